//! Forward with products in tiles of bf16, pipelined over the panels of queries.
//!
//! ```text
//! for each tile of keys that the band touches
//!     copy K; copy V transposed
//!     for each panel of queries, at once:
//!         O^T of the panel before = alpha O^T + V^T P     in tiles
//!         P of this panel, alpha                          in vectors
//!         S = K Q^T of the panel after                    in tiles
//! ```
//!
//! Within a panel the order of operations is that of the other path, so results depend on nothing more.

use std::f32::consts::LOG2_E;
use std::f64::consts::LN_2;

use fmha_core::DType;

use super::{Scratch, Shared, Task, key_tiles};
use crate::blocks::{
    AllFinite, RowState, Scale, TILE, TileColumns, TileScores, TileSoftmax, TileStage, TransposeValues,
    UntransposeOut, WriteTransposed,
};
use crate::score::{Adjust, HeadScore, Panel};
use crate::simd::Simd;

/// A tile of keys in a task.
struct Keys<'a> {
    head: &'a HeadScore,
    /// The task's first query, and the number of queries.
    i: u32,
    queries: usize,
    /// The tile's first key, and the number of keys.
    j: u32,
    keys: usize,
    /// Rows (keys) that a panel of scores has room for.
    capacity: usize,
    /// Whether V is finite and so small that no possible P makes the product overflow f32.
    is_moderate: bool,
}

impl Keys<'_> {
    /// The next PANEL queries, from query `first` on, that see some of the keys, and the index of the first of
    /// these queries.
    fn panel<S: Simd>(&self, mut first: usize) -> Option<(usize, Panel)> {
        while first < self.queries {
            let live = S::PANEL.min(self.queries - first);
            if let Some(panel) = Panel::new(self.head.band, self.i + first as u32, live, self.j, self.keys) {
                return Some((first, panel));
            }
            first += S::PANEL;
        }
        None
    }
}

