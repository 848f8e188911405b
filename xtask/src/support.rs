//! `cargo xtask support`: the README's support table, from the battery's results, run now or kept.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const BEGIN: &str = "<!-- support: written by `cargo xtask support` from the battery's results -->\n";
const END: &str = "<!-- end of support -->";

/// One column: a backend of this machine (`cpu`, `cuda`), an emulated one (`cuda@sm_90a`), or what a run
/// elsewhere printed (`TITLE=FILE`).
struct Column {
    title: String,
    /// Of each family: its counts.
    families: BTreeMap<String, Counts>,
}

/// What the battery counts, in its order.
const COUNTED: [&str; 4] = ["passed", "failed", "refused", "absent"];
type Counts = [u64; 4];

/// A line such as `edges        12 passed, 0 failed, 0 refused, 3 absent`, and nothing else.
fn family_line(line: &str) -> Option<(&str, Counts)> {
    let (family, rest) = line.split_once(char::is_whitespace)?;
    let mut counts = Counts::default();
    let mut parts = rest.split(',');
    for (count, word) in counts.iter_mut().zip(COUNTED) {
        *count = parts.next()?.trim().strip_suffix(word)?.trim().parse().ok()?;
    }
    parts.next().is_none().then_some((family, counts))
}

/// The battery may have run in parts: their counts are summed.
fn families(text: &str) -> BTreeMap<String, Counts> {
    let mut families: BTreeMap<String, Counts> = BTreeMap::new();
    for (family, counts) in text.lines().filter_map(family_line) {
        let sums = families.entry(family.to_owned()).or_default();
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    families
}

/// Runs the battery on each of `backends`, or reads what it printed, and rewrites the table.
pub(crate) fn write(backends: &[&str]) -> Result<(), String> {
    let columns = backends.iter().map(|backend| column(backend)).collect::<Result<Vec<_>, _>>()?;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = std::fs::read_to_string(&path).map_err(|error| format!("README.md: {error}"))?;
    let (before, rest) = readme.split_once(BEGIN).ok_or("README.md has no place for the table")?;
    let (_, after) = rest.split_once(END).ok_or("README.md has no end of the table")?;
    let text = format!("{before}{BEGIN}{}{END}{after}", table(&columns));
    std::fs::write(&path, text).map_err(|error| format!("README.md: {error}"))
}

fn column(backend: &str) -> Result<Column, String> {
    if let Some((title, file)) = backend.split_once('=') {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
        return match families(&text) {
            none if none.is_empty() => Err(format!("{file}: no line of a battery's family in it")),
            families => Ok(Column { title: title.to_owned(), families }),
        };
    }
    let (kind, arch) = backend.split_once('@').map_or((backend, None), |(kind, arch)| (kind, Some(arch)));
    let mut command = Command::new(env!("CARGO"));
    command.args(["run", "--release", "--quiet", "--", "conformance", "--allow-fallback", "--backend", kind]);
    if let Some(arch) = arch {
        command.args(["--emulate", arch]);
    }
    println!("battery on {backend}");
    let output = command.output().map_err(|error| format!("cargo run: {error}"))?;
    let families = families(&String::from_utf8_lossy(&output.stdout));
    if families.is_empty() {
        return Err(format!("{backend}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let title = arch.map_or_else(|| kind.to_owned(), |arch| format!("{kind}, {arch} emulated"));
    Ok(Column { title, families })
}

/// Families down, backends across.
fn table(columns: &[Column]) -> String {
    let mut families: Vec<&String> = columns.iter().flat_map(|column| column.families.keys()).collect();
    families.sort_unstable();
    families.dedup();
    // The sum comes last.
    families.sort_by_key(|family| *family == "all");
    let mut text = String::from("| cases |");
    for column in columns {
        text += &format!(" {} |", column.title);
    }
    text += &format!("\n|---|{}\n", "---|".repeat(columns.len()));
    for family in families {
        text += &format!("| {family} |");
        for column in columns {
            let cell = column.families.get(family).map_or_else(|| "did not run".to_owned(), words);
            text += &format!(" {cell} |");
        }
        text.push('\n');
    }
    text
}

/// `141 passed, 6 absent`: without what there is none of, but for what passed and what failed.
fn words(counts: &Counts) -> String {
    let counted = COUNTED.iter().zip(counts).enumerate();
    let said = counted.filter(|(i, (_, count))| *i < 2 || **count > 0);
    said.map(|(_, (word, count))| format!("{count} {word}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_that_a_backend_did_not_run_is_not_called_passed() {
        let column = |title: &str, text: &str| Column { title: title.to_owned(), families: families(text) };
        let text = table(&[
            column(
                "cpu",
                "edges  3 passed, 0 failed, 0 refused, 2 absent\nall  3 passed, 0 failed, 0 refused, 0 absent",
            ),
            column("cuda", "all  0 passed, 1 failed, 0 refused, 0 absent"),
        ]);
        assert!(text.contains("| edges | 3 passed, 0 failed, 2 absent | did not run |"));
        assert!(text.ends_with("| all | 3 passed, 0 failed | 0 passed, 1 failed |\n"));
    }

    #[test]
    fn parts_of_a_battery_are_summed_and_other_lines_are_not_counted() {
        let text = "39 cases on cuda:0\nedges   2 passed, 1 failed, 0 refused, 4 absent\nexit 1 filter ^edges/\n\
                    edges   5 passed, 0 failed, 3 refused, 0 absent\nbattery cpu: 7 passed, 0 failed, 0 refused, 0 absent";
        assert_eq!(families(text), BTreeMap::from([("edges".to_owned(), [7, 1, 3, 4])]));
    }
}
