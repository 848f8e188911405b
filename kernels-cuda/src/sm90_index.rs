//! Scores of an indexer on Hopper's wgmma: a warpgroup holds keys in registers, and multiplies them with tokens that
//! are loaded to shared memory one after another.

use fmha_core::abi::AbiLiteral as _;
use fmha_core::choose_params::IndexSpec;
use fmha_core::error::Result;
use fmha_core::source::{Entry, Header, KernelSource};
use fmha_core::sparse::{IndexKeys, IndexStrides, Indexer, ValidChoose};
use fmha_core::tune::TileOptions;
use fmha_core::{Call, DType, ScoreSums, abi_spec};
use fmha_gpu::{Grid, Launch, Operand, ScoresIndex, Stage};

use crate::nvidia::{DeviceFacts, Nvidia};
use crate::operands::{ALIGN, swizzle_span};
use crate::tma::{TensorMap, TensorMapFacts, stride_bytes};

/// The kernel's name.
pub const NAME: &str = "sm90_index";

/// Number of keys in a product: the device's `kRows`.
const ROWS: i32 = 64;

/// Most keys that one TMA instruction loads.
const MOST_BOX_KEYS: u32 = 128;

/// Most heads: they are the columns of one product, whose sums a thread holds twice.
const MOST_HEADS: u32 = 64;

/// Number of tokens of a piece of work: the device's `kPieceRows`.
const PIECE_ROWS: u32 = 32;

abi_spec! {
    /// Tile of the kernel: the choices with which it computes a problem.
    pub struct Sm90IndexTile {
        /// Number of warpgroups that run the matrix products.
        pub warpgroups: i32,
        /// Number of tiles of 64 keys that a warpgroup has; it is even.
        pub warpgroup_tiles: i32,
        /// Number of tiles of keys in shared memory.
        pub stages_k: i32,
        /// Number of tokens in shared memory.
        pub stages_q: i32,
        /// Number of tokens whose products are issued without a gap.
        pub run_tokens: i32,
        /// Number of keys that one TMA copy loads.
        pub box_keys: i32,
    }
}

impl Sm90IndexTile {
    /// The tile of an indexer, with fields that the caller sets.
    ///
    /// # Errors
    /// A field that is unknown or out of its range.
    pub fn of(indexer: &Indexer, fields: &TileOptions) -> Result<Self, String> {
        let row = indexer.head_dim as i32 * indexer.dtype_k.size_bytes() as i32;
        // A thread holds a row's elements for every 64 keys in registers: 32 or 64 of them.
        let mut tile = Self {
            warpgroups: 2,
            warpgroup_tiles: if row > 128 { 2 } else { 4 },
            stages_k: 2,
            stages_q: 4,
            run_tokens: 2,
            box_keys: box_keys(indexer).cast_signed(),
        };
        for (name, value) in fields {
            let (field, range) = match name.as_str() {
                "warpgroups" => (&mut tile.warpgroups, 2..=3),
                "warpgroup_tiles" => (&mut tile.warpgroup_tiles, 2..=4),
                "stages_k" => (&mut tile.stages_k, 1..=8),
                "stages_q" => (&mut tile.stages_q, 2..=16),
                "run_tokens" => (&mut tile.run_tokens, 1..=4),
                _ => return Err(format!("tile {name}={value} is unknown (known: {})", FIELDS.join(", "))),
            };
            let number = value.parse().ok().filter(|number| range.contains(number));
            *field = number.ok_or_else(|| format!("tile {name}={value} is not in {range:?}"))?;
        }
        if tile.warpgroup_tiles % 2 != 0 {
            return Err(format!("tile warpgroup_tiles={} is not even", tile.warpgroup_tiles));
        }
        if tile.run_tokens > tile.stages_q {
            let Self { run_tokens, stages_q, .. } = tile;
            return Err(format!("tile run_tokens={run_tokens} is more than stages_q={stages_q}"));
        }
        Ok(tile)
    }

    /// Number of keys of a CTA.
    #[must_use]
    pub fn block_n(&self) -> u64 {
        (self.warpgroups * self.warpgroup_tiles * ROWS).unsigned_abs().into()
    }

    /// Number of threads of a CTA: the warpgroups that multiply, and one that loads.
    #[must_use]
    pub fn num_threads(&self) -> u32 {
        ((self.warpgroups + 1) * 128).unsigned_abs()
    }

