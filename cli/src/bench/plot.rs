//! A table as an SVG picture: one line of points a library, ours the thickest.

use std::ops::Range;

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// One library's speeds over the rows; `None` for a row that it does not support.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) speeds: Vec<Option<f64>>,
}

/// Text below a row's points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Label {
    /// Words that distinguish the rows of one group, one line for each.
    pub(super) tick: String,
    /// Text that neighbours share. Lines join the rows of a group alone: nothing grows between groups.
    pub(super) group: String,
}

/// Colours of Okabe and Ito ("Color Universal Design", 2008), distinguishable with all kinds of colour
/// vision.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];
const GREY: RGBColor = RGBColor(140, 140, 140);

// Pixels.
const FONT: u32 = 13;
const LINE: i32 = 16;
/// Approximate width of a letter of the plot's font, in pixels.
const LETTER: i32 = 7;
const MARGIN: i32 = 14;
const LEFT: u32 = 70;
const TITLE: i32 = 30;
const PLOT_HEIGHT: i32 = 340;
/// Least height of a row in the picture, then least width of the picture, in pixels.
const ROW: i32 = 62;
const LEAST_WIDTH: i32 = 720;

/// The picture's text.
pub(super) fn svg(title: &str, unit: &str, labels: &[Label], series: &[Series]) -> Result<String, String> {
    let mut text = String::new();
    draw(&mut text, title, unit, labels, series).map_err(|error| format!("plot: {error}"))?;
    Ok(text)
}

type Failed = Box<dyn std::error::Error>;
type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Chart<'a, 'b> = ChartContext<'b, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

fn draw(
    text: &mut String,
    title: &str,
    unit: &str,
    labels: &[Label],
    series: &[Series],
) -> Result<(), Failed> {
    let width = LEAST_WIDTH.max(labels.len() as i32 * ROW) + LEFT as i32 + 2 * MARGIN;
    let legend = places(series, width);
    let legend_lines = legend.last().map_or(0, |&(_, line)| line + 1);
    let tick_lines = labels.iter().map(|label| label.tick.split(' ').count()).max().unwrap_or(0) as i32;
    let top = MARGIN + TITLE + legend_lines.max(1) * (LINE + 2) + 8;
    let below = 8 + (tick_lines + 2) * LINE;
    let height = top + PLOT_HEIGHT + below;

    let area = SVGBackend::with_string(text, (width as u32, height as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    write_text(&area, title, (width / 2, MARGIN), HPos::Center, 19)?;
    let unit_line = (legend_lines - 1).max(0);
    write_text(&area, unit, (MARGIN, MARGIN + TITLE + unit_line * (LINE + 2) + 1), HPos::Left, FONT)?;
    for (index, (one, &(x, line))) in series.iter().zip(&legend).enumerate() {
        let y = MARGIN + TITLE + line * (LINE + 2) + LINE / 2;
        let (colour, stroke) = style(index);
        area.draw(&PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(stroke)))?;
        area.draw(&Circle::new((x + 12, y), 2 + stroke, colour.filled()))?;
        write_text(&area, &one.name, (x + 30, y - LINE / 2 + 2), HPos::Left, FONT)?;
    }

    let largest = series.iter().flat_map(|s| s.speeds.iter().flatten()).fold(0.0f64, |most, &s| most.max(s));
    let last = labels.len().saturating_sub(1) as f64;
    let mut chart = ChartBuilder::on(&area)
        .margin_top(top)
        .margin_bottom(below)
        .margin_right(MARGIN)
        .y_label_area_size(LEFT)
        .build_cartesian_2d(-0.5..last + 0.5, 0.0..(largest * 1.08).max(f64::MIN_POSITIVE))?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .y_labels(7)
        // 0.30000000000000004 is 0.3.
        .y_label_formatter(&|y| format!("{}", (y * 1e6).round() / 1e6))
        .y_label_style(("sans-serif", FONT))
        .axis_style(GREY)
        .bold_line_style(BLACK.mix(0.12))
        .light_line_style(TRANSPARENT)
        .draw()?;
    below_the_axis(&area, &chart, labels, tick_lines)?;
    // Ours last: on top.
    for (index, one) in series.iter().enumerate().rev() {
        let (colour, stroke) = style(index);
        for run in runs(labels, &one.speeds) {
            let points = run.filter_map(|x| Some((x as f64, one.speeds.get(x).copied().flatten()?)));
            let points: Vec<(f64, f64)> = points.collect();
            chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(stroke)))?;
            chart.draw_series(points.iter().map(|&point| Circle::new(point, 2 + stroke, colour.filled())))?;
        }
    }
    area.present()?;
    Ok(())
}

