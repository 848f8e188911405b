//! Ranges of a function's values over a tile of pairs, by interval arithmetic (Moore, Kearfott and Cloud,
//! "Introduction to Interval Analysis", 2009, chapter 2). They show which tiles of a mask are whole and which
//! are empty.
//!
//! Intervals hold what f32 and f64 evaluations give: an end of a float moves outward by more than f32 rounds. They
//! never leave a value out, but may include values that no pair has.

use std::ops::Range;

use super::Function;
use super::eval::{Captured, HostTensor, Number, Value, floor_div, floor_mod};
use super::graph::{Binary, Graph, Node, Type, Unary, Variable};

/// An interval of the values that a node may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Interval {
    /// The possible values of a bool.
    Bool {
        /// Whether the value may be false.
        no: bool,
        /// Whether the value may be true.
        yes: bool,
    },
    /// Integer range, both ends included.
    Int {
        /// The smallest value.
        lo: i64,
        /// The largest value.
        hi: i64,
    },
    /// Float range, both ends included, infinities too.
    Float {
        /// The smallest value.
        lo: f64,
        /// The largest value.
        hi: f64,
        /// Whether the value may be NaN.
        nan: bool,
    },
}

impl Interval {
    /// The interval of all values of a type.
    #[must_use]
    pub fn all(of: Type) -> Self {
        match of {
            Type::Bool => Interval::Bool { no: true, yes: true },
            Type::Int => Interval::Int { lo: i64::MIN, hi: i64::MAX },
            Type::Float => Interval::Float { lo: f64::NEG_INFINITY, hi: f64::INFINITY, nan: true },
        }
    }

    /// The interval that holds only this value.
    #[must_use]
    pub fn of(value: Value) -> Self {
        match value {
            Value::Bool(value) => Interval::Bool { no: !value, yes: value },
            Value::Int(value) => Interval::Int { lo: value, hi: value },
            Value::Float(value) if value.is_nan() => {
                // NaN lies in no interval, and an empty one is never made: the result is all numbers.
                Interval::all(Type::Float)
            }
            Value::Float(value) => Interval::Float { lo: value, hi: value, nan: false },
        }
    }

    /// Whether the interval contains a value.
    #[must_use]
    pub fn contains(&self, value: Value) -> bool {
        match (*self, value) {
            (Interval::Bool { no, yes }, Value::Bool(value)) => {
                if value {
                    yes
                } else {
                    no
                }
            }
            (Interval::Int { lo, hi }, Value::Int(value)) => (lo..=hi).contains(&value),
            (Interval::Float { lo, hi, nan }, Value::Float(value)) => {
                if value.is_nan() {
                    nan
                } else {
                    (lo..=hi).contains(&value)
                }
            }
            _ => false,
        }
    }

    /// The smallest interval that holds the values of both.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        match (self, other) {
            (Interval::Bool { no, yes }, Interval::Bool { no: no2, yes: yes2 }) => {
                Interval::Bool { no: no || no2, yes: yes || yes2 }
            }
            (Interval::Int { lo, hi }, Interval::Int { lo: lo2, hi: hi2 }) => {
                Interval::Int { lo: lo.min(lo2), hi: hi.max(hi2) }
            }
            (Interval::Float { lo, hi, nan }, Interval::Float { lo: lo2, hi: hi2, nan: nan2 }) => {
                Interval::Float { lo: lo.min(lo2), hi: hi.max(hi2), nan: nan || nan2 }
            }
            _ => Interval::all(Type::Float),
        }
    }
}

/// A tile of (query, key) pairs: of one sequence and head, or of ranges of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Indices of the tile's sequences.
    pub b: Range<u32>,
    /// Indices of the tile's query heads.
    pub h: Range<u32>,
    /// Positions of the tile's queries, at least one.
    pub q: Range<u32>,
    /// Positions of the tile's keys, at least one.
    pub k: Range<u32>,
    /// Queries of the sequences: from the least to the most.
    pub seqlen_q: (u32, u32),
    /// Keys of the sequences: from the least to the most.
    pub seqlen_k: (u32, u32),
}

