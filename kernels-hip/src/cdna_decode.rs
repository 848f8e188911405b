//! The kernel `cdna_decode`, for short queries over long, paged and quantised caches, on MFMA. A wave has 32 rows
//! (pairs of a query and a head of one KV head's group) and a part of the keys; a second launch merges the parts.
//! For head dimensions above 256 four waves have a quarter of the columns each. Latent attention (576/512) reads K
//! once and uses it as V too; no other kernel supports such rows at any length.

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _, DevPtr, FwdParams, View};
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::lists::ListParams;
use fmha_core::second::TwoCachesParams;
use fmha_core::source::{Entry, Header, KernelSource};
use fmha_core::{
    Bias, DType, FwdArgs, FwdProblem, KvLayout, PlanOptions, Refusal, VLayout, abi_spec, abi_struct,
};

use crate::CDNA;
use crate::arch::Arch;
use crate::decode::recipe::Split;
use crate::decode::{
    Cut, MOST_SHARES, Parts, Room, cache_details, leaves_to_forward, refuse_rows_of_bytes, row_blocks,
    shares_rows, strides_are_dwords, takes, walked,
};
use crate::device::{Device, needs_mfma};
use crate::forward::CdnaParams;
use crate::paths::LoadPath;

/// The kernel's name in plans and refusals.
pub(crate) const NAME: &str = "cdna_decode";
/// Name of the launch that merges the parts of each row.
pub(crate) const MERGE: &str = "cdna_decode_merge";
/// Header that the kernel's entry includes.
pub(crate) const HEADER: &str = "fmha/cdna/decode/main.h";

/// Waves of a workgroup, at most.
const MOST_WAVES: u32 = 4;
const WAVE_THREADS: u32 = 64;
/// Number of rows of a wave, and of keys of a step.
const EDGE: u32 = 32;
/// Number of waves that share longer rows.
const COLUMN_WAVES: u32 = 4;
/// Head dimensions of latent attention: of its keys, and of the values inside the keys.
const LATENT: [(u32, u32); 2] = [(576, 512), (512, 512)];
/// Fewest keys of a part by default: at head dimension 128 in 16 bits their K and V are 64 KB, and writing and
/// reading the partial results of eight rows adds 12 % to that.
const LEAST_KEYS: u32 = 128;
/// Fewest keys of a part if waves share rows: 256 latent keys are 295 KB, and the partial results of 32 rows add 44
/// % to that, those of 16 rows half as much.
const LEAST_SHARED_KEYS: u32 = 256;
/// Waves per SIMD to aim at, so that one wave's loads are in flight while the other computes.
const WAVES_OF_A_SIMD: u32 = 2;
const SIMDS: u32 = 4;
const SHARED_GROUPS_OF_A_UNIT: u32 = WAVES_OF_A_SIMD * SIMDS / COLUMN_WAVES;

abi_spec! {
    /// Compile-time spec of a decode kernel.
    pub struct CdnaDecodeSpec {
        /// Type of Q, and of K and V as operands of products.
        pub dtype: DType,
        /// Type of K and V in memory.
        pub stored: DType,
        /// Elements of a query's or key's row, padded to multiples of 32; of 64 if waves share rows.
        pub head_dim_qk: i32,
        /// Elements of a value's or output's row, padded to 32, 64, 128, 256 or 512.
        pub head_dim_v: i32,
        /// Number of waves that share the columns of a row: 4 if a row is longer than 256, otherwise 1.
        pub column_waves: i32,
        /// Whether V is the first 512 columns of K, so that K is read once for both.
        pub v_in_k: bool,
        /// Whether a row of Q or K is shorter than its padded length.
        pub ends_early: bool,
        /// Whether there may be a soft-cap, a bias or slopes.
        pub modifies: bool,
        /// Way of loading Q, K and V.
        pub load: LoadPath,
        /// Whether each token's keys come from a list, or from two caches.
        pub listed: bool,
        /// Whether rows of an FP8 cache have scales of their own.
        pub scaled: bool,
        /// Whether they come from two caches.
        pub two_caches: bool,
        /// Bytes of a key's row, 584 or 656, if the cache has rows of bytes; 0 if rows have elements of type
        /// `stored`.
        pub row_bytes: i32,
    }
}

