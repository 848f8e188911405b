//! Rollout and training with equal bits: `cargo run --release --example rollout -- --device cpu --tokens 40`.
//!
//! A small policy with random weights samples answers to several prompts at once, over a paged cache: each step is one
//! call, in which some requests are at a piece of their prompt and others at their next token. A trainer then computes
//! the log-probabilities of the sampled tokens again, all sequences packed in one call. Both plans are asked for
//! `row_invariant`, so the difference is 0, to the bit.

use fmha::{
    Backend, BlockTable, DType, DevBuffer, Device, Dims, ElemType, Error, FwdArgs, FwdPlan, FwdProblem,
    KvLayout, MaskSpec, PlanOptions, QLayout, SeqArgs, Totals, f16,
};

const HEADS_Q: u32 = 4;
const HEADS_KV: u32 = 2;
const HEAD_DIM: u32 = 32;
const WIDTH: usize = (HEADS_Q * HEAD_DIM) as usize;
const WIDTH_KV: usize = (HEADS_KV * HEAD_DIM) as usize;
const VOCABULARY: usize = 53;
/// Tokens of a page, and of each piece of a prompt.
const PAGE: u32 = 7;
const PIECE: usize = 16;
/// Tokens of each prompt.
const PROMPTS: [usize; 3] = [3, 50, 21];

/// Random generator with a seed.
struct Random(u64);

impl Random {
    /// Random number from 0 to 1.
    fn number(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }

    fn matrix(&mut self, rows: usize, columns: usize) -> Matrix {
        let weights = (0..rows * columns).map(|_| self.number() * 4.0 - 2.0).collect();
        Matrix { columns, weights }
    }
}

/// A matrix that multiplies rows one at a time, so that a row's result does not depend on others.
struct Matrix {
    columns: usize,
    weights: Vec<f32>,
}

impl Matrix {
    fn times(&self, row: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; self.columns];
        for (x, weights) in row.iter().zip(self.weights.chunks(self.columns)) {
            out.iter_mut().zip(weights).for_each(|(out, weight)| *out += x * weight);
        }
        out
    }

    fn row(&self, at: usize) -> &[f32] {
        &self.weights[at * self.columns..][..self.columns]
    }
}

/// Policy model: one layer of attention between an embedding and a head.
struct Policy {
    embedding: Matrix,
    q: Matrix,
    k: Matrix,
    v: Matrix,
    head: Matrix,
}

impl Policy {
    fn new(random: &mut Random) -> Self {
        Self {
            embedding: random.matrix(VOCABULARY, 24),
            q: random.matrix(24, WIDTH),
            k: random.matrix(24, WIDTH_KV),
            v: random.matrix(24, WIDTH_KV),
            head: random.matrix(WIDTH, VOCABULARY),
        }
    }

    /// Projects tokens to rows in f16.
    fn project(&self, by: &Matrix, tokens: &[usize]) -> Vec<f16> {
        tokens.iter().flat_map(|&token| by.times(self.embedding.row(token))).map(f16::from_f32).collect()
    }

    /// Log-probabilities of the next token, from a row of O.
    fn log_probabilities(&self, o: &[f16]) -> Vec<f32> {
        let row: Vec<f32> = o.iter().map(|x| x.to_f32()).collect();
        let logits = self.head.times(&row);
        let most = logits.iter().fold(f32::NEG_INFINITY, |most, &logit| most.max(logit));
        let sum: f32 = logits.iter().map(|logit| (logit - most).exp()).sum();
        logits.iter().map(|logit| logit - most - sum.ln()).collect()
    }
}

/// Request: its tokens, the number of those in the cache, and the log-probabilities of sampled tokens.
struct Request {
    tokens: Vec<usize>,
    prompt: usize,
    cached: usize,
    sampled: Vec<f32>,
}

fn dims(batch: usize, seqlen_q: usize, seqlen_k: usize) -> Dims {
    Dims::batch(batch as u32)
        .seqlens(seqlen_q as u32, seqlen_k as u32)
        .heads(HEADS_Q, HEADS_KV)
        .head_dim(HEAD_DIM)
}

/// Makes a causal plan whose rows have equal bits in every call.
fn plan(device: &Device, keys: KvLayout, dims: Dims) -> Result<FwdPlan, Error> {
    let mut problem = FwdProblem::new(QLayout::Packed, keys, DType::F16, dims).mask(MaskSpec::CAUSAL);
    problem.layout.seqused_k = matches!(keys, KvLayout::Paged { .. });
    device.plan_fwd(&problem.validate()?, &PlanOptions::default().row_invariant(true))
}

