//! Device text of the AMD kernels: freestanding HIP C++ that needs no ROCm header, embedded so that
//! a program can compile it wherever it finds clang or hipRTC.
//!
//! The text obeys the arrows of the repository: `isa` (one instruction, one function) below `mma`
//! (typed tiles) below `cdna` (the forward kernel) and `combine.h`. What all vendors share comes from
//! [`fmha_core::source`].

use fmha_core::source::Header;
use fmha_core::{abi_enum, abi_spec};

/// How global memory is read into a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadPath {
    /// 16 bytes a lane through buffer descriptors; rows start and end on dwords.
    Vector,
    /// An element a lane at any address: right for every stride, fast for none.
    Element,
}

/// How O is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StorePath {
    /// Four elements at once.
    Vector,
    /// One element.
    Element,
}

/// How workgroups come by their tiles. A tile is `block_m` queries of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileOrder {
    /// One tile a workgroup, in the hardware's order.
    Single,
    /// A workgroup walks over tiles by a stride, every second round backwards.
    Static,
}

abi_enum!(LoadPath { Vector, Element });
abi_enum!(StorePath { Vector, Element });
abi_enum!(TileOrder { Single, Static });

abi_spec! {
    /// How the CDNA forward kernel computes.
    pub struct CdnaTile {
        /// Queries of a workgroup: 32 a wave.
        pub block_m: i32,
        /// Keys of a step of the main loop.
        pub block_n: i32,
        /// How Q, K and V are read.
        pub load: LoadPath,
        /// How O is written.
        pub store: StorePath,
        /// Dies that workgroups are dealt to in turn; neighbours in a head are kept on one.
        pub num_xcds: i32,
        /// Whether workgroups have one tile each or several.
        pub order: TileOrder,
    }
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
        "isa/buffer.h",
        "isa/sync.h",
        "isa/sched.h",
        "isa/num.h",
        "mma/cdna.h",
        "cdna/config.h",
        "cdna/load.h",
        "cdna/direct.h",
        "cdna/schedule.h",
        "cdna/tile_step.h",
        "cdna/epilogue.h",
        "cdna/nonfinite.h",
        "cdna/main_loop.h",
        "cdna/order.h",
        "cdna/fwd.h",
        "simt/fwd.h",
        "combine.h",
    ));
    headers.push(Header::rendered("fmha/cdna/tile.h", tile_h()));
    headers
}

fn tile_h() -> String {
    use fmha_core::abi::AbiLiteral;
    format!(
        "#pragma once\n#include <fmha/spec.h>\n\nnamespace fmha::cdna {{\n\n{}{}{}{}\n}}  // namespace fmha::cdna\n",
        LoadPath::c_definition(),
        StorePath::c_definition(),
        TileOrder::c_definition(),
        CdnaTile::c_definition()
    )
}
