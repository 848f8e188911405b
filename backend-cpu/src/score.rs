//! Steps between `Q K^T` and the softmax, on a panel of scores: those of some keys and PANEL queries.

use fmha_core::dropout::{KeepMask, keep_scale};
use fmha_core::{Bias, BlockClass, DevSlice, FwdProblem, MaskBand, ScoreArgs, SeqSpan};

use crate::code::Code;
use crate::simd::{Op, Simd, tanh};
use crate::tensor::{Matrix, Source, f32_at};

/// Operands of the score for a whole call.
pub(crate) struct ScoreInputs<'a> {
    problem: &'a FwdProblem,
    args: ScoreArgs<'a>,
    bias: Option<Source>,
    /// Score and mask functions of the call.
    pub(crate) code: Option<Code<'a>>,
}

impl<'a> ScoreInputs<'a> {
    pub(crate) fn new(problem: &'a FwdProblem, args: &ScoreArgs<'a>, code: Option<Code<'a>>) -> Self {
        let bias = match (problem.score.bias, args.bias) {
            (Bias::Elementwise(bias), Some(slice)) => Some(Source::new(slice, bias.dtype, bias.strides)),
            _ => None,
        };
        Self { problem, args: *args, bias, code }
    }

    /// Whether there is an elementwise bias.
    pub(crate) fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// Score steps of one sequence and query head.
    pub(crate) fn head(&self, span: SeqSpan, i_head: u32) -> HeadScore {
        let (problem, args) = (self.problem, &self.args);
        let dims = problem.dims;
        let i_head_kv = i_head / problem.gqa_ratio();
        let descale = |slice: &Option<DevSlice<'_>>, kind: fmha_core::Descale| {
            slice
                .as_ref()
                .map_or(1.0, |slice| f32_at(slice, kind.index(span.i_batch, i_head_kv, dims.num_heads_kv)))
        };
        let alibi = match (problem.score.bias, &args.alibi_slopes) {
            (Bias::Alibi { per_batch }, Some(slopes)) => {
                let i_batch = if per_batch { span.i_batch as usize } else { 0 };
                let slope = f32_at(slopes, i_batch * dims.num_heads_q as usize + i_head as usize);
                Some((slope, problem.alibi_diagonal(span.seqlen_q, span.seqlen_k)))
            }
            _ => None,
        };
        let bias = match (problem.score.bias, &self.bias) {
            (Bias::Elementwise(bias), Some(source)) => {
                let (b, h) = bias.broadcast.index(span.i_batch, i_head);
                Some(source.matrix(b, h, 0))
            }
            _ => None,
        };
        HeadScore {
            span,
            i_head,
            coded: self.code.is_some(),
            i_head_kv,
            band: problem.band(span.seqlen_q, span.seqlen_k),
            softmax_scale: problem.resolved_softmax_scale(),
            softcap: problem.score.softcap,
            bias,
            alibi,
            drops: problem.drops(),
            keep: problem.keep(args.dropout.unwrap_or_default(), span.i_batch, i_head),
            keep_scale: if problem.drops() { keep_scale(problem.dropout.p_drop) as f32 } else { 1.0 },
            sink: args.sink.as_ref().map(|sink| f32_at(sink, i_head as usize)),
            descale_q: descale(&args.descale_q, problem.scales.descale_q),
            descale_k: descale(&args.descale_k, problem.scales.descale_k),
            descale_v: descale(&args.descale_v, problem.scales.descale_v),
        }
    }
}

/// The score of one sequence and query head.
#[derive(Clone, Copy)]
pub(crate) struct HeadScore {
    pub(crate) span: SeqSpan,
    pub(crate) i_head: u32,
    /// Whether the problem has a score function or a mask function.
    pub(crate) coded: bool,
    pub(crate) i_head_kv: u32,
    pub(crate) band: MaskBand,
    pub(crate) softmax_scale: f32,
    pub(crate) softcap: Option<f32>,
    pub(crate) bias: Option<Matrix>,
    /// ALiBi's slope, and the diagonal from which distances are measured.
    alibi: Option<(f32, i64)>,
    /// Whether any score can be dropped.
    pub(crate) drops: bool,
    pub(crate) keep: KeepMask,
    /// `1 / (1 - p_drop)`.
    pub(crate) keep_scale: f32,
    pub(crate) sink: Option<f32>,
    pub(crate) descale_q: f32,
    pub(crate) descale_k: f32,
    pub(crate) descale_v: f32,
}

/// A panel of scores: queries `i .. i + queries` (lanes) and keys `j + rows.start .. j + rows.end` (rows).
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    /// First query.
    pub(crate) i: u32,
    /// Live lanes.
    pub(crate) queries: usize,
    /// The key of row 0.
    pub(crate) j: u32,
    /// First row, and one past the last, that any lane sees.
    pub(crate) rows: (usize, usize),
    /// Whether the mask hides some pair of the panel.
    pub(crate) edge: bool,
}

