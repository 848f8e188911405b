//! Bounds of a mask over a tile, as C++ that g++, NVRTC and clang compile: [`bounds`](super::bounds) of integers and
//! bools, for kernels that classify tiles. Floats are not bounded here: a comparison of floats may be true or false.
//!
//! The text is a template over a `Tile`, which a kernel writes:
//!
//! ```text
//! expr::Bound b, h, q, k, seqlen_q, seqlen_k;          ranges of what Variable says
//! long long whole_number(int i);                       captured integers, by the capture's place
//! unsigned extent(int i, int axis);                    extents of captured tensors
//! long long load_int(int i, const long long* at);      elements of integers and bools, by resolved indices
//! ```

use std::fmt::Write as _;

use super::Function;
use super::graph::{Binary, Graph, Id, Node, Type, Unary, Variable};

/// Functions that printed bounds call, after [`DEVICE_PRELUDE`](super::DEVICE_PRELUDE). A bool is an integer from 0 to
/// 1. Ends beyond 2^31 are treated as unknown, so that no computation here wraps.
pub const BOUNDS_PRELUDE: &str = r"namespace fmha { namespace expr {
struct Bound {
  i64 lo, hi;
};
namespace bound {
FMHA_EXPR Bound any() { return {-9223372036854775807ll - 1, 9223372036854775807ll}; }
FMHA_EXPR Bound truth() { return {0, 1}; }
FMHA_EXPR bool is_known(Bound a) { return a.lo >= -(1ll << 31) && a.hi <= 1ll << 31; }
FMHA_EXPR bool is_point(Bound a) { return a.lo == a.hi; }
FMHA_EXPR Bound within(i64 lo, i64 hi) {
  const Bound a = {lo, hi};
  return is_known(a) ? a : any();
}
FMHA_EXPR Bound point(i64 x) { return within(x, x); }
FMHA_EXPR Bound join(Bound a, Bound b) { return {expr::min(a.lo, b.lo), expr::max(a.hi, b.hi)}; }
FMHA_EXPR Bound add(Bound a, Bound b) {
  return is_known(a) && is_known(b) ? within(a.lo + b.lo, a.hi + b.hi) : any();
}
FMHA_EXPR Bound sub(Bound a, Bound b) {
  return is_known(a) && is_known(b) ? within(a.lo - b.hi, a.hi - b.lo) : any();
}
FMHA_EXPR Bound corners(i64 a, i64 b, i64 c, i64 d) {
  return within(expr::min(expr::min(a, b), expr::min(c, d)), expr::max(expr::max(a, b), expr::max(c, d)));
}
FMHA_EXPR Bound mul(Bound a, Bound b) {
  if (!is_known(a) || !is_known(b)) return any();
  return corners(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi);
}
FMHA_EXPR Bound floor_div(Bound a, Bound b) {
  if (!is_known(a) || !is_known(b) || (b.lo <= 0 && b.hi >= 0)) return any();
  return corners(expr::floor_div(a.lo, b.lo), expr::floor_div(a.lo, b.hi), expr::floor_div(a.hi, b.lo),
                 expr::floor_div(a.hi, b.hi));
}
FMHA_EXPR Bound mod(Bound a, Bound b) {
  if (!is_known(b)) return any();
  if (is_known(a) && is_point(b) && b.lo != 0 && expr::floor_div(a.lo, b.lo) == expr::floor_div(a.hi, b.lo))
    return {expr::floor_mod(a.lo, b.lo), expr::floor_mod(a.hi, b.lo)};
  return {b.lo < 0 ? b.lo + 1 : 0, b.hi > 0 ? b.hi - 1 : 0};
}
FMHA_EXPR Bound neg(Bound a) { return sub(point(0), a); }
FMHA_EXPR Bound abs(Bound a) {
  if (!is_known(a)) return any();
  const i64 most = expr::max(-a.lo, a.hi);
  return a.lo >= 0 ? a : a.hi <= 0 ? neg(a) : within(0, most);
}
FMHA_EXPR Bound sign(Bound a) { return {expr::sign(a.lo), expr::sign(a.hi)}; }
FMHA_EXPR Bound bit_not(Bound a) { return is_known(a) ? within(-a.hi - 1, -a.lo - 1) : any(); }
FMHA_EXPR Bound min(Bound a, Bound b) { return {expr::min(a.lo, b.lo), expr::min(a.hi, b.hi)}; }
FMHA_EXPR Bound max(Bound a, Bound b) { return {expr::max(a.lo, b.lo), expr::max(a.hi, b.hi)}; }
FMHA_EXPR Bound bit_and(Bound a, Bound b) {
  if (a.lo >= 0 && b.lo >= 0) return {0, expr::min(a.hi, b.hi)};
  return a.lo >= 0 ? Bound{0, a.hi} : b.lo >= 0 ? Bound{0, b.hi} : any();
}
FMHA_EXPR i64 ones(i64 a) {
  for (int bits = 1; bits < 64; bits *= 2) a |= a >> bits;
  return a;
}
FMHA_EXPR Bound bit_or(Bound a, Bound b) {
  if (a.lo < 0 || b.lo < 0) return any();
  return {expr::max(a.lo, b.lo), ones(expr::max(a.hi, b.hi))};
}
FMHA_EXPR Bound bit_xor(Bound a, Bound b) {
  if (a.lo < 0 || b.lo < 0) return any();
  return {0, ones(expr::max(a.hi, b.hi))};
}
FMHA_EXPR Bound shl(Bound a, Bound b) {
  if (!is_known(a) || b.lo < 0 || b.hi > 30) return any();
  return mul(a, {1ll << b.lo, 1ll << b.hi});
}
FMHA_EXPR Bound shr(Bound a, Bound b) {
  if (b.lo < 0 || b.hi > 63) return any();
  return {expr::min(a.lo >> b.lo, a.lo >> b.hi), expr::max(a.hi >> b.lo, a.hi >> b.hi)};
}
// Bounds of a bool that may be true if `yes`, and may be false if `no`.
FMHA_EXPR Bound either(bool yes, bool no) { return {no ? 0 : 1, yes ? 1 : 0}; }
FMHA_EXPR Bound lt(Bound a, Bound b) { return either(a.lo < b.hi, a.hi >= b.lo); }
FMHA_EXPR Bound le(Bound a, Bound b) { return either(a.lo <= b.hi, a.hi > b.lo); }
FMHA_EXPR Bound eq(Bound a, Bound b) {
  return either(a.lo <= b.hi && b.lo <= a.hi, !(is_point(a) && is_point(b) && a.lo == b.lo));
}
FMHA_EXPR Bound negated(Bound a) { return {1 - a.hi, 1 - a.lo}; }
FMHA_EXPR Bound both(Bound a, Bound b) { return {a.lo & b.lo, a.hi & b.hi}; }
FMHA_EXPR Bound one_of(Bound a, Bound b) { return {a.lo | b.lo, a.hi | b.hi}; }
FMHA_EXPR Bound select(Bound condition, Bound yes, Bound no) {
  return condition.lo == 1 ? yes : condition.hi == 0 ? no : join(yes, no);
}
FMHA_EXPR Bound is_not_0(Bound a) { return either(a.lo != 0 || a.hi != 0, a.lo <= 0 && a.hi >= 0); }
}
} }
";

