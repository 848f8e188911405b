//! Matrix instructions of one warp. PTX ISA, Warp Level Matrix Instructions.

use crate::fill::Element::{self, Bf16, E4m3, E5m2, F16, S8, Tf32, U8};
use crate::fill::Fill::{Bits, Unit, Whole};
use crate::program::{Format, Program, Truth};

/// `%a{from}, %a{from + 1}, ...` in braces.
pub(super) fn registers(letter: char, from: usize, count: usize) -> String {
    let names: Vec<String> = (from..from + count).map(|at| format!("%{letter}{at}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// `ldmatrix` and `stmatrix`, rows in a scrambled order, and `movmatrix`.
fn moves() -> Vec<Program> {
    let mut all = vec![
        Program::new("matrix/movmatrix", &[Bits], "movmatrix.sync.aligned.m8n8.trans.b16 %o0, %i0;")
            .shape(8, 32),
    ];
    // Lane l names row (5 l + 3) mod 32 of 16 bytes.
    let rows = "mov.u32 %w0, rows; mad.lo.s32 %w1, %t, 5, 3; and.b32 %w1, %w1, 31; shl.b32 %w1, %w1, 4; add.s32 %w1, %w1, %w0;\n\
                shl.b32 %w2, %t, 2; add.s32 %w2, %w2, %w0;\n";
    let all_words = |instruction: &str, register: &str| -> String {
        (0..4).map(|at| format!("{instruction} [%w2+{}], {register}{at};\n", 128 * at)).collect()
    };
    for trans in ["", ".trans"] {
        for num in [1, 2, 4] {
            let load = format!(
                "{rows}{}bar.sync 0;\nldmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 {}, [%w1];",
                all_words("st.shared.b32", "%i"),
                registers('o', 0, num)
            );
            let program = Program::new(format!("matrix/ldmatrix.x{num}{trans}"), &[Bits; 4], load);
            all.push(program.shape(8, 32).outputs(num));
            let store = format!(
                "{rows}{}bar.sync 0;\nstmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 [%w1], {};\nbar.sync 0;\n{}",
                all_words("st.shared.b32", "%i"),
                registers('i', 4, num),
                (0..4).map(|at| format!("ld.shared.b32 %o{at}, [%w2+{}];\n", 128 * at)).collect::<String>()
            );
            let program = Program::new(format!("matrix/stmatrix.x{num}{trans}"), &[Bits; 8], store);
            all.push(program.shape(8, 32).outputs(4));
        }
    }
    all.iter_mut().for_each(|program| program.declare = ".shared .align 16 .b8 rows[512];".into());
    all
}

/// The accumulators' types of `mma.sync`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    F32,
    F16,
    S32,
}

impl Sums {
    pub(super) fn name(self) -> &'static str {
        match self {
            Sums::F32 => "f32",
            Sums::F16 => "f16",
            Sums::S32 => "s32",
        }
    }

    /// Initial value of accumulator `at`: small and exact, another number in each thread.
    pub(super) fn begin(self, at: usize, whole: bool) -> String {
        match self {
            Sums::F32 if whole => format!("add.u32 %o{at}, %t, {at}; cvt.rn.f32.u32 %o{at}, %o{at};\n"),
            Sums::F32 => format!("cvt.rn.f32.u32 %o{at}, %t; mul.f32 %o{at}, %o{at}, 0f3C000000;\n"),
            Sums::F16 => format!("mov.b32 %o{at}, 0x3c00b800;\n"),
            Sums::S32 => format!("sub.s32 %o{at}, {at}, %t;\n"),
        }
    }

    /// Bound of the distance, in two orders, of sums of `k` products of numbers in −1..1 and of a number in
    /// −1..1.
    ///
    /// Singles: each of k additions loses at most 2^-23 (truncation) of a partial sum below k + 1. Products of FP8
    /// are summed in fewer bits: they are aligned to the largest and keep 13 bits below its leading one (DeepSeek-V3
    /// Technical Report, arXiv:2412.19437, section 3.5.2), so each of the k + 1 terms loses at most 2^-13 of a number
    /// below 2. Halves: a result is one of two neighbours, of which those below 32 are 2^-6 apart.
    pub(super) fn near(self, element: Element, k: u32) -> Truth {
        let k = f64::from(k);
        match self {
            Sums::F16 => Truth::Near(Format::F16x2, 2f64.powi(-6)),
            _ if element.bytes() == 1 => Truth::Near(Format::F32, 2.0 * (k + 1.0) * 2f64.powi(-13)),
            _ => Truth::Near(Format::F32, k * (k + 1.0) * 2f64.powi(-23)),
        }
    }
}

fn products() -> Vec<Program> {
    let shapes: [(u32, Element, Element, Sums); 16] = [
        (8, F16, F16, Sums::F32),
        (16, F16, F16, Sums::F32),
        (8, F16, F16, Sums::F16),
        (16, F16, F16, Sums::F16),
        (8, Bf16, Bf16, Sums::F32),
        (16, Bf16, Bf16, Sums::F32),
        (4, Tf32, Tf32, Sums::F32),
        (8, Tf32, Tf32, Sums::F32),
        (32, E4m3, E4m3, Sums::F32),
        (32, E4m3, E5m2, Sums::F32),
        (32, E5m2, E4m3, Sums::F32),
        (32, E5m2, E5m2, Sums::F32),
        (16, S8, S8, Sums::S32),
        (32, S8, S8, Sums::S32),
        (32, U8, U8, Sums::S32),
        (32, U8, S8, Sums::S32),
    ];
    let mut all = Vec::new();
    for (k, a, b, sums) in shapes {
        let a_words = (k * a.bytes() / 8) as usize;
        let results = if sums == Sums::F16 { 2 } else { 4 };
        let instruction =
            format!("mma.sync.aligned.m16n8k{k}.row.col.{0}.{1}.{2}.{0}", sums.name(), a.name(), b.name());
        for whole in [true, false] {
            if !whole && sums == Sums::S32 {
                continue;
            }
            let fill = |element| if whole { Whole(element) } else { Unit(element) };
            let mut inputs = vec![fill(a); a_words];
            inputs.extend(vec![fill(b); a_words / 2]);
            let begin: String = (0..results).map(|at| sums.begin(at, whole)).collect();
            let body = format!(
                "{begin}{instruction} {}, {}, {}, {};",
                registers('o', 0, results),
                registers('i', 0, a_words),
                registers('i', a_words, a_words / 2),
                registers('o', 0, results),
            );
            let words = if whole { "whole" } else { "any" };
            let truth = if whole { Truth::Exact } else { sums.near(a, k) };
            all.push(
                Program::new(format!("matrix/{instruction}/{words}"), &inputs, body)
                    .shape(8, 32)
                    .outputs(results)
                    .truth(truth),
            );
        }
    }
    all
}

pub(super) fn programs() -> Vec<Program> {
    moves().into_iter().chain(products()).collect()
}
