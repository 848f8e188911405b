//! `fmha conformance`: its report and its exit status. The battery itself runs elsewhere.

use super::{fmha, fmha_in};

/// A filter that finds few cases, whatever the battery has.
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

/// Each case in one part, by its kernels: what a run of that part would run.
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

/// Cases that a seed decides pass on the CPU, and one of them alone is the same case.
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
