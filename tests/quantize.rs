//! Conversion to formats with scales by blocks, on emulated devices and the CPU: bits must equal those of
//! `BlockFormat::quantize` on the host.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use fmha_conformance::apart::run_test;
use fmha_core::block_scales::{BlockAxis, BlockFormat};
use fmha_core::quantize::{QuantizeProblem, TensorScale};
use fmha_core::{DType, Device, Error, PlanOptions, QuantizeArgs, Shape, Strides};

/// Random generator with a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    fn below(&mut self, end: u32) -> u32 {
        ((u64::from(self.next()) * u64::from(end)) >> 32) as u32
    }

    /// Draws a number that is hard to round: any bits, few digits near a block's scale, or one for which a format has
    /// its own rule.
    fn number(&mut self, kind: u32) -> f32 {
        const SPECIAL: [f32; 10] = [
            0.0,
            -0.0,
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-42,
            -1e-45,
            448.0,
        ];
        let sign = if self.below(2) == 0 { 1.0 } else { -1.0 };
        match kind {
            // Finite numbers of every magnitude.
            0 => f32::from_bits(self.next() & 0xff7f_ffff),
            // Ties of E2M1 and of FP8 under scales that are powers of two, or few digits.
            1 => sign * self.below(97) as f32 / 8.0,
            2 => sign * self.below(1 << 12) as f32 * 2f32.powi(self.below(24) as i32 - 12),
            // Subnormal numbers beside the smallest normal ones.
            3 => sign * f32::from_bits(self.below(1 << 25)),
            4 if self.below(9) == 0 => SPECIAL[self.below(10) as usize],
            _ => sign * self.below(1 << 20) as f32 / 65536.0,
        }
    }
}

/// A conversion, its input, and a tensor's scale that the caller gives.
struct Case {
    problem: QuantizeProblem,
    values: Vec<f32>,
    given: Option<f32>,
}

/// Result of a conversion: stored elements, scales of blocks, and the tensor's scale.
type Stored = (Vec<u8>, Vec<u8>, Option<f32>);

impl Case {
    fn new(problem: QuantizeProblem, given: Option<f32>, kind: u32, seed: u64) -> Self {
        let mut random = Random(seed);
        let count = extent(problem.x, problem.shape);
        let values = (0..count).map(|_| rounded(problem.dtype, random.number(kind))).collect();
        Self { problem, values, given }
    }

    fn name(&self) -> String {
        let QuantizeProblem { format, axis, pairs, dtype, shape, tensor_scale, .. } = &self.problem;
        format!(
            "{format} {axis:?} pairs {pairs:?} of {dtype} {shape:?}, scale {tensor_scale:?} {:?}",
            self.given
        )
    }

    /// Elements and scales as the host computes them.
    fn expected(&self) -> Stored {
        let problem = &self.problem;
        let Shape { batch, seq, head, dim } = problem.shape;
        let at = |b, s, h, d| self.values[problem.x.offset(b, s, h, d) as usize];
        let heads = |b: u32, h: u32| -> Vec<f32> {
            (0..seq).flat_map(|s| (0..dim).map(move |d| at(b, s, h, d))).collect()
        };
        let all: Vec<f32> = (0..batch).flat_map(|b| (0..head).flat_map(move |h| heads(b, h))).collect();
        let scale = match problem.tensor_scale {
            TensorScale::One => 1.0,
            TensorScale::Given => self.given.unwrap(),
            TensorScale::Written => problem.format.tensor_scale(&all),
        };
        let (stored, of_scales) = (problem.stored(), problem.of_scales());
        let mut elements = vec![UNTOUCHED; extent(problem.elements, stored)];
        let mut scales = vec![UNTOUCHED; extent(problem.scales, of_scales)];
        for (b, h) in (0..batch).flat_map(|b| (0..head).map(move |h| (b, h))) {
            let values = heads(b, h);
            let of_head = problem.format.quantize(&values, dim as usize, problem.axis, scale);
            let (codes, of_blocks) = match of_head {
                Ok(it) => (it.elements, it.scales),
                Err(_) => (vec![0; values.len()], vec![0x7f; values.len()]),
            };
            let each = problem.format.elems_per_byte();
            let width = dim.div_ceil(each);
            let code = |s: u32, d: u32| match each {
                1 => codes[(s * dim + d) as usize],
                _ if s < seq && d < dim => codes[(s * width + d / 2) as usize] >> (4 * (d % 2)) & 0xf,
                _ => 0,
            };
            for (s, d) in (0..stored.seq).flat_map(|s| (0..stored.dim).map(move |d| (s, d))) {
                elements[problem.elements.offset(b, s, h, d) as usize] = match (each, problem.pairs) {
                    (1, _) => code(s, d),
                    (_, BlockAxis::Rows) => code(2 * s, d) | code(2 * s + 1, d) << 4,
                    _ => code(s, 2 * d) | code(s, 2 * d + 1) << 4,
                };
            }
            for (s, d) in (0..of_scales.seq).flat_map(|s| (0..of_scales.dim).map(move |d| (s, d))) {
                scales[problem.scales.offset(b, s, h, d) as usize] =
                    of_blocks[(s * of_scales.dim + d) as usize];
            }
        }
        (elements, scales, (problem.tensor_scale == TensorScale::Written).then_some(scale))
    }

