//! A tile of queries against a tile of keys: P and dS, and their share of dQ.

use super::Shared;
use crate::blocks::{Columns, Gather, GatherRows, Gradient, Multiply, Scores, TransposePanels, row_stride};
use crate::code::{Code, CodeLanes};
use crate::memory::{Floats, reserve};
use crate::score::{Adjust, HeadScore, Keep, Panel};
use crate::simd::Simd;
use crate::tensor::f32_at;
use crate::tile::Store;

/// Functions through which a score's gradient is propagated back to the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Through {
    /// No function: the gradient of the score is also that of the bias.
    Nothing,
    /// Through the soft-cap, to the score that the score function computed.
    SoftCap,
    /// Through the soft-cap and the score function, to the scaled product of Q and K.
    All,
}

/// A tile of queries against a tile of keys.
pub(super) struct Tile {
    pub(super) keys: Floats,
    /// A second copy of K and V as dense rows.
    pub(super) key_rows: Floats,
    pub(super) value_rows: Floats,
    pub(super) queries: Floats,
    pub(super) douts: Floats,
    pub(super) queries_transposed: Floats,
    pub(super) douts_transposed: Floats,
    /// S, later P times dropout's factor: an array `[keys][PANEL]` for each block of PANEL queries.
    pub(super) weights: Floats,
    /// dP, overwritten by dS.
    pub(super) gradients: Floats,
    pub(super) extra: Floats,
    pub(super) slope: Floats,
    pub(super) code: CodeLanes,
    /// 1 for each score of a panel that the mask function hides, else 0.
    pub(super) hide: Floats,
    /// Scores before the score function: an array `[keys][PANEL]` for each block of PANEL queries.
    pub(super) scaled: Floats,
    pub(super) lse: Floats,
    /// Origin that is subtracted from each query's scores, if that of some query is not 0.
    pub(super) origin: Floats,
    pub(super) has_origin: bool,
    pub(super) delta: Floats,
    pub(super) dlse: Floats,
    /// Keys and queries in use of each block of PANEL queries; `None` if the mask hides them all.
    pub(super) panels: Vec<Option<Panel>>,
    pub(super) keys_finite: bool,
    pub(super) queries_finite: bool,
    pub(super) douts_finite: bool,
}

