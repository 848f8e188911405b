//! Masks as data, and scores and masks as code, over 1 to 8 ranks: every scheme against float64 of one device.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::sync::Arc;

use fmha::expr::{CaptureKind, Function, Number, Stored, Type};
use fmha::{
    BlockLists, BwdArgs, BwdProblem, CapturedGrad, CapturedTensor, DType, DevSlice, DevSliceMut, Dims,
    FwdArgs, FwdProblem, Intervals, MaskArgs, MaskAxes, MaskBits, ScoreArgs, SeqArgs, Shape, Strides, Totals,
};
use fmha_core::expr::draw::{self, Draw, Kind};
use fmha_core::reference::{Precision, backward, forward};
use fmha_core::{SeqSpan, ValidBwd, ValidFwd};
use fmha_dist::{BwdPlan, Error, FwdPlan, Group, Links, Options, Partition, Problem, Scheme};

const SCHEMES: [Scheme; 4] = [Scheme::Gather, Scheme::Ring, Scheme::Mixed, Scheme::Ulysses];

/// Forms from practice; drawn ones come beside them.
const FORMS: [(&str, &str); 7] = [
    ("slopes: f32[_]; s + slopes[h] * (k - q)", "k <= q + (seqlen_k - seqlen_q)"),
    ("table: bf16[_, _]; s + table[h, k - q]", "ids: i32[_]; ids[q] == ids[k] or k < 3"),
    ("rate: float; s * rate + b", "shift: int; k - q >= shift"),
    ("", "ids: i32[_]; gate: bool[_]; ids[q] <= ids[k] and gate[k]"),
    ("2.0 * tanh(s / 2.0)", "k <= q and k % 7 != 3"),
    ("slopes: f32[_]; s + slopes[h] * (k - q)", ""),
    ("gain: f32[]; s * gain[] + h", "first_q: int; q + first_q >= k // 2 and k < seqlen_k - 1"),
];

/// Numbers of a case that every rank has.
#[derive(Default)]
struct Operands {
    numbers: Vec<Number>,
    captured: Vec<Vec<u64>>,
    intervals: Vec<i32>,
    bits: Vec<i32>,
    lists: [Vec<i32>; 4],
}

struct Case {
    problem: FwdProblem,
    operands: Operands,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
    sink: Vec<f32>,
    /// Packed: offsets of queries and keys.
    cu: Option<[Vec<u32>; 2]>,
    dcaptured: Vec<CapturedGrad>,
}

fn numbers(shape: Shape, strides: Strides, mut of: impl FnMut([u32; 4]) -> i32) -> Vec<i32> {
    let mut numbers = vec![i32::MIN + 7; strides.extent(shape).unwrap() as usize];
    for (b, h) in (0..shape.batch).flat_map(|b| (0..shape.head).map(move |h| (b, h))) {
        for (s, d) in (0..shape.seq).flat_map(|s| (0..shape.dim).map(move |d| (s, d))) {
            numbers[strides.offset(b, s, h, d) as usize] = of([b, s, h, d]);
        }
    }
    numbers
}

/// Block sizes of a case's lists: of whole words, so that a partition can suit bits too.
const BLOCKS: [[u32; 2]; 3] = [[16, 32], [32, 16], [8, 8]];

