//! A score and a mask as code over panels of scores. Programs are compiled once per call, and each thread runs them
//! in its own registers. Masks as data hide pairs of the same panels.

use std::ops::Range;

use fmha_core::expr::{
    Block, Bounds, Captured, Function, HostTensor, Id, Lanes, Pair, Program, Rounding, Seen, Tile, VectorMath,
};
use fmha_core::masks::{HostMasks, Shown};
use fmha_core::{BlockClass, FwdProblem, MaskArgs, ProblemError, ScoreArgs, SeqSpan, ValidBwd};

use crate::memory::zeros;
use crate::score::{HeadScore, Panel};
use crate::simd::{Op, Simd, exp, tanh};

/// The compiled program of a score or mask function, and the tensors that the function reads (captures).
struct Compiled<'a> {
    program: Program,
    captured: Vec<Captured<'a>>,
    narrow: bool,
}

/// A captured element that a score reads and whose gradient is wanted.
struct Read {
    /// Which of the wanted gradients.
    gradient: usize,
    /// The program's root that computes the derivative by this element; the roots of its indices follow.
    root: usize,
    shape: Vec<u32>,
}

/// The operands of a call that its score and mask functions, and its masks as data (tensors), read.
pub(crate) struct CodeArgs<'a> {
    pub(crate) score: ScoreArgs<'a>,
    pub(crate) masks: MaskArgs<'a>,
    /// Rows of packed queries.
    pub(crate) total_q: Option<u32>,
}

/// The score and mask functions of a call, and its masks as data (tensors).
pub(crate) struct Code<'a> {
    masks: Option<HostMasks<'a>>,
    score: Option<(&'a Function, Compiled<'a>)>,
    mask: Option<(&'a Function, Compiled<'a>)>,
    slope: Option<Compiled<'a>>,
    reads: Option<(Compiled<'a>, Vec<Read>)>,
}

/// Registers of a thread.
#[derive(Default)]
pub(crate) struct CodeLanes {
    score: Option<Lanes>,
    mask: Option<Lanes>,
    slope: Option<Lanes>,
    reads: Option<Lanes>,
    /// The sequence and head for which the functions are set.
    head: Option<Pair>,
}

