//! The backend on the test double of the driver: an emulated device that interprets the compiled kernels. Needs
//! NVRTC; without it a test prints `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use fmha_core::tune::TunedTile;
use fmha_core::{
    Accuracy, AnyProblem, BwdProblem, DType, DevBuffer, DevSliceMut, Device, Dims, DropoutSeed, FwdArgs,
    FwdPlan, FwdProblem, MaskSpec, PlanOptions, Stream, Totals,
};

/// Allocator that counts this thread's allocations. The double has an allocator of its own.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has already destroyed its counter; its allocations are not counted.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The emulated device; `None`, with a message, if there is no NVRTC.
fn device() -> Option<Device> {
    match fmha_cuda::nvrtc::nvrtc() {
        Ok(_) => Some(fmha_cuda::open(0, Some("sm_90a")).unwrap()),
        Err(reason) => {
            println!("absent: {reason}");
            None
        }
    }
}

/// A call's operands on the device.
struct Call {
    plan: FwdPlan,
    q: DevBuffer,
    k: DevBuffer,
    v: DevBuffer,
    o: DevBuffer,
    lse: DevBuffer,
    workspace: Option<DevBuffer>,
}

impl Call {
    /// Causal f16 attention with more tiles than multiprocessors: some tile indices come from a counter.
    fn new(backend: &Device) -> Self {
        let dims = Dims::batch(35).seqlens(20, 30).heads(4, 4).head_dim(64);
        let problem = FwdProblem::batch(DType::F16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        let problem = problem.validate().unwrap();
        let options = PlanOptions::default().tile([("order", "dynamic")]);
        let plan = backend.plan_fwd(&problem, &options).unwrap();
        let memory = backend.memory();
        let filled = |elems: u64, salt: u64| {
            let bytes: Vec<u8> = (0..elems)
                .flat_map(|i| half::f16::from_f64(((i * 37 + salt) % 101) as f64 / 50.0 - 1.0).to_le_bytes())
                .collect();
            let mut buffer = memory.alloc(bytes.len() as u64).unwrap();
            memory.upload(&bytes, &mut buffer).unwrap();
            buffer
        };
        Self {
            q: filled(problem.shape_q().num_elems(), 1),
            k: filled(problem.shape_k().num_elems(), 2),
            v: filled(problem.shape_v().num_elems(), 3),
            o: filled(problem.shape_o().num_elems(), 4),
            lse: memory.alloc(problem.extents(fmha_core::Totals::NONE).lse_elems * 4).unwrap(),
            workspace: memory.workspace(plan.workspace()).unwrap(),
            plan,
        }
    }

    fn run(&mut self, stream: &Stream) {
        let mut args = FwdArgs::new(self.q.slice(), self.k.slice(), self.v.slice(), self.o.slice_mut());
        args.lse = Some(self.lse.slice_mut());
        args.workspace = self.workspace.as_mut().map(DevBuffer::slice_mut);
        self.plan.run(&mut args, stream).unwrap();
    }

    fn output(&self, backend: &Device) -> Vec<u8> {
        let mut bytes = vec![0u8; self.o.bytes() as usize];
        backend.synchronize().unwrap();
        backend.memory().download(&self.o, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn a_run_allocates_nothing() {
    let Some(backend) = device() else { return };
    let mut call = Call::new(&backend);
    call.run(&backend.default_stream());
    let stream = backend.default_stream();
    let before = ALLOCATIONS.get();
    call.run(&stream);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    let counts = ALLOCATIONS.get();
    drop(std::hint::black_box(vec![0u8; 1]));
    assert_eq!(ALLOCATIONS.get() - counts, 1, "the counter does not count");
}

/// A run gives equal bits whatever its workspace holds: an aborted launch may leave any number in the tile counter.
#[test]
fn a_run_gives_the_same_bits_whatever_its_workspace_holds_before_it() {
    let Some(backend) = device() else { return };
    let mut call = Call::new(&backend);
    let bytes = call.plan.workspace().bytes as usize;
    assert!(bytes > 0);
    call.run(&backend.default_stream());
    let first = call.output(&backend);
    for dirt in [0x00u8, 0x01, 0xFF] {
        backend.memory().upload(&vec![dirt; bytes], call.workspace.as_mut().unwrap()).unwrap();
        backend.memory().upload(&vec![0xFFu8; first.len()], &mut call.o).unwrap();
        call.run(&backend.default_stream());
        assert!(call.output(&backend) == first, "a workspace of {dirt:#x} changes the result");
    }
}

/// A plan reads each call's operands at their current addresses; the tensor maps of the last call are reused only if no
/// operand has moved.
#[test]
fn a_plan_reads_each_call_where_it_lies_and_each_operand_by_itself() {
    let Some(backend) = device() else { return };
    let mut call = Call::new(&backend);
    call.run(&backend.default_stream());
    let first = call.output(&backend);
    let other = |from: &DevBuffer| {
        let mut bytes = vec![0u8; from.bytes() as usize];
        backend.memory().download(from, &mut bytes).unwrap();
        bytes.rotate_left(1024);
        let mut buffer = backend.memory().alloc(from.bytes()).unwrap();
        backend.memory().upload(&bytes, &mut buffer).unwrap();
        buffer
    };
    let operands: [fn(&mut Call) -> &mut DevBuffer; 3] =
        [|call| &mut call.q, |call| &mut call.k, |call| &mut call.v];
    for (operand, name) in operands.into_iter().zip(["q", "k", "v"]) {
        let elsewhere = other(operand(&mut call));
        let before = std::mem::replace(operand(&mut call), elsewhere);
        call.run(&backend.default_stream());
        assert!(call.output(&backend) != first, "{name} was read where it had been");
        *operand(&mut call) = before;
        call.run(&backend.default_stream());
        assert!(call.output(&backend) == first, "{name} is back, and its bits are not");
    }
}

#[test]
fn a_plan_runs_on_the_device_that_made_it_alone() {
    let Some(maker) = device() else { return };
    let mut call = Call::new(&maker);
    // A second handle of this device, with an equal configuration.
    let twin = fmha_cuda::open(0, Some("sm_90a")).unwrap();
    let mut args = FwdArgs::new(call.q.slice(), call.k.slice(), call.v.slice(), call.o.slice_mut());
    args.lse = Some(call.lse.slice_mut());
    args.workspace = call.workspace.as_mut().map(DevBuffer::slice_mut);
    let error = call.plan.run(&mut args, &twin.default_stream()).unwrap_err().to_string();
    assert!(error.starts_with("stream is of the device"), "{error}");
    call.plan.run(&mut args, &maker.default_stream()).unwrap();
}

/// Wrong offsets (decreasing, negative, beyond the tensors' rows) access nothing outside the tensors. Each tensor is an
/// allocation of its own, and the emulated device reports an access outside all of them as a fault.
#[test]
fn offsets_that_lie_touch_nothing_outside_the_tensors_and_checking_names_them() {
    let Some(backend) = device() else { return };
    let memory = backend.memory();
    let dims = Dims::batch(3).seqlens(96, 96).heads(1, 1).head_dim(64);
    let problem = FwdProblem::group(DType::F16, dims).write_lse(true);
    let problem = problem.validate().unwrap();
    let on_device = |bytes: &[u8]| {
        let mut buffer = memory.alloc(bytes.len() as u64).unwrap();
        memory.upload(bytes, &mut buffer).unwrap();
        buffer
    };
    let tensor = || on_device(&[0x11; 96 * 64 * 2]);
    let (q, k, v, mut o) = (tensor(), tensor(), tensor(), tensor());
    let mut lse = memory.alloc(96 * 4).unwrap();
    let honest = [0, 30, 60, 96];
    for (offsets, text) in [
        ([0, 90, 20, 96], "cu_seqlens_q[2] 20 is less than cu_seqlens_q[1] 90"),
        ([-5000, 30, 60, 96], "cu_seqlens_q[0] -5000 is negative"),
        ([0, 30, 60, 100_000], "cu_seqlens_q[3] 100000 is larger than the 96 rows"),
        (honest, ""),
    ] {
        let bytes: Vec<u8> = offsets.iter().flat_map(|offset: &i32| offset.to_le_bytes()).collect();
        let (cu_q, cu_k) = (on_device(&bytes), on_device(&bytes));
        for kernel in ["sm90", "simt"] {
            let options = PlanOptions::default().kernel(kernel.to_owned());
            let mut run = |options: &PlanOptions| {
                let plan = backend.plan_fwd(&problem, options).unwrap();
                let mut workspace = memory.workspace(plan.workspace()).unwrap();
                let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
                args.lse = Some(lse.slice_mut());
                args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
                args.seq.totals = Totals::packed(96, 96);
                (args.seq.cu_seqlens_q, args.seq.cu_seqlens_k) = (Some(cu_q.slice()), Some(cu_k.slice()));
                plan.run(&mut args, &backend.default_stream())?;
                backend.synchronize()
            };
            run(&options).unwrap_or_else(|error| panic!("{kernel} with {offsets:?}: {error}"));
            match run(&options.clone().check_lengths(true)) {
                Ok(()) => assert_eq!(offsets, honest),
                Err(error) => assert!(!text.is_empty() && error.to_string().contains(text), "{error}"),
            }
        }
    }
}

#[test]
fn a_workspace_that_is_short_crooked_or_over_an_operand_is_refused() {
    let Some(backend) = device() else { return };
    let mut call = Call::new(&backend);
    let mut big = backend.memory().alloc(4096).unwrap();
    let (space, bytes) = (backend.memory().space(), call.plan.workspace().bytes);
    let o = call.o.as_ptr();
    for (first, bytes, text) in [
        (big.as_ptr(), bytes - 1, "its extents"),
        (big.as_ptr().wrapping_add(4), bytes, "is aligned to"),
        (o, bytes, "overlaps"),
    ] {
        let mut args = FwdArgs::new(call.q.slice(), call.k.slice(), call.v.slice(), call.o.slice_mut());
        args.lse = Some(call.lse.slice_mut());
        // SAFETY: refused before anything is launched.
        args.workspace =
            Some(unsafe { DevSliceMut::from_raw(space, first, bytes, fmha_core::ElemType::Bytes) });
        let error = call.plan.run(&mut args, &backend.default_stream()).unwrap_err().to_string();
        assert!(error.contains("workspace") && error.contains(text), "{error}");
    }
    drop(big.slice_mut());
}

#[test]
fn a_run_is_captured_and_replayed() {
    let Some(backend) = device() else { return };
    let mut call = Call::new(&backend);
    call.run(&backend.default_stream());
    let expected = call.output(&backend);
    let nothing = vec![0xFF; expected.len()];
    backend.memory().upload(&nothing, &mut call.o).unwrap();

    let stream = backend.stream().unwrap();
    let queue = || {
        call.run(&stream);
        Ok(())
    };
    let recording = stream.capture(queue).unwrap();
    assert!(call.output(&backend) == nothing, "it ran while it was captured");
    for _ in 0..2 {
        backend.memory().upload(&nothing, &mut call.o).unwrap();
        // SAFETY: the buffers of `call` live, and nothing else runs.
        unsafe { recording.replay(&stream).unwrap() };
        stream.synchronize().unwrap();
        assert!(call.output(&backend) == expected);
    }
}

/// One plan and one graph for all lengths up to the bound, 0 among them: parts of a fixed number of keys and equal
/// shares of all keys, by `sm80` and by `sm90`. Each replay is compared with a call that does not split keys.
#[test]
fn a_graph_of_decoding_replays_with_any_lengths() {
    const BOUND: usize = 600;
    let Some(backend) = device() else { return };
    let dims = Dims::batch(4).seqlens(2, BOUND as u32).heads(5, 1).head_dim(64);
    let mut problem = FwdProblem::batch(DType::F16, dims);
    (problem.mask, problem.layout.seqused_k) = (MaskSpec::CAUSAL, true);
    let problem = problem.validate().unwrap();
    let numbers = |elems: usize, salt: usize| -> Vec<u8> {
        let number = |i: usize| ((i * 37 + i / 64 * 11 + salt) % 101) as f64 / 50.0 - 1.0;
        (0..elems).flat_map(|i| half::f16::from_f64(number(i)).to_le_bytes()).collect()
    };
    let memory = backend.memory();
    let upload = |bytes: &[u8]| {
        let mut buffer = memory.alloc(bytes.len() as u64).unwrap();
        memory.upload(bytes, &mut buffer).unwrap();
        buffer
    };
    let q = upload(&numbers(4 * 2 * 5 * 64, 1));
    let (k, v) = (upload(&numbers(4 * BOUND * 64, 2)), upload(&numbers(4 * BOUND * 64, 3)));
    for (kernel, shares, words) in [
        ("sm80", "0", "keys in parts of 128"),
        ("sm80", "8", "keys of all sequences in 8 equal shares"),
        ("sm90", "8", "keys of all sequences in 8 equal shares"),
    ] {
        let cut = PlanOptions::default().kernel(kernel).tile([("split_keys", "128"), ("shares", shares)]);
        let whole = PlanOptions::default().kernel("sm80").tile([("split_keys", "0")]);
        let plans = [cut, whole].map(|options| backend.plan_fwd(&problem, &options).unwrap());
        let said = plans.each_ref().map(|plan| format!("{plan}").contains(words));
        assert_eq!(said, [true, false], "{kernel}: {words}");
        let mut used = upload(&[0; 16]);
        let mut os = [(); 2].map(|()| upload(&vec![0xff; q.bytes() as usize]));
        let mut workspaces = plans.each_ref().map(|plan| memory.workspace(plan.workspace()).unwrap());
        let stream = backend.stream().unwrap();
        let mut run = |at: usize, used: &DevBuffer, os: &mut [DevBuffer; 2]| {
            let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), os[at].slice_mut());
            args.seq.seqused_k = Some(used.slice());
            args.workspace = workspaces[at].as_mut().map(DevBuffer::slice_mut);
            plans[at].run(&mut args, &stream)
        };
        let graph = stream.capture(|| run(0, &used, &mut os)).unwrap();
        let mut state = 59u32;
        let mut drawn = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // One length in four is 0; the logarithms of the others are about uniform.
            let longest = BOUND >> (state >> 28 & 7);
            if state >> 30 == 0 { 0 } else { 1 + (state >> 8) as usize % longest }
        };
        for replay in 0..8 {
            // Among the replays are one with all keys and one with none.
            let lengths: [usize; 4] = match replay {
                0 => [BOUND; 4],
                1 => [0; 4],
                _ => [(); 4].map(|()| drawn()),
            };
            let bytes: Vec<u8> = lengths.iter().flat_map(|&length| (length as i32).to_le_bytes()).collect();
            memory.upload(&bytes, &mut used).unwrap();
            for o in &mut os {
                memory.upload(&vec![0xff_u8; o.bytes() as usize], o).unwrap();
            }
            run(1, &used, &mut os).unwrap();
            // SAFETY: the buffers of the captured call live until the end of this test.
            unsafe { graph.replay(&stream) }.unwrap();
            stream.synchronize().unwrap();
            let [ours, theirs] = os.each_ref().map(|o| {
                let mut bytes = vec![0_u8; o.bytes() as usize];
                memory.download(o, &mut bytes).unwrap();
                let elems: Vec<f64> = bytes.chunks_exact(2).map(|elem| DType::F16.read(elem)).collect();
                elems
            });
            for (at, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                let is_near = (ours - theirs).abs() <= 2e-3;
                assert!(is_near, "{kernel}, {words}, {lengths:?}, element {at}: {ours}, whole {theirs}");
            }
        }
    }
}

/// A replay would repeat the seed of the recording, and so its keep mask.
#[test]
fn a_call_that_drops_is_not_captured() {
    let Some(backend) = device() else { return };
    let mut call = Call::new(&backend);
    let mut dropping = FwdProblem::clone(call.plan.problem());
    dropping.dropout.p_drop = 0.25;
    call.plan = backend.plan_fwd(&dropping.validate().unwrap(), &PlanOptions::default()).unwrap();
    call.workspace = backend.memory().workspace(call.plan.workspace()).unwrap();
    let before = call.output(&backend);
    let stream = backend.stream().unwrap();
    let mut run = || {
        let mut args = FwdArgs::new(call.q.slice(), call.k.slice(), call.v.slice(), call.o.slice_mut());
        args.lse = Some(call.lse.slice_mut());
        args.workspace = call.workspace.as_mut().map(DevBuffer::slice_mut);
        args.score.dropout = Some(DropoutSeed { seed: 7, offset: 0 });
        call.plan.run(&mut args, &stream)
    };
    let error = stream.capture(&mut run).err().unwrap().to_string();
    assert!(error.starts_with("p_drop 0.25 in a call that is captured"), "{error}");
    run().unwrap();
    assert!(call.output(&backend) != before);
}

#[test]
fn an_emulated_device_keeps_no_tile_and_its_own_tile_spelt_out_is_its_plan() {
    let Some(backend) = device() else { return };
    let fwd = Call::new(&backend).plan.problem().clone();
    let bwd = BwdProblem::new(FwdProblem::clone(&fwd)).validate().unwrap();
    let tuner = backend.tuner().unwrap();
    let plan = |problem: AnyProblem<'_>, options: &PlanOptions| match problem {
        AnyProblem::Backward(problem) => {
            let plan = backend.plan_bwd(problem, options).unwrap();
            (plan.details().to_vec(), plan.explain().launch)
        }
        _ => {
            let plan = backend.plan_fwd(&fwd, options).unwrap();
            (plan.details().to_vec(), plan.explain().launch)
        }
    };
    for (problem, deterministic) in [
        (AnyProblem::Forward(&fwd), false),
        (AnyProblem::Backward(&bwd), false),
        (AnyProblem::Backward(&bwd), true),
    ] {
        let options = PlanOptions::default().deterministic(deterministic);
        let tile = tuner.default_tile(problem, &options).unwrap();
        let knobs = tuner.knobs(problem, &options).unwrap().into_iter().map(|(knob, _)| knob);
        assert!(knobs.eq(tile.iter().map(|(name, _)| name)), "{tile:?}");
        let spelt = options.clone().tile(tile.clone());
        assert_eq!(plan(problem, &options), plan(problem, &spelt));

        let tile = TunedTile { tile, seconds: 1.0, default_seconds: 2.0 };
        assert!(tuner.keep(problem, &options, tile).unwrap_err().to_string().contains("emulated"));
    }
    assert!(!backend.has_clock());
}

