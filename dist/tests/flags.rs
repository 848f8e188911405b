//! Gather whose keys come while kernels wait for their flags, over two ranks that are threads of an emulated
//! device: the bits of one device, and why there may be no flags. Needs NVRTC; where there is none, a test
//! says `absent` and checks nothing.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;
use std::time::Duration;

use fmha::{
    Backend, BwdArgs, BwdProblem, DType, DevBuffer, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem,
    MemorySpace, PlanOptions, Stream, bf16,
};
use fmha_dist::{
    BwdPlan, Error, Exchange, FwdPlan, Group, Host, Options, Partition, Problem, Result, Scheme, threads,
};

/// Runs begin at whole blocks of queries.
const TOKENS: u32 = 512;
const HEADS: [u32; 2] = [2, 1];
const DIM: u32 = 64;

/// Threads whose buffers are an emulated device's: rows move by way of the host.
struct OnDevice {
    host: Host,
    device: Device,
}

fn bytes_of(device: &Device, ptr: *mut u8, bytes: u64) -> Vec<u8> {
    let mut host = vec![0u8; bytes as usize];
    // SAFETY: lent for the copy.
    let buffer = unsafe { DevBuffer::from_raw(MemorySpace::Device, ptr, bytes, Box::new(|_| ())) };
    device.memory().download(&buffer, &mut host).unwrap();
    host
}

impl Group for OnDevice {
    fn rank(&self) -> u32 {
        self.host.rank()
    }

    fn size(&self) -> u32 {
        self.host.size()
    }

    fn space(&self) -> MemorySpace {
        MemorySpace::Device
    }

    fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.host.share(mine)
    }

    fn exchange(
        &self,
        exchange: &Exchange,
        sources: &[DevSlice<'_>],
        sinks: &mut [DevSliceMut<'_>],
        stream: &Stream,
    ) -> Result<()> {
        assert!(exchange.rows() <= self.most_rows(), "{} rows", exchange.rows());
        let from: Vec<_> =
            sources.iter().map(|s| bytes_of(&self.device, s.as_ptr().cast_mut(), s.bytes())).collect();
        let mut to: Vec<_> =
            sinks.iter().map(|s| bytes_of(&self.device, s.as_mut_ptr(), s.bytes())).collect();
        let from: Vec<_> = from.iter().map(|bytes| DevSlice::host(&bytes[..])).collect();
        let mut slices: Vec<_> = to.iter_mut().map(|bytes| DevSliceMut::host(&mut bytes[..])).collect();
        self.host.exchange(exchange, &from, &mut slices, stream)?;
        for (sink, bytes) in sinks.iter().zip(&to) {
            // SAFETY: lent for the copy.
            let mut buffer = unsafe {
                DevBuffer::from_raw(MemorySpace::Device, sink.as_mut_ptr(), sink.bytes(), Box::new(|_| ()))
            };
            self.device.memory().upload(bytes, &mut buffer).unwrap();
        }
        Ok(())
    }

    /// Fewer than tokens: rows of heads are packed.
    fn most_rows(&self) -> u64 {
        64
    }

    fn timeout(&self) -> Duration {
        self.host.timeout()
    }

    fn failure(&self) -> Option<Error> {
        self.host.failure()
    }

    fn fail(&self, error: Error) -> Error {
        self.host.fail(error)
    }
}

fn device() -> Option<Device> {
    match (Backend::Cuda { ordinal: 0, emulate: Some("sm_90a".into()) }).open() {
        Ok(device) => Some(device),
        Err(reason) => {
            println!("absent: {reason}");
            None
        }
    }
}

fn whole() -> FwdProblem {
    let dims = Dims::batch(1).seqlens(TOKENS, TOKENS).heads(HEADS[0], HEADS[1]).head_dim(DIM);
    FwdProblem::batch(DType::Bf16, dims).mask("b".parse().unwrap()).write_lse(true)
}

fn noise(seed: u64, heads: u32) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..TOKENS * heads * DIM).flat_map(|_| next().to_bits().to_le_bytes()).collect()
}

