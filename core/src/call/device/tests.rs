//! How a call is checked, cleared and launched, and when streams, events and graphs are destroyed, on a device that
//! logs each request.

use super::*;
use crate::toy::{Log, Toy, problem};
use crate::{
    Bias, BiasBroadcast, BiasGrad, BwdArgs, BwdProblem, DType, DevBuffer, DevSlice, DevSliceMut, Dims,
    DropoutSeed, ElemType, ElementwiseBias, Error, FwdArgs, FwdProblem, KvLayout, MemorySpace, QLayout,
    SeqArgs, Strides, ValidFwd,
};

fn open(toy: Toy) -> (Device, Log) {
    let log = toy.log.clone();
    (Device::new(toy), log)
}

/// Operands of a problem, in a device's memory.
struct Operands {
    inputs: [DevBuffer; 3],
    o: DevBuffer,
    workspace: Option<DevBuffer>,
}

impl Operands {
    fn of(plan: &FwdPlan) -> Self {
        let (memory, problem) = (plan.device().memory(), plan.problem());
        let tensor = |elems: u64| memory.alloc(4 * elems).unwrap();
        let shapes = [problem.shape_q(), problem.shape_k(), problem.shape_v()];
        let workspace = (plan.workspace().bytes > 0).then(|| {
            // Extra bytes: the driver aligns addresses to 256 bytes.
            memory.alloc(plan.workspace().bytes + 256).unwrap()
        });
        Self {
            inputs: shapes.map(|shape| tensor(shape.num_elems())),
            o: tensor(problem.shape_o().num_elems()),
            workspace,
        }
    }

    fn args(&mut self) -> FwdArgs<'_> {
        let [q, k, v] = &self.inputs;
        let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), self.o.slice_mut());
        args.workspace = self.workspace.as_mut().map(|buffer| {
            let skipped = buffer.as_ptr().align_offset(Workspace::ALIGN);
            let bytes = buffer.bytes() - skipped as u64;
            // SAFETY: inside the buffer.
            unsafe {
                crate::DevSliceMut::from_raw(
                    crate::MemorySpace::Device,
                    buffer.as_ptr().add(skipped),
                    bytes,
                    crate::ElemType::Scratch,
                )
            }
        });
        args
    }
}

#[test]
fn a_call_is_checked_then_cleared_then_launched() {
    let workspace = Workspace { bytes: 64, zeroed_bytes: 16 };
    let (device, log) = open(Toy { workspace, ..Toy::on_a_device() });
    let plan = device.plan_fwd(&problem(), &PlanOptions::default()).unwrap();
    let mut operands = Operands::of(&plan);
    let stream = device.stream().unwrap();
    assert_eq!(log.take(), ["create stream"]);
    plan.run(&mut operands.args(), &stream).unwrap();
    assert_eq!(log.take(), ["zero 16 on 1", "launch on 1, 0 sequences"]);

    let mut args = operands.args();
    args.workspace = None;
    assert!(plan.run(&mut args, &stream).unwrap_err().to_string().starts_with("workspace"));
    let mut args = operands.args();
    args.q = DevSlice::host(&[0u8; 4]);
    assert!(plan.run(&mut args, &stream).unwrap_err().to_string().starts_with("q"));
    assert_eq!(log.take(), Vec::<String>::new(), "something was queued");
}

#[test]
fn an_address_that_a_kernel_does_not_take_is_refused_before_anything_is_queued() {
    let workspace = Workspace::zeroed(16);
    let (device, log) = open(Toy { workspace, refused: Some(0x1000), ..Toy::on_a_device() });
    let plan = device.plan_fwd(&problem(), &PlanOptions::default()).unwrap();
    let mut operands = Operands::of(&plan);
    let mut args = operands.args();
    // SAFETY: nobody reads it.
    args.q = unsafe { DevSlice::from_raw(crate::MemorySpace::Device, 0x1000 as *const u8, 64, DType::F32) };
    let error = plan.run(&mut args, &device.default_stream()).unwrap_err();
    assert_eq!(error.to_string(), "q starts at 0x1000");
    assert_eq!(log.take(), Vec::<String>::new());
}

