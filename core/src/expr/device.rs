//! A function as C++ that g++, NVRTC and clang compile: the text is the same for the same structure, so it is a compile
//! key.
//!
//! The text is templates over a `Pair`, which a kernel writes:
//!
//! ```text
//! int b, h, q, k, seqlen_q, seqlen_k;                  what Variable says
//! float number(int i); long long whole_number(int i);  captured numbers, by the capture's place
//! unsigned extent(int i, int axis);                    extents of captured tensors
//! float load_float(int i, const long long* at);        elements, by indices that are resolved already;
//! long long load_int(int i, const long long* at);      at has an index for each axis
//! ```

use std::fmt::Write as _;

use super::bounds::{Bounds, Interval, Tile};
use super::graph::{Binary, CaptureKind, Graph, Id, Node, Type, Unary, Variable};
use super::{Function, Slopes};

/// Functions that printed text calls, in namespace `fmha::expr`; a translation unit includes it once, before the
/// printed text. It needs the functions of `<cmath>`, and a definition of the macro `FMHA_EXPR`, the qualifiers of a
/// function (`__device__ inline`, `static inline`).
pub const DEVICE_PRELUDE: &str = r"namespace fmha { namespace expr {
typedef long long i64;
typedef unsigned long long u64;
FMHA_EXPR i64 add(i64 a, i64 b) { return i64(u64(a) + u64(b)); }
FMHA_EXPR i64 sub(i64 a, i64 b) { return i64(u64(a) - u64(b)); }
FMHA_EXPR i64 mul(i64 a, i64 b) { return i64(u64(a) * u64(b)); }
FMHA_EXPR i64 neg(i64 a) { return sub(0, a); }
FMHA_EXPR bool are_short(i64 a, i64 b) { return u64(a | b) < 2147483648u; }
FMHA_EXPR i64 floor_div(i64 a, i64 b) {
  if (b == 0) return 0;
  if (are_short(a, b)) return i64(unsigned(a) / unsigned(b));
  if (b == -1) return neg(a);
  const i64 rest = a % b;
  return a / b - ((rest != 0 && (rest < 0) != (b < 0)) ? 1 : 0);
}
FMHA_EXPR i64 floor_mod(i64 a, i64 b) {
  if (b == 0 || b == -1) return 0;
  if (are_short(a, b)) return i64(unsigned(a) % unsigned(b));
  const i64 rest = a % b;
  return (rest != 0 && (rest < 0) != (b < 0)) ? rest + b : rest;
}
FMHA_EXPR i64 shl(i64 a, i64 b) { return b >= 0 && b < 64 ? i64(u64(a) << b) : 0; }
FMHA_EXPR i64 shr(i64 a, i64 b) { return a >> (b >= 0 && b < 64 ? b : 63); }
FMHA_EXPR i64 abs(i64 a) { return a < 0 ? neg(a) : a; }
FMHA_EXPR i64 sign(i64 a) { return (a > 0) - (a < 0); }
FMHA_EXPR i64 min(i64 a, i64 b) { return a < b ? a : b; }
FMHA_EXPR i64 max(i64 a, i64 b) { return a > b ? a : b; }
FMHA_EXPR int floor_div(int a, int b) {
  if (b == 0) return 0;
  const int rest = a % b;
  return a / b - ((rest != 0 && (rest < 0) != (b < 0)) ? 1 : 0);
}
FMHA_EXPR int floor_mod(int a, int b) {
  if (b == 0 || b == -1) return 0;
  const int rest = a % b;
  return (rest != 0 && (rest < 0) != (b < 0)) ? rest + b : rest;
}
FMHA_EXPR int abs(int a) { return a < 0 ? -a : a; }
FMHA_EXPR int sign(int a) { return (a > 0) - (a < 0); }
FMHA_EXPR int min(int a, int b) { return a < b ? a : b; }
FMHA_EXPR int max(int a, int b) { return a > b ? a : b; }
FMHA_EXPR float sign(float a) { return float((a > 0.f) - (a < 0.f)); }
FMHA_EXPR float min(float a, float b) { return a < b || a != a ? a : b; }
FMHA_EXPR float max(float a, float b) { return a > b || a != a ? a : b; }
FMHA_EXPR float mod(float a, float b) {
  const float rest = fmodf(a, b);
  return (rest != 0.f && (rest < 0.f) != (b < 0.f)) ? rest + b : rest;
}
// a / c of a constant c whose reciprocal rounds to `inverse`: the quotient that rounding leaves, put right by the exact
// rest (Markstein, 1990). The result equals a / c for |a| of 2^-100 and more, and there is no branch for each element
// as in a division.
FMHA_EXPR float div_by(float a, float c, float inverse) {
  const float near = a * inverse, rest = fmaf(-near, c, a), right = fmaf(rest, inverse, near);
  return rest != 0.f && right == right ? right : near;
}
FMHA_EXPR float mul0(float a, float b) { return a == 0.f ? 0.f : a * b; }
FMHA_EXPR float relu(float a) { return a < 0.f ? 0.f : a; }
FMHA_EXPR float sigmoid(float a) { return 1.f / (1.f + expf(-a)); }
FMHA_EXPR i64 whole(float a) {
  if (a != a) return 0;
  if (a >= 9223372036854775808.f) return 9223372036854775807ll;
  if (a < -9223372036854775808.f) return -9223372036854775807ll - 1;
  return i64(a);
}
FMHA_EXPR i64 index(i64 i, i64 extent) {
  if (i < 0) i += extent;
  return i < 0 ? 0 : i < extent ? i : extent - 1;
}
FMHA_EXPR unsigned index_from_0(int i, unsigned extent) { return unsigned(i) < extent ? unsigned(i) : extent - 1u; }
FMHA_EXPR unsigned index(int i, unsigned extent) {
  const unsigned below = 0u - unsigned(i);
  return i >= 0 ? index_from_0(i, extent) : below < extent ? extent - below : 0u;
}
} }
";

