//! Attention calls of our kernels: small, seeded, of every kind.

use std::collections::BTreeMap;

use fmha_conformance::check::intact_fwd;
use fmha_conformance::execute::run_fwd;
use fmha_conformance::init::Init;
use fmha_conformance::tensor::{Operand, Tensor};
use fmha_conformance::tensors::{Data, HostFwd, Lengths};
use fmha_core::reference::{Precision, forward_rows};
use fmha_core::{
    Bias, BiasBroadcast, DType, Descale, Device, Dims, ElementwiseBias, FwdProblem, MaskSpec, PlanOptions,
    Strides, VLayout,
};

use crate::compare::{Agreement, Outcome};
use crate::fill::mix;
use crate::record::{CallRecord, Recording, digest};

/// One attention call.
#[derive(Clone, Debug)]
pub struct Call {
    /// Unique; decides the numbers.
    pub name: String,
    problem: FwdProblem,
    lengths: Lengths,
    init: Init,
    /// Name of the kernel; `None`: the first that takes the call.
    kernel: Option<&'static str>,
    /// Whether O is exact in any order of sums.
    exact: bool,
}

/// The device, or the emulated one.
///
/// # Errors
/// What the backend said.
pub fn open(emulated: bool) -> Result<Device, String> {
    fmha_cuda::open(0, emulated.then_some("sm_90a")).map_err(|error| error.to_string())
}

const BATCH: u32 = 2;

fn dims(seqlen_q: u32, seqlen_k: u32, heads: (u32, u32), head_dim: (u32, u32)) -> Dims {
    Dims {
        batch: BATCH,
        seqlen_q,
        seqlen_k,
        num_heads_q: heads.0,
        num_heads_kv: heads.1,
        head_dim_qk: head_dim.0,
        head_dim_v: head_dim.1,
    }
}

fn plain(dtype: DType, dims: Dims, mask: &str) -> FwdProblem {
    let mut problem = FwdProblem::batch(dtype, dims);
    problem.mask = mask.parse().unwrap_or(MaskSpec::NONE);
    problem.write_lse = true;
    problem
}

struct List(Vec<Call>);

impl List {
    fn push(&mut self, name: String, problem: FwdProblem) -> &mut Call {
        let call = Call {
            name,
            problem,
            lengths: Lengths::default(),
            init: Init::Normal,
            kernel: None,
            exact: false,
        };
        self.0.push(call);
        self.0.last_mut().unwrap_or_else(|| unreachable!("one was pushed"))
    }
}

const WIDE: [DType; 2] = [DType::F16, DType::Bf16];

/// All calls. Few kernels, many problems: lengths, windows and scales cost no compilation.
#[must_use]
pub fn calls() -> Vec<Call> {
    let mut list = List(Vec::new());
    head_dims(&mut list);
    features(&mut list);
    packed(&mut list);
    exact(&mut list);
    second_opinion(&mut list);
    list.0
}

/// Every head dimension, every kind of mask, lengths about the tiles.
fn head_dims(list: &mut List) {
    for dtype in WIDE {
        for d in [64, 96, 128, 192, 256] {
            for (kind, masks) in [
                ("full", ["0", "0", "0"]),
                ("causal", ["t", "b", "b"]),
                ("window", ["b:70,0", "t:5,9", "b:0,33"]),
            ] {
                for ((q, k), mask) in [(300, 300), (129, 257), (1, 190)].into_iter().zip(masks) {
                    let problem = plain(dtype, dims(q, k, (2, 1), (d, d)), mask);
                    list.push(format!("{kind}/{dtype}/d{d}/s{q}x{k}/{mask}"), problem);
                }
            }
        }
        // Padded inside: dimensions that no tile has, and V unlike K.
        for (d, dv) in [(40, 24), (72, 72), (100, 100), (192, 128), (33, 47), (160, 160), (8, 256)] {
            for (q, k) in [(70, 130), (200, 65)] {
                let problem = plain(dtype, dims(q, k, (2, 2), (d, dv)), "b");
                list.push(format!("odd/{dtype}/d{d}x{dv}/s{q}x{k}"), problem);
            }
        }
    }
}

