//! Lists the ways in which few queries can walk their keys, for `bench/ways.py` to time. A line of standard input is a
//! call as `split/measured.tsv` has it, tabs between: batch, heads, queries, lengths, head dimension, page. A line of
//! the output is that call, the kernel, its keys, the words of its tile, and the price in microseconds. The ways are
//! whole, shares, and parts of the length that is cheapest, of its half and of its double.
//!
//! `cargo run --release -p fmha-kernels-cuda --example ways < calls.tsv > ways.tsv`

use std::io::Read as _;

use fmha_kernels_cuda::split::measured::{Call, ROOM};
use fmha_kernels_cuda::split::price::{Keys, micros};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    for line in text.lines() {
        let call = Call::parsed(&line.split('\t').collect::<Vec<_>>())?;
        let ways = call.ways();
        for kernel in ["sm80", "sm90"] {
            let ways = ways.iter().filter(|way| way.0 == kernel);
            let priced = ways.map(|way| (micros(&call.problem, &way.2, ROOM.num_sms), way));
            let (parts, others): (Vec<_>, Vec<_>) =
                priced.partition(|(_, way)| matches!(way.2.keys, Keys::Parts(_)));
            let best = parts.iter().min_by(|(a, _), (b, _)| a.total_cmp(b));
            let best = best.map(|&(_, way)| way.2.keys);
            let near = |wanted: f64| {
                let distance = |keys: Keys| match keys {
                    Keys::Parts(keys) => (f64::from(keys) / wanted).ln().abs(),
                    _ => f64::INFINITY,
                };
                parts.iter().min_by(|(_, a), (_, b)| distance(a.2.keys).total_cmp(&distance(b.2.keys)))
            };
            let mut chosen = others;
            if let Some(Keys::Parts(keys)) = best {
                chosen
                    .extend([1.0, 0.5, 2.0].into_iter().filter_map(|by| near(by * f64::from(keys))).copied());
            }
            chosen.sort_by_key(|(_, way)| way.1.clone());
            chosen.dedup_by_key(|(_, way)| way.1.clone());
            for (micros, (kernel, words, walk)) in chosen {
                println!("{line}\t{kernel}\t{}\t{words}\t{micros:.1}", walk.keys);
            }
        }
    }
    Ok(())
}
