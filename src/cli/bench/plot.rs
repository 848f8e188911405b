//! A table as an SVG picture: one line of points a library, ours the thickest.

use plotters::prelude::*;

/// One library's speeds over the rows; `None` where it does not take one.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) speeds: Vec<Option<f64>>,
}

/// The colours of Okabe and Ito ("Color Universal Design", 2008), which everybody tells apart.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

/// The picture's text.
pub(super) fn svg(title: &str, unit: &str, labels: &[String], series: &[Series]) -> Result<String, String> {
    let mut text = String::new();
    draw(&mut text, title, unit, labels, series).map_err(|error| format!("plot: {error}"))?;
    Ok(text)
}

fn draw(
    text: &mut String,
    title: &str,
    unit: &str,
    labels: &[String],
    series: &[Series],
) -> Result<(), Box<dyn std::error::Error>> {
    let largest = series.iter().flat_map(|s| s.speeds.iter().flatten()).fold(0.0f64, |most, &s| most.max(s));
    let area = SVGBackend::with_string(text, (900, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let last = labels.len().saturating_sub(1) as f64;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(-0.5..last + 0.5, 0.0..(largest * 1.15).max(f64::MIN_POSITIVE))?;
    let label = |x: &f64| {
        let whole = (x - x.round()).abs() < 1e-6 && *x >= 0.0;
        labels.get(x.round() as usize).filter(|_| whole).cloned().unwrap_or_default()
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(labels.len() * 2 + 1)
        .x_label_formatter(&label)
        .y_desc(unit)
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (index, one) in series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let width = if index == 0 { 3 } else { 1 };
        let points: Vec<(f64, f64)> = one
            .speeds
            .iter()
            .enumerate()
            .filter_map(|(x, speed)| speed.map(|speed| (x as f64, speed)))
            .collect();
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(width)))?
            .label(one.name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(width)));
        chart.draw_series(points.iter().map(|&point| Circle::new(point, 2 + width, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_names_its_title_rows_and_libraries() {
        let series = [
            Series { name: "ours".into(), speeds: vec![Some(1.0), Some(2.0)] },
            Series { name: "theirs".into(), speeds: vec![None, Some(1.5)] },
        ];
        let text = svg("a title", "TFLOP/s", &["S512".into(), "S1024".into()], &series).unwrap();
        for word in ["<svg", "a title", "TFLOP/s", "S512", "S1024", "ours", "theirs", "</svg>"] {
            assert!(text.contains(word), "{word}");
        }
    }

    #[test]
    fn an_empty_table_is_still_a_picture() {
        assert!(svg("nothing", "GB/s", &[], &[]).unwrap().contains("</svg>"));
    }
}
