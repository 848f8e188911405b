//! Speeds of other libraries on the same shapes, from a file of the user.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::failure::Failure;
use crate::target::read_text;

/// Speeds by row and peer. A later line replaces an earlier one.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    speeds: BTreeMap<String, BTreeMap<String, f64>>,
}

/// A line of a peers' file: one measurement; other fields are ignored.
#[derive(Debug, Deserialize)]
struct Line {
    /// The row's label: `B4 H32 S1024 D128 causal fp16`.
    row: String,
    peer: String,
    /// Speed in the table's unit; `None` if the peer does not support the row.
    speed: Option<f64>,
}

impl Peers {
    /// Reads `.jsonl` (one object a line, or one array of them) or `.csv` with the columns `row`,
    /// `peer` and `speed`.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let text = read_text(path)?;
        let parsed = if path.extension().is_some_and(|extension| extension == "csv") {
            csv(&text)
        } else {
            json(&text)
        };
        parsed.map_err(|line| Failure::wrong(format!("{}: {line}", path.display())))
    }

    fn add(&mut self, line: Line) {
        if let Some(speed) = line.speed {
            self.speeds.entry(line.row).or_default().insert(line.peer, speed);
        }
    }

    /// Names of the peers, except this library, that have a speed for one of `rows`.
    pub(super) fn names<'a>(&self, rows: impl Iterator<Item = &'a str>) -> Vec<String> {
        let mut names: Vec<String> =
            rows.filter_map(|row| self.speeds.get(row)).flat_map(|peers| peers.keys().cloned()).collect();
        names.sort_unstable();
        names.dedup();
        names.retain(|name| name != "ours");
        names
    }

    pub(super) fn speed(&self, row: &str, peer: &str) -> Option<f64> {
        self.speeds.get(row)?.get(peer).copied()
    }
}

pub(crate) fn json(text: &str) -> Result<Peers, String> {
    let mut peers = Peers::default();
    if text.trim_start().starts_with('[') {
        let lines: Vec<Line> = serde_json::from_str(text).map_err(|error| error.to_string())?;
        lines.into_iter().for_each(|line| peers.add(line));
        return Ok(peers);
    }
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        peers.add(serde_json::from_str(line).map_err(|error| format!("line {}: {error}", index + 1))?);
    }
    Ok(peers)
}

pub(crate) fn csv(text: &str) -> Result<Peers, String> {
    let mut peers = Peers::default();
    let mut table = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text.as_bytes());
    let header = table.headers().map_err(|error| error.to_string())?.clone();
    let column = |name: &str| {
        header.iter().position(|column| column == name).ok_or_else(|| format!("line 1: no column `{name}`"))
    };
    let (row, peer, speed) = (column("row")?, column("peer")?, column("speed")?);
    for record in table.records() {
        let record = record.map_err(|error| match error.kind() {
            csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
                format!(
                    "line {}: {len} cells, not {expected_len}",
                    pos.as_ref().map_or(0, csv::Position::line)
                )
            }
            _ => error.to_string(),
        })?;
        let line = record.position().map_or(0, csv::Position::line);
        let speed = match &record[speed] {
            "" | "-" => None,
            number => Some(number.parse().map_err(|_| format!("line {line}: speed `{number}`"))?),
        };
        peers.add(Line { row: record[row].to_owned(), peer: record[peer].to_owned(), speed });
    }
    Ok(peers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_figures_are_read_from_every_form() {
        let lines = "{\"row\": \"B1\", \"peer\": \"fa3\", \"speed\": 7.5, \"ms\": 1}\n\n{\"row\": \"B1\", \"peer\": \"x\", \"absent\": \"no\"}";
        let array = "[{\"row\": \"B1\", \"peer\": \"fa3\", \"speed\": 7.5}]";
        let table = "row,peer,speed\n\"B1\",fa3,7.5\nB1,x,-\n";
        for peers in [json(lines), json(array), csv(table)] {
            let peers = peers.unwrap();
            assert_eq!(peers.names(["B1", "B2"].into_iter()), ["fa3"]);
            assert_eq!(peers.speed("B1", "fa3"), Some(7.5));
        }
    }

    #[test]
    fn a_label_between_quotes_keeps_its_commas() {
        let peers = csv("row,peer,speed\n\"B1 b:512,0 bf16\",fa3,7.5\n").unwrap();
        assert_eq!(peers.speed("B1 b:512,0 bf16", "fa3"), Some(7.5));
    }

    #[test]
    fn a_wrong_line_is_named_by_its_number() {
        assert!(json("{}\n").unwrap_err().starts_with("line 1"));
        assert!(csv("row,peer,speed\nB1,fa3,fast").unwrap_err().starts_with("line 2"));
        assert!(csv("row,peer,speed\nB1,fa3\n").unwrap_err().starts_with("line 2: 2 cells, not 3"));
        assert!(csv("row,speed\n").unwrap_err().contains("`peer`"));
    }
}
