//! Compares every function with attention written out in f64 in candle's own operations; candle's autograd gives
//! the expected gradients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod plain;

use candle_core::{DType, Device, Tensor, Var};
use fmha_candle::{BlockLists, Options, Sequences, Small};
use plain::{Plain, close, device, difference, f64s, random};
use rand::SeedableRng;
use rand::rngs::StdRng;

const F32: f64 = 2e-6;
const GRADIENT: f64 = 1e-5;

/// Q, K and V `[batch, seqlen, heads, head_dim]` as variables, in f32 and in f64.
struct Case {
    f32s: [Var; 3],
    f64s: [Var; 3],
}

impl Case {
    fn new(seed: u64, dims: [&[usize]; 3], dtype: DType) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let f32s =
            dims.map(|dims| Var::from_tensor(&random(&mut rng, dims).to_dtype(dtype).unwrap()).unwrap());
        let f64s = [0, 1, 2].map(|at| Var::from_tensor(&f32s[at].to_dtype(DType::F64).unwrap()).unwrap());
        Self { f32s, f64s }
    }

    /// O and LSE of each sequence of the batch, written out.
    fn plain(&self, plain: &Plain) -> (Tensor, Tensor) {
        let [q, k, v] = &self.f64s;
        let batch = q.dim(0).unwrap();
        let (mut os, mut lses) = (Vec::new(), Vec::new());
        for b in 0..batch {
            let (o, lse) = plain.attend(&q.get(b).unwrap(), &k.get(b).unwrap(), &v.get(b).unwrap()).unwrap();
            os.push(o);
            lses.push(lse);
        }
        (Tensor::stack(&os, 0).unwrap(), Tensor::stack(&lses, 0).unwrap())
    }

    /// Compares `o` and its gradients with those of `plain`, for a random dO.
    fn check(&self, o: &Tensor, plain: &Tensor, tolerance: f64, gradient: f64) {
        close(o, plain, tolerance);
        let dout = random(&mut StdRng::seed_from_u64(99), o.dims());
        let loss =
            (o * dout.to_dtype(o.dtype()).unwrap()).unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap();
        let found = loss.backward().unwrap();
        let right =
            (plain * dout.to_dtype(DType::F64).unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
        for (name, (found_of, right_of)) in ["q", "k", "v"].iter().zip(self.f32s.iter().zip(&self.f64s)) {
            let differ = difference(found.get(found_of).unwrap(), right.get(right_of).unwrap());
            assert!(differ <= gradient, "d{name} differs by {differ}");
        }
    }
}

/// Options with which f32 is computed on a GPU too.
fn allowing() -> Options {
    Options::default().allow_fallback(true)
}

#[test]
fn flash_attn_of_equal_lengths_and_its_gradients() {
    for (seed, causal, dims) in [
        (1, false, [[2, 9, 4, 24], [2, 13, 2, 24], [2, 13, 2, 24]]),
        (2, true, [[2, 9, 4, 24], [2, 13, 2, 24], [2, 13, 2, 24]]),
        (3, true, [[1, 17, 3, 5], [1, 6, 1, 5], [1, 6, 1, 7]]),
    ] {
        let case = Case::new(seed, [&dims[0], &dims[1], &dims[2]], DType::F32);
        let [q, k, v] = &case.f32s;
        let plain = if causal { Plain::causal(dims[0][3]) } else { Plain::new(dims[0][3]) };
        let o = fmha_candle::flash_attn(q, k, v, plain.scale as f32, causal).unwrap();
        case.check(&o, &case.plain(&plain).0, F32, GRADIENT);
    }
}

#[test]
fn each_mask_as_data_that_spells_causal_is_causal_with_its_gradients() {
    let (rows, dims) = (9u32, [2, 9, 4, 24]);
    let case = Case::new(5, [&dims, &dims, &dims], DType::F32);
    let [q, k, v] = &case.f32s;
    let plain = Plain::causal(dims[3]);
    let (exact, _) = case.plain(&plain);
    let tensor = |numbers: Vec<i32>, shape: &[usize]| Tensor::from_vec(numbers, shape, &device()).unwrap();
    let ends = (0..2).flat_map(|end| (0..9).map(move |row| end * (row + 1))).collect();
    let ends = tensor(ends, &[1, 1, 2, 9]);
    let words = Tensor::from_vec((0..rows).map(|row| (2u32 << row) - 1).collect(), (1, 1, 9, 1), &device());
    let counts = tensor((1..=9).collect(), &[1, 1, 9]);
    let indices = tensor((0..9).flat_map(|_| 0..9).collect(), &[1, 1, 9, 9]);
    let lists =
        BlockLists { block_q: 1, block_k: 1, partial: None, full: Some([counts.clone(), indices.clone()]) };
    let masks = [
        allowing().intervals(&ends),
        allowing().mask_bits(&words.unwrap()),
        allowing().block_lists(lists.clone()),
    ];
    for options in masks {
        let (o, _) = fmha_candle::attention(q, k, v, &options.softmax_scale(plain.scale as f32)).unwrap();
        case.check(&o, &exact, F32, GRADIENT);
    }
    let refused = |options: Options| fmha_candle::attention(q, k, v, &options).unwrap_err().to_string();
    for (options, said) in [
        (allowing().intervals(&ends.narrow(3, 0, 8).unwrap()), "intervals has 8 queries, where 9"),
        (allowing().intervals(&ends.narrow(2, 0, 1).unwrap()), "intervals has 1 endpoints a row"),
        (allowing().intervals(&ends.to_dtype(DType::F32).unwrap()), "intervals is f32"),
        (allowing().mask_bits(&ends), "mask_bits has 2 queries"),
        (
            allowing().block_lists(BlockLists { block_q: 0, ..lists.clone() }),
            "block_lists.block_q 0 is not in 1..=",
        ),
        (allowing().block_lists(BlockLists { full: None, ..lists.clone() }), "block_lists has 0 lists"),
    ] {
        let error = refused(options);
        assert!(error.contains(said), "{error}, not {said}");
    }
}

