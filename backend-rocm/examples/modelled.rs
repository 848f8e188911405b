//! Writes `docs/kernels/cdna-fwd.tsv`: registers, occupancy and the modelled passes of the main loop.

#[path = "../tests/support/mod.rs"]
mod support;
#[path = "../tests/support/modelled.rs"]
mod table;

fn main() -> std::io::Result<()> {
    if !support::clang_is_there() || !table::tools_are_there() {
        return Ok(());
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kernels/cdna-fwd.tsv");
    std::fs::write(path, table::table())
}
