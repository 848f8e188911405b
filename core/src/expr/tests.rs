//! Tests of expressions that must hold for all random functions.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;

use proptest::prelude::*;

use super::draw::{self, CAPTURED, Draw, Kind, NUMBERS};
use super::*;

/// Memory from which the tensors of random captures are made.
struct Memory {
    tensors: Vec<(Vec<u8>, Vec<u32>, Vec<i64>)>,
    numbers: [Number; 2],
}

impl Memory {
    fn new(seed: u64) -> Self {
        let mut draw = Draw::new(seed ^ 0xca97);
        let tensors = CAPTURED
            .iter()
            .map(|&(_, stored, rank)| {
                let shape: Vec<u32> = (0..rank).map(|_| 1 + draw.below(6) as u32).collect();
                let mut strides = vec![1i64; rank];
                for axis in (0..rank.saturating_sub(1)).rev() {
                    strides[axis] = strides[axis + 1] * i64::from(shape[axis + 1]);
                }
                let count: u32 = shape.iter().product();
                let mut bytes = vec![];
                for _ in 0..count {
                    let x = draw.unit() as f32;
                    match stored {
                        Stored::F32 => bytes.extend(x.to_ne_bytes()),
                        Stored::F16 => bytes.extend(half::f16::from_f32(x).to_ne_bytes()),
                        Stored::Bf16 => bytes.extend(half::bf16::from_f32(x).to_ne_bytes()),
                        Stored::I32 => bytes.extend((draw.below(9) as i32 - 2).to_ne_bytes()),
                        Stored::I64 => bytes.extend((draw.below(9) as i64 - 2).to_ne_bytes()),
                        Stored::Bool => bytes.push(draw.below(2) as u8),
                    }
                }
                (bytes, shape, strides)
            })
            .collect();
        Self { tensors, numbers: [Number::Float(draw.unit() as f32), Number::Int(draw.below(7) as i64 - 3)] }
    }

    /// Random values of a function's captures.
    fn of(&self, captures: &[Capture]) -> Vec<Captured<'_>> {
        let of = |capture: &Capture| match capture.kind {
            CaptureKind::Number(_) => Captured::Number(
                self.numbers[NUMBERS.iter().position(|(name, _)| *name == capture.name).unwrap()],
            ),
            CaptureKind::Tensor { stored, .. } => {
                let at = CAPTURED.iter().position(|(name, ..)| *name == capture.name).unwrap();
                let (bytes, shape, strides) = &self.tensors[at];
                Captured::Tensor(HostTensor { bytes, stored, shape, strides })
            }
        };
        captures.iter().map(of).collect()
    }
}

fn pair(draw: &mut Draw) -> Pair {
    let (seqlen_q, seqlen_k) = (1 + draw.below(40) as u32, 1 + draw.below(60) as u32);
    Pair {
        score: draw.unit() * 4.0,
        b: draw.below(3) as u32,
        h: draw.below(5) as u32,
        q: draw.below(seqlen_q as usize) as u32,
        k: draw.below(seqlen_k as usize) as u32,
        seqlen_q,
        seqlen_k,
    }
}

fn drawn(seed: u64) -> Function {
    if seed.is_multiple_of(3) { draw::mask(seed, Kind::Any) } else { draw::score(seed, Kind::Any) }.unwrap()
}

