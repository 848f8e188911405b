//! The kernels `cdna_index` and `rdna_index`: scores of an indexer on matrix units (`fmha/amd/index.h`). A wave holds
//! keys in registers, and multiplies them with one row of q after another.

use std::marker::PhantomData;

use fmha_core::abi::AbiLiteral as _;
use fmha_core::choose_params::IndexSpec;
use fmha_core::source::{Entry, Header, KernelSource};
use fmha_core::sparse::{IndexStrides, Indexer, ValidChoose};
use fmha_core::tune::TileOptions;
use fmha_core::{Call, DType, abi_spec};
use fmha_gpu::{Launch, Operand, ScoresIndex, Stage};

use crate::arch::Arch;
use crate::device::{Amd, DeviceFacts, launch, needs_unit};

/// Most bytes of LDS for two rows of q: a half of the smallest architecture's lets two workgroups share a compute unit.
const HALF_LDS: u32 = 32 << 10;
/// Bytes of a row that a wave multiplies at a time: two chunks, which on gfx1100 one lane has, and elsewhere two lanes.
const STEP_BYTES: u32 = 32;
/// Bytes that addresses and strides are multiples of.
const DWORD: u64 = 4;
/// Most rows of q that a workgroup multiplies with its keys.
const MOST_ROWS: u64 = 64;
/// Workgroups to aim at for each compute unit.
const GROUPS_OF_A_UNIT: u64 = 4;

abi_spec! {
    /// Tile of the kernel: the choices with which it computes a problem.
    pub struct IndexTile {
        /// Threads of a workgroup.
        pub num_threads: i32,
        /// Number of products that a wave computes at a time, each with other keys: an even number, or 1.
        pub groups: i32,
        /// Type in which q and k are multiplied.
        pub dtype: DType,
    }
}

/// A matrix unit and the text for it.
pub(crate) trait IndexUnit: Send + Sync + 'static {
    const NAME: &'static str;
    const IS_WMMA: bool;
    /// Number of rows and of columns of a product.
    const EDGE: u32;
    const NAMESPACE: &'static str;
    const HEADER: &'static str;
    const WORDS: &'static str;
}

/// Kernel of an indexer on the matrix instructions MFMA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MfmaIndex;

impl IndexUnit for MfmaIndex {
    const NAME: &'static str = "cdna_index";
    const IS_WMMA: bool = false;
    const EDGE: u32 = 32;
    const NAMESPACE: &'static str = "cdna";
    const HEADER: &'static str = "fmha/cdna/index.h";
    const WORDS: &'static str = "MFMA, a wave's keys in registers; f32 sums in one order";
}

/// Kernel of an indexer on the matrix instructions WMMA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WmmaIndex;

impl IndexUnit for WmmaIndex {
    const NAME: &'static str = "rdna_index";
    const IS_WMMA: bool = true;
    const EDGE: u32 = 16;
    const NAMESPACE: &'static str = "rdna";
    const HEADER: &'static str = "fmha/rdna/index.h";
    const WORDS: &'static str = "WMMA, a wave's keys in registers; f32 sums in one order";
}

/// Kernel that computes an indexer's scores on unit `U`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixIndex<U>(PhantomData<U>);

/// Type in which an architecture multiplies q and k: their own type if it has instructions for it, otherwise 16 bits,
/// which hold E4M3 exactly.
fn product_type(arch: Arch, q: DType, k: DType) -> Result<DType, String> {
    for (field, dtype) in [("dtype_q", q), ("dtype_k", k)] {
        // gfx90a's MFMA treats subnormal f16 as 0, which would change a score, so such operands are multiplied in
        // another type.
        if dtype == DType::F16 && arch == Arch::Gfx90a {
            return Err(format!(
                "{field} {dtype}: the matrix unit of {} flushes its subnormals",
                arch.name()
            ));
        }
    }
    if q == k && arch.multiplies(q) {
        return Ok(q);
    }
    for (field, dtype) in [("dtype_q", q), ("dtype_k", k)] {
        if dtype == DType::E4m3Fnuz {
            return Err(format!("{field} {dtype} beside dtype_q {q}, dtype_k {k} on {}", arch.name()));
        }
    }
    Ok(match [q, k].into_iter().find(|dtype| !dtype.is_fp8()) {
        Some(wide) => wide,
        None => DType::F16,
    })
}

impl IndexTile {
    fn of<U: IndexUnit>(indexer: &Indexer, arch: Arch) -> Result<Self, String> {
        let dtype = product_type(arch, indexer.dtype_q, indexer.dtype_k)?;
        let row_bytes = indexer.head_dim * dtype.size_bytes() as u32;
        if !row_bytes.is_multiple_of(STEP_BYTES) {
            return Err(format!(
                "head_dim {}: rows of {row_bytes} bytes in {dtype} are not whole steps of {STEP_BYTES} bytes",
                indexer.head_dim
            ));
        }
        // Registers of a lane for the keys of one product; on gfx1100 both halves of a wave have the whole rows.
        let of_product = if arch == Arch::Gfx1100 { row_bytes / 4 } else { row_bytes / 8 };
        let groups = [4, 2].into_iter().find(|groups| {
            // At the end each key belongs to one lane, and 128 registers of keys leave room for two waves.
            groups * U::EDGE <= 64 && groups * of_product <= 128
        });
        let q_bytes = 2 * padded_heads::<U>(indexer) * row_bytes;
        let num_threads = if q_bytes >= HALF_LDS && !arch.is_rdna() { 512 } else { 256 };
        Ok(Self { num_threads, groups: groups.unwrap_or(1) as i32, dtype })
    }

