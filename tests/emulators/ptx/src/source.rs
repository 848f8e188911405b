//! Which lines of which source file a line of PTX comes from: `.file` and `.loc`. PTX ISA 11.5.

use std::collections::HashMap;

/// A line of a source file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceLine {
    /// The file, as the compiler was given its name.
    pub file: String,
    /// Line number, from 1.
    pub line: u32,
}

/// File number, line and column, as `.loc` has them.
type Position = [u32; 3];

/// The source lines of a PTX text that was compiled with line information.
#[derive(Clone, Debug, Default)]
pub struct SourceMap {
    files: HashMap<u32, String>,
    /// Position of each PTX line, from line 1: an index into `chains`.
    lines: Vec<usize>,
    /// Positions, each inlined at the next. The first chain is empty.
    chains: Vec<Vec<Position>>,
}

impl SourceMap {
    /// Reads the directives of `ptx`. Text without any gives a map that knows no line. Files are named relative to
    /// the folder that all of them share.
    #[must_use]
    pub fn of(ptx: &str) -> Self {
        let mut map = Self { chains: vec![Vec::new()], ..Self::default() };
        // Place where the function that holds a position was inlined: a compiler repeats the callers before a
        // position whenever they are others than before.
        let mut callers = HashMap::new();
        let mut now = 0;
        for line in ptx.lines() {
            let line = line.trim_start();
            if let Some(rest) = line.strip_prefix(".file") {
                let mut words = rest.splitn(3, '"');
                let number = words.next().and_then(|word| word.trim().parse().ok());
                if let (Some(number), Some(name)) = (number, words.next()) {
                    map.files.insert(number, name.to_owned());
                }
            } else if let Some(rest) = line.strip_prefix(".loc") {
                let mut parts = rest.split("inlined_at");
                if let Some(at) = parts.next().and_then(position) {
                    callers.insert(at, parts.next().and_then(position));
                    now = map.chains.len();
                    map.chains.push(followed(at, &callers));
                }
            } else if line.starts_with(".visible") || line.starts_with(".entry") || line.starts_with(".func")
            {
                now = 0;
            }
            map.lines.push(now);
        }
        let shared = shared_folder(map.files.values());
        map.files.values_mut().for_each(|name| *name = name[shared..].to_owned());
        map
    }

    /// The source lines that PTX line `line` (from 1) belongs to: its own, then the calls through which that was
    /// inlined, innermost first. Empty where the text does not say.
    #[must_use]
    pub fn chain(&self, line: u32) -> Vec<SourceLine> {
        let chain = (line as usize).checked_sub(1).and_then(|i| self.lines.get(i)).copied().unwrap_or(0);
        let place = |&[file, line, _]: &Position| {
            let file = self.files.get(&file)?.clone();
            (line > 0).then_some(SourceLine { file, line })
        };
        self.chains.get(chain).into_iter().flatten().filter_map(place).collect()
    }
}

/// A position and its callers.
fn followed(at: Position, callers: &HashMap<Position, Option<Position>>) -> Vec<Position> {
    let mut chain = vec![at];
    // A function inlined into itself is text that no compiler writes; it must not hang its reader.
    while let Some(Some(caller)) =
        chain.last().and_then(|last| callers.get(last)).filter(|_| chain.len() < 64)
    {
        chain.push(*caller);
    }
    chain
}

/// Bytes of the longest prefix of all names that ends a folder.
fn shared_folder<'a>(mut names: impl Iterator<Item = &'a String>) -> usize {
    let Some(first) = names.next() else { return 0 };
    let mut shared = first.rfind('/').map_or(0, |at| at + 1);
    for name in names {
        while shared > 0 && !name.starts_with(&first[..shared]) {
            shared = first[..shared - 1].rfind('/').map_or(0, |at| at + 1);
        }
    }
    shared
}

/// The first three numbers.
fn position(text: &str) -> Option<Position> {
    let mut numbers = text.split([' ', '\t', ',']).filter_map(|word| word.parse().ok());
    Some([numbers.next()?, numbers.next()?, numbers.next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_knows_the_calls_it_was_inlined_through() {
        let ptx = ".visible .entry k()\n{\n\t.loc\t1 7 3\n\tadd;\n\t.loc 2 40 5, function_name $L0, inlined_at 1 9 2\n\
                   \t.loc 3 11 1, function_name $L1+4, inlined_at 2 40 5\n\tmul;\n}\n\t.file\t1 \"/x/entry.cu\"\n\
                   .file 2 \"/x/y/a.cuh\"\n.file 3 \"/x/y/b.cuh\"\n";
        let map = SourceMap::of(ptx);
        let text =
            |line| map.chain(line).iter().map(|s| format!("{}:{}", s.file, s.line)).collect::<Vec<_>>();
        assert!(text(2).is_empty());
        assert_eq!(text(4), ["entry.cu:7"]);
        assert_eq!(text(7), ["y/b.cuh:11", "y/a.cuh:40", "entry.cu:9"]);
    }
}