impl Panel {
    /// The panel of queries `i .. i + queries` and the `keys` keys from `j` on; `None` if no pair is visible.
    pub(crate) fn new(band: MaskBand, i: u32, queries: usize, j: u32, keys: usize) -> Option<Self> {
        let (i_range, j_range) = (i..i + queries as u32, j..j + keys as u32);
        let class = band.block_class(i_range.clone(), j_range.clone());
        let rows = match class {
            BlockClass::Skipped => return None,
            BlockClass::Inside => (0, keys),
            BlockClass::Edge => {
                let seen = band.k_range(i_range.clone(), j_range.end);
                let sinks = band.sink_range(i_range, j_range.end);
                let first = if sinks.end > j { j } else { seen.start.max(j) };
                let last = seen.end.max(sinks.end).min(j_range.end);
                if first >= last {
                    return None;
                }
                // Rows start at an even index, for kernels that multiply pairs of rows.
                ((first - j) as usize & !1, (last - j) as usize)
            }
        };
        Some(Self { i, queries, j, rows, edge: class == BlockClass::Edge })
    }

    /// Number of vectors that have at least one valid lane.
    pub(crate) fn vectors<S: Simd>(&self) -> usize {
        self.queries.div_ceil(S::LANES)
    }
}

/// Visible pairs of a tile, for products with numbers that are not finite.
#[derive(Clone, Copy)]
pub(crate) struct Visible {
    band: MaskBand,
    /// Whether a weight of 0 may mean a pair that the mask function hides.
    coded: bool,
}

impl Visible {
    /// Whether query `i` sees key `j`, given `weight`, its weight after the mask function.
    pub(crate) fn sees(self, i: u32, j: u32, weight: f32) -> bool {
        self.band.visible(i, j) && !(self.coded && weight == 0.0)
    }
}

impl HeadScore {
    /// Pairs that the mask leaves visible.
    pub(crate) fn visible(&self) -> Visible {
        Visible { band: self.band, coded: self.coded }
    }

    /// The panel of these queries and keys in the tile. It counts as masked in part if a mask function may hide
    /// pairs.
    pub(crate) fn panel(&self, i: u32, queries: usize, j: u32, keys: usize) -> Option<Panel> {
        Panel::new(self.band, i, queries, j, keys)
            .map(|panel| Panel { edge: panel.edge || self.coded, ..panel })
    }

    /// Whether [`Adjust`] would change a score of the panel.
    pub(crate) fn adjusts(&self, panel: &Panel) -> bool {
        panel.edge || self.changes()
    }

    /// ALiBi term of the score of (i, j).
    pub(crate) fn alibi_term(&self, i: u32, j: u32) -> Option<f32> {
        let (slope, diag) = self.alibi?;
        Some(-slope * (i64::from(i) + diag - i64::from(j)).abs() as f32)
    }

    /// The score of (i, j) in f64, from the scaled product.
    pub(crate) fn modified(&self, scaled: f64, i: u32, j: u32) -> f64 {
        let mut score = self.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh());
        if let Some(bias) = self.bias {
            // SAFETY: the bias has an element for each query and key.
            score += f64::from(unsafe { bias.get(i as usize, j as usize) });
        }
        if let Some((slope, diag)) = self.alibi {
            score -= f64::from(slope) * (i64::from(i) + diag - i64::from(j)).abs() as f64;
        }
        score
    }

    /// ALiBi term of the score, without rounding; `None` without ALiBi.
    pub(crate) fn alibi_exact(&self, i: u32, j: u32) -> Option<f64> {
        let (slope, diag) = self.alibi?;
        Some(-f64::from(slope) * (i64::from(i) + diag - i64::from(j)).abs() as f64)
    }

    /// Whether scores of visible pairs are more than scaled products.
    pub(crate) fn changes(&self) -> bool {
        self.softcap.is_some() || self.bias.is_some() || self.alibi.is_some()
    }
}

/// Applies soft-cap, bias, ALiBi and mask in place to a panel of scores, `[rows][PANEL]`, a row for each key.
pub(crate) struct Adjust<'a> {
    pub(crate) head: &'a HeadScore,
    pub(crate) panel: Panel,
    pub(crate) scores: *mut f32,
    /// Scratch with room for as many numbers as the panel has; used with an elementwise bias.
    pub(crate) bias: *mut f32,
    /// Output for the soft-cap's derivative `1 - tanh^2`, if it is needed.
    pub(crate) slope: Option<*mut f32>,
}