impl Function {
    /// The function as `template <class Pair> .. float score(const Pair& pair, float s)`, or, of a mask, `bool
    /// visible(const Pair& pair)`, after [`DEVICE_PRELUDE`]. Names of captures do not occur in the text.
    #[must_use]
    pub fn device_text(&self) -> String {
        let (signature, value) = if self.is_mask() {
            ("bool visible(const Pair& pair)", Type::Bool)
        } else {
            ("float score(const Pair& pair, float s)", Type::Float)
        };
        let mut out = header(signature, &self.reads());
        let names = body(&mut out, self.graph());
        debug_assert_eq!(self.graph().type_of(self.root()), value);
        let _ = writeln!(out, "  return {};\n}}", names[self.root().index()]);
        out
    }

    fn reads(&self) -> Reads {
        Reads::of(self.graph())
    }
}

impl Slopes {
    /// The derivative through the score as `template <class Pair> .. float slope(const Pair& pair, float s)`, and,
    /// where captured floats have one, `void slopes(const Pair& pair, float s, Add&& add)`, which calls `add(i, at,
    /// value)` for each element that is read: its capture, its resolved indices (null for a number) and the derivative
    /// of the score with respect to it.
    #[must_use]
    pub fn device_text(&self) -> String {
        let one = |roots: &[Id]| self.graph.extract(roots).ok();
        let mut out = String::new();
        if let Some((_, roots)) = one(&[self.score]) {
            // The text is printed from the graph with all captures, so that each capture keeps its index.
            let used = Used::of(&self.graph, &[self.score]);
            debug_assert_eq!(roots.len(), 1);
            out += &header("float slope(const Pair& pair, float s)", &Reads::of_used(&self.graph, &used));
            let names = body_of(&mut out, &self.graph, &used);
            let _ = writeln!(out, "  return {};\n}}", names[self.score.index()]);
        }
        if self.captures.is_empty() {
            return out;
        }
        let mut roots = vec![];
        for capture in &self.captures {
            roots.push(capture.slope);
            roots.extend(&capture.at);
        }
        let used = Used::of(&self.graph, &roots);
        let widths = Widths::new(&self.graph);
        let reads = Reads::of_used(&self.graph, &used);
        out += &header("void slopes(const Pair& pair, float s, Add&& add)", &reads)
            .replace("template <class Pair>", "template <class Pair, class Add>");
        let names = body_of(&mut out, &self.graph, &used);
        for (number, capture) in self.captures.iter().enumerate() {
            let slope = &names[capture.slope.index()];
            if capture.at.is_empty() {
                let _ = writeln!(out, "  add({}, (const expr::i64*)0, {slope});", capture.capture);
            } else {
                let at = indices(capture.capture as u32, &capture.at, &names, &widths);
                let _ = writeln!(out, "  const expr::i64 at{number}[] = {{{at}}};");
                let _ = writeln!(out, "  add({}, at{number}, {slope});", capture.capture);
            }
        }
        out + "}\n"
    }
}