#[test]
fn a_call_that_writes_nothing_launches_nothing() {
    let (device, log) = open(Toy::on_a_device());
    let mut empty = FwdProblem::clone(&problem());
    empty.dims.seqlen_q = 0;
    let plan = device.plan_fwd(&empty.validate().unwrap(), &PlanOptions::default()).unwrap();
    plan.run(&mut Operands::of(&plan).args(), &device.default_stream()).unwrap();
    assert_eq!(log.take(), Vec::<String>::new());
}

const TWO: Dims = Dims::batch(2).seqlens(3, 3).heads(1, 1).head_dim(8);

#[test]
fn lengths_are_checked_where_that_was_asked_for_and_read_back_from_a_device() {
    let problem = FwdProblem::batch(DType::F32, TWO).seqused_k(true);
    let problem = problem.validate().unwrap();
    let checks = PlanOptions { check_lengths: true, ..PlanOptions::default() };
    for (options, checked) in [(checks, true), (PlanOptions::default(), false)] {
        let (device, log) = open(Toy::on_a_device());
        let plan = device.plan_fwd(&problem, &options).unwrap();
        assert_eq!(plan.promises().graph_capturable, !checked);
        assert_eq!(plan.to_string().contains("read back and checked"), checked);
        let mut lengths = device.memory().alloc(8).unwrap();
        for (used, wrong) in [([3i32, 1], false), ([3, 9], true)] {
            device.memory().upload(&used, &mut lengths).unwrap();
            let mut operands = Operands::of(&plan);
            let mut args = operands.args();
            args.seq = SeqArgs { seqused_k: Some(lengths.slice()), ..SeqArgs::default() };
            let ran = plan.run(&mut args, &device.default_stream());
            let mut expected = if checked { vec!["synchronize 0", "read 8"] } else { Vec::new() };
            match (checked, wrong) {
                (true, true) => assert!(ran.unwrap_err().to_string().contains("seqused_k[1] 9")),
                _ => {
                    ran.unwrap();
                    expected.push("launch on 0, 0 sequences");
                }
            }
            assert_eq!(log.take(), expected);
        }
    }

    let (device, log) = open(Toy::in_host_memory());
    for (checked, used, wrong) in
        [(false, [3i32, 1], false), (false, [3, 9], false), (true, [3, 1], false), (true, [3, 9], true)]
    {
        let plan = device.plan_fwd(&problem, &PlanOptions::default().check_lengths(checked)).unwrap();
        assert_eq!(plan.to_string().contains("checked by each run"), checked);
        let mut operands = Operands::of(&plan);
        let mut args = operands.args();
        args.seq = SeqArgs { seqused_k: Some(DevSlice::host(&used)), ..SeqArgs::default() };
        match plan.run(&mut args, &device.default_stream()) {
            Err(error) => assert!(wrong && error.to_string().contains("seqused_k[1] 9"), "{error}"),
            Ok(()) => assert!(!wrong),
        }
        assert_eq!(log.take().len(), usize::from(!wrong));
    }
}

#[test]
fn a_stream_an_event_and_a_recording_of_another_device_are_refused_by_name() {
    let ((ours, log), (other, _)) = (open(Toy::on_a_device()), open(Toy::on_a_device()));
    assert!(ours.is(&ours.clone()) && !ours.is(&other));
    let plan = ours.plan_fwd(&problem(), &PlanOptions::default()).unwrap();
    let (stream, event) = (ours.stream().unwrap(), other.event().unwrap());
    let recording = other.stream().unwrap().capture(|| Ok(())).unwrap();
    log.take();
    for (error, name) in [
        (plan.run(&mut Operands::of(&plan).args(), &other.default_stream()), "stream is of the device"),
        (event.record(&stream), "stream is of the device"),
        (stream.wait(&event), "event is of the device"),
        (ours.event().unwrap().seconds_since(&event).map(drop), "start is of the device"),
        // SAFETY: nothing was recorded.
        (unsafe { recording.replay(&stream) }, "stream is of the device"),
    ] {
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with(name) && text.contains("toy:7"), "{text}");
    }
    assert_eq!(log.take(), ["destroy event 101"]);
}

