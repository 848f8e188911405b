//! Tables of shapes: a TOML file whose rows are options of `run`.

use std::path::Path;

use clap::Parser;
use serde::Deserialize;
use toml::{Table as Options, Value};

use crate::argv;
use crate::failure::Failure;
use crate::options::ProblemArgs;
use crate::target::read_text;

/// A file of tables.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    table: Vec<RawTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTable {
    name: String,
    title: String,
    /// Unit of the speeds: `tflops`, or `gbs` where bytes count.
    #[serde(default)]
    unit: Unit,
    /// Options of every row.
    #[serde(default)]
    common: Options,
    rows: Vec<Options>,
}

/// Unit of a table's speeds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Unit {
    #[default]
    Tflops,
    Gbs,
}

impl Unit {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tflops => "TFLOP/s",
            Self::Gbs => "GB/s",
        }
    }
}

/// One table, parsed.
#[derive(Debug)]
pub(crate) struct Table {
    pub(super) name: String,
    pub(super) title: String,
    pub(super) unit: Unit,
    pub(super) rows: Vec<Problem>,
}

/// A row: the words that it was written with, and the problem that they describe.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(super) words: Vec<String>,
    args: ProblemArgs,
}

impl std::ops::Deref for Problem {
    type Target = ProblemArgs;

    fn deref(&self) -> &ProblemArgs {
        &self.args
    }
}

/// A row as a command line without a command.
#[derive(Debug, Parser)]
#[command(name = "row", no_binary_name = true, disable_help_flag = true)]
struct Row {
    #[command(flatten)]
    problem: ProblemArgs,
}

/// Every table of the file at `path`.
pub(super) fn read(path: &Path) -> Result<Vec<Table>, Failure> {
    let text = read_text(path)?;
    parse(&text).map_err(|line| Failure::wrong(format!("{}: {line}", path.display())))
}

pub(crate) fn parse(text: &str) -> Result<Vec<Table>, String> {
    let file: File = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
        format!("line {line}: {}", error.message())
    })?;
    file.table.into_iter().map(RawTable::parse).collect()
}

impl RawTable {
    fn parse(self) -> Result<Table, String> {
        let Self { name, title, unit, common, rows } = self;
        if rows.is_empty() {
            return Err(format!("table {name} has no rows"));
        }
        let rows = rows
            .into_iter()
            .enumerate()
            .map(|(index, row)| {
                let mut options = common.clone();
                options.extend(row);
                problem(&options).map_err(|line| format!("table {name}, row {}: {line}", index + 1))
            })
            .collect::<Result<_, _>>()?;
        Ok(Table { name, title, unit, rows })
    }
}

fn problem(options: &Options) -> Result<Problem, String> {
    let mut args = Vec::new();
    for (name, value) in options {
        args.push(match value {
            Value::Boolean(true) => format!("--{name}"),
            Value::Boolean(false) => continue,
            Value::Integer(value) => format!("--{name}={value}"),
            Value::Float(value) => format!("--{name}={value}"),
            Value::String(value) => format!("--{name}={value}"),
            Value::Array(list) => {
                let words: Option<Vec<_>> =
                    list.iter().map(|v| v.as_integer().map(|n| n.to_string())).collect();
                let words = words.ok_or_else(|| format!("{name}: a list of whole numbers is wanted"))?;
                format!("--{name}={}", words.join(","))
            }
            other => return Err(format!("{name} is a {}, not an option's value", other.type_str())),
        });
    }
    let words = argv::normalise(args).map_err(|failure| failure.to_string())?;
    let row = Row::try_parse_from(&words).map_err(|error| crate::one_line(&error))?;
    Ok(Problem { words, args: row.problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_options_of_run_over_the_common_ones() {
        let tables = parse(
            r#"
            [[table]]
            name = "t"
            title = "a title"
            common = { d = 64, mask = "b", lse = true }
            rows = [{ s = 512 }, { s = [100, 200], mode = 1, d = 128 }]
            "#,
        )
        .unwrap();
        let [first, second] = tables[0].rows.as_slice() else { panic!("{tables:?}") };
        assert_eq!((first.head_dim_qk, first.mask.band, first.lse), (Some(64), fmha::MaskSpec::CAUSAL, true));
        assert_eq!(second.head_dim_qk, Some(128));
        assert_eq!(second.seqlen_q.as_ref().map(|lengths| lengths.0.as_slice()), Some(&[100, 200][..]));
    }

    #[test]
    fn a_wrong_row_is_named_with_its_number() {
        let text = "[[table]]\nname = 't'\ntitle = ''\nrows = [{ s = 1 }, { s = -5 }]";
        let line = parse(text).unwrap_err();
        assert!(line.contains("table t, row 2") && line.contains("seqlen_q -5"), "{line}");
        let line = parse("[[table]]\nname = 't'\ntitle = ''\nrows = [{ banana = 1 }]").unwrap_err();
        assert!(line.contains("banana"), "{line}");
        let line = parse("[[table]]\nname = 't'\n\n\nrows = 7").unwrap_err();
        assert!(line.contains("line "), "{line}");
    }

    #[test]
    fn every_table_that_is_shipped_is_sound() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench");
        let mut seen = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|kind| kind != "toml") {
                continue;
            }
            for table in read(&path).unwrap_or_else(|failure| panic!("{failure}")) {
                for row in &table.rows {
                    row.setup(None).unwrap_or_else(|failure| panic!("{} {failure}", table.name));
                    seen += 1;
                }
            }
        }
        assert!(seen > 50, "{seen} rows");
    }
}
