//! The kernel `rdna_decode`, for short queries over long, paged and quantised caches, on WMMA. A workgroup has some
//! rows (pairs of a query and a head of one KV head's group) and a part of the keys; a second launch merges the
//! parts. For head dimensions above 256 four waves have a quarter of the columns each; no other kernel supports
//! such rows at any length.

use fmha_core::abi::FwdParams;
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::source::{Entry, KernelSource};
use fmha_core::{
    Bias, CacheRows, DType, FwdArgs, FwdProblem, MaskKind, PlanOptions, Refusal, VLayout, abi_spec,
};

use crate::RDNA;
use crate::cdna_decode::CdnaDecodeParams;
use crate::decode::recipe::Split;
use crate::decode::{
    Cut, Keys, MOST_SHARES, Parts, Room, cache_details, leaves_to_forward, refuse_rows_of_bytes, row_blocks,
    shares_rows, strides_are_dwords, takes, walked,
};
use crate::device::{Device, needs_wmma, refuse};
use crate::forward::{CdnaSpec, OutputKind};
use crate::paths::{LoadPath, StorePath};
use crate::rdna::RdnaTile;

/// The kernel's name in plans and refusals.
pub(crate) const NAME: &str = "rdna_decode";
/// Name of the launch that merges the parts of each row.
pub(crate) const MERGE: &str = "rdna_decode_merge";
/// Header that the kernel's entry includes.
pub(crate) const HEADER: &str = "fmha/rdna/decode/main.h";

const WAVE_THREADS: u32 = 32;
/// Rows of a wave.
const WAVE_ROWS: u32 = 16;
/// Waves that share longer rows.
const COLUMN_WAVES: u32 = 4;
/// Fewest keys of a part by default: at head dimension 128 in 16 bits their K and V are 64 KB, and writing and reading
/// the partial results of eight rows adds 12 % to that.
const LEAST_KEYS: u32 = 128;
/// Fewest keys of a part if waves share rows: 256 latent keys are 295 KB, and the partial results of 16 rows add 22
/// % to that.
const LEAST_SHARED_KEYS: u32 = 256;
/// Work items that a pair of compute units should have at once: 128 KB of LDS hold six tiles of 32 keys at D 128.
const GROUPS_OF_A_UNIT: u32 = 6;
/// Work items of a pair of compute units for rows of 512 elements that waves share: two fit.
const SHARED_GROUPS_OF_A_UNIT: u32 = 2;
/// Largest number of keys of a step.
const STEP: u32 = 32;

abi_spec! {
    /// Tile of the decode kernel: how it computes.
    pub struct RdnaDecodeTile {
        /// Keys of a part; with `shares` of a stretch at least.
        pub split_keys: i32 = Takes::multiples(32, 32, 1 << 24).tuned_over(&[128, 256, 512, 1024]),
        /// Rows of a workgroup: 16 a wave.
        pub block_m: i32 = Takes::among(&[16, 32, 64, 128]).tuned(),
        /// Number of equal stretches into which all sequences' keys are cut together. For each block of rows and KV
        /// head one workgroup reads a stretch. 0: each sequence's keys are cut into parts instead.
        pub shares: i32 = Takes::within(0, MOST_SHARES as i32),
    }
}

/// The kernel, with all that was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RdnaDecode {
    spec: CdnaSpec,
    stored: DType,
    /// Bytes of a key's row, 584 or 656, if the cache has rows of bytes; else 0.
    row_bytes: u32,
    tile: RdnaTile,
    parts: Parts,
}

fn spec(problem: &FwdProblem) -> CdnaSpec {
    let whole = if shares_rows(problem) { COLUMN_WAVES * WAVE_ROWS } else { 2 * WAVE_ROWS };
    let padded = |dim: u32| dim.max(1).next_multiple_of(whole).cast_signed();
    CdnaSpec {
        dtype_qk: problem.dtypes.qk,
        dtype_v: problem.dtypes.v,
        // The merging launch writes O.
        output: OutputKind::Wide,
        head_dim_qk: padded(problem.dims.head_dim_qk),
        head_dim_v: padded(problem.dims.head_dim_v),
        v_layout: VLayout::RowMajor,
        mask: MaskKind::Band,
        sink_columns: true,
        modifies: problem.score.softcap.is_some() || problem.score.bias != Bias::None,
        masks: false,
        dropout: false,
    }
}

/// Whether wide loads are possible: rows are whole pieces of eight elements of Q and K and four of V, and every row
/// begins at a dword. A quantised cache is judged as if it were in 16 bits, whose steps it uses; its own pieces may
/// begin at any byte.
fn loads_wide(problem: &FwdProblem) -> bool {
    problem.layout.v == VLayout::RowMajor
        && problem.dims.head_dim_qk.is_multiple_of(8)
        && problem.dims.head_dim_v.is_multiple_of(4)
        // Rows of bytes have strides in bytes.
        && strides_are_dwords(problem, if problem.cache.rows.is_some() { 1 } else { problem.dtypes.qk.size_bytes() })
}

/// Rows of a workgroup: all rows of a short query; for a long query, as many as share a tile of K and V.
fn default_block_m(problem: &FwdProblem) -> i32 {
    let most = if shares_rows(problem) { 2 * WAVE_ROWS } else { 4 * WAVE_ROWS };
    let rows = row_blocks(problem, 1).clamp(WAVE_ROWS.into(), most.into()) as u32;
    rows.next_power_of_two().cast_signed()
}

impl RdnaDecode {
    fn num_waves(&self) -> u32 {
        self.tile.block_m.unsigned_abs() / WAVE_ROWS * self.tile.column_waves.unsigned_abs()
    }
}

