//! `fmha run --ranks N` and `fmha explain --ranks N`.

use super::fmha;
use super::run::{npy, quoted};

const BASE: &str = "-h 4 --heads-kv 2 -d 24 --prec bf16 --backend cpu --repeat 1 --warmup 0";

#[test]
fn a_run_over_ranks_ends_in_pass() {
    for (options, says) in [
        ("-s 70 --mask b --ranks 3 --scheme gather --batch-invariant", "the bits of one rank"),
        ("-s 70 --mask b --ranks 2 --scheme ring --backward --sink", "scheme      ring: asked for"),
        (
            "--mode 1 -s 50,0,21 --mask b:9,0 --p-drop 0.2 --ranks 2 --scheme ulysses",
            "ranks              2, ",
        ),
    ] {
        let ran = fmha(&format!("run {BASE} {options}"));
        assert!(ran.status == 0 && ran.out.ends_with("PASS\n"), "{options}: {}{}", ran.out, ran.err);
        assert!(ran.out.contains(says), "{options}: {}", ran.out);
    }
}

/// Numbers below `most`, drawn by a seed.
fn drawn(seed: u64, most: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    }
}

#[test]
fn a_mask_of_a_file_and_functions_over_ranks_are_those_of_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, descr: &str, shape: &[usize], bytes: Vec<u8>| {
        let path = folder.path().join(format!("{name}.npy"));
        std::fs::write(&path, npy(descr, shape, &bytes)).unwrap();
        path.display().to_string()
    };
    let mut at = drawn(1, 70);
    let ends: Vec<u8> = (0..2 * 4 * 70).flat_map(|_| (at() as i32 - 3).to_le_bytes()).collect();
    let intervals = file("intervals", "<i4", &[1, 2, 4, 70], ends);
    let mut at = drawn(2, 3);
    let pairs = file("pairs", "|b1", &[2, 1, 70, 70], (0..2 * 70 * 70).map(|_| u8::from(at() > 0)).collect());
    let mut at = drawn(3, 1 << 31);
    let words = file("words", "<u4", &[4, 71, 2], (0..4 * 71 * 8).map(|_| at() as u8).collect());
    let packed = "--mode 1 -s 50,0,21";
    for options in [
        format!("-s 70 --mask {intervals} --ranks 3"),
        format!("-s 70 --mask {intervals} --ranks 2 --scheme ring --backward --sink"),
        format!("-s 70 --mask {pairs} --ranks 2 --scheme ulysses --backward"),
        format!(
            "-b 2 -s 70 --mask {pairs} --ranks 2 --scheme gather --score '0.5 * s + 0.1 * (k - q)' --backward"
        ),
        format!("{packed} --mask {words} --ranks 3 --scheme gather --keep 'k <= q or k % 5 == 0'"),
        "-s 70 --score 'tanh(s / 3.0) * 3.0 + h' --keep 'q // 9 == k // 9' --ranks 4 --backward".to_owned(),
        format!("{packed} --score 's * 0.5 - b' --mask b --p-drop 0.2 --ranks 2 --scheme ring --backward"),
    ] {
        let ran = quoted(&format!("run {BASE} --lse {options}"));
        assert!(ran.status == 0 && ran.out.ends_with("PASS\n"), "{options}: {}{}", ran.out, ran.err);
        assert!(ran.out.contains("\nranks   ") && ran.out.contains("one rank\n"), "{options}: {}", ran.out);
    }
    for (options, says) in [
        (format!("-s 71 --mask {intervals} --ranks 2"), "has 70 queries (seqlen_q), not 71"),
        (
            format!("-s 70 --mask {pairs} --ranks 2 --scheme ring"),
            "ring: mask_bits: keys of part 0 begin at position 53, no multiple of a word's keys, 32",
        ),
        ("-s 70 --score 's +' --ranks 2".to_owned(), "score"),
        ("-s 70 --keep 'k - q' --ranks 2".to_owned(), "keep"),
        ("-s 70 --lists nowhere.npy --ranks 2".to_owned(), "nowhere.npy"),
        (
            "-s 70 --out-row-max row.npy --ranks 2".to_owned(),
            "outputs: a small output (row_max, head_max, key_sum) is for one device alone, not for ranks (here 2)",
        ),
    ] {
        let ran = quoted(&format!("run {BASE} {options}"));
        assert_eq!((ran.status, &*ran.out), (2, ""), "{options}: {}", ran.err);
        assert!(ran.err.contains(says), "{options}: {}", ran.err);
    }
}

#[test]
fn what_does_not_go_over_ranks_is_refused_with_the_reason() {
    for (options, says) in [
        ("--ranks 3 --scheme ulysses", "rank 0, scheme: ulysses: num_heads_q 4 is not a multiple of 3 ranks"),
        ("--ranks 2 --scheme star", "scheme `star` is none of gather, ulysses, ring, mixed, decode"),
        ("--ranks 2 --bias e:2", "bias e: each rank has its own rows of it"),
        ("--ranks 2 --iperm", "tensors are contiguous b*s*h*d"),
        ("--ranks 65", "ranks 65 are more than the 64 processes"),
        ("--ranks 0", "ranks 0 is not in 1..="),
    ] {
        let ran = fmha(&format!("run {BASE} -s 40 {options}"));
        assert_eq!(ran.status, 2, "{options}: {}{}", ran.out, ran.err);
        assert!(ran.err.contains(says), "{options}: {}", ran.err);
        // Errors in the command's options are reported before anything runs.
        let by_words = !options.contains("--iperm");
        assert_eq!(ran.out.is_empty(), by_words, "{options}: {}", ran.out);
    }
}

#[test]
fn explain_says_what_each_scheme_would_cost_over_ranks_that_are_not_here() {
    let ran = fmha("explain -b 1 -h 32 --heads-kv 8 -s 32768 -d 128 --mask b --prec bf16 --ranks 16");
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(ran.out.starts_with("scheme      "), "{}", ran.out);
    for scheme in ["gather", "ulysses", "ring"] {
        let line = ran.out.lines().find(|line| line.trim_start().starts_with(scheme)).unwrap_or_default();
        assert!(line.contains(" ms (kernels ") && line.ends_with(" of one device's rate"), "{}", ran.out);
    }
}