/// Modifiers of a score, layouts of tensors, types of O.
fn features(list: &mut List) {
    for dtype in WIDE {
        for d in [64, 128] {
            for (q, k) in [(150, 150), (64, 280)] {
                let base = plain(dtype, dims(q, k, (4, 2), (d, d)), "b");
                let mut add = |what: &str, change: &dyn Fn(&mut FwdProblem)| {
                    let mut problem = base.clone();
                    change(&mut problem);
                    list.push(format!("{what}/{dtype}/d{d}/s{q}x{k}"), problem);
                };
                add("softcap", &|p| p.score.softcap = Some(2.5));
                add("sink", &|p| p.score.sink = true);
                add("dropout", &|p| p.dropout.p_drop = 0.17);
                add("alibi", &|p| p.score.bias = Bias::Alibi { per_batch: true });
                add("bias", &|p| {
                    let broadcast = BiasBroadcast::BatchHead;
                    let strides = Strides::bhsd(p.shape_bias(broadcast));
                    p.score.bias =
                        Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
                });
                add("column_major_v", &|p| {
                    // Rows padded to multiples that TMA takes.
                    let shape = p.shape_v();
                    let dim = i64::from(shape.seq.next_multiple_of(8));
                    let head = dim * i64::from(shape.dim);
                    p.layout.v = VLayout::ColMajor;
                    p.strides.v = Strides { batch: head * i64::from(shape.head), seq: 1, head, dim };
                });
                add("heads_outside", &|p| {
                    (p.strides.q, p.strides.k, p.strides.v) =
                        (Strides::bhsd(p.shape_q()), Strides::bhsd(p.shape_k()), Strides::bhsd(p.shape_v()));
                });
                add("o_f32", &|p| p.dtypes.o = DType::F32);
                add("negative_scale", &|p| p.score.softmax_scale = Some(-0.2));
                add("empty_rows", &|p| p.mask = "b:-1,-90".parse().unwrap_or(MaskSpec::NONE));
                add("sink_columns", &|p| p.mask = "b:30,0,4".parse().unwrap_or(MaskSpec::NONE));
                add("used", &|p| (p.layout.seqused_q, p.layout.seqused_k) = (true, true));
                list.0.last_mut().into_iter().for_each(|call| {
                    let signed = |lengths: [u32; 2]| lengths.map(u32::cast_signed).to_vec();
                    call.lengths.seqused_q = signed([q, q / 2]);
                    call.lengths.seqused_k = signed([k - 77, 0]);
                });
            }
            for init in [Init::HugeLogits, Init::Outliers, Init::ConstantV, Init::Trig] {
                let problem = plain(dtype, dims(130, 200, (2, 1), (d, d)), "b");
                list.push(format!("numbers/{init}/{dtype}/d{d}"), problem).init = init;
            }
            // Few queries of many heads: the rows of a tile are heads.
            for (heads, q) in [((8, 1), 1), ((8, 2), 5), ((6, 2), 40)] {
                let problem = plain(dtype, dims(q, 220, heads, (d, d)), "b");
                let call = list.push(format!("grouped/{dtype}/d{d}/h{}kv{}/s{q}", heads.0, heads.1), problem);
                // Recorded when the fast kernel packed three heads and so refused them.
                call.kernel = (heads == (6, 2)).then_some("simt");
            }
        }
    }
}

/// Packed sequences, some of them empty.
fn packed(list: &mut List) {
    let sequences: [&[(u32, u32)]; 3] = [
        &[(130, 130), (0, 40), (64, 200), (1, 1)],
        &[(33, 0), (300, 290)],
        &[(5, 70), (6, 71), (7, 72), (0, 0), (128, 128)],
    ];
    for dtype in WIDE {
        for d in [64, 128] {
            for (lengths, mask) in
                sequences.iter().flat_map(|lengths| ["0", "b", "b:40,0"].map(|mask| (lengths, mask)))
            {
                let most = |side: fn(&(u32, u32)) -> u32| lengths.iter().map(side).max().unwrap_or(0);
                let sizes = dims(most(|s| s.0), most(|s| s.1), (4, 2), (d, d));
                let sizes = Dims { batch: lengths.len() as u32, ..sizes };
                let mut problem = FwdProblem::group(dtype, sizes);
                problem.mask = mask.parse().unwrap_or(MaskSpec::NONE);
                problem.write_lse = true;
                let name = format!("packed/{dtype}/d{d}/{}_sequences/{mask}", lengths.len());
                list.push(name, problem).lengths = Lengths::packed(lengths);
            }
        }
    }
}

/// O is a number that any order of sums gives: one key; or scores of 0 and 2^n whole numbers.
fn exact(list: &mut List) {
    for dtype in WIDE {
        for d in [64, 128] {
            let one = plain(dtype, dims(90, 1, (2, 1), (d, d)), "0");
            list.push(format!("exact/one_key/{dtype}/d{d}"), one).exact = true;
            for k in [16, 64, 256] {
                let mut mean = plain(dtype, dims(140, k, (2, 1), (d, d)), "0");
                mean.score.softmax_scale = Some(0.0);
                let call = list.push(format!("exact/mean/{dtype}/d{d}/k{k}"), mean);
                (call.exact, call.init) = (true, Init::Integers);
            }
        }
    }
}

