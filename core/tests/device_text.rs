//! Checks that functions rendered as C++, built with the host's compiler, give the results of their evaluation in
//! Rust.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use fmha_core::expr::draw::{self, CAPTURED, Draw, Kind};
use fmha_core::expr::{
    BOUNDS_PRELUDE, Capture, Captured, DEVICE_PRELUDE, Function, HostTensor, Number, Pair, Rounding, Seen,
    Stored, Tile,
};

const EXTENT: u32 = 5;

/// Element `at` of every captured tensor, as exactly as its type can store it.
fn element(at: i64) -> f32 {
    (at * 7 % 11) as f32 / 4.0 - 1.25
}

/// C++ text that evaluates a pair's code, as a kernel does.
const PAIR: &str = r"
struct Pair {
  int b, h, q, k, seqlen_q, seqlen_k;
  const int* stored;
  float number(int) const { return 0.625f; }
  long long whole_number(int) const { return -2; }
  unsigned extent(int, int) const { return 5; }
  static long long place(const long long* at, int rank) {
    long long place = 0;
    for (int axis = 0; axis < rank; ++axis) place = place * 5 + at[axis];
    return place;
  }
  static float element(long long at) { return float(at * 7 % 11) / 4.f - 1.25f; }
  float load_float(int i, const long long* at) const { return element(place(at, stored[i] & 15)); }
  long long load_int(int i, const long long* at) const {
    const float x = element(place(at, stored[i] & 15));
    return stored[i] & 16 ? x > 0.f : (long long)(x * 4.f);
  }
};
";

/// Memory of a captured tensor on the host.
fn memory(stored: Stored, rank: usize) -> Vec<u8> {
    let mut bytes = vec![];
    for at in 0..i64::from(EXTENT.pow(rank as u32)) {
        let x = element(at);
        match stored {
            Stored::F32 => bytes.extend(x.to_ne_bytes()),
            Stored::F16 => bytes.extend(half::f16::from_f32(x).to_ne_bytes()),
            Stored::Bf16 => bytes.extend(half::bf16::from_f32(x).to_ne_bytes()),
            Stored::I32 => bytes.extend(((x * 4.0) as i32).to_ne_bytes()),
            Stored::I64 => bytes.extend(((x * 4.0) as i64).to_ne_bytes()),
            Stored::Bool => bytes.push(u8::from(x > 0.0)),
        }
    }
    bytes
}

const SHAPE: [u32; 2] = [EXTENT; 2];

/// Dense strides of tensors with one axis and with two.
const STRIDES: [[i64; 2]; 2] = [[1, 0], [EXTENT as i64, 1]];

/// Index of a captured tensor in [`CAPTURED`]; `None` for a number.
fn place(capture: &Capture) -> Option<usize> {
    CAPTURED.iter().position(|(name, ..)| *name == capture.name)
}

/// Captured tensors in these memories, and captured numbers.
fn captured<'a>(captures: &[Capture], memories: &'a [Vec<u8>]) -> Vec<Captured<'a>> {
    let of = |capture: &Capture| match place(capture) {
        Some(at) => {
            let (_, stored, rank) = CAPTURED[at];
            let strides = &STRIDES[usize::from(rank == 2)][..rank];
            Captured::Tensor(HostTensor { bytes: &memories[at], stored, shape: &SHAPE[..rank], strides })
        }
        None if capture.name == "rate" => Captured::Number(Number::Float(0.625)),
        None => Captured::Number(Number::Int(-2)),
    };
    captures.iter().map(of).collect()
}

/// A capture's number in the C++ program: its number of axes, plus 16 for bools.
fn stored_word(capture: &Capture) -> usize {
    let of = |at: usize| CAPTURED[at].2 | if CAPTURED[at].1 == Stored::Bool { 16 } else { 0 };
    place(capture).map_or(0, of)
}