impl<'a> Code<'a> {
    /// The functions and masks of a forward call; `None` if it has neither.
    ///
    /// # Errors
    /// A captured operand that is missing.
    pub(crate) fn of(problem: &'a FwdProblem, args: &CodeArgs<'a>) -> Result<Option<Self>, ProblemError> {
        if !problem.asks_pairs() {
            return Ok(None);
        }
        let all = everything(problem);
        let of = |function: &'a Function| {
            let captured = problem.code.bind(function, &args.score)?;
            let compiled = Compiled::new(function.graph(), &[function.root()], captured, &all);
            Ok::<_, ProblemError>((function, compiled))
        };
        Ok(Some(Self {
            masks: HostMasks::of(problem, &args.masks, args.total_q)?,
            score: problem.code.score.as_ref().map(of).transpose()?,
            mask: problem.code.mask.as_ref().map(of).transpose()?,
            slope: None,
            reads: None,
        }))
    }

    /// The functions and masks of a backward call, with derivatives.
    ///
    /// # Errors
    /// A captured operand that is missing.
    pub(crate) fn of_backward(
        problem: &'a ValidBwd,
        args: &CodeArgs<'a>,
    ) -> Result<Option<Self>, ProblemError> {
        let fwd: &FwdProblem = problem.fwd();
        let Some(mut code) = Self::of(fwd, args)? else { return Ok(None) };
        if let Some((score, compiled)) = &code.score {
            let (slopes, all) = (score.slopes(), everything(fwd));
            let captured = || compiled.captured.clone();
            let (mut roots, mut reads) = (vec![], vec![]);
            for read in &slopes.captures {
                let name = &slopes.graph.captures()[read.capture].name;
                let wanted = problem.dcaptured.iter().position(|gradient| gradient.name == *name);
                let tensor = fwd.code.tensor(name);
                if let (Some(gradient), Some(tensor)) = (wanted, tensor) {
                    reads.push(Read { gradient, root: roots.len(), shape: tensor.shape.clone() });
                    roots.push(read.slope);
                    roots.extend(&read.at);
                }
            }
            code.slope = Some(Compiled::new(&slopes.graph, &[slopes.score], captured(), &all));
            if !reads.is_empty() {
                code.reads = Some((Compiled::new(&slopes.graph, &roots, captured(), &all), reads));
            }
        }
        Ok(Some(code))
    }

    /// Registers for a thread.
    pub(crate) fn lanes(&self) -> CodeLanes {
        let of = |compiled: &Compiled<'_>| Lanes::new(&compiled.program, compiled.narrow);
        CodeLanes {
            score: self.score.as_ref().map(|(_, compiled)| of(compiled)),
            mask: self.mask.as_ref().map(|(_, compiled)| of(compiled)),
            slope: self.slope.as_ref().map(of),
            reads: self.reads.as_ref().map(|(compiled, _)| of(compiled)),
            head: None,
        }
    }

    /// Classifies the pairs of a tile by the mask function.
    pub(crate) fn seen(&self, head: &HeadScore, q: Range<u32>, k: Range<u32>) -> Seen {
        let masks = self.masks.as_ref();
        match masks.map(|masks| masks.head(&head.span, head.i_head).class(q.clone(), k.clone())) {
            Some(BlockClass::Skipped) => return Seen::Nothing,
            // Full blocks do not evaluate the mask as code.
            Some(_) if masks.is_some_and(HostMasks::has_full_blocks) => return Seen::Part,
            _ => {}
        }
        let Some((mask, compiled)) = &self.mask else { return Seen::Everything };
        let (SeqSpan { i_batch, seqlen_q, seqlen_k, .. }, i_head) = (head.span, head.i_head);
        let tile = Tile {
            b: i_batch..i_batch + 1,
            h: i_head..i_head + 1,
            q,
            k,
            seqlen_q: (seqlen_q, seqlen_q),
            seqlen_k: (seqlen_k, seqlen_k),
        };
        mask.seen(&tile, compiled.captured.as_slice())
    }

    /// The keys outside which masks as data show no key to any query of `rows`; all keys if there are no such
    /// masks.
    pub(crate) fn hull(&self, head: &HeadScore, rows: Range<u32>) -> Range<u32> {
        let all = 0..head.span.seqlen_k;
        self.masks
            .as_ref()
            .map_or(all.clone(), |masks| masks.head(&head.span, head.i_head).hull(rows, all.end))
    }

    /// Whether masks show query `i` the key `j`; the band and the score apart.
    pub(crate) fn shows(&self, head: &HeadScore, i: u32, j: u32) -> bool {
        let masks = self.masks.as_ref();
        match masks.map_or(Shown::Asked, |masks| masks.head(&head.span, head.i_head).shown(i, j)) {
            Shown::No => false,
            Shown::Full => true,
            Shown::Asked => self.mask.as_ref().is_none_or(|(mask, compiled)| {
                let pair = Pair { q: i, k: j, ..head_of(&head.span, head.i_head) };
                mask.eval(&pair, &compiled.captured, Rounding::F32).bool()
            }),
        }
    }

    /// One score in f64, from the scaled product; `None` if the pair is hidden.
    pub(crate) fn one(&self, head: &HeadScore, scaled: f64, i: u32, j: u32) -> Option<f64> {
        let pair = Pair { score: scaled, q: i, k: j, ..head_of(&head.span, head.i_head) };
        if !self.shows(head, i, j) {
            return None;
        }
        let score = match &self.score {
            None => scaled,
            Some((score, compiled)) => score.eval(&pair, &compiled.captured, Rounding::F32).float(),
        };
        Some(score).filter(|&score| score != f64::NEG_INFINITY)
    }

    /// Converts a panel of scaled products to scores, and writes to `hide` a number other than 0 for each hidden
    /// pair.
    ///
    /// # Safety
    /// `scores` and `hide` are panels of these rows.
    pub(crate) unsafe fn score<S: Simd>(
        &self,
        s: S,
        lanes: &mut CodeLanes,
        head: &HeadScore,
        panel: &Panel,
        (scores, hide): (*mut f32, *mut f32),
    ) {
        lanes.set_head(self, head_of(&head.span, head.i_head));
        for_blocks::<S>(panel, |block, at, count| {
            // SAFETY: the caller promises PANEL numbers for each row of the panel, at both pointers.
            let (scores, hide) = unsafe {
                (
                    std::slice::from_raw_parts_mut(scores.add(at), count),
                    std::slice::from_raw_parts_mut(hide.add(at), count),
                )
            };
            hide.fill(0.0);
            if let (Some((_, compiled)), Some(lanes)) = (&self.mask, &mut lanes.mask) {
                s.plain().run(RunProgram { compiled, lanes, block, scores });
                for (hide, &shows) in hide.iter_mut().zip(lanes.bools(&compiled.program, 0)) {
                    if shows == 0 {
                        *hide = 1.0;
                    }
                }
            }
        });
        // SAFETY: promised by the caller: `scores` and `hide` have PANEL numbers for each row of the panel.
        unsafe { self.hide_by_data::<S>(head, panel, hide) };
        for_blocks::<S>(panel, |block, at, count| {
            let (Some((_, compiled)), Some(lanes)) = (&self.score, &mut lanes.score) else { return };
            // SAFETY: the caller promises PANEL numbers for each row of the panel, at both pointers.
            let (scores, hide) = unsafe {
                (
                    std::slice::from_raw_parts_mut(scores.add(at), count),
                    std::slice::from_raw_parts_mut(hide.add(at), count),
                )
            };
            s.plain().run(RunProgram { compiled, lanes, block, scores });
            scores.copy_from_slice(&lanes.floats(&compiled.program, 0)[..count]);
            for (hide, score) in hide.iter_mut().zip(&*scores) {
                if *score == f32::NEG_INFINITY {
                    *hide = 1.0;
                }
            }
        });
    }

    /// Writes to `hide` the result of masks as data for a panel: pairs that they hide, and pairs that they show
    /// without the mask as code.
    ///
    /// # Safety
    /// `hide` is a panel of these rows.
    unsafe fn hide_by_data<S: Simd>(&self, head: &HeadScore, panel: &Panel, hide: *mut f32) {
        let Some(masks) = &self.masks else { return };
        let masks = masks.head(&head.span, head.i_head);
        let keys = panel.j + panel.rows.0 as u32..panel.j + panel.rows.1 as u32;
        for lane in 0..panel.queries {
            masks.runs(panel.i + lane as u32, keys.clone(), |run, shown| {
                let value = match shown {
                    Shown::Asked => return,
                    Shown::No => 1.0,
                    Shown::Full => 0.0,
                };
                for j in run {
                    // SAFETY: the caller promises that `hide` has PANEL numbers for each row; `j` is one of the
                    // rows.
                    unsafe { *hide.add((j - panel.j) as usize * S::PANEL + lane) = value };
                }
            });
        }
    }

    /// Writes the number `hidden` for each pair that [`score`](Self::score) marked as hidden: -inf to scores, after
    /// soft-cap and bias, and 0 to derivatives.
    ///
    /// # Safety
    /// `values` and `hide` are panels of these rows.
    pub(crate) unsafe fn hide<S: Simd>(panel: &Panel, values: *mut f32, hide: *const f32, hidden: f32) {
        let (at, count) = (panel.rows.0 * S::PANEL, (panel.rows.1 - panel.rows.0) * S::PANEL);
        // SAFETY: the caller promises PANEL numbers for each row of the panel, at both pointers.
        let (values, hide) = unsafe {
            (
                std::slice::from_raw_parts_mut(values.add(at), count),
                std::slice::from_raw_parts(hide.add(at), count),
            )
        };
        for (value, &hide) in values.iter_mut().zip(hide) {
            *value = if hide == 0.0 { *value } else { hidden };
        }
    }

    /// Multiplies gradients of scores by the derivative of the score function at the scaled products; a gradient of
    /// 0 stays 0.
    ///
    /// # Safety
    /// `scaled` and `gradients` are panels of these rows.
    pub(crate) unsafe fn slope<S: Simd>(
        &self,
        s: S,
        lanes: &mut CodeLanes,
        head: &HeadScore,
        panel: &Panel,
        (scaled, gradients): (*mut f32, *mut f32),
    ) {
        let Some(compiled) = &self.slope else { return };
        lanes.set_head(self, head_of(&head.span, head.i_head));
        let Some(lanes) = &mut lanes.slope else { return };
        for_blocks::<S>(panel, |block, at, count| {
            // SAFETY: the caller promises PANEL numbers for each row of the panel, at both pointers.
            let (scores, gradients) = unsafe {
                (
                    std::slice::from_raw_parts_mut(scaled.add(at), count),
                    std::slice::from_raw_parts_mut(gradients.add(at), count),
                )
            };
            s.plain().run(RunProgram { compiled, lanes, block, scores });
            for (gradient, &slope) in gradients.iter_mut().zip(lanes.floats(&compiled.program, 0)) {
                *gradient = if *gradient == 0.0 { 0.0 } else { *gradient * slope };
            }
        });
    }

    /// Adds a panel's contributions to the gradients of captured elements, pair by pair.
    ///
    /// # Safety
    /// As [`slope`](Self::slope).
    pub(crate) unsafe fn add_to_captured<S: Simd>(
        &self,
        s: S,
        lanes: &mut CodeLanes,
        head: &HeadScore,
        panel: &Panel,
        (scaled, gradients): (*mut f32, *const f32),
        sums: &mut [Vec<f64>],
    ) {
        let Some((compiled, reads)) = &self.reads else { return };
        lanes.set_head(self, head_of(&head.span, head.i_head));
        let Some(lanes) = &mut lanes.reads else { return };
        for_blocks::<S>(panel, |block, at, count| {
            // SAFETY: the caller promises PANEL numbers for each row of the panel, at both pointers.
            let (scores, gradients) = unsafe {
                (
                    std::slice::from_raw_parts_mut(scaled.add(at), count),
                    std::slice::from_raw_parts(gradients.add(at), count),
                )
            };
            s.plain().run(RunProgram { compiled, lanes, block, scores });
            for (lane, &gradient) in gradients.iter().enumerate() {
                if gradient == 0.0 || lane % S::PANEL >= panel.queries {
                    continue;
                }
                for read in reads {
                    let place = read.shape.iter().enumerate().fold(0u64, |place, (axis, &extent)| {
                        let index = lanes.int(&compiled.program, read.root + 1 + axis, lane);
                        place * u64::from(extent) + HostTensor::resolved(index, extent)
                    });
                    let slope = lanes.floats(&compiled.program, read.root)[lane];
                    sums[read.gradient][place as usize] += f64::from(gradient) * f64::from(slope);
                }
            }
        });
    }
}