#[test]
fn a_drawn_function_has_every_operation() {
    let mut texts = String::new();
    (0..3000).for_each(|seed| writeln!(texts, "{:?}", drawn(seed).graph().nodes()).unwrap());
    let names = Unary::ALL.iter().map(|op| format!("Unary({op:?},"));
    for name in names.chain(Binary::ALL.iter().map(|op| format!("Binary({op:?},"))) {
        assert!(texts.contains(&name), "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_text_of_a_function_parses_to_it(seed: u64) {
        for function in [drawn(seed), slope_of(&drawn(seed | 1))] {
            let text = function.to_string();
            let parsed: Function = text.parse().unwrap_or_else(|error| panic!("{text}\n{error}"));
            prop_assert_eq!(parsed.to_string(), text);
            prop_assert_eq!(parsed.structure(), function.structure());
            prop_assert_eq!(parsed, function);
        }
    }

    /// Compares derivatives with central differences where the function does not jump: both sides of each
    /// point, at two steps, agree.
    #[test]
    fn derivatives_are_central_differences(seed: u64) {
        let function = draw::score(seed, if seed % 2 == 0 { Kind::Any } else { Kind::Tame }).unwrap();
        let (slopes, mut draw) = (function.slopes(), Draw::new(seed));
        let mut memory = Memory::new(seed);
        for _ in 0..8 {
            let pair = pair(&mut draw);
            let at = |pair: &Pair, memory: &Memory| {
                function.eval(pair, &memory.of(function.captures()), Rounding::Exact).float()
            };
            let values = eval::eval(&slopes.graph, &pair, &memory.of(slopes.graph.captures()), Rounding::Exact);
            if hides_steps(&function, &pair, &memory) {
                continue;
            }
            let score = |step: f64| at(&Pair { score: pair.score + step, ..pair }, &memory);
            check_slope(&function, values[slopes.score.index()].float(), score)
                .map_err(|error| TestCaseError::fail(format!("{function} at {pair:?}: {error}")))?;

            // A step of a captured f32 number is rounded to f32, unlike other steps.
            let Number::Float(rate) = memory.numbers[0] else { unreachable!() };
            let mut sum = 0.0;
            for capture in &slopes.captures {
                if slopes.graph.captures()[capture.capture].name == "rate" {
                    sum += values[capture.slope.index()].float();
                }
            }
            let mut moved = |step: f64| {
                memory.numbers[0] = Number::Float(rate + step as f32);
                let value = at(&pair, &memory);
                memory.numbers[0] = Number::Float(rate);
                value
            };
            check_slope_of_f32(&function, sum, rate, &mut moved)
                .map_err(|error| TestCaseError::fail(format!("{function} at {pair:?}: {error}")))?;
            // All reads of one element of a captured tensor contribute to its derivative.
            let element = draw.below(memory.tensors[0].1[0] as usize);
            let mut sum = 0.0;
            for capture in &slopes.captures {
                if slopes.graph.captures()[capture.capture].name == "slopes" {
                    let index = values[capture.at[0].index()].int();
                    if HostTensor::resolved(index, memory.tensors[0].1[0]) == element as u64 {
                        sum += values[capture.slope.index()].float();
                    }
                }
            }
            let bytes = element * 4..element * 4 + 4;
            let old = f32::from_ne_bytes(memory.tensors[0].0[bytes.clone()].try_into().unwrap());
            let mut moved = |step: f64| {
                memory.tensors[0].0[bytes.clone()].copy_from_slice(&(old + step as f32).to_ne_bytes());
                let value = at(&pair, &memory);
                memory.tensors[0].0[bytes.clone()].copy_from_slice(&old.to_ne_bytes());
                value
            };
            check_slope_of_f32(&function, sum, old, &mut moved)
                .map_err(|error| TestCaseError::fail(format!("{function} at {pair:?}: {error}")))?;
        }
    }

    #[test]
    fn bounds_hold_every_value_in_f64_and_f32(seed: u64) {
        let (function, memory, mut draw) = (drawn(seed), Memory::new(seed), Draw::new(seed));
        let captured = memory.of(function.captures());
        for number in 0..6 {
            let (seqlen_q, seqlen_k) = (20 + draw.below(30) as u32, 20 + draw.below(30) as u32);
            let (q, k) = (draw.below(16) as u32, draw.below(16) as u32);
            let tile = Tile {
                b: 0..2,
                h: 1..3,
                q: q..q + 1 + draw.below(4) as u32,
                k: k..k + 1 + draw.below(4) as u32,
                seqlen_q: (seqlen_q, seqlen_q),
                seqlen_k: (seqlen_k, seqlen_k),
            };
            let bounds = match number % 2 {
                0 => Bounds::new(function.graph(), &tile, captured.as_slice()),
                _ => Bounds::new(function.graph(), &tile, &()),
            };
            for (b, h, q, k) in pairs(&tile) {
                let pair = Pair { score: draw.unit() * 50.0, b, h, q, k, seqlen_q, seqlen_k };
                for rounding in [Rounding::Exact, Rounding::F32] {
                    let values = eval::eval(function.graph(), &pair, &captured, rounding);
                    for (at, value) in values.into_iter().enumerate() {
                        let interval = bounds.of(Id(at as u32));
                        prop_assert!(
                            interval.contains(value),
                            "{function}: node {at} {:?} is {value:?}, not in {interval:?} at {pair:?}",
                            function.graph().nodes()[at]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn blocks_have_the_values_of_pairs(seed: u64) {
        let (function, memory, mut draw) = (drawn(seed), Memory::new(seed), Draw::new(seed));
        let captured = memory.of(function.captures());
        let program = Program::new(function.graph(), &[function.root()]);
        let tile = Tile { b: 0..4, h: 0..8, q: 0..200, k: 0..200, seqlen_q: (200, 200), seqlen_k: (200, 200) };
        let narrow = Bounds::new(function.graph(), &tile, captured.as_slice()).fits_i32();
        let mut lanes = Lanes::new(&program, narrow);
        let steps = steps(function.graph());
        let is_sine = |node: &Node| matches!(node, Node::Unary(Unary::Sin | Unary::Cos, _));
        let has_sine = function.graph().nodes().iter().any(is_sine);
        for width in [1, 16, 32] {
            let (b, h) = (draw.below(3) as u32, draw.below(5) as u32);
            let head = Pair { b, h, seqlen_q: 200, seqlen_k: 200, ..Pair::default() };
            lanes.set_head(&program, &captured, &head);
            let block = Block { q: draw.below(40) as u32, k: draw.below(40) as u32, width };
            let scores: Vec<f32> = (0..Program::BLOCK).map(|_| draw.unit() as f32 * 4.0).collect();
            lanes.run(&program, &captured, &ScalarMath, block, &scores);
            for (e, &score) in scores.iter().enumerate() {
                let (q, k) = (block.q + (e % width) as u32, block.k + (e / width) as u32);
                let pair = Pair { score: score.into(), b, h, q, k, seqlen_q: 200, seqlen_k: 200 };
                let value = function.eval(&pair, &captured, Rounding::F32);
                if function.is_mask() && !steps {
                    prop_assert_eq!(lanes.bools(&program, 0)[e] != 0, value.bool(), "{} at {:?}", function, pair);
                } else if !function.is_mask() {
                    let found = f64::from(lanes.floats(&program, 0)[e]);
                    let values = eval::eval(function.graph(), &pair, &captured, Rounding::F32);
                    // A sine magnifies the last digits of a large number, where a step is lost.
                    let most = if has_sine { 1e2 } else { 1e3 };
                    let strays = |value: &Value| match value {
                        Value::Float(x) => *x != 0.0 && !(1e-6..most).contains(&x.abs()),
                        _ => false,
                    };
                    if values.iter().any(strays) || steps {
                        continue;
                    }
                    let exact = function.eval(&pair, &captured, Rounding::Exact).float();
                    prop_assert!(
                        near(found, value.float(), exact),
                        "{function} at {pair:?}: {found}, not {value:?} ({exact})"
                    );
                }
            }
        }
    }
}

/// Whether a float jumps: on either side of a jump both values are right.
fn steps(graph: &Graph) -> bool {
    let is_float = |id: &Id| graph.type_of(*id) == Type::Float;
    graph.nodes().iter().any(|node| match node {
        Node::Unary(Unary::Floor | Unary::Ceil | Unary::Round | Unary::Sign, a)
        | Node::Binary(Binary::Mod, a, _)
        | Node::Cast(Type::Int | Type::Bool, a) => is_float(a),
        Node::Binary(op, a, _) => op.compares() && is_float(a),
        _ => false,
    })
}

/// A function with the operations of a derivative, for its text.
fn slope_of(score: &Function) -> Function {
    let slopes = score.slopes();
    Function::of(&slopes.graph, slopes.score).unwrap_or_else(|_| score.clone())
}

/// Whether two results agree up to the rounding that a tree of functions accumulates. Where f32 and f64 differ by more,
/// two evaluations in f32 may differ too.
fn near(found: f64, wanted: f64, exact: f64) -> bool {
    if wanted.is_nan() || exact.is_nan() || !exact.is_finite() {
        return true;
    }
    let slack = 64.0 * (wanted - exact).abs() + 1e-4 * wanted.abs().max(1.0);
    (found - wanted).abs() <= slack || (wanted - exact).abs() > 0.01 * exact.abs().max(1e-3)
}

fn pairs(tile: &Tile) -> Vec<(u32, u32, u32, u32)> {
    let mut all = vec![];
    for b in tile.b.clone() {
        for h in tile.h.clone() {
            for q in tile.q.clone() {
                tile.k.clone().for_each(|k| all.push((b, h, q, k)));
            }
        }
    }
    all
}

/// Whether a slope is torch's NaN or infinity: a pole's own slope, 0 times it, and exponents of numbers below 0.
fn is_singular(function: &Function, slope: f64) -> bool {
    let has_pole = |node: &Node| match node {
        Node::Binary(op, ..) => matches!(op, Binary::Pow | Binary::Div | Binary::Mod),
        Node::Unary(op, _) => matches!(op, Unary::Sqrt | Unary::Rsqrt | Unary::Log | Unary::Log2),
        _ => false,
    };
    !slope.is_finite() && function.graph().nodes().iter().any(has_pole)
}

/// Whether differences do not see how a function changes at a pair: a number so large that a step is lost beside it, or
/// a remainder of a small divisor, which rises and falls millions of times within a step.
fn hides_steps(function: &Function, pair: &Pair, memory: &Memory) -> bool {
    const LARGE: f64 = 1e6;
    let graph = function.graph();
    let values = eval::eval(graph, pair, &memory.of(function.captures()), Rounding::Exact);
    let is_large = |x: f64| x.abs() > LARGE;
    let has_teeth = graph.nodes().iter().any(|node| match *node {
        Node::Binary(Binary::Mod, a, b) if graph.type_of(a) == Type::Float => {
            is_large(values[a.index()].float() / values[b.index()].float())
        }
        _ => false,
    });
    has_teeth || values.iter().any(|value| matches!(value, Value::Float(x) if is_large(*x)))
}

/// Compares `slope` with differences of `f` around 0, at the step sizes where they converge.
fn check_slope(function: &Function, slope: f64, mut f: impl FnMut(f64) -> f64) -> Result<(), TestCaseError> {
    if is_singular(function, slope) {
        return Ok(());
    }
    let here = f(0.0);
    let mut difference = |step: f64| (f(step) - f(-step)) / (2.0 * step);
    // The last step tells a staircase, whose steps may be narrower than the others, from a slope.
    let (wide, close, nearest) = (difference(1e-4), difference(5e-5), difference(1e-7));
    let mut side = |step: f64| (f(step) - here) / step;
    let (left, right) = (side(-5e-5), side(5e-5));
    let size = 1.0f64.max(close.abs());
    let settles = |a: f64, b: f64| (a - b).abs() < 1e-3 * size;
    // The function has a jump or a corner here, or values too large for differences in f64.
    if !(here.abs() < 1e3
        && settles(wide, close)
        && settles(close, nearest)
        && (left - right).abs() < 0.02 * size)
    {
        return Ok(());
    }
    prop_assert!((slope - close).abs() < 5e-3 * size, "slope {slope}, differences {wide} {close}");
    Ok(())
}

/// Does what [`check_slope`] does, with a step that is rounded to f32.
fn check_slope_of_f32(
    function: &Function,
    slope: f64,
    at: f32,
    f: &mut impl FnMut(f64) -> f64,
) -> Result<(), TestCaseError> {
    if is_singular(function, slope) {
        return Ok(());
    }
    let here = f(0.0);
    let mut side = |step: f32| (f(step.into()) - here) / f64::from((at + step) - at);
    let (left, right) = (side(-1e-3), side(1e-3));
    let (near_left, near_right) = (side(-5e-4), side(5e-4));
    let close = (near_left + near_right) / 2.0;
    let nearest = (side(-2e-5) + side(2e-5)) / 2.0;
    let size = 1.0f64.max(close.abs());
    let settles = here.abs() < 1e3
        && ((left + right) / 2.0 - close).abs() < 1e-3 * size
        && (close - nearest).abs() < 1e-3 * size
        && (near_left - near_right).abs() < 0.02 * size;
    if settles {
        prop_assert!((slope - close).abs() < 5e-3 * size, "slope {slope}, differences {close}");
    }
    Ok(())
}

#[test]
fn most_drawn_slopes_are_checked() {
    let mut checked = 0;
    for seed in 0..200 {
        let function = draw::score(seed, Kind::Tame).unwrap();
        let (memory, mut draw) = (Memory::new(seed), Draw::new(seed));
        let pair = pair(&mut draw);
        let captured = memory.of(function.captures());
        let at = |step: f64| {
            function.eval(&Pair { score: pair.score + step, ..pair }, &captured, Rounding::Exact).float()
        };
        let (left, right) = ((at(0.0) - at(-1e-5)) / 1e-5, (at(1e-5) - at(0.0)) / 1e-5);
        checked += usize::from((left - right).abs() < 1e-2);
    }
    assert!(checked > 180, "{checked} of 200");
}

#[test]
fn a_parse_error_names_the_place_and_the_word() {
    for (text, error) in [
        ("s + foo", "column 5, `foo`: the name is neither s, b, h, q, k, seqlen_q, seqlen_k nor declared"),
        ("s +", "column 4, the end: a value is expected here"),
        ("s ** 2", "column 3, `*`: powers are written pow(a, b)"),
        ("max(s)", "column 1, `max`: the function takes 2 operands, not 1"),
        ("atan(s)", "column 1, `atan`: the language has no function of this name"),
        ("q // 2.0", "column 3, `/`: // does not take int and float; floor(a / b) does"),
        ("s + (k <= q)", "column 3, `+`: + does not take float and bool"),
        ("t: f32[_]; s + t[q, k]", "column 16, `t`: t[..] has 2 indices for 1 axes"),
        ("t: f32[_]; s + t[s]", "column 16, `t`: t: the index of axis 0 is float, not int"),
        ("t: f64[_]; s", "column 4, `f64`: a tensor's type is f32, f16, bf16, i32, i64 or bool"),
        ("q: int; s", "column 1, `q`: the name is taken"),
        ("s + 1e99", "column 5, `1e99`: the number is larger than f32 holds"),
        ("k <= q <= 3", "column 8, `<`: comparisons are joined by `and`"),
        ("s $ 2", "column 3, `$`: no operator of the language begins so"),
        ("k <= q s", "column 8, `s`: the expression ends before this word"),
        ("s <= 2", "s: a mask does not read the score"),
    ] {
        assert_eq!(text.parse::<Function>().unwrap_err().to_string(), error, "{text}");
    }
    let deep = format!("{}s{}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(deep.parse::<Function>().unwrap_err().to_string().contains("nests deeper than 200"));
    let long = vec!["s"; 100_000].join(" + ");
    assert!(long.parse::<Function>().is_err(), "100000 operations");
}

#[test]
fn operators_bind_as_in_python() {
    let pair = Pair { score: 0.5, b: 1, h: 2, q: 7, k: 3, seqlen_q: 8, seqlen_k: 9 };
    for (text, value) in [
        ("2 + 3 * 4 % 5 - -1", 5.0),
        ("-7 // 2", -4.0),
        ("-7 % 2", 1.0),
        ("7 % -2", -1.0),
        ("7 // 0 + 7 % 0", 0.0),
        ("-7.5 % 2", 0.5),
        ("1 | 6 & 3 ^ 1 << 2", 7.0),
        ("q / 2", 3.5),
        ("select(not k == 3 or q > 5 and true, 1, 2)", 1.0),
        ("round(2.5) + round(-0.5) + float(int(-2.7))", 0.0),
        ("sign(-3) * abs(-4) + sign(0.0)", -4.0),
        ("let a = s + s; a * a", 1.0),
        ("~q + (1 << 70) + (-1 >> 99)", -9.0),
        ("min(q, k) + max(s, 1) + clamp(9, 2, 4)", 8.0),
        ("pow(2, 3) + exp2(3) + log2(8) + relu(-1)", 19.0),
        ("mul0(0, inf) + seqlen_q + seqlen_k", 17.0),
    ] {
        let function: Function = text.parse().unwrap();
        assert_eq!(function.eval(&pair, &[], Rounding::Exact), Value::Float(value), "{text}");
    }
}

#[test]
fn an_index_counts_from_the_end_once_and_is_clamped() {
    let found: Vec<u64> = [0, 3, 4, 99, -1, -4, -5, i64::MIN].map(|i| HostTensor::resolved(i, 4)).to_vec();
    assert_eq!(found, [0, 3, 3, 3, 3, 0, 0, 0]);
}

#[test]
fn the_surface_of_rust_builds_what_the_text_says() {
    let slopes = Tensor::<f32, 1>::new("slopes");
    let table = Tensor::<half::bf16, 2>::new("table");
    let documents = Tensor::<i32, 2>::new("documents");
    let score = Function::score(|s: Score, at: At| {
        let near = (at.q - at.k).abs().lt(4);
        select(near, s + slopes[at.h] * (at.k - at.q), (s / 2.0).tanh() * table[(at.h, at.b)])
            * number("rate")
    });
    let text = "slopes: f32[_]; table: bf16[_, _]; rate: float; \
        select(abs(q - k) < 4, s + slopes[h] * (k - q), tanh(s / 2) * table[h, b]) * rate";
    assert_eq!(score.unwrap(), text.parse().unwrap());
    let mask = Function::mask(|at: At| {
        let same = documents[(at.b, at.q)].equals(documents[(at.b, at.k)]);
        same & (at.k.le(at.q) | at.k.lt(whole_number("prefix")))
    });
    let text =
        "documents: i32[_, _]; prefix: int; documents[b, q] == documents[b, k] and (k <= q or k < prefix)";
    assert_eq!(mask.unwrap(), text.parse().unwrap());
    let twice = Function::score(|s: Score, at: At| s + number("c") + Tensor::<f32, 1>::new("c")[at.q]);
    assert_eq!(twice.unwrap_err().to_string(), "c is float and f32[_]: one name is one capture");
    let reserved = Function::score(|s: Score, _: At| s + number("exp"));
    assert_eq!(reserved.unwrap_err().to_string(), "capture \"exp\": the name is taken");
}

/// Values are made before a function, within it, and for functions that are never made; an error stays with its value.
#[test]
fn what_is_wrong_with_a_value_is_said_by_each_function_that_reads_it_and_by_no_other() {
    let wrong = number("exp");
    for _ in 0..2 {
        let error = Function::score(|s: Score, _: At| s * wrong).unwrap_err();
        assert_eq!(error.to_string(), "capture \"exp\": the name is taken");
    }
    let outer = Function::score(|s: Score, at: At| {
        let wrong = number("log");
        assert!(Function::mask(|at: At| at.k.le(at.q)).is_ok());
        s + wrong * at.k
    });
    assert_eq!(outer.unwrap_err().to_string(), "capture \"log\": the name is taken");
    assert!(Function::score(|s: Score, _: At| s * 2.0).is_ok());
    // One name with different types in two functions is two captures.
    assert!(Function::score(|s: Score, at: At| s + Tensor::<f32, 1>::new("t")[at.q]).is_ok());
    assert!(Function::score(|s: Score, at: At| s + Tensor::<f32, 2>::new("t")[(at.q, at.k)]).is_ok());
}

#[test]
fn a_tensor_is_indexed_any_number_of_times() {
    let table = Tensor::<f32, 1>::new("table");
    let first = &raw const table[Int::from(0)];
    for _ in 0..200_000 {
        assert_eq!(&raw const table[Int::from(0)], first);
    }
    for i in 0..3_000 {
        let _ = table[Int::from(i)];
    }
}

#[test]
fn names_of_captures_and_values_of_numbers_are_not_the_structure() {
    let of = |text: &str| text.parse::<Function>().unwrap().structure();
    assert_eq!(of("a: float; s * a"), of("rate: float; s * rate"));
    assert_eq!(of("a: float; s * a"), of("   a:float;(s*a)"));
    assert_ne!(of("a: float; s * a"), of("a: f32[]; s * a[]"));
    assert_ne!(of("s * 2"), of("s * 3"));
}

#[test]
fn a_branch_that_is_not_taken_adds_0_though_it_is_nan() {
    let score: Function = "select(k > 0, s, sqrt(s) * log(s - 1))".parse().unwrap();
    let slopes = score.slopes();
    for (k, slope) in [(1, 1.0), (0, f64::NAN)] {
        let pair = Pair { score: 0.0, k, ..Pair::default() };
        let found = eval::eval(&slopes.graph, &pair, &[], Rounding::Exact)[slopes.score.index()].float();
        assert!(found == slope || found.is_nan() && slope.is_nan(), "k {k}: {found}");
    }
    for (text, at, slope) in [
        ("abs(s)", 0.0, 0.0),
        ("relu(s)", 0.0, 0.0),
        ("max(s, 1)", 1.0, 0.5),
        ("min(s, s)", 3.0, 1.0),
        ("max(s, 1) + 3 * min(s, 1)", 2.0, 1.0),
        ("max(s, 1) + 3 * min(s, 1)", 0.0, 3.0),
        ("clamp(s, 1, 2)", 2.0, 1.0),
        ("clamp(s, 1, 2)", 1.0, 1.0),
        ("floor(s) + round(s)", 2.0, 0.0),
        ("select(s > 1, 2 * s, 3 * s)", 1.0, 3.0),
        ("sqrt(s) * 0", 0.0, 0.0),
    ] {
        let slopes = text.parse::<Function>().unwrap().slopes();
        let pair = Pair { score: at, ..Pair::default() };
        let found = eval::eval(&slopes.graph, &pair, &[], Rounding::Exact)[slopes.score.index()].float();
        assert_eq!(found, slope, "{text}");
    }
}

/// Tiles of the masks that models use are found to be fully visible or empty wherever they are.
#[test]
fn tiles_of_common_masks_are_whole_empty_or_cut() {
    let ids: Vec<u8> = (0..64).flat_map(|at: i32| (at / 16).to_ne_bytes()).collect();
    let tensor = HostTensor { bytes: &ids, stored: Stored::I32, shape: &[64], strides: &[1] };
    let captured = [Captured::Tensor(tensor)];
    let tile =
        |q: std::ops::Range<u32>, k| Tile { b: 0..1, h: 0..1, q, k, seqlen_q: (64, 64), seqlen_k: (64, 64) };
    for (text, q, k, seen) in [
        ("k <= q", 0..16, 16..32, Seen::Nothing),
        ("k <= q", 16..32, 0..17, Seen::Everything),
        ("k <= q", 16..32, 0..18, Seen::Part),
        ("k <= q + (seqlen_k - seqlen_q) and q - k < 8", 0..8, 8..16, Seen::Nothing),
        ("k <= q and q - k < 8", 16..20, 13..17, Seen::Everything),
        ("q // 8 == k // 8", 8..16, 8..16, Seen::Everything),
        ("q // 8 == k // 8", 8..16, 16..24, Seen::Nothing),
        ("ids: i32[_]; ids[q] == ids[k]", 16..32, 16..32, Seen::Everything),
        ("ids: i32[_]; ids[q] == ids[k]", 16..32, 32..48, Seen::Nothing),
        ("ids: i32[_]; ids[q] == ids[k]", 16..33, 16..32, Seen::Part),
    ] {
        let mask: Function = text.parse().unwrap();
        assert_eq!(mask.seen(&tile(q.clone(), k.clone()), captured.as_slice()), seen, "{text} {q:?} {k:?}");
    }
}

/// Runs every operation alone, including step functions, on numbers for which f32 and f64 agree.
#[test]
fn blocks_compute_each_operation_as_pairs_do() {
    const XS: [f32; 12] = [-2.75, -2.5, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 1.5, 3.0, 7.0];
    let mut functions = vec![];
    for op in Unary::ALL {
        functions.push(match op {
            Unary::Not => "float(not (s > 0.3))".to_owned(),
            Unary::BitNot => "~int(s * 4)".to_owned(),
            Unary::Neg => "-s - float(-int(s * 2))".to_owned(),
            Unary::Abs | Unary::Sign => format!("{0}(s) + {0}(int(s * 2))", op.name()),
            op => format!("{}(s)", op.name()),
        });
    }
    for op in Binary::ALL {
        let name = op.name();
        functions.push(match op {
            Binary::Min | Binary::Max => format!("{name}(s, float(k)) * {name}(q, int(s * 2))"),
            Binary::Pow | Binary::MulZero => format!("{name}(s, float(k - 3))"),
            Binary::And | Binary::Or => format!("float(s > 0.1 {name} k > 3)"),
            op if op.compares() => format!("float(s {name} k - 2) + float(int(s) {name} k - 2)"),
            Binary::FloorDiv
            | Binary::BitAnd
            | Binary::BitOr
            | Binary::BitXor
            | Binary::Shl
            | Binary::Shr => {
                format!("int(s * 3) {name} (k - 2)")
            }
            _ => format!("(s {name} float(k - 2)) + float(int(s * 3) {name} (k - 2))"),
        });
    }
    for text in [
        "clamp(s, -1, k - 3) + clamp(q, 1, k)",
        "select(k > 4, s, q) + select(s > 0, k, 2)",
        "bool(s) == bool(k)",
    ] {
        functions.push(if text.contains("==") { format!("float({text})") } else { text.to_owned() });
    }
    for text in functions {
        let function: Function = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        let program = Program::new(function.graph(), &[function.root()]);
        for narrow in [false, true] {
            let mut lanes = Lanes::new(&program, narrow);
            lanes.set_head(&program, &[], &Pair { seqlen_q: 12, seqlen_k: 10, ..Pair::default() });
            let scores: Vec<f32> = (0..120).map(|e| XS[e % 12]).collect();
            lanes.run(&program, &[], &ScalarMath, Block { q: 0, k: 0, width: 12 }, &scores);
            for (e, &score) in scores.iter().enumerate() {
                let (q, k) = ((e % 12) as u32, (e / 12) as u32);
                let pair = Pair { score: score.into(), q, k, seqlen_q: 12, seqlen_k: 10, ..Pair::default() };
                let wanted = function.eval(&pair, &[], Rounding::F32).float();
                let found = f64::from(lanes.floats(&program, 0)[e]);
                let same = found == wanted
                    || found.is_nan() && wanted.is_nan()
                    || (found - wanted).abs() <= 3e-7 * wanted.abs();
                assert!(same, "{text} at s {score}, q {q}, k {k}: {found}, not {wanted}");
            }
        }
    }
}

/// Text of a random conjunction: bounds of distances as people write them, and random masks.
fn conjunction(draw: &mut Draw) -> String {
    let bound = |draw: &mut Draw| {
        let c = draw.below(15) as i64 - 7;
        let m = 1 + draw.below(4) as i64;
        match draw.below(12) {
            0 => "q >= k".to_owned(),
            1 => format!("q - k <= {c}"),
            2 => format!("k - q < {c}"),
            3 => format!("not (k > q + {c})"),
            4 => format!("abs(q - k) <= {c}"),
            5 => format!("{c} > abs(k - q + {m})"),
            6 => format!("{m} * q + {c} >= k * {m}"),
            7 => format!("k - q <= seqlen_k - seqlen_q + {c}"),
            8 => format!("not (q + seqlen_k - k < seqlen_q or k + {c} > q + 9)"),
            9 => format!("k == q + {c}"),
            10 => format!("{m} * (k - q - (seqlen_k - seqlen_q)) > -{m} * q + {m} * q - {c}"),
            _ => "q - k <= shift".to_owned(),
        }
    };
    let parts: Vec<String> = (0..1 + draw.below(4))
        .map(|_| if draw.below(4) == 0 { "(k % 3 != 1)".to_owned() } else { format!("({})", bound(draw)) })
        .collect();
    format!("shift: int; {}", parts.join(" and "))
}

fn shows(limits: Limits, distance: i64) -> bool {
    limits.lo.is_none_or(|lo| lo <= distance) && limits.hi.is_none_or(|hi| distance <= hi)
}

fn seen_by(bands: &Bands, pair: &Pair, memory: &Memory) -> bool {
    let distance = i64::from(pair.k) - i64::from(pair.q);
    let diagonal = i64::from(pair.seqlen_k) - i64::from(pair.seqlen_q);
    let rest = bands
        .rest
        .as_ref()
        .is_none_or(|rest| rest.eval(pair, &memory.of(rest.captures()), Rounding::Exact).bool());
    rest && shows(bands.top_left, distance) && shows(bands.bottom_right, distance - diagonal)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// A mask equals the conjunction of its bands and its rest, at every pair of random lengths.
    #[test]
    fn a_mask_is_its_bands_and_its_rest(seed: u64, is_drawn: bool, knows: bool) {
        let mut draw = Draw::new(seed);
        let function = if is_drawn {
            draw::mask(seed, Kind::Any).unwrap()
        } else {
            conjunction(&mut draw).parse().unwrap()
        };
        let memory = Memory::new(seed);
        let numbers: Vec<Option<Number>> = memory
            .of(function.captures())
            .iter()
            .map(|captured| match captured {
                Captured::Number(number) if knows => Some(*number),
                _ => None,
            })
            .collect();
        let takes_all = draw.below(3) > 0;
        let found = function.bands(|align| takes_all || align == crate::MaskAlign::TopLeft, &numbers);
        let inlined = function.with_built_in(&numbers).unwrap();
        for _ in 0..4 {
            let (seqlen_q, seqlen_k) = (1 + draw.below(20) as u32, 1 + draw.below(20) as u32);
            for at in 0..seqlen_q * seqlen_k {
                let (q, k) = (at / seqlen_k, at % seqlen_k);
                let pair = Pair { score: 0.0, b: 1, h: 2, q, k, seqlen_q, seqlen_k };
                let of = |function: &Function| {
                    function.eval(&pair, &memory.of(function.captures()), Rounding::Exact).bool()
                };
                let expected = of(&function);
                if let Some(bands) = &found {
                    prop_assert_eq!(seen_by(bands, &pair, &memory), expected, "{} at {:?}: {:?}", function, pair, bands);
                }
                if let Some(inlined) = &inlined {
                    prop_assert_eq!(of(inlined), expected, "{} at {:?}: {}", function, pair, inlined);
                }
            }
        }
    }

    /// A score that is recognised has the values of its form.
    #[test]
    fn a_score_is_its_form(seed: u64, cap in 0.25f32..40.0, factor in 0.05f32..8.0) {
        let mut draw = Draw::new(seed);
        let core = draw.of(&["s", "s * F", "F * s", "s / F", "-(-(s))"]).replace('F', &format!("{factor:?}"));
        let bent = format!("{cap:?} * tanh(({core}) / {cap:?})");
        let of = draw.of(&[core.as_str(), bent.as_str(), "s + 0.5", "tanh(s)"]).to_owned();
        let text = match draw.below(6) {
            0 => format!("slopes: f32[_]; {of} + slopes[h] * (k - q)"),
            1 => format!("slopes: f32[_]; slopes[h] * (k - q) + ({of})"),
            2 => format!("slopes: f32[_]; {of} - (q - k) * slopes[h]"),
            3 => format!("slopes: f32[_]; {of} + -slopes[h] * abs(q - k)"),
            4 => format!("slopes: f32[_]; {of} - slopes[h] * (k - q)"),
            _ => of,
        };
        let function: Function = text.parse().unwrap();
        let memory = Memory::new(seed);
        let Some(form) = function.score_form(&[]) else { return Ok(()) };
        for _ in 0..30 {
            let pair = pair(&mut draw);
            let x = form.factor * pair.score;
            let mut expected = form.softcap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh());
            let captured = memory.of(function.captures());
            if let Some(AlibiTerm { capture, per_batch, distance }) = form.alibi {
                prop_assert!(!per_batch);
                let Captured::Tensor(tensor) = captured[capture] else { unreachable!() };
                let slope = tensor.read(tensor.offset([i64::from(pair.h)].into_iter())).float();
                let far = f64::from(pair.q) - f64::from(pair.k);
                expected -= slope * if matches!(distance, Distance::Signed(_)) { far } else { far.abs() };
            }
            let actual = function.eval(&pair, &captured, Rounding::Exact).float();
            prop_assert!((actual - expected).abs() <= 1e-9 * (1.0 + expected.abs()), "{}: {} {}", function, actual, expected);
        }
    }
}

#[test]
fn what_kernels_have_is_found_in_each_way_to_say_it() {
    let bands = |text: &str| text.parse::<Function>().unwrap().bands(|_| true, &[]);
    let only = |lo: Option<i64>, hi: Option<i64>| Limits { lo, hi };
    for (text, lo, hi) in [
        ("q >= k", None, Some(0)),
        ("k <= q", None, Some(0)),
        ("not (k > q)", None, Some(0)),
        ("q - k >= 3", None, Some(-3)),
        ("(q >= k) and (q - k <= 64)", Some(-64), Some(0)),
        ("abs(q - k) < 5", Some(-4), Some(4)),
        ("2 * q >= 2 * k - 3", None, Some(1)),
        ("2 * q + 3 > 2 * k and k + 4 >= q", Some(-4), Some(1)),
    ] {
        let found = bands(text).unwrap_or_else(|| panic!("{text}"));
        assert_eq!((found.top_left, found.rest), (only(lo, hi), None), "{text}");
        assert!(found.bottom_right.is_empty(), "{text}");
    }
    let found = bands("k - q <= seqlen_k - seqlen_q").unwrap();
    assert_eq!((found.top_left, found.bottom_right), (Limits::default(), only(None, Some(0))));
    let found = bands("(q >= k) and ((q - k) % 4 == 0)").unwrap();
    assert_eq!(found.rest.unwrap().to_string(), "(q - k) % 4 == 0");
    for text in [
        "k < 5",
        "q >= k or k < 128",
        "q != k",
        "q + k >= 3",
        "q >= 2 * k",
        "k - q <= seqlen_k",
        "q * q >= k * k",
        "w: int; q - k <= w",
        "float(q) >= float(k)",
    ] {
        assert!(bands(text).is_none(), "{text}");
    }
    let form = |text: &str| text.parse::<Function>().unwrap().score_form(&[]);
    assert_eq!(form("30.0 * tanh(s / 30.0)").unwrap().softcap, Some(30.0));
    assert_eq!(form("tanh(s * 0.5) * 2.0").unwrap().factor, 1.0);
    assert_eq!(form("s * 3.0").unwrap().factor, 3.0);
    for text in
        ["s * -1.0", "0.0 * s", "s + 1.0", "s * s", "cap: float; cap * tanh(s / cap)", "tanh(s) * -2.0"]
    {
        assert!(form(text).is_none(), "{text}");
    }
    let numbers = [Some(Number::Float(20.0))];
    let capped: Function = "cap: float; cap * tanh(s / cap)".parse().unwrap();
    assert_eq!(capped.score_form(&numbers).unwrap().softcap, Some(20.0));
    assert_eq!(capped.with_built_in(&numbers).unwrap().unwrap().to_string(), "20.0 * tanh(s / 20.0)");
    let window: Function = "w: int; d: int; (q - k <= w) and (k % d == 0)".parse().unwrap();
    let numbers = [Some(Number::Int(7)), Some(Number::Int(3))];
    assert_eq!(
        window.with_built_in(&numbers).unwrap().unwrap().to_string(),
        "d: int; q - k <= 7 and k % d == 0"
    );
}