impl Shared<'_> {
    /// Computes a task whose problem fits tiles.
    pub(super) fn attend_in_tiles<S: Simd>(&self, s: S, scratch: &mut Scratch, task: Task) {
        let block_n = self.blocks.block_n;
        let span = self.spans[task.span as usize];
        let head = self.score.head(span, task.i_head);
        let dim_v = self.problem.dims.head_dim_v as usize;
        let queries = task.queries as usize;
        let capacity = block_n.next_multiple_of(TILE);
        s.enter_tiles();
        self.load_queries(s, scratch, task, &head, true);
        let mut fresh = u128::MAX;
        for (j, keys) in key_tiles(&head, task.i..task.i + task.queries, block_n) {
            let is_moderate = self.load_keys(s, scratch, &head, (j, keys), capacity / 2, true);
            let (from, to) = (scratch.values.as_mut_ptr(), scratch.columns.as_mut_ptr());
            s.run(TransposeValues { from, capacity: capacity / 2, keys, dim: dim_v, to });
            let tile = Keys { head: &head, i: task.i, queries, j, keys, capacity, is_moderate };
            self.pipeline(s, scratch, &tile, &mut fresh);
        }
        s.leave_tiles();
        self.settle_rows(scratch, task, &head, LN_2);
        self.write_tiled(s, scratch, task, fresh);
        let (from, len) = (scratch.out.as_ptr(), queries.next_multiple_of(S::PANEL) * dim_v);
        let mut all_finite = true;
        s.run(AllFinite { from, len, is_finite: &mut all_finite });
        let place = |row: usize, d: usize| row / S::PANEL * S::PANEL * dim_v + d * S::PANEL + row % S::PANEL;
        self.mend_rows(scratch, task, &head, all_finite, place);
    }

    /// Writes O, which lies transposed.
    fn write_tiled<S: Simd>(&self, s: S, scratch: &mut Scratch, task: Task, fresh: u128) {
        let dim_v = self.problem.dims.head_dim_v as usize;
        let queries = task.queries as usize;
        if self.o.dtype == DType::Bf16 {
            s.run(WriteTransposed {
                to: &self.o,
                at: self.first_row(task),
                rows: queries,
                dim: dim_v,
                from: scratch.out.as_ptr(),
                factors: scratch.row_sum.as_ptr(),
                untouched: fresh,
                staging: scratch.staging.as_mut_ptr(),
            });
            return;
        }
        for first in (0..queries).step_by(S::PANEL) {
            s.run(UntransposeOut {
                from: scratch.out.as_ptr().wrapping_add(first * dim_v),
                dim: dim_v,
                to: scratch.out_rows.as_mut_ptr().wrapping_add(first * S::PANEL),
                capacity: self.blocks.block_m,
            });
        }
        let found = scratch.out_rows.as_ptr();
        self.write_rows(s, scratch, task, fresh, found);
    }

    /// Computes all blocks of PANEL queries against one tile of keys.
    fn pipeline<S: Simd>(&self, s: S, scratch: &mut Scratch, tile: &Keys<'_>, fresh: &mut u128) {
        let dim_v = self.problem.dims.head_dim_v as usize;
        let units = self.problem.dims.head_dim_qk as usize / 2;
        // Two panels of scores: one holds the panel in the softmax; the other's P is already used when new scores
        // are written.
        let mut number = 0;
        let mut before: Option<TileColumns> = None;
        let scores_of = |number: usize, scratch: &mut Scratch| {
            scratch.scores.as_mut_ptr().wrapping_add(number % 2 * tile.capacity * S::PANEL)
        };
        let product = |(first, panel): (usize, Panel), number: usize, scratch: &mut Scratch| TileScores {
            panel,
            keys: scratch.keys.as_ptr(),
            queries: scratch.queries.as_ptr().wrapping_add(first * units),
            units,
            scores: scores_of(number, scratch),
        };
        let mut current = tile.panel::<S>(0);
        if let Some(current) = current {
            let scores = Some(product(current, 0, scratch));
            s.run(TileStage { columns: None, softmax: None, scores });
        }
        while let Some((first, panel)) = current {
            let next = tile.panel::<S>(first + S::PANEL);
            let scores = scores_of(number, scratch);
            let factor = self.adjust(s, scratch, tile.head, panel, scores);
            let alpha = scratch.alpha.as_mut_ptr().wrapping_add(first);
            let state = RowState {
                row_max: scratch.row_max.as_mut_ptr().wrapping_add(first),
                row_sum: scratch.row_sum.as_mut_ptr().wrapping_add(first),
                alpha,
            };
            let may_lag = tile.is_moderate && !self.blocks.exact_max;
            let slack = if may_lag { TileSoftmax::SLACK } else { 0.0 };
            let softmax = Some(TileSoftmax { panel, scores, factor: factor * LOG2_E, slack, state });
            let after = next.map(|next| product(next, number + 1, scratch));
            s.run(TileStage { columns: before.take(), softmax, scores: after });
            let bit = 1u128 << (first / S::PANEL);
            let columns = TileColumns {
                panel,
                weights: scores,
                columns: scratch.columns.as_ptr(),
                capacity: tile.capacity / 2,
                dim: dim_v,
                out: scratch.out.as_mut_ptr().wrapping_add(first * dim_v),
                alpha: (*fresh & bit == 0).then_some(alpha.cast_const()),
            };
            *fresh &= !bit;
            if panel.edge && !tile.is_moderate {
                columns.visible_only(s, tile.head.visible(), scratch.values.as_ptr());
            } else {
                before = Some(columns);
            }
            (current, number) = (next, number + 1);
        }
        if before.is_some() {
            s.run(TileStage { columns: before, softmax: None, scores: None });
        }
    }

    /// Adds bias, slopes and soft-cap to a panel's scores before their softmax, and returns the factor that
    /// the scores still need: products in tiles do not scale.
    fn adjust<S: Simd>(
        &self,
        s: S,
        scratch: &mut Scratch,
        head: &HeadScore,
        panel: Panel,
        scores: *mut f32,
    ) -> f32 {
        let mut factor = head.softmax_scale;
        if head.changes() || factor <= 0.0 {
            s.plain().run(Scale { panel, x: scores, factor });
            factor = 1.0;
        }
        if head.adjusts(&panel) {
            s.plain().run(Adjust { head, panel, scores, bias: scratch.extra.as_mut_ptr(), slope: None });
        }
        factor
    }
}

#[cfg(test)]
mod tests {
    use fmha_core::reference::{Inputs, Precision, forward_head};
    use fmha_core::{
        DType, DevSlice, DevSliceMut, Dims, FwdArgs, FwdProblem, ScoreSums, SeqArgs, Shape, Totals, ValidFwd,
    };
    use half::bf16;

    use super::super::*;
    use crate::isa::FORWARD_BLOCKS;
    use crate::simd::SoftTiles;

