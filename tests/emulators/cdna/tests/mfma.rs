//! Each matrix instruction's layout and arithmetic: operands are laid out here by the rules of AMD's documents, the
//! product is computed here by its definition, and every element must be equal. Inputs are small integers, which all
//! formats have and whose sums are exact, so that the order of summation does not matter.

mod common;

use common::{Random, bytes, compile, device, words};
use fmha_emu_cdna::{Arch, Launch};

#[derive(Clone, Copy, PartialEq)]
enum Format {
    F32,
    F16,
    Bf16,
    Fp8,
    Bf8,
    I8,
}

impl Format {
    fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            _ => 1,
        }
    }

    /// The code of -2, -1, 0, 1 or 2.
    fn code(self, value: i32, arch: Arch) -> u32 {
        let ocp = arch == Arch::Gfx950;
        // Codes of 1 and 2.
        let [one, two] = match self {
            Self::F32 => [0x3f80_0000, 0x4000_0000],
            Self::F16 => [0x3c00, 0x4000],
            Self::Bf16 => [0x3f80, 0x4000],
            Self::Fp8 if ocp => [0x38, 0x40],
            Self::Fp8 => [0x40, 0x48],
            Self::Bf8 if ocp => [0x3c, 0x40],
            Self::Bf8 => [0x40, 0x44],
            Self::I8 => return u32::from(value as i8 as u8),
        };
        let magnitude = [0, one, two][value.unsigned_abs() as usize];
        magnitude | if value < 0 { 1 << (8 * self.bytes() - 1) } else { 0 }
    }
}

struct Case {
    kernel: &'static str,
    archs: &'static [Arch],
    m: usize,
    k: usize,
    blocks: usize,
    formats: [Format; 2],
    /// Factor of the product: the scales of the scaled instructions.
    scale: f32,
    /// 8-bit operands in runs of 16: f8f6f4.
    runs: bool,
}

const ALL: &[Arch] = &Arch::CDNA;
const FP8: &[Arch] = &[Arch::Gfx942, Arch::Gfx950];
const NEW: &[Arch] = &[Arch::Gfx950];

fn cases() -> Vec<Case> {
    use Format::{Bf8, Bf16, F16, F32, Fp8, I8};
    let case = |kernel, archs, m, k, blocks, formats| Case {
        kernel,
        archs,
        m,
        k,
        blocks,
        formats,
        scale: 1.0,
        runs: false,
    };
    let scaled = |kernel, m, k| Case { scale: 0.5, runs: true, ..case(kernel, NEW, m, k, 1, [Fp8, Fp8]) };
    vec![
        case("f32_32x32x2_f32", ALL, 32, 2, 1, [F32, F32]),
        case("f32_16x16x4_f32", ALL, 16, 4, 1, [F32, F32]),
        case("f32_32x32x8_f16", ALL, 32, 8, 1, [F16, F16]),
        case("f32_16x16x16_f16", ALL, 16, 16, 1, [F16, F16]),
        case("f32_32x32x4_f16", ALL, 32, 4, 2, [F16, F16]),
        case("f32_4x4x4_f16", ALL, 4, 4, 16, [F16, F16]),
        case("f32_32x32x8_bf16", ALL, 32, 8, 1, [Bf16, Bf16]),
        case("f32_16x16x16_bf16", ALL, 16, 16, 1, [Bf16, Bf16]),
        case("f32_32x32x16_fp8_fp8", FP8, 32, 16, 1, [Fp8, Fp8]),
        case("f32_32x32x16_fp8_bf8", FP8, 32, 16, 1, [Fp8, Bf8]),
        case("f32_16x16x32_fp8_fp8", FP8, 16, 32, 1, [Fp8, Fp8]),
        case("f32_16x16x32_bf8_bf8", FP8, 16, 32, 1, [Bf8, Bf8]),
        case("i32_32x32x16_i8", FP8, 32, 16, 1, [I8, I8]),
        case("i32_16x16x32_i8", FP8, 16, 32, 1, [I8, I8]),
        case("f32_32x32x16_f16", NEW, 32, 16, 1, [F16, F16]),
        case("f32_16x16x32_f16", NEW, 16, 32, 1, [F16, F16]),
        case("f32_32x32x16_bf16", NEW, 32, 16, 1, [Bf16, Bf16]),
        case("f32_16x16x32_bf16", NEW, 16, 32, 1, [Bf16, Bf16]),
        scaled("f32_32x32x64_f8f6f4", 32, 64),
        scaled("f32_16x16x128_f8f6f4", 16, 128),
    ]
}