    /// Elements and scales as a device computes them.
    fn run(&self, device: &Device) -> Stored {
        let problem = self.problem.clone().validate().unwrap();
        let plan = device.plan_quantize(&problem, &PlanOptions::default()).unwrap();
        let memory = device.memory();
        let mut bytes = Vec::new();
        for &x in &self.values {
            match problem.dtype {
                DType::F32 => bytes.extend(x.to_le_bytes()),
                DType::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
                _ => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
            }
        }
        let x = memory.place(&bytes[..]).unwrap().typed(problem.dtype);
        let mut elements = vec![UNTOUCHED; extent(problem.elements, problem.stored())];
        let mut scales = vec![UNTOUCHED; extent(problem.scales, problem.of_scales())];
        let mut to_elements = memory.place(&elements[..]).unwrap().typed(problem.format.elem());
        let mut to_scales = memory.place(&scales[..]).unwrap().typed(problem.format.scale_elem());
        let given = self.given.map(|scale| memory.place(&[scale]).unwrap());
        let is_written = problem.tensor_scale == TensorScale::Written;
        let mut written = is_written.then(|| memory.place(&[7.0f32]).unwrap());
        let mut scratch = memory.workspace(plan.workspace()).unwrap();
        let mut args = QuantizeArgs::new(x.slice(), to_elements.slice_mut(), to_scales.slice_mut())
            .tensor_scale(given.as_ref().map(|it| it.slice()))
            .written_scale(written.as_mut().map(|it| it.slice_mut()))
            .workspace(scratch.as_mut().map(|it| it.slice_mut()));
        let stream = device.default_stream();
        plan.run(&mut args, &stream).unwrap();
        stream.synchronize().unwrap();
        memory.download(&to_elements, &mut elements).unwrap();
        memory.download(&to_scales, &mut scales).unwrap();
        let mut scale = [0.0];
        written.iter().for_each(|it| memory.download(it, &mut scale).unwrap());
        (elements, scales, is_written.then_some(scale[0]))
    }

    fn holds(&self, device: &Device) {
        let name = format!("{} on {}", self.name(), device.name());
        let (wanted, found) = (self.expected(), self.run(device));
        assert_eq!(found.2.map(f32::to_bits), wanted.2.map(f32::to_bits), "{name}: the tensor's scale");
        for (what, found, wanted) in [("scale", &found.1, &wanted.1), ("element", &found.0, &wanted.0)] {
            let differs = found.iter().zip(wanted).position(|(a, b)| a != b);
            if let Some(at) = differs {
                panic!("{name}: byte {at} of the {what}s is {:#x}, should be {:#x}", found[at], wanted[at]);
            }
        }
    }
}

/// Byte with which memory is filled beforehand. No conversion here writes it, in any format.
const UNTOUCHED: u8 = 0xa5;

fn extent(strides: Strides, shape: Shape) -> usize {
    let Shape { batch, seq, head, dim } = shape;
    if [batch, seq, head, dim].contains(&0) {
        return 0;
    }
    1 + strides.offset(batch - 1, seq - 1, head - 1, dim - 1) as usize
}

fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::F16 => half::f16::from_f32(x).to_f32(),
        _ => half::bf16::from_f32(x).to_f32(),
    }
}

