//! `fmha conformance`: its report and its exit status. The battery itself runs elsewhere.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::{command, fmha, fmha_in};

/// A filter that finds few cases in any battery.
fn a_few() -> (String, usize) {
    let ran = fmha("conformance --list");
    assert_eq!(ran.status, 0);
    let names: Vec<&str> = ran.out.lines().collect();
    assert!(names.len() > 1000, "{} cases", names.len());
    let family = names[0].split('/').take(2).collect::<Vec<_>>().join("/");
    let found = names.iter().filter(|name| name.starts_with(&family)).take(3).collect::<Vec<_>>();
    (format!("^({})$", found.iter().map(ToString::to_string).collect::<Vec<_>>().join("|")), found.len())
}

#[test]
fn the_report_ends_in_a_summary_that_counts_every_case() {
    let (filter, count) = a_few();
    let ran = fmha(&format!("conformance --backend cpu --filter {filter} --json"));
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    let counts =
        ["passed", "failed", "refused", "absent"].map(|name| report["summary"][name].as_u64().unwrap());
    assert_eq!(counts, [count as u64, 0, 0, 0]);
    let tail = &ran.out[ran.out.find("\"summary\"").unwrap()..];
    assert_eq!(tail.matches('{').count(), 1, "something follows the summary: {tail}");
}

/// A part is listed as it would run: each case is in one part, by its kernels.
#[test]
fn a_part_is_listed_as_it_would_run() {
    let names = |words: &str| {
        let ran = fmha(&format!("conformance --backend cpu --filter edges --list {words}"));
        assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
        ran.out.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let (mut whole, one, other) = (names(""), names("--deal 1/2"), names("--deal 2/2"));
    assert!(!one.is_empty() && !other.is_empty());
    let mut both = [one, other].concat();
    both.sort();
    whole.sort();
    assert_eq!(both, whole);
}

#[test]
fn junit_is_written_on_request() {
    let (filter, _) = a_few();
    let folder = tempfile::tempdir().unwrap();
    let line = format!("conformance --backend cpu --filter {filter} --junit r.xml");
    let ran = fmha_in(folder.path(), &line);
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains(" passed, 0 failed, 0 refused, 0 absent"), "{}", ran.out);
    let xml = std::fs::read_to_string(folder.path().join("r.xml")).unwrap();
    assert!(xml.contains("<testsuite") && xml.contains("<testcase"), "{xml}");
}

/// Random cases of a seed pass on the CPU, and one of them alone, by name, is the same case.
#[test]
fn drawn_cases_run_and_are_repeated_by_name() {
    let ran = fmha("conformance --backend cpu --drawn 5:24");
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("24 passed, 0 failed, 0 refused, 0 absent"), "{}", ran.out);
    let names = fmha("conformance --drawn 5:24 --list");
    let name = names.out.lines().nth(20).unwrap();
    assert!(name.starts_with("drawn/5_00020/"), "{name}");
    let alone = fmha("conformance --backend cpu --drawn 5:21 --filter drawn/5_00020/ --list");
    assert_eq!(alone.out.trim_end(), name);
}

/// A kernel of the forward alone refuses a backward case, which no backend declares: the case fails.
#[test]
fn the_command_that_repeats_a_failed_case_says_how_the_case_was_run() {
    let names = fmha("conformance --list --filter ^backward/");
    let name = names.out.lines().next().unwrap();
    let how = "--backend cpu --kernel=cpu-fwd --tile=block_n=64 --accuracy=exact --allow-fallback --batch-invariant \
               --check-lengths --huge-on-device";
    let repro = |words: &str| {
        let ran = fmha(&format!("conformance --filter ^{name}$ {words}"));
        assert_eq!(ran.status, 1, "{}{}", ran.out, ran.err);
        let line = ran.out.lines().find(|line| line.trim_start().starts_with("fmha conformance")).unwrap();
        line.trim_start().split_once("$' ").unwrap().1.to_owned()
    };
    let said = repro(how);
    let sorted = |words: &str| {
        let mut words: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
        words.sort();
        words
    };
    assert_eq!(sorted(&said), sorted(how));
    assert_eq!(repro(&said), said, "a case that is repeated is run otherwise");
}

/// `fmha conformance | head -1` runs few of the hundred thousand cases: it stops when the reader is gone.
#[test]
fn a_run_whose_output_nobody_reads_any_more_stops() {
    let folder = tempfile::tempdir().unwrap();
    for words in ["", "--json", "--junit r.xml"] {
        let mut command =
            command(folder.path(), &format!("conformance --backend cpu --drawn 1:100000 {words}"));
        let mut running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(running.stdout.take().unwrap());
        if words != "--json" {
            let mut first = String::new();
            out.read_line(&mut first).unwrap();
            assert!(first.starts_with("100000 cases on cpu"), "{first}");
        }
        drop(out);
        let start = Instant::now();
        while running.try_wait().unwrap().is_none() {
            if start.elapsed() > Duration::from_secs(300) {
                running.kill().unwrap();
                panic!("`{words}`: goes on for 300 s though nobody reads");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let ran = super::Ran::of(running.wait_with_output().unwrap());
        assert_eq!((ran.status, &*ran.err), (141, ""), "{words}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a report of a part was written");
    }
}