fn uploaded(device: &Device, bytes: &[u8]) -> DevBuffer {
    let mut buffer = device.memory().alloc(bytes.len() as u64).unwrap();
    device.memory().upload(bytes, &mut buffer).unwrap();
    device.synchronize().unwrap();
    buffer
}

fn downloaded(device: &Device, buffer: &DevBuffer) -> Vec<u8> {
    bytes_of(device, buffer.as_ptr(), buffer.bytes())
}

/// O and LSE, and dQ, of one device.
fn alone(device: &Device, inputs: &[Vec<u8>; 4]) -> [Vec<u8>; 3] {
    let [q, k, v, dout] = inputs.each_ref().map(|bytes| uploaded(device, bytes));
    let mut o = uploaded(device, &inputs[0]);
    let mut lse = uploaded(device, &vec![0u8; (4 * HEADS[0] * TOKENS) as usize]);
    let options = PlanOptions::default().batch_invariant(true);
    let plan = device.plan_fwd(&whole().validate().unwrap(), &options).unwrap();
    let mut workspace = device.memory().workspace(plan.workspace()).unwrap();
    let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut()).lse(lse.slice_mut());
    args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
    let stream = device.default_stream();
    plan.run(&mut args, &stream).unwrap();
    let options = PlanOptions::default().deterministic(true);
    let problem = BwdProblem::new(whole()).dtype_grad(DType::F32);
    let plan = device.plan_bwd(&problem.validate().unwrap(), &options).unwrap();
    let mut workspace = device.memory().workspace(plan.workspace()).unwrap();
    let [mut dq, mut dk, mut dv] =
        [&inputs[0], &inputs[1], &inputs[2]].map(|bytes| uploaded(device, &[&bytes[..], bytes].concat()));
    let mut args = BwdArgs::new(
        [q.slice(), k.slice(), v.slice()],
        [o.slice(), lse.slice(), dout.slice()],
        [dq.slice_mut(), dk.slice_mut(), dv.slice_mut()],
    )
    .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
    plan.run(&mut args, &stream).unwrap();
    stream.synchronize().unwrap();
    [o, lse, dq].map(|buffer| downloaded(device, &buffer))
}