/// Cases of every format, both axes and pairs of rows, with types and numbers in turn.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let (dtypes, mut seed) = ([DType::Bf16, DType::F32, DType::F16], 0);
    for format in BlockFormat::ALL {
        for (axis, by_columns) in [(BlockAxis::Dim, false), (BlockAxis::Rows, false), (BlockAxis::Rows, true)]
        {
            for kind in 0..6 {
                seed += 1;
                let dtype = dtypes[(seed % 3) as usize];
                // The shape has whole blocks, which are moved as words, or incomplete ones.
                let shape = match seed % 2 {
                    0 => Shape { batch: 2, seq: 40, head: 2, dim: 64 },
                    _ => Shape { batch: 1, seq: 37, head: 3, dim: 41 },
                };
                let problem = QuantizeProblem::new(format, axis, dtype, shape);
                let mut problem = if by_columns { problem.by_columns() } else { problem };
                let mut given = None;
                if format == BlockFormat::Nvfp4 && kind % 3 == 1 {
                    // With few digits every quotient may be a tie; 3 and 1e-40 have none to spare.
                    given = Some([1.0, 0.375, 3.0, 1e-40, 1e30, 0.0][(seed % 6) as usize]);
                    problem = problem.tensor_scale(TensorScale::Given);
                } else if format == BlockFormat::Nvfp4 && kind == 5 {
                    problem = problem.tensor_scale(TensorScale::One);
                }
                cases.push(Case::new(problem, given, kind, seed));
            }
        }
    }
    // Strides have gaps: rows of a head are apart, and V lies within a row of Q, K and V.
    let shape = Shape { batch: 2, seq: 33, head: 2, dim: 48 };
    for format in [BlockFormat::Nvfp4, BlockFormat::Mxfp8E4m3] {
        for axis in [BlockAxis::Dim, BlockAxis::Rows] {
            let problem = QuantizeProblem::new(format, axis, DType::Bf16, shape);
            let (stored, scales) = (problem.stored(), problem.of_scales());
            let apart = |shape: Shape, more: i64| {
                let head = i64::from(shape.dim) + more;
                let seq = head * i64::from(shape.head);
                Strides { batch: seq * i64::from(shape.seq) + 3, seq, head, dim: 1 }
            };
            let problem = problem
                .strides(Strides { dim: 2, ..apart(Shape { dim: 96, ..shape }, 1) })
                .strides_elements(apart(stored, 5))
                .strides_scales(Strides { dim: 3, ..apart(Shape { dim: 3 * scales.dim, ..scales }, 0) });
            seed += 1;
            cases.push(Case::new(problem, None, 4, seed));
        }
    }
    // The tensor's scale is 1 without elements, with only zeros, and where it would be subnormal.
    for empty in [Shape { seq: 0, ..shape }, Shape { batch: 0, ..shape }] {
        let none = QuantizeProblem::new(BlockFormat::Nvfp4, BlockAxis::Dim, DType::F32, empty);
        cases.push(Case::new(none, None, 0, 1));
    }
    for most in [0.0, f32::MIN_POSITIVE * 2688.0, 3.158_97e-35, 3.158_975e-35, f32::from_bits(0x0641_ffff)] {
        let tensor = Shape { batch: 1, seq: 3, head: 1, dim: 32 };
        let problem = QuantizeProblem::new(BlockFormat::Nvfp4, BlockAxis::Dim, DType::F32, tensor);
        let mut case = Case::new(problem, None, 0, 1);
        case.values.fill(0.0);
        case.values[40] = most;
        case.values[41] = most / 3.0;
        cases.push(case);
    }
    cases
}

/// Quotients halfway between two scales and halfway between two elements: exactly there, and one f32 beside.
fn ties() -> Vec<Case> {
    let mut cases = Vec::new();
    for scale in [1.0f32, 0.625, 1.7, 3e-39, 2e-3] {
        let shape = Shape { batch: 1, seq: 256, head: 1, dim: 16 };
        let problem = QuantizeProblem::new(BlockFormat::Nvfp4, BlockAxis::Dim, DType::F32, shape)
            .tensor_scale(TensorScale::Given);
        let mut case = Case::new(problem, Some(scale), 5, 9);
        for (row, of_row) in case.values.chunks_mut(16).enumerate() {
            // The middle between two scales, of which the lower is this code.
            let [low, high] =
                [row as u8 / 2, row as u8 / 2 + 1].map(|code| BlockFormat::Nvfp4.scale(code & 0x7f));
            let middle = 3.0 * (low + high) * scale;
            of_row[0] = f32::from_bits(middle.to_bits() + row as u32 % 2);
            let next = |x: f32, by: i32| f32::from_bits(x.to_bits().saturating_add_signed(by));
            let middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
            for (at, to) in of_row[1..].iter_mut().enumerate() {
                *to = next(middles[at % 7] * low * scale, row as i32 % 3 - 1).min(middle);
            }
        }
        cases.push(case);
    }
    cases
}

fn all_hold(device: &Device) {
    cases().iter().chain(&ties()).for_each(|case| case.holds(device));
}

#[test]
fn the_cpu_converts_to_the_bits_of_the_host() {
    all_hold(&Device::new(fmha_cpu::CpuBackend::new().unwrap()));
}

fn nvidia(arch: &str) {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    match fmha_cuda::open(0, Some(arch)) {
        Ok(device) => all_hold(&device),
        Err(Error::NoDevice(reason)) => println!("absent: {reason}"),
        Err(error) => panic!("{arch}: {error}"),
    }
}

#[test]
fn sm80_converts_to_the_bits_of_the_host() {
    nvidia("sm_80");
}

#[test]
fn the_work_of_this_process() {
    if let Ok(arch) = std::env::var("QUANTIZE_ARCH") {
        nvidia(&arch);
    }
}

/// Each architecture has its process, since a process emulates only one. Vector clocks check the order of every access.
#[test]
fn blackwell_converts_to_the_bits_of_the_host() {
    let own = "the_work_of_this_process";
    run_test(own, &[("QUANTIZE_ARCH", "sm_100a"), ("FMHA_EMULATE_MODE", "hb")]).unwrap();
}

#[test]
fn cdna_and_rdna_convert_to_the_bits_of_the_host() {
    for arch in ["gfx942", "gfx1100"] {
        if let Some(device) = amd::open(arch, "the conversion to scales by blocks") {
            all_hold(&device);
        }
    }
}
