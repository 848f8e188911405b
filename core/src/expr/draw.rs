//! Random functions for tests; a seed determines the function.

use super::graph::{Binary, CaptureKind, Graph, Id, Stored, Type, Unary, Variable};
use super::{ExprError, Function};

/// Numbers that look random: splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// 2014).
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// The generator for a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A random number below `count`, which is not 0.
    pub fn below(&mut self, count: usize) -> usize {
        (self.bits() % count as u64) as usize
    }

    /// A random number in -1..1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// A random element of `all`.
    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Kinds of operations that are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All operations, with any values.
    Any,
    /// Operations without jumps or steep growth in the score, for comparisons after a softmax.
    Tame,
    /// Operations of [`Kind::Tame`], without captured tensors and numbers.
    Bare,
}

/// A captured tensor of every drawn function: names, types, and by which position of the pair tame functions index
/// their axes.
pub const CAPTURED: [(&str, Stored, usize); 5] = [
    ("slopes", Stored::F32, 1),
    ("table", Stored::Bf16, 2),
    ("gain", Stored::F32, 0),
    ("ids", Stored::I32, 1),
    ("gate", Stored::Bool, 1),
];

/// The captured numbers of drawn functions.
pub const NUMBERS: [(&str, Type); 2] = [("rate", Type::Float), ("shift", Type::Int)];

/// The random score of a seed.
///
/// # Errors
/// None occurs for a random function.
pub fn score(seed: u64, kind: Kind) -> Result<Function, ExprError> {
    let mut drawing = Drawing { graph: Graph::default(), draw: Draw::new(seed), kind, is_mask: false };
    let root = match kind {
        Kind::Any => drawing.float(5)?,
        Kind::Tame | Kind::Bare => {
            // The score stays in a range that a softmax can use.
            let s = drawing.graph.variable(Variable::Score);
            let factor = drawing.bounded(3)?;
            let (one, term) = (drawing.graph.float(1.0), drawing.bounded(4)?);
            let factor = drawing.graph.binary(Binary::Add, factor, one)?;
            let product = drawing.graph.binary(Binary::Mul, s, factor)?;
            drawing.graph.binary(Binary::Add, product, term)?
        }
    };
    Function::of(&drawing.graph, root)
}

/// The random mask of a seed.
///
/// # Errors
/// None occurs for a random function.
pub fn mask(seed: u64, kind: Kind) -> Result<Function, ExprError> {
    let mut drawing = Drawing { graph: Graph::default(), draw: Draw::new(seed), kind, is_mask: true };
    let root = drawing.bool(3, false)?;
    Function::of(&drawing.graph, root)
}

struct Drawing {
    graph: Graph,
    draw: Draw,
    kind: Kind,
    is_mask: bool,
}

type Drawn = Result<Id, ExprError>;

impl Drawing {
    fn load(&mut self, number: usize, depth: usize) -> Drawn {
        let (name, stored, rank) = CAPTURED[number];
        if self.kind == Kind::Bare {
            return self.instead(stored.value_type());
        }
        let capture = self.graph.capture(name, CaptureKind::Tensor { stored, rank })?;
        let mut at = vec![];
        for _ in 0..rank {
            at.push(self.int(depth)?);
        }
        self.graph.load(capture, &at)
    }

    /// A drawn value in place of a captured one.
    fn instead(&mut self, of: Type) -> Drawn {
        let key = self.graph.variable(Variable::Key);
        match of {
            Type::Float => {
                let value = self.draw.unit() as f32;
                Ok(self.graph.float(value))
            }
            Type::Int => Ok(key),
            Type::Bool => {
                let last = self.draw.below(60) as i64;
                let last = self.graph.int(last);
                self.graph.binary(Binary::Lt, key, last)
            }
        }
    }

    fn number(&mut self, number: usize) -> Drawn {
        let (name, kind) = NUMBERS[number];
        if self.kind == Kind::Bare {
            return self.instead(kind);
        }
        let capture = self.graph.capture(name, CaptureKind::Number(kind))?;
        Ok(self.graph.number(capture))
    }

    fn constant(&mut self) -> Id {
        let value = match self.draw.below(4) {
            0 => self.draw.of(&[0.0, 1.0, -1.0, 0.5, 2.0]),
            _ => (self.draw.unit() * 3.0) as f32,
        };
        self.graph.float(value)
    }

