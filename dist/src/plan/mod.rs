//! Steps from a problem to a plan that runs.
//!
//! ```text
//!  Whole      the problem as this rank sees it                     problem/check.rs
//!      │ choose                the scheme, by the model            choice.rs
//!      │ agree                 all ranks say the same              planned.rs
//!      │ build                 its steps, kernels and buffers      built.rs
//!      │ meet                  where keys come while kernels run   arrivals/
//!  Planned
//!      │ run                   a call's tensors, checked           forward.rs, backward.rs
//! ```
//!
//! If one rank fails, all ranks get the error: each of these steps ends with messages between all ranks.

mod backward;
mod built;
mod choice;
mod forward;
mod options;
mod planned;

pub use backward::BwdPlan;
pub use choice::{Choice, choose};
pub use forward::FwdPlan;
pub use options::Options;
