//! Words in each rank's memory that streams and kernels wait for. Other ranks write them.
//!
//! - `flag`, one per piece: the piece has arrived. Its owner sets it; it is reset at the end of the run, when
//!   all have arrived.
//! - `late`, written by the kernels. Not 0: a piece did not arrive within the timeout, and the outputs of the
//!   run are invalid.
//! - `free`, one per rank: that rank's buffers may be written again. That rank sets it at the end of a run;
//!   the rank that writes there resets it.
//! - `home` and `home_free`, one per rank: `flag` and `free` for dK and dV, which go the other way. Each goes
//!   to the owner of its keys as soon as no later kernel of the rank changes it.

/// Addresses of a rank's words.
#[derive(Clone, Copy)]
pub(super) struct Words {
    pub(super) address: u64,
    pub(super) pieces: u64,
    pub(super) ranks: u64,
}

impl Words {
    /// Words before the first run: nothing has come and nothing is late, and every buffer is free.
    pub(super) fn at_first(pieces: usize, ranks: u32) -> Vec<u32> {
        let mut words = vec![0; pieces + 1];
        for value in [1, 0, 1] {
            words.resize(words.len() + ranks as usize, value);
        }
        words
    }

    /// Bytes of the flags and of `late` behind them, which kernels are given.
    pub(super) fn kernels_bytes(self) -> u64 {
        4 * (self.pieces + 1)
    }

    pub(super) fn flag(self, piece: usize) -> u64 {
        self.address + 4 * piece as u64
    }

    pub(super) fn late(self) -> u64 {
        self.address + 4 * self.pieces
    }

    pub(super) fn free(self, rank: u32) -> u64 {
        self.late() + 4 + 4 * u64::from(rank)
    }

    pub(super) fn home(self, rank: u32) -> u64 {
        self.free(rank) + 4 * self.ranks
    }

    pub(super) fn home_free(self, rank: u32) -> u64 {
        self.home(rank) + 4 * self.ranks
    }
}
