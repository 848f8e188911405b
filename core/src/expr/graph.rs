//! The graph of an expression: typed nodes, in which equal nodes occur only once.

use std::collections::HashMap;
use std::fmt;

use super::ExprError;

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// True or false.
    Bool,
    /// A 64-bit integer; sums and products wrap.
    Int,
    /// An f32 number; float64 in the reference.
    Float,
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Type::Bool => "bool",
            Type::Int => "int",
            Type::Float => "float",
        })
    }
}

/// Element type of a tensor that a function captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stored {
    /// Elements of type f32.
    F32,
    /// Elements of type f16.
    F16,
    /// Elements of type bf16.
    Bf16,
    /// Elements of type i32.
    I32,
    /// Elements of type i64.
    I64,
    /// Elements of one byte, true iff it is not 0.
    Bool,
}

impl Stored {
    /// Every type.
    pub const ALL: [Stored; 6] =
        [Stored::F32, Stored::F16, Stored::Bf16, Stored::I32, Stored::I64, Stored::Bool];

    /// The name in the text language.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Stored::F32 => "f32",
            Stored::F16 => "f16",
            Stored::Bf16 => "bf16",
            Stored::I32 => "i32",
            Stored::I64 => "i64",
            Stored::Bool => "bool",
        }
    }

    /// The type of an element's value in an expression.
    #[must_use]
    pub fn value_type(self) -> Type {
        match self {
            Stored::F32 | Stored::F16 | Stored::Bf16 => Type::Float,
            Stored::I32 | Stored::I64 => Type::Int,
            Stored::Bool => Type::Bool,
        }
    }

    /// Bytes of an element.
    #[must_use]
    pub fn size_bytes(self) -> u64 {
        match self {
            Stored::Bool => 1,
            Stored::F16 | Stored::Bf16 => 2,
            Stored::F32 | Stored::I32 => 4,
            Stored::I64 => 8,
        }
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Inputs of a function, apart from its pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CaptureKind {
    /// A number, an argument of the call: f32 for [`Type::Float`], i64 for [`Type::Int`].
    Number(Type),
    /// A tensor with this many axes.
    Tensor {
        /// The type of its elements.
        stored: Stored,
        /// The number of its axes, from 0 to [`MAX_RANK`].
        rank: usize,
    },
}

impl CaptureKind {
    /// The type of a value that is read.
    #[must_use]
    pub fn value_type(self) -> Type {
        match self {
            CaptureKind::Number(number) => number,
            CaptureKind::Tensor { stored, .. } => stored.value_type(),
        }
    }
}

/// Writes the type of a declaration in the text language: `f32`, `f32[_, _]`.
impl fmt::Display for CaptureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CaptureKind::Number(number) => number.fmt(f),
            CaptureKind::Tensor { stored, rank } => write!(f, "{stored}[{}]", vec!["_"; *rank].join(", ")),
        }
    }
}

/// Most axes of a tensor that a function captures.
pub const MAX_RANK: usize = 5;

/// An input that a function reads by name: a captured number or tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Capture {
    /// The name: a letter, then letters, digits and `_`.
    pub name: String,
    /// Kind of the capture.
    pub kind: CaptureKind,
}

/// Property of a (query, key) pair that needs no capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variable {
    /// The scaled, descaled score; f32.
    Score,
    /// Number of the sequence.
    Batch,
    /// Number of the query head.
    Head,
    /// Position of the query in its sequence, from 0.
    Query,
    /// Position of the key in its sequence, from 0.
    Key,
    /// Number of queries of the sequence.
    SeqlenQ,
    /// Number of keys of the sequence, including appended ones.
    SeqlenK,
}

impl Variable {
    /// Every variable.
    pub const ALL: [Variable; 7] = [
        Variable::Score,
        Variable::Batch,
        Variable::Head,
        Variable::Query,
        Variable::Key,
        Variable::SeqlenQ,
        Variable::SeqlenK,
    ];

