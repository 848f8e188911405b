//! Rows with large scores of Q and K alone, without a bias, have the gradients that follow from their P.
//!
//! The battery judges such rows by the size of what they add, since f32 does not tell most of their scores
//! apart. Here P follows from the inputs whatever the sums round: one key is far above all others, or two are
//! equal to the bit.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use fmha_core::{BwdArgs, BwdProblem, DType, DevBuffer, Device, Dims, FwdProblem, MaskSpec, PlanOptions};
use half::{bf16, f16};

const QUERIES: usize = 70;
const KEYS: usize = 90;
/// Row and key of a score that is far above the rest, by a single product.
const ONE: (usize, usize) = (33, 5);
/// Row and two keys with equal scores, each a single product, far above the rest.
const TWO: (usize, [usize; 2]) = (47, [9, 10]);
/// Row and key of a score far above the rest, whose sum depends on the order of its terms: P is 1 however it is
/// rounded.
const SUM: (usize, usize) = (60, 20);

/// Numbers of sequences, query heads and kv heads.
const HEADS: [usize; 3] = [1, 2, 1];

#[derive(Clone, Copy)]
struct Call {
    dtype: DType,
    mask: &'static str,
    head_dim: usize,
    /// Whether each head has a sink, equal to the bit to the scores of [`ONE`] and [`TWO`]: LSE is as large
    /// in every row.
    sink: bool,
}

impl Call {
    fn dims(&self) -> Dims {
        let [batch, num_heads_q, num_heads_kv] = HEADS.map(|n| n as u32);
        let [head_dim_qk, head_dim_v] = [self.head_dim as u32; 2];
        Dims::batch(batch)
            .seqlens(QUERIES as u32, KEYS as u32)
            .heads(num_heads_q, num_heads_kv)
            .head_dims(head_dim_qk, head_dim_v)
    }

    fn rounded(&self, x: f64) -> f64 {
        match self.dtype {
            DType::F16 => f16::from_f64(x).to_f64(),
            DType::Bf16 => bf16::from_f64(x).to_f64(),
            _ => f64::from(x as f32),
        }
    }
}

/// Tensor of rows, `[batch, seq, head, dim]`.
#[derive(Clone)]
struct Tensor {
    shape: [usize; 4],
    elems: Vec<f64>,
}

impl Tensor {
    fn zeros(shape: [usize; 4]) -> Self {
        Self { shape, elems: vec![0.0; shape.iter().product()] }
    }

    fn row(&mut self, b: usize, s: usize, h: usize) -> &mut [f64] {
        let [_, seq, heads, dim] = self.shape;
        &mut self.elems[((b * seq + s) * heads + h) * dim..][..dim]
    }

    fn at(&self, b: usize, s: usize, h: usize) -> &[f64] {
        let [_, seq, heads, dim] = self.shape;
        &self.elems[((b * seq + s) * heads + h) * dim..][..dim]
    }

    fn bytes(&self, dtype: DType) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &x in &self.elems {
            match dtype {
                DType::F16 => bytes.extend(f16::from_f64(x).to_le_bytes()),
                DType::Bf16 => bytes.extend(bf16::from_f64(x).to_le_bytes()),
                _ => bytes.extend((x as f32).to_le_bytes()),
            }
        }
        bytes
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    dout: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    sink: f64,
    dsink: Tensor,
}