#[test]
fn a_backend_without_a_device_plans_and_refuses_to_run() {
    let backend = fmha_cuda::pretend("sm_90a").unwrap();
    let dims = Dims::batch(1).seqlens(4096, 4096).heads(8, 8).head_dim(128);
    let problem = FwdProblem::batch(DType::Bf16, dims).validate().unwrap();
    let plan = backend.plan_fwd(&problem, &PlanOptions::default()).unwrap();
    assert_eq!(plan.kernel(), "sm90");
    assert_eq!(plan.explain().launch.unwrap().groups, 132);
    let registers = plan.explain().resources.and_then(|resources| resources.registers);
    assert_eq!(registers.is_some(), fmha_cuda::nvrtc::nvrtc().is_ok(), "{}", plan.explain().code);
    assert!(backend.memory().alloc(1).unwrap_err().to_string().contains("no device"));
    assert!(fmha_cuda::pretend("sm_12").is_err());
}

#[test]
fn exact_is_planned_without_a_lagging_maximum_and_what_is_not_kept_is_refused() {
    let backend = fmha_cuda::pretend("sm_90a").unwrap();
    let dims = Dims::batch(1).seqlens(512, 512).heads(2, 2).head_dim(64);
    let problem = FwdProblem::batch(DType::Bf16, dims).validate().unwrap();
    let exact = PlanOptions::default().accuracy(Accuracy::Exact);
    let plan = backend.plan_fwd(&problem, &exact).unwrap();
    assert_eq!((plan.kernel(), plan.promises().accuracy), ("sm90", Accuracy::Exact));
    let lagging = vec![("lazy_rescale_log2".to_owned(), "8".to_owned())];
    let error = backend.plan_fwd(&problem, &exact.clone().tile(lagging)).unwrap_err();
    assert!(error.to_string().contains("accuracy exact is not kept"), "{error}");
    let invariant = PlanOptions::default().batch_invariant(true);
    let plan = backend.plan_fwd(&problem, &invariant).unwrap();
    assert!(plan.kernel() == "sm90" && plan.promises().batch_invariant, "{plan}");
    assert!(!backend.plan_fwd(&problem, &PlanOptions::default()).unwrap().promises().batch_invariant);
}
