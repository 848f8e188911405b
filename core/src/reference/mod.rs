//! Attention by its definition: slow, short, and the reference for every backend.
//!
//! The code serves two purposes, chosen by [`Precision`]. In f64 it is the reference. In the input's precision it
//! is the plain, unfused algorithm; the accuracy promise of a kernel is relative to its error.

mod backward;
mod cache;
mod code;
mod combine;
mod forward;
mod head;
mod pair;

pub use backward::{
    Backward, BackwardSpread, FAR_LSE, HeadBackward, Part, backward, backward_head, backward_part, is_far,
};
pub use combine::combine;
pub use forward::{HeadForward, forward, forward_head, forward_rows};
pub use head::{Inputs, Precision};

#[cfg(test)]
mod tests;