/// Which parameters a body reads. Compilers warn of unused ones.
struct Reads {
    pair: bool,
    score: bool,
}

/// For each node, whether a body needs it.
struct Used(Vec<bool>);

impl Used {
    fn of(graph: &Graph, roots: &[Id]) -> Self {
        let mut used = vec![false; graph.nodes().len()];
        roots.iter().for_each(|root| used[root.index()] = true);
        for at in (0..used.len()).rev() {
            if used[at] {
                graph.nodes()[at].operands(|id| used[id.index()] = true);
            }
        }
        Self(used)
    }
}

impl Reads {
    fn of(graph: &Graph) -> Self {
        Self::of_used(graph, &Used(vec![true; graph.nodes().len()]))
    }

    fn of_used(graph: &Graph, used: &Used) -> Self {
        let nodes = || graph.nodes().iter().zip(&used.0).filter(|(_, used)| **used).map(|(node, _)| node);
        let score = nodes().any(|node| *node == Node::Variable(Variable::Score));
        let pair = nodes().any(|node| {
            matches!(node, Node::Number(_) | Node::Load(..) | Node::Variable(_))
                && *node != Node::Variable(Variable::Score)
        });
        Self { pair, score }
    }
}

fn header(signature: &str, reads: &Reads) -> String {
    let mut out = format!("template <class Pair>\nFMHA_EXPR {signature} {{\n");
    if !reads.pair {
        out += "  (void)pair;\n";
    }
    if !reads.score && signature.contains("float s") {
        out += "  (void)s;\n";
    }
    out
}

fn body(out: &mut String, graph: &Graph) -> Vec<String> {
    body_of(out, graph, &Used(vec![true; graph.nodes().len()]))
}

fn indices(capture: u32, at: &[Id], names: &[String], widths: &Widths) -> String {
    let one = |(axis, id): (usize, &Id)| {
        let (name, extent) = (&names[id.index()], format!("pair.extent({capture}, {axis})"));
        match widths.of(*id) {
            Width::FromZero => format!("expr::index_from_0({name}, {extent})"),
            Width::Narrow => format!("expr::index({name}, {extent})"),
            Width::Wide => format!("expr::index({name}, expr::i64({extent}))"),
        }
    };
    at.iter().enumerate().map(one).collect::<Vec<_>>().join(", ")
}

/// Width in which an integer is computed. The language has 64-bit integers, which take several instructions on a GPU;
/// values that always fit 32 bits are computed in 32.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Width {
    Wide,
    Narrow,
    /// 32 bits, and never negative.
    FromZero,
}

/// The width of each node of a graph, by the range of its values.
struct Widths(Vec<Width>);

impl Widths {
    fn new(graph: &Graph) -> Self {
        // A pair's numbers have 32 bits and are not negative, even beyond the lengths.
        let (any, length) = (0..u32::try_from(i32::MAX).unwrap_or(0) + 1, (0, i32::MAX.unsigned_abs()));
        let tile = Tile {
            b: any.clone(),
            h: any.clone(),
            q: any.clone(),
            k: any,
            seqlen_q: length,
            seqlen_k: length,
        };
        let bounds = Bounds::new(graph, &tile, &());
        let of =
            |at: usize| match bounds.of(Id(at as u32)) {
                Interval::Int { lo, hi } if i32::try_from(lo).is_ok() && i32::try_from(hi).is_ok() => {
                    if lo >= 0 { Width::FromZero } else { Width::Narrow }
                }
                _ => Width::Wide,
            };
        Self((0..graph.nodes().len()).map(of).collect())
    }

    fn of(&self, id: Id) -> Width {
        self.0[id.index()]
    }

    fn is_wide(&self, id: Id) -> bool {
        self.of(id) == Width::Wide
    }
}

