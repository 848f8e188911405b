//! The Rust operators that build an expression.
//!
//! Values are small copies: each is the index of a node in a graph that belongs to the thread. The graph has each node
//! once and lives as long as the thread, so values cannot leave the thread.

use std::cell::{OnceCell, RefCell};
use std::marker::PhantomData;
use std::ops;

use super::graph::{Binary, CaptureKind, Graph, Id, Stored, Type, Unary, Variable};
use super::{ExprError, Function};

thread_local! {
    static GRAPH: RefCell<Building> = RefCell::default();
}

/// The thread's graph, and the errors that occurred in it.
#[derive(Default)]
struct Building {
    graph: Graph,
    /// Errors of values. Each error is a captured number with a name that no user can give, so that a
    /// function that reads it is refused.
    errors: Vec<ExprError>,
}

fn build(make: impl FnOnce(&mut Graph) -> Id) -> Id {
    GRAPH.with_borrow_mut(|building| make(&mut building.graph))
}

/// Adds a node whose operand types Rust has checked. Any other error is reported when the function is made.
fn checked(make: impl FnOnce(&mut Graph) -> Result<Id, ExprError>) -> Id {
    GRAPH.with_borrow_mut(|building| {
        make(&mut building.graph).unwrap_or_else(|error| {
            let name = format!("{WRONG}{}", building.errors.len());
            building.errors.push(error);
            let capture = building.graph.capture_of_thread(&name, CaptureKind::Number(Type::Int));
            building.graph.number(capture)
        })
    })
}

/// Builds the function whose value the closure `root` returns.
pub(super) fn trace(root: impl FnOnce() -> Id) -> Result<Function, ExprError> {
    let root = root();
    GRAPH.with_borrow(|building| {
        let (own, _) = building.graph.extract(&[root])?;
        let wrong =
            own.captures().iter().filter_map(|capture| capture.name.strip_prefix(WRONG)?.parse().ok());
        // The error that occurred first is reported: the others follow from it.
        match wrong.min().and_then(|at: usize| building.errors.get(at)) {
            Some(error) => Err(error.clone()),
            None => Function::of(&building.graph, root),
        }
    })
}

/// Prefix of the names that stand for wrong values. [`check_name`] accepts no user's name with it.
const WRONG: &str = "!";

type OfThread = PhantomData<*const ()>;

macro_rules! values {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name(Id, OfThread);

        impl $name {
            fn of(id: Id) -> Self {
                Self(id, PhantomData)
            }

            pub(super) fn id(self) -> Id {
                self.0
            }
        }
    )*};
}

values! {
    /// A bool value of an expression.
    Bool;
    /// An integer value of an expression.
    Int;
    /// A float value of an expression.
    Float;
}

/// The scaled, descaled score, the argument of a score function.
pub type Score = Float;

/// The scaled score.
pub(super) fn score() -> Score {
    Float::of(build(|graph| graph.variable(Variable::Score)))
}

/// Position of a (query, key) pair.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct At {
    /// Number of the sequence.
    pub b: Int,
    /// Number of the query head.
    pub h: Int,
    /// Position of the query in its sequence.
    pub q: Int,
    /// Position of the key in its sequence.
    pub k: Int,
    /// The number of queries of the sequence.
    pub seqlen_q: Int,
    /// The number of keys of the sequence.
    pub seqlen_k: Int,
}

impl At {
    pub(super) fn here() -> Self {
        let [b, h, q, k, seqlen_q, seqlen_k] = [
            Variable::Batch,
            Variable::Head,
            Variable::Query,
            Variable::Key,
            Variable::SeqlenQ,
            Variable::SeqlenK,
        ]
        .map(|variable| Int::of(build(|graph| graph.variable(variable))));
        Self { b, h, q, k, seqlen_q, seqlen_k }
    }
}

/// A captured f32 number: an argument of the call, so that changing it compiles nothing.
#[must_use]
pub fn number(name: &str) -> Float {
    Float::of(captured(name, Type::Float))
}

/// A captured i64 number.
#[must_use]
pub fn whole_number(name: &str) -> Int {
    Int::of(captured(name, Type::Int))
}

fn captured(name: &str, kind: Type) -> Id {
    checked(|graph| {
        check_name(name)?;
        let capture = graph.capture_of_thread(name, CaptureKind::Number(kind));
        Ok(graph.number(capture))
    })
}

