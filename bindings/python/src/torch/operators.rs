//! The operators: what each takes, in order, and what it gives. Schemas are made from this table and
//! arguments read by it.

use std::fmt::Write as _;

use fmha_c::FMHA_F32;

use super::shims::Kernel;
use super::{Making, kernel};
use crate::call::{Wrong, ensure};
use crate::combine;
use crate::request::{
    ADDS, ADDS_TO, NUM_CACHE, NUM_COMMON, NUM_SCALED, NUMBERS, Request, Slot, WANTS_DBIAS, WANTS_DSINK, name,
};
use crate::shapes::attention_type;
use crate::tensor::{Tensor, is_fp8};

/// How an operator takes a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Take {
    /// `Tensor`.
    Given,
    /// `Tensor?`.
    Optional,
    /// `Tensor(a!)`.
    Written,
    /// `Tensor(a!)?`.
    OptionalWritten,
}

/// The form in which an operator takes its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelt {
    /// The first of [`NUMBERS`], as many as stated, each as an argument of its own.
    Each(usize),
    /// One argument: the index under which the numbers were kept. Each argument costs torch and Python 0.1 us; 13
    /// of them are a third of what a call of Q, K and V costs on the host.
    Kept,
}

/// Whether an operator takes a score and a mask as code, and block sizes of masks as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    /// The operator has no functions.
    None,
    /// The operator has functions of score and mask.
    Forward,
    /// The operator has functions and also returns gradients of captured tensors: those whose bits are set in
    /// a number, from the lowest bit.
    Backward,
}

/// The arguments of code, in a schema: names are those of the tensors and then of the numbers, by commas. Sizes of
/// blocks are those of lists.
const CODE: &str = "str score_code, str mask_code, str captured_names, Tensor[] captured, \
    float[] captured_numbers, SymInt block_q, SymInt block_k";

/// The name of a seed that is a tensor.
pub(super) const DRAWN_SEED: &str = "drawn_seed";

