//! One sequence and one query head: its operands as plain matrices, and its scores.

use num_traits::Float;

use super::cache::Cached;
use super::code::HeadCode;
use crate::args::{BwdArgs, CacheArgs, DevSlice, FwdArgs, MaskArgs, ScoreArgs, SecondArgs, SeqArgs};
use crate::dropout::{KeepMask, keep_scale};
use crate::dtype::DType;
use crate::error::ProblemError;
use crate::layout::Strides;
use crate::lists::HostLists;
use crate::mask::{MaskBand, MaskSpec};
use crate::masks::{HostMasks, Shown};
use crate::plan::{ScoreSums, in_order};
use crate::problem::FwdProblem;
use crate::score::{Bias, Descale};
use crate::second::SecondCall;
use crate::seq::SeqSpan;
use crate::tree::TreeMask;

/// Which arithmetic the reference uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Everything is computed in f64, and nothing is rounded.
    Exact,
    /// The unfused algorithm in the input's type: sums and softmax in f32, P (backward: dS too) rounded to the
    /// input's type, results to the output's type. Scores are summed like in the backend's matrix unit.
    AsInput(ScoreSums),
}

/// Operands of attention in host memory.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Memory of Q, which the call reads.
    pub q: DevSlice<'a>,
    /// Memory of K, which the call reads.
    pub k: DevSlice<'a>,
    /// Memory of V, which the call reads.
    pub v: DevSlice<'a>,
    /// Lengths and offsets of the sequences, which [`spans`](crate::seq::spans) has checked.
    pub seq: SeqArgs<'a>,
    /// Operands of a call with a KV cache. New keys are read from here, even if the cache already contains them.
    pub cache: CacheArgs<'a>,
    /// Scales of K's and V's rows, for rows that are in the cache.
    pub cache_scales: [Option<DevSlice<'a>>; 2],
    /// Operands of the score.
    pub score: ScoreArgs<'a>,
    /// Tensors of the masks.
    pub masks: MaskArgs<'a>,
    /// Operands of a second cache, if there is one.
    pub second: Option<SecondArgs<'a>>,
}

impl<'a> From<&'a FwdArgs<'_>> for Inputs<'a> {
    fn from(args: &'a FwdArgs<'_>) -> Self {
        let (q, k, v) = (args.q, args.k_slice(), args.v_slice());
        let FwdArgs { seq, cache, score, masks, second, .. } = *args;
        let cache_scales = args.scale_slices();
        Self { q, k, v, seq, cache, cache_scales, score, masks, second: second.copied() }
    }
}

impl<'a> From<&BwdArgs<'a>> for Inputs<'a> {
    fn from(args: &BwdArgs<'a>) -> Self {
        let cache = CacheArgs::default();
        let BwdArgs { q, k, v, seq, score, masks, .. } = *args;
        Self { q, k, v, seq, cache, cache_scales: [None; 2], score, masks, second: None }
    }
}

/// One query head of one sequence, its matrices gathered and descaled.
pub(super) struct Head<'a, T> {
    pub(super) span: SeqSpan,
    pub(super) i_head: u32,
    pub(super) head_dim_qk: usize,
    pub(super) head_dim_v: usize,
    /// Q of the head, `[seqlen_q, head_dim_qk]`.
    pub(super) q: Vec<T>,
    /// K, `[seqlen_k, head_dim_qk]`, followed by a second cache's rows.
    pub(super) k: Vec<T>,
    /// V of the head, `[seqlen_k, head_dim_v]`.
    pub(super) v: Vec<T>,
    pub(super) softmax_scale: T,
    pub(super) softcap: Option<T>,
    pub(super) sink: Option<T>,
    pub(super) band: MaskBand,
    tree: Option<TreeMask<'a>>,
    /// The keys that each query lists, ascending; with two caches, all its visible keys, the second cache's
    /// numbered after the first's.
    lists: Option<Vec<Vec<u32>>>,
    masks: Option<HostMasks<'a>>,
    pub(super) code: Option<HeadCode<'a>>,
    problem: &'a FwdProblem,
    bias: Option<&'a [u8]>,
    /// ALiBi's slope, and the diagonal from which its distance counts.
    alibi: Option<(T, i64)>,
    keep: Option<KeepMask>,
    precision: Precision,
}