#[test]
fn sixteen_bits_are_as_good_as_sixteen_bits_allow() {
    for (dtype, tolerance) in [(DType::F16, 2e-3), (DType::BF16, 1.6e-2)] {
        let case = Case::new(4, [&[2, 33, 4, 64], &[2, 40, 2, 64], &[2, 40, 2, 64]], dtype);
        let [q, k, v] = &case.f32s;
        let plain = Plain::causal(64);
        let o = fmha_candle::flash_attn(q, k, v, 0.125, true).unwrap();
        assert_eq!(o.dtype(), dtype);
        case.check(&o, &case.plain(&plain).0, tolerance, 8.0 * tolerance);
    }
}

#[test]
fn windows_alibi_and_softcap() {
    let dims: [&[usize]; 3] = [&[2, 11, 4, 16], &[2, 15, 2, 16], &[2, 15, 2, 16]];
    let slopes = [0.5f32, 0.25, 0.125, 0.0625];
    let tensor = Tensor::new(&slopes, &device()).unwrap();
    let of_slopes = || Some(slopes.iter().map(|&slope| f64::from(slope)).collect());
    let case = Case::new(5, dims, DType::F32);
    let [q, k, v] = &case.f32s;
    let scale = 0.25;

    for (left, right) in
        [(Some(3), Some(0)), (Some(2), Some(4)), (None, Some(1)), (Some(5), None), (Some(400), Some(0))]
    {
        let plain = Plain { left, right, ..Plain::new(16) };
        let o = fmha_candle::flash_attn_windowed(q, k, v, scale, left, right).unwrap();
        case.check(&o, &case.plain(&plain).0, F32, GRADIENT);
    }
    let plain = Plain { slopes: of_slopes(), ..Plain::causal(16) };
    let o = fmha_candle::flash_attn_alibi(q, k, v, &tensor, scale, true).unwrap();
    case.check(&o, &case.plain(&plain).0, F32, GRADIENT);

    let plain = Plain { slopes: of_slopes(), left: Some(6), right: Some(2), ..Plain::new(16) };
    let o = fmha_candle::flash_attn_alibi_windowed(q, k, v, &tensor, scale, Some(6), Some(2)).unwrap();
    case.check(&o, &case.plain(&plain).0, F32, GRADIENT);

    let plain = Plain { softcap: Some(0.75), left: Some(6), right: Some(0), ..Plain::new(16) };
    let o =
        fmha_candle::flash_attn_alibi_windowed_softcap(q, k, v, None, scale, Some(6), Some(0), 0.75).unwrap();
    case.check(&o, &case.plain(&plain).0, F32, GRADIENT);
}

#[test]
fn lse_is_the_natural_logarithm_and_minus_infinity_without_a_key() {
    let case = Case::new(6, [&[1, 9, 2, 8], &[1, 4, 2, 8], &[1, 4, 2, 8]], DType::F32);
    let [q, k, v] = &case.f32s;
    let (o, lse) = fmha_candle::attention(q, k, v, &allowing().causal()).unwrap();
    let (plain_o, plain_lse) = case.plain(&Plain::causal(8));
    close(&lse, &plain_lse, F32);
    assert_eq!(f64s(&lse)[0], f64::NEG_INFINITY);
    case.check(&o, &plain_o, F32, GRADIENT);
}

/// Three sequences of a packed batch, one of them without queries, one without keys.
struct PackedCase {
    case: Case,
    lengths: [(usize, usize); 4],
    sequences: Sequences,
}