/// Part of a tile that a mask shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// No pair is visible: the tile costs nothing.
    Nothing,
    /// Every pair is visible: the tile needs no mask.
    Everything,
    /// The mask shows some pairs of the tile and hides others, or this is not known.
    Part,
}

/// Ranges of the values that a function captures, where they are known. By default only their types are.
pub trait Ranges {
    /// Interval of a captured number; `None` if it is unknown.
    fn number(&self, _capture: usize) -> Option<Interval> {
        None
    }

    /// Values of a captured tensor's elements whose indices lie in these ranges, before they are resolved.
    fn load(&self, _capture: usize, _at: &[(i64, i64)]) -> Option<Interval> {
        None
    }
}

impl Ranges for () {}

/// Most elements that [`Captured`] values are searched for one bound.
const MOST_READ: u64 = 1024;

impl Ranges for [Captured<'_>] {
    fn number(&self, capture: usize) -> Option<Interval> {
        match self.get(capture)? {
            Captured::Number(Number::Int(value)) => Some(Interval::of(Value::Int(*value))),
            Captured::Number(Number::Float(value)) => Some(Interval::of(Value::Float((*value).into()))),
            Captured::Tensor(_) => None,
        }
    }

    fn load(&self, capture: usize, at: &[(i64, i64)]) -> Option<Interval> {
        let Captured::Tensor(tensor) = self.get(capture)? else { return None };
        // Ranges of the indices of each axis after they are resolved: an index range must not contain both signs.
        let mut ranges = [(0u64, 0u64); super::MAX_RANK];
        let mut count = 1u64;
        for (range, (&(lo, hi), &extent)) in ranges.iter_mut().zip(at.iter().zip(tensor.shape)) {
            *range = if lo < 0 && hi >= 0 {
                (0, u64::from(extent) - 1)
            } else {
                (HostTensor::resolved(lo, extent), HostTensor::resolved(hi, extent))
            };
            count = count.saturating_mul(range.1 - range.0 + 1);
        }
        if count > MOST_READ {
            return None;
        }
        let ranges = &ranges[..at.len()];
        let mut index: Vec<i64> = ranges.iter().map(|range| range.0 as i64).collect();
        let mut all: Option<Interval> = None;
        for _ in 0..count {
            let value = Interval::of(tensor.read(tensor.offset(index.iter().copied())));
            all = Some(all.map_or(value, |all| all.join(value)));
            for (index, range) in index.iter_mut().zip(ranges) {
                if (*index).unsigned_abs() < range.1 {
                    *index += 1;
                    break;
                }
                *index = range.0 as i64;
            }
        }
        all
    }
}

/// Intervals of the values that every node has over a tile.
#[derive(Clone, Debug)]
pub struct Bounds(Vec<Interval>);

impl Bounds {
    /// Bounds the value of each node of a graph over all pairs of a tile.
    #[must_use]
    pub fn new(graph: &Graph, tile: &Tile, ranges: &(impl Ranges + ?Sized)) -> Self {
        let mut all: Vec<Interval> = Vec::with_capacity(graph.nodes().len());
        for (at, node) in graph.nodes().iter().enumerate() {
            let kind = graph.type_of(super::Id(at as u32));
            let of = |id: &super::Id| all[id.index()];
            let value = match node {
                Node::Variable(variable) => of_variable(*variable, tile),
                Node::Bool(value) => Interval::of(Value::Bool(*value)),
                Node::Int(value) => Interval::of(Value::Int(*value)),
                Node::Float(bits) => Interval::of(Value::Float(f32::from_bits(*bits).into())),
                Node::Number(capture) => {
                    ranges.number(*capture as usize).unwrap_or_else(|| Interval::all(kind))
                }
                Node::Load(capture, at) => {
                    let at: Vec<(i64, i64)> = at.iter().map(|id| ints(of(id))).collect();
                    ranges
                        .load(*capture as usize, &at)
                        .unwrap_or_else(|| of_stored(graph, *capture as usize, kind))
                }
                Node::Unary(op, a) => unary(*op, of(a)),
                Node::Binary(op, a, b) => binary(*op, of(a), of(b)),
                Node::Select(condition, yes, no) => match of(condition) {
                    Interval::Bool { no: false, .. } => of(yes),
                    Interval::Bool { yes: false, .. } => of(no),
                    _ => of(yes).join(of(no)),
                },
                Node::Clamp(x, low, high) => {
                    binary(Binary::Min, binary(Binary::Max, of(x), of(low)), of(high))
                }
                Node::Cast(to, a) => cast(*to, of(a)),
            };
            all.push(value);
        }
        Self(all)
    }