/// A replay repeats the recorded seed and so the keep mask: calls with dropout are recorded only to measure time.
#[test]
fn a_call_that_drops_is_not_recorded_but_for_its_time() {
    let (device, log) = open(Toy::on_a_device());
    let dropping = FwdProblem::clone(&problem()).p_drop(0.25).validate().unwrap();
    let plan = device.plan_fwd(&dropping, &PlanOptions::default()).unwrap();
    assert!(!plan.promises().graph_capturable, "{plan}");
    let mut operands = Operands::of(&plan);
    let stream = device.stream().unwrap();
    log.take();
    let mut run = |raw: bool| {
        let mut args = operands.args();
        args.score.dropout = Some(DropoutSeed { seed: 1, offset: 0 });
        if raw {
            // SAFETY: the stream lives.
            unsafe { plan.run_on_raw(&mut args, stream.as_raw()) }
        } else {
            plan.run(&mut args, &stream)
        }
    };
    for raw in [false, true] {
        let error = stream.capture(|| run(raw)).err().unwrap().to_string();
        assert!(error.starts_with("p_drop 0.25 in a call that is captured"), "{error}");
        assert_eq!(log.take(), Vec::<String>::new());
        run(raw).unwrap();
        assert_eq!(log.take().len(), 1);
    }
    assert!(stream.capture_for_its_time(|| run(false)).is_ok());
    assert!(stream.capture(|| run(false)).is_err(), "a timed recording lets no other one pass");
}

#[test]
fn what_a_device_made_is_destroyed_once_and_what_is_the_callers_never() {
    let (device, log) = open(Toy::on_a_device());
    let stream = device.stream().unwrap();
    let event = device.event().unwrap();
    event.record(&stream).unwrap();
    stream.wait(&event).unwrap();
    stream.synchronize().unwrap();
    let recording = stream.capture(|| Ok(())).unwrap();
    // SAFETY: nothing was recorded.
    unsafe { recording.replay(&stream).unwrap() };
    // SAFETY: the toy's streams are numbers.
    let callers = unsafe { Stream::from_raw(&device, 5) };
    callers.synchronize().unwrap();
    assert_eq!((callers.as_raw(), device.default_stream().as_raw()), (5, 0));
    let asked = ["create stream", "record 101 on 1", "1 waits for 101", "synchronize 1", "replay 201 on 1"];
    assert_eq!(log.take(), [&asked[..], &["synchronize 5"]].concat());
    drop((callers, device.default_stream()));
    assert_eq!(log.take(), Vec::<String>::new());
    drop((recording, event, stream));
    assert_eq!(log.take(), ["destroy graph 201", "destroy event 101", "destroy stream 1"]);
}

#[test]
fn without_streams_work_is_done_at_return_and_has_no_clock() {
    let device = Device::new(Toy::in_host_memory());
    assert!(!device.has_streams() && !device.has_clock());
    let (stream, event) = (device.stream().unwrap(), device.event().unwrap());
    event.record(&stream).unwrap();
    stream.wait(&event).unwrap();
    for done in [stream.synchronize(), event.synchronize(), device.synchronize()] {
        done.unwrap();
    }
    for error in [stream.seconds(|| Ok(())).map(drop), stream.capture(|| Ok(())).map(drop)] {
        assert!(matches!(error, Err(Error::NoDevice(text)) if text.contains("no streams")));
    }
}

#[test]
fn a_plan_that_breaks_a_wish_is_refused_though_its_backend_made_it() {
    let (device, _) = open(Toy { deterministic: false, ..Toy::on_a_device() });
    let options = PlanOptions { deterministic: true, ..PlanOptions::default() };
    let error = device.plan_fwd(&problem(), &options).unwrap_err().to_string();
    assert!(error.contains("toy: deterministic true is not kept"), "{error}");
}