impl Case {
    fn new(seed: u64) -> Self {
        let mut draw = Draw::new(seed);
        let heads = draw.of(&[(4, 2), (8, 4), (8, 1), (8, 8), (2, 1)]);
        let is_packed = draw.below(3) == 0;
        let mut length = |least: usize| (least + draw.below(100)) as u32;
        let sequences: Vec<(u32, u32)> = if is_packed {
            vec![(length(0), length(1)), (length(20), length(20)), (length(0), length(0))]
        } else {
            vec![(length(20), length(20))]
        };
        let most = |side: fn(&(u32, u32)) -> u32| sequences.iter().map(side).max().unwrap();
        let dims = Dims::batch(if is_packed { 3 } else { 1 + draw.below(2) as u32 })
            .seqlens(most(|rows| rows.0), most(|rows| rows.1))
            .heads(heads.0, heads.1)
            .head_dim(8);
        let new = if is_packed { FwdProblem::group } else { FwdProblem::batch };
        let band = draw.of(&["0", "0", "b", "t:40,20", "b:30,9,2"]);
        let mut problem = new(DType::F32, dims).write_lse(true).mask(band.parse().unwrap());
        problem = problem.sink(draw.below(3) == 0);
        let cu = |side: fn(&(u32, u32)) -> u32| {
            let sums = sequences.iter().scan(0, |at, rows| {
                *at += side(rows);
                Some(*at)
            });
            std::iter::once(0).chain(sums).collect::<Vec<u32>>()
        };
        let cu = is_packed.then(|| [cu(|rows| rows.0), cu(|rows| rows.1)]);
        let rows = |at: usize, seqlen: u32| {
            cu.as_ref().map_or(dims.batch * seqlen, |cu| *cu[at].last().unwrap()) as usize
        };
        let (rows_q, rows_k) = (rows(0, dims.seqlen_q), rows(1, dims.seqlen_k));
        let mut noise = |count: usize| (0..count).map(|_| draw.unit() as f32 * 1.5).collect::<Vec<f32>>();
        let (all_q, all_k) = (rows_q * heads.0 as usize * 8, rows_k * heads.1 as usize * 8);
        let [q, k, v, dout] = [all_q, all_k, all_k, all_q].map(&mut noise);
        let sink = noise(heads.0 as usize);
        let mut case =
            Self { problem, operands: Operands::default(), q, k, v, dout, sink, cu, dcaptured: vec![] };
        let asks = draw.below(6);
        if asks < 3 || asks == 5 {
            case.draw_functions(&mut draw);
        }
        if asks >= 3 {
            case.draw_masks(&mut draw);
        }
        case
    }

    fn draw_functions(&mut self, draw: &mut Draw) {
        let seed = draw.bits();
        let (score, mask) = if draw.below(3) > 0 {
            let (score, mask) = draw.of(&FORMS);
            let of = |text: &str| (!text.is_empty()).then(|| text.parse::<Function>().unwrap());
            (of(score), of(mask))
        } else {
            (draw::score(seed, Kind::Tame).ok(), draw::mask(seed, Kind::Tame).ok())
        };
        self.problem = self.problem.clone().score_code(score).mask_code(mask);
        let code = &self.problem.code;
        let mut captured: Vec<CapturedTensor> = vec![];
        for capture in code.score.iter().chain(&code.mask).flat_map(Function::captures) {
            let CaptureKind::Tensor { stored, rank } = capture.kind else { continue };
            if captured.iter().any(|tensor| tensor.name == capture.name) {
                continue;
            }
            let extents: Vec<u32> = (0..rank).map(|_| 2 + draw.below(60) as u32).collect();
            let tensor = CapturedTensor::dense(capture.name.clone(), &extents);
            let mut bytes: Vec<u8> = vec![];
            for _ in 0..tensor.num_elems() {
                match stored {
                    Stored::F32 => bytes.extend((draw.unit() as f32 * 0.1).to_ne_bytes()),
                    Stored::Bf16 => bytes.extend(half::bf16::from_f64(draw.unit()).to_ne_bytes()),
                    Stored::I32 => bytes.extend((draw.below(5) as i32 - 2).to_ne_bytes()),
                    _ => bytes.push(draw.below(3) as u8),
                }
            }
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            self.operands.captured.push(bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect());
            let reads = |score: &Function| score.captures().iter().any(|other| other.name == capture.name);
            if stored.value_type() == Type::Float && code.score.as_ref().is_some_and(reads) {
                let dtype = if draw.below(2) == 0 { DType::F32 } else { DType::Bf16 };
                self.dcaptured.push(CapturedGrad { name: capture.name.clone(), dtype });
            }
            captured.push(tensor);
        }
        for (_, kind) in code.numbers() {
            self.operands.numbers.push(match kind {
                Type::Float => Number::Float(draw.unit() as f32),
                _ => Number::Int(draw.below(9) as i64 - 4),
            });
        }
        // Without wanted gradients functions become what kernels have built in.
        if draw.below(2) == 0 {
            self.dcaptured.clear();
        }
        self.problem = self.problem.clone().captured(captured);
    }

