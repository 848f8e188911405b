//! One battery of attention tests for every backend of `fmha`.
//!
//! A [`Case`](case::Case) is data with a name; [`case::all`] has thousands, [`report::run`] runs them
//! on any [`Device`](fmha_core::Device) and says what passed, failed, was refused as
//! declared, or could not run here. Each is held to the f64 reference of `fmha-core` by one
//! [`tolerance`], or bit for bit to another call by a [`law`].
//!
//! The pieces serve others too: [`tensors`] makes the operands of a problem from a seed, [`execute`]
//! runs a plan on them, [`check`] compares the results.

pub mod apart;
pub mod captured;
pub mod case;
pub mod check;
pub mod deal;
pub mod declared;
pub mod execute;
mod families;
pub mod init;
pub mod law;
pub mod memory;
pub mod report;
pub mod rows;
pub mod run;
pub mod tensor;
pub mod tensors;
pub mod tolerance;
mod used;
pub mod verdict;

pub use families::definition;
pub use regex_lite::Regex;
