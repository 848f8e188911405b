//! Checks that the device headers, built with the host's C++ compiler, compute the same bits as Rust.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use fmha_core::abi::MaskParams;
use fmha_core::dropout::{DropoutSeed, KeepMask, keep_threshold};
use fmha_core::seq::{KvRows, spans};
use fmha_core::{
    BlockClass, BlockTable, DType, DevSlice, Dims, FwdProblem, FwdSpec, KvLayout, MaskBand, MaskSpec,
    QLayout, SeqArgs, Totals, source,
};

/// Builds `program` against the shared headers and returns what it prints; `None`, with a note,
/// where there is no C++ compiler.
fn run_cpp(name: &str, program: &str) -> Option<String> {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    for header in source::headers() {
        let path = dir.join(header.name.as_ref());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, header.text.as_ref()).unwrap();
    }
    let unit = dir.join("main.cc");
    std::fs::write(&unit, program).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let built = Command::new(&compiler)
        .args(["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-I"])
        .arg(&dir)
        .arg("-o")
        .arg(dir.join("main"))
        .arg(&unit)
        .output();
    let Ok(built) = built else {
        eprintln!("absent: no C++ compiler `{compiler}`, so {name} was not checked");
        return None;
    };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(dir.join("main")).output().unwrap();
    assert!(ran.status.success());
    Some(String::from_utf8(ran.stdout).unwrap())
}

fn assert_same_lines(device: &str, host: &str) {
    let different = device.lines().zip(host.lines()).enumerate().find(|(_, (a, b))| a != b);
    assert!(different.is_none(), "line {different:?}");
    assert_eq!(device.lines().count(), host.lines().count());
}

#[test]
fn masks_agree() {
    let masks = ["0", "t", "b", "t:2,1", "b:0,-1", "b:3,0,2", "t:-1,2", "g:-1,4", "g:3,2,1", "g:5,-2"];
    let mut program = String::from(
        "#include <cstdio>\n#include <fmha/mask.h>\nusing namespace fmha;\nint main() {\n  const MaskParams masks[] = {\n",
    );
    for mask in masks {
        let MaskParams { lo, hi, bottom_right, sink_columns } = mask.parse::<MaskSpec>().unwrap().into();
        let lo = if lo == i32::MIN { "kUnboundedLo".to_owned() } else { lo.to_string() };
        writeln!(program, "    {{{lo}, {hi}, {bottom_right}, {sink_columns}}},").unwrap();
    }
    program.push_str(
        r#"  };
  for (const auto& mask : masks)
    for (int sq = 1; sq < 7; ++sq)
      for (int sk = 0; sk < 7; ++sk) {
        const MaskBand band = resolve_band(mask, sq, sk);
        printf("band %d %d %d\n", band.lo, band.hi, band.sink_columns);
        for (int begin = 0; begin < sq; ++begin)
          for (int end = begin + 1; end <= sq; ++end) {
            const Range keys = k_range(band, {begin, end}, sk), sinks = sink_range(band, {begin, end}, sk);
            printf("range %d %d %d\n", keys.begin, keys.end, sinks.end);
            const Range row = row_range(band, begin, sk);
            printf("row %d %d\n", row.begin, row.end);
            for (int k = 0; k < sk; ++k)
              printf("%d %d\n", int(visible(band, begin, k)), int(block_class(band, {begin, end}, {k / 2, k + 1})));
          }
      }
}
"#,
    );
    let Some(device) = run_cpp("masks", &program) else { return };
    let mut host = String::new();
    for mask in masks {
        let mask: MaskSpec = mask.parse().unwrap();
        for (sq, sk) in (1..7u32).flat_map(|sq| (0..7u32).map(move |sk| (sq, sk))) {
            let band = mask.band(sq, sk);
            let MaskBand { lo, hi, sink_columns } = band;
            writeln!(host, "band {lo} {hi} {sink_columns}").unwrap();
            for (begin, end) in (0..sq).flat_map(|begin| (begin + 1..=sq).map(move |end| (begin, end))) {
                let keys = band.k_range(begin..end, sk);
                let sinks = band.sink_range(begin..end, sk);
                writeln!(host, "range {} {} {}", keys.start, keys.end, sinks.end).unwrap();
                let row = band.row_range(begin, sk);
                writeln!(host, "row {} {}", row.start, row.end).unwrap();
                for k in 0..sk {
                    let class = match band.block_class(begin..end, k / 2..k + 1) {
                        BlockClass::Skipped => 0,
                        BlockClass::Edge => 1,
                        BlockClass::Inside => 2,
                    };
                    writeln!(host, "{} {class}", u8::from(band.visible(begin, k))).unwrap();
                }
            }
        }
    }
    assert_same_lines(&device, &host);
}

