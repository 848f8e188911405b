//! Results as Markdown, CSV, JSON and a picture.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::measure::Measured;
use super::peers::Peers;
use super::plot::{Label, Series, svg};
use super::table::{Table, Unit};

/// One row's label and what came of it.
pub(super) struct Row {
    pub(super) label: String,
    pub(super) outcome: Measured,
}

/// One table with the peers' figures for its rows.
pub(super) struct Results {
    pub(super) name: String,
    title: String,
    unit: Unit,
    pub(super) rows: Vec<Row>,
    /// By peer: a speed for each row, where there is one.
    peers: Vec<(String, Vec<Option<f64>>)>,
}

impl Results {
    pub(super) fn new(table: &Table, rows: Vec<Row>, peers: &Peers) -> Self {
        let names = peers.names(rows.iter().map(|row| row.label.as_str()));
        let peers = names
            .into_iter()
            .map(|name| {
                let speeds = rows.iter().map(|row| peers.speed(&row.label, &name)).collect();
                (name, speeds)
            })
            .collect();
        Self { name: table.name.clone(), title: table.title.clone(), unit: table.unit, rows, peers }
    }

    /// Our speed on a row, in the table's unit.
    fn ours(&self, row: &Row) -> Option<f64> {
        match (&row.outcome, self.unit) {
            (Measured::Timed { speed, .. }, Unit::Tflops) => Some(speed.tflops),
            (Measured::Timed { speed, .. }, Unit::Gbs) => Some(speed.gb_per_second),
            _ => None,
        }
    }

    /// Ours over the best peer's.
    fn ratio(&self, index: usize) -> Option<f64> {
        let best = self.peers.iter().filter_map(|(_, speeds)| speeds[index]).reduce(f64::max)?;
        self.ours(&self.rows[index]).map(|ours| ours / best)
    }

    pub(super) fn plot(&self) -> Result<String, String> {
        let ours =
            Series { name: "ours".into(), speeds: self.rows.iter().map(|row| self.ours(row)).collect() };
        let peers =
            self.peers.iter().map(|(name, speeds)| Series { name: name.clone(), speeds: speeds.clone() });
        let series: Vec<_> = [ours].into_iter().chain(peers).collect();
        svg(&self.title, self.unit.name(), &self.short_labels(), &series)
    }

    /// The words of the labels that tell the rows apart: a length tells rows of a group apart, the other
    /// words groups. Where that makes hardly any group, or no length differs, all are the rows' own.
    fn short_labels(&self) -> Vec<Label> {
        let words: Vec<Vec<&str>> = self.rows.iter().map(|row| row.label.split(' ').collect()).collect();
        let differs = |at: usize| words.iter().any(|label| label.get(at) != words[0].get(at));
        let is_length = |at: usize| at == LENGTH_WORD && differs(LENGTH_WORD);
        let pick = |label: &[&str], wanted: &dyn Fn(usize) -> bool| {
            let picked = label.iter().enumerate().filter(|(at, _)| wanted(*at)).map(|(_, word)| *word);
            picked.collect::<Vec<_>>().join(" ")
        };
        // The batch that keeps the number of tokens constant tells nothing that the length does not.
        let telling = |at: usize| differs(at) && !(at == 0 && differs(LENGTH_WORD));
        let grouped: Vec<Label> = words
            .iter()
            .map(|label| Label {
                tick: pick(label, &is_length),
                group: pick(label, &|at| telling(at) && at != LENGTH_WORD),
            })
            .collect();
        let groups = grouped.chunk_by(|a, b| a.group == b.group).count();
        let is_unique = |label: &Label| grouped.iter().filter(|other| *other == label).count() == 1;
        if differs(LENGTH_WORD) && 2 * groups <= words.len() && grouped.iter().all(is_unique) {
            return grouped;
        }
        words
            .iter()
            .map(|label| match pick(label, &differs) {
                none if none.is_empty() => label.join(" "),
                tick => tick,
            })
            .map(|tick| Label { tick, group: String::new() })
            .collect()
    }
}

/// Which word of a label is the length: `B4 H32 S1024 D128 causal fp16`.
const LENGTH_WORD: usize = 2;

fn cell(speed: Option<f64>) -> String {
    match speed {
        None => "-".to_owned(),
        Some(speed) if speed >= 100.0 => format!("{speed:.0}"),
        Some(speed) => format!("{speed:.3}"),
    }
}