    /// The name in the text language.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Variable::Score => "s",
            Variable::Batch => "b",
            Variable::Head => "h",
            Variable::Query => "q",
            Variable::Key => "k",
            Variable::SeqlenQ => "seqlen_q",
            Variable::SeqlenK => "seqlen_k",
        }
    }

    /// The type of the variable's value: float for the score, otherwise integer.
    #[must_use]
    pub fn value_type(self) -> Type {
        if self == Variable::Score { Type::Float } else { Type::Int }
    }
}

/// Functions and operators of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unary {
    /// Operation `-x` on an int or a float.
    Neg,
    /// Operation `|x|` on an int or a float.
    Abs,
    /// Sign: -1, 0 or 1, and 0 for NaN; int or float.
    Sign,
    /// Largest whole number that is not above x.
    Floor,
    /// Smallest whole number that is not below x.
    Ceil,
    /// Nearest whole number, ties to even.
    Round,
    /// Exponential, e^x.
    Exp,
    /// Power of two, 2^x.
    Exp2,
    /// Natural logarithm.
    Log,
    /// Logarithm to base 2.
    Log2,
    /// Sine.
    Sin,
    /// Cosine.
    Cos,
    /// Hyperbolic tangent.
    Tanh,
    /// Error function.
    Erf,
    /// Function `1 / (1 + e^-x)`.
    Sigmoid,
    /// Rectifier: x, or 0 if x is negative.
    Relu,
    /// Square root.
    Sqrt,
    /// Function `1 / sqrt(x)`.
    Rsqrt,
    /// Operation `not x` on bools.
    Not,
    /// Operation `~x` on ints.
    BitNot,
}

impl Unary {
    /// All unary operations.
    pub const ALL: [Unary; 20] = [
        Unary::Neg,
        Unary::Abs,
        Unary::Sign,
        Unary::Floor,
        Unary::Ceil,
        Unary::Round,
        Unary::Exp,
        Unary::Exp2,
        Unary::Log,
        Unary::Log2,
        Unary::Sin,
        Unary::Cos,
        Unary::Tanh,
        Unary::Erf,
        Unary::Sigmoid,
        Unary::Relu,
        Unary::Sqrt,
        Unary::Rsqrt,
        Unary::Not,
        Unary::BitNot,
    ];

    /// Name of the operation in the text language; the symbol if it is an operator.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Unary::Neg => "-",
            Unary::Abs => "abs",
            Unary::Sign => "sign",
            Unary::Floor => "floor",
            Unary::Ceil => "ceil",
            Unary::Round => "round",
            Unary::Exp => "exp",
            Unary::Exp2 => "exp2",
            Unary::Log => "log",
            Unary::Log2 => "log2",
            Unary::Sin => "sin",
            Unary::Cos => "cos",
            Unary::Tanh => "tanh",
            Unary::Erf => "erf",
            Unary::Sigmoid => "sigmoid",
            Unary::Relu => "relu",
            Unary::Sqrt => "sqrt",
            Unary::Rsqrt => "rsqrt",
            Unary::Not => "not",
            Unary::BitNot => "~",
        }
    }

    /// Type to which an operand of type `operand` is converted, which is also the result's type; `None` if the
    /// operation does not apply to it.
    fn operand(self, operand: Type) -> Option<Type> {
        match (self, operand) {
            (Unary::Not, Type::Bool) => Some(Type::Bool),
            (Unary::BitNot, Type::Int) => Some(Type::Int),
            (Unary::Not | Unary::BitNot, _) | (_, Type::Bool) => None,
            (Unary::Neg | Unary::Abs | Unary::Sign, numbers) => Some(numbers),
            _ => Some(Type::Float),
        }
    }
}

