//! Random calls by a seed, made through candle's tensors as through fmha's other interfaces, and compared
//! with the float64 reference, gradients included. Rows outside every sequence are 0. `FMHA_DRAWN=SEED:COUNT`
//! draws others, or more.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Result, Tensor, Var, WithDType};
use fmha::{Bias, BwdProblem, DropoutSeed, FwdProblem, KvLayout, MaskAlign, MaskShape, MaskSpec};
use fmha::{PlanOptions, QLayout, Shape, Strides};
use fmha_candle::{Options, Sequences, attention, attention_varlen};
use fmha_conformance::case::{Body, Drawn};
use fmha_conformance::check::{Selection, check_bwd, check_fwd};
use fmha_conformance::tensor::{self, Operand, Operands};
use fmha_conformance::tensors::{Data, HostBwd, HostFwd, Lengths};
use fmha_conformance::verdict::Verdict;
use half::{bf16, f16};

/// Random cases of a seed, as many as run in a few seconds, or the seed and count of `FMHA_DRAWN`.
fn cases(count: u32) -> Vec<(String, Body)> {
    let text = std::env::var("FMHA_DRAWN").unwrap_or_else(|_| format!("58:{count}"));
    let drawn: Drawn = text.parse().unwrap();
    drawn.cases().into_iter().map(|case| (case.name, case.body)).collect()
}

/// Offsets of sequences no longer than `most`.
fn offsets(drawn: &[i32], most: u32) -> Vec<i32> {
    let mut end = 0;
    let ends = drawn.windows(2).map(|pair| {
        end += (pair[1] - pair[0]).min(most.cast_signed());
        end
    });
    std::iter::once(0).chain(ends.collect::<Vec<_>>()).collect()
}

/// Part of a drawn call that candle's interface can express: one type of three, equal lengths, packed
/// sequences side by side with rows after the last one, or pages under packed queries; a window at the last
/// key; ALiBi, a cap and dropout.
fn sayable(drawn: &FwdProblem, drawn_lengths: &Lengths) -> (FwdProblem, Lengths) {
    let (dims, mut lengths) = (drawn.dims, Lengths::default());
    let dtype = if drawn.dtypes.qk.is_fp8() { fmha::DType::F32 } else { drawn.dtypes.qk };
    let packed = drawn.layout.q == QLayout::Packed;
    let (q, kv) = match drawn.layout.kv {
        KvLayout::Paged { .. } => (QLayout::Packed, drawn.layout.kv),
        KvLayout::Packed if packed => (QLayout::Packed, KvLayout::Packed),
        _ => (QLayout::Batch, KvLayout::Strided),
    };
    if q == QLayout::Packed {
        let whole: Vec<i32> = (0..=dims.batch).map(|at| (at * dims.seqlen_q).cast_signed()).collect();
        let of = if packed { &drawn_lengths.cu_seqlens_q } else { &whole };
        lengths.cu_seqlens_q = offsets(of, dims.seqlen_q);
        lengths.totals.total_q = drawn_lengths.totals.total_q.or(Some(dims.batch * dims.seqlen_q));
    }
    if kv == KvLayout::Packed {
        lengths.cu_seqlens_k = offsets(&drawn_lengths.cu_seqlens_k, dims.seqlen_k);
        lengths.totals.total_k = drawn_lengths.totals.total_k;
    }
    if kv.is_paged() {
        lengths.seqused_k = drawn_lengths.seqused_k.clone();
        lengths.block_table = drawn_lengths.block_table.clone();
        lengths.totals.num_pages = drawn_lengths.totals.num_pages;
    }
    let (left, right) = match drawn.mask.shape {
        MaskShape::Causal(_) => (None, Some(0)),
        MaskShape::Window { left, right, .. } => (left, right),
        _ => (None, None),
    };
    // The binding takes a window bound beyond the number of keys as no bound, as candle-flash-attn does.
    let bound = |size: Option<u32>| size.filter(|&size| size <= dims.seqlen_k);
    let shape = MaskShape::Window { left: bound(left), right: bound(right), align: MaskAlign::BottomRight };
    let mut problem = FwdProblem::new(q, kv, dtype, dims)
        .seqused_k(kv.is_paged())
        .mask(MaskSpec { shape, ..MaskSpec::NONE })
        .softmax_scale(drawn.score.softmax_scale)
        .softcap(drawn.score.softcap)
        .p_drop(drawn.dropout.p_drop)
        .write_lse(true);
    if let Bias::Alibi { .. } = drawn.score.bias {
        problem.score.bias = drawn.score.bias;
    }
    let extents = problem.extents(lengths.totals);
    problem.strides.o = Strides::bshd(extents.o);
    for (shape, drawn_strides, strides, alike) in [
        (extents.q, drawn.strides.q, &mut problem.strides.q, drawn.layout.q == q),
        (extents.k, drawn.strides.k, &mut problem.strides.k, drawn.layout.kv == kv),
        (extents.v, drawn.strides.v, &mut problem.strides.v, drawn.layout.kv == kv && !drawn.cache.v_in_k),
    ] {
        let bshd = Strides::bshd(Shape { seq: shape.seq.max(2), ..shape });
        let taken = alike && drawn_strides.dim == 1;
        *strides = View::new(shape, if taken { drawn_strides } else { bshd }).strides;
    }
    (problem, lengths)
}