    /// bf16 that look random, of mean 0.
    fn noise(count: u64, salt: u32) -> Vec<bf16> {
        let word = |i: u64| fmha_core::dropout::philox4x32_10([i as u32, salt, 0, 0], [1, 2])[0];
        (0..count).map(|i| bf16::from_f32(((word(i) >> 8) as f32 / (1 << 23) as f32 - 1.0) * 2.0)).collect()
    }

    /// Largest difference of O and of LSE from f64, over the largest of the plain algorithm in bf16.
    fn errors(problem: &FwdProblem, blocks: Blocks, change: impl Fn(&mut [bf16])) -> (f64, f64) {
        let soft = errors_of(SoftTiles::FUSED, problem, blocks, &change);
        // AMX, which this test's software tiles imitate, is tested too if the processor has it.
        #[cfg(target_arch = "x86_64")]
        if let Some(amx) = crate::simd::Amx::detect() {
            let (o, lse) = errors_of(amx, problem, blocks, &change);
            return (soft.0.max(o), soft.1.max(lse));
        }
        soft
    }

    fn attend<S: Simd>(
        s: S,
        valid: &ValidFwd,
        blocks: Blocks,
        [q, k, v]: [&[bf16]; 3],
        o: DevSliceMut<'_>,
        lse: &mut [f32],
    ) {
        let spans = fmha_core::seq::spans(valid, &SeqArgs::default()).unwrap();
        let mut args = FwdArgs::new(DevSlice::host(q), DevSlice::host(k), DevSlice::host(v), o);
        args.lse = Some(DevSliceMut::host(lse));
        assert!(in_tiles::<S>(valid));
        let call = Forward { problem: valid, args: &args, spans: &spans, blocks };
        call.run(s, &Threads::new(1).unwrap()).unwrap();
    }

    fn errors_of<S: Simd>(
        s: S,
        problem: &FwdProblem,
        blocks: Blocks,
        change: &impl Fn(&mut [bf16]),
    ) -> (f64, f64) {
        let valid = problem.clone().validate().unwrap();
        let (q, k) = (noise(valid.shape_q().num_elems(), 1), noise(valid.shape_k().num_elems(), 2));
        let mut v = noise(valid.shape_v().num_elems(), 3);
        change(&mut v);
        let mut o = vec![bf16::NAN; valid.shape_o().num_elems() as usize];
        let mut lse = vec![f32::NAN; valid.extents(Totals::NONE).lse_elems as usize];
        let spans = fmha_core::seq::spans(&valid, &SeqArgs::default()).unwrap();
        attend(s, &valid, blocks, [&q, &k, &v], DevSliceMut::host(&mut o), &mut lse);

        let inputs = Inputs {
            q: DevSlice::host(&q),
            k: DevSlice::host(&k),
            v: DevSlice::host(&v),
            seq: SeqArgs::default(),
            cache: fmha_core::CacheArgs::default(),
            cache_scales: [None; 2],
            score: fmha_core::ScoreArgs::default(),
            masks: fmha_core::MaskArgs::default(),
            second: None,
        };
        let (mut worst, mut same_worst, mut lse_worst) = (0.0f64, 0.0f64, 0.0f64);
        for &span in &spans {
            for i_head in 0..valid.dims.num_heads_q {
                let exact = forward_head(&valid, &inputs, span, i_head, Precision::Exact).unwrap();
                let same =
                    forward_head(&valid, &inputs, span, i_head, Precision::AsInput(ScoreSums::F32)).unwrap();
                let dim = valid.dims.head_dim_v;
                for i in 0..span.seqlen_q {
                    let found = f64::from(lse[span.lse_index(&valid, i_head, i)]);
                    let wanted = exact.lse[i as usize];
                    assert_eq!(found.is_infinite(), wanted.is_infinite(), "LSE of row {i}");
                    if wanted.is_finite() {
                        lse_worst = lse_worst.max((found - wanted).abs());
                    }
                    for d in 0..dim {
                        let at = valid.strides.o.offset(span.q_batch, i, i_head, d) as usize;
                        let found = o[at].to_f64();
                        let index = (i * dim + d) as usize;
                        if exact.o[index].is_nan() {
                            assert!(found.is_nan(), "row {i} column {d} is {found}");
                            continue;
                        }
                        worst = worst.max((found - exact.o[index]).abs());
                        same_worst = same_worst.max((same.o[index] - exact.o[index]).abs());
                        assert!(found.is_finite(), "row {i} column {d} is {found}");
                    }
                }
            }
        }
        (worst / same_worst.max(1e-6), lse_worst)
    }