/// Zero arrays in the shapes of a call's gradients of captured tensors.
///
/// # Errors
/// Memory that the system refuses.
pub(crate) fn captured_zeros(problem: &ValidBwd) -> fmha_core::Result<Vec<Vec<f64>>> {
    problem.captured_elems().map(zeros).collect()
}

impl<'a> Compiled<'a> {
    fn new(graph: &fmha_core::expr::Graph, roots: &[Id], captured: Vec<Captured<'a>>, all: &Tile) -> Self {
        let narrow = Bounds::new(graph, all, captured.as_slice()).fits_i32();
        Self { program: Program::new(graph, roots), captured, narrow }
    }
}

impl CodeLanes {
    fn set_head(&mut self, code: &Code<'_>, head: Pair) {
        if self.head == Some(head) {
            return;
        }
        self.head = Some(head);
        let of = |lanes: &mut Option<Lanes>, compiled: Option<&Compiled<'_>>| {
            if let (Some(lanes), Some(compiled)) = (lanes, compiled) {
                lanes.set_head(&compiled.program, &compiled.captured, &head);
            }
        };
        of(&mut self.score, code.score.as_ref().map(|(_, compiled)| compiled));
        of(&mut self.mask, code.mask.as_ref().map(|(_, compiled)| compiled));
        of(&mut self.slope, code.slope.as_ref());
        of(&mut self.reads, code.reads.as_ref().map(|(compiled, _)| compiled));
    }
}

