//! Model of the time of each scheme, from a kernel's rate and the links. The planner compares schemes by it,
//! and it answers for more ranks than the machine has.

use std::fmt;
use std::str::FromStr;

use fmha::MAX_ARRIVALS;

use crate::problem::Whole;
use crate::scheme::{Scheme, last_home};

/// Speeds of a device and of its links. In text: lines `name = number`, `#` begins a comment.
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
    /// Bytes per second from a rank to its peers, while it receives as many.
    pub bytes_per_second: f64,
    /// Seconds of an exchange of nothing.
    pub latency: f64,
    /// Seconds in which the processor queues one message of an exchange, for each rank of the group.
    pub queueing: f64,
    /// Operations a second of the forward kernel, as a device keeps them up.
    pub fwd_flops: f64,
    /// Operations a second of the backward kernel, as a device keeps them up.
    pub bwd_flops: f64,
    /// Speed of a device that has rested, before its power limit lowers the clock, over its lasting speed.
    pub burst: f64,
    /// Seconds for which that speed lasts.
    pub burst_seconds: f64,
    /// Processors of a device, of which each computes a tile of 128 queries of a head at a time.
    pub processors: f64,
    /// Bytes per second of reads or writes in a device's own memory.
    pub memory_bytes_per_second: f64,
    /// Bytes that a rank may use, apart from its own tensors.
    pub memory: f64,
    /// Neighbouring ranks that these links join; `None`: all.
    pub ranks_per_host: Option<u32>,
    /// Bytes per second from a rank to ranks of other hosts, while it receives as many.
    pub host_bytes_per_second: f64,
    /// Seconds of an exchange of nothing between hosts.
    pub host_latency: f64,
}

/// NVLink of four H100: 64 MiB per ring step in 259 us, 256 MiB in 890 us; half of the card's memory; 400
/// Gb/s between hosts. The fall of the clock is that of H200s: four take 0.24 of the 181 ms of one device,
/// and 0.25 of its 3.0 s. Seconds to queue a message come from H200s that decode a query with messages to and
/// from each: four by 16 take 0.422 ms, of which the kernels take 0.233; two by 8 take 0.111.
impl Default for Links {
    fn default() -> Self {
        Self {
            bytes_per_second: 3.19e11,
            latency: 48e-6,
            queueing: 6.6e-6,
            fwd_flops: 6e14,
            bwd_flops: 5.2e14,
            burst: 1.2,
            burst_seconds: 0.1,
            processors: 132.0,
            memory_bytes_per_second: 3e12,
            memory: 4e10,
            ranks_per_host: None,
            host_bytes_per_second: 4.5e10,
            host_latency: 60e-6,
        }
    }
}

impl Links {
    /// Work that a device that has rested does in `seconds`, in seconds of a device that has not.
    #[must_use]
    pub fn kept_up(&self, seconds: f64) -> f64 {
        seconds + (self.burst - 1.0) * seconds.min(self.burst_seconds)
    }

    /// Seconds in which a device that has rested does the work of `kept_up` seconds of one that has not.
    fn rested(&self, kept_up: f64) -> f64 {
        (kept_up / self.burst).max(kept_up - (self.burst - 1.0) * self.burst_seconds)
    }
}

