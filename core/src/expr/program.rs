//! Values over blocks of pairs at the speed of vectors: a register machine whose registers hold a block, so that one
//! decision of the machine serves [`Program::BLOCK`] pairs and each operation is a loop that compilers vectorise.
//!
//! Nodes that depend on neither row, key nor score are computed once a head.

use super::eval::{
    Captured, HostTensor, Number, Pair, Rounding, Value, binary, compare, eval, floor_div, floor_mod, unary,
};
use super::graph::{Binary, Graph, Id, Node, Stored, Type, Unary, Variable};

/// Number of pairs of a block.
const N: usize = 128;

/// Number of a register among those of its type.
type Register = u32;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Score,
    Query,
    Key,
    Load(u32),
    FloatUnary(Unary),
    IntUnary(Unary),
    Not,
    FloatBinary(Binary),
    IntBinary(Binary),
    BoolBinary(Binary),
    CompareFloat(Binary),
    CompareInt(Binary),
    Select(Type),
    ClampFloat,
    ClampInt,
    Cast(Type, Type),
}

#[derive(Clone, Debug)]
struct Step {
    operation: Operation,
    to: Register,
    from: [Register; 3],
    /// Registers of a load's indices.
    at: Box<[Register]>,
}

/// A graph compiled to steps that compute its roots.
#[derive(Clone, Debug)]
pub struct Program {
    graph: Graph,
    steps: Vec<Step>,
    /// Nodes with one value for each head, and the registers that hold these values.
    uniform: Vec<(Id, Register)>,
    roots: Vec<(Type, Register)>,
    registers: [usize; 3],
}

/// The pairs of a block: pair `e` is row `q + e % width` and key `k + e / width`.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The row of the first pair.
    pub q: u32,
    /// The key of the first pair.
    pub k: u32,
    /// Number of rows that are computed together.
    pub width: usize,
}

fn file(of: Type) -> usize {
    match of {
        Type::Bool => 0,
        Type::Int => 1,
        Type::Float => 2,
    }
}

impl Program {
    /// Number of pairs of a block.
    pub const BLOCK: usize = N;

