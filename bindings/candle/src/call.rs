//! One call: converts candle's layouts to a problem, makes a plan and runs it, forward, and backward when candle
//! asks for gradients.

use std::sync::{Arc, OnceLock};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, DType, Error, Layout, Result, Shape, Storage, Tensor, bail,
};
use fmha::expr::{Number, Stored as FunctionType};
use fmha::{
    Bias, BlockTable, BwdArgs, BwdProblem, CapturedTensor, DevSlice, Dims, DropoutSeed, FwdArgs, FwdProblem,
    KvLayout, MaskAlign, MaskArgs, MaskShape, MaskSpec, PlanOptions, QLayout, ScoreArgs, SeqArgs, Totals,
};

use crate::masks;
use crate::memory::{Input, Output, Place, Stored, Written, extent};
use crate::{Options, Outputs, Sequences, Small};

/// Index tables of packed sequences, contiguous as the kernels require.
#[derive(Clone)]
pub(crate) struct Packed {
    cu_seqlens_q: Tensor,
    /// First key of each sequence; for a paged cache, the number of keys of each sequence.
    keys: Tensor,
    batch: usize,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    block_table: Option<Tensor>,
}

/// A refusal by the name that the caller has given: a paged cache's lengths are made of `seqlens_k`.
fn named(error: fmha::Error) -> Error {
    match error {
        fmha::Error::Problem(error) if error.field == "seqused_k" => {
            Error::msg(format!("seqlens_k, whose differences are seqused_k: {error}"))
        }
        error => Error::wrap(error),
    }
}

/// An index table as the kernels read it: contiguous, 32 bits.
fn table(field: &'static str, tensor: &Tensor, axes: usize) -> Result<Tensor> {
    if !matches!(tensor.dtype(), DType::U32 | DType::I32) {
        bail!("{field} is {}, where u32 or i32 is wanted", tensor.dtype().as_str());
    }
    if tensor.rank() != axes {
        bail!("{field} has {} axes, where {axes} are wanted", tensor.rank());
    }
    tensor.detach().contiguous()
}

/// The number of keys of each sequence; `ends` has the first key of each and the end of the last.
fn lengths(ends: &Tensor, batch: usize) -> Result<Tensor> {
    if !ends.device().is_cpu() {
        // The differences are computed on the device, so that the host waits for nothing.
        return ends.narrow(0, 1, batch)? - ends.narrow(0, 0, batch)?;
    }
    // Ends that decrease are refused when the call is planned; here candle's `-` on unsigned integers could fail on
    // them.
    let ends = match ends.dtype() {
        DType::U32 => ends.to_vec1::<u32>()?.into_iter().map(u32::cast_signed).collect(),
        _ => ends.to_vec1::<i32>()?,
    };
    let lengths: Vec<i32> = ends.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
    Tensor::from_vec(lengths, batch, &candle_core::Device::Cpu)
}

impl Packed {
    pub(crate) fn new(sequences: &Sequences) -> Result<Self> {
        let cu_seqlens_q = table("seqlens_q", &sequences.seqlens_q, 1)?;
        let cu_seqlens_k = table("seqlens_k", &sequences.seqlens_k, 1)?;
        let (offsets, offsets_k) = (cu_seqlens_q.dim(0)?, cu_seqlens_k.dim(0)?);
        if offsets == 0 || offsets != offsets_k {
            bail!("seqlens_k has {offsets_k} offsets, seqlens_q {offsets}: each has batch + 1");
        }
        let batch = offsets - 1;
        let block_table = match &sequences.block_table {
            Some(block_table) => Some(table("block_table", block_table, 2)?),
            None => None,
        };
        let keys = match &block_table {
            None => cu_seqlens_k,
            Some(block_table) if block_table.dim(0)? != batch => {
                bail!("block_table has {} rows, but there are {batch} sequences", block_table.dim(0)?)
            }
            Some(_) => lengths(&cu_seqlens_k, batch)?,
        };
        let Sequences { max_seqlen_q, max_seqlen_k, .. } = *sequences;
        Ok(Self { cu_seqlens_q, keys, batch, max_seqlen_q, max_seqlen_k, block_table })
    }
}

