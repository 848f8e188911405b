//! The loss that trains an indexer, on mma.sync, for every architecture from sm_80 on: its tile, its entries, its
//! launches.
//!
//! A CTA has all heads of a query (`fmha/sm80/index/loss.cuh`). dK is added to in memory in no order; or, if sums must
//! be ordered, computed by CTAs that each have some keys and walk all queries.

use fmha_core::abi::AbiLiteral as _;
use fmha_core::index_loss_params::IndexLossSpec;
use fmha_core::memory::Size;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::sparse::IndexLossProblem;
use fmha_core::{DType, ScoreSums, abi_memory, abi_spec};
use fmha_gpu::{Grid, IndexProducts, Launch, MultipliesLists, Operand, Stage};

use crate::nvidia::{DeviceFacts, Nvidia};
use crate::sm80_bwd::tile_size;
use crate::sm80_lists_bwd;

/// The kernel's name.
pub const NAME: &str = "sm80_index_loss";

/// The header that the entries include.
const HEADER: &str = "fmha/sm80/index/loss.cuh";

/// Warps of a CTA.
const WARPS: i32 = 8;

/// Entries of a list that a CTA takes at a time.
const COLUMNS: i32 = 64;

/// Most heads of a CTA, and most elements of its rows of q.
const MOST_HEADS: u32 = 128;
const MOST_ELEMS: u32 = 128 * 128;

/// Keys of a CTA that alone sums their dK, at most.
const MOST_RANGE: u64 = 1024;

abi_spec! {
    /// How the kernel computes.
    pub struct IndexLossTile {
        /// Heads of a query, 16 to a row of fragments; a power of two.
        pub rows: i32,
        /// Entries of a block.
        pub columns: i32,
        /// Warps of a CTA.
        pub warps: i32,
        /// Keys of a CTA that alone sums their dK; 0 if sums have no order.
        pub range: i32,
    }
}

abi_memory! {
    fn memory_text() as SmemParts;
    /// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
    pub const fn smem_bytes(&self, spec: &IndexLossSpec) of tile: IndexLossTile {
        /// Keys of the CTA's own range that a query's list names.
        range: "KeysOfRange<tile.range>" if self.range > 0 => Size::words(3 * self.range + self.range / 32);
        q: "Rows<spec, tile.rows>" => tile_size(self.rows, spec.head_dim);
        k: "Rows<spec, tile.columns>" => tile_size(self.columns, spec.head_dim);
        /// G: gradients of products.
        factors: "SmemTile<uint16_t, tile.rows, tile.columns>" => tile_size(self.rows, self.columns);
        weights: "float" [self.rows] => Size::WORD;
        /// The block's keys; -1: absent.
        keys: "int32_t" [self.columns] => Size::WORD;
        /// Gradients of the block's scores.
        ds: "float" [self.columns] => Size::WORD;
        of_groups: "GroupSums<tile.rows, tile.columns>" => Size::words(self.rows / 16 * self.columns);
        of_warps: "WarpSums<tile.warps>" => Size::words(16 * self.warps);
    }
}

impl IndexLossTile {
    /// The tile of a problem; with `ordered` for CTAs that have keys of their own.
    #[must_use]
    pub fn of(problem: &IndexLossProblem, num_sms: u32, ordered: bool) -> Self {
        let rows = problem.num_heads.next_power_of_two().max(16).cast_signed();
        // Two CTAs for each multiprocessor, in whole groups of 32 keys.
        let even = problem.keys().div_ceil(2 * u64::from(num_sms.max(1)));
        let range = even.next_multiple_of(32).clamp(32, MOST_RANGE) as i32;
        Self { rows, columns: COLUMNS, warps: WARPS, range: if ordered { range } else { 0 } }
    }
}

/// The kernel.
#[derive(Clone, Copy, Debug)]
pub struct Sm80IndexLoss;

