//! A layer that is trained sparse: an indexer chooses 8 of 64 keys for each query, attention sees those alone, and both
//! learn to find the one key that is asked for. It ends with the same lists over a cache in pages.
//!
//! ```sh
//! cargo run --release --example sparse
//! ```
//!
//! The task: a sequence has 64 names in any order, each with one of 8 values; a query has a name and wants its value.
//! Names and values are rows of tables that are learnt. First every key is listed, so that the indexer learns from
//! all of attention's probabilities; then it chooses, as DeepSeek-V3.2 is trained (arXiv 2512.02556).

use fmha::sparse::{
    Candidates, IndexArgs, IndexCall, IndexProblem, index_gradients, index_lists, index_loss, index_scores,
};
use fmha::{
    Backend, BwdArgs, BwdProblem, CacheSlice, DType, DevSlice, DevSliceMut, Device, Dims, Error, FwdArgs,
    FwdProblem, KeyLists, KvLayout, ListEntries, PlanOptions, SeqArgs, Strides, Totals,
};

const BATCH: usize = 32;
const QUERIES: usize = 4;
const NAMES: usize = 64;
const VALUES: usize = 8;
const DIM: usize = 16;
const INDEX_HEADS: usize = 4;
const INDEX_DIM: usize = 16;
const TOPK: usize = 8;
const WARM_UP: usize = 80;
const STEPS: usize = 400;

/// Table of rows that are learned by Adam (Kingma and Ba, arXiv 1412.6980).
struct Table {
    dim: usize,
    rows: Vec<f32>,
    gradient: Vec<f32>,
    moments: Vec<[f32; 2]>,
    steps: i32,
}

impl Table {
    fn new(rows: usize, dim: usize, random: &mut Random) -> Self {
        let count = rows * dim;
        let rows = (0..count).map(|_| random.number() * (3.0 / dim as f32).sqrt()).collect();
        Self { dim, rows, gradient: vec![0.0; count], moments: vec![[0.0; 2]; count], steps: 0 }
    }

    /// Rows with the given numbers, one after another.
    fn gather(&self, rows: &[usize]) -> Vec<f32> {
        rows.iter().flat_map(|&row| &self.rows[row * self.dim..][..self.dim]).copied().collect()
    }

    fn scatter(&mut self, rows: &[usize], gradients: impl IntoIterator<Item = f32>) {
        let places = rows.iter().flat_map(|&row| row * self.dim..(row + 1) * self.dim);
        places.zip(gradients).for_each(|(at, gradient)| self.gradient[at] += gradient);
    }

    fn step(&mut self) {
        const RATE: f32 = 0.02;
        self.steps += 1;
        let correction = |beta: f32| 1.0 - beta.powi(self.steps);
        let (first, second) = (correction(0.9), correction(0.99));
        for ((x, gradient), moments) in self.rows.iter_mut().zip(&mut self.gradient).zip(&mut self.moments) {
            moments[0] += 0.1 * (*gradient - moments[0]);
            moments[1] += 0.01 * (*gradient * *gradient - moments[1]);
            *x -= RATE * moments[0] / first / ((moments[1] / second).sqrt() + 1e-8);
            *gradient = 0.0;
        }
    }
}

/// Random generator SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 33) as usize % bound
    }

    /// A random number in -1 .. 1.
    fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Task: sequences of names with values, and queries for names.
struct Task {
    names: Vec<usize>,
    values: Vec<usize>,
    asked: Vec<usize>,
    wanted: Vec<usize>,
}

impl Task {
    fn draw(random: &mut Random) -> Self {
        let mut task = Self { names: vec![], values: vec![], asked: vec![], wanted: vec![] };
        for _ in 0..BATCH {
            let mut names: Vec<usize> = (0..NAMES).collect();
            (1..NAMES).for_each(|at| names.swap(at, random.below(at + 1)));
            let values: Vec<usize> = (0..NAMES).map(|_| random.below(VALUES)).collect();
            for _ in 0..QUERIES {
                let at = random.below(NAMES);
                task.asked.push(names[at]);
                task.wanted.push(values[at]);
            }
            task.names.extend(names);
            task.values.extend(values);
        }
        task
    }
}

/// Weights of the layer, which training changes.
struct Layer {
    q: Table,
    k: Table,
    v: Table,
    out: Table,
    index_q: Table,
    index_k: Table,
}

