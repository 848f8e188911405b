//! Conversion of a call's score and mask functions to the C structs.

use std::ffi::{CStr, c_char};
use std::ptr;

use fmha_c::{FMHA_BF16, FMHA_F16, FMHA_F32, FMHA_MAX_RANK, FmhaCaptured, FmhaCapturedArgs, FmhaCode};
use fmha_core::expr::{CaptureKind, Function, Stored};

use crate::call::{Key, Wrong, ensure, word};
use crate::request::{Captured, Code};
use crate::shapes::{contiguous, expect};
use crate::tensor::{BOOL, Device, I32, I64, MAX_DIMS, dtype_name};

const _: () = assert!(MAX_DIMS == FMHA_MAX_RANK);

/// C structs of a call's score and mask code, with the types of the captures.
pub(crate) struct Coded {
    code: FmhaCode,
    captured: Vec<FmhaCaptured>,
    args: Vec<FmhaCapturedArgs>,
    /// Element types of captured tensors; -1 for a captured number.
    types: Vec<i32>,
}

impl Coded {
    /// # Errors
    /// A captured tensor on another device, or a gradient whose shape or type is not its tensor's.
    pub(crate) fn new(code: &Code, captured: &[Captured], device: Device) -> Result<Self, Wrong> {
        let struct_bytes = size_of::<FmhaCode>() as u64;
        let num_captured = captured.len() as i64;
        let given = FmhaCode {
            struct_bytes,
            score: code.score,
            mask: code.mask,
            captured: ptr::null(),
            num_captured,
        };
        let both = captured.iter().map(|captured| one(captured, device)).collect::<Result<Vec<_>, _>>()?;
        let (list, args) = both.into_iter().unzip();
        let type_of = |captured: &Captured| captured.tensor.given().map_or(-1, |tensor| tensor.dtype);
        Ok(Self { code: given, captured: list, args, types: captured.iter().map(type_of).collect() })
    }

    /// The C struct with a pointer to its list of captures, which is valid while this borrow lives.
    pub(crate) fn pointed(&self) -> FmhaCode {
        FmhaCode { captured: self.captured.as_ptr(), ..self.code }
    }

    /// Tensors and numbers that a run captures, valid as long as `self` lives.
    pub(crate) fn args(&self) -> *const FmhaCapturedArgs {
        if self.args.is_empty() { ptr::null() } else { self.args.as_ptr() }
    }

    /// Adds to a plan's key the numbers of the functions on which the plan depends.
    pub(crate) fn key(&self, key: &mut Key) {
        for text in [self.code.score, self.code.mask] {
            key_text(key, text);
        }
        for (captured, &dtype) in self.captured.iter().zip(&self.types) {
            key_text(key, captured.name);
            key.extend([dtype, captured.dtype_grad].map(|code| word(code.into())));
            key.push(word(captured.write_grad.into()));
            if dtype >= 0 {
                key.push(captured.num_dims as u64);
                let axes = usize::try_from(captured.num_dims).unwrap_or(0);
                key.extend(captured.shape[..axes].iter().chain(&captured.strides[..axes]).map(|&n| word(n)));
            }
        }
    }

    /// Adds to a key the numbers that the functions capture.
    pub(crate) fn key_numbers(&self, key: &mut Key) {
        key.extend(
            self.args.iter().map(|args| u64::from(args.real.to_bits()) ^ word(args.integer).rotate_left(32)),
        );
        key.extend(self.args.iter().map(|args| word(args.integer)));
    }

    /// # Errors
    /// A tensor whose elements have another type than its declaration in a function.
    pub(crate) fn check_types(&self) -> Result<(), Wrong> {
        for text in [self.code.score, self.code.mask] {
            // SAFETY: who made the request promised C strings.
            let Some(text) = (unsafe { text_of(text) }) else { continue };
            // The C library reports errors of a function's text, so a text that does not parse is skipped here.
            let Ok(function) = text.to_string_lossy().parse::<Function>() else { continue };
            for (captured, &dtype) in self.captured.iter().zip(&self.types) {
                // SAFETY: who made the request promised C strings.
                let Some(name) = (unsafe { text_of(captured.name) }) else { continue };
                let read = function.captures().iter().find(|read| read.name.as_bytes() == name.to_bytes());
                if let Some(CaptureKind::Tensor { stored, .. }) = read.map(|read| read.kind)
                    && dtype >= 0
                {
                    ensure!(
                        dtype == code_of(stored),
                        "captured {} is of {}, but the function reads {stored}",
                        name.to_string_lossy(),
                        dtype_name(dtype)
                    );
                }
            }
        }
        Ok(())
    }
}

/// Code of a captured tensor's type, as the bindings number types.
fn code_of(stored: Stored) -> i32 {
    match stored {
        Stored::F32 => FMHA_F32,
        Stored::F16 => FMHA_F16,
        Stored::Bf16 => FMHA_BF16,
        Stored::I32 => I32,
        Stored::I64 => I64,
        Stored::Bool => BOOL,
    }
}

/// # Safety
/// `text` is null or a C string that lives as long as its request.
unsafe fn text_of<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: the caller promises that `text` is null or a C string that lives as long as its request.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

fn key_text(key: &mut Key, text: *const c_char) {
    // SAFETY: who made the request promised C strings.
    let Some(text) = (unsafe { text_of(text) }) else { return key.push(u64::MAX) };
    let bytes = text.to_bytes();
    key.push(bytes.len() as u64);
    key.extend(bytes.chunks(8).map(|chunk| chunk.iter().fold(0, |word, &byte| word << 8 | u64::from(byte))));
}

fn one(captured: &Captured, device: Device) -> Result<(FmhaCaptured, FmhaCapturedArgs), Wrong> {
    // SAFETY: who made the request promised a C string.
    let name = unsafe { text_of(captured.name) }.map_or("?".into(), CStr::to_string_lossy);
    let mut given = FmhaCaptured {
        name: captured.name,
        shape: [0; FMHA_MAX_RANK],
        strides: [0; FMHA_MAX_RANK],
        num_dims: 0,
        dtype_grad: 0,
        write_grad: 0,
        reserved: 0,
    };
    let mut args = FmhaCapturedArgs {
        data: ptr::null(),
        grad: ptr::null_mut(),
        integer: captured.integer,
        real: captured.real as f32,
        reserved: 0,
    };
    let Some(tensor) = captured.tensor.given() else {
        ensure!(
            args.real.is_finite() == captured.real.is_finite(),
            "captured {name} {:?} is {} as a 32-bit number",
            captured.real,
            args.real
        );
        return Ok((given, args));
    };
    let (theirs, ours) = (tensor.device, device);
    ensure!(theirs == ours, "captured {name} is on {}, but q is on {}", theirs.name(), ours.name());
    args.data = tensor.address();
    given.num_dims = tensor.num_dims;
    given.shape[..tensor.shape().len()].copy_from_slice(tensor.shape());
    // An axis of one index has no second element, so its stride means nothing.
    let steps = tensor.shape().iter().zip(tensor.steps());
    for (to, (&size, &step)) in given.strides.iter_mut().zip(steps) {
        *to = if size == 1 { 0 } else { step };
    }
    if let Some(gradient) = captured.gradient.given() {
        let named = format!("dcaptured {name}");
        expect(&named, gradient, tensor.shape())?;
        contiguous(&named, gradient)?;
        ensure!(
            gradient.device == ours,
            "{named} is on {}, but q is on {}",
            gradient.device.name(),
            ours.name()
        );
        args.grad = gradient.address();
        given.write_grad = 1;
        given.dtype_grad = gradient.dtype;
    }
    Ok((given, args))
}
