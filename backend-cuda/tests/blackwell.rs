//! The Blackwell kernel on the test double of the driver, by features: lengths, heads, one kv head for all by
//! stride 0, one token on a cache, segments merged by their LSE. `FMHA_EMULATE_MODE=hb` also checks each
//! access for happens-before. Needs NVRTC; without it a test prints `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::sync::OnceLock;

use fmha_conformance::captured::{Gradients, run_16_bits};
use fmha_conformance::case::{Body, Case, Forward, Plant};
use fmha_conformance::run::{Options, Outcome};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{
    DType, DevBuffer, Device, Dims, FwdArgs, FwdProblem, KvLayout, MaskSpec, PlanOptions, QLayout, Strides,
    Totals, VLayout,
};
use half::bf16;

/// The emulated device; `None`, with a message, if there is no NVRTC.
fn device() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let open = || match fmha_cuda::nvrtc::nvrtc() {
        Ok(_) => Some(fmha_cuda::open(0, Some("sm_100a")).unwrap()),
        Err(reason) => {
            println!("absent: {reason}");
            None
        }
    };
    DEVICE.get_or_init(open).as_ref()
}

/// Options that name the kernel, so that no fallback runs.
fn sm100() -> PlanOptions {
    PlanOptions::default().kernel("sm100")
}

fn problem(seqlen_q: u32, seqlen_k: u32, heads: u32, heads_kv: u32, mask: MaskSpec) -> FwdProblem {
    let dims = Dims::batch(1).seqlens(seqlen_q, seqlen_k).heads(heads, heads_kv).head_dim(128);
    FwdProblem::batch(DType::Bf16, dims).mask(mask).write_lse(true)
}

/// Checks O and LSE against the reference in f64.
fn passes(name: &str, problem: FwdProblem) {
    passes_with(name, problem, Lengths::default(), Plant::Nothing);
}

fn passes_with(name: &str, problem: FwdProblem, lengths: Lengths, plant: Plant) {
    passes_by(name, sm100(), problem, lengths, plant);
}

fn passes_by(name: &str, plan: PlanOptions, problem: FwdProblem, lengths: Lengths, plant: Plant) {
    let Some(backend) = device() else { return };
    let data = Data { seed: u64::from(problem.dims.seqlen_q), ..Data::default() };
    let forward = Forward { problem, lengths, data, plant };
    let case = Case { name: name.to_owned(), body: Body::Forward(Box::new(forward)) };
    let options = Options { plan, ..Options::default() };
    let (outcome, text) = case.run(backend, &options);
    assert!(matches!(outcome, Outcome::Passed), "{name}: {text}");
}

#[test]
fn one_head_of_1_32_33_and_128_tokens() {
    for tokens in [1, 32, 33, 128] {
        passes(&format!("{tokens} tokens"), problem(tokens, tokens, 1, 1, MaskSpec::CAUSAL));
    }
}

#[test]
fn eight_and_thirty_two_heads() {
    for heads in [8, 32] {
        passes(&format!("{heads} heads"), problem(33, 33, heads, heads, MaskSpec::CAUSAL));
    }
}

#[test]
fn every_query_head_reads_one_kv_head_by_stride_0() {
    let mut mqa = problem(130, 140, 4, 4, MaskSpec::CAUSAL);
    (mqa.strides.k.head, mqa.strides.v.head) = (0, 0);
    passes("stride 0", mqa);
    passes("one kv head", problem(130, 140, 4, 1, MaskSpec::CAUSAL));
}

#[test]
fn one_token_reads_a_cache() {
    for keys in [1, 127, 300] {
        passes(&format!("{keys} keys"), problem(1, keys, 8, 2, MaskSpec::CAUSAL));
    }
}

/// Options for parts of 256 keys, whatever the cost model would choose.
fn in_parts() -> PlanOptions {
    with_tile(&[("split_keys", "256"), ("shares", "0")])
}