impl Function {
    /// Bounds of the mask as `template <class Tile> .. expr::Bound seen(const Tile& tile)`, after [`BOUNDS_PRELUDE`]:
    /// from 1 on it shows every pair of the tile, up to 0 none.
    #[must_use]
    pub fn bounds_text(&self) -> String {
        let graph = self.graph();
        let mut used = vec![false; graph.nodes().len()];
        used[self.root().index()] = true;
        for at in (0..used.len()).rev() {
            if used[at] {
                graph.nodes()[at].operands(|id| used[id.index()] |= graph.type_of(id) != Type::Float);
            }
        }
        let mut out =
            "template <class Tile>\nFMHA_EXPR expr::Bound seen(const Tile& tile) {\n  (void)tile;\n"
                .to_owned();
        let mut names: Vec<String> = Vec::with_capacity(used.len());
        for (at, node) in graph.nodes().iter().enumerate() {
            let kind = graph.type_of(Id(at as u32));
            if !used[at] || kind == Type::Float {
                names.push("expr::bound::any()".to_owned());
                continue;
            }
            let text = bound(graph, node, kind, &names, (&mut out, at));
            let _ = writeln!(out, "  const expr::Bound v{at} = {text};");
            names.push(format!("v{at}"));
        }
        let _ = writeln!(out, "  return {};\n}}", names[self.root().index()]);
        out
    }
}