    /// The program that computes `roots`.
    #[must_use]
    pub fn new(graph: &Graph, roots: &[Id]) -> Self {
        let nodes = graph.nodes();
        let mut varies = vec![false; nodes.len()];
        let mut last_use = vec![0usize; nodes.len()];
        for (at, node) in nodes.iter().enumerate() {
            let mut any = matches!(node, Node::Variable(Variable::Score | Variable::Query | Variable::Key));
            node.operands(|id| {
                any |= varies[id.index()];
                last_use[id.index()] = at;
            });
            varies[at] = any;
        }
        roots.iter().for_each(|root| last_use[root.index()] = usize::MAX);
        let mut registers = [0usize; 3];
        let mut free: [Vec<Register>; 3] = Default::default();
        let mut place: Vec<Register> = vec![Register::MAX; nodes.len()];
        let mut uniform = vec![];
        // Uniform values that steps or roots read keep a register for themselves.
        let mut is_read = vec![false; nodes.len()];
        for (at, node) in nodes.iter().enumerate().filter(|(at, _)| varies[*at]) {
            debug_assert!(varies[at]);
            node.operands(|id| is_read[id.index()] = true);
        }
        roots.iter().for_each(|root| is_read[root.index()] = true);
        for at in (0..nodes.len()).filter(|&at| !varies[at] && is_read[at]) {
            let id = Id(at as u32);
            let count = &mut registers[file(graph.type_of(id))];
            place[at] = *count as Register;
            *count += 1;
            uniform.push((id, place[at]));
        }
        let mut steps = vec![];
        for (at, node) in nodes.iter().enumerate().filter(|(at, _)| varies[*at]) {
            let id = Id(at as u32);
            let kind = file(graph.type_of(id));
            // The result never shares a register with an operand, since operands are freed after it.
            let to = free[kind].pop().unwrap_or_else(|| {
                registers[kind] += 1;
                registers[kind] as Register - 1
            });
            place[at] = to;
            let mut from = [0; 3];
            let mut indices = vec![];
            let mut number = 0;
            node.operands(|id| {
                if matches!(node, Node::Load(..)) {
                    indices.push(place[id.index()]);
                } else {
                    from[number] = place[id.index()];
                    number += 1;
                }
            });
            let type_at = |id: &Id| graph.type_of(*id);
            let operation = match node {
                Node::Variable(Variable::Score) => Operation::Score,
                Node::Variable(Variable::Query) => Operation::Query,
                Node::Load(capture, _) => Operation::Load(*capture),
                Node::Unary(op, a) => match type_at(a) {
                    Type::Float => Operation::FloatUnary(*op),
                    Type::Int => Operation::IntUnary(*op),
                    Type::Bool => Operation::Not,
                },
                Node::Binary(op, a, _) => match (type_at(a), op.compares()) {
                    (Type::Float, true) => Operation::CompareFloat(*op),
                    (Type::Int, true) => Operation::CompareInt(*op),
                    (Type::Float, false) => Operation::FloatBinary(*op),
                    (Type::Int, false) => Operation::IntBinary(*op),
                    (Type::Bool, _) => Operation::BoolBinary(*op),
                },
                Node::Select(_, yes, _) => Operation::Select(type_at(yes)),
                Node::Clamp(x, ..) => match type_at(x) {
                    Type::Float => Operation::ClampFloat,
                    _ => Operation::ClampInt,
                },
                Node::Cast(to, a) => Operation::Cast(type_at(a), *to),
                // The other leaves have the same value for all pairs.
                Node::Variable(_) | Node::Bool(_) | Node::Int(_) | Node::Float(_) | Node::Number(_) => {
                    Operation::Key
                }
            };
            steps.push(Step { operation, to, from, at: indices.into() });
            let mut dead = vec![];
            node.operands(|id| {
                if varies[id.index()] && last_use[id.index()] == at && !dead.contains(&id) {
                    dead.push(id);
                }
            });
            dead.into_iter().for_each(|id| free[file(graph.type_of(id))].push(place[id.index()]));
            if last_use[at] == 0 {
                free[kind].push(to);
            }
        }
        let roots = roots.iter().map(|root| (graph.type_of(*root), place[root.index()])).collect();
        Self { graph: graph.clone(), steps, uniform, roots, registers }
    }

    /// Whether the program reads the score.
    #[must_use]
    pub fn reads_score(&self) -> bool {
        self.steps.iter().any(|step| step.operation == Operation::Score)
    }
}

/// Functions of a program that a processor's vector instructions compute.
pub trait VectorMath {
    /// Replaces each number by e to its power.
    fn exp(&self, x: &mut [f32]);
    /// Replaces each number by its hyperbolic tangent.
    fn tanh(&self, x: &mut [f32]);
}

/// Uses the functions of the standard library.
#[derive(Clone, Copy, Debug)]
pub struct ScalarMath;

impl VectorMath for ScalarMath {
    fn exp(&self, x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = x.exp());
    }

    fn tanh(&self, x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = x.tanh());
    }
}

/// Integer type of a block: 64 bits, or 32 if bounds show that no value needs more.
trait IntLane: Copy + PartialOrd + Default + 'static {
    fn of(value: i64) -> Self;
    fn wide(self) -> i64;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn float(self) -> f32;
}

macro_rules! int_lane {
    ($($int:ty)*) => {$(
        impl IntLane for $int {
            #[inline(always)]
            fn of(value: i64) -> Self { value as $int }
            #[inline(always)]
            fn wide(self) -> i64 { self.into() }
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn sub(self, other: Self) -> Self { self.wrapping_sub(other) }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn float(self) -> f32 { self as f32 }
        }
    )*};
}
int_lane!(i32 i64);

/// All registers of one type.
#[derive(Clone, Debug)]
struct File<T>(Vec<Box<[T]>>);

