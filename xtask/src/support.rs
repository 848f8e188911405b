//! `cargo xtask support`: the README's support table, from the battery's results.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const BEGIN: &str = "<!-- support: written by `cargo xtask support` from the battery's results -->\n";
const END: &str = "<!-- end of support -->";

/// One column: a backend of this machine (`cpu`, `cuda`), or an emulated one (`cuda@sm_90a`).
struct Column {
    title: String,
    /// Of each family: what the battery's line says after its name.
    families: BTreeMap<String, String>,
}

/// Runs the battery on each of `backends` and rewrites the table.
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
    let (kind, arch) = backend.split_once('@').map_or((backend, None), |(kind, arch)| (kind, Some(arch)));
    let mut command = Command::new(env!("CARGO"));
    command.args(["run", "--release", "--quiet", "--", "conformance", "--allow-fallback", "--backend", kind]);
    if let Some(arch) = arch {
        command.args(["--emulate", arch]);
    }
    println!("battery on {backend}");
    let output = command.output().map_err(|error| format!("cargo run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let families: BTreeMap<_, _> = text
        .lines()
        .filter(|line| line.ends_with(" absent") && line.contains(" passed, "))
        .filter_map(|line| line.split_once(' '))
        .map(|(family, counts)| (family.to_owned(), counts.trim().to_owned()))
        .collect();
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
            let counts = column.families.get(family).map_or("did not run", String::as_str);
            text += &format!(" {counts} |");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_that_a_backend_did_not_run_is_not_called_passed() {
        let column = |title: &str, families: &[(&str, &str)]| Column {
            title: title.to_owned(),
            families: families.iter().map(|(f, c)| ((*f).to_owned(), (*c).to_owned())).collect(),
        };
        let text = table(&[
            column("cpu", &[("edges", "3 passed"), ("all", "3 passed")]),
            column("cuda", &[("all", "1 failed")]),
        ]);
        assert!(text.contains("| edges | 3 passed | did not run |"));
        assert!(text.ends_with("| all | 3 passed | 1 failed |\n"));
    }
}