    fn float(&mut self, depth: usize) -> Drawn {
        if depth == 0 {
            return match self.draw.below(8) {
                0..=2 if !self.is_mask => Ok(self.graph.variable(Variable::Score)),
                0..=3 => Ok(self.constant()),
                4 => self.number(0),
                5 => self.load(0, 0),
                6 => self.load(2, 0),
                _ => {
                    let int = self.int(0)?;
                    Ok(self.graph.promote(int, Type::Float))
                }
            };
        }
        let less = depth - 1;
        match self.draw.below(12) {
            0..=3 => {
                let op = self.draw.of(&[
                    Binary::Add,
                    Binary::Add,
                    Binary::Sub,
                    Binary::Mul,
                    Binary::Mul,
                    Binary::Div,
                    Binary::Mod,
                    Binary::Min,
                    Binary::Max,
                    Binary::Pow,
                    Binary::MulZero,
                ]);
                let (a, b) = (self.float(less)?, self.float(less)?);
                let (a, b) = (self.graph.promote(a, Type::Float), self.graph.promote(b, Type::Float));
                self.graph.binary(op, a, b)
            }
            4..=7 => {
                // The last two operations do not apply to floats.
                let op = self.draw.of(&Unary::ALL[..18]);
                let a = self.float(less)?;
                self.graph.unary(op, a)
            }
            8 => {
                let (c, a, b) = (self.bool(less, true)?, self.float(less)?, self.float(less)?);
                self.graph.select(c, a, b)
            }
            9 => {
                let (x, low, high) = (self.float(less)?, self.float(0)?, self.float(0)?);
                self.graph.clamp(x, low, high)
            }
            10 => {
                let number = self.draw.below(3);
                self.load(number, less.min(2))
            }
            _ => self.float(0),
        }
    }

    /// A random float between about -1 and 1 that changes smoothly with the score.
    fn bounded(&mut self, depth: usize) -> Drawn {
        if depth == 0 {
            return match self.draw.below(5) {
                0 => {
                    let value = self.draw.unit() as f32;
                    Ok(self.graph.float(value))
                }
                1 => self.number(0),
                2 => self.load(0, 1),
                3 => self.load(1, 1),
                _ => self.load(2, 0),
            };
        }
        let less = depth - 1;
        match self.draw.below(8) {
            0 | 1 => {
                let (a, b) = (self.bounded(less)?, self.bounded(less)?);
                let op = self.draw.of(&[Binary::Add, Binary::Sub]);
                let sum = self.graph.binary(op, a, b)?;
                let half = self.graph.float(0.5);
                self.graph.binary(Binary::Mul, sum, half)
            }
            2 => {
                let (a, b) = (self.bounded(less)?, self.bounded(less)?);
                let op = self.draw.of(&[Binary::Mul, Binary::Min, Binary::Max]);
                self.graph.binary(op, a, b)
            }
            3 => {
                let x = self.bounded(less)?;
                let op = self.draw.of(&[
                    Unary::Sin,
                    Unary::Tanh,
                    Unary::Erf,
                    Unary::Abs,
                    Unary::Relu,
                    Unary::Sigmoid,
                    Unary::Neg,
                    Unary::Cos,
                ]);
                self.graph.unary(op, x)
            }
            4 => {
                let s = self.graph.variable(Variable::Score);
                let x = self.bounded(less)?;
                let product = self.graph.binary(Binary::Mul, s, x)?;
                let op = self.draw.of(&[Unary::Tanh, Unary::Sin, Unary::Sigmoid]);
                self.graph.unary(op, product)
            }
            5 => {
                let (c, a, b) = (self.bool(less.min(2), false)?, self.bounded(less)?, self.bounded(less)?);
                self.graph.select(c, a, b)
            }
            6 => {
                let (x, y) = (self.graph.variable(Variable::Query), self.graph.variable(Variable::Key));
                let far = self.graph.binary(Binary::Sub, y, x)?;
                let rate = self.graph.float(1.0 / 64.0);
                let far = self.graph.binary(Binary::Mul, far, rate)?;
                self.graph.unary(Unary::Cos, far)
            }
            _ => self.bounded(0),
        }
    }

