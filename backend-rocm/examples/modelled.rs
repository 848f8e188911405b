//! Writes `docs/kernels/cdna-fwd.tsv` and `cdna-bwd.tsv`: registers, occupancy and the modelled passes of the
//! main loops. `modelled fwd` and `modelled bwd` write one of them.

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
    let tables: [(&str, fn() -> String); 2] = [("fwd", table::table), ("bwd", table::bwd_table)];
    for (name, table) in tables {
        if wanted.as_deref().is_none_or(|wanted| wanted == name) {
            std::fs::write(format!("{folder}/cdna-{name}.tsv"), table())?;
        }
    }
    Ok(())
}
