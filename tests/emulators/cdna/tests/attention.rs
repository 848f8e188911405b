//! A real attention kernel: right against float64 on every architecture, and with each of its waits and
//! barriers removed in turn, caught or shown to be redundant.

mod common;

use common::{Random, compile, device, fast_device};
use fmha_emu_cdna::{Arch, CodeObject, Counters, Device, FaultKind, Launch, LaunchError};

const HEAD_DIM: usize = 64;
const NUM_Q: usize = 128;
const NUM_K: usize = 96;

/// A number that f16 has, and its bits: 10 mantissa bits of a value in [-1, 1).
fn exact_f16(random: &mut Random) -> (f64, u16) {
    let step = (random.bits() % 2048) as i32 - 1024;
    let value = f64::from(step) / 1024.0;
    (value, f16_bits(value))
}

/// Bits of a number that f16 has exactly.
fn f16_bits(value: f64) -> u16 {
    if value == 0.0 {
        return 0;
    }
    let sign = if value < 0.0 { 0x8000 } else { 0 };
    let exponent = value.abs().log2().floor() as i32;
    let mantissa = (value.abs() / 2f64.powi(exponent) - 1.0) * 1024.0;
    sign | ((exponent + 15) as u16) << 10 | mantissa as u16
}

fn f16_value(bits: u16) -> f64 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    if exponent == 0 {
        sign * mantissa * 2f64.powi(-24)
    } else {
        sign * (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15)
    }
}

struct Problem {
    q: Vec<(f64, u16)>,
    k: Vec<(f64, u16)>,
    v: Vec<(f64, u16)>,
}

impl Problem {
    fn new() -> Self {
        let mut random = Random(7);
        let mut matrix = |rows: usize| (0..rows * HEAD_DIM).map(|_| exact_f16(&mut random)).collect();
        Self { q: matrix(NUM_Q), k: matrix(NUM_K), v: matrix(NUM_K) }
    }

    /// Runs the kernel; O as f16 bits and the LSE.
    fn run(&self, device: &Device, code: &[u8]) -> Result<(Vec<u16>, Vec<f32>, Counters), LaunchError> {
        let module = device.load(code).expect("a code object");
        let upload = |m: &[(f64, u16)]| {
            device.memory.alloc_from(&m.iter().flat_map(|x| x.1.to_le_bytes()).collect::<Vec<u8>>())
        };
        let (q, k, v) = (upload(&self.q), upload(&self.k), upload(&self.v));
        let (o, lse) = (device.memory.alloc(NUM_Q * HEAD_DIM * 2), device.memory.alloc(NUM_Q * 4));
        let mut args: Vec<u8> = [q, k, v, o, lse].iter().flat_map(|p| p.to_le_bytes()).collect();
        args.extend((NUM_K as i32).to_le_bytes());
        args.extend((std::f32::consts::LOG2_E / (HEAD_DIM as f32).sqrt()).to_le_bytes());
        let launch =
            Launch { grid: [(NUM_Q / 128) as u32, 1, 1], block: [256, 1, 1], dynamic_lds: 0, args: &args };
        let counters = device.launch(&module, "attention", &launch)?;
        let read = |address, bytes| device.memory.read_vec(address, bytes).expect("allocated above");
        let o =
            read(o, NUM_Q * HEAD_DIM * 2).chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        let lse = read(lse, NUM_Q * 4)
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        Ok((o, lse, counters))
    }

    /// O and LSE by the definition.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let scale = 1.0 / (HEAD_DIM as f64).sqrt();
        let (mut o, mut lse) = (Vec::new(), Vec::new());
        for q in self.q.chunks_exact(HEAD_DIM) {
            let scores: Vec<f64> = self
                .k
                .chunks_exact(HEAD_DIM)
                .map(|k| scale * q.iter().zip(k).map(|(a, b)| a.0 * b.0).sum::<f64>())
                .collect();
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            for d in 0..HEAD_DIM {
                let row = scores.iter().enumerate().map(|(j, s)| s.exp() * self.v[j * HEAD_DIM + d].0);
                o.push(row.sum::<f64>() / sum);
            }
            lse.push(sum.ln());
        }
        (o, lse)
    }
}

#[test]
fn an_attention_kernel_agrees_with_float64_on_every_architecture() {
    let problem = Problem::new();
    let (want_o, want_lse) = problem.reference();
    for arch in Arch::CDNA {
        let Some(code) = compile("attention.hip", arch) else { return };
        let (o, lse, counters) = problem.run(&device(arch), &code).unwrap_or_else(|e| panic!("{arch}: {e}"));
        for (got, want) in o.iter().zip(&want_o) {
            // P and O are rounded to f16: two roundings of 2^-11 of numbers below 1.
            assert!((f16_value(*got) - want).abs() < 1e-3, "{arch}: {} for {want}", f16_value(*got));
        }
        for (got, want) in lse.iter().zip(&want_lse) {
            assert!((f64::from(*got) - want).abs() < 1e-5, "{arch}: {got} for {want}");
        }
        let fast = problem.run(&fast_device(arch), &code).expect("it ran with checks");
        assert_eq!((&fast.0, &fast.1), (&o, &lse), "{arch}: checks change results");
        assert_eq!(fast.2.executed, counters.executed, "{arch}: checks change the count");
    }
}

/// Replaces the instruction by `s_nop 0`.
fn without(code: &[u8], file_offset: usize) -> Vec<u8> {
    const S_NOP: u32 = 0xbf80_0000;
    let mut code = code.to_vec();
    code[file_offset..file_offset + 4].copy_from_slice(&S_NOP.to_le_bytes());
    code
}

#[test]
fn every_wait_and_barrier_that_is_removed_is_caught_or_redundant() {
    let problem = Problem::new();
    for arch in Arch::CDNA {
        let Some(code) = compile("attention.hip", arch) else { return };
        let object = CodeObject::parse(&code).expect("a code object");
        let device = device(arch);
        let (want, _, counters) = problem.run(&device, &code).expect("the kernel is right");
        let (mut caught, mut redundant) = (0, 0);
        for inst in object.disassemble() {
            if !matches!(inst.mnemonic.as_str(), "s_waitcnt" | "s_barrier") {
                continue;
            }
            let mutant = without(&code, inst.file_offset);
            match problem.run(&common::device(arch), &mutant) {
                Err(LaunchError::Fault(fault)) => {
                    let kinds = [
                        FaultKind::MissingWait,
                        FaultKind::LdsRace,
                        FaultKind::UninitLds,
                        FaultKind::DivergentBarrier,
                    ];
                    assert!(kinds.contains(&fault.kind), "{arch} 0x{:x}: {fault}", inst.pc);
                    caught += 1;
                }
                Err(refused) => panic!("{arch} 0x{:x}: {refused}", inst.pc),
                Ok((o, ..)) => {
                    // Redundant: whenever it was reached, everything that it waits for had been waited for already.
                    assert!(
                        inst.mnemonic == "s_waitcnt" && !counters.useful_waits.contains(&inst.pc),
                        "{arch}: {} at 0x{:x} ({:?}) was removed and nothing noticed",
                        inst.mnemonic,
                        inst.pc,
                        inst.source
                    );
                    assert_eq!(o, want);
                    redundant += 1;
                }
            }
        }
        println!("{arch}: {caught} caught, {redundant} redundant");
        assert!(caught >= 8, "{arch}: {caught} caught");
    }
}