/// The plain kernel: FP8, and the keep mask.
fn second_opinion(list: &mut List) {
    for dtype in [DType::E4m3Fn, DType::E5m2] {
        for dtype_v in [dtype, DType::Bf16] {
            let mut problem = plain(dtype, dims(50, 70, (4, 2), (64, 64)), "b");
            problem.dtypes.v = dtype_v;
            (problem.scales.descale_q, problem.scales.descale_k) = (Descale::PerKvHead, Descale::PerTensor);
            list.push(format!("simt/{dtype}/v_{dtype_v}"), problem).kernel = Some("simt");
        }
    }
    for dtype in WIDE {
        for mask in ["0", "b", "t:9,3"] {
            let mut problem = plain(dtype, dims(50, 70, (4, 2), (64, 64)), mask);
            (problem.dropout.p_drop, problem.dropout.write_keep_mask) = (0.4, true);
            list.push(format!("simt/keep_mask/{dtype}/{mask}"), problem).kernel = Some("simt");
        }
        let problem = plain(dtype, dims(90, 111, (2, 1), (128, 128)), "b");
        list.push(format!("simt/{dtype}"), problem).kernel = Some("simt");
    }
}

/// A call's tensors after it, and the name of its kernel.
struct Ran {
    host: HostFwd,
    kernel: String,
    asked: String,
}

fn seed(call: &Call) -> u64 {
    call.name.bytes().fold(1, |seed, byte| mix(seed ^ u64::from(byte)))
}

/// Description of a call, in words that no new field of a problem changes, and the numbers that it reads.
fn asked(call: &Call, host: &HostFwd) -> String {
    let (p, lengths) = (&call.problem, &call.lengths);
    let sizes = &p.dims;
    let dims = [
        sizes.batch,
        sizes.num_heads_q,
        sizes.num_heads_kv,
        sizes.seqlen_q,
        sizes.seqlen_k,
        sizes.head_dim_qk,
        sizes.head_dim_v,
    ];
    // Packed sequences follow each other row by row: no batch stride is read.
    let batch = i64::from(lengths.cu_seqlens_q.is_empty());
    let strides =
        [p.strides.q, p.strides.k, p.strides.v, p.strides.o].map(|s| [batch * s.batch, s.seq, s.head, s.dim]);
    let bias = match p.score.bias {
        Bias::None => "none".to_owned(),
        Bias::Alibi { per_batch } => format!("alibi {per_batch}"),
        Bias::Elementwise(bias) => {
            let s = bias.strides;
            let strides = [s.batch, s.seq, s.head, s.dim];
            format!("{} {:?} {strides:?}", bias.dtype, bias.broadcast)
        }
    };
    let words = format!(
        "{dims:?} {} {} {} {strides:?} {} {} {:?} {:?} {bias} {} {} {:?} {:?} {:?} {} {:?} {:?} {:?} {:?}",
        p.dtypes.qk,
        p.dtypes.v,
        p.dtypes.o,
        p.layout.v == VLayout::ColMajor,
        p.mask,
        p.score.softmax_scale,
        p.score.softcap,
        p.score.sink,
        p.dropout.p_drop,
        p.scales.descale_q,
        p.scales.descale_k,
        p.scales.descale_v,
        p.dropout.write_keep_mask,
        lengths.cu_seqlens_q,
        lengths.cu_seqlens_k,
        lengths.seqused_q,
        lengths.seqused_k,
    );
    let inputs = [Operand::Q, Operand::K, Operand::V, Operand::Bias, Operand::Sink, Operand::AlibiSlopes];
    let tensors = inputs.iter().filter_map(|&name| host.operands.get(name).map(Tensor::elems));
    digest(std::iter::once(words.as_bytes()).chain(tensors))
}

/// Runs a call on the kernel that is named; without a name on the first that takes it.
fn run(backend: &Device, call: &Call, kernel: Option<&str>) -> Result<Ran, String> {
    let data = Data { init: call.init, seed: seed(call), ..Data::default() };
    let mut host =
        HostFwd::new(call.problem.clone(), &call.lengths, data).map_err(|error| error.to_string())?;
    let asked = asked(call, &host);
    let mut options = PlanOptions::default().allow_fallback(kernel.is_none());
    options.kernel = kernel.map(str::to_owned);
    let plan = backend.plan_fwd(&host.problem, &options).map_err(|error| error.to_string())?;
    run_fwd(backend, &plan, &mut host).map_err(|error| error.to_string())?;
    let faults = intact_fwd(&host);
    if faults.is_empty() {
        Ok(Ran { host, kernel: plan.kernel().to_owned(), asked })
    } else {
        Err(faults.join("; "))
    }
}