#[test]
fn drawn_functions_and_their_slopes_compute_what_the_evaluation_does() {
    let memories: Vec<Vec<u8>> = CAPTURED.iter().map(|&(_, stored, rank)| memory(stored, rank)).collect();
    let mut program = format!(
        "#include <cmath>\n#include <cstdio>\n#define FMHA_EXPR static inline __attribute__((unused))\n{DEVICE_PRELUDE}{PAIR}"
    );
    let (mut calls, mut wanted) = (String::new(), vec![]);
    for seed in 0..60u64 {
        let kind = if seed % 2 == 0 { Kind::Any } else { Kind::Tame };
        let function: Function =
            if seed % 5 == 4 { draw::mask(seed, kind) } else { draw::score(seed, kind) }.unwrap();
        let slopes = function.slopes();
        let text = function.device_text();
        assert_eq!(text, function.to_string().parse::<Function>().unwrap().device_text());
        writeln!(
            program,
            "namespace f{seed} {{ namespace expr = fmha::expr;\n{text}{}}}",
            slopes.device_text()
        )
        .unwrap();
        let captured = captured(function.captures(), &memories);
        let kinds = function.captures().iter().map(stored_word);
        let kinds: Vec<String> = kinds.chain([0]).map(|kind| kind.to_string()).collect();
        writeln!(calls, "  {{ const int stored[] = {{{}}};", kinds.join(", ")).unwrap();
        let mut draw = Draw::new(seed);
        for _ in 0..12 {
            let [b, h, q, k] = [3, 4, 40, 50].map(|below| draw.below(below) as u32);
            let (seqlen_q, seqlen_k) = (40, 50);
            let score = draw.unit() as f32 * 3.0;
            let pair = Pair { score: score.into(), b, h, q, k, seqlen_q, seqlen_k };
            let value = |rounding| {
                let value = function.eval(&pair, &captured, rounding);
                let slope = slope(&slopes, &pair, &captured, rounding);
                (value.float(), slope)
            };
            wanted.push((function.to_string(), pair, value(Rounding::F32), value(Rounding::Exact)));
            let call = if function.is_mask() { "visible(pair)" } else { "score(pair, s)" };
            writeln!(
                calls,
                "    {{ const Pair pair = {{{b}, {h}, {q}, {k}, 40, 50, stored}}; const float s = {score:?}f;\n      \
                 printf(\"%.9g %.9g\\n\", double(f{seed}::{call}), double(f{seed}::slope(pair, s))); (void)s; }}"
            )
            .unwrap();
        }
        calls.push_str("  }\n");
        if !slopes.captures.is_empty() {
            // The program must compile; the battery checks the sums that it computes.
            writeln!(
                calls,
                "  {{ const int stored[] = {{{}}}; const Pair pair = {{0, 0, 0, 0, 1, 1, stored}}; \
                 f{seed}::slopes(pair, 0.f, [](int, const long long*, float) {{}}); }}",
                kinds.join(", ")
            )
            .unwrap();
        }
    }
    writeln!(program, "int main() {{\n{calls}}}").unwrap();
    let Some(found) = run_cpp("device_text", &program) else { return };
    assert_eq!(found.lines().count(), wanted.len());
    let mut compared = 0;
    for (line, (text, pair, rounded, exact)) in found.lines().zip(wanted) {
        let numbers: Vec<f64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        for (found, rounded, exact) in [(numbers[0], rounded.0, exact.0), (numbers[1], rounded.1, exact.1)] {
            // Results of two f32 computations may differ as much as f32 and f64 do, at a jump or for large values.
            if (rounded - exact).abs() <= 1e-4 * exact.abs() && exact.is_finite() {
                let near = (found - rounded).abs() <= 1e-3 * rounded.abs();
                assert!(near, "{text} at {pair:?}: {found}, not {rounded}");
                compared += 1;
            }
        }
    }
    assert!(compared > 700, "{compared} numbers compared");
}

/// C++ text that evaluates a tile's code, as a kernel does.
const TILE: &str = r"
struct Tile {
  fmha::expr::Bound b, h, q, k, seqlen_q, seqlen_k;
  const int* stored;
  Pair captures() const { return {0, 0, 0, 0, 0, 0, stored}; }
  long long whole_number(int i) const { return captures().whole_number(i); }
  unsigned extent(int i, int axis) const { return captures().extent(i, axis); }
  long long load_int(int i, const long long* at) const { return captures().load_int(i, at); }
};
";

/// Masks that people write, with integers only.
const MASKS: [&str; 14] = [
    "k <= q",
    "k <= q + seqlen_k - seqlen_q",
    "q - k < 9 and k <= q",
    "abs(q - k) <= 5",
    "k < 4 or k <= q",
    "ids: i32[_]; k < ids[b] or k <= q",
    "q // 16 == k // 16",
    "k // 8 <= q // 8 and not (k == q)",
    "(q - k) % 4 == 0",
    "max(q, k) < 20 and min(q, k) >= 2",
    "(q & 7) < 4 or (k >> 3) != (q >> 3)",
    "select(h == 1, k <= q, k >= q)",
    "shift: int; clamp(k - q, -3, 6) > shift",
    "gate: bool[_]; gate[h] and k < q * 2",
];