impl<'a, T: Float> Head<'a, T> {
    pub(super) fn gather(
        problem: &'a FwdProblem,
        inputs: &Inputs<'a>,
        span: SeqSpan,
        i_head: u32,
        precision: Precision,
    ) -> Result<Self, ProblemError> {
        let dims = problem.dims;
        let i_head_kv = i_head / problem.gqa_ratio();
        let score = &inputs.score;
        let descale = |name, slice: &Option<DevSlice<'a>>, kind: Descale| match kind {
            Descale::None => Ok(T::one()),
            _ => f32_at(name, slice.as_ref(), kind.index(span.i_batch, i_head_kv, dims.num_heads_kv)),
        };
        let cached = Cached { problem, inputs, span, rounds: precision != Precision::Exact };
        let alibi = match problem.score.bias {
            Bias::Alibi { per_batch } => {
                let i_batch = if per_batch { span.i_batch as usize } else { 0 };
                let index = i_batch * dims.num_heads_q as usize + i_head as usize;
                let slope = f32_at("alibi_slopes", score.alibi_slopes.as_ref(), index)?;
                Some((slope, problem.alibi_diagonal(span.seqlen_q, span.seqlen_k)))
            }
            _ => None,
        };
        let bias = match problem.score.bias {
            Bias::Elementwise(_) => Some(host("bias", score.bias.as_ref())?),
            _ => None,
        };
        let sink = if problem.score.sink {
            Some(f32_at("sink", score.sink.as_ref(), i_head as usize)?)
        } else {
            None
        };
        let lists = HostLists::of(problem, &inputs.seq)?.map(|lists| {
            let row = |i| {
                let mut keys = vec![];
                lists.row(&span, i_head_kv, i, &mut keys);
                keys.sort_unstable();
                keys
            };
            (0..span.seqlen_q).map(row).collect()
        });
        let seed = score.seed(problem)?;
        let keep = problem.drops().then(|| problem.keep(seed, span.i_batch, i_head));
        let mut head = Self {
            span,
            i_head,
            head_dim_qk: dims.head_dim_qk as usize,
            head_dim_v: dims.head_dim_v as usize,
            q: cached.queries(i_head, descale("descale_q", &score.descale_q, problem.scales.descale_q)?)?,
            k: cached.keys(i_head_kv, descale("descale_k", &score.descale_k, problem.scales.descale_k)?)?,
            v: cached.values(i_head_kv, descale("descale_v", &score.descale_v, problem.scales.descale_v)?)?,
            softmax_scale: real(f64::from(problem.resolved_softmax_scale())),
            softcap: problem.score.softcap.map(|softcap| real(f64::from(softcap))),
            sink,
            band: problem.band(span.seqlen_q, span.seqlen_k),
            tree: TreeMask::of(problem, &inputs.cache, &inputs.seq),
            lists,
            masks: HostMasks::of(problem, &inputs.masks, inputs.seq.totals.total_q)?,
            code: HeadCode::of(problem, inputs, span, i_head, precision)?,
            problem,
            bias,
            alibi,
            keep,
            precision,
        };
        if let Some(second) = SecondCall::of(problem, inputs.second.as_ref(), &inputs.seq)? {
            head.join(&second, inputs)?;
        }
        Ok(head)
    }

    /// Appends the rows of a second cache to the first's, and lists each query's visible keys in both.
    fn join(&mut self, second: &SecondCall<'a>, inputs: &Inputs<'a>) -> Result<(), ProblemError> {
        let first: Vec<Vec<u32>> = (0..self.span.seqlen_q).map(|i| self.visible(i)).collect();
        let spans = second.spans()?;
        let Some(&span) = spans.get(self.span.i_batch as usize) else { return Ok(()) };
        let inputs = Inputs {
            k: second.args.k,
            v: second.args.v.unwrap_or(second.args.k),
            seq: second.seq,
            cache: CacheArgs::default(),
            score: ScoreArgs::default(),
            masks: second.masks(),
            second: None,
            ..*inputs
        };
        let i_head_kv = self.i_head / second.problem.gqa_ratio();
        let rounds = !self.is_exact();
        let cached = Cached { problem: &second.problem, inputs: &inputs, span, rounds };
        self.k.extend(cached.keys(i_head_kv, T::one())?);
        self.v.extend(cached.values(i_head_kv, T::one())?);
        let lists = HostLists::of(&second.problem, &second.seq)?;
        let masks = HostMasks::of(&second.problem, &inputs.masks, second.seq.totals.total_q)?;
        let row = |(i, mut keys): (usize, Vec<u32>)| {
            let (i, mut of_second) = (i as u32, vec![]);
            match &lists {
                Some(lists) => lists.row(&span, i_head_kv, i, &mut of_second),
                None => of_second.extend(0..span.seqlen_k),
            }
            if let Some(masks) = &masks {
                of_second.retain(|&j| masks.head(&span, self.i_head).shown(i, j) != Shown::No);
            }
            of_second.sort_unstable();
            keys.extend(of_second.iter().map(|j| j + self.span.seqlen_k));
            keys
        };
        self.lists = Some(first.into_iter().enumerate().map(row).collect());
        // The lists already leave out keys of the first cache that band and masks hide.
        (self.masks, self.band) = (None, MaskSpec::NONE.band(self.span.seqlen_q, self.num_keys() as u32));
        Ok(())
    }

    /// Number of rows of K, including those of a second cache.
    pub(super) fn num_keys(&self) -> usize {
        self.k.len() / self.head_dim_qk
    }

    /// Whether nothing is rounded.
    pub(super) fn is_exact(&self) -> bool {
        self.precision == Precision::Exact
    }

    /// The keys that query `i` sees, ascending; a key that is listed twice is returned twice.
    pub(super) fn visible(&self, i: u32) -> Vec<u32> {
        let mut visible = self.inside_band(i);
        if self.problem.asks_pairs() {
            visible.retain(|&j| self.shows(i, j));
        }
        visible
    }

    /// How often query `i` sees key `j`: once, or as often as its list names the key.
    pub(super) fn times_seen(&self, i: u32, j: u32) -> usize {
        let listed = match &self.lists {
            None => 1,
            Some(lists) => {
                let keys = &lists[i as usize];
                keys.partition_point(|&key| key <= j) - keys.partition_point(|&key| key < j)
            }
        };
        if listed > 0 && self.sees(i, j) { listed } else { 0 }
    }

    /// Whether query `i` sees key `j`.
    pub(super) fn sees(&self, i: u32, j: u32) -> bool {
        self.band.visible(i, j) && self.shows(i, j)
    }

    /// Whether masks as data and code show query `i` the key `j`, which its band shows.
    fn shows(&self, i: u32, j: u32) -> bool {
        let by_data =
            self.masks.as_ref().map_or(Shown::Asked, |masks| masks.head(&self.span, self.i_head).shown(i, j));
        let asks = by_data == Shown::Asked;
        by_data != Shown::No
            && self.code.as_ref().is_none_or(|code| (!asks || code.sees(i, j)) && self.function_shows(i, j))
    }

    /// Whether the score function leaves the pair visible: a score of -inf hides it, before soft-cap and bias.
    fn function_shows(&self, i: u32, j: u32) -> bool {
        self.coded(self.product(i, j), i, j) != T::neg_infinity()
    }

    /// The listed keys of query `i` that the band or the tree mask shows, ascending.
    fn inside_band(&self, i: u32) -> Vec<u32> {
        if let Some(tree) = &self.tree {
            return (0..self.span.seqlen_k).filter(|&j| tree.visible(&self.span, i, j)).collect();
        }
        if let Some(lists) = &self.lists {
            return lists[i as usize].iter().copied().filter(|&j| self.band.visible(i, j)).collect();
        }
        let keys = self.band.row_range(i, self.span.seqlen_k);
        self.band.sink_range(i..i + 1, self.span.seqlen_k).chain(keys).collect()
    }

    fn score_sums(&self) -> ScoreSums {
        match self.precision {
            Precision::AsInput(sums) => sums,
            Precision::Exact => ScoreSums::F32,
        }
    }

    /// The product `Q[i] . K[j]`.
    fn product(&self, i: u32, j: u32) -> T {
        let (q, k) = (row(&self.q, i, self.head_dim_qk), row(&self.k, j, self.head_dim_qk));
        self.score_sums().dot(q, k)
    }

    /// The score function's value for a product.
    fn coded(&self, product: T, i: u32, j: u32) -> T {
        let scaled = self.softmax_scale * product;
        self.code.as_ref().map_or(scaled, |code| code.score(scaled, i, j))
    }

    fn capped(&self, product: T, i: u32, j: u32) -> T {
        let scaled = self.coded(product, i, j);
        self.softcap.map_or(scaled, |softcap| softcap * (scaled / softcap).tanh())
    }

    /// The score `softmax_scale * Q[i] . K[j]`, soft-capped, with its bias.
    pub(super) fn score(&self, i: u32, j: u32) -> T {
        self.capped(self.product(i, j), i, j) + self.bias(i, j)
    }

    /// The [`score`](Self::score) of query `i` and each of `keys`.
    pub(super) fn scores(&self, i: u32, keys: &[u32]) -> Vec<T> {
        let products = match self.score_sums() {
            ScoreSums::F32 => {
                dots(row(&self.q, i, self.head_dim_qk), keys, |j| row(&self.k, j, self.head_dim_qk))
            }
            ScoreSums::Cut { .. } => keys.iter().map(|&j| self.product(i, j)).collect(),
        };
        keys.iter().zip(products).map(|(&j, product)| self.capped(product, i, j) + self.bias(i, j)).collect()
    }

    /// Slope of the soft-cap at (i, j).
    pub(super) fn slope(&self, i: u32, j: u32) -> T {
        self.softcap.map_or(T::one(), |softcap| {
            let tanh = (self.coded(self.product(i, j), i, j) / softcap).tanh();
            T::one() - tanh * tanh
        })
    }

    /// The score before the score function, and the function's derivative there.
    pub(super) fn code_slope(&self, i: u32, j: u32) -> (T, T) {
        match &self.code {
            None => (T::zero(), T::one()),
            Some(code) => {
                let scaled = self.softmax_scale * self.product(i, j);
                (scaled, code.slope(scaled, i, j))
            }
        }
    }

    /// Bias added to the score of (i, j).
    pub(super) fn bias(&self, i: u32, j: u32) -> T {
        if let (Bias::Elementwise(bias), Some(bytes)) = (self.problem.score.bias, self.bias) {
            let (b, h) = bias.broadcast.index(self.span.i_batch, self.i_head);
            let at = bias.strides.offset(b, i, h, j) as usize * bias.dtype.size_bytes() as usize;
            return real(bias.dtype.read(&bytes[at..]));
        }
        self.alibi.map_or(T::zero(), |(slope, diag)| {
            let distance = (i64::from(i) + diag - i64::from(j)).abs();
            -slope * real(distance as f64)
        })
    }

    /// Factor that dropout gives a probability: `keep[i, j] / (1 - p_drop)`.
    pub(super) fn keep_factor(&self, i: u32, j: u32) -> T {
        match &self.keep {
            None => T::one(),
            Some(mask) if mask.keep(i, j) => real(keep_scale(self.problem.dropout.p_drop)),
            Some(_) => T::zero(),
        }
    }

    /// Rounds a P as the input's precision does before its product with V.
    ///
    /// An FP8 P is first scaled by a power of two towards the type's largest number, as in every FP8 kernel:
    /// without the scale, small P would become 0.
    pub(super) fn probability(&self, value: T) -> T {
        let dtype = self.problem.dtypes.v;
        let scale = if dtype.is_fp8() { 2f64.powi(dtype.max_finite().log2().floor() as i32) } else { 1.0 };
        self.rounded(value, scale, dtype)
    }

    /// Rounds a row's P (`weights` of the keys `visible`, ascending) as [`probability`](Self::probability) does, or
    /// one block of keys at a time if V has scales by blocks.
    pub(super) fn probabilities(&self, visible: &[u32], weights: &[T]) -> Vec<T> {
        let Some(scales) = self.problem.block_scales.filter(|_| !self.is_exact()) else {
            return weights.iter().map(|&weight| self.probability(weight)).collect();
        };
        let block = scales.format.block_size();
        let mut rounded = Vec::with_capacity(weights.len());
        for keys in visible.chunk_by(|a, b| a / block == b / block) {
            let of_block = weights[rounded.len()..].iter().take(keys.len());
            let mut p: Vec<f64> = of_block.map(|p| p.to_f64().unwrap_or(f64::NAN)).collect();
            scales.format.round_p(&mut p);
            rounded.extend(p.into_iter().map(real::<T>));
        }
        rounded
    }

    /// Rounds a dS as the input's precision does before its products with K and Q; for FP8 inputs it is
    /// rounded to the gradients' type.
    pub(super) fn score_gradient(&self, value: T, dtype_grad: DType) -> T {
        let dtype = self.problem.dtypes.qk;
        self.rounded(value, 1.0, if dtype.is_fp8() { dtype_grad } else { dtype })
    }

    fn rounded(&self, value: T, scale: f64, dtype: DType) -> T {
        if self.is_exact() {
            return value;
        }
        real(dtype.round(value.to_f64().unwrap_or(f64::NAN) * scale) / scale)
    }

    /// Rounds `value` to a result of type `dtype`.
    pub(super) fn as_result(&self, value: T, dtype: DType) -> f64 {
        let value = value.to_f64().unwrap_or(f64::NAN);
        if self.is_exact() { value } else { dtype.round(value) }
    }
}

