//! Merge of partial results by their LSE, or their sum: converts a request's `o_parts` and `lse_parts` to the C
//! structs.

use std::ffi::c_void;
use std::ptr;

use fmha_c::{
    FMHA_ADD_TO, FMHA_BY_LSE, FMHA_F32, FMHA_SUM, FmhaCombineArgs, FmhaCombineProblem, FmhaPartial,
    FmhaStrides,
};

use crate::call::{Key, Wrong, add, ensure, word};
use crate::request::{ADDS, ADDS_TO, Request, Slot};
use crate::shapes::{attention_type, contiguous, dense_axis, dense_rows, of_type, one_device, shape};
use crate::tensor::{Device, Tensor, dtype_name, element_bytes, is_fp8};

/// Sizes of the axes of partial outputs.
///
/// # Errors
/// Partial outputs that do not have five axes.
pub fn axes(parts: &Tensor) -> Result<[i64; 5], Wrong> {
    shape("o_parts", parts, "parts, batch, seqlen_q, num_heads_q, head_dim_v")
}

/// C structs of a merge, with the parts that they point to.
pub struct Combine {
    /// Description of the merge without its tensors.
    pub problem: FmhaCombineProblem,
    args: FmhaCombineArgs,
    parts: Vec<FmhaPartial>,
    options: i64,
    /// Device of all tensors of the merge.
    pub device: Device,
}

impl Combine {
    /// Reads a request.
    ///
    /// # Errors
    /// The first tensor that is missing or does not match the others, with both numbers.
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
            o: at(parts.data, i * steps[0] * bytes),
            lse: match merge {
                FMHA_BY_LSE => at(lse_parts, i * batch * heads * seqlen * 4).cast_const().cast(),
                _ => ptr::null(),
            },
        };
        Ok(Self {
            problem: FmhaCombineProblem {
                struct_bytes: size_of::<FmhaCombineProblem>() as u64,
                num_parts: count,
                batch,
                seqlen_q: seqlen,
                num_heads_q: heads,
                head_dim_v: dim,
                part: rows(&steps[1..], o),
                o: rows(o.steps(), o),
                dtype_part: parts.dtype,
                dtype_o: o.dtype,
                merge,
                write_lse: i32::from(merge == FMHA_BY_LSE),
            },
            args: FmhaCombineArgs {
                struct_bytes: size_of::<FmhaCombineArgs>() as u64,
                stream: ptr::with_exposed_provenance_mut(word(request.stream) as usize),
                parts: ptr::null(),
                o: o.data,
                lse: lse.cast(),
            },
            parts: (0..count).map(partial).collect(),
            options: request.numbers.options,
            device,
        })
    }

    /// Arguments of a run. Their parts belong to this value.
    pub fn args(&self) -> FmhaCombineArgs {
        FmhaCombineArgs { parts: self.parts.as_ptr(), ..self.args }
    }

    /// Options of the request.
    #[must_use]
    pub fn options(&self) -> i64 {
        self.options
    }

    /// Everything of the call that a plan depends on, in numbers.
    #[must_use]
    pub fn key(&self) -> Key {
        // This word begins no key of a forward call: the first word of such a key is a scale, of 41 bits.
        let mut key = Key::from_slice(&[u64::MAX - 2]);
        key.extend([self.device.kind, self.device.index].map(|code| word(code.into())));
        key.push(word(self.options));
        add(&mut key, Some(&self.problem));
        key
    }
}

/// Moves a pointer by `bytes`. The pointer of a tensor without elements is never read.
fn at(data: *mut c_void, bytes: i64) -> *mut c_void {
    data.wrapping_byte_offset(bytes as isize)
}

/// Strides of a tensor of rows that has O's shape.
fn rows(strides: &[i64], o: &Tensor) -> FmhaStrides {
    FmhaStrides {
        batch_stride: strides[0],
        seqlen_stride: strides[1],
        head_stride: strides[2],
        dim_stride: dense_axis(o.shape(), strides[3]),
    }
}
