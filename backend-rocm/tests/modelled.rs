//! The committed tables of modelled figures equal what the compiler and llvm-mca report today.

use fmha_core::DType;
use fmha_rocm::Arch;

mod support;
#[path = "support/modelled.rs"]
mod table;

/// Rows of f16 are left out: their kernels differ from bf16's only in the products' mnemonic and in conversions.
#[test]
fn the_committed_table_of_modelled_figures_is_current() {
    rows_are_current(|dtype| dtype != DType::F16);
}

#[test]
#[ignore = "half a minute of kernels that have a twin of bf16: cargo xtask test --all"]
fn the_rows_of_f16_in_the_committed_table_of_modelled_figures_are_current() {
    rows_are_current(|dtype| dtype == DType::F16);
}

fn rows_are_current(dtypes: fn(DType) -> bool) {
    if !support::clang_is_there() || !table::tools_are_there() {
        return;
    }
    // Lines of a table: a header, then rows whose second column begins with a data type.
    let is_of = |line: &&str| {
        let call = line.split('\t').nth(1).and_then(|call| call.split('/').next());
        call.and_then(|dtype| dtype.parse().ok()).is_none_or(dtypes)
    };
    let committed: Vec<&str> =
        include_str!("../../docs/kernels/cdna-fwd.tsv").lines().filter(is_of).collect();
    let current = table::table(dtypes);
    for (ours, theirs) in committed.iter().zip(current.lines()) {
        assert_eq!(*ours, theirs, "make it anew: cargo run --release -p fmha-rocm --example modelled");
    }
    assert_eq!(committed.len(), current.lines().count());
    assert!(committed.len() > 10);
}

/// Rows of the backward's table for WMMA with the smallest head dimension; `--all` checks the other rows.
#[test]
fn rows_of_the_committed_table_of_the_backward_on_wmma_are_current() {
    rows_on_wmma_are_current(|_, head_dim| head_dim == 64);
}

#[test]
#[ignore = "15 kernels are compiled: cargo xtask test --all"]
fn the_committed_table_of_the_backward_on_wmma_is_current() {
    rows_on_wmma_are_current(|_, _| true);
}

fn rows_on_wmma_are_current(rows: fn(Arch, u32) -> bool) {
    if !support::clang_is_there() || !table::tools_are_there() {
        return;
    }
    let committed: Vec<&str> = include_str!("../../docs/kernels/rdna-bwd.tsv").lines().collect();
    let current = table::rdna_bwd_table(rows);
    for line in current.lines() {
        assert!(
            committed.contains(&line),
            "not `{line}`: make it anew: cargo run --release -p fmha-rocm --example modelled"
        );
    }
    assert!(current.lines().count() > 2);
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