/// A buffer that safe code uploads has the uploaded type, and a call with another type refuses it.
#[test]
fn a_buffer_knows_the_type_of_what_was_uploaded() {
    let (device, _) = open(Toy::on_a_device());
    let memory = device.memory();
    let mut buffer = memory.alloc(64).unwrap();
    assert_eq!((buffer.elem(), buffer.slice().elem()), (ElemType::Bytes, ElemType::Bytes));
    memory.upload(&[1f32; 16], &mut buffer).unwrap();
    let f32s = ElemType::Number(DType::F32);
    assert_eq!((buffer.slice().elem(), buffer.slice_mut().elem()), (f32s, f32s));
    // Bytes may be uploaded to a buffer of any type.
    memory.upload(&[0u8; 64], &mut buffer).unwrap();
    assert_eq!(buffer.elem(), f32s);
    let said = memory.download(&buffer, &mut [half::bf16::ZERO; 32]).unwrap_err().to_string();
    assert!(said.contains("from has elements of f32, but is read as bf16"), "{said}");
    memory.download(&buffer, &mut [1f32; 16]).unwrap();
    memory.download(&buffer, &mut [1u8; 64]).unwrap();
    memory.upload(&[7i32; 2], &mut buffer).unwrap();
    assert_eq!(buffer.elem(), ElemType::I32);

    let halves = memory.alloc_of(DType::Bf16, 8).unwrap();
    assert_eq!((halves.elem(), halves.bytes()), (ElemType::Number(DType::Bf16), 16));
    assert_eq!(memory.place(&[1u32, 2]).unwrap().elem(), ElemType::U32);
    assert_eq!(memory.alloc(2).unwrap().typed(DType::F16).elem(), ElemType::Number(DType::F16));
}

#[test]
fn a_plan_refuses_a_buffer_of_another_type() {
    let (device, log) = open(Toy::on_a_device());
    let plan = device.plan_fwd(&problem(), &PlanOptions::default()).unwrap();
    let mut operands = Operands::of(&plan);
    let stream = device.default_stream();
    plan.run(&mut operands.args(), &stream).unwrap();
    log.take();
    let halves = vec![half::bf16::ONE; operands.inputs[1].bytes() as usize / 2];
    device.memory().upload(&halves, &mut operands.inputs[1]).unwrap();
    let said = plan.run(&mut operands.args(), &stream).unwrap_err().to_string();
    assert!(said.contains("k has elements of bf16, but the problem has it in f32"), "{said}");
    assert!(log.take().is_empty(), "it was launched");
}

/// An output of one call is refused as an operand of another type in a later call.
#[test]
fn a_buffer_knows_the_type_of_what_a_call_wrote() {
    let (device, _) = open(Toy::on_a_device());
    let (memory, stream) = (device.memory(), device.default_stream());
    let [of_f32, of_bf16] = [DType::F32, DType::Bf16].map(|dtype| {
        let problem = FwdProblem::batch(dtype, problem().dims).validate().unwrap();
        device.plan_fwd(&problem, &PlanOptions::default()).unwrap()
    });
    let [q, mut o] = [(); 2].map(|()| memory.alloc(4 * 64).unwrap());
    let run = |plan: &FwdPlan, q: &DevBuffer, o: &mut DevBuffer| {
        plan.run(&mut FwdArgs::new(q.slice(), q.slice(), q.slice(), o.slice_mut()), &stream)
    };
    run(&of_f32, &q, &mut o).unwrap();
    assert_eq!((q.elem(), o.elem()), (ElemType::Bytes, ElemType::Number(DType::F32)));
    let mut other = memory.alloc(4 * 64).unwrap();
    let said = run(&of_bf16, &o, &mut other).unwrap_err().to_string();
    assert!(said.contains("q has elements of f32, but the problem has it in bf16"), "{said}");
    assert!(memory.download(&o, &mut [half::bf16::ZERO; 8]).is_err());
    run(&of_f32, &o, &mut other).unwrap();
    // A later call may write another type there, and bytes may be uploaded to any type.
    run(&of_bf16, &q, &mut o).unwrap();
    assert_eq!((o.elem(), o.slice_mut().as_input().elem()), (DType::Bf16.into(), DType::Bf16.into()));
    memory.upload(&[0u8; 64], &mut o).unwrap();
    assert_eq!(o.elem(), ElemType::Bytes);
    // A write to a part of a buffer does not set the type of the whole buffer.
    let mut whole = o.slice_mut();
    let mut args = FwdArgs::new(q.slice(), q.slice(), q.slice(), whole.skip(4));
    of_f32.run(&mut args, &stream).unwrap();
    assert_eq!(o.elem(), ElemType::Bytes);

    let mut f32s = memory.alloc_of(DType::F32, 64).unwrap();
    let said = run(&of_bf16, &q, &mut f32s).unwrap_err().to_string();
    assert!(said.contains("o has elements of f32, but the problem has it in bf16"), "{said}");
}