/// Operators and functions of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binary {
    /// Operation `a + b`.
    Add,
    /// Operation `a - b`.
    Sub,
    /// Operation `a * b`.
    Mul,
    /// Division `a / b`, whose result is always a float.
    Div,
    /// `a // b`, rounded down; int, and 0 where b is 0.
    FloorDiv,
    /// `a % b`, of b's sign; integers are 0 where b is 0.
    Mod,
    /// The smaller of two numbers; NaN if one is NaN.
    Min,
    /// The larger of two numbers; NaN if one is NaN.
    Max,
    /// a to the power of b; float.
    Pow,
    /// Product `a * b`, which is 0 if a is 0, even if b is infinite or NaN. Derivatives use it.
    MulZero,
    /// Operation `a & b` on ints.
    BitAnd,
    /// Operation `a | b` on ints.
    BitOr,
    /// Operation `a ^ b` on ints.
    BitXor,
    /// `a << b`; int, 0 where b is not in 0..64.
    Shl,
    /// `a >> b`; int, with a's sign, and the sign alone where b is not in 0..64.
    Shr,
    /// Operation `a and b` on bools.
    And,
    /// Operation `a or b` on bools.
    Or,
    /// Comparison `a < b`.
    Lt,
    /// Comparison `a <= b`.
    Le,
    /// Comparison `a > b`.
    Gt,
    /// Comparison `a >= b`.
    Ge,
    /// Comparison `a == b`.
    Eq,
    /// Comparison `a != b`.
    Ne,
}

impl Binary {
    /// All binary operations.
    pub const ALL: [Binary; 23] = [
        Binary::Add,
        Binary::Sub,
        Binary::Mul,
        Binary::Div,
        Binary::FloorDiv,
        Binary::Mod,
        Binary::Min,
        Binary::Max,
        Binary::Pow,
        Binary::MulZero,
        Binary::BitAnd,
        Binary::BitOr,
        Binary::BitXor,
        Binary::Shl,
        Binary::Shr,
        Binary::And,
        Binary::Or,
        Binary::Lt,
        Binary::Le,
        Binary::Gt,
        Binary::Ge,
        Binary::Eq,
        Binary::Ne,
    ];

    /// The name or operator in the text language.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "+",
            Binary::Sub => "-",
            Binary::Mul => "*",
            Binary::Div => "/",
            Binary::FloorDiv => "//",
            Binary::Mod => "%",
            Binary::Min => "min",
            Binary::Max => "max",
            Binary::Pow => "pow",
            Binary::MulZero => "mul0",
            Binary::BitAnd => "&",
            Binary::BitOr => "|",
            Binary::BitXor => "^",
            Binary::Shl => "<<",
            Binary::Shr => ">>",
            Binary::And => "and",
            Binary::Or => "or",
            Binary::Lt => "<",
            Binary::Le => "<=",
            Binary::Gt => ">",
            Binary::Ge => ">=",
            Binary::Eq => "==",
            Binary::Ne => "!=",
        }
    }

    /// Whether the operation compares, so that its result is a bool.
    #[must_use]
    pub fn compares(self) -> bool {
        matches!(self, Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::Eq | Binary::Ne)
    }

    /// Type to which both operands are converted; `None` if the operation does not apply to them.
    fn operands(self, a: Type, b: Type) -> Option<Type> {
        let widest = a.max(b);
        match self {
            Binary::And | Binary::Or => (widest == Type::Bool).then_some(Type::Bool),
            Binary::BitAnd | Binary::BitOr | Binary::BitXor if widest == Type::Bool => None,
            Binary::FloorDiv
            | Binary::BitAnd
            | Binary::BitOr
            | Binary::BitXor
            | Binary::Shl
            | Binary::Shr => (a == Type::Int && b == Type::Int).then_some(Type::Int),
            Binary::Eq | Binary::Ne if widest == Type::Bool => Some(Type::Int),
            _ if a == Type::Bool || b == Type::Bool => None,
            Binary::Div | Binary::Pow | Binary::MulZero => Some(Type::Float),
            _ => Some(widest),
        }
    }
}

/// Index of a node in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub(super) u32);

