//! `rdna_fwd`: forward on WMMA, gfx1100 and gfx1201.

use fmha_core::abi_spec;
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::source::{Entry, Header, KernelSource};
use fmha_core::{FwdProblem, PlanOptions, Refusal, Shape, Strides, VLayout};

use crate::RDNA;
use fmha_gpu::Operand;

use crate::arch::Arch;
use crate::cdna;
use crate::device::{Device, needs_wmma, refuse};
use crate::forward::recipe::Whole;
use crate::forward::{CdnaSpec, alignment, takes};
use crate::paths::{LoadPath, StorePath};

/// The kernel's name in plans and refusals.
pub(crate) const NAME: &str = "rdna_fwd";
/// Header that the kernel's entry includes.
pub(crate) const HEADER: &str = "fmha/rdna/fwd.h";

/// Rows of a matrix instruction, hence queries of a wave.
const WAVE_ROWS: u32 = 16;
/// Bytes of the widest load of a lane.
const CHUNK: i64 = 16;

abi_spec! {
    /// Tile of the RDNA forward kernel: its tuning parameters.
    pub struct RdnaTile {
        /// Queries of a workgroup: 16 a wave.
        pub block_m: i32 = Takes::multiples(16, 16, 256).tuned_over(&[64, 128]),
        /// Keys of a step of the main loop.
        pub block_n: i32 = Takes::among(&[16, 32, 64]).tuned_over(&[32, 64]),
        /// How Q, K and V are loaded: in chunks of 16 bytes, or by elements.
        pub load: LoadPath = Takes::nothing(),
        /// Way of storing O.
        pub store: StorePath = Takes::nothing(),
        /// Number of waves that share the columns of a row.
        pub column_waves: i32 = Takes::nothing(),
        /// Whether a workgroup has only a part of the keys, so that a second launch merges results.
        pub split: bool = Takes::nothing(),
    }
}

/// The kernel, with all that was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rdna {
    spec: CdnaSpec,
    /// Tile of the kernel.
    pub(crate) tile: RdnaTile,
}

/// Checks that this kernel computes `problem` on `device`, and chooses its tile.
///
/// # Errors
/// The field that it does not support, and its value.
pub(crate) fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Rdna, Refusal> {
    let arch = device.arch;
    needs_wmma(arch, NAME)?;
    takes(problem, arch, NAME)?;
    let load = if loads_chunks(problem) { LoadPath::Chunks } else { LoadPath::Element };
    let chosen = Rdna::of(problem, arch, load, &options.tile)?;
    let (tiles, most) = (chosen.num_tiles(problem), u64::from(u32::MAX / chosen.num_threads()));
    if tiles > most {
        refuse!(
            NAME,
            "seqlen_q, num_heads_q and batch make {tiles} tiles of {} queries, more than {most}",
            chosen.tile.block_m
        );
    }
    Ok(chosen)
}

/// Whether every row of Q, K and V is whole chunks long and starts on one.
fn loads_chunks(problem: &FwdProblem) -> bool {
    let fits = |strides: Strides, shape: Shape, size: u64| {
        let size = size.cast_signed();
        let whole = |count: u32, stride: i64| count <= 1 || (stride * size) % CHUNK == 0;
        (i64::from(shape.dim) * size) % CHUNK == 0
            && whole(shape.batch, strides.batch)
            && whole(shape.head, strides.head)
            && whole(shape.seq, strides.seq)
    };
    let (qk, v) = (problem.dtypes.qk.size_bytes(), problem.dtypes.v.size_bytes());
    problem.layout.v == VLayout::RowMajor
        && fits(problem.strides.q, problem.shape_q(), qk)
        && fits(problem.strides.k, problem.shape_k(), qk)
        && fits(problem.strides.v, problem.shape_v(), v)
}

impl Rdna {
    fn of(
        problem: &FwdProblem,
        arch: Arch,
        load: LoadPath,
        asked: &[(String, String)],
    ) -> Result<Self, Refusal> {
        let spec = cdna::spec(problem, load);
        let widest = spec.head_dim_qk.max(spec.head_dim_v);
        let few_queries = problem.dims.seqlen_q <= 64;
        let by_element = load == LoadPath::Element;
        let mut tile = RdnaTile {
            // Eight waves share the tiles of K and V if rows leave registers for them.
            block_m: if few_queries || widest > 128 { 64 } else { 128 },
            block_n: match widest {
                // Addresses of single elements take registers too, so blocks are smaller.
                193.. if by_element => 16,
                129.. => 32,
                _ => 64,
            },
            load,
            store: if by_element || !cdna::stores_runs(problem) {
                StorePath::Element
            } else {
                StorePath::Vector
            },
            column_waves: 1,
            split: false,
        };
        for (name, value) in asked {
            tile.set_field(name, value).map_err(|text| Refusal::new(NAME, format!("tile {text}")))?;
        }
        let chosen = Self { spec, tile };
        let lds = chosen.lds_bytes();
        if lds > arch.lds_bytes() {
            let block_n = tile.block_n;
            refuse!(NAME, "tile block_n={block_n} takes {lds} bytes of LDS, more than {}", arch.lds_bytes());
        }
        Ok(chosen)
    }

