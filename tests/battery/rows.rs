//! Pairs of calls that share rows: a shared row must have equal bits in both calls.
//!
//! A [`Story`] is one sequence, its numbers decided by a seed. A [`View`] is a call with some of its rows: in
//! training, in a chunk of a prompt, in decoding, beside other sequences, in any layout. [`draw`] makes a story
//! with two views that share a row.

use std::ops::Range;

use fmha_core::seq::KvRows;
use fmha_core::{
    BlockFormat, BwdProblem, DType, Device, Dims, FwdProblem, KvLayout, MaskAlign, MaskShape, PlanOptions,
    Result, SeqSpan, Strides,
};

use crate::check::{Selection, check_fwd};
use crate::families::pages;
use crate::init::mix;
use crate::law::BIT_FOR_BIT;
use crate::run::Options;
use crate::tensor::{Operand, Operands, Tensor};
use crate::tensors::{Data, HostBwd, HostFwd, Lengths, scale_code, set_coded_row};
use crate::verdict::Verdict;

/// Random generator with a seed.
#[derive(Clone, Copy, Debug)]
pub struct Dice(u64);

impl Dice {
    /// A generator with this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x0705_1a5e))
    }

    fn below(&mut self, end: u32) -> u32 {
        self.0 = mix(self.0.wrapping_add(0x9e37_79b9_7f4a_7c15));
        ((self.0 >> 33) % u64::from(end.max(1))) as u32
    }

    fn within(&mut self, range: Range<u32>) -> u32 {
        range.start + self.below(range.end - range.start)
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u32) as usize]
    }

    fn chance(&mut self, one_in: u32) -> bool {
        self.below(one_in) == 0
    }
}

/// One sequence, whose rows occur in calls.
#[derive(Clone, Debug, PartialEq)]
pub struct Story {
    /// Seed of every number.
    pub seed: u64,
    /// Type of Q, K and V. With f32, O is f32 too.
    pub dtype: DType,
    /// Type of O.
    pub dtype_o: DType,
    /// Type of the cache, if it differs.
    pub dtype_cache: Option<DType>,
    /// Numbers of query heads and of kv heads.
    pub heads: [u32; 2],
    /// Head dimensions of Q and K, and of V.
    pub dims: [u32; 2],
    /// Number of tokens.
    pub len: u32,
    /// Number of keys before its own that a row sees; `None`: all, without a window.
    pub left: Option<u32>,
    /// Whether scores have a soft-cap.
    pub softcap: bool,
    /// Whether the call has learnable sinks.
    pub sink: bool,
    /// Whether the call has slopes of ALiBi.
    pub alibi: bool,
    /// Rare property of the problem, which only few random problems have.
    pub rare: Option<Rare>,
}

/// Rare property of a random problem, in kernels that promise equal rows with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rare {
    /// Q, K and V are FP8.
    Fp8(DType),
    /// Q, K and V have scales by blocks.
    Scales(BlockFormat),
    /// Latent attention: V is the first 512 elements of K's 576.
    Latent,
    /// A score function adds to a score by its key's position.
    Score,
}

/// Layout of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// A batch whose sequences have a common capacity.
    Strided,
    /// Sequences one after another.
    Packed,
    /// Pages with this many rows.
    Paged(u32),
}

/// A call that contains some of the rows of a random problem ([`Story`]).
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// Queries of the problem that this call has. Each sees the keys up to its own position.
    pub rows: Range<u32>,
    /// Layout of K and V in this call.
    pub keys: Keys,
    /// Whether Q's sequences are packed.
    pub packed: bool,
    /// Numbers of queries and keys of the call's other sequences, whose contents differ.
    pub others: Vec<[u32; 2]>,
    /// Index of the problem's sequence among the call's sequences.
    pub place: usize,
    /// Rows of the cache beyond the longest sequence.
    pub spare: u32,
    /// Whether the call has no mask: it has one row per sequence, which sees all keys.
    pub unmasked: bool,
    /// Whether the call asks for LSE.
    pub lse: bool,
}