    fn draw_masks(&mut self, draw: &mut Draw) {
        let Dims { seqlen_k, num_heads_q, num_heads_kv, .. } = self.problem.dims;
        let has = [draw.below(2) == 0, draw.below(3) == 0, draw.below(2) == 0];
        let has = if has == [false; 3] { [true, false, true] } else { has };
        let mut axes = |by_kv: bool| MaskAxes {
            per_batch: draw.below(2) == 0,
            heads: draw.of(&[1, num_heads_q, if by_kv { num_heads_kv } else { 1 }]),
        };
        let [of_intervals, of_bits, of_lists] = [axes(true), axes(true), axes(false)];
        let problem = self.problem.clone();
        let total = self.cu.as_ref().map(|cu| *cu[0].last().unwrap());
        let totals = Totals { total_q: total, ..Totals::NONE };
        if has[0] {
            let intervals = match total {
                Some(rows) => Intervals::packed(rows, of_intervals.heads, 4),
                None => Intervals::batch(&problem, of_intervals, 4),
            };
            let shape = problem.shape_intervals(&intervals, totals);
            let mut at = || draw.below(seqlen_k as usize + 20) as i32 - 10;
            self.operands.intervals = numbers(shape, intervals.strides, |[_, _, _, m]| match m {
                0 => at() / 3,
                1 | 3 => at().max(at()),
                _ => at(),
            });
            self.problem = self.problem.clone().intervals(intervals);
        }
        if has[1] {
            let bits = MaskBits::dense(&problem, of_bits, totals);
            let shape = problem.shape_mask_bits(&bits, totals);
            self.operands.bits = numbers(shape, bits.strides, |_| (draw.bits() | draw.bits()) as u32 as i32);
            self.problem = self.problem.clone().mask_bits(bits);
        }
        if has[2] {
            let sizes = draw.of(&BLOCKS);
            let blocks = seqlen_k.div_ceil(sizes[1]).max(1);
            let [partial, full] = draw.of(&[[true, false], [true, true], [false, true]]);
            let room = |has: bool| has.then_some(blocks);
            let lists = BlockLists::dense(&problem, of_lists, sizes, room(partial), room(full));
            for (at, list) in [(0, lists.partial), (2, lists.full)] {
                let Some(list) = list else { continue };
                let shape = problem.shape_block_lists(&lists, list.max_blocks);
                // Even blocks belong to one list and odd ones to the other, so that none is listed twice.
                let own = (blocks + 1 - at / 2) / 2;
                let counts =
                    numbers(Shape { dim: 1, ..shape }, list.counts, |_| draw.below(own as usize + 1) as i32);
                let indices = numbers(shape, list.indices, |[_, row, _, i]| {
                    if i < own { (2 * ((i + row) % own) + at / 2).cast_signed() } else { i32::MAX }
                });
                self.operands.lists[at as usize] = counts;
                self.operands.lists[at as usize + 1] = indices;
            }
            self.problem = self.problem.clone().block_lists(lists);
        }
    }

    /// Runs of rows for each of 1 to 8 ranks: as blocks and words lie, or anywhere.
    fn partition(&self, draw: &mut Draw, side: usize, ranks: u32, aligned: bool) -> Partition {
        let seqlen = [self.problem.dims.seqlen_q, self.problem.dims.seqlen_k][side];
        let cu = self.cu.as_ref().map_or(vec![0, seqlen], |cu| cu[side].clone());
        let rows = *cu.last().unwrap();
        let places: Vec<u32> = if aligned {
            cu.windows(2).flat_map(|ends| (ends[0]..ends[1]).step_by(32)).collect()
        } else {
            (0..rows).collect()
        };
        let mut cuts = vec![0, rows];
        cuts.extend((0..2 * ranks).filter(|_| !places.is_empty()).map(|_| draw.of(&places)));
        cuts.sort_unstable();
        let mut runs = vec![vec![]; ranks as usize];
        for ends in cuts.windows(2) {
            runs[draw.below(ranks as usize)].push(ends[0]..ends[1]);
        }
        Partition::new(rows, runs).unwrap()
    }

    fn seq<'a>(&'a self, offsets: &'a [Vec<i32>; 2]) -> SeqArgs<'a> {
        match &self.cu {
            None => SeqArgs::default(),
            Some([q, k]) => SeqArgs::default()
                .totals(Totals::packed(*q.last().unwrap(), *k.last().unwrap()))
                .cu_seqlens_q(DevSlice::host(&offsets[0]))
                .cu_seqlens_k(DevSlice::host(&offsets[1])),
        }
    }