/// The custom op: the options of the call, and LSE once the forward pass has run.
#[derive(Clone)]
pub(crate) struct Attend {
    options: Options,
    packed: Option<Packed>,
    small: Small,
    beside: Arc<OnceLock<Beside>>,
}

/// Results of the forward pass besides O. Candle has no gradient of these.
#[derive(Clone)]
struct Beside {
    lse: Tensor,
    /// Row maxima, maxima of heads and sums of keys; `None` for those that are not wanted.
    small: [Option<Tensor>; 3],
}

impl Attend {
    pub(crate) fn new(options: &Options, packed: Option<Packed>) -> Result<Self> {
        let mut options = options.clone();
        if let Some(slopes) = &options.alibi_slopes {
            if slopes.dtype() != DType::F32 {
                bail!("alibi_slopes is {}, where f32 is wanted", slopes.dtype().as_str());
            }
            options.alibi_slopes = Some(slopes.detach().contiguous()?);
        }
        for (name, tensor) in &mut options.captured {
            if tensor.track_op() {
                bail!("captured {name} is tracked, but this op has no gradient of it: detach it");
            }
            *tensor = tensor.contiguous()?;
        }
        masks::contiguous(&mut options.masks)?;
        Ok(Self { options, packed, small: Small::default(), beside: Arc::default() })
    }

    /// The call with small outputs.
    pub(crate) fn with_small(self, small: Small) -> Self {
        Self { small, ..self }
    }