impl<T: Copy + Default> File<T> {
    fn new(count: usize) -> Self {
        Self(vec![vec![T::default(); N].into(); count])
    }

    /// Takes the result's register out, so that the others can be read meanwhile.
    #[inline(always)]
    fn take(&mut self, at: Register) -> Box<[T]> {
        std::mem::take(&mut self.0[at as usize])
    }

    #[inline(always)]
    fn put(&mut self, at: Register, register: Box<[T]>) {
        self.0[at as usize] = register;
    }

    #[inline(always)]
    fn get(&self, at: Register) -> &[T] {
        &self.0[at as usize]
    }
}

/// The registers in which a thread runs a program; one value serves one program only.
#[derive(Clone, Debug)]
pub struct Lanes {
    bools: File<u32>,
    ints: Ints,
    floats: File<f32>,
}

#[derive(Clone, Debug)]
enum Ints {
    Narrow(File<i32>),
    Wide(File<i64>),
}

impl Lanes {
    /// Registers for a program. `narrow`: every integer of it fits 32 bits, whatever the pair
    /// ([`Bounds::fits_i32`](super::Bounds::fits_i32)).
    #[must_use]
    pub fn new(program: &Program, narrow: bool) -> Self {
        let [bools, ints, floats] = program.registers;
        Self {
            bools: File::new(bools),
            ints: if narrow { Ints::Narrow(File::new(ints)) } else { Ints::Wide(File::new(ints)) },
            floats: File::new(floats),
        }
    }