/// Rows of a strided tensor in host memory.
pub(super) struct Rows<'a> {
    pub(super) name: &'static str,
    pub(super) slice: DevSlice<'a>,
    pub(super) dtype: DType,
    pub(super) strides: Strides,
}

impl Rows<'_> {
    /// Reads `count` rows of `dim` elements, dense, times `factor`; `place` gives the batch index and the row of
    /// each.
    pub(super) fn gather<T: Float>(
        &self,
        place: impl Fn(u32) -> (u32, u32),
        head: u32,
        count: u32,
        dim: u32,
        factor: T,
    ) -> Result<Vec<T>, ProblemError> {
        let bytes = host(self.name, Some(&self.slice))?;
        let size = self.dtype.size_bytes() as usize;
        let mut rows = Vec::with_capacity(count as usize * dim as usize);
        for (batch, seq) in (0..count).map(place) {
            for d in 0..dim {
                let at = self.strides.offset(batch, seq, head, d) as usize * size;
                rows.push(real::<T>(self.dtype.read(&bytes[at..])) * factor);
            }
        }
        Ok(rows)
    }
}

pub(super) fn row<T>(matrix: &[T], index: u32, dim: usize) -> &[T] {
    &matrix[index as usize * dim..][..dim]
}

pub(super) fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    in_order(a, [b])[0]
}