impl PackedCase {
    fn new(seed: u64, dtype: DType) -> Self {
        let lengths = [(7, 9), (0, 3), (5, 0), (6, 12)];
        let total = |of: fn(&(usize, usize)) -> usize| lengths.iter().map(of).sum::<usize>();
        let (total_q, total_k) = (total(|l| l.0), total(|l| l.1));
        let case = Case::new(seed, [&[total_q, 4, 16], &[total_k, 2, 16], &[total_k, 2, 16]], dtype);
        let offsets = |of: fn(&(usize, usize)) -> usize| {
            let mut sum = 0u32;
            let offsets = std::iter::once(0).chain(lengths.iter().map(|length| {
                sum += of(length) as u32;
                sum
            }));
            Tensor::new(offsets.collect::<Vec<_>>(), &device()).unwrap()
        };
        let sequences = Sequences {
            seqlens_q: offsets(|l| l.0),
            seqlens_k: offsets(|l| l.1),
            max_seqlen_q: 7,
            max_seqlen_k: 12,
            block_table: None,
        };
        Self { case, lengths, sequences }
    }

    /// O and LSE of the packed batch, written out.
    fn plain(&self, plain: &Plain) -> (Tensor, Tensor) {
        let [q, k, v] = &self.case.f64s;
        let (mut at_q, mut at_k) = (0, 0);
        let (mut os, mut lses) = (Vec::new(), Vec::new());
        for (seqlen_q, seqlen_k) in self.lengths {
            if seqlen_q > 0 && seqlen_k > 0 {
                let [q, k, v] = [(q, at_q, seqlen_q), (k, at_k, seqlen_k), (v, at_k, seqlen_k)]
                    .map(|(tensor, from, count)| tensor.narrow(0, from, count).unwrap());
                let (o, lse) = plain.attend(&q, &k, &v).unwrap();
                os.push(o);
                lses.push(lse);
            } else if seqlen_q > 0 {
                os.push(Tensor::zeros((seqlen_q, 4, 16), DType::F64, &device()).unwrap());
                lses.push(Tensor::full(f64::NEG_INFINITY, (4, seqlen_q), &device()).unwrap());
            }
            (at_q, at_k) = (at_q + seqlen_q, at_k + seqlen_k);
        }
        (Tensor::cat(&os, 0).unwrap(), Tensor::cat(&lses, 1).unwrap())
    }
}

#[test]
fn packed_sequences_and_their_gradients() {
    let packed = PackedCase::new(7, DType::F32);
    let [q, k, v] = &packed.case.f32s;
    let Sequences { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k, .. } = &packed.sequences;
    let (max_q, max_k) = (*max_seqlen_q, *max_seqlen_k);
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &device()).unwrap();
    let of_slopes = || Some(vec![0.5, 0.25, 0.125, 0.0625]);
    let check = |o: &Tensor, plain: Plain| packed.case.check(o, &packed.plain(&plain).0, F32, GRADIENT);

    let o = fmha_candle::flash_attn_varlen(q, k, v, seqlens_q, seqlens_k, max_q, max_k, 0.25, true).unwrap();
    check(&o, Plain::causal(16));
    let (_, lse) = fmha_candle::attention_varlen(q, k, v, &packed.sequences, &allowing().causal()).unwrap();
    close(&lse, &packed.plain(&Plain::causal(16)).1, F32);

    let (left, right) = (Some(3), Some(1));
    let o = fmha_candle::flash_attn_varlen_windowed(
        q, k, v, seqlens_q, seqlens_k, max_q, max_k, 0.25, left, right,
    )
    .unwrap();
    check(&o, Plain { left, right, ..Plain::new(16) });
    let o = fmha_candle::flash_attn_varlen_alibi(
        q, k, v, &slopes, seqlens_q, seqlens_k, max_q, max_k, 0.25, false,
    )
    .unwrap();
    check(&o, Plain { slopes: of_slopes(), ..Plain::new(16) });
    let o = fmha_candle::flash_attn_varlen_alibi_windowed(
        q, k, v, &slopes, seqlens_q, seqlens_k, max_q, max_k, 0.25, left, right,
    )
    .unwrap();
    check(&o, Plain { slopes: of_slopes(), left, right, ..Plain::new(16) });
    let o = fmha_candle::flash_attn_varlen_alibi_windowed_softcap(
        q,
        k,
        v,
        Some(&slopes),
        seqlens_q,
        seqlens_k,
        max_q,
        max_k,
        0.25,
        left,
        right,
        0.75,
    )
    .unwrap();
    check(&o, Plain { slopes: of_slopes(), left, right, softcap: Some(0.75), ..Plain::new(16) });
}