    /// Runs the call and returns O, of which candle can ask a gradient, and the other outputs.
    pub(crate) fn apply(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Outputs> {
        let beside = Arc::clone(&self.beside);
        let o = q.apply_op3(k, v, self)?;
        match beside.get().cloned() {
            Some(Beside { lse, small: [row_max, head_max, key_sum] }) => {
                Ok(Outputs { o, lse, row_max, head_max, key_sum })
            }
            None => bail!("lse: the forward has not run"),
        }
    }

    fn mask(&self, seqlen_k: u32) -> MaskSpec {
        // A bound beyond the number of keys is no bound, as in candle-flash-attn.
        let bound = |size: Option<usize>| {
            size.and_then(|size| u32::try_from(size).ok()).filter(|&size| size <= seqlen_k)
        };
        match (bound(self.options.window_size_left), bound(self.options.window_size_right)) {
            (None, None) => MaskSpec::NONE,
            (None, Some(0)) => MaskSpec::CAUSAL,
            (left, right) => {
                let shape = MaskShape::Window { left, right, align: MaskAlign::BottomRight };
                MaskSpec { shape, ..MaskSpec::NONE }
            }
        }
    }

    fn problem(&self, q: &Input<'_>, k: &Input<'_>, v: &Input<'_>) -> Result<FwdProblem> {
        let dtype = q.float()?;
        for tensor in [k, v] {
            if tensor.float()? != dtype {
                bail!("{} is {}, but q is {}", tensor.field, tensor.dtype.as_str(), q.dtype.as_str());
            }
        }
        let axes = |input: &Input<'_>| -> Result<[u32; 4]> {
            let mut extents = [1; 4];
            let given = input.dims();
            let names = &["batch", "seq", "head", "dim"][4usize.saturating_sub(given.len())..];
            for (place, (&size, name)) in given.iter().zip(names).enumerate() {
                extents[place + 4 - names.len()] = extent(input.field, name, size)?;
            }
            Ok(extents)
        };
        let paged = self.packed.as_ref().is_some_and(|packed| packed.block_table.is_some());
        for (input, wanted) in [
            (q, if self.packed.is_some() { 3 } else { 4 }),
            (k, if self.packed.is_some() && !paged { 3 } else { 4 }),
            (v, if self.packed.is_some() && !paged { 3 } else { 4 }),
        ] {
            if input.dims().len() != wanted {
                bail!(
                    "{} has {} axes {:?}, where {wanted} are wanted",
                    input.field,
                    input.dims().len(),
                    input.dims()
                );
            }
        }
        let [batch, seqlen_q, num_heads_q, head_dim_qk] = axes(q)?;
        let [batch_k, seqlen_k, num_heads_kv, head_dim_k] = axes(k)?;
        let [batch_v, seqlen_v, num_heads_v, head_dim_v] = axes(v)?;
        for (what, of_k, wanted) in [
            ("k has head_dim", head_dim_k, head_dim_qk),
            ("v has batch", batch_v, batch_k),
            ("v has seqlen", seqlen_v, seqlen_k),
            ("v has num_heads_kv", num_heads_v, num_heads_kv),
        ] {
            if of_k != wanted {
                bail!("{what} {of_k}, where {wanted} is wanted");
            }
        }
        let (q_layout, kv_layout, dims) = match &self.packed {
            None if batch_k != batch => bail!("k has batch {batch_k}, but q has {batch}"),
            None => {
                let dims =
                    Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v };
                (QLayout::Batch, KvLayout::Strided, dims)
            }
            Some(packed) => {
                let dims = Dims {
                    batch: extent("seqlens_q", "batch", packed.batch)?,
                    seqlen_q: extent("max_seqlen_q", "seq", packed.max_seqlen_q)?,
                    seqlen_k: extent("max_seqlen_k", "seq", packed.max_seqlen_k)?,
                    num_heads_q,
                    num_heads_kv,
                    head_dim_qk,
                    head_dim_v,
                };
                let kv_layout =
                    if paged { KvLayout::Paged { page_size: seqlen_k } } else { KvLayout::Packed };
                (QLayout::Packed, kv_layout, dims)
            }
        };
        let bias = match &self.options.alibi_slopes {
            None => Bias::None,
            Some(slopes) => {
                let (heads, sequences) = (num_heads_q as usize, dims.batch as usize);
                match *slopes.dims() {
                    [given] if given == heads => Bias::Alibi { per_batch: false },
                    [rows, given] if given == heads && rows == sequences => Bias::Alibi { per_batch: true },
                    ref given => bail!(
                        "alibi_slopes has dims {given:?}, where [{heads}] or [{sequences}, {heads}] is wanted"
                    ),
                }
            }
        };
        let problem = FwdProblem::new(q_layout, kv_layout, dtype, dims);
        let problem = masks::of(&self.options.masks, problem, q.dims()[0])?;
        Ok(self
            .coded(problem)?
            .seqused_k(paged)
            .strides_q(q.strides()?)
            .strides_k(k.strides()?)
            .strides_v(v.strides()?)
            .mask(self.mask(dims.seqlen_k))
            .softmax_scale(self.options.softmax_scale)
            .softcap(self.options.softcap.filter(|&softcap| softcap != 0.0))
            .bias(bias)
            .p_drop(self.options.p_drop)
            .write_lse(true))
    }

    /// The problem with the options' score and mask functions and the extents of the tensors that they capture.
    fn coded(&self, problem: FwdProblem) -> Result<FwdProblem> {
        let Options { score_code, mask_code, captured, numbers, .. } = &self.options;
        let mut tensors = Vec::with_capacity(captured.len());
        for (name, tensor) in captured {
            let field = format!("captured {name}");
            let shape = tensor.dims().iter().map(|&size| extent(&field, "an axis", size));
            tensors.push(CapturedTensor::dense(name.clone(), &shape.collect::<Result<Vec<_>>>()?));
        }
        let problem = problem.score_code(score_code.clone()).mask_code(mask_code.clone()).captured(tensors);
        for (name, tensor) in captured {
            let (dtype, stored) = (tensor.dtype(), problem.code.stored(name));
            if let Some(stored) = stored
                && stored_as(dtype) != Some(stored)
            {
                bail!("captured {name} is {}, but the function reads {stored}", dtype.as_str());
            }
        }
        let wanted = problem.code.numbers();
        for (name, _) in numbers {
            if !wanted.iter().any(|(known, _)| known == name) {
                bail!("number {name} is given, but no function reads it");
            }
        }
        for (name, kind) in wanted {
            if !numbers.iter().any(|(known, _)| known == name) {
                bail!("number {name} is missing: the function reads {kind}");
            }
        }
        Ok(problem)
    }

    /// The numbers that a call captures, in the order in which its problem reads them.
    fn numbers(&self, problem: &FwdProblem) -> Vec<Number> {
        let of = |name: &str| self.options.numbers.iter().find(|(known, _)| known == name).map(|(_, n)| *n);
        problem.code.numbers().into_iter().filter_map(|(name, _)| of(name)).collect()
    }

    fn plan_options(&self, place: &Place) -> PlanOptions {
        PlanOptions::default()
            .allow_fallback(self.options.allow_fallback)
            .deterministic(self.options.deterministic)
            .batch_invariant(self.options.batch_invariant)
            .row_invariant(self.options.row_invariant)
            // On the CPU this check costs nothing; an offset that decreases is then an error.
            .check_lengths(place.is_cpu() && self.packed.is_some())
    }

    /// Runs the forward pass: returns O and the other outputs.
    fn forward(
        &self,
        q: &Input<'_>,
        k: &Input<'_>,
        v: &Input<'_>,
        place: &Place,
    ) -> Result<(Output, Beside)> {
        let Small { row_max, head_max, key_sum } = self.small;
        let problem = self.problem(q, k, v)?.row_max(row_max).head_max(head_max).key_sum(key_sum);
        let totals = self.totals(q, k)?;
        let shape_o: Vec<usize> = with_last(q.dims(), problem.dims.head_dim_v);
        let shape_lse = match totals.total_q {
            Some(total) => vec![problem.dims.num_heads_q as usize, total as usize],
            None => [problem.dims.batch, problem.dims.num_heads_q, problem.dims.seqlen_q]
                .map(|n| n as usize)
                .to_vec(),
        };
        let problem = problem.validate().map_err(Error::wrap)?;
        let plan = place.device.plan_fwd(&problem, &self.plan_options(place)).map_err(Error::wrap)?;
        // No kernel writes rows that belong to no sequence.
        let whole = self.packed.is_none();
        let mut o = place.memory(shape_o, q.dtype, whole)?;
        let heads = problem.dims.num_heads_q as usize;
        let of_keys = vec![problem.dims.batch as usize, heads, problem.dims.seqlen_k as usize];
        let wanted = |is_wanted: bool, shape: Vec<usize>, whole: bool| {
            is_wanted.then(|| place.memory(shape, DType::F32, whole)).transpose()
        };
        let mut small = [
            wanted(row_max, shape_lse.clone(), whole)?,
            // Without a sequence this output is not written.
            wanted(head_max, vec![heads], problem.dims.batch > 0)?,
            wanted(key_sum, of_keys, true)?,
        ];
        let mut lse = place.memory(shape_lse, DType::F32, whole)?;
        let mut workspace = place.memory(plan.workspace().bytes as usize, DType::U8, true)?;
        {
            let held = Held::new(self)?;
            let inputs = held.inputs(place, self.numbers(&problem))?;
            let (mut o, mut lse) = (o.write()?, lse.write()?);
            let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice()?);
            args.lse = Some(lse.slice()?);
            let [row_max, head_max, key_sum] = &mut small;
            let mut row_max = row_max.as_mut().map(Output::write).transpose()?;
            let mut head_max = head_max.as_mut().map(Output::write).transpose()?;
            let mut key_sum = key_sum.as_mut().map(Output::write).transpose()?;
            args.row_max = row_max.as_mut().map(Written::slice).transpose()?;
            args.head_max = head_max.as_mut().map(Written::slice).transpose()?;
            args.key_sum = key_sum.as_mut().map(Written::slice).transpose()?;
            (args.seq, args.score) = inputs.args(totals, self);
            args.masks = inputs.masks();
            let bytes = workspace.bytes();
            let mut scratch = workspace.write()?;
            args.workspace = if bytes == 0 { None } else { Some(scratch.slice()?) };
            plan.run(&mut args, &place.stream()).map_err(named)?;
        }
        let small = small.map(|output| output.map(Output::into_tensor));
        Ok((o, Beside { lse: lse.into_tensor(), small }))
    }

    /// dQ, dK and dV.
    fn backward(&self, given: [(&'static str, &Tensor); 6]) -> Result<[Tensor; 3]> {
        let storages = given.map(|(field, tensor)| (field, tensor.storage_and_layout()));
        let (_, (first, _)) = &storages[0];
        let place = Stored::of("q", first)?.place()?;
        let mut inputs = Vec::with_capacity(storages.len());
        for (field, (storage, layout)) in &storages {
            inputs.push(Input::new(field, Stored::of(field, storage)?, layout, &place)?);
        }
        let [q, k, v, o, lse, dout] = &inputs[..] else { bail!("a backward has six inputs") };
        let problem = self.problem(q, k, v)?;
        let totals = self.totals(q, k)?;
        let contiguous = fmha::Strides::bshd;
        let extents = problem.extents(totals);
        let problem = BwdProblem::new(problem.strides_o(o.strides()?))
            .strides_dout(dout.strides()?)
            .strides_dq(contiguous(extents.q))
            .strides_dk(contiguous(extents.k))
            .strides_dv(contiguous(extents.v));
        let problem = problem.validate().map_err(Error::wrap)?;
        let plan = place.device.plan_bwd(&problem, &self.plan_options(&place)).map_err(Error::wrap)?;
        let gradient = |of: &Input<'_>| place.memory(of.dims(), q.dtype, self.packed.is_none());
        let mut gradients = [gradient(q)?, gradient(k)?, gradient(v)?];
        let mut workspace = place.memory(plan.workspace().bytes as usize, DType::U8, true)?;
        {
            let held = Held::new(self)?;
            let tables = held.inputs(&place, self.numbers(problem.fwd()))?;
            let [dq, dk, dv] = &mut gradients;
            let (mut dq, mut dk, mut dv) = (dq.write()?, dk.write()?, dv.write()?);
            let bytes = workspace.bytes();
            let mut scratch = workspace.write()?;
            let (seq, score) = tables.args(totals, self);
            let mut args = BwdArgs::new(
                [q.slice(), k.slice(), v.slice()],
                [o.slice(), lse.slice(), dout.slice()],
                [dq.slice()?, dk.slice()?, dv.slice()?],
            )
            .seq(seq)
            .score(score)
            .masks(tables.masks())
            .workspace(if bytes == 0 { None } else { Some(scratch.slice()?) });
            plan.run(&mut args, &place.stream()).map_err(named)?;
        }
        Ok(gradients.map(Output::into_tensor))
    }

    fn totals(&self, q: &Input<'_>, k: &Input<'_>) -> Result<Totals> {
        let Some(packed) = &self.packed else { return Ok(Totals::NONE) };
        let rows = |input: &Input<'_>| Ok::<_, Error>(Some(extent(input.field, "seq", input.dims()[0])?));
        let (total_q, keys) = (rows(q)?, rows(k)?);
        Ok(match packed.block_table {
            Some(_) => Totals { total_q, num_pages: keys, ..Totals::NONE },
            None => Totals { total_q, total_k: keys, ..Totals::NONE },
        })
    }

    fn run(&self, given: [(&'static str, Stored<'_>, &Layout); 3]) -> Result<(Storage, Shape)> {
        let place = given[0].1.place()?;
        let [q, k, v] = given.map(|(field, stored, layout)| Input::new(field, stored, layout, &place));
        let (o, beside) = self.forward(&q?, &k?, &v?, &place)?;
        if self.beside.set(beside).is_err() {
            bail!("lse: this op has run before");
        }
        Ok(o.into_storage())
    }
}

/// Type of a captured tensor's elements, as a function reads them; `None` for types that functions cannot read.
fn stored_as(dtype: DType) -> Option<FunctionType> {
    Some(match dtype {
        DType::F32 => FunctionType::F32,
        DType::F16 => FunctionType::F16,
        DType::BF16 => FunctionType::Bf16,
        DType::I32 => FunctionType::I32,
        DType::I64 => FunctionType::I64,
        DType::U8 => FunctionType::Bool,
        _ => return None,
    })
}

fn with_last(dims: &[usize], last: u32) -> Vec<usize> {
    let mut dims = dims.to_vec();
    if let Some(end) = dims.last_mut() {
        *end = last as usize;
    }
    dims
}

type Guard<'a> = (&'static str, (candle_core::StorageRef<'a>, &'a Layout));

