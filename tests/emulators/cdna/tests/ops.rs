//! Compiled operations against the host's own arithmetic.

mod common;

use common::{Random, bytes, compile, device, words};
use fmha_emu_cdna::{Arch, Launch};

/// Runs a kernel of one wave on 192 input words; 64 words come back.
fn run(arch: Arch, code: &[u8], kernel: &str, input: &[u32]) -> Vec<u32> {
    let device = device(arch);
    let module = device.load(code).expect("a code object");
    let (from, to) = (device.memory.alloc_from(&bytes(input)), device.memory.alloc(256));
    let args: Vec<u8> = [from, to].iter().flat_map(|p| p.to_le_bytes()).collect();
    let launch = Launch { grid: [1; 3], block: [64, 1, 1], dynamic_lds: 0, args: &args };
    device.launch(&module, kernel, &launch).unwrap_or_else(|e| panic!("{arch} {kernel}: {e}"));
    words(&device.memory.read_vec(to, 256).expect("allocated above"))
}

#[test]
fn integer_arithmetic_is_the_hosts() {
    for arch in Arch::ALL {
        let Some(code) = compile("ops.hip", arch) else { return };
        let mut random = Random(1);
        let input: Vec<u32> = (0..192).map(|i| random.bits() >> (i % 7)).collect();
        let got = run(arch, &code, "integers", &input);
        for (i, x) in input.chunks_exact(3).enumerate() {
            let [a, b, c] = [x[0] as i32, x[1] as i32, x[2] as i32];
            let mut r = a.wrapping_mul(b).wrapping_add(c);
            r ^= (a << (b & 31)) | ((c as u32) >> (a & 31)) as i32;
            r = r.wrapping_add(a.wrapping_div(b | 1)).wrapping_add((b as u32 % (c as u32 | 1)) as i32);
            r = r.wrapping_add(
                (a.count_ones() + (b | 1).leading_zeros() + (c | 1 << 30).trailing_zeros()) as i32,
            );
            let wide = (i64::from(a) * i64::from(b)).wrapping_add(i64::from(c) << 20);
            r = r.wrapping_add((wide >> 17) as i32).wrapping_add((wide as u64 / 1000) as i32);
            assert_eq!(got[i] as i32, r, "{arch} lane {i}: {a} {b} {c}");
        }
    }
}

#[test]
fn float_arithmetic_is_the_hosts() {
    for arch in Arch::ALL {
        let Some(code) = compile("ops.hip", arch) else { return };
        let mut random = Random(2);
        let input: Vec<u32> = (0..192).map(|_| (random.unit() * 50.0).to_bits()).collect();
        let got = run(arch, &code, "floats", &input);
        for (i, x) in input.chunks_exact(3).enumerate() {
            let [a, b, c] = [x[0], x[1], x[2]].map(f32::from_bits);
            let mut r = a.mul_add(b, c) + a / b;
            r += a.min(b.abs()) - c.floor() + c.abs().sqrt();
            r += (a * 100.0) as i32 as f32 + (b * 7.0).abs() as u32 as f32;
            let d = f64::from(a) * f64::from(b) - f64::from(c);
            r += (d * d) as f32 + if a < b { c } else { -c };
            let got = f32::from_bits(got[i]);
            // The compiler may contract a * b - c in double precision, and sqrt is built from the hardware's estimate.
            assert!((got - r).abs() <= 2e-6 * r.abs().max(100.0), "{arch} lane {i}: {got} for {r}");
        }
    }
}