#[test]
fn a_paged_cache_is_its_keys_in_their_order() {
    let packed = PackedCase::new(8, DType::F32);
    let [q, k, v] = &packed.case.f32s;
    let page = 4;
    // The pages of sequences of 9, 3, 0 and 12 keys, shuffled; NaN where no key lies.
    let rows = [3usize, 1, 0, 3];
    let order = [5u32, 0, 3, 6, 2, 1, 4];
    let mut table = vec![0u32; 4 * 3];
    let mut pages = vec![vec![None; page]; order.len()];
    let (mut next, mut key) = (0, 0);
    for (sequence, (&count, &(_, keys))) in rows.iter().zip(&packed.lengths).enumerate() {
        for at in 0..count {
            let number = order[next];
            next += 1;
            table[sequence * 3 + at] = number;
            for row in 0..page.min(keys - at * page) {
                pages[number as usize][row] = Some(key);
                key += 1;
            }
        }
    }
    let paged = |tensor: &Tensor| {
        let nan = Tensor::full(f32::NAN, (2, 16), &device()).unwrap();
        let rows: Vec<Tensor> = pages
            .iter()
            .flatten()
            .map(|row| row.map_or_else(|| nan.clone(), |row| tensor.get(row).unwrap()))
            .collect();
        Tensor::stack(&rows, 0).unwrap().reshape((order.len(), page, 2, 16)).unwrap()
    };
    let table = Tensor::from_vec(table, (4, 3), &device()).unwrap();
    let Sequences { seqlens_q, seqlens_k, .. } = &packed.sequences;
    let run = |page_size, ranges: Option<&Tensor>| {
        fmha_candle::flash_attn_varlen_paged_windowed(
            q,
            &paged(k),
            &paged(v),
            seqlens_q,
            seqlens_k,
            &table,
            ranges,
            7,
            12,
            0.25,
            Some(5),
            Some(0),
            page_size,
            Some(2.0),
        )
    };
    let plain = Plain { left: Some(5), softcap: Some(2.0), ..Plain::causal(16) };
    let o = run(page, None).unwrap();
    close(&o, &packed.plain(&plain).0, F32);

    let no_gradient = o.sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(no_gradient.contains("block_table"), "{no_gradient}");
    let other = run(16, None).unwrap_err().to_string();
    assert!(other.contains("page_block_size 16") && other.contains("4 rows"), "{other}");
    let ranges = run(page, Some(&Tensor::new(&[[[0i32, 2]]], &device()).unwrap())).unwrap_err().to_string();
    assert!(ranges.contains("mm_prefix_ranges"), "{ranges}");
}

#[test]
fn tensors_are_taken_as_they_lie() {
    let fused = Case::new(9, [&[2, 12, 8, 16], &[2, 12, 8, 16], &[2, 12, 8, 16]], DType::F32);
    let qkv = &fused.f32s[0];
    let [q, k, v] = [(0, 4), (4, 2), (6, 2)].map(|(from, heads)| qkv.narrow(2, from, heads).unwrap());
    let [pq, pk, pv] =
        [(0, 4), (4, 2), (6, 2)].map(|(from, heads)| fused.f64s[0].narrow(2, from, heads).unwrap());
    let o = fmha_candle::flash_attn(&q, &k, &v, 0.25, true).unwrap();
    let plain: Vec<Tensor> = (0..2)
        .map(|b| {
            Plain::causal(16).attend(&pq.get(b).unwrap(), &pk.get(b).unwrap(), &pv.get(b).unwrap()).unwrap().0
        })
        .collect();
    close(&o, &Tensor::stack(&plain, 0).unwrap(), F32);
    // A broadcast gradient has strides of 0, and the gradient of the fused tensor is the three in their places.
    let found = o.sum_all().unwrap().backward().unwrap();
    let right = Tensor::stack(&plain, 0).unwrap().sum_all().unwrap().backward().unwrap();
    close(found.get(qkv).unwrap(), right.get(&fused.f64s[0]).unwrap(), GRADIENT);

    // `[batch, heads, seqlen, head_dim]` in memory.
    let [q, k, v] =
        [&q, &k, &v].map(|t| t.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap());
    close(&fmha_candle::flash_attn(&q, &k, &v, 0.25, true).unwrap(), &o, 0.0);
}

