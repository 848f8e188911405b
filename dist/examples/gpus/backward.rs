//! Backward over ranks, compared with one device.

use fmha::{BwdArgs, DType, DevBuffer};
use fmha_dist::{BwdPlan, Options, Partition, Problem, Scheme};

use crate::AnyError;
use crate::alone::Whole;
use crate::bench::Bench;

/// Rows of a tensor and their heads.
type RowsOf = (usize, usize);

impl Bench {
    pub(crate) fn backward(
        &self,
        name: &str,
        scheme: Scheme,
        problem: &Problem,
        options: &Options,
        whole: &Whole,
        (expected, alone): &([DevBuffer; 3], f64),
    ) -> Result<(), AnyError> {
        let mut plan =
            BwdPlan::new(problem, (DType::Bf16, false), self.group.clone(), &self.device, options)?;
        let [q, k, v, dout] = &whole.inputs;
        let (queries, keys) = (&self.queries, &self.keys);
        let all = [
            self.own(queries, q, 1, 32 * 256)?,
            self.own(keys, k, 1, 8 * 256)?,
            self.own(keys, v, 1, 8 * 256)?,
            self.own(queries, &whole.o, 1, 32 * 256)?,
            self.own(queries, &whole.lse, 32, 4)?,
            self.own(queries, dout, 1, 32 * 256)?,
        ];
        let all = all.each_ref();
        let tensors: [(&str, &Partition, RowsOf); 3] =
            [("dQ", queries, 32), ("dK", keys, 8), ("dV", keys, 8)]
                .map(|(name, part, heads)| (name, part, (part.rows_of(self.group.rank()) as usize, heads)));
        let alloc =
            |&(_, _, (rows, heads)): &(_, _, RowsOf)| self.device.memory().alloc((rows * heads * 256) as u64);
        let [dq, dk, dv] = tensors.each_ref().map(alloc);
        let mut grads = [dq?, dk?, dv?];
        let seconds = self.fastest(|| Ok(plan.run(&mut arguments(all, &mut grads), &self.stream)?))?;
        self.stream.synchronize()?;
        self.report((name, scheme), (problem, options), (true, *alone), seconds)?;
        for (&(name, part, (_, heads)), (grad, expected)) in tensors.iter().zip(grads.iter().zip(expected)) {
            self.compare(name, grad, part, expected, heads as u64)?;
        }
        self.again(name, || {
            plan.run(&mut arguments(all, &mut grads), &self.stream)?;
            self.stream.synchronize()?;
            let mut bytes = Vec::new();
            for ((_, _, (rows, heads)), grad) in tensors.iter().zip(&grads) {
                bytes.extend(self.download(grad, (rows * heads * 256) as u64)?);
            }
            Ok(bytes)
        })
    }
}

/// Q, K, V, O, LSE and dO; dQ, dK and dV.
pub(crate) fn arguments<'a>(inputs: [&'a DevBuffer; 6], grads: &'a mut [DevBuffer; 3]) -> BwdArgs<'a> {
    let [q, k, v, o, lse, dout] = inputs.map(DevBuffer::slice);
    BwdArgs::new([q, k, v], [o, lse, dout], grads.each_mut().map(DevBuffer::slice_mut))
}