/// The tables and slopes of a call, their storages locked for reading.
struct Held<'a> {
    guards: Vec<Guard<'a>>,
}

impl<'a> Held<'a> {
    fn new(op: &'a Attend) -> Result<Self> {
        let mut guards = Vec::new();
        let mut hold = |field, tensor: &'a Tensor| guards.push((field, tensor.storage_and_layout()));
        if let Some(packed) = &op.packed {
            hold("seqlens_q", &packed.cu_seqlens_q);
            hold("seqlens_k", &packed.keys);
            if let Some(block_table) = &packed.block_table {
                hold("block_table", block_table);
            }
        }
        if let Some(slopes) = &op.options.alibi_slopes {
            hold("alibi_slopes", slopes);
        }
        for (_, tensor) in &op.options.captured {
            hold("captured", tensor);
        }
        for (field, tensor) in masks::tensors(&op.options.masks) {
            hold(field, tensor);
        }
        Ok(Self { guards })
    }

    fn inputs<'b>(&'b self, place: &'b Place, numbers: Vec<Number>) -> Result<Tables<'b>> {
        let mut inputs = Vec::with_capacity(self.guards.len());
        for (field, (storage, layout)) in &self.guards {
            inputs.push(Input::new(field, Stored::of(field, storage)?, layout, place)?);
        }
        let captured = inputs.iter().filter(|input| input.field == "captured").map(Input::slice);
        Ok(Tables { captured: captured.collect(), numbers, inputs })
    }
}

