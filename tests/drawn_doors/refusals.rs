//! Drawn calls with one fault each: the error must name the faulty argument, before anything runs.

mod c;

use std::collections::BTreeMap;

use fmha::{Attention, Backend};
use fmha_conformance::case::Body;
use fmha_conformance::tensor::{Operand, Operands};
use fmha_conformance::tensors::{HostBwd, HostFwd};
use fmha_core::{
    Bias, BlockTable, BwdArgs, BwdPlan, BwdProblem, CacheArgs, CacheSlice, DType, Descale, DevSlice,
    DevSliceMut, DropoutSeed, ElemType, Error, FwdArgs, FwdPlan, FwdProblem, KvLayout, MemorySpace,
    PlanOptions, QLayout, ScoreArgs, SeqArgs, Shape, Totals, VLayout,
};

use super::views::forward_of;
use super::{cases, cpu};

/// Calls tried through one interface, and those of them whose error did not name the fault.
#[derive(Default)]
struct Tried {
    count: usize,
    wrong: Vec<String>,
}

impl Tried {
    fn note(&mut self, name: &str, field: &str, refused: Result<(), String>) {
        self.count += 1;
        match refused {
            Err(text) if text.contains(field) => {}
            Err(text) => self.wrong.push(format!("{name}: {field} is wrong, and it is said: {text}")),
            Ok(()) => self.wrong.push(format!("{name}: {field} is wrong, and taken")),
        }
    }

    fn end(self, door: &str, least: usize) {
        println!("wrong calls of {door}: {}, of which {} are not named", self.count, self.wrong.len());
        assert!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        assert!(self.count >= least, "{door}: {}", self.count);
    }
}