    /// The interval of a node's values.
    #[must_use]
    pub fn of(&self, id: super::Id) -> Interval {
        self.0[id.index()]
    }

    /// Whether every integer fits 32 bits.
    #[must_use]
    pub fn fits_i32(&self) -> bool {
        let fits = |value: i64| i32::try_from(value).is_ok();
        self.0.iter().all(|interval| match interval {
            Interval::Int { lo, hi } => fits(*lo) && fits(*hi),
            _ => true,
        })
    }
}

impl Function {
    /// The values of the function over a tile.
    #[must_use]
    pub fn bounds(&self, tile: &Tile, ranges: &(impl Ranges + ?Sized)) -> Interval {
        Bounds::new(self.graph(), tile, ranges).of(self.root())
    }

    /// Part of a tile that the mask shows; [`Seen::Part`] for a score.
    #[must_use]
    pub fn seen(&self, tile: &Tile, ranges: &(impl Ranges + ?Sized)) -> Seen {
        match self.bounds(tile, ranges) {
            Interval::Bool { no: true, yes: false } => Seen::Nothing,
            Interval::Bool { no: false, yes: true } => Seen::Everything,
            _ => Seen::Part,
        }
    }
}

fn of_variable(variable: Variable, tile: &Tile) -> Interval {
    let range = |range: &Range<u32>| (range.start, range.end.max(1) - 1);
    let (lo, hi) = match variable {
        // A score may have any value, even NaN, since Q may be NaN.
        Variable::Score => return Interval::all(Type::Float),
        Variable::Batch => range(&tile.b),
        Variable::Head => range(&tile.h),
        Variable::Query => range(&tile.q),
        Variable::Key => range(&tile.k),
        Variable::SeqlenQ => tile.seqlen_q,
        Variable::SeqlenK => tile.seqlen_k,
    };
    Interval::Int { lo: lo.into(), hi: hi.into() }
}

fn of_stored(graph: &Graph, capture: usize, kind: Type) -> Interval {
    match graph.captures()[capture].kind {
        super::CaptureKind::Tensor { stored: super::Stored::I32, .. } => {
            Interval::Int { lo: i32::MIN.into(), hi: i32::MAX.into() }
        }
        _ => Interval::all(kind),
    }
}

fn ints(interval: Interval) -> (i64, i64) {
    match interval {
        Interval::Int { lo, hi } => (lo, hi),
        _ => (i64::MIN, i64::MAX),
    }
}

fn int(corners: &[i128]) -> Interval {
    let lo = corners.iter().copied().min().unwrap_or(i128::MIN);
    let hi = corners.iter().copied().max().unwrap_or(i128::MAX);
    match (i64::try_from(lo), i64::try_from(hi)) {
        (Ok(lo), Ok(hi)) => Interval::Int { lo, hi },
        // A corner outside i64 wraps, so any number is possible.
        _ => Interval::all(Type::Int),
    }
}

/// Moves an interval's ends outward, by more than some roundings to f32 change, so that subnormal numbers that become 0
/// and numbers that overflow f32 are included.
fn outward(lo: f64, hi: f64, nan: bool) -> Interval {
    const ROUNDING: f64 = 1.0 / (1u32 << 18) as f64;
    const TINY: f64 = 1e-36;
    const LARGE: f64 = 3.4e38;
    if lo.is_nan() || hi.is_nan() {
        return Interval::all(Type::Float);
    }
    let (mut lo, mut hi) = (lo - lo.abs() * ROUNDING - TINY, hi + hi.abs() * ROUNDING + TINY);
    if lo.is_nan() {
        lo = f64::NEG_INFINITY;
    }
    if hi.is_nan() {
        hi = f64::INFINITY;
    }
    // A bound above f32's largest number is an infinity in f32.
    if hi > LARGE {
        hi = f64::INFINITY;
        lo = lo.min(LARGE);
    }
    if lo < -LARGE {
        lo = f64::NEG_INFINITY;
        hi = hi.max(-LARGE);
    }
    Interval::Float { lo, hi, nan }
}

