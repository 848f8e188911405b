//! How long the host takes to issue a forward call: checks, arguments, tensor maps, the driver.
//!
//! `cargo run --release -p fmha-cuda --example issue_time`, on a machine with a device.

use std::time::Instant;

use fmha_core::{DType, DevBuffer, Dims, FwdArgs, FwdProblem, MaskSpec, PlanOptions, Shape};

const CALLS: usize = 4000;
/// Calls before the host waits for the device: fewer than a stream queues.
const BURST: usize = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backend = fmha_cuda::open(0, None)?;
    println!("{}", backend.name());
    let dims = |seqlen, heads, dim| Dims {
        batch: 1,
        seqlen_q: seqlen,
        seqlen_k: seqlen,
        num_heads_q: heads,
        num_heads_kv: heads,
        head_dim_qk: dim,
        head_dim_v: dim,
    };
    let decode = |seqlen_q| Dims { seqlen_q, num_heads_kv: 8, ..dims(4096, 32, 128) };
    let dynamic = vec![("order".to_owned(), "dynamic".to_owned())];
    for (name, dims, mask, tile) in [
        ("one wave", dims(64, 4, 64), MaskSpec::NONE, Vec::new()),
        ("claimed tiles", dims(512, 40, 128), MaskSpec::CAUSAL, dynamic),
        ("one token, parts and their merge", decode(1), MaskSpec::NONE, Vec::new()),
        ("eight tokens, parts and their merge", decode(8), MaskSpec::NONE, Vec::new()),
    ] {
        let problem = FwdProblem::batch(DType::Bf16, dims).mask(mask).validate()?;
        let plan = backend.plan_fwd(&problem, &PlanOptions::default().tile(tile))?;
        let memory = backend.memory();
        let tensor = |shape: Shape| memory.alloc(shape.num_elems() * 2);
        let (q, mut o) = (tensor(problem.shape_q())?, tensor(problem.shape_o())?);
        let (k, v) = (tensor(problem.shape_k())?, tensor(problem.shape_v())?);
        let mut workspace = memory.workspace(plan.workspace())?;
        let stream = backend.stream()?;
        let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
        args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
        let mut seconds = Vec::with_capacity(CALLS);
        for call in 0..CALLS + BURST {
            let start = Instant::now();
            plan.run(&mut args, &stream)?;
            // The first burst warms up.
            if call >= BURST {
                seconds.push(start.elapsed().as_secs_f64());
            }
            if call % BURST == 0 {
                stream.synchronize()?;
            }
        }
        stream.synchronize()?;
        let on_device = stream.seconds(|| (0..BURST).try_for_each(|_| plan.run(&mut args, &stream)))?;
        seconds.sort_unstable_by(f64::total_cmp);
        println!(
            "{name} ({}): issued in {:.2} us in the middle, {:.2} at the least, of {CALLS}; {:.2} us a call in a burst \
             of {BURST}, by the device's clock",
            plan.kernel(),
            seconds[CALLS / 2] * 1e6,
            seconds[0] * 1e6,
            on_device * 1e6 / BURST as f64
        );
    }
    Ok(())
}