/// A problem with one wrong field, and the field's name.
type Wrong<T> = (&'static str, T);

/// Whether an axis has two elements or more, so that a wrong stride along it matters.
fn has_two(extent: u32) -> bool {
    extent > 1
}

fn wrong_problems(sound: &FwdProblem) -> Vec<Wrong<FwdProblem>> {
    let (dims, layout, dtypes) = (sound.dims, sound.layout, sound.dtypes);
    let mut all: Vec<Wrong<FwdProblem>> = Vec::new();
    let mut wrong = |applies: bool, field, change: &dyn Fn(&mut FwdProblem)| {
        if applies {
            let mut problem = sound.clone();
            change(&mut problem);
            all.push((field, problem));
        }
    };
    wrong(true, "batch", &|problem| problem.dims.batch = u32::MAX);
    wrong(true, "seqlen_q", &|problem| problem.dims.seqlen_q = u32::MAX);
    wrong(true, "seqlen_k", &|problem| problem.dims.seqlen_k = u32::MAX);
    wrong(true, "num_heads_kv", &|problem| problem.dims.num_heads_kv = 0);
    wrong(true, "num_heads_q", &|problem| problem.dims.num_heads_q = 0);
    wrong(has_two(dims.num_heads_kv), "num_heads_q", &|problem| problem.dims.num_heads_q += 1);
    for size in [0, 1025, u32::MAX] {
        wrong(true, "head_dim_qk", &|problem| problem.dims.head_dim_qk = size);
        wrong(true, "head_dim_v", &|problem| problem.dims.head_dim_v = size);
    }
    wrong(layout.kv.is_paged(), "page_size", &|problem| {
        problem.layout.kv = KvLayout::Paged { page_size: 0 };
    });
    for number in [f32::NAN, f32::INFINITY] {
        wrong(true, "softmax_scale", &|problem| problem.score.softmax_scale = Some(number));
    }
    for number in [f32::NAN, f32::INFINITY, 0.0, -2.0] {
        wrong(true, "softcap", &|problem| problem.score.softcap = Some(number));
    }
    for number in [f32::NAN, 1.0, -0.1] {
        wrong(true, "p_drop", &|problem| problem.dropout.p_drop = number);
    }
    let columns = layout.v == VLayout::ColMajor;
    wrong(has_two(dims.head_dim_qk), "q", &|problem| problem.strides.q.dim = 2);
    wrong(has_two(dims.head_dim_qk), "k", &|problem| problem.strides.k.dim = 2);
    wrong(has_two(dims.head_dim_v) && !columns, "v", &|problem| problem.strides.v.dim = 2);
    wrong(has_two(dims.seqlen_k) && columns, "v", &|problem| problem.strides.v.seq = 2);
    wrong(has_two(dims.head_dim_v), "o", &|problem| problem.strides.o.dim = 2);
    wrong(has_two(dims.num_heads_q), "q", &|problem| problem.strides.q.head = -8);
    wrong(has_two(dims.num_heads_kv), "k", &|problem| problem.strides.k.head = i64::MAX);
    wrong(has_two(dims.num_heads_kv), "v", &|problem| problem.strides.v.head = i64::MIN);
    wrong(has_two(dims.num_heads_q), "o", &|problem| problem.strides.o.head = 0);
    let other = if dtypes.qk == DType::F32 { DType::F16 } else { DType::F32 };
    wrong(true, "dtype_v", &|problem| problem.dtypes.v = other);
    wrong(dtypes.qk != DType::E5m2Fnuz, "dtype_o", &|problem| problem.dtypes.o = DType::E5m2Fnuz);
    let per_tensor = Descale::PerTensor;
    wrong(!dtypes.qk.is_fp8(), "descale_q", &|problem| problem.scales.descale_q = per_tensor);
    wrong(!sound.stored_k().is_fp8(), "descale_k", &|problem| problem.scales.descale_k = per_tensor);
    wrong(!sound.stored_v().is_fp8(), "descale_v", &|problem| problem.scales.descale_v = per_tensor);
    wrong(!dtypes.o.is_fp8(), "scale_o", &|problem| problem.scales.scale_o = true);
    wrong(true, "arrivals", &|problem| problem.arrivals = 65);
    // Beside a descale, which needs FP8, the error would name the descale and not the type.
    let unscaled = [sound.scales.descale_k, sound.scales.descale_v] == [Descale::None; 2];
    wrong(unscaled, "dtype_cache", &|problem| problem.cache.dtype = Some(DType::F16));
    if let Bias::Elementwise(bias) = sound.score.bias {
        let mut other = bias;
        other.dtype = DType::E4m3Fn;
        wrong(true, "bias", &|problem| problem.score.bias = Bias::Elementwise(other));
        let mut other = bias;
        other.strides.dim = 2;
        wrong(has_two(dims.seqlen_k), "bias", &|problem| problem.score.bias = Bias::Elementwise(other));
    }
    if let Some(rotary) = sound.cache.rotary {
        for dim in [0, 1, dims.head_dim_qk + 2, u32::MAX] {
            let mut other = rotary;
            other.dim = dim;
            wrong(true, "rotary_dim", &|problem| problem.cache.rotary = Some(other));
        }
        for max_pos in [0, u32::MAX] {
            let mut other = rotary;
            other.max_pos = max_pos;
            wrong(true, "max_pos", &|problem| problem.cache.rotary = Some(other));
        }
        let mut other = rotary;
        other.dtype = DType::E5m2Fnuz;
        wrong(true, "rotary.dtype", &|problem| problem.cache.rotary = Some(other));
    }
    if let Some(append) = sound.cache.append {
        let mut other = append;
        other.seqlen_new = u32::MAX;
        wrong(true, "seqlen_new", &|problem| problem.cache.append = Some(other));
        let mut other = append;
        other.k_new.dim = 2;
        wrong(has_two(dims.head_dim_qk), "k_new", &|problem| problem.cache.append = Some(other));
        wrong(true, "append", &|problem| problem.layout.seqused_k = false);
    }
    wrong(sound.cache.tree_mask, "tree_mask", &|problem| problem.mask = "t".parse().unwrap());
    wrong(sound.cache.v_in_k, "v_in_k", &|problem| problem.strides.v.seq += 8);
    all
}

fn wrong_gradients(sound: &BwdProblem) -> Vec<Wrong<BwdProblem>> {
    let dims = sound.fwd.dims;
    let mut all: Vec<Wrong<BwdProblem>> = wrong_problems(&sound.fwd)
        .into_iter()
        .map(|(field, fwd)| {
            let mut problem = sound.clone();
            problem.fwd = fwd;
            (field, problem)
        })
        .collect();
    let mut wrong = |applies: bool, field, change: &dyn Fn(&mut BwdProblem)| {
        if applies {
            let mut problem = sound.clone();
            change(&mut problem);
            all.push((field, problem));
        }
    };
    wrong(true, "dtype_grad", &|problem| problem.dtype_grad = DType::E5m2);
    wrong(has_two(dims.head_dim_v), "dout", &|problem| problem.dout.dim = 2);
    wrong(has_two(dims.head_dim_qk), "dq", &|problem| problem.dq.dim = 2);
    wrong(has_two(dims.num_heads_kv), "dk", &|problem| problem.dk.head = 0);
    wrong(has_two(dims.num_heads_kv), "dv", &|problem| problem.dv.head = -1);
    wrong(!sound.fwd.score.sink, "dsink", &|problem| problem.write_dsink = true);
    wrong(sound.dbias.is_some(), "dbias", &|problem| problem.fwd.score.bias = Bias::None);
    wrong(sound.fwd.layout.kv == KvLayout::Strided, "page_size", &|problem| {
        problem.fwd.layout.kv = KvLayout::Paged { page_size: 16 };
    });
    all
}

/// Address, size in bytes and element type of an operand, as in its slice.
#[derive(Clone, Copy)]
struct Given {
    first: *mut u8,
    bytes: u64,
    elem: ElemType,
}

/// Operands of a call in host memory, and its other arguments.
#[derive(Clone)]
struct Arguments {
    given: BTreeMap<Operand, Given>,
    totals: Totals,
    max_pages: u32,
    dropout: Option<DropoutSeed>,
    workspace: Option<Given>,
}

/// Name of an operand in the contract.
fn name_of(operand: Operand) -> String {
    let mut name = String::new();
    for letter in format!("{operand:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_lowercase());
    }
    name
}

impl Arguments {
    fn new(
        operands: &Operands,
        (totals, batch): (Totals, u32),
        dropout: DropoutSeed,
        scratch: &mut Vec<u64>,
        bytes: u64,
    ) -> Self {
        let given: BTreeMap<Operand, Given> = operands
            .all()
            .map(|(operand, tensor)| {
                let (slice, first) = (tensor.slice(), tensor.elems().as_ptr().cast_mut());
                (operand, Given { first, bytes: slice.bytes(), elem: slice.elem() })
            })
            .collect();
        let table = given.get(&Operand::BlockTable).map_or(0, |table| table.bytes / 4);
        // The scratch has room for an alignment of 256 bytes.
        scratch.resize(bytes.div_ceil(8) as usize + 32, 0);
        let first = scratch.as_mut_ptr().cast::<u8>();
        let first = first.wrapping_add(first.align_offset(256));
        let workspace = (bytes > 0).then_some(Given { first, bytes, elem: ElemType::Scratch });
        let max_pages = (table / u64::from(batch.max(1))) as u32;
        Self { given, totals, max_pages, dropout: Some(dropout), workspace }
    }

    fn input(&self, operand: Operand) -> Option<DevSlice<'_>> {
        let Given { first, bytes, elem } = *self.given.get(&operand)?;
        // SAFETY: the call is refused before it reads anything, or its operand is whole.
        Some(unsafe { DevSlice::from_raw(MemorySpace::Host, first, bytes, elem) })
    }

    fn output(&self, operand: Operand) -> Option<DevSliceMut<'_>> {
        self.given.get(&operand).map(|given| Self::written(*given))
    }

    fn written<'a>(Given { first, bytes, elem }: Given) -> DevSliceMut<'a> {
        // SAFETY: the call is refused before it writes anything.
        unsafe { DevSliceMut::from_raw(MemorySpace::Host, first, bytes, elem) }
    }

    fn seq(&self) -> SeqArgs<'_> {
        SeqArgs::default()
            .totals(self.totals)
            .block_table(
                self.input(Operand::BlockTable).map(|pages| BlockTable { pages, max_pages: self.max_pages }),
            )
            .cu_seqlens_new(self.input(Operand::CuSeqlensNew))
            .cu_seqlens_q(self.input(Operand::CuSeqlensQ))
            .cu_seqlens_k(self.input(Operand::CuSeqlensK))
            .seqused_q(self.input(Operand::SequsedQ))
            .seqused_k(self.input(Operand::SequsedK))
    }

    fn score(&self) -> ScoreArgs<'_> {
        let mut score = ScoreArgs::default()
            .bias(self.input(Operand::Bias))
            .alibi_slopes(self.input(Operand::AlibiSlopes))
            .sink(self.input(Operand::Sink))
            .descale_q(self.input(Operand::DescaleQ))
            .descale_k(self.input(Operand::DescaleK))
            .descale_v(self.input(Operand::DescaleV));
        score.dropout = self.dropout;
        score
    }

    fn run_fwd(&self, plan: &FwdPlan) -> Result<(), String> {
        let empty = || DevSlice::host::<u8>(&[]);
        let appends = plan.problem().cache.append.is_some();
        let cached = |operand| -> CacheSlice<'_> {
            match (self.input(operand), appends) {
                (None, _) if operand == Operand::V && plan.problem().cache.v_in_k => CacheSlice::InK,
                (None, _) => empty().into(),
                (Some(_), true) => self.output(operand).unwrap().into(),
                (Some(slice), false) => slice.into(),
            }
        };
        let mut args = FwdArgs::new(
            self.input(Operand::Q).unwrap_or_else(empty),
            cached(Operand::K),
            cached(Operand::V),
            self.output(Operand::O).unwrap_or_else(|| DevSliceMut::host::<u8>(&mut [])),
        )
        .lse(self.output(Operand::Lse))
        .seq(self.seq())
        .score(self.score())
        .cache(
            CacheArgs::default()
                .k_new(self.input(Operand::KNew))
                .v_new(self.input(Operand::VNew))
                .cos(self.input(Operand::Cos))
                .sin(self.input(Operand::Sin))
                .tree_mask(self.input(Operand::TreeMask)),
        )
        .scale_o(self.input(Operand::ScaleO))
        .keep_mask(self.output(Operand::KeepMask))
        .workspace(self.workspace.map(Self::written));
        said(plan.run(&mut args, &cpu().default_stream()))
    }

    fn run_bwd(&self, plan: &BwdPlan) -> Result<(), String> {
        let input = |operand| self.input(operand).unwrap_or_else(|| DevSlice::host::<u8>(&[]));
        let output = |operand| self.output(operand).unwrap_or_else(|| DevSliceMut::host::<u8>(&mut []));
        let mut args = BwdArgs::new(
            [input(Operand::Q), input(Operand::K), input(Operand::V)],
            [input(Operand::O), input(Operand::Lse), input(Operand::Dout)],
            [output(Operand::Dq), output(Operand::Dk), output(Operand::Dv)],
        )
        .dlse(self.input(Operand::Dlse))
        .dbias(self.output(Operand::Dbias))
        .dsink(self.output(Operand::Dsink))
        .seq(self.seq())
        .score(self.score())
        .workspace(self.workspace.map(Self::written));
        said(plan.run(&mut args, &cpu().default_stream()))
    }

    /// Variants of the call with one wrong argument each, and the argument's name.
    fn wrong(&self, problem: &FwdProblem, backward: bool) -> Vec<Wrong<Self>> {
        let mut all = Vec::new();
        let mut wrong = |field: String, change: &dyn Fn(&mut Self)| {
            let mut other = self.clone();
            change(&mut other);
            // The name is leaked, so that it lives as long as the test.
            all.push((&*field.leak(), other));
        };
        for (&operand, &Given { bytes, elem, .. }) in &self.given {
            let name = name_of(operand);
            if bytes > 0 {
                wrong(name.clone(), &|other| {
                    other.given.remove(&operand);
                });
                wrong(name.clone(), &|other| other.at(operand).bytes -= 1);
            }
            let of_another = match elem {
                ElemType::Number(DType::F32) => ElemType::I32,
                ElemType::Bytes => ElemType::Scratch,
                _ => ElemType::Number(DType::F32),
            };
            wrong(name.clone(), &|other| other.at(operand).elem = of_another);
            if bytes > 0 && elem.size_bytes() > 1 {
                wrong(name, &|other| other.at(operand).first = other.at(operand).first.wrapping_add(1));
            }
        }
        let spare = self.given[&Operand::Q];
        let shared = [
            Operand::CuSeqlensQ,
            Operand::CuSeqlensK,
            Operand::SequsedQ,
            Operand::SequsedK,
            Operand::BlockTable,
            Operand::Bias,
            Operand::AlibiSlopes,
            Operand::Sink,
            Operand::DescaleQ,
            Operand::DescaleK,
            Operand::DescaleV,
        ];
        let forward = [
            Operand::CuSeqlensNew,
            Operand::KNew,
            Operand::VNew,
            Operand::Cos,
            Operand::Sin,
            Operand::TreeMask,
            Operand::ScaleO,
            Operand::KeepMask,
            Operand::Lse,
        ];
        let gradients = [Operand::Dlse, Operand::Dbias, Operand::Dsink];
        let own: &[Operand] = if backward { &gradients } else { &forward };
        for &operand in shared.iter().chain(own) {
            if !self.given.contains_key(&operand) {
                wrong(name_of(operand), &|other| {
                    other.given.insert(operand, spare);
                });
            }
        }
        if problem.cache.append.is_none() {
            let (output, name) = if backward { (Operand::Dq, "dq") } else { (Operand::O, "o") };
            if spare.bytes > 0 && self.given[&output].bytes > 0 {
                wrong(name.to_owned(), &|other| other.at(output).first = spare.first);
            }
        }
        let [q, k, pages] = [
            problem.layout.q == QLayout::Packed,
            problem.layout.kv == KvLayout::Packed,
            problem.layout.kv.is_paged(),
        ];
        wrong("total_q".to_owned(), &|other| other.totals.total_q = (!q).then_some(4));
        wrong("total_k".to_owned(), &|other| other.totals.total_k = (!k).then_some(4));
        wrong("num_pages".to_owned(), &|other| other.totals.num_pages = (!pages).then_some(4));
        for (wanted, field, set) in [
            (q, "total_q", (|totals, most| totals.total_q = most) as fn(&mut Totals, Option<u32>)),
            (k, "total_k", |totals, most| totals.total_k = most),
            (pages, "num_pages", |totals, most| totals.num_pages = most),
        ] {
            if wanted {
                wrong(field.to_owned(), &|other| set(&mut other.totals, Some(u32::MAX)));
            }
        }
        if pages && problem.dims.seqlen_k > 0 {
            wrong("block_table".to_owned(), &|other| other.max_pages = 0);
            wrong("block_table".to_owned(), &|other| other.max_pages = u32::MAX);
        }
        if problem.dropout.p_drop > 0.0 {
            wrong("dropout".to_owned(), &|other| other.dropout = None);
        }
        if let Some(Given { bytes, .. }) = self.workspace {
            wrong("workspace".to_owned(), &|other| other.workspace = None);
            wrong("workspace".to_owned(), &|other| other.workspace.as_mut().unwrap().bytes = bytes - 1);
        }
        all
    }

    fn at(&mut self, operand: Operand) -> &mut Given {
        self.given.get_mut(&operand).unwrap()
    }

    /// Calls with wrong lengths, which a plan with `check_lengths` reports, and the memory of the lengths.
    fn wrong_lengths(&self) -> Vec<(&'static str, Vec<i32>, Self)> {
        let mut all = Vec::new();
        let keys = self.values(Operand::SequsedK).iter().any(|&keys| keys > 0);
        let pages = self.totals.num_pages.map_or(0, u32::cast_signed);
        for (operand, field, is_offset, wrong) in [
            (Operand::CuSeqlensQ, "cu_seqlens_q", true, i32::MAX),
            (Operand::CuSeqlensQ, "cu_seqlens_q", true, -1),
            (Operand::CuSeqlensK, "cu_seqlens_k", true, i32::MAX),
            (Operand::CuSeqlensK, "cu_seqlens_k", true, -1),
            (Operand::CuSeqlensNew, "cu_seqlens_new", true, i32::MAX),
            (Operand::SequsedQ, "seqused_q", false, i32::MAX),
            (Operand::SequsedQ, "seqused_q", false, -1),
            (Operand::SequsedK, "seqused_k", false, i32::MAX),
            (Operand::SequsedK, "seqused_k", false, i32::MIN),
            (Operand::BlockTable, "block_table", false, pages),
            (Operand::BlockTable, "block_table", false, -1),
        ] {
            let mut values = self.values(operand);
            if values.is_empty() || operand == Operand::BlockTable && !keys {
                continue;
            }
            match (is_offset, values.last_mut()) {
                (true, Some(last)) => *last = wrong,
                _ => values.fill(wrong),
            }
            let mut other = self.clone();
            other.at(operand).first = values.as_mut_ptr().cast();
            all.push((field, values, other));
        }
        all
    }

    fn values(&self, operand: Operand) -> Vec<i32> {
        let Some(slice) = self.input(operand) else { return Vec::new() };
        slice.as_host().unwrap().chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
    }
}