    /// Shared memory of a CTA: `sizeof(Smem)`.
    #[must_use]
    pub fn smem_bytes(&self, spec: &IndexSpec) -> u64 {
        let [stages_k, stages_q, heads, dim] = [self.stages_k, self.stages_q, spec.num_heads, spec.head_dim]
            .map(|x| u64::from(x.unsigned_abs()));
        let row = dim * spec.dtype_k.size_bytes();
        let tile = |rows: u64| (rows * row).next_multiple_of(1024);
        let scales = if spec.k_scale { self.block_n() } else { 1 };
        let words = stages_q * heads * 4 + stages_k * scales * 4;
        let bytes = stages_k * tile(self.block_n()) + stages_q * tile(heads) + words.next_multiple_of(8);
        (bytes + 16 * (stages_k + stages_q)).next_multiple_of(1024)
    }
}

/// Number of keys that TMA loads at once: those of a page, or a divisor of it that divides a tile.
fn box_keys(indexer: &Indexer) -> u32 {
    match indexer.keys {
        IndexKeys::Batch => MOST_BOX_KEYS,
        IndexKeys::Paged { page_size, .. } => {
            MOST_BOX_KEYS.min(1 << page_size.max(1).trailing_zeros().min(16))
        }
    }
}

/// Fields of the tile that a caller may set.
const FIELDS: &[&str] = &["warpgroups", "warpgroup_tiles", "stages_k", "stages_q", "run_tokens"];

/// The kernel.
#[derive(Clone, Copy, Debug)]
pub struct Sm90Index;

/// A kernel argument: `Maps`.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub struct IndexMaps {
    q: TensorMap,
    k: TensorMap,
}

/// Refuses strides that TMA does not support.
fn takes_strides(strides: IndexStrides, dtype: DType) -> Result<(), String> {
    for (axis, stride) in [("outer", strides.outer), ("key", strides.key)] {
        let bytes = stride * dtype.size_bytes();
        if !bytes.is_multiple_of(ALIGN) || bytes == 0 || bytes >= 1 << 40 {
            return Err(format!(
                "strides_k.{axis} of {bytes} bytes is not a positive multiple of {ALIGN} below 2^40"
            ));
        }
    }
    Ok(())
}

