//! Scores and masks as code: expressions over a score and the place of its pair.
//!
//! ```text
//! Function      a score `score(s, b, h, q, k, ..)` or a mask `mask(b, h, q, k, ..)`
//!   Graph         nodes with types, each once                              graph
//!   surface       the operators of Rust that build one                     surface
//!   text          the small language: parse and print                      text
//!   eval          its value, in f64 or f32                                 eval
//!   Program       its values over blocks of pairs, a register machine      program
//!   derive        derivatives, through the score and to captures           derive
//!   bounds        its values over a tile, by interval arithmetic           bounds
//!   forms         bands, soft-cap, ALiBi: what kernels have built in       forms
//!   part          the same function for a part of a larger whole           part
//!   device        C++ that g++, NVRTC and clang compile                    device
//!                 and its bounds over a tile there                         device_bounds
//! ```
//!
//! `s` is the scaled, descaled score; `b` the sequence, `h` the query head, `q` and `k` the places of row and key
//! inside their sequence from 0 (no diagonal is added), `seqlen_q` and `seqlen_k` the sequence's lengths. What else a
//! function reads it captures by name: numbers, which are arguments of a call, and elements of tensors. Integers have
//! 64 bits, floats are f32 (float64 in the reference).
//!
//! ```
//! use fmha_core::expr::{At, Function, Score, Tensor};
//!
//! let slopes = Tensor::<f32, 1>::new("slopes");
//! let alibi = Function::score(|s: Score, at: At| s + slopes[at.h] * (at.k - at.q))?;
//! assert_eq!(alibi.to_string(), "slopes: f32[_]; s + slopes[h] * float(k - q)");
//! assert_eq!("slopes: f32[_]; s + slopes[h] * (k - q)".parse::<Function>()?, alibi);
//! # Ok::<(), fmha_core::expr::ExprError>(())
//! ```

mod bounds;
mod derive;
mod device;
mod device_bounds;
#[doc(hidden)]
pub mod draw;
mod eval;
mod forms;
mod graph;
mod part;
mod program;
mod surface;
#[cfg(test)]
mod tests;
mod text;

use std::fmt;
use std::sync::Arc;

pub use bounds::{Bounds, Interval, Ranges, Seen, Tile};
pub use derive::{CaptureSlope, Slopes};
pub use device::DEVICE_PRELUDE;
pub use device_bounds::BOUNDS_PRELUDE;
pub use eval::{Captured, HostTensor, Number, Pair, Rounding, Value};
pub use forms::{AlibiTerm, Bands, Distance, Limits, ScoreForm};
pub use graph::{Binary, Capture, CaptureKind, Graph, Id, MAX_RANK, Node, Stored, Type, Unary, Variable};
pub use program::{Block, Lanes, Program, ScalarMath, VectorMath};
pub use surface::{At, Bool, Element, Float, Int, Score, Tensor, number, select, whole_number};

/// Most nodes of a function: its registers and its device text stay small.
pub const MAX_NODES: usize = 4096;

/// Reason why an expression is invalid: a sentence that names the operation, or the place in the text and its
/// word.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ExprError {
    text: String,
}

impl ExprError {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into() }
    }
}

/// A score function or a mask function. Two are equal if they compute the same from captures of the same names; a clone
/// shares the graph.
#[derive(Clone)]
pub struct Function(Arc<Parts>);

struct Parts {
    graph: Graph,
    root: Id,
}

impl Function {
    /// Makes a score of the closure `score`, which is called once.
    ///
    /// # Errors
    /// One name that two captures have, and more than [`MAX_NODES`] nodes.
    pub fn score<R: Into<Float>>(score: impl FnOnce(Score, At) -> R) -> Result<Self, ExprError> {
        surface::trace(|| score(surface::score(), At::here()).into().id())
    }

    /// Makes a mask of the closure `mask`, which is called once. A pair is visible where the result is true.
    ///
    /// # Errors
    /// As [`score`](Self::score).
    pub fn mask(mask: impl FnOnce(At) -> Bool) -> Result<Self, ExprError> {
        surface::trace(|| mask(At::here()).id())
    }

    /// The function whose value is `root`: a mask if that is a bool, otherwise a score.
    ///
    /// # Errors
    /// A mask that reads the score, and more than [`MAX_NODES`] nodes.
    pub(crate) fn of(graph: &Graph, root: Id) -> Result<Self, ExprError> {
        let (mut graph, mut roots) = graph.extract(&[root])?;
        if graph.type_of(roots[0]) == Type::Int {
            roots[0] = graph.promote(roots[0], Type::Float);
            (graph, roots) = graph.extract(&roots)?;
        }
        let (count, root) = (graph.nodes().len(), roots[0]);
        if count > MAX_NODES {
            return Err(ExprError::new(format!(
                "the expression has {count} operations, more than {MAX_NODES}"
            )));
        }
        let reads_score = graph.nodes().contains(&Node::Variable(Variable::Score));
        if graph.type_of(root) == Type::Bool && reads_score {
            return Err(ExprError::new("s: a mask does not read the score"));
        }
        Ok(Self(Arc::new(Parts { graph, root })))
    }

    /// Nodes of the function's expressions, and the tensors and numbers that it captures.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.0.graph
    }

    /// The node that is the function's value.
    #[must_use]
    pub fn root(&self) -> Id {
        self.0.root
    }

    /// Tensors and numbers that the function captures, in the order of first use.
    #[must_use]
    pub fn captures(&self) -> &[Capture] {
        self.0.graph.captures()
    }

    /// Whether the function is a mask: its value is a bool that hides pairs. Otherwise it is a score.
    #[must_use]
    pub fn is_mask(&self) -> bool {
        self.0.graph.type_of(self.0.root) == Type::Bool
    }

    /// Hash of the function's structure: captures count by their index and kind, not by name, and values of captured
    /// numbers not at all. SHA-256 of the canonical text.
    #[must_use]
    pub fn structure(&self) -> [u8; 32] {
        hmac_sha256::Hash::hash(text::print(self.graph(), self.root(), |at| format!("c{at}")).as_bytes())
    }
}

impl PartialEq for Function {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&self.0, &other.0);
        Arc::ptr_eq(a, b)
            || a.root == b.root
                && a.graph.nodes() == b.graph.nodes()
                && a.graph.captures() == b.graph.captures()
    }
}

impl Eq for Function {}

impl std::hash::Hash for Function {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.0.root, self.0.graph.nodes(), self.0.graph.captures()).hash(state);
    }
}

/// Prints the text that parses to the function.
impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text::print(self.graph(), self.root(), |at| self.captures()[at].name.clone()))
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{self}`")
    }
}

/// The text language: declarations, names for parts, and an expression.
///
/// ```text
/// slopes: f32[_]; cap: float; documents: i32[_, _];     captures: tensors by axes, numbers `float` and `int`
/// let far = k - q; s + cap * slopes[h] * far
/// ```
///
/// Operators bind as in Python: `or`, `and`, `not`, comparisons, `|`, `^`, `&`, `<< >>`, `+ -`, `* / // %`, then signs
/// and `~`. Functions:
/// `abs sign floor ceil round exp exp2 log log2 sin cos tanh erf sigmoid relu sqrt rsqrt min max pow clamp select`, and
/// the casts `float int bool`. An integer beside a float becomes one; `/` is always float.
impl std::str::FromStr for Function {
    type Err = ExprError;

    fn from_str(text: &str) -> Result<Self, ExprError> {
        text::parse(text)
    }
}
