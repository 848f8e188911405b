//! A planned loss of an indexer, and its gradients: `fmha_core::sparse::index_losses` and `index_gradients`, by
//! definition in f64, on one thread.

use fmha_core::sparse::{
    Candidates, IndexArgs, IndexCall, IndexProblem, ValidIndexLoss, index_gradients, index_losses,
};
use fmha_core::{DevSlice, DevSliceMut, IndexLossArgs, Result};

/// A call that computes an indexer's loss.
pub(crate) struct Loss<'a> {
    pub(crate) problem: &'a ValidIndexLoss,
    pub(crate) args: &'a IndexLossArgs<'a>,
}

/// Numbers of an operand, which core saw to be aligned.
fn numbers<'a, T: bytemuck::Pod>(slice: &DevSlice<'a>, count: u64) -> &'a [T] {
    // Without elements an operand may lie anywhere.
    let bytes = slice.as_host().filter(|_| count > 0).unwrap_or_default();
    bytemuck::try_cast_slice(&bytes[..count as usize * size_of::<T>()]).unwrap_or_default()
}

/// Writes an output that is wanted, in f32.
fn write(to: &Option<DevSliceMut<'_>>, values: &[f64]) {
    let Some(to) = to else { return };
    for (at, &value) in values.iter().enumerate() {
        // SAFETY: core saw that the output has as many aligned numbers, which nothing else of the call touches.
        unsafe { to.as_mut_ptr().cast::<f32>().add(at).write(value as f32) };
    }
}

impl Loss<'_> {
    /// Computes it.
    ///
    /// # Errors
    /// Memory for scratch that the system refuses.
    pub(crate) fn run(&self) -> Result<()> {
        let Self { problem, args } = *self;
        let (rows, topk) = (problem.rows(), problem.topk as usize);
        let index = IndexProblem {
            batch: problem.batch,
            seqlen_q: problem.seqlen_q,
            seqlen_k: problem.seqlen_k,
            num_heads: problem.num_heads,
            head_dim: problem.head_dim,
            dtype_q: problem.dtype_q,
            dtype_k: problem.dtype_k,
        };
        let operands = IndexArgs {
            q: args.q,
            k: args.k,
            weights: numbers(&args.weights, rows * u64::from(problem.num_heads)),
            k_scale: args.k_scale.as_ref().map(|scale| numbers(scale, problem.keys())),
            candidates: Candidates::All,
        };
        let call = IndexCall::new(index, operands)?;
        let indices: &[i32] = numbers(&args.indices, rows * topk as u64);
        let target: &[f32] = numbers(&args.target, rows * topk as u64);
        let (losses, mut gradients) = index_losses(&call, (indices, topk), target)?;
        write(&args.loss, &losses);
        if !problem.has_gradients() {
            return Ok(());
        }
        if let Some(dloss) = &args.dloss {
            let factors: &[f32] = numbers(dloss, rows);
            for (row, factor) in factors.iter().enumerate() {
                let of_row = &mut gradients[row * topk..(row + 1) * topk];
                // A gradient of 0 times an infinite factor is 0, as of an entry that is absent.
                of_row
                    .iter_mut()
                    .filter(|gradient| **gradient != 0.0)
                    .for_each(|gradient| *gradient *= factor);
            }
        }
        let made = index_gradients(&call, (indices, topk), &gradients)?;
        write(&args.dq, &made.q);
        write(&args.dk, &made.k);
        write(&args.dweights, &made.weights);
        Ok(())
    }
}
