//! Evaluates a function at one pair. All other implementations are compared with this one.

use super::Function;
use super::graph::{Binary, Graph, Node, Stored, Type, Unary, Variable};

/// A value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A bool.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
}

impl Value {
    /// Number of a float value. 0 for another type, which a well-typed graph never reaches.
    #[must_use]
    pub fn float(self) -> f64 {
        match self {
            Value::Float(value) => value,
            Value::Int(value) => value as f64,
            Value::Bool(value) => f64::from(u8::from(value)),
        }
    }

    /// The value as an integer.
    #[must_use]
    pub fn int(self) -> i64 {
        match self {
            Value::Int(value) => value,
            // The conversion `as` drops the fraction and saturates; NaN becomes 0.
            Value::Float(value) => value as i64,
            Value::Bool(value) => i64::from(value),
        }
    }

    /// The number as a bool: whether it is not 0.
    #[must_use]
    pub fn bool(self) -> bool {
        match self {
            Value::Bool(value) => value,
            Value::Int(value) => value != 0,
            Value::Float(value) => value != 0.0,
        }
    }
}

/// The value of a captured number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// An f32 number.
    Float(f32),
    /// An i64 number.
    Int(i64),
}

/// A tensor in host memory that a function captures.
#[derive(Clone, Copy, Debug)]
pub struct HostTensor<'a> {
    /// Memory, from the first element on.
    pub bytes: &'a [u8],
    /// The type of an element.
    pub stored: Stored,
    /// Extents of the axes, each at least one.
    pub shape: &'a [u32],
    /// Strides in elements, for each axis.
    pub strides: &'a [i64],
}

impl HostTensor<'_> {
    /// Resolves an index of an axis with `extent` elements: a negative index counts from the end, then the index is
    /// clamped.
    #[must_use]
    pub fn resolved(index: i64, extent: u32) -> u64 {
        let extent = i64::from(extent);
        let index = if index < 0 { index.wrapping_add(extent) } else { index };
        index.clamp(0, (extent - 1).max(0)).unsigned_abs()
    }

    /// Offset of the element at these indices, in elements.
    #[must_use]
    pub fn offset(&self, at: impl Iterator<Item = i64>) -> i64 {
        at.zip(self.shape.iter().zip(self.strides))
            .map(|(index, (&extent, &stride))| Self::resolved(index, extent) as i64 * stride)
            .sum()
    }

    /// The element at this offset, which [`offset`](Self::offset) computed.
    #[must_use]
    #[inline]
    pub fn read(&self, offset: i64) -> Value {
        fn of<T: bytemuck::AnyBitPattern>(bytes: &[u8], offset: i64) -> T {
            let start = offset as usize * size_of::<T>();
            bytemuck::pod_read_unaligned(&bytes[start..start + size_of::<T>()])
        }
        match self.stored {
            Stored::F32 => Value::Float(f64::from(of::<f32>(self.bytes, offset))),
            Stored::F16 => Value::Float(f64::from(half::f16::from_bits(of(self.bytes, offset)))),
            Stored::Bf16 => Value::Float(f64::from(half::bf16::from_bits(of(self.bytes, offset)))),
            Stored::I32 => Value::Int(i64::from(of::<i32>(self.bytes, offset))),
            Stored::I64 => Value::Int(of(self.bytes, offset)),
            Stored::Bool => Value::Bool(of::<u8>(self.bytes, offset) != 0),
        }
    }
}

/// Value of a captured name in a call.
#[derive(Clone, Copy, Debug)]
pub enum Captured<'a> {
    /// A number.
    Number(Number),
    /// A tensor.
    Tensor(HostTensor<'a>),
}

/// Pair of query and key that a function gets, and its score.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pair {
    /// The scaled, descaled score; not read by a mask.
    pub score: f64,
    /// Number of the sequence.
    pub b: u32,
    /// Number of the query head.
    pub h: u32,
    /// Position of the query in its sequence.
    pub q: u32,
    /// Position of the key in its sequence.
    pub k: u32,
    /// Number of queries of the sequence.
    pub seqlen_q: u32,
    /// Number of keys of the sequence.
    pub seqlen_k: u32,
}

/// Arithmetic of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// Results are f64 and not rounded further.
    Exact,
    /// Each result is rounded to f32.
    F32,
}

impl Rounding {
    fn of(self, value: f64) -> f64 {
        match self {
            Rounding::Exact => value,
            Rounding::F32 => f64::from(value as f32),
        }
    }
}