impl<V: Nvidia> ScoresIndex<V> for Sm90Index {
    const NAME: &'static str = NAME;
    const IS_FALLBACK: bool = false;
    const FIELDS: &'static [&'static str] = FIELDS;
    type Beside = IndexMaps;

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        facts.needs(facts.instructions.wgmma, "wgmma")
    }

    fn takes(indexer: Option<&Indexer>) -> Result<(), String> {
        let Some(indexer) = indexer else {
            return Err("source given: it scores keys for an indexer".to_owned());
        };
        let Indexer { head_dim, num_heads, dtype_q, dtype_k, .. } = *indexer;
        if !matches!(dtype_q, DType::F16 | DType::Bf16 | DType::E4m3Fn) {
            return Err(format!("dtype_q {dtype_q} is not f16, bf16 or e4m3"));
        }
        if dtype_q != dtype_k {
            return Err(format!("dtype_k {dtype_k} is not dtype_q {dtype_q}"));
        }
        if !head_dim.is_multiple_of(32) || head_dim > 128 {
            return Err(format!("head_dim {head_dim} is not a multiple of 32 of at most 128"));
        }
        if !num_heads.is_multiple_of(8) || num_heads > MOST_HEADS {
            return Err(format!("num_heads {num_heads} is not a multiple of 8 of at most {MOST_HEADS}"));
        }
        if let IndexKeys::Paged { page_size, .. } = indexer.keys
            && !page_size.is_multiple_of(8)
        {
            return Err(format!("page_size {page_size} is not a multiple of 8"));
        }
        takes_strides(indexer.strides_k, dtype_k)
    }

    fn alignment(operand: Operand) -> u64 {
        if matches!(operand, Operand::Q | Operand::K) { ALIGN } else { 1 }
    }

    fn sums(indexer: Option<&Indexer>, facts: &DeviceFacts) -> ScoreSums {
        indexer.map_or(ScoreSums::F32, |indexer| facts.score_sums.of(indexer.dtype_k))
    }

    fn launch(
        problem: &ValidChoose,
        indexer: &Indexer,
        rows: u64,
        facts: &DeviceFacts,
        fields: &TileOptions,
    ) -> Result<Option<Launch>, String> {
        let (spec, tile) = (IndexSpec::of(indexer), Sm90IndexTile::of(indexer, fields)?);
        let shared_bytes = tile.smem_bytes(&spec);
        facts.has_room_for(&tile, shared_bytes as i32, 1)?;
        // Number of sequences to which the rows may belong, and of groups of rows in each.
        let of_sequence = u64::from(problem.seqlen_q).clamp(1, rows.max(1));
        let sequences = (rows.div_ceil(of_sequence) + 1).min(problem.batch.into());
        let blocks = u64::from(problem.seqlen_k).div_ceil(tile.block_n());
        let pieces = blocks * sequences * of_sequence.div_ceil(PIECE_ROWS.into());
        i32::try_from(pieces).map_err(|_| format!("{pieces} pieces are more than the kernel counts"))?;
        let ctas = (pieces as u32).min(facts.num_sms);
        let launch = Launch {
            stage: Stage::Main,
            kernel: NAME,
            source: source(&spec, &tile),
            grid: Grid::new(ctas, tile.num_threads()),
            shared_bytes: shared_bytes as u32,
            tiles: pieces,
            tiles_at_once: facts.num_sms.into(),
        };
        Ok(Some(launch))
    }

    fn beside(call: &Call<'_, ValidChoose>, indexer: &Indexer, _: &TileOptions) -> Result<IndexMaps> {
        let problem = call.problem;
        // Without rows or keys no CTA runs, so no tensor map is read.
        if problem.rows() == 0 || problem.seqlen_k == 0 {
            return Ok(IndexMaps { q: TensorMap::UNREAD, k: TensorMap::UNREAD });
        }
        let address =
            |slice: &Option<fmha_core::DevSlice<'_>>| slice.map_or(0, |slice| slice.as_ptr() as u64);
        let size = indexer.dtype_k.size_bytes();
        let row = u64::from(indexer.head_dim) * size;
        let span = swizzle_span(indexer.head_dim.cast_signed(), indexer.dtype_k).unsigned_abs();
        let [heads, dim] = [indexer.num_heads, indexer.head_dim].map(u64::from);
        let q = TensorMapFacts {
            name: "q",
            dtype: indexer.dtype_q,
            address: address(&call.args.q),
            dims: [dim, heads, problem.rows(), 1],
            strides_bytes: [row, row * heads, 1 << 20],
            box_dims: [span, indexer.num_heads, 1, 1],
        };
        let [outer, inner] = match indexer.keys {
            IndexKeys::Batch => [problem.batch, problem.seqlen_k],
            IndexKeys::Paged { page_size, num_pages, .. } => [num_pages, page_size],
        };
        let stride = |stride: u64, extent| stride_bytes(stride.cast_signed(), extent, size);
        let k = TensorMapFacts {
            name: "k",
            dtype: indexer.dtype_k,
            address: address(&call.args.k),
            dims: [dim, u64::from(inner.max(1)), u64::from(outer.max(1)), 1],
            strides_bytes: [
                stride(indexer.strides_k.key, inner),
                stride(indexer.strides_k.outer, outer),
                1 << 20,
            ],
            box_dims: [span, box_keys(indexer), 1, 1],
        };
        Ok(IndexMaps { q: q.encode::<V::Driver>()?, k: k.encode::<V::Driver>()? })
    }

    fn words() -> &'static str {
        "wgmma, a warpgroup's keys in registers; sums over heads in f32, in one order"
    }
}

/// `fmha/sm90_index.h`: the types that this file shares with the device.
fn header() -> Header {
    Header::shared("fmha/sm90_index.h", "fmha", &["fmha/portable.h"], &[Sm90IndexTile::c_definition()])
}

/// Source text of the kernel.
#[must_use]
pub fn source(spec: &IndexSpec, tile: &Sm90IndexTile) -> KernelSource {
    use crate::wgmma::{OperandA, Sums, WgmmaShape};
    let entry = Entry {
        include: "fmha/sm90/index/main.cuh",
        constants: &[("kSpec", spec), ("kTile", tile)],
        bounds: &format!("__launch_bounds__({}, 1)", tile.num_threads()),
        params: "const __grid_constant__ ChooseParams p, const __grid_constant__ sm90_index::Maps maps",
        call: &format!(
            "static_assert(sizeof(sm90_index::Smem<kSpec, kTile>) <= {}, \"host and device disagree\"); \
             sm90_index::index_scores<kSpec, kTile>(p, maps);",
            tile.smem_bytes(spec)
        ),
    };
    let shape =
        WgmmaShape { dtype: spec.dtype_k, n: spec.num_heads, a: OperandA::Registers, sums: Sums::F32 };
    let shapes = [shape, WgmmaShape { a: OperandA::Shared, ..shape }];
    crate::source(entry.render(), move || {
        [fmha_core::choose_params::header(), header(), crate::wgmma::header(&shapes)]
    })
}