/// Results of each rank's closure, by rank.
fn on_ranks<T: Send>(device: &Device, run: impl Fn(Arc<dyn Group>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let groups = threads(2, Duration::from_secs(120));
        let handles: Vec<_> = groups
            .into_iter()
            .map(|host| {
                let (run, device) = (&run, device.clone());
                scope.spawn(move || run(Arc::new(OnDevice { host, device })))
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    })
}

#[test]
fn keys_that_come_while_kernels_wait_give_the_bits_of_one_device() {
    let Some(device) = device() else { return };
    let inputs = [noise(1, HEADS[0]), noise(2, HEADS[1]), noise(3, HEADS[1]), noise(4, HEADS[0])];
    let expected = alone(&device, &inputs);
    let rows = Partition::zig_zag(TOKENS, 2);
    let problem = Problem::new(whole(), rows.clone());
    let row = |heads: u32| u64::from(heads * DIM) * 2;
    let options = Options::default().scheme(Scheme::Gather).flags(true);
    on_ranks(&device, |group| {
        let rank = group.rank();
        let own = |bytes: &[u8], heads| uploaded(&device, &rows.split(bytes, 1, row(heads), rank));
        let own_lse = || rows.split(&expected[1], HEADS[0], 4, rank);
        let [q, k, v] =
            [(0, HEADS[0]), (1, HEADS[1]), (2, HEADS[1])].map(|(at, heads)| own(&inputs[at], heads));
        let forward = options.clone().kernels(PlanOptions::default().batch_invariant(true));
        let mut plan = FwdPlan::new(&problem, group.clone(), &device, &forward).unwrap();
        assert!(plan.explain().contains("come while the kernels run"), "{}", plan.explain());
        let stream = device.stream().unwrap();
        // Twice: the second run's flags are those of the first one, reset. Then with heads that travel, packed.
        let by_heads = forward.scheme(Scheme::Ulysses).flags(None);
        let mut by_heads = FwdPlan::new(&problem, group.clone(), &device, &by_heads).unwrap();
        for run in 0..3 {
            let plan = if run < 2 { &mut plan } else { &mut by_heads };
            let (mut o, mut lse) = (own(&inputs[3], HEADS[0]), uploaded(&device, &own_lse()));
            let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut()).lse(lse.slice_mut());
            plan.run(&mut args, &stream).unwrap();
            stream.synchronize().unwrap();
            assert!(downloaded(&device, &o) == rows.split(&expected[0], 1, row(HEADS[0]), rank), "O, {rank}");
            assert!(downloaded(&device, &lse) == own_lse(), "LSE, {rank}");
        }
        let (o, lse) = (own(&expected[0], HEADS[0]), uploaded(&device, &own_lse()));
        let dout = own(&inputs[3], HEADS[0]);
        // Plans of these ranks with and without flags, against the dQ of one device.
        let [first, second] = [false, true].map(|flags| {
            let options = options.clone().flags(flags).kernels(PlanOptions::default().deterministic(true));
            // f32 shows a different order of dQ's sums, which bf16 hides.
            let wanted = (DType::F32, false);
            let mut plan = BwdPlan::new(&problem, wanted, group.clone(), &device, &options).unwrap();
            let text = plan.explain();
            assert!(!flags || text.contains("of dK and dV home by copy engines"), "{text}");
            // The call runs twice: the second run reuses the first one's slots.
            [(); 2].map(|()| {
                let mut grads = [HEADS[0], HEADS[1], HEADS[1]].map(|heads| {
                    uploaded(&device, &vec![0u8; (2 * row(heads) * u64::from(rows.rows_of(rank))) as usize])
                });
                let [dq, dk, dv] = &mut grads;
                let mut args = BwdArgs::new(
                    [q.slice(), k.slice(), v.slice()],
                    [o.slice(), lse.slice(), dout.slice()],
                    [dq.slice_mut(), dk.slice_mut(), dv.slice_mut()],
                );
                plan.run(&mut args, &stream).unwrap();
                stream.synchronize().unwrap();
                grads.each_ref().map(|grad| downloaded(&device, grad))
            })
        });
        assert!(first == second, "gradients, {rank}");
        let [first, again] = first;
        assert!(first == again, "gradients of a second run, {rank}");
        assert!(first[0] == rows.split(&expected[2], 1, 2 * row(HEADS[0]), rank), "dQ, {rank}");
    });
}

#[test]
fn where_no_flags_can_be_the_plan_says_why_or_refuses_as_it_was_asked() {
    let Some(device) = device() else { return };
    let rows = Partition::contiguous(TOKENS, 2);
    let packed = FwdProblem::group(DType::Bf16, whole().dims).mask("b".parse().unwrap());
    let packed = Problem::new(packed, rows.clone()).packed(vec![0, TOKENS], vec![0, TOKENS]);
    // Cases without flags: a kernel that cannot wait, on rank 1 alone; packed rows.
    let simt = PlanOptions::default().kernel("simt");
    for (problem, of_rank_1, reason) in [
        (Problem::new(whole(), rows.clone()), simt, "rank 1: "),
        (packed, PlanOptions::default(), "packed rows of 1 sequences"),
    ] {
        for flags in [None, Some(true)] {
            let plans = on_ranks(&device, |group| {
                let kernels = if group.rank() == 1 { of_rank_1.clone() } else { PlanOptions::default() };
                let options = Options::default().scheme(Scheme::Gather).flags(flags).kernels(kernels);
                FwdPlan::new(&problem, group, &device, &options).map(|plan| plan.explain())
            });
            for plan in plans {
                match (flags, plan) {
                    (None, Ok(text)) => {
                        assert!(text.contains("before the kernels: ") && text.contains(reason), "{text}");
                    }
                    (Some(_), Err(error)) => {
                        assert!(error.field == "flags" && error.text.contains(reason), "{error}");
                    }
                    (_, other) => panic!("{flags:?}, {reason}: {other:?}"),
                }
            }
        }
    }
}