/// The index tables and ALiBi slopes of a call, in the form that the call takes.
struct Tables<'a> {
    inputs: Vec<Input<'a>>,
    captured: Vec<DevSlice<'a>>,
    numbers: Vec<Number>,
}

impl<'a> Tables<'a> {
    fn find(&self, field: &str) -> Option<&Input<'a>> {
        self.inputs.iter().find(|input| input.field == field)
    }

    fn args(&self, totals: Totals, op: &Attend) -> (SeqArgs<'_>, ScoreArgs<'_>) {
        let slice = |field: &str| self.find(field).map(Input::slice);
        let paged = totals.num_pages.is_some();
        let mut seq = SeqArgs::default();
        seq.totals = totals;
        seq.cu_seqlens_q = slice("seqlens_q");
        seq.cu_seqlens_k = slice("seqlens_k").filter(|_| !paged);
        seq.seqused_k = slice("seqlens_k").filter(|_| paged);
        seq.block_table = self.find("block_table").map(|table| BlockTable {
            pages: table.slice(),
            max_pages: table.dims().get(1).map_or(0, |&pages| pages as u32),
        });
        let mut score = ScoreArgs::default();
        score.alibi_slopes = slice("alibi_slopes");
        (score.captured, score.numbers) = (&self.captured, &self.numbers);
        score.dropout = op.options.seed.map(|seed| DropoutSeed { seed, offset: 0 });
        (seq, score)
    }
}