fn unary(op: Unary, a: Interval) -> Interval {
    match a {
        Interval::Bool { no, yes } => Interval::Bool { no: yes, yes: no },
        Interval::Int { lo, hi } => {
            let (lo, hi) = (i128::from(lo), i128::from(hi));
            match op {
                Unary::Neg => int(&[-lo, -hi]),
                Unary::Abs if lo >= 0 => int(&[lo, hi]),
                Unary::Abs if hi <= 0 => int(&[-lo, -hi]),
                Unary::Abs => int(&[0, -lo, hi]),
                Unary::Sign => int(&[lo.signum(), hi.signum()]),
                Unary::BitNot => int(&[-lo - 1, -hi - 1]),
                _ => Interval::all(Type::Int),
            }
        }
        Interval::Float { lo, hi, nan } => {
            let monotone = |f: fn(f64) -> f64| outward(f(lo), f(hi), nan);
            match op {
                Unary::Neg => Interval::Float { lo: -hi, hi: -lo, nan },
                Unary::Abs if lo >= 0.0 => a,
                Unary::Abs if hi <= 0.0 => Interval::Float { lo: -hi, hi: -lo, nan },
                Unary::Abs => Interval::Float { lo: 0.0, hi: hi.max(-lo), nan },
                Unary::Sign => {
                    let sign = |x: f64| if x == 0.0 { 0.0 } else { x.signum() };
                    let (lo, hi) = (sign(lo), sign(hi));
                    if nan {
                        Interval::Float { lo: lo.min(0.0), hi: hi.max(0.0), nan: false }
                    } else {
                        Interval::Float { lo, hi, nan }
                    }
                }
                Unary::Floor => Interval::Float { lo: lo.floor(), hi: hi.floor(), nan },
                Unary::Ceil => Interval::Float { lo: lo.ceil(), hi: hi.ceil(), nan },
                Unary::Round => Interval::Float { lo: lo.round_ties_even(), hi: hi.round_ties_even(), nan },
                Unary::Relu => Interval::Float { lo: lo.max(0.0), hi: hi.max(0.0), nan },
                Unary::Exp => monotone(f64::exp),
                Unary::Exp2 => monotone(f64::exp2),
                Unary::Tanh => monotone(f64::tanh),
                Unary::Erf => monotone(libm::erf),
                Unary::Sigmoid => monotone(|x| 1.0 / (1.0 + (-x).exp())),
                Unary::Sqrt | Unary::Rsqrt | Unary::Log | Unary::Log2 => {
                    // A number slightly above 0 may be 0 in f32, so the interval also includes the value at 0.
                    let may_nan = nan || lo < 0.0;
                    let (lo, hi) = (if lo <= 1e-36 { 0.0 } else { lo }, hi.max(0.0));
                    match op {
                        Unary::Sqrt => outward(lo.sqrt(), hi.sqrt(), may_nan),
                        Unary::Log => outward(lo.ln(), hi.ln(), may_nan),
                        Unary::Log2 => outward(lo.log2(), hi.log2(), may_nan),
                        // The logarithm of -0 is -infinity.
                        _ if lo == 0.0 => outward(f64::NEG_INFINITY, f64::INFINITY, may_nan),
                        _ => outward(1.0 / hi.sqrt(), 1.0 / lo.sqrt(), may_nan),
                    }
                }
                Unary::Sin | Unary::Cos => {
                    outward(-1.0, 1.0, nan || lo == f64::NEG_INFINITY || hi == f64::INFINITY)
                }
                Unary::Not | Unary::BitNot => Interval::all(Type::Float),
            }
        }
    }
}

