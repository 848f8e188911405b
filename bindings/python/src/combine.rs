//! Merging partial results by their LSE, or adding them: from a request's `o_parts` and `lse_parts` to the C struct.

use std::ffi::c_void;
use std::ptr;

use fmha_c::{FMHA_ADD_TO, FMHA_BY_LSE, FMHA_F32, FMHA_SUM, FmhaCombine, FmhaPartial, FmhaTensor};

use crate::call::{Key, Wrong, ensure, word};
use crate::request::{ADDS, ADDS_TO, Request, Slot};
use crate::shapes::{attention_type, contiguous, dense_axis, dense_rows, of_type, one_device, shape};
use crate::tensor::{Device, Tensor, dtype_name, element_bytes, is_fp8};

/// Axes of partial outputs.
///
/// # Errors
/// Where there are not five.
pub fn axes(parts: &Tensor) -> Result<[i64; 5], Wrong> {
    shape("o_parts", parts, "parts, batch, seqlen_q, num_heads_q, head_dim_v")
}

/// A combine call's struct, and its parts, which it points to.
pub struct Combine {
    call: FmhaCombine,
    parts: Vec<FmhaPartial>,
    options: i64,
    /// The device that all of its tensors are on.
    pub device: Device,
}

impl Combine {
    /// Reads a request.
    ///
    /// # Errors
    /// The first tensor that is missing, or does not go with the others, with both numbers.
    pub fn new(request: &Request) -> Result<Self, Wrong> {
        let device = one_device(request, Slot::OParts)?;
        let (parts, o) = (request.required(Slot::OParts)?, request.required(Slot::O)?);
        let [count, batch, seqlen, heads, dim] = axes(parts)?;
        let merge = match (request.asks(ADDS), request.asks(ADDS_TO)) {
            (false, false) => FMHA_BY_LSE,
            (true, false) => FMHA_SUM,
            (_, true) => FMHA_ADD_TO,
        };
        let fits = |name: &str, tensor: &Tensor, wanted: &[i64]| {
            ensure!(tensor.shape() == wanted, "{name} has shape {:?}, not {wanted:?}", tensor.shape());
            Ok(())
        };
        fits("o", o, &[batch, seqlen, heads, dim])?;
        ensure!(merge != FMHA_BY_LSE || count >= 1, "o_parts has {count} parts, not at least 1");
        let mut lses = [ptr::null_mut(); 2];
        if merge == FMHA_BY_LSE {
            let slots = [
                ("lse_parts", Slot::LseParts, &[count, batch, heads, seqlen][..]),
                ("lse", Slot::Lse, &[batch, heads, seqlen][..]),
            ];
            for (data, (name, slot, wanted)) in lses.iter_mut().zip(slots) {
                let tensor = request.required(slot)?;
                fits(name, tensor, wanted)?;
                of_type(name, tensor, &[FMHA_F32])?;
                contiguous(name, tensor)?;
                *data = tensor.address();
            }
        }
        let [lse_parts, lse] = lses;
        for (name, tensor) in [("o_parts", parts), ("o", o)] {
            attention_type(name, tensor)?;
            ensure!(
                !is_fp8(tensor.dtype),
                "{name} is of {}, which combine does not take",
                dtype_name(tensor.dtype)
            );
            dense_rows(name, tensor, false)?;
            if let Some(stride) = tensor.steps().iter().find(|&&stride| stride < 0) {
                return Err(format!("{name} has stride {stride}, below 0"));
            }
        }
        let bytes = element_bytes(parts.dtype);
        let steps = parts.steps();
        let partial = |i: i64| FmhaPartial {
            o: rows(at(parts.data, i * steps[0] * bytes), &steps[1..], o),
            lse: match merge {
                FMHA_BY_LSE => at(lse_parts, i * batch * heads * seqlen * 4).cast_const().cast(),
                _ => ptr::null(),
            },
        };
        Ok(Self {
            call: FmhaCombine {
                struct_bytes: size_of::<FmhaCombine>() as u64,
                num_parts: count,
                batch,
                seqlen_q: seqlen,
                num_heads_q: heads,
                head_dim_v: dim,
                parts: ptr::null(),
                o: rows(o.data, o.steps(), o),
                lse: lse.cast(),
                stream: ptr::with_exposed_provenance_mut(word(request.stream) as usize),
                dtype_part: parts.dtype,
                dtype_o: o.dtype,
                merge,
                reserved: 0,
            },
            parts: (0..count).map(partial).collect(),
            options: request.numbers.options,
            device,
        })
    }

    /// The whole struct; its parts are this value's.
    pub fn call(&mut self) -> &FmhaCombine {
        self.call.parts = self.parts.as_ptr();
        &self.call
    }

    /// Options of the request.
    #[must_use]
    pub fn options(&self) -> i64 {
        self.options
    }

    /// Everything of the call that a plan depends on, in numbers.
    #[must_use]
    pub fn key(&self) -> Key {
        let call = &self.call;
        // No forward call's key begins so: the first word of those is a scale's 41 bits.
        let mut key = Key::from_slice(&[u64::MAX - 2]);
        let codes = [self.device.kind, self.device.index, call.dtype_part, call.dtype_o];
        key.extend(codes.map(|code| word(code.into())));
        let dims =
            [call.num_parts, call.batch, call.seqlen_q, call.num_heads_q, call.head_dim_v, self.options];
        key.extend(dims.map(word));
        for tensor in self.parts.first().map(|part| &part.o).into_iter().chain([&call.o]) {
            let strides = [tensor.batch_stride, tensor.seqlen_stride, tensor.head_stride, tensor.dim_stride];
            key.extend(strides.map(word));
        }
        key.push(u64::from(call.lse.is_null()));
        key
    }
}

/// Pointer moved by `bytes`; a tensor without elements is never read.
fn at(data: *mut c_void, bytes: i64) -> *mut c_void {
    data.wrapping_byte_offset(bytes as isize)
}

/// Rows of O's shape at an address.
fn rows(data: *mut c_void, strides: &[i64], o: &Tensor) -> FmhaTensor {
    FmhaTensor {
        data,
        batch_stride: strides[0],
        seqlen_stride: strides[1],
        head_stride: strides[2],
        dim_stride: dense_axis(o.shape(), strides[3]),
    }
}
