//! `fmha run` on the user's own data.

use std::path::{Path, PathBuf};

use super::{fmha, fmha_in};

fn minilm() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/minilm/qkv.safetensors")
}

#[test]
fn a_real_transformer_layer_equals_pytorch_within_the_rule() {
    let ran = fmha(&format!("run --input {} --expect o --repeat 1", minilm().display()));
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("o against the expected one"), "{}", ran.out);
    assert!(ran.out.ends_with("PASS\n"), "{}", ran.out);
}

#[test]
fn a_wrong_expectation_fails_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("run --input {} --expect v --out o.npy --repeat 1", minilm().display());
    let ran = fmha_in(folder.path(), &line);
    assert_eq!(ran.status, 1, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("FAIL"), "{}", ran.out);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn outputs_of_one_run_are_inputs_of_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let first =
        format!("run --input {} --lse --out r.safetensors --out-lse lse.npy --repeat 1", minilm().display());
    assert_eq!(fmha_in(folder.path(), &first).status, 0);
    let first = format!("run --input {} --out o.npy --repeat 1", minilm().display());
    assert_eq!(fmha_in(folder.path(), &first).status, 0);
    // O as Q, K and V, from either kind of file: the same result.
    let again = fmha_in(folder.path(), "run --q o.npy --k o.npy --v o.npy --out twice.npy --repeat 1");
    assert_eq!(again.status, 0, "{}{}", again.out, again.err);
    let other = "run --input r.safetensors --q o --k o --v o --expect twice.npy --repeat 1";
    let ran = fmha_in(folder.path(), other);
    assert_eq!(ran.status, 2, "twice.npy is no tensor of the archive: {}{}", ran.out, ran.err);
    let other = "run --input r.safetensors --q o --k o --v o --out thrice.npy --repeat 1";
    assert_eq!(fmha_in(folder.path(), other).status, 0);
    let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    assert_eq!(read("twice.npy"), read("thrice.npy"));
    let mut names: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort_unstable();
    assert_eq!(names, ["lse.npy", "o.npy", "r.safetensors", "thrice.npy", "twice.npy"]);
}

#[test]
fn packed_data_takes_its_lengths_from_the_options() {
    let folder = tempfile::tempdir().unwrap();
    let line =
        format!("run --input {} --mode 1 -s 40,56 --lse --out o.safetensors --repeat 1", minilm().display());
    let ran = fmha_in(folder.path(), &line);
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("varlen"), "{}", ran.out);
}