/// A workspace holds arbitrary device memory: neither a call nor a download reads it.
#[test]
fn nothing_reads_a_workspace() {
    let workspace = Workspace { bytes: 64, zeroed_bytes: 0 };
    let (device, _) = open(Toy { workspace, ..Toy::on_a_device() });
    let memory = device.memory();
    let scratch = memory.workspace(workspace).unwrap().unwrap();
    let said = memory.download(&scratch, &mut [0u8; 64]).unwrap_err().to_string();
    assert!(said.contains("from has elements of a workspace, but is read as bytes"), "{said}");
    assert!(memory.download(&scratch, &mut [0f32; 16]).is_err());
    // A slice of scratch stays scratch, whatever type it is given.
    assert_eq!(scratch.slice().typed(DType::F32).elem(), ElemType::Scratch);
    assert_eq!(scratch.slice().typed(ElemType::Bytes).elem(), ElemType::Scratch);
    let plan = device.plan_fwd(&problem(), &PlanOptions::default()).unwrap();
    let mut operands = Operands::of(&plan);
    operands.inputs[0] = scratch;
    let said = plan.run(&mut operands.args(), &device.default_stream()).unwrap_err().to_string();
    assert!(said.contains("q has elements of a workspace, but the problem has it in f32"), "{said}");
}

/// Without a sequence outputs are empty, and sums over the sequences are 0.
#[test]
fn a_plan_of_no_sequences_launches_nothing_and_clears_the_sums() {
    let dims = Dims { batch: 0, ..TWO };
    let workspace = Workspace { bytes: 64, zeroed_bytes: 16 };
    let nothing = || {
        // SAFETY: 0 bytes, at null.
        unsafe { DevSlice::from_raw(MemorySpace::Device, std::ptr::null(), 0, crate::ElemType::Bytes) }
    };
    let empty = || {
        // SAFETY: 0 bytes, at null.
        unsafe { DevSliceMut::from_raw(MemorySpace::Device, std::ptr::null_mut(), 0, crate::ElemType::Bytes) }
    };
    for layout in [QLayout::Batch, QLayout::Packed] {
        let (device, log) = open(Toy { workspace, ..Toy::on_a_device() });
        let stream = device.default_stream();
        let problem = FwdProblem::new(layout, KvLayout::Strided, DType::F32, dims).write_lse(true);
        let plan = device.plan_fwd(&problem.validate().unwrap(), &PlanOptions::default()).unwrap();
        assert_eq!((plan.workspace(), plan.steps().len()), (Workspace::NONE, 0));
        let offsets = device.memory().place(&[0i32]).unwrap();
        let mut args = FwdArgs::new(nothing(), nothing(), nothing(), empty()).lse(empty());
        if layout == QLayout::Packed {
            args.seq.totals.total_q = Some(0);
            args.seq.cu_seqlens_q = Some(offsets.slice());
        }
        plan.run(&mut args, &stream).unwrap();
        assert!(log.take().is_empty());
    }

    let (device, log) = open(Toy::on_a_device());
    let mut fwd = FwdProblem::batch(DType::F32, dims).sink(true);
    let shape = BiasBroadcast::OneHead.shape(0, dims.num_heads_q, dims.seqlen_q, dims.seqlen_k);
    // Each row has four numbers, and rows begin five numbers apart.
    let strides = Strides { batch: 0, seq: 5, head: 5 * i64::from(shape.seq), dim: 1 };
    fwd.score.bias = Bias::Elementwise(ElementwiseBias {
        dtype: DType::F32,
        broadcast: BiasBroadcast::OneHead,
        strides: Strides::bhsd(shape),
    });
    let mut problem = BwdProblem::new(fwd).write_dsink(true);
    problem.dbias = Some(BiasGrad { strides, dtype: DType::F32 });
    let plan = device.plan_bwd(&problem.validate().unwrap(), &PlanOptions::default()).unwrap();
    let memory = device.memory();
    let bias = memory.alloc_of(DType::F32, shape.num_elems()).unwrap();
    let elems = ValidFwd::extent_bytes(strides, shape, DType::F32) / 4;
    let mut dbias = memory.alloc_of(DType::F32, elems).unwrap();
    let mut dsink = memory.place(&vec![7f32; dims.num_heads_q as usize]).unwrap();
    let sink = memory.place(&vec![7f32; dims.num_heads_q as usize]).unwrap();
    let mut args = BwdArgs::new(
        [nothing(), nothing(), nothing()],
        [nothing(), nothing(), nothing()],
        [empty(), empty(), empty()],
    );
    (args.score.bias, args.score.sink) = (Some(bias.slice()), Some(sink.slice()));
    (args.dbias, args.dsink) = (Some(dbias.slice_mut()), Some(dsink.slice_mut()));
    plan.run(&mut args, &device.default_stream()).unwrap();
    let rows = shape.head * shape.seq;
    let mut expected = vec![format!("zero {} on 0", 4 * dims.num_heads_q)];
    expected.extend((0..rows).map(|_| format!("zero {} on 0", 4 * dims.seqlen_k)));
    assert_eq!(log.take(), expected);
}

