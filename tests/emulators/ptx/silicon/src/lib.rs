//! Results of a device for some hundreds of small programs and calls, kept as bits, and the emulator compared
//! with them.
//!
//! ```text
//!  programs   one instruction each, PTX text          ─┐  run   ┌─ Driver: a real libcuda
//!                                                       ├──────>─┤
//!  forward    seeded attention calls, our kernels      ─┘        └─ the emulator
//!       │ outputs
//!  record     digests and sampled bits, one line each, in `recordings/`
//!       │
//!  compare    equal bits where the ISA is exact, else within the bound of the instruction or the kernel
//! ```
//!
//! The program `silicon` makes a recording on a machine with a device; the test `silicon` compares.

pub mod compare;
pub mod fill;
pub mod forward;
pub mod program;
pub mod programs;
pub mod record;
pub mod run;