fn main() -> Result<(), Error> {
    let random = &mut Random(7);
    let mut layer = Layer {
        q: Table::new(NAMES, DIM, random),
        k: Table::new(NAMES, DIM, random),
        v: Table::new(VALUES, DIM, random),
        out: Table::new(VALUES, DIM, random),
        index_q: Table::new(NAMES, INDEX_HEADS * INDEX_DIM, random),
        index_k: Table::new(NAMES, INDEX_DIM, random),
    };
    let device = Backend::Cpu.open()?;
    for step in 0..STEPS {
        let topk = if step < WARM_UP { NAMES } else { TOPK };
        let report = train(&device, &mut layer, &Task::draw(random), topk)?;
        if step % 50 == 49 {
            println!("step {:3}, {topk:2} of {NAMES} keys: {report}", step + 1);
        }
    }
    let task = Task::draw(random);
    let in_pages = decode_from_pages(&device, &layer, &task)?;
    println!("from pages: {:.1} % right, {} of {NAMES} keys read for each query", 100.0 * in_pages, TOPK);
    assert!(in_pages > 0.9, "the layer has not learnt its task");
    Ok(())
}

/// Call of the indexer for a task.
fn index_call<'a>(q: &'a [f32], k: &'a [f32], weights: &'a [f32]) -> Result<IndexCall<'a>, Error> {
    let problem = IndexProblem {
        batch: BATCH as u32,
        seqlen_q: QUERIES as u32,
        seqlen_k: NAMES as u32,
        num_heads: INDEX_HEADS as u32,
        head_dim: INDEX_DIM as u32,
        dtype_q: DType::F32,
        dtype_k: DType::F32,
    };
    let (q, k) = (DevSlice::host(q), DevSlice::host(k));
    Ok(IndexCall::new(problem, IndexArgs { q, k, weights, k_scale: None, candidates: Candidates::All })?)
}

fn problem(topk: usize) -> FwdProblem {
    let dims =
        Dims::batch(BATCH as u32).seqlens(QUERIES as u32, NAMES as u32).heads(1, 1).head_dim(DIM as u32);
    let problem = FwdProblem::batch(DType::F32, dims).write_lse(true);
    let lists = KeyLists::new(&problem, topk as u32);
    problem.lists(lists)
}

/// Trains the layer by one step and returns its loss.
fn train(device: &Device, layer: &mut Layer, task: &Task, topk: usize) -> Result<String, Error> {
    let rows = BATCH * QUERIES;
    let (index_q, index_k) = (layer.index_q.gather(&task.asked), layer.index_k.gather(&task.names));
    let weights = vec![1.0 / INDEX_HEADS as f32; rows * INDEX_HEADS];
    let call = index_call(&index_q, &index_k, &weights)?;
    let indices = index_lists(&call, topk as u32)?;

    let (q, k, v) = (layer.q.gather(&task.asked), layer.k.gather(&task.names), layer.v.gather(&task.values));
    let (mut o, mut lse) = (vec![0.0f32; rows * DIM], vec![0.0f32; rows]);
    let problem = problem(topk);
    let seq = SeqArgs::default().indices(DevSlice::host(&indices));
    let [q_, k_, v_] = [&q, &k, &v].map(|x| DevSlice::host(x.as_slice()));
    let plan = device.plan_fwd(&problem.clone().validate()?, &PlanOptions::default())?;
    let mut args =
        FwdArgs::new(q_, k_, v_, DevSliceMut::host(&mut o)).lse(DevSliceMut::host(&mut lse)).seq(seq);
    plan.run(&mut args, &device.default_stream())?;

    // Loss: the cross-entropy of the values' scores, O times a table.
    let (mut loss, mut right) = (0.0, 0);
    let mut dout = vec![0.0f32; rows * DIM];
    for row in 0..rows {
        let o = &o[row * DIM..][..DIM];
        let scores: Vec<f32> =
            (0..VALUES).map(|value| dot(o, &layer.out.rows[value * DIM..][..DIM])).collect();
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = scores.iter().map(|score| (score - largest).exp()).sum();
        let wanted = task.wanted[row];
        loss -= (scores[wanted] - largest - sum.ln()) / rows as f32;
        right += usize::from(scores[wanted] == largest);
        for (value, score) in scores.iter().enumerate() {
            let gradient =
                ((score - largest).exp() / sum - f32::from(u8::from(value == wanted))) / rows as f32;
            layer.out.scatter(&[value], o.iter().map(|o| gradient * o));
            let out = &layer.out.rows[value * DIM..][..DIM];
            dout[row * DIM..][..DIM].iter_mut().zip(out).for_each(|(d, out)| *d += gradient * out);
        }
    }

    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| vec![0.0f32; x.len()]);
    let backward = BwdProblem::new(problem).validate()?;
    let plan = device.plan_bwd(&backward, &PlanOptions::default().deterministic(true))?;
    let mut args = BwdArgs::new(
        [q_, k_, v_],
        [DevSlice::host(&o), DevSlice::host(&lse), DevSlice::host(&dout)],
        [&mut dq, &mut dk, &mut dv].map(|x| DevSliceMut::host(x.as_mut_slice())),
    )
    .seq(seq);
    plan.run(&mut args, &device.default_stream())?;
    layer.q.scatter(&task.asked, dq);
    layer.k.scatter(&task.names, dk);
    layer.v.scatter(&task.values, dv);

    // Training moves the indexer's scores towards attention's probabilities for the listed keys.
    let scores = index_scores(&call)?;
    let (mut d_scores, mut divergence) = (vec![0.0f32; indices.len()], 0.0);
    for (row, list) in indices.chunks(topk).enumerate() {
        let first_key = row / QUERIES * NAMES;
        let place = |j: i32| first_key + j.unsigned_abs() as usize;
        let listed: Vec<f32> =
            list.iter().map(|&j| scores[row * NAMES + j.unsigned_abs() as usize]).collect();
        let probability = |&j: &i32| {
            let product = dot(&q[row * DIM..][..DIM], &k[place(j) * DIM..][..DIM]);
            (product / (DIM as f32).sqrt() - lse[row]).exp()
        };
        let target: Vec<f32> = list.iter().map(probability).collect();
        divergence += index_loss(&listed, &target, &mut d_scores[row * topk..][..topk])? / rows as f64;
    }
    d_scores.iter_mut().for_each(|gradient| *gradient /= rows as f32);
    let gradients = index_gradients(&call, (&indices, topk), &d_scores)?;
    layer.index_q.scatter(&task.asked, gradients.q.iter().map(|&x| x as f32));
    layer.index_k.scatter(&task.names, gradients.k.iter().map(|&x| x as f32));
    let Layer { q, k, v, out, index_q, index_k } = layer;
    [q, k, v, out, index_q, index_k].into_iter().for_each(Table::step);
    let percent = 100.0 * right as f32 / rows as f32;
    Ok(format!("loss {loss:.3}, {percent:5.1} % right, indexer's divergence {divergence:.3}"))
}