/// The dot product of `a` with the row of each of `keys`.
pub(super) fn dots<'a, T: Float + 'a>(a: &[T], keys: &[u32], row: impl Fn(u32) -> &'a [T]) -> Vec<T> {
    let (eights, rest) = keys.as_chunks::<8>();
    let eights = eights.iter().flat_map(|keys| in_order(a, keys.map(&row)));
    eights.chain(rest.iter().map(|&j| in_order(a, [row(j)])[0])).collect()
}

/// Converts to the arithmetic's own type.
pub(super) fn real<T: Float>(value: f64) -> T {
    T::from(value).unwrap_or_else(T::nan)
}

pub(super) fn host<'a>(name: &'static str, slice: Option<&DevSlice<'a>>) -> Result<&'a [u8], ProblemError> {
    slice
        .and_then(DevSlice::as_host)
        .ok_or_else(|| ProblemError::new(name, format!("{name} is missing or not in host memory")))
}

pub(super) fn f32_at<T: Float>(
    name: &'static str,
    slice: Option<&DevSlice<'_>>,
    index: usize,
) -> Result<T, ProblemError> {
    let bytes = host(name, slice)?;
    let at = bytes.get(index * 4..index * 4 + 4).ok_or_else(|| {
        ProblemError::new(name, format!("{name} has {} bytes, but element {index} is read", bytes.len()))
    })?;
    Ok(real(DType::F32.read(at)))
}
