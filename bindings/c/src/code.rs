//! Scores and masks as code: texts are read once, at the plan; each run is held to them and brings its captures.

use std::ffi::{CStr, CString, c_char};
use std::fmt::Display;

use fmha::expr::{CaptureKind, Function, Number, Stored};
use fmha::{
    CapturedGrad, CapturedTensor, DType, DevSlice, DevSliceMut, ElemType, FwdProblem, ProblemError, ValidBwd,
};

use crate::Result;
use crate::agree::differs;
use crate::host::{c_str, dtype, none, size, struct_bytes, text};
use crate::plan::Memory;
use crate::structs::{FMHA_MAX_RANK, FmhaCall, FmhaCaptured, FmhaCode};

/// Memory that a call's [`FmhaCode`] points to.
#[derive(Clone, Debug)]
pub(crate) struct PointedCode {
    score: Option<Function>,
    mask: Option<Function>,
    texts: [Option<CString>; 2],
    captured: Vec<(CString, FmhaCaptured)>,
}

impl PointedCode {
    /// # Safety
    /// Texts and names are null or C strings, `captured` is null or as many as the struct says.
    pub(crate) unsafe fn read(code: &FmhaCode) -> Result<Self> {
        struct_bytes::<FmhaCode>(code.struct_bytes)?;
        // SAFETY: the caller keeps the contract of `read`.
        let (score, mask) = unsafe { (function("score", code.score)?, function("mask", code.mask)?) };
        // SAFETY: the caller keeps the contract of `read`.
        let texts = unsafe { [code.score, code.mask].map(|text| c_str(text).map(CStr::to_owned)) };
        let mut captured: Vec<(CString, FmhaCaptured)> = vec![];
        // SAFETY: the caller keeps the contract of `read`.
        for (at, given) in unsafe { listed(code)? }.iter().enumerate() {
            // SAFETY: the caller keeps the contract of `read`.
            let Some(name) = (unsafe { c_str(given.name) }) else {
                return refused(format!("captured[{at}].name is null"));
            };
            if captured.iter().any(|(known, _)| known.as_c_str() == name) {
                return refused(format!("captured {} is given twice", name.to_string_lossy()));
            }
            captured.push((name.to_owned(), *given));
        }
        Ok(Self { score, mask, texts, captured })
    }

    /// A problem with the functions and the extents of what they capture.
    pub(crate) fn forward(&self, problem: FwdProblem, is_backward: bool) -> Result<FwdProblem> {
        let mut tensors = vec![];
        for (name, given) in &self.captured {
            let name = name.to_string_lossy();
            none("reserved", given.reserved)?;
            self.check(&name, given, is_backward)?;
            if given.data.is_null() {
                continue;
            }
            let axes = usize::try_from(given.num_dims).ok().filter(|&axes| axes <= FMHA_MAX_RANK);
            let Some(axes) = axes else {
                let num_dims = given.num_dims;
                return refused(format!(
                    "captured {name}.num_dims {num_dims} is not in 0..={FMHA_MAX_RANK} (FMHA_MAX_RANK)"
                ));
            };
            let shape = given.shape[..axes].iter().map(|&extent| size("captured", extent));
            tensors.push(CapturedTensor {
                name: name.into_owned(),
                shape: shape.collect::<Result<_, _>>()?,
                strides: given.strides[..axes].to_vec(),
            });
        }
        for capture in self.functions().flat_map(Function::captures) {
            let is_given = self.captured.iter().any(|(name, _)| name.to_bytes() == capture.name.as_bytes());
            if !is_given {
                return refused(format!(
                    "captured {} is missing: the function reads {}",
                    capture.name, capture.kind
                ));
            }
        }
        Ok(problem.score_code(self.score.clone()).mask_code(self.mask.clone()).captured(tensors))
    }

    /// Which gradients a call wants.
    pub(crate) fn gradients(&self) -> Result<Vec<CapturedGrad>> {
        let wanted = self.captured.iter().filter(|(_, given)| !given.grad.is_null());
        wanted
            .map(|(name, given)| {
                let dtype = dtype("dtype_grad", given.dtype_grad)?;
                Ok(CapturedGrad { name: name.to_string_lossy().into_owned(), dtype })
            })
            .collect()
    }

    fn functions(&self) -> impl Iterator<Item = &Function> {
        self.score.iter().chain(&self.mask)
    }

