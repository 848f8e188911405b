//! A call's score and mask as code in the form for GPU kernels: the header `fmha/code.h` with the functions' text,
//! and words in the kernel's arguments with their captures.
//!
//! The header depends on the functions' structure, on ranks and types of captures, and on which gradients are
//! wanted; values, extents and addresses are words, so that changing them compiles nothing.

use std::fmt::Write as _;

use crate::abi::{AbiLiteral, CODE_WORDS};
use crate::args::{DevSliceMut, ScoreArgs};
use crate::error::Refusal;
use crate::expr::{BOUNDS_PRELUDE, CaptureKind, DEVICE_PRELUDE, Function, Number};
use crate::problem::{CapturedGrad, CapturedTensor, Code};
use crate::source::Header;

/// The header's name.
pub const CODE_H: &str = "fmha/code.h";

/// The functions of a call, and the gradients that it computes for their captured tensors.
#[derive(Clone, Copy, Debug)]
pub struct CodeSource<'a> {
    /// The functions.
    pub code: &'a Code,
    /// The gradients to compute; empty for a forward call.
    pub gradients: &'a [CapturedGrad],
}

impl CodeSource<'_> {
    /// Index of the first word of captured tensor `at`; the words of numbers come before all tensors.
    fn word_of_tensor(&self, at: usize) -> usize {
        let tensors = self.code.captured[..at].iter().map(words_of);
        self.code.numbers().len() + tensors.sum::<usize>()
    }

    /// Index of the first word of the gradients: for each, where its sums lie and where it is written.
    fn word_of_gradients(&self) -> usize {
        self.word_of_tensor(self.code.captured.len())
    }

    /// Refuses a problem whose captures do not fit a GPU kernel's arguments.
    ///
    /// # Errors
    /// More captures than a kernel's arguments hold.
    pub fn refuse_words(&self, kernel: &str) -> Result<(), Refusal> {
        let words = self.word_of_gradients() + 2 * self.gradients.len();
        if words <= CODE_WORDS {
            return Ok(());
        }
        let text = format!(
            "captured: {} numbers and {} tensors take {words} words of a kernel's arguments, more than \
             {CODE_WORDS}",
            self.code.numbers().len(),
            self.code.captured.len()
        );
        Err(Refusal::new(kernel, text))
    }

    /// The header `fmha/code.h`.
    #[must_use]
    pub fn header(&self) -> Header {
        let mut text = String::from(BEGIN);
        for (name, function, default) in
            [("of_score", &self.code.score, NO_SCORE), ("of_mask", &self.code.mask, NO_MASK)]
        {
            let _ = writeln!(text, "namespace {name} {{");
            match function {
                None => text.extend([NO_LAYOUT, default, if name == "of_score" { NO_SLOPES } else { "" }]),
                Some(function) => {
                    self.layout(&mut text, function);
                    text += &function.device_text();
                    if function.is_mask() {
                        text += &function.bounds_text();
                    } else {
                        let slopes = function.slopes();
                        text += &slopes.device_text();
                        if slopes.captures.is_empty() {
                            text += NO_SLOPES;
                        }
                    }
                }
            }
            let _ = write!(text, "}}  // namespace {name}\n\n");
        }
        let first = self.word_of_gradients();
        let given = !self.code.is_empty();
        let reads = self.code.score.as_ref().map_or(0, |score| score.slopes().captures.len());
        let dtypes =
            self.gradients.iter().enumerate().map(|(at, gradient)| {
                format!("if (gradient == {at}) return {};", gradient.dtype.c_literal())
            });
        let _ = write!(
            text,
            "constexpr bool kIsGiven = {given};\n\
             constexpr int32_t kNumGradients = {}, kFirstGradientWord = {first}, kNumReads = {reads};\n\
             FMHA_DEVICE constexpr DType gradient_dtype([[maybe_unused]] int32_t gradient) {{\n  {}\n  \
             return DType::F32;\n}}\n\n\
             }}  // namespace fmha::code\n",
            self.gradients.len(),
            dtypes.collect::<Vec<_>>().join("\n  ")
        );
        Header::rendered(CODE_H, text)
    }

    /// Writes C++ text that maps each of a function's captures to its words.
    fn layout(&self, text: &mut String, function: &Function) {
        let (mut words, mut ranks, mut stored_as, mut gradients) = (vec![], vec![], vec![], vec![]);
        let numbers = self.code.numbers();
        for capture in function.captures() {
            match capture.kind {
                CaptureKind::Number(_) => {
                    let at = numbers.iter().position(|(name, _)| *name == capture.name);
                    words.push(at.unwrap_or(0).to_string());
                    ranks.push("0".to_owned());
                    stored_as.push("Stored::F32".to_owned());
                    gradients.push("-1".to_owned());
                }
                CaptureKind::Tensor { stored, rank } => {
                    let at = self.code.captured.iter().position(|tensor| tensor.name == capture.name);
                    words.push(self.word_of_tensor(at.unwrap_or(0)).to_string());
                    ranks.push(rank.to_string());
                    stored_as.push(format!("Stored::{stored:?}"));
                    let gradient = self.gradients.iter().position(|wanted| wanted.name == capture.name);
                    let word = gradient.map(|at| (self.word_of_gradients() + 2 * at).to_string());
                    gradients.push(word.unwrap_or_else(|| "-1".to_owned()));
                }
            }
        }
        let _ = writeln!(text, "struct Layout {{");
        for (kind, name, values, otherwise) in [
            ("int32_t", "word", words, "0"),
            ("int32_t", "rank", ranks, "0"),
            ("Stored", "stored", stored_as, "Stored::F32"),
            ("int32_t", "gradient", gradients, "-1"),
        ] {
            let _ = writeln!(text, "  FMHA_DEVICE static constexpr {kind} {name}([[maybe_unused]] int i) {{");
            for (i, value) in values.iter().enumerate() {
                let _ = writeln!(text, "    if (i == {i}) return {value};");
            }
            let _ = writeln!(text, "    return {otherwise};\n  }}");
        }
        *text += "};\n";
    }

    /// Words of the tensors and scalars that functions capture.
    #[must_use]
    pub fn words(&self, args: &ScoreArgs<'_>) -> [u64; CODE_WORDS] {
        let mut words = [0; CODE_WORDS];
        let numbers = args.numbers.iter().map(|number| match *number {
            Number::Float(value) => u64::from(value.to_bits()),
            Number::Int(value) => value as u64,
        });
        let tensors = self.code.captured.iter().zip(args.captured).flat_map(|(tensor, slice)| {
            let strides = tensor.strides.iter().map(|&stride| stride as u64);
            let extents = tensor.shape.iter().map(|&extent| u64::from(extent));
            std::iter::once(slice.as_ptr() as u64).chain(strides).chain(extents)
        });
        // `refuse_words` has checked that the words hold all of them.
        words.iter_mut().zip(numbers.chain(tensors)).for_each(|(word, value)| *word = value);
        words
    }

    /// Writes to the words, for each gradient, the offset of its sums in elements and the address of the result.
    pub fn add_gradients(&self, words: &mut [u64; CODE_WORDS], outputs: &[DevSliceMut<'_>]) {
        let (mut first, mut at) = (0, self.word_of_gradients());
        for (gradient, output) in self.gradients.iter().zip(outputs) {
            if let Some([sum, goes_to]) = words.get_mut(at..at + 2) {
                (*sum, *goes_to) = (first, output.as_mut_ptr() as u64);
            }
            first += self.code.tensor(&gradient.name).map_or(0, CapturedTensor::num_elems);
            at += 2;
        }
    }
}

