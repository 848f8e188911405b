//! A score function and a mask function, and the tensors that they capture.

use crate::args::{DevSlice, ScoreArgs};
use crate::dtype::DType;
use crate::error::{ProblemError, Refusal, ensure};
use crate::expr::{CaptureKind, Captured, Function, HostTensor, MAX_RANK, Number, Stored, Type, Variable};
use crate::problem::MAX_EXTENT_BYTES;

/// A score and a mask as functions of the pair ([`expr`](crate::expr)), and what they capture.
///
/// `S = score(softmax_scale Q K^T)` comes before soft-cap and bias. A pair is hidden if `mask` is false for
/// it, or if the problem's mask hides it. Both functions use the same captures.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Code {
    /// Function of the scaled score.
    pub score: Option<Function>,
    /// Function that shows a pair if it is true.
    pub mask: Option<Function>,
    /// Every tensor that the functions capture, once, in the order of [`ScoreArgs::captured`].
    pub captured: Vec<CapturedTensor>,
}

/// Extents of a tensor that a score or mask function captures. The function defines the element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapturedTensor {
    /// Name by which functions read the tensor.
    pub name: String,
    /// Extents of the axes, each at least one.
    pub shape: Vec<u32>,
    /// Element strides of each axis, at least 0.
    pub strides: Vec<i64>,
}

impl CapturedTensor {
    /// A tensor whose last axis is dense, without gaps between rows.
    #[must_use]
    pub fn dense(name: impl Into<String>, shape: &[u32]) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), strides: dense_strides(shape) }
    }

    /// Number of elements: the product of the extents.
    #[must_use]
    pub fn num_elems(&self) -> u64 {
        self.shape.iter().fold(1, |count: u64, &extent| count.saturating_mul(extent.into()))
    }

    /// Number of elements of memory from the first to the last element, both included.
    #[must_use]
    pub fn extent_elems(&self) -> u64 {
        let last = self.shape.iter().zip(&self.strides).fold(0u64, |last, (&extent, &stride)| {
            last.saturating_add(u64::from(extent.max(1) - 1).saturating_mul(stride.unsigned_abs()))
        });
        last.saturating_add(1)
    }
}

fn dense_strides(shape: &[u32]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis].into());
    }
    strides
}

/// Source of a number that the functions of a part capture ([`Code::of_part`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartNumber {
    /// The number at this index among those of the whole's functions.
    OfWhole(usize),
    /// The sequence, head, query or key of the whole at which the part begins, or a length of the whole's sequence.
    OfPart(Variable),
}

/// The gradient of a captured tensor: dense, with the tensor's shape. All of it is written: 0 where no score read
/// an element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapturedGrad {
    /// Name of the captured tensor.
    pub name: String,
    /// Type of the gradient's elements: f32, f16 or bf16.
    pub dtype: DType,
}