/// A tensor as candle's operations make it of one piece of memory: rows and heads taken out of larger ones, axes
/// swapped, one row for all heads.
struct View {
    shape: Shape,
    /// Requested strides, each made larger up to a multiple of the next smaller one.
    strides: Strides,
    /// The axes that are stored, outermost first: the index of each, and how many of its elements are stored.
    stored: Vec<(usize, usize)>,
}

fn axes(shape: Shape) -> [usize; 4] {
    [shape.batch, shape.seq, shape.head, shape.dim].map(|extent| extent as usize)
}

impl View {
    fn new(shape: Shape, strides: Strides) -> Self {
        let extents = axes(shape);
        let mut steps = [strides.batch, strides.seq, strides.head, strides.dim];
        let mut inner: Vec<usize> = (0..4).filter(|&axis| extents[axis] > 1 && steps[axis] > 0).collect();
        inner.sort_by_key(|&axis| (steps[axis], std::cmp::Reverse(axis)));
        let mut stored: Vec<(usize, usize)> = Vec::new();
        let mut below = 1;
        for (at, &axis) in inner.iter().enumerate() {
            let least = at.checked_sub(1).map_or(1, |at| below * extents[inner[at]] as i64);
            steps[axis] = (steps[axis].max(least) + below - 1) / below * below;
            if let Some(last) = stored.last_mut() {
                last.1 = (steps[axis] / below) as usize;
            } else if steps[axis] > 1 {
                // Elements apart, where a row has one.
                stored.push((4, steps[axis] as usize));
            }
            stored.push((axis, extents[axis]));
            below = steps[axis];
        }
        stored.reverse();
        let [batch, seq, head, dim] = steps;
        Self { shape, strides: Strides { batch, seq, head, dim }, stored }
    }

    fn is_shared(&self) -> bool {
        let Strides { batch, seq, head, .. } = self.strides;
        let extents = axes(self.shape);
        [batch, seq, head].iter().zip(extents).any(|(&stride, extent)| stride == 0 && extent > 1)
    }

    /// Elements of the memory.
    fn elems(&self) -> usize {
        self.stored.iter().map(|&(_, count)| count).product()
    }

    /// The tensor in `memory`, which has one axis.
    fn of(&self, memory: &Tensor) -> Result<Tensor> {
        let extents = axes(self.shape);
        let mut tensor = memory.reshape(self.stored.iter().map(|&(_, count)| count).collect::<Vec<_>>())?;
        let mut order: Vec<usize> = Vec::new();
        for (at, &(axis, _)) in self.stored.iter().enumerate() {
            tensor = tensor.narrow(at, 0, extents.get(axis).copied().unwrap_or(1))?;
            order.push(axis);
        }
        if order.last() == Some(&4) {
            tensor = tensor.squeeze(order.len() - 1)?;
            order.pop();
        }
        let mut sorted = order.clone();
        sorted.sort_unstable();
        let places: Vec<usize> =
            sorted.iter().map(|axis| order.iter().position(|other| other == axis).unwrap()).collect();
        tensor = tensor.permute(places)?;
        for axis in 0..4 {
            if !sorted.contains(&axis) {
                tensor = tensor.unsqueeze(axis)?;
            }
        }
        tensor.broadcast_as(&extents[..])
    }
}