/// Limits within which random problems ([`Story`]) and calls with some of their rows ([`View`]) are drawn.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Types that Q may have.
    pub dtypes: &'static [DType],
    /// Keys of a part in the tested kernel; half of the pairs span three or more parts.
    pub part: u32,
    /// Most queries of a call that has many.
    pub most_rows: u32,
    /// Head dimensions that may be drawn.
    pub dims: &'static [u32],
    /// Whether some problems have FP8 caches.
    pub fp8_caches: bool,
    /// Rare properties, of which one problem in `ONE_RARE` has one.
    pub rare: &'static [Rare],
    /// Whether each second seed's row sees three parts or more, and lies at two places of a tile. In one of
    /// `ONE_TRAINS` such pairs one call is a training call of few heads, whatever `most_rows` is.
    pub forced: bool,
}

/// Number of random problems of which one has a rare property.
const ONE_RARE: u32 = 8;
/// Number of forced pairs of calls of which one has a training call.
const ONE_TRAINS: u32 = 4;
/// Rows of the smallest tile: two rows that are equal modulo this number have one position in a tile.
const TILE_ROWS: u32 = 16;
/// Most queries of a call that has many, if the problem is latent attention.
const LATENT_ROWS: u32 = 20;

/// Pairs of a few hundred keys, for emulated devices whose tiles have parts of 128.
pub const SHORT: Bounds = Bounds {
    dtypes: &[DType::Bf16, DType::F16],
    part: 128,
    most_rows: 70,
    dims: &[16, 64, 72],
    fp8_caches: true,
    rare: &[],
    forced: false,
};

/// Limits of random problems for backward kernels in which several blocks of 128 keys add to dQ one after another.
pub const BLOCKS: Bounds = Bounds { most_rows: 420, dims: &[16, 64, 72, 128], fp8_caches: false, ..SHORT };

/// Draws a random problem ([`Story`]), and two calls ([`View`]) that both contain one of its rows.
#[must_use]
pub fn draw(seed: u64, bounds: &Bounds) -> (Story, [View; 2]) {
    let mut dice = Dice::new(seed);
    let is_forced = bounds.forced && seed.is_multiple_of(2);
    let is_long = dice.chance(2) || is_forced;
    let len = if is_long {
        dice.within(2 * bounds.part + 1..4 * bounds.part)
    } else {
        dice.within(1..2 * bounds.part + 1)
    };
    let ratio = dice.one_of(&[1, 1, 2, 3, 4, 8]);
    let kv = dice.one_of(&[1, 1, 2]);
    let dtype = dice.one_of(bounds.dtypes);
    let dim_v = dice.one_of(bounds.dims);
    let dim_qk = if dice.chance(5) { dice.one_of(bounds.dims) } else { dim_v };
    let is_wide = matches!(dtype, DType::F16 | DType::Bf16);
    let mut story = Story {
        seed: mix(seed),
        dtype,
        // O is mostly f32, so that the last bits of sums are visible.
        dtype_o: if is_wide && !dice.chance(4) { DType::F32 } else { dtype },
        dtype_cache: (bounds.fp8_caches && is_wide && dice.chance(6)).then_some(DType::E4m3Fn),
        heads: [ratio * kv, kv],
        dims: [dim_qk, dim_v],
        len,
        left: dice.chance(4).then(|| dice.below(len + len / 2 + 1)),
        softcap: dice.chance(6),
        sink: dice.chance(8),
        alibi: dice.chance(8),
        rare: None,
    };
    let row = if is_long { dice.within(2 * bounds.part..len) } else { dice.below(len) };
    // These numbers come from a generator of their own, so that bounds without rare properties draw the same pairs.
    let mut own = Dice::new(seed ^ 0x0f0c_ed00);
    if !bounds.rare.is_empty() && own.chance(ONE_RARE) {
        story.take(own.one_of(bounds.rare));
    }
    let is_latent = story.rare == Some(Rare::Latent);
    let bounds = &Bounds { most_rows: if is_latent { LATENT_ROWS } else { bounds.most_rows }, ..*bounds };
    if !is_forced {
        let views = [0, 1].map(|_| view(&mut dice, &story, row, bounds));
        return (story, views);
    }
    story.left = story.left.map(|left| left.max(2 * bounds.part));
    let mut first = view(&mut dice, &story, row, bounds);
    if !is_latent && own.chance(ONE_TRAINS) {
        story.heads = [own.within(1..3), 1];
        story.dims = [bounds.dims[0]; 2];
        (first.rows, first.unmasked) = (0..own.within(row + 1..len + 1), false);
    }
    let place = |view: &View| (row - view.rows.start) % TILE_ROWS;
    let mut second = view(&mut dice, &story, row, bounds);
    while place(&second) == place(&first) {
        second = view(&mut dice, &story, row, bounds);
    }
    let views = if own.chance(2) { [first, second] } else { [second, first] };
    (story, views)
}