fn head_of(span: &SeqSpan, i_head: u32) -> Pair {
    let SeqSpan { i_batch, seqlen_q, seqlen_k, .. } = *span;
    Pair { score: 0.0, b: i_batch, h: i_head, q: 0, k: 0, seqlen_q, seqlen_k }
}

/// Every pair that a problem may have.
fn everything(problem: &FwdProblem) -> Tile {
    let dims = problem.dims;
    Tile {
        b: 0..dims.batch,
        h: 0..dims.num_heads_q,
        // The range is 1024 queries longer than the sequence: lanes beyond the live ones are computed, and
        // discarded.
        q: 0..dims.seqlen_q.saturating_add(1024),
        k: 0..dims.seqlen_k.saturating_add(1024),
        seqlen_q: (0, dims.seqlen_q),
        seqlen_k: (0, dims.seqlen_k),
    }
}

/// Calls `each` for the blocks of a panel: the block, the index of its first score, and the number of scores.
fn for_blocks<S: Simd>(panel: &Panel, mut each: impl FnMut(Block, usize, usize)) {
    let step = Program::BLOCK / S::PANEL;
    let (first, last) = panel.rows;
    for row in (first..last).step_by(step) {
        let block = Block { q: panel.i, k: panel.j + row as u32, width: S::PANEL };
        each(block, row * S::PANEL, step.min(last - row) * S::PANEL);
    }
}

