//! How long each scheme takes, from a kernel's rate and the links: what the planner compares, and what answers for more ranks
//! than are there.

use std::fmt;
use std::str::FromStr;

use crate::problem::Whole;
use crate::scheme::Scheme;

/// What a device computes and what a link carries. In text: lines `name = number`, `#` begins a comment.
///
/// ```
/// use fmha_dist::Links;
///
/// let links: Links = "bytes_per_second = 50e9   # 400 Gb/s between hosts\nlatency = 20e-6".parse()?;
/// assert_eq!(links.bytes_per_second, 50e9);
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Links {
    /// What a rank sends a second to its peers while it receives as much.
    pub bytes_per_second: f64,
    /// Seconds of an exchange of nothing.
    pub latency: f64,
    /// Operations a second of the forward kernel.
    pub fwd_flops: f64,
    /// Operations a second of the backward kernel.
    pub bwd_flops: f64,
    /// Bytes that a rank may hold besides its own tensors.
    pub memory: f64,
}

/// NVLink of four H100: 64 MiB a ring step in 259 us, 256 MiB in 890 us; half of the card's memory.
impl Default for Links {
    fn default() -> Self {
        Self { bytes_per_second: 3.19e11, latency: 48e-6, fwd_flops: 6e14, bwd_flops: 5.2e14, memory: 4e10 }
    }
}

impl FromStr for Links {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut links = Self::default();
        for line in text.lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let (name, number) =
                line.split_once('=').ok_or_else(|| format!("`{line}` is no `name = number`"))?;
            let value: f64 = number.trim().parse().map_err(|error| format!("`{line}`: {error}"))?;
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("`{line}`: {value} is not finite and positive"));
            }
            *match name.trim() {
                "bytes_per_second" => &mut links.bytes_per_second,
                "latency" => &mut links.latency,
                "fwd_flops" => &mut links.fwd_flops,
                "bwd_flops" => &mut links.bwd_flops,
                "memory" => &mut links.memory,
                other => {
                    let known = "bytes_per_second, latency, fwd_flops, bwd_flops, memory";
                    return Err(format!("`{other}` is none of {known}"));
                }
            } = value;
        }
        Ok(links)
    }
}

/// A scheme's cost on its slowest rank.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Estimate {
    /// Seconds of kernels.
    pub compute: f64,
    /// Seconds of transfers.
    pub transfer: f64,
    /// Seconds of both: what is beside each other counts once.
    pub seconds: f64,
    /// Bytes that a rank sends.
    pub bytes_sent: f64,
    /// Bytes that a rank holds besides its own tensors.
    pub memory: f64,
    /// `ranks` times the seconds, over those of one device.
    pub efficiency: f64,
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compute, transfer, seconds, bytes_sent, memory, efficiency } = self;
        write!(
            f,
            "{:.3} ms (kernels {:.3}, transfers {:.3}), sends {:.1} MiB, holds {:.1} MiB, {:.2} of one device's rate",
            seconds * 1e3,
            compute * 1e3,
            transfer * 1e3,
            bytes_sent / 1048576.0,
            memory / 1048576.0,
            efficiency
        )
    }
}

/// Pairs that each rank computes when its queries meet all keys, over all heads.
fn pairs_by_rank(whole: &Whole) -> Vec<f64> {
    let keys = whole.k.whole();
    let of = |rank| {
        let pieces = whole.q.pieces(rank);
        let pairs: u64 = pieces.iter().flat_map(|q| keys.iter().map(|k| whole.pairs(q, k))).sum();
        pairs as f64 * f64::from(whole.fwd.dims.num_heads_q)
    };
    (0..whole.ranks).map(of).collect()
}

/// What `scheme` would cost.
pub(crate) fn estimate(scheme: Scheme, whole: &Whole, backward: bool, links: &Links) -> Estimate {
    let dims = whole.fwd.dims;
    let ranks = f64::from(whole.ranks);
    let (qk, v) = (f64::from(dims.head_dim_qk), f64::from(dims.head_dim_v));
    let (flops, rate) = if backward {
        (2.0 * (3.0 * qk + 2.0 * v), links.bwd_flops)
    } else {
        (2.0 * (qk + v), links.fwd_flops)
    };
    let pairs = pairs_by_rank(whole);
    let replicated = whole.q.partition.is_replicated();
    let all: f64 = if replicated { pairs.first().copied().unwrap_or(0.0) } else { pairs.iter().sum() };
    let slowest = pairs.iter().copied().fold(0.0, f64::max);
    let seconds_of = |pairs: f64| pairs * flops / rate;
    let size = |dtype: fmha::DType| dtype.size_bytes() as f64;
    let dtypes = whole.fwd.dtypes;
    let batch = f64::from(whole.k.tensor_batch());
    let (heads_q, heads_kv) = (f64::from(dims.num_heads_q), f64::from(dims.num_heads_kv));
    let rows_k = f64::from(whole.k.partition.rows()) * batch * heads_kv;
    let rows_q = f64::from(whole.q.partition.rows()) * batch * heads_q;
    let kv = rows_k * (qk * size(dtypes.qk) + v * size(dtypes.v));
    let dkv = if backward { rows_k * (qk + v) * 4.0 } else { 0.0 };
    let others = (ranks - 1.0) / ranks;
    let sent = |bytes: f64| bytes / links.bytes_per_second;
    let (compute, bytes_sent, memory, exchanges, hidden) = match scheme {
        Scheme::Gather => (
            seconds_of(slowest),
            (kv + dkv) * others,
            kv + 2.0 * dkv,
            if backward { 2.0 } else { 1.0 },
            false,
        ),
        Scheme::Ring => {
            let parts = if backward { dkv / ranks * 3.0 } else { 3.0 * rows_q / ranks * (v + 1.0) * 4.0 };
            let steps = if backward { 2.0 * ranks - 1.0 } else { ranks - 1.0 };
            (seconds_of(slowest), kv * others + dkv, 2.0 * kv / ranks + parts, steps, true)
        }
        Scheme::Ulysses => {
            let share = rows_k.max(rows_k / heads_kv * ranks) / ranks;
            let own = rows_q / ranks * (qk * size(dtypes.qk) + v * size(dtypes.o))
                + share * (qk * size(dtypes.qk) + v * size(dtypes.v));
            let more = if backward {
                rows_q / ranks * (2.0 * v * size(dtypes.o) + qk * 4.0) + share * (qk + v) * 4.0
            } else {
                0.0
            };
            (seconds_of(all / ranks), (own + more) * others, own + more, 2.0, false)
        }
        Scheme::Decode => {
            let part = rows_q * (v + 1.0) * 4.0;
            (seconds_of(all / ranks), part * (ranks - 1.0), part * (ranks + 2.0), 1.0, false)
        }
    };
    let exchanges = if whole.ranks == 1 { 0.0 } else { exchanges };
    let transfer = sent(bytes_sent) + exchanges * links.latency;
    // A ring's transfers run beside its kernels, but for the last step's way home.
    let seconds = if hidden { compute.max(transfer) } else { compute + transfer };
    let one = seconds_of(all);
    let efficiency = if seconds > 0.0 { one / (ranks * seconds) } else { 1.0 };
    Estimate { compute, transfer, seconds, bytes_sent, memory, efficiency }
}