impl<V: Nvidia> MultipliesLists<V> for Sm80IndexLoss {
    const NAME: &'static str = NAME;
    const IS_FALLBACK: bool = false;

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        crate::sm80::recipe::needs(facts)
    }

    fn takes(problem: &IndexLossProblem, facts: &DeviceFacts) -> Result<(), String> {
        let IndexLossProblem { num_heads, head_dim, dtype_q, dtype_k, k_scale, .. } = *problem;
        for (field, dtype) in [("dtype_q", dtype_q), ("dtype_k", dtype_k)] {
            if dtype != DType::Bf16 {
                return Err(format!(
                    "{field} {dtype} is not bf16, in which gradients of products keep their range"
                ));
            }
        }
        if k_scale {
            return Err("k_scale true: keys have no scales".to_owned());
        }
        if !head_dim.is_multiple_of(8) || head_dim > 256 {
            return Err(format!("head_dim {head_dim} is not a multiple of 8 of at most 256"));
        }
        if num_heads > MOST_HEADS || num_heads.next_power_of_two() * head_dim > MOST_ELEMS {
            return Err(format!(
                "num_heads {num_heads} of head_dim {head_dim}: a CTA has at most {MOST_HEADS} heads, and \
                 {MOST_ELEMS} elements of them"
            ));
        }
        let tile = IndexLossTile::of(problem, facts.num_sms, true);
        facts.has_room_for(&tile, tile.smem_bytes(&IndexLossSpec::of(problem)), 1)
    }

    fn alignment(operand: Operand) -> u64 {
        if matches!(operand, Operand::Q | Operand::K) { 16 } else { 1 }
    }

    fn launches(
        problem: &IndexLossProblem,
        facts: &DeviceFacts,
        ordered: bool,
    ) -> Result<IndexProducts, String> {
        let spec = IndexLossSpec::of(problem);
        let launch = |at: (Stage, &'static str), function, ctas: u64, tile: IndexLossTile| {
            let groups = i32::try_from(ctas).map_err(|_| format!("{ctas} CTAs are more than a grid has"))?;
            let shared_bytes = tile.smem_bytes(&spec).unsigned_abs();
            Ok::<_, String>(Launch {
                stage: at.0,
                kernel: at.1,
                source: source(&spec, &tile, function),
                grid: Grid::new(groups.unsigned_abs(), 32 * tile.warps.unsigned_abs()),
                shared_bytes,
                tiles: ctas,
                tiles_at_once: facts.num_sms.into(),
            })
        };
        let walks = IndexLossTile::of(problem, facts.num_sms, false);
        let ordered = ordered && problem.write_dk;
        // Where keys have CTAs of their own, those of queries sum dQ and dw alone.
        let mut gradients = Vec::new();
        if problem.write_dq || problem.write_dweights || (problem.write_dk && !ordered) {
            let function = if ordered { "query_gradients" } else { "gradients" };
            gradients.push(launch(
                (Stage::Gradients, "sm80_index_gradients"),
                function,
                problem.rows(),
                walks,
            )?);
        }
        if ordered {
            let tile = IndexLossTile::of(problem, facts.num_sms, true);
            let ranges = u64::from(problem.seqlen_k.div_ceil(tile.range.unsigned_abs()));
            let ctas = u64::from(problem.batch) * ranges;
            gradients.push(launch((Stage::Gradients, "sm80_index_keys"), "keys", ctas, tile)?);
        }
        let scores = launch((Stage::Main, NAME), "scores", problem.rows(), walks)?;
        Ok(IndexProducts { scores, gradients, adds_to_keys: problem.write_dk && !ordered })
    }

    fn words() -> &'static str {
        "mma.sync, a CTA to a query, gathers 64 entries at a time"
    }

    fn sums(problem: &IndexLossProblem, facts: &DeviceFacts) -> ScoreSums {
        facts.score_sums.of(problem.dtype_q)
    }
}

/// Source text of a launch.
#[must_use]
pub fn source(spec: &IndexLossSpec, tile: &IndexLossTile, function: &str) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let call = format!(
        "static_assert(sizeof(sm80::index_loss::Smem<kSpec, kTile>) == {}, \"Smem: host and device disagree\"); \
         sm80::index_loss::{function}<kSpec, kTile>(p);",
        tile.smem_bytes(spec)
    );
    let entry = Entry {
        include: HEADER,
        constants: &constants,
        bounds: &format!("__launch_bounds__({})", 32 * tile.warps),
        params: "const __grid_constant__ IndexLossParams p",
        call: &call,
    };
    crate::source(entry.render(), || {
        let own = [IndexLossTile::c_definition()];
        let [host, memory] = sm80_lists_bwd::host_headers();
        [
            host,
            memory,
            fmha_core::lists::header(),
            fmha_core::index_loss_params::header(),
            Header::shared("fmha/sm80_index_loss_host.h", "fmha", &["fmha/portable.h"], &own),
            Header::shared("fmha/sm80_index_loss_memory.h", "fmha::sm80::index_loss", &[], &[memory_text()]),
        ]
    })
}