abi_spec! {
    /// Tile of the decode kernel: its tuning parameters.
    pub struct CdnaDecodeTile {
        /// Number of keys of a part; with `shares` the least number of a stretch.
        pub split_keys: i32 = Takes::multiples(32, 32, 1 << 24).tuned_over(&[128, 256, 512, 1024]),
        /// Number of equal stretches into which all sequences' keys are cut together. For each block of rows and KV
        /// head one work item reads a stretch. 0: each sequence's keys are cut into parts instead.
        pub shares: i32 = Takes::within(0, MOST_SHARES as i32),
    }
}

abi_struct! {
    /// Arguments of both launches of every decode kernel.
    pub struct CdnaDecodeParams {
        /// Parameters of the attention call.
        pub call: CdnaParams,
        /// O of the parts, `[parts, num_heads_q, seqlen_q]` rows of padded length. With parts, the index is the
        /// part's number times the batch plus the sequence; with stretches, it follows from the stretch and the
        /// part within it.
        pub o: DevPtr<f32>,
        /// Maximum and sum of exponentials of each row of the parts.
        pub stats: DevPtr<f32>,
        /// Record of how stretches were assigned, which the first launch writes for the second (`pieces.h`); null
        /// if each work item has one part.
        pub shares: DevPtr<i32>,
        /// Words of the tree mask, u32 `[batch, seqlen_q, words]`, or packed; null: no tree mask.
        pub tree_mask: DevPtr<u32>,
        /// Number of rows of the tree mask for each sequence.
        pub tree_mask_batch: i64,
        /// Number of u32 words in a query's row of the tree mask.
        pub tree_mask_words: i32,
        /// Number of keys of a part; with stretches the least number of a stretch.
        pub part_keys: i32,
        /// Number of parts of the longest sequence, or of stretches.
        pub num_parts: i32,
        /// Number of work items when each compute unit has one workgroup of them.
        pub round: i32,
        /// Number of blocks of rows of the longest query.
        pub row_blocks: i32,
        /// Number of work items of the first launch: each is a wave, or a workgroup of waves that share rows.
        pub num_waves: i32,
        /// Number of waves of a workgroup.
        pub waves_of_group: i32,
        /// Number of dies to which work items with different keys are assigned round-robin; items with the same
        /// keys stay on one die.
        pub num_xcds: i32,
        /// Number of keys that determines P's scale; 0: that of the sequence.
        pub scale_keys: i32,
        /// Padding that makes the size a multiple of eight bytes.
        pub reserved: i32,
    }
}

abi_struct! {
    /// Arguments of the decode kernel of an FP8 cache whose rows have scales of their own.
    pub struct ScaledDecodeParams {
        /// Arguments of the kernel without scales.
        pub decode: CdnaDecodeParams,
        /// Scales of K's rows.
        pub k_scale: View,
        /// Scales of V's rows.
        pub v_scale: View,
        /// Number of adjacent rows that share a scale.
        pub scale_block: i32,
        /// Padding that makes the size a multiple of eight bytes.
        pub reserved: i32,
    }
}

impl ScaledDecodeParams {
    /// Arguments with the scales of the call's rows; `None` where rows have none.
    pub(crate) fn of(problem: &FwdProblem, args: &FwdArgs<'_>, decode: &CdnaDecodeParams) -> Option<Self> {
        let scales = problem.cache.scales?;
        let packed = problem.layout.kv == KvLayout::Packed;
        let [k_scale, v_scale] =
            args.scale_slices().map(|slice| slice.map_or(0, |slice| slice.as_ptr() as u64));
        Some(Self {
            decode: *decode,
            k_scale: View::new(k_scale, scales.k, packed),
            v_scale: View::new(v_scale, scales.v, packed),
            scale_block: scales.block.cast_signed(),
            reserved: 0,
        })
    }
}

abi_struct! {
    /// Arguments of both launches of a decode kernel over lists of keys.
    pub struct ListDecodeParams {
        /// Arguments of the kernel without lists.
        pub decode: CdnaDecodeParams,
        /// Parameters of the lists of keys.
        pub lists: ListParams,
    }
}

abi_struct! {
    /// Arguments of both launches of a decode kernel over two caches; they begin as those over lists do.
    pub struct TwoDecodeParams {
        /// Arguments of the kernel without lists.
        pub decode: CdnaDecodeParams,
        /// Parameters of both caches.
        pub caches: TwoCachesParams,
    }
}

/// The kernel, with all that was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CdnaDecode {
    spec: CdnaDecodeSpec,
    /// Tile of the kernel.
    pub(crate) tile: CdnaDecodeTile,
    parts: Parts,
    num_xcds: u32,
}

