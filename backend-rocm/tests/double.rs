//! The complete backend with the emulator's driver library: memory, launches, streams, events, graphs. Emulated,
//! never run on hardware.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::reference::{Precision, combine, forward};
use fmha_core::{
    CombineArgs, CombineProblem, DType, DevBuffer, DevSlice, DevSliceMut, Device, Dims, DropoutSeed, FwdArgs,
    FwdProblem, MemorySpace, PartialResult, PlanOptions, Shape, Stream, Totals,
};

mod support;

const DIMS: Dims = Dims::batch(1).seqlens(48, 80).heads(2, 1).head_dim(64);

/// The emulated device; `None`, with a message, if the emulator is absent.
fn device(arch: &str) -> Option<Device> {
    if !support::clang_is_there() {
        return None;
    }
    match fmha_rocm::open(0, Some(arch)) {
        Ok(backend) => Some(backend),
        Err(error) => {
            println!("absent: no emulated {arch}: {error}");
            None
        }
    }
}

fn numbers(dtype: DType, elems: usize, seed: u32) -> Vec<u8> {
    let size = dtype.size_bytes() as usize;
    let mut state = seed;
    let mut bytes = vec![0; elems * size];
    for elem in bytes.chunks_exact_mut(size) {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        dtype.write(f64::from(state >> 8) / f64::from(1 << 23) - 1.0, elem);
    }
    bytes
}

fn upload(backend: &Device, bytes: &[u8]) -> DevBuffer {
    let mut buffer = backend.memory().alloc(bytes.len() as u64).unwrap();
    backend.memory().upload(bytes, &mut buffer).unwrap();
    buffer
}

fn download(backend: &Device, buffer: &DevBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.bytes() as usize];
    backend.memory().download(buffer, &mut bytes).unwrap();
    bytes
}

fn agrees(dtype: DType, ours: &[u8], theirs: &[f64], allowance: f64) {
    for (index, (elem, theirs)) in ours.chunks_exact(dtype.size_bytes() as usize).zip(theirs).enumerate() {
        let ours = dtype.read(elem);
        assert!((ours - theirs).abs() <= allowance, "element {index}: {ours}, not {theirs}");
    }
}

/// O in memory's order from the reference's heads.
fn reference_o(problem: &FwdProblem, q: &[u8], k: &[u8], v: &[u8]) -> Vec<f64> {
    let args = FwdArgs::new(
        DevSlice::host(q),
        DevSlice::host(k),
        DevSlice::host(v),
        DevSliceMut::host::<u8>(&mut []),
    );
    let mut o = vec![0.0; problem.shape_o().num_elems() as usize];
    for head in forward(problem, &args, Precision::Exact).unwrap() {
        for (at, value) in head.o.iter().enumerate() {
            let (i, d) = (at as u32 / DIMS.head_dim_v, at as u32 % DIMS.head_dim_v);
            o[problem.strides.o.offset(head.span.q_batch, i, head.i_head, d) as usize] = *value;
        }
    }
    o
}