/// Text of an error that is the caller's fault. Other errors begin with their kind.
fn said<T>(result: Result<T, Error>) -> Result<(), String> {
    match result {
        Ok(_) => Ok(()),
        Err(Error::Problem(error)) => Err(format!("{} {}", error.field, error.text)),
        Err(error) => Err(format!("no fault of a field? {error}").replace('_', " ")),
    }
}

#[test]
fn a_drawn_problem_with_a_wrong_field_is_refused_by_its_name() {
    let mut tried = Tried::default();
    for (name, body) in cases(200) {
        match &body {
            Body::Forward(case) => {
                for (field, problem) in wrong_problems(&case.problem) {
                    tried.note(&name, field, said(problem.validate().map_err(Error::from)));
                }
            }
            Body::Backward(case) => {
                for (field, problem) in wrong_gradients(&case.problem) {
                    tried.note(&name, field, said(problem.validate().map_err(Error::from)));
                }
            }
            _ => {}
        }
    }
    tried.end("problems", 4000);
}

/// Problems with an extreme value in one number each.
fn extremes(sound: &FwdProblem) -> Vec<FwdProblem> {
    let mut all = Vec::new();
    let sizes = [0, 1, 2, 65_535, i32::MAX.unsigned_abs(), u32::MAX - 1, u32::MAX];
    for (at, size) in (0..12).flat_map(|at| sizes.map(|size| (at, size))) {
        let mut problem = sound.clone();
        let dims = &mut problem.dims;
        match at {
            0 => dims.batch = size,
            1 => dims.seqlen_q = size,
            2 => dims.seqlen_k = size,
            3 => dims.num_heads_q = size,
            4 => dims.num_heads_kv = size,
            5 => dims.head_dim_qk = size,
            6 => dims.head_dim_v = size,
            7 => problem.layout.kv = KvLayout::Paged { page_size: size },
            8 => problem.arrivals = size,
            9 => (dims.num_heads_q, dims.num_heads_kv) = (size, size),
            10 => (dims.seqlen_q, dims.seqlen_k) = (size, size),
            _ => (dims.batch, dims.num_heads_q, dims.num_heads_kv) = (size, size, 1),
        }
        all.push(problem);
    }
    let steps = [i64::MIN, -1, 0, 1, 1 << 32, i64::MAX / 2, i64::MAX];
    for (at, step) in (0..16).flat_map(|at| steps.map(|step| (at, step))) {
        let mut problem = sound.clone();
        let strides = &mut problem.strides;
        let tensors = [&mut strides.q, &mut strides.k, &mut strides.v, &mut strides.o];
        let Some(tensor) = tensors.into_iter().nth(at / 4) else { continue };
        let axes = [&mut tensor.batch, &mut tensor.seq, &mut tensor.head, &mut tensor.dim];
        axes.into_iter().skip(at % 4).take(1).for_each(|axis| *axis = step);
        all.push(problem);
    }
    all
}

