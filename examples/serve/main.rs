//! A small serving engine over a paged cache, on any device:
//! `cargo run --release --example serve -- --device cpu --requests 40 --seed 1`.
//!
//! Each step is one call per layer: new keys are rotated to their positions, appended to the pages and
//! attended to, whether a request is at a piece of its prompt or at its next token (continuous batching,
//! chunked prefill). Requests with a common beginning share pages. Unused pages are kept for later requests,
//! and reused when no page is free. A request may lose its pages, and is then computed again. On a GPU, steps
//! with one token per request are replays of a graph.
//!
//! At the end each request is computed again alone, in its own cache, with its prompt in one call and its
//! answer token by token. Because the plans are batch-invariant, the logits of every step are equal to the
//! bit. So are the logits of the last step if the whole request is computed in one call. A final check uses
//! no cache and no device, with attention by its definition.
//!
//! A decode step over a mix of lengths is timed as well, and compared with each sequence padded to the
//! longest.

mod attention;
mod engine;
mod mix;
mod model;
mod pages;
mod trace;

use std::path::PathBuf;
use std::time::Instant;

use attention::{Attention, MAX_PAGES, Room, Step};
use engine::{Engine, Sequence};
use fmha::{Backend, Device, Error};
use model::{MAX_LEN, Model};

/// The cache has pages for three requests of full length, fewer than the slots could use, so that pages run out.
const ROOM: Room = Room { slots: 8, tokens: 48, pages: 3 * MAX_PAGES };
const ALONE: Room = Room { slots: 1, tokens: MAX_LEN, pages: MAX_PAGES };

struct Options {
    device: String,
    requests: Option<usize>,
    seed: u64,
    lengths: Option<PathBuf>,
}

impl Options {
    fn parse() -> Result<Self, String> {
        let mut options = Self { device: "auto".into(), requests: None, seed: 1, lengths: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let value = words.next().ok_or_else(|| format!("{word} has no value"))?;
            let number = || value.parse::<u64>().map_err(|error| format!("{word} {value}: {error}"));
            match word.as_str() {
                "--device" => options.device = value,
                "--requests" => options.requests = Some(number()? as usize),
                "--seed" => options.seed = number()?,
                "--lengths" => options.lengths = Some(value.into()),
                _ => return Err(format!("{word} is not --device, --requests, --seed or --lengths")),
            }
        }
        Ok(options)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse()?;
    let lengths = mix::lengths(options.lengths.as_deref())?;
    let model = Model::random(7);
    let attention = |device: &Device, room| Attention::new(device, room, &model.cos, &model.sin);
    let backend: Backend = options.device.parse()?;
    let mut device = backend.open()?;
    let serving = match attention(&device, ROOM) {
        // The device has no kernel for the problem. The CPU serves in its place, with a message, unless the user has
        // chosen a device.
        Err(error @ Error::Unsupported { .. }) if options.device == "auto" => {
            println!("{error}\nso the CPU serves");
            device = Backend::Cpu.open()?;
            attention(&device, ROOM)?
        }
        other => other?,
    };
    println!("{}, kernel {}", device.name(), serving.plan().kernel());

    // An emulated device needs a second where a real one needs a microsecond.
    let emulated = device.has_streams() && !device.has_clock();
    let requests = trace::requests(options.seed, options.requests.unwrap_or(if emulated { 2 } else { 40 }));
    let mut engine = Engine::new(&model, serving, ROOM);
    let began = Instant::now();
    let mut coming = requests.into_iter().peekable();
    while coming.peek().is_some() || !engine.is_idle() {
        let step = engine.counts.steps;
        let idle = engine.is_idle();
        while let Some(request) = coming.next_if(|request| idle || request.arrival <= step) {
            engine.submit(request);
        }
        engine.step()?;
    }
    let seconds = began.elapsed().as_secs_f64();

    let Engine { attention: serving, answered, counts, pages, .. } = engine;
    let answers: usize = answered.iter().map(|sequence| sequence.logits.len()).sum();
    println!(
        "{} requests, {} steps: {answers} tokens answered, {} computed, {} found in the cache",
        answered.len(),
        counts.steps,
        counts.computed,
        counts.shared
    );
    println!(
        "{} pages given to others, {} requests computed again, {} of {} calls from a graph",
        pages.evicted,
        counts.preempted,
        serving.replayed,
        counts.steps * model::LAYERS
    );
    println!(
        "{:.0} tokens answered a second; {:.0} % of the time in attention, copies included",
        answers as f64 / seconds,
        100.0 * serving.time.as_secs_f64() / seconds
    );

    let mut alone = attention(&device, ALONE)?;
    let mut worst = 0f32;
    for (number, sequence) in answered.iter().enumerate() {
        let error =
            check(&model, &mut alone, sequence).map_err(|text| format!("request {number}: {text}"))?;
        worst = worst.max(error);
    }
    println!(
        "every token's logits have the bits of its request alone, and are within {worst:.1e} of their largest of the reference"
    );
    if emulated {
        println!(
            "{}: an emulated device, whose seconds say nothing: the mix of lengths is not timed",
            device.name()
        );
        return Ok(());
    }
    mix::compare(&device, (&lengths, options.lengths.as_deref()))
}

/// Largest difference from the reference, as a share of a token's largest logit: operands and O are f16.
const TOLERANCE: f32 = 2e-3;

/// Compares the logits of every step bit for bit with those of the request alone, and with the reference. Returns the
/// worst error, relative to a token's largest logit.
fn check(model: &Model, alone: &mut Attention, sequence: &Sequence) -> Result<f32, String> {
    let prompt = sequence.request.prompt.len();
    let mut logits_after = |cached: usize, end: usize| {
        let table = (0..MAX_PAGES.cast_signed()).collect();
        let step = Step { tokens: vec![&sequence.tokens[cached..end]], cached: vec![cached as i32], table };
        model.step(alone, &step).map(|mut logits| logits.swap_remove(0)).map_err(|error| error.to_string())
    };
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    let expected = model.reference(&sequence.tokens).map_err(|error| error.to_string())?;
    let mut worst = 0f32;
    let mut cached = 0;
    for (at, logits) in sequence.logits.iter().enumerate() {
        if !logits.iter().all(|x| x.is_finite()) {
            return Err(format!("token {at} of the answer has read a row that nobody wrote"));
        }
        let end = prompt + at;
        if !same(&logits_after(cached, end)?, logits) {
            return Err(format!("token {at} of the answer has other bits than alone"));
        }
        let expected = &expected[end - 1];
        let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let error =
            expected.iter().zip(logits).fold(0f32, |error, (a, b)| error.max((a - b).abs())) / largest;
        if error.is_nan() || error > TOLERANCE {
            return Err(format!(
                "token {at} of the answer is {error:e} of its largest logit from the reference"
            ));
        }
        worst = worst.max(error);
        cached = end;
    }
    match sequence.logits.last() {
        Some(logits) if !same(&logits_after(0, cached)?, logits) => {
            Err("the last token has other bits than in one call".into())
        }
        _ => Ok(worst),
    }
}