/// (sequence, head, row, dim) of the elements of O that are kept.
fn places(host: &HostFwd, seed: u64) -> Vec<[u32; 4]> {
    let dims = host.problem.dims;
    let spans: Vec<u32> =
        (0..host.spans.len() as u32).filter(|&at| host.spans[at as usize].seqlen_q > 0).collect();
    if spans.is_empty() {
        return Vec::new();
    }
    (0..64)
        .map(|n| {
            let pick = |what: u64, count: u32| (mix(mix(seed ^ n) ^ what) % u64::from(count)) as u32;
            let span = spans[pick(0, spans.len() as u32) as usize];
            let row = pick(2, host.spans[span as usize].seqlen_q);
            [span, pick(1, dims.num_heads_q), row, pick(3, dims.head_dim_v)]
        })
        .collect()
}

/// Number of places whose LSE is kept.
const LSE_PLACES: usize = 24;

fn o_bits(host: &HostFwd, place: [u32; 4]) -> u32 {
    let [span, head, row, dim] = place;
    let at = host.spans[span as usize];
    host.operands.expect(Operand::O).bits(at.q_batch, at.q_row + row, head, dim)
}

fn lse_bits(host: &HostFwd, place: [u32; 4]) -> u32 {
    let [span, head, row, _] = place;
    let index = host.spans[span as usize].lse_index(&host.problem, head, row);
    (host.operands.expect(Operand::Lse).nth(index) as f32).to_bits()
}

/// Pattern that no rounding changes: NaN or not of each element of O, which LSE are infinite, O of rows that
/// see nothing, and the keep mask.
fn pattern(host: &HostFwd) -> String {
    let problem = &*host.problem;
    let mut classes = Vec::new();
    for span in &host.spans {
        for head in 0..problem.dims.num_heads_q {
            for row in 0..span.seqlen_q {
                let lse = host.operands.expect(Operand::Lse).nth(span.lse_index(problem, head, row));
                classes.push(if lse.is_finite() {
                    0
                } else {
                    1 + u8::from(lse > 0.0) + 2 * u8::from(lse.is_nan())
                });
                for dim in 0..problem.dims.head_dim_v {
                    let o = host.operands.expect(Operand::O).get(span.q_batch, span.q_row + row, head, dim);
                    classes.push(u8::from(o.is_nan()));
                    if !lse.is_finite() {
                        classes.push(1 + u8::from(o == 0.0));
                    }
                }
            }
        }
    }
    let keep = host.operands.get(Operand::KeepMask).map_or(&[][..], Tensor::elems);
    digest([classes.as_slice(), keep])
}

fn record_of(ran: &Ran, seed: u64) -> CallRecord {
    let places = places(&ran.host, seed);
    CallRecord {
        kernel: ran.kernel.clone(),
        asked: ran.asked.clone(),
        pattern: pattern(&ran.host),
        o: digest([ran.host.operands.expect(Operand::O).elems()]),
        o_bits: places.iter().map(|&place| o_bits(&ran.host, place)).collect(),
        lse_bits: places.iter().take(LSE_PLACES).map(|&place| lse_bits(&ran.host, place)).collect(),
    }
}

/// Runs a call on a device.
///
/// # Errors
/// What the backend said, or bytes written that belong to no tensor.
pub fn record(backend: &Device, call: &Call) -> Result<CallRecord, String> {
    Ok(record_of(&run(backend, call, call.kernel)?, seed(call)))
}

/// Bound of the distance of two results of one kernel on one problem.
///
/// Both add the same products in the same blocks; they differ by the rounding of sums inside a matrix instruction, by
/// `ex2.approx` (2 ulp each) and its like, all of single precision. Of P that moves each element by about 2^-20, which
/// matters where it makes P round to its other neighbour in the input's type: a share of P of `u` twice over. Such
/// errors of both signs add up to the *spread* of O (the root of the sum of the squares of its terms) times `2 u`,
/// beyond six standard deviations because few elements are that near to a tie; single precision's own share is below
/// that of the spread. Last, O is rounded once: one unit in the last place of its type. LSE is a sum in single
/// precision: a few of its units, and what scores differ by, a few units of the largest.
struct Bound {
    o: f64,
    lse: f64,
}

const U32: f64 = 1.0 / (1u64 << 24) as f64;

