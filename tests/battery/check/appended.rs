//! Bytes of a quantised cache that a call appends to.

use fmha_core::seq::KvRows;
use fmha_core::{CacheScales, Result, SeqSpan};

use crate::tensor::{Operand, Tensor};
use crate::tensors::{HostFwd, set_page_byte};

/// Whether the contract has new rows of this call's cache quantised.
#[must_use]
pub fn quantises(host: &HostFwd) -> bool {
    let cache = &host.problem.cache;
    cache.append.is_some() && (cache.rows.is_some() || cache.scales.is_some())
}

/// Finds the first byte of a quantised cache, or of its scales, that is not what an append makes of `before`: new rows
/// as the contract quantises them, all other bytes as they were.
///
/// # Errors
/// Lengths that do not fit the problem.
pub fn appended_bytes(host: &HostFwd, mut before: HostFwd) -> Result<Option<String>> {
    let problem = &host.problem;
    let seq = host.inputs().seq;
    let places = KvRows::of(problem, &seq)?;
    let page_size = problem.layout.kv.page_size().unwrap_or(1);
    let added = |span: &SeqSpan| span.seqlen_cached..span.seqlen_k;
    let of_heads = |(span, j)| (0..problem.dims.num_heads_kv).map(move |head| (span, j, head));
    let rows = host.spans.iter().flat_map(|span| added(span).map(move |j| (span, j))).flat_map(of_heads);
    for (span, j, head) in rows {
        let at = [span.new_batch, span.new_row + j - span.seqlen_cached, head];
        let (batch, row) = places.at(span, j);
        let tensors =
            [(Operand::KNew, Operand::K, Operand::KScale), (Operand::VNew, Operand::V, Operand::VScale)];
        for (new, cache, scales) in tensors {
            let Some(new) = host.operands.get(new) else { continue };
            let mut numbers = row_of(new, at);
            if let Some(format) = problem.cache.rows {
                let wanted = before.operands.expect_mut(cache);
                format.write(page_size, row, &numbers, |at, byte| set_page_byte(wanted, batch, at, byte));
                continue;
            }
            let scale = CacheScales::quantise(problem.stored_k(), &mut numbers);
            before.operands.expect_mut(scales).set([batch, row, head, 0], f64::from(scale));
            for (d, &x) in (0..).zip(&numbers) {
                before.operands.expect_mut(cache).set([batch, row, head, d], f64::from(x));
            }
        }
    }
    let named =
        [("k", Operand::K), ("v", Operand::V), ("k_scale", Operand::KScale), ("v_scale", Operand::VScale)];
    Ok(named.into_iter().find_map(|(name, operand)| {
        let (got, wanted) = (host.operands.get(operand)?.elems(), before.operands.get(operand)?.elems());
        let at = got.iter().zip(wanted).position(|(got, wanted)| got != wanted)?;
        Some(format!("{name}: byte {at} of the cache is {}, not {}", got[at], wanted[at]))
    }))
}

fn row_of(tensor: &Tensor, [batch, row, head]: [u32; 3]) -> Vec<f32> {
    (0..tensor.shape.dim).map(|d| tensor.get(batch, row, head, d) as f32).collect()
}
