//! A recording: text, one line a program or a call.
//!
//! ```text
//! silicon 1
//! device NVIDIA H200, driver 13000
//! program NAME | INPUT DIGEST | OUTPUT DIGEST | WORDS
//! call NAME | KERNEL | INPUT DIGEST | PATTERN DIGEST | O DIGEST | O BITS | LSE BITS
//! ```
//! Digests are the first 16 hexadecimal digits of a SHA-256; words and bits are hexadecimal, of the positions that
//! [`chosen`] or [`crate::forward`] name.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use crate::program::{Program, Truth};

/// Result of a device for a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramRecord {
    /// Digest of the text and the inputs.
    pub asked: String,
    /// Digest of every word of output.
    pub output: String,
    /// Some words of the output.
    pub words: Vec<u32>,
}

/// Result of a device for a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRecord {
    /// Name of the kernel that computed the call.
    pub kernel: String,
    /// Digest of the problem and its inputs.
    pub asked: String,
    /// Digest of what no rounding changes: which elements are NaN, empty rows, the keep mask.
    pub pattern: String,
    /// Digest of every bit of O.
    pub o: String,
    /// Bits of some elements of O.
    pub o_bits: Vec<u32>,
    /// Bits of some elements of LSE.
    pub lse_bits: Vec<u32>,
}

/// Recorded results of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// Name of the device.
    pub device: String,
    /// Results by name.
    pub programs: BTreeMap<String, ProgramRecord>,
    /// Results by name.
    pub calls: BTreeMap<String, CallRecord>,
}

/// 16 hexadecimal digits of these bytes.
#[must_use]
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update((part.len() as u64).to_le_bytes());
        sha.update(part);
    }
    sha.finalize().iter().take(8).fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Number of words that are kept: few where a digest says all, more where each is compared alone.
fn num_kept(program: &Program) -> usize {
    match program.truth {
        Truth::Exact => 8,
        Truth::Near(..) => 128,
        Truth::Approximate { .. } => 256,
    }
}

/// Positions of the words that are kept, when so many are.
#[must_use]
pub fn chosen(program: &Program, kept: usize) -> Vec<usize> {
    let total = program.outputs * program.total() as usize;
    let kept = total.min(kept);
    // An odd step, so that neighbours are not always the same lane.
    let step = (total / kept.max(1)) | 1;
    (0..kept).map(|at| at * step % total.max(1)).collect()
}

impl ProgramRecord {
    /// Record of everything that a program wrote.
    #[must_use]
    pub fn new(program: &Program, output: &[u32]) -> Self {
        Self {
            asked: asked(program),
            output: digest([bytes(output).as_slice()]),
            words: chosen(program, num_kept(program)).into_iter().map(|at| output[at]).collect(),
        }
    }
}

/// Digest of a program's text and inputs.
#[must_use]
pub fn asked(program: &Program) -> String {
    digest([program.ptx().as_bytes(), bytes(&program.input()).as_slice()])
}

fn hexadecimal(words: &[u32]) -> String {
    if words.is_empty() {
        return "-".into();
    }
    words.iter().map(|word| format!("{word:x}")).collect::<Vec<_>>().join(",")
}

fn numbers(text: &str) -> Result<Vec<u32>, String> {
    let words = text.split(',').filter(|word| *word != "-");
    words.map(|word| u32::from_str_radix(word, 16).map_err(|error| format!("{word}: {error}"))).collect()
}

impl Recording {
    /// Text of the recording's file.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!("silicon 1\ndevice {}\n", self.device);
        for (name, record) in &self.programs {
            let words = hexadecimal(&record.words);
            let _ = writeln!(text, "program {name} | {} | {} | {words}", record.asked, record.output);
        }
        for (name, record) in &self.calls {
            let CallRecord { kernel, asked, pattern, o, o_bits, lse_bits } = record;
            let (o_bits, lse_bits) = (hexadecimal(o_bits), hexadecimal(lse_bits));
            let _ =
                writeln!(text, "call {name} | {kernel} | {asked} | {pattern} | {o} | {o_bits} | {lse_bits}");
        }
        text
    }

    /// Recording of a file's text.
    ///
    /// # Errors
    /// The line that is none of a recording.
    pub fn from_text(text: &str) -> Result<Self, String> {
        let mut recording = Self::default();
        for (line, number) in text.lines().zip(1..) {
            let broken = || format!("line {number} is none of a recording: {line}");
            let (kind, rest) = line.split_once(' ').ok_or_else(broken)?;
            let fields: Vec<&str> = rest.split(" | ").map(str::trim).collect();
            match (kind, fields.as_slice()) {
                ("silicon", ["1"]) => {}
                ("device", _) => recording.device = rest.to_owned(),
                ("program", [name, asked, output, words]) => {
                    let record = ProgramRecord {
                        asked: (*asked).into(),
                        output: (*output).into(),
                        words: numbers(words)?,
                    };
                    recording.programs.insert((*name).into(), record);
                }
                ("call", [name, kernel, asked, pattern, o, o_bits, lse_bits]) => {
                    let record = CallRecord {
                        kernel: (*kernel).into(),
                        asked: (*asked).into(),
                        pattern: (*pattern).into(),
                        o: (*o).into(),
                        o_bits: numbers(o_bits)?,
                        lse_bits: numbers(lse_bits)?,
                    };
                    recording.calls.insert((*name).into(), record);
                }
                _ => return Err(broken()),
            }
        }
        Ok(recording)
    }
}