    fn score<'a>(&'a self, captured: &'a [DevSlice<'a>]) -> ScoreArgs<'a> {
        let sink = self.problem.score.sink.then(|| DevSlice::host(&self.sink));
        ScoreArgs::default().captured(captured).numbers(&self.operands.numbers).sink(sink)
    }

    fn masks(&self) -> MaskArgs<'_> {
        fn of<T: fmha::Elem>(numbers: &[T], has: bool) -> Option<DevSlice<'_>> {
            has.then(|| DevSlice::host(numbers))
        }
        let (masks, operands) = (&self.problem.masks, &self.operands);
        let [partial, full] = [
            masks.block_lists.is_some_and(|lists| lists.partial.is_some()),
            masks.block_lists.is_some_and(|lists| lists.full.is_some()),
        ];
        MaskArgs::default()
            .intervals(of(&operands.intervals, masks.intervals.is_some()))
            .bits(of(bytemuck::cast_slice::<i32, u32>(&operands.bits), masks.bits.is_some()))
            .kv_num_blocks(of(&operands.lists[0], partial))
            .kv_indices(of(&operands.lists[1], partial))
            .full_kv_num_blocks(of(&operands.lists[2], full))
            .full_kv_indices(of(&operands.lists[3], full))
    }

    fn captured(&self) -> Vec<DevSlice<'_>> {
        self.operands.captured.iter().map(|words| DevSlice::host(words)).collect()
    }

    fn offsets(&self) -> [Vec<i32>; 2] {
        let of = |at: usize| {
            self.cu.as_ref().map_or(vec![], |cu| cu[at].iter().map(|at| at.cast_signed()).collect())
        };
        [of(0), of(1)]
    }
}

/// O, LSE, dQ, dK, dV in the layout of one device, and each captured tensor's gradient.
struct Results {
    tensors: [Vec<f64>; 5],
    captured: Vec<Vec<f64>>,
}

const NAMES: [&str; 5] = ["O", "LSE", "dQ", "dK", "dV"];

/// Results in float64; O and LSE in f32 too, which a backward call reads.
fn reference(case: &Case) -> (Results, Vec<f32>, Vec<f32>) {
    let problem: ValidFwd = case.problem.clone().validate().unwrap();
    let (captured, offsets) = (case.captured(), case.offsets());
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| DevSlice::host(x));
    let mut o = vec![0f32; case.q.len()];
    let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut o));
    (args.seq, args.score, args.masks) = (case.seq(&offsets), case.score(&captured), case.masks());
    let Dims { batch, seqlen_q, num_heads_q, .. } = problem.dims;
    let lse_rows = case.cu.as_ref().map_or(batch * seqlen_q, |cu| *cu[0].last().unwrap());
    let mut lse = vec![f64::NEG_INFINITY; (lse_rows * num_heads_q) as usize];
    let mut all_o = vec![0f64; case.q.len()];
    let strides = problem.strides.o;
    for head in forward(&problem, &args, Precision::Exact).unwrap() {
        for i in 0..head.span.seqlen_q {
            let at = strides.offset(head.span.q_batch, head.span.q_row + i, head.i_head, 0) as usize;
            all_o[at..at + 8].copy_from_slice(&head.o[8 * i as usize..][..8]);
            lse[head.span.lse_index(&problem, head.i_head, i)] = head.lse[i as usize];
        }
    }
    let of_f32 = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let (o32, lse32) = (of_f32(&all_o), of_f32(&lse));
    let bwd: ValidBwd =
        BwdProblem::new(case.problem.clone()).dcaptured(case.dcaptured.clone()).validate().unwrap();
    let [mut a, mut b, mut c] = [case.q.clone(), case.k.clone(), case.v.clone()];
    let mut blanks: Vec<Vec<f32>> = bwd.captured_elems().map(|elems| vec![0.0; elems as usize]).collect();
    let grads = [DevSliceMut::host(&mut a), DevSliceMut::host(&mut b), DevSliceMut::host(&mut c)];
    let given = [DevSlice::host(&o32), DevSlice::host(&lse32), DevSlice::host(&case.dout)];
    let mut args = BwdArgs::new([q, k, v], given, grads);
    args.dcaptured = blanks.iter_mut().map(|sum| DevSliceMut::host(sum)).collect();
    (args.seq, args.score, args.masks) = (case.seq(&offsets), case.score(&captured), case.masks());
    let exact = backward(&bwd, &args, Precision::Exact).unwrap();
    let place = |strides: Strides, elems: usize, of: &[(SeqSpan, u32, Vec<f64>)], is_q: bool| {
        let mut all = vec![0f64; elems];
        for (span, head, rows) in of {
            let (batch, first) = if is_q { (span.q_batch, span.q_row) } else { (span.k_batch, span.k_row) };
            for (row, values) in (0..).zip(rows.chunks_exact(8)) {
                let at = strides.offset(batch, first + row, *head, 0) as usize;
                all[at..at + 8].copy_from_slice(values);
            }
        }
        all
    };
    let dq = place(bwd.dq, case.q.len(), &exact.dq, true);
    let dk = place(bwd.dk, case.k.len(), &exact.dk, false);
    let dv = place(bwd.dv, case.v.len(), &exact.dv, false);
    (Results { tensors: [all_o, lse, dq, dk, dv], captured: exact.dcaptured }, o32, lse32)
}