/// Writes a line for each node that is no leaf; returns the names of all nodes.
fn body_of(out: &mut String, graph: &Graph, used: &Used) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(graph.nodes().len());
    let mut lines = 0;
    let widths = &Widths::new(graph);
    for (at, node) in graph.nodes().iter().enumerate() {
        if !used.0[at] {
            names.push(String::new());
            continue;
        }
        let kind = graph.type_of(Id(at as u32));
        let width = widths.0[at];
        // An integer is computed in 32 bits if it and all its operands fit 32 bits.
        let mut all_narrow = width != Width::Wide;
        node.operands(|id| all_narrow &= graph.type_of(id) != Type::Int || !widths.is_wide(id));
        let is_int = kind == Type::Int;
        let of = |id: &Id| {
            let name = names[id.index()].as_str();
            let widens = is_int && !all_narrow && graph.type_of(*id) == Type::Int && !widths.is_wide(*id);
            if widens { format!("expr::i64({name})") } else { name.to_owned() }
        };
        let text = match node {
            Node::Variable(Variable::Score) => {
                names.push("s".to_owned());
                continue;
            }
            Node::Variable(variable) => format!("pair.{}", variable.name()),
            Node::Bool(value) => value.to_string(),
            Node::Int(i64::MIN) => "(-9223372036854775807ll - 1)".to_owned(),
            Node::Int(value) => match i32::try_from(*value) {
                Ok(i32::MIN) => "(-2147483647 - 1)".to_owned(),
                Ok(value) => value.to_string(),
                Err(_) => format!("{value}ll"),
            },
            Node::Float(bits) => float(*bits),
            Node::Number(capture) => match kind {
                Type::Float => format!("pair.number({capture})"),
                _ => format!("pair.whole_number({capture})"),
            },
            Node::Load(capture, indices_of) => {
                let is_float = matches!(
                    graph.captures()[*capture as usize].kind,
                    CaptureKind::Tensor { stored, .. } if stored.value_type() == Type::Float
                );
                let read = if is_float { "load_float" } else { "load_int" };
                let suffix = if kind == Type::Bool { " != 0" } else { "" };
                if indices_of.is_empty() {
                    format!("pair.{read}({capture}, (const expr::i64*)0){suffix}")
                } else {
                    let at = indices(*capture, indices_of, &names, widths);
                    let _ = writeln!(out, "  const expr::i64 i{lines}[] = {{{at}}};");
                    format!("pair.{read}({capture}, i{lines}){suffix}")
                }
            }
            Node::Unary(op, a) => unary(*op, kind, all_narrow, &of(a)),
            Node::Binary(op @ (Binary::FloorDiv | Binary::Mod), a, b)
                if is_int && all_narrow && is_unsigned_quotient(graph, widths, *a, *b) =>
            {
                let sign = if *op == Binary::Mod { "%" } else { "/" };
                format!("int(unsigned({}) {sign} unsigned({}))", of(a), of(b))
            }
            Node::Binary(op, a, b) => match divisor(graph, *b).filter(|_| *op == Binary::Div) {
                Some(c) => format!("expr::div_by({}, {}, {})", of(a), of(b), float((1.0 / c).to_bits())),
                None => binary(*op, graph.type_of(*a), all_narrow, &of(a), &of(b)),
            },
            Node::Select(a, b, c) => format!("{} ? {} : {}", of(a), of(b), of(c)),
            Node::Clamp(x, low, high) => {
                format!("expr::min(expr::max({}, {}), {})", of(x), of(low), of(high))
            }
            Node::Cast(to, a) => match (to, graph.type_of(*a)) {
                (Type::Bool, Type::Float) => format!("{} != 0.f", of(a)),
                (Type::Bool, _) => format!("{} != 0", of(a)),
                (Type::Int, Type::Float) => format!("expr::whole({})", of(a)),
                (Type::Int, _) => of(a),
                (Type::Float, _) => format!("float({})", of(a)),
            },
        };
        let declared = match kind {
            Type::Bool => "bool",
            Type::Int if width == Width::Wide => "expr::i64",
            Type::Int => "int",
            Type::Float => "float",
        };
        let text = if declared == "int" && !all_narrow { format!("int({text})") } else { text };
        let _ = writeln!(out, "  const {declared} v{lines} = {text};");
        names.push(format!("v{lines}"));
        lines += 1;
    }
    names
}