fn bound(problem: &FwdProblem, o: f64, spread: f64, lse: f64, logits: f64) -> Bound {
    let u_p = if problem.dtypes.v.is_fp8() {
        DType::E4m3Fn.unit_roundoff()
    } else {
        problem.dtypes.v.unit_roundoff()
    };
    let u_o = problem.dtypes.o.unit_roundoff();
    Bound {
        o: 2.0 * u_o * o.abs() + 2.0 * u_p * spread + 64.0 * U32 * (o.abs() + spread),
        lse: 16.0 * U32 * (lse.abs() + 1.0) + 8.0 * U32 * logits,
    }
}

/// Bound of the largest score, by Cauchy and Schwarz.
fn logits(host: &HostFwd) -> f64 {
    let norm = |operand: Operand| {
        let tensor = host.operands.expect(operand);
        let shape = tensor.shape;
        let rows = (0..shape.batch)
            .flat_map(|b| (0..shape.seq).flat_map(move |s| (0..shape.head).map(move |h| (b, s, h))));
        rows.map(|(b, s, h)| (0..shape.dim).map(|d| tensor.get(b, s, h, d).powi(2)).sum::<f64>().sqrt())
            .filter(|norm| norm.is_finite())
            .fold(0.0, f64::max)
    };
    norm(Operand::Q) * norm(Operand::K) * f64::from(host.problem.resolved_softmax_scale()).abs()
}

/// Holds what the emulator makes of a call to its record, on the kernel that served it there: what is chosen has
/// changed since.
///
/// # Errors
/// How it differs beyond what it may.
pub fn compare(backend: &Device, call: &Call, device: &CallRecord) -> Result<Agreement, String> {
    let named = |text: String| format!("{}: {text}", call.name);
    let ran = run(backend, call, Some(&device.kernel)).map_err(named)?;
    let emulated = record_of(&ran, seed(call));
    if emulated.asked != device.asked {
        return Err(named("its problem or inputs have changed since the recording: record anew".into()));
    }
    if emulated.kernel != device.kernel {
        return Err(named(format!("kernel {}, recorded of {}", emulated.kernel, device.kernel)));
    }
    if emulated.pattern != device.pattern {
        return Err(named("NaN, infinities, empty rows or the keep mask differ".into()));
    }
    if call.exact && emulated.o != device.o {
        return Err(named("O differs, though any order of sums gives it".into()));
    }
    let (host, problem) = (&ran.host, &*ran.host.problem);
    let (inputs, logits) = (host.inputs(), logits(host));
    let mut rows = BTreeMap::new();
    let mut agreement = Agreement::default();
    for (at, place) in places(host, seed(call)).into_iter().enumerate() {
        let [span, head, row, dim] = place;
        let exact = match rows.entry((span, head, row)) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => {
                let span = host.spans[span as usize];
                let exact = forward_rows(problem, &inputs, span, head, &[row], Precision::Exact);
                entry.insert(exact.map_err(|error| named(error.to_string()))?)
            }
        };
        let most = bound(problem, exact.o[dim as usize], exact.spread[dim as usize], exact.lse[0], logits);
        let read = |bits: u32| problem.dtypes.o.read(&bits.to_le_bytes());
        let single = |bits: u32| f64::from(f32::from_bits(bits));
        let mut hold = |what: &str, bits: [u32; 2], values: [f64; 2], most: f64| {
            let equal = bits[0] == bits[1];
            let share = if equal { 0.0 } else { (values[0] - values[1]).abs() / most };
            agreement = agreement.and(Agreement { compared: 1, equal: equal.into(), worst: share });
            // NaN is not at most 1 either.
            if share <= 1.0 {
                return Ok(());
            }
            Err(named(format!(
                "{what} at sequence {span} head {head} row {row} dim {dim}: emulated {:e}, device {:e}, at most {most:e} apart",
                values[0], values[1]
            )))
        };
        let o = [emulated.o_bits[at], device.o_bits[at]];
        hold("o", o, o.map(read), most.o)?;
        if let (Some(&ours), Some(&theirs)) = (emulated.lse_bits.get(at), device.lse_bits.get(at)) {
            hold("lse", [ours, theirs], [single(ours), single(theirs)], most.lse)?;
        }
    }
    Ok(agreement)
}

/// Every call whose name `takes` takes against its record; a call without one fails.
#[must_use]
pub fn compare_all(recording: &Recording, backend: &Device, takes: impl Fn(&str) -> bool) -> Outcome {
    let mut outcome = Outcome::default();
    for call in calls().into_iter().filter(|call| takes(&call.name)) {
        let record = recording.calls.get(&call.name).ok_or_else(|| format!("{}: not recorded", call.name));
        outcome.add(record.and_then(|record| compare(backend, &call, record)));
    }
    outcome
}
