//! Loads and stores of global memory.

use fmha_core::abi_enum;

/// Way of loading global memory into a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LoadPath {
    /// Each lane loads 16 bytes through buffer descriptors; rows start on dwords and are multiples of 16 bytes long.
    Chunks,
    /// Each lane loads 16 bytes through buffer descriptors; rows start on dwords and are multiples of 4 bytes long.
    Dwords,
    /// Each lane loads one element, at any address: this works for every stride, slowly.
    Element,
}

/// Way of storing O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StorePath {
    /// Four elements are stored at once.
    Vector,
    /// Elements are stored one by one, after an exchange through LDS.
    Element,
}

abi_enum!(LoadPath { Chunks, Dwords, Element });
abi_enum!(StorePath { Vector, Element });