/// Whether both calls have a row that sees three parts of so many keys or more, at two places of a tile.
#[must_use]
pub fn is_far_apart(story: &Story, [a, b]: &[View; 2], part: u32) -> bool {
    let mut rows = a.rows.start.max(b.rows.start)..a.rows.end.min(b.rows.end);
    let first_key = |row: u32| story.left.map_or(0, |left| row.saturating_sub(left));
    a.rows.start.abs_diff(b.rows.start) % TILE_ROWS > 0
        && rows.any(|row| row / part - first_key(row) / part >= 2)
}

impl Story {
    /// Gives the problem a rare property.
    fn take(&mut self, rare: Rare) {
        self.rare = Some(rare);
        match rare {
            Rare::Fp8(dtype) => (self.dtype, self.dtype_o, self.dtype_cache) = (dtype, DType::F32, None),
            Rare::Scales(_) => {
                (self.dtype_o, self.dtype_cache) = (DType::F32, None);
                if self.dtype == DType::F16 {
                    self.dtype = DType::Bf16;
                }
            }
            // V has the properties of K.
            Rare::Latent => (self.dims, self.heads) = ([576, 512], [self.heads[0].min(3), 1]),
            Rare::Score => {}
        }
    }
}

/// Draws a call that contains the given row.
fn view(dice: &mut Dice, story: &Story, row: u32, bounds: &Bounds) -> View {
    // The call is a training call, a chunk of a prompt, or a step of decoding.
    let rows = match dice.below(3) {
        0 if row < bounds.most_rows => {
            0..dice.within(row + 1..story.len.min(bounds.most_rows).max(row + 1) + 1)
        }
        2 => {
            let count = dice.one_of(&[1, 1, 2, 5, 16]);
            let begin = row.saturating_sub(dice.below(count));
            begin..story.len.min(begin + count).max(row + 1)
        }
        _ => {
            let begin = row.saturating_sub(dice.below(bounds.most_rows));
            begin..dice.within(row + 1..story.len.min(begin + bounds.most_rows).max(row + 1) + 1)
        }
    };
    let must_page = story.dtype_cache.is_some();
    let mut keys = match dice.below(3) {
        0 => Keys::Strided,
        1 if !must_page => Keys::Packed,
        _ => Keys::Paged(dice.one_of(&[1, 2, 3, 16, 17, 32, 64, 100, 128])),
    };
    if let Some(Rare::Scales(format)) = story.rare {
        keys = match keys {
            Keys::Paged(rows) => Keys::Paged(rows.next_multiple_of(format.block_size())),
            _ => Keys::Strided,
        };
    }
    // Keys that are packed go with queries that are.
    let packed = keys == Keys::Packed || keys != Keys::Strided && dice.chance(2);
    let most = story.len + bounds.part;
    let count = dice.below(3);
    let others: Vec<[u32; 2]> = (0..count)
        .map(|_| {
            let keys = dice.within(1..most);
            let queries = if dice.chance(2) { 1 } else { dice.within(1..bounds.most_rows.min(keys) + 1) };
            [queries, keys]
        })
        .collect();
    let one_row = rows.len() == 1 && others.iter().all(|[queries, _]| *queries == 1);
    View {
        // ALiBi's distances follow the mask's diagonal.
        unmasked: one_row && story.left.is_none() && !story.alibi && dice.chance(2),
        place: dice.below(count + 1) as usize,
        spare: if dice.chance(2) { dice.below(bounds.part + 1) } else { 0 },
        lse: !dice.chance(3),
        rows,
        keys,
        packed,
        others,
    }
}