#[test]
fn extremes_in_a_drawn_problem_are_planned_or_refused_by_a_field() {
    let (mut planned, mut refused) = (0, 0);
    for (name, body) in cases(100) {
        let Some((problem, _)) = forward_of(&body) else { continue };
        for extreme in extremes(problem) {
            let result = match extreme.clone().validate() {
                Ok(valid) => cpu().plan_fwd(&valid, &PlanOptions::default()).map(|_| ()),
                Err(error) => Err(error.into()),
            };
            match result {
                Ok(()) => planned += 1,
                Err(Error::Problem(error)) if error.text.contains(error.field) => refused += 1,
                // The CPU's kernel does not wait for pieces of keys to arrive.
                Err(Error::Unsupported { .. }) if extreme.arrivals > 0 => refused += 1,
                Err(error) => panic!("{name}: {error}: {extreme:?}"),
            }
        }
    }
    println!("extremes: {planned} are planned, {refused} refused");
    assert!(planned > 1000 && refused > 1000, "{planned} {refused}");
}

#[test]
fn a_drawn_call_with_a_wrong_argument_is_refused_by_its_name() {
    let mut tried = Tried::default();
    let options = PlanOptions::default().check_lengths(true);
    for (name, body) in cases(40) {
        match &body {
            Body::Forward(case) => {
                let host = HostFwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
                let plan = cpu().plan_fwd(&host.problem, &options).unwrap();
                let facts = (host.totals, host.problem.dims.batch);
                let (mut scratch, bytes) = (Vec::new(), plan.workspace().bytes);
                let sound = Arguments::new(&host.operands, facts, host.dropout, &mut scratch, bytes);
                for (field, wrong) in sound.wrong(&host.problem, false) {
                    tried.note(&name, field, wrong.run_fwd(&plan));
                }
                for (field, _values, wrong) in sound.wrong_lengths() {
                    tried.note(&name, field, wrong.run_fwd(&plan));
                }
            }
            Body::Backward(case) => {
                let host = HostBwd::new(case.problem.clone(), &case.lengths, case.data).unwrap();
                let plan = cpu().plan_bwd(&host.problem, &options).unwrap();
                let fwd = host.problem.fwd();
                let (mut scratch, bytes) = (Vec::new(), plan.workspace().bytes);
                let facts = (host.totals, fwd.dims.batch);
                let sound = Arguments::new(&host.operands, facts, host.dropout, &mut scratch, bytes);
                for (field, wrong) in sound.wrong(fwd, true) {
                    tried.note(&name, field, wrong.run_bwd(&plan));
                }
                for (field, _values, wrong) in sound.wrong_lengths() {
                    tried.note(&name, field, wrong.run_bwd(&plan));
                }
            }
            _ => {}
        }
    }
    tried.end("plans", 1000);
}