impl<S: Simd> Op<S> for Adjust<'_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { head, panel, scores, bias, slope } = self;
        let (width, (first, last)) = (S::PANEL, panel.rows);
        if let Some(matrix) = head.bias {
            let tile = matrix.skip(panel.i as usize).skip_cols(panel.j as usize + first);
            let to = bias.wrapping_add(first * width);
            // SAFETY: queries and keys of the panel are inside the bias tensor; the scratch has PANEL numbers a
            // row.
            unsafe {
                tile.gather_transposed(s, panel.queries, last - first, 1.0, to, last - first);
            }
        }
        let mut lanes = [0.0; 32];
        let (mut lo, mut hi) = ([0.0; 32], [0.0; 32]);
        for lane in 0..width {
            lanes[lane] = lane as f32;
            // Row numbers of the first and last visible key, clamped to the panel: small integers,
            // exact in f32.
            let i = i64::from(panel.i) + lane as i64 - i64::from(panel.j);
            let clamp = |row: i64| row.clamp(-1, last as i64 + 1) as f32;
            (lo[lane], hi[lane]) = (clamp(i + head.band.lo), clamp(i + head.band.hi));
        }
        // Rows that every live lane sees are skipped if only the mask would change scores.
        let spared = if head.changes() {
            0..0
        } else {
            let latest_lo = lo[..panel.queries].iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
            let earliest_hi = hi[..panel.queries].iter().fold(f32::INFINITY, |a, &b| a.min(b));
            latest_lo.max(0.0) as usize..(earliest_hi + 1.0).max(0.0) as usize
        };
        let hidden = s.splat(f32::NEG_INFINITY);
        for v in 0..panel.vectors::<S>() {
            let at_lane = v * S::LANES;
            // SAFETY: the arrays have 32 numbers, as many as the widest panel has lanes.
            let (lanes, lo, hi) = unsafe {
                (
                    s.load(lanes.as_ptr().add(at_lane)),
                    s.load(lo.as_ptr().add(at_lane)),
                    s.load(hi.as_ptr().add(at_lane)),
                )
            };
            for row in (first..last).filter(|row| !spared.contains(row)) {
                let at = row * width + at_lane;
                // SAFETY: `scores` has PANEL numbers for each row, and `at` is in such a row.
                let mut x = unsafe { s.load(scores.add(at)) };
                let hides = panel.edge.then(|| {
                    let sink = i64::from(panel.j) + (row as i64) < head.band.sink_columns;
                    (s.splat(row as f32), sink)
                });
                if let Some(softcap) = head.softcap {
                    let cap = s.splat(softcap);
                    let t = tanh(s, s.div(x, cap));
                    x = s.mul(cap, t);
                    if let Some(slope) = slope {
                        let one = s.splat(1.0);
                        // (1 - t)(1 + t) keeps the small slopes that 1 - t^2 would cancel away.
                        let value = s.mul(s.sub(one, t), s.add(one, t));
                        // A hidden score may be NaN, and so may its derivative: multiplying by 0 would give NaN.
                        let value = match hides {
                            None => value,
                            Some((j, sink)) => {
                                let zero = s.splat(0.0);
                                let above = if sink { value } else { s.select_le(lo, j, value, zero) };
                                s.select_le(j, hi, above, zero)
                            }
                        };
                        // SAFETY: `slope` has PANEL numbers for each row, as `scores` has, and `at` is in such a
                        // row.
                        unsafe { s.store(slope.add(at), value) };
                    }
                }
                if head.bias.is_some() {
                    // SAFETY: filled above.
                    x = s.add(x, unsafe { s.load(bias.add(at)) });
                }
                if let Some((slope, diag)) = head.alibi {
                    let from = i64::from(panel.i) + diag - i64::from(panel.j) - row as i64;
                    let distance = s.abs(s.add(s.splat(from as f32), lanes));
                    x = s.fma(s.splat(-slope), distance, x);
                }
                if let Some((j, sink)) = hides {
                    if !sink {
                        x = s.select_le(lo, j, x, hidden);
                    }
                    x = s.select_le(j, hi, x, hidden);
                }
                // SAFETY: `scores` has PANEL numbers for each row, and `at` is in such a row.
                unsafe { s.store(scores.add(at), x) };
            }
        }
    }
}

/// Writes dropout's decisions for a panel of scores: `factor` for kept ones, 0 for dropped ones.
pub(crate) struct Keep {
    pub(crate) mask: KeepMask,
    pub(crate) panel: Panel,
    pub(crate) factor: f32,
    pub(crate) to: *mut f32,
}

impl<S: Simd> Op<S> for Keep {
    #[inline(always)]
    fn call(self, _: S) {
        let Self { mask, panel, factor, to } = self;
        let (first, last) = panel.rows;
        let j_first = panel.j as usize + first;
        let j_last = panel.j as usize + last;
        for quad in j_first / 4..j_last.div_ceil(4) {
            for lane in 0..panel.queries {
                let kept = mask.quad(panel.i + lane as u32, quad as u32);
                for (word, &kept) in kept.iter().enumerate() {
                    let j = quad * 4 + word;
                    if (j_first..j_last).contains(&j) {
                        let at = (j - panel.j as usize) * S::PANEL + lane;
                        // SAFETY: `to` has PANEL numbers for each row, and `at` is in such a row.
                        unsafe { *to.add(at) = if kept { factor } else { 0.0 } };
                    }
                }
            }
        }
    }
}
