//! A product on tiles.

use super::Simd;

/// `C (=|+=) A B` over a block of 32 x 32 f32: A has 32 rows of bf16, reduced 32 at a time (a *step*); B has
/// a row of 32 pairs of bf16 for each pair of the reduction, 16 rows a step. Distances are in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileProduct {
    pub(crate) a: *const u8,
    /// Stride between rows of A.
    pub(crate) a_row: usize,
    pub(crate) b: *const u8,
    /// Stride between rows of B.
    pub(crate) b_row: usize,
    /// Number of steps; at least 1.
    pub(crate) steps: usize,
    pub(crate) c: *mut f32,
    /// Stride between rows of C.
    pub(crate) c_row: usize,
    pub(crate) add: bool,
}

/// The first row of a tile, and the number of bytes between its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileRows {
    pub(crate) first: *const u8,
    pub(crate) step: isize,
}

/// Work that is interleaved with a tile product, a little after each step.
pub(crate) trait Between<S: Simd> {
    /// Implementations are `#[inline(always)]`.
    fn go_on(&mut self, s: S);
}

/// An epilogue that does nothing.
pub(crate) struct Nothing;

impl<S: Simd> Between<S> for Nothing {
    #[inline(always)]
    fn go_on(&mut self, _: S) {}
}

impl TileProduct {
    /// Computes the product, and calls `between` after each step.
    ///
    /// # Safety
    /// A, B and C are valid memory over their extents; this thread has entered tiles.
    #[inline(always)]
    pub(crate) unsafe fn run<S: Simd>(&self, s: S, between: &mut impl Between<S>) {
        let (mut a, mut b) = (self.a, self.b);
        // SAFETY: the caller keeps the contract of `run`.
        unsafe {
            if self.add {
                s.tile_load(self.c, self.c_row);
            } else {
                s.tile_zero();
            }
            for _ in 0..self.steps {
                s.tile_step(a, self.a_row, b, self.b_row);
                (a, b) = (a.add(64), b.add(16 * self.b_row));
                between.go_on(s);
            }
            s.tile_store(self.c, self.c_row);
        }
    }
}