    fn problem(seqlen_q: u32, seqlen_k: u32, dims: (u32, u32), mask: &str) -> FwdProblem {
        let dims = Dims::batch(2).seqlens(seqlen_q, seqlen_k).heads(2, 1).head_dims(dims.0, dims.1);
        let mut problem = FwdProblem::batch(DType::Bf16, dims);
        (problem.mask, problem.write_lse) = (mask.parse().unwrap(), true);
        problem
    }

    #[test]
    fn products_in_tiles_keep_the_accuracy_promise() {
        for (seqlen_q, seqlen_k, dims, mask) in [
            (64, 128, (32, 32), "0"),
            (1, 1, (32, 64), "0"),
            (33, 47, (64, 32), "0"),
            (70, 301, (64, 96), "b"),
            (150, 150, (128, 128), "t"),
            (150, 150, (32, 32), "b:37,5"),
            (90, 200, (32, 32), "t:3,0,2"),
            (40, 20, (32, 32), "b"),
        ] {
            for blocks in [
                FORWARD_BLOCKS,
                Blocks { block_m: 64, block_n: 36, ..FORWARD_BLOCKS },
                Blocks { block_n: 36, exact_max: true, ..FORWARD_BLOCKS },
            ] {
                let (o, lse) = errors(&problem(seqlen_q, seqlen_k, dims, mask), blocks, |_| {});
                assert!(o <= 2.0 && lse < 1e-5, "{seqlen_q}x{seqlen_k} {dims:?} {mask}: O {o}, LSE {lse}");
            }
        }
        let mut capped = problem(50, 60, (32, 32), "b");
        (capped.score.softcap, capped.score.softmax_scale) = (Some(1.5), Some(-0.3));
        assert!(errors(&capped, FORWARD_BLOCKS, |_| {}).0 <= 2.0);
        let mut negative = problem(50, 60, (32, 32), "0");
        negative.score.softmax_scale = Some(-0.3);
        assert!(errors(&negative, FORWARD_BLOCKS, |_| {}).0 <= 2.0);
        // Scores of one tile of keys are far above those of the other, so that O is rescaled.
        for scale in [2.0, 30.0, -30.0] {
            let mut steep = problem(70, 301, (64, 96), "b");
            steep.score.softmax_scale = Some(scale);
            let (o, _) = errors(&steep, FORWARD_BLOCKS, |_| {});
            assert!(o <= 2.0, "scale {scale}: {o}");
        }
    }

    /// Scores so large that one ulp is many powers of 2: in each tile a row picks only the key with its largest
    /// score.
    #[test]
    fn scores_that_f32_hardly_tells_apart_pick_one_key_through_tiles() {
        for (scale, mask) in [(1e8, "0"), (1e8, "b"), (-1e8, "0"), (1e6, "b:37,5")] {
            let mut steep = problem(70, 301, (64, 96), mask);
            steep.score.softmax_scale = Some(scale);
            let (o, lse) = errors(&steep, FORWARD_BLOCKS, |_| {});
            assert!(
                o <= 2.0 && lse < 6.4e-5 * f64::from(scale.abs()),
                "scale {scale} {mask}: O {o}, LSE {lse}"
            );
        }
    }

    /// The exact maximum is subtracted on request. The last key, in a tile of its own, has e^3 times the weight of
    /// each other: with the exact maximum its P is 1, exact in bf16; with a lagging maximum it is e^3, which bf16
    /// rounds.
    fn subtracts_the_true_maximum_on_request<S: Simd>(s: S) {
        let mut problem = problem(9, 37, (32, 32), "0");
        (problem.dtypes.o, problem.score.softmax_scale) = (DType::F32, Some(1.0));
        let valid = problem.validate().unwrap();
        let last_keys = |number: f32, shape: Shape| -> Vec<bf16> {
            let row = (shape.head * shape.dim) as usize;
            let is_last = |at: usize| at / row % shape.seq as usize == shape.seq as usize - 1;
            let of = |at| if is_last(at) { number } else { 0.0 };
            (0..shape.num_elems() as usize).map(|at| bf16::from_f32(of(at))).collect()
        };
        let q = vec![bf16::from_f32(0.25); valid.shape_q().num_elems() as usize];
        let (k, v) = (last_keys(0.375, valid.shape_k()), last_keys(1.0, valid.shape_v()));
        let wanted = 1.0 / (1.0 + 36.0 * (-3f64).exp());
        for exact_max in [true, false] {
            let mut o = vec![f32::NAN; valid.shape_o().num_elems() as usize];
            let mut lse = vec![f32::NAN; valid.extents(Totals::NONE).lse_elems as usize];
            let blocks = Blocks { block_n: 36, exact_max, ..FORWARD_BLOCKS };
            attend(s, &valid, blocks, [&q, &k, &v], DevSliceMut::host(&mut o), &mut lse);
            let error = o.iter().fold(0.0, |most: f64, &o| most.max((f64::from(o) / wanted - 1.0).abs()));
            assert_eq!(error < 1e-6, exact_max, "exact_max {exact_max}: {error}");
        }
    }

