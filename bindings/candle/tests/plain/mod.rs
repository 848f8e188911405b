//! Reference attention in f64, written in candle's own operations, and random inputs for it.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::sync::OnceLock;

use candle_core::{DType, Device, Result, Tensor};
use rand::Rng;
use rand::rngs::StdRng;

/// Device of the tests' tensors: the first CUDA device with the feature `cuda`, otherwise the CPU.
pub fn device() -> Device {
    // One handle for all threads: tensors of two handles are of two devices to candle.
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| Device::cuda_if_available(0).unwrap()).clone()
}

/// Values that the tests compare: heads of one sequence, `[seqlen, heads, head_dim]`, in f64.
pub struct Plain {
    pub scale: f64,
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub softcap: Option<f64>,
    pub slopes: Option<Vec<f64>>,
}

impl Plain {
    pub fn new(head_dim: usize) -> Self {
        Self { scale: 1.0 / (head_dim as f64).sqrt(), left: None, right: None, softcap: None, slopes: None }
    }

    pub fn causal(head_dim: usize) -> Self {
        Self { right: Some(0), ..Self::new(head_dim) }
    }

    /// O `[seqlen_q, heads, head_dim]` and LSE `[heads, seqlen_q]`.
    pub fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (seqlen_q, heads, _) = q.dims3()?;
        let (seqlen_k, heads_kv, _) = k.dims3()?;
        let shared = |t: &Tensor| -> Result<Tensor> {
            let (seq, _, dim) = t.dims3()?;
            let t = t.transpose(0, 1)?.unsqueeze(1)?;
            t.broadcast_as((heads_kv, heads / heads_kv, seq, dim))?.reshape((heads, seq, dim))
        };
        let (q, k, v) = (q.transpose(0, 1)?.contiguous()?, shared(k)?, shared(v)?);
        let mut scores = (q.matmul(&k.transpose(1, 2)?.contiguous()?)? * self.scale)?;
        if let Some(softcap) = self.softcap {
            scores = ((scores / softcap)?.tanh()? * softcap)?;
        }
        let mut added = vec![0f64; heads * seqlen_q * seqlen_k];
        for (at, added) in added.iter_mut().enumerate() {
            let (head, i, j) = (at / (seqlen_q * seqlen_k), at / seqlen_k % seqlen_q, at % seqlen_k);
            let distance = (i + seqlen_k) as i64 - seqlen_q as i64 - j as i64;
            let hidden = self.left.is_some_and(|left| distance > left as i64)
                || self.right.is_some_and(|right| -distance > right as i64);
            if let Some(slopes) = &self.slopes {
                *added -= slopes[head] * distance.abs() as f64;
            }
            if hidden {
                *added = f64::NEG_INFINITY;
            }
        }
        let scores = (scores + Tensor::from_vec(added, (heads, seqlen_q, seqlen_k), q.device())?)?;
        // A row without a key has a maximum of -inf, which must not be subtracted.
        let max = scores.max_keepdim(2)?.detach().maximum(-1e300)?;
        let p = scores.broadcast_sub(&max)?.exp()?;
        let sum = p.sum_keepdim(2)?;
        let lse = (sum.log()? + max)?.squeeze(2)?;
        let o = p.broadcast_div(&sum.maximum(1e-100)?)?.matmul(&v)?;
        Ok((o.transpose(0, 1)?.contiguous()?, lse))
    }
}

pub fn random(rng: &mut StdRng, dims: &[usize]) -> Tensor {
    let count = dims.iter().product();
    let elems: Vec<f32> = (0..count).map(|_| rng.random_range(-1.5..1.5)).collect();
    Tensor::from_vec(elems, dims, &device()).unwrap()
}

pub fn f64s(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest difference, -inf and -inf being equal; NaN where either has one.
pub fn difference(left: &Tensor, right: &Tensor) -> f64 {
    assert_eq!(left.dims(), right.dims());
    let pairs = f64s(left).into_iter().zip(f64s(right));
    pairs.map(|(left, right)| if left == right { 0.0 } else { (left - right).abs() }).fold(
        0.0,
        |most, next| {
            if next.is_nan() || most.is_nan() { f64::NAN } else { most.max(next) }
        },
    )
}

pub fn close(left: &Tensor, right: &Tensor, tolerance: f64) {
    let found = difference(left, right);
    assert!(found <= tolerance, "they differ by {found}");
}
