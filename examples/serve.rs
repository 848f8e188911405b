//! A tiny decoder (random weights by seed) that serves three requests at once over a paged cache that they share:
//! `cargo run --release --example serve`.
//!
//! Each step is one call a layer: new keys are turned to their positions, appended to the pages and attended to,
//! whether a request is at its prompt or at its next token (continuous batching). The second and third request begin
//! with the first one's page: their block tables name it, and it is computed once. After each step every request is
//! computed again from nothing, alone, in a cache of its own; because the plans are batch-invariant, the logits are
//! the same to the bit.

use fmha::{
    Append, Backend, BlockTable, CacheArgs, DType, DevSlice, DevSliceMut, Device, Dims, Error, FwdArgs,
    FwdPlan, FwdProblem, KvLayout, MaskSpec, PlanOptions, QLayout, Rotary, RotaryPairs, Totals,
};

const LAYERS: usize = 2;
const HEADS_Q: u32 = 4;
const HEADS_KV: u32 = 2;
const HEAD_DIM: u32 = 16;
const WIDTH: usize = (HEADS_Q * HEAD_DIM) as usize;
const WIDTH_KV: usize = (HEADS_KV * HEAD_DIM) as usize;
const VOCABULARY: usize = 61;
const MAX_LEN: u32 = 48;
const PAGE: u32 = 8;
const MAX_PAGES: u32 = MAX_LEN / PAGE;

/// Rows times a matrix, a row at a time, so that a row's result does not depend on the rows beside it.
struct Matrix {
    columns: usize,
    weights: Vec<f32>,
}