/// A cache long enough to be read in parts of 256 keys, with masks that hide all of a part, sequences that end
/// before a part, sinks, packed heads, wider rows, and FP8. Hidden keys may hold NaN.
#[test]
fn a_long_cache_is_read_in_parts_that_are_merged() {
    let Some(backend) = device() else { return };
    let one_token = problem(1, 700, 8, 2, MaskSpec::CAUSAL).validate().unwrap();
    let plan = backend.plan_fwd(&one_token, &in_parts()).unwrap();
    let names: Vec<_> = plan.steps().iter().map(|step| step.kernel.clone()).collect();
    assert_eq!(names, ["sm100", "sm100_merge"]);
    let passes_with =
        |name: &str, problem, lengths, plant| passes_by(name, in_parts(), problem, lengths, plant);
    let passes = |name: &str, problem| passes_with(name, problem, Lengths::default(), Plant::Nothing);
    for (tokens, keys, mask) in [(1, 700, "0"), (3, 512, "b"), (1, 1100, "b:300,0"), (5, 700, "t")] {
        passes(&format!("{tokens} x {keys} {mask}"), problem(tokens, keys, 8, 2, mask.parse().unwrap()));
    }
    let dims = Dims { batch: 3, ..problem(2, 700, 2, 1, MaskSpec::NONE).dims };
    let used = FwdProblem::batch(DType::Bf16, dims).mask("b:200,0".parse().unwrap()).seqused_k(true);
    let lengths = Lengths { seqused_k: vec![0, 300, 700], ..Lengths::default() };
    for plant in [Plant::Nothing, Plant::HiddenKeys] {
        passes_with("lengths", used.clone().write_lse(true), lengths.clone(), plant);
    }
    let sinks = problem(1, 600, 4, 1, MaskSpec::CAUSAL).sink(true);
    passes("a learnable sink", sinks);
    for (dtype, dim) in [(DType::E4m3Fn, 128), (DType::F16, 144), (DType::Bf16, 50), (DType::Bf16, 250)] {
        let dims = Dims { head_dim_qk: dim, head_dim_v: dim, ..problem(1, 600, 2, 1, MaskSpec::NONE).dims };
        let whole_blocks = with_tile(&[("split_keys", "384"), ("shares", "0")]);
        let wide = FwdProblem::batch(dtype, dims).dtype_o(DType::F16);
        passes_by(&format!("{dtype}, {dim}"), whole_blocks, wide, Lengths::default(), Plant::Nothing);
    }
}

/// A sequence that is read in parts of fixed length has equal bits alone and beside other sequences.
#[test]
fn a_sequence_in_parts_has_the_bits_that_it_has_alone() {
    let Some(backend) = device() else { return };
    let (keys, heads, dim) = (600, 2, 128);
    let row = (heads * dim) as usize;
    let alone = problem(1, keys, heads, heads, MaskSpec::CAUSAL);
    let dims = Dims { batch: 3, ..alone.dims };
    let beside = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
    let [q, k, v] =
        [(1, 1), (keys, 2), (keys, 3)].map(|(rows, salt)| filled(3 * u64::from(rows) * row as u64, salt));
    let (of_all, _) = attend(backend, beside, &in_parts(), [&q, &k, &v]);
    let cache = row * keys as usize;
    let own = [&q[row..2 * row], &k[cache..2 * cache], &v[cache..2 * cache]];
    let (of_one, _) = attend(backend, alone, &in_parts(), own);
    assert_eq!(of_one, of_all[row..2 * row]);
}

#[test]
fn maxima_by_the_loads_are_refused_where_loads_have_none() {
    let Some(backend) = device() else { return };
    let tile = vec![("load_max".to_owned(), "1".to_owned())];
    let options = sm100().tile(tile);
    let refused = backend.plan_fwd(&problem(1, 1, 1, 1, MaskSpec::NONE).validate().unwrap(), &options);
    let text = refused.err().unwrap().to_string();
    assert!(text.contains("load_max=1") && text.contains("sm_103a"), "{text}");
}

/// O in FP8 is multiplied by `scale_o` and rounded once, also if keys are in parts.
#[test]
fn o_of_8_bits_is_scaled_and_rounded_once() {
    for (tokens, keys, dim) in [(140, 150, 128), (1, 600, 128), (40, 50, 64)] {
        for dtype_o in [DType::E4m3Fn, DType::E5m2] {
            let dims = Dims {
                head_dim_qk: dim,
                head_dim_v: dim,
                ..problem(tokens, keys, 2, 1, MaskSpec::NONE).dims
            };
            let fp8 = FwdProblem::batch(dtype_o, dims);
            let mut fp8 = fp8.clone().dtype_o(dtype_o).scale_o(true).mask(MaskSpec::CAUSAL);
            // Rows whose stride is not a multiple of 16 bytes are stored byte by byte.
            fp8.strides.o.seq += i64::from(tokens == 40);
            passes(&format!("{tokens} x {keys}, {dim}, {dtype_o}"), fp8);
        }
    }
}

fn filled(elems: u64, salt: u64) -> Vec<bf16> {
    (0..elems).map(|i| bf16::from_f64(((i * i * 37 + i * 11 + salt) % 101) as f64 / 50.0 - 1.0)).collect()
}

