//! Scores and masks as code: a plan parses their texts once, and each run passes the tensors and numbers that they
//! capture.

use std::ffi::{CString, c_char};

use fmha::expr::{CaptureKind, Function, Number, Stored, Type};
use fmha::{
    CapturedGrad, CapturedTensor, Code, DType, DevSlice, DevSliceMut, ElemType, FwdProblem, ProblemError,
};

use crate::Result;
use crate::host::{c_str, dtype, flag, none, size, text};
use crate::plan::Memory;
use crate::structs::{FMHA_MAX_RANK, FmhaArgs, FmhaCaptured, FmhaCapturedArgs, FmhaCode};

/// Texts of a problem's functions, and the tensors and numbers that they capture, as [`FmhaCode`] gives them.
#[derive(Clone, Debug)]
pub(crate) struct PointedCode {
    score: Option<Function>,
    mask: Option<Function>,
    captured: Vec<(CString, FmhaCaptured)>,
}

impl PointedCode {
    /// Reads the texts and the captures.
    ///
    /// # Safety
    /// Texts and names are null or C strings, `captured` is null or as many as the struct says.
    pub(crate) unsafe fn read(code: &FmhaCode) -> Result<Self> {
        // SAFETY: the caller keeps the contract of `read`.
        let (score, mask) = unsafe { (function("score", code.score)?, function("mask", code.mask)?) };
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
        Ok(Self { score, mask, captured })
    }

