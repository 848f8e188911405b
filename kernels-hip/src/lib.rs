//! Device text of the AMD kernels: freestanding HIP C++ that needs no ROCm header, embedded so that
//! a program can compile it wherever it finds clang or hipRTC.
//!
//! The text obeys the arrows of the repository: `isa` (one instruction, one function) below `mma` (typed
//! tiles) below `cdna` (forward, decode, backward), `rdna` (the same) and `combine.h`. What all vendors share
//! comes from [`fmha_core::source`].
//!
//! Beside the text stands each kernel's recipe: what it accepts, its tile, its entry, its grid, its launches, for any
//! backend that is [`Amd`].

mod arch;
mod backward;
mod cdna;
mod cdna_bwd;
mod cdna_decode;
mod decode;
mod device;
mod forward;
mod order;
mod paths;
mod rdna;
mod rdna_bwd;
mod rdna_decode;
pub mod recipes;
mod rows;
mod widened;

pub use arch::Arch;
pub use device::{Amd, DeviceFacts};

use fmha_core::source::{Entry, Header, KernelSource};

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        [$(Header::embedded(concat!("fmha/", $name), include_str!(concat!("../fmha/", $name)))),*]
    };
}

/// Every header that an entry needs: core's, then these.
#[must_use]
pub fn headers() -> Vec<Header> {
    let mut headers = fmha_core::source::headers();
    headers.extend(embedded!(
        "isa/hip.h",
        "isa/lane.h",
        "isa/mfma.h",
        "isa/wmma.h",
        "isa/buffer.h",
        "isa/sync.h",
        "isa/sched.h",
        "isa/num.h",
        "isa/widen.h",
        "mma/cdna.h",
        "mma/rdna.h",
        "amd/score.h",
        "cdna/config.h",
        "cdna/load.h",
        "cdna/direct.h",
        "cdna/schedule.h",
        "cdna/score.h",
        "cdna/tile_step.h",
        "cdna/output.h",
        "cdna/epilogue.h",
        "cdna/nonfinite.h",
        "cdna/main_loop.h",
        "cdna/simple_loop.h",
        "cdna/order.h",
        "cdna/span.h",
        "cdna/fwd.h",
        "cdna/bwd/job.h",
        "cdna/bwd/config.h",
        "cdna/bwd/load.h",
        "cdna/bwd/pairs.h",
        "cdna/bwd/owner.h",
        "cdna/bwd/store.h",
        "cdna/bwd/rest.h",
        "cdna/bwd/walk.h",
        "cdna/bwd/main.h",
        "cdna/decode/work.h",
        "cdna/decode/pieces.h",
        "cdna/decode/config.h",
        "cdna/decode/load.h",
        "cdna/decode/columns.h",
        "cdna/decode/main.h",
        "cdna/decode/merge.h",
        "cdna/decode/update.h",
        "rdna/config.h",
        "rdna/load.h",
        "rdna/tile_step.h",
        "rdna/epilogue.h",
        "rdna/fwd.h",
        "rdna/bwd/main.h",
        "rdna/decode/load.h",
        "rdna/decode/main.h",
        "simt/bwd.h",
        "simt/fwd.h",
        "simt/lists.h",
        "simt/lists_bwd.h",
        "simt/masked.h",
        "simt/scaled.h",
        "combine.h",
        "dropout.h",
        "widen_cache.h",
    ));
    headers.push(forward::tile_header());
    headers.push(backward::tile_header());
    headers.push(cdna_decode::tile_header());
    headers.push(rdna::tile_header());
    headers.push(widened::header());
    headers
}

/// Namespace beside `fmha` that entries on MFMA use, and those on WMMA too, which share CDNA's scalar text.
const CDNA: &str = "using namespace fmha::cdna;";
const RDNA: &str = "using namespace fmha::cdna;\nusing fmha::rdna::RdnaTile;";

/// An entry that uses these namespaces.
fn source(entry: &Entry<'_>, names: &str) -> KernelSource {
    let text = entry.render().replace("using namespace fmha;", &format!("using namespace fmha;\n{names}"));
    KernelSource::new(text, headers)
}

/// The attribute of a kernel whose workgroups have so many threads.
fn group_of(threads: u32) -> String {
    format!("__attribute__((amdgpu_flat_work_group_size({threads}, {threads})))")
}