impl Split for RdnaDecode {
    const NAME: &'static str = NAME;
    const MERGE: &'static str = MERGE;
    const HEADER: &'static str = HEADER;
    const IS_RDNA: bool = true;

    type Tile = RdnaDecodeTile;

    fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Self, Refusal> {
        needs_wmma(device.arch, NAME)?;
        takes(NAME, problem)?;
        leaves_to_forward(NAME, problem, device, options)?;
        if !loads_wide(problem) {
            refuse_rows_of_bytes(NAME, problem)?;
        }
        let shares_rows = shares_rows(problem);
        let walked = walked(problem);
        let mut asked = RdnaDecodeTile { split_keys: 0, block_m: default_block_m(&walked), shares: -1 };
        for (name, value) in &options.tile {
            asked.set_field(name, value).map_err(|text| Refusal::new(NAME, format!("tile {text}")))?;
        }
        let block_rows = asked.block_m.unsigned_abs();
        if shares_rows && block_rows > 2 * WAVE_ROWS {
            refuse!(NAME, "tile block_m={block_rows} is more than {} of shared rows", 2 * WAVE_ROWS);
        }
        let (of_a_unit, least) = match shares_rows {
            true => (SHARED_GROUPS_OF_A_UNIT, LEAST_SHARED_KEYS),
            false => (GROUPS_OF_A_UNIT, LEAST_KEYS),
        };
        let room = Room { device, of_a_unit, of_a_group: 1, least, edge: STEP };
        let of_sequence = row_blocks(&walked, block_rows).saturating_mul(problem.dims.num_heads_kv.into());
        let keys = (asked.split_keys.unsigned_abs(), u32::try_from(asked.shares).ok());
        let cut = Cut::of(NAME, &walked, options, &room, of_sequence, keys)?;
        let spec = spec(problem);
        let load = if loads_wide(problem) { LoadPath::Chunks } else { LoadPath::Element };
        let tile = RdnaTile {
            block_m: asked.block_m,
            block_n: block_n(&spec, load, options.row_invariant),
            load,
            store: StorePath::Vector,
            column_waves: if shares_rows { COLUMN_WAVES.cast_signed() } else { 1 },
            split: true,
        };
        let parts = Parts::of(NAME, &walked, device.arch, block_rows, (cut, spec.head_dim_v), options)?;
        let row_bytes = problem.cache.rows.map_or(0, CacheRows::row_bytes);
        Ok(Self { spec, stored: problem.stored_k(), row_bytes, tile, parts })
    }

    fn tile(&self) -> RdnaDecodeTile {
        let Cut { keys, shares, .. } = self.parts.cut;
        RdnaDecodeTile { split_keys: keys as i32, block_m: self.tile.block_m, shares: shares as i32 }
    }

    fn parts(&self) -> &Parts {
        &self.parts
    }

    fn source(&self) -> KernelSource {
        let threads = self.num_threads();
        let keys = self.parts.keys;
        let call = match keys {
            Keys::Sequence | Keys::Scaled => format!("run<kSpec, kTile, kStored, {}>", keys.places()),
            Keys::Lists | Keys::TwoCaches => {
                format!("run_listed<kSpec, kTile, kStored, {}, {}>", keys.places(), self.row_bytes)
            }
        };
        let entry = Entry {
            include: HEADER,
            constants: &[("kSpec", &self.spec), ("kTile", &self.tile), ("kStored", &self.stored)],
            bounds: &crate::group_of(threads),
            params: keys.entry_params(),
            call: &format!("rdna::decode::{call}({});", keys.entry_argument()),
        };
        crate::source(&entry, RDNA)
    }

    fn num_threads(&self) -> u32 {
        self.num_waves() * WAVE_THREADS
    }

    fn workgroups(&self) -> u64 {
        self.parts.pieces.into()
    }

    fn load(&self) -> LoadPath {
        self.tile.load
    }

    fn for_any_address(&self) -> Option<Self> {
        let load = LoadPath::Element;
        let block_n = block_n(&self.spec, load, self.parts.row_invariant);
        let tile = RdnaTile { block_n, load, ..self.tile };
        (tile != self.tile).then_some(Self { tile, ..*self })
    }

    fn params(&self, problem: &FwdProblem, args: &FwdArgs<'_>, fwd: &FwdParams) -> CdnaDecodeParams {
        self.parts.params(problem, args, fwd, (1, 1))
    }

    fn details(&self, problem: &FwdProblem) -> Vec<(&'static str, String)> {
        let Self { tile, parts, .. } = self;
        let (rows, keys) = (tile.block_m, tile.block_n);
        let mut details =
            vec![("tile", format!("{rows} rows, {keys} keys a step, split_keys {}", parts.cut.keys))];
        details.extend(parts.details(problem));
        details.push(("loads", format!("{:?}, K and V to LDS", tile.load)));
        if tile.column_waves > 1 {
            details.push(("columns", format!("a quarter of a row's to each of {} waves", tile.column_waves)));
        }
        details.extend(cache_details(problem));
        details
    }
}

/// Keys per step: as many as registers and LDS allow; in a row-invariant plan the number is equal for every way of
/// loading.
fn block_n(spec: &CdnaSpec, load: LoadPath, row_invariant: bool) -> i32 {
    let load = if row_invariant { LoadPath::Element } else { load };
    match spec.head_dim_qk.max(spec.head_dim_v) {
        257.. => 16,
        // Loads by elements and modifiers need registers for addresses and values.
        193.. if load == LoadPath::Element || spec.modifies => 16,
        _ => STEP.cast_signed(),
    }
}