#[test]
fn drawn_slices_that_do_not_fit_are_refused_by_name() {
    let mut tried = Tried::default();
    for (name, body) in cases(200) {
        let Some((problem, _)) = forward_of(&body) else { continue };
        let options = Attention::new(problem.dims)
            .mask(problem.mask)
            .softmax_scale(problem.score.softmax_scale)
            .softcap(problem.score.softcap)
            .backend(Backend::Cpu);
        let plain = options.problem(DType::F32);
        let zeros = |shape: Shape| vec![0f32; shape.num_elems() as usize];
        let (q, k, v) = (zeros(plain.shape_q()), zeros(plain.shape_k()), zeros(plain.shape_v()));
        let mut refused = |field, q: &[f32], k: &[f32], v: &[f32], options: &Attention| {
            tried.note(&name, field, said(fmha::attention(q, k, v, options)));
        };
        refused("q", &q[1..], &k, &v, &options);
        refused("k", &q, &k[1..], &v, &options);
        refused("v", &q, &k, &v[1..], &options);
        refused("v", &q, &k, &[&v[..], &[0.0]].concat(), &options);
        refused("softcap", &q, &k, &v, &options.clone().softcap(-1.0));
        refused("softmax_scale", &q, &k, &v, &options.clone().softmax_scale(f32::NAN));
        refused("p_drop", &q, &k, &v, &options.clone().dropout(1.0, DropoutSeed::default()));
        let mut unseeded = options.clone();
        unseeded.p_drop = 0.5;
        refused("dropout", &q, &k, &v, &unseeded);
        let mut heads = options.clone();
        heads.dims.num_heads_kv = 0;
        refused("num_heads_kv", &q, &k, &v, &heads);
    }
    tried.end("slices", 1000);
}
