//! Sizes of a call, and the check of its tensors against them. The C structs hold strides only, so a wrong shape has to
//! be found here.

use std::ffi::c_void;
use std::ptr;

use fmha_c::{FMHA_BF16, FMHA_F16, FMHA_F32, FmhaStrides};
use smallvec::SmallVec;

use crate::call::{Wrong, ensure};
use crate::request::{Request, SLOT_NAMES, Slot, name};
use crate::tensor::{Device, Tensor, U8, dtype_name, is_fp8};

/// Sizes of a call, against which its tensors are checked.
pub(crate) struct Sizes {
    pub(crate) batch: i64,
    pub(crate) seqlen_q: i64,
    pub(crate) seqlen_k: i64,
    pub(crate) heads_q: i64,
    pub(crate) heads_kv: i64,
    pub(crate) dim_qk: i64,
    pub(crate) dim_v: i64,
    /// Rows of packed tensors.
    pub(crate) total_q: Option<i64>,
    pub(crate) total_k: Option<i64>,
    /// Number of pages, rows of a page, and columns of the block table.
    pub(crate) pages: Option<(i64, i64, i64)>,
}

impl Sizes {
    pub(crate) fn q(&self, dim: i64) -> SmallVec<[i64; 4]> {
        rows(self.batch, self.seqlen_q, self.total_q, self.heads_q, dim)
    }

    pub(crate) fn k(&self, dim: i64) -> SmallVec<[i64; 4]> {
        match self.pages {
            Some((pages, page_size, _)) => SmallVec::from_slice(&[pages, page_size, self.heads_kv, dim]),
            None => rows(self.batch, self.seqlen_k, self.total_k, self.heads_kv, dim),
        }
    }

    pub(crate) fn lse(&self) -> SmallVec<[i64; 4]> {
        match self.total_q {
            Some(total) => SmallVec::from_slice(&[self.heads_q, total]),
            None => SmallVec::from_slice(&[self.batch, self.heads_q, self.seqlen_q]),
        }
    }
}

pub(crate) fn rows(batch: i64, seqlen: i64, total: Option<i64>, heads: i64, dim: i64) -> SmallVec<[i64; 4]> {
    match total {
        Some(total) => SmallVec::from_slice(&[total, heads, dim]),
        None => SmallVec::from_slice(&[batch, seqlen, heads, dim]),
    }
}

/// Checks that all tensors of a request are on one device. The error names the first tensor on another device than
/// `first`.
pub(crate) fn one_device(request: &Request, first: Slot) -> Result<Device, Wrong> {
    let device = request.required(first)?.device;
    for (tensor, slot) in request.tensors.iter().zip(SLOT_NAMES) {
        if let Some(tensor) = tensor.given() {
            ensure!(
                tensor.device == device,
                "{slot} is on {}, but {} is on {}",
                tensor.device.name(),
                name(first),
                device.name()
            );
        }
    }
    Ok(device)
}

/// Sizes of a tensor that must have as many axes as `axes` has names.
pub(crate) fn shape<const N: usize>(name: &str, tensor: &Tensor, axes: &str) -> Result<[i64; N], Wrong> {
    let shape = tensor.shape();
    shape
        .try_into()
        .map_err(|_| format!("{name} has {} axes of {shape:?}, not the {N} of [{axes}]", shape.len()))
}