impl Code {
    /// Whether there is neither a score function nor a mask function.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.score.is_none() && self.mask.is_none()
    }

    fn functions(&self) -> impl Iterator<Item = &Function> {
        self.score.iter().chain(&self.mask)
    }

    /// The names and types of captured numbers, the score's first, in the order of [`ScoreArgs::numbers`].
    #[must_use]
    pub fn numbers(&self) -> Vec<(&str, Type)> {
        let mut numbers: Vec<(&str, Type)> = vec![];
        for capture in self.functions().flat_map(Function::captures) {
            if let CaptureKind::Number(kind) = capture.kind
                && !numbers.iter().any(|(name, _)| *name == capture.name)
            {
                numbers.push((&capture.name, kind));
            }
        }
        numbers
    }

    /// These functions for a call that is a part of a larger one ([`Part`](crate::Part)). Functions of a call read its
    /// own places, so those of the whole become sums of these and of captured numbers, which are arguments: parts that
    /// begin elsewhere have the same functions. The second value says what each of [`numbers`](Self::numbers) is.
    ///
    /// ```
    /// use fmha_core::{Code, PartNumber, expr::Variable};
    ///
    /// let mut whole = Code::default();
    /// whole.mask = Some("k <= q".parse()?);
    /// let (part, numbers) = whole.of_part()?;
    /// let moved = "first_k: int; first_q: int; k + first_k <= q + first_q";
    /// assert_eq!(part.mask.unwrap().to_string(), moved);
    /// assert_eq!(numbers[0], PartNumber::OfPart(Variable::Key));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A function that has too many operations then.
    pub fn of_part(&self) -> Result<(Self, Vec<PartNumber>), ProblemError> {
        let is_taken =
            |name: &str| self.functions().flat_map(Function::captures).any(|capture| capture.name == name);
        let mut names: Vec<(Variable, String)> = vec![];
        for variable in Variable::ALL.into_iter().filter(|&variable| variable != Variable::Score) {
            let of_length = matches!(variable, Variable::SeqlenQ | Variable::SeqlenK);
            let mut name = format!("{}_{}", if of_length { "whole" } else { "first" }, variable.name());
            while is_taken(&name) {
                name.push('_');
            }
            names.push((variable, name));
        }
        let name =
            |variable| names.iter().find(|(named, _)| *named == variable).map(|(_, name)| name.as_str());
        let moved = |field: &'static str, function: &Option<Function>| {
            let moved = function.as_ref().map(|function| function.in_part(name)).transpose();
            moved.map_err(|error| ProblemError::new(field, format!("{field} in a part: {error}")))
        };
        let code = Self {
            score: moved("score", &self.score)?,
            mask: moved("mask", &self.mask)?,
            captured: self.captured.clone(),
        };
        let of_whole: Vec<&str> = self.numbers().into_iter().map(|(name, _)| name).collect();
        let source = |wanted: &str| {
            let of_part =
                names.iter().find(|(_, name)| name == wanted).map(|(of, _)| PartNumber::OfPart(*of));
            of_part.unwrap_or_else(|| {
                PartNumber::OfWhole(of_whole.iter().position(|name| *name == wanted).unwrap_or(usize::MAX))
            })
        };
        let numbers = code.numbers().into_iter().map(|(name, _)| source(name)).collect();
        Ok((code, numbers))
    }

    /// The tensor of this name among those that the functions capture.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&CapturedTensor> {
        self.captured.iter().find(|tensor| tensor.name == name)
    }

    /// Storage type of a captured tensor's elements; `None` for a name that no function reads.
    #[must_use]
    pub fn stored(&self, name: &str) -> Option<Stored> {
        self.functions().flat_map(Function::captures).find(|capture| capture.name == name).and_then(
            |capture| match capture.kind {
                CaptureKind::Tensor { stored, .. } => Some(stored),
                CaptureKind::Number(_) => None,
            },
        )
    }

    /// Checks the functions and their captures.
    ///
    /// # Errors
    /// A score in place of a mask or the reverse, one name that two captures have, and extents that are missing, that
    /// no function reads, or that do not fit.
    pub(crate) fn check(&self) -> Result<(), ProblemError> {
        if let Some(score) = &self.score {
            ensure!(!score.is_mask(), "score", "score {score:?} is a bool: it is a mask");
        }
        if let Some(mask) = &self.mask {
            ensure!(mask.is_mask(), "mask", "mask {mask:?} is a number, not a bool");
        }
        let mut known: Vec<(&str, CaptureKind)> = vec![];
        for capture in self.functions().flat_map(Function::captures) {
            let (name, kind) = (capture.name.as_str(), capture.kind);
            match known.iter().find(|(known, _)| *known == name) {
                None => known.push((name, kind)),
                Some((_, other)) => ensure!(
                    *other == kind,
                    "captured",
                    "captured {name} is {other} in the score and {kind} in the mask"
                ),
            }
            if let CaptureKind::Tensor { rank, .. } = kind {
                let Some(tensor) = self.tensor(name) else {
                    return Err(ProblemError::new(
                        "captured",
                        format!("captured {name}: the function reads {kind}, of which no extents are given"),
                    ));
                };
                let axes = tensor.shape.len();
                ensure!(axes == rank, "captured", "captured {name} has {axes} axes, but is read as {kind}");
            }
        }
        for (at, tensor) in self.captured.iter().enumerate() {
            let CapturedTensor { name, shape, strides } = tensor;
            let is_twice = self.captured[..at].iter().any(|other| other.name == *name);
            ensure!(!is_twice, "captured", "captured {name} is given twice");
            let Some(stored) = self.stored(name) else {
                return Err(ProblemError::new(
                    "captured",
                    format!("captured {name} is a tensor that no function reads"),
                ));
            };
            ensure!(
                shape.len() == strides.len() && shape.len() <= MAX_RANK,
                "captured",
                "captured {name} has {} extents and {} strides",
                shape.len(),
                strides.len()
            );
            for (axis, (&extent, &stride)) in shape.iter().zip(strides).enumerate() {
                ensure!(
                    extent >= 1,
                    "captured",
                    "captured {name}: extent {extent} of axis {axis} is not at least 1"
                );
                ensure!(
                    stride >= 0 || extent == 1,
                    "captured",
                    "captured {name}: stride {stride} of axis {axis} is negative"
                );
            }
            let bytes = tensor.extent_elems().saturating_mul(stored.size_bytes());
            ensure!(
                bytes <= MAX_EXTENT_BYTES,
                "captured",
                "captured {name} of extents {shape:?} and strides {strides:?} is beyond 2^62 bytes"
            );
        }
        Ok(())
    }

    /// Checks the wanted gradients of captured tensors.
    ///
    /// # Errors
    /// A gradient of a tensor that is not captured or has no gradient, or of a type that is no float.
    pub(crate) fn check_gradients(&self, gradients: &[CapturedGrad]) -> Result<(), ProblemError> {
        for (at, CapturedGrad { name, dtype }) in gradients.iter().enumerate() {
            let is_twice = gradients[..at].iter().any(|other| other.name == *name);
            ensure!(!is_twice, "dcaptured", "dcaptured {name} is wanted twice");
            match self.stored(name) {
                None => {
                    let text = format!("dcaptured {name} is wanted, but no function captures such a tensor");
                    return Err(ProblemError::new("dcaptured", text));
                }
                Some(stored) => ensure!(
                    stored.float_dtype().is_some(),
                    "dcaptured",
                    "dcaptured {name} is wanted, but {stored} has no gradient"
                ),
            }
            ensure!(!dtype.is_fp8(), "dcaptured", "dcaptured {name}: {dtype} is not f32, f16 or bf16");
        }
        Ok(())
    }

    /// Binds the captures of a function to a call's arguments, in the order of its
    /// [`captures`](Function::captures).
    ///
    /// # Errors
    /// Numbers and tensors that are missing, of another type, or not in host memory.
    pub fn bind<'a>(
        &'a self,
        function: &Function,
        args: &ScoreArgs<'a>,
    ) -> Result<Vec<Captured<'a>>, ProblemError> {
        let numbers = self.numbers();
        let of = |capture: &crate::expr::Capture| {
            let missing = || ProblemError::new("captured", format!("captured {} is missing", capture.name));
            match capture.kind {
                CaptureKind::Number(_) => {
                    let at =
                        numbers.iter().position(|(name, _)| *name == capture.name).ok_or_else(missing)?;
                    args.numbers.get(at).copied().map(Captured::Number).ok_or_else(missing)
                }
                CaptureKind::Tensor { stored, .. } => {
                    let at = self.captured.iter().position(|tensor| tensor.name == capture.name);
                    let at = at.ok_or_else(missing)?;
                    let tensor = &self.captured[at];
                    let bytes = args.captured.get(at).and_then(DevSlice::as_host).ok_or_else(missing)?;
                    ensure!(
                        bytes.len() as u64 >= tensor.extent_elems() * stored.size_bytes(),
                        "captured",
                        "captured {} has {} bytes, but element {} is read",
                        capture.name,
                        bytes.len(),
                        tensor.extent_elems() - 1
                    );
                    let (shape, strides) = (tensor.shape.as_slice(), tensor.strides.as_slice());
                    Ok(Captured::Tensor(HostTensor { bytes, stored, shape, strides }))
                }
            }
        };
        function.captures().iter().map(of).collect()
    }

    /// Refuses functions, for kernels that compute none.
    ///
    /// # Errors
    /// A score function or a mask function.
    pub fn refuse(&self, kernel: &str) -> Result<(), Refusal> {
        let what = match (&self.score, &self.mask) {
            (Some(_), _) => "score as code",
            (None, Some(_)) => "mask as code",
            (None, None) => return Ok(()),
        };
        Err(Refusal::new(kernel, format!("{what} is not in this kernel")))
    }

    /// Checks the numbers of a call.
    ///
    /// # Errors
    /// Numbers whose count or types differ from those that the functions capture.
    pub(crate) fn check_numbers(&self, given: &[Number]) -> Result<(), ProblemError> {
        let wanted = self.numbers();
        ensure!(
            given.len() == wanted.len(),
            "numbers",
            "numbers: {} given, but the functions capture {}",
            given.len(),
            wanted.len()
        );
        for ((name, kind), number) in wanted.into_iter().zip(given) {
            ensure!(
                number.value_type() == kind,
                "numbers",
                "numbers: {name} is {number:?}, but the function reads {kind}"
            );
        }
        Ok(())
    }
}