    fn block_n<U: IndexUnit>(&self, arch: Arch) -> u64 {
        let waves = self.num_threads.unsigned_abs() / arch.wave_threads();
        (waves * self.groups.unsigned_abs() * U::EDGE).into()
    }
}

/// Number of heads, rounded up to whole rows of a product.
fn padded_heads<U: IndexUnit>(indexer: &Indexer) -> u32 {
    indexer.num_heads.next_multiple_of(U::EDGE)
}

/// Refuses strides with which a key's row does not begin on a dword.
fn takes_strides(strides: IndexStrides, dtype: DType) -> Result<(), String> {
    for (axis, stride) in [("outer", strides.outer), ("key", strides.key)] {
        let stride = stride * dtype.size_bytes();
        if !stride.is_multiple_of(DWORD) {
            return Err(format!("strides_k.{axis} of {stride} bytes is not a multiple of {DWORD}"));
        }
    }
    Ok(())
}

impl<V: Amd, U: IndexUnit> ScoresIndex<V> for MatrixIndex<U> {
    const NAME: &'static str = U::NAME;
    const IS_FALLBACK: bool = false;
    type Beside = ();

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        needs_unit(facts.device.arch, U::IS_WMMA)
    }

    fn takes(indexer: Option<&Indexer>) -> Result<(), String> {
        let Some(indexer) = indexer else {
            return Err("source given: it scores keys for an indexer".to_owned());
        };
        let Indexer { head_dim, num_heads, dtype_q, dtype_k, .. } = *indexer;
        if !head_dim.is_multiple_of(16) || head_dim > 256 {
            return Err(format!("head_dim {head_dim} is not a multiple of 16 of at most 256"));
        }
        for (field, dtype) in [("dtype_q", dtype_q), ("dtype_k", dtype_k)] {
            if !matches!(dtype, DType::F16 | DType::Bf16 | DType::E4m3Fn | DType::E4m3Fnuz) {
                return Err(format!("{field} {dtype} is not f16, bf16 or e4m3"));
            }
        }
        if dtype_q != dtype_k && dtype_q.is_fp8() == dtype_k.is_fp8() {
            return Err(format!("dtype_k {dtype_k} is not dtype_q {dtype_q}"));
        }
        // Two rows of q with their weights must fit 64 KB of LDS, with one weight a thread.
        let heads = padded_heads::<U>(indexer);
        let bytes = u64::from(heads) * (u64::from(head_dim) * 4 + 8);
        if heads > 256 || bytes > 64 << 10 {
            return Err(format!(
                "num_heads {num_heads} of head_dim {head_dim}: two rows of q in 16 bits take {bytes} bytes of LDS, more \
                 than 65536, or more weights than 256 threads"
            ));
        }
        takes_strides(indexer.strides_k, dtype_k)
    }

    fn alignment(operand: Operand) -> u64 {
        if matches!(operand, Operand::Q | Operand::K) { DWORD } else { 1 }
    }

    fn launch(
        problem: &ValidChoose,
        indexer: &Indexer,
        rows: u64,
        facts: &DeviceFacts,
        _: &TileOptions,
    ) -> Result<Option<Launch>, String> {
        let device = facts.device;
        let tile = IndexTile::of::<U>(indexer, device.arch)?;
        // Rows of one sequence reuse the keys in registers, as long as each compute unit has some workgroups.
        let blocks = u64::from(problem.seqlen_k).div_ceil(tile.block_n::<U>(device.arch));
        let wanted = rows * blocks / (GROUPS_OF_A_UNIT * u64::from(device.num_compute_units)).max(1);
        let most = MOST_ROWS.min(problem.seqlen_q.into()).max(1);
        let groups = blocks * rows.div_ceil(wanted.clamp(1, most)).max(1);
        let threads = tile.num_threads.unsigned_abs();
        let most = u64::from(u32::MAX / threads);
        if groups > most {
            return Err(format!("rows and keys make {groups} workgroups, more than {most}"));
        }
        let text = source::<U>(&IndexSpec::of(indexer), &tile);
        Ok(Some(launch(Stage::Main, U::NAME, text, groups, threads)))
    }

    fn beside(_: &Call<'_, ValidChoose>, _: &Indexer, _: &TileOptions) -> fmha_core::Result<()> {
        Ok(())
    }

    fn words() -> &'static str {
        U::WORDS
    }
}

/// `fmha/amd/index_tile.h`: the types that this file shares with the device.
fn header() -> Header {
    Header::shared("fmha/amd/index_tile.h", "fmha", &["fmha/spec.h"], &[IndexTile::c_definition()])
}

fn source<U: IndexUnit>(spec: &IndexSpec, tile: &IndexTile) -> KernelSource {
    let entry = Entry {
        include: U::HEADER,
        constants: &[("kSpec", spec), ("kTile", tile)],
        bounds: &crate::group_of(tile.num_threads.unsigned_abs()),
        params: "ChooseParams p",
        call: &format!("{}::index_scores<kSpec, kTile>(p);", U::NAMESPACE),
    };
    KernelSource::new(entry.render(), || {
        let mut headers = crate::headers();
        headers.extend([fmha_core::choose_params::header(), header()]);
        headers
    })
}
