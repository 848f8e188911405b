//! Check that a call writes no byte outside its tensors: margins, gaps between strides, padding rows.

use fmha_core::{SeqSpan, ValidFwd};

use crate::tensor::{Operand, Tensor};
use crate::tensors::{HostBwd, HostCombine, HostFwd, heads_and_rows};

/// Which bytes of an output may be written.
struct Owned {
    bytes: Vec<bool>,
    first: usize,
    size: usize,
}

impl Owned {
    fn none(tensor: &Tensor) -> Self {
        let (bytes, first) = tensor.raw();
        Self { bytes: vec![false; bytes.len()], first, size: tensor.dtype.size_bytes() as usize }
    }

    fn elem(&mut self, index: usize) {
        let at = self.first + index * self.size;
        self.bytes[at..at + self.size].fill(true);
    }

    /// Finds the first byte that was written and belongs to no tensor.
    fn fault(&self, name: &str, tensor: &Tensor) -> Option<String> {
        let (bytes, first) = tensor.raw();
        let poison = tensor.poison();
        let at = bytes.iter().zip(&self.bytes).position(|(&byte, &owned)| !owned && byte != poison)?;
        let offset = at as i64 - first as i64;
        let extent = tensor.elems().len();
        Some(format!("{name}: byte {offset} of {extent} was written, but belongs to no element that may be"))
    }
}

fn rows_of(
    name: &'static str,
    tensor: &Tensor,
    spans: &[SeqSpan],
    side: impl Fn(&SeqSpan) -> (u32, u32, u32),
) -> Option<String> {
    let mut owned = Owned::none(tensor);
    for span in spans {
        let (batch, first, count) = side(span);
        for row in first..first + count {
            for head in 0..tensor.shape.head {
                for dim in 0..tensor.shape.dim {
                    owned.elem(tensor.strides.offset(batch, row, head, dim) as usize);
                }
            }
        }
    }
    owned.fault(name, tensor)
}

fn every_row(name: &'static str, tensor: &Tensor) -> Option<String> {
    let group = tensor.shape.batch;
    let spans: Vec<SeqSpan> = (0..group)
        .map(|b| SeqSpan {
            i_batch: b,
            q_batch: b,
            q_row: 0,
            seqlen_q: tensor.shape.seq,
            k_batch: b,
            k_row: 0,
            seqlen_k: tensor.shape.seq,
            seqlen_cached: tensor.shape.seq,
            new_batch: 0,
            new_row: 0,
            lse_rows: tensor.shape.seq,
        })
        .collect();
    rows_of(name, tensor, &spans, |span| (span.q_batch, span.q_row, span.seqlen_q))
}

fn lse_of(problem: &ValidFwd, tensor: &Tensor, spans: &[SeqSpan]) -> Option<String> {
    let mut owned = Owned::none(tensor);
    for span in spans {
        for (head, i) in heads_and_rows(problem, span) {
            owned.elem(span.lse_index(problem, head, i));
        }
    }
    owned.fault("lse", tensor)
}

/// Reports every byte that was written outside the elements of O, LSE and the keep mask: margins, gaps, padding
/// rows. Sparse tensors are too long to search.
#[must_use]
pub fn intact_fwd(host: &HostFwd) -> Vec<String> {
    let (problem, spans) = (&host.problem, &host.spans[..]);
    let mut faults = Vec::new();
    if let Some(o) = host.operands.get(Operand::O) {
        faults.extend(rows_of("o", o, spans, |span| (span.q_batch, span.q_row, span.seqlen_q)));
    }
    if let Some(lse) = host.operands.get(Operand::Lse) {
        faults.extend(lse_of(problem, lse, spans));
    }
    if let Some(mask) = host.operands.get(Operand::KeepMask) {
        let dims = problem.dims;
        let mut owned = Owned::none(mask);
        for span in spans {
            for (head, i) in heads_and_rows(problem, span) {
                let row = (span.i_batch * dims.num_heads_q + head) as usize * dims.seqlen_q as usize;
                let row = (row + i as usize) * dims.seqlen_k as usize;
                (row..row + span.seqlen_k as usize).for_each(|index| owned.elem(index));
            }
        }
        faults.extend(owned.fault("keep_mask", mask));
    }
    faults
}

/// Checks as [`intact_fwd`] does, for the gradients.
#[must_use]
pub fn intact_bwd(host: &HostBwd) -> Vec<String> {
    let spans = &host.spans[..];
    let mut faults = Vec::new();
    for (name, operand) in [("dq", Operand::Dq), ("dk", Operand::Dk), ("dv", Operand::Dv)] {
        let Some(tensor) = host.operands.get(operand) else { continue };
        faults.extend(rows_of(name, tensor, spans, |span| {
            if operand == Operand::Dq {
                (span.q_batch, span.q_row, span.seqlen_q)
            } else {
                (span.k_batch, span.k_row, span.seqlen_k)
            }
        }));
    }
    for (name, operand) in [("dbias", Operand::Dbias), ("dsink", Operand::Dsink)] {
        faults.extend(host.operands.get(operand).and_then(|tensor| every_row(name, tensor)));
    }
    faults
}

/// Checks as [`intact_fwd`] does, for a combine call.
#[must_use]
pub fn intact_combine(host: &HostCombine) -> Vec<String> {
    [("o", Operand::O), ("lse", Operand::Lse)]
        .into_iter()
        .filter_map(|(name, operand)| every_row(name, host.operands.get(operand)?))
        .collect()
}