/// Colour and width of a series.
fn style(index: usize) -> (RGBColor, u32) {
    (COLOURS[index % COLOURS.len()], if index == 0 { 3 } else { 1 })
}

/// Position of each name in the legend: x, and the line on which it is.
fn places(series: &[Series], width: i32) -> Vec<(i32, i32)> {
    let (mut x, mut line) = (LEFT as i32 + 8, 0);
    series
        .iter()
        .map(|one| {
            let wide = 30 + one.name.chars().count() as i32 * LETTER + 20;
            if x + wide > width - MARGIN && x > LEFT as i32 + 8 {
                (x, line) = (LEFT as i32 + 8, line + 1);
            }
            x += wide;
            (x - wide, line)
        })
        .collect()
}

/// Rows that a line joins: neighbours of one group, all with a speed.
fn runs(labels: &[Label], speeds: &[Option<f64>]) -> Vec<Range<usize>> {
    groups(labels)
        .into_iter()
        .flat_map(|group| {
            let rows: Vec<usize> = group.filter(|&x| speeds.get(x).is_some_and(Option::is_some)).collect();
            rows.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[run.len() - 1] + 1).collect::<Vec<_>>()
        })
        .collect()
}

/// Neighbours with the same group.
fn groups(labels: &[Label]) -> Vec<Range<usize>> {
    let mut start = 0;
    labels
        .chunk_by(|a, b| a.group == b.group)
        .map(|group| {
            start += group.len();
            start - group.len()..start
        })
        .collect()
}

/// The rows' labels, and the groups' below them.
fn below_the_axis(
    area: &Area<'_>,
    chart: &Chart<'_, '_>,
    labels: &[Label],
    tick_lines: i32,
) -> Result<(), Failed> {
    let pixel = |x: f64| chart.plotting_area().map_coordinate(&(x, 0.0));
    for (x, label) in labels.iter().enumerate() {
        let (x, y) = pixel(x as f64);
        for (line, word) in label.tick.split(' ').enumerate() {
            write_text(area, word, (x, y + 8 + line as i32 * LINE), HPos::Center, FONT)?;
        }
    }
    for group in groups(labels).into_iter().filter(|group| !labels[group.start].group.is_empty()) {
        let (from, y) = pixel(group.start as f64 - 0.42);
        let (to, _) = pixel(group.end as f64 - 0.58);
        let y = y + 12 + tick_lines * LINE;
        area.draw(&PathElement::new([(from, y), (to, y)], GREY.stroke_width(1)))?;
        write_text(area, &labels[group.start].group, ((from + to) / 2, y + 4), HPos::Center, FONT)?;
    }
    Ok(())
}

fn write_text(area: &Area<'_>, text: &str, at: (i32, i32), side: HPos, size: u32) -> Result<(), Failed> {
    let style = TextStyle::from(("sans-serif", size)).pos(Pos::new(side, VPos::Top));
    area.draw(&Text::new(text.to_owned(), at, style))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(words: &[(&str, &str)]) -> Vec<Label> {
        words.iter().map(|&(tick, group)| Label { tick: tick.into(), group: group.into() }).collect()
    }

    #[test]
    fn a_picture_names_its_title_rows_groups_and_libraries() {
        let series = [
            Series { name: "ours".into(), speeds: vec![Some(1.0), Some(2.0)] },
            Series { name: "theirs".into(), speeds: vec![None, Some(1.5)] },
        ];
        let labels = labels(&[("S512", "causal"), ("S1024", "causal")]);
        let text = svg("a title", "TFLOP/s", &labels, &series).unwrap();
        for word in ["<svg", "a title", "TFLOP/s", "S512", "S1024", "causal", "ours", "theirs", "</svg>"] {
            assert!(text.contains(word), "{word}");
        }
    }

    #[test]
    fn an_empty_table_is_still_a_picture() {
        assert!(svg("nothing", "GB/s", &[], &[]).unwrap().contains("</svg>"));
    }

    #[test]
    fn a_line_joins_neither_groups_nor_the_rows_beside_a_missing_one() {
        let labels = labels(&[("a", "x"), ("b", "x"), ("c", "x"), ("d", "x"), ("e", "y"), ("f", "y")]);
        let speeds = [Some(1.0), Some(2.0), None, Some(3.0), Some(4.0), Some(5.0)];
        assert_eq!(runs(&labels, &speeds), [0..2, 3..4, 4..6]);
    }

    #[test]
    fn a_legend_that_is_too_long_goes_on_in_the_next_line() {
        let long = |name: &str| Series { name: name.repeat(20), speeds: vec![] };
        let places = places(&[long("ours"), long("them"), long("more")], 800);
        assert_eq!(places.iter().map(|place| place.1).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(places.iter().all(|place| place.0 == LEFT as i32 + 8));
    }
}
