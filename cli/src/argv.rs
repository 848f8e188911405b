//! Composable Kernel's spelling of options, rewritten to ours before they are parsed.
//!
//! `-h_k=4`, `-h_k 4` and `-mask=b` become `--h_k=4` and `--mask=b`; its `0`/`1` switches
//! (`-lse=1`, `--iperm 0`) become flags that are there or not; its options that we do not have are
//! taken at their default, where they change nothing, and refused otherwise.

use crate::failure::Failure;

/// Options with a value whose names have several letters.
const VALUES: &[&str] = &[
    "mode",
    "h_k",
    "s_knew",
    "rotary_dim",
    "page_block_size",
    "s_k",
    "s_qpad",
    "s_kpad",
    "d_v",
    "scale_s",
    "qscale",
    "logits_soft_cap",
    "softcap",
    "bias",
    "prec",
    "mask",
    "vlayout",
    "init",
    "seed",
    "p_drop",
    "drop_seed",
    "drop_offset",
    "warmup",
    "repeat",
    "q_eff_lens",
    "kv_eff_lens",
];

/// Switches: flags of ours.
const SWITCHES: &[&str] = &[
    "lse",
    "iperm",
    "operm",
    "rotary_interleaved",
    "kname",
    "json",
    "dbias",
    "dsink",
    "sink_grad",
    "deterministic",
    "batch_invariant",
    "row_invariant",
    "sink",
    "init_sink",
    "backward",
];

/// Options of Composable Kernel that this command lacks, with the default value at which they change nothing.
const ABSENT: &[(&str, &str)] = &[
    ("drop_prefs", "0"),
    ("timer", "gpu"),
    ("num_splits", "1"),
    ("cache_batch_idx", "0"),
    ("pack_gqa", "1"),
];

/// The arguments in the form for `clap`.
pub(super) fn normalise(args: impl IntoIterator<Item = String>) -> Result<Vec<String>, Failure> {
    let mut args = args.into_iter().peekable();
    let mut normal = Vec::new();
    while let Some(arg) = args.next() {
        if arg == "--" {
            normal.push(arg);
            normal.extend(args);
            break;
        }
        let Some((name, value)) = split(&arg) else {
            normal.push(arg);
            continue;
        };
        if SWITCHES.contains(&name) {
            let value = match value {
                Some(value) => Some(value.to_owned()),
                None => args.next_if(|next| switch(next).is_some()),
            };
            match value.as_deref().map_or(Some(true), switch) {
                Some(true) => normal.push(format!("--{name}")),
                Some(false) => {}
                None => {
                    return Err(Failure::wrong(format!(
                        "{name} {} is neither 0 nor 1",
                        value.unwrap_or_default()
                    )));
                }
            }
        } else if let Some((_, default)) = ABSENT.iter().find(|(absent, _)| *absent == name) {
            let value = value.map(str::to_owned).or_else(|| args.next()).unwrap_or_default();
            if value != *default {
                return Err(Failure::wrong(format!(
                    "{name} {value}: there is no such option here, only {default}"
                )));
            }
        } else if VALUES.contains(&name) && !arg.starts_with("--") {
            match value {
                Some(value) => normal.push(format!("--{name}={value}")),
                // Joined, so that a value such as `-1` is not read as an option.
                None => match args.next() {
                    Some(value) => normal.push(format!("--{name}={value}")),
                    None => normal.push(format!("--{name}")),
                },
            }
        } else if is_word(&arg) {
            // `-dropout` is an option that there is not, and no `-d` with the value `ropout`.
            normal.push(format!("-{arg}"));
        } else {
            normal.push(arg);
        }
    }
    Ok(normal)
}

/// Name and value of `-name`, `-name=value`, `--name` or `--name=value`; none for a single letter.
fn split(arg: &str) -> Option<(&str, Option<&str>)> {
    let body = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-'))?;
    let (name, value) = match body.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (body, None),
    };
    (name.len() > 1).then_some((name, value))
}

/// Whether the argument is one dash and a name of three letters or more: no one-letter option has such a value.
fn is_word(arg: &str) -> bool {
    let name = arg.strip_prefix('-').map(|body| body.split('=').next().unwrap_or(body));
    let has_letters =
        |name: &str| name.len() > 2 && name.chars().all(|c| c.is_ascii_alphabetic() || c == '_');
    // `-inf` is a number.
    name.is_some_and(has_letters) && arg.parse::<f64>().is_err()
}

fn switch(text: &str) -> Option<bool> {
    match text {
        "1" | "true" => Some(true),
        "0" | "false" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> String {
        normalise(text.split(' ').map(str::to_owned)).unwrap().join(" ")
    }

    #[test]
    fn composable_kernels_spelling_becomes_ours() {
        assert_eq!(words("-h_k=4 -mask=b -s_k -1"), "--h_k=4 --mask=b --s_k=-1");
        assert_eq!(words("-prec bf16 -b=2 -h 8"), "--prec=bf16 -b=2 -h 8");
        assert_eq!(words("-num_splits=1 -timer gpu -d 64"), "-d 64");
    }

    #[test]
    fn switches_are_flags_that_are_there_or_not() {
        assert_eq!(words("-lse=1 -iperm=0 --operm 1 --json"), "--lse --operm --json");
        assert_eq!(words("--kname -b 2"), "--kname -b 2");
    }

    #[test]
    fn our_own_spelling_passes_unchanged() {
        let ours = "--heads-kv 4 --seqlen-k=7 -b 1 -d128 -s=16 -- -mask=b";
        assert_eq!(words(ours), ours);
    }

    #[test]
    fn a_word_behind_one_dash_is_an_option_and_no_letter_with_a_value() {
        assert_eq!(words("-dropout 0.1 -causal=1"), "--dropout 0.1 --causal=1");
        assert_eq!(words("--softmax-scale -inf -b2"), "--softmax-scale -inf -b2");
    }

    #[test]
    fn what_would_be_ignored_is_refused_with_its_number() {
        for (text, said) in
            [("-num_splits=4", "num_splits 4"), ("-lse=2", "lse 2"), ("-timer cpu", "timer cpu")]
        {
            let Err(Failure::Wrong(line)) = normalise(text.split(' ').map(str::to_owned)) else {
                panic!("{text} is accepted");
            };
            assert!(line.contains(said), "{line}");
        }
    }
}
