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
fn small_outputs_have_files_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let line = "run -b 2 -h 4 -h_k 2 -s 40 -s_k 56 -d 32 --mask b --verify full --repeat 1 \
                --out-row-max row.npy --out-head-max head.npy --out-key-sum key.npy";
    let ran = fmha_in(folder.path(), line);
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    let [rows, heads, keys] = ["row", "head", "key"].map(|name| numbers(folder.path(), name));
    assert_eq!([rows.len(), heads.len(), keys.len()], [2 * 4 * 40, 4, 2 * 4 * 56]);
    for (head, &greatest) in heads.iter().enumerate() {
        let of_head = |batch: usize| &rows[(batch * 4 + head) * 40..][..40];
        let all = of_head(0).iter().chain(of_head(1));
        assert_eq!(all.fold(f32::NEG_INFINITY, |a, &b| a.max(b)), greatest);
    }
    // Each query's probabilities are 1 together.
    assert!((keys.iter().sum::<f32>() - rows.len() as f32).abs() < 1e-2);
}

/// The f32 numbers of a .npy file of version 1.
fn numbers(folder: &Path, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(folder.join(format!("{name}.npy"))).unwrap();
    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    bytes[header..].chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
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

/// The shapes in a .safetensors file's header.
fn shapes(path: &Path) -> serde_json::Value {
    let bytes = std::fs::read(path).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    serde_json::from_slice(&rest[..u64::from_le_bytes(*length) as usize]).unwrap()
}

#[test]
fn permuted_files_have_heads_first_however_few() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (heads, kv) in [(1, 1), (2, 1), (2, 2)] {
        let problem =
            format!("-b 2 -h {heads} --heads-kv {kv} -s 3 --seqlen-k 5 -d 8 --iperm --operm --repeat 1");
        let line = format!("run {problem} --lse --export in.safetensors --out o.safetensors");
        let ran = fmha_in(folder.path(), &line);
        assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
        let (inputs, outputs) = (shapes(&at("in.safetensors")), shapes(&at("o.safetensors")));
        assert_eq!(inputs["q"]["shape"], serde_json::json!([2, heads, 3, 8]));
        assert_eq!(inputs["k"]["shape"], serde_json::json!([2, kv, 5, 8]));
        assert_eq!(outputs["o"]["shape"], serde_json::json!([2, heads, 3, 8]));
        // The command reads back the file that it has written.
        let line = "run --input in.safetensors --iperm --operm --repeat 1 --out again.safetensors";
        let ran = fmha_in(folder.path(), line);
        assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
        let line = format!("run {problem} --backward --export b.safetensors --out g.safetensors");
        let ran = fmha_in(folder.path(), &line);
        assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
        let gradients = shapes(&at("g.safetensors"));
        assert_eq!(gradients["dq"]["shape"], serde_json::json!([2, heads, 3, 8]));
        assert_eq!(gradients["dk"]["shape"], serde_json::json!([2, kv, 5, 8]));
        assert_eq!(gradients["dv"]["shape"], serde_json::json!([2, kv, 5, 8]));
    }
}

#[test]
fn what_was_made_up_is_written_on_request_and_gives_the_same_results() {
    for options in [
        "--bias e:2 --sink --prec bf16",
        "--bias a:1 --prec fp32 --mask t",
        "--prec fp8 --qscale kv --prec-o fp8",
        "--backward --bias e:1 --dbias --sink --dsink --dlse",
        "--vlayout c --operm",
        "--vlayout c --iperm",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let first = format!(
            "run -b 2 -h 2 -s 6 -d 8 --repeat 1 {options} --export in.safetensors --out a.safetensors"
        );
        let ran = fmha_in(folder.path(), &first);
        assert_eq!(ran.status, 0, "{options}: {}{}", ran.out, ran.err);
        // The type of O alone is not in the inputs.
        let rest: Vec<&str> = options.split(' ').collect();
        let rest = rest.join(" ");
        let second = format!("run --input in.safetensors --repeat 1 {rest} --out b.safetensors");
        let ran = fmha_in(folder.path(), &second);
        assert_eq!(ran.status, 0, "{options}: {}{}", ran.out, ran.err);
        let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
        assert_eq!(read("a.safetensors"), read("b.safetensors"), "{options}");
    }
}

#[test]
fn a_user_operand_is_the_one_that_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let made = "run -b 1 -h 2 -s 6 -d 8 --prec fp32 --sink --repeat 1 --seed";
    for seed in ["1", "2"] {
        let line = format!("{made} {seed} --export in{seed}.safetensors --out o{seed}.safetensors");
        assert_eq!(fmha_in(folder.path(), &line).status, 0);
    }
    // q, k, v of the first with the sink of the first by name, then by default: the first's result.
    for how in ["--operand sink=sink", ""] {
        let line = format!("run --input in1.safetensors --sink --repeat 1 {how} --out again.safetensors");
        let ran = fmha_in(folder.path(), &line);
        assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
        let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
        assert_eq!(read("o1.safetensors"), read("again.safetensors"));
        assert_ne!(read("o2.safetensors"), read("again.safetensors"));
    }
}