/// Tensors in f64: the inputs, O and LSE of a forward call, and the gradients.
fn tensors(call: &Call) -> Tensors {
    let dims = call.dims();
    let [b, hq, hk] = HEADS;
    let [dim, dim_v] = [call.head_dim; 2];
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut random = |shape: [usize; 4], first: usize| {
        let mut tensor = Tensor::zeros(shape);
        for (at, x) in tensor.elems.iter_mut().enumerate() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *x =
                if at % shape[3] < first { 0.0 } else { f64::from((state >> 33) as u32 % 256) / 128.0 - 1.0 };
        }
        tensor
    };
    // The first two dimensions are reserved for the rows with single products.
    let (mut q, mut k) = (random([b, QUERIES, hq, dim], 2), random([b, KEYS, hk, dim], 0));
    let (v, dout) = (random([b, KEYS, hk, dim_v], 0), random([b, QUERIES, hq, dim_v], 0));
    let scale = 1.0 / f64::from(dims.head_dim_qk).sqrt();
    // LSE in log2 exceeds 2^25, where f32 can not represent it closely.
    let (size, peak) = match call.dtype {
        DType::F16 => (32768.0, 32768.0),
        _ => (f64::powi(2.0, 24), 64.0),
    };
    for batch in 0..b {
        for head in 0..hk {
            k.row(batch, ONE.1, head)[0] = peak;
            TWO.1.into_iter().for_each(|key| k.row(batch, key, head)[1] = peak);
        }
        for head in 0..hq {
            for (row, d) in [(ONE.0, 0), (TWO.0, 1)] {
                q.row(batch, row, head).fill(0.0);
                q.row(batch, row, head)[d] = size;
            }
            let (size, of_key) = (size.min(32768.0), k.at(batch, SUM.1, head * hk / hq).to_vec());
            for (x, k) in q.row(batch, SUM.0, head).iter_mut().zip(of_key).skip(2) {
                *x = call.rounded(*x * 0.1 * size + size * k.signum());
            }
        }
    }
    let mask: MaskSpec = call.mask.parse().unwrap();
    let band = mask.band(dims.seqlen_q, dims.seqlen_k);
    let mut all = Tensors {
        sink: if call.sink { scale * size * peak } else { f64::NEG_INFINITY },
        dsink: Tensor::zeros([1, 1, hq, 1]),
        o: Tensor::zeros(dout.shape),
        lse: Tensor::zeros([b, hq, QUERIES, 1]),
        dq: Tensor::zeros(q.shape),
        dk: Tensor::zeros(k.shape),
        dv: Tensor::zeros(v.shape),
        q,
        k,
        v,
        dout,
    };
    for (batch, head, i) in
        (0..b).flat_map(|b| (0..hq).flat_map(move |h| (0..QUERIES).map(move |i| (b, h, i))))
    {
        let kv = head * hk / hq;
        let (q, dout) = (all.q.at(batch, i, head).to_vec(), all.dout.at(batch, i, head).to_vec());
        let keys: Vec<usize> = (0..KEYS).filter(|&j| band.visible(i as u32, j as u32)).collect();
        let scores: Vec<f64> = keys.iter().map(|&j| scale * dot(&q, all.k.at(batch, j, kv))).collect();
        let top = scores.iter().copied().fold(all.sink, f64::max);
        let of_sink = (all.sink - top).exp();
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum::<f64>() + of_sink;
        all.lse.row(batch, head, i)[0] = top + sum.ln();
        let probs: Vec<f64> = scores.iter().map(|s| (s - top).exp() / sum).collect();
        for (&j, p) in keys.iter().zip(&probs) {
            let v = all.v.at(batch, j, kv).to_vec();
            all.o.row(batch, i, head).iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
        }
        let delta = dot(&dout, all.o.at(batch, i, head));
        all.dsink.row(0, 0, head)[0] -= of_sink / sum * delta;
        for (&j, p) in keys.iter().zip(&probs) {
            let ds = scale * p * (dot(&dout, all.v.at(batch, j, kv)) - delta);
            let k = all.k.at(batch, j, kv).to_vec();
            all.dq.row(batch, i, head).iter_mut().zip(k).for_each(|(dq, k)| *dq += ds * k);
            all.dk.row(batch, j, kv).iter_mut().zip(&q).for_each(|(dk, q)| *dk += ds * q);
            all.dv.row(batch, j, kv).iter_mut().zip(&dout).for_each(|(dv, g)| *dv += p * g);
        }
    }
    all
}

fn gradients(backend: &Device, call: &Call, options: &PlanOptions, t: &Tensors) -> [Vec<f64>; 4] {
    let mut fwd = FwdProblem::batch(call.dtype, call.dims());
    fwd.mask = call.mask.parse().unwrap();
    fwd.score.sink = call.sink;
    let mut problem = BwdProblem::new(fwd).write_dsink(call.sink);
    problem.dtype_grad = DType::F32;
    let plan = backend.plan_bwd(&problem.validate().unwrap(), options).unwrap();
    let memory = backend.memory();
    let upload = |bytes: &[u8]| -> DevBuffer {
        let mut buffer = memory.alloc(bytes.len() as u64).unwrap();
        memory.upload(bytes, &mut buffer).unwrap();
        buffer
    };
    let [q, k, v, o, dout] = [&t.q, &t.k, &t.v, &t.o, &t.dout].map(|x| upload(&x.bytes(call.dtype)));
    let lse = upload(&t.lse.bytes(DType::F32));
    let sizes = [&t.dq, &t.dk, &t.dv, &t.dsink].map(|x| x.elems.len());
    let [mut dq, mut dk, mut dv, mut dsink] = sizes.map(|len| upload(&vec![0xff; 4 * len]));
    let sinks = upload(&Tensor { shape: t.dsink.shape, elems: vec![t.sink; sizes[3]] }.bytes(DType::F32));
    let mut scratch = memory.workspace(plan.workspace()).unwrap();
    let mut args = BwdArgs::new(
        [q.slice(), k.slice(), v.slice()],
        [o.slice(), lse.slice(), dout.slice()],
        [dq.slice_mut(), dk.slice_mut(), dv.slice_mut()],
    )
    .workspace(scratch.as_mut().map(DevBuffer::slice_mut));
    if call.sink {
        (args.score.sink, args.dsink) = (Some(sinks.slice()), Some(dsink.slice_mut()));
    }
    let stream = backend.default_stream();
    plan.run(&mut args, &stream).unwrap();
    stream.synchronize().unwrap();
    [(&dq, sizes[0]), (&dk, sizes[1]), (&dv, sizes[2]), (&dsink, sizes[3])].map(|(buffer, len)| {
        let mut out = vec![0f32; len];
        memory.download(buffer, &mut out).unwrap();
        out.into_iter().map(f64::from).collect()
    })
}

