//! A first call with a checked output: `cargo run --release --example attend`.

use fmha::{Attention, Dims, MaskSpec, bf16};

fn main() -> Result<(), fmha::Error> {
    let dims = Dims {
        batch: 1,
        seqlen_q: 256,
        seqlen_k: 256,
        num_heads_q: 8,
        num_heads_kv: 2, // four query heads share one of these
        head_dim_qk: 64,
        head_dim_v: 64,
    };
    let wave = |count: usize, step: f32| (0..count).map(move |i| bf16::from_f32((i as f32 * step).sin()));
    let q: Vec<bf16> = wave(256 * 8 * 64, 0.37).collect();
    let k: Vec<bf16> = wave(256 * 2 * 64, 0.73).collect();
    let v: Vec<bf16> = wave(256 * 2 * 64, 0.11).collect();

    let options = Attention::new(dims).mask(MaskSpec::CAUSAL);
    let result = fmha::attention(&q, &k, &v, &options)?;

    // The first query sees one key, so its output is that key's value.
    assert_eq!(result.o[..64], v[..64]);
    // The last query sees all keys. Its output is a mean of values, so no element exceeds the largest value.
    let largest = v.iter().fold(0.0, |most: f32, v| most.max(v.to_f32().abs()));
    assert!(result.o.iter().all(|o| o.to_f32().abs() <= largest));
    println!("O[0, 255, 0, ..4] = {:?}", &result.o[255 * 8 * 64..][..4]);
    println!("LSE[0, 0, 255]    = {}", result.lse[255]);
    Ok(())
}
