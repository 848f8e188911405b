//! An emulator of AMD's CDNA GPUs: it takes the ELF code objects that a compiler made for gfx90a, gfx942 or gfx950,
//! runs them on the CPU, and checks as it runs. See the crate's README for what its results do and do not show.
//!
//! ```no_run
//! use fmha_emu_cdna::{Arch, Device, Launch, Options};
//!
//! let device = Device::new(Arch::Gfx942, Options::default());
//! let module = device.load(&std::fs::read("kernel.co")?)?;
//! let x = device.memory.alloc_from(&[0; 1024]);
//! let args = x.to_le_bytes();
//! let launch = Launch { grid: [4, 1, 1], block: [64, 1, 1], dynamic_lds: 0, args: &args };
//! let counters = device.launch(&module, "kernel", &launch)?;
//! println!("{} instructions", counters.total());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
// Register numbers, encodings and lanes are narrowed on purpose all over: that is what a machine of fixed widths does.
#![allow(
    clippy::needless_range_loop,
    clippy::similar_names,
    clippy::many_single_char_names,
    reason = "loops over 64 lanes index several registers at once; a, b, c, d are the ISA's own names"
)]

mod checks;
mod counters;
mod decode;
mod elf;
mod error;
mod exec;
mod garbage;
mod inst;
mod launch;
mod line;
mod memory;
pub mod mutation;
mod num;
mod op;
mod order;
mod recording;
mod text;
mod wave;

pub use checks::Checks;
pub use counters::Counters;
pub use elf::{Arch, CodeObject, Instruction, KernelArg, KernelInfo};
pub use error::{Fault, FaultKind, LaunchError, LoadError};
pub use inst::Class;
pub use launch::{Device, Launch, Module, Options, pack_args};
pub use memory::{DeviceMemory, MemoryError};
pub use recording::{Ended, Ready, Recording};
