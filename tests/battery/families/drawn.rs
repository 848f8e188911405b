//! Random cases from a seed, in addition to the battery's: problems over the contract (except parts of a larger
//! call, merging and laws), from one row to several blocks and tiles, to test a device for any length of time.

mod lay;

use std::fmt;
use std::str::FromStr;

use fmha_core::{
    Append, CacheUse, DType, Descale, Dims, FwdProblem, ProblemError, Rotary, RotaryPairs, Strides,
};

use super::backward::random_options;
use super::decode::in_pages;
use super::edges::masked;
use super::recipe::{INITS, fp8_scales, random_levels, recipe};
use crate::case::{Backward, Body, Case, seed_of};
use crate::init::{Init, mix};
use crate::tensors::{Data, Lengths};

/// Most multiplications of Q K and P V that a case's f64 reference may need.
const AFFORDABLE: u64 = 1 << 29;
/// Most multiplications of a backward case, which has five products in place of two.
const AFFORDABLE_BACKWARD: u64 = AFFORDABLE / 4;
const MOST_CASES: u32 = 100_000;

/// Seed and number of cases, written `SEED` (for 1000 cases) or `SEED:COUNT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drawn {
    seed: u64,
    count: u32,
}

impl FromStr for Drawn {
    type Err = ProblemError;

    fn from_str(text: &str) -> Result<Self, ProblemError> {
        let (seed, count) = text.split_once(':').unwrap_or((text, "1000"));
        match (seed.parse(), count.parse()) {
            (Ok(seed), Ok(count)) if (1..=MOST_CASES).contains(&count) => Ok(Self { seed, count }),
            _ => Err(ProblemError::new(
                "drawn",
                format!("drawn `{text}` is not SEED or SEED:COUNT with COUNT from 1 to {MOST_CASES}"),
            )),
        }
    }
}

impl fmt::Display for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.seed, self.count)
    }
}

impl Drawn {
    /// The cases, named `drawn/SEED_INDEX/...`. The first cases of a seed do not depend on the count.
    #[must_use]
    pub fn cases(self) -> Vec<Case> {
        (0..self.count).map(|index| self.case(index)).collect()
    }

    fn case(self, index: u32) -> Case {
        let name = format!("drawn/{}_{index:05}", self.seed);
        let mut draw = Draw(seed_of(&name));
        match draw.below(8) {
            0 => small(&name, &mut draw),
            1..=3 => draw.forward(&name),
            4 | 5 => draw.backward(&name),
            _ => draw.over_a_cache(&name),
        }
    }
}

/// Draws a small problem like the battery's, with other combinations of levels.
fn small(name: &str, draw: &mut Draw) -> Case {
    let made = recipe(&random_levels(draw.word(), 0), draw.word());
    Case::forward(format!("{name}/{}", made.label), made.problem, made.lengths, made.data)
}

/// Generator of random choices.
struct Draw(u64);

impl Draw {
    fn word(&mut self) -> u64 {
        self.0 = mix(self.0);
        self.0
    }

    /// Draws one of `0..count`.
    fn below(&mut self, count: u32) -> u32 {
        ((self.word() >> 16) % u64::from(count)) as u32
    }

    fn one_in(&mut self, count: u32) -> bool {
        self.below(count) == 0
    }

    fn of<T: Copy, const N: usize>(&mut self, choices: [T; N]) -> T {
        choices[self.below(N as u32) as usize]
    }

    /// Draws a number in `1..=most`, about equally often below 16 and between 16 and 256.
    fn length(&mut self, most: u32) -> u32 {
        let bits = 1 + self.below(most.ilog2() + 1);
        1 + self.below((1u32 << bits).min(most))
    }

    fn fraction(&mut self) -> f32 {
        self.below(1 << 20) as f32 / (1 << 20) as f32
    }

    /// Draws a head dimension: mostly one whose rows are a multiple of 16 bytes.
    fn head_dim(&mut self, most: u32) -> u32 {
        match self.below(8) {
            0 => 1 + self.below(most),
            1..=3 => self.of([64, 128, 96, 192, 256]).min(most),
            _ => 8 * (1 + self.below(most / 8)),
        }
    }