    /// Holds what is given to what the functions read of it.
    fn check(&self, name: &str, given: &FmhaCaptured, is_backward: bool) -> Result<()> {
        let mut captures = self.functions().flat_map(Function::captures);
        let Some(read) = captures.find(|capture| capture.name == name) else {
            return refused(format!("captured {name} is given, but no function reads it"));
        };
        match (read.kind, given.data.is_null()) {
            (CaptureKind::Number(kind), false) => {
                return refused(format!("captured {name}.data is given, but the function reads {kind}"));
            }
            (kind @ CaptureKind::Tensor { .. }, true) => {
                return refused(format!("captured {name}.data is null, but the function reads {kind}"));
            }
            _ => {}
        }
        match (given.grad.is_null(), given.dtype_grad) {
            (true, 0) => {}
            (true, dtype) => {
                return refused(format!("captured {name}.dtype_grad {dtype} goes with grad, which is null"));
            }
            (false, _) if given.data.is_null() => {
                return refused(format!("captured {name}.grad is given, but a number has no gradient"));
            }
            (false, _) if !is_backward => {
                return refused(format!("captured {name}.grad is given, but gradients is null"));
            }
            (false, _) => {}
        }
        Ok(())
    }
}

/// The function of a text.
///
/// # Safety
/// `given` is null or a C string.
unsafe fn function(field: &'static str, given: *const c_char) -> Result<Option<Function>> {
    // SAFETY: the caller keeps the contract of `function`.
    let Some(text) = (unsafe { text(field, given)? }) else { return Ok(None) };
    match text.parse() {
        Ok(function) => Ok(Some(function)),
        Err(error) => Err(ProblemError::new(field, format!("{field}: {error}")).into()),
    }
}

/// The captures of a struct.
///
/// # Safety
/// As [`PointedCode::read`].
unsafe fn listed(code: &FmhaCode) -> Result<&[FmhaCaptured]> {
    let count = size("num_captured", code.num_captured)?;
    if count == 0 {
        return Ok(&[]);
    }
    if code.captured.is_null() {
        let text = format!("captured is null, but num_captured is {count}");
        return Err(ProblemError::new("num_captured", text).into());
    }
    // SAFETY: the caller promised so many.
    Ok(unsafe { std::slice::from_raw_parts(code.captured, count as usize) })
}

fn refused<T>(text: String) -> Result<T> {
    Err(ProblemError::new("captured", text).into())
}

/// Refuses functions and captures that are not the planned ones; numbers and addresses may be others.
///
/// # Safety
/// As [`PointedCode::read`].
pub(crate) unsafe fn agree(given: Option<&FmhaCode>, planned: Option<&PointedCode>) -> Result<()> {
    let (given, planned) = match (given, planned) {
        (None, None) => return Ok(()),
        (Some(given), Some(planned)) => (given, planned),
        (given, _) => {
            let (given, planned) = if given.is_some() { ("given", "null") } else { ("null", "given") };
            return Err(differs("code", &given, &planned).into());
        }
    };
    struct_bytes::<FmhaCode>(given.struct_bytes)?;
    let functions = [&planned.score, &planned.mask];
    for (at, (field, given)) in [("score", given.score), ("mask", given.mask)].into_iter().enumerate() {
        // SAFETY: the caller keeps the contract of `agree`.
        if unsafe { c_str(given) } == planned.texts[at].as_deref() {
            continue;
        }
        // SAFETY: the caller keeps the contract of `agree`. Another spelling of the same function is the
        // same.
        let given = unsafe { function(field, given)? };
        if given != *functions[at] {
            let word = |function: &Option<Function>| {
                function.as_ref().map_or_else(|| "null".to_owned(), |function| format!("`{function}`"))
            };
            return Err(differs(field, &word(&given), &word(functions[at])).into());
        }
    }
    let count = planned.captured.len() as i64;
    if given.num_captured != count {
        return Err(differs("num_captured", &given.num_captured, &count).into());
    }
    // SAFETY: the caller keeps the contract of `agree`.
    for ((name, planned), given) in planned.captured.iter().zip(unsafe { listed(given)? }) {
        // SAFETY: the caller keeps the contract of `agree`.
        unsafe { agree_captured(name, planned, given)? };
    }
    Ok(())
}