pub(crate) fn sizes(request: &Request) -> Result<Sizes, Wrong> {
    let numbers = &request.numbers;
    let (q, k) = (request.required(Slot::Q)?, request.required(Slot::K)?);
    let packed_q = request.get(Slot::CuSeqlensQ);
    let (batch, seqlen_q, total_q, heads_q, dim_qk) = match packed_q {
        Some(offsets) => {
            let [total, heads, dim] = shape("q", q, "total_q, num_heads_q, head_dim_qk")?;
            (sequences("cu_seqlens_q", offsets)?, numbers.max_seqlen_q, Some(total), heads, dim)
        }
        None => {
            let [batch, seqlen, heads, dim] = shape("q", q, "batch, seqlen_q, num_heads_q, head_dim_qk")?;
            (batch, seqlen, None, heads, dim)
        }
    };
    let (seqlen_k, total_k, pages, heads_kv) =
        match (request.get(Slot::CuSeqlensK), request.get(Slot::BlockTable)) {
            (Some(_), Some(_)) => {
                return Err(
                    "block_table is given beside cu_seqlens_k, but K is either paged or packed".into()
                );
            }
            (Some(offsets), None) => {
                let [total, heads, _] = shape("k", k, "total_k, num_heads_kv, head_dim_qk")?;
                let count = sequences("cu_seqlens_k", offsets)?;
                ensure!(count == batch, "cu_seqlens_k is of {count} sequences, but batch is {batch}");
                (numbers.max_seqlen_k, Some(total), None, heads)
            }
            (None, Some(table)) => {
                let [pages, page_size, heads, _] =
                    shape("k", k, "num_pages, page_size, num_heads_kv, head_dim_qk")?;
                let [count, max_pages] = shape("block_table", table, "batch, max_pages")?;
                ensure!(count == batch, "block_table has {count} rows, but batch is {batch}");
                let longest = match numbers.max_seqlen_k {
                    0 => max_pages.saturating_mul(page_size),
                    given => given,
                };
                (longest, None, Some((pages, page_size, max_pages)), heads)
            }
            // SAFETY: who made the request promised its lists.
            (None, None) if unsafe { request.is_addressed() } => {
                let [pages, page_size, heads, _] =
                    shape("k", k, "num_pages, page_size, num_heads_kv, head_dim_qk")?;
                (0, None, Some((pages, page_size, 0)), heads)
            }
            (None, None) => {
                let [count, seqlen, heads, _] = shape("k", k, "batch, seqlen_k, num_heads_kv, head_dim_qk")?;
                ensure!(count == batch, "k has batch {count}, but q has {batch}");
                (seqlen, None, None, heads)
            }
        };
    for (side, total, longest) in [("q", total_q, seqlen_q), ("k", total_k, seqlen_k)] {
        longest_is_said(&format!("max_seqlen_{side}"), longest, side, total)?;
    }
    // SAFETY: who made the request promised its scales.
    if let Some(scales) = unsafe { request.scaled() } {
        let each = crate::scales::elems_per_byte(scales);
        let v = request.required(Slot::V)?;
        let pairs_of_keys = each > 1 && crate::scales::lies_in_columns(v);
        let dim_v =
            v.shape().last().ok_or("v has 0 axes")?.saturating_mul(if pairs_of_keys { 1 } else { each });
        let dim_qk = dim_qk.saturating_mul(each);
        return Ok(Sizes {
            batch,
            seqlen_q,
            seqlen_k,
            heads_q,
            heads_kv,
            dim_qk,
            dim_v,
            total_q,
            total_k,
            pages,
        });
    }
    let dim_v = match request.get(Slot::V) {
        Some(v) => *v.shape().last().ok_or("v has 0 axes")?,
        None => numbers.head_dim_v,
    };
    Ok(Sizes { batch, seqlen_q, seqlen_k, heads_q, heads_kv, dim_qk, dim_v, total_q, total_k, pages })
}

/// Checks that a bound was given: without one every row would be left out, and a GPU, which reads lengths as
/// the kernel runs, would report nothing.
pub(crate) fn longest_is_said(
    bound: &str,
    longest: i64,
    rows: &str,
    total: Option<i64>,
) -> Result<(), Wrong> {
    let total = total.unwrap_or(0);
    ensure!(longest != 0 || total == 0, "{bound} is 0 (its default), but {rows} has {total} packed rows");
    Ok(())
}

/// Number of sequences that offsets separate.
fn sequences(name: &str, offsets: &Tensor) -> Result<i64, Wrong> {
    let [entries] = shape(name, offsets, "batch + 1")?;
    ensure!(entries >= 1, "{name} has {entries} entries, not one more than sequences");
    Ok(entries - 1)
}

/// Checks that a tensor has a given shape.
pub(crate) fn expect(name: &str, tensor: &Tensor, wanted: &[i64]) -> Result<(), Wrong> {
    let shape = tensor.shape();
    ensure!(shape == wanted, "{name} has shape {shape:?}, not {wanted:?}");
    Ok(())
}

pub(crate) fn of_type(name: &str, tensor: &Tensor, wanted: &[i32]) -> Result<(), Wrong> {
    if wanted.contains(&tensor.dtype) {
        return Ok(());
    }
    let names: Vec<&str> = wanted.iter().map(|&dtype| dtype_name(dtype)).collect();
    Err(format!("{name} is of {}, not of {}", dtype_name(tensor.dtype), names.join(" or ")))
}

/// A tensor as the C structs take it: its address goes into the run's arguments, its strides into the problem.
#[derive(Clone, Copy)]
pub(crate) struct Placed {
    pub data: *mut c_void,
    pub strides: FmhaStrides,
}

pub(crate) const NO_STRIDES: FmhaStrides =
    FmhaStrides { batch_stride: 0, seqlen_stride: 0, head_stride: 0, dim_stride: 0 };

/// C form of an operand that has rows. Axes of one index get harmless strides: a plan counts with a sequence's most
/// rows, which packed tensors may not have.
pub(crate) fn operand(name: &str, tensor: &Tensor, wanted: &[i64]) -> Result<Placed, Wrong> {
    attention_type(name, tensor)?;
    rows_of(name, tensor, wanted)
}