/// Text of the bound of a node. `at` is the node's index, by which it is named.
fn bound(
    graph: &Graph,
    node: &Node,
    kind: Type,
    names: &[String],
    (out, at): (&mut String, usize),
) -> String {
    let of = |id: &Id| names[id.index()].as_str();
    let call = |name: &str, operands: &[&Id]| {
        let operands: Vec<&str> = operands.iter().map(|id| of(id)).collect();
        format!("expr::bound::{name}({})", operands.join(", "))
    };
    let unknown = if kind == Type::Bool { "expr::bound::truth()" } else { "expr::bound::any()" };
    match node {
        Node::Variable(Variable::Score) => unknown.to_owned(),
        Node::Variable(variable) => format!("tile.{}", variable.name()),
        Node::Bool(value) => format!("expr::bound::point({})", i32::from(*value)),
        Node::Int(value) if value.unsigned_abs() <= 1 << 31 => format!("expr::bound::point({value}ll)"),
        Node::Int(_) | Node::Float(_) => unknown.to_owned(),
        Node::Number(capture) => format!("expr::bound::point(tile.whole_number({capture}))"),
        Node::Load(capture, indices) => {
            let nonzero = if kind == Type::Bool { " != 0" } else { "" };
            if indices.is_empty() {
                let load = format!("tile.load_int({capture}, (const expr::i64*)0){nonzero}");
                return format!("expr::bound::point({load})");
            }
            let places: Vec<String> = indices
                .iter()
                .enumerate()
                .map(|(axis, id)| {
                    format!("expr::index({}.lo, expr::i64(tile.extent({capture}, {axis})))", of(id))
                })
                .collect();
            let points: Vec<String> =
                indices.iter().map(|id| format!("expr::bound::is_point({})", of(id))).collect();
            let _ = writeln!(out, "  const expr::i64 i{at}[] = {{{}}};", places.join(", "));
            format!(
                "{} ? expr::bound::point(tile.load_int({capture}, i{at}){nonzero}) : {unknown}",
                points.join(" && ")
            )
        }
        Node::Unary(op, a) => match op {
            Unary::Neg => call("neg", &[a]),
            Unary::Abs => call("abs", &[a]),
            Unary::Sign => call("sign", &[a]),
            Unary::BitNot => call("bit_not", &[a]),
            Unary::Not => call("negated", &[a]),
            _ => unknown.to_owned(),
        },
        Node::Binary(_, a, _) if graph.type_of(*a) == Type::Float => unknown.to_owned(),
        Node::Binary(op, a, b) if graph.type_of(*a) == Type::Bool => match op {
            Binary::And => call("both", &[a, b]),
            Binary::Or => call("one_of", &[a, b]),
            _ => unknown.to_owned(),
        },
        Node::Binary(op, a, b) => match op {
            Binary::Add => call("add", &[a, b]),
            Binary::Sub => call("sub", &[a, b]),
            Binary::Mul => call("mul", &[a, b]),
            Binary::FloorDiv => call("floor_div", &[a, b]),
            Binary::Mod => call("mod", &[a, b]),
            Binary::Min => call("min", &[a, b]),
            Binary::Max => call("max", &[a, b]),
            Binary::BitAnd => call("bit_and", &[a, b]),
            Binary::BitOr => call("bit_or", &[a, b]),
            Binary::BitXor => call("bit_xor", &[a, b]),
            Binary::Shl => call("shl", &[a, b]),
            Binary::Shr => call("shr", &[a, b]),
            Binary::Lt => call("lt", &[a, b]),
            Binary::Le => call("le", &[a, b]),
            Binary::Gt => call("lt", &[b, a]),
            Binary::Ge => call("le", &[b, a]),
            Binary::Eq => call("eq", &[a, b]),
            Binary::Ne => format!("expr::bound::negated({})", call("eq", &[a, b])),
            _ => unknown.to_owned(),
        },
        Node::Select(condition, yes, no) => call("select", &[condition, yes, no]),
        Node::Clamp(x, low, high) => {
            format!("expr::bound::min(expr::bound::max({}, {}), {})", of(x), of(low), of(high))
        }
        Node::Cast(to, a) => match (to, graph.type_of(*a)) {
            (_, Type::Float) => unknown.to_owned(),
            (Type::Bool, Type::Int) => call("is_not_0", &[a]),
            _ => of(a).to_owned(),
        },
    }
}