/// Results of one rank's plans: O, LSE, dQ, dK, dV, and the captured tensors' gradients; of replicated queries, which
/// have no gradients, O and LSE.
fn of_rank(
    case: &Case,
    problem: &Problem,
    group: Arc<dyn Group>,
    options: &Options,
    (o, lse): (&[f32], &[f32]),
) -> Result<Vec<Vec<u8>>, Error> {
    let (rank, device) = (group.rank(), support::device());
    let Dims { batch, num_heads_q, num_heads_kv, .. } = case.problem.dims;
    let batch = if case.cu.is_some() { 1 } else { batch };
    let q_rows =
        |x: &[f32]| problem.q.split(bytemuck::cast_slice(x), batch, 32 * u64::from(num_heads_q), rank);
    let k_rows =
        |x: &[f32]| problem.k.split(bytemuck::cast_slice(x), batch, 32 * u64::from(num_heads_kv), rank);
    let lse = problem.q.split(bytemuck::cast_slice(lse), batch * num_heads_q, 4, rank);
    let (q, k, v, dout, o) =
        (q_rows(&case.q), k_rows(&case.k), k_rows(&case.v), q_rows(&case.dout), q_rows(o));
    let captured = case.captured();
    let stream = device.default_stream();
    let [mut to_o, mut dq] = [vec![0xffu8; q.len()], vec![0xffu8; q.len()]];
    let [mut dk, mut dv] = [vec![0xffu8; k.len()], vec![0xffu8; k.len()]];
    let mut to_lse = vec![0xffu8; lse.len()];
    let mut plan = FwdPlan::new(problem, group.clone(), &device, options)?;
    let [q, k, v, o, lse, dout] = [&q, &k, &v, &o, &lse, &dout].map(|bytes| DevSlice::host(&bytes[..]));
    let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut to_o)).lse(DevSliceMut::host(&mut to_lse));
    (args.score, args.masks) = (case.score(&captured), case.masks());
    plan.run(&mut args, &stream)?;
    if problem.q.is_replicated() {
        return Ok(vec![to_o, to_lse]);
    }
    let mut plan = BwdPlan::new(problem, (DType::F32, false), group, &device, options)?;
    let mut sums: Vec<Vec<u8>> = case
        .dcaptured
        .iter()
        .map(|wanted| {
            let elems = case.problem.code.tensor(&wanted.name).unwrap().num_elems();
            vec![0xff; (elems * wanted.dtype.size_bytes()) as usize]
        })
        .collect();
    let grads = [&mut dq, &mut dk, &mut dv].map(|bytes| DevSliceMut::host(&mut bytes[..]));
    let mut args = BwdArgs::new([q, k, v], [o, lse, dout], grads);
    args.dcaptured = sums.iter_mut().map(|sum| DevSliceMut::host(&mut sum[..])).collect();
    (args.score, args.masks) = (case.score(&captured), case.masks());
    plan.run(&mut args, &stream)?;
    let mut results = vec![to_o, to_lse, dq, dk, dv];
    results.extend(sums);
    Ok(results)
}

/// Whether a number is as near as f32 sums of some hundred terms bring it.
fn is_near(found: f64, wanted: f64, size: f64, bound: f64) -> bool {
    found == wanted || (found - wanted).abs() <= bound * size.max(1.0)
}

fn compare(what: &str, found: &[f64], wanted: &[f64], bound: f64) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let size = wanted.iter().filter(|x| x.is_finite()).fold(1.0f64, |most, x| most.max(x.abs()));
    let wrong = found.iter().zip(wanted).position(|(&found, &wanted)| !is_near(found, wanted, size, bound));
    if let Some(at) = wrong {
        panic!("{what}: element {at} is {}, not {} (of up to {size})", found[at], wanted[at]);
    }
}