/// A batch of 0, no queries and no keys, of batches, packed rows and pages: outputs are empty or 0, and so
/// are gradients.
#[test]
fn what_has_no_elements_is_computed() {
    let ints = |count: usize| Tensor::zeros(count, DType::U32, &device()).unwrap();
    let is_zero = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|&x| x == 0.0);
    for (batch, seqlen_q, seqlen_k) in [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)] {
        let dims = [[batch, seqlen_q, 4, 8], [batch, seqlen_k, 2, 8], [batch, seqlen_k, 2, 6]];
        let variables =
            dims.map(|dims| Var::from_tensor(&Tensor::ones(&dims, DType::F32, &device()).unwrap()).unwrap());
        let [q, k, v] = &variables;
        let slopes = Tensor::ones((batch, 4), DType::F32, &device()).unwrap();
        for options in [allowing(), allowing().causal().alibi_slopes(slopes), allowing().dropout(0.5, 1)] {
            let (o, lse) = fmha_candle::attention(q, k, v, &options).unwrap();
            assert_eq!((o.dims(), lse.dims()), (&[batch, seqlen_q, 4, 6][..], &[batch, 4, seqlen_q][..]));
            assert!(is_zero(&o));
            let gradients = o.sum_all().unwrap().backward().unwrap();
            for of in &variables {
                assert!(gradients.get(of).is_none_or(|found| found.dims() == of.dims() && is_zero(found)));
            }
        }
        let rows = dims.map(|[batch, seq, heads, dim]| {
            Tensor::ones((batch * seq, heads, dim), DType::F32, &device()).unwrap()
        });
        let pages = [8, 6].map(|dim| Tensor::ones((3, 16, 2, dim), DType::F32, &device()).unwrap());
        let sequences = |paged: bool| Sequences {
            seqlens_q: ints(batch + 1),
            seqlens_k: ints(batch + 1),
            max_seqlen_q: seqlen_q,
            max_seqlen_k: if paged { 16 } else { seqlen_k },
            block_table: paged.then(|| Tensor::zeros((batch, 1), DType::U32, &device()).unwrap()),
        };
        let packed =
            fmha_candle::attention_varlen(&rows[0], &rows[1], &rows[2], &sequences(false), &allowing());
        let paged =
            fmha_candle::attention_varlen(&rows[0], &pages[0], &pages[1], &sequences(true), &allowing());
        for (o, lse) in [packed.unwrap(), paged.unwrap()] {
            assert_eq!((o.dims(), lse.dims()), (&[batch * seqlen_q, 4, 6][..], &[4, batch * seqlen_q][..]));
            assert!(is_zero(&o));
        }
    }
}

#[test]
fn dropout_is_linear_in_v_with_its_own_gradient_and_repeats_by_its_seed() {
    let case = Case::new(10, [&[2, 20, 2, 8], &[2, 30, 2, 8], &[2, 30, 2, 8]], DType::F32);
    let [q, k, v] = &case.f32s;
    let run = |seed| fmha_candle::attention(q, k, v, &allowing().dropout(0.4, seed)).unwrap().0;
    assert_eq!(difference(&run(3), &run(3)), 0.0);
    assert!(difference(&run(3), &run(4)) > 0.1);
    let mut unseeded = allowing();
    unseeded.p_drop = 0.4;
    let said = fmha_candle::attention(q, k, v, &unseeded).unwrap_err().to_string();
    assert!(said.contains("dropout has no seed, but p_drop is 0.4"), "{said}");
    let dout = random(&mut StdRng::seed_from_u64(1), &[2, 20, 2, 8]);
    let loss = (run(3) * &dout).unwrap().sum_all().unwrap();
    let gradients = loss.backward().unwrap();
    let by_v = (gradients.get(v).unwrap() * v.as_tensor()).unwrap().sum_all().unwrap();
    close(&by_v, &loss, 1e-4);
}

#[test]
fn what_does_not_fit_is_refused_by_its_name_and_number() {
    let cpu = &Device::Cpu;
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, cpu).unwrap();
    let q = zeros(&[2, 8, 4, 16], DType::F32);
    let kv = zeros(&[2, 8, 2, 16], DType::F32);
    let refused = |q: &Tensor, k: &Tensor, v: &Tensor, options: Options, words: &[&str]| {
        let error = fmha_candle::attention(q, k, v, &options).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "`{error}` has no `{word}`");
        }
    };
    let plain = allowing;
    refused(
        &q,
        &zeros(&[2, 8, 3, 16], DType::F32),
        &zeros(&[2, 8, 3, 16], DType::F32),
        plain(),
        &["num_heads_q 4", "3"],
    );
    refused(&q, &zeros(&[2, 8, 2, 12], DType::F32), &kv, plain(), &["k has head_dim 12", "16"]);
    refused(&q, &kv, &zeros(&[2, 9, 2, 16], DType::F32), plain(), &["v has seqlen 9", "8"]);
    refused(
        &q,
        &zeros(&[3, 8, 2, 16], DType::F32),
        &zeros(&[3, 8, 2, 16], DType::F32),
        plain(),
        &["k has batch 3", "2"],
    );
    refused(&q, &kv.to_dtype(DType::F16).unwrap(), &kv, plain(), &["k is f16", "q is f32"]);
    refused(&q.to_dtype(DType::F64).unwrap(), &kv, &kv, plain(), &["q is f64"]);
    refused(&q.get(0).unwrap(), &kv, &kv, plain(), &["q has 3 axes", "4"]);
    refused(
        &q.transpose(1, 3).unwrap(),
        &zeros(&[2, 8, 4, 8], DType::F32),
        &zeros(&[2, 8, 4, 8], DType::F32),
        plain(),
        &["q.dim stride"],
    );
    refused(&q, &kv, &kv, plain().softcap(-1.0), &["softcap", "-1"]);
    refused(&q, &kv, &kv, plain().softmax_scale(f32::NAN), &["softmax_scale", "NaN"]);
    refused(&q, &kv, &kv, plain().dropout(1.5, 0), &["p_drop 1.5"]);
    refused(&q, &kv, &kv, plain().alibi_slopes(zeros(&[3], DType::F32)), &["alibi_slopes", "[3]", "[4]"]);
    refused(&q, &kv, &kv, plain().alibi_slopes(zeros(&[4], DType::F16)), &["alibi_slopes is f16"]);

    let packed = |seqlens_q: &[u32], seqlens_k: &[u32], words: &[&str]| {
        let sequences = Sequences {
            seqlens_q: Tensor::new(seqlens_q, cpu).unwrap(),
            seqlens_k: Tensor::new(seqlens_k, cpu).unwrap(),
            max_seqlen_q: 8,
            max_seqlen_k: 8,
            block_table: None,
        };
        let (q, kv) = (q.reshape((16, 4, 16)).unwrap(), kv.reshape((16, 2, 16)).unwrap());
        let error =
            fmha_candle::attention_varlen(&q, &kv, &kv, &sequences, &plain()).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "`{error}` has no `{word}`");
        }
    };
    packed(&[0, 8, 16], &[0, 8], &["seqlens_k has 2 offsets", "3"]);
    packed(&[0, 8, 4], &[0, 8, 16], &["cu_seqlens_q"]);
    packed(&[0, 8, 16], &[0, 8, 24], &["cu_seqlens_k"]);
    packed(&[0, 8, 16], &[0, 8, u32::MAX], &["cu_seqlens_k"]);
}