#[test]
fn bounds_of_masks_over_tiles_say_what_their_pairs_do() {
    let memories: Vec<Vec<u8>> = CAPTURED.iter().map(|&(_, stored, rank)| memory(stored, rank)).collect();
    let mut program = format!(
        "#include <cmath>\n#include <cstdio>\n#define FMHA_EXPR static inline __attribute__((unused))\n\
         {DEVICE_PRELUDE}{BOUNDS_PRELUDE}{PAIR}{TILE}"
    );
    let (mut calls, mut wanted) = (String::new(), vec![]);
    let written = MASKS.iter().map(|text| (true, text.parse::<Function>().unwrap()));
    let drawn = (0..60u64).map(|seed| (false, draw::mask(seed, Kind::Any).unwrap()));
    for (at, (of_integers, mask)) in written.chain(drawn).enumerate() {
        writeln!(program, "namespace f{at} {{ namespace expr = fmha::expr;\n{}}}", mask.bounds_text())
            .unwrap();
        let captured = captured(mask.captures(), &memories);
        let kinds = mask.captures().iter().map(stored_word);
        let kinds: Vec<String> = kinds.chain([0]).map(|kind| kind.to_string()).collect();
        writeln!(calls, "  {{ const int stored[] = {{{}}};", kinds.join(", ")).unwrap();
        let mut draw = Draw::new(at as u64);
        for _ in 0..16 {
            let [b, h, q, k] = [3, 4, 40, 50].map(|below| draw.below(below) as u32);
            let [rows, keys] = [8, 8].map(|most| draw.below(most) as u32);
            let tile = Tile {
                b: b..b + 1,
                h: h..h + 1,
                q: q..q + rows + 1,
                k: k..k + keys + 1,
                seqlen_q: (48, 48),
                seqlen_k: (58, 58),
            };
            let pairs = tile.q.clone().flat_map(|q| tile.k.clone().map(move |k| (q, k)));
            let shown: Vec<bool> = pairs
                .map(|(q, k)| {
                    let pair = Pair { score: 0.0, b, h, q, k, seqlen_q: 48, seqlen_k: 58 };
                    mask.eval(&pair, &captured, Rounding::F32).float() != 0.0
                })
                .collect();
            let host = of_integers.then(|| mask.seen(&tile, &captured[..]));
            wanted.push((mask.to_string(), tile, shown, host));
            writeln!(
                calls,
                "    {{ const Tile tile = {{{{{b}, {b}}}, {{{h}, {h}}}, {{{q}, {}}}, {{{k}, {}}}, {{48, 48}}, \
                 {{58, 58}}, stored}};\n      const fmha::expr::Bound seen = f{at}::seen(tile);\n      \
                 printf(\"%lld %lld\\n\", seen.lo, seen.hi); }}",
                q + rows,
                k + keys
            )
            .unwrap();
        }
        calls.push_str("  }\n");
    }
    writeln!(program, "int main() {{\n{calls}}}").unwrap();
    let Some(found) = run_cpp("device_bounds", &program) else { return };
    assert_eq!(found.lines().count(), wanted.len());
    let (mut none, mut every) = (0, 0);
    for (line, (text, tile, shown, host)) in found.lines().zip(wanted) {
        let [lo, hi] = [0, 1].map(|at| line.split(' ').nth(at).unwrap().parse::<i64>().unwrap());
        let seen = match (lo, hi) {
            (_, 0) => Seen::Nothing,
            (1, _) => Seen::Everything,
            _ => Seen::Part,
        };
        assert!((0..=1).contains(&lo) && (lo..=1).contains(&hi), "{text} over {tile:?}: {line}");
        assert!(seen != Seen::Nothing || !shown.contains(&true), "{text} over {tile:?} shows some pairs");
        assert!(seen != Seen::Everything || !shown.contains(&false), "{text} over {tile:?} hides some pairs");
        if let Some(host) = host {
            assert_eq!(seen, host, "{text} over {tile:?}");
        }
        none += usize::from(seen == Seen::Nothing);
        every += usize::from(seen == Seen::Everything);
    }
    assert!(none > 60 && every > 60, "{none} tiles of nothing and {every} of everything are known");
}

/// `d score / d s`, evaluated from the derivative's own graph.
fn slope(
    slopes: &fmha_core::expr::Slopes,
    pair: &Pair,
    captured: &[Captured<'_>],
    rounding: Rounding,
) -> f64 {
    slopes.eval(pair, captured, rounding)[slopes.score.index()].float()
}

/// Compiles and runs the program, and returns its output; `None`, with a note, without a C++ compiler.
fn run_cpp(name: &str, program: &str) -> Option<String> {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&dir).unwrap();
    let unit = dir.join("main.cc");
    std::fs::write(&unit, program).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let built = Command::new(&compiler)
        .args([
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-tautological-compare",
            "-o",
        ])
        .arg(dir.join("main"))
        .arg(&unit)
        .output();
    let Ok(built) = built else {
        eprintln!("absent: no C++ compiler `{compiler}`, so the text of functions was not compiled");
        return None;
    };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(dir.join("main")).output().unwrap();
    assert!(ran.status.success());
    Some(String::from_utf8(ran.stdout).unwrap())
}
