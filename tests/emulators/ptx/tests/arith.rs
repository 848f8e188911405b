//! Scalar instructions against independent arithmetic, lane by lane, edge values included.

mod common;

use common::{Random, lanes};

type Case32 = (&'static str, fn(u32, u32, u32) -> u32);

fn operands(seed: u64) -> [[u64; 32]; 3] {
    let edges = [
        0u64,
        1,
        2,
        31,
        32,
        33,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        0x7fff_ffff_ffff_ffff,
        1 << 63,
        u64::MAX,
    ];
    let mut random = Random(seed);
    std::array::from_fn(|_| {
        std::array::from_fn(|_| {
            let w = random.word();
            if w.is_multiple_of(3) {
                edges[(w >> 8) as usize % edges.len()]
            } else {
                random.word() >> (w >> 40 & 63)
            }
        })
    })
}

fn check32(cases: &[Case32]) {
    for (text, want) in cases {
        for seed in 1..4 {
            let [a, b, c] = operands(seed).map(|row| row.map(|v| v & 0xffff_ffff));
            let got = lanes(32, text, [&a, &b, &c]);
            for i in 0..32 {
                let (x, y, z) = (a[i] as u32, b[i] as u32, c[i] as u32);
                assert_eq!(got[i] as u32, want(x, y, z), "{text} of {x:#x} {y:#x} {z:#x}");
            }
        }
    }
}

fn s(x: u32) -> i32 {
    x as i32
}

#[test]
fn integer_instructions_agree_with_rust() {
    check32(&[
        ("add.s32 %d, %a, %b;", |a, b, _| a.wrapping_add(b)),
        ("sub.u32 %d, %a, %b;", |a, b, _| a.wrapping_sub(b)),
        ("mul.lo.s32 %d, %a, %b;", |a, b, _| a.wrapping_mul(b)),
        ("mul.hi.s32 %d, %a, %b;", |a, b, _| ((i64::from(s(a)) * i64::from(s(b))) >> 32) as u32),
        ("mul.hi.u32 %d, %a, %b;", |a, b, _| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        ("mad.lo.s32 %d, %a, %b, %c;", |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        ("min.s32 %d, %a, %b;", |a, b, _| s(a).min(s(b)) as u32),
        ("max.u32 %d, %a, %b;", |a, b, _| a.max(b)),
        ("shl.b32 %d, %a, %b;", |a, b, _| a.checked_shl(b).unwrap_or(0)),
        ("shr.u32 %d, %a, %b;", |a, b, _| a.checked_shr(b).unwrap_or(0)),
        ("shr.s32 %d, %a, %b;", |a, b, _| (s(a) >> b.min(31)) as u32),
        ("abs.s32 %d, %a;", |a, _, _| s(a).wrapping_abs() as u32),
        ("neg.s32 %d, %a;", |a, _, _| a.wrapping_neg()),
        ("popc.b32 %d, %a;", |a, _, _| a.count_ones()),
        ("clz.b32 %d, %a;", |a, _, _| a.leading_zeros()),
        ("brev.b32 %d, %a;", |a, _, _| a.reverse_bits()),
        ("bfind.shiftamt.u32 %d, %a;", |a, _, _| if a == 0 { u32::MAX } else { a.leading_zeros() }),
        ("bfind.shiftamt.s32 %d, %a;", |a, _, _| match a as i32 {
            0 | -1 => u32::MAX,
            x if x < 0 => (!a).leading_zeros(),
            _ => a.leading_zeros(),
        }),
        ("bfind.u32 %d, %a;", |a, _, _| if a == 0 { u32::MAX } else { 31 - a.leading_zeros() }),
        ("sad.s32 %d, %a, %b, %c;", |a, b, c| s(a).abs_diff(s(b)).wrapping_add(c)),
        ("lop3.b32 %d, %a, %b, %c, 0xCA;", |a, b, c| a & b | !a & c),
        ("prmt.b32 %d, %a, %b, 0x7531;", |a, b, _| {
            let all = [a.to_le_bytes(), b.to_le_bytes()].concat();
            u32::from_le_bytes([all[1], all[3], all[5], all[7]])
        }),
        ("shf.l.wrap.b32 %d, %a, %b, %c;", |a, b, c| {
            ((u64::from(b) << 32 | u64::from(a)) << (c & 31) >> 32) as u32
        }),
        ("bfe.u32 %d, %a, 5, 7;", |a, _, _| a >> 5 & 0x7f),
        ("bfe.s32 %d, %a, 5, 7;", |a, _, _| (s(a) << 20 >> 25) as u32),
        ("bfi.b32 %d, %a, %b, 9, 6;", |a, b, _| b & !(0x3f << 9) | (a & 0x3f) << 9),
        ("setp.lt.s32 %p, %a, %b; selp.b32 %d, 1, 0, %p;", |a, b, _| u32::from(s(a) < s(b))),
        ("setp.hi.u32 %p|%q, %a, %b; selp.b32 %d, 1, 0, %q;", |a, b, _| u32::from(a <= b)),
        ("setp.ne.b32 %q, %c, 0; setp.eq.and.s32 %p, %a, %b, %q; selp.b32 %d, 1, 0, %p;", |a, b, c| {
            u32::from(a == b && c != 0)
        }),
        ("mov.pred %p, -1; mov.pred %q, 0; and.pred %q, %p, %q; selp.b32 %d, %a, %b, %q;", |_, b, _| b),
        ("add.cc.u32 %w0, %a, %b; addc.u32 %d, 0, 0;", |a, b, _| u32::from(a.checked_add(b).is_none())),
        ("cvt.u16.u32 %h0, %a; cvt.s32.s16 %d, %h0;", |a, _, _| i32::from(a as u16 as i16) as u32),
        ("cvt.s32.s8 %d, %a;", |a, _, _| i32::from(a as u8 as i8) as u32),
        ("cvt.sat.u8.s32 %d, %a;", |a, _, _| s(a).clamp(0, 255) as u32),
        ("mov.b32 {%h0, %h1}, %a; mov.b32 %d, {%h1, %h0};", |a, _, _| a.rotate_left(16)),
        ("dp4a.s32.s32 %d, %a, %b, %c;", |a, b, c| {
            let dot: i32 = (0..4)
                .map(|i| i32::from(a.to_le_bytes()[i] as i8) * i32::from(b.to_le_bytes()[i] as i8))
                .sum();
            c.wrapping_add(dot as u32)
        }),
    ]);
}

#[test]
fn sixty_four_bit_instructions_agree_with_rust() {
    type Case = (&'static str, fn(u64, u64, u64) -> u64);
    let cases: &[Case] = &[
        ("add.s64 %d, %a, %b;", |a, b, _| a.wrapping_add(b)),
        ("mad.lo.u64 %d, %a, %b, %c;", |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        ("mul.hi.s64 %d, %a, %b;", |a, b, _| ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64),
        ("mul.hi.u64 %d, %a, %b;", |a, b, _| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        ("shl.b64 %d, %a, 37;", |a, _, _| a << 37),
        ("shr.s64 %d, %a, 37;", |a, _, _| ((a as i64) >> 37) as u64),
        ("cvt.u32.u64 %w0, %b; cvt.u64.u32 %d, %w0;", |_, b, _| b & 0xffff_ffff),
        ("cvt.u32.u64 %w0, %b; cvt.s64.s32 %d, %w0;", |_, b, _| i64::from(b as u32 as i32) as u64),
        ("cvt.u32.u64 %w0, %a; cvt.u32.u64 %w1, %b; mul.wide.s32 %d, %w0, %w1;", |a, b, _| {
            (i64::from(a as u32 as i32) * i64::from(b as u32 as i32)) as u64
        }),
        ("bfi.b64 %d, %a, %b, 9, 46;", |a, b, _| b & !(((1 << 46) - 1) << 9) | (a & ((1 << 46) - 1)) << 9),
        ("bfi.b64 %d, %a, %b, 60, 80;", |a, b, _| b & !(0xf << 60) | a << 60),
        ("cvt.u32.u64 %w0, %c; and.b32 %w0, %w0, 63; bfi.b64 %d, %a, %b, %w0, 1;", |a, b, c| {
            b & !(1 << (c & 63)) | (a & 1) << (c & 63)
        }),
        ("popc.b64 %w0, %a; cvt.u64.u32 %d, %w0;", |a, _, _| u64::from(a.count_ones())),
        ("setp.gt.s64 %p, %a, %b; selp.b64 %d, %a, %b, %p;", |a, b, _| (a as i64).max(b as i64) as u64),
        ("mov.b64 {%w0, %w1}, %a; mov.b64 %d, {%w1, %w0};", |a, _, _| a.rotate_left(32)),
    ];
    for (text, want) in cases {
        let [a, b, c] = operands(7);
        let got = lanes(64, text, [&a, &b, &c]);
        for i in 0..32 {
            assert_eq!(got[i], want(a[i], b[i], c[i]), "{text} of {:#x} {:#x} {:#x}", a[i], b[i], c[i]);
        }
    }
}

/// Equal bits, any NaN equal to any other.
fn same(got: u32, want: f32) -> bool {
    got == want.to_bits() || f32::from_bits(got).is_nan() && want.is_nan()
}

#[test]
fn single_precision_rounds_as_ieee_754_says() {
    let special =
        [0.0f32, -0.0, 1.0, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, f32::MAX, 0.1, 3e38];
    let mut random = Random(3);
    let mut row = || -> [u64; 32] {
        std::array::from_fn(|i| {
            let x = if i < 22 {
                special[random.word() as usize % 11]
            } else {
                f32::from_bits(random.word() as u32)
            };
            u64::from(x.to_bits())
        })
    };
    type Case = (&'static str, fn(f32, f32, f32) -> f32);
    let cases: &[Case] = &[
        ("add.f32 %d, %a, %b;", |a, b, _| a + b),
        ("mul.rn.f32 %d, %a, %b;", |a, b, _| a * b),
        ("fma.rn.f32 %d, %a, %b, %c;", |a, b, c| a.mul_add(b, c)),
        ("div.rn.f32 %d, %a, %b;", |a, b, _| a / b),
        ("sqrt.rn.f32 %d, %a;", |a, _, _| a.sqrt()),
        ("rcp.rn.f32 %d, %a;", |a, _, _| 1.0 / a),
        ("max.f32 %d, %a, %b;", |a, b, _| if a == 0.0 && b == 0.0 { a + b } else { a.max(b) }),
        ("max.NaN.f32 %d, %a, %b;", |a, b, _| {
            if a.is_nan() || b.is_nan() {
                f32::NAN
            } else if a == 0.0 && b == 0.0 {
                a + b
            } else {
                a.max(b)
            }
        }),
        ("max.NaN.f32 %d, %a, %b, %c;", |a, b, c| {
            let of = [a, b, c];
            let largest = of.into_iter().max_by(f32::total_cmp);
            largest.filter(|_| of.iter().all(|x| !x.is_nan())).unwrap_or(f32::NAN)
        }),
        ("setp.neu.f32 %p, %a, %b; selp.f32 %d, %a, %b, %p;", |a, b, _| if a == b { b } else { a }),
        ("setp.lt.f32 %p, %a, %b; selp.f32 %d, %a, %b, %p;", |a, b, _| if a < b { a } else { b }),
        ("cvt.rzi.s32.f32 %w0, %a; cvt.rn.f32.s32 %d, %w0;", |a, _, _| (a as i32) as f32),
        ("cvt.rn.f16.f32 %h0, %a; cvt.f32.f16 %d, %h0;", |a, _, _| half::f16::from_f32(a).to_f32()),
        ("cvt.rn.bf16x2.f32 %d, %a, %b; shl.b32 %d, %d, 16;", |_, b, _| half::bf16::from_f32(b).to_f32()),
        ("cvt.rn.f16x2.f32 %w0, %a, %b; mov.b32 {%h0, %h1}, %w0; cvt.f32.f16 %d, %h1;", |a, _, _| {
            half::f16::from_f32(a).to_f32()
        }),
        ("cvt.rni.f32.f32 %d, %a;", |a, _, _| a.round_ties_even()),
    ];
    for (text, want) in cases {
        for _ in 0..4 {
            let (a, b, c) = (row(), row(), row());
            let got = lanes(32, text, [&a, &b, &c]);
            for i in 0..32 {
                let [x, y, z] = [a, b, c].map(|r| f32::from_bits(r[i] as u32));
                let w = want(x, y, z);
                assert!(same(got[i] as u32, w), "{text} of {x:e} {y:e} {z:e}: {:#x}, {w:e}", got[i]);
            }
        }
    }
}

#[test]
fn directed_rounding_moves_an_inexact_sum_by_one_ulp() {
    let (one, tiny) = (1.0f32, 1e-40f32);
    let row = |x: f32| -> [u64; 32] { [u64::from(x.to_bits()); 32] };
    for (mode, x, want) in [
        ("rz", -one, 0xbf7f_ffffu32),
        ("rm", -one, (-one).to_bits()),
        ("rp", -one, 0xbf7f_ffff),
        ("rz", one, one.to_bits()),
        ("rp", one, 0x3f80_0001),
    ] {
        let got = lanes(32, &format!("add.{mode}.f32 %d, %a, %b;"), [&row(x), &row(tiny), &row(0.0)]);
        assert_eq!(got[0] as u32, want, "{mode} of {x} + {tiny:e}");
    }
}

#[test]
fn approximations_stay_within_the_documented_error() {
    type Case = (&'static str, fn(f64) -> f64, f64, (f32, f32));
    let cases: &[Case] = &[
        ("ex2.approx.f32 %d, %a;", f64::exp2, 2f64.powf(-22.5), (-100.0, 100.0)),
        ("ex2.approx.ftz.f32 %d, %a;", f64::exp2, 2f64.powf(-22.5), (-100.0, 100.0)),
        ("lg2.approx.ftz.f32 %d, %a;", f64::log2, 2f64.powi(-22), (2.0, 1e30)),
        ("rcp.approx.ftz.f32 %d, %a;", |x| 1.0 / x, 2f64.powi(-23), (1e-30, 1e30)),
        ("rsqrt.approx.ftz.f32 %d, %a;", |x| 1.0 / x.sqrt(), 2f64.powf(-22.9), (1e-30, 1e30)),
        ("tanh.approx.f32 %d, %a;", f64::tanh, 2f64.powi(-11), (-3.0, 3.0)),
    ];
    let mut random = Random(5);
    for (text, exact, bound, (low, high)) in cases {
        let a: [u64; 32] = std::array::from_fn(|_| {
            let unit = (random.word() >> 40) as f32 / (1u32 << 24) as f32;
            u64::from((low + unit * (high - low)).to_bits())
        });
        let got = lanes(32, text, [&a, &a, &a]);
        for i in 0..32 {
            let want = exact(f64::from(f32::from_bits(a[i] as u32)));
            let error = ((f64::from(f32::from_bits(got[i] as u32)) - want) / want).abs();
            assert!(error <= *bound, "{text}: relative error {error:e}");
        }
    }
}

#[test]
fn packed_halves_and_pairs_of_singles_equal_their_elements() {
    let mut random = Random(9);
    let a: [u64; 32] = std::array::from_fn(|_| random.word() & 0xbfff_bfff);
    let b: [u64; 32] = std::array::from_fn(|_| random.word() & 0xbfff_bfff);
    let got = lanes(32, "add.rn.f16x2 %d, %a, %b;", [&a, &b, &a]);
    let h = |v: u64, i: u32| half::f16::from_bits((v >> (16 * i)) as u16);
    for i in 0..32 {
        for e in 0..2 {
            let want = h(a[i], e) + h(b[i], e);
            assert!(
                h(got[i], e) == want || want.is_nan() && h(got[i], e).is_nan(),
                "{:?} {:?}",
                h(a[i], e),
                h(b[i], e)
            );
        }
    }
    let x: [u64; 32] =
        std::array::from_fn(|i| u64::from((i as f32).to_bits()) << 32 | u64::from(1.5f32.to_bits()));
    let got = lanes(64, "fma.rn.f32x2 %d, %a, %b, %c;", [&x, &x, &x]);
    for (i, g) in got.iter().enumerate() {
        let f = i as f32;
        assert_eq!(f32::from_bits((g >> 32) as u32), f * f + f);
        assert_eq!(f32::from_bits(*g as u32), 3.75);
    }
}

#[test]
fn sums_of_a_single_and_halves_are_singles() {
    let halves = [1.5f32, -0.37, 3.25, 65504.0];
    let a: [u64; 32] =
        std::array::from_fn(|i| u64::from(half::bf16::from_f32(halves[i % 4] * (1 + i) as f32).to_bits()));
    let b: [u64; 32] = std::array::from_fn(|i| u64::from(half::bf16::from_f32(0.1 * i as f32).to_bits()));
    let c: [u64; 32] = std::array::from_fn(|i| u64::from((1.0 / (1 + i) as f32).to_bits()));
    let split = "cvt.u16.u32 %h0, %a; cvt.u16.u32 %h1, %b;";
    let fma = lanes(32, &format!("{split} fma.rn.f32.bf16 %d, %h0, %h1, %c;"), [&a, &b, &c]);
    let add = lanes(32, &format!("{split} add.f32.bf16 %d, %h0, %c;"), [&a, &b, &c]);
    for i in 0..32 {
        let [x, y] = [a, b].map(|row| half::bf16::from_bits(row[i] as u16).to_f32());
        let z = f32::from_bits(c[i] as u32);
        assert_eq!(f32::from_bits(fma[i] as u32), x.mul_add(y, z));
        assert_eq!(f32::from_bits(add[i] as u32), x + z);
    }
}

#[test]
fn fp8_conversions_round_to_nearest_and_saturate() {
    let values = [0.0f32, 1.0, -1.0, 448.0, 1e9, -1e9, 0.3, 1.0 / 512.0, 17.0, 19.0];
    let want = [0x00, 0x38, 0xb8, 0x7e, 0x7e, 0xfe, 0x2a, 0x01, 0x58, 0x5a];
    let a: [u64; 32] = std::array::from_fn(|i| u64::from(values[i % values.len()].to_bits()));
    let got = lanes(32, "cvt.rn.satfinite.e4m3x2.f32 %h0, %a, %a; cvt.u32.u16 %d, %h0;", [&a, &a, &a]);
    for i in 0..32 {
        assert_eq!(got[i], want[i % values.len()] * 0x101, "{}", values[i % values.len()]);
    }
}

#[test]
fn four_bit_conversions_round_to_nearest_even_and_saturate() {
    let values =
        [0.0f32, -0.0, 0.25, 0.26, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0, -5.1, 6.5, 1e9, -1e9, f32::NAN, 4.9];
    let want = [0, 8, 0, 1, 2, 2, 12, 4, 6, 6, 15, 7, 7, 15, 7, 6];
    let a: [u64; 32] = std::array::from_fn(|i| u64::from(values[i % values.len()].to_bits()));
    let one: [u64; 32] = [u64::from(1f32.to_bits()); 32];
    // The first number of a byte is the second operand. Bytes are packed from the low end.
    let got = lanes(
        32,
        "{ .reg .b8 %e, %f; cvt.rn.satfinite.e2m1x2.f32 %e, %b, %a; cvt.rn.satfinite.e2m1x2.f32 %f, %a, %b;
         mov.b32 %d, {%e, %f, %e, %e}; }",
        [&a, &one, &a],
    );
    for i in 0..32 {
        let (code, pair) = (want[i % want.len()], want[i % want.len()] | 0x20);
        let other = 2 | code << 4;
        assert_eq!(got[i], pair | other << 8 | pair << 16 | pair << 24, "{}", values[i % values.len()]);
    }
}

#[test]
fn shuffles_and_votes_follow_the_isa() {
    let a: [u64; 32] = std::array::from_fn(|i| 100 + i as u64);
    let lane = |text: &str| lanes(32, text, [&a, &a, &a]);
    assert!((0..32).all(|i| lane("shfl.sync.bfly.b32 %d, %a, 5, 31, -1;")[i] == 100 + (i as u64 ^ 5)));
    let up = lane("shfl.sync.up.b32 %d, %a, 3, 0, -1;");
    assert!((0..32).all(|i| up[i] == 100 + i.saturating_sub(3).max(if i < 3 { i } else { 0 }) as u64));
    let down = lane("shfl.sync.down.b32 %d|%p, %a, 3, 31, -1; @!%p mov.u32 %d, 7;");
    assert!((0..32).all(|i| down[i] == if i + 3 < 32 { 103 + i as u64 } else { 7 }));
    // Segments of eight lanes: c = (32 - 8) << 8 | 31.
    let idx = lane("shfl.sync.idx.b32 %d, %a, 2, 0x181f, -1;");
    assert!((0..32).all(|i| idx[i] == 102 + (i as u64 & 24)));
    let ballot = lane("setp.gt.u32 %p, %a, 109; vote.sync.ballot.b32 %d, %p, -1;");
    assert_eq!(ballot[0], 0xffff_fc00);
    let redux = lane("redux.sync.max.u32 %d, %a, -1;");
    assert_eq!(redux, [131; 32]);
    let matched = lane("shr.u32 %w0, %a, 2; match.any.sync.b32 %d, %w0, -1;");
    assert_eq!(matched[0], 0xf);
    let elected = lane("elect.sync %w0|%p, -1; selp.b32 %d, 1, 0, %p;");
    assert_eq!(elected.iter().sum::<u64>(), 1);
}

#[test]
fn diverged_lanes_meet_again_and_loops_end_for_each_lane_alone() {
    // Lane i loops i times, and then all lanes vote.
    let a: [u64; 32] = std::array::from_fn(|i| i as u64);
    let got = lanes(
        32,
        "mov.u32 %w0, 0;
         LOOP: setp.ge.u32 %p, %w0, %a; @%p bra DONE;
         add.u32 %w0, %w0, 1; add.u32 %d, %d, 3; bra LOOP;
         DONE: setp.ne.u32 %q, %d, 0; vote.sync.ballot.b32 %w1, %q, -1; popc.b32 %w1, %w1; mad.lo.u32 %d, %w1, 1000, %d;",
        [&a, &a, &a],
    );
    assert!((0..32).all(|i| got[i] == 31_000 + 3 * i as u64));
}
