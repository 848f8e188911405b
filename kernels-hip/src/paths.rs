//! Loads and stores of global memory.

use fmha_core::abi_enum;

/// Way of loading global memory into a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LoadPath {
    /// 16 bytes a lane through buffer descriptors; rows start on dwords and are whole 16 bytes long.
    Chunks,
    /// 16 bytes a lane through buffer descriptors; rows start on dwords and are whole dwords long.
    Dwords,
    /// An element a lane at any address: right for every stride, fast for none.
    Element,
}

/// Way of storing O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StorePath {
    /// Four elements at once.
    Vector,
    /// Element by element, by way of LDS.
    Element,
}

abi_enum!(LoadPath { Chunks, Dwords, Element });
abi_enum!(StorePath { Vector, Element });