    fn int(&mut self, depth: usize) -> Drawn {
        const PLACES: [Variable; 6] = [
            Variable::Query,
            Variable::Key,
            Variable::Head,
            Variable::Batch,
            Variable::SeqlenQ,
            Variable::SeqlenK,
        ];
        if depth == 0 {
            return match self.draw.below(8) {
                0 => {
                    let value = self.draw.below(9) as i64 - 3;
                    Ok(self.graph.int(value))
                }
                1 => self.number(1),
                2 => {
                    let at = self.draw.of(&[Variable::Query, Variable::Key]);
                    let at = self.graph.variable(at);
                    let (name, stored, rank) = CAPTURED[3];
                    if self.kind == Kind::Bare {
                        return Ok(at);
                    }
                    let capture = self.graph.capture(name, CaptureKind::Tensor { stored, rank })?;
                    self.graph.load(capture, &[at])
                }
                _ => {
                    let place = self.draw.of(&PLACES);
                    Ok(self.graph.variable(place))
                }
            };
        }
        let less = depth - 1;
        match self.draw.below(if self.kind == Kind::Any { 9 } else { 6 }) {
            0..=2 => {
                let op = self.draw.of(&[Binary::Add, Binary::Sub, Binary::Min, Binary::Max]);
                let (a, b) = (self.int(less)?, self.int(less)?);
                self.graph.binary(op, a, b)
            }
            3 => {
                let op = self.draw.of(&[Binary::FloorDiv, Binary::Mod]);
                let (a, b) = (self.int(less)?, self.draw.below(7) as i64 + 1);
                let b = self.graph.int(b);
                self.graph.binary(op, a, b)
            }
            4 => {
                let op = self.draw.of(&[Unary::Neg, Unary::Abs, Unary::Sign, Unary::BitNot]);
                let a = self.int(less)?;
                self.graph.unary(op, a)
            }
            5 => self.int(0),
            6 => {
                let op = self.draw.of(&[
                    Binary::Mul,
                    Binary::FloorDiv,
                    Binary::Mod,
                    Binary::BitAnd,
                    Binary::BitOr,
                    Binary::BitXor,
                    Binary::Shl,
                    Binary::Shr,
                ]);
                let (a, b) = (self.int(less)?, self.int(less)?);
                self.graph.binary(op, a, b)
            }
            7 => {
                let x = self.float(less)?;
                let x = self.graph.promote(x, Type::Float);
                Ok(self.graph.cast(Type::Int, x))
            }
            _ => {
                let (x, low, high) = (self.int(less)?, self.int(0)?, self.int(0)?);
                self.graph.clamp(x, low, high)
            }
        }
    }

    /// A random bool. `with_floats`: it may compare floats, which may depend on the score.
    fn bool(&mut self, depth: usize, with_floats: bool) -> Drawn {
        const COMPARISONS: [Binary; 6] =
            [Binary::Lt, Binary::Le, Binary::Gt, Binary::Ge, Binary::Eq, Binary::Ne];
        let less = depth.saturating_sub(1);
        match self.draw.below(if depth == 0 { 4 } else { 8 }) {
            0..=2 => {
                let op = self.draw.of(&COMPARISONS[..if self.kind == Kind::Any { 6 } else { 4 }]);
                let (a, b) = (self.int(less)?, self.int(less)?);
                self.graph.binary(op, a, b)
            }
            3 if with_floats && self.kind == Kind::Any => {
                let op = self.draw.of(&COMPARISONS);
                let (a, b) = (self.float(less)?, self.float(less)?);
                let (a, b) = (self.graph.promote(a, Type::Float), self.graph.promote(b, Type::Float));
                self.graph.binary(op, a, b)
            }
            3 => self.load(4, less),
            4 | 5 => {
                let op = self.draw.of(&[Binary::And, Binary::Or]);
                let (a, b) = (self.bool(less, with_floats)?, self.bool(less, with_floats)?);
                self.graph.binary(op, a, b)
            }
            6 => {
                let a = self.bool(less, with_floats)?;
                self.graph.unary(Unary::Not, a)
            }
            _ => {
                let (c, a, b) = (
                    self.bool(less, with_floats)?,
                    self.bool(less, with_floats)?,
                    self.bool(less, with_floats)?,
                );
                self.graph.select(c, a, b)
            }
        }
    }
}