    fn dims(&mut self, (most_q, most_k): (u32, u32)) -> Dims {
        let head_dim_qk = self.head_dim(256);
        let (seqlen_q, num_heads_kv) = (self.length(most_q), self.length(4));
        Dims::batch(self.length(4))
            .seqlens(
                seqlen_q,
                if self.one_in(3) && most_q == most_k { seqlen_q } else { self.length(most_k) },
            )
            .heads(num_heads_kv * self.of([1, 1, 2, 3, 4, 8]), num_heads_kv)
            .head_dims(head_dim_qk, if self.one_in(5) { self.head_dim(256) } else { head_dim_qk })
    }

    /// Draws a mask of any shape whose numbers are about as large as the lengths.
    fn mask(&mut self, dims: Dims) -> String {
        let longest = dims.seqlen_q.max(dims.seqlen_k);
        let near = |draw: &mut Self| if draw.one_in(4) { draw.below(4) } else { draw.length(longest) };
        let sinks = if self.one_in(3) { format!(",{}", self.length(80)) } else { String::new() };
        match self.below(10) {
            0 | 1 => "0".to_owned(),
            2 | 3 => "b".to_owned(),
            4 => "t".to_owned(),
            5 => format!("g:{},{}{sinks}", self.either_sign(longest), self.either_sign(longest)),
            6 => format!("{}:-1,{}{sinks}", self.of(["t", "b"]), near(self)),
            7 => format!("{}:{},-1{sinks}", self.of(["t", "b"]), near(self)),
            8 => format!("b:{},0{sinks}", near(self)),
            _ => format!("{}:{},{}{sinks}", self.of(["t", "b"]), near(self), near(self)),
        }
    }

    fn either_sign(&mut self, most: u32) -> i32 {
        let number = self.length(most).cast_signed();
        if self.one_in(2) { -number } else { number }
    }

    /// Draws modifiers of the scores: mostly none, sometimes all.
    fn modifiers(&mut self, problem: &mut FwdProblem) {
        if self.one_in(5) {
            problem.score.softcap = Some(self.of([0.5, 2.0, 30.0, 50.0]));
        }
        if self.one_in(5) {
            problem.score.softmax_scale = Some(self.of([0.31, -0.2, 0.0, 1.0, 0.01]));
        }
        problem.score.sink = self.one_in(5);
        if self.one_in(5) {
            problem.dropout.p_drop = 0.05 + 0.9 * self.fraction();
            problem.dropout.write_keep_mask = self.one_in(4);
        }
        self.bias(problem);
    }

    fn dtype(&mut self) -> DType {
        use DType::{Bf16, E4m3Fn, E4m3Fnuz, E5m2, F16};
        self.of([F16, F16, F16, Bf16, Bf16, Bf16, Bf16, E4m3Fn, E4m3Fn, E5m2, E4m3Fnuz])
    }

    fn data(&mut self, problem: &FwdProblem, backward: bool) -> Data {
        let few_keys = problem.dims.seqlen_k < 300;
        // A V in FP8 with a scale, in K's rows or appended is not constant.
        let constant = problem.cache == CacheUse::default();
        let init = match self.below(4) {
            0 if !backward && !few_keys => self.of(Init::GROWING),
            1 => Some(self.of(INITS)).filter(|&init| constant || init != Init::ConstantV).unwrap_or_default(),
            _ => Init::Normal,
        };
        Data { init, seed: self.word(), ..Data::default() }
    }

    /// Draws a problem of some blocks, without a cache.
    fn problem(&mut self, affordable: u64) -> (String, FwdProblem, Lengths) {
        let mut dims = self.dims((1500, 1500));
        if self.one_in(16) {
            (dims.head_dim_qk, dims.head_dim_v) =
                self.of([(512, 512), (576, 512), (576, 576), (384, 384), (320, 256), (257, 300)]);
        }
        let dims = affordably(dims, affordable);
        let (dtype, mask) = (self.dtype(), self.mask(dims));
        let mut problem = masked(dtype, dims, &mask);
        problem.write_lse = !self.one_in(3);
        let lengths = self.sequences(&mut problem);
        self.layouts(lengths.totals, &mut problem);
        if dtype.is_fp8() {
            problem.dtypes.v = self.of([dtype, dtype, DType::F16, DType::Bf16]);
            fp8_scales(self.of([Descale::None, Descale::PerTensor, Descale::PerKvHead]), &mut problem);
        }
        problem.dtypes.o = if self.one_in(6) { DType::F32 } else { problem.dtypes.o };
        problem.scales.scale_o = problem.dtypes.o.is_fp8();
        self.modifiers(&mut problem);
        (label(&problem, &mask), problem, lengths)
    }