/// C form of a tensor that has rows, without a check of its type.
pub(crate) fn rows_of(name: &str, tensor: &Tensor, wanted: &[i64]) -> Result<Placed, Wrong> {
    expect(name, tensor, wanted)?;
    let mut steps: SmallVec<[i64; 4]> = SmallVec::from_slice(tensor.steps());
    for (at, (step, &size)) in steps.iter_mut().zip(wanted).enumerate() {
        ensure!(*step >= 0 || size <= 1, "{name} has stride {step} on axis {at}, below 0");
        *step = (*step).max(0);
    }
    dense_rows(name, tensor, name == "v")?;
    let (batch_stride, row) = if steps.len() == 4 { (steps[0], &steps[1..]) } else { (0, &steps[..]) };
    let dim_stride = dense_axis(wanted, row[2]);
    let seqlen_stride = match wanted {
        &[0 | 1, heads, dim] if dim_stride == 1 => {
            let row_elems = (heads - 1).max(0).saturating_mul(row[1]).saturating_add(dim);
            // Rows of a multiple of 16 elements satisfy every kernel's alignment.
            if row[0] < row_elems { row_elems.saturating_add(15) / 16 * 16 } else { row[0] }
        }
        _ => row[0],
    };
    let strides = FmhaStrides { batch_stride, seqlen_stride, head_stride: row[1], dim_stride };
    Ok(Placed { data: tensor.data, strides })
}

/// The stride of a last axis; 1 where the axis has at most one element, since its stride is then never used.
pub(crate) fn dense_axis(shape: &[i64], stride: i64) -> i64 {
    if shape.last() == Some(&1) || shape.contains(&0) { 1 } else { stride }
}

/// Checks that the last axis has stride 1; with `may_be_columns` the sequence axis may have it instead.
pub(crate) fn dense_rows(name: &str, tensor: &Tensor, may_be_columns: bool) -> Result<(), Wrong> {
    let (shape, steps) = (tensor.shape(), tensor.steps());
    let Some((&last, rest)) = steps.split_last() else { return Ok(()) };
    let is_dense = dense_axis(shape, last) == 1;
    let by_columns = may_be_columns && rest.len() >= 2 && rest[rest.len() - 2] == 1;
    if is_dense || by_columns {
        return Ok(());
    }
    let is_written = matches!(name, "o" | "dq" | "dk" | "dv" | "dbias");
    let remedy = match is_written {
        true => "what is written has a dense last axis".to_owned(),
        false => format!("{name}.contiguous() has it"),
    };
    Err(format!("{name} has stride {last} on its last axis, not 1: {remedy}"))
}

pub(crate) fn attention_type(name: &str, tensor: &Tensor) -> Result<(), Wrong> {
    ensure!(
        matches!(tensor.dtype, FMHA_F16 | FMHA_BF16 | FMHA_F32) || is_fp8(tensor.dtype),
        "{name} is of {}, not of float16, bfloat16, float32 or FP8",
        dtype_name(tensor.dtype)
    );
    Ok(())
}

/// Bytes of a row of K where K is a latent cache in FlashMLA's format, with FP8 values, scales and a rotary part;
/// otherwise 0.
pub(crate) fn cache_rows(k: &Tensor) -> i32 {
    match k.shape() {
        [.., width @ (656 | 584)] if k.dtype == U8 => *width as i32,
        _ => 0,
    }
}

/// Whether K is an FP8 cache under queries of 16 bits.
pub(crate) fn is_cache(q: &Tensor, k: &Tensor) -> bool {
    is_fp8(k.dtype) && matches!(q.dtype, FMHA_F16 | FMHA_BF16)
}

pub(crate) fn contiguous(name: &str, tensor: &Tensor) -> Result<(), Wrong> {
    ensure!(
        tensor.is_contiguous(),
        "{name} is not contiguous: strides {:?} of shape {:?}; {name}.contiguous() is",
        tensor.steps(),
        tensor.shape()
    );
    Ok(())
}

/// A contiguous tensor of one of the given types, if the tensor is given.
pub(crate) fn plain(
    request: &Request,
    slot: Slot,
    wanted: &[i64],
    types: &[i32],
) -> Result<*mut c_void, Wrong> {
    let Some(tensor) = request.get(slot) else { return Ok(ptr::null_mut()) };
    expect(name(slot), tensor, wanted)?;
    of_type(name(slot), tensor, types)?;
    contiguous(name(slot), tensor)?;
    ensure!(
        !tensor.data.is_null() || wanted.contains(&0),
        "{} has no memory (address 0) for its {wanted:?}",
        name(slot)
    );
    Ok(tensor.address())
}