/// Checks the name of a capture.
///
/// # Errors
/// A name that the text language does not allow.
fn check_name(name: &str) -> Result<(), ExprError> {
    let is_word = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if is_word && !super::text::is_reserved(name) {
        return Ok(());
    }
    let why = if is_word { "the name is taken" } else { "a name is a letter, then letters, digits and `_`" };
    Err(ExprError::new(format!("capture {name:?}: {why}")))
}

/// Element type of a captured tensor, and the type with which functions compute when they read an element.
pub trait Element: 'static {
    /// Type of a read value: [`Float`], [`Int`] or [`Bool`].
    type Value: Copy + 'static;
    /// Storage type of an element.
    const STORED: Stored;
    #[doc(hidden)]
    fn value(id: Id) -> Self::Value;
    #[doc(hidden)]
    fn id(value: Self::Value) -> Id;
}

macro_rules! elements {
    ($($element:ty: $value:ident = $stored:ident;)*) => {$(
        impl Element for $element {
            type Value = $value;
            const STORED: Stored = Stored::$stored;
            fn value(id: Id) -> $value {
                $value::of(id)
            }
            fn id(value: $value) -> Id {
                value.id()
            }
        }
    )*};
}

elements! {
    f32: Float = F32;
    half::f16: Float = F16;
    half::bf16: Float = Bf16;
    i32: Int = I32;
    i64: Int = I64;
    bool: Bool = Bool;
}

/// A captured tensor of `RANK` axes; `tensor[i]`, `tensor[(i, j)]`, `tensor[[i, j, k]]` are its elements. A negative
/// index counts from the end once, then an index is clamped.
#[derive(Debug)]
pub struct Tensor<E: Element, const RANK: usize> {
    name: String,
    read: Kept<E::Value>,
}

impl<E: Element, const RANK: usize> Tensor<E, RANK> {
    /// The captured tensor of this name. The problem states its extents.
    #[must_use]
    pub fn new(name: &str) -> Self {
        const { assert!(RANK <= super::MAX_RANK, "a captured tensor has at most MAX_RANK axes") };
        Self { name: name.to_owned(), read: Kept::default() }
    }

    /// The only element of a tensor without axes, or an element by its indices.
    #[must_use]
    pub fn at(&self, at: [Int; RANK]) -> E::Value {
        E::value(checked(|graph| {
            check_name(&self.name)?;
            let kind = CaptureKind::Tensor { stored: E::STORED, rank: RANK };
            let capture = graph.capture_of_thread(&self.name, kind);
            graph.load(capture, &at.map(Int::id))
        }))
    }
}

impl<E: Element, const RANK: usize> ops::Index<[Int; RANK]> for Tensor<E, RANK> {
    type Output = E::Value;

    fn index(&self, at: [Int; RANK]) -> &E::Value {
        self.read.keep(self.at(at), E::id)
    }
}

impl<E: Element> ops::Index<Int> for Tensor<E, 1> {
    type Output = E::Value;

    fn index(&self, at: Int) -> &E::Value {
        self.read.keep(self.at([at]), E::id)
    }
}

impl<E: Element> ops::Index<(Int, Int)> for Tensor<E, 2> {
    type Output = E::Value;

    fn index(&self, (row, column): (Int, Int)) -> &E::Value {
        self.read.keep(self.at([row, column]), E::id)
    }
}

/// A list whose values never move, so that an index returns a reference that stays valid.
#[derive(Debug)]
struct Kept<T>(OnceCell<Box<Link<T>>>);

#[derive(Debug)]
struct Link<T> {
    value: T,
    next: Kept<T>,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self(OnceCell::new())
    }
}

impl<T: Copy> Kept<T> {
    /// Keeps the value, unless a value with its number is kept already, and returns a reference.
    fn keep(&self, value: T, id: fn(T) -> Id) -> &T {
        let mut end = self;
        while let Some(link) = end.0.get() {
            if id(link.value) == id(value) {
                return &link.value;
            }
            end = &link.next;
        }
        &end.0.get_or_init(|| Box::new(Link { value, next: Kept::default() })).value
    }
}

/// The list is dropped link by link: recursion over a long list would overflow the thread's stack.
impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        let mut next = self.0.take();
        while let Some(mut link) = next {
            next = link.next.0.take();
        }
    }
}