    #[test]
    fn the_true_maximum_is_subtracted_through_tiles_where_it_is_asked_for() {
        subtracts_the_true_maximum_on_request(SoftTiles::FUSED);
        #[cfg(target_arch = "x86_64")]
        crate::simd::Amx::detect().map_or_else(
            || eprintln!("absent: amx, which this processor has not"),
            subtracts_the_true_maximum_on_request,
        );
    }

    /// A V near f32's largest number stays finite through tiles. It lies in tiles of keys after the first, where P
    /// exceeds 1 in rows whose largest score is there.
    #[test]
    fn a_value_near_the_end_of_f32_stays_finite_through_tiles() {
        let blocks = Blocks { block_n: 36, ..FORWARD_BLOCKS };
        for mask in ["0", "t"] {
            let problem = problem(100, 100, (32, 32), mask);
            for key in [40, 41, 60, 90] {
                let at = problem.strides.v.offset(0, key, 0, 3) as usize;
                let (o, _) = errors(&problem, blocks, |v| v[at] = bf16::from_f32(3.3e38));
                assert!(o <= 2.0, "{mask}, key {key}: {o}");
            }
        }
    }

    /// A NaN in V reaches exactly the rows that see its key. It lies in the second panel of columns, in tiles of
    /// keys that begin at the first key and later.
    #[test]
    fn a_nan_reaches_the_rows_that_see_its_key_and_no_others_through_tiles() {
        let blocks = Blocks { block_n: 36, ..FORWARD_BLOCKS };
        for (mask, keys) in [("t", [20, 60, 61]), ("b:9,2", [7, 40, 99])] {
            let problem = problem(70, 100, (32, 64), mask);
            for key in keys {
                let at = problem.strides.v.offset(0, key, 0, 35) as usize;
                let (o, _) = errors(&problem, blocks, |v| v[at] = bf16::NAN);
                assert!(o <= 2.0, "{mask}, key {key}: {o}");
            }
        }
    }

    /// Both ways to write O from tiles agree: rounding before transposing, and transposing to f32.
    fn writes_alike<S: Simd>(s: S) {
        let problem = problem(70, 90, (32, 64), "t:40,3");
        let in_f32 = problem.clone().dtype_o(DType::F32).validate().unwrap();
        let valid = problem.validate().unwrap();
        let [q, k, v] = [(valid.shape_q(), 1), (valid.shape_k(), 2), (valid.shape_v(), 3)]
            .map(|(shape, salt)| noise(shape.num_elems(), salt));
        let count = valid.shape_o().num_elems() as usize;
        let (mut narrow, mut wide) = (vec![bf16::NAN; count], vec![f32::NAN; count]);
        let mut lse = vec![f32::NAN; valid.extents(Totals::NONE).lse_elems as usize];
        attend(s, &valid, FORWARD_BLOCKS, [&q, &k, &v], DevSliceMut::host(&mut narrow), &mut lse);
        attend(s, &in_f32, FORWARD_BLOCKS, [&q, &k, &v], DevSliceMut::host(&mut wide), &mut lse);
        for (at, (narrow, wide)) in narrow.iter().zip(&wide).enumerate() {
            assert_eq!(*narrow, bf16::from_f32(*wide), "element {at}");
        }
    }

    #[test]
    fn o_of_tiles_in_bf16_is_o_in_f32_rounded() {
        writes_alike(SoftTiles::FUSED);
        #[cfg(target_arch = "x86_64")]
        crate::simd::Amx::detect()
            .map_or_else(|| eprintln!("absent: amx, which this processor has not"), writes_alike);
    }
}