impl View {
    /// Numbers of queries and keys of all sequences of the call.
    fn sequences(&self) -> Vec<[u32; 2]> {
        let mut all = self.others.clone();
        all.insert(self.place, [self.rows.len() as u32, self.rows.end]);
        all
    }

    /// Problem and lengths of the call.
    #[must_use]
    pub fn problem(&self, story: &Story) -> (FwdProblem, Lengths) {
        let sequences = self.sequences();
        let most = |at: usize| sequences.iter().map(|sequence| sequence[at]).max().unwrap_or(0);
        let spare = if self.keys == Keys::Packed { 0 } else { self.spare };
        let dims = Dims::batch(sequences.len() as u32)
            .seqlens(most(0), most(1) + spare)
            .heads(story.heads[0], story.heads[1])
            .head_dims(story.dims[0], story.dims[1]);
        let mut problem = if self.packed {
            FwdProblem::group(story.dtype, dims)
        } else {
            FwdProblem::batch(story.dtype, dims)
        };
        let pairs: Vec<(u32, u32)> = sequences.iter().map(|&[q, k]| (q, k)).collect();
        let mut lengths = if self.packed { Lengths::packed(&pairs) } else { Lengths::default() };
        let used = |at: usize| sequences.iter().map(|sequence| sequence[at].cast_signed()).collect();
        let unlike = |at: usize| sequences.iter().any(|sequence| sequence[at] != sequences[0][at]);
        if !self.packed && unlike(0) {
            problem.layout.seqused_q = true;
            lengths.seqused_q = used(0);
        }
        if self.keys != Keys::Packed {
            problem.layout.kv = KvLayout::Strided;
            (lengths.cu_seqlens_k, lengths.totals.total_k) = (Vec::new(), None);
            if unlike(1) || spare > 0 || self.keys != Keys::Strided {
                problem.layout.seqused_k = true;
                lengths.seqused_k = used(1);
            }
        }
        if let Keys::Paged(page_size) = self.keys {
            let (table, num_pages) = pages(&problem, page_size, story.seed ^ u64::from(self.rows.start));
            problem.layout.kv = KvLayout::Paged { page_size };
            (lengths.block_table, lengths.totals.num_pages) = (table, Some(num_pages));
        }
        problem.cache.dtype = story.dtype_cache;
        problem.dtypes.o = story.dtype_o;
        problem.strides.q = Strides::bshd(problem.shape_q());
        problem.strides.k = Strides::bshd(problem.shape_k());
        problem.strides.v = Strides::bshd(problem.shape_v());
        problem.strides.o = Strides::bshd(problem.shape_o());
        if !self.unmasked {
            let (right, align) = (Some(0), MaskAlign::BottomRight);
            problem.mask.shape = MaskShape::Window { left: story.left, right, align };
        }
        problem.write_lse = self.lse;
        problem.score.softcap = story.softcap.then_some(20.0);
        problem.score.sink = story.sink;
        if story.alibi {
            problem.score.bias = fmha_core::Bias::Alibi { per_batch: false };
        }
        match story.rare {
            Some(Rare::Scales(format)) => problem = problem.with_block_scales(format),
            Some(Rare::Latent) => (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k),
            Some(Rare::Score) => problem = problem.score_code(SCORE.parse().ok()),
            Some(Rare::Fp8(_)) | None => {}
        }
        (problem, lengths)
    }

