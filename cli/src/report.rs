//! Report of a run: the problem, the speed.

use std::fmt::Write as _;

use fmha::{Bias, BiasBroadcast, KvLayout, ListEntries, QLayout, Roofline, Totals, VLayout};

use crate::failure::Failure;
use crate::setup::Setup;
use crate::timing::{Timing, duration};

/// The shape in one line, in the usual form of libraries' tables: `B4 H32/8 S1024 D128 causal fp16`.
pub(super) fn label(setup: &Setup) -> String {
    let dims = setup.fwd.dims;
    let pair = |a: u32, b: u32| if a == b { a.to_string() } else { format!("{a}/{b}") };
    let length = match setup.fwd.layout.q {
        QLayout::Batch => format!("S{}", pair(dims.seqlen_q, dims.seqlen_k)),
        QLayout::Packed => "varlen".to_owned(),
    };
    let mask = match setup.fwd.mask.to_string().as_str() {
        "0" => "full".to_owned(),
        "b" => "causal".to_owned(),
        other => other.to_owned(),
    };
    let dtype = match (setup.fwd.dtypes.qk.name(), setup.fwd.dtypes.v == setup.fwd.dtypes.qk) {
        ("f16", _) => "fp16".to_owned(),
        ("f32", _) => "fp32".to_owned(),
        ("e4m3fn", true) => "e4m3".to_owned(),
        (name, true) => name.to_owned(),
        (name, false) => format!("{name}+{}", setup.fwd.dtypes.v),
    };
    let backward = if setup.bwd.is_some() { " bwd" } else { "" };
    format!(
        "B{} H{} {length} D{} {mask} {dtype}{backward}",
        dims.batch,
        pair(dims.num_heads_q, dims.num_heads_kv),
        pair(dims.head_dim_qk, dims.head_dim_v),
    )
}

/// The label, and every option that is on.
pub(super) fn describe(setup: &Setup) -> String {
    let fwd = &setup.fwd;
    let mut text = label(setup);
    if let Totals { total_q: Some(total_q), total_k: Some(total_k), .. } = setup.totals() {
        let _ = write!(text, ", {total_q} rows of q, {total_k} of k");
    }
    if fwd.dtypes.o != fwd.dtypes.qk {
        let _ = write!(text, ", O {}", fwd.dtypes.o);
    }
    match fwd.score.bias {
        Bias::None => {}
        Bias::Alibi { per_batch } => text.push_str(if per_batch { ", ALiBi b*h" } else { ", ALiBi h" }),
        Bias::Elementwise(bias) => text.push_str(match bias.broadcast {
            BiasBroadcast::OneOne => ", bias 1*1",
            BiasBroadcast::OneHead => ", bias 1*h",
            BiasBroadcast::BatchOne => ", bias b*1",
            BiasBroadcast::BatchHead => ", bias b*h",
        }),
    }
    if let KvLayout::Paged { page_size } = fwd.layout.kv {
        let _ = write!(text, ", pages of {page_size}");
    }
    if let Some(append) = &fwd.cache.append {
        let _ = write!(text, ", {} new rows", append.seqlen_new);
    }
    if let Some(rotary) = &fwd.cache.rotary {
        let _ = write!(text, ", rotary {}", rotary.dim);
    }
    if let Some(cache) = fwd.cache.dtype {
        let _ = write!(text, ", {cache} cache");
    }
    if let Some(scales) = &fwd.cache.scales {
        let _ = write!(text, ", a scale for {} rows", scales.block);
    }
    if let Some(lists) = &fwd.lists {
        let of = match lists.entries {
            ListEntries::Addresses => "addresses".to_owned(),
            ListEntries::Blocks { size } => format!("blocks of {size} keys"),
            _ => "keys".to_owned(),
        };
        let _ = write!(text, ", lists of {} {of}", lists.topk);
    }
    for (on, word) in [
        (fwd.cache.v_in_k, "V in K"),
        (fwd.cache.tree_mask, "tree"),
        (fwd.masks.intervals.is_some(), "intervals"),
        (fwd.masks.bits.is_some(), "mask bits"),
        (fwd.layout.seqused_q || fwd.layout.seqused_k, "padded"),
        (fwd.score.sink, "sinks"),
        (fwd.layout.v == VLayout::ColMajor, "V column-major"),
        (fwd.write_lse && setup.bwd.is_none(), "LSE"),
        (setup.deterministic && setup.bwd.is_some(), "deterministic"),
    ] {
        if on {
            let _ = write!(text, ", {word}");
        }
    }
    for (code, word) in [(&fwd.code.score, "score"), (&fwd.code.mask, "keep")] {
        if let Some(code) = code {
            let _ = write!(text, ", {word} {code}");
        }
    }
    for (value, word) in [(fwd.score.softmax_scale, "scale"), (fwd.score.softcap, "softcap")] {
        if let Some(value) = value {
            let _ = write!(text, ", {word} {value}");
        }
    }
    if fwd.dropout.p_drop > 0.0 {
        let _ = write!(text, ", dropout {}", fwd.dropout.p_drop);
    }
    text
}

/// Speed computed from a problem and its time.
#[derive(Clone, Debug)]
pub(super) struct Speed {
    /// Floating-point operations of the visible pairs.
    pub(super) flops: u64,
    /// Bytes of the elements in use, each counted once.
    pub(super) bytes: u64,
    pub(super) tflops: f64,
    pub(super) gb_per_second: f64,
    /// Share of the device's limit, if known: of the nearer of its two limits.
    pub(super) share: Option<f64>,
    /// Source of the limits.
    pub(super) source: String,
}

impl Speed {
    pub(super) fn of(setup: &Setup, timing: &Timing, roofline: &Roofline) -> Result<Self, Failure> {
        let (flops, bytes) = work_of(setup)?;
        let seconds = timing.median();
        let at_best = |amount: u64, rate: Option<f64>| rate.map(|rate| amount as f64 / rate / seconds);
        let share = [at_best(flops, roofline.flops_per_second), at_best(bytes, roofline.bytes_per_second)]
            .into_iter()
            .flatten()
            .reduce(f64::max);
        Ok(Self {
            flops,
            bytes,
            tflops: flops as f64 / seconds / 1e12,
            gb_per_second: bytes as f64 / seconds / 1e9,
            share,
            source: roofline.source.clone(),
        })
    }
}

/// Operations and bytes of a call.
pub(super) fn work_of(setup: &Setup) -> Result<(u64, u64), Failure> {
    let work = setup.work()?;
    Ok(match &setup.bwd {
        None => (work.fwd_flops, work.fwd_bytes),
        // Q, K, V, O and dO are read, dQ, dK, dV written: twice the forward's, to a close bound.
        Some(_) => (work.bwd_flops, 2 * work.fwd_bytes),
    })
}

/// Median and spread.
pub(super) fn time(timing: &Timing) -> String {
    format!(
        "{} ({} clock, median of {}; {} to {})",
        duration(timing.median()),
        timing.clock(),
        timing.calls(),
        duration(timing.fastest()),
        duration(timing.slowest())
    )
}

impl std::fmt::Display for Speed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3} TFLOP/s, {:.1} GB/s", self.tflops, self.gb_per_second)?;
        if let Some(share) = self.share {
            write!(f, ", {:.0} % of the roofline", share * 100.0)?;
        }
        Ok(())
    }
}