#[test]
fn the_ends_of_three_16_bit_numbers_are_the_hosts() {
    for arch in Arch::ALL {
        let Some(code) = compile("ops.hip", arch) else { return };
        let mut random = Random(11);
        let input: Vec<u32> = (0..192).map(|_| random.bits()).collect();
        let got = run(arch, &code, "shorts", &input);
        for (i, x) in input.chunks_exact(3).enumerate() {
            let [a, b, c] = [x[0] as u16, x[1] as u16, x[2] as u16];
            let [d, e, f] = [a as i16, b as i16, c as i16];
            let signed = [d.min(e).min(f) as u16, d.max(e).max(f) as u16].map(u32::from);
            let unsigned = [a.min(b).min(c), a.max(b).max(c)].map(u32::from);
            let want = unsigned[0] + 3 * unsigned[1] + 5 * signed[0] + 7 * signed[1];
            assert_eq!(got[i], want, "{arch} lane {i}");
        }
    }
}

/// Down to subnormal operands and quotients, up to those that overflow.
#[test]
fn quotients_are_correctly_rounded_over_the_whole_range() {
    for arch in Arch::ALL {
        let Some(code) = compile("ops.hip", arch) else { return };
        let mut random = Random(7);
        for round in 0..50 {
            let input: Vec<u32> = (0..192)
                .map(|i| match (round, i % 3) {
                    // About the edge at which 1 / b and a / b become subnormal.
                    (0, 0) => 2f32.to_bits(),
                    (0, 1) => (2f32.powi(126) * (1.0 + i as f32 / 64.0)).to_bits(),
                    _ => random.bits(),
                })
                .collect();
            let got = run(arch, &code, "quotients", &input);
            for (i, x) in input.chunks_exact(3).enumerate() {
                let [a, b] = [x[0], x[1]].map(f32::from_bits);
                let (got, want) = (f32::from_bits(got[i]), a / b);
                assert!(
                    got == want || got.is_nan() && want.is_nan(),
                    "{arch}: {a:e} / {b:e} = {got:e}, not {want:e}"
                );
            }
        }
    }
}

#[test]
fn lane_moves_follow_their_definitions() {
    for arch in Arch::ALL {
        let Some(code) = compile("ops.hip", arch) else { return };
        let mut random = Random(3);
        let a: Vec<u32> = (0..192).map(|_| random.bits()).collect();
        let got = run(arch, &code, "lanes", &a);
        for i in 0..64usize {
            let bpermute = a[i ^ 5];
            // Swizzle 0x041f: and 31, or 0, xor 1.
            let swizzle = a[i ^ 1];
            // Quad permutation 0xb1: 1, 0, 3, 2.
            let quad = a[i ^ 1];
            // Row shift right by one; the first of each 16 keeps the old value, 7.
            let shifted = if i % 16 == 0 { 7 } else { a[i - 1] };
            // First lane of the lane's own wave.
            let wave = i - i % arch.wave_lanes() as usize;
            let sum = [bpermute, swizzle, quad, shifted, a[wave + 9], a[wave]]
                .iter()
                .fold(0u32, |s, x| s.wrapping_add(*x));
            assert_eq!(got[i], sum, "{arch} lane {i}");
        }
    }
}

#[test]
fn atomics_of_all_lanes_and_workgroups_add_up() {
    for arch in Arch::ALL {
        let Some(code) = compile("ops.hip", arch) else { return };
        let device = device(arch);
        let module = device.load(&code).expect("a code object");
        let (counter, sum) = (device.memory.alloc_from(&[0; 4]), device.memory.alloc_from(&[0; 4]));
        let input = device.memory.alloc_from(&bytes(&[0.5f32.to_bits(); 64]));
        let out = device.memory.alloc(256);
        let args: Vec<u8> = [counter, sum, input, out].iter().flat_map(|p| p.to_le_bytes()).collect();
        let launch = Launch { grid: [3, 1, 1], block: [64, 1, 1], dynamic_lds: 0, args: &args };
        device.launch(&module, "atomics", &launch).unwrap_or_else(|e| panic!("{arch}: {e}"));
        let word = |address| words(&device.memory.read_vec(address, 4).expect("allocated above"))[0];
        assert_eq!(word(counter), 3 * (0..64).sum::<u32>(), "{arch}");
        assert_eq!(f32::from_bits(word(sum)), 96.0, "{arch}");
    }
}