    /// Tensors of the call.
    ///
    /// # Errors
    /// The contradiction in the problem.
    pub fn host(&self, story: &Story) -> Result<HostFwd> {
        let (problem, lengths) = self.problem(story);
        let data = Data { seed: story.seed, ..Data::default() };
        let mut host = HostFwd::unfilled(problem, &lengths, data)?;
        let seq = host.inputs().seq;
        let places: Vec<Vec<(u32, u32)>> = {
            let rows = KvRows::of(&host.problem, &seq)?;
            host.spans.iter().map(|span| (0..span.seqlen_k).map(|j| rows.at(span, j)).collect()).collect()
        };
        for (at, (span, places)) in host.spans.clone().iter().zip(&places).enumerate() {
            // The other sequences have other numbers.
            let seed = if at == self.place { story.seed } else { mix(story.seed ^ (at as u64 + 1)) };
            let first = if at == self.place {
                self.rows.start
            } else {
                span.seqlen_k - span.seqlen_q.min(span.seqlen_k)
            };
            let of_q = |i: u32| (span.q_batch, span.q_row + i);
            let queries: Vec<_> = (0..span.seqlen_q).map(|i| (first + i, of_q(i))).collect();
            let keys: Vec<_> = (0..).zip(places.iter().copied()).collect();
            for (operand, salt, rows) in
                [(Operand::Q, OF_Q, &queries), (Operand::K, OF_K, &keys), (Operand::V, OF_V, &keys)]
            {
                match story.rare {
                    Some(Rare::Latent) if operand == Operand::V => {}
                    Some(Rare::Scales(format)) => {
                        put_scaled(&mut host.operands, operand, format, (seed, salt), story.dims, rows);
                    }
                    _ => put(host.operands.expect_mut(operand), (seed, salt), rows.iter().copied()),
                }
            }
        }
        Ok(host)
    }
}

/// Numbers that are mixed into the seed, so that operands get different elements.
const OF_Q: u64 = 1;
const OF_K: u64 = 2;
const OF_V: u64 = 3;
const OF_DOUT: u64 = 4;

/// A function of a score: what it adds depends on the key alone, as a call's first query is another row in each view.
const SCORE: &str = "s * 0.75 + float(k % 7) * 0.125";

/// Fills a row with numbers. Some rows are larger than others, so that maxima rise late, by little and by much.
fn draw_row((seed, salt): (u64, u64), head: u32, position: u32, values: &mut [f32]) {
    let spread = if salt == OF_Q || salt == OF_K { 3.0 } else { 1.0 };
    let mut state = mix(seed ^ salt << 56 ^ u64::from(head) << 40 ^ u64::from(position));
    let scale = [0.25, 1.0, 1.0, 1.0, 2.0, 1.0, 0.5, 4.0][(state >> 7 & 7) as usize] * spread;
    for value in values {
        state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
        *value = ((state >> 40) as f32 / 8_388_608.0 - 1.0) * scale;
    }
}

/// Writes rows, given by their positions in a sequence, to their places in a tensor.
fn put(tensor: &mut Tensor, of: (u64, u64), rows: impl Iterator<Item = (u32, (u32, u32))>) {
    let mut values = vec![0_f32; tensor.shape.dim as usize];
    for (position, (batch, row)) in rows {
        for head in 0..tensor.shape.head {
            draw_row(of, head, position, &mut values);
            tensor.set_row([batch, row, head], &values);
        }
    }
}

/// [`put`] in a format with scales by blocks, and the scales, by the positions of their blocks.
fn put_scaled(
    operands: &mut Operands,
    operand: Operand,
    format: BlockFormat,
    of: (u64, u64),
    [dim_qk, dim_v]: [u32; 2],
    rows: &[(u32, (u32, u32))],
) {
    let (of_scales, block, dim) = match operand {
        Operand::Q => (Operand::BlockScaleQ, 1, dim_qk),
        Operand::K => (Operand::BlockScaleK, 1, dim_qk),
        _ => (Operand::BlockScaleV, format.block_size(), dim_v),
    };
    let mut values = vec![0_f32; dim as usize];
    for &(position, (batch, row)) in rows {
        for head in 0..operands.expect(operand).shape.head {
            draw_row(of, head, position, &mut values);
            set_coded_row(operands.expect_mut(operand), format, false, [batch, row, head], &values);
            let scales = operands.expect_mut(of_scales);
            for column in 0..scales.shape.dim {
                let salt = [head, position / block, column]
                    .into_iter()
                    .fold(of.0 ^ of.1, |salt, x| mix(salt ^ u64::from(x)));
                *scales.byte_mut([batch, row / block, head, column]) = scale_code(format, salt);
            }
        }
    }
}

