//! Results as Markdown, CSV, JSON and a picture.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::counted;
use super::measure::Measured;
use super::peers::Peers;
use super::plot::{Label, Series, svg};
use super::table::{Table, Unit};

/// Label of a row, and its result.
pub(super) struct Row {
    pub(super) label: String,
    pub(super) outcome: Measured,
}

/// One table, with the peers' figures for its rows.
pub(super) struct Results {
    pub(super) name: String,
    title: String,
    unit: Unit,
    pub(super) rows: Vec<Row>,
    /// Speeds of each peer, one for each row, if present.
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
        let ours = Series { name: OURS.into(), speeds: self.rows.iter().map(|row| self.ours(row)).collect() };
        let peers =
            self.peers.iter().map(|(name, speeds)| Series { name: name.clone(), speeds: speeds.clone() });
        let series: Vec<_> = [ours].into_iter().chain(peers).collect();
        svg(&self.title, self.unit.name(), &self.short_labels(), &series)
    }

    /// Words of the labels that distinguish the rows: a length distinguishes the rows of a group, the other
    /// words the groups. If that makes few groups, or no length differs, every row has all words.
    fn short_labels(&self) -> Vec<Label> {
        let words: Vec<Vec<&str>> = self.rows.iter().map(|row| row.label.split(' ').collect()).collect();
        let differs = |at: usize| words.iter().any(|label| label.get(at) != words[0].get(at));
        let is_length = |at: usize| at == LENGTH_WORD && differs(LENGTH_WORD);
        let pick = |label: &[&str], wanted: &dyn Fn(usize) -> bool| {
            let picked = label.iter().enumerate().filter(|(at, _)| wanted(*at)).map(|(_, word)| *word);
            picked.collect::<Vec<_>>().join(" ")
        };
        // A batch that keeps the number of tokens constant is left out, since it follows from the length.
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

/// Index of the length among the words of a label: `B4 H32 S1024 D128 causal fp16`.
const LENGTH_WORD: usize = 2;

/// Name of this library in a comparison.
const OURS: &str = "ours";

fn cell(speed: Option<f64>) -> String {
    match speed {
        None => "-".to_owned(),
        Some(speed) if speed >= 100.0 => format!("{speed:.0}"),
        Some(speed) => format!("{speed:.3}"),
    }
}

/// Mean for comparisons with the figures of other libraries.
fn geometric_mean(ratios: &[f64]) -> f64 {
    (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
}

/// Text for a row that ran on an emulated device.
const fn emulated_words(checked: bool) -> &'static str {
    if checked { "emulated: checked against f64, not timed" } else { "emulated: neither checked nor timed" }
}

/// Heading of the counters of rows that ran on an emulated device.
const COUNTED: &str = "Counted in the emulator, a call's launches together; modelled from the operations and bytes of the \
    problem at the device's stated rates, with its units idle as the launch leaves them. Nothing here was timed.";

/// A line of a Markdown table.
fn line(cells: &[String]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    format!("| {} |", cells.join(" | "))
}

pub(super) fn markdown(all: &[Results], device: &str) -> String {
    let mut text = format!("Device: {device}\n");
    for results in all {
        let unit = results.unit.name();
        let _ = writeln!(text, "\n## {}: {}, {unit}\n", results.name, results.title);
        let mut head = vec![
            "row".to_owned(),
            "kernel".into(),
            OURS.into(),
            "median".into(),
            "spread".into(),
            "roofline".into(),
        ];
        head.extend(results.peers.iter().map(|(name, _)| name.clone()));
        if !results.peers.is_empty() {
            head.push("ours / best".into());
        }
        let _ = writeln!(text, "{}", line(&head));
        let _ = writeln!(text, "|{}", "---|".repeat(head.len()));
        let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
        let (mut ratios, mut emulated) = (Vec::new(), Vec::new());
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
                Measured::Emulated { kernel, checked, counted } => {
                    emulated.push((row.label.as_str(), counted));
                    cells.extend([kernel.as_str(), "-", "-", "-", "-"].map(str::to_owned));
                    *reasons.entry(emulated_words(*checked).to_owned()).or_default() += 1;
                }
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
            let _ = writeln!(text, "{}", line(&cells));
        }
        for (reason, rows) in reasons {
            let _ = writeln!(text, "\n{rows} of {} rows: {reason}", results.rows.len());
        }
        if !emulated.is_empty() {
            let _ = writeln!(text, "\n{COUNTED}\n");
            for (at, cells) in counted::table(&emulated).iter().enumerate() {
                let _ = writeln!(text, "{}", line(cells));
                if at == 0 {
                    let _ = writeln!(text, "|{}", "---|".repeat(cells.len()));
                }
            }
        }
        if !ratios.is_empty() {
            let mean = geometric_mean(&ratios);
            let _ = writeln!(text, "\nGeometric mean of ours / best: {mean:.3} over {} rows", ratios.len());
        }
    }
    text
}

