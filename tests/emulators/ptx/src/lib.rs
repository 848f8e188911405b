//! An interpreter of PTX for kernels that use `wgmma`, TMA, mbarriers and clusters, made to find what tests on a
//! device find only by luck: missing waits, fences and arrivals, reads of bytes never written, over-reads.
//!
//! ```text
//!  PTX text ── parse ──> ast ── decode ──> Program (rows, not names)
//!                                             │  launch
//!              Cluster: blocks · warps · shared memory · barriers   one per core, see `exec`
//!                                             │  every access
//!              Tracker: vector clocks over shared memory            see `hb`
//! ```
//!
//! [`Device`] holds memory and modules; [`Device::launch`] runs a kernel and returns a [`Report`] or the first
//! [`Fault`].

mod ast;
mod class;
mod counters;
mod decode;
mod exec;
mod fault;
mod fp;
mod garbage;
mod hb;
mod launch;
mod lex;
mod memory;
mod mutate;
pub mod mutation;
mod op;
mod order;
mod parse;
mod recording;
mod source;

pub use counters::Counters;
pub use exec::TensorMap;
pub use fault::{Fault, FaultKind, Place};
pub use launch::{Asynchrony, Device, Kernel, LaunchConfig, Module, Options, Report, RowShift};
pub use mutate::{Mutant, mutants};
pub use recording::{Ended, Ready, Recording};
pub use source::{SourceLine, SourceMap};
