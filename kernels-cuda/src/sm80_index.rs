//! Scores of an indexer on mma.sync, for every architecture from sm_80 on: a warp holds keys in registers, and
//! multiplies them with one row of q after another.

use fmha_core::abi::AbiLiteral as _;
use fmha_core::choose_params::IndexSpec;
use fmha_core::source::{Entry, Header, KernelSource};
use fmha_core::sparse::{IndexStrides, Indexer, ValidChoose};
use fmha_core::tune::TileOptions;
use fmha_core::{Call, DType, abi_spec};
use fmha_gpu::{Grid, Launch, Operand, ScoresIndex, Stage};

use crate::nvidia::{DeviceFacts, Nvidia, row_launch};

/// The kernel's name.
pub const NAME: &str = "sm80_index";

/// Threads of a CTA. A CTA has half as many if a sequence has few rows.
const NUM_THREADS: u32 = 256;

/// Fewest rows of a sequence for which a CTA has all its threads.
const SHORT_ROWS: u32 = 8;

/// Shared memory that a kernel has without asking for more, bytes.
const SHARED_BYTES: u32 = 48 << 10;

/// Most rows of q that a CTA multiplies with its keys.
const MOST_ROWS: u64 = 64;

abi_spec! {
    /// Tile of the kernel: the choices with which it computes a problem.
    pub struct IndexTile {
        /// Threads of a CTA.
        pub num_threads: i32,
        /// Keys of a warp, whose rows are in its registers.
        pub warp_keys: i32,
        /// Whether the device has an instruction that converts e4m3.
        pub converts_fp8: bool,
    }
}

impl IndexTile {
    fn of(indexer: &Indexer, num_threads: u32, facts: &DeviceFacts) -> Self {
        // A thread has head_dim / 4 registers of eight keys: 32 keys of 128 elements are 64.
        let warp_keys = if indexer.head_dim <= 128 { 32 } else { 16 };
        // A thread has the weight of one head.
        let num_threads = num_threads.max(padded_heads(indexer).next_multiple_of(64)) as i32;
        Self { num_threads, warp_keys, converts_fp8: facts.instructions.converts_fp8 }
    }

    fn block_n(&self) -> u64 {
        (self.num_threads / 32 * self.warp_keys) as u64
    }
}

/// The kernel.
#[derive(Clone, Copy, Debug)]
pub struct Sm80Index;

/// Number of heads, rounded up to whole rows of a product.
fn padded_heads(indexer: &Indexer) -> u32 {
    indexer.num_heads.next_multiple_of(16)
}

/// Refuses strides with which a key's row, or half a row in FP8, does not begin at a whole word.
fn takes_strides(strides: IndexStrides, dtype: DType) -> Result<(), String> {
    let bytes = if dtype.is_fp8() { 8 } else { 16 };
    for (axis, stride) in [("outer", strides.outer), ("key", strides.key)] {
        let stride = stride * dtype.size_bytes();
        if !stride.is_multiple_of(bytes) {
            return Err(format!("strides_k.{axis} of {stride} bytes is not a multiple of {bytes}"));
        }
    }
    Ok(())
}

