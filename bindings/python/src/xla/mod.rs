//! Handlers that JAX calls through XLA. A request's tensors come as buffers, and an attribute gives the slot of each.

mod api;

use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::call::{Wrong, ensure};
use crate::plans;
use crate::request::{Captured, Code, NUM_SLOTS, NUMBERS, Numbers, Request};
use crate::tensor::{BOOL, Device, F64, I32, I64, MAX_DIMS, OTHER, Tensor, U8, U32};
use api::Buffer;
pub use api::{CallFrame, XlaError};

/// Mark in `operands` for an argument that exists only so that a result may overwrite it.
const IGNORED: i64 = -1;

/// First slot of captured tensors and of their gradients, which follow in the order of their names.
const FIRST_CAPTURED: i64 = 1 << 16;
const FIRST_GRADIENT: i64 = 1 << 17;

/// The handler of the target `fmha` on the CPU. Attributes, arrays of int64 each: `operands` and `results`, the slot of
/// every argument and result; `numbers`, the words of [`Numbers`]; `code`, absent or the lengths of score, mask and
/// names, which commas part, and their bytes; `captured`, the words of the numbers that are named last.
///
/// # Safety
/// XLA calls it, with its own frame.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_xla_cpu(frame: *const CallFrame) -> *mut XlaError {
    // SAFETY: the caller keeps the contract of `fmha_xla_cpu`.
    unsafe { handle(frame, 0) }
}

/// The handler on NVIDIA's devices.
///
/// # Safety
/// As [`fmha_xla_cpu`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_xla_cuda(frame: *const CallFrame) -> *mut XlaError {
    // SAFETY: the caller keeps the contract of `fmha_xla_cuda`.
    unsafe { handle(frame, 1) }
}

/// The handler on AMD's devices.
///
/// # Safety
/// As [`fmha_xla_cpu`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fmha_xla_rocm(frame: *const CallFrame) -> *mut XlaError {
    // SAFETY: the caller keeps the contract of `fmha_xla_rocm`.
    unsafe { handle(frame, 2) }
}

/// # Safety
/// As [`fmha_xla_cpu`].
unsafe fn handle(frame: *const CallFrame, kind: i32) -> *mut XlaError {
    // SAFETY: the caller keeps the contract of `handle`.
    let Some(frame) = (unsafe { frame.as_ref() }) else { return std::ptr::null_mut() };
    // SAFETY: the caller keeps the contract of `handle`.
    if unsafe { frame.answered() } {
        return std::ptr::null_mut();
    }
    match catch_unwind(AssertUnwindSafe(|| run(frame, kind))) {
        Ok(Ok(())) => return std::ptr::null_mut(),
        Ok(Err(text)) => crate::keep(&text),
        Err(_) => crate::keep("internal error: a panic was caught at XLA's boundary"),
    }
    crate::with_text(|text| frame.error(text))
}

fn run(frame: &CallFrame, kind: i32) -> Result<(), Wrong> {
    let index = if kind == 0 { 0 } else { frame.ordinal()? };
    let device = Device { kind, index };
    let mut request = Request::new();
    let words = frame.numbers("numbers")?;
    ensure!(
        words.len() == NUMBERS.len(),
        "the attribute numbers has {} words, not {}",
        words.len(),
        NUMBERS.len()
    );
    let mut words = words.into_iter();
    request.numbers = Numbers::read(NUMBERS.len(), |_| words.next().unwrap_or_default().cast_unsigned());
    let mut spelt = Spelt::new(&frame.optional_numbers("code")?, &frame.optional_numbers("captured")?)?;
    for (name, buffers) in [("operands", frame.arguments()), ("results", frame.results())] {
        let slots = frame.numbers(name)?;
        ensure!(
            slots.len() == buffers.len(),
            "the attribute {name} has {} slots of {} buffers",
            slots.len(),
            buffers.len()
        );
        for (slot, buffer) in slots.into_iter().zip(buffers) {
            if slot == IGNORED {
                continue;
            }
            if let Some(to) = spelt.place(slot) {
                *to = tensor(buffer, device)?;
                continue;
            }
            let to = usize::try_from(slot).ok().and_then(|slot| request.tensors.get_mut(slot));
            let to = to.ok_or_else(|| format!("the attribute {name} has slot {slot} of {NUM_SLOTS}"))?;
            *to = tensor(buffer, device)?;
        }
    }
    let code = spelt.code();
    if let Some(code) = &code {
        request.code = code;
    }
    if kind == 0 {
        return plans::run(&request, crate::host_scratch);
    }
    request.stream = frame.stream()?;
    plans::run(&request, |bytes| frame.scratch(bytes, plans::ALIGNMENT))
}