    fn num_waves(&self) -> u32 {
        self.tile.block_m.unsigned_abs() / WAVE_ROWS
    }

    /// Bytes of LDS: a tile of K and a transposed tile of V with padded rows, or a block of O for each wave,
    /// whichever is larger.
    fn lds_bytes(&self) -> u32 {
        let Self { spec, tile } = self;
        let rows = |rows: i32, elems: i32, size: u64| {
            let size = size as u32;
            rows.unsigned_abs() * (elems.unsigned_abs() * size + 8 * size)
        };
        let k = rows(tile.block_n, spec.head_dim_qk, spec.dtype_qk.size_bytes()).next_multiple_of(16);
        let v = rows(spec.head_dim_v, tile.block_n, spec.dtype_v.size_bytes()).next_multiple_of(16);
        let o = self.num_waves() * WAVE_ROWS * WAVE_ROWS * 4;
        (k + v).max(o) + (4 * self.num_waves()).next_multiple_of(16)
    }
}

impl Whole for Rdna {
    const NAME: &'static str = NAME;
    const WIDENED: &'static str = "rdna_widened";
    const HEADER: &'static str = HEADER;
    const IS_RDNA: bool = true;

    type Tile = RdnaTile;

    fn accept(problem: &FwdProblem, device: Device, options: &PlanOptions) -> Result<Self, Refusal> {
        accept(problem, device, options)
    }

    fn tile(&self) -> RdnaTile {
        self.tile
    }

    fn block(&self) -> [i32; 2] {
        [self.tile.block_m, self.tile.block_n]
    }

    fn load(&self) -> LoadPath {
        self.tile.load
    }

    fn num_threads(&self) -> u32 {
        self.num_waves() * 32
    }

    fn workgroups(&self, tiles: u64, _: u64) -> u64 {
        tiles
    }

    fn num_tiles(&self, problem: &FwdProblem) -> u64 {
        let dims = problem.dims;
        let m_blocks = dims.seqlen_q.div_ceil(self.tile.block_m.unsigned_abs());
        u64::from(m_blocks).saturating_mul(u64::from(dims.num_heads_q) * u64::from(dims.batch))
    }

    fn source(&self) -> KernelSource {
        let threads = self.num_threads();
        let entry = Entry {
            include: HEADER,
            constants: &[("kSpec", &self.spec), ("kTile", &self.tile)],
            bounds: &crate::group_of(threads),
            params: crate::forward::entry_params(&self.spec),
            call: &format!("rdna::fwd<kSpec, kTile>({});", crate::forward::entry_argument(&self.spec)),
        };
        crate::source(&entry, RDNA)
    }

    fn alignment(&self, problem: &FwdProblem, operand: Operand) -> u64 {
        let load = if self.tile.load == LoadPath::Element { 1 } else { CHUNK.unsigned_abs() };
        alignment(problem, operand, (load, self.tile.store))
    }

    fn for_any_address(&self, problem: &FwdProblem) -> Option<Self> {
        let tile = RdnaTile { load: LoadPath::Element, store: StorePath::Element, ..self.tile };
        (tile != self.tile).then(|| Self { tile, spec: cdna::spec(problem, tile.load) })
    }

    fn details(&self) -> Vec<(&'static str, String)> {
        let Self { spec, tile } = self;
        vec![
            ("tile", format!("block_m {} block_n {}", tile.block_m, tile.block_n)),
            ("loads", format!("{:?}", tile.load)),
            ("stores", format!("{:?}", tile.store)),
            ("lds", format!("{} bytes", self.lds_bytes())),
            ("matrix type", format!("{} x {}, then {}", spec.dtype_qk, spec.dtype_qk, spec.dtype_v)),
        ]
    }
}

pub(crate) fn tile_header() -> Header {
    use fmha_core::abi::AbiLiteral as _;
    let text = format!(
        "#pragma once\n#include <fmha/cdna/tile.h>\n\nnamespace fmha::rdna {{\n\nusing namespace fmha::cdna;\n\n{}\n\
         }}  // namespace fmha::rdna\n",
        RdnaTile::c_definition()
    );
    Header::rendered("fmha/rdna/tile.h", text)
}
