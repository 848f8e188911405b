//! The kernels that are interpreted where there is no device, by the rows of `kernels.txt`.
//!
//! A new kernel gets its rows there, which `cargo xtask test`, `--all` and the evidence use.

use std::collections::HashMap;
use std::sync::LazyLock;

use crate::step::Step;

/// How an emulated device runs asynchronous work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Asynchronous work completes when it is issued: fast, but a missing wait is not noticed.
    Eager,
    /// Asynchronous work completes when it is issued, and vector clocks check the order of every access: a missing
    /// wait, fence or arrival is a failure.
    HappensBefore,
    /// Clusters run piece by piece in a random order that differs in each launch, so that tiles go to other CTAs.
    DrawnOrder,
    /// Asynchronous work is done as soon as it is issued, but unwritten memory, and the destination of a `cp.async`
    /// before its wait, hold finite garbage instead of NaN, which recomputed rows would hide.
    Garbage,
    /// Asynchronous work takes effect with random delays, different in each launch.
    Late,
}

/// One kernel on one architecture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Name of the kernel in plans, where every case must run on it; `None` lets the backend choose,
    /// fallbacks included.
    pub(crate) kernel: Option<&'static str>,
    /// Backend, `cuda` or `rocm`, and the architecture to emulate.
    pub(crate) backend: &'static str,
    pub(crate) arch: &'static str,
    /// Option `--tile`, for a row that tests a tile which no table chooses for such small cases.
    pub(crate) tile: Option<&'static str>,
    pub(crate) mode: Mode,
    /// Number of multiprocessors, few enough that each has several tiles; `None`: the emulator's default.
    pub(crate) multiprocessors: Option<u32>,
    /// The cases of `cargo xtask test`, those of `--all`, and the one of `--quick`.
    pub(crate) in_test: Cases,
    pub(crate) in_all: Cases,
    pub(crate) in_quick: Cases,
}

/// A filter of the battery; of the kernels that its cases need one in `deal` runs, with all its cases, since most
/// time goes into compiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cases {
    pub(crate) filter: &'static str,
    /// Number of kernels of which one is tested: 1 tests every kernel, 0 none.
    pub(crate) deal: u32,
}

const NONE: Cases = Cases { filter: "", deal: 0 };

/// The architecture that mutation and coverage interpret.
pub(crate) const HOPPER_ARCH: &str = "sm_90a";

/// The rows of `kernels.txt`, in its order.
pub(crate) static ROWS: LazyLock<Vec<Row>> = LazyLock::new(|| {
    parsed(include_str!("kernels.txt")).unwrap_or_else(|wrong| panic!("kernels.txt: {wrong}"))
});

/// The rows of a text; its head says what a row is.
///
/// # Errors
/// The line that is none, and the word that is wrong.
fn parsed(text: &'static str) -> Result<Vec<Row>, String> {
    let (mut rows, mut named) = (Vec::new(), HashMap::new());
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let wrong = |what: &str| format!("`{line}`: {what}");
        if let Some((name, filter)) = line.split_once(" = ") {
            named.insert(name, filter);
            continue;
        }
        let words: Vec<&'static str> = line.split_whitespace().collect();
        if !line.starts_with(' ') {
            let [arch, kernel, options @ ..] = words.as_slice() else {
                return Err(wrong("a row has no kernel"));
            };
            let mut row = Row::of(arch, kernel);
            for option in options {
                row.set(option).map_err(|what| wrong(&what))?;
            }
            rows.push(row);
            continue;
        }
        let (which, deal, filter) = match words[..] {
            [which, filter] => (which, Some(1), filter),
            [which, share, filter] => (which, share.strip_prefix("1/").and_then(|n| n.parse().ok()), filter),
            _ => return Err(wrong("cases are neither two words nor three")),
        };
        let deal = deal.filter(|&n| n > 0).ok_or_else(|| wrong("the second word is not 1/N"))?;
        let filter = match filter.strip_prefix('@') {
            Some(name) => *named.get(name).ok_or_else(|| wrong("no filter has this name"))?,
            None => filter,
        };
        let row: &mut Row = rows.last_mut().ok_or_else(|| wrong("the cases are of no row"))?;
        let cases = match which {
            "test" => &mut row.in_test,
            "all" => &mut row.in_all,
            "quick" => &mut row.in_quick,
            _ => return Err(wrong("the cases are neither of test, all nor quick")),
        };
        if cases.deal > 0 {
            return Err(wrong("the row has such cases already"));
        }
        *cases = Cases { filter, deal };
    }
    Ok(rows)
}

impl Row {
    fn of(arch: &'static str, kernel: &'static str) -> Self {
        Self {
            kernel: (kernel != "any").then_some(kernel),
            backend: if arch.starts_with("gfx") { "rocm" } else { "cuda" },
            arch,
            tile: None,
            mode: Mode::Eager,
            multiprocessors: None,
            in_test: NONE,
            in_all: NONE,
            in_quick: NONE,
        }
    }

