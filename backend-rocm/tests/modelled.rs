//! The committed table of modelled figures is what the compiler and llvm-mca say today.

mod support;
#[path = "support/modelled.rs"]
mod table;

#[test]
fn the_committed_table_of_modelled_figures_is_current() {
    if !support::clang_is_there() || !table::tools_are_there() {
        return;
    }
    let committed = include_str!("../../docs/kernels/cdna-fwd.tsv");
    let current = table::table();
    for (ours, theirs) in committed.lines().zip(current.lines()) {
        assert_eq!(ours, theirs, "make it anew: cargo run --release -p fmha-rocm --example modelled");
    }
    assert_eq!(committed.lines().count(), current.lines().count());
}

#[test]
fn the_committed_table_of_decodes_modelled_figures_is_current() {
    if !support::clang_is_there() || !table::tools_are_there() {
        return;
    }
    let committed = include_str!("../../docs/kernels/cdna-decode.tsv");
    let current = table::decode_table();
    for (ours, theirs) in committed.lines().zip(current.lines()) {
        assert_eq!(ours, theirs, "make it anew: cargo run --release -p fmha-rocm --example modelled");
    }
    assert_eq!(committed.lines().count(), current.lines().count());
}

#[test]
fn the_committed_table_of_the_backwards_modelled_figures_is_current() {
    if !support::clang_is_there() || !table::tools_are_there() {
        return;
    }
    let committed = include_str!("../../docs/kernels/cdna-bwd.tsv");
    let current = table::bwd_table();
    for (ours, theirs) in committed.lines().zip(current.lines()) {
        assert_eq!(ours, theirs, "make it anew: cargo run --release -p fmha-rocm --example modelled");
    }
    assert_eq!(committed.lines().count(), current.lines().count());
}
