//! Device text of the AMD kernels: freestanding HIP C++ without ROCm headers, embedded so that any program with
//! clang or hipRTC can compile it.
//!
//! The layers of the text are: `isa` (one instruction, one function) below `mma` (typed tiles) below `cdna`
//! (forward, decode, backward), `rdna` (the same) and `combine.h`. What all vendors share comes from
//! [`fmha_core::source`].
//!
//! The crate also has each kernel's recipe for any backend that is [`Amd`]: supported problems, tile, entry, grid
//! and launches.

mod arch;
mod backward;
mod cdna;
mod cdna_bwd;
mod cdna_decode;
mod decode;
mod device;
mod forward;
mod index;
mod index_loss;
mod lists_bwd;
mod order;
mod paths;
mod rdna;
mod rdna_bwd;
mod rdna_decode;
pub mod recipes;
mod rows;
mod tile_list;
mod widened;

pub use arch::Arch;
pub use device::{Amd, DeviceFacts};

use fmha_core::source::{Entry, Header, KernelSource};
use include_dir::{Dir, include_dir};

/// Every header that an entry needs: core's, followed by those of this crate.
#[must_use]
pub fn headers() -> Vec<Header> {
    static FOLDER: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/fmha");
    let mut headers = fmha_core::source::headers();
    headers.extend(Header::all_of(&FOLDER));
    headers.extend([
        forward::tile_header(),
        backward::tile_header(),
        cdna_decode::tile_header(),
        lists_bwd::tile_header(),
        rdna::tile_header(),
        rows::header(),
        widened::header(),
        fmha_core::lists::header(),
        fmha_core::masks::header(),
        fmha_core::second::header(),
        fmha_gpu::tile_list::header(),
    ]);
    headers
}

/// Namespace, besides `fmha`, for entries on MFMA, and on WMMA too, since these share CDNA's scalar text.
const CDNA: &str = "using namespace fmha::cdna;";
const RDNA: &str = "using namespace fmha::cdna;\nusing fmha::rdna::RdnaTile;";

/// Source of an entry that uses these namespaces.
fn source(entry: &Entry<'_>, names: &str) -> KernelSource {
    let text = entry.render().replace("using namespace fmha;", &format!("using namespace fmha;\n{names}"));
    KernelSource::new(text, headers)
}

/// The attribute that tells the compiler the number of threads of a workgroup.
fn group_of(threads: u32) -> String {
    format!("__attribute__((amdgpu_flat_work_group_size({threads}, {threads})))")
}