/// Keys have a batch axis, packed rows, or pages of every small size.
#[test]
fn keys_lie_in_the_same_places() {
    let dims = Dims::batch(2).seqlens(3, 7).heads(1, 1).head_dim(4);
    let (cu_seqlens_k, seqused_k, table): (_, _, [i32; 14]) =
        ([0, 4, 11], [5, 7], [9, 3, 0, 8, 2, 3, 1, 7, 6, 9, 9, 4, 5, 0]);
    let mut program =
        String::from("#include <cstdio>\n#include <fmha/seq.h>\nusing namespace fmha;\nint main() {\n");
    let mut host = String::new();
    let layouts = [KvLayout::Strided, KvLayout::Packed].into_iter();
    for layout in layouts.chain((1..9).map(|page_size| KvLayout::Paged { page_size })) {
        let mut problem = FwdProblem::new(QLayout::Batch, layout, DType::F32, dims);
        let (packed, paged) = (layout == KvLayout::Packed, layout.page_size().is_some());
        problem.layout.seqused_k = !packed;
        let seq = SeqArgs::default()
            .totals(Totals { total_k: packed.then_some(11), num_pages: paged.then_some(10), ..Totals::NONE })
            .cu_seqlens_k(packed.then(|| DevSlice::host(&cu_seqlens_k)))
            .seqused_k((!packed).then(|| DevSlice::host(&seqused_k)))
            .block_table(paged.then(|| BlockTable { pages: DevSlice::host(&table), max_pages: 7 }));
        let rows = KvRows::of(&problem, &seq).unwrap();
        for span in spans(&problem, &seq).unwrap() {
            for j in 0..span.seqlen_k {
                let (batch, row) = rows.at(&span, j);
                writeln!(host, "{batch} {row}").unwrap();
                let next = (0..rows.run(&span, j)).all(|n| rows.at(&span, j + n) == (batch, row + n));
                assert!(next && rows.run(&span, j) > 0, "{layout:?} key {j}");
            }
        }
        let (kind, size) = (FwdSpec::of(&problem).kv_layout, layout.page_size().unwrap_or(1));
        writeln!(
            program,
            "  {{\n    int table[] = {{{table}}}, cu[] = {{0, 4, 11}}, used[] = {{5, 7}};\n    \
             FwdParams p{{}};\n    p.seqlen_q = 3, p.seqlen_k = 7, p.total_k = 11, p.num_pages = 10, p.page_size = {size};\n    \
             p.block_table = table, p.block_table_batch = 7;\n    \
             if (KvKind::{kind:?} == KvKind::Packed) p.cu_seqlens_k = cu; else p.seqused_k = used;\n    \
             for (int b = 0; b < 2; ++b) {{\n      \
             const SeqSpan span = resolve_seq(p, QLayout::Batch, KvKind::{kind:?}, b);\n      \
             for (int j = 0; j < span.seqlen_k; ++j) {{\n        \
             const KvRow at = kv_row(p, KvKind::{kind:?}, span, j);\n        \
             printf(\"%d %d\\n\", KvKind::{kind:?} == KvKind::Packed ? 0 : at.batch, at.row);\n      \
             }}\n    }}\n  }}",
            table = table.map(|page| page.to_string()).join(", "),
        )
        .unwrap();
    }
    program.push_str("}\n");
    let Some(device) = run_cpp("kv_rows", &program) else { return };
    assert_same_lines(&device, &host);
}

