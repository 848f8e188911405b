//! How a decode kernel's keys are cut: each sequence's keys into parts of a fixed number of keys, or all sequences'
//! keys into equal stretches. The cut is planned from the longest possible length. Parts suit sequences of one
//! length, and bits that depend on a row's own sequence alone. If only the device has the lengths, it cuts the
//! actual keys (`cdna/decode/pieces.h`). The problem decides which cut is used; a cost model that was never
//! measured decides the size of stretches.

use fmha_core::{FwdProblem, KvLayout, PlanOptions, Refusal};

use crate::device::{Device, refuse};

/// Keys of a part whose bits do not depend on the device or on the rest of the call; partial results add 6 % of
/// traffic.
const INVARIANT_KEYS: u32 = 256;
/// Most parts of a sequence: a 32-lane wave of the merging launch reads them in four iterations.
const MOST_PARTS: u32 = 128;
/// Most stretches into which all sequences' keys are divided.
pub(crate) const MOST_SHARES: u32 = 1 << 14;
/// Most sequence lengths that each work item of a launch with stretches reads, twice or three times.
const MOST_SCANNED: u32 = 1024;
/// Most work items of a round, so that products on the device fit 32 bits.
const MOST_ROUND: u32 = 1 << 14;
/// Largest allowed load of the fullest compute unit above the mean, in per cent. Stretches are made finer, up to
/// twice as many, until it holds.
const UNEVEN_PERCENT: u64 = 5;

/// How the keys of all sequences are divided among workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Number of keys of a part; with stretches the least number of a stretch.
    pub(crate) keys: u32,
    /// Number of stretches of all sequences' keys; 0 if each sequence's keys are cut into parts.
    pub(crate) shares: u32,
    /// Number of work items with which each compute unit has one workgroup.
    pub(crate) round: u32,
}

/// How much work a device can hold at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) device: Device,
    /// Work items that a compute unit should have at once.
    pub(crate) of_a_unit: u32,
    /// Number of work items that a workgroup has.
    pub(crate) of_a_group: u32,
    /// Least number of keys of a part or a stretch.
    pub(crate) least: u32,
    /// Keys that a wave processes in one step; parts are multiples.
    pub(crate) edge: u32,
}

/// Whether sequences have lengths that only the device knows at run time.
fn has_unlike_lengths(problem: &FwdProblem) -> bool {
    problem.layout.seqused_k || problem.layout.kv == KvLayout::Packed
}

impl Cut {
    /// The cut when a sequence has `of_sequence` work items for each part. `keys`, if not 0, and `shares`, if
    /// given, are the caller's choices.
    ///
    /// # Errors
    /// A requested number of stretches that is not possible, as a refusal of `kernel`.
    pub(crate) fn of(
        kernel: &'static str,
        problem: &FwdProblem,
        options: &PlanOptions,
        room: &Room,
        of_sequence: u64,
        (keys, shares): (u32, Option<u32>),
    ) -> Result<Self, Refusal> {
        let keys = (keys > 0).then_some(keys);
        let shares = match shares {
            Some(0) => 0,
            Some(asked) => {
                if let Some(reason) = shares_are_refused(problem, options, keys.unwrap_or(room.least), asked)
                {
                    refuse!(kernel, "tile shares={asked}: {reason}");
                }
                asked
            }
            None => default_shares(problem, options, room, of_sequence, keys.unwrap_or(room.least)),
        };
        let keys = keys.unwrap_or_else(|| match shares {
            0 => default_keys(problem, options, room, of_sequence),
            _ => room.least,
        });
        let round = room.device.num_compute_units.saturating_mul(room.of_a_group).clamp(1, MOST_ROUND);
        Ok(Self { keys, shares, round })
    }
}

/// The reason why keys cannot be divided into shares.
fn shares_are_refused(problem: &FwdProblem, options: &PlanOptions, keys: u32, shares: u32) -> Option<String> {
    let dims = problem.dims;
    if options.batch_invariant {
        return Some("batch_invariant has parts of a fixed number of keys".to_owned());
    }
    if problem.walks_lists() {
        return Some("lists of keys have parts of a fixed number of entries".to_owned());
    }
    if dims.batch > MOST_SCANNED {
        return Some(format!(
            "batch {} is more than {MOST_SCANNED} lengths, which each piece reads",
            dims.batch
        ));
    }
    // The device counts tiles with 32 bits.
    let all = u64::from(dims.batch) * u64::from(dims.seqlen_k.next_multiple_of(32).max(32));
    let stretches = u64::from(keys) * 2 * u64::from(shares);
    let most = 1 << 30;
    // A stretch has at least 1/128 of the longest sequence's tiles of 32 keys, since a merge reads at most 128
    // parts.
    let tiles = u64::from(dims.seqlen_k).div_ceil(32 * 128) * u64::from(shares);
    (all.max(stretches) >= most || tiles >= 2 * most)
        .then(|| format!("batch times seqlen_k, or shares of split_keys={keys}, are 2^30 keys or more"))
}

/// Number of stretches with which no compute unit's load is much above the mean; 0 if parts are better.
fn default_shares(
    problem: &FwdProblem,
    options: &PlanOptions,
    room: &Room,
    of_sequence: u64,
    keys: u32,
) -> u32 {
    let units = u64::from(room.device.num_compute_units.max(1));
    // Number of workgroups that process a stretch of keys.
    let of_stretch = of_sequence.div_ceil(room.of_a_group.max(1).into()).max(1);
    let groups = units * u64::from((room.of_a_unit / room.of_a_group.max(1)).max(1));
    let most = (2 * groups / of_stretch).clamp(1, MOST_SHARES.into());
    // How far the load of the fullest compute unit exceeds the mean, in per cent.
    let unevenness = |shares: u64| {
        let all = shares * of_stretch;
        all.div_ceil(units) * units * 100 / all - 100
    };
    let fewest = (groups / of_stretch).clamp(1, most);
    let even = (fewest..=most).find(|&shares| unevenness(shares) <= UNEVEN_PERCENT);
    let shares =
        even.or_else(|| (fewest..=most).min_by_key(|&shares| unevenness(shares))).unwrap_or(1) as u32;
    let is_cut = has_unlike_lengths(problem) && problem.dims.seqlen_k > room.least;
    if is_cut && shares_are_refused(problem, options, keys, shares).is_none() { shares } else { 0 }
}

/// Keys of a part such that compute units have the intended number of work items.
fn default_keys(problem: &FwdProblem, options: &PlanOptions, room: &Room, of_sequence: u64) -> u32 {
    if options.batch_invariant {
        return INVARIANT_KEYS;
    }
    let groups = of_sequence.saturating_mul(problem.dims.batch.into());
    let wanted = u64::from(room.device.num_compute_units * room.of_a_unit);
    let parts = wanted.div_ceil(groups.max(1)).min(MOST_PARTS.into()) as u32;
    problem.dims.seqlen_k.div_ceil(parts).next_multiple_of(room.edge).max(room.least)
}