/// Returns `yes` where the condition holds, otherwise `no`.
#[must_use]
pub fn select(condition: Bool, yes: impl Into<Float>, no: impl Into<Float>) -> Float {
    let (yes, no) = (yes.into(), no.into());
    Float::of(checked(|graph| graph.select(condition.id(), yes.id(), no.id())))
}

impl From<f32> for Float {
    fn from(value: f32) -> Self {
        Self::of(build(|graph| graph.float(value)))
    }
}

impl From<Int> for Float {
    fn from(value: Int) -> Self {
        Self::of(build(|graph| graph.promote(value.id(), Type::Float)))
    }
}

impl From<i64> for Int {
    fn from(value: i64) -> Self {
        Self::of(build(|graph| graph.int(value)))
    }
}

impl From<bool> for Bool {
    fn from(value: bool) -> Self {
        Self::of(build(|graph| graph.bool(value)))
    }
}

fn binary(op: Binary, a: Id, b: Id) -> Id {
    checked(|graph| graph.binary(op, a, b))
}

fn unary(op: Unary, a: Id) -> Id {
    checked(|graph| graph.unary(op, a))
}

/// Operators of two operands: `trait::method = operation: left, right -> result`, operands converted first.
macro_rules! operators {
    ($($operator:ident::$method:ident = $op:ident: $left:ty, $right:ty => $with:ident -> $result:ident;)*) => {$(
        impl ops::$operator<$right> for $left {
            type Output = $result;
            fn $method(self, right: $right) -> $result {
                $result::of(binary(Binary::$op, $with::from(self).id(), $with::from(right).id()))
            }
        }
    )*};
}

macro_rules! arithmetic {
    ($($operator:ident::$method:ident = $op:ident;)*) => {$(
        operators! {
            $operator::$method = $op: Float, Float => Float -> Float;
            $operator::$method = $op: Float, f32 => Float -> Float;
            $operator::$method = $op: f32, Float => Float -> Float;
            $operator::$method = $op: Float, Int => Float -> Float;
            $operator::$method = $op: Int, Float => Float -> Float;
            $operator::$method = $op: Int, Int => Int -> Int;
            $operator::$method = $op: Int, i64 => Int -> Int;
            $operator::$method = $op: i64, Int => Int -> Int;
        }
    )*};
}

arithmetic! {
    Add::add = Add;
    Sub::sub = Sub;
    Mul::mul = Mul;
    Rem::rem = Mod;
}

operators! {
    Div::div = Div: Float, Float => Float -> Float;
    Div::div = Div: Float, f32 => Float -> Float;
    Div::div = Div: f32, Float => Float -> Float;
    Div::div = Div: Float, Int => Float -> Float;
    Div::div = Div: Int, Float => Float -> Float;
    Div::div = Div: Int, Int => Float -> Float;
    BitAnd::bitand = And: Bool, Bool => Bool -> Bool;
    BitOr::bitor = Or: Bool, Bool => Bool -> Bool;
    BitXor::bitxor = Ne: Bool, Bool => Bool -> Bool;
    BitAnd::bitand = BitAnd: Int, Int => Int -> Int;
    BitAnd::bitand = BitAnd: Int, i64 => Int -> Int;
    BitOr::bitor = BitOr: Int, Int => Int -> Int;
    BitOr::bitor = BitOr: Int, i64 => Int -> Int;
    BitXor::bitxor = BitXor: Int, Int => Int -> Int;
    BitXor::bitxor = BitXor: Int, i64 => Int -> Int;
    Shl::shl = Shl: Int, Int => Int -> Int;
    Shl::shl = Shl: Int, i64 => Int -> Int;
    Shr::shr = Shr: Int, Int => Int -> Int;
    Shr::shr = Shr: Int, i64 => Int -> Int;
}

macro_rules! prefixes {
    ($($operator:ident::$method:ident = $op:ident: $value:ident;)*) => {$(
        impl ops::$operator for $value {
            type Output = $value;
            fn $method(self) -> $value {
                $value::of(unary(Unary::$op, self.id()))
            }
        }
    )*};
}

prefixes! {
    Neg::neg = Neg: Float;
    Neg::neg = Neg: Int;
    Not::not = Not: Bool;
    Not::not = BitNot: Int;
}