fn of_bytes(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        DType::Bf16 => {
            bytes.chunks_exact(2).map(|at| bytemuck::pod_read_unaligned::<half::bf16>(at).to_f64()).collect()
        }
        _ => bytes.chunks_exact(4).map(|at| bytemuck::pod_read_unaligned::<f32>(at).into()).collect(),
    }
}

/// Runs a case over ranks; `Ok(false)` where the scheme refuses it for a place inside a block.
fn runs(
    case: &Case,
    problem: &Problem,
    scheme: Scheme,
    exact: &(Results, Vec<f32>, Vec<f32>),
    what: &str,
) -> bool {
    let (exact, o, lse) = exact;
    let mut links = Links::default();
    links.ranks_per_host = Some(2);
    let options = Options::default().scheme(scheme).links(links);
    let results = support::on_ranks(problem.q.ranks(), support::TIMEOUT, |group| {
        of_rank(case, problem, group, &options, (o, lse))
    });
    let results = match results.into_iter().collect::<Result<Vec<_>, _>>() {
        Ok(results) => results,
        Err(error) => {
            let text = &error.text;
            let names_place = text.contains(" begin at position ") && text.contains(", no multiple of ");
            let names_sizes = ["num_heads_q ", "query heads of a rank", "ranks_per_host 2"]
                .iter()
                .any(|part| text.contains(part));
            assert!(names_place && scheme != Scheme::Ulysses || names_sizes, "{what}: {error}");
            return false;
        }
    };
    let Dims { batch, num_heads_q, num_heads_kv, .. } = case.problem.dims;
    let batch = if case.cu.is_some() { 1 } else { batch };
    for (at, name) in NAMES.into_iter().enumerate() {
        let wanted = &exact.tensors[at];
        let mut whole = vec![0u8; 4 * wanted.len()];
        for (rank, own) in (0..).zip(&results) {
            let (partition, batch, row) = match at {
                1 => (&problem.q, batch * num_heads_q, 4),
                3 | 4 => (&problem.k, batch, 32 * u64::from(num_heads_kv)),
                _ => (&problem.q, batch, 32 * u64::from(num_heads_q)),
            };
            partition.join(&mut whole, &own[at], batch, row, rank);
        }
        compare(&format!("{what}, {name}"), &of_bytes(&whole, DType::F32), wanted, 2e-4);
    }
    for (at, (wanted, gradient)) in exact.captured.iter().zip(&case.dcaptured).enumerate() {
        for own in &results {
            assert!(
                own[5 + at] == results[0][5 + at],
                "{what}: ranks have unlike gradients of {}",
                gradient.name
            );
        }
        let bound = if gradient.dtype == DType::F32 { 2e-4 } else { 8e-3 };
        let found = of_bytes(&results[0][5 + at], gradient.dtype);
        compare(&format!("{what}, gradient of {}", gradient.name), &found, wanted, bound);
    }
    true
}

#[test]
fn what_masks_and_functions_show_over_ranks_is_what_one_device_shows() {
    let mut served = [0; SCHEMES.len()];
    for seed in 0..60 {
        let case = Case::new(seed);
        let exact = reference(&case);
        let mut draw = Draw::new(seed + 500);
        let ranks = [1, 2, 3, 4, 4, 6, 8, 8][draw.below(8)];
        let aligned = draw.below(4) > 0;
        let rows_q = case.partition(&mut draw, 0, ranks, aligned);
        let rows_k = case.partition(&mut draw, 1, ranks, aligned);
        let mut problem = Problem::new(case.problem.clone(), rows_q).keys(rows_k);
        problem = problem.dcaptured(case.dcaptured.clone());
        if let Some([q, k]) = case.cu.clone() {
            problem = problem.packed(q, k);
        }
        for (at, scheme) in SCHEMES.into_iter().enumerate() {
            let code = &case.problem.code;
            let what = format!(
                "seed {seed}, {scheme} over {ranks}: {:?} {:?} {:?}",
                code.score, code.mask, case.problem.masks
            );
            served[at] += usize::from(runs(&case, &problem, scheme, &exact, &what));
        }
    }
    assert!(served[0] > 40 && served[1] > 30 && served[2] > 15 && served[3] > 20, "{served:?}");
}