/// What other libraries' figures are compared by.
fn geometric_mean(ratios: &[f64]) -> f64 {
    (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
}

pub(super) fn markdown(all: &[Results], device: &str) -> String {
    let mut text = format!("Device: {device}\n");
    for results in all {
        let unit = results.unit.name();
        let _ = writeln!(text, "\n## {}: {}, {unit}\n", results.name, results.title);
        let mut head = vec![
            "row".to_owned(),
            "kernel".into(),
            "ours".into(),
            "median".into(),
            "spread".into(),
            "roofline".into(),
        ];
        head.extend(results.peers.iter().map(|(name, _)| name.clone()));
        if !results.peers.is_empty() {
            head.push("ours / best".into());
        }
        let _ = writeln!(text, "| {} |", head.join(" | "));
        let _ = writeln!(text, "|{}", "---|".repeat(head.len()));
        let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
        let mut ratios = Vec::new();
        for (index, row) in results.rows.iter().enumerate() {
            let mut cells = vec![row.label.clone()];
            match &row.outcome {
                Measured::Timed { kernel, timing, speed } => cells.extend([
                    kernel.clone(),
                    cell(results.ours(row)),
                    format!("{:.4} ms", timing.median() * 1e3),
                    format!("{:.1} %", (timing.slowest() / timing.fastest() - 1.0) * 100.0),
                    speed.share.map_or("-".into(), |share| format!("{:.0} %", share * 100.0)),
                ]),
                Measured::Absent(reason) => {
                    cells.extend(["-", "-", "-", "-", "-"].map(str::to_owned));
                    *reasons.entry(reason.clone()).or_default() += 1;
                }
                Measured::Wrong(reason) => {
                    cells.extend(["-", "wrong", "-", "-", "-"].map(str::to_owned));
                    *reasons.entry(format!("wrong: {reason}")).or_default() += 1;
                }
            }
            cells.extend(results.peers.iter().map(|(_, speeds)| cell(speeds[index])));
            if !results.peers.is_empty() {
                let ratio = results.ratio(index);
                ratios.extend(ratio);
                cells.push(ratio.map_or("-".into(), |ratio| format!("{ratio:.3}")));
            }
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
        for (reason, rows) in reasons {
            let _ = writeln!(text, "\n{rows} of {} rows: {reason}", results.rows.len());
        }
        if !ratios.is_empty() {
            let mean = geometric_mean(&ratios);
            let _ = writeln!(text, "\nGeometric mean of ours / best: {mean:.3} over {} rows", ratios.len());
        }
    }
    text
}

pub(super) fn csv(all: &[Results]) -> String {
    let mut text =
        "table,row,peer,kernel,speed,unit,median_seconds,fastest_seconds,slowest_seconds\n".to_owned();
    for results in all {
        let (name, unit) = (&results.name, results.unit.name());
        for (index, row) in results.rows.iter().enumerate() {
            // A label may have commas: a window's bounds.
            let label = format!("\"{}\"", row.label);
            if let Measured::Timed { kernel, timing, .. } = &row.outcome {
                let speed = results.ours(row).unwrap_or(f64::NAN);
                let (median, fastest, slowest) = (timing.median(), timing.fastest(), timing.slowest());
                let _ = writeln!(
                    text,
                    "{name},{label},ours,{kernel},{speed},{unit},{median},{fastest},{slowest}"
                );
            } else {
                let _ = writeln!(text, "{name},{label},ours,,,{unit},,,");
            }
            for (peer, speeds) in &results.peers {
                if let Some(speed) = speeds[index] {
                    let _ = writeln!(text, "{name},{label},{peer},,{speed},{unit},,,");
                }
            }
        }
    }
    text
}

pub(super) fn json(all: &[Results], device: &str) -> String {
    let tables: Vec<Value> = all
        .iter()
        .map(|results| {
            let rows: Vec<Value> =
                results.rows.iter().enumerate().map(|(i, row)| row_json(results, i, row)).collect();
            json!({ "name": results.name, "title": results.title, "unit": results.unit.name(), "rows": rows })
        })
        .collect();
    format!("{:#}\n", json!({ "device": device, "tables": tables }))
}

fn row_json(results: &Results, index: usize, row: &Row) -> Value {
    let peers: BTreeMap<&str, f64> =
        results.peers.iter().filter_map(|(name, speeds)| Some((name.as_str(), speeds[index]?))).collect();
    let mut object = json!({ "row": row.label, "peers": peers, "ours_to_best": results.ratio(index) });
    match &row.outcome {
        Measured::Timed { kernel, timing, speed } => {
            object["kernel"] = kernel.as_str().into();
            object["speed"] = results.ours(row).into();
            object["median_seconds"] = timing.median().into();
            object["fastest_seconds"] = timing.fastest().into();
            object["slowest_seconds"] = timing.slowest().into();
            object["flops"] = speed.flops.into();
            object["bytes"] = speed.bytes.into();
            object["roofline_share"] = speed.share.into();
        }
        Measured::Absent(reason) => object["absent"] = reason.as_str().into(),
        Measured::Wrong(reason) => object["wrong"] = reason.as_str().into(),
    }
    object
}
