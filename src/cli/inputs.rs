//! Made-up tensors, or the user's own, in host memory.

use std::collections::BTreeMap;

use fmha::core::dropout::philox4x32_10;
use fmha::{Bias, BwdProblem, DType, Descale, FwdProblem, Shape, Strides, ValidFwd};

use super::data::OwnData;
use super::failure::Failure;
use super::job::Aligned;
use super::setup::Setup;

/// How made-up numbers are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Init {
    Uniform,
    Normal,
    UniformInteger,
    NormalInteger,
    Sine,
}

/// Reads `uf`, `nf`, `ui`, `ni`, `tf`, and Composable Kernel's older `0`, `1`, `2`.
pub(super) fn init(text: &str) -> Result<Init, String> {
    match text {
        "uf" | "1" => Ok(Init::Uniform),
        "nf" => Ok(Init::Normal),
        "ui" | "0" => Ok(Init::UniformInteger),
        "ni" => Ok(Init::NormalInteger),
        "tf" | "2" => Ok(Init::Sine),
        _ => Err(format!("init `{text}` is no distribution (known: uf, nf, ui, ni, tf)")),
    }
}

/// Every input of a problem, by the name of its argument.
pub(super) struct HostTensors(BTreeMap<&'static str, Aligned>);

impl HostTensors {
    /// Q, K, V are the user's where there are any; all else is made up from `seed`.
    pub(super) fn new(setup: &Setup, own: Option<OwnData>, init: Init, seed: u64) -> Result<Self, Failure> {
        let fwd = &setup.fwd;
        let mut all = BTreeMap::new();
        let mut source = Source { init, seed, stream: 0 };
        if let Some(own) = own {
            for (name, tensor) in [("q", own.q), ("k", own.k), ("v", own.v)] {
                all.insert(name, Aligned::of(name, &tensor.bytes)?);
            }
        } else {
            for (name, strides, shape, dtype) in [
                ("q", fwd.q, fwd.shape_q(), fwd.dtype_qk),
                ("k", fwd.k, fwd.shape_k(), fwd.dtype_qk),
                ("v", fwd.v, fwd.shape_v(), fwd.dtype_v),
            ] {
                all.insert(name, source.tensor(name, strides, shape, dtype)?);
            }
        }
        source.score_operands(fwd, &mut all)?;
        if let Some(bwd) = &setup.bwd {
            source.output_gradients(bwd, &mut all)?;
        }
        Ok(Self(all))
    }

    pub(super) fn take(&mut self, name: &str) -> Option<Aligned> {
        self.0.remove(name)
    }
}

/// Where made-up numbers come from: each tensor has a stream of its own.
struct Source {
    init: Init,
    seed: u64,
    stream: u32,
}

impl Source {
    fn score_operands(
        &mut self,
        fwd: &FwdProblem,
        all: &mut BTreeMap<&'static str, Aligned>,
    ) -> Result<(), Failure> {
        let dims = fwd.dims;
        let heads = u64::from(dims.num_heads_q);
        match fwd.bias {
            Bias::None => {}
            Bias::Elementwise(bias) => {
                let shape = fwd.shape_bias(bias.broadcast);
                all.insert("bias", self.tensor("bias", bias.strides, shape, bias.dtype)?);
            }
            Bias::Alibi { per_batch } => {
                let count = heads * if per_batch { u64::from(dims.batch) } else { 1 };
                // The slopes of Press et al. ("Train Short, Test Long", 2022): 2^(-8 (h + 1) / heads).
                let slope = |i: u64| (-8.0 * ((i % heads) + 1) as f64 / heads as f64).exp2();
                all.insert("alibi_slopes", numbers("alibi_slopes", count, slope)?);
            }
        }
        if fwd.sink {
            let draw = self.draw(Init::Normal);
            all.insert("sink", numbers("sink", heads, draw)?);
        }
        for (name, kind) in
            [("descale_q", fwd.descale_q), ("descale_k", fwd.descale_k), ("descale_v", fwd.descale_v)]
        {
            if kind != Descale::None {
                let draw = self.draw(Init::Uniform);
                let count = kind.num_elems(dims.batch, dims.num_heads_kv);
                all.insert(name, numbers(name, count, |i| 0.5 + draw(i))?);
            }
        }
        if fwd.scale_o {
            all.insert("scale_o", numbers("scale_o", 1, |_| 16.0)?);
        }
        Ok(())
    }

    fn output_gradients(
        &mut self,
        bwd: &BwdProblem,
        all: &mut BTreeMap<&'static str, Aligned>,
    ) -> Result<(), Failure> {
        let fwd = &bwd.fwd;
        all.insert("dout", self.tensor("dout", bwd.dout, fwd.shape_o(), fwd.dtype_o)?);
        if bwd.has_dlse {
            let draw = self.draw(Init::Normal);
            all.insert("dlse", numbers("dlse", fwd.lse_elems(), draw)?);
        }
        Ok(())
    }

    /// A tensor of `shape`; holes between its elements, if there are any, hold numbers too.
    fn tensor(
        &mut self,
        name: &'static str,
        strides: Strides,
        shape: Shape,
        dtype: DType,
    ) -> Result<Aligned, Failure> {
        let mut tensor = Aligned::zeros(name, ValidFwd::extent_bytes(strides, shape, dtype))?;
        let draw = self.draw(self.init);
        let size = dtype.size_bytes() as usize;
        for (i, elem) in tensor.as_mut().chunks_exact_mut(size).enumerate() {
            dtype.write(draw(i as u64), elem);
        }
        Ok(tensor)
    }

    /// The next stream of numbers, by index.
    fn draw(&mut self, init: Init) -> impl Fn(u64) -> f64 + use<> {
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let stream = self.stream;
        self.stream += 1;
        move |i| {
            let [a, b, ..] = philox4x32_10([i as u32, (i >> 32) as u32, stream, 0x666d_6861], key);
            let unit = |word: u32| (f64::from(word) + 0.5) / 4_294_967_296.0;
            // Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958.
            let normal = || (-2.0 * unit(a).ln()).sqrt() * (std::f64::consts::TAU * unit(b)).cos();
            match init {
                Init::Uniform => unit(a),
                Init::Normal => normal(),
                Init::UniformInteger => f64::from(a % 7) - 3.0,
                Init::NormalInteger => normal().round(),
                Init::Sine => (i as f64).sin(),
            }
        }
    }
}

/// `count` f32.
fn numbers(name: &'static str, count: u64, number: impl Fn(u64) -> f64) -> Result<Aligned, Failure> {
    let mut tensor = Aligned::zeros(name, count * 4)?;
    for (i, elem) in tensor.as_mut().chunks_exact_mut(4).enumerate() {
        DType::F32.write(number(i as u64), elem);
    }
    Ok(tensor)
}