    /// Takes a word behind the kernel's name.
    fn set(&mut self, word: &'static str) -> Result<(), String> {
        match (word, word.split_once('=')) {
            ("happens-before", _) => self.mode = Mode::HappensBefore,
            ("drawn-order", _) => self.mode = Mode::DrawnOrder,
            ("garbage", _) => self.mode = Mode::Garbage,
            ("late", _) => self.mode = Mode::Late,
            (_, Some(("sms", count))) => {
                self.multiprocessors = Some(count.parse().map_err(|_| format!("sms {count} is no number"))?);
            }
            (_, Some(("tile", fields))) => self.tile = Some(fields),
            _ => return Err(format!("{word} is no word of a row")),
        }
        Ok(())
    }

    /// Name of the run's counts: `cuda sm_90a sm90 order=dynamic hb`.
    pub(crate) fn name(&self) -> String {
        let mode = match self.mode {
            Mode::Eager => None,
            Mode::HappensBefore => Some("happens-before"),
            Mode::DrawnOrder => Some("drawn order"),
            Mode::Late => Some("late"),
            Mode::Garbage => Some("garbage"),
        };
        [Some(self.backend), Some(self.arch), self.kernel, self.tile, mode]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Step that runs these cases: all of them, or those whose kernel belongs to this part.
    pub(crate) fn step(&self, cases: Cases, fmha: &str) -> Option<Step> {
        if cases.deal == 0 {
            return None;
        }
        let mut words: Vec<String> = [fmha, "conformance", "--backend", self.backend, "--emulate", self.arch]
            .map(str::to_owned)
            .into();
        let mut add = |name: &str, value: &str| words.extend([name.to_owned(), value.to_owned()]);
        add("--filter", cases.filter);
        if let Some(kernel) = self.kernel {
            add("--kernel", kernel);
        }
        if let Some(tile) = self.tile {
            add("--tile", tile);
        }
        if cases.deal > 1 {
            add("--deal", &format!("1/{}", cases.deal));
        }
        let mut environment = Vec::new();
        match self.mode {
            Mode::Eager => {}
            Mode::HappensBefore => environment.push(("FMHA_EMULATE_MODE".to_owned(), "hb".to_owned())),
            Mode::DrawnOrder => environment.push(("FMHA_EMULATE_ORDER".to_owned(), "1".to_owned())),
            Mode::Late => environment.push(("FMHA_EMULATE_MODE".to_owned(), "late:1".to_owned())),
            Mode::Garbage => environment.push(("FMHA_EMULATE_GARBAGE".to_owned(), "1".to_owned())),
        }
        if let Some(count) = self.multiprocessors {
            environment.push(("FMHA_EMULATE_SMS".to_owned(), count.to_string()));
        }
        Some(Step::battery(self.name(), words, environment))
    }

    /// Description of the cases of this row that `cargo xtask test` leaves out.
    pub(crate) fn left_out(&self) -> Option<String> {
        (self.in_test != self.in_all && self.in_all.deal > 0).then(|| {
            format!("absent: the rest of {}, {}: cargo xtask test --all", self.name(), self.in_all.filter)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_of_the_battery_is_in_some_row() {
        let text = include_str!("../../tests/battery/families/mod.rs");
        let families: Vec<&str> = text.lines().filter_map(|l| l.trim().strip_suffix("::cases(),")).collect();
        assert!(families.len() >= 10, "{families:?}");
        // Cases of two caches are named like cases of lists.
        let elsewhere = ["backward", "bits", "decode", "two_caches"];
        for family in families.iter().filter(|family| !elsewhere.contains(family)) {
            let own = [format!("^{family}/"), format!("|{family})/")];
            let has_rows = ROWS.iter().any(|row| own.iter().any(|own| row.in_all.filter.contains(own)));
            let whole = |row: &Row| row.in_all.filter.strip_prefix("^(")?.strip_suffix(")/");
            let mut lists = ROWS.iter().filter_map(whole).map(|list| list.split('|'));
            let is_listed = lists.any(|mut list| list.any(|one| one == *family));
            assert!(is_listed || has_rows, "no row of --all takes {family}");
        }
    }

    #[test]
    fn a_quick_run_has_every_kernel_that_another_run_names() {
        let quick: Vec<&Row> = ROWS.iter().filter(|row| row.in_quick.deal > 0).collect();
        let named: Vec<&str> = quick.iter().filter_map(|row| row.kernel).collect();
        for kernel in ROWS.iter().filter_map(|row| row.kernel) {
            assert!(named.contains(&kernel), "{kernel}");
        }
        assert!(quick.iter().all(|row| row.in_quick.deal == 1 && row.in_quick.filter.ends_with('$')));
    }

    #[test]
    fn no_two_rows_have_a_name_and_a_filter_in_common() {
        let run_twice = |a: Cases, b: Cases| a.deal > 0 && a == b;
        for (i, a) in ROWS.iter().enumerate() {
            for b in ROWS[i + 1..].iter().filter(|b| b.name() == a.name()) {
                assert!(!run_twice(a.in_test, b.in_test), "{} in the test: {}", a.name(), a.in_test.filter);
                assert!(!run_twice(a.in_all, b.in_all), "{} in --all: {}", a.name(), a.in_all.filter);
            }
        }
    }
}