fn words_of(tensor: &CapturedTensor) -> usize {
    1 + 2 * tensor.shape.len()
}

const BEGIN: &str = "// The functions of a call.\n#pragma once\n#include <fmha/code_pair.h>\n\n\
                     namespace fmha::code {\n\n";
/// Placeholder text of a call without functions: it compiles, and no kernel calls it.
const NO_LAYOUT: &str = "struct Layout {
  FMHA_DEVICE static constexpr int32_t word(int) { return 0; }
  FMHA_DEVICE static constexpr int32_t rank(int) { return 0; }
  FMHA_DEVICE static constexpr Stored stored(int) { return Stored::F32; }
  FMHA_DEVICE static constexpr int32_t gradient(int) { return -1; }
};
";
const NO_SCORE: &str = "template <class Pair>
FMHA_DEVICE float score(const Pair&, float s) {
  return s;
}
template <class Pair>
FMHA_DEVICE float slope(const Pair&, float) {
  return 1.f;
}
";
const NO_SLOPES: &str = "template <class Pair, class Add>
FMHA_DEVICE void slopes(const Pair&, float, Add&&) {}
";
const NO_MASK: &str = "template <class Pair>
FMHA_DEVICE bool visible(const Pair&) {
  return true;
}
template <class Tile>
FMHA_DEVICE expr::Bound seen(const Tile&) {
  return {1, 1};
}
";

/// `fmha/expr.h`: functions that printed expressions call.
#[must_use]
pub(crate) fn expr_h() -> Header {
    let text = format!(
        "#pragma once\n#include <fmha/expr_math.h>\n\n#define FMHA_EXPR FMHA_DEVICE\n\n{DEVICE_PRELUDE}{BOUNDS_PRELUDE}"
    );
    Header::rendered("fmha/expr.h", text)
}