/// # Safety
/// As [`PointedCode::read`].
unsafe fn agree_captured(name: &CStr, planned: &FmhaCaptured, given: &FmhaCaptured) -> Result<()> {
    let differs = |what: &str, given: &dyn Display, planned: &dyn Display| {
        let text = format!("captured {}.{what} {given} is not the plan's {planned}", name.to_string_lossy());
        Err(ProblemError::new("captured", text).into())
    };
    // SAFETY: the caller keeps the contract of `agree_captured`.
    let given_name = unsafe { c_str(given.name) };
    if given_name != Some(name) {
        let given_name = given_name.map_or("null".into(), CStr::to_string_lossy);
        return differs("name", &given_name, &name.to_string_lossy());
    }
    for (what, given, planned) in [
        ("num_dims", given.num_dims, planned.num_dims),
        ("dtype_grad", given.dtype_grad, planned.dtype_grad),
        ("reserved", given.reserved, planned.reserved),
    ] {
        if given != planned {
            return differs(what, &given, &planned);
        }
    }
    for (what, given, planned) in
        [("data", given.data, planned.data), ("grad", given.grad.cast_const(), planned.grad.cast_const())]
    {
        if given.is_null() != planned.is_null() {
            let (given, planned) = if given.is_null() { ("null", "given") } else { ("given", "null") };
            return differs(what, &given, &planned);
        }
    }
    // A number has no axes.
    let axes = if given.data.is_null() { 0 } else { usize::try_from(given.num_dims).unwrap_or(0) };
    for axis in 0..axes.min(FMHA_MAX_RANK) {
        for (what, given, planned) in [
            ("shape", given.shape[axis], planned.shape[axis]),
            ("strides", given.strides[axis], planned.strides[axis]),
        ] {
            if given != planned {
                return differs(&format!("{what}[{axis}]"), &given, &planned);
            }
        }
    }
    Ok(())
}

/// Arguments that a run captures, in the order of its problem.
#[derive(Debug, Default)]
pub(crate) struct CapturedArgs<'a> {
    tensors: Vec<DevSlice<'a>>,
    numbers: Vec<Number>,
}

impl<'a> CapturedArgs<'a> {
    pub(crate) fn tensors(&self) -> &[DevSlice<'a>] {
        &self.tensors
    }

    pub(crate) fn numbers(&self) -> &[Number] {
        &self.numbers
    }
}

impl Memory {
    /// Arguments that a call captures, once the call agrees with its plan.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    pub(crate) unsafe fn captured<'a>(self, problem: &FwdProblem, call: &FmhaCall) -> CapturedArgs<'a> {
        let mut args = CapturedArgs::default();
        // SAFETY: the caller keeps the contract of `captured`; its list was read when it was held to the
        // plan's.
        let Some(code) = (unsafe { call.code.as_ref() }) else { return args };
        // SAFETY: the caller keeps the contract of `captured`; its list was read when it was held to the
        // plan's.
        let given = unsafe { listed(code) }.unwrap_or_default();
        let tensors = given.iter().filter(|captured| !captured.data.is_null());
        for (tensor, captured) in problem.code.captured.iter().zip(tensors) {
            let Some(stored) = problem.code.stored(&tensor.name) else { continue };
            let bytes = tensor.extent_elems().saturating_mul(stored.size_bytes());
            // SAFETY: the caller keeps the contract of `captured`.
            args.tensors.push(unsafe { self.read(captured.data.cast(), bytes, elem(stored)) });
        }
        for (name, kind) in problem.code.numbers() {
            let is_it = |captured: &&FmhaCaptured| {
                // SAFETY: the caller keeps the contract of `captured`.
                let given = unsafe { c_str(captured.name) };
                given.is_some_and(|given| given.to_bytes() == name.as_bytes())
            };
            let Some(captured) = given.iter().find(is_it) else { continue };
            args.numbers.push(match kind {
                fmha::expr::Type::Float => Number::Float(captured.real),
                _ => Number::Int(captured.integer),
            });
        }
        args
    }

    /// Outputs for the gradients of captured tensors.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    pub(crate) unsafe fn dcaptured<'a>(self, problem: &ValidBwd, call: &FmhaCall) -> Vec<DevSliceMut<'a>> {
        // SAFETY: the caller keeps the contract of `dcaptured`.
        let Some(code) = (unsafe { call.code.as_ref() }) else { return vec![] };
        // SAFETY: the caller keeps the contract of `dcaptured`.
        let given = unsafe { listed(code) }.unwrap_or_default();
        let wanted = given.iter().filter(|captured| !captured.grad.is_null());
        let sizes = problem.dcaptured.iter().zip(problem.captured_elems());
        let slice = |((grad, elems), captured): ((&CapturedGrad, u64), &FmhaCaptured)| {
            let bytes = elems.saturating_mul(grad.dtype.size_bytes());
            // SAFETY: the caller keeps the contract of `dcaptured`.
            unsafe { self.write(captured.grad.cast(), bytes, grad.dtype) }
        };
        sizes.zip(wanted).map(slice).collect()
    }
}

/// The type of a captured tensor's memory.
fn elem(stored: Stored) -> ElemType {
    match stored {
        Stored::F32 => DType::F32.into(),
        Stored::F16 => DType::F16.into(),
        Stored::Bf16 => DType::Bf16.into(),
        Stored::I32 => ElemType::I32,
        Stored::I64 | Stored::Bool => ElemType::Bytes,
    }
}