impl Shared<'_> {
    /// Makes the scratch memory of one thread: a tile of the backward.
    pub(super) fn tile<S: Simd>(&self) -> fmha_core::Result<Tile> {
        let block_m = self.blocks.block_m;
        let (dim_qk, dim_v) = self.dims();
        let (cols_qk, cols_v) = (dim_qk.next_multiple_of(S::PANEL), dim_v.next_multiple_of(S::PANEL));
        let keys = self.key_capacity();
        let panels = block_m / S::PANEL;
        let fwd = self.problem.fwd();
        let optional = |wanted: bool, len: usize| Floats::scratch(if wanted { len } else { 0 });
        let mut live = reserve(panels)?;
        live.resize(panels, None);
        Ok(Tile {
            keys: Floats::scratch(keys * cols_qk)?,
            key_rows: Floats::scratch(keys * row_stride(dim_qk))?,
            value_rows: Floats::scratch(keys * row_stride(dim_v))?,
            queries: Floats::scratch(block_m * cols_qk)?,
            douts: Floats::scratch(block_m * cols_v)?,
            queries_transposed: Floats::scratch(block_m * dim_qk)?,
            douts_transposed: Floats::scratch(block_m * dim_v)?,
            weights: Floats::scratch(block_m * keys)?,
            gradients: Floats::scratch(block_m * keys)?,
            extra: optional(fwd.drops() || self.score.has_bias(), keys * S::PANEL)?,
            slope: optional(fwd.score.softcap.is_some(), keys * S::PANEL)?,
            code: self.score.code.as_ref().map(Code::lanes).unwrap_or_default(),
            hide: optional(self.score.code.is_some(), keys * S::PANEL)?,
            scaled: optional(self.score.code.is_some(), block_m * keys)?,
            lse: Floats::scratch(block_m)?,
            origin: optional(self.far.any(), block_m)?,
            has_origin: false,
            delta: Floats::scratch(block_m)?,
            dlse: Floats::scratch(block_m)?,
            panels: live,
            keys_finite: true,
            queries_finite: true,
            douts_finite: true,
        })
    }

    /// Copies K and V of a tile to panels, which are blocks of PANEL columns.
    pub(super) fn load_keys<S: Simd>(&self, s: S, tile: &mut Tile, head: &HeadScore, j: u32, keys: usize) {
        let (dim_qk, dim_v) = self.dims();
        let capacity = self.key_capacity();
        let (k, v) = (self.k.k_rows(head.span, head.i_head_kv), self.v.k_rows(head.span, head.i_head_kv));
        s.run(Gather {
            from: k.skip(j as usize),
            rows: keys,
            cols: dim_qk,
            factor: head.descale_k,
            to: tile.keys.as_mut_ptr(),
            capacity,
            pairs: false,
            is_moderate: &mut tile.keys_finite,
        });
        for (from, cols, factor, to) in [
            (k, dim_qk, head.descale_k, &mut tile.key_rows),
            (v, dim_v, head.descale_v, &mut tile.value_rows),
        ] {
            s.run(GatherRows {
                from: from.skip(j as usize),
                rows: keys,
                cols,
                factor,
                to: to.as_mut_ptr(),
                pairs: false,
            });
        }
    }

    /// Copies Q and dO of a tile, both to blocks of PANEL columns and transposed; also LSE and delta.
    pub(super) fn load_queries<S: Simd>(
        &self,
        s: S,
        tile: &mut Tile,
        head: &HeadScore,
        i_head: u32,
        i: u32,
        queries: usize,
    ) {
        let (dim_qk, dim_v) = self.dims();
        let span = head.span;
        let (q, dout) = (self.q.q_rows(span, i_head), self.dout.q_rows(span, i_head));
        let capacity = self.blocks.block_m;
        for (from, cols, factor, to, transposed, finite) in [
            (
                q,
                dim_qk,
                head.descale_q,
                &mut tile.queries,
                &mut tile.queries_transposed,
                &mut tile.queries_finite,
            ),
            (dout, dim_v, 1.0, &mut tile.douts, &mut tile.douts_transposed, &mut tile.douts_finite),
        ] {
            let from = from.skip(i as usize);
            s.run(Gather {
                from,
                rows: queries,
                cols,
                factor,
                to: to.as_mut_ptr(),
                capacity,
                pairs: false,
                is_moderate: finite,
            });
            let (from, to) = (to.as_ptr(), transposed.as_mut_ptr());
            s.run(TransposePanels { from, capacity, rows: queries, cols, to });
        }
        tile.lse.fill(f32::INFINITY);
        tile.origin.fill(0.0);
        tile.has_origin = false;
        tile.delta.fill(0.0);
        tile.dlse.fill(0.0);
        for lane in 0..queries {
            let index = span.lse_index(self.problem.fwd(), i_head, i + lane as u32);
            let (origin, lse) = self.far.row(index).unwrap_or((0.0, f32_at(&self.args.lse, index)));
            if origin != 0.0 {
                tile.has_origin = true;
                // SAFETY: of a call with origins a tile has block_m, no fewer than the queries.
                unsafe { *tile.origin.as_mut_ptr().add(lane) = origin };
            }
            // SAFETY: one number for each row of delta; block_m, no fewer than the queries, of the others.
            unsafe {
                // A row without visible keys must have P = 0 = exp(S - inf).
                *tile.lse.as_mut_ptr().add(lane) = if lse == f32::NEG_INFINITY { f32::INFINITY } else { lse };
                *tile.delta.as_mut_ptr().add(lane) = *self.delta.as_ptr().add(index);
                *tile.dlse.as_mut_ptr().add(lane) = self.dlse_at(index) as f32;
            }
        }
    }

    /// Computes P and dS of the tile, and notes for which blocks of PANEL queries some pair is visible.
    #[expect(clippy::too_many_arguments, reason = "a tile is two ranges")]
    pub(super) fn gradients<S: Simd>(
        &self,
        s: S,
        tile: &mut Tile,
        head: &HeadScore,
        i: u32,
        queries: usize,
        j: u32,
        keys: usize,
        through: Through,
    ) {
        let (dim_qk, dim_v) = self.dims();
        let capacity = self.key_capacity();
        tile.panels.fill(None);
        for first in (0..queries).step_by(S::PANEL) {
            let number = first / S::PANEL;
            let live = S::PANEL.min(queries - first);
            let offset = number * capacity * S::PANEL;
            let weights = tile.weights.as_mut_ptr().wrapping_add(offset);
            let gradients = tile.gradients.as_mut_ptr().wrapping_add(offset);
            let panel = head.panel(i + first as u32, live, j, keys);
            tile.panels[number] = panel;
            let Some(panel) = panel else { continue };
            s.run(Scores {
                panel,
                keys: tile.key_rows.as_ptr(),
                queries: tile.queries_transposed.as_ptr().wrapping_add(first * dim_qk),
                dim: dim_qk,
                factor: head.softmax_scale,
                scores: weights,
                pairs: false,
            });
            let capped = through != Through::Nothing && head.softcap.is_some();
            let scaled = tile.scaled.as_mut_ptr().wrapping_add(offset);
            if let Some(code) = &self.score.code {
                let (at, count) = (panel.rows.0 * S::PANEL, (panel.rows.1 - panel.rows.0) * S::PANEL);
                // SAFETY: the pointers have PANEL numbers for each key of the panel.
                unsafe {
                    std::ptr::copy_nonoverlapping(weights.add(at), scaled.add(at), count);
                    code.score(s, &mut tile.code, head, &panel, (weights, tile.hide.as_mut_ptr()));
                }
            }
            if head.adjusts(&panel) {
                let slope = capped.then(|| tile.slope.as_mut_ptr());
                let bias = tile.extra.as_mut_ptr();
                s.run(Adjust { head, panel, scores: weights, bias, slope });
            }
            if head.coded {
                // SAFETY: the pointers have PANEL numbers for each key of the panel.
                unsafe { Code::hide::<S>(&panel, weights, tile.hide.as_ptr(), f32::NEG_INFINITY) };
                if capped {
                    // A hidden score may be NaN, and so may its derivative: multiplying by 0 would give NaN, so it
                    // is replaced. SAFETY: as for the panels above.
                    unsafe { Code::hide::<S>(&panel, tile.slope.as_mut_ptr(), tile.hide.as_ptr(), 0.0) };
                }
            }
            s.run(Scores {
                panel,
                keys: tile.value_rows.as_ptr(),
                queries: tile.douts_transposed.as_ptr().wrapping_add(first * dim_v),
                dim: dim_v,
                factor: 1.0,
                scores: gradients,
                pairs: false,
            });
            let keep = tile.extra.as_mut_ptr();
            if head.drops {
                s.run(Keep { mask: head.keep, panel, factor: head.keep_scale, to: keep });
            }
            s.run(Gradient {
                panel,
                capacity,
                weights,
                gradients,
                keep: head.drops.then_some(keep.cast_const()),
                origin: tile.has_origin.then(|| tile.origin.as_ptr().wrapping_add(first)),
                lse: tile.lse.as_ptr().wrapping_add(first),
                delta: tile.delta.as_ptr().wrapping_add(first),
                dlse: tile.dlse.as_ptr().wrapping_add(first),
            });
            if capped {
                s.run(Multiply { panel, x: gradients, y: tile.slope.as_ptr() });
            }
            if let Some(code) = self.score.code.as_ref().filter(|_| through == Through::All) {
                // SAFETY: the pointers have PANEL numbers for each key of the panel.
                unsafe { code.slope(s, &mut tile.code, head, &panel, (scaled, gradients)) };
            }
        }
    }

    /// `dQ += dS K` of the tile.
    pub(super) fn add_dq<S: Simd>(
        &self,
        s: S,
        tile: &Tile,
        head: &HeadScore,
        out: *mut f32,
        out_capacity: usize,
    ) {
        let capacity = self.key_capacity();
        for (number, panel) in tile.panels.iter().enumerate() {
            let Some(panel) = *panel else { continue };
            let columns = Columns {
                panel,
                weights: tile.gradients.as_ptr().wrapping_add(number * capacity * S::PANEL),
                right: tile.keys.as_ptr(),
                capacity,
                dim: self.dims().0,
                out: out.wrapping_add(number * S::PANEL * S::PANEL),
                out_capacity,
                store: Store::Add,
                pairs: false,
            };
            if panel.edge && !tile.keys_finite {
                columns.visible_only::<S>(head.visible());
            } else {
                s.run(columns);
            }
        }
    }
}

impl Tile {
    pub(super) fn has_edge(&self) -> bool {
        self.panels.iter().flatten().any(|panel| panel.edge)
    }
}