    /// Sets the values that all pairs of a sequence and head share, those of `pair`. It must be called before
    /// [`run`](Self::run).
    pub fn set_head(&mut self, program: &Program, captured: &[Captured<'_>], pair: &Pair) {
        let values = eval(&program.graph, pair, captured, Rounding::F32);
        for &(id, register) in &program.uniform {
            match values[id.index()] {
                Value::Bool(value) => self.bools.0[register as usize].fill(u32::from(value)),
                Value::Float(value) => self.floats.0[register as usize].fill(value as f32),
                Value::Int(value) => match &mut self.ints {
                    Ints::Narrow(ints) => ints.0[register as usize].fill(i32::of(value)),
                    Ints::Wide(ints) => ints.0[register as usize].fill(value),
                },
            }
        }
    }

    /// Computes every root of a block; `scores` are read where the program reads the score, at most
    /// [`Program::BLOCK`] of them.
    #[inline(always)]
    pub fn run(
        &mut self,
        program: &Program,
        captured: &[Captured<'_>],
        math: &impl VectorMath,
        block: Block,
        scores: &[f32],
    ) {
        let Self { bools, ints, floats } = self;
        match ints {
            Ints::Narrow(ints) => run(program, captured, bools, ints, floats, math, block, scores),
            Ints::Wide(ints) => run(program, captured, bools, ints, floats, math, block, scores),
        }
    }

    /// The values of a root that is a float.
    #[must_use]
    pub fn floats(&self, program: &Program, root: usize) -> &[f32] {
        self.floats.get(program.roots[root].1)
    }

    /// The values of a root that is a bool: 0 or 1.
    #[must_use]
    pub fn bools(&self, program: &Program, root: usize) -> &[u32] {
        self.bools.get(program.roots[root].1)
    }

    /// One value of a root that is an integer.
    #[must_use]
    pub fn int(&self, program: &Program, root: usize, lane: usize) -> i64 {
        let register = program.roots[root].1;
        match &self.ints {
            Ints::Narrow(ints) => ints.get(register)[lane].wide(),
            Ints::Wide(ints) => ints.get(register)[lane],
        }
    }
}

/// Computes `to[e] = f(a[e])` for all e.
#[inline(always)]
fn map<T, A: Copy>(to: &mut [T], a: &[A], f: impl Fn(A) -> T) {
    to.iter_mut().zip(a).for_each(|(to, &a)| *to = f(a));
}

/// Computes `to[e] = f(a[e], b[e])` for all e.
#[inline(always)]
fn zip<T, A: Copy, B: Copy>(to: &mut [T], a: &[A], b: &[B], f: impl Fn(A, B) -> T) {
    to.iter_mut().zip(a).zip(b).for_each(|((to, &a), &b)| *to = f(a, b));
}

/// Computes `to[e] = f(a[e], b[e], c[e])` for all e.
#[inline(always)]
fn zip3<T, A: Copy, B: Copy, C: Copy>(to: &mut [T], (a, b, c): (&[A], &[B], &[C]), f: impl Fn(A, B, C) -> T) {
    to.iter_mut().zip(a).zip(b).zip(c).for_each(|(((to, &a), &b), &c)| *to = f(a, b, c));
}

#[inline(always)]
fn min(a: f32, b: f32) -> f32 {
    if a < b || a.is_nan() { a } else { b }
}

#[inline(always)]
fn max(a: f32, b: f32) -> f32 {
    if a > b || a.is_nan() { a } else { b }
}

#[expect(clippy::too_many_arguments, reason = "the parts of `Lanes`, one of them generic")]
#[inline(always)]
fn run<I: IntLane>(
    program: &Program,
    captured: &[Captured<'_>],
    bools: &mut File<u32>,
    ints: &mut File<I>,
    floats: &mut File<f32>,
    math: &impl VectorMath,
    block: Block,
    scores: &[f32],
) {
    for step in &program.steps {
        let ([a, b, c], to) = (step.from, step.to);
        match step.operation {
            Operation::Score => {
                let count = scores.len().min(N);
                floats.0[to as usize][..count].copy_from_slice(&scores[..count]);
            }
            Operation::Query => {
                // Avoids a remainder per pair: the division would take longer than everything else.
                for rows in ints.0[to as usize].chunks_mut(block.width) {
                    for (lane, row) in rows.iter_mut().enumerate() {
                        *row = I::of(i64::from(block.q) + lane as i64);
                    }
                }
            }
            Operation::Key => {
                for (number, keys) in ints.0[to as usize].chunks_mut(block.width).enumerate() {
                    keys.fill(I::of(i64::from(block.k) + number as i64));
                }
            }
            Operation::Load(capture) => {
                let Captured::Tensor(tensor) = &captured[capture as usize] else { continue };
                load(tensor, &step.at, to, bools, ints, floats);
            }
            Operation::FloatUnary(op) => {
                let mut out = floats.take(to);
                float_unary(op, &mut out, floats.get(a), math);
                floats.put(to, out);
            }
            Operation::IntUnary(op) => {
                let mut out = ints.take(to);
                let a = ints.get(a);
                match op {
                    Unary::Neg => map(&mut out, a, |a| I::default().sub(a)),
                    Unary::Abs => {
                        map(&mut out, a, |a| if a < I::default() { I::default().sub(a) } else { a });
                    }
                    Unary::Sign => map(&mut out, a, |a| I::of(a.wide().signum())),
                    _ => map(&mut out, a, |a| I::of(!a.wide())),
                }
                ints.put(to, out);
            }
            Operation::Not => {
                let mut out = bools.take(to);
                map(&mut out, bools.get(a), |a| a ^ 1);
                bools.put(to, out);
            }
            Operation::FloatBinary(op) => {
                let mut out = floats.take(to);
                let (a, b) = (floats.get(a), floats.get(b));
                match op {
                    Binary::Add => zip(&mut out, a, b, |a, b| a + b),
                    Binary::Sub => zip(&mut out, a, b, |a, b| a - b),
                    Binary::Mul => zip(&mut out, a, b, |a, b| a * b),
                    Binary::Div => zip(&mut out, a, b, |a, b| a / b),
                    Binary::Min => zip(&mut out, a, b, min),
                    Binary::Max => zip(&mut out, a, b, max),
                    Binary::MulZero => zip(&mut out, a, b, |a, b| if a == 0.0 { 0.0 } else { a * b }),
                    Binary::Pow => zip(&mut out, a, b, f32::powf),
                    op => zip(&mut out, a, b, |a, b| binary(op, a.into(), b.into()) as f32),
                }
                floats.put(to, out);
            }
            Operation::IntBinary(op) => {
                let mut out = ints.take(to);
                let (a, b) = (ints.get(a), ints.get(b));
                match op {
                    Binary::Add => zip(&mut out, a, b, I::add),
                    Binary::Sub => zip(&mut out, a, b, I::sub),
                    Binary::Mul => zip(&mut out, a, b, I::mul),
                    Binary::Min => zip(&mut out, a, b, |a, b| if a < b { a } else { b }),
                    Binary::Max => zip(&mut out, a, b, |a, b| if a > b { a } else { b }),
                    Binary::FloorDiv => zip(&mut out, a, b, |a, b| I::of(floor_div(a.wide(), b.wide()))),
                    Binary::Mod => zip(&mut out, a, b, |a, b| I::of(floor_mod(a.wide(), b.wide()))),
                    op => zip(&mut out, a, b, |a, b| I::of(super::eval::binary_int(op, a.wide(), b.wide()))),
                }
                ints.put(to, out);
            }
            Operation::BoolBinary(op) => {
                let mut out = bools.take(to);
                let (a, b) = (bools.get(a), bools.get(b));
                match op {
                    Binary::And => zip(&mut out, a, b, |a, b| a & b),
                    _ => zip(&mut out, a, b, |a, b| a | b),
                }
                bools.put(to, out);
            }
            Operation::CompareFloat(op) => {
                let mut out = bools.take(to);
                comparison(op, &mut out, floats.get(a), floats.get(b));
                bools.put(to, out);
            }
            Operation::CompareInt(op) => {
                let mut out = bools.take(to);
                comparison(op, &mut out, ints.get(a), ints.get(b));
                bools.put(to, out);
            }
            Operation::Select(Type::Float) => {
                let mut out = floats.take(to);
                let operands = (bools.get(a), floats.get(b), floats.get(c));
                zip3(&mut out, operands, |chosen, yes, no| if chosen != 0 { yes } else { no });
                floats.put(to, out);
            }
            Operation::Select(Type::Int) => {
                let mut out = ints.take(to);
                let operands = (bools.get(a), ints.get(b), ints.get(c));
                zip3(&mut out, operands, |chosen, yes, no| if chosen != 0 { yes } else { no });
                ints.put(to, out);
            }
            Operation::Select(Type::Bool) => {
                let mut out = bools.take(to);
                let operands = (bools.get(a), bools.get(b), bools.get(c));
                zip3(&mut out, operands, |chosen, yes, no| if chosen != 0 { yes } else { no });
                bools.put(to, out);
            }
            Operation::ClampFloat => {
                let mut out = floats.take(to);
                let operands = (floats.get(a), floats.get(b), floats.get(c));
                zip3(&mut out, operands, |x, low, high| min(max(x, low), high));
                floats.put(to, out);
            }
            Operation::ClampInt => {
                let mut out = ints.take(to);
                let operands = (ints.get(a), ints.get(b), ints.get(c));
                zip3(&mut out, operands, |x, low, high| {
                    let x = if x > low { x } else { low };
                    if x < high { x } else { high }
                });
                ints.put(to, out);
            }
            Operation::Cast(Type::Int, Type::Float) => map(&mut floats.0[to as usize], ints.get(a), I::float),
            Operation::Cast(Type::Bool, Type::Float) => {
                map(&mut floats.0[to as usize], bools.get(a), |a| a as f32);
            }
            Operation::Cast(Type::Float, Type::Int) => {
                map(&mut ints.0[to as usize], floats.get(a), |a| I::of(a as i64));
            }
            Operation::Cast(Type::Bool, Type::Int) => {
                map(&mut ints.0[to as usize], bools.get(a), |a| I::of(a.into()));
            }
            Operation::Cast(Type::Float, _) => {
                map(&mut bools.0[to as usize], floats.get(a), |a| u32::from(a != 0.0));
            }
            Operation::Cast(_, _) => {
                map(&mut bools.0[to as usize], ints.get(a), |a| u32::from(a != I::default()));
            }
        }
    }
}

#[inline(always)]
fn comparison<T: Copy + PartialOrd>(op: Binary, out: &mut [u32], a: &[T], b: &[T]) {
    match op {
        Binary::Lt => zip(out, a, b, |a, b| u32::from(a < b)),
        Binary::Le => zip(out, a, b, |a, b| u32::from(a <= b)),
        Binary::Gt => zip(out, a, b, |a, b| u32::from(a > b)),
        Binary::Ge => zip(out, a, b, |a, b| u32::from(a >= b)),
        op => zip(out, a, b, |a, b| u32::from(compare(op, a, b))),
    }
}

#[inline(always)]
fn float_unary(op: Unary, out: &mut [f32], a: &[f32], math: &impl VectorMath) {
    match op {
        Unary::Neg => map(out, a, |a| -a),
        Unary::Abs => map(out, a, f32::abs),
        Unary::Sign => map(out, a, |a| {
            let positive = if a > 0.0 { 1.0 } else { 0.0 };
            if a < 0.0 { -1.0 } else { positive }
        }),
        Unary::Floor => map(out, a, f32::floor),
        Unary::Ceil => map(out, a, f32::ceil),
        Unary::Round => map(out, a, f32::round_ties_even),
        Unary::Relu => map(out, a, |a| if a < 0.0 { 0.0 } else { a }),
        Unary::Sqrt => map(out, a, f32::sqrt),
        Unary::Rsqrt => map(out, a, |a| 1.0 / a.sqrt()),
        Unary::Exp => {
            out.copy_from_slice(a);
            math.exp(out);
        }
        Unary::Tanh => {
            out.copy_from_slice(a);
            math.tanh(out);
        }
        Unary::Sigmoid => {
            map(out, a, |a| -a);
            math.exp(out);
            out.iter_mut().for_each(|x| *x = 1.0 / (1.0 + *x));
        }
        Unary::Exp2 => map(out, a, f32::exp2),
        Unary::Log => map(out, a, f32::ln),
        Unary::Log2 => map(out, a, f32::log2),
        Unary::Sin => map(out, a, f32::sin),
        Unary::Cos => map(out, a, f32::cos),
        Unary::Erf => map(out, a, libm::erff),
        op => map(out, a, |a| unary(op, a.into()) as f32),
    }
}

#[inline(always)]
fn load<I: IntLane>(
    tensor: &HostTensor<'_>,
    at: &[Register],
    to: Register,
    bools: &mut File<u32>,
    ints: &mut File<I>,
    floats: &mut File<f32>,
) {
    let mut offsets = [0i64; N];
    for (&index, (&extent, &stride)) in at.iter().zip(tensor.shape.iter().zip(tensor.strides)) {
        for (offset, &index) in offsets.iter_mut().zip(ints.get(index)) {
            *offset += HostTensor::resolved(index.wide(), extent) as i64 * stride;
        }
    }
    match tensor.stored.value_type() {
        Type::Float => map(&mut floats.0[to as usize], &offsets, |at| tensor.read(at).float() as f32),
        Type::Int => map(&mut ints.0[to as usize], &offsets, |at| I::of(tensor.read(at).int())),
        Type::Bool => map(&mut bools.0[to as usize], &offsets, |at| u32::from(tensor.read(at).bool())),
    }
}

impl Number {
    /// Type of the captured number, or of the captured tensor's elements, as the program computes with it.
    #[must_use]
    pub fn value_type(self) -> Type {
        match self {
            Number::Float(_) => Type::Float,
            Number::Int(_) => Type::Int,
        }
    }
}

impl Stored {
    /// The problem's data type for float elements; `None` for others.
    #[must_use]
    pub fn float_dtype(self) -> Option<crate::DType> {
        match self {
            Stored::F32 => Some(crate::DType::F32),
            Stored::F16 => Some(crate::DType::F16),
            Stored::Bf16 => Some(crate::DType::Bf16),
            _ => None,
        }
    }
}