fn binary(op: Binary, a: Interval, b: Interval) -> Interval {
    match (a, b) {
        (Interval::Bool { no, yes }, Interval::Bool { no: no2, yes: yes2 }) => match op {
            Binary::And => Interval::Bool { no: no || no2, yes: yes && yes2 },
            _ => Interval::Bool { no: no && no2, yes: yes || yes2 },
        },
        (Interval::Int { lo, hi }, Interval::Int { lo: lo2, hi: hi2 }) => {
            if op.compares() {
                compare(op, (lo, hi), (lo2, hi2), false)
            } else {
                binary_int(op, (lo, hi), (lo2, hi2))
            }
        }
        (Interval::Float { lo, hi, nan }, Interval::Float { lo: lo2, hi: hi2, nan: nan2 }) => {
            if op.compares() {
                compare(op, (lo, hi), (lo2, hi2), nan || nan2)
            } else {
                binary_float(op, (lo, hi), (lo2, hi2), nan || nan2)
            }
        }
        _ => Interval::all(Type::Bool),
    }
}

fn compare<T: Copy + PartialOrd>(op: Binary, a: (T, T), b: (T, T), nan: bool) -> Interval {
    let ordered = |yes: bool, no: bool| Interval::Bool { yes, no: no || nan };
    match op {
        Binary::Lt => ordered(a.0 < b.1, a.1 >= b.0),
        Binary::Le => ordered(a.0 <= b.1, a.1 > b.0),
        Binary::Gt => ordered(a.1 > b.0, a.0 <= b.1),
        Binary::Ge => ordered(a.1 >= b.0, a.0 < b.1),
        _ => {
            let meet = a.0 <= b.1 && b.0 <= a.1;
            let differ = !(a.0 == a.1 && b.0 == b.1 && a.0 == b.0) || nan;
            match op {
                Binary::Eq => Interval::Bool { yes: meet, no: differ },
                _ => Interval::Bool { yes: differ, no: meet },
            }
        }
    }
}

fn binary_int(op: Binary, a: (i64, i64), b: (i64, i64)) -> Interval {
    let wide = |(lo, hi): (i64, i64)| [i128::from(lo), i128::from(hi)];
    let ([a0, a1], [b0, b1]) = (wide(a), wide(b));
    let corners = |f: &dyn Fn(i128, i128) -> i128| int(&[f(a0, b0), f(a0, b1), f(a1, b0), f(a1, b1)]);
    match op {
        Binary::Add => int(&[a0 + b0, a1 + b1]),
        Binary::Sub => int(&[a0 - b1, a1 - b0]),
        Binary::Mul => corners(&|a, b| a * b),
        Binary::Min => int(&[a0.min(b0), a1.min(b1)]),
        Binary::Max => int(&[a0.max(b0), a1.max(b1)]),
        Binary::FloorDiv => {
            if a.0 == i64::MIN && b.0 <= -1 && b.1 >= -1 {
                return Interval::all(Type::Int);
            }
            // The quotient is monotone in each operand if the divisor has one sign.
            let mut found = vec![];
            if b.0 <= 0 && b.1 >= 0 {
                found.push(0);
            }
            for (lo, hi) in [(b.0, b.1.min(-1)), (b.0.max(1), b.1)] {
                if lo <= hi {
                    for a in [a.0, a.1] {
                        found.extend([lo, hi].map(|b| i128::from(floor_div(a, b))));
                    }
                }
            }
            int(&found)
        }
        Binary::Mod => {
            if b.0 == b.1 && b.0 != 0 && a.0 != i64::MIN && floor_div(a.0, b.0) == floor_div(a.1, b.0) {
                // The remainder grows within one period of the divisor.
                return int(&[floor_mod(a.0, b.0), floor_mod(a.1, b.0)].map(i128::from));
            }
            let hi = if b1 > 0 { b1 - 1 } else { 0 };
            let lo = if b0 < 0 { b0 + 1 } else { 0 };
            int(&[lo, hi])
        }
        Binary::BitAnd => match (a0 >= 0, b0 >= 0) {
            (true, true) => int(&[0, a1.min(b1)]),
            (true, false) => int(&[0, a1]),
            (false, true) => int(&[0, b1]),
            (false, false) => Interval::all(Type::Int),
        },
        Binary::BitOr | Binary::BitXor if a0 >= 0 && b0 >= 0 => {
            let top = (a1.max(b1) as u128 + 1).next_power_of_two() as i128 - 1;
            int(&[if op == Binary::BitOr { a0.max(b0) } else { 0 }, top])
        }
        Binary::Shl if b0 >= 0 && b1 < 64 => corners(&|a, b| a << b),
        Binary::Shr if b0 >= 0 && b1 < 64 => corners(&|a, b| a >> b),
        _ => Interval::all(Type::Int),
    }
}