#[test]
fn a_cache_over_ranks_is_asked_as_on_one_device() {
    let mut served = 0;
    for seed in 100..130 {
        let case = Case::new(seed);
        if case.cu.is_some() {
            continue;
        }
        let (exact, o, lse) = reference(&case);
        let mut draw = Draw::new(seed);
        let ranks = 1 + draw.below(8) as u32;
        let aligned = draw.below(4) > 0;
        let rows_k = case.partition(&mut draw, 1, ranks, aligned);
        let queries = Partition::replicated(case.problem.dims.seqlen_q, ranks);
        let problem = Problem::new(case.problem.clone(), queries).keys(rows_k);
        let results = support::on_ranks(ranks, support::TIMEOUT, |group| {
            of_rank(&case, &problem, group, &Options::default().scheme(Scheme::Decode), (&o, &lse))
        });
        for (rank, own) in results.into_iter().enumerate() {
            let what = format!("seed {seed}, rank {rank} of {ranks}");
            match own {
                Ok(own) => {
                    for (at, name) in ["O", "LSE"].into_iter().enumerate() {
                        let found = of_bytes(&own[at], DType::F32);
                        compare(&format!("{what}, {name}"), &found, &exact.tensors[at], 2e-4);
                    }
                    served += usize::from(rank == 0);
                }
                Err(error) => assert!(error.text.contains(" begin at position "), "{what}: {error}"),
            }
        }
    }
    assert!(served > 10, "{served}");
}

/// An operand of one rank that does not fit the problem is refused on every rank before anything runs.
#[test]
fn operands_that_do_not_fit_are_named_on_every_rank() {
    let mask = |text: &str| text.parse::<Function>().unwrap();
    let dims = Dims::batch(1).seqlens(64, 64).heads(2, 1).head_dim(8);
    let plain = FwdProblem::batch(DType::F32, dims).write_lse(true);
    let of = |problem: &FwdProblem, options: &Options, edit: &(dyn Fn(&mut FwdArgs<'_>) + Sync)| {
        let problem = Problem::new(problem.clone(), Partition::contiguous(64, 2));
        let results = support::on_ranks(2, support::TIMEOUT, |group| {
            let device = support::device();
            let rank = group.rank();
            let mut plan = FwdPlan::new(&problem, group, &device, options)?;
            let (q, k) = (vec![0f32; 32 * 16], vec![0f32; 32 * 8]);
            let (mut o, mut lse) = (q.clone(), vec![0f32; 64]);
            let [k, v] = [DevSlice::host(&k); 2];
            let mut args = FwdArgs::new(DevSlice::host(&q), k, v, DevSliceMut::host(&mut o))
                .lse(DevSliceMut::host(&mut lse));
            if rank == 1 {
                edit(&mut args);
            }
            plan.run(&mut args, &device.default_stream())
        });
        let texts: Vec<String> = results.into_iter().map(|ran| ran.unwrap_err().to_string()).collect();
        assert_eq!(texts[0], texts[1]);
        texts[0].clone()
    };
    let intervals = plain.clone().intervals(Intervals::batch(&plain, MaskAxes::SHARED, 2));
    let any = Options::default();
    static SHORT: [i32; 127] = [0; 127];
    let text = of(&intervals, &any, &|args| args.masks.intervals = Some(DevSlice::host(&SHORT)));
    assert!(text.contains("intervals"), "{text}");
    let shifted = plain.clone().mask_code(mask("shift: int; k - q >= shift"));
    let text = of(&shifted, &any, &|args| args.score.numbers = &[Number::Int(3)]);
    assert!(text.contains("numbers"), "{text}");
    let captured = CapturedTensor::dense("ids", &[64]);
    let read = plain.clone().mask_code(mask("ids: i32[_]; ids[k] > 0")).captured(vec![captured]);
    let text = of(&read, &any, &|_| ());
    assert!(text.contains("captured: 0 tensors given, but 1 wanted"), "{text}");
    // A scheme that was asked for, and places inside a block.
    let lists = BlockLists::dense(&plain, MaskAxes::SHARED, [48, 16], Some(4), None);
    let listed = plain.clone().block_lists(lists);
    for scheme in [Scheme::Gather, Scheme::Ring] {
        let text = of(&listed, &Options::default().scheme(scheme), &|_| ());
        let wanted = format!(
            "{scheme}: block_lists: queries of part 1 begin at position 32, no multiple of block_q 48"
        );
        assert!(text.contains(&wanted), "{text}");
    }
}
