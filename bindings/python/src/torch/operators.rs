//! Table of the operators: the arguments of each, in order, and its results. Schemas are made from the table, and
//! arguments are read by it.

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

/// Form in which an operator takes a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Take {
    /// A required tensor: `Tensor` in the schema.
    Given,
    /// An optional tensor: `Tensor?` in the schema.
    Optional,
    /// A required tensor that is written: `Tensor(a!)` in the schema.
    Written,
    /// An optional tensor that is written: `Tensor(a!)?` in the schema.
    OptionalWritten,
}

/// The form in which an operator takes its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelt {
    /// The stated count of [`NUMBERS`], from the first on, each as an argument.
    Each(usize),
    /// One argument: the index under which the numbers were kept. An argument costs torch and Python 0.1 us, so 13 of
    /// them are a third of the host's time for a call of Q, K and V.
    Kept,
}

/// Whether an operator takes a score and a mask as code, and block sizes of masks as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    /// The operator takes no functions.
    None,
    /// The operator takes score and mask functions.
    Forward,
    /// The operator takes functions and returns gradients of captured tensors: a number's bits choose them, from the
    /// lowest bit.
    Backward,
}

/// Arguments for code in a schema. `names` lists captured tensors and then numbers, separated by commas; block sizes
/// belong to lists of blocks.
const CODE: &str = "str score_code, str mask_code, str captured_names, Tensor[] captured, \
    float[] captured_numbers, SymInt block_q, SymInt block_k";

/// Name of the argument that gives the seed as a tensor.
pub(super) const DRAWN_SEED: &str = "drawn_seed";

/// Signature of an operator.
pub(super) struct Operator {
    pub(super) name: &'static str,
    /// Tensors of the operator, its first arguments.
    pub(super) tensors: &'static [(Slot, Take)],
    /// Form in which the operator takes its numbers.
    pub(super) numbers: Spelt,
    /// Whether the operator may take the seed last, as a host tensor [`DRAWN_SEED`]: a compiler that draws a seed has
    /// it only as a tensor.
    pub(super) is_seeded: bool,
    /// Whether the operator takes, after its numbers, a score and a mask as code and their captures.
    pub(super) code: Coding,
    /// Number of tensors that the operator returns, besides a list of gradients of captured tensors.
    num_results: usize,
    /// Makes the results and puts them into the request.
    pub(super) results: fn(&mut Making<'_>) -> Result<(), Wrong>,
    pub(super) kernel: Kernel,
}

impl Operator {
    /// Schema of the operator, such as `forward(Tensor q, ..., int options) -> (Tensor, Tensor)`.
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

/// List of an operator's tensors: some of its own, those that modify scores and give lengths, and more of its own.
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

/// Tensors of a paged K and V, and scales of FP8.
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

/// Tensors that backward reads, and those that modify scores.
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
    // `forward` and `backward` of Q, K and V only, the most common call.
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
    // Operator like `plain` without LSE as a result: it saves an allocation, and no LSE is written.
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
    // `forward_out` with small outputs is an operator of its own: engines call `forward_out` in each layer, and each
    // argument costs the host 0.1 us.
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
    // `kvcache` with scales by rows is an operator of its own, since each argument costs the host 0.1 us.
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

/// Type of the O to be made: the requested type, otherwise that of `from`, or bf16 if `from` is FP8.
fn dtype_o(request: &Request, from: &Tensor) -> i32 {
    match request.numbers.dtype_o {
        asked @ 0.. => i32::try_from(asked).unwrap_or(crate::tensor::OTHER),
        _ if is_fp8(from.dtype) => fmha_c::FMHA_BF16,
        _ => from.dtype,
    }
}

/// Makes O, of Q's shape with V's last axis, and LSE.
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

/// Makes dQ, dK and dV.
fn plain_gradients(making: &mut Making<'_>) -> Result<(), Wrong> {
    making.gradient(Slot::Dq, Slot::Q)?;
    making.gradient(Slot::Dk, Slot::K)?;
    making.gradient(Slot::Dv, Slot::V)
}

/// Makes dQ, dK, dV, dBias and dSink. A gradient that is not wanted is an empty tensor: an operator always returns all
/// of its results.
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

/// Makes O and LSE of all parts together.
fn combined(making: &mut Making<'_>) -> Result<(), Wrong> {
    added(making)?;
    let parts = *making.request.required(Slot::OParts)?;
    let [_, batch, seqlen, heads, _] = combine::axes(&parts)?;
    making.make(Slot::Lse, &[batch, heads, seqlen], FMHA_F32, parts.device)
}

/// Makes O of all parts together.
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