/// Outcome of a pair of calls.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// All shared rows had equal bits. The names are those of both calls' kernels.
    Equal([String; 2]),
    /// A call was refused, for this reason.
    Refused(String),
    /// Description of the first bits that differ.
    Differ(String),
}

/// How the calls of a pair are planned.
#[derive(Clone, Debug, Default)]
pub struct Planning {
    /// Plan options of both calls.
    pub plan: PlanOptions,
    /// Options for the second call only, which replace those of both.
    pub of_second: Option<PlanOptions>,
    /// Whether plans are made without asking for the promise, to test the search itself.
    pub unasked: bool,
    /// Whether a refusal counts as a valid outcome.
    pub refuses: bool,
}

impl Planning {
    /// Wishes of one of a pair's calls.
    fn options(&self, call: usize) -> PlanOptions {
        let own = self.of_second.as_ref().filter(|_| call == 1);
        own.unwrap_or(&self.plan).clone().row_invariant(!self.unasked)
    }
}

/// Runs both calls of a random problem and compares the rows that they share.
///
/// # Errors
/// An error of the backend, other than a refusal.
pub fn compare(device: &Device, story: &Story, views: &[View; 2], planning: &Planning) -> Result<Outcome> {
    let (mut hosts, mut kernels) = (Vec::new(), Vec::new());
    for (at, view) in views.iter().enumerate() {
        let mut host = view.host(story)?;
        let options = planning.options(at);
        let plan = match device.plan_fwd(&host.problem, &options) {
            Ok(plan) => plan,
            Err(error @ fmha_core::Error::Unsupported { .. }) => {
                return Ok(Outcome::Refused(error.to_string()));
            }
            Err(error) => return Err(error),
        };
        crate::execute::run_fwd(device, &plan, &mut host)?;
        hosts.push(host);
        kernels.push(plan.kernel().to_owned());
    }
    Ok(match differing(story, views, [&hosts[0], &hosts[1]]) {
        Some(what) => Outcome::Differ(what),
        None => Outcome::Equal([kernels.remove(0), kernels.remove(0)]),
    })
}

/// Finds the first bits that differ in the rows that two finished calls share.
#[must_use]
pub fn differing(story: &Story, views: &[View; 2], hosts: [&HostFwd; 2]) -> Option<String> {
    let [a, b] = views;
    let (begin, end) = (a.rows.start.max(b.rows.start), a.rows.end.min(b.rows.end));
    let of = |at: usize| (hosts[at], hosts[at].spans[views[at].place], views[at].rows.start);
    let ((host_a, span_a, first_a), (host_b, span_b, first_b)) = (of(0), of(1));
    let (o_a, o_b) = (host_a.operands.expect(Operand::O), host_b.operands.expect(Operand::O));
    for i in begin..end {
        for head in 0..story.heads[0] {
            let place = |said: String| Some(format!("row {i}, head {head}: {said}"));
            let at_a = [span_a.q_batch, span_a.q_row + i - first_a, head];
            let at_b = [span_b.q_batch, span_b.q_row + i - first_b, head];
            if let Some(d) = o_a.row_differs(at_a, o_b, at_b) {
                let bits = |o: &Tensor, [batch, row, head]: [u32; 3]| o.bits(batch, row, head, d);
                return place(format!("o[{d}] has bits {:#x} and {:#x}", bits(o_a, at_a), bits(o_b, at_b)));
            }
            let lse = |at: usize, i: u32| {
                let (host, span, first) = of(at);
                let lse = host.operands.get(Operand::Lse)?;
                Some((lse.nth(span.lse_index(&host.problem, head, i - first)) as f32).to_bits())
            };
            if let (Some(bits_a), Some(bits_b)) = (lse(0, i), lse(1, i))
                && bits_a != bits_b
            {
                return place(format!("lse has bits {bits_a:#x} and {bits_b:#x}"));
            }
        }
    }
    None
}