    fn forward(&mut self, name: &str) -> Case {
        let (label, problem, lengths) = self.problem(AFFORDABLE);
        let data = self.data(&problem, false);
        Case::forward(format!("{name}/{label}"), problem, lengths, data)
    }

    fn backward(&mut self, name: &str) -> Case {
        let (label, mut fwd, lengths) = self.problem(AFFORDABLE_BACKWARD);
        fwd.dropout.write_keep_mask = false;
        (fwd.dtypes.o, fwd.scales.scale_o) =
            (if fwd.dtypes.o.is_fp8() { DType::Bf16 } else { fwd.dtypes.o }, false);
        let data = self.data(&fwd, true);
        let (mut problem, deterministic) = random_options(fwd, lengths.totals, self.word());
        self.layouts_of_gradients(lengths.totals, &mut problem);
        let body = Backward { problem, lengths, data, deterministic, planted: Vec::new() };
        Case { name: format!("{name}/backward/{label}"), body: Body::Backward(Box::new(body)) }
    }

    /// Draws a call with few queries, or with a chunk of queries, over a cache.
    fn over_a_cache(&mut self, name: &str) -> Case {
        let most_q = self.of([1, 1, 4, 16, 64, 300]);
        let mut dims = self.dims((most_q, 3000));
        let v_in_k = self.one_in(6);
        if v_in_k {
            (dims.num_heads_q, dims.num_heads_kv) = (self.of([1, 5, 16, 40, 128]), 1);
            (dims.head_dim_qk, dims.head_dim_v) =
                self.of([(576, 512), (576, 512), (192, 128), (64, 64), (320, 256)]);
        } else if self.one_in(8) {
            dims.head_dim_qk = 8 * (33 + self.below(40));
            dims.head_dim_v = if self.one_in(2) { dims.head_dim_qk } else { self.head_dim(512) };
        }
        let dims = affordably(dims, AFFORDABLE);
        let of_16_bits = [DType::F16, DType::Bf16, DType::Bf16];
        let dtype = match self.one_in(6) {
            true => self.of([DType::E4m3Fn, DType::E4m3Fn, DType::E5m2, DType::E4m3Fnuz]),
            false => self.of(of_16_bits),
        };
        let tree = self.one_in(8);
        let mask = if tree { "b".to_owned() } else { self.mask(dims) };
        let mut problem = masked(dtype, dims, &mask);
        problem.write_lse = self.one_in(2);
        (problem.layout.seqused_k, problem.cache.tree_mask) = (true, tree);
        if dtype.is_fp8() {
            problem.dtypes.v = if v_in_k || self.one_in(2) { dtype } else { self.of(of_16_bits) };
            let descale = self.of([Descale::None, Descale::PerTensor, Descale::PerKvHead]);
            fp8_scales(descale, &mut problem);
        } else if self.one_in(3) {
            problem.cache.dtype = Some(self.of([DType::E4m3Fn, DType::E4m3Fn, DType::E5m2]));
            let descale = self.of([Descale::None, Descale::PerTensor, Descale::PerKvHead]);
            problem.scales.descale_k = descale;
            problem.scales.descale_v = descale;
        }
        self.modifiers(&mut problem);
        let appends = problem.cache.dtype.is_none() && self.one_in(4);
        let new = if appends { self.length(dims.seqlen_q.min(dims.seqlen_k)) } else { 0 };
        let most = dims.seqlen_k - new;
        let seqused_k = (0..dims.batch).map(|_| self.below(most + 1).cast_signed()).collect();
        let mut lengths = Lengths { seqused_k, ..Lengths::default() };
        self.queries_of_a_cache(&mut problem, &mut lengths);
        if tree {
            let rows = lengths.totals.total_q.unwrap_or(dims.batch * dims.seqlen_q);
            let words = rows * problem.tree_mask_words();
            lengths.tree_mask = (0..words).map(|_| (self.word() >> 32) as u32 as i32).collect();
        }
        if self.one_in(2) {
            let size = if self.one_in(4) { self.length(300) } else { self.of([1, 16, 32, 64, 128]) };
            (problem, lengths) = in_pages(problem, size, lengths, name);
            if self.one_in(3) {
                problem.strides.k = Strides::bhsd(problem.shape_k());
                problem.strides.v = Strides::bhsd(problem.shape_v());
            }
        }
        if v_in_k {
            (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        }
        if lengths.totals.total_q.is_some() {
            self.rows_of_queries(lengths.totals, &mut problem);
        }
        if self.one_in(4) && dims.head_dim_qk >= 2 {
            let dim = 2 * (1 + self.below(dims.head_dim_qk / 2));
            let pairs = self.of([RotaryPairs::Interleaved, RotaryPairs::Half]);
            let max_pos = dims.seqlen_k + dims.seqlen_q;
            problem.cache.rotary = Some(Rotary { dim, pairs, max_pos, dtype: self.of([DType::F32, dtype]) });
        }
        let packs_new = new > 1 && self.one_in(3);
        problem.cache.append = (new > 0).then(|| match packs_new {
            true => Append::packed(&problem, new),
            false => Append::batch(&problem, new),
        });
        if packs_new {
            let rows = (0..dims.batch).map(|at| (if at == 0 { new } else { self.below(new + 1) }, 0));
            let packed = Lengths::packed(&rows.collect::<Vec<_>>());
            (lengths.totals.total_new, lengths.cu_seqlens_new) = (packed.totals.total_q, packed.cu_seqlens_q);
        }
        let of = label(&problem, &mask);
        let data = self.data(&problem, false);
        Case::forward(format!("{name}/cache/{of}"), problem, lengths, data)
    }
}

/// Sizes whose reference is affordable, with fewer sequences, heads and at last queries than `dims`. They
/// have more keys where a handful of scores says little about a root mean square of errors (all of a row's
/// elements share the errors of its P).
fn affordably(mut dims: Dims, most: u64) -> Dims {
    let rows = dims.batch * dims.num_heads_q * dims.seqlen_q;
    dims.seqlen_k = dims.seqlen_k.max(256 / rows.max(1));
    let cost = |dims: &Dims| {
        let scores = u64::from(dims.batch * dims.num_heads_q) * u64::from(dims.seqlen_q * dims.seqlen_k);
        scores * u64::from(dims.head_dim_qk + dims.head_dim_v)
    };
    while cost(&dims) > most {
        if dims.batch > 1 {
            dims.batch -= 1;
        } else if dims.num_heads_kv > 1 {
            dims.num_heads_q /= dims.num_heads_kv;
            dims.num_heads_kv = 1;
        } else if dims.num_heads_q > 1 {
            dims.num_heads_q /= 2;
        } else {
            dims.seqlen_q = dims.seqlen_q.div_ceil(2);
        }
    }
    dims
}

fn label(problem: &FwdProblem, mask: &str) -> String {
    let Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v } = problem.dims;
    let dtype = problem.dtypes.qk;
    format!(
        "{dtype}/b{batch}/d{head_dim_qk}x{head_dim_v}/h{num_heads_q}kv{num_heads_kv}/s{seqlen_q}x{seqlen_k}/{mask}"
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::soundness;
    use super::*;

    #[test]
    fn every_case_of_a_seed_is_sound_and_decided_by_it() {
        let drawn: Drawn = "7:3000".parse().unwrap();
        let cases = drawn.cases();
        for case in &cases {
            assert_eq!(soundness(case), Ok(()), "{}", case.name);
        }
        let backward = cases.iter().filter(|case| matches!(case.body, Body::Backward(_))).count();
        assert!((600..900).contains(&backward), "{backward}");
        let names: std::collections::HashSet<_> = cases.iter().map(|case| &case.name).collect();
        assert_eq!(names.len(), cases.len());
        let fewer: Drawn = "7:20".parse().unwrap();
        assert!(fewer.cases().iter().zip(&cases).all(|(a, b)| format!("{a:?}") == format!("{b:?}")));
        let other: Drawn = "8:20".parse().unwrap();
        assert!(other.cases().iter().zip(&cases).any(|(a, b)| a.problem() != b.problem()));
    }

    #[test]
    fn a_text_that_is_no_seed_is_refused_with_it() {
        for text in ["", "x", "3:0", "3:100001", "-1", "3:4:5"] {
            let error = text.parse::<Drawn>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
        assert_eq!("3".parse::<Drawn>().unwrap().to_string(), "3:1000");
    }
}
