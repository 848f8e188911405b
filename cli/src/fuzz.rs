//! Random arguments, tables and files: each is accepted or refused with one line, and nothing panics.
//! `FMHA_FUZZ_SECONDS` sets about how long each test runs.

use std::sync::Arc;

use clap::Parser as _;
use fmha_core::cache::{Bundle, CompiledKernel};
use proptest::prelude::*;
use proptest::sample::select;

use crate::argv;
use crate::bench::{peers, table};
use crate::files::Archive;
use crate::options::ProblemArgs;
use crate::report::describe;
use crate::{Action, Command, one_line};

/// Number of cases: cases per second times the seconds of the run.
pub(crate) fn config(cases_per_second: u32) -> ProptestConfig {
    let seconds = std::env::var(fmha_core::env::FUZZ_SECONDS.name);
    let seconds: u32 = seconds.map_or(1, |seconds| seconds.parse().unwrap());
    let cases = cases_per_second.saturating_mul(seconds.max(1));
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Numbers at which behaviour changes, and words that are no numbers. There are few sequences or absurdly many:
/// numbers between are allowed, but would really use that memory.
const NUMBERS: &[&str] = &[
    "0",
    "1",
    "2",
    "3",
    "7",
    "64",
    "1000",
    "-1",
    "-2",
    "2147483647",
    "2147483648",
    "4294967295",
    "18446744073709551616",
    "1e3",
    "0x10",
    "x",
    "",
    " 1",
    "1,2",
    "3,0,17",
    "1,,2",
    "2000000000",
];

const WORDS: &[&str] = &[
    "bf16",
    "fp8",
    "fp32",
    "fp8-hybrid",
    "b",
    "t",
    "0",
    "1",
    "2",
    "b:7,0",
    "t:-1,-1",
    "b:-2,0",
    "g:3,-4",
    "b:2147483647,4294967295",
    "t:0,0,5",
    "e:2",
    "a:1",
    "n",
    "e:9",
    "kv",
    "pt",
    "r",
    "c",
    "auto",
    "cpu",
    "cuda:1",
    "cuda:",
    "rocm:99999999999",
    "block_m=8",
    "=",
    "é",
    "exact",
    "nan",
    "-inf",
    "1e-60",
    "1e400",
    "0.5",
    "-0",
    "0.99999999",
    "--",
    "-",
];

fn option() -> impl Strategy<Value = Vec<String>> {
    let name = select(vec![
        "-b",
        "-h",
        "--heads-kv",
        "-s",
        "--seqlen-k",
        "-d",
        "--head-dim-v",
        "--mode",
        "--padded-q",
        "--padded-k",
        "--seqused-q",
        "--seqused-k",
        "--prec",
        "--prec-o",
        "--softmax-scale",
        "--softcap",
        "--mask",
        "--bias",
        "--p-drop",
        "--drop-seed",
        "--drop-offset",
        "--qscale",
        "--vlayout",
        "-h_k",
        "-mask",
        "-lse",
        "--operand",
        "--tile",
        "--backend",
        "--accuracy",
        "--repeat",
        "-v",
        "--init",
    ]);
    let flag = select(vec![
        "--sink",
        "--iperm",
        "--operm",
        "--lse",
        "--backward",
        "--dbias",
        "--dsink",
        "--dlse",
        "--deterministic",
        "--batch-invariant",
        "--row-invariant",
        "--check-lengths",
        "--json",
        "--nonsense",
    ]);
    let value = prop_oneof![select(NUMBERS), select(WORDS)];
    prop_oneof![
        3 => (name.clone(), value.clone()).prop_map(|(name, value)| vec![name.to_owned(), value.to_owned()]),
        1 => (name, value).prop_map(|(name, value)| vec![format!("{name}={value}")]),
        2 => flag.prop_map(|flag| vec![flag.to_owned()]),
    ]
}

fn problem_of(action: Action) -> Option<ProblemArgs> {
    match action {
        Action::Explain(args) => Some(args.problem()),
        _ => None,
    }
}

/// Checks that a refusal has a text, of one line.
fn is_a_line(text: &str) -> Result<(), TestCaseError> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty()).count();
    prop_assert!(lines >= 1, "{:?}", text);
    prop_assert!(!text.contains("panicked"), "{}", text);
    Ok(())
}

