//! A test double of `libcuda.so`: a device, or several equal ones, whose kernels run in [`fmha_emu_ptx`].
//!
//! Environment:
//! - `FMHA_EMULATE`: the device's architecture, `sm_80`, `sm_90a` (default), `sm_100a`, `sm_120`; of several devices,
//!   which are alike, each one's: `sm_90a,sm_90a`;
//! - `FMHA_EMULATE_MODE`: `eager` (default), `late:SEED` (other delays with each launch), `hb` (happens-before);
//! - `FMHA_EMULATE_ORDER`: a seed for the order in which clusters run piece by piece, another with each launch;
//! - `FMHA_EMULATE_PTX_DIR`: where `<sha256 of a cubin>.ptx` stands for the cubin;
//! - `FMHA_EMULATE_REPORT`: a file to which every fault is appended.
//!
//! Everything is carried out when it is called, but for `cuMemcpyHtoD` from pageable memory, which is staged
//! and arrives with the default stream's next work: one schedule that the real driver may choose. A fault in
//! a kernel is printed, makes the launch fail with `CUDA_ERROR_LAUNCH_FAILED`, and sticks to the context, as
//! on a device.
#![allow(
    non_snake_case,
    missing_docs,
    clippy::missing_safety_doc,
    reason = "the names and contracts are those of NVIDIA's driver API"
)]

mod context;
mod error;
mod graph;
mod launch;
#[path = "../../../launches.rs"]
mod launches;
mod memory;
mod module;
mod observe;
mod occupancy;
mod proc_address;
mod state;
mod stream;
mod tensor_map;

/// Functions that a program may look up and that this driver does not have: they answer
/// `CUDA_ERROR_NOT_SUPPORTED`, where a missing symbol would end the program.
macro_rules! not_supported {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> error::Result {
                eprintln!("emulated driver: {} is not supported", stringify!($name));
                error::NOT_SUPPORTED
            }
        )*
    };
}

not_supported! {
    cuCtxCreate_v3
    cuDestroyExternalMemory
    cuExternalMemoryGetMappedBuffer
    cuImportExternalMemory
    cuMemAdvise_v2
    cuMemAllocManaged
    cuMemPrefetchAsync_v2
    cuMemcpyPeerAsync
    cuOccupancyMaxPotentialBlockSizeWithFlags
    cuOccupancyMaxPotentialClusterSize
    cuTensorMapEncodeIm2col
    cuTensorMapReplaceAddress
    cuMulticastCreate
    cuMemCreate
    cuMemMap
}
