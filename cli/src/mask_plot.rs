//! `fmha explain --plot FILE.svg`: which tiles of a mask a kernel computes completely, which are partly masked, and
//! which it skips.

use std::path::Path;

use fmha::{DevSlice, MaskArgs};
use fmha_core::BlockClass;
use fmha_core::expr::{Captured, Seen, Tile};
use fmha_core::masks::HostMasks;
use fmha_core::seq::SeqSpan;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::failure::Failure;
use crate::setup::Setup;

/// Most tiles along an axis of the picture; with more, a tile of the picture is several of the kernel's.
const MOST_TILES: u32 = 192;
/// Longest side of the picture of tiles, pixels.
const SIDE: u32 = 720;
const MARGIN: i32 = 16;
const LINE: i32 = 20;
const FONT: u32 = 14;
const COLOURS: [RGBColor; 3] = [RGBColor(236, 238, 241), RGBColor(240, 150, 50), RGBColor(38, 98, 170)];

/// Tiles of one sequence and head: their classes row by row.
struct Picture {
    block_q: u32,
    block_k: u32,
    rows: Vec<Vec<BlockClass>>,
}

/// Writes the picture of the first sequence and head, in tiles of `block_q` x `block_k`; what it shows, in words.
///
/// # Errors
/// A sequence without pairs, and a file that the system does not write.
pub(super) fn write(setup: &Setup, [block_q, block_k]: [u32; 2], path: &Path) -> Result<String, Failure> {
    let wrong = |text: String| Failure::wrong(format!("plot: {text}"));
    let spans = setup.spans()?;
    let Some(span) = spans.iter().find(|span| span.seqlen_q > 0 && span.seqlen_k > 0) else {
        return Err(wrong(format!("none of {} sequences has a query and a key", spans.len())));
    };
    let picture = tiles(setup, span, [block_q, block_k])?;
    let all = picture.rows.iter().flatten();
    let count = |class: BlockClass| all.clone().filter(|&&one| one == class).count();
    let [skipped, cut, whole] = [BlockClass::Skipped, BlockClass::Edge, BlockClass::Inside].map(count);
    let several = if [picture.block_q, picture.block_k] == [block_q, block_k] {
        String::new()
    } else {
        format!(", several of the {block_q} x {block_k} asked for: a side has {MOST_TILES} at most")
    };
    let words = format!(
        "{whole} tiles whole, {cut} cut, {skipped} skipped, of {} x {}{several}",
        picture.block_q, picture.block_k
    );
    let title = format!(
        "mask {} of sequence {}, head 0: {} queries, {} keys",
        said(setup),
        span.i_batch,
        span.seqlen_q,
        span.seqlen_k
    );
    let text = svg(&picture, &title, [("skipped", skipped), ("cut", cut), ("whole", whole)])
        .map_err(|error| wrong(error.to_string()))?;
    std::fs::write(path, text).map_err(|error| wrong(format!("{}: {error}", path.display())))?;
    Ok(words)
}

/// The mask in words: its band, and the other masks.
fn said(setup: &Setup) -> String {
    let masks = &setup.fwd.masks;
    let code = setup.fwd.code.mask.as_ref().map(|mask| format!(" and `{mask}`"));
    let of = |wanted: bool, name: &str| if wanted { format!(" and {name}") } else { String::new() };
    let data = of(masks.intervals.is_some(), "intervals") + &of(masks.bits.is_some(), "bits");
    format!("{}{data}{}", setup.fwd.mask, code.unwrap_or_default())
}