impl Matrix {
    fn random(rows: usize, columns: usize, state: &mut u64) -> Self {
        let scale = 1.0 / (rows as f32).sqrt();
        let mut number = || {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((*state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 1.7 * scale
        };
        Self { columns, weights: (0..rows * columns).map(|_| number()).collect() }
    }

    fn times(&self, rows: &[f32]) -> Vec<f32> {
        let width = self.weights.len() / self.columns;
        let one = |row: &[f32]| {
            let mut out = vec![0.0; self.columns];
            for (x, weights) in row.iter().zip(self.weights.chunks(self.columns)) {
                out.iter_mut().zip(weights).for_each(|(out, w)| *out += x * w);
            }
            out
        };
        rows.chunks(width).flat_map(one).collect()
    }
}

struct Layer {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    up: Matrix,
    down: Matrix,
}

struct Model {
    embedding: Matrix,
    layers: Vec<Layer>,
    head: Matrix,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Model {
    fn random(seed: u64) -> Self {
        let mut state = seed;
        let mut matrix = |rows, columns| Matrix::random(rows, columns, &mut state);
        let layers = (0..LAYERS).map(|_| Layer {
            q: matrix(WIDTH, WIDTH),
            k: matrix(WIDTH, WIDTH_KV),
            v: matrix(WIDTH, WIDTH_KV),
            o: matrix(WIDTH, WIDTH),
            up: matrix(WIDTH, 2 * WIDTH),
            down: matrix(2 * WIDTH, WIDTH),
        });
        let layers = layers.collect();
        let (embedding, head) = (matrix(VOCABULARY, WIDTH), matrix(WIDTH, VOCABULARY));
        let half = HEAD_DIM / 2;
        let angles = (0..MAX_LEN * half).map(|at| {
            let (position, i) = (at / half, at % half);
            position as f32 * 10000f32.powf(-(i as f32) / half as f32)
        });
        let (cos, sin) = angles.map(|angle| (angle.cos(), angle.sin())).unzip();
        Self { embedding, layers, head, cos, sin }
    }
}

/// Pages of keys and values of each layer.
struct Cache {
    num_pages: u32,
    layers: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Cache {
    fn new(num_pages: u32) -> Self {
        // Rows that nobody has written are NaN: whoever reads one shows it.
        let pages = || vec![f32::NAN; (num_pages * PAGE) as usize * WIDTH_KV];
        Self { num_pages, layers: (0..LAYERS).map(|_| (pages(), pages())).collect() }
    }
}

/// The plan of a call for at most so many requests; what each step brings is in its arguments.
fn plan(backend: &Device, batch: u32) -> Result<FwdPlan, Error> {
    let dims = Dims {
        batch,
        seqlen_q: MAX_LEN,
        seqlen_k: MAX_LEN,
        num_heads_q: HEADS_Q,
        num_heads_kv: HEADS_KV,
        head_dim_qk: HEAD_DIM,
        head_dim_v: HEAD_DIM,
    };
    let mut problem = FwdProblem::new(QLayout::Packed, KvLayout::Paged { page_size: PAGE }, DType::F32, dims);
    (problem.mask, problem.layout.seqused_k) = (MaskSpec::CAUSAL, true);
    problem.cache.append = Some(Append::packed(&problem, MAX_LEN));
    problem.cache.rotary =
        Some(Rotary { dim: HEAD_DIM, pairs: RotaryPairs::Half, max_pos: MAX_LEN, dtype: DType::F32 });
    backend.plan_fwd(&problem.validate()?, &PlanOptions::default().batch_invariant(true))
}

/// What a step brings of each request.
struct Step<'a> {
    /// New tokens of each request, perhaps none.
    tokens: Vec<&'a [usize]>,
    /// Tokens that are in the cache.
    cached: Vec<i32>,
    /// `[request, MAX_PAGES]`.
    table: &'a [i32],
}

impl Model {
    /// The logits after each request's last token; empty where it has no new one.
    fn step(
        &self,
        (backend, plan): (&Device, &FwdPlan),
        cache: &mut Cache,
        step: &Step<'_>,
    ) -> Result<Vec<Vec<f32>>, Error> {
        let mut offsets = vec![0i32];
        for tokens in &step.tokens {
            offsets.push(offsets[offsets.len() - 1] + tokens.len() as i32);
        }
        let total = offsets[offsets.len() - 1].unsigned_abs();
        let row = |&token: &usize| &self.embedding.weights[token * WIDTH..][..WIDTH];
        let mut x: Vec<f32> =
            step.tokens.iter().flat_map(|tokens| tokens.iter().flat_map(row)).copied().collect();
        let num_pages = Some(cache.num_pages);
        for (layer, (k, v)) in self.layers.iter().zip(&mut cache.layers) {
            let (q, k_new, v_new) = (layer.q.times(&x), layer.k.times(&x), layer.v.times(&x));
            let mut o = vec![0f32; q.len()];
            let (k, v, o_slice) = (DevSliceMut::host(k), DevSliceMut::host(v), DevSliceMut::host(&mut o));
            let mut args = FwdArgs::new(DevSlice::host(&q), k, v, o_slice);
            args.seq.totals =
                Totals { total_q: Some(total), total_new: Some(total), num_pages, ..Totals::NONE };
            args.seq.cu_seqlens_q = Some(DevSlice::host(&offsets));
            args.seq.cu_seqlens_new = Some(DevSlice::host(&offsets));
            args.seq.seqused_k = Some(DevSlice::host(&step.cached));
            args.seq.block_table =
                Some(BlockTable { pages: DevSlice::host(step.table), max_pages: MAX_PAGES });
            args.cache = CacheArgs::default()
                .k_new(DevSlice::host(&k_new))
                .v_new(DevSlice::host(&v_new))
                .cos(DevSlice::host(&self.cos))
                .sin(DevSlice::host(&self.sin));
            plan.run(&mut args, &backend.default_stream())?;
            for (x, o) in x.iter_mut().zip(layer.o.times(&o)) {
                *x += o;
            }
            let hidden: Vec<f32> = layer.up.times(&x).into_iter().map(|h| h.max(0.0)).collect();
            for (x, y) in x.iter_mut().zip(layer.down.times(&hidden)) {
                *x += y;
            }
        }
        let last = |ends: &[i32]| match (ends[0], ends[1]) {
            (begin, end) if begin == end => Vec::new(),
            (_, end) => self.head.times(&x[(end as usize - 1) * WIDTH..end as usize * WIDTH]),
        };
        Ok(offsets.windows(2).map(last).collect())
    }
}

fn main() -> Result<(), Error> {
    let backend = Device::open(Backend::Cpu)?;
    let model = Model::random(7);
    let prefix: Vec<usize> = (0..PAGE as usize).map(|n| n * 5 % VOCABULARY).collect();
    let prompt = |rest: &[usize]| [&prefix[..], rest].concat();
    let mut requests = [prompt(&[3, 1, 4]), prompt(&[1, 5, 9, 2, 6, 5]), prompt(&[35])];

    // Page 0 holds the prefix of all three; the others are each request's own.
    let mut table: Vec<i32> = (0..3 * MAX_PAGES.cast_signed()).collect();
    for request in 1..3 {
        table[request * MAX_PAGES as usize] = 0;
    }
    let mut cache = Cache::new(3 * MAX_PAGES);
    let serving = plan(&backend, 3)?;
    let alone = plan(&backend, 1)?;
    let own_table: Vec<i32> = (0..MAX_PAGES.cast_signed()).collect();

    // The first request writes the shared page; the others come a step later, each from the end of the prefix.
    let mut cached = [0i32, PAGE.cast_signed(), PAGE.cast_signed()];
    let mut tokens_compared = 0;
    for number in 0..20 {
        let arrived = |request: usize| request == 0 || number >= request;
        let new = |request: usize| match arrived(request) {
            true => &requests[request][cached[request] as usize..],
            false => &[][..],
        };
        let step = Step { tokens: (0..3).map(new).collect(), cached: cached.to_vec(), table: &table };
        let logits = model.step((&backend, &serving), &mut cache, &step)?;
        for request in (0..3).filter(|&request| arrived(request)) {
            let again = Step { tokens: vec![&requests[request]], cached: vec![0], table: &own_table };
            let from_nothing =
                model.step((&backend, &alone), &mut Cache::new(MAX_PAGES), &again)?.swap_remove(0);
            let same = logits[request].iter().zip(&from_nothing).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "step {number}, request {request}: other bits than from nothing");
            assert!(from_nothing.iter().all(|x| x.is_finite()), "a row that nobody wrote was read");
            tokens_compared += 1;
            cached[request] = requests[request].len() as i32;
            let best = |best: usize, at: usize| if from_nothing[at] > from_nothing[best] { at } else { best };
            requests[request].push((0..VOCABULARY).fold(0, best));
        }
    }
    for (request, tokens) in requests.iter().enumerate() {
        println!("request {request}: {tokens:?}");
    }
    println!("{tokens_compared} tokens, each with the bits of its request computed alone and from nothing");
    Ok(())
}
