//! A test double of AMD's HIP runtime: `libamdhip64.so`, whose kernels run in the CDNA emulator. A client
//! that opens the library at run time works with it unchanged, as long as it keeps to the module API.
//!
//! - `FMHA_EMULATE=gfx942` chooses the device; `gfx90a,gfx950` gives two. Without it there is no device, as
//!   on a machine that has the runtime and no GPU.
//! - `FMHA_EMULATE_CHECKS=none` turns the checks off, `FMHA_EMULATE_SEQUENTIAL=1` runs workgroups in order.
//! - Device addresses are fake: no host pointer equals one, and following one on the host crashes.
//! - Streams execute at once. A kernel's fault is reported as a GPU would, by the next call that waits: 700
//!   (hipErrorIllegalAddress) for addresses, 702 for a hang, 719 for the rest. It is then forgotten, so that a process
//!   may go on. Its description goes to stderr, and to `fmhaEmulatorLastFault`.
//! - `fmhaEmulatorLaunches` tells what the launches since it was last asked did, in counters.
#![allow(non_snake_case, reason = "the names are HIP's")]
#![allow(
    clippy::missing_safety_doc,
    reason = "every function here has HIP's own contract: pointers are valid for what HIP's documentation says"
)]
#![allow(missing_docs, unreachable_pub, reason = "exported to C, documented by HIP")]

mod device;
mod graph;
#[path = "../../../launches.rs"]
mod launches;
mod memory;
mod module;
mod observe;
mod runtime;
mod status;
mod stream;
