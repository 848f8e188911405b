//! Results of a rung as lines, JSON, Markdown and a plot.

use std::fmt::Write as _;
use std::path::Path;

use fmha::{Device, Dims, Error, Stream};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde_json::{Value, json};

use crate::problem::Problem;

/// Result of one rung on one problem.
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) text: String,
    pub(crate) registers: Option<u32>,
    pub(crate) spill_bytes: Option<u32>,
    pub(crate) smem_bytes: Option<u32>,
    /// Seconds by the device's clock; `None` if it has none.
    pub(crate) seconds: Option<f64>,
    /// Counters of an emulated device: instructions of warps, and extra cycles of shared memory after bank
    /// conflicts.
    counted: Option<[u64; 2]>,
    /// Largest error against float64, and its bound.
    error: Option<(f64, f64)>,
    /// Reason why there is no result.
    pub(crate) note: String,
    wrong: bool,
}

impl Row {
    pub(crate) fn new(name: &str, text: &str) -> Self {
        Self {
            name: name.to_owned(),
            text: text.to_owned(),
            registers: None,
            spill_bytes: None,
            smem_bytes: None,
            seconds: None,
            counted: None,
            error: None,
            note: String::new(),
            wrong: false,
        }
    }

    /// Whether the result was wrong. A feature that the device lacks is no failure.
    pub(crate) fn failed(&self) -> bool {
        self.wrong
    }

    /// Runs and checks a call, and times it if its result is right.
    pub(crate) fn measure(
        &mut self,
        device: &Device,
        problem: &Problem,
        queue: impl Fn(&Stream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _ = fmha::emulated_launches();
        let stream = device.stream()?;
        queue(&stream)?;
        stream.synchronize()?;
        self.judge(device, problem);
        self.time(device, || queue(&stream), &stream)
    }

    /// Measures a call that borrows the problem's output, as [`measure`](Self::measure) does.
    pub(crate) fn measure_mut(
        &mut self,
        device: &Device,
        problem: &mut Problem,
        mut queue: impl FnMut(&mut Problem, &Stream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _ = fmha::emulated_launches();
        let stream = device.stream()?;
        queue(problem, &stream)?;
        stream.synchronize()?;
        self.judge(device, problem);
        self.time(device, || queue(problem, &stream), &stream)
    }

    fn judge(&mut self, device: &Device, problem: &Problem) {
        self.counted = fmha::emulated_launches().and_then(|launches| {
            let launches: Vec<Value> = serde_json::from_str(&launches).ok()?;
            let sum =
                |name| launches.iter().map(|launch| launch["counters"][name].as_u64().unwrap_or(0)).sum();
            Some(["warp_instructions", "bank_conflicts"].map(sum))
        });
        match problem.check(device) {
            Ok(error) => self.error = Some(error),
            Err(why) => (self.note, self.wrong) = (why, true),
        }
    }

    /// Seconds of a call: the median of bursts of some 20 ms.
    fn time(
        &mut self,
        device: &Device,
        mut queue: impl FnMut() -> Result<(), Error>,
        stream: &Stream,
    ) -> Result<(), Error> {
        if self.wrong || !device.has_clock() {
            return Ok(());
        }
        let once = stream.seconds(&mut queue)?;
        let calls = (0.02 / once).clamp(1.0, 100.0) as u32;
        let mut bursts = Vec::new();
        for _ in 0..7 {
            bursts.push(stream.seconds(|| (0..calls).try_for_each(|_| queue()))? / f64::from(calls));
        }
        bursts.sort_unstable_by(f64::total_cmp);
        self.seconds = Some(bursts[bursts.len() / 2]);
        Ok(())
    }
}

/// Rows of all rungs of one problem.
pub(crate) struct Table {
    dims: Dims,
    causal: bool,
    flops: f64,
    pub(crate) rows: Vec<Row>,
}

impl Table {
    pub(crate) fn new(problem: &Problem, rows: Vec<Row>) -> Self {
        Self { dims: problem.dims, causal: problem.causal, flops: problem.flops(), rows }
    }

    fn mask(&self) -> &'static str {
        if self.causal { "causal" } else { "full" }
    }

    fn short(&self) -> String {
        format!("D {} {}", self.dims.head_dim_qk, self.mask())
    }

    pub(crate) fn title(&self) -> String {
        let Dims { batch, num_heads_q, seqlen_q, .. } = self.dims;
        format!("{}, batch {batch}, {num_heads_q} heads, {seqlen_q} queries and keys, bf16", self.short())
    }

    fn tflops(&self, row: &Row) -> Option<f64> {
        row.seconds.map(|seconds| self.flops / seconds * 1e-12)
    }

    /// Speed relative to the previous step that has one.
    fn gain(&self, index: usize) -> Option<f64> {
        let before = self.rows[..index].iter().rev().find_map(|row| row.seconds)?;
        self.rows[index].seconds.map(|seconds| before / seconds)
    }

    /// Text for a terminal.
    pub(crate) fn lines(&self) -> String {
        let mut text =
            format!("{:<16}{:>12}{:>10}{:>8}  {}", "step", "time, us", "TFLOP/s", "gain", "largest error");
        for (index, row) in self.rows.iter().enumerate() {
            let number =
                |x: Option<f64>, digits| x.map_or_else(|| "-".to_owned(), |x| format!("{x:.digits$}"));
            let time = number(row.seconds.map(|s| s * 1e6), 1);
            let (rate, gain) = (number(self.tflops(row), 1), number(self.gain(index), 2));
            let _ = write!(text, "\n{:<16}{time:>12}{rate:>10}{gain:>8}  ", row.name);
            match row.error {
                Some((error, bound)) => {
                    let _ = write!(text, "{error:.1e} of {bound:.1e}");
                }
                None => text += &row.note,
            }
            if let Some([instructions, conflicts]) = row.counted {
                let _ =
                    write!(text, "; {instructions} warp instructions, {conflicts} bank conflicts (emulated)");
            }
        }
        text
    }

    fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().enumerate().map(|(index, row)| {
            json!({
                "step": row.name, "text": row.text, "seconds": row.seconds, "tflops": self.tflops(row),
                "gain": self.gain(index), "registers": row.registers, "spill_bytes": row.spill_bytes,
                "smem_bytes": row.smem_bytes, "error": row.error.map(|e| e.0), "bound": row.error.map(|e| e.1),
                "emulated_warp_instructions": row.counted.map(|c| c[0]),
                "emulated_bank_conflicts": row.counted.map(|c| c[1]), "note": row.note,
            })
        }).collect();
        let Dims { batch, num_heads_q, seqlen_q, head_dim_qk, .. } = self.dims;
        json!({
            "batch": batch, "heads": num_heads_q, "seqlen": seqlen_q, "head_dim": head_dim_qk, "mask": self.mask(),
            "dtype": "bf16", "rows": rows,
        })
    }
}