/// Number of waves in a workgroup for this many blocks of rows.
fn waves_of_rows(row_blocks: u64) -> u32 {
    row_blocks.clamp(1, MOST_WAVES.into()) as u32
}

/// Number of dies among which this many sets of keys are spread evenly: a power of two, at most the architecture's
/// number.
fn dies(sets_of_keys: u64, arch: Arch) -> u32 {
    1 << sets_of_keys.trailing_zeros().min(arch.num_xcds().unsigned_abs().trailing_zeros())
}

fn spec(problem: &FwdProblem) -> CdnaDecodeSpec {
    let dims = problem.dims;
    // Each wave has whole steps of 16 columns. This holds for quantised caches too, whose sums must equal those of
    // a 16-bit cache.
    let (column_waves, whole_qk) =
        if shares_rows(problem) { (COLUMN_WAVES, EDGE / 2 * COLUMN_WAVES) } else { (1, EDGE) };
    let padded = |dim: u32| dim.max(1).next_multiple_of(whole_qk) as i32;
    let head_dim_v = dims.head_dim_v.max(1).next_power_of_two().max(EDGE * column_waves);
    let wide = loads_wide(problem, head_dim_v / column_waves / EDGE);
    let load = if wide { LoadPath::Chunks } else { LoadPath::Element };
    let head_dim_v = head_dim_v as i32;
    CdnaDecodeSpec {
        dtype: problem.dtypes.qk,
        stored: problem.stored_k(),
        head_dim_qk: padded(dims.head_dim_qk),
        head_dim_v,
        column_waves: column_waves as i32,
        // FP8 K and V have a descale each, so their columns are converted separately and V is not taken from K's
        // block.
        v_in_k: wide
            && problem.cache.v_in_k
            && problem.cache.dtype.is_none()
            && LATENT.contains(&(dims.head_dim_qk, dims.head_dim_v)),
        ends_early: dims.head_dim_qk as i32 != padded(dims.head_dim_qk),
        modifies: problem.score.softcap.is_some() || problem.score.bias != Bias::None,
        load,
        listed: problem.walks_lists(),
        scaled: problem.cache.scales.is_some(),
        two_caches: problem.walks_caches(),
        row_bytes: problem.cache.rows.map_or(0, |rows| rows.row_bytes().cast_signed()),
    }
}

/// Whether wide loads are possible: rows are whole chunks, a lane's part of V (this many columns) is one load, and
/// every row begins at a dword.
fn loads_wide(problem: &FwdProblem, columns: u32) -> bool {
    let elems_of_chunk = 16 / problem.stored_k().size_bytes() as u32;
    problem.layout.v == VLayout::RowMajor
        && problem.dims.head_dim_qk.is_multiple_of(elems_of_chunk)
        && problem.dims.head_dim_v.is_multiple_of(columns)
        // Rows of bytes have strides in bytes.
        && strides_are_dwords(problem, if problem.cache.rows.is_some() { 1 } else { problem.stored_k().size_bytes() })
}

impl CdnaDecode {
    /// Number of waves in a workgroup. Waves with the same keys for other rows form a workgroup and share its
    /// compute unit's cache; other waves are separate workgroups, so that few of them spread over many compute
    /// units. Waves that share the columns of rows are one work item.
    fn waves_of_group(&self) -> u32 {
        if self.column_waves() > 1 { 1 } else { waves_of_rows(self.parts.row_blocks.into()) }
    }

    fn column_waves(&self) -> u32 {
        self.spec.column_waves.unsigned_abs()
    }
}

impl Split for CdnaDecode {
    const NAME: &'static str = NAME;
    const MERGE: &'static str = MERGE;
    const HEADER: &'static str = HEADER;
    const IS_RDNA: bool = false;

    type Tile = CdnaDecodeTile;

    fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Self, Refusal> {
        needs_mfma(device.arch, NAME)?;
        takes(NAME, problem)?;
        leaves_to_forward(NAME, problem, device, options)?;
        if !spec(problem).v_in_k {
            refuse_rows_of_bytes(NAME, problem)?;
        }
        let walked = walked(problem);
        let blocks = row_blocks(&walked, EDGE);
        let (of_a_unit, of_a_group, least) = if shares_rows(problem) {
            (SHARED_GROUPS_OF_A_UNIT, 1, LEAST_SHARED_KEYS)
        } else {
            (SIMDS * WAVES_OF_A_SIMD, waves_of_rows(blocks), LEAST_KEYS)
        };
        let room = Room { device, of_a_unit, of_a_group, least, edge: EDGE };
        let of_sequence = blocks.saturating_mul(problem.dims.num_heads_kv.into());
        let mut asked = CdnaDecodeTile { split_keys: 0, shares: -1 };
        for (name, value) in &options.tile {
            asked.set_field(name, value).map_err(|text| Refusal::new(NAME, format!("tile {text}")))?;
        }
        let asked = (asked.split_keys.unsigned_abs(), u32::try_from(asked.shares).ok());
        let cut = Cut::of(NAME, &walked, options, &room, of_sequence, asked)?;
        let tile = CdnaDecodeTile { split_keys: cut.keys as i32, shares: cut.shares as i32 };
        let spec = spec(problem);
        let parts = Parts::of(NAME, &walked, device.arch, EDGE, (cut, spec.head_dim_v), options)?;
        let num_xcds = dies((parts.pieces / parts.row_blocks.max(1)).into(), device.arch);
        Ok(Self { spec, tile, parts, num_xcds })
    }

    fn tile(&self) -> CdnaDecodeTile {
        self.tile
    }

    fn parts(&self) -> &Parts {
        &self.parts
    }

    fn source(&self) -> KernelSource {
        // Rows of 256 need more than half of a SIMD's registers; the quarters of longer rows do not.
        let is_wide = self.spec.head_dim_qk.max(self.spec.head_dim_v) > 128;
        // Modifiers together with list indices would spill: 16 registers on gfx950 at head dimension 128, 40 on
        // gfx90a at 576.
        let is_busy =
            self.spec.listed && self.spec.modifies && self.spec.head_dim_qk.max(self.spec.head_dim_v) > 64;
        let waves = if is_busy || is_wide && self.column_waves() == 1 { 1 } else { WAVES_OF_A_SIMD };
        let (least, most) = match self.column_waves() {
            1 => (WAVE_THREADS, MOST_WAVES * WAVE_THREADS),
            _ => (self.num_threads(), self.num_threads()),
        };
        let entry = Entry {
            include: HEADER,
            constants: &[("kSpec", &self.spec)],
            bounds: &format!(
                "__attribute__((amdgpu_flat_work_group_size({least}, {most}), \
                 amdgpu_waves_per_eu({waves}, {waves})))"
            ),
            params: self.parts.keys.entry_params(),
            call: &format!("cdna::decode::run<kSpec>({});", self.parts.keys.entry_argument()),
        };
        crate::source(&entry, CDNA)
    }

    fn num_threads(&self) -> u32 {
        self.waves_of_group() * self.column_waves() * WAVE_THREADS
    }

    fn workgroups(&self) -> u64 {
        self.parts.pieces.div_ceil(self.waves_of_group()).into()
    }

    fn load(&self) -> LoadPath {
        self.spec.load
    }

    fn for_any_address(&self) -> Option<Self> {
        let spec = CdnaDecodeSpec { load: LoadPath::Element, v_in_k: false, ..self.spec };
        (spec != self.spec).then_some(Self { spec, ..*self })
    }

    fn params(&self, problem: &FwdProblem, args: &FwdArgs<'_>, fwd: &FwdParams) -> CdnaDecodeParams {
        self.parts.params(problem, args, fwd, (self.waves_of_group(), self.num_xcds))
    }

    fn details(&self, problem: &FwdProblem) -> Vec<(&'static str, String)> {
        let Self { spec, tile, parts, .. } = self;
        let mut details =
            vec![("tile", format!("{EDGE} rows, {EDGE} keys a step, split_keys {}", tile.split_keys))];
        details.extend(parts.details(problem));
        details.push(("loads", format!("{:?}, K and V straight to registers", spec.load)));
        if spec.column_waves > 1 {
            let once = if spec.v_in_k { "; K is read once, for its values too" } else { "" };
            details.push((
                "columns",
                format!("a quarter of a row's to each of {} waves{once}", spec.column_waves),
            ));
        }
        details.extend(cache_details(problem));
        details
    }
}

/// `fmha/cdna/decode/tile.h`: the types that this file shares with the device.
pub(crate) fn tile_header() -> Header {
    let definitions = [
        CdnaDecodeSpec::c_definition(),
        CdnaDecodeParams::c_definition(),
        ScaledDecodeParams::c_definition(),
        ListDecodeParams::c_definition(),
        TwoDecodeParams::c_definition(),
    ];
    Header::shared(
        "fmha/cdna/decode/tile.h",
        "fmha::cdna",
        &["fmha/cdna/tile.h", "fmha/lists.h", "fmha/two_caches_params.h"],
        &definitions,
    )
}