#[test]
fn ends_of_a_paged_cache_that_are_no_ends_are_refused_as_seqlens_k() {
    if !device().is_cpu() {
        return;
    }
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let (q, pages) = (zeros(&[4, 2, 8]), zeros(&[2, 4, 2, 8]));
    let new = |ends: [i64; 3], dtype| Tensor::new(&ends, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    for seqlens_k in [
        new([4, 0, 0], DType::U32),
        new([0, i64::from(i32::MAX), i64::from(i32::MIN)], DType::I32),
        new([0, 9, 9], DType::U32),
    ] {
        let sequences = Sequences {
            seqlens_q: Tensor::new(&[0u32, 2, 4], &Device::Cpu).unwrap(),
            seqlens_k,
            max_seqlen_q: 2,
            max_seqlen_k: 8,
            block_table: Some(Tensor::zeros((2, 2), DType::U32, &Device::Cpu).unwrap()),
        };
        let error = fmha_candle::attention_varlen(&q, &pages, &pages, &sequences, &allowing());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("seqlens_k") && error.contains("seqused_k[0]"), "{error}");
    }
}

#[test]
fn tensors_of_two_devices_are_refused() {
    if device().is_cpu() {
        return;
    }
    let [here, there] =
        [&device(), &Device::Cpu].map(|at| Tensor::zeros((1, 8, 2, 16), DType::F16, at).unwrap());
    let error = fmha_candle::flash_attn(&here, &there, &here, 0.25, false).unwrap_err().to_string();
    assert!(error.contains("device mismatch"), "{error}"); // candle's own words, before it comes here
}

#[test]
fn a_small_model_trains_as_with_attention_written_out() {
    // Trains one block of attention to give, at each position, the sum of the elements at that position and the one
    // before.
    let (seq, model, heads) = (12, 16, 2);
    let mut rng = StdRng::seed_from_u64(11);
    let x = random(&mut rng, &[4, seq, model]);
    let shifted = x.pad_with_zeros(1, 1, 0).unwrap().narrow(1, 0, seq).unwrap();
    let target = (&x + shifted).unwrap();
    let weights: Vec<Tensor> = (0..4).map(|_| (random(&mut rng, &[model, model]) * 0.3).unwrap()).collect();

    let train = |fused: bool| -> Vec<f32> {
        let weights: Vec<Var> = weights.iter().map(|weight| Var::from_tensor(weight).unwrap()).collect();
        let mut losses = Vec::new();
        for _ in 0..30 {
            let projected = |at: usize| {
                let y = x.broadcast_matmul(weights[at].as_tensor()).unwrap();
                y.reshape((4, seq, heads, model / heads)).unwrap()
            };
            let (q, k, v) = (projected(0), projected(1), projected(2));
            let scale = 1.0 / ((model / heads) as f32).sqrt();
            let attended = if fused {
                fmha_candle::flash_attn(&q, &k, &v, scale, true).unwrap()
            } else {
                let each = (0..4).map(|b| {
                    let [q, k, v] = [&q, &k, &v].map(|t| t.get(b).unwrap().to_dtype(DType::F64).unwrap());
                    Plain::causal(model / heads).attend(&q, &k, &v).unwrap().0.to_dtype(DType::F32).unwrap()
                });
                Tensor::stack(&each.collect::<Vec<_>>(), 0).unwrap()
            };
            let y =
                attended.reshape((4, seq, model)).unwrap().broadcast_matmul(weights[3].as_tensor()).unwrap();
            let loss = (y - &target).unwrap().sqr().unwrap().mean_all().unwrap();
            let gradients = loss.backward().unwrap();
            for weight in &weights {
                weight
                    .set(&(weight.as_tensor() - (gradients.get(weight).unwrap() * 0.5).unwrap()).unwrap())
                    .unwrap();
            }
            losses.push(loss.to_scalar::<f32>().unwrap());
        }
        losses
    };
    let (fused, plain) = (train(true), train(false));
    assert!(fused[29] < 0.6 * fused[0], "{} to {}", fused[0], fused[29]);
    for (step, (fused, plain)) in fused.iter().zip(&plain).enumerate() {
        assert!((fused - plain).abs() <= 1e-4 * plain, "step {step}: {fused} and {plain}");
    }
}