proptest! {
    #![proptest_config(config(400))]

    /// Any options give a described problem or a refusal.
    #[test]
    fn any_options_are_a_problem_or_a_refusal(options in prop::collection::vec(option(), 0..7)) {
        let words = ["fmha", "explain"].map(str::to_owned).into_iter().chain(options.into_iter().flatten());
        let args = match argv::normalise(words) {
            Ok(args) => args,
            Err(failure) => return is_a_line(&failure.to_string()),
        };
        match Command::try_parse_from(args) {
            Err(error) => is_a_line(&one_line(&error))?,
            Ok(command) => {
                let Some(problem) = problem_of(command.action) else { return Ok(()) };
                match problem.setup(None) {
                    Ok(setup) => prop_assert!(!describe(&setup).is_empty()),
                    Err(failure) => {
                        let text = failure.to_string();
                        is_a_line(&text)?;
                        let number = text.contains(|c: char| c.is_ascii_digit());
                        let words = ["NaN", "inf", "is none", "is ALiBi", "is false"];
                        let value = number || words.iter().any(|word| text.contains(word));
                        prop_assert!(value, "no value: {}", text);
                    }
                }
            }
        }
    }

    /// Any text gives tables, or a refusal with a line number.
    #[test]
    fn any_text_is_a_table_or_a_refusal(
        parts in prop::collection::vec(select(vec![
            "[[table]]\n", "name = 't'\n", "title = \"x\"\n", "rows = [{ s = 16 }]\n", "rows = []\n",
            "common = { b = 1, mask = 'b' }\n", "unit = 'gbs'\n", "unit = 7\n", "rows = [{ s = -1 }]\n",
            "rows = [{ nonsense = true }]\n", "[", "]", "'", "=", "\u{0}", "é", "rows = [{ d = [1] }]\n",
            "rows = [{ lse = true, s = \"3,4\", mode = 1 }]\n", "9999999999999999999999",
        ]), 0..9)
    ) {
        if let Err(text) = table::parse(&parts.concat()) {
            is_a_line(&text)?;
        }
    }

    /// Other libraries' figures, in either form.
    #[test]
    fn any_text_is_peers_figures_or_a_refusal(
        text in "(row,peer,speed\n)?([a-z\"{},:\\[\\]0-9.e -]{0,30}\n){0,4}"
    ) {
        for parse in [peers::json, peers::csv] {
            if let Err(text) = parse(&text) {
                is_a_line(&text)?;
            }
        }
    }

    /// A header of any offsets and extents gives a tensor of the stated size, or a refusal.
    #[test]
    fn any_safetensors_are_tensors_or_a_refusal(
        extents in prop::collection::vec(prop_oneof![0u64..5, any::<u64>()], 0..5),
        offsets in (prop_oneof![0u64..70, any::<u64>()], prop_oneof![0u64..70, any::<u64>()]),
        dtype in select(vec!["F32", "BF16", "F8_E4M3", "I64", "BOOL", "X"]),
        claimed in prop_oneof![Just(None), any::<u64>().prop_map(Some)],
        data in prop::collection::vec(any::<u8>(), 0..70),
    ) {
        let header = format!(
            "{{\"q\":{{\"dtype\":\"{dtype}\",\"shape\":{extents:?},\"data_offsets\":[{},{}]}}}}",
            offsets.0, offsets.1
        );
        let length = claimed.unwrap_or(header.len() as u64);
        let bytes = [&length.to_le_bytes()[..], header.as_bytes(), &data].concat();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        std::fs::write(&path, bytes).unwrap();
        match Archive::open(&path).and_then(|archive| archive.tensor("q")) {
            Ok(tensor) => {
                let elems: u64 = tensor.shape.iter().product();
                prop_assert_eq!(elems * tensor.dtype.size_bytes(), tensor.bytes.len() as u64);
            }
            Err(failure) => is_a_line(&failure.to_string())?,
        }
    }

    /// A bundle with one byte changed, cut or lengthened is refused by name.
    #[test]
    fn a_bundle_that_is_not_the_written_one_is_refused(
        machine in prop::collection::vec(any::<u8>(), 0..50),
        (at, flip) in (any::<prop::sample::Index>(), 1u8..),
        cut in any::<prop::sample::Index>(),
        more in prop::collection::vec(any::<u8>(), 1..9),
    ) {
        let kernel = CompiledKernel {
            key: serde_json::from_value(serde_json::json!(vec![7u8; 32])).unwrap(),
            kernel: "sm90".to_owned(),
            arch: "sm_90a".to_owned(),
            compiler: "NVRTC".to_owned(),
            entry: String::new(),
            machine,
            assembly: Vec::new(),
            log: String::new(),
            resources: Default::default(),
            own_flags: Default::default(),
        };
        let whole = Bundle::new("b", [Arc::new(kernel)]).to_bytes().unwrap();
        prop_assert_eq!(Bundle::from_bytes("b", &whole).unwrap().len(), 1);
        let mut changed = whole.clone();
        changed[at.index(whole.len())] ^= flip;
        let longer = [whole.as_slice(), &more].concat();
        for bytes in [changed.as_slice(), &whole[..cut.index(whole.len())], &longer] {
            let text = Bundle::from_bytes("b", bytes).unwrap_err().to_string();
            prop_assert!(text.starts_with("bundle b"), "{}", text);
        }
    }
}
