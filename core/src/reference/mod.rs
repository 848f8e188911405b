//! Attention by its definition: slow, short, and the truth that every backend is measured against.
//!
//! The same code serves two purposes, told apart by [`Precision`]: in f64 it is the reference
//! itself; in the input's precision it is the plain, unfused algorithm whose error is the yardstick
//! of the accuracy promise.

mod backward;
mod combine;
mod forward;
mod head;

pub use backward::{Backward, BackwardSpread, HeadBackward, backward, backward_head};
pub use combine::combine;
pub use forward::{HeadForward, forward, forward_head, forward_rows};
pub use head::{Inputs, Precision};

#[cfg(test)]
mod tests;