/// Wrong offsets and lengths never leave the tensors: every pair of offsets and every length, from beyond one end
/// to beyond the other.
#[test]
fn offsets_and_lengths_that_lie_never_leave_the_tensors() {
    let program = r#"
#include <cstdio>
#include <fmha/seq.h>
using namespace fmha;
int main() {
  constexpr int kLeast = -2147483647 - 1, kMost = 2147483647;
  const int values[] = {kLeast, -1, 0, 1, 3, 5, 6, 7, 9, kMost};
  int cu_q[2], cu_k[2], used_q[1], used_k[1];
  FwdParams p{};
  p.cu_seqlens_q = cu_q, p.cu_seqlens_k = cu_k;
  p.total_q = 6, p.total_k = 7, p.seqlen_q = 4, p.seqlen_k = 5;
  for (int begin : values)
    for (int end : values)
      for (int used : values)
        for (int limited = 0; limited < 2; ++limited) {
          cu_q[0] = cu_k[0] = begin, cu_q[1] = cu_k[1] = end, used_q[0] = used_k[0] = used;
          p.seqused_q = limited ? used_q : nullptr, p.seqused_k = limited ? used_k : nullptr;
          const SeqSpan s = resolve_seq(p, QLayout::Packed, KvKind::Packed, 0);
          const bool q = s.q_row >= 0 && s.seqlen_q >= 0 && s.seqlen_q <= 4 && s.q_row + s.seqlen_q <= 6;
          const bool k = s.k_row >= 0 && s.seqlen_k >= 0 && s.seqlen_k <= 5 && s.k_row + s.seqlen_k <= 7;
          const SeqSpan t = resolve_seq(p, QLayout::Batch, KvKind::Strided, 0);
          const bool b = t.seqlen_q >= 0 && t.seqlen_q <= 4 && t.seqlen_k >= 0 && t.seqlen_k <= 5;
          if (!q || !k || !b) printf("%d %d %d %d\n", begin, end, used, limited);
        }
  // Valid lengths and offsets are used unchanged.
  cu_q[0] = 2, cu_q[1] = 5, cu_k[0] = 1, cu_k[1] = 6, used_q[0] = 2, used_k[0] = 4;
  p.seqused_q = used_q, p.seqused_k = used_k;
  const SeqSpan s = resolve_seq(p, QLayout::Packed, KvKind::Packed, 0);
  printf("%d %d %d %d\n", s.q_row, s.seqlen_q, s.k_row, s.seqlen_k);
}
"#;
    let Some(device) = run_cpp("lying_lengths", program) else { return };
    assert_eq!(device, "2 2 1 4\n");
}

#[test]
fn number_formats_agree() {
    let program = r#"
#include <cstdio>
#include <initializer_list>
#include <fmha/num.h>
using namespace fmha;
template <DType dtype> void show() {
  const int codes = dtype == DType::F16 ? 65536 : 256;
  for (int code = 0; code < codes; ++code) {
    const float x = decode(format_of(dtype), code);
    printf("%08x\n", is_nan(x) ? 0x7fc00000 : bits_of(x));
  }
  uint32_t bits = 1;
  for (int n = 0; n < 20000; ++n) {
    bits = bits * 1664525u + 1013904223u;
    // The numbers have exponents around the format's limits, where rounding matters.
    const float x = float_of((bits & 0x80ffffffu) | 0x30000000u | (bits >> 3 & 0x0f000000u));
    printf("%x\n", encode(format_of(dtype), x));
  }
  for (float x : {infinity(), -infinity(), 0.f, -0.f, 1e30f, -1e-30f}) printf("%x\n", encode(format_of(dtype), x));
}
int main() {
  show<DType::F16>();
  show<DType::E4m3Fn>();
  show<DType::E5m2>();
  show<DType::E4m3Fnuz>();
  show<DType::E5m2Fnuz>();
}
"#;
    let Some(device) = run_cpp("numbers", program) else { return };
    let mut host = String::new();
    for dtype in [DType::F16, DType::E4m3Fn, DType::E5m2, DType::E4m3Fnuz, DType::E5m2Fnuz] {
        let size = dtype.size_bytes();
        for code in 0..1u32 << (8 * size) {
            let value = dtype.read(&code.to_le_bytes()) as f32;
            writeln!(host, "{:08x}", if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }).unwrap();
        }
        let code_of = |value: f32| {
            let mut bytes = [0; 4];
            dtype.write(value.into(), &mut bytes);
            u32::from_le_bytes(bytes)
        };
        let mut bits = 1u32;
        for _ in 0..20000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(bits & 0x80ff_ffff | 0x3000_0000 | bits >> 3 & 0x0f00_0000);
            writeln!(host, "{:x}", code_of(value)).unwrap();
        }
        for value in [f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e30, -1e-30] {
            writeln!(host, "{:x}", code_of(value)).unwrap();
        }
    }
    assert_same_lines(&device, &host);
}

