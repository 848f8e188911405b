//! An H200 sums the 16 products of an `mma.sync` and of a `wgmma` alike: one function gives every recorded bit of both.
//! So a row of attention may have its bits from a kernel of either (CONTRACT.md, `row_invariant`).

use fmha_core::DType;
use fmha_emu_silicon::program::Program;
use fmha_emu_silicon::programs;
use fmha_emu_silicon::record::{Recording, chosen};

/// Made by `silicon record` on an NVIDIA H200, driver 580.159.
const H200: &str = include_str!("../recordings/h200.txt");

/// Bits that a term keeps below the largest product's leading place, which is the sum of its factors' exponents.
const KEPT: i32 = 25;

/// Largest power of two that is no larger, as an exponent.
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52 & 0x7ff) as i32) - 1023
}

/// The 16 products and the accumulator, aligned to the largest, cut, summed exactly and cut to a single.
fn sum(a: &[f64], b: &[f64], accumulator: f64, kept: i32) -> u32 {
    let pairs = || a.iter().zip(b).filter(|(a, b)| **a * **b != 0.0);
    let of_products = pairs().map(|(a, b)| exponent(*a) + exponent(*b));
    let of_accumulator = (accumulator != 0.0).then(|| exponent(accumulator));
    let top = of_products.chain(of_accumulator).max().unwrap_or(0);
    let place = 2f64.powi(top - kept);
    let cut = |x: f64| (x / place).trunc();
    let sum = (pairs().map(|(a, b)| cut(a * b)).sum::<f64>() + cut(accumulator)) * place;
    // A double's last 29 bits are beyond a single's.
    ((f64::from_bits(sum.to_bits() >> 29 << 29)) as f32).to_bits()
}

/// Place of an element of a result: its row and column; and the accumulator that it began with.
struct Element {
    row: u32,
    column: u32,
    begin: f64,
}

/// Element of a fragment of 16 rows that output `o` of a thread is.
fn element(o: u32, thread: u32) -> Element {
    let (warp, lane) = (thread / 32, thread % 32);
    let (row, column) = (lane / 4 + o % 4 / 2 * 8, o / 4 * 8 + lane % 4 * 2 + o % 2);
    Element { row: 16 * warp + row, column, begin: f64::from(thread) / 128.0 }
}

/// The half at `at` of a word.
fn half(dtype: DType, word: u32, at: u32) -> f64 {
    dtype.read(&((word >> (16 * at)) as u16).to_le_bytes())
}

/// Recorded words of a program that the function gives, of how many. `operands` are A's row and B's column of an
/// element, from the program's input.
fn agreement(
    recording: &Recording,
    program: &Program,
    kept: i32,
    operands: impl Fn(&[u32], &Element, u32, u32) -> [f64; 2],
) -> (usize, usize) {
    let record = &recording.programs[&program.name];
    let (input, total) = (program.input(), program.total());
    let places = chosen(program, record.words.len());
    let equal = places.iter().zip(&record.words).filter(|(place, word)| {
        let (o, thread) = (**place as u32 / total, **place as u32 % total);
        let element = element(o, thread % program.threads);
        let terms = (0..16).map(|k| operands(&input, &element, thread / program.threads, k));
        let (a, b): (Vec<f64>, Vec<f64>) = terms.map(|[a, b]| (a, b)).unzip();
        sum(&a, &b, element.begin, kept) == **word
    });
    (equal.count(), record.words.len())
}

/// Word of A that has a row's `k`-th element, in a thread of its warp.
fn of_a(row: u32, k: u32) -> (u32, u32) {
    (row % 16 / 8 + k / 8 * 2, row % 8 * 4 + k % 8 / 2)
}

/// Words that the function gives of all programs of one instruction.
fn all(kept: i32) -> Vec<(String, usize, usize)> {
    let recording = Recording::from_text(H200).unwrap_or_else(|error| panic!("{error}"));
    let mut found = Vec::new();
    for program in programs::all() {
        let dtype = if program.name.contains(".bf16.bf16") { DType::Bf16 } else { DType::F16 };
        let (equal, of) = if program.name.starts_with("matrix/mma.sync.aligned.m16n8k16.row.col.f32.")
            && program.name.ends_with("/any")
        {
            let total = program.total();
            agreement(&recording, &program, kept, |input, element, block, k| {
                let word = |row: u32, lane: u32| input[(row * total + block * 32 + lane) as usize];
                let (row, lane) = of_a(element.row, k);
                let b = word(4 + k / 8, element.column * 4 + k % 8 / 2);
                [half(dtype, word(row, lane), k % 2), half(dtype, b, k % 2)]
            })
        } else if program.name.contains("/a registers/b 128/on sums, any")
            && program.name.contains("k16.f32.")
        {
            let (total, rows) = (program.total(), program.inputs.len() as u32);
            agreement(&recording, &program, kept, |input, element, _, k| {
                let word = |row: u32, thread: u32| input[(row * total + thread) as usize];
                let (row, lane) = of_a(element.row, k);
                let a = word(rows - 4 + row, element.row / 16 * 32 + lane);
                // B's rows are 128 bytes, whose sixteens are scrambled by the row.
                let byte = element.column * 128 + ((k / 8) ^ (element.column % 8)) * 16 + k % 8 * 2;
                let b = word(byte / 512, byte % 512 / 4);
                [half(dtype, a, k % 2), half(dtype, b, k % 2)]
            })
        } else {
            continue;
        };
        found.push((program.name.clone(), equal, of));
    }
    found
}

#[test]
fn one_function_gives_every_recorded_bit_of_both_instructions() {
    let found = all(KEPT);
    for kind in ["matrix/", "wgmma/"] {
        assert_eq!(found.iter().filter(|(name, ..)| name.starts_with(kind)).count(), 2, "{found:?}");
    }
    for (name, equal, of) in found {
        assert!(equal == of && of >= 128, "{name}: {equal} of {of}");
    }
}

/// Another number of kept bits is found out, so that the agreement says something.
#[test]
fn a_function_that_keeps_a_bit_more_or_less_is_not_the_device_s() {
    for kept in [KEPT - 1, KEPT + 1] {
        assert!(all(kept).iter().any(|(_, equal, of)| equal < of), "{kept}");
    }
}