/// A random story and two training calls that share a row: with all rows, or with some rows, which see the keys
/// before them too.
#[must_use]
pub fn draw_training(seed: u64, bounds: &Bounds) -> (Story, [View; 2]) {
    let (story, _) = draw(seed, &Bounds { fp8_caches: false, rare: &[], forced: false, ..*bounds });
    let mut dice = Dice::new(seed ^ 0x7a1);
    let len = story.len.min(bounds.most_rows);
    let story = Story { len, dtype_o: story.dtype, ..story };
    let (same, row) = (dice.chance(2), dice.below(len));
    let views = [0, 1].map(|_| {
        let count = dice.below(3);
        let end = if same { len } else { dice.within(row + 1..len + 1) };
        let begin = if same || dice.chance(2) { 0 } else { dice.below(row + 1) };
        let others = (0..count).map(|_| [dice.within(1..bounds.most_rows + 1); 2]).collect();
        let packed = dice.chance(2);
        View {
            rows: begin..end,
            keys: if packed { Keys::Packed } else { Keys::Strided },
            packed,
            others,
            place: dice.below(count + 1) as usize,
            spare: 0,
            unmasked: false,
            lse: true,
        }
    });
    (story, views)
}

/// Runs the backward of two training calls and compares their gradients bit for bit: dQ of the rows that both
/// calls have, and dK and dV if both calls have the same rows. A call may begin amid its sequence.
///
/// # Errors
/// An error of the backend, other than a refusal.
pub fn compare_gradients(
    device: &Device,
    story: &Story,
    views: &[View; 2],
    planning: &Planning,
) -> Result<Outcome> {
    let (mut hosts, mut kernels) = (Vec::new(), Vec::new());
    for (at, view) in views.iter().enumerate() {
        let options = planning.options(at);
        let mut forward = view.host(story)?;
        let (problem, lengths) = view.problem(story);
        let problem = BwdProblem::new(problem).dtype_grad(DType::F32);
        let data = Data { seed: story.seed, ..Data::default() };
        let mut host = HostBwd::new(problem, &lengths, data)?;
        let plans = device.plan_fwd(&forward.problem, &options);
        let plans = plans.and_then(|plan| Ok((plan, device.plan_bwd(&host.problem, &options)?)));
        let (plan_fwd, plan_bwd) = match plans {
            Ok(plans) => plans,
            Err(error @ fmha_core::Error::Unsupported { .. }) => {
                return Ok(Outcome::Refused(error.to_string()));
            }
            Err(error) => return Err(error),
        };
        crate::execute::run_fwd(device, &plan_fwd, &mut forward)?;
        for operand in [Operand::Q, Operand::K, Operand::V, Operand::O, Operand::Lse] {
            let from = forward.operands.expect(operand).elems();
            host.operands.expect_mut(operand).elems_mut().copy_from_slice(from);
        }
        for (at, span) in host.spans.clone().iter().enumerate() {
            let seed = if at == view.place { story.seed } else { mix(story.seed ^ (at as u64 + 1)) };
            let first = if at == view.place { view.rows.start } else { 0 };
            let rows = (0..span.seqlen_q).map(|i| (first + i, (span.q_batch, span.q_row + i)));
            put(host.operands.expect_mut(Operand::Dout), (seed, OF_DOUT), rows);
        }
        crate::execute::run_bwd(device, &plan_bwd, &mut host)?;
        hosts.push(host);
        kernels.push(plan_bwd.kernel().to_owned());
    }
    let [a, b] = views;
    let rows = a.rows.start.max(b.rows.start)..a.rows.end.min(b.rows.end);
    let [span_a, span_b] = [0, 1].map(|at| hosts[at].spans[views[at].place]);
    let keys = if a.rows == b.rows { 0..rows.end } else { 0..0 };
    for (operand, rows, heads, is_query) in [
        (Operand::Dq, rows, story.heads[0], true),
        (Operand::Dk, keys.clone(), story.heads[1], false),
        (Operand::Dv, keys, story.heads[1], false),
    ] {
        let [of_a, of_b] = [0, 1].map(|at| hosts[at].operands.expect(operand));
        for (i, head) in rows.flat_map(|i| (0..heads).map(move |head| (i, head))) {
            let place = |view: &View, span: &SeqSpan| match is_query {
                true => [span.q_batch, span.q_row + i - view.rows.start, head],
                false => [span.k_batch, span.k_row + i, head],
            };
            if let Some(d) = of_a.row_differs(place(a, &span_a), of_b, place(b, &span_b)) {
                return Ok(Outcome::Differ(format!("{operand:?} of row {i}, head {head}, element {d}")));
            }
        }
    }
    Ok(Outcome::Equal([kernels.remove(0), kernels.remove(0)]))
}