/// O and LSE that the kernel computes for a call.
fn attend(
    backend: &Device,
    problem: FwdProblem,
    options: &PlanOptions,
    [q, k, v]: [&[bf16]; 3],
) -> (Vec<f64>, Vec<f64>) {
    let plan = backend.plan_fwd(&problem.validate().unwrap(), options).unwrap();
    let memory = backend.memory();
    let upload = |x: &[bf16]| {
        let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut buffer = memory.alloc(bytes.len() as u64).unwrap();
        memory.upload(&bytes, &mut buffer).unwrap();
        buffer
    };
    let (q, k, v) = (upload(q), upload(k), upload(v));
    let mut o = memory.alloc(plan.problem().shape_o().num_elems() * 2).unwrap();
    let mut lse = memory.alloc(plan.problem().extents(Totals::NONE).lse_elems * 4).unwrap();
    let mut workspace = memory.workspace(plan.workspace()).unwrap();
    let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
    args.lse = Some(lse.slice_mut());
    args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
    plan.run(&mut args, &backend.default_stream()).unwrap();
    backend.synchronize().unwrap();
    let download = |buffer: &DevBuffer| {
        let mut bytes = vec![0u8; buffer.bytes() as usize];
        memory.download(buffer, &mut bytes).unwrap();
        bytes
    };
    let o = download(&o).chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect();
    let words = download(&lse);
    let lse =
        words.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect();
    (o, lse)
}

#[test]
fn two_segments_merged_by_their_lse_are_the_whole() {
    let Some(backend) = device() else { return };
    let (tokens, heads, dim, first, rest) = (5, 4, 128, 150, 83);
    let row = u64::from(heads * dim);
    let of = |keys| problem(tokens, keys, heads, heads, MaskSpec::NONE);
    let q = filled(u64::from(tokens) * row, 1);
    let [k, v] = [2, 3].map(|salt| filled(u64::from(first + rest) * row, salt));
    let cut = (u64::from(first) * row) as usize;
    let (whole, whole_lse) = attend(backend, of(first + rest), &sm100(), [&q, &k, &v]);
    let (o_1, lse_1) = attend(backend, of(first), &sm100(), [&q, &k[..cut], &v[..cut]]);
    let (o_2, lse_2) = attend(backend, of(rest), &sm100(), [&q, &k[cut..], &v[cut..]]);
    for (at, &expected) in whole.iter().enumerate() {
        // O is [token, head, dim], LSE [head, token].
        let (token, head) = (at / row as usize, at / dim as usize % heads as usize);
        let (a, b) = (lse_1[head * tokens as usize + token], lse_2[head * tokens as usize + token]);
        let lse = a.max(b) + ((a - a.max(b)).exp() + (b - a.max(b)).exp()).ln();
        assert!((lse - whole_lse[head * tokens as usize + token]).abs() < 1e-5, "{token}, {head}");
        let merged = o_1[at] * (a - lse).exp() + o_2[at] * (b - lse).exp();
        // P and then O are rounded to bf16, both in the parts and in the whole; no value exceeds 1.
        assert!((merged - expected).abs() < 4.0 / 512.0, "{at}: {merged} beside {expected}");
    }
}

/// Batch-invariant plans: the bits of a row depend on the row alone. One token and the last of many have equal
/// bits, with other sequences in the batch or without.
#[test]
fn one_token_has_the_bits_of_the_last_of_many() {
    let Some(backend) = device() else { return };
    let invariant = sm100().batch_invariant(true);
    // There are so many keys that those of one token would be split; then those of every call are.
    let part = u64::from(fmha_kernels_cuda::split::FIXED_KEYS.unsigned_abs());
    for (tokens, keys) in [(130, 520), (140, part + 72)] {
        let (heads, dim) = (2, 128);
        let row = (heads * dim) as usize;
        let q = filled(tokens * row as u64, 1);
        let [k, v] = [2, 3].map(|salt| filled(keys * row as u64, salt));
        let many = problem(tokens as u32, keys as u32, heads, heads, MaskSpec::CAUSAL);
        let one = problem(1, keys as u32, heads, heads, MaskSpec::CAUSAL);
        let plan = backend.plan_fwd(&many.clone().validate().unwrap(), &invariant).unwrap().to_string();
        assert_eq!(plan.contains(&format!("of every sequence in parts of {part}")), keys > part, "{plan}");
        let (of_many, lse_many) = attend(backend, many, &invariant, [&q, &k, &v]);
        let (of_one, lse_one) = attend(backend, one, &invariant, [&q[q.len() - row..], &k, &v]);
        assert_eq!(of_one, of_many[of_many.len() - row..]);
        let last = |head: usize| lse_many[(head + 1) * tokens as usize - 1];
        assert_eq!(lse_one, (0..heads as usize).map(last).collect::<Vec<_>>());
    }
}