fn binary_float(op: Binary, a: (f64, f64), b: (f64, f64), nan: bool) -> Interval {
    let is_bounded = |(lo, hi): (f64, f64)| lo > f64::NEG_INFINITY && hi < f64::INFINITY;
    let (bounded_a, bounded_b) = (is_bounded(a), is_bounded(b));
    let corners = |f: fn(f64, f64) -> f64, nan: bool| {
        let all = [f(a.0, b.0), f(a.0, b.1), f(a.1, b.0), f(a.1, b.1)];
        if all.iter().any(|x| x.is_nan()) {
            return Interval::all(Type::Float);
        }
        let lo = all.iter().fold(f64::INFINITY, |x, &y| x.min(y));
        let hi = all.iter().fold(f64::NEG_INFINITY, |x, &y| x.max(y));
        outward(lo, hi, nan)
    };
    match op {
        // The sum of two opposite infinities is NaN, so the interval holds everything.
        Binary::Add => outward(a.0 + b.0, a.1 + b.1, nan || !bounded_a && !bounded_b),
        Binary::Sub => outward(a.0 - b.1, a.1 - b.0, nan || !bounded_a && !bounded_b),
        Binary::Mul if bounded_a && bounded_b => corners(|a, b| a * b, nan),
        Binary::MulZero if bounded_a && bounded_b => match corners(|a, b| a * b, nan) {
            Interval::Float { lo, hi, nan } => Interval::Float { lo: lo.min(0.0), hi: hi.max(0.0), nan },
            other => other,
        },
        // The divisor must be farther from 0 than any number that may round to 0.
        Binary::Div if bounded_a && bounded_b && (b.0 > 1e-36 || b.1 < -1e-36) => corners(|a, b| a / b, nan),
        Binary::Mod if bounded_a && bounded_b && (b.0 > 1e-36 || b.1 < -1e-36) => {
            outward(b.0.min(0.0), b.1.max(0.0), nan)
        }
        Binary::Min | Binary::Max => {
            let of = |x: f64, y: f64| if op == Binary::Min { x.min(y) } else { x.max(y) };
            Interval::Float { lo: of(a.0, b.0), hi: of(a.1, b.1), nan }
        }
        // The power is monotone in each operand if the base is at least 1e-36; the exponent's sign decides the
        // direction.
        Binary::Pow if bounded_a && bounded_b && a.0 > 1e-36 => corners(f64::powf, nan),
        _ => Interval::all(Type::Float),
    }
}

fn cast(to: Type, a: Interval) -> Interval {
    match (to, a) {
        (Type::Float, Interval::Int { lo, hi }) => {
            let exact = |x: i64| x.unsigned_abs() <= 1 << 24;
            if exact(lo) && exact(hi) {
                Interval::Float { lo: lo as f64, hi: hi as f64, nan: false }
            } else {
                outward(lo as f64, hi as f64, false)
            }
        }
        (Type::Int, Interval::Float { lo, hi, nan }) => {
            let (mut lo, mut hi) = (lo as i64, hi as i64);
            if nan {
                (lo, hi) = (lo.min(0), hi.max(0));
            }
            Interval::Int { lo, hi }
        }
        (Type::Bool, Interval::Int { lo, hi }) => {
            Interval::Bool { no: lo <= 0 && hi >= 0, yes: lo != 0 || hi != 0 }
        }
        (Type::Bool, Interval::Float { lo, hi, nan }) => {
            Interval::Bool { no: lo <= 1e-36 && hi >= -1e-36, yes: lo != 0.0 || hi != 0.0 || nan }
        }
        (Type::Int, Interval::Bool { no, yes }) => Interval::Int { lo: i64::from(!no), hi: i64::from(yes) },
        (Type::Float, Interval::Bool { no, yes }) => {
            Interval::Float { lo: f64::from(u8::from(!no)), hi: f64::from(u8::from(yes)), nan: false }
        }
        (_, same) => same,
    }
}