#[test]
fn dropout_keeps_the_same_elements() {
    let (at, p_drop) = (DropoutSeed { seed: 0x1234_5678_9abc_def0, offset: 77 }, 0.3f32);
    let program = format!(
        r#"
#include <cstdio>
#include <fmha/philox.h>
using namespace fmha;
int main() {{
  FwdParams p{{}};
  p.dropout_key_low = {}u;
  p.dropout_key_high = {}u;
  p.dropout_offset = {}u;
  p.dropout_threshold = {}u;
  for (int i = 0; i < 9; ++i)
    for (int j = 0; j < 70; ++j) printf("%d\n", int(dropout_keeps(p, 3 * 8 + 5, i, j)));
}}
"#,
        at.seed as u32,
        (at.seed >> 32) as u32,
        at.offset as u32,
        keep_threshold(p_drop)
    );
    let Some(device) = run_cpp("dropout", &program) else { return };
    let mask = KeepMask::new(p_drop, at, 3, 5, 8);
    let mut host = String::new();
    for (i, j) in (0..9).flat_map(|i| (0..70).map(move |j| (i, j))) {
        writeln!(host, "{}", u8::from(mask.keep(i, j))).unwrap();
    }
    assert_same_lines(&device, &host);
}

#[test]
fn tanh_is_right_to_a_few_ulps_of_one() {
    let program = r#"
#include <cstdio>
#include <fmha/score.h>
#include <fmha/online_softmax.h>
int main() {
  for (int n = -4000; n <= 4000; ++n) printf("%08x\n", fmha::bits_of(fmha::tanh_of(float(n) / 256)));
}
"#;
    let Some(device) = run_cpp("tanh", program) else { return };
    for (n, line) in (-4000..=4000).zip(device.lines()) {
        let value = f64::from(f32::from_bits(u32::from_str_radix(line, 16).unwrap()));
        let expected = (f64::from(n) / 256.0).tanh();
        assert!((value - expected).abs() <= 3e-7, "tanh({n}/256) = {value}, not {expected}");
    }
}

/// Math functions for compilers without a mathematical library are accurate to a few ulps in the hard cases: large
/// angles, exponents that magnify an error, remainders of large numbers.
#[test]
fn functions_of_expressions_are_right_to_a_few_ulps() {
    let program = r#"
#include <cstdio>
#include <fmha/expr_math.h>
int main() {
  const float xs[] = {0.f, 1e-20f, 1e-3f, 0.3f, 0.7853982f, 1.f, 1.5707964f, 2.5f, 3.9f, 7.f,
                      100.f, 1000.5f, 65536.f, 1e6f, 1.6e7f, 1e10f, 1e30f, 3.4e38f};
  for (float x : xs) {
    const float signs[] = {x, -x}, bs[] = {0.f, 1.f, -1.f, 0.5f, 2.f, -3.f, 7.25f, 30.f, -40.f, 0.001f};
    for (float a : signs) {
      const float ys[] = {fmha::sinf(a), fmha::cosf(a), fmha::erff(a)};
      for (float y : ys) printf("%.9g\n", double(y));
      for (float b : bs)
        printf("%.9g\n%.9g\n", double(fmha::powf(a, b)), double(fmha::fmodf(a, b)));
    }
  }
}
"#;
    let Some(device) = run_cpp("expr_math", program) else { return };
    let xs = [
        0.0f32,
        1e-20,
        1e-3,
        0.3,
        std::f32::consts::FRAC_PI_4,
        1.0,
        std::f32::consts::FRAC_PI_2,
        2.5,
        3.9,
        7.0,
        100.0,
        1000.5,
        65536.0,
        1e6,
        1.6e7,
        1e10,
        1e30,
        3.4e38,
    ];
    let mut wanted: Vec<(String, f64)> = vec![];
    for x in xs {
        for a in [x, -x] {
            let wide = f64::from(a);
            wanted.push((format!("sin({a})"), wide.sin()));
            wanted.push((format!("cos({a})"), wide.cos()));
            wanted.push((format!("erf({a})"), libm::erf(wide)));
            for b in [0.0f32, 1.0, -1.0, 0.5, 2.0, -3.0, 7.25, 30.0, -40.0, 0.001] {
                wanted.push((format!("pow({a}, {b})"), wide.powf(b.into())));
                wanted.push((format!("fmod({a}, {b})"), f64::from(a % b)));
            }
        }
    }
    let found: Vec<f64> = device.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(found.len(), wanted.len());
    for (found, (name, wanted)) in found.into_iter().zip(wanted) {
        let nearest = f64::from(wanted as f32);
        let right = found == nearest
            || (found.is_nan() && wanted.is_nan())
            || (found - wanted).abs() <= 4e-7 * wanted.abs() + 1.5e-45;
        assert!(right, "{name} = {found}, not {wanted}");
    }
}