/// One block, compiled for an instruction set.
struct RunProgram<'x, 'a> {
    compiled: &'x Compiled<'a>,
    lanes: &'x mut Lanes,
    block: Block,
    scores: &'x [f32],
}

impl<S: Simd> Op<S> for RunProgram<'_, '_> {
    #[inline(always)]
    fn call(self, s: S) {
        let Self { compiled, lanes, block, scores } = self;
        lanes.run(&compiled.program, &compiled.captured, &Vectors(s), block, scores);
    }
}

/// The functions of an instruction set.
struct Vectors<S>(S);

impl<S: Simd> VectorMath for Vectors<S> {
    // The loop calls the function without a closure: a closure is compiled for the baseline's instructions alone,
    // and each vector operation would become a function call.
    #[inline(always)]
    fn exp(&self, x: &mut [f32]) {
        let s = self.0;
        for lanes in x.chunks_exact_mut(S::LANES) {
            // SAFETY: a vector's numbers.
            unsafe { s.store(lanes.as_mut_ptr(), exp(s, s.load(lanes.as_ptr()))) };
        }
    }

    #[inline(always)]
    fn tanh(&self, x: &mut [f32]) {
        let s = self.0;
        for lanes in x.chunks_exact_mut(S::LANES) {
            // SAFETY: a vector's numbers.
            unsafe { s.store(lanes.as_mut_ptr(), tanh(s, s.load(lanes.as_ptr()))) };
        }
    }
}
