//! Forward over ranks.

use std::sync::Arc;

use fmha::{CacheSlice, Device, FwdArgs, Stream};

use super::planned::{Call, Planned};
use super::{Choice, Options};
use crate::error::Result;
use crate::group::Group;
use crate::problem::Problem;
use crate::program::{Buf, Memory};

/// Forward over ranks, planned once and run many times; every rank runs it at the same place of its program.
pub struct FwdPlan {
    planned: Planned,
}

impl FwdPlan {
    /// Plans this rank's part. All ranks call it together, with the same problem and options.
    ///
    /// # Errors
    /// On every rank the same: the rank that is wrong, or says something else than the others, and the field.
    pub fn new(problem: &Problem, group: Arc<dyn Group>, device: &Device, options: &Options) -> Result<Self> {
        Ok(Self { planned: Planned::new(problem, group, device, options, None)? })
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

    /// O, and LSE if the problem writes it, of this rank's queries from this rank's Q, K and V. `args` are a rank's own
    /// tensors, as [`Problem`] has them; lengths and workspace play no part.
    ///
    /// # Errors
    /// The rank and the field, on every rank. No output is then a result.
    pub fn run(&mut self, args: &mut FwdArgs<'_>, stream: &Stream) -> Result<()> {
        let (score, masks) = (args.score, args.masks);
        let call = self.tensors(args);
        self.planned.run(call, (&score, &masks), stream)
    }

    fn tensors<'a>(&self, args: &'a mut FwdArgs<'_>) -> Result<Call<'a>> {
        let planned = &self.planned;
        let cache = |buf, field, cache: &CacheSlice<'a>| -> Result<(Buf, Memory<'a>)> {
            match cache {
                CacheSlice::Read(slice) => planned.read(buf, *slice),
                _ => {
                    let text = format!("{field} is appended to, in 1 part of several");
                    Err(planned.wrong(field, text))
                }
            }
        };
        let mut call = vec![planned.read(Buf::Q, args.q)?];
        call.push(cache(Buf::K, "k", &args.k)?);
        call.push(cache(Buf::V, "v", &args.v)?);
        call.push(planned.write(Buf::O, Some(&mut args.o))?);
        if planned.whole.fwd.write_lse {
            call.push(planned.write(Buf::Lse, args.lse.as_mut())?);
        }
        Ok(call)
    }
}