/// Division by a constant, computed without a division, rounds like the division.
#[test]
fn a_quotient_by_a_constant_rounds_as_the_division() {
    let program = r#"
#include <cstdio>
#include <fmha/expr.h>
int main() {
  const float cs[] = {30.f, 3.f, 0.1f, -7.f, 1.0000001f, 1.9999999f, 16777215.f, 1e-20f, 3e20f};
  const float inf = __builtin_inff(), ends[] = {0.f, -0.f, inf, -inf, 3e38f, -3e38f};
  unsigned bits = 1;
  for (float c : cs) {
    int wrong = 0;
    for (int n = 0; n < 500000; ++n) {
      bits = bits * 1664525u + 1013904223u;
      // Exponents run from -40 to 39, with either sign.
      const unsigned exponent = 87u + (bits >> 9) % 80u;
      const float a = fmha::float_of((bits & 0x80000000u) | exponent << 23 | ((bits * 2654435761u) >> 9));
      volatile float quotient = a / c;
      wrong += fmha::expr::div_by(a, c, 1.f / c) != quotient;
    }
    for (float a : ends) {
      volatile float quotient = a / c;
      wrong += fmha::bits_of(fmha::expr::div_by(a, c, 1.f / c)) != fmha::bits_of(float(quotient));
    }
    const float nan = fmha::expr::div_by(__builtin_nanf(""), c, 1.f / c);
    wrong += nan == nan;
    printf("%d\n", wrong);
  }
}
"#;
    let Some(device) = run_cpp("div_by", program) else { return };
    assert_eq!(device.lines().collect::<Vec<_>>(), vec!["0"; 9]);
}

