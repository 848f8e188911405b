//! Fates of the mutants: stored, compared with the reasons, counted.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use crate::mutant::Mutant;
use crate::rewrite::LeftOut;
use crate::run::Fates;

const REASONS: &str = "tests/evidence/mutants-host.reasons";

/// Reason, a line `FILE | PART | PART... | why`: the mutant's name contains every part.
struct Reason {
    file: String,
    parts: Vec<String>,
    line: String,
}

impl Reason {
    fn is_of(&self, mutant: &Mutant) -> bool {
        mutant.file.starts_with(&self.file) && self.parts.iter().all(|part| mutant.words().contains(part))
    }
}

fn reasons(root: &Path) -> Result<Vec<Reason>, String> {
    let text = std::fs::read_to_string(root.join(REASONS)).map_err(|error| format!("{REASONS}: {error}"))?;
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let parse = |line: &str| match line.split(" | ").collect::<Vec<_>>()[..] {
        [file, ref parts @ .., _] if !parts.is_empty() => Ok(Reason {
            file: file.to_owned(),
            parts: parts.iter().map(|part| (*part).to_owned()).collect(),
            line: line.to_owned(),
        }),
        _ => Err(format!("{REASONS}: `{line}` is not FILE | PART... | why")),
    };
    lines.map(parse).collect()
}

/// Hash of each mutant's file. A fate is valid only for that text.
pub(crate) fn texts(root: &Path, mutants: &[Mutant]) -> BTreeMap<String, u64> {
    let mut texts = BTreeMap::new();
    for mutant in mutants {
        texts.entry(mutant.file.clone()).or_insert_with(|| {
            let mut hasher = DefaultHasher::new();
            std::fs::read(root.join(&mutant.file)).unwrap_or_default().hash(&mut hasher);
            hasher.finish()
        });
    }
    texts
}

/// Fates of an earlier run, without those that must be tried again because they have no reason yet.
pub(crate) fn read(file: &Path, root: &Path, mutants: &[Mutant], again: &[String]) -> Result<Fates, String> {
    let (texts, reasons) = (texts(root, mutants), reasons(root)?);
    let named: BTreeMap<&str, &Mutant> =
        mutants.iter().map(|mutant| (mutant.name.as_str(), mutant)).collect();
    let mut fates = Fates::new(texts);
    for line in std::fs::read_to_string(file).unwrap_or_default().lines() {
        let [fate, text, name] = line.split('\t').collect::<Vec<_>>()[..] else { continue };
        fates.of.remove(name);
        let Some(mutant) = named.get(name) else { continue };
        let runs_again =
            again.iter().any(|again| again == fate) && !reasons.iter().any(|reason| reason.is_of(mutant));
        if fates.text(&mutant.file).to_string() == text && !runs_again {
            fates.of.insert(name.to_owned(), fate.to_owned());
        }
    }
    Ok(fates)
}

/// Prints each mutant that was not caught, then counts by file and in total. Returns whether every survivor has a
/// reason.
pub(crate) fn print(
    root: &Path,
    mutants: &[(u32, &Mutant)],
    left_out: &LeftOut,
    fates: &Fates,
) -> Result<bool, String> {
    let reasons = reasons(root)?;
    let mut used = vec![false; reasons.len()];
    let mut counts: BTreeMap<&str, BTreeMap<String, usize>> = BTreeMap::new();
    for (number, mutant) in mutants {
        let found = fates.of.get(&mutant.name).map(String::as_str);
        let fate = match (left_out.get(number).copied(), found) {
            (Some("does not compile"), _) => "does not compile".to_owned(),
            (Some(why), _) => format!("not in the build ({why})"),
            (None, Some(fate @ ("survives" | "outlives" | "not reached"))) => {
                let reason = reasons.iter().position(|reason| reason.is_of(mutant));
                reason.into_iter().for_each(|at| used[at] = true);
                if reason.is_some() { format!("{fate}, with a reason") } else { fate.to_owned() }
            }
            (None, fate) => fate.unwrap_or("not run").to_owned(),
        };
        println!("{fate}: {}", mutant.name);
        *counts.entry(&mutant.file).or_default().entry(fate).or_default() += 1;
    }
    let mut sums: BTreeMap<&str, usize> = BTreeMap::new();
    println!();
    for (file, counts) in &counts {
        println!("{file}: {}", words(counts.iter().map(|(fate, count)| (fate.as_str(), *count))));
        for (fate, count) in counts {
            *sums.entry(fate).or_default() += count;
        }
    }
    println!("\nall {}: {}", mutants.len(), words(sums.iter().map(|(fate, count)| (*fate, *count))));
    let is_all = counts.len() > 1 && !sums.contains_key("not run");
    for (reason, _) in reasons.iter().zip(used).filter(|(_, used)| is_all && !used) {
        println!("a reason of no mutant: {}", reason.line);
    }
    Ok(!sums.contains_key("survives") && !sums.contains_key("outlives"))
}

fn words<'a>(counts: impl Iterator<Item = (&'a str, usize)>) -> String {
    counts.map(|(fate, count)| format!("{count} {fate}")).collect::<Vec<_>>().join(", ")
}