fn of_bytes<T: WithDType + bytemuck::AnyBitPattern>(bytes: &[u8], count: usize) -> Result<Tensor> {
    let mut elems: Vec<T> = bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
    elems.resize(count, T::from_f64(f64::NAN));
    Tensor::from_vec(elems, count, &Device::Cpu)
}

/// All elements of a host tensor's memory, gaps included, followed by some NaN.
fn memory(tensor: &tensor::Tensor, count: usize) -> Result<Tensor> {
    match tensor.dtype {
        fmha::DType::F16 => of_bytes::<f16>(tensor.elems(), count),
        fmha::DType::Bf16 => of_bytes::<bf16>(tensor.elems(), count),
        _ => of_bytes::<f32>(tensor.elems(), count),
    }
}

fn bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::F16 => bytemuck::cast_slice(&flat.to_vec1::<f16>()?).to_vec(),
        DType::BF16 => bytemuck::cast_slice(&flat.to_vec1::<bf16>()?).to_vec(),
        _ => bytemuck::cast_slice(&flat.to_vec1::<f32>()?).to_vec(),
    })
}

/// A call in the form in which a candle user makes it.
struct Call {
    memories: [Var; 3],
    views: [View; 3],
    packed: [bool; 3],
    options: Options,
    sequences: Option<Sequences>,
}