/// A kernel whose mask kind is a compile-time constant agrees with `visible`, pair by pair.
#[test]
fn known_masks_say_what_the_band_says() {
    let mut program = String::from(
        r#"
#include <cstdio>
#include <fmha/mask.h>
using namespace fmha;
template <MaskKind kind, bool has_sinks>
void check(const MaskParams& params) {
  for (int sq = 1; sq < 7; ++sq)
    for (int sk = 0; sk < 7; ++sk) {
      const MaskBand band = resolve_band(params, sq, sk);
      const KnownMask<kind, has_sinks> mask = {band, sk};
      const auto sees = [&](int i, int j) { return j < sk && visible(band, i, j); };
      int wrong = 0;
      for (int first = 0; first < sq; ++first)
        for (int last = first; last < sq; ++last) {
          const Range whole = mask.whole(first, last);
          for (int begin = 0; begin < 8; ++begin) {
            const Range keys = {begin, begin + 3};
            bool all = true, none = true;
            for (int i = first; i <= last; ++i)
              for (int j = keys.begin; j < keys.end; ++j) {
                all &= sees(i, j);
                none &= !sees(i, j);
                const auto columns = mask.columns(i, keys.begin);
                const Range queries = mask.queries(j, first);
                wrong += columns.has(j - keys.begin) != sees(i, j);
                if (j >= sk) continue;
                wrong += mask.sees(i, j) != visible(band, i, j);
                wrong += (i - first >= queries.begin && i - first < queries.end) != visible(band, i, j);
              }
            // A tile of sink columns alone may be classified as partly masked although it is fully visible.
            const bool within = keys.begin >= whole.begin && keys.end <= whole.end;
            wrong += (within || !mask.cuts(first, last, keys)) && !all;
            wrong += !has_sinks && all && (!within || mask.cuts(first, last, keys));
            wrong += mask.skips(first, last, keys) && !none;
          }
        }
      printf("%d\n", wrong);
    }
}
int main() {
"#,
    );
    for (mask, kind, has_sinks) in [
        ("0", "Full", false),
        ("t", "Upper", false),
        ("b", "Upper", false),
        ("b:0,-1", "Band", false),
        ("t:2,1", "Band", false),
        ("b:3,0,2", "Band", true),
        ("g:3,2,1", "Band", true),
        ("g:5,-2", "Band", false),
    ] {
        let MaskParams { lo, hi, bottom_right, sink_columns } = mask.parse::<MaskSpec>().unwrap().into();
        let lo = if lo == i32::MIN { "kUnboundedLo".to_owned() } else { lo.to_string() };
        writeln!(
            program,
            "  check<MaskKind::{kind}, {has_sinks}>({{{lo}, {hi}, {bottom_right}, {sink_columns}}});"
        )
        .unwrap();
    }
    program.push_str("}\n");
    let Some(device) = run_cpp("known_masks", &program) else { return };
    assert_eq!(device.lines().count(), 8 * 6 * 7);
    assert!(device.lines().all(|line| line == "0"), "pairs that are told wrongly: {device}");
}

/// Each form of a soft-cap, and the derivative computed from it, agree with f64.
#[test]
fn a_soft_cap_and_its_slope_are_right_in_each_form() {
    let program = r#"
#include <cstdio>
#include <fmha/score.h>
using namespace fmha;
struct Unit {
  static float exp2(float x) { return exp2_of(x); }
  static float rcp(float x) { return 1.f / x; }
};
template <class Tanh>
void print() {
  const float caps[] = {0.5f, 30.f, 1e6f};
  for (const float cap : caps)
    for (int n = -400; n <= 400; ++n) {
      const Scored x = Tanh::capped(float(n) / 16, 0.75f, cap);
      printf("%08x %08x\n", bits_of(x.score), bits_of(x.slope));
    }
}
constexpr FwdSpec spec() {
  FwdSpec spec{};
  spec.bias = BiasKind::Alibi;
  spec.softcap = true;
  return spec;
}
int main() {
  print<ExactTanh>();
  print<FastTanh<Unit>>();
  print<BranchlessTanh<Unit>>();
  Score<spec()> score = {};
  score.scale = 0.75f;
  static_cast<SoftCap&>(score) = {30.f};
  static_cast<Alibi&>(score) = {0.25f, 3};
  const Pair pair = {40, 7, 2, 5};
  const auto none = [] { return 0.f; };
  const Scored natural = score.natural(pair, 8.f, none), log2 = score.log2(pair, 8.f, -2.f, none);
  const Scored both[] = {natural, log2};
  for (const Scored& x : both) printf("%08x %08x\n", bits_of(x.score), bits_of(x.slope));
}
"#;
    let Some(device) = run_cpp("soft_cap", program) else { return };
    let mut lines = device.lines().map(|line| {
        let (score, slope) = line.split_once(' ').unwrap();
        [score, slope].map(|bits| f64::from(f32::from_bits(u32::from_str_radix(bits, 16).unwrap())))
    });
    for form in ["ExactTanh", "FastTanh", "BranchlessTanh"] {
        for cap in [0.5f64, 30.0, 1e6] {
            // The fast form supports caps up to 64.
            let bound = if form == "FastTanh" { cap * 3e-7 } else { 3e-7 * cap.min(30.0) };
            for n in -400..=400 {
                let [score, slope] = lines.next().unwrap();
                let t = (f64::from(n) / 16.0 * 0.75 / cap).tanh();
                assert!(
                    (score - cap * t).abs() <= bound,
                    "{form}, cap {cap}, {n}/16: {score}, not {}",
                    cap * t
                );
                assert!((slope - (1.0 - t * t)).abs() <= 1e-6, "{form}, cap {cap}, {n}/16: slope {slope}");
            }
        }
    }
    // The values are those of query 42 and key 12, with a diagonal of 3.
    let t = (8.0f64 * 0.75 / 30.0).tanh();
    let expected = 30.0 * t - 0.25 * 33.0;
    for (found, expected) in lines.zip([expected, expected * std::f64::consts::LOG2_E - 2.0]) {
        assert!((found[0] - expected).abs() <= 1e-5, "{found:?}, not {expected}");
        assert!((found[1] - (1.0 - t * t)).abs() <= 1e-6, "{found:?}");
    }
}
