//! A tiny decoder with random weights by seed. The host multiplies its matrices, one row at a time, so a
//! row's result does not depend on other rows. The device computes its attention.

use fmha::{Error, f16};

use crate::attention::{Attention, Step};

pub(crate) const LAYERS: usize = 2;
pub(crate) const HEADS_Q: u32 = 4;
pub(crate) const HEADS_KV: u32 = 2;
pub(crate) const HEAD_DIM: u32 = 16;
/// Most tokens of a request, prompt and answer together.
pub(crate) const MAX_LEN: u32 = 128;
pub(crate) const VOCABULARY: usize = 61;
pub(crate) const WIDTH: usize = (HEADS_Q * HEAD_DIM) as usize;
pub(crate) const WIDTH_KV: usize = (HEADS_KV * HEAD_DIM) as usize;

/// Matrix that multiplies rows one at a time, so a row's result does not depend on other rows.
pub(crate) struct Matrix {
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

pub(crate) struct Model {
    embedding: Matrix,
    layers: Vec<Layer>,
    head: Matrix,
    /// Cosines of rotary embedding, `[MAX_LEN, HEAD_DIM / 2]`.
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
}

impl Model {
    pub(crate) fn random(seed: u64) -> Self {
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

    /// Logits after the last new token of each request; empty for a request without new tokens.
    pub(crate) fn step(&self, attention: &mut Attention, step: &Step<'_>) -> Result<Vec<Vec<f32>>, Error> {
        let offsets = attention.begin(step)?;
        let x = self.layers(&step.tokens.concat(), |at, q, k, v| attention.layer(at, q, k, v))?;
        let last = |ends: &[i32]| match (ends[0], ends[1]) {
            (begin, end) if begin == end => Vec::new(),
            (_, end) => self.head.times(&x[(end as usize - 1) * WIDTH..end as usize * WIDTH]),
        };
        Ok(offsets.windows(2).map(last).collect())
    }

    /// Logits after each token of a request, with attention computed by its definition in f64, without cache and
    /// device.
    pub(crate) fn reference(&self, tokens: &[usize]) -> Result<Vec<Vec<f32>>, Error> {
        let x = self.layers(tokens, |_, q, k, v| Ok(self.attend(q, k, v)))?;
        Ok(x.chunks(WIDTH).map(|row| self.head.times(row)).collect())
    }

    /// Passes rows of tokens through all layers, whose attention is `attend(layer, q, k, v)`.
    fn layers(
        &self,
        tokens: &[usize],
        mut attend: impl FnMut(usize, &[f32], &[f32], &[f32]) -> Result<Vec<f32>, Error>,
    ) -> Result<Vec<f32>, Error> {
        let row = |&token: &usize| &self.embedding.weights[token * WIDTH..][..WIDTH];
        let mut x: Vec<f32> = tokens.iter().flat_map(row).copied().collect();
        for (at, layer) in self.layers.iter().enumerate() {
            let o = attend(at, &layer.q.times(&x), &layer.k.times(&x), &layer.v.times(&x))?;
            for (x, o) in x.iter_mut().zip(layer.o.times(&o)) {
                *x += o;
            }
            let hidden: Vec<f32> = layer.up.times(&x).into_iter().map(|h| h.max(0.0)).collect();
            for (x, y) in x.iter_mut().zip(layer.down.times(&hidden)) {
                *x += y;
            }
        }
        Ok(x)
    }

    /// Causal attention of one request's rows, rotated to their positions, on f16 operands like the cache's.
    fn attend(&self, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let dim = HEAD_DIM as usize;
        let rounded = |x: &f32| f64::from(f16::from_f32(*x).to_f32());
        let turned = |row: &[f32], position: usize| -> Vec<f64> {
            let (half, row) = (dim / 2, row.iter().map(rounded).collect::<Vec<_>>());
            let factors = |at: usize| {
                let at = position * half + at % half;
                (f64::from(self.cos[at]), f64::from(self.sin[at]))
            };
            let other = |at: usize| if at < half { -row[at + half] } else { row[at - half] };
            (0..dim).map(|at| row[at] * factors(at).0 + other(at) * factors(at).1).collect()
        };
        let mut o = Vec::with_capacity(q.len());
        for (position, row) in q.chunks(WIDTH).enumerate() {
            for (head, row) in row.chunks(dim).enumerate() {
                let at = head / (HEADS_Q / HEADS_KV) as usize * dim;
                let row = turned(row, position);
                let score = |(j, key): (usize, &[f32])| {
                    let key = turned(&key[at..at + dim], j);
                    row.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / f64::from(HEAD_DIM).sqrt()
                };
                let scores: Vec<f64> = k.chunks(WIDTH_KV).enumerate().take(position + 1).map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let sum: f64 = weights.iter().sum();
                o.extend((0..dim).map(|column| {
                    let of_key = |(weight, value): (&f64, &[f32])| weight * rounded(&value[at + column]);
                    (weights.iter().zip(v.chunks(WIDTH_KV)).map(of_key).sum::<f64>() / sum) as f32
                }));
            }
        }
        o
    }
}

/// Token with the largest logit, which greedy decoding chooses.
pub(crate) fn best(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best })
}
