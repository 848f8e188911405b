//! List of mutants, made by cargo-mutants.

use std::ops::Range;
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

/// A line and a column, both counted from 1. The column counts characters.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Place {
    line: usize,
    column: usize,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Span {
    start: Place,
    end: Place,
}

/// One mutant: a range of a file and its replacement.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Mutant {
    /// Path from the repository's root.
    pub(crate) file: String,
    /// Description of the mutant by cargo-mutants, with `FILE:LINE:COLUMN: ` in front.
    pub(crate) name: String,
    pub(crate) genre: String,
    pub(crate) replacement: String,
    span: Span,
}

impl Mutant {
    /// Range of the bytes of `text` that the mutant replaces.
    pub(crate) fn range(&self, text: &str) -> Range<usize> {
        offset(text, self.span.start)..offset(text, self.span.end)
    }

    /// Name without line and column, so that a reason still matches after lines of the file have moved.
    pub(crate) fn words(&self) -> &str {
        self.name.splitn(4, ':').nth(3).unwrap_or(&self.name).trim()
    }
}

fn offset(text: &str, place: Place) -> usize {
    let line: usize = text.split_inclusive('\n').take(place.line - 1).map(str::len).sum();
    let column = text[line..].char_indices().nth(place.column - 1).map_or(text.len() - line, |(at, _)| at);
    line + column
}

/// All mutants that `.cargo/mutants.toml` selects. They are numbered from 1 in this order.
pub(crate) fn list(root: &Path) -> Result<Vec<Mutant>, String> {
    let words = ["mutants", "--workspace", "--list", "--json"];
    let output = Command::new("cargo").args(words).current_dir(root).output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("cargo mutants: {said} (`cargo install cargo-mutants` sets it up)"));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo mutants --list --json: {error}"))
}
