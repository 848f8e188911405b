//! The Blackwell kernel on the test double of the driver, step by step as it was asked for: lengths, heads, one kv head for
//! all by stride 0, one token on a cache, segments merged by their LSE. `FMHA_EMULATE_MODE=hb` holds each of its
//! accesses to happens-before as well. Needs NVRTC; where there is none, a test says `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::sync::OnceLock;

use fmha_conformance::case::Case;
use fmha_conformance::run::{Options, Outcome};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::{
    DType, DevBuffer, Dims, FmhaBackend, FwdArgs, FwdProblem, MaskSpec, PlanOptions, Stream, Totals,
};
use fmha_cuda::CudaBackend;
use half::bf16;

/// The emulated device, or why there is none.
fn device() -> Option<&'static CudaBackend> {
    static DEVICE: OnceLock<Option<CudaBackend>> = OnceLock::new();
    let open = || match fmha_cuda::nvrtc::nvrtc() {
        Ok(_) => Some(CudaBackend::open(0, Some("sm_100a")).unwrap()),
        Err(reason) => {
            println!("absent: {reason}");
            None
        }
    };
    DEVICE.get_or_init(open).as_ref()
}

/// The kernel by name: nothing stands in for it.
fn sm100() -> PlanOptions {
    PlanOptions { kernel: Some("sm100".to_owned()), ..PlanOptions::default() }
}

fn problem(seqlen_q: u32, seqlen_k: u32, heads: u32, heads_kv: u32, mask: MaskSpec) -> FwdProblem {
    let dims = Dims {
        batch: 1,
        seqlen_q,
        seqlen_k,
        num_heads_q: heads,
        num_heads_kv: heads_kv,
        head_dim_qk: 128,
        head_dim_v: 128,
    };
    FwdProblem { mask, write_lse: true, ..FwdProblem::batch(DType::Bf16, dims) }
}

/// Held to the reference in f64.
fn passes(name: &str, problem: FwdProblem) {
    let Some(backend) = device() else { return };
    let data = Data { seed: u64::from(problem.dims.seqlen_q), ..Data::default() };
    let case = Case::forward(name, problem, Lengths::default(), data);
    let options = Options { plan: sm100(), ..Options::default() };
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
    (mqa.k.head, mqa.v.head) = (0, 0);
    passes("stride 0", mqa);
    passes("one kv head", problem(130, 140, 4, 1, MaskSpec::CAUSAL));
}

#[test]
fn one_token_reads_a_cache() {
    for keys in [1, 127, 300] {
        passes(&format!("{keys} keys"), problem(1, keys, 8, 2, MaskSpec::CAUSAL));
    }
}

fn filled(elems: u64, salt: u64) -> Vec<bf16> {
    (0..elems).map(|i| bf16::from_f64(((i * i * 37 + i * 11 + salt) % 101) as f64 / 50.0 - 1.0)).collect()
}

/// O and LSE of a call.
fn attend(backend: &CudaBackend, problem: FwdProblem, [q, k, v]: [&[bf16]; 3]) -> (Vec<f64>, Vec<f64>) {
    let plan = backend.plan_fwd(&problem.validate().unwrap(), &sm100()).unwrap();
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
    backend.run_fwd(&plan, &mut args, Stream::DEFAULT).unwrap();
    memory.synchronize(Stream::DEFAULT).unwrap();
    let download = |buffer: &DevBuffer| {
        let mut bytes = vec![0; buffer.bytes() as usize];
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
    let (whole, whole_lse) = attend(backend, of(first + rest), [&q, &k, &v]);
    let (o_1, lse_1) = attend(backend, of(first), [&q, &k[..cut], &v[..cut]]);
    let (o_2, lse_2) = attend(backend, of(rest), [&q, &k[cut..], &v[cut..]]);
    for (at, &expected) in whole.iter().enumerate() {
        // O is [token, head, dim], LSE [head, token].
        let (token, head) = (at / row as usize, at / dim as usize % heads as usize);
        let (a, b) = (lse_1[head * tokens as usize + token], lse_2[head * tokens as usize + token]);
        let lse = a.max(b) + ((a - a.max(b)).exp() + (b - a.max(b)).exp()).ln();
        assert!((lse - whole_lse[head * tokens as usize + token]).abs() < 1e-5, "{token}, {head}");
        let merged = o_1[at] * (a - lse).exp() + o_2[at] * (b - lse).exp();
        // P, then O, are rounded to bf16, in the parts and in the whole; no value is larger than 1.
        assert!((merged - expected).abs() < 4.0 / 512.0, "{at}: {merged} beside {expected}");
    }
}

/// A row's bits depend on the row alone: one token, or the same token as the last of many, beside other sequences or not.
#[test]
fn one_token_has_the_bits_of_the_last_of_many() {
    let Some(backend) = device() else { return };
    let (tokens, keys, heads, dim) = (130, 200, 2, 128);
    let row = (heads * dim) as usize;
    let q = filled(tokens * row as u64, 1);
    let [k, v] = [2, 3].map(|salt| filled(keys * row as u64, salt));
    let many = problem(tokens as u32, keys as u32, heads, heads, MaskSpec::CAUSAL);
    let one = problem(1, keys as u32, heads, heads, MaskSpec::CAUSAL);
    let (of_many, lse_many) = attend(backend, many, [&q, &k, &v]);
    let (of_one, lse_one) = attend(backend, one, [&q[q.len() - row..], &k, &v]);
    assert_eq!(of_one, of_many[of_many.len() - row..]);
    let last = |head: usize| lse_many[(head + 1) * tokens as usize - 1];
    assert_eq!(lse_one, (0..heads as usize).map(last).collect::<Vec<_>>());
}