fn tiles(setup: &Setup, span: &SeqSpan, blocks: [u32; 2]) -> Result<Picture, Failure> {
    let problem = &setup.fwd;
    let lengths = [span.seqlen_q, span.seqlen_k];
    let [block_q, block_k] = [0, 1].map(|axis| {
        let (block, length): (u32, u32) = (blocks[axis].max(1), lengths[axis]);
        block.saturating_mul(length.div_ceil(block).div_ceil(MOST_TILES).max(1))
    });
    let args = MaskArgs::default()
        .intervals(DevSlice::host(&setup.masks.intervals))
        .bits(DevSlice::host(&setup.masks.bits));
    let masks = HostMasks::of(problem, &args, setup.totals().total_q)?;
    let of_head = masks.as_ref().map(|masks| masks.head(span, 0));
    let band = problem.band(span.seqlen_q, span.seqlen_k);
    // Functions of the command capture nothing.
    let captured: &[Captured<'_>] = &[];
    let class = |q: std::ops::Range<u32>, k: std::ops::Range<u32>| {
        let by_code = problem.code.mask.as_ref().map(|mask| {
            let b = span.i_batch..span.i_batch + 1;
            let (seqlen_q, seqlen_k) = ((span.seqlen_q, span.seqlen_q), (span.seqlen_k, span.seqlen_k));
            let seen =
                mask.seen(&Tile { b, h: 0..1, q: q.clone(), k: k.clone(), seqlen_q, seqlen_k }, captured);
            match seen {
                Seen::Nothing => BlockClass::Skipped,
                Seen::Part => BlockClass::Edge,
                Seen::Everything => BlockClass::Inside,
            }
        });
        let by_data = of_head.as_ref().map(|masks| masks.class(q.clone(), k.clone()));
        let all = [Some(band.block_class(q, k)), by_data, by_code];
        let said = || all.into_iter().flatten();
        if said().any(|class| class == BlockClass::Skipped) {
            BlockClass::Skipped
        } else if said().all(|class| class == BlockClass::Inside) {
            BlockClass::Inside
        } else {
            BlockClass::Edge
        }
    };
    let steps = |length: u32, block: u32| {
        (0..length).step_by(block as usize).map(move |first| first..first.saturating_add(block).min(length))
    };
    let rows = steps(span.seqlen_q, block_q)
        .map(|q| steps(span.seqlen_k, block_k).map(|k| class(q.clone(), k)).collect())
        .collect();
    Ok(Picture { block_q, block_k, rows })
}

type Failed = Box<dyn std::error::Error>;

fn svg(picture: &Picture, title: &str, legend: [(&str, usize); 3]) -> Result<String, Failed> {
    let (rows, columns) = (picture.rows.len() as u32, picture.rows.first().map_or(1, Vec::len) as u32);
    let side = (SIDE / rows.max(columns)).max(3);
    let (width, height) = (columns * side, rows * side);
    let top = MARGIN + 3 * LINE;
    let size = ((width + 2 * MARGIN as u32).max(520), height + top as u32 + MARGIN as u32 + LINE as u32);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE)?;
        let style =
            |at: f64| ("sans-serif", at).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Top));
        area.draw(&Text::new(title.to_owned(), (MARGIN, MARGIN), style(f64::from(FONT) + 1.0)))?;
        let mut x = MARGIN;
        for ((name, count), colour) in legend.into_iter().zip(COLOURS).rev() {
            let y = MARGIN + LINE + 6;
            area.draw(&Rectangle::new([(x, y), (x + 14, y + 14)], colour.filled()))?;
            area.draw(&Text::new(format!("{name} {count}"), (x + 20, y), style(f64::from(FONT))))?;
            x += 150;
        }
        for (row, classes) in picture.rows.iter().enumerate() {
            // Adjacent tiles of one class are drawn as one rectangle.
            let mut first = 0;
            for run in classes.chunk_by(|a, b| a == b) {
                let colour = COLOURS[match run[0] {
                    BlockClass::Skipped => 0,
                    BlockClass::Edge => 1,
                    BlockClass::Inside => 2,
                }];
                let at = |column: usize, row: usize| {
                    (MARGIN + column as i32 * side as i32, top + row as i32 * side as i32)
                };
                let gap = i32::from(side > 6);
                let (left, right) = (at(first, row), at(first + run.len(), row + 1));
                area.draw(&Rectangle::new([left, (right.0 - gap, right.1 - gap)], colour.filled()))?;
                first += run.len();
            }
        }
        let below =
            format!("keys to the right, queries down; a tile is {} x {}", picture.block_q, picture.block_k);
        let at = (MARGIN, top + height as i32 + 6);
        area.draw(&Text::new(below, at, style(f64::from(FONT) - 1.0)))?;
        area.present()?;
    }
    Ok(text)
}
