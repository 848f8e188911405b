//! Attention by its definition: slow, short, and the reference for every backend.
//!
//! One piece of code serves two purposes, told apart by [`Precision`]. In f64 it is the reference. In the
//! input's precision it is the plain, unfused algorithm, whose error the accuracy promise is measured by.

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