fn holds(backend: &Device, call: &Call, options: &PlanOptions) {
    let t = tensors(call);
    let [dq, dk, dv, dsink] = gradients(backend, call, options, &t);
    let Call { dtype, mask, head_dim, sink } = call;
    let what = format!(
        "{} {:?}, {dtype}, mask {mask}, head_dim {head_dim}, sink {sink}",
        backend.name(),
        options.kernel
    );
    let [b, hq, hk] = HEADS;
    // Largest error of a row over its largest element.
    let off = |found: &[f64], right: &Tensor, at: (usize, usize, usize)| {
        let row = right.at(at.0, at.1, at.2);
        let first = (row.as_ptr() as usize - right.elems.as_ptr() as usize) / size_of::<f64>();
        let size = row.iter().fold(0.0, |size: f64, x| size.max(x.abs()));
        let worst = row
            .iter()
            .zip(&found[first..])
            .map(|(x, y)| (x - y).abs())
            .fold(0.0, |worst: f64, x| if x.is_nan() { f64::INFINITY } else { worst.max(x) });
        // The relative error of 0 is 0 even if the gradient is all zeros, as for a key that a sink outweighs.
        if worst == 0.0 { 0.0 } else { worst / size }
    };
    for batch in 0..b {
        for head in 0..hk {
            for key in [ONE.1, TWO.1[0], TWO.1[1], SUM.1] {
                let off = off(&dv, &t.dv, (batch, key, head));
                assert!(off < 0.03, "{what}: dV of key {key} of head {head} is {off:.2e} of its size off");
            }
            for key in TWO.1 {
                let off = off(&dk, &t.dk, (batch, key, head));
                assert!(off < 0.03, "{what}: dK of key {key} of head {head} is {off:.2e} of its size off");
            }
        }
        for head in 0..hq {
            let of_dq = off(&dq, &t.dq, (batch, TWO.0, head));
            assert!(
                of_dq < 0.03,
                "{what}: dQ of query {} of head {head} is {of_dq:.2e} of its size off",
                TWO.0
            );
            let of_dsink = if *sink { off(&dsink, &t.dsink, (0, 0, head)) } else { 0.0 };
            assert!(of_dsink < 0.03, "{what}: dSink of head {head} is {of_dsink:.2e} of its size off");
        }
    }
    let finite = [dq, dk, dv].iter().all(|x| x.iter().all(|x| x.is_finite()));
    assert!(finite, "{what}: a gradient is not finite");
}

const SMALL: Call = Call { dtype: DType::Bf16, mask: "0", head_dim: 64, sink: false };
const SINK: Call = Call { sink: true, mask: "b", ..SMALL };

#[test]
fn far_products_have_their_gradients_on_the_cpu() {
    let backend = fmha::Backend::Cpu.open().unwrap();
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for mask in ["0", "b"] {
            holds(&backend, &Call { dtype, mask, ..SMALL }, &PlanOptions::default());
        }
        holds(&backend, &Call { dtype, ..SINK }, &PlanOptions::default());
    }
}

#[test]
fn far_products_have_their_gradients_on_an_emulated_sm_90a() {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    let backend = fmha_cuda::open(0, Some("sm_90a")).unwrap();
    for kernel in ["simt", "sm80"] {
        holds(&backend, &SINK, &PlanOptions::default().kernel(kernel));
    }
    for call in [SMALL, SINK, Call { dtype: DType::F16, mask: "b", head_dim: 256, ..SMALL }] {
        holds(&backend, &call, &PlanOptions::default().kernel("sm90"));
    }
}

#[test]
fn far_products_have_their_gradients_on_an_emulated_gfx942() {
    if let Some(backend) = amd::open("gfx942", "far products") {
        holds(&backend, &SINK, &PlanOptions::default().kernel("simt"));
        holds(&backend, &SINK, &PlanOptions::default().kernel("cdna_bwd"));
    }
}