impl FromStr for Links {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut links = Self::default();
        let mut said = Vec::new();
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
            if said.contains(&name.trim()) {
                return Err(format!("`{line}`: {} is said 2 times", name.trim()));
            }
            said.push(name.trim());
            if name.trim() == "ranks_per_host" {
                let ranks = number.trim().parse::<u32>();
                links.ranks_per_host = Some(ranks.map_err(|error| format!("`{line}`: {error}"))?);
                continue;
            }
            *match name.trim() {
                "bytes_per_second" => &mut links.bytes_per_second,
                "latency" => &mut links.latency,
                "queueing" => &mut links.queueing,
                "fwd_flops" => &mut links.fwd_flops,
                "bwd_flops" => &mut links.bwd_flops,
                "burst" => &mut links.burst,
                "burst_seconds" => &mut links.burst_seconds,
                "processors" => &mut links.processors,
                "memory_bytes_per_second" => &mut links.memory_bytes_per_second,
                "memory" => &mut links.memory,
                "host_bytes_per_second" => &mut links.host_bytes_per_second,
                "host_latency" => &mut links.host_latency,
                other => {
                    let known = "bytes_per_second, latency, queueing, fwd_flops, bwd_flops, burst, \
                                 burst_seconds, processors, memory_bytes_per_second, memory, ranks_per_host, \
                                 host_bytes_per_second, host_latency";
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
    /// Seconds of compute and transfer; time in which they overlap counts once.
    pub seconds: f64,
    /// Bytes that a rank sends.
    pub bytes_sent: f64,
    /// Bytes that a rank uses, apart from its own tensors.
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

/// The time of a kernel that waits for flags, over that of one whose keys are there: two and four H200,
/// 131072 and 524288 tokens, forward, 0.993 to 1.028, with what the keys' way takes where they come first
/// left out.
const COST_OF_WAITING: f64 = 1.005;

/// The time of kernels over runs of keys that write f32, over that of one over all keys: a ring of two H200,
/// 131072 tokens, causal, forward 97.4 ms and backward 314, of one device 177 and 585; the model has the
/// rest.
const COST_OF_PARTS: f64 = 1.05;

/// Seconds that a launch of a rank and what belongs to it (copies of its rows, its LSE, its sums) take to
/// begin, where calls follow each other: two H200, 8192 and 16384 tokens. Of keys that are gathered, or of a
/// ring; forward, or backward.
const LAUNCH: f64 = 10e-6;
const LAUNCH_BACKWARD: f64 = 120e-6;
const LAUNCH_OF_RING: f64 = 62e-6;
const LAUNCH_OF_RING_BACKWARD: f64 = 235e-6;

/// Seconds that a launch takes that packs or unpacks rows of heads, and how many bytes it reads and writes a
/// second: Ulysses of two and four H200, 16384 and 131072 tokens.
const PACKING: f64 = 15e-6;
const PACKED_BYTES_PER_SECOND: f64 = 5.5e11;

/// Seconds of a decoding step without its keys and the latency of an exchange: its launches and the merge. On
/// two pairs of H200, a query against 131072 and 1048576 keys: 9 to 19 us.
const DECODING: f64 = 14e-6;

/// Estimate of the time and memory of `scheme`.
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
    // Shares of an all-to-all's bytes that come from this host and from other hosts.
    let per_host = f64::from(whole.ranks_per_host.min(whole.ranks));
    let (hosts, across) = (ranks / per_host, per_host < ranks);
    let (near, far) = ((per_host - 1.0) / ranks, (ranks - per_host) / ranks);
    let all_to_all = |bytes: f64| Moved { near: bytes * near, far: bytes * far, ..Moved::default() };
    // Other time that a rank loses: its launches begin, and their last tiles leave processors idle for half
    // of a tile's time. Partial results are written and read again.
    let idle = |keys: f64| 0.5 * 128.0 * keys * flops * links.processors / rate;
    let stored = |bytes: f64| bytes / links.memory_bytes_per_second;
    let sequences = if whole.k.cu_seqlens.is_some() { f64::from(whole.k.batch) } else { 1.0 };
    let keys = f64::from(whole.k.partition.rows()) / sequences;
    let own_q = rows_q / ranks;
    let groups = f64::from(whole.head_groups);
    let (begin, begin_of_ring) =
        if backward { (LAUNCH_BACKWARD, LAUNCH_OF_RING_BACKWARD) } else { (LAUNCH, LAUNCH_OF_RING) };
    // Pieces of the rank that has most: every rank must find the same number.
    let pieces = (0..whole.ranks).map(|rank| whole.q.pieces(rank).len()).max().unwrap_or(0) as f64;
    let seen = if all > 0.0 { all / (rows_q * f64::from(whole.k.partition.rows())) } else { 0.0 };
    // Seconds of a ring with so many steps: a launch for each run of queries and each run of keys that it
    // sees, and the sums of each step's f32 dQ, dK and dV.
    let of_ring = |steps: f64| {
        let launches = (pieces * pieces * steps * seen).max(steps);
        let bytes = if backward {
            4.0 * (steps * own_q * qk * 4.0 + steps * dkv / ranks)
        } else {
            2.0 * launches * own_q / pieces.max(1.0) * (v + 1.0) * 4.0
        };
        launches * (begin_of_ring + idle(keys / (pieces * steps).max(1.0))) + stored(bytes)
    };
    let (besides, slower) = match scheme {
        _ if whole.ranks == 1 => (0.0, 1.0),
        Scheme::Gather => {
            let bytes = if backward { 2.0 * own_q * qk * 4.0 + 6.0 * dkv } else { 0.0 };
            let slower = if whole.flags { COST_OF_WAITING } else { 1.0 };
            (pieces * begin + idle(keys) + stored(2.0 * kv / ranks + bytes), slower)
        }
        Scheme::Ring => (of_ring(ranks), COST_OF_PARTS),
        Scheme::Mixed => (of_ring(hosts), COST_OF_PARTS),
        // Rows that move are packed before, or unpacked after. Launches of groups fill each other's idle
        // ends.
        Scheme::Ulysses => {
            let bytes = rows_q / ranks * (qk * size(dtypes.qk) + v * size(dtypes.o)) + kv / ranks;
            let (packed, tensors) = if backward { (2.5 * bytes, 8.0) } else { (bytes, 4.0) };
            let packs = tensors * pieces * ranks * groups;
            let packing = packs * PACKING + 2.0 * packed / PACKED_BYTES_PER_SECOND;
            (sequences * groups * begin + idle(keys) + packing, 1.0)
        }
        Scheme::Decode => (DECODING, 1.0),
    };
    let (compute, moved, memory) = match scheme {
        Scheme::Gather => {
            let mut moved = all_to_all(kv + dkv);
            moved.exchanges = if backward { 2.0 } else { 1.0 };
            // Overlap with kernels: all arrivals except the first piece that a kernel waits for, and all
            // departures that the last kernel does not change.
            if whole.flags {
                let home =
                    if backward { dkv * (1.0 - last_home(whole) * ranks / (ranks - 1.0)) } else { 0.0 };
                moved.hidden = ((1.0 - 1.0 / f64::from(MAX_ARRIVALS)) * kv + home) / (kv + dkv);
            }
            (seconds_of(slowest), moved, kv + 2.0 * dkv)
        }
        Scheme::Ring => {
            let parts = if backward { dkv / ranks * 3.0 } else { 3.0 * rows_q / ranks * (v + 1.0) * 4.0 };
            let steps = if backward { 2.0 * ranks - 1.0 } else { ranks - 1.0 };
            let bytes = kv * (ranks - 1.0) / ranks + dkv;
            // A step is as slow as its slowest link.
            let (near, far) = if across { (0.0, bytes) } else { (bytes, 0.0) };
            (
                seconds_of(slowest),
                Moved { near, far, exchanges: steps, hidden: 1.0, messages: 0.0 },
                2.0 * kv / ranks + parts,
            )
        }
        Scheme::Mixed => {
            let inside = (per_host - 1.0) / per_host;
            let share = |bytes: f64| bytes / ranks;
            let parts = if backward {
                dkv / hosts + share(dkv) * (per_host + 2.0)
            } else {
                3.0 * rows_q / ranks * (v + 1.0) * 4.0
            };
            let (near, far) = ((kv + dkv) * inside, share(kv) * (hosts - 1.0) + share(dkv) * hosts);
            let exchanges = if backward { 4.0 * hosts } else { 2.0 * hosts - 1.0 };
            // The first host's keys come before there is anything to compute.
            let hidden = 1.0 - 1.0 / hosts;
            (
                seconds_of(slowest),
                Moved { near, far, exchanges, hidden, messages: 0.0 },
                2.0 * kv / hosts + 2.0 * share(kv) + parts,
            )
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
            // Overlap with kernels: all arrivals except the first group, and all departures except the last.
            let moved =
                Moved { exchanges: 2.0 * groups, hidden: 1.0 - 1.0 / groups, ..all_to_all(own + more) };
            (seconds_of(all / ranks), moved, own + more)
        }
        Scheme::Decode => {
            let part = rows_q * (v + 1.0) * 4.0;
            // One call for all ranks.
            let moved = Moved { exchanges: 1.0, messages: 1.0, ..all_to_all(part * ranks) };
            (seconds_of(all / ranks), moved, part * (ranks + 2.0))
        }
    };
    let compute = links.rested(compute * slower) + besides;
    let exchanges = if whole.ranks == 1 { 0.0 } else { moved.exchanges };
    let latency = if across { links.host_latency } else { links.latency };
    // Links inside and between hosts work at once.
    let sent = (moved.near / links.bytes_per_second).max(moved.far / links.host_bytes_per_second);
    let transfer = sent + exchanges * latency;
    let hidden = moved.hidden * transfer;
    // The host queues the next call while this one runs.
    let seconds = (compute.max(hidden) + transfer - hidden).max(moved.messages * ranks * links.queueing);
    let one = links.rested(seconds_of(all));
    let efficiency = if seconds > 0.0 { one / (ranks * seconds) } else { 1.0 };
    let bytes_sent = moved.near + moved.far;
    Estimate { compute, transfer, seconds, bytes_sent, memory, efficiency }
}

/// Bytes and messages that a rank sends.
#[derive(Clone, Copy, Default)]
struct Moved {
    /// Bytes to ranks of its host.
    near: f64,
    /// Bytes to ranks of other hosts.
    far: f64,
    /// Number of times that ranks wait for each other.
    exchanges: f64,
    /// Part of the transfer that overlaps with kernels.
    hidden: f64,
    /// Messages that the host queues, apart from those in the cost of launches.
    messages: f64,
}
