//! Results of one device, and their time.

use fmha::{BwdProblem, DevBuffer, FwdArgs, PlanOptions};

use crate::AnyError;
use crate::backward::arguments;
use crate::bench::Bench;

/// Q, K, V and dO of all ranks; O and LSE of one device. On each device.
pub(crate) struct Whole {
    pub(crate) inputs: [DevBuffer; 4],
    pub(crate) o: DevBuffer,
    pub(crate) lse: DevBuffer,
}

impl Bench {
    /// O and LSE of one device, and its seconds; of no time where backward is what is wanted.
    pub(crate) fn alone(&self, inputs: [DevBuffer; 4], is_timed: bool) -> Result<(Whole, f64), AnyError> {
        let (memory, rows) = (self.device.memory(), u64::from(self.queries.rows()));
        let plan = self.device.plan_fwd(&self.whole.clone().validate()?, &PlanOptions::default())?;
        let [q, k, v, _] = &inputs;
        let (mut o, mut lse) = (memory.alloc(rows * 32 * 256)?, memory.alloc(rows * 128)?);
        let mut workspace = memory.workspace(plan.workspace())?;
        let mut call = || -> Result<(), AnyError> {
            let workspace = workspace.as_mut().map(DevBuffer::slice_mut);
            let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut()).score(self.score());
            if let Some((rows, offsets)) = &self.offsets {
                let total = rows.last().copied().unwrap_or(0);
                args.seq.totals = fmha::Totals::packed(total, total);
                args.seq.cu_seqlens_q = Some(offsets.slice());
                args.seq.cu_seqlens_k = Some(offsets.slice());
            }
            Ok(plan.run(&mut args.lse(lse.slice_mut()).workspace(workspace), &self.stream)?)
        };
        let mut seconds = 0.0;
        if is_timed {
            seconds = self.fastest(call)?;
        } else {
            call()?;
        }
        self.stream.synchronize()?;
        if self.is_first() {
            let (name, kernel) = (self.device.name(), plan.kernel());
            self.say(&format!("{name}: one device {:.3} ms ({kernel})", seconds * 1e3));
        }
        Ok((Whole { inputs, o, lse }, seconds))
    }

    /// dQ, dK and dV of one device, and its seconds.
    pub(crate) fn backward_alone(
        &self,
        whole: &Whole,
        kernels: &PlanOptions,
    ) -> Result<([DevBuffer; 3], f64), AnyError> {
        let plan = self.device.plan_bwd(&BwdProblem::new(self.whole.clone()).validate()?, kernels)?;
        let memory = self.device.memory();
        let [q, k, v, dout] = &whole.inputs;
        let all = [q, k, v, &whole.o, &whole.lse, dout];
        let mut grads = [memory.alloc(q.bytes())?, memory.alloc(k.bytes())?, memory.alloc(v.bytes())?];
        let mut workspace = memory.workspace(plan.workspace())?;
        let seconds = self.fastest(|| {
            let mut args = arguments(all, &mut grads);
            args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
            Ok(plan.run(&mut args, &self.stream)?)
        })?;
        if self.is_first() {
            self.say(&format!("backward: one device {:.3} ms ({})", seconds * 1e3, plan.kernel()));
        }
        Ok((grads, seconds))
    }
}
