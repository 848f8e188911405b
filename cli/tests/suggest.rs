//! "Did you mean", and what shells complete.

use super::fmha;

#[test]
fn a_wrong_word_is_refused_with_the_one_that_is_meant() {
    for (line, meant) in [
        ("rum", "did you mean run?"),
        ("run --maks b", "did you mean --mask?"),
        ("run --causal", "did you mean --mask causal?"),
        ("explain --is_causal=1", "did you mean --mask causal?"),
        ("run --scale 1", "did you mean --softmax-scale?"),
        ("tune --dropout_p 0.1", "did you mean --p-drop?"),
        ("run --attn_mask m.npy", "did you mean --mask, or --bias e?"),
        ("run --prec bf61", "did you mean bf16?"),
        ("run --mask casual", "did you mean causal?"),
        ("run --backend cuad", "did you mean cuda?"),
    ] {
        let ran = fmha(line);
        assert_eq!((ran.status, ran.err.lines().count()), (2, 1), "{line}: {}", ran.err);
        assert!(ran.err.contains(meant), "{line}: {}", ran.err);
    }
    for line in ["run --prec int8", "run --zzzz 1", "run -s 1x"] {
        let ran = fmha(line);
        assert!(ran.status == 2 && !ran.err.contains("did you mean"), "{line}: {}", ran.err);
    }
}

#[test]
fn causal_is_a_mask_by_its_name() {
    let explain = |mask: &str| fmha(&format!("explain --backend cpu -b 1 -h 2 -s 64 -d 32 --mask {mask}"));
    // Of 64 rows the i-th sees i keys, in each of two heads.
    let ran = explain("causal");
    assert!(ran.status == 0 && ran.out.contains("4160 visible pairs"), "{}{}", ran.out, ran.err);
}

#[test]
fn shells_are_given_every_command_and_option() {
    for shell in ["bash", "zsh", "fish"] {
        let ran = fmha(&format!("completions {shell}"));
        assert_eq!((ran.status, ran.err.as_str()), (0, ""), "{shell}");
        for word in ["conformance", "bundle", "softmax-scale", "p-drop", "seqlen-k"] {
            assert!(ran.out.contains(word), "{shell}: {word}");
        }
    }
    let ran = fmha("completions tcsh");
    assert_eq!((ran.status, ran.err.lines().count()), (2, 1), "{}", ran.err);
    assert!(ran.err.contains("bash") && ran.err.contains("tcsh"), "{}", ran.err);
    // A shell reads its script without an error.
    let script = fmha("completions bash").out;
    if let Ok(ran) = std::process::Command::new("bash").args(["-n", "-c", &script]).output() {
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    }
}