/// A score and a mask given as code equal the ALiBi slopes and the window that they write out, gradients included.
#[test]
fn code_spells_slopes_and_windows() {
    use fmha_candle::expr::{At, Function, Number, Score, Tensor as Captured, number};

    let case = Case::new(7, [&[2, 9, 4, 16], &[2, 11, 2, 16], &[2, 11, 2, 16]], DType::F32);
    let [q, k, v] = case.f32s.each_ref().map(Var::as_tensor);
    let slopes = Tensor::from_slice(&[0.5f32, 0.25, 0.125, 0.0625], 4, &device()).unwrap();
    let built_in = allowing().window(Some(5), Some(0)).alibi_slopes(slopes.clone());
    let (wanted, lse) = fmha_candle::attention(q, k, v, &built_in).unwrap();
    let table = Captured::<f32, 1>::new("slopes");
    let score = Function::score(|s: Score, at: At| {
        s - number("by") * table[at.h] * ((at.seqlen_k - at.seqlen_q) + at.q - at.k)
    });
    let mask: Function =
        "left: int; let d = q + seqlen_k - seqlen_q; k <= d and d - k <= left".parse().unwrap();
    let options = allowing()
        .score_code(score.unwrap())
        .mask_code(mask)
        .captured("slopes", &slopes)
        .number("by", Number::Float(1.0))
        .number("left", Number::Int(5));
    let (found, found_lse) = fmha_candle::attention(q, k, v, &options).unwrap();
    assert!(difference(&found, &wanted) < F32 && difference(&found_lse, &lse) < F32);
    let gradients = [&wanted, &found].map(|o| o.sqr().unwrap().sum_all().unwrap().backward().unwrap());
    for x in [q, k, v] {
        let [wanted, found] = gradients.each_ref().map(|of| of.get(x).unwrap());
        assert!(difference(found, wanted) < GRADIENT);
    }
    let says = |options: Options, words: &str| {
        let error = fmha_candle::attention(q, k, v, &options).unwrap_err().to_string();
        assert!(error.contains(words), "{error}, not {words}");
    };
    let reads: Function = "slopes: f32[_]; by: float; s + by * slopes[h]".parse().unwrap();
    let coded = || allowing().score_code(reads.clone());
    let one = || coded().number("by", Number::Float(1.0));
    says(one(), "captured slopes: the function reads f32[_]");
    says(coded().captured("slopes", &slopes), "number by is missing: the function reads float");
    says(one().captured("slopes", &slopes).number("to", Number::Int(1)), "number to is given");
    says(one().captured("slopes", &slopes.to_dtype(DType::F16).unwrap()), "captured slopes is f16, but");
    says(
        one().captured("slopes", Var::from_tensor(&slopes).unwrap().as_tensor()),
        "captured slopes is tracked",
    );
    says(
        one().captured("slopes", &slopes).captured("more", &slopes),
        "captured more is a tensor that no function",
    );
    says(coded().captured("slopes", &slopes).number("by", Number::Int(1)), "numbers: by is Int(1)");
    assert!("s + slope[h]".parse::<Function>().unwrap_err().to_string().contains("column 5, `slope`"));
}

/// Row maxima and sums of keys of `[rows, heads, dim]` rows of one sequence, by definition.
fn small_of(q: &Tensor, k: &Tensor, causal: bool) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let (q, k) = (q.to_dtype(DType::F64).unwrap(), k.to_dtype(DType::F64).unwrap());
    let (q, k) = (q.to_vec3::<f64>().unwrap(), k.to_vec3::<f64>().unwrap());
    let (heads, kv) = (q[0].len(), k[0].len());
    let (mut maxima, mut sums) = (vec![vec![]; heads], vec![vec![0.0; k.len()]; heads]);
    for h in 0..heads {
        for (i, row) in q.iter().enumerate() {
            let seen = if causal { (i + 1 + k.len()).saturating_sub(q.len()).min(k.len()) } else { k.len() };
            let score = |j: usize| -> f64 {
                let key = &k[j][h * kv / heads];
                row[h].iter().zip(key).map(|(a, b)| a * b).sum::<f64>() / (key.len() as f64).sqrt()
            };
            let scores: Vec<f64> = (0..seen).map(score).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - most).exp()).sum();
            scores.iter().enumerate().for_each(|(j, s)| sums[h][j] += (s - most).exp() / total);
            maxima[h].push(most);
        }
    }
    (maxima, sums)
}

