//! `fmha bench`: its tables, formats, peers and pictures. No time is judged.

use super::fmha_in;

const TABLE: &str = r#"
[[table]]
name = "t"
title = "a title"
common = { b = 1, h = 2, d = 16, prec = "bf16", mask = "b:8,0" }
rows = [{ s = 16 }, { s = 32 }]
"#;

const PEERS: &str = r#"{"row": "B1 H2 S16 D16 b:8,0 bf16", "peer": "theirs", "speed": 0.5, "ms": 1.0}
{"row": "B1 H2 S32 D16 b:8,0 bf16", "peer": "theirs", "absent": "not taken"}
"#;

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t.toml"), TABLE).unwrap();
    std::fs::write(folder.path().join("peers.jsonl"), PEERS).unwrap();
    folder
}

#[test]
fn a_table_has_our_figures_beside_the_peers() {
    let folder = folder();
    let ran = fmha_in(folder.path(), "bench t.toml --rounds 1 --peers peers.jsonl --plot t.svg");
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    for words in [
        "## t: a title, TFLOP/s",
        "| theirs | ours / best |",
        "| B1 H2 S16 D16 b:8,0 bf16 |",
        "Geometric mean",
    ] {
        assert!(ran.out.contains(words), "{words}: {}", ran.out);
    }
    let picture = std::fs::read_to_string(folder.path().join("t.svg")).unwrap();
    assert!(picture.contains("theirs") && picture.contains("S32"), "{picture}");
}

#[test]
fn every_format_has_every_row() {
    let folder = folder();
    let csv = fmha_in(folder.path(), "bench t.toml --rounds 1 --format csv --protocol hot --rows S16");
    assert_eq!(csv.out.lines().count(), 2, "{}{}", csv.out, csv.err);
    let ran = fmha_in(folder.path(), "bench t.toml --rounds 1 --format json --out r.json");
    assert_eq!((ran.status, ran.out.as_str()), (0, ""), "{}", ran.err);
    let text = std::fs::read_to_string(folder.path().join("r.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["tables"][0]["rows"].as_array().unwrap().len(), 2);
    // Our own figures are a peers' file too.
    let ran = fmha_in(folder.path(), "bench t.toml --rounds 1 --format csv --out ours.csv");
    assert_eq!(ran.status, 0, "{}", ran.err);
    let text = std::fs::read_to_string(folder.path().join("ours.csv")).unwrap().replace(",ours,", ",before,");
    std::fs::write(folder.path().join("before.csv"), text).unwrap();
    let ran = fmha_in(folder.path(), "bench t.toml --rounds 1 --peers before.csv");
    assert!(
        ran.out.contains("| before | ours / best |") && ran.out.contains("over 2 rows"),
        "{}{}",
        ran.out,
        ran.err
    );
}

#[test]
fn a_list_runs_nothing() {
    let folder = folder();
    let ran = fmha_in(folder.path(), "bench t.toml --list --rows S32");
    assert_eq!(ran.status, 0);
    assert!(ran.out.contains("S32") && !ran.out.contains("S16"), "{}", ran.out);
}

#[test]
fn rows_go_over_ranks_beside_one_device() {
    let folder = folder();
    let ran = fmha_in(folder.path(), "bench t.toml --ranks 3 --rows S32 --scheme gather");
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    for words in
        ["## t: a title, over ranks", "| B1 H2 S32 D16 b:8,0 bf16 | 2 | gather | ", " | 3 | gather | "]
    {
        assert!(ran.out.contains(words), "{words}: {}", ran.out);
    }
    let ran = fmha_in(folder.path(), "bench t.toml --ranks 2 --rows S16 --scheme decode --format json");
    assert_eq!(ran.status, 0, "{}{}", ran.out, ran.err);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    let reason = report[0]["absent"].as_str().unwrap();
    assert!(
        report[0]["ranks"] == 2 && reason.contains("decode: each of 2 ranks needs all queries"),
        "{reason}"
    );
    let ran = fmha_in(folder.path(), "bench t.toml --ranks 2 --peers peers.jsonl");
    assert!(ran.status == 2 && ran.err.contains("ranks 2: a table of scaling has no peers"), "{}", ran.err);
    let ran = fmha_in(folder.path(), "bench t.toml --ranks 2 --emulate sm_90a");
    assert!(
        ran.status == 2 && ran.err.contains("ranks 2 are processes of the CPU, or a GPU each"),
        "{}",
        ran.err
    );
}
