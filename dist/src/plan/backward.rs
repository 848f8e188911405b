//! Backward over ranks.

use std::sync::Arc;

use fmha::{BwdArgs, DType, Device, Stream};

use super::planned::{Call, Planned};
use super::{Choice, Options};
use crate::error::Result;
use crate::group::Group;
use crate::problem::{Gradients, Problem};
use crate::program::Buf;

/// Backward over ranks.
pub struct BwdPlan {
    planned: Planned,
    gradients: Gradients,
}

impl BwdPlan {
    /// Plans a backward call as [`FwdPlan::new`](super::FwdPlan::new) plans a forward one, with gradients of
    /// type `dtype_grad`, and those of the sinks if they are wanted; those of captured tensors as the problem
    /// [wants them](Problem::dcaptured). Sums of dK and dV over ranks are made in
    /// f32, and rounded once.
    ///
    /// # Errors
    /// As [`FwdPlan::new`](super::FwdPlan::new).
    pub fn new(
        problem: &Problem,
        (dtype_grad, write_dsink): (DType, bool),
        group: Arc<dyn Group>,
        device: &Device,
        options: &Options,
    ) -> Result<Self> {
        let gradients = Gradients { dtype: dtype_grad, dsink: write_dsink };
        let planned = Planned::new(problem, group, device, options, Some(gradients))?;
        Ok(Self { planned, gradients })
    }

    /// Scheme of the plan, and the reason.
    #[must_use]
    pub fn choice(&self) -> &Choice {
        &self.planned.choice
    }

    /// The choice and every step of this rank.
    #[must_use]
    pub fn explain(&self) -> String {
        self.planned.explain()
    }

    /// dQ, dK and dV of this rank's rows, and the sinks' whole gradient, from this rank's Q, K, V, O, LSE and dO.
    ///
    /// # Errors
    /// The rank and the field, on every rank. No output is then a result.
    pub fn run(&mut self, args: &mut BwdArgs<'_>, stream: &Stream) -> Result<()> {
        let (score, masks) = (args.score, args.masks);
        let call = self.tensors(args);
        self.planned.run(call, (&score, &masks), stream)
    }

    fn tensors<'a>(&self, args: &'a mut BwdArgs<'_>) -> Result<Call<'a>> {
        let planned = &self.planned;
        let mut call = vec![
            planned.read(Buf::Q, args.q)?,
            planned.read(Buf::K, args.k)?,
            planned.read(Buf::V, args.v)?,
            planned.read(Buf::O, args.o)?,
            planned.read(Buf::Lse, args.lse)?,
            planned.read(Buf::Dout, args.dout)?,
            planned.write(Buf::Dq, Some(&mut args.dq))?,
            planned.write(Buf::Dk, Some(&mut args.dk))?,
            planned.write(Buf::Dv, Some(&mut args.dv))?,
        ];
        for (field, is_given) in [("dlse", args.dlse.is_some()), ("dbias", args.dbias.is_some())] {
            if is_given {
                let text = format!("{field} is given, and is taken over 1 rank alone");
                return Err(planned.wrong(field, text));
            }
        }
        if self.gradients.dsink {
            call.push(planned.write(Buf::Dsink, args.dsink.as_mut())?);
        }
        let (given, wanted) = (args.dcaptured.len(), planned.whole.dcaptured.len());
        if given != wanted {
            let text = format!("dcaptured: {given} gradients given, but {wanted} wanted");
            return Err(planned.wrong("dcaptured", text));
        }
        for (at, gradient) in args.dcaptured.iter_mut().enumerate() {
            call.push(planned.write(Buf::Dcaptured(at), Some(gradient))?);
        }
        Ok(call)
    }
}