#[test]
fn a_backend_that_knows_of_no_code_refuses_it_by_each_kernels_name() {
    let (device, log) = open(Toy::on_a_device());
    for (text, what) in [("s * s", "score as code"), ("k <= 2 * q", "mask as code")] {
        let function: crate::expr::Function = text.parse().unwrap();
        let coded = FwdProblem::clone(&problem());
        let coded = if function.is_mask() { coded.mask_code(function) } else { coded.score_code(function) };
        let refused = device.plan_fwd(&coded.validate().unwrap(), &PlanOptions::default());
        let Err(crate::Error::Unsupported { refusals, .. }) = refused else { panic!("{text} is planned") };
        assert!(!refusals.is_empty());
        for refusal in refusals {
            assert_eq!(refusal.reason, format!("{what} is not in this kernel"), "{}", refusal.kernel);
        }
    }
    assert!(log.take().is_empty());
}

#[test]
fn a_backend_that_knows_of_no_lists_refuses_them_by_each_kernels_name() {
    let (device, log) = open(Toy::on_a_device());
    let listed = FwdProblem::clone(&problem());
    let lists = crate::KeyLists::new(&listed, 7);
    let listed = listed.lists(lists);
    let refused = device.plan_fwd(&listed.validate().unwrap(), &PlanOptions::default());
    let Err(crate::Error::Unsupported { refusals, .. }) = refused else { panic!("lists are planned") };
    assert!(!refusals.is_empty());
    for refusal in refusals {
        assert_eq!(refusal.reason, "indices of topk 7 are not in this kernel", "{}", refusal.kernel);
    }
    assert!(log.take().is_empty());
}

#[test]
fn a_backend_that_knows_of_no_small_outputs_refuses_them_by_each_kernels_name() {
    let (device, log) = open(Toy::on_a_device());
    for (wanted, name) in [
        (FwdProblem::clone(&problem()).row_max(true), "row_max"),
        (FwdProblem::clone(&problem()).head_max(true), "head_max"),
        (FwdProblem::clone(&problem()).key_sum(true), "key_sum"),
    ] {
        let refused = device.plan_fwd(&wanted.validate().unwrap(), &PlanOptions::default());
        let Err(crate::Error::Unsupported { refusals, .. }) = refused else { panic!("{name} is planned") };
        assert!(!refusals.is_empty());
        for refusal in refusals {
            assert_eq!(refusal.reason, format!("{name} is not written by this kernel"), "{}", refusal.kernel);
        }
    }
    assert!(log.take().is_empty());
}

#[test]
fn a_backend_that_knows_of_no_scales_by_blocks_refuses_them_by_each_kernels_name() {
    let (device, log) = open(Toy::on_a_device());
    let dims = FwdProblem::clone(&problem()).dims;
    for format in crate::BlockFormat::ALL {
        let scaled = FwdProblem::batch(crate::DType::F32, dims).with_block_scales(format);
        let refused = device.plan_fwd(&scaled.validate().unwrap(), &PlanOptions::default());
        let Err(crate::Error::Unsupported { refusals, .. }) = refused else { panic!("{format} is planned") };
        assert!(!refusals.is_empty());
        for refusal in refusals {
            let reason = format!("block_scales {format} is not in this kernel");
            assert_eq!(refusal.reason, reason, "{}", refusal.kernel);
        }
    }
    assert!(log.take().is_empty());
}