/// Offsets of sequences with the given lengths.
fn offsets(lengths: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut all = vec![0];
    all.extend(lengths.scan(0, |sum, length| {
        *sum += length as i32;
        Some(*sum)
    }));
    all
}

/// Samples `answer` tokens for each prompt.
fn roll_out(
    device: &Device,
    policy: &Policy,
    answer: usize,
    random: &mut Random,
) -> Result<Vec<Request>, Error> {
    let new = |&prompt: &usize| {
        let tokens = (0..prompt).map(|at| (at * 7 + prompt) % VOCABULARY).collect();
        Request { tokens, prompt, cached: 0, sampled: Vec::new() }
    };
    let mut requests: Vec<Request> = PROMPTS.iter().map(new).collect();
    let longest = PROMPTS.iter().max().unwrap_or(&0) + answer;
    let pages = (longest as u32).div_ceil(PAGE);
    let count = requests.len();
    let plan =
        plan(device, KvLayout::Paged { page_size: PAGE }, dims(count, PIECE, (pages * PAGE) as usize))?;
    let memory = device.memory();
    let halves = |count: usize| memory.alloc_of(DType::F16, count as u64);
    // The pages of a request are not adjacent: page p of request r is page p * count + r of the pool.
    let rows = count * (pages * PAGE) as usize;
    let [mut host_k, mut host_v] = [0, 1].map(|_| vec![f16::NAN; rows * WIDTH_KV]);
    let (mut k, mut v) = (halves(rows * WIDTH_KV)?, halves(rows * WIDTH_KV)?);
    let (mut q, mut o) = (halves(count * PIECE * WIDTH)?, halves(count * PIECE * WIDTH)?);
    let table: Vec<i32> =
        (0..count).flat_map(|r| (0..pages as usize).map(move |p| (p * count + r) as i32)).collect();
    let table = memory.place(&table)?;
    let (mut begins, mut used) =
        (memory.alloc_of(ElemType::I32, count as u64 + 1)?, memory.alloc_of(ElemType::I32, count as u64)?);
    let mut scratch = memory.workspace(plan.workspace())?;
    let stream = device.default_stream();

    while requests.iter().any(|request| request.tokens.len() < request.prompt + answer) {
        // A request contributes a piece of its prompt, its last token, or nothing.
        let taken: Vec<usize> = requests
            .iter()
            .map(|request| {
                if request.sampled.len() < answer {
                    (request.tokens.len() - request.cached).min(PIECE)
                } else {
                    0
                }
            })
            .collect();
        let mut of_q = Vec::new();
        for (r, (request, &taken)) in requests.iter_mut().zip(&taken).enumerate() {
            let tokens = &request.tokens[request.cached..][..taken];
            of_q.extend(policy.project(&policy.q, tokens));
            for (by, to) in [(&policy.k, &mut host_k), (&policy.v, &mut host_v)] {
                for (at, row) in policy.project(by, tokens).chunks(WIDTH_KV).enumerate() {
                    let position = request.cached + at;
                    let page = position / PAGE as usize * count + r;
                    let place = (page * PAGE as usize + position % PAGE as usize) * WIDTH_KV;
                    to[place..place + WIDTH_KV].copy_from_slice(row);
                }
            }
            request.cached += taken;
        }
        let total = taken.iter().sum::<usize>() as u32;
        let rows_of = offsets(taken.iter().copied());
        let lengths: Vec<i32> = requests.iter().map(|request| request.cached as i32).collect();
        memory.upload(&of_q, &mut q)?;
        memory.upload(&host_k, &mut k)?;
        memory.upload(&host_v, &mut v)?;
        memory.upload(&rows_of, &mut begins)?;
        memory.upload(&lengths, &mut used)?;
        let totals = Totals { total_q: Some(total), num_pages: Some(count as u32 * pages), ..Totals::NONE };
        let seq = SeqArgs::default()
            .totals(totals)
            .cu_seqlens_q(begins.slice())
            .seqused_k(used.slice())
            .block_table(BlockTable { pages: table.slice(), max_pages: pages });
        let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut())
            .seq(seq)
            .workspace(scratch.as_mut().map(DevBuffer::slice_mut));
        plan.run(&mut args, &stream)?;
        stream.synchronize()?;
        let mut of_o = vec![f16::ZERO; of_q.len()];
        memory.download(&o, &mut of_o)?;
        for ((request, &taken), &begin) in requests.iter_mut().zip(&taken).zip(&rows_of) {
            // The next token is sampled only after a prompt's last piece or after a single token.
            if taken == 0 || request.cached < request.tokens.len() {
                continue;
            }
            let row = (begin as usize + taken - 1) * WIDTH;
            let chances = policy.log_probabilities(&of_o[row..row + WIDTH]);
            let mut left = random.number();
            let drawn = chances.iter().position(|chance| {
                left -= chance.exp();
                left <= 0.0
            });
            let token = drawn.unwrap_or(VOCABULARY - 1);
            request.tokens.push(token);
            request.sampled.push(chances[token]);
        }
    }
    Ok(requests)
}