/// One operator.
pub(super) struct Operator {
    pub(super) name: &'static str,
    /// The operator's tensors, which come first.
    pub(super) tensors: &'static [(Slot, Take)],
    /// Form in which the operator takes its numbers.
    pub(super) numbers: Spelt,
    /// Whether a seed may come last as a tensor of the host, [`DRAWN_SEED`], in place of the number: a
    /// compiler that draws it has a tensor alone.
    pub(super) is_seeded: bool,
    /// Whether, behind its numbers, it takes a score and a mask as code and what they capture.
    pub(super) code: Coding,
    /// Number of tensors that the operator returns, besides a list of gradients of captured tensors.
    num_results: usize,
    /// Makes the results and puts them into the request.
    pub(super) results: fn(&mut Making<'_>) -> Result<(), Wrong>,
    pub(super) kernel: Kernel,
}

impl Operator {
    /// `forward(Tensor q, ..., int options) -> (Tensor, Tensor)`.
    pub(super) fn schema(&self) -> String {
        let mut text = format!("{}(", self.name);
        let mut written = 'a'..='z';
        for &(slot, take) in self.tensors {
            let mut alias = || written.next().map_or_else(String::new, |letter| format!("({letter}!)"));
            let spelt = match take {
                Take::Given => "Tensor".to_owned(),
                Take::Optional => "Tensor?".to_owned(),
                Take::Written => format!("Tensor{}", alias()),
                Take::OptionalWritten => format!("Tensor{}?", alias()),
            };
            // Writing to a string does not fail.
            let _ = write!(text, "{spelt} {}, ", name(slot));
        }
        match self.numbers {
            Spelt::Each(count) => {
                for (number, spelt) in &NUMBERS[..count] {
                    let _ = write!(text, "{spelt} {number}, ");
                }
            }
            Spelt::Kept => text.push_str("int numbers"),
        }
        if self.code != Coding::None {
            let _ = write!(text, "{CODE}, ");
        }
        if self.code == Coding::Backward {
            text.push_str("int wanted, ");
        }
        if self.is_seeded {
            let _ = write!(text, "Tensor? {DRAWN_SEED}=None");
        }
        let arguments = text.trim_end_matches([',', ' ']);
        let mut results = vec!["Tensor"; self.num_results];
        if self.code == Coding::Backward {
            results.push("Tensor[]");
        }
        format!("{arguments}) -> ({})", results.join(", "))
    }
}

use Take::{Given, Optional, OptionalWritten, Written};

/// A list of tensors: some, those that modify scores and say lengths, and some more.
macro_rules! tensors {
    ([$($before:expr),*], [$($after:expr),*]) => {
        &[
            $($before,)*
            (Slot::Bias, Optional),
            (Slot::AlibiSlopes, Optional),
            (Slot::Sink, Optional),
            (Slot::CuSeqlensQ, Optional),
            (Slot::CuSeqlensK, Optional),
            (Slot::SequsedQ, Optional),
            (Slot::SequsedK, Optional),
            $($after,)*
        ]
    };
}

/// K and V in pages, and scales of FP8.
macro_rules! cached {
    ([$($before:expr),*], [$($after:expr),*]) => {
        tensors!([$($before),*], [
            (Slot::BlockTable, Optional),
            (Slot::DescaleQ, Optional),
            (Slot::DescaleK, Optional),
            (Slot::DescaleV, Optional)
            $(, $after)*
        ])
    };
}

/// Operands of a gradient, and what modifies scores.
macro_rules! gradients_of {
    ([$($after:expr),*]) => {
        tensors!([
            (Slot::Dout, Given),
            (Slot::Q, Given),
            (Slot::K, Given),
            (Slot::V, Given),
            (Slot::O, Given),
            (Slot::Lse, Given),
            (Slot::Dlse, Optional)
        ], [$($after),*])
    };
}

/// An operator of a whole call: all numbers, which gives O and LSE.
const WHOLE: Operator = Operator {
    name: "",
    tensors: &[],
    numbers: Spelt::Each(NUM_COMMON),
    is_seeded: true,
    code: Coding::None,
    num_results: 2,
    results: o_and_lse,
    kernel: kernel::<0>,
};

pub(super) static OPERATORS: [Operator; 14] = [
    Operator {
        name: "forward",
        tensors: cached!([(Slot::Q, Given), (Slot::K, Given), (Slot::V, Given)], []),
        kernel: kernel::<0>,
        ..WHOLE
    },
    Operator {
        name: "forward_out",
        tensors: cached!(
            [(Slot::Q, Given), (Slot::K, Given), (Slot::V, Given)],
            [
                (Slot::ScaleO, Optional),
                (Slot::O, Written),
                (Slot::Lse, OptionalWritten),
                (Slot::KeepMask, OptionalWritten)
            ]
        ),
        num_results: 0,
        results: |_| Ok(()),
        kernel: kernel::<1>,
        ..WHOLE
    },
    Operator {
        name: "backward",
        tensors: gradients_of!([]),
        num_results: 5,
        results: gradients,
        kernel: kernel::<2>,
        ..WHOLE
    },
    Operator {
        name: "kvcache",
        tensors: cached!(
            [
                (Slot::Q, Given),
                (Slot::K, Written),
                (Slot::V, OptionalWritten),
                (Slot::KNew, Optional),
                (Slot::VNew, Optional),
                (Slot::CuSeqlensNew, Optional),
                (Slot::RotaryCos, Optional),
                (Slot::RotarySin, Optional),
                (Slot::TreeMask, Optional)
            ],
            []
        ),
        numbers: Spelt::Each(NUM_CACHE),
        kernel: kernel::<3>,
        ..WHOLE
    },
    Operator {
        name: "combine",
        tensors: &[(Slot::OParts, Given), (Slot::LseParts, Given)],
        is_seeded: false,
        results: combined,
        kernel: kernel::<4>,
        ..WHOLE
    },
    // `forward` and `backward` of Q, K and V alone, which most calls are.
    Operator {
        name: "plain",
        tensors: &[(Slot::Q, Given), (Slot::K, Given), (Slot::V, Given)],
        numbers: Spelt::Kept,
        is_seeded: false,
        kernel: kernel::<5>,
        ..WHOLE
    },
    Operator {
        name: "plain_backward",
        tensors: &[
            (Slot::Dout, Given),
            (Slot::Q, Given),
            (Slot::K, Given),
            (Slot::V, Given),
            (Slot::O, Given),
            (Slot::Lse, Given),
            (Slot::Dlse, Optional),
        ],
        numbers: Spelt::Kept,
        is_seeded: false,
        num_results: 3,
        results: plain_gradients,
        kernel: kernel::<6>,
        ..WHOLE
    },
    // Like `plain`, without the LSE as a result: one allocation less, and no LSE is written.
    Operator {
        name: "plain_o",
        tensors: &[(Slot::Q, Given), (Slot::K, Given), (Slot::V, Given)],
        numbers: Spelt::Kept,
        is_seeded: false,
        num_results: 1,
        results: |making| outputs(making, false),
        kernel: kernel::<7>,
        ..WHOLE
    },
    // Adds partial gradients: `combine` without LSE.
    Operator {
        name: "add_parts",
        tensors: &[(Slot::OParts, Given)],
        is_seeded: false,
        num_results: 1,
        results: |making| {
            making.request.numbers.options |= ADDS;
            added(making)
        },
        kernel: kernel::<8>,
        ..WHOLE
    },
    Operator {
        name: "add_parts_to",
        tensors: &[(Slot::OParts, Given), (Slot::O, Written)],
        is_seeded: false,
        num_results: 0,
        results: |making| {
            making.request.numbers.options |= ADDS_TO;
            Ok(())
        },
        kernel: kernel::<9>,
        ..WHOLE
    },
    // `forward` and `backward` with a score or a mask as code, or with masks as data.
    Operator {
        name: "forward_code",
        tensors: cached!(
            [(Slot::Q, Given), (Slot::K, Given), (Slot::V, Given)],
            [
                (Slot::Intervals, Optional),
                (Slot::MaskBits, Optional),
                (Slot::KvNumBlocks, Optional),
                (Slot::KvIndices, Optional),
                (Slot::FullKvNumBlocks, Optional),
                (Slot::FullKvIndices, Optional),
                (Slot::RowMax, OptionalWritten),
                (Slot::HeadMax, OptionalWritten),
                (Slot::KeySum, OptionalWritten)
            ]
        ),
        code: Coding::Forward,
        kernel: kernel::<10>,
        ..WHOLE
    },
    Operator {
        name: "backward_code",
        tensors: gradients_of!([
            (Slot::Intervals, Optional),
            (Slot::MaskBits, Optional),
            (Slot::KvNumBlocks, Optional),
            (Slot::KvIndices, Optional),
            (Slot::FullKvNumBlocks, Optional),
            (Slot::FullKvIndices, Optional)
        ]),
        code: Coding::Backward,
        num_results: 5,
        results: gradients,
        kernel: kernel::<11>,
        ..WHOLE
    },
    // `forward_out` with small outputs, apart: engines call that once a layer, and an argument costs the host 0.1 us.
    Operator {
        name: "forward_out_small",
        tensors: cached!(
            [(Slot::Q, Given), (Slot::K, Given), (Slot::V, Given)],
            [
                (Slot::ScaleO, Optional),
                (Slot::O, Written),
                (Slot::Lse, OptionalWritten),
                (Slot::KeepMask, OptionalWritten),
                (Slot::RowMax, OptionalWritten),
                (Slot::HeadMax, OptionalWritten),
                (Slot::KeySum, OptionalWritten)
            ]
        ),
        num_results: 0,
        results: |_| Ok(()),
        kernel: kernel::<12>,
        ..WHOLE
    },
    // `kvcache` with scales by rows, apart for the same reason.
    Operator {
        name: "kvcache_scaled",
        tensors: cached!(
            [
                (Slot::Q, Given),
                (Slot::K, Written),
                (Slot::V, OptionalWritten),
                (Slot::KNew, Optional),
                (Slot::VNew, Optional),
                (Slot::CuSeqlensNew, Optional),
                (Slot::RotaryCos, Optional),
                (Slot::RotarySin, Optional),
                (Slot::TreeMask, Optional),
                (Slot::KScale, OptionalWritten),
                (Slot::VScale, OptionalWritten)
            ],
            []
        ),
        numbers: Spelt::Each(NUM_SCALED),
        kernel: kernel::<13>,
        ..WHOLE
    },
];

/// The type of the O that is made: the type asked for, else that of `from`; bf16 if `from` is FP8.
fn dtype_o(request: &Request, from: &Tensor) -> i32 {
    match request.numbers.dtype_o {
        asked @ 0.. => i32::try_from(asked).unwrap_or(crate::tensor::OTHER),
        _ if is_fp8(from.dtype) => fmha_c::FMHA_BF16,
        _ => from.dtype,
    }
}

/// O of Q's shape with V's last axis, and LSE.
fn o_and_lse(making: &mut Making<'_>) -> Result<(), Wrong> {
    outputs(making, true)
}

fn outputs(making: &mut Making<'_>, wants_lse: bool) -> Result<(), Wrong> {
    let request = &*making.request;
    let q = *request.required(Slot::Q)?;
    attention_type("q", &q)?;
    let dim = match request.get(Slot::V) {
        Some(v) => v.shape().last().copied().ok_or("v has 0 axes")?,
        None => request.numbers.head_dim_v,
    };
    ensure!(dim >= 0, "head_dim_v {dim} is below 0");
    let (lse, rows, heads): (&[i64], _, _) = match *q.shape() {
        [batch, seqlen, heads, _] => (&[batch, heads, seqlen], [batch, seqlen], heads),
        [total, heads, _] => (&[heads, total], [total, 0], heads),
        _ => {
            return Err(format!(
                "q has {} axes of {:?}, neither 4 nor, packed, 3",
                q.shape().len(),
                q.shape()
            ));
        }
    };
    let o = [rows[0], rows[1], heads, dim];
    let packed = [rows[0], heads, dim];
    let o = if lse.len() == 2 { &packed[..] } else { &o[..] };
    let dtype = dtype_o(request, &q);
    making.make(Slot::O, o, dtype, q.device)?;
    if wants_lse { making.make(Slot::Lse, lse, FMHA_F32, q.device) } else { Ok(()) }
}

/// dQ, dK, dV.
fn plain_gradients(making: &mut Making<'_>) -> Result<(), Wrong> {
    making.gradient(Slot::Dq, Slot::Q)?;
    making.gradient(Slot::Dk, Slot::K)?;
    making.gradient(Slot::Dv, Slot::V)
}

/// dQ, dK, dV, dBias and dSink. A gradient that is not wanted is an empty tensor: an operator always returns all of
/// its results.
fn gradients(making: &mut Making<'_>) -> Result<(), Wrong> {
    plain_gradients(making)?;
    let device = making.request.required(Slot::Q)?.device;
    for (slot, of, wanted) in [(Slot::Dbias, Slot::Bias, WANTS_DBIAS), (Slot::Dsink, Slot::Sink, WANTS_DSINK)]
    {
        match making.request.get(of).is_some() && making.request.asks(wanted) {
            true => making.gradient(slot, of)?,
            false => making.nothing(device)?,
        }
    }
    Ok(())
}

/// O and LSE of all parts together.
fn combined(making: &mut Making<'_>) -> Result<(), Wrong> {
    added(making)?;
    let parts = *making.request.required(Slot::OParts)?;
    let [_, batch, seqlen, heads, _] = combine::axes(&parts)?;
    making.make(Slot::Lse, &[batch, heads, seqlen], FMHA_F32, parts.device)
}

/// O of all parts together.
fn added(making: &mut Making<'_>) -> Result<(), Wrong> {
    let parts = *making.request.required(Slot::OParts)?;
    attention_type("o_parts", &parts)?;
    let [_, batch, seqlen, heads, dim] = combine::axes(&parts)?;
    let dtype = dtype_o(making.request, &parts);
    making.make(Slot::O, &[batch, seqlen, heads, dim], dtype, parts.device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_say_what_is_written_and_end_in_the_results() {
        let schema = |at: usize| OPERATORS[at].schema();
        assert!(
            schema(1).contains("Tensor(a!) o, Tensor(b!)? lse, Tensor(c!)? keep_mask, SymInt max_seqlen_q")
        );
        assert!(schema(1).ends_with("int options, Tensor? drawn_seed=None) -> ()"));
        assert!(schema(3).starts_with("kvcache(Tensor q, Tensor(a!) k, Tensor(b!)? v, Tensor? k_new"));
        assert!(schema(13).contains("Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor? bias"));
        assert!(schema(13).contains("int rotary_interleaved, SymInt scale_block, Tensor? drawn_seed"));
        assert!(schema(4).starts_with("combine(Tensor o_parts, Tensor lse_parts, "));
        assert!(schema(4).ends_with("-> (Tensor, Tensor)"));
        assert_eq!(schema(5), "plain(Tensor q, Tensor k, Tensor v, int numbers) -> (Tensor, Tensor)");
        assert!(schema(9).starts_with("add_parts_to(Tensor o_parts, Tensor(a!) o, "));
        assert!(
            schema(10)
                .ends_with("SymInt block_q, SymInt block_k, Tensor? drawn_seed=None) -> (Tensor, Tensor)")
        );
        assert!(
            schema(11).contains(
                "int options, str score_code, str mask_code, str captured_names, Tensor[] captured, "
            )
        );
        assert!(schema(11).contains("int wanted, Tensor? drawn_seed=None) -> (Tensor, Tensor, Tensor, "));
        assert!(schema(11).ends_with("Tensor, Tensor[])"));
        assert_eq!(schema(7), "plain_o(Tensor q, Tensor k, Tensor v, int numbers) -> (Tensor)");
    }
}
