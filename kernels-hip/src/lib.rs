//! Device text of the AMD kernels: freestanding HIP C++ that needs no ROCm header, embedded so that
//! a program can compile it wherever it finds clang or hipRTC.
//!
//! The text obeys the arrows of the repository: `isa` (one instruction, one function) below `mma`
//! (typed tiles) below `cdna` (forward, decode, backward), `rdna` (the same) and `combine.h`. What all vendors share comes from
//! [`fmha_core::source`].
//!
//! Beside the text stands each kernel's recipe: what it accepts, its tile, its entry, its grid, its launches, for any
//! backend that is [`Amd`].

pub mod arch;
pub mod backward;
pub mod cache_update;
pub mod cdna;
pub mod cdna_bwd;
pub mod cdna_decode;
pub mod combine;
mod decode;
mod device;
mod forward;
mod order;
pub mod rdna;
pub mod rdna_bwd;
pub mod rdna_decode;
pub mod recipes;
pub mod simt;
pub mod simt_bwd;

pub use arch::Arch;
pub use backward::{BwdSums, MatrixBwdParams, MatrixBwdSpec, MatrixBwdTile};
pub use cdna_decode::{CdnaDecodeParams, CdnaDecodeSpec, CdnaDecodeTile};
pub use device::{Amd, Device, DeviceFacts, Grid};
pub use rdna_decode::RdnaDecodeTile;

use fmha_core::abi::{AbiStruct, FwdParams};
use fmha_core::fields::Takes;
use fmha_core::source::Header;
use fmha_core::{DType, MaskKind, VLayout, abi_enum, abi_spec, abi_struct};

/// How global memory is read into a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadPath {
    /// 16 bytes a lane through buffer descriptors; rows start on dwords and are whole 16 bytes long.
    Chunks,
    /// The same; rows are whole dwords long.
    Dwords,
    /// An element a lane at any address: right for every stride, fast for none.
    Element,
}

/// How O is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StorePath {
    /// Four elements at once.
    Vector,
    /// One element, by way of LDS.
    Element,
}

/// Which types of O a kernel writes; which of them a call wants is in [`CdnaParams`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutputKind {
    /// f32, f16 or bf16.
    Wide,
    /// The FP8 types of the architecture.
    Fp8,
    /// All of these.
    Any,
}

/// How workgroups come by their tiles. A tile is `block_m` queries of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileOrder {
    /// One tile a workgroup, in the hardware's order.
    Single,
    /// A workgroup walks over tiles by a stride, every second round backwards.
    Static,
}

abi_enum!(LoadPath { Chunks, Dwords, Element });
abi_enum!(OutputKind { Wide, Fp8, Any });
abi_enum!(StorePath { Vector, Element });
abi_enum!(TileOrder { Single, Static });

abi_spec! {
    /// What a CDNA forward kernel is compiled for: what changes the instructions of its main loop. All else of a
    /// problem is a number that it reads.
    pub struct CdnaSpec {
        /// Q and K.
        pub dtype_qk: DType,
        /// V, and P.
        pub dtype_v: DType,
        /// O.
        pub output: OutputKind,
        /// Elements of a query's or key's row, padded to whole 32.
        pub head_dim_qk: i32,
        /// Elements of a value's or output's row, padded to whole 32.
        pub head_dim_v: i32,
        /// Which axis of V has stride 1.
        pub v_layout: VLayout,
        /// `Full`: no band. Any other: the band of the call, bounded or not.
        pub mask: MaskKind,
        /// Whether there may be sink columns.
        pub sink_columns: bool,
        /// Whether there may be a soft-cap, a bias or slopes.
        pub modifies: bool,
        /// Whether there may be dropout, or its mask to write.
        pub dropout: bool,
    }
}

abi_struct! {
    /// What a CDNA forward kernel reads.
    pub struct CdnaParams {
        /// What all forward kernels read.
        pub fwd: FwdParams,
        /// Elements of a query's or key's row.
        pub head_dim_qk: i32,
        /// Elements of a value's or output's row.
        pub head_dim_v: i32,
        /// O's type, as [`DType`] counts.
        pub dtype_o: i32,
        /// The elementwise bias' type, as [`DType`] counts.
        pub dtype_bias: i32,
        /// 1: probabilities are dropped.
        pub drops: i64,
    }
}

