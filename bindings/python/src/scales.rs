//! Q, K and V with scales by blocks: checks them against the call's sizes and fills in the C structs.

use fmha_c::{
    FMHA_E4M3FN, FMHA_E5M2, FMHA_MXFP8_E4M3, FMHA_MXFP8_E5M2, FMHA_NVFP4, FMHA_V_COL_MAJOR, FMHA_V_ROW_MAJOR,
    FmhaArgs, FmhaBlockScales, FmhaProblem, FmhaStrides,
};

use crate::call::{Wrong, ensure};
use crate::request::{BlockScales, Request, Slot};
use crate::shapes::{Placed, Sizes, expect, of_type, rows_of};
use crate::tensor::{Device, Tensor, U8};

/// Elements that one byte of the format holds.
pub(crate) fn elems_per_byte(scales: &BlockScales) -> i64 {
    if scales.format == i64::from(FMHA_NVFP4) { 2 } else { 1 }
}

/// Whether neighbouring keys of V are adjacent in memory, so that V is column-major.
pub(crate) fn lies_in_columns(v: &Tensor) -> bool {
    match v.steps() {
        [.., keys, _, dim] => *keys == 1 && *dim != 1,
        _ => false,
    }
}

/// Fills the C structs of Q, K and V for a call whose elements are stored in a block-scaled format.
pub(crate) fn fill_operands(
    problem: &mut FmhaProblem,
    args: &mut FmhaArgs,
    sizes: &Sizes,
    request: &Request,
    scales: &BlockScales,
) -> Result<(), Wrong> {
    let stored = match i32::try_from(scales.format) {
        Ok(FMHA_MXFP8_E4M3) => FMHA_E4M3FN,
        Ok(FMHA_MXFP8_E5M2) => FMHA_E5M2,
        Ok(FMHA_NVFP4) => U8,
        _ => return Err(format!("block_scales: format {} is none of 1, 2 and 3", scales.format)),
    };
    ensure!(
        sizes.total_k.is_none(),
        "cu_seqlens_k is given beside block_scales: packed sequences of K begin anywhere in a block of V's keys"
    );
    let each = elems_per_byte(scales);
    let (q, k, v) = (request.required(Slot::Q)?, request.required(Slot::K)?, request.required(Slot::V)?);
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        of_type(name, tensor, &[stored])?;
    }
    let placed = rows_of("q", q, &sizes.q(sizes.dim_qk / each))?;
    (problem.q, args.q) = (placed.strides, placed.data);
    let placed = rows_of("k", k, &sizes.k(sizes.dim_qk / each))?;
    (problem.k, args.k) = (placed.strides, placed.data);
    let by_columns = lies_in_columns(v);
    let mut wanted = sizes.k(if by_columns { sizes.dim_v } else { sizes.dim_v / each });
    if by_columns && wanted.len() == 4 {
        wanted[1] = wanted[1].saturating_add(each - 1) / each;
    }
    let placed = rows_of("v", v, &wanted)?;
    (problem.v, args.v) = (placed.strides, placed.data);
    problem.v_layout = if by_columns { FMHA_V_COL_MAJOR } else { FMHA_V_ROW_MAJOR };
    problem.dtype_qk = i32::try_from(scales.values).unwrap_or(-1);
    problem.dtype_v = problem.dtype_qk;
    Ok(())
}

/// Block scales of a call whose tensors are on `device`.
pub(crate) fn scales(
    args: &mut FmhaArgs,
    sizes: &Sizes,
    given: &BlockScales,
    device: Device,
) -> Result<FmhaBlockScales, Wrong> {
    let block = if elems_per_byte(given) == 2 { 16 } else { 32 };
    let blocks = |elems: i64| elems.saturating_add(block - 1) / block;
    let mut of_v = sizes.k(sizes.dim_v);
    if of_v.len() == 4 {
        of_v[1] = blocks(of_v[1]);
    }
    let of_dim = blocks(sizes.dim_qk);
    let q = of_rows("block_scales: q", &given.q, &sizes.q(of_dim), device)?;
    let k = of_rows("block_scales: k", &given.k, &sizes.k(of_dim), device)?;
    let v = of_rows("block_scales: v", &given.v, &of_v, device)?;
    args.block_scale_q = q.data.cast();
    args.block_scale_k = k.data.cast();
    args.block_scale_v = v.data.cast();
    Ok(FmhaBlockScales {
        struct_bytes: size_of::<FmhaBlockScales>() as u64,
        q: q.strides,
        k: k.strides,
        v: v.strides,
        format: i32::try_from(given.format).unwrap_or(0),
        reserved: 0,
    })
}

fn of_rows(name: &str, tensor: &Tensor, wanted: &[i64], device: Device) -> Result<Placed, Wrong> {
    let tensor = tensor.given().ok_or_else(|| format!("{name} is missing"))?;
    expect(name, tensor, wanted)?;
    of_type(name, tensor, &[U8])?;
    let is_here = tensor.device == device;
    ensure!(is_here, "{name} is on {}, but q is on {}", tensor.device.name(), device.name());
    let steps = tensor.steps();
    for (axis, (&step, &size)) in steps.iter().zip(wanted).enumerate() {
        ensure!(step >= 0 || size <= 1, "{name} has stride {step} on axis {axis}, below 0");
    }
    let step = |from_last: usize| steps.len().checked_sub(from_last).map_or(0, |at| steps[at].max(0));
    let strides = FmhaStrides {
        batch_stride: step(4),
        seqlen_stride: step(3),
        head_stride: step(2),
        dim_stride: step(1),
    };
    Ok(Placed { data: tensor.address(), strides })
}