/// Score and mask functions in the form of attributes.
struct Spelt {
    /// Texts of the score and of the mask.
    texts: [CString; 2],
    /// Owner of the names that `captured` points to.
    _names: Vec<CString>,
    captured: Vec<Captured>,
}

impl Spelt {
    fn new(words: &[i64], numbers: &[i64]) -> Result<Self, Wrong> {
        let Some((lengths, bytes)) = words.split_first_chunk::<3>() else {
            return Ok(Self { texts: Default::default(), _names: vec![], captured: vec![] });
        };
        let bytes: Vec<u8> = bytes.iter().map(|&byte| byte as u8).collect();
        let mut left = &bytes[..];
        let mut texts = Vec::with_capacity(3);
        for &length in lengths {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let (text, rest) = left.split_at_checked(length).ok_or("the attribute code is cut")?;
            texts.push(CString::new(text).map_err(|error| error.to_string())?);
            left = rest;
        }
        let names = texts.pop().unwrap_or_default().into_string().map_err(|error| error.to_string())?;
        let names: Vec<CString> = names
            .split(',')
            .filter(|name| !name.is_empty())
            .map(|name| CString::new(name).map_err(|error| error.to_string()))
            .collect::<Result<_, _>>()?;
        let first = names
            .len()
            .checked_sub(numbers.len())
            .ok_or("the attribute captured has more numbers than names")?;
        let captured = names
            .iter()
            .enumerate()
            .map(|(at, name)| {
                let bits = at.checked_sub(first).map_or(0, |at| numbers[at]);
                let real = f64::from_bits(bits.cast_unsigned());
                let (tensor, gradient) = (Tensor::ABSENT, Tensor::ABSENT);
                Captured { name: name.as_ptr(), tensor, gradient, real, integer: real as i64 }
            })
            .collect();
        let [score, mask] = [0, 1].map(|at| texts[at].clone());
        Ok(Self { texts: [score, mask], _names: names, captured })
    }

    /// Field for the captured tensor, or for its gradient, that a slot denotes; `None` for other slots.
    fn place(&mut self, slot: i64) -> Option<&mut Tensor> {
        let of = |first: i64| usize::try_from(slot.checked_sub(first)?).ok();
        match of(FIRST_GRADIENT) {
            Some(at) => self.captured.get_mut(at).map(|captured| &mut captured.gradient),
            None => self.captured.get_mut(of(FIRST_CAPTURED)?).map(|captured| &mut captured.tensor),
        }
    }

    /// The request's functions; the pointers are valid as long as `self`.
    fn code(&self) -> Option<Code> {
        let [score, mask] = &self.texts;
        let text = |text: &CString| if text.is_empty() { std::ptr::null() } else { text.as_ptr() };
        (!score.is_empty() || !mask.is_empty()).then(|| Code {
            score: text(score),
            mask: text(mask),
            captured: self.captured.as_ptr(),
            num_captured: self.captured.len() as i64,
        })
    }
}

/// Describes a buffer as a tensor. A buffer is dense, its last axis innermost.
fn tensor(buffer: &Buffer, device: Device) -> Result<Tensor, Wrong> {
    let shape = buffer.shape();
    ensure!(shape.len() <= MAX_DIMS, "a buffer of {shape:?} has more axes than {MAX_DIMS}");
    let mut tensor = Tensor { data: buffer.data, num_dims: shape.len() as i32, device, ..Tensor::ABSENT };
    let mut stride = 1i64;
    for (i, &size) in shape.iter().enumerate().rev() {
        (tensor.sizes[i], tensor.strides[i]) = (size, stride);
        stride = stride.saturating_mul(size.max(1));
    }
    tensor.dtype = dtype(buffer.dtype);
    if shape.contains(&0) {
        tensor.data = std::ptr::null_mut();
    }
    Ok(tensor)
}

/// This library's code of an XLA element type.
fn dtype(theirs: i32) -> i32 {
    match theirs {
        10 => fmha_c::FMHA_F16,
        16 => fmha_c::FMHA_BF16,
        11 => fmha_c::FMHA_F32,
        20 => fmha_c::FMHA_E4M3FN,
        19 => fmha_c::FMHA_E5M2,
        25 => fmha_c::FMHA_E4M3FNUZ,
        24 => fmha_c::FMHA_E5M2FNUZ,
        4 => I32,
        6 => U8,
        8 => U32,
        12 => F64,
        5 => I64,
        1 => BOOL,
        _ => OTHER,
    }
}
