//! `fmha run --ranks N` and `fmha explain --ranks N`.

use super::fmha;

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