    /// The problem with its score and mask functions added, and the extents of the tensors that they capture.
    pub(crate) fn forward(&self, problem: FwdProblem, is_backward: bool) -> Result<FwdProblem> {
        let mut tensors = vec![];
        for (name, given) in &self.captured {
            let name = name.to_string_lossy();
            none("reserved", given.reserved)?;
            if !self.is_tensor(&name, given, is_backward)? {
                if given.num_dims != 0 {
                    let num_dims = given.num_dims;
                    let text =
                        format!("captured {name}.num_dims is {num_dims}, but the function reads a number");
                    return refused(text);
                }
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

    /// The gradients of captured tensors that a call wants.
    pub(crate) fn gradients(&self) -> Result<Vec<CapturedGrad>> {
        let wanted = self.captured.iter().filter(|(_, given)| given.write_grad != 0);
        wanted
            .map(|(name, given)| {
                let dtype = dtype("dtype_grad", given.dtype_grad)?;
                Ok(CapturedGrad { name: name.to_string_lossy().into_owned(), dtype })
            })
            .collect()
    }

    /// The position in the run's arguments of each captured tensor or number, in the order in which the problem's
    /// functions read them.
    pub(crate) fn captures(&self, problem: &FwdProblem) -> Captures {
        let place = |wanted: &str| {
            self.captured
                .iter()
                .position(|(name, _)| name.to_bytes() == wanted.as_bytes())
                .unwrap_or_default()
        };
        // A function reads every name; otherwise the problem would have been refused.
        let read = |(name, given): &(CString, FmhaCaptured)| {
            let name = name.to_string_lossy().into_owned();
            let kind =
                self.functions().flat_map(Function::captures).find(|capture| capture.name == name)?.kind;
            Some(Planned { name, kind, has_grad: given.write_grad != 0 })
        };
        Captures {
            given: self.captured.iter().filter_map(read).collect(),
            numbers: problem.code.numbers().into_iter().map(|(name, kind)| (place(name), kind)).collect(),
        }
    }

    fn functions(&self) -> impl Iterator<Item = &Function> {
        self.score.iter().chain(&self.mask)
    }

    /// Whether the functions read a tensor by this name. The caller's declaration must then agree with theirs.
    fn is_tensor(&self, name: &str, given: &FmhaCaptured, is_backward: bool) -> Result<bool> {
        let mut captures = self.functions().flat_map(Function::captures);
        let Some(read) = captures.find(|capture| capture.name == name) else {
            return refused(format!("captured {name} is given, but no function reads it"));
        };
        let is_tensor = matches!(read.kind, CaptureKind::Tensor { .. });
        match (flag("write_grad", given.write_grad)?, given.dtype_grad) {
            (false, 0) => {}
            (false, dtype) => {
                return refused(format!(
                    "captured {name}.dtype_grad {dtype} goes with write_grad, which is 0"
                ));
            }
            (true, _) if !is_tensor => {
                return refused(format!("captured {name}.write_grad is 1, but a number has no gradient"));
            }
            (true, _) if !is_backward => {
                return refused(format!("captured {name}.write_grad is 1, but gradients is null"));
            }
            (true, _) => {}
        }
        Ok(is_tensor)
    }
}

/// Tensors and numbers that a problem's functions capture, in the order of [`FmhaCode`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Captures {
    given: Vec<Planned>,
    /// Index and type of each captured number, in the problem's order.
    numbers: Vec<(usize, Type)>,
}

/// The name of a captured tensor or number, and what the functions read by that name.
#[derive(Clone, Debug)]
struct Planned {
    name: String,
    kind: CaptureKind,
    has_grad: bool,
}

/// Parses the text of a function.
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

/// The tensors and numbers that a struct says its functions capture.
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
    // SAFETY: the caller promised `count` structs at this pointer.
    Ok(unsafe { std::slice::from_raw_parts(code.captured, count as usize) })
}

fn refused<T>(text: String) -> Result<T> {
    Err(ProblemError::new("captured", text).into())
}

/// The tensors and numbers that a run captures, in the order in which its problem reads them.
#[derive(Debug, Default)]
pub(crate) struct CapturedArgs<'a> {
    given: &'a [FmhaCapturedArgs],
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
    /// Tensors and numbers that a run gives for its functions to read.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    pub(crate) unsafe fn captured<'a>(
        self,
        problem: &FwdProblem,
        captures: &Captures,
        args: &'a FmhaArgs,
    ) -> Result<CapturedArgs<'a>, ProblemError> {
        let refused = |text| Err(ProblemError::new("captured", text));
        let count = captures.given.len();
        match (count, args.captured.is_null()) {
            (0, true) => return Ok(CapturedArgs::default()),
            (0, false) => return refused("captured is given, but the problem is without it".to_owned()),
            (_, true) => return refused(format!("captured is null, but the problem has {count}")),
            _ => {}
        }
        // SAFETY: the caller promised as many as the problem has.
        let given = unsafe { std::slice::from_raw_parts(args.captured, count) };
        let mut tensors = vec![];
        let mut wanted = problem.code.captured.iter();
        for (Planned { name, kind, has_grad }, captured) in captures.given.iter().zip(given) {
            none("reserved", captured.reserved)?;
            match (kind, captured.data.is_null()) {
                (CaptureKind::Number(_), true) => {}
                (CaptureKind::Number(_), false) => {
                    return refused(format!("captured {name}.data is given, but the function reads {kind}"));
                }
                (CaptureKind::Tensor { .. }, true) => {
                    return refused(format!("captured {name}.data is null, but the function reads {kind}"));
                }
                (CaptureKind::Tensor { stored, .. }, false) => {
                    let elems = wanted.next().map_or(0, CapturedTensor::extent_elems);
                    let bytes = elems.saturating_mul(stored.size_bytes());
                    // SAFETY: the caller keeps the contract of `captured`.
                    tensors.push(unsafe { self.read(captured.data.cast(), bytes, elem(*stored)) });
                }
            }
            if captured.grad.is_null() == *has_grad {
                let (is, says) = if *has_grad { ("null", 1) } else { ("given", 0) };
                return refused(format!("captured {name}.grad is {is}, but write_grad is {says}"));
            }
        }
        let number = |&(at, kind): &(usize, Type)| match kind {
            Type::Float => Number::Float(given[at].real),
            _ => Number::Int(given[at].integer),
        };
        Ok(CapturedArgs { given, tensors, numbers: captures.numbers.iter().map(number).collect() })
    }

    /// Outputs for the gradients of tensors that the score function captures.
    ///
    /// # Safety
    /// As [`FmhaPlan::run`](crate::FmhaPlan::run).
    pub(crate) unsafe fn dcaptured<'a>(
        self,
        code: &Code,
        wanted: &[CapturedGrad],
        args: &CapturedArgs<'_>,
    ) -> Vec<DevSliceMut<'a>> {
        let given = args.given.iter().filter(|captured| !captured.grad.is_null());
        let slice = |(wanted, captured): (&CapturedGrad, &FmhaCapturedArgs)| {
            let elems = code.tensor(&wanted.name).map_or(0, CapturedTensor::num_elems);
            let bytes = elems.saturating_mul(wanted.dtype.size_bytes());
            // SAFETY: the caller keeps the contract of `dcaptured`.
            unsafe { self.write(captured.grad.cast(), bytes, wanted.dtype) }
        };
        wanted.iter().zip(given).map(slice).collect()
    }
}

/// Type in which a captured tensor is stored in memory.
fn elem(stored: Stored) -> ElemType {
    match stored {
        Stored::F32 => DType::F32.into(),
        Stored::F16 => DType::F16.into(),
        Stored::Bf16 => DType::Bf16.into(),
        Stored::I32 => ElemType::I32,
        Stored::I64 | Stored::Bool => ElemType::Bytes,
    }
}
