//! Comparison of emulated results with recorded ones.

use crate::program::{Format, Program, Truth};
use crate::record::{ProgramRecord, Recording, asked, chosen};
use crate::run::{Emulated, Runner};

/// Agreement of two results.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Agreement {
    /// Numbers compared.
    pub compared: u64,
    /// Compared numbers with equal bits.
    pub equal: u64,
    /// The largest difference, in units of the allowed one.
    pub worst: f64,
}

impl Agreement {
    /// Sum of two agreements.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            compared: self.compared + other.compared,
            equal: self.equal + other.equal,
            worst: self.worst.max(other.worst),
        }
    }
}

/// Whether no relative error is promised: 0, infinity, NaN, what overflows, or what a subnormal becomes.
fn is_special(format: Format, value: f64) -> bool {
    !value.is_finite() || value.abs() < format.least_normal() || value.abs() > format.most()
}

/// One word of output, emulated and the device's.
///
/// # Errors
/// How they differ beyond what they may.
pub fn word(
    program: &Program,
    input: &[u32],
    at: usize,
    emulated: u32,
    device: u32,
) -> Result<Agreement, String> {
    let total = program.total() as usize;
    let thread = at % total;
    let differ = |text: String| {
        let inputs: Vec<String> = (0..program.inputs.len().min(4))
            .map(|row| format!("{:#x}", input[row * total + thread]))
            .collect();
        format!(
            "{}: thread {thread}, %o{}, inputs {}: emulated {emulated:#x}, device {device:#x}{text}",
            program.name,
            at / total,
            inputs.join(" ")
        )
    };
    let mut agreement = Agreement::default();
    let mut add = |equal: bool, share: f64| {
        agreement = agreement.and(Agreement { compared: 1, equal: equal.into(), worst: share });
    };
    match program.truth {
        Truth::Exact => {
            add(emulated == device, 0.0);
            if emulated != device {
                return Err(differ(String::new()));
            }
        }
        Truth::Near(format, most) => {
            for (e, d) in format.values(emulated).into_iter().zip(format.values(device)) {
                let share = (e - d).abs() / most;
                add(e.to_bits() == d.to_bits(), share);
                if share.is_nan() || share > 1.0 {
                    return Err(differ(format!(": {e:e} and {d:e}, at most {most:e} apart")));
                }
            }
        }
        Truth::Approximate { of, format, error } => {
            let values = format.values(emulated).into_iter().zip(format.values(device));
            for ((e, d), x) in values.zip(format.values(input[thread])) {
                let want = of(x);
                let same = e.to_bits() == d.to_bits() || e.is_nan() && d.is_nan();
                // Halves are never flushed.
                let flushed = format != Format::F16x2 && is_special(format, x);
                if is_special(format, want) || flushed || !x.is_finite() {
                    add(same, 0.0);
                    let subnormal = e.abs().max(d.abs()) <= format.least_normal();
                    if !same && !subnormal {
                        return Err(differ(format!(": {e:e} and {d:e} of {x:e}")));
                    }
                    continue;
                }
                // A result is also rounded to its format.
                let most = error.at(want);
                let share = (e - want).abs().max((d - want).abs()) / most;
                add(same, share);
                if share.is_nan() || share > 1.0 {
                    return Err(differ(format!(
                        ": {e:e} and {d:e} of {x:e}, which is {want:e} give or take {most:e}"
                    )));
                }
            }
        }
    }
    Ok(agreement)
}

/// Compares all that was kept of a program's output.
///
/// # Errors
/// A recording of another program, or the first words that differ beyond what they may.
pub fn program(program: &Program, emulated: &[u32], recorded: &ProgramRecord) -> Result<Agreement, String> {
    if asked(program) != recorded.asked {
        return Err(format!(
            "{}: its text or inputs have changed since the recording: record anew",
            program.name
        ));
    }
    let input = program.input();
    let mut agreement = Agreement::default();
    for (at, &device) in chosen(program, recorded.words.len()).into_iter().zip(&recorded.words) {
        agreement = agreement.and(word(program, &input, at, emulated[at], device)?);
    }
    if matches!(program.truth, Truth::Exact) {
        let all = ProgramRecord::new(program, emulated);
        if all.output != recorded.output {
            return Err(format!("{}: equal where words were kept, not everywhere", program.name));
        }
        agreement.compared = emulated.len() as u64;
        agreement.equal = agreement.compared;
    }
    Ok(agreement)
}

/// Comparison of a whole recording.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Programs or calls compared.
    pub count: usize,
    /// Sums over all programs.
    pub agreement: Agreement,
    /// Programs and calls that differ beyond their bound, and how.
    pub failures: Vec<String>,
}

impl Outcome {
    /// Adds the result of a program.
    pub fn add(&mut self, result: Result<Agreement, String>) {
        self.count += 1;
        match result {
            Ok(agreement) => self.agreement = self.agreement.and(agreement),
            Err(text) => self.failures.push(text),
        }
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Agreement { compared, equal, worst } = self.agreement;
        write!(
            f,
            "{} compared, {} differ; of {compared} numbers {equal} have equal bits, the others differ by at most \
             {worst:.2} of what they may",
            self.count,
            self.failures.len()
        )?;
        self.failures.iter().try_for_each(|failure| write!(f, "\n  {failure}"))
    }
}

/// Every program, emulated, against its record; a program without one fails.
#[must_use]
pub fn programs(recording: &Recording) -> Outcome {
    let mut outcome = Outcome::default();
    for one in crate::programs::all() {
        let record = recording.programs.get(&one.name).ok_or_else(|| format!("{}: not recorded", one.name));
        outcome.add(record.and_then(|record| program(&one, &Emulated.run(&one)?, record)));
    }
    outcome
}