impl<V: Nvidia> ScoresIndex<V> for Sm80Index {
    const NAME: &'static str = NAME;
    const IS_FALLBACK: bool = false;
    type Beside = ();

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        if facts.instructions.mma_sync {
            return Ok(());
        }
        Err(format!("{} has no mma.sync of bf16", facts.arch))
    }

    fn takes(indexer: Option<&Indexer>) -> Result<(), String> {
        let Some(indexer) = indexer else {
            return Err("source given: it scores keys for an indexer".to_owned());
        };
        let Indexer { head_dim, num_heads, dtype_q, dtype_k, .. } = *indexer;
        if !head_dim.is_multiple_of(32) || head_dim > 256 {
            return Err(format!("head_dim {head_dim} is not a multiple of 32 of at most 256"));
        }
        for (field, dtype) in [("dtype_q", dtype_q), ("dtype_k", dtype_k)] {
            if !matches!(dtype, DType::F16 | DType::Bf16 | DType::E4m3Fn) {
                return Err(format!("{field} {dtype} is not f16, bf16 or e4m3"));
            }
        }
        if dtype_q != dtype_k && !dtype_q.is_fp8() && !dtype_k.is_fp8() {
            return Err(format!("dtype_k {dtype_k} is not dtype_q {dtype_q}"));
        }
        let heads = padded_heads(indexer);
        let bytes = u64::from(heads) * (u64::from(head_dim) * 4 + 8);
        if heads > NUM_THREADS || bytes > SHARED_BYTES.into() {
            return Err(format!(
                "num_heads {num_heads} of head_dim {head_dim}: two rows of q take {bytes} bytes of shared memory, \
                 more than {SHARED_BYTES}"
            ));
        }
        takes_strides(indexer.strides_k, dtype_k)
    }

    fn alignment(operand: Operand) -> u64 {
        if matches!(operand, Operand::Q | Operand::K) { 16 } else { 1 }
    }

    fn launch(
        problem: &ValidChoose,
        indexer: &Indexer,
        rows: u64,
        facts: &DeviceFacts,
        _: &TileOptions,
    ) -> Result<Option<Launch>, String> {
        // Rows of one sequence reuse the keys in registers. If rows are few, small CTAs, of which a multiprocessor
        // holds more, load keys while others multiply.
        let is_short = problem.seqlen_q < SHORT_ROWS;
        let tile = IndexTile::of(indexer, if is_short { NUM_THREADS / 2 } else { NUM_THREADS }, facts);
        let blocks = u64::from(problem.seqlen_k).div_ceil(tile.block_n());
        // A CTA takes as many rows as leaves every multiprocessor some CTAs.
        let wanted = rows * blocks / (4 * u64::from(facts.num_sms)).max(1);
        let most = MOST_ROWS.min(problem.seqlen_q.into()).max(1);
        let groups = blocks * rows.div_ceil(wanted.clamp(1, most)).max(1);
        let groups = i32::try_from(groups).map_err(|_| format!("{groups} CTAs are more than a grid has"))?;
        let grid = Grid::new(groups.unsigned_abs(), tile.num_threads.unsigned_abs());
        let launch = row_launch((Stage::Main, NAME), source(&IndexSpec::of(indexer), &tile), grid, facts);
        Ok(Some(launch))
    }

    fn beside(_: &Call<'_, ValidChoose>, _: &Indexer, _: &TileOptions) -> fmha_core::Result<()> {
        Ok(())
    }

    fn words() -> &'static str {
        "mma.sync, a warp's keys in registers; f32 sums in one order"
    }
}

/// `fmha/sm80_index.h`: the types that this file shares with the device.
fn header() -> Header {
    Header::shared("fmha/sm80_index.h", "fmha", &["fmha/portable.h"], &[IndexTile::c_definition()])
}

/// Source text of the kernel.
#[must_use]
pub fn source(spec: &IndexSpec, tile: &IndexTile) -> KernelSource {
    // Threads that a multiprocessor should hold: 168 registers each if there are 384. FP8 conversion without an
    // instruction for it needs more.
    let by_hand = !tile.converts_fp8 && (spec.dtype_q.is_fp8() || spec.dtype_k.is_fp8());
    let at_once = if by_hand { 256 } else { 384 };
    let entry = Entry {
        include: "fmha/sm80/index/main.cuh",
        constants: &[("kSpec", spec), ("kTile", tile)],
        bounds: &format!("__launch_bounds__({}, {})", tile.num_threads, at_once / tile.num_threads),
        params: "const __grid_constant__ ChooseParams p",
        call: "sm80::index_scores<kSpec, kTile>(p);",
    };
    crate::source(entry.render(), || [fmha_core::choose_params::header(), header()])
}