/// A line for each row and library; a field that was not measured is empty.
pub(super) fn csv(all: &[Results]) -> Result<String, String> {
    let failed = |error: csv::Error| format!("csv: {error}");
    let mut table = csv::Writer::from_writer(Vec::new());
    let head = "table,row,peer,kernel,speed,unit,median_seconds,fastest_seconds,slowest_seconds";
    table.write_record(head.split(',')).map_err(failed)?;
    for results in all {
        for (index, row) in results.rows.iter().enumerate() {
            let [mut kernel, mut speed, mut median, mut fastest, mut slowest] = [const { String::new() }; 5];
            if let Measured::Timed { kernel: name, timing, .. } = &row.outcome {
                kernel.clone_from(name);
                speed = results.ours(row).map_or(String::new(), |speed| speed.to_string());
                [median, fastest, slowest] =
                    [timing.median(), timing.fastest(), timing.slowest()].map(|seconds| seconds.to_string());
            }
            if let Measured::Emulated { kernel: name, .. } = &row.outcome {
                kernel.clone_from(name);
            }
            let (name, unit) = (results.name.as_str(), results.unit.name());
            let ours = [name, &row.label, OURS, &kernel, &speed, unit, &median, &fastest, &slowest];
            table.write_record(ours).map_err(failed)?;
            for (peer, speeds) in &results.peers {
                if let Some(speed) = speeds[index] {
                    let speed = speed.to_string();
                    let theirs = [name, &row.label, peer, "", &speed, unit, "", "", ""];
                    table.write_record(theirs).map_err(failed)?;
                }
            }
        }
    }
    let bytes = table.into_inner().map_err(|error| format!("csv: {error}"))?;
    String::from_utf8(bytes).map_err(|error| format!("csv: {error}"))
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
            object["clock"] = timing.clock().into();
            object["fastest_seconds"] = timing.fastest().into();
            object["slowest_seconds"] = timing.slowest().into();
            object["flops"] = speed.flops.into();
            object["bytes"] = speed.bytes.into();
            object["roofline_share"] = speed.share.into();
        }
        Measured::Emulated { kernel, checked, counted } => {
            object["kernel"] = kernel.as_str().into();
            object["emulated"] = emulated_words(*checked).into();
            object["counted"] = counted.json();
            object["modelled_seconds"] = counted.modelled_seconds.into();
        }
        Measured::Absent(reason) => object["absent"] = reason.as_str().into(),
        Measured::Wrong(reason) => object["wrong"] = reason.as_str().into(),
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Speed;
    use crate::timing::Timing;
    use fmha_conformance::execute::CallTime;

    /// Results of a row that was timed and of one that no kernel supports, with a peer whose name needs escapes.
    fn results() -> [Results; 1] {
        let timing = Timing::of(&[2e-3, 1e-3, 4e-3].map(|seconds| CallTime { seconds, on_device: false }));
        let speed = Speed {
            flops: 6,
            bytes: 5,
            tflops: 3.0,
            gb_per_second: 4.0,
            share: Some(0.5),
            source: "a guess".into(),
        };
        let row = |label: &str, outcome| Row { label: label.into(), outcome };
        [Results {
            name: "t".into(),
            title: "a title".into(),
            unit: Unit::Tflops,
            rows: vec![
                row("B1 H2 S16 D8 b:8,0 bf16", Measured::Timed { kernel: "cpu-fwd".into(), timing, speed }),
                row("B1 H2 S32 D8 b:8,0 bf16", Measured::Absent("head_dim_qk 8 is odd, or so".into())),
            ],
            peers: vec![("their \"2|3\", new".into(), vec![Some(1.5), Some(2.5)])],
        }]
    }

    #[test]
    fn every_row_of_the_markdown_has_a_cell_for_each_column() {
        let text = markdown(&results(), "a device");
        let cells = |line: &str| line.replace("\\|", "").matches('|').count();
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines.iter().all(|line| cells(line) == cells(lines[0])), "{text}");
        assert!(lines[2].contains("| 3.000 | 2.0000 ms | 300.0 % | 50 % | 1.500 | 2.000 |"), "{text}");
        assert!(text.contains("1 of 2 rows: head_dim_qk 8 is odd, or so"), "{text}");
        assert!(text.ends_with("ours / best: 2.000 over 1 rows\n"), "{text}");
    }

    #[test]
    fn the_csv_is_read_back_as_it_was_written() {
        let text = csv(&results()).unwrap();
        let mut table = csv::Reader::from_reader(text.as_bytes());
        let rows: Vec<csv::StringRecord> = table.records().map(Result::unwrap).collect();
        let found: Vec<[&str; 5]> =
            rows.iter().map(|row| [&row[1], &row[2], &row[3], &row[4], &row[6]]).collect();
        let (first, second, theirs) =
            ("B1 H2 S16 D8 b:8,0 bf16", "B1 H2 S32 D8 b:8,0 bf16", "their \"2|3\", new");
        let expected = [
            [first, "ours", "cpu-fwd", "3", "0.002"],
            [first, theirs, "", "1.5", ""],
            [second, "ours", "", "", ""],
            [second, theirs, "", "2.5", ""],
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_json_has_the_figures_and_what_is_absent_with_its_reason() {
        let text = json(&results(), "a device");
        let report: Value = serde_json::from_str(&text).unwrap();
        let rows = &report["tables"][0]["rows"];
        assert_eq!((&report["device"], &rows[0]["speed"]), (&json!("a device"), &json!(3.0)));
        assert_eq!((&rows[0]["median_seconds"], &rows[0]["ours_to_best"]), (&json!(2e-3), &json!(2.0)));
        assert_eq!(rows[0]["peers"]["their \"2|3\", new"], 1.5);
        assert_eq!(rows[1]["absent"], "head_dim_qk 8 is odd, or so");
        assert!(rows[1].get("speed").is_none());
    }

    #[test]
    fn a_length_is_a_rows_own_and_what_else_differs_its_groups() {
        let labelled = |labels: &[&str]| {
            let rows = labels
                .iter()
                .map(|label| Row { label: (*label).to_owned(), outcome: Measured::Absent(String::new()) });
            let [mut results] = results();
            results.rows = rows.collect();
            let labels = results.short_labels();
            labels.into_iter().map(|label| format!("{}/{}", label.tick, label.group)).collect::<Vec<_>>()
        };
        assert_eq!(
            labelled(&["B4 H2 S1 D8 full", "B2 H2 S2 D8 full", "B4 H2 S1 D8 causal", "B2 H2 S2 D8 causal"]),
            ["S1/full", "S2/full", "S1/causal", "S2/causal"]
        );
        // First list: no length differs. Second: groups would be as many as rows. Third: only B differs.
        assert_eq!(labelled(&["B1 H2 S1 D8 full", "B1 H2 S1 D16 full"]), ["D8/", "D16/"]);
        assert_eq!(labelled(&["B1 H2 S1 D8 full", "B1 H2 S2 D16 full"]), ["S1 D8/", "S2 D16/"]);
        assert_eq!(
            labelled(&["B1 H2 S1 D8 full", "B2 H2 S1 D8 full", "B1 H2 S2 D8 full"]),
            ["B1 S1/", "B2 S1/", "B1 S2/"]
        );
    }
}