impl Id {
    /// Index of the node in [`Graph::nodes`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One value of an expression: a variable, a constant or an operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// Property of the pair.
    Variable(Variable),
    /// A bool constant.
    Bool(bool),
    /// An integer constant.
    Int(i64),
    /// A float constant, as the bits of an f32.
    Float(u32),
    /// A number that the function captures, by its index in [`Graph::captures`].
    Number(u32),
    /// An element of a captured tensor: the tensor's index in [`Graph::captures`], and an integer for each axis.
    Load(u32, Box<[Id]>),
    /// An operation on one operand.
    Unary(Unary, Id),
    /// An operation on two operands of one type.
    Binary(Binary, Id, Id),
    /// `select(condition, yes, no)`.
    Select(Id, Id, Id),
    /// `clamp(x, low, high)`, high where low is above it.
    Clamp(Id, Id, Id),
    /// Conversion to this type: a float to an integer by cutting its fraction, saturating, NaN to 0; a number
    /// to a bool by `!= 0`.
    Cast(Type, Id),
}

impl Node {
    /// Calls `see` with each operand, in order.
    pub fn operands(&self, mut see: impl FnMut(Id)) {
        match self {
            Node::Variable(_) | Node::Bool(_) | Node::Int(_) | Node::Float(_) | Node::Number(_) => {}
            Node::Load(_, at) => at.iter().copied().for_each(see),
            Node::Unary(_, a) | Node::Cast(_, a) => see(*a),
            Node::Binary(_, a, b) => [*a, *b].into_iter().for_each(see),
            Node::Select(a, b, c) | Node::Clamp(a, b, c) => [*a, *b, *c].into_iter().for_each(see),
        }
    }

    /// A copy of the node with other operands.
    #[must_use]
    pub(super) fn map(&self, mut to: impl FnMut(Id) -> Id) -> Node {
        match self {
            Node::Load(tensor, at) => Node::Load(*tensor, at.iter().map(|&id| to(id)).collect()),
            Node::Unary(op, a) => Node::Unary(*op, to(*a)),
            Node::Cast(kind, a) => Node::Cast(*kind, to(*a)),
            Node::Binary(op, a, b) => {
                let a = to(*a);
                Node::Binary(*op, a, to(*b))
            }
            Node::Select(a, b, c) => {
                let (a, b) = (to(*a), to(*b));
                Node::Select(a, b, to(*c))
            }
            Node::Clamp(a, b, c) => {
                let (a, b) = (to(*a), to(*b));
                Node::Clamp(a, b, to(*c))
            }
            leaf => leaf.clone(),
        }
    }
}

/// Bits of the quiet NaN to which every NaN constant is normalised.
pub(super) const NAN: u32 = 0x7fc0_0000;

/// A graph of expressions: nodes, each once and after its operands, and the tensors and numbers that they read
/// (captures).
#[derive(Clone, Debug, Default)]
pub struct Graph {
    nodes: Vec<Node>,
    types: Vec<Type>,
    captures: Vec<Capture>,
    known: HashMap<Node, Id>,
}

impl Graph {
    /// The nodes, each after its operands.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Tensors and numbers that the graph reads, in the order of their first use.
    #[must_use]
    pub fn captures(&self) -> &[Capture] {
        &self.captures
    }