abi_spec! {
    /// How the CDNA forward kernel computes.
    pub struct CdnaTile {
        /// Queries of a workgroup: 32 a wave.
        pub block_m: i32 = Takes::multiples(32, 32, 512).tuned_over(&[64, 128, 256]),
        /// Keys of a step of the main loop.
        pub block_n: i32 = Takes::among(&[32, 64, 128]).tuned(),
        /// How Q, K and V are read.
        pub load: LoadPath = Takes::nothing(),
        /// How O is written.
        pub store: StorePath = Takes::nothing(),
        /// Dies that workgroups are dealt to in turn; neighbours in a head are kept on one.
        pub num_xcds: i32 = Takes::nothing(),
        /// Whether workgroups have one tile each or several.
        pub order: TileOrder = Takes::all().tuned(),
    }
}

impl CdnaTile {
    /// None of a kernel: where names are read into.
    const UNSET: Self = Self {
        block_m: 0,
        block_n: 0,
        load: LoadPath::Element,
        store: StorePath::Element,
        num_xcds: 1,
        order: TileOrder::Single,
    };
}

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        [$(Header::embedded(concat!("fmha/", $name), include_str!(concat!("../fmha/", $name)))),*]
    };
}

/// Every header that an entry needs: core's, then these.
#[must_use]
pub fn headers() -> Vec<Header> {
    let mut headers = fmha_core::source::headers();
    headers.extend(embedded!(
        "isa/hip.h",
        "isa/lane.h",
        "isa/mfma.h",
        "isa/wmma.h",
        "isa/buffer.h",
        "isa/sync.h",
        "isa/sched.h",
        "isa/num.h",
        "isa/widen.h",
        "mma/cdna.h",
        "mma/rdna.h",
        "cdna/config.h",
        "cdna/load.h",
        "cdna/direct.h",
        "cdna/schedule.h",
        "cdna/score.h",
        "cdna/tile_step.h",
        "cdna/output.h",
        "cdna/epilogue.h",
        "cdna/nonfinite.h",
        "cdna/main_loop.h",
        "cdna/simple_loop.h",
        "cdna/order.h",
        "cdna/span.h",
        "cdna/fwd.h",
        "cdna/bwd/job.h",
        "cdna/bwd/config.h",
        "cdna/bwd/load.h",
        "cdna/bwd/pairs.h",
        "cdna/bwd/owner.h",
        "cdna/bwd/store.h",
        "cdna/bwd/rest.h",
        "cdna/bwd/walk.h",
        "cdna/bwd/main.h",
        "cdna/decode/work.h",
        "cdna/decode/config.h",
        "cdna/decode/load.h",
        "cdna/decode/columns.h",
        "cdna/decode/main.h",
        "cdna/decode/merge.h",
        "cdna/decode/update.h",
        "rdna/config.h",
        "rdna/load.h",
        "rdna/tile_step.h",
        "rdna/epilogue.h",
        "rdna/fwd.h",
        "rdna/bwd/main.h",
        "rdna/decode/load.h",
        "rdna/decode/main.h",
        "simt/bwd.h",
        "simt/fwd.h",
        "combine.h",
        "dropout.h",
    ));
    headers.push(Header::rendered("fmha/cdna/tile.h", tile_h()));
    headers.push(backward::tile_header());
    headers.push(cdna_decode::tile_header());
    headers.push(rdna::tile_header());
    headers
}

fn tile_h() -> String {
    use fmha_core::abi::AbiLiteral;
    format!(
        "#pragma once\n#include <fmha/params.h>\n#include <fmha/spec.h>\n\nnamespace fmha::cdna {{\n\n{}\n}}  // namespace fmha::cdna\n",
        [
            LoadPath::c_definition(),
            StorePath::c_definition(),
            OutputKind::c_definition(),
            TileOrder::c_definition(),
            CdnaSpec::c_definition(),
            CdnaTile::c_definition(),
            CdnaParams::c_definition(),
        ]
        .concat()
    )
}
