//! Gain from work items of similar size: a decode step over a mix of cache lengths, compared with the step in
//! which each sequence is as long as the longest.

use std::path::Path;
use std::time::Instant;

use fmha::{DType, DevBuffer, Device, Dims, Error, FwdArgs, FwdProblem, PlanOptions, SeqArgs, Stream, f16};

/// Lengths of sequences, drawn with the seed that the file states.
const DRAWN: &str = include_str!("lengths.txt");
/// Query heads and kv heads: a quarter of Qwen 2.5 7B's 28 and 4, so that a step takes some milliseconds on a CPU.
const HEADS: (u32, u32) = (7, 1);
const HEAD_DIM: u32 = 64;
/// Number of timed steps, after one that is not timed.
const STEPS: u32 = 5;
/// Largest distance of a row from the reference, which uses equal operands: O is f16.
const TOLERANCE: f64 = 1e-3;

/// Reads lengths from a file, one number a line; lines that begin with `#` are comments.
///
/// # Errors
/// A file that can not be read, or a line that is no length.
pub(crate) fn lengths(path: Option<&Path>) -> Result<Vec<u32>, String> {
    let text = match path {
        Some(path) => {
            std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?
        }
        None => DRAWN.to_owned(),
    };
    let lines =
        text.lines().enumerate().filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty());
    let length = |(at, line): (usize, &str)| match line.trim().parse() {
        Ok(length @ 1..) => Ok(length),
        _ => Err(format!("line {} of the lengths: {line} is no number of tokens from 1 on", at + 1)),
    };
    let lengths = lines.map(length).collect::<Result<Vec<u32>, String>>()?;
    if lengths.is_empty() { Err("the file of lengths has none".to_owned()) } else { Ok(lengths) }
}

/// Tensors of a step: one token of each sequence, and for each a cache as long as the longest.
struct Decode {
    plan: fmha::FwdPlan,
    stream: Stream,
    device: Device,
    longest: u32,
    q: Vec<f16>,
    k: Vec<f16>,
    v: Vec<f16>,
    buffers: [DevBuffer; 4],
    used: DevBuffer,
    workspace: Option<DevBuffer>,
}

impl Decode {
    fn new(device: &Device, batch: u32, longest: u32) -> Result<Self, Error> {
        let dims = Dims::batch(batch).seqlens(1, longest).heads(HEADS.0, HEADS.1).head_dim(HEAD_DIM);
        let mut problem = FwdProblem::batch(DType::F16, dims);
        problem.layout.seqused_k = true;
        let plan = device.plan_fwd(&problem.validate()?, &PlanOptions::default())?;
        let mut state = 59u64;
        let mut rows = |rows: u32| -> Vec<f16> {
            let mut number = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                f16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
            };
            (0..rows as usize * HEAD_DIM as usize).map(|_| number()).collect()
        };
        let (q, k, v) =
            (rows(batch * HEADS.0), rows(batch * longest * HEADS.1), rows(batch * longest * HEADS.1));
        let memory = device.memory();
        let buffers = [
            memory.place(&q)?,
            memory.place(&k)?,
            memory.place(&v)?,
            memory.alloc_of(DType::F16, q.len() as u64)?,
        ];
        let used = memory.place(&vec![0i32; batch as usize])?;
        let (workspace, stream) = (memory.workspace(plan.workspace())?, device.stream()?);
        Ok(Self { plan, stream, device: device.clone(), longest, q, k, v, buffers, used, workspace })
    }

    /// Seconds of a step over sequences with these lengths.
    fn seconds(&mut self, lengths: &[u32]) -> Result<f64, Error> {
        let lengths: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
        self.device.memory().upload(&lengths, &mut self.used)?;
        let mut began = Instant::now();
        for step in 0..=STEPS {
            let [q, k, v, o] = &mut self.buffers;
            let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut())
                .seq(SeqArgs::default().seqused_k(self.used.slice()))
                .workspace(self.workspace.as_mut().map(DevBuffer::slice_mut));
            self.plan.run(&mut args, &self.stream)?;
            if step == 0 {
                self.stream.synchronize()?;
                began = Instant::now();
            }
        }
        self.stream.synchronize()?;
        Ok(began.elapsed().as_secs_f64() / f64::from(STEPS))
    }

    /// Largest distance of a row of a sequence from softmax(q k^T / sqrt(d)) v in f64.
    fn error_of(&self, sequence: usize, length: u32) -> Result<f64, Error> {
        let mut o = vec![f16::ZERO; self.q.len()];
        self.device.memory().download(&self.buffers[3], &mut o)?;
        let dim = HEAD_DIM as usize;
        let row = |x: &[f16], at: usize| -> Vec<f64> {
            x[at * dim..][..dim].iter().map(|x| f64::from(x.to_f32())).collect()
        };
        let first_key = sequence * self.longest as usize;
        let mut worst = 0f64;
        for head in 0..HEADS.0 as usize {
            let q = row(&self.q, sequence * HEADS.0 as usize + head);
            let (mut sum, mut expected) = (0.0, vec![0.0; dim]);
            for key in first_key..first_key + length as usize {
                let score: f64 = q.iter().zip(row(&self.k, key)).map(|(q, k)| q * k).sum();
                let weight = (score / f64::from(HEAD_DIM).sqrt()).exp();
                sum += weight;
                expected.iter_mut().zip(row(&self.v, key)).for_each(|(o, v)| *o += weight * v);
            }
            let found = row(&o, sequence * HEADS.0 as usize + head);
            let errors = expected.iter().zip(found).map(|(expected, found)| (expected / sum - found).abs());
            // A NaN counts as the worst error.
            worst = errors.fold(worst, |worst, error| if error <= worst { worst } else { error });
        }
        Ok(worst)
    }
}

/// Prints tokens per second of a layer's attention over the lengths (of a file, if one is given), and over the same
/// sequences padded to the longest.
///
/// # Errors
/// What the device refuses, or its driver said; a row that is not what attention is.
pub(crate) fn compare(
    device: &Device,
    (lengths, path): (&[u32], Option<&Path>),
) -> Result<(), Box<dyn std::error::Error>> {
    let (batch, longest) = (lengths.len(), lengths.iter().copied().max().unwrap_or(1));
    let mut decode = Decode::new(device, batch as u32, longest)?;
    let padded = decode.seconds(&vec![longest; batch])?;
    let own = decode.seconds(lengths)?;
    for (sequence, &length) in lengths.iter().enumerate() {
        let error = decode.error_of(sequence, length)?;
        if error.is_nan() || error > TOLERANCE {
            return Err(format!("sequence {sequence} of {length} keys is {error:e} from attention").into());
        }
    }
    let keys: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
    let from = path.map(|path| format!(" from {}", path.display())).unwrap_or_default();
    println!(
        "a mix of {batch} lengths{from}, {} to {longest} keys, {keys} together, kernel {}:",
        lengths.iter().min().unwrap_or(&0),
        decode.plan.kernel()
    );
    println!(
        "{:.0} tokens a second of a layer's attention; {:.0} with each padded to the longest ({:.1} of the keys, {:.1} of the time)",
        batch as f64 / own,
        batch as f64 / padded,
        (batch as u64 * u64::from(longest)) as f64 / keys as f64,
        padded / own
    );
    Ok(())
}