    /// The node with this index.
    #[must_use]
    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id.index()]
    }

    /// The type of a node's value.
    #[must_use]
    pub fn type_of(&self, id: Id) -> Type {
        self.types[id.index()]
    }

    /// Adds a node whose operands have the right types.
    pub(super) fn add(&mut self, node: Node, value: Type) -> Id {
        if let Some(&id) = self.known.get(&node) {
            return id;
        }
        let id = Id(self.nodes.len() as u32);
        self.known.insert(node.clone(), id);
        self.nodes.push(node);
        self.types.push(value);
        id
    }

    pub(super) fn variable(&mut self, variable: Variable) -> Id {
        self.add(Node::Variable(variable), variable.value_type())
    }

    pub(super) fn bool(&mut self, value: bool) -> Id {
        self.add(Node::Bool(value), Type::Bool)
    }

    pub(super) fn int(&mut self, value: i64) -> Id {
        self.add(Node::Int(value), Type::Int)
    }

    pub(super) fn float(&mut self, value: f32) -> Id {
        self.add(Node::Float(if value.is_nan() { NAN } else { value.to_bits() }), Type::Float)
    }

    /// The index of a capture, which is added if it is new.
    ///
    /// # Errors
    /// A name that another kind of capture already has.
    pub(super) fn capture(&mut self, name: &str, kind: CaptureKind) -> Result<u32, ExprError> {
        if let Some(at) = self.captures.iter().position(|capture| capture.name == name) {
            let known = self.captures[at].kind;
            return if known == kind {
                Ok(at as u32)
            } else {
                Err(ExprError::new(format!("{name} is {known} and {kind}: one name is one capture")))
            };
        }
        self.captures.push(Capture { name: name.to_owned(), kind });
        Ok(self.captures.len() as u32 - 1)
    }

    /// The index of a capture in a thread's graph of many functions, in which functions may use one name for different
    /// captures.
    pub(super) fn capture_of_thread(&mut self, name: &str, kind: CaptureKind) -> u32 {
        let known = self.captures.iter().position(|capture| capture.name == name && capture.kind == kind);
        known.unwrap_or_else(|| {
            self.captures.push(Capture { name: name.to_owned(), kind });
            self.captures.len() - 1
        }) as u32
    }

    pub(super) fn number(&mut self, capture: u32) -> Id {
        let value = self.captures[capture as usize].kind.value_type();
        self.add(Node::Number(capture), value)
    }

    /// Adds a read of an element of a captured tensor.
    ///
    /// # Errors
    /// A number of indices that differs from the rank, and indices that are no integers.
    pub(super) fn load(&mut self, capture: u32, at: &[Id]) -> Result<Id, ExprError> {
        let Capture { name, kind } = &self.captures[capture as usize];
        let rank = match kind {
            CaptureKind::Tensor { rank, .. } => *rank,
            CaptureKind::Number(_) => {
                return Err(ExprError::new(format!("{name} is a number: it has no elements")));
            }
        };
        if at.len() != rank {
            return Err(ExprError::new(format!("{name}[..] has {} indices for {rank} axes", at.len())));
        }
        for (axis, &index) in at.iter().enumerate() {
            let found = self.type_of(index);
            if found != Type::Int {
                return Err(ExprError::new(format!("{name}: the index of axis {axis} is {found}, not int")));
            }
        }
        let value = kind.value_type();
        Ok(self.add(Node::Load(capture, at.into()), value))
    }

    /// Converts an operand to this type. An integer constant becomes a float constant, another integer gets a cast.
    pub(super) fn promote(&mut self, id: Id, to: Type) -> Id {
        match (self.type_of(id), to, self.node(id)) {
            (from, to, _) if from == to => id,
            (_, Type::Float, &Node::Int(value)) => self.float(value as f32),
            _ => self.cast(to, id),
        }
    }

    pub(super) fn cast(&mut self, to: Type, id: Id) -> Id {
        if self.type_of(id) == to { id } else { self.add(Node::Cast(to, id), to) }
    }

    /// Adds an operation on one operand.
    ///
    /// # Errors
    /// An operand of a type that the operation does not support.
    pub(super) fn unary(&mut self, op: Unary, a: Id) -> Result<Id, ExprError> {
        let found = self.type_of(a);
        let value = op
            .operand(found)
            .ok_or_else(|| ExprError::new(format!("{} does not take a {found}", op.name())))?;
        let a = self.promote(a, value);
        Ok(self.add(Node::Unary(op, a), value))
    }

    /// Adds an operation on two operands.
    ///
    /// # Errors
    /// Operands of types that the operation does not support.
    pub(super) fn binary(&mut self, op: Binary, a: Id, b: Id) -> Result<Id, ExprError> {
        let (left, right) = (self.type_of(a), self.type_of(b));
        let op = match (op, left.max(right)) {
            (Binary::BitAnd, Type::Bool) => Binary::And,
            (Binary::BitOr, Type::Bool) => Binary::Or,
            (Binary::BitXor, Type::Bool) => Binary::Ne,
            (op, _) => op,
        };
        let operands = op.operands(left, right).ok_or_else(|| {
            let instead = match op {
                Binary::FloorDiv if left.max(right) == Type::Float => "; floor(a / b) does",
                _ => "",
            };
            ExprError::new(format!("{} does not take {left} and {right}{instead}", op.name()))
        })?;
        let (a, b) = (self.promote(a, operands), self.promote(b, operands));
        Ok(self.add(Node::Binary(op, a, b), if op.compares() { Type::Bool } else { operands }))
    }

    /// Adds a selection.
    ///
    /// # Errors
    /// A condition that is no bool, and branches without a common type.
    pub(super) fn select(&mut self, condition: Id, yes: Id, no: Id) -> Result<Id, ExprError> {
        let found = self.type_of(condition);
        if found != Type::Bool {
            return Err(ExprError::new(format!("select: the condition is {found}, not bool")));
        }
        let (yes, no, value) = self.together("select", yes, no)?;
        Ok(self.add(Node::Select(condition, yes, no), value))
    }

    /// Adds a clamp.
    ///
    /// # Errors
    /// Operands that are no numbers.
    pub(super) fn clamp(&mut self, x: Id, low: Id, high: Id) -> Result<Id, ExprError> {
        let value = [x, low, high].map(|id| self.type_of(id));
        if value.contains(&Type::Bool) {
            return Err(ExprError::new("clamp does not take a bool"));
        }
        let widest = value[0].max(value[1]).max(value[2]);
        let [x, low, high] = [x, low, high].map(|id| self.promote(id, widest));
        Ok(self.add(Node::Clamp(x, low, high), widest))
    }

    fn together(&mut self, name: &str, a: Id, b: Id) -> Result<(Id, Id, Type), ExprError> {
        let (left, right) = (self.type_of(a), self.type_of(b));
        if (left == Type::Bool) != (right == Type::Bool) {
            return Err(ExprError::new(format!("{name} does not take {left} and {right}")));
        }
        let widest = left.max(right);
        Ok((self.promote(a, widest), self.promote(b, widest), widest))
    }

    /// Copies the nodes on which `roots` depend, and no others, in the order of a walk from them; returns the roots'
    /// new indices.
    ///
    /// # Errors
    /// A name that two captures have.
    pub(super) fn extract(&self, roots: &[Id]) -> Result<(Graph, Vec<Id>), ExprError> {
        let mut to = Graph::default();
        let roots = to.copy(self, roots)?;
        Ok((to, roots))
    }

    /// Adds `roots` of another graph and all nodes that they need.
    ///
    /// # Errors
    /// A name that is two captures.
    pub(super) fn copy(&mut self, from: &Graph, roots: &[Id]) -> Result<Vec<Id>, ExprError> {
        let mut places: Vec<Option<Id>> = vec![None; from.nodes.len()];
        // The walk has its own stack: recursion over a chain of a million operations would overflow the thread's stack.
        let mut stack: Vec<(Id, bool)> = roots.iter().rev().map(|&root| (root, false)).collect();
        while let Some((id, has_operands)) = stack.pop() {
            if places[id.index()].is_some() {
                continue;
            }
            if !has_operands {
                stack.push((id, true));
                let mut operands = vec![];
                from.node(id).operands(|operand| operands.push((operand, false)));
                stack.extend(operands.into_iter().rev());
                continue;
            }
            let node = match from.node(id) {
                Node::Number(at) => {
                    let Capture { name, kind } = &from.captures[*at as usize];
                    Node::Number(self.capture(name, *kind)?)
                }
                Node::Load(at, indices) => {
                    let Capture { name, kind } = &from.captures[*at as usize];
                    Node::Load(self.capture(name, *kind)?, indices.clone())
                }
                other => other.clone(),
            };
            // Operands come first on the stack, so each has a new index already.
            let node = node.map(|operand| places[operand.index()].unwrap_or(operand));
            places[id.index()] = Some(self.add(node, from.type_of(id)));
        }
        Ok(roots.iter().map(|root| places[root.index()].unwrap_or(*root)).collect())
    }
}