impl<'a> Tables<'a> {
    fn masks(&self) -> MaskArgs<'a> {
        let slice = |field: &str| self.find(field).map(Input::slice);
        MaskArgs::default()
            .intervals(slice("intervals"))
            .bits(slice("mask_bits").map(|words| words.typed(fmha::ElemType::U32)))
            .kv_num_blocks(slice("kv_num_blocks"))
            .kv_indices(slice("kv_indices"))
            .full_kv_num_blocks(slice("full_kv_num_blocks"))
            .full_kv_indices(slice("full_kv_indices"))
    }
}

impl CustomOp3 for Attend {
    fn name(&self) -> &'static str {
        "fmha"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let run = self.run([
            ("q", Stored::Cpu(q), q_layout),
            ("k", Stored::Cpu(k), k_layout),
            ("v", Stored::Cpu(v), v_layout),
        ]);
        match run? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => bail!("O of tensors on the CPU lies there"),
        }
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let run = self.run([
            ("q", Stored::Cuda(q), q_layout),
            ("k", Stored::Cuda(k), k_layout),
            ("v", Stored::Cuda(v), v_layout),
        ]);
        match run? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => bail!("O of tensors on a CUDA device lies there"),
        }
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        if self.packed.as_ref().is_some_and(|packed| packed.block_table.is_some()) {
            bail!("block_table: a paged cache has no gradient");
        }
        let Some(Beside { lse, .. }) = self.beside.get() else { bail!("lse: the forward has not run") };
        // A gradient that candle broadcasts has no stride of 1.
        let dout = if dout.stride().last() == Some(&1) { dout.clone() } else { dout.contiguous()? };
        let [dq, dk, dv] =
            self.backward([("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("dout", &dout)])?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