/// Computes log-probabilities of the sampled tokens, with all sequences packed in one call.
fn train(device: &Device, policy: &Policy, requests: &[Request]) -> Result<Vec<Vec<f32>>, Error> {
    // The last token was sampled and is no input.
    let inputs = |request: &Request| request.tokens.len() - 1;
    let longest = requests.iter().map(inputs).max().unwrap_or(0);
    let plan = plan(device, KvLayout::Packed, dims(requests.len(), longest, longest))?;
    println!("trainer on {}: {}, {}", device.name(), plan.kernel(), plan.promises());
    let memory = device.memory();
    let of = |by: &Matrix| -> Result<DevBuffer, Error> {
        let rows = requests.iter().flat_map(|request| policy.project(by, &request.tokens[..inputs(request)]));
        memory.place(&rows.collect::<Vec<f16>>())
    };
    let (q, k, v) = (of(&policy.q)?, of(&policy.k)?, of(&policy.v)?);
    let begins = offsets(requests.iter().map(inputs));
    let total = begins[begins.len() - 1] as u32;
    let mut o = memory.alloc_of(DType::F16, u64::from(total) * WIDTH as u64)?;
    let places = memory.place(&begins)?;
    let mut scratch = memory.workspace(plan.workspace())?;
    let stream = device.default_stream();
    let totals = Totals { total_q: Some(total), total_k: Some(total), ..Totals::NONE };
    let seq = SeqArgs::default().totals(totals).cu_seqlens_q(places.slice()).cu_seqlens_k(places.slice());
    let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut())
        .seq(seq)
        .workspace(scratch.as_mut().map(DevBuffer::slice_mut));
    plan.run(&mut args, &stream)?;
    stream.synchronize()?;
    let mut of_o = vec![f16::ZERO; total as usize * WIDTH];
    memory.download(&o, &mut of_o)?;
    let of_request = |(request, &begin): (&Request, &i32)| {
        let sampled = request.prompt..request.tokens.len();
        let chance = |at: usize| {
            let row = (begin as usize + at - 1) * WIDTH;
            policy.log_probabilities(&of_o[row..row + WIDTH])[request.tokens[at]]
        };
        sampled.map(chance).collect()
    };
    Ok(requests.iter().zip(&begins).map(of_request).collect())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut name, mut answer) = ("auto".to_owned(), 12);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word} has no value"))?;
        match word.as_str() {
            "--device" => name = value,
            "--tokens" => answer = value.parse().map_err(|error| format!("{word} {value}: {error}"))?,
            _ => return Err(format!("{word} is neither --device nor --tokens").into()),
        }
    }
    let mut random = Random(7);
    let policy = Policy::new(&mut random);
    let backend: Backend = name.parse()?;
    let mut device = backend.open()?;
    let requests = match roll_out(&device, &policy, answer, &mut random) {
        // The device's kernels do not promise equal bits. The CPU serves in its place, with a message, unless the user
        // has chosen the device.
        Err(error @ Error::Unsupported { .. }) if name == "auto" => {
            println!("{error}\nso the CPU serves");
            device = Backend::Cpu.open()?;
            roll_out(&device, &policy, answer, &mut random)?
        }
        other => other?,
    };
    let trained = train(&device, &policy, &requests)?;
    let pairs =
        || requests.iter().zip(&trained).flat_map(|(request, trained)| request.sampled.iter().zip(trained));
    let most = pairs().map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max);
    println!("{} sampled tokens; largest difference of a log-probability: {most:e}", pairs().count());
    if let Some((a, b)) = pairs().find(|(a, b)| a.to_bits() != b.to_bits()) {
        return Err(format!("a log-probability is {a:e} in the rollout and {b:e} in training").into());
    }
    Ok(())
}