fn ints(values: &[i32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

impl Call {
    fn new(problem: &FwdProblem, lengths: &Lengths, operands: &Operands, seed: DropoutSeed) -> Result<Self> {
        let extents = problem.extents(lengths.totals);
        let views = [
            View::new(extents.q, problem.strides.q),
            View::new(extents.k, problem.strides.k),
            View::new(extents.v, problem.strides.v),
        ];
        let of = |operand, view: &View| {
            // A tensor without elements still has the shape that its axes give.
            Var::from_tensor(&memory(operands.expect(operand), view.elems())?)
        };
        let memories = [of(Operand::Q, &views[0])?, of(Operand::K, &views[1])?, of(Operand::V, &views[2])?];
        let q = problem.layout.q == QLayout::Packed;
        let kv = problem.layout.kv == KvLayout::Packed;
        let slopes = match operands.get(Operand::AlibiSlopes) {
            None => None,
            Some(slopes) => {
                let heads = problem.dims.num_heads_q as usize;
                let count = slopes.shape.dim as usize;
                let slopes = of_bytes::<f32>(slopes.elems(), count)?;
                let per_batch = problem.score.bias == Bias::Alibi { per_batch: true };
                Some(if per_batch { slopes.reshape((count / heads, heads))? } else { slopes })
            }
        };
        let (left, right) = match problem.mask.shape {
            MaskShape::Window { left, right, .. } => (left, right),
            _ => (None, None),
        };
        let mut options = Options::default()
            .window(left.map(|size| size as usize), right.map(|size| size as usize))
            .softmax_scale(problem.score.softmax_scale)
            .softcap(problem.score.softcap)
            .alibi_slopes(slopes);
        if problem.dropout.p_drop > 0.0 {
            options = options.dropout(problem.dropout.p_drop, seed.seed);
        }
        let keys: Vec<i32> = std::iter::once(0)
            .chain(lengths.seqused_k.iter().scan(0, |end, keys| {
                *end += keys;
                Some(*end)
            }))
            .collect();
        let paged = problem.layout.kv.is_paged();
        let batch = problem.dims.batch as usize;
        let table = || ints(&lengths.block_table).reshape((batch, lengths.block_table.len() / batch));
        let sequences = q.then(|| Sequences {
            seqlens_q: ints(&lengths.cu_seqlens_q),
            seqlens_k: ints(if paged { &keys } else { &lengths.cu_seqlens_k }),
            max_seqlen_q: problem.dims.seqlen_q as usize,
            max_seqlen_k: problem.dims.seqlen_k as usize,
            block_table: paged.then(|| table().unwrap()),
        });
        Ok(Self { memories, views, packed: [q, kv, kv], options, sequences })
    }

    /// `memory` as candle's user sees it.
    fn view(&self, at: usize, memory: &Tensor) -> Result<Tensor> {
        let tensor = self.views[at].of(memory)?;
        if self.packed[at] { tensor.squeeze(0) } else { Ok(tensor) }
    }

    fn inputs(&self) -> Result<[Tensor; 3]> {
        let view = |at: usize| self.view(at, self.memories[at].as_tensor());
        Ok([view(0)?, view(1)?, view(2)?])
    }

    fn run(&self, [q, k, v]: &[Tensor; 3]) -> Result<(Tensor, Tensor)> {
        match &self.sequences {
            None => attention(q, k, v, &self.options),
            Some(sequences) => attention_varlen(q, k, v, sequences, &self.options),
        }
    }
}

/// Writes contiguous `found` to those rows of `tensor` that belong to a sequence. All other rows must be 0.
fn put(
    name: &str,
    tensor: &mut tensor::Tensor,
    found: &Tensor,
    rows: impl Iterator<Item = (u32, u32)>,
) -> Result<Option<String>> {
    let found = bytes(found)?;
    let Shape { batch, seq, head, dim } = tensor.shape;
    let size = (head * dim) as usize * tensor.dtype.size_bytes() as usize;
    assert_eq!(found.len(), (batch * seq) as usize * size, "{name}");
    let mut owned = vec![false; (batch * seq) as usize];
    rows.for_each(|(at, row)| owned[(at * seq + row) as usize] = true);
    for (row, owned) in owned.into_iter().enumerate() {
        let found = &found[row * size..][..size];
        if owned {
            tensor.elems_mut()[row * size..][..size].copy_from_slice(found);
        } else if found.iter().any(|&byte| byte != 0) {
            return Ok(Some(format!("{name}: row {row} is no sequence's, and not 0")));
        }
    }
    Ok(None)
}

/// The CPU device of the library, which says in what precision such a call's scores are summed.
fn device() -> fmha::Device {
    fmha::Backend::Cpu.open().unwrap()
}

fn forward(drawn: &FwdProblem, drawn_lengths: &Lengths, data: Data) -> Result<Verdict> {
    let (problem, lengths) = sayable(drawn, drawn_lengths);
    let mut host = HostFwd::new(problem, &lengths, data).unwrap();
    host.dropout.offset = 0;
    host.score_sums =
        device().plan_fwd(&host.problem, &PlanOptions::default()).unwrap().promises().score_sums;
    let call = Call::new(&host.problem, &lengths, &host.operands, host.dropout)?;
    let (o, lse) = call.run(&call.inputs()?)?;
    let spans = host.spans.clone();
    let rows = spans.iter().flat_map(|span| (0..span.seqlen_q).map(|i| (span.q_batch, span.q_row + i)));
    let mut faults = Vec::new();
    faults.extend(put("o", host.operands.expect_mut(Operand::O), &o, rows)?);
    let found = lse.flatten_all()?.to_vec1::<f32>()?;
    let mut owned = vec![false; found.len()];
    for span in &spans {
        for head in 0..host.problem.dims.num_heads_q {
            for i in 0..span.seqlen_q {
                let at = span.lse_index(&host.problem, head, i);
                owned[at] = true;
                host.operands.expect_mut(Operand::Lse).set_nth(at, f64::from(found[at]));
            }
        }
    }
    if let Some(at) = found.iter().zip(owned).position(|(&lse, owned)| !owned && lse != 0.0) {
        faults.push(format!("lse: element {at} is no row's, and not 0"));
    }
    let mut verdict = check_fwd(&host, &Selection::default(), &|_, _| ()).unwrap();
    verdict.faults.extend(faults);
    Ok(verdict)
}

fn backward(drawn: &FwdProblem, drawn_lengths: &Lengths, data: Data, deterministic: bool) -> Result<Verdict> {
    let (mut fwd, lengths) = sayable(drawn, drawn_lengths);
    let extents = fwd.extents(lengths.totals);
    // Operands whose heads share memory get dense strides: the gradient of shared memory would be the sum of
    // the gradients of these heads.
    for (shape, strides) in
        [(extents.q, &mut fwd.strides.q), (extents.k, &mut fwd.strides.k), (extents.v, &mut fwd.strides.v)]
    {
        if View::new(shape, *strides).is_shared() {
            *strides = Strides::bshd(shape);
        }
    }
    let dtype = fwd.dtypes.qk;
    let problem = BwdProblem::new(fwd)
        .dtype_grad(dtype)
        .strides_dout(Strides::bshd(extents.o))
        .strides_dq(Strides::bshd(extents.q))
        .strides_dk(Strides::bshd(extents.k))
        .strides_dv(Strides::bshd(extents.v));
    let mut host = HostBwd::new(problem, &lengths, data).unwrap();
    host.dropout.offset = 0;
    host.score_sums =
        device().plan_bwd(&host.problem, &PlanOptions::default()).unwrap().promises().score_sums;
    let mut call = Call::new(host.problem.fwd(), &lengths, &host.operands, host.dropout)?;
    call.options = call.options.deterministic(deterministic);
    let (o, _) = call.run(&call.inputs()?)?;
    let dout = host.operands.expect(Operand::Dout);
    let dout = memory(dout, o.elem_count())?.reshape(o.dims())?;
    let gradients = (o * dout)?.sum_all()?.backward()?;
    let spans = host.spans.clone();
    let queries = || spans.iter().flat_map(|span| (0..span.seqlen_q).map(|i| (span.q_batch, span.q_row + i)));
    let keys = || spans.iter().flat_map(|span| (0..span.seqlen_k).map(|j| (span.k_batch, span.k_row + j)));
    let mut faults = Vec::new();
    for (at, (name, operand)) in
        [("dq", Operand::Dq), ("dk", Operand::Dk), ("dv", Operand::Dv)].into_iter().enumerate()
    {
        let tensor = host.operands.expect_mut(operand);
        let gradient = match gradients.get(&call.memories[at]) {
            Some(gradient) => call.view(at, gradient)?.contiguous()?,
            None => panic!("{name} is missing"),
        };
        faults.extend(match at {
            0 => put(name, tensor, &gradient, queries())?,
            _ => put(name, tensor, &gradient, keys())?,
        });
    }
    let mut verdict = check_bwd(&host, &Selection::default(), &|_, _| ()).unwrap();
    verdict.faults.extend(faults);
    Ok(verdict)
}

#[test]
fn drawn_calls_and_their_gradients_are_right_and_rows_of_no_sequence_are_0() {
    let results: Vec<(String, Result<Verdict>)> = cases(24)
        .into_iter()
        .filter_map(|(name, body)| match body {
            Body::Forward(case) => Some((name, forward(&case.problem, &case.lengths, case.data))),
            Body::Backward(case) => {
                let (fwd, lengths) = (&case.problem.fwd, &case.lengths);
                Some((name, backward(fwd, lengths, case.data, case.deterministic)))
            }
            _ => None,
        })
        .collect();
    let wrong: Vec<String> = results
        .iter()
        .filter_map(|(name, result)| match result {
            Ok(verdict) if verdict.pass() => None,
            Ok(verdict) => Some(format!("{name}: {verdict}")),
            Err(error) => Some(format!("{name}: refused: {error}")),
        })
        .collect();
    println!("drawn calls of candle: {}, of which {} are wrong", results.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(std::env::var_os("FMHA_DRAWN").is_some() || results.len() >= 20, "{}", results.len());
}

/// Name of a case, the call as a candle user makes it, with one thing wrong, and a word that the refusal must
/// contain.
type Wrong = (&'static str, [Tensor; 3], Options, Option<Sequences>);

fn wrong_calls(call: &Call) -> Result<Vec<Wrong>> {
    let inputs = call.inputs()?;
    let sound = || (inputs.clone(), call.options.clone(), call.sequences.clone());
    let mut all: Vec<Wrong> = Vec::new();
    for number in [f32::NAN, f32::INFINITY] {
        let (inputs, options, sequences) = sound();
        all.push(("softmax_scale", inputs, options.softmax_scale(number), sequences));
    }
    for number in [f32::NAN, f32::INFINITY, -1.0] {
        let (inputs, options, sequences) = sound();
        all.push(("softcap", inputs, options.softcap(number), sequences));
    }
    for number in [f32::NAN, 1.0, -0.5] {
        let (inputs, options, sequences) = sound();
        all.push(("p_drop", inputs, options.dropout(number, 7), sequences));
    }
    let (mut options, heads) = (call.options.clone(), inputs[0].dim(inputs[0].rank() - 2)?);
    (options.p_drop, options.seed) = (0.5, None);
    all.push(("seed", inputs.clone(), options, call.sequences.clone()));
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu);
    for slopes in [
        zeros(&[heads + 1], DType::F32)?,
        zeros(&[heads], DType::F16)?,
        zeros(&[heads], DType::U32)?,
        zeros(&[1, 1, heads], DType::F32)?,
        zeros(&[], DType::F32)?,
    ] {
        let (inputs, options, sequences) = sound();
        all.push(("alibi_slopes", inputs, options.alibi_slopes(slopes), sequences));
    }
    for (at, name) in ["q", "k", "v"].into_iter().enumerate() {
        let of = &inputs[at];
        let (rank, dims) = (of.rank(), of.dims().to_vec());
        let mut put = |word: &'static str, tensor: Tensor| {
            let (mut inputs, options, sequences) = sound();
            inputs[at] = tensor;
            all.push((word, inputs, options, sequences));
        };
        // Q sets the type of the call: if Q alone has another type, the error names K.
        put(if at == 0 { "k is" } else { name }, of.to_dtype(other(of.dtype()))?);
        put(name, of.to_dtype(DType::F64)?);
        put(name, of.to_dtype(DType::U8)?);
        put(name, of.unsqueeze(0)?);
        put(name, of.flatten_all()?);
        if of.elem_count() > 0 && dims[rank - 1] > 1 {
            let pairs = [&dims[..], &[2]].concat();
            let apart = zeros(&pairs, of.dtype())?.narrow(rank, 0, 1)?.squeeze(rank)?;
            put(name, apart);
        }
        let mut wider = dims.clone();
        wider[rank - 1] += 1;
        // V may have a head dimension of its own.
        if at < 2 {
            put("head_dim", zeros(&wider, of.dtype())?);
        }
        let mut huge = dims.clone();
        huge[rank - 1] = 1025;
        put("head_dim", zeros(&huge, of.dtype())?);
        let mut heads = dims.clone();
        heads[rank - 2] = 0;
        // The error about missing heads is reported before that about slopes.
        if call.options.alibi_slopes.is_none() {
            put("num_heads", zeros(&heads, of.dtype())?);
        }
        if rank == 4 && at > 0 {
            let mut longer = dims.clone();
            longer[1] += 1;
            put(if at == 1 { "seqlen" } else { name }, zeros(&longer, of.dtype())?);
            let mut more = dims;
            more[0] += 1;
            put("batch", zeros(&more, of.dtype())?);
        }
    }
    if let Some(sequences) = &call.sequences {
        let mut put = |word: &'static str, change: &dyn Fn(&mut Sequences)| {
            let (inputs, options, sequences) = sound();
            let mut sequences = sequences.unwrap();
            change(&mut sequences);
            all.push((word, inputs, options, Some(sequences)));
        };
        let batch = sequences.seqlens_q.dim(0)? - 1;
        put("max_seqlen_q", &|of| of.max_seqlen_q = usize::MAX);
        put("max_seqlen_k", &|of| of.max_seqlen_k = usize::MAX);
        put("seqlens_q", &|of| of.seqlens_q = of.seqlens_q.to_dtype(DType::F32).unwrap());
        put("seqlens_k", &|of| of.seqlens_k = of.seqlens_k.to_dtype(DType::I64).unwrap());
        put("seqlens_q", &|of| of.seqlens_q = of.seqlens_q.unsqueeze(0).unwrap());
        put("seqlens_k", &|of| of.seqlens_k = of.seqlens_k.narrow(0, 0, batch).unwrap());
        put("seqlens", &|of| of.seqlens_q = of.seqlens_q.narrow(0, 0, 0).unwrap());
        let ends = |last: i32| {
            let mut ends = vec![0; batch + 1];
            ends[batch] = last;
            ints(&ends)
        };
        for last in [i32::MAX, -1, i32::MIN] {
            put("seqlens_q", &|of| of.seqlens_q = ends(last));
            put("seqlens_k", &|of| of.seqlens_k = ends(last));
        }
        // The numbers of keys of a paged cache are differences of the ends, whatever integer type these have.
        put("seqlens_k", &|of| {
            of.seqlens_k = Tensor::full(7u32, batch + 1, &Device::Cpu).unwrap();
            of.seqlens_k = Tensor::cat(&[&of.seqlens_k, &of.seqlens_k.zeros_like().unwrap()], 0).unwrap();
            of.seqlens_k = of.seqlens_k.narrow(0, batch, batch + 1).unwrap();
        });
        if let Some(table) = &sequences.block_table {
            let pages = inputs[1].dim(0)? as i32;
            put("block_table", &|of| of.block_table = Some(table.to_dtype(DType::F32).unwrap()));
            put("block_table", &|of| of.block_table = Some(table.flatten_all().unwrap()));
            put("block_table", &|of| of.block_table = Some(Tensor::cat(&[table, table], 0).unwrap()));
            if sequences.max_seqlen_k > 0 {
                put("block_table", &|of| of.block_table = Some(table.narrow(1, 0, 0).unwrap()));
            }
            let keys = sequences.seqlens_k.to_vec1::<i32>()?;
            if keys[batch] > 0 {
                for page in [pages, -1, i32::MAX] {
                    put("block_table", &|of| {
                        of.block_table = Some(Tensor::full(page, table.dims(), &Device::Cpu).unwrap());
                    });
                }
            }
        }
    }
    Ok(all)
}

fn other(dtype: DType) -> DType {
    if dtype == DType::F16 { DType::BF16 } else { DType::F16 }
}

#[test]
fn a_drawn_call_with_a_wrong_argument_is_refused_by_its_name() {
    let (mut count, mut missed) = (0, Vec::new());
    for (name, body) in cases(20) {
        let (drawn, drawn_lengths, data) = match &body {
            Body::Forward(case) => (&case.problem, &case.lengths, case.data),
            Body::Backward(case) => (&case.problem.fwd, &case.lengths, case.data),
            _ => continue,
        };
        let (problem, lengths) = sayable(drawn, drawn_lengths);
        let host = HostFwd::new(problem, &lengths, data).unwrap();
        let call = Call::new(&host.problem, &lengths, &host.operands, host.dropout).unwrap();
        for (word, [q, k, v], options, sequences) in wrong_calls(&call).unwrap() {
            count += 1;
            let result = match &sequences {
                None => attention(&q, &k, &v, &options),
                Some(sequences) => attention_varlen(&q, &k, &v, sequences, &options),
            };
            match result {
                Err(error) if error.to_string().contains(word) => {}
                Err(error) => missed.push(format!("{name}: {word} is wrong, and it is said: {error}")),
                Ok(_) => missed.push(format!("{name}: {word} is wrong, and taken")),
            }
        }
    }
    println!("wrong calls of candle: {count}, of which {} are not named", missed.len());
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    assert!(std::env::var_os("FMHA_DRAWN").is_some() || count >= 600, "{count}");
}