/// Number of pairs in one case of the battery.
pub(crate) const PAIRS: u64 = 6;

/// The problems of a case's calls.
pub(crate) fn problems(first: u64) -> impl Iterator<Item = FwdProblem> {
    (first..first + PAIRS).flat_map(|seed| {
        let (story, views) = draw(seed, &SHORT);
        views.map(|view| view.problem(&story).0)
    })
}

/// Training calls of a pair.
pub(crate) fn training_problems(seed: u64) -> impl Iterator<Item = FwdProblem> {
    let (story, views) = draw_training(seed, &BLOCKS);
    views.into_iter().map(move |view| view.problem(&story).0)
}

/// The backward problem of a training call, with f32 gradients.
pub(crate) fn backward_of(problem: FwdProblem) -> BwdProblem {
    BwdProblem::new(problem).dtype_grad(DType::F32)
}

/// Law of some pairs: shared rows have equal bits. Where a call is refused, only the case's own call is compared with
/// the reference.
pub(crate) fn law(device: &Device, options: &Options, of: (u64, HostFwd)) -> Result<Verdict> {
    law_of(device, options, of, PAIRS, |seed, planning| {
        let (story, views) = draw(seed, &SHORT);
        compare(device, &story, &views, planning)
    })
}

/// Law of a pair of training calls: shared rows have equal gradients.
pub(crate) fn law_of_gradients(device: &Device, options: &Options, of: (u64, HostFwd)) -> Result<Verdict> {
    law_of(device, options, of, 1, |seed, planning| {
        let (story, views) = draw_training(seed, &BLOCKS);
        compare_gradients(device, &story, &views, planning)
    })
}

fn law_of(
    device: &Device,
    options: &Options,
    (first, mut host): (u64, HostFwd),
    pairs: u64,
    compared_pair: impl Fn(u64, &Planning) -> Result<Outcome>,
) -> Result<Verdict> {
    let planning = Planning { plan: options.plan.clone(), ..Planning::default() };
    let (mut verdict, mut compared) = (Verdict { note: Some(BIT_FOR_BIT), ..Verdict::default() }, false);
    for seed in first..first + pairs {
        match compared_pair(seed, &planning)? {
            Outcome::Equal(_) => compared = true,
            Outcome::Differ(what) => verdict.faults.push(format!("pair {seed}: {what}")),
            Outcome::Refused(_) if compared || !verdict.faults.is_empty() => (),
            Outcome::Refused(_) => {
                let plan = device.plan_fwd(&host.problem, &options.plan)?;
                crate::execute::run_fwd(device, &plan, &mut host)?;
                verdict = check_fwd(&host, &Selection::default(), &|_, _| ())?;
                verdict.note = Some("one call within the bound: no plan promises rows of equal bits");
                break;
            }
        }
    }
    Ok(verdict)
}
