//! One problem on the device, and its expected output.

use fmha::{
    DType, DevBuffer, DevSlice, DevSliceMut, Device, Dims, Error, FwdArgs, FwdProblem, MaskSpec, ScoreSums,
    ValidFwd, bf16,
};
use fmha_core::reference::{Inputs, Precision, forward_rows};
use fmha_core::seq::spans;

/// Q, K, V and O on the device, and rows of the expected O.
pub(crate) struct Problem {
    pub(crate) dims: Dims,
    pub(crate) causal: bool,
    pub(crate) valid: ValidFwd,
    pub(crate) q: DevBuffer,
    pub(crate) k: DevBuffer,
    pub(crate) v: DevBuffer,
    pub(crate) o: DevBuffer,
    expected: Vec<Expected>,
}

/// Rows of one head, computed by definition in float64.
struct Expected {
    i_batch: u32,
    i_head: u32,
    rows: Vec<u32>,
    o: Vec<f64>,
    /// Bound of an error: twice the largest error of the unfused algorithm in bf16, plus that of rounding the result.
    bound: f64,
}

impl Problem {
    /// Makes a problem of the given sizes with normally distributed random numbers.
    pub(crate) fn new(device: &Device, dims: Dims, causal: bool) -> Result<Self, Error> {
        let mask = if causal { MaskSpec::CAUSAL } else { MaskSpec::NONE };
        let valid = FwdProblem::batch(DType::Bf16, dims).mask(mask).validate()?;
        let count = valid.shape_q().num_elems() as usize;
        let [q, k, v] = [1, 2, 3].map(|seed| normal(count, seed));
        let memory = device.memory();
        let expected = expected(&valid, [&q, &k, &v])?;
        let (q, k, v, o) = (
            memory.place(&q)?,
            memory.place(&k)?,
            memory.place(&v)?,
            memory.alloc_of(DType::Bf16, count as u64)?,
        );
        Ok(Self { dims, causal, valid, q, k, v, o, expected })
    }

    /// FLOPs of the call: two for each multiply-add that the mask leaves.
    pub(crate) fn flops(&self) -> f64 {
        let Dims { batch, num_heads_q, seqlen_q, head_dim_qk, .. } = self.dims;
        let (n, heads) = (f64::from(seqlen_q), f64::from(batch * num_heads_q));
        let pairs = if self.causal { n * (n + 1.0) / 2.0 } else { n * n };
        4.0 * heads * pairs * f64::from(head_dim_qk)
    }

    /// Arguments of the library's own call.
    pub(crate) fn args(&mut self) -> FwdArgs<'_> {
        FwdArgs::new(self.q.slice(), self.k.slice(), self.v.slice(), self.o.slice_mut())
    }

    /// Fills O with NaN, so that elements which a kernel leaves out are noticed.
    pub(crate) fn spoil(&mut self, device: &Device) -> Result<(), Error> {
        let bytes = vec![0xffu8; self.valid.shape_q().num_elems() as usize * 2];
        device.memory().upload(&bytes, &mut self.o)
    }

    /// Compares O with the rows in float64. Returns the largest error and its bound, or the place where the bound is
    /// exceeded.
    pub(crate) fn check(&self, device: &Device) -> Result<(f64, f64), String> {
        let mut o = vec![bf16::ZERO; self.valid.shape_q().num_elems() as usize];
        let download = device.memory().download(&self.o, &mut o);
        download.map_err(|error| error.to_string())?;
        if let Some(at) = o.iter().position(|o| !o.is_finite()) {
            return Err(format!("O[{at}] is {}", o[at]));
        }
        let Dims { seqlen_q, num_heads_q, head_dim_v, .. } = self.dims;
        let mut most = (0.0, f64::INFINITY);
        for Expected { i_batch, i_head, rows, o: expected, bound } in &self.expected {
            for (&row, expected) in rows.iter().zip(expected.chunks(head_dim_v as usize)) {
                let first =
                    ((i_batch * seqlen_q + row) * num_heads_q + i_head) as usize * head_dim_v as usize;
                for (d, (&expected, o)) in expected.iter().zip(&o[first..]).enumerate() {
                    let error = (o.to_f64() - expected).abs();
                    if error > *bound {
                        let at = format!("O[{i_batch}, {row}, {i_head}, {d}]");
                        return Err(format!(
                            "{at} is {o} and should be {expected:.6}: {error:.2e} > {bound:.2e}"
                        ));
                    }
                    if error / bound > most.0 / most.1 {
                        most = (error, *bound);
                    }
                }
            }
        }
        Ok(most)
    }
}

/// Expected rows of the first and the last head: all rows of a short sequence, some 60 of a long one.
fn expected(problem: &ValidFwd, [q, k, v]: [&[bf16]; 3]) -> Result<Vec<Expected>, Error> {
    let mut unread: Vec<bf16> = Vec::new();
    let args =
        FwdArgs::new(DevSlice::host(q), DevSlice::host(k), DevSlice::host(v), DevSliceMut::host(&mut unread));
    let inputs = Inputs::from(&args);
    let n = problem.dims.seqlen_q;
    let mut rows: Vec<u32> = (0..n).step_by((n as usize / 67).max(1)).chain([n - 1]).collect();
    rows.dedup();
    let spans = spans(problem, &args.seq)?;
    let heads = [(spans.first(), 0), (spans.last(), problem.dims.num_heads_q - 1)];
    let of_head = |(span, i_head): (Option<&_>, u32)| {
        let Some(&span) = span else { return Ok(None) };
        let exact = forward_rows(problem, &inputs, span, i_head, &rows, Precision::Exact)?;
        let same = forward_rows(problem, &inputs, span, i_head, &rows, Precision::AsInput(ScoreSums::F32))?;
        let error = exact.o.iter().zip(&same.o).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
        let largest = exact.o.iter().fold(0.0, |most: f64, o| most.max(o.abs()));
        let bound = 2.0 * error + DType::Bf16.unit_roundoff() * largest;
        Ok(Some(Expected { i_batch: span.i_batch, i_head, rows: rows.clone(), o: exact.o, bound }))
    };
    heads.into_iter().map(of_head).filter_map(Result::transpose).collect()
}

/// Normally distributed numbers (Box and Muller), equal for equal seeds on every machine.
fn normal(count: usize, seed: u64) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 + 0.5) / (1u64 << 24) as f32
    };
    let one = |(a, b): (f32, f32)| (-2.0 * a.ln()).sqrt() * (std::f32::consts::TAU * b).cos();
    (0..count).map(|_| bf16::from_f32(one((uniform(), uniform())))).collect()
}
