//! Attention over the GPUs of one host, one process each, compared with one GPU: times, and whether the bits
//! are equal.
//!
//! ```text
//!  for r in 0 1; do
//!    CUDA_VISIBLE_DEVICES=$r RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
//!      cargo run --release -p fmha-dist --features cuda --example gpus -- - forward 32768 b gather,ring 1 + backward 8192 b gather 1 &
//!  done; wait
//! ```
//!
//! Arguments: NCCL's path (or `-`), and jobs with `+` between them: what to do, tokens, masks, schemes, how
//! often to run for equal bits (0: plan alone, which compiles what is not in the cache yet). bf16, batch 1,
//! 32 query heads, 8 of keys, head dim 128. `emulated:N` in place of a path plans alone, as N ranks would,
//! and so compiles kernels for a machine that must compile none.
//!
//! - forward, backward, deterministic (backward)
//! - modified: forward with ALiBi and dropout
//! - packed: forward of documents of different lengths
//! - decode: one query that all ranks have, against a cache of that many tokens, of which each rank has a
//!   part
//! - capture: forward (of one query if the scheme is decode), recorded once; the timed and repeated runs are
//!   replays
//! - parts: split of a run's time for a scheme that gathers: run and replayed in alternation, the parts on
//!   each rank's stream, the host
//! - slow, dead: forward whose last rank comes late, or ends itself, before the last run; the errors of the
//!   other ranks, and when they come
//!
//! `gather:whole` brings all keys before the kernels, `gather:flags` while they run or not at all; `mixed`
//! takes two GPUs for a host. The first rank measures the links, and prints what the model of scale predicts
//! from them and one device's speed. Tensors are made on the devices and compared by their bits on the host,
//! of each 1 GiB at most.

mod alone;
mod backward;
mod bench;
mod forward;
mod groups;
mod job;
mod parts;
mod tensors;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fmha::Backend;
use fmha_dist::{Group, Nccl, Rendezvous, connect};

use groups::Planning;
use job::Job;

type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<(), AnyError> {
    let start = Instant::now();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (library, jobs) = args.split_first().ok_or("NCCL's path, - or emulated:ranks, and jobs")?;
    let emulated = library.strip_prefix("emulated:").map(str::parse::<u32>).transpose()?;
    let library = Some(library).filter(|path| *path != "-").map(PathBuf::from);
    let jobs: Vec<&[String]> = jobs.split(|word| word == "+").collect();
    if let Some(ranks) = emulated {
        return plan_emulated(ranks, &jobs, start);
    }
    let troubled = |job: &&[String]| matches!(job.first().map(String::as_str), Some("slow" | "dead"));
    let timeout = Duration::from_secs(if jobs.iter().any(troubled) { 3 } else { 60 });
    let control = connect(&Rendezvous::from_env()?, timeout)?;
    let device = Backend::Cuda { ordinal: 0, emulate: None }.open()?;
    let group: Arc<dyn Group> = Arc::new(Nccl::new(control, library.as_deref())?);
    let mut measured = None;
    for job in jobs {
        let job = Job::parse(job)?;
        job.run(&device, &group, (start, &mut measured))?;
        group.share(&[])?;
    }
    Ok(())
}

/// Plans jobs as `ranks` ranks would, on an emulated sm_90a: compiles their kernels where there is no device.
fn plan_emulated(ranks: u32, jobs: &[&[String]], start: Instant) -> Result<(), AnyError> {
    let device = Backend::Cuda { ordinal: 0, emulate: Some("sm_90a".into()) }.open()?;
    let plan = |host: fmha_dist::Host| -> Result<(), String> {
        let group: Arc<dyn Group> = Arc::new(Planning(host));
        for job in jobs {
            let job = Job { repeats: 0, ..Job::parse(job).map_err(|error| error.to_string())? };
            job.run(&device, &group, (start, &mut None)).map_err(|error| error.to_string())?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let hosts = fmha_dist::threads(ranks, Duration::from_secs(3600));
        let ranks: Vec<_> = hosts.into_iter().map(|host| scope.spawn(|| plan(host))).collect();
        ranks.into_iter().try_for_each(|rank| Ok(rank.join().map_err(|_| "a rank has panicked")??))
    })
}