fn wide(dtype: DType, dims: [u32; 2], seqlens: [u32; 2], mask: &str) -> FwdProblem {
    let [seqlen_q, seqlen_k] = seqlens;
    let [head_dim_qk, head_dim_v] = dims;
    let dims = Dims { head_dim_qk, head_dim_v, ..problem(seqlen_q, seqlen_k, 2, 1, MaskSpec::NONE).dims };
    FwdProblem::batch(dtype, dims).mask(mask.parse().unwrap()).write_lse(true).dtype_o(DType::Bf16)
}

/// Options for the kernel with these tile fields.
fn with_tile(words: &[(&str, &str)]) -> PlanOptions {
    sm100().tile(words.iter().copied())
}

/// Pairs of CTAs that compute as one: rows that end in the first CTA, in the second, and beyond one pair; blocks
/// that one of the two does not see; both layouts of V, padding that may hold NaN, FP8.
#[test]
fn pairs_of_ctas_compute_as_one() {
    let Some(backend) = device() else { return };
    // The kernel uses pairs of CTAs only without a mask or with many keys.
    for (mask, keys, pairs) in
        [("0", 300, true), ("b", 300, false), ("b", 8192, true), ("b:100,0", 8192, false)]
    {
        let problem = wide(DType::Bf16, [256, 256], [300, keys], mask).validate().unwrap();
        let plan = backend.plan_fwd(&problem, &sm100()).unwrap().to_string();
        assert_eq!(plan.contains("pairs of CTAs"), pairs, "{mask}, {keys} keys: {plan}");
    }
    let passes = |name: &str, problem, lengths, plant| {
        passes_by(name, with_tile(&[("cluster", "2"), ("block_n", "128")]), problem, lengths, plant);
    };
    let plain = |name: &str, problem| passes(name, problem, Lengths::default(), Plant::Nothing);
    for (seqlens, mask) in
        [([129, 140], "0"), ([300, 500], "t"), ([257, 70], "b"), ([400, 650], "b:130,0"), ([200, 0], "0")]
    {
        plain(&format!("{seqlens:?} {mask}"), wide(DType::Bf16, [256, 256], seqlens, mask));
    }
    plain("unlike dimensions", wide(DType::F16, [200, 248], [280, 200], "b:100,50,3"));
    plain("8 bits", wide(DType::E4m3Fn, [256, 256], [200, 300], "b"));
    let mut columns = wide(DType::Bf16, [256, 224], [200, 264], "b");
    columns.layout.v = VLayout::ColMajor;
    columns.strides.v = Strides::bhds(columns.shape_v());
    plain("column-major V", columns);
    let sequences = [(300, 200), (0, 30), (140, 333)];
    let dims = Dims { batch: 3, ..wide(DType::Bf16, [256, 256], [300, 333], "b").dims };
    let packed = FwdProblem::group(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
    passes("packed", packed, Lengths::packed(&sequences), Plant::HiddenKeys);
}

/// A pair of CTAs and single CTAs with equal blocks of keys give equal bits.
#[test]
fn a_pair_of_ctas_gives_the_bits_of_single_ones() {
    let Some(backend) = device() else { return };
    let (tokens, keys, heads, dim) = (390_u32, 450_u32, 2, 128);
    let row = u64::from(heads * dim);
    let q = filled(u64::from(tokens) * row, 1);
    let [k, v] = [2, 3].map(|salt| filled(u64::from(keys) * row, salt));
    for mask in ["0", "b", "b:100,0"] {
        let of = problem(tokens, keys, heads, heads, MaskSpec::NONE).mask(mask.parse().unwrap());
        let single = attend(backend, of.clone(), &with_tile(&[("cluster", "1")]), [&q, &k, &v]);
        let pair = attend(backend, of, &with_tile(&[("cluster", "2")]), [&q, &k, &v]);
        assert!(single == pair, "{mask}");
    }
}

/// Threads copy operands whose strides TMA does not support: FP8, both layouts of V, packed sequences whose keys begin
/// anywhere.
#[test]
fn strides_that_tma_does_not_take_are_copied() {
    for (dtype, dtype_v) in
        [(DType::E4m3Fn, DType::E4m3Fn), (DType::E5m2, DType::Bf16), (DType::Bf16, DType::Bf16)]
    {
        for gap in [1, 4, 8] {
            let mut odd = wide(dtype, [72, 100], [140, 150], "b");
            odd.dtypes.v = dtype_v;
            odd.strides.k.seq += gap;
            odd.strides.v.seq += gap;
            passes(&format!("{dtype}, {dtype_v}, rows {gap} apart"), odd.clone());
            odd.layout.v = VLayout::ColMajor;
            odd.strides.v = Strides::bhds(odd.shape_v());
            odd.strides.v.dim += gap;
            passes(&format!("{dtype}, {dtype_v}, columns {gap} apart"), odd);
        }
        let dims = Dims { batch: 2, ..wide(dtype, [64, 64], [130, 201], "b").dims };
        let mut packed = FwdProblem::group(dtype, dims).mask(MaskSpec::CAUSAL).dtype_o(DType::F16);
        packed.dtypes.v = dtype_v;
        packed.layout.v = VLayout::ColMajor;
        (packed.strides.v.dim, packed.strides.v.head, packed.strides.v.seq) = (335, 335 * 64, 1);
        passes_with("packed columns", packed, Lengths::packed(&[(130, 133), (40, 201)]), Plant::HiddenKeys);
    }
}

/// Packed short queries are read in parts too: parts are laid out by the maximal lengths, whatever the sequences'
/// own.
#[test]
fn packed_short_queries_are_read_in_parts() {
    let Some(backend) = device() else { return };
    let sequences = [(3, 1100), (0, 700), (1, 0), (2, 255), (3, 513)];
    let dims = Dims { batch: 5, ..problem(3, 1100, 4, 1, MaskSpec::NONE).dims };
    for plant in [Plant::Nothing, Plant::HiddenKeys] {
        let packed = FwdProblem::group(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        for (shares, how) in [("0", "in parts of 256"), ("7", "in 7 equal shares")] {
            let options = with_tile(&[("split_keys", "256"), ("shares", shares)]);
            let plan = backend.plan_fwd(&packed.clone().validate().unwrap(), &options).unwrap();
            assert!(plan.steps().len() == 2 && plan.to_string().contains(how), "{plan}");
            passes_by("packed", options, packed.clone(), Lengths::packed(&sequences), plant);
        }
    }
}

/// Few tokens over pages. TMA reads blocks within one page, blocks of several pages, and pages of several blocks; pages
/// whose rows form no box, and column-major V, are copied by threads. Also groups whose heads do not divide 128, and
/// more rows than one tile has.
#[test]
fn tokens_read_pages_by_boxes_and_by_copies() {
    let Some(backend) = device() else { return };
    for (page_size, tokens, (heads, heads_kv), shares, how) in [
        (8, 1, (8, 2), "8", "boxes of 8 keys"),
        (48, 3, (7, 1), "0", "boxes of 16 keys"),
        (64, 16, (10, 2), "8", "boxes of 64 keys"),
        (256, 2, (28, 4), "0", "boxes of 128 keys"),
        (256, 30, (5, 1), "8", "boxes of 128 keys"),
        (3, 2, (6, 2), "8", "copies of 16 bytes"),
    ] {
        let dims = Dims { batch: 3, ..problem(tokens, 700, heads, heads_kv, MaskSpec::NONE).dims };
        let kv = KvLayout::Paged { page_size };
        let paged =
            FwdProblem::new(QLayout::Batch, kv, DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        let paged = paged.seqused_k(true);
        // The block table has pages in random order, and one page that no sequence uses.
        let of_sequence = 700_u32.div_ceil(page_size);
        let num_pages = 3 * of_sequence + 1;
        let block_table = (0..3 * of_sequence).map(|n| (n * 101 % num_pages).cast_signed()).collect();
        let totals = Totals { num_pages: Some(num_pages), ..Totals::default() };
        let seqused_k = vec![tokens.cast_signed(), 300, 700];
        let lengths = Lengths { totals, block_table, seqused_k, ..Lengths::default() };
        let options = with_tile(&[("split_keys", "128"), ("shares", shares)]);
        let plan = backend.plan_fwd(&paged.clone().validate().unwrap(), &options).unwrap().to_string();
        assert!(plan.contains(how), "{page_size}: {plan}");
        let name = format!("pages of {page_size}, {tokens} tokens, {heads} heads, {shares} shares");
        passes_by(&name, options, paged, lengths, Plant::HiddenKeys);
    }
}

/// Runs every `step`-th check of scores and masks as code, with gradients of captured tensors.
fn functions(step: usize) {
    let Some(device) = device() else { return };
    run_16_bits(device, &sm100(), Gradients::Captured, step).unwrap();
}

#[test]
fn functions_and_gradients_of_what_they_capture() {
    functions(39);
}

#[test]
#[ignore = "compiles a hundred kernels"]
fn functions_in_every_form() {
    functions(1);
}
