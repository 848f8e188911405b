//! "Did you mean", and what shells complete.

use super::fmha;

#[test]
fn a_wrong_word_is_refused_with_the_one_that_is_meant() {
    for (line, meant) in [
        ("rum", "did you mean run?"),
        ("Run", "did you mean run?"),
        ("tunes", "did you mean tune?"),
        ("run -dropout 0.1", "did you mean --p-drop?"),
        ("run -causal 1", "did you mean --mask causal?"),
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
    // Row i of 64 sees i keys, in each of two heads.
    let ran = explain("causal");
    assert!(ran.status == 0 && ran.out.contains("4160 visible pairs"), "{}{}", ran.out, ran.err);
}

/// The words that help lists: `(run, --softcap)`, and a command by itself.
fn helped() -> Vec<(String, String)> {
    let commands = fmha("--help").out;
    let (_, commands) = commands.split_once("Commands:\n").unwrap();
    let commands = commands.lines().take_while(|line| !line.is_empty());
    let mut all = Vec::new();
    for command in commands.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help") {
        all.push((command.to_owned(), command.to_owned()));
        for line in fmha(&format!("{command} --help")).out.lines() {
            let line = line.trim_start();
            if line.starts_with('-') {
                let option = line.split(|c: char| c != '-' && c != '_' && !c.is_ascii_alphanumeric());
                all.extend(
                    option
                        .filter(|word| word.len() > 2 && word.starts_with("--"))
                        .map(|o| (command.to_owned(), o.to_owned())),
                );
            }
        }
    }
    all
}

#[test]
fn shells_are_given_every_command_and_option_that_help_names() {
    let helped = helped();
    assert!(helped.len() > 150, "{} words in the help of all commands", helped.len());
    for shell in ["bash", "zsh", "fish"] {
        let ran = fmha(&format!("completions {shell}"));
        assert_eq!((ran.status, ran.err.as_str()), (0, ""), "{shell}");
        let words: std::collections::HashSet<_> =
            ran.out.split(|c: char| c != '-' && c != '_' && !c.is_ascii_alphanumeric()).collect();
        for (command, word) in &helped {
            // fish writes `-l softcap`.
            let word = if shell == "fish" { word.trim_start_matches('-') } else { word };
            assert!(words.contains(word), "{shell}: {command} {word}");
        }
        // A shell reads its script without an error.
        let reads = if shell == "fish" { "--no-execute" } else { "-n" };
        let script = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(script.path(), &ran.out).unwrap();
        match std::process::Command::new(shell).arg(reads).arg(script.path()).output() {
            Ok(ran) => assert!(ran.status.success(), "{shell}: {}", String::from_utf8_lossy(&ran.stderr)),
            Err(_) => println!("absent: {shell}: its script was not read"),
        }
    }
    let ran = fmha("completions tcsh");
    assert_eq!((ran.status, ran.err.lines().count()), (2, 1), "{}", ran.err);
    assert!(ran.err.contains("bash") && ran.err.contains("tcsh"), "{}", ran.err);
}

#[test]
fn bash_completes_an_option_and_a_value() {
    let script = fmha("completions bash").out;
    let completed = |words: &[&str]| {
        let line = format!(
            "{script}\nCOMP_WORDS=(fmha {}); COMP_CWORD={}; _fmha fmha '{}' x; echo \"${{COMPREPLY[*]}}\"",
            words.join(" "),
            words.len(),
            words.last().unwrap()
        );
        match std::process::Command::new("bash").args(["-c", &line]).output() {
            Ok(ran) => Some(String::from_utf8(ran.stdout).unwrap().trim().to_owned()),
            Err(_) => None,
        }
    };
    let Some(commands) = completed(&["con"]) else {
        println!("absent: bash: nothing was completed");
        return;
    };
    assert_eq!(commands, "conformance");
    assert_eq!(completed(&["run", "--softc"]).unwrap(), "--softcap");
    assert_eq!(completed(&["completions", "z"]).unwrap(), "zsh");
}
