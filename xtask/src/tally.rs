//! Counts, read from the output of the test programs.

use std::fmt;

/// Steps that have run so far.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Cases of the battery, by their line: `battery cpu: 3120 passed, 0 failed, 12 refused, 0 absent`.
    battery: Vec<String>,
    /// Lines in which a test reports something absent.
    absent: Vec<String>,
}

impl Tally {
    /// Prints a line and counts it.
    pub(crate) fn say(&mut self, line: &str) {
        println!("{line}");
        self.read(line);
    }

    /// Adds the counts of another tally.
    pub(crate) fn merge(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.battery.extend(other.battery);
        self.absent.extend(other.absent);
    }

    /// Counts a line if it ends a test program or a battery, or reports something absent.
    pub(crate) fn read(&mut self, line: &str) {
        let line = line.trim();
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.passed += number_before(rest, "passed");
            self.failed += number_before(rest, "failed");
        } else if line.starts_with("battery ") && line.contains(" passed, ") {
            self.passed += number_before(line, "passed");
            self.failed += number_before(line, "failed");
            self.battery.push(line.to_owned());
        } else if line.starts_with("absent: ") {
            self.absent.push(line.to_owned());
        } else if let Some((test, reason)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ignored"))
        {
            self.absent.push(format!("absent: {test}{reason}"));
        }
    }
}

/// Number in front of `word` in a text.
fn number_before(text: &str, word: &str) -> u64 {
    let words: Vec<&str> =
        text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    words.windows(2).find(|pair| pair[1] == word).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
}

impl fmt::Display for Tally {
    /// Prints the batteries, the absent things, and the line that closes the run.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f)?;
        for line in self.battery.iter().chain(&self.absent) {
            writeln!(f, "{line}")?;
        }
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_summed_over_programs_and_batteries() {
        let mut tally = Tally::default();
        tally.read("test result: ok. 19 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out");
        tally.read("battery cpu: 3120 passed, 2 failed, 12 refused, 0 absent");
        tally.read("absent: clang-22 is not installed");
        tally.read("test mask::tests::passed ... ok");
        tally.read("test the_whole_table ... ignored, cargo xtask test --all");
        assert_eq!((tally.passed, tally.failed), (3139, 3));
        assert!(tally.to_string().ends_with("\n3139 passed, 3 failed"));
        assert!(tally.to_string().contains("absent: clang-22"));
        assert!(tally.to_string().contains("absent: the_whole_table, cargo xtask test --all"));
    }
}
