//! Conversion of a request's lists of keys to the C struct.

use fmha_c::{FMHA_LENGTH_PER_SEQUENCE, FMHA_LENGTH_PER_TOKEN, FMHA_LENGTH_WHOLE, FmhaArgs, FmhaLists};

use crate::call::{Wrong, ensure};
use crate::request::Lists;
use crate::shapes::{Sizes, expect, of_type};
use crate::tensor::{Device, I32, Tensor};

/// The lists of a call whose tensors are on `device`.
///
/// # Errors
/// A tensor of another shape, type or device, or a number that is out of range, with both numbers.
pub(crate) fn lists(
    args: &mut FmhaArgs,
    sizes: &Sizes,
    given: &Lists,
    device: Device,
) -> Result<FmhaLists, Wrong> {
    let indices = given.indices.given().ok_or("indices are missing")?;
    let topk = *indices.shape().last().ok_or("indices have 0 axes")?;
    let per_token: &[i64] = match sizes.total_q {
        Some(total) => &[total],
        None => &[sizes.batch, sizes.seqlen_q],
    };
    let wanted: Vec<i64> = per_token.iter().copied().chain([sizes.heads_kv, topk]).collect();
    let takes = |name: &str, tensor: &Tensor| {
        of_type(name, tensor, &[I32])?;
        let is_here = tensor.device == device;
        ensure!(is_here, "{name} is on {}, but q is on {}", tensor.device.name(), device.name());
        Ok(())
    };
    expect("indices", indices, &wanted)?;
    takes("indices", indices)?;
    let steps = indices.steps();
    for (axis, (&step, &size)) in steps.iter().zip(&wanted).enumerate() {
        ensure!(step >= 0 || size <= 1, "indices have stride {step} on axis {axis}, below 0");
    }
    let is_dense = topk <= 1 || wanted.contains(&0) || steps.last() == Some(&1);
    ensure!(is_dense, "indices have stride {:?} on their last axis, not 1", steps.last());
    let of_rows = &steps[steps.len() - 3..];
    let length = match given.topk_length.given() {
        None => FMHA_LENGTH_WHOLE,
        Some(length) => {
            // Packed Q is tried with a length for each token first: where there are as many tokens as sequences, both
            // shapes match.
            let is_per_token = length.shape() == per_token;
            let shape = length.shape();
            ensure!(
                is_per_token || shape == [sizes.batch],
                "topk_length has shape {shape:?}, neither [{}] nor {per_token:?}",
                sizes.batch
            );
            takes("topk_length", length)?;
            crate::shapes::contiguous("topk_length", length)?;
            args.topk_length = length.address().cast_const().cast();
            if is_per_token { FMHA_LENGTH_PER_TOKEN } else { FMHA_LENGTH_PER_SEQUENCE }
        }
    };
    let block = i32::try_from(given.block).ok().filter(|&block| block >= 1);
    let block = block.ok_or_else(|| format!("index_block {} is not in 1..=2147483647", given.block))?;
    args.indices = indices.address().cast_const().cast();
    Ok(FmhaLists {
        struct_bytes: size_of::<FmhaLists>() as u64,
        topk,
        batch_stride: if sizes.total_q.is_some() { 0 } else { steps[0].max(0) },
        seqlen_stride: of_rows[0].max(0),
        head_stride: of_rows[1].max(0),
        length,
        addresses: i32::from(given.addresses != 0),
        block,
        lse_without_sink: i32::from(given.lse_without_sink != 0),
    })
}