impl Function {
    /// The function's value at a (query, key) pair; `captured` has the value of each of its
    /// [`captures`](Function::captures).
    #[must_use]
    pub fn eval(&self, pair: &Pair, captured: &[Captured<'_>], rounding: Rounding) -> Value {
        eval(self.graph(), pair, captured, rounding)[self.root().index()]
    }
}

impl super::Slopes {
    /// The value of every node of [`graph`](Self::graph) at a pair; `captured` holds what each of the function's
    /// captures is.
    #[must_use]
    pub fn eval(&self, pair: &Pair, captured: &[Captured<'_>], rounding: Rounding) -> Vec<Value> {
        eval(&self.graph, pair, captured, rounding)
    }
}

/// Computes the value of every node.
pub(super) fn eval(graph: &Graph, pair: &Pair, captured: &[Captured<'_>], rounding: Rounding) -> Vec<Value> {
    let mut values: Vec<Value> = Vec::with_capacity(graph.nodes().len());
    for node in graph.nodes() {
        let of = |id: &super::Id| values[id.index()];
        let value = match node {
            Node::Variable(variable) => match variable {
                Variable::Score => Value::Float(rounding.of(pair.score)),
                Variable::Batch => Value::Int(pair.b.into()),
                Variable::Head => Value::Int(pair.h.into()),
                Variable::Query => Value::Int(pair.q.into()),
                Variable::Key => Value::Int(pair.k.into()),
                Variable::SeqlenQ => Value::Int(pair.seqlen_q.into()),
                Variable::SeqlenK => Value::Int(pair.seqlen_k.into()),
            },
            Node::Bool(value) => Value::Bool(*value),
            Node::Int(value) => Value::Int(*value),
            Node::Float(bits) => Value::Float(f64::from(f32::from_bits(*bits))),
            Node::Number(capture) => match captured[*capture as usize] {
                Captured::Number(Number::Float(value)) => Value::Float(value.into()),
                Captured::Number(Number::Int(value)) => Value::Int(value),
                Captured::Tensor(_) => Value::Int(0),
            },
            Node::Load(capture, at) => match &captured[*capture as usize] {
                Captured::Tensor(tensor) => tensor.read(tensor.offset(at.iter().map(|id| of(id).int()))),
                Captured::Number(_) => Value::Int(0),
            },
            Node::Unary(op, a) => match of(a) {
                Value::Float(a) => Value::Float(rounding.of(unary(*op, a))),
                Value::Int(a) => Value::Int(unary_int(*op, a)),
                Value::Bool(a) => Value::Bool(!a),
            },
            Node::Binary(op, a, b) => match (of(a), of(b)) {
                (Value::Float(a), Value::Float(b)) if op.compares() => Value::Bool(compare(*op, a, b)),
                (Value::Int(a), Value::Int(b)) if op.compares() => Value::Bool(compare(*op, a, b)),
                (Value::Float(a), Value::Float(b)) => Value::Float(rounding.of(binary(*op, a, b))),
                (Value::Int(a), Value::Int(b)) => Value::Int(binary_int(*op, a, b)),
                (a, b) => Value::Bool(match op {
                    Binary::And => a.bool() && b.bool(),
                    _ => a.bool() || b.bool(),
                }),
            },
            Node::Select(condition, yes, no) => {
                if of(condition).bool() {
                    of(yes)
                } else {
                    of(no)
                }
            }
            Node::Clamp(x, low, high) => match (of(x), of(low), of(high)) {
                (Value::Float(x), Value::Float(low), Value::Float(high)) => {
                    Value::Float(binary(Binary::Min, binary(Binary::Max, x, low), high))
                }
                (x, low, high) => Value::Int(x.int().max(low.int()).min(high.int())),
            },
            Node::Cast(Type::Bool, a) => Value::Bool(of(a).bool()),
            Node::Cast(Type::Int, a) => Value::Int(of(a).int()),
            Node::Cast(Type::Float, a) => Value::Float(rounding.of(of(a).float())),
        };
        values.push(value);
    }
    values
}

/// Result of an operation on a float.
pub(super) fn unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sign => f64::from(i8::from(x > 0.0) - i8::from(x < 0.0)),
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Round => x.round_ties_even(),
        Unary::Exp => x.exp(),
        Unary::Exp2 => x.exp2(),
        Unary::Log => x.ln(),
        Unary::Log2 => x.log2(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Tanh => x.tanh(),
        Unary::Erf => libm::erf(x),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Not | Unary::BitNot => f64::NAN,
    }
}

/// Result of an operation on an integer.
#[inline]
pub(super) fn unary_int(op: Unary, x: i64) -> i64 {
    match op {
        Unary::Neg => x.wrapping_neg(),
        Unary::Abs => x.wrapping_abs(),
        Unary::Sign => x.signum(),
        Unary::BitNot => !x,
        _ => x,
    }
}

/// Result of an operation on two floats.
pub(super) fn binary(op: Binary, a: f64, b: f64) -> f64 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Mod => {
            let rest = a % b;
            if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
        }
        Binary::Min => {
            if a < b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Binary::Max => {
            if a > b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Binary::Pow => a.powf(b),
        Binary::MulZero => {
            if a == 0.0 {
                0.0
            } else {
                a * b
            }
        }
        _ => f64::NAN,
    }
}

/// Result of an operation on two integers.
#[inline]
pub(super) fn binary_int(op: Binary, a: i64, b: i64) -> i64 {
    match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::FloorDiv => floor_div(a, b),
        Binary::Mod => floor_mod(a, b),
        Binary::Min => a.min(b),
        Binary::Max => a.max(b),
        Binary::BitAnd => a & b,
        Binary::BitOr => a | b,
        Binary::BitXor => a ^ b,
        Binary::Shl if (0..64).contains(&b) => a << b,
        Binary::Shr => a >> if (0..64).contains(&b) { b } else { 63 },
        _ => 0,
    }
}

/// The quotient `a // b`, rounded down; 0 if b is 0.
#[inline]
pub(super) fn floor_div(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let rest = a.wrapping_rem(b);
    a.wrapping_div(b) - i64::from(rest != 0 && (rest < 0) != (b < 0))
}

/// The remainder `a % b`, with b's sign; 0 if b is 0.
#[inline]
pub(super) fn floor_mod(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let rest = a.wrapping_rem(b);
    if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
}

/// Result of a comparison.
#[inline]
pub(super) fn compare<T: Copy + PartialOrd>(op: Binary, a: T, b: T) -> bool {
    match op {
        Binary::Lt => a < b,
        Binary::Le => a <= b,
        Binary::Gt => a > b,
        Binary::Ge => a >= b,
        Binary::Eq => a == b,
        _ => a != b,
    }
}
