//! The battery on the CUDA backend with no GPU: the kernels that NVRTC compiles, interpreted.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::tally::Tally;

/// The architecture whose kernels are interpreted.
pub(crate) const ARCH: &str = "sm_90a";

/// Of the battery `cargo xtask test` interprets what this matches: some 1500 cases, 8 minutes of two cores, most of them
/// spent in NVRTC. `cargo xtask emulated` takes [`FAMILIES`] whole.
pub(crate) const IN_TEST: &str = "^(edges|laws|combine)/";

/// The families that are interpreted. Edges, laws and FP8 are where kernels break; `definition` sweeps the same kernels
/// over pairs of features and would double the time. `guards` need host memory, and backward has no CUDA kernel yet.
const FAMILIES: [&str; 4] = ["combine", "edges", "laws", "fp8"];
const LEFT_OUT: [&str; 3] = ["backward", "definition", "guards"];

/// Tiles that the table takes for longer sequences than are interpreted, each on the cases of masks and lengths: two CTAs
/// of a cluster share their loads and draw their tiles together. Blocks of 32 keys, because the cases are short: so CTAs
/// of a pair see unlike numbers of blocks, and a tile has several. Then two consumers, as the table has them.
const CLUSTERS: [&str; 3] = [
    "cluster=2,order=dynamic,block_m=64,block_n=32,wait_anchor=0",
    "cluster=2,cluster_heads=1,order=dynamic,pack_gqa=0,block_m=64,block_n=32,wait_anchor=0",
    "cluster=2,order=dynamic",
];
const CLUSTER_CASES: &str = "^edges/(mask_sq_[a-z]*_sk/|nan|inf|group|gqa).*bf16";

/// Blackwell's kernel, on the cases where kernels break and in one 16-bit type, under happens-before, on so few
/// multiprocessors that CTAs walk several tiles.
const BLACKWELL: &str = "sm_100a";
const BLACKWELL_CASES: &str = "^(edges|laws)/.*bf16";

/// How much of the battery to interpret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// What matches [`IN_TEST`].
    InTest,
    /// All of [`FAMILIES`].
    Whole,
}

/// Runs those families and counts them; what does not run is counted absent, by name.
pub(crate) fn battery(environment: &[(String, String)], part: Part, tally: &mut Tally) {
    let mut say = |line: &str| {
        println!("{line}");
        tally.read(line);
    };
    if !environment.iter().any(|(name, _)| name == "FMHA_NVRTC") {
        say(&format!("absent: the battery on emulated {ARCH}: it needs NVRTC"));
        return;
    }
    say(&format!(
        "absent: the families {} on emulated {ARCH}: not in the part that CI runs",
        LEFT_OUT.join(", ")
    ));
    let filter = match part {
        Part::InTest => IN_TEST.to_owned(),
        Part::Whole => format!("^({})/", FAMILIES.join("|")),
    };
    if part == Part::InTest {
        say(&format!(
            "absent: the rest on emulated {ARCH}, what {IN_TEST} does not match: cargo xtask emulated"
        ));
    }
    if let Err(reason) = run(environment, ARCH, &["--allow-fallback", "--filter", &filter], &mut say) {
        say(&format!("battery cuda, {ARCH} emulated: 0 passed, 1 failed: {reason}"));
    }
    // As many multiprocessors as a cluster has CTAs, so that it walks several tiles.
    let walking = [("FMHA_EMULATE_SMS", "2"), ("FMHA_EMULATE_MODE", "hb")];
    let environment: Vec<(String, String)> = environment
        .iter()
        .cloned()
        .chain(walking.map(|(name, value)| (name.to_owned(), value.to_owned())))
        .collect();
    for tile in CLUSTERS {
        let words = ["--kernel", "sm90", "--tile", tile, "--filter", CLUSTER_CASES];
        if let Err(reason) = run(&environment, ARCH, &words, &mut say) {
            say(&format!("battery cuda, {ARCH} emulated, {tile}: 0 passed, 1 failed: {reason}"));
        }
    }
    let words = ["--allow-fallback", "--filter", if part == Part::InTest { BLACKWELL_CASES } else { &filter }];
    say(&format!("absent: the rest on emulated {BLACKWELL}, what {} does not match", words[2]));
    if let Err(reason) = run(&environment, BLACKWELL, &words, &mut say) {
        say(&format!("battery cuda, {BLACKWELL} emulated: 0 passed, 1 failed: {reason}"));
    }
}

/// `words`: which cases, and how they are to be computed.
fn run(
    environment: &[(String, String)],
    arch: &str,
    words: &[&str],
    say: &mut dyn FnMut(&str),
) -> Result<(), String> {
    let cargo = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO"));
        command.args(words).envs(environment.iter().cloned());
        command
    };
    // The command and the driver's double beside it.
    let built = cargo(&["build", "--release", "--quiet"]).status();
    if !built.is_ok_and(|status| status.success()) {
        return Err("cargo build does not end well".to_owned());
    }
    let mut child = cargo(&["run", "--release", "--quiet", "--", "conformance"])
        .args(["--backend", "cuda", "--emulate", arch])
        .args(words)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let mut sum = None;
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        let line = line.map_err(|error| error.to_string())?;
        println!("{line}");
        if let Some(counts) = line.trim().strip_prefix("all ") {
            sum = Some(counts.trim().to_owned());
        }
    }
    child.wait().map_err(|error| error.to_string())?;
    let sum = sum.ok_or("the battery ended without its counts")?;
    let tile = words.iter().skip_while(|&&word| word != "--tile").nth(1);
    let tile = tile.map(|tile| format!(", {tile}")).unwrap_or_default();
    say(&format!("battery cuda, {arch} emulated{tile}: {sum}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_families_that_run_and_those_left_out_are_all_there_are() {
        let text = include_str!("../../tests/battery/families/mod.rs");
        let mut named: Vec<&str> = text.lines().filter_map(|l| l.trim().strip_suffix("::cases(),")).collect();
        let mut ours = [&FAMILIES[..], &LEFT_OUT[..]].concat();
        named.sort_unstable();
        ours.sort_unstable();
        assert_eq!(named, ours);
    }
}
