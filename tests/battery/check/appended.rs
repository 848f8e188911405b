//! Bytes of a cache that a call appends to.

use fmha_core::seq::KvRows;
use fmha_core::{Result, SeqSpan};

use crate::tensor::Operand;
use crate::tensors::{HostFwd, set_page_byte};

/// Finds the first byte of a cache of rows of bytes that is not what an append makes of `before`: new rows as the
/// contract quantises them, all other bytes as they were. `None` where there is none, or where no such cache is
/// appended to.
///
/// # Errors
/// Lengths that do not fit the problem.
pub fn appended_bytes(host: &HostFwd, mut before: HostFwd) -> Result<Option<String>> {
    let problem = &host.problem;
    let (Some(format), Some(_)) = (problem.cache.rows, &problem.cache.append) else { return Ok(None) };
    let seq = host.inputs().seq;
    let places = KvRows::of(problem, &seq)?;
    let (wanted, new) = (before.operands.expect_mut(Operand::K), host.operands.expect(Operand::KNew));
    let page_size = problem.layout.kv.page_size().unwrap_or(1);
    let added = |span: &SeqSpan| span.seqlen_cached..span.seqlen_k;
    for (span, j) in host.spans.iter().flat_map(|span| added(span).map(move |j| (span, j))) {
        let from = [span.new_batch, span.new_row + j - span.seqlen_cached];
        let row: Vec<f32> =
            (0..problem.dims.head_dim_qk).map(|d| new.get(from[0], from[1], 0, d) as f32).collect();
        let (page, at) = places.at(span, j);
        format.write(page_size, at, &row, |at, byte| set_page_byte(wanted, page, at, byte));
    }
    let got = host.operands.expect(Operand::K).elems();
    let differs = wanted.elems().iter().zip(got).position(|(wanted, got)| wanted != got);
    Ok(differs.map(|at| format!("k: byte {at} of the cache is {}, not {}", got[at], wanted.elems()[at])))
}