#[test]
fn a_call_a_stream_and_a_graph_give_the_same_bits() {
    let Some(backend) = device("gfx942") else { return };
    assert!(backend.name().contains("emulated"), "{}", backend.name());
    let problem = FwdProblem::batch(DType::F16, DIMS).validate().unwrap();
    let (q, k, v) = (
        numbers(DType::F16, 48 * 2 * 64, 1),
        numbers(DType::F16, 80 * 64, 2),
        numbers(DType::F16, 80 * 64, 3),
    );
    let (dev_q, dev_k, dev_v) = (upload(&backend, &q), upload(&backend, &k), upload(&backend, &v));
    let plan = backend.plan_fwd(&problem, &PlanOptions::default()).unwrap();
    let mut o = backend.memory().alloc(q.len() as u64).unwrap();
    let run = |o: &mut DevBuffer, stream: &Stream| {
        plan.run(&mut FwdArgs::new(dev_q.slice(), dev_k.slice(), dev_v.slice(), o.slice_mut()), stream)
    };

    run(&mut o, &backend.default_stream()).unwrap();
    backend.synchronize().unwrap();
    let plain = download(&backend, &o);
    agrees(DType::F16, &plain, &reference_o(&problem, &q, &k, &v), 2e-3);

    let stream = backend.stream().unwrap();
    let (start, stop) = (backend.event().unwrap(), backend.event().unwrap());
    backend.memory().upload(&vec![0u8; q.len()], &mut o).unwrap();
    start.record(&stream).unwrap();
    run(&mut o, &stream).unwrap();
    stop.record(&stream).unwrap();
    assert!(stop.seconds_since(&start).unwrap() >= 0.0);
    assert_eq!(download(&backend, &o), plain);

    backend.memory().upload(&vec![0u8; q.len()], &mut o).unwrap();
    let graph = stream.capture(|| run(&mut o, &stream)).unwrap();
    assert!(download(&backend, &o).iter().all(|&byte| byte == 0), "a captured call ran");
    // SAFETY: the buffers of the captured call live until the end of this test.
    unsafe { graph.replay(&stream) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(download(&backend, &o), plain);
}

/// A call with dropout is not captured: each replay would repeat the seed and so the keep mask.
#[test]
fn a_call_that_drops_is_not_captured() {
    let Some(backend) = device("gfx942") else { return };
    let problem = FwdProblem::batch(DType::F16, DIMS).p_drop(0.25).validate().unwrap();
    let plan = backend.plan_fwd(&problem, &PlanOptions::default()).unwrap();
    let inputs = [(48 * 2 * 64, 1), (80 * 64, 2), (80 * 64, 3)];
    let [q, k, v] = inputs.map(|(elems, seed)| upload(&backend, &numbers(DType::F16, elems, seed)));
    let mut o = backend.memory().alloc(q.bytes()).unwrap();
    let stream = backend.stream().unwrap();
    let mut run = || {
        let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
        args.score.dropout = Some(DropoutSeed { seed: 7, offset: 0 });
        plan.run(&mut args, &stream)
    };
    let error = stream.capture(&mut run).err().unwrap().to_string();
    assert!(error.starts_with("p_drop 0.25 in a call that is captured"), "{error}");
    run().unwrap();
}

/// Kernels read the lengths on the device, so a replayed graph uses the lengths of that moment.
#[test]
fn a_captured_graph_replays_with_the_lengths_of_the_moment() {
    let Some(backend) = device("gfx942") else { return };
    let dims = Dims { batch: 2, ..DIMS };
    let mut problem = FwdProblem::group(DType::Bf16, dims);
    problem.mask = "b".parse().unwrap();
    let problem = problem.validate().unwrap();
    let plan = backend.plan_fwd(&problem, &PlanOptions::default()).unwrap();
    assert!(plan.promises().graph_capturable);
    let inputs = [(48 * 2 * 64, 1), (80 * 64, 2), (80 * 64, 3)];
    let [q, k, v] = inputs.map(|(elems, seed)| upload(&backend, &numbers(DType::Bf16, elems, seed)));
    let mut o = backend.memory().alloc(q.bytes()).unwrap();
    let zeros = vec![0u8; q.bytes() as usize];
    let lengths = |offsets: [i32; 3]| offsets.iter().flat_map(|at| at.to_le_bytes()).collect::<Vec<u8>>();
    // The first lengths are 40 and 8 queries, the second 3 and 45.
    let times = [(lengths([0, 40, 48]), lengths([0, 70, 80])), (lengths([0, 3, 48]), lengths([0, 11, 80]))];
    let (mut cu_q, mut cu_k) = (upload(&backend, &times[0].0), upload(&backend, &times[0].1));
    let run = |o: &mut DevBuffer, cu_q: &DevBuffer, cu_k: &DevBuffer, stream: &Stream| {
        let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
        args.seq.totals = Totals::packed(48, 80);
        (args.seq.cu_seqlens_q, args.seq.cu_seqlens_k) = (Some(cu_q.slice()), Some(cu_k.slice()));
        plan.run(&mut args, stream)
    };
    let stream = backend.stream().unwrap();
    let graph = stream.capture(|| run(&mut o, &cu_q, &cu_k, &stream)).unwrap();
    let mut results = Vec::new();
    for (q_offsets, k_offsets) in &times {
        backend.memory().upload(q_offsets, &mut cu_q).unwrap();
        backend.memory().upload(k_offsets, &mut cu_k).unwrap();
        let mut both = Vec::new();
        for replay in [true, false] {
            backend.memory().upload(&zeros, &mut o).unwrap();
            if replay {
                // SAFETY: the buffers of the captured call live until the end of this test.
                unsafe { graph.replay(&stream) }.unwrap();
            } else {
                run(&mut o, &cu_q, &cu_k, &stream).unwrap();
            }
            stream.synchronize().unwrap();
            both.push(download(&backend, &o));
        }
        assert_eq!(both[0], both[1], "the graph and the call differ");
        results.push(both.remove(0));
    }
    assert_ne!(results[0], results[1], "the graph did not see the new lengths");
}

/// One plan and one graph serve all lengths up to the bound: the kernel divides the keys among workgroups at run
/// time. `simt` does not divide them.
#[test]
fn a_graph_of_decoding_replays_with_any_lengths() {
    const BOUND: usize = 700;
    for (arch, kernel) in [("gfx942", "cdna_decode"), ("gfx1201", "rdna_decode")] {
        let Some(backend) = device(arch) else { return };
        let dims = Dims { batch: 4, seqlen_q: 2, seqlen_k: BOUND as u32, num_heads_q: 5, ..DIMS };
        let mut problem = FwdProblem::batch(DType::F16, dims);
        (problem.mask, problem.layout.seqused_k) = ("b".parse().unwrap(), true);
        let problem = problem.validate().unwrap();
        let plans = [kernel, "simt"]
            .map(|kernel| backend.plan_fwd(&problem, &PlanOptions::default().kernel(kernel)).unwrap());
        let inputs = [(4 * 2 * 5 * 64, 1), (4 * BOUND * 64, 2), (4 * BOUND * 64, 3)];
        let [q, k, v] = inputs.map(|(elems, seed)| upload(&backend, &numbers(DType::F16, elems, seed)));
        let mut used = upload(&backend, &[0; 16]);
        let mut os = [(); 2].map(|()| upload(&backend, &vec![0xff; q.bytes() as usize]));
        let mut workspaces =
            plans.each_ref().map(|plan| backend.memory().workspace(plan.workspace()).unwrap());
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
            // Lengths: one in four is 0; the logarithms of the others are about uniform.
            let longest = BOUND >> (state >> 28 & 7);
            if state >> 30 == 0 { 0 } else { 1 + (state >> 8) as usize % longest }
        };
        for replay in 0..12 {
            // Among the replays are one with all keys and one with none.
            let lengths: [usize; 4] = match replay {
                0 => [BOUND; 4],
                1 => [0; 4],
                _ => [(); 4].map(|()| drawn()),
            };
            let bytes: Vec<u8> = lengths.iter().flat_map(|&length| (length as i32).to_le_bytes()).collect();
            backend.memory().upload(&bytes, &mut used).unwrap();
            for o in &mut os {
                backend.memory().upload(&vec![0xffu8; o.bytes() as usize], o).unwrap();
            }
            run(1, &used, &mut os).unwrap();
            // SAFETY: the buffers of the captured call live until the end of this test.
            unsafe { graph.replay(&stream) }.unwrap();
            stream.synchronize().unwrap();
            let expected: Vec<f64> =
                download(&backend, &os[1]).chunks_exact(2).map(|elem| DType::F16.read(elem)).collect();
            println!("{arch}: {lengths:?}");
            agrees(DType::F16, &download(&backend, &os[0]), &expected, 2e-3);
        }
    }
}

