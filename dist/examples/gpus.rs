//! Forward attention over the GPUs of one host, a process each, beside one GPU: times, and whether the bits are equal.
//!
//! ```text
//!  for r in 0 1; do
//!    CUDA_VISIBLE_DEVICES=$r RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
//!      cargo run --release -p fmha-dist --features cuda --example gpus -- 32768 b gather,ring [libnccl.so.2] &
//!  done; wait
//! ```
//!
//! Arguments: tokens, mask, schemes, the library's path. bf16, batch 1, 32 query heads, 8 of keys, head dim 128.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fmha::{
    Backend, DType, DevBuffer, Device, Dims, FwdArgs, FwdProblem, MaskSpec, PlanOptions, Stream, bf16,
};
use fmha_dist::{FwdPlan, Group, Nccl, Options, Partition, Problem, Rendezvous, Scheme, connect};

type AnyError = Box<dyn std::error::Error>;

/// Numbers that every rank makes alike.
fn noise(seed: u64, count: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..count).map(next).collect()
}

fn upload(device: &Device, bytes: &[u8]) -> Result<DevBuffer, fmha::Error> {
    let mut buffer = device.memory().alloc(bytes.len() as u64)?;
    device.memory().upload(bytes, &mut buffer)?;
    Ok(buffer)
}

/// The fastest of some calls, in seconds.
fn fastest(stream: &Stream, mut call: impl FnMut() -> Result<(), AnyError>) -> Result<f64, AnyError> {
    let mut fastest = f64::INFINITY;
    for _ in 0..8 {
        let (start, stop) = (stream.device().event()?, stream.device().event()?);
        start.record(stream)?;
        call()?;
        stop.record(stream)?;
        fastest = fastest.min(stop.seconds_since(&start)?);
    }
    Ok(fastest)
}

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().collect();
    let arg = |at: usize, default: &str| args.get(at).map_or(default, String::as_str).to_owned();
    let tokens: u32 = arg(1, "32768").parse()?;
    let mask: MaskSpec = arg(2, "b").parse()?;
    let library = args.get(4).map(PathBuf::from);

    let control = connect(&Rendezvous::from_env()?, Duration::from_secs(60))?;
    let (rank, ranks) = (control.rank(), control.size());
    let device = Device::open(Backend::Cuda { ordinal: 0, emulate: None })?;
    let group: Arc<dyn Group> = Arc::new(Nccl::new(control, library.as_deref())?);

    let (seqlen_q, seqlen_k, num_heads_q, num_heads_kv) = (tokens, tokens, 32, 8);
    let dims =
        Dims { batch: 1, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk: 128, head_dim_v: 128 };
    let whole = FwdProblem::batch(DType::Bf16, dims).mask(mask).write_lse(true);
    let [q, k, v] = [(1, 32), (2, 8), (3, 8)].map(|(seed, heads)| noise(seed, tokens as usize * heads * 128));
    let [q, k, v] = [&q, &k, &v].map(|elems| bytemuck::cast_slice::<bf16, u8>(elems));
    let stream = device.stream()?;

    // One device.
    let kernels = PlanOptions::default();
    let plan = device.plan_fwd(&whole.clone().validate()?, &kernels)?;
    let [whole_q, whole_k, whole_v] = [upload(&device, q)?, upload(&device, k)?, upload(&device, v)?];
    let (mut o, mut lse) =
        (device.memory().alloc(q.len() as u64)?, device.memory().alloc(u64::from(tokens) * 128)?);
    let mut workspace = device.memory().workspace(plan.workspace())?;
    let alone = fastest(&stream, || {
        let mut args = FwdArgs::new(whole_q.slice(), whole_k.slice(), whole_v.slice(), o.slice_mut());
        args.lse = Some(lse.slice_mut());
        args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
        Ok(plan.run(&mut args, &stream)?)
    })?;
    let mut expected = vec![0u8; q.len()];
    device.memory().download(&o, &mut expected)?;
    if rank == 0 {
        println!(
            "{}, {tokens} tokens, mask {mask}: one device {:.3} ms ({})",
            device.name(),
            alone * 1e3,
            plan.kernel()
        );
    }

    for scheme in arg(3, "gather,ring").split(',') {
        let scheme: Scheme = scheme.parse()?;
        let partition = Partition::zig_zag(tokens, ranks);
        let problem = Problem::new(whole.clone(), partition.clone());
        let options = Options::default().scheme(scheme).kernels(kernels.clone());
        let mut plan = FwdPlan::new(&problem, group.clone(), &device, &options)?;
        let [own_q, own_k, own_v] =
            [(q, 32), (k, 8), (v, 8)].map(|(whole, heads)| partition.split(whole, 1, heads * 256, rank));
        let [dev_q, dev_k, dev_v] =
            [upload(&device, &own_q)?, upload(&device, &own_k)?, upload(&device, &own_v)?];
        let mut o = device.memory().alloc(own_q.len() as u64)?;
        let mut lse = device.memory().alloc(u64::from(partition.rows_of(rank)) * 128)?;
        let seconds = fastest(&stream, || {
            let mut args = FwdArgs::new(dev_q.slice(), dev_k.slice(), dev_v.slice(), o.slice_mut());
            args.lse = Some(lse.slice_mut());
            Ok(plan.run(&mut args, &stream)?)
        })?;
        stream.synchronize()?;
        let mut own = vec![0u8; own_q.len()];
        device.memory().download(&o, &mut own)?;
        let wanted = partition.split(&expected, 1, 32 * 256, rank);
        let (own, wanted): (&[bf16], &[bf16]) = (bytemuck::cast_slice(&own), bytemuck::cast_slice(&wanted));
        let off = own.iter().zip(wanted).map(|(a, b)| (a.to_f32() - b.to_f32()).abs()).fold(0f32, f32::max);
        let differ = own.iter().zip(wanted).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        let all = group.share(&seconds.to_le_bytes())?;
        let slowest = all.iter().filter_map(|bytes| Some(f64::from_le_bytes(bytes[..].try_into().ok()?)));
        let slowest = slowest.fold(0.0, f64::max);
        println!(
            "rank {rank} {scheme}: {:.3} ms, {:.3} of {ranks} devices; {differ} of {} elements differ, by {off:e} at most",
            slowest * 1e3,
            alone / (f64::from(ranks) * slowest),
            own.len()
        );
        if rank == 0 {
            print!("{}", plan.explain());
        }
    }
    group.share(&[])?;
    Ok(())
}