#[test]
fn small_outputs_are_those_of_the_definition() {
    let case = Case::new(31, [&[2, 7, 4, 16], &[2, 9, 2, 16], &[2, 9, 2, 16]], DType::F32);
    let [q, k, v] = &case.f32s;
    let options = Options::default().causal();
    let (plain, lse) = fmha_candle::attention(q, k, v, &options).unwrap();
    let out = fmha_candle::attention_with_small(q, k, v, None, Small::ALL, &options).unwrap();
    assert_eq!((f64s(&out.o), f64s(&out.lse)), (f64s(&plain), f64s(&lse)));
    let (row_max, key_sum) = (out.row_max.unwrap(), out.key_sum.unwrap());
    let mut of_heads = vec![f64::NEG_INFINITY; 4];
    for b in 0..2 {
        let (maxima, sums) = small_of(&q.get(b).unwrap(), &k.get(b).unwrap(), true);
        for (found, wanted, bound) in [(&row_max, &maxima, 2e-5), (&key_sum, &sums, 1e-4)] {
            let wanted = Tensor::new(wanted.clone(), &device()).unwrap();
            assert!(difference(&found.get(b).unwrap(), &wanted) <= bound);
        }
        for (most, rows) in of_heads.iter_mut().zip(&maxima) {
            *most = rows.iter().copied().fold(*most, f64::max);
        }
    }
    let wanted = Tensor::new(of_heads, &device()).unwrap();
    assert!(difference(&out.head_max.unwrap(), &wanted) <= 2e-5);
    // O still has a gradient.
    let dout = out.o.sum_all().unwrap().backward().unwrap();
    let right = plain.sum_all().unwrap().backward().unwrap();
    assert_eq!(f64s(dout.get(q).unwrap()), f64s(right.get(q).unwrap()));
    // Small outputs that a caller does not ask for are absent.
    let some = Small { key_sum: true, ..Small::default() };
    let out = fmha_candle::attention_with_small(q, k, v, None, some, &options).unwrap();
    assert!(out.row_max.is_none() && out.head_max.is_none() && out.key_sum.is_some());
}

#[test]
fn small_outputs_of_packed_sequences() {
    let case = Case::new(32, [&[1, 12, 4, 16], &[1, 15, 2, 16], &[1, 15, 2, 16]], DType::F32);
    let [q, k, v] = [0, 1, 2].map(|at| case.f32s[at].get(0).unwrap());
    let ends = |ends: [u32; 3]| Tensor::new(&ends, &device()).unwrap();
    let sequences = Sequences {
        seqlens_q: ends([0, 5, 12]),
        seqlens_k: ends([0, 9, 15]),
        max_seqlen_q: 7,
        max_seqlen_k: 9,
        block_table: None,
    };
    let out =
        fmha_candle::attention_with_small(&q, &k, &v, Some(&sequences), Small::ALL, &Options::default())
            .unwrap();
    let (row_max, key_sum) = (out.row_max.unwrap(), out.key_sum.unwrap());
    assert_eq!((row_max.dims(), key_sum.dims()), (&[4, 12][..], &[2, 4, 9][..]));
    for (b, [at_q, at_k]) in [[0..5, 0..9], [5..12, 9..15]].into_iter().enumerate() {
        let (rows, keys) = (q.narrow(0, at_q.start, at_q.len()), k.narrow(0, at_k.start, at_k.len()));
        let (maxima, sums) = small_of(&rows.unwrap(), &keys.unwrap(), false);
        let found = row_max.narrow(1, at_q.start, at_q.len()).unwrap();
        assert!(difference(&found, &Tensor::new(maxima, &device()).unwrap()) <= 2e-5);
        let of_keys = key_sum.get(b).unwrap();
        let found = of_keys.narrow(1, 0, at_k.len()).unwrap();
        assert!(difference(&found, &Tensor::new(sums, &device()).unwrap()) <= 1e-4);
        let beyond = of_keys.narrow(1, at_k.len(), 9 - at_k.len()).unwrap();
        assert!(f64s(&beyond).iter().all(|&sum| sum == 0.0));
    }
}

#[test]
fn wrong_input_beside_small_outputs_is_refused_by_name() {
    let case = Case::new(33, [&[1, 4, 2, 16], &[1, 5, 2, 8], &[1, 5, 2, 16]], DType::F32);
    let [q, k, v] = &case.f32s;
    let error =
        fmha_candle::attention_with_small(q, k, v, None, Small::ALL, &Options::default()).unwrap_err();
    assert!(error.to_string().contains("k has head_dim 8, where 16 is wanted"), "{error}");
}