/// Writes `ladder.json`, `ladder.md` and, if there are times, `ladder.svg`.
pub(crate) fn write(folder: &Path, device: &str, tables: &[Table]) -> Result<(), Box<dyn std::error::Error>> {
    std::fs::create_dir_all(folder)?;
    let all = json!({ "device": device, "problems": tables.iter().map(Table::json).collect::<Vec<_>>() });
    std::fs::write(folder.join("ladder.json"), serde_json::to_string_pretty(&all)? + "\n")?;
    std::fs::write(folder.join("ladder.md"), markdown(device, tables))?;
    if tables.iter().flat_map(|table| &table.rows).any(|row| row.seconds.is_some()) {
        std::fs::write(folder.join("ladder.svg"), svg(device, tables)?)?;
    }
    Ok(())
}

/// Table with a column for each problem: TFLOP/s and the gain over the previous step, or an emulated device's
/// instructions and bank conflicts.
fn markdown(device: &str, tables: &[Table]) -> String {
    let mut text = format!("{device}\n\n| step | registers |");
    for table in tables {
        let _ = write!(text, " {} |", table.short());
    }
    text += "\n|---|---|";
    text += &"---|".repeat(tables.len());
    let Some(first) = tables.first() else { return text };
    for (index, row) in first.rows.iter().enumerate() {
        let registers = row.registers.map_or_else(|| "-".to_owned(), |count| count.to_string());
        let _ = write!(text, "\n| {} | {registers} |", row.name);
        for table in tables {
            let row = &table.rows[index];
            let cell = match (table.tflops(row), table.gain(index), row.counted) {
                (Some(rate), Some(gain), _) => format!("{rate:.1} (x {gain:.2})"),
                (Some(rate), None, _) => format!("{rate:.1}"),
                (None, _, Some([instructions, conflicts])) if row.error.is_some() => {
                    format!("{instructions} instructions, {conflicts} conflicts")
                }
                _ => "-".to_owned(),
            };
            let _ = write!(text, " {cell} |");
        }
    }
    text + "\n"
}

/// The colours of Okabe and Ito ("Color Universal Design", 2008).
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];

/// Plot with a line for each problem. TFLOP/s are on a logarithmic scale, so that equal gains have equal heights.
fn svg(device: &str, tables: &[Table]) -> Result<String, Box<dyn std::error::Error>> {
    let steps: Vec<&str> =
        tables.first().map(|table| &table.rows).into_iter().flatten().map(|row| &*row.name).collect();
    let points = |table: &Table| -> Vec<(f64, f64)> {
        let rates = table.rows.iter().enumerate().filter_map(|(x, row)| Some((x as f64, table.tflops(row)?)));
        rates.collect()
    };
    let rates: Vec<f64> = tables.iter().flat_map(points).map(|point| point.1).collect();
    let (least, most) =
        rates.iter().fold((f64::INFINITY, 1.0f64), |(a, b), &rate| (a.min(rate), b.max(rate)));
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (960, 520)).into_drawing_area();
        area.fill(&WHITE)?;
        let write = |words: &str, at: (i32, i32), side: HPos, size: u32| {
            let style = TextStyle::from(("sans-serif", size)).pos(Pos::new(side, VPos::Top));
            area.draw(&Text::new(words.to_owned(), at, style))
        };
        write(&format!("The ladder, TFLOP/s: {device}"), (480, 12), HPos::Center, 17)?;
        let last = steps.len().saturating_sub(1) as f64;
        let mut chart = ChartBuilder::on(&area)
            .margin_top(48)
            .margin_right(20)
            .margin_bottom(56)
            .y_label_area_size(56)
            .build_cartesian_2d(-0.5..last + 0.5, (least * 0.7..most * 1.4).log_scale())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .y_label_formatter(&|y| format!("{y}"))
            .light_line_style(BLACK.mix(0.06))
            .draw()?;
        for (x, step) in steps.iter().enumerate() {
            let (at, _) = chart.plotting_area().map_coordinate(&(x as f64, least * 0.7));
            for (line, word) in step.split(' ').enumerate() {
                write(word, (at, 470 + 15 * line as i32), HPos::Center, 13)?;
            }
        }
        for (index, table) in tables.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let line = points(table);
            chart.draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(2)))?;
            chart.draw_series(line.iter().map(|&point| Circle::new(point, 4, colour.filled())))?;
            let y = 60 + 18 * index as i32;
            area.draw(&PathElement::new([(72, y + 7), (96, y + 7)], colour.stroke_width(2)))?;
            write(&table.short(), (102, y), HPos::Left, 13)?;
        }
        area.present()?;
    }
    Ok(text)
}