/// The operand as the lanes hold it. `at(block, row, k)` is the matrix.
fn fragments(case: &Case, format: Format, arch: Arch, at: impl Fn(usize, usize, usize) -> i32) -> Vec<u8> {
    let (m, k, blocks) = (case.m, case.k, case.blocks);
    let groups = 64 / (m * blocks);
    let per_lane = k / groups;
    let mut out = Vec::new();
    for lane in 0..64 {
        let (row, group, block) = (lane % m, lane / m % groups, lane / m / groups);
        for j in 0..per_lane {
            let depth =
                if case.runs { 16 * groups * (j / 16) + 16 * group + j % 16 } else { group * per_lane + j };
            let code = format.code(at(block, row, depth), arch);
            out.extend_from_slice(&code.to_le_bytes()[..format.bytes()]);
        }
    }
    out
}

/// Lane and register of D's element.
fn place(case: &Case, block: usize, row: usize, column: usize) -> (usize, usize) {
    match case.m {
        32 => (32 * (row / 4 % 2) + column, 16 * block + 4 * (row / 8) + row % 4),
        16 => (16 * (row / 4) + column, 4 * block + row % 4),
        _ => (4 * block + column, row),
    }
}

#[test]
fn matrix_instructions_give_the_product_in_amds_layout() {
    for arch in Arch::CDNA {
        let Some(code) = compile("mfma.hip", arch) else { return };
        for case in cases().iter().filter(|case| case.archs.contains(&arch)) {
            let (m, k, blocks) = (case.m, case.k, case.blocks);
            let mut random = Random(11);
            let mut matrix = |n: usize| (0..n).map(|_| (random.bits() % 5) as i32 - 2).collect::<Vec<i32>>();
            let (a, b, c) = (matrix(blocks * m * k), matrix(blocks * m * k), matrix(blocks * m * m));
            let regs = m * m * blocks / 64;
            let integer = case.formats[0] == Format::I8;
            let number = |value: f32| if integer { value as i32 as u32 } else { value.to_bits() };
            let mut c_regs = vec![0u32; 64 * regs];
            let mut want = vec![0u32; 64 * regs];
            for block in 0..blocks {
                for row in 0..m {
                    for column in 0..m {
                        let (lane, reg) = place(case, block, row, column);
                        let start = c[(block * m + row) * m + column] as f32;
                        let product: i32 = (0..k)
                            .map(|d| a[(block * m + row) * k + d] * b[(block * m + column) * k + d])
                            .sum();
                        c_regs[lane * regs + reg] = number(start);
                        want[lane * regs + reg] = number(product as f32 * case.scale + start);
                    }
                }
            }
            let device = device(arch);
            let module = device.load(&code).expect("a code object");
            let fragment = |format, x: &[i32]| {
                fragments(case, format, arch, |block, row, depth| x[(block * m + row) * k + depth])
            };
            let pa = device.memory.alloc_from(&fragment(case.formats[0], &a));
            let pb = device.memory.alloc_from(&fragment(case.formats[1], &b));
            let pc = device.memory.alloc_from(&bytes(&c_regs));
            let pd = device.memory.alloc(4 * want.len());
            let args: Vec<u8> = [pa, pb, pc, pd].iter().flat_map(|p| p.to_le_bytes()).collect();
            let launch = Launch { grid: [1; 3], block: [64, 1, 1], dynamic_lds: 0, args: &args };
            let name = case.kernel;
            device.launch(&module, name, &launch).unwrap_or_else(|e| panic!("{arch} {name}: {e}"));
            let got = words(&device.memory.read_vec(pd, 4 * want.len()).expect("allocated above"));
            // A sum that cancels may be zero of either sign.
            let zero = |x: &u32| if *x == 0x8000_0000 && !integer { 0 } else { *x };
            let same = got.iter().map(zero).eq(want.iter().map(zero));
            let wrong = got.iter().zip(&want).position(|(g, w)| zero(g) != zero(w));
            assert!(same, "{arch} {name}: first wrong element {wrong:?}");
        }
    }
}