macro_rules! methods {
    ($($value:ident { $($(#[$doc:meta])* $method:ident = $op:ident;)* })*) => {$(
        impl $value {$(
            $(#[$doc])*
            #[must_use]
            pub fn $method(self) -> $value {
                $value::of(unary(Unary::$op, self.id()))
            }
        )*}
    )*};
}

methods! {
    Float {
        /// The absolute value.
        abs = Abs;
        /// The sign: -1, 0 or 1.
        sign = Sign;
        /// Largest whole number that is not above `self`.
        floor = Floor;
        /// Smallest whole number that is not below `self`.
        ceil = Ceil;
        /// Nearest whole number, ties to even.
        round = Round;
        /// e to the power of `self`.
        exp = Exp;
        /// 2 to the power of `self`.
        exp2 = Exp2;
        /// Natural logarithm.
        log = Log;
        /// Logarithm to base 2.
        log2 = Log2;
        /// Sine.
        sin = Sin;
        /// Cosine.
        cos = Cos;
        /// Hyperbolic tangent.
        tanh = Tanh;
        /// Error function.
        erf = Erf;
        /// `1 / (1 + e^-x)`.
        sigmoid = Sigmoid;
        /// The rectifier: 0 for negative numbers.
        relu = Relu;
        /// The square root.
        sqrt = Sqrt;
        /// The reciprocal square root, `1 / sqrt(x)`.
        rsqrt = Rsqrt;
    }
    Int {
        /// The absolute value.
        abs = Abs;
        /// Sign of the number: -1, 0 or 1.
        sign = Sign;
    }
}

macro_rules! pairs {
    ($($value:ident { $($(#[$doc:meta])* $method:ident = $op:ident -> $result:ident;)* })*) => {$(
        impl $value {$(
            $(#[$doc])*
            #[must_use]
            pub fn $method(self, other: impl Into<$value>) -> $result {
                $result::of(binary(Binary::$op, self.id(), other.into().id()))
            }
        )*}
    )*};
}

pairs! {
    Float {
        /// The smaller of both numbers; NaN if one is NaN.
        min = Min -> Float;
        /// The larger of both numbers; NaN if one is NaN.
        max = Max -> Float;
        /// Power of `self` with the exponent `other`.
        pow = Pow -> Float;
        /// Whether `self < other`.
        lt = Lt -> Bool;
        /// Whether `self <= other`.
        le = Le -> Bool;
        /// Whether `self > other`.
        gt = Gt -> Bool;
        /// Whether `self >= other`.
        ge = Ge -> Bool;
        /// Whether `self == other`.
        equals = Eq -> Bool;
        /// Whether `self != other`.
        differs = Ne -> Bool;
    }
    Int {
        /// The smaller of both numbers.
        min = Min -> Int;
        /// The larger of both numbers.
        max = Max -> Int;
        /// Quotient rounded down; 0 where `other` is 0.
        floor_div = FloorDiv -> Int;
        /// Whether `self < other`.
        lt = Lt -> Bool;
        /// Whether `self <= other`.
        le = Le -> Bool;
        /// Whether `self > other`.
        gt = Gt -> Bool;
        /// Whether `self >= other`.
        ge = Ge -> Bool;
        /// Whether `self == other`.
        equals = Eq -> Bool;
        /// Whether `self != other`.
        differs = Ne -> Bool;
    }
}

impl Float {
    /// The value limited to `low ..= high`; `high` where `low` is above it.
    #[must_use]
    pub fn clamp(self, low: impl Into<Float>, high: impl Into<Float>) -> Float {
        let (low, high) = (low.into(), high.into());
        Float::of(checked(|graph| graph.clamp(self.id(), low.id(), high.id())))
    }

    /// The number without its fraction, saturating; 0 for NaN.
    #[must_use]
    pub fn to_int(self) -> Int {
        Int::of(build(|graph| graph.cast(Type::Int, self.id())))
    }
}

impl Int {
    /// Converts to a float.
    #[must_use]
    pub fn to_float(self) -> Float {
        self.into()
    }
}

impl Bool {
    /// The bool as an integer: 1 for true, 0 for false.
    #[must_use]
    pub fn to_int(self) -> Int {
        Int::of(build(|graph| graph.cast(Type::Int, self.id())))
    }
}
