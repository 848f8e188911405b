//! Writes `docs/kernels/cdna-fwd.tsv`, `cdna-bwd.tsv`, `rdna-bwd.tsv` and `cdna-decode.tsv`: registers,
//! occupancy and the modelled passes of the main loops. `modelled fwd`, `modelled bwd` and `modelled decode`
//! write one of them.

#[path = "../tests/support/mod.rs"]
mod support;
#[path = "../tests/support/modelled.rs"]
mod table;

fn main() -> std::io::Result<()> {
    if !support::clang_is_there() || !table::tools_are_there() {
        return Ok(());
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kernels");
    let wanted = std::env::args().nth(1);
    let is_wanted = |name| wanted.as_deref().is_none_or(|wanted| wanted == name);
    if is_wanted("fwd") {
        std::fs::write(format!("{folder}/cdna-fwd.tsv"), table::table(|_| true))?;
    }
    if is_wanted("bwd") {
        std::fs::write(format!("{folder}/cdna-bwd.tsv"), table::bwd_table())?;
        std::fs::write(format!("{folder}/rdna-bwd.tsv"), table::rdna_bwd_table(|_, _| true))?;
    }
    if is_wanted("decode") {
        std::fs::write(format!("{folder}/cdna-decode.tsv"), table::decode_table())?;
    }
    Ok(())
}