/// Text of a constant: decimals that round to it.
fn float(bits: u32) -> String {
    let value = f32::from_bits(bits);
    if value.is_nan() {
        "(0.f / 0.f)".to_owned()
    } else if value.is_infinite() {
        format!("({}1.f / 0.f)", if value < 0.0 { "-" } else { "" })
    } else {
        format!("{value:?}f")
    }
}

/// The constant divisor, if it and its reciprocal are far from the limits of f32.
fn divisor(graph: &Graph, b: Id) -> Option<f32> {
    const FAR: f32 = 1e30;
    match graph.nodes()[b.index()] {
        Node::Float(bits) => Some(f32::from_bits(bits)).filter(|c| (1.0 / FAR..FAR).contains(&c.abs())),
        _ => None,
    }
}

/// Whether a quotient is one of numbers without a sign: of a number from 0 up by a constant from 1 up.
fn is_unsigned_quotient(graph: &Graph, widths: &Widths, a: Id, b: Id) -> bool {
    widths.of(a) == Width::FromZero && matches!(graph.nodes()[b.index()], Node::Int(1..))
}

/// Text of an operation on one operand. `narrow`: integers have 32 bits, and so has the result.
fn unary(op: Unary, kind: Type, narrow: bool, a: &str) -> String {
    let of = |name: &str| format!("{name}({a})");
    match (op, kind) {
        (Unary::Neg, Type::Int) if narrow => format!("-{a}"),
        (Unary::Neg, Type::Int) => of("expr::neg"),
        (Unary::Neg, _) => format!("-{a}"),
        (Unary::Abs, Type::Int) => of("expr::abs"),
        (Unary::Abs, _) => of("fabsf"),
        (Unary::Sign, _) => of("expr::sign"),
        (Unary::Floor, _) => of("floorf"),
        (Unary::Ceil, _) => of("ceilf"),
        (Unary::Round, _) => of("rintf"),
        (Unary::Exp, _) => of("expf"),
        (Unary::Exp2, _) => of("exp2f"),
        (Unary::Log, _) => of("logf"),
        (Unary::Log2, _) => of("log2f"),
        (Unary::Sin, _) => of("sinf"),
        (Unary::Cos, _) => of("cosf"),
        (Unary::Tanh, _) => of("tanhf"),
        (Unary::Erf, _) => of("erff"),
        (Unary::Sigmoid, _) => of("expr::sigmoid"),
        (Unary::Relu, _) => of("expr::relu"),
        (Unary::Sqrt, _) => of("sqrtf"),
        (Unary::Rsqrt, _) => format!("1.f / sqrtf({a})"),
        (Unary::Not, _) => format!("!{a}"),
        (Unary::BitNot, _) => format!("~{a}"),
    }
}

/// Text of an operation on two operands. `narrow`: integers have 32 bits, and so has the result.
fn binary(op: Binary, operands: Type, narrow: bool, a: &str, b: &str) -> String {
    let infix = |op: &str| format!("{a} {op} {b}");
    let call = |name: &str| format!("{name}({a}, {b})");
    match (op, operands) {
        (Binary::Add | Binary::Sub | Binary::Mul, Type::Int) if narrow => infix(op.name()),
        (Binary::Shl | Binary::Shr, _) if narrow => format!(
            "int(expr::{}(expr::i64({a}), expr::i64({b})))",
            if op == Binary::Shl { "shl" } else { "shr" }
        ),
        (Binary::Add, Type::Int) => call("expr::add"),
        (Binary::Sub, Type::Int) => call("expr::sub"),
        (Binary::Mul, Type::Int) => call("expr::mul"),
        (Binary::Mod, Type::Int) => call("expr::floor_mod"),
        (Binary::Mod, _) => call("expr::mod"),
        (Binary::FloorDiv, _) => call("expr::floor_div"),
        (Binary::Min, _) => call("expr::min"),
        (Binary::Max, _) => call("expr::max"),
        (Binary::Pow, _) => call("powf"),
        (Binary::MulZero, _) => call("expr::mul0"),
        (Binary::Shl, _) => call("expr::shl"),
        (Binary::Shr, _) => call("expr::shr"),
        (Binary::And, _) => infix("&&"),
        (Binary::Or, _) => infix("||"),
        (op, _) => infix(op.name()),
    }
}