#[test]
fn combine_agrees_with_the_reference_and_empty_parts_are_neutral() {
    let rows = Shape { batch: 2, seq: 5, head: 3, dim: 40 };
    for arch in ["gfx90a", "gfx942", "gfx950"] {
        let Some(backend) = device(arch) else { return };
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let mut problem = CombineProblem::new(3, dtype, dtype, rows);
            problem.write_lse = true;
            let problem = problem.validate().unwrap();
            let o: Vec<Vec<u8>> = (0..3).map(|n| numbers(dtype, rows.num_elems() as usize, 7 + n)).collect();
            let mut lse: Vec<Vec<u8>> = (0..3).map(|n| numbers(DType::F32, 30, 70 + n)).collect();
            // No row sees a key of the second part, and row 3 sees none of any part.
            for elem in lse[1].chunks_exact_mut(4) {
                DType::F32.write(f64::NEG_INFINITY, elem);
            }
            for part in &mut lse {
                DType::F32.write(f64::NEG_INFINITY, &mut part[12..]);
            }
            let dev: Vec<_> =
                o.iter().zip(&lse).map(|(o, lse)| (upload(&backend, o), upload(&backend, lse))).collect();
            let parts: Vec<_> =
                dev.iter().map(|(o, lse)| PartialResult { o: o.slice(), lse: lse.slice() }).collect();
            let mut out = backend.memory().alloc(o[0].len() as u64).unwrap();
            let mut out_lse = backend.memory().alloc(120).unwrap();
            let plan = backend.plan_combine(&problem, &PlanOptions::default()).unwrap();
            let mut args = CombineArgs::new(&parts, out.slice_mut()).lse(out_lse.slice_mut());
            plan.run(&mut args, &backend.default_stream()).unwrap();

            let host: Vec<_> = o
                .iter()
                .zip(&lse)
                .map(|(o, lse)| PartialResult { o: DevSlice::host(o), lse: DevSlice::host(lse) })
                .collect();
            let args = CombineArgs::new(&host, DevSliceMut::host::<u8>(&mut []));
            let (want_o, want_lse) = combine(&problem, &args).unwrap();
            agrees(dtype, &download(&backend, &out), &want_o, 2.0 * dtype.unit_roundoff());
            for (ours, theirs) in download(&backend, &out_lse).chunks_exact(4).zip(want_lse) {
                let ours = DType::F32.read(ours);
                assert!(
                    ours == theirs || (ours - theirs).abs() < 1e-5,
                    "{arch} {dtype}: LSE {ours}, not {theirs}"
                );
            }
        }
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused_before_anything_runs() {
    let Some(backend) = device("gfx950") else { return };
    let problem = FwdProblem::batch(DType::F16, DIMS).validate().unwrap();
    let plan = backend.plan_fwd(&problem, &PlanOptions::default()).unwrap();
    let (small, enough) = (backend.memory().alloc(64).unwrap(), backend.memory().alloc(1 << 14).unwrap());
    let mut o = backend.memory().alloc(1 << 14).unwrap();
    let mut args = FwdArgs::new(enough.slice(), small.slice(), enough.slice(), o.slice_mut());
    let error = plan.run(&mut args, &backend.default_stream()).unwrap_err().to_string();
    assert!(error.contains("k has 64 bytes"), "{error}");
}

#[test]
fn an_emulated_device_has_no_clock() {
    let Some(backend) = device("gfx942") else { return };
    assert!(!backend.has_clock());
}

/// Workgroups that process several tiles write the same bits as those with one tile. Packed sequences without
/// queries, without keys, without both; rows without visible keys; dropout.
#[test]
fn workgroups_that_walk_over_tiles_write_the_bits_of_those_that_have_one() {
    const ROWS: u32 = 300;
    let dims = Dims { batch: 4, seqlen_q: 150, seqlen_k: 130, num_heads_q: 4, num_heads_kv: 2, ..DIMS };
    let mut packed = FwdProblem::group(DType::Bf16, dims);
    packed.mask = "b".parse().unwrap();
    let offsets = |ends: [i32; 5]| ends.iter().flat_map(|end| end.to_le_bytes()).collect::<Vec<u8>>();
    let lengths = [offsets([0, 0, 150, 260, 300]), offsets([0, 130, 130, 170, 300])];
    let mut dropped = FwdProblem::batch(DType::F16, dims);
    (dropped.mask, dropped.dropout.p_drop) = ("t:20,0".parse().unwrap(), 0.3);
    for (arch, problem) in
        ["gfx90a", "gfx942", "gfx950"].into_iter().flat_map(|arch| [(arch, &packed), (arch, &dropped)])
    {
        let Some(backend) = device(arch) else { return };
        let mut problem = problem.clone();
        problem.write_lse = true;
        let is_packed = problem.dropout.p_drop == 0.0;
        let problem = problem.validate().unwrap();
        let totals = if is_packed { Totals::packed(ROWS, ROWS) } else { Totals::NONE };
        let extents = problem.extents(totals);
        let dtype = problem.dtypes.qk;
        let tensor = |shape: Shape, seed| upload(&backend, &numbers(dtype, shape.num_elems() as usize, seed));
        let (q, k, v) = (tensor(extents.q, 1), tensor(extents.k, 2), tensor(extents.v, 3));
        let [cu_q, cu_k] = [0, 1].map(|which| upload(&backend, &lengths[which]));
        let run = |tile: &[(&str, &str)]| {
            let options = PlanOptions::default().tile(tile.iter().copied());
            let plan = backend.plan_fwd(&problem, &options).unwrap();
            // Bytes of the output that no workgroup writes keep this value.
            let mut o = upload(&backend, &vec![0x5a; q.bytes() as usize]);
            let mut lse = upload(&backend, &vec![0x5a; extents.lse_elems as usize * 4]);
            let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
            args.lse = Some(lse.slice_mut());
            args.score.dropout = Some(DropoutSeed { seed: 3, offset: 1 });
            if is_packed {
                args.seq.totals = totals;
                (args.seq.cu_seqlens_q, args.seq.cu_seqlens_k) = (Some(cu_q.slice()), Some(cu_k.slice()));
            }
            plan.run(&mut args, &backend.default_stream()).unwrap();
            backend.synchronize().unwrap();
            (plan.explain().launch.unwrap(), download(&backend, &o), download(&backend, &lse))
        };
        let (launch, o, lse) = run(&[("block_m", "64"), ("order", "single")]);
        assert_eq!((launch.groups, launch.tiles), (48, 48));
        assert!(!o.chunks_exact(8).any(|bytes| bytes == [0x5a; 8]), "{arch}: a row was not written");
        for workgroups in ["1", "3", "19", "47", "1000"] {
            let (launch, walked_o, walked_lse) =
                run(&[("block_m", "64"), ("order", "static"), ("workgroups", workgroups)]);
            assert_eq!((launch.groups, launch.tiles), (workgroups.parse::<u64>().unwrap().min(48), 48));
            assert!(walked_o == o && walked_lse == lse, "{arch}, {workgroups} workgroups: other bits");
        }
    }
}

#[test]
fn a_plan_runs_on_the_device_that_made_it_alone() {
    let (maker, twin) = (fmha_rocm::pretend("gfx942").unwrap(), fmha_rocm::pretend("gfx942").unwrap());
    let problem = FwdProblem::batch(DType::F16, DIMS).validate().unwrap();
    let plan = maker.plan_fwd(&problem, &PlanOptions::default()).unwrap();
    let mut args = FwdArgs::new(
        DevSlice::host::<u8>(&[]),
        DevSlice::host::<u8>(&[]),
        DevSlice::host::<u8>(&[]),
        DevSliceMut::host::<u8>(&mut []),
    );
    let error = plan.run(&mut args, &twin.default_stream()).unwrap_err().to_string();
    assert!(error.starts_with("stream is of the device"), "{error}");
    // A stream of the device passes the stream check; the next check refuses the arguments.
    let error = plan.run(&mut args, &maker.default_stream()).unwrap_err().to_string();
    assert!(error.starts_with("q is in Host memory"), "{error}");
}

/// Wrong offsets (decreasing, negative, beyond the tensors' rows) access nothing outside the tensors; the emulated
/// device faults on an access outside every allocation.
#[test]
fn offsets_that_lie_touch_nothing_outside_the_tensors_and_checking_names_them() {
    let Some(backend) = device("gfx942") else { return };
    let dims = Dims { batch: 2, num_heads_q: 1, ..DIMS };
    let problem = FwdProblem::group(DType::F16, dims).write_lse(true);
    let problem = problem.validate().unwrap();
    let [q, k, v] = [48, 80, 80].map(|rows| upload(&backend, &numbers(DType::F16, rows * 64, rows as u32)));
    let (mut o, mut lse) = (upload(&backend, &[0; 48 * 64 * 2]), upload(&backend, &[0; 48 * 4]));
    let honest = [0, 20, 48];
    for (offsets, text) in [
        ([0, 48, -9], "cu_seqlens_q[2] -9 is less than cu_seqlens_q[1] 48"),
        ([-70_000, 20, 48], "cu_seqlens_q[0] -70000 is negative"),
        ([0, 20, 1 << 30], "cu_seqlens_q[2] 1073741824 is larger than the 48 rows"),
        (honest, ""),
    ] {
        let bytes: Vec<u8> = offsets.iter().flat_map(|offset: &i32| offset.to_le_bytes()).collect();
        let (cu_q, cu_k) = (upload(&backend, &bytes), upload(&backend, &bytes));
        for kernel in ["cdna_decode", "cdna_fwd", "simt"] {
            let options = PlanOptions::default().kernel(kernel.to_owned());
            let mut run = |options: &PlanOptions| {
                let plan = backend.plan_fwd(&problem, options).unwrap();
                let mut workspace = backend.memory().workspace(plan.workspace())?;
                let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
                args.lse = Some(lse.slice_mut());
                args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
                args.seq.totals = Totals::packed(48, 80);
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
fn unaligned_operands_are_served_by_a_kernel_of_the_plan_or_refused_by_name() {
    let Some(backend) = device("gfx942") else { return };
    let problem = FwdProblem::batch(DType::F16, DIMS).validate().unwrap();
    let (q, k, v) = (
        numbers(DType::F16, 48 * 2 * 64, 1),
        numbers(DType::F16, 80 * 64, 2),
        numbers(DType::F16, 80 * 64, 3),
    );
    // Operands are moved by one element, so that they do not begin at a dword.
    let shifted = |bytes: &[u8]| upload(&backend, &[&[0; 2], bytes].concat());
    let (dev_q, dev_k, dev_v) = (shifted(&q), upload(&backend, &k), upload(&backend, &v));
    let mut o = backend.memory().alloc(q.len() as u64).unwrap();
    let mut run = |allow_fallback| {
        let options = PlanOptions::default().allow_fallback(allow_fallback);
        let plan = backend.plan_fwd(&problem, &options).unwrap();
        // SAFETY: the buffer has two bytes more than Q.
        let q = unsafe {
            DevSlice::from_raw(
                MemorySpace::Device,
                dev_q.as_ptr().wrapping_add(2),
                q.len() as u64,
                fmha_core::ElemType::Bytes,
            )
        };
        let mut args = FwdArgs::new(q, dev_k.slice(), dev_v.slice(), o.slice_mut());
        plan.run(&mut args, &backend.default_stream())
    };
    let refused = run(false).unwrap_err().to_string();
    assert!(refused.contains("q starts at 0x") && refused.contains("4 bytes"), "{refused}");
    run(true).unwrap();
    backend.synchronize().unwrap();
    agrees(DType::F16, &download(&backend, &o), &reference_o(&problem, &q, &k, &v), 2e-3);
}