/// Share of queries that are answered correctly over a cache in pages of 16 keys, with lists of addresses.
fn decode_from_pages(device: &Device, layer: &Layer, task: &Task) -> Result<f32, Error> {
    const PAGE: usize = 16;
    let rows = BATCH * QUERIES;
    let (index_q, index_k) = (layer.index_q.gather(&task.asked), layer.index_k.gather(&task.names));
    let weights = vec![1.0 / INDEX_HEADS as f32; rows * INDEX_HEADS];
    let mut indices = index_lists(&index_call(&index_q, &index_k, &weights)?, TOPK as u32)?;
    // The pages of a sequence are adjacent here, so a key's address is its index among all keys.
    for (row, list) in indices.chunks_mut(TOPK).enumerate() {
        list.iter_mut().for_each(|key| *key += (row / QUERIES * NAMES) as i32);
    }
    let (q, k, v) = (layer.q.gather(&task.asked), layer.k.gather(&task.names), layer.v.gather(&task.values));
    let mut o = vec![0.0f32; rows * DIM];
    let mut problem = problem(TOPK).write_lse(false).kv_layout(KvLayout::Paged { page_size: PAGE as u32 });
    (problem.strides.k, problem.strides.v) =
        (Strides::bshd(problem.shape_k()), Strides::bshd(problem.shape_v()));
    problem.lists = problem.lists.map(|lists| lists.entries(ListEntries::Addresses));
    let totals = Totals { num_pages: Some((k.len() / DIM / PAGE) as u32), ..Totals::NONE };
    let seq = SeqArgs::default().totals(totals).indices(DevSlice::host(&indices));
    let plan = device.plan_fwd(&problem.validate()?, &PlanOptions::default())?;
    let [q, k, v] = [&q, &k, &v].map(|x| DevSlice::host(x.as_slice()));
    let mut args =
        FwdArgs::new(q, CacheSlice::Read(k), CacheSlice::Read(v), DevSliceMut::host(&mut o)).seq(seq);
    plan.run(&mut args, &device.default_stream())?;
    let is_right = |row: &usize| {
        let score = |value: usize| dot(&o[row * DIM..][..DIM], &layer.out.rows[value * DIM..][..DIM]);
        (0..VALUES).all(|value| score(value) <= score(task.wanted[*row]))
    };
    Ok((0..rows).filter(is_right).count() as f32 / rows as f32)
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
