//! Mask objects on every backend: calls with an object have the bits of calls without; a change after its build has no
//! effect; a call that it was not made for is refused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use fmha_conformance::apart::run_test;
use fmha_core::expr::Number;
use fmha_core::{
    BwdArgs, BwdPlan, BwdProblem, DType, DevBuffer, DevSlice, Device, Dims, FwdArgs, FwdPlan, FwdProblem,
    Intervals, MaskArgs, MaskAxes, MaskObject, PlanOptions, ScoreArgs, SeqArgs, Stream,
};
use half::bf16;

/// Tiles that are skipped, whole and cut, at every tile size.
const DIMS: Dims = Dims::batch(2).seqlens(300, 300).heads(2, 1).head_dim(64);
const ROWS: usize = 300;
const Q: usize = 2 * 300 * 2 * 64;
const KV: usize = 2 * 300 * 64;

fn problem() -> FwdProblem {
    let mut problem = FwdProblem::batch(DType::Bf16, DIMS).write_lse(true);
    problem.masks.intervals = Some(Intervals::batch(&problem, MaskAxes::SHARED, 2));
    problem
}

/// Intervals of keys of documents of `length` tokens: a row sees its whole document, but in the first document only
/// the keys up to its own.
fn documents(length: usize) -> Vec<i32> {
    let first = (0..ROWS).map(|row| (row / length * length) as i32);
    let end = (0..ROWS)
        .map(|row| if row < length { row + 1 } else { ((row / length + 1) * length).min(ROWS) } as i32);
    first.chain(end).collect()
}

/// Operands of a call in a device's memory.
struct Memory {
    q: DevBuffer,
    k: DevBuffer,
    v: DevBuffer,
    dout: DevBuffer,
    o: DevBuffer,
    lse: DevBuffer,
    gradients: [DevBuffer; 3],
    scratch: [Option<DevBuffer>; 2],
    /// Numbers that functions capture.
    numbers: Vec<Number>,
}

impl Memory {
    fn new(device: &Device, (forward, backward): (&FwdPlan, &BwdPlan)) -> Self {
        let memory = device.memory();
        let drawn = |seed: usize, count: usize| {
            let number = |i: usize| ((i + seed).wrapping_mul(0x9E37_79B1) >> 20 & 0xff) as f32 / 128.0 - 1.0;
            memory.place(&(0..count).map(|i| bf16::from_f32(number(i))).collect::<Vec<_>>()).unwrap()
        };
        let zeros = |count: usize| memory.alloc_of(DType::Bf16, count as u64).unwrap();
        Self {
            q: drawn(1, Q),
            k: drawn(2, KV),
            v: drawn(3, KV),
            dout: drawn(4, Q),
            o: zeros(Q),
            lse: memory.alloc_of(DType::F32, (2 * 4 * ROWS) as u64).unwrap(),
            gradients: [zeros(Q), zeros(KV), zeros(KV)],
            scratch: [forward.workspace(), backward.workspace()].map(|it| memory.workspace(it).unwrap()),
            numbers: vec![],
        }
    }

    fn forward(&mut self, plan: &FwdPlan, masks: MaskArgs<'_>, stream: &Stream) -> fmha_core::Result<()> {
        let workspace = self.scratch[0].as_mut().map(DevBuffer::slice_mut);
        let mut args = FwdArgs::new(self.q.slice(), self.k.slice(), self.v.slice(), self.o.slice_mut())
            .lse(self.lse.slice_mut())
            .score(ScoreArgs::default().numbers(&self.numbers))
            .masks(masks)
            .workspace(workspace);
        plan.run(&mut args, stream)
    }

    fn backward(&mut self, plan: &BwdPlan, masks: MaskArgs<'_>, stream: &Stream) -> fmha_core::Result<()> {
        let workspace = self.scratch[1].as_mut().map(DevBuffer::slice_mut);
        let mut args = BwdArgs::new(
            [self.q.slice(), self.k.slice(), self.v.slice()],
            [self.o.slice(), self.lse.slice(), self.dout.slice()],
            self.gradients.each_mut().map(DevBuffer::slice_mut),
        )
        .score(ScoreArgs::default().numbers(&self.numbers))
        .masks(masks)
        .workspace(workspace);
        plan.run(&mut args, stream)
    }

    fn results(&self, device: &Device) -> Vec<Vec<u16>> {
        let [dq, dk, dv] = &self.gradients;
        let read = |buffer: &DevBuffer| {
            let mut all = vec![bf16::ZERO; (buffer.bytes() / 2) as usize];
            device.memory().download(buffer, &mut all).unwrap();
            all.into_iter().map(bf16::to_bits).collect()
        };
        [&self.o, dq, dk, dv].map(read).to_vec()
    }
}

/// Bits of a forward and a backward call.
fn both(
    device: &Device,
    memory: &mut Memory,
    (forward, backward): (&FwdPlan, &BwdPlan),
    masks: MaskArgs<'_>,
) -> Vec<Vec<u16>> {
    let stream = device.default_stream();
    memory.forward(forward, masks, &stream).unwrap();
    memory.backward(backward, masks, &stream).unwrap();
    stream.synchronize().unwrap();
    memory.results(device)
}

/// Kernels of a device, and how they use a mask object.
#[derive(Clone, Copy)]
struct Kernels {
    /// Names of the forward and the backward kernel.
    names: [&'static str; 2],
    /// Whether the kernels walk lists of tiles, which the object has for each kernel.
    walk_lists: bool,
    /// Whether additions to dQ are ordered beside masks, which needs positions that the object stores.
    in_order: bool,
}

impl Kernels {
    fn options(self) -> [PlanOptions; 2] {
        let [forward, backward] = self.names.map(|name| PlanOptions::default().kernel(name));
        [forward, backward.deterministic(self.in_order)]
    }
}

fn holds_on(device: &Device, kernels: Kernels) {
    let [of_forward, of_backward] = kernels.options();
    let problem = problem();
    let forward = device.plan_fwd(&problem.clone().validate().unwrap(), &of_forward).unwrap();
    let bwd = BwdProblem::new(problem.clone()).validate().unwrap();
    let backward = device.plan_bwd(&bwd, &of_backward).unwrap();
    let plans = (&forward, &backward);
    let mut memory = Memory::new(device, plans);
    let stream = device.default_stream();
    let on_device = |length: usize| device.memory().place(&documents(length)).unwrap();
    let (mut long, short) = (on_device(130), on_device(70));
    let [by_long, by_short] =
        [&long, &short].map(|it| both(device, &mut memory, plans, documents_at(it.slice())));
    assert!(by_long != by_short, "{}: the two masks are one", device.name());

    let mut object = MaskObject::new(Some(&forward), Some(&backward), Default::default()).unwrap();
    let early = memory.forward(&forward, object.args(), &stream).unwrap_err().to_string();
    assert!(early.contains("mask: the object was built 0 times before the call"), "{early}");
    object.build(&SeqArgs::default(), &documents_at(long.slice()), &stream).unwrap();
    assert!(both(device, &mut memory, plans, object.args()) == by_long, "{}", device.name());
    // A change after the build has no effect until the next build.
    device.memory().upload(&documents(70), &mut long).unwrap();
    for call in 0..2 {
        let bits = both(device, &mut memory, plans, object.args());
        assert!(bits == by_long, "{}: call {call} after the tensors changed", device.name());
    }
    object.build(&SeqArgs::default(), &documents_at(long.slice()), &stream).unwrap();
    assert!(both(device, &mut memory, plans, object.args()) == by_short, "{}: built again", device.name());

    // Two calls with memory of their own share the object.
    let mut other = Memory::new(device, plans);
    memory.forward(&forward, object.args(), &stream).unwrap();
    other.forward(&forward, object.args(), &stream).unwrap();
    memory.backward(&backward, object.args(), &stream).unwrap();
    other.backward(&backward, object.args(), &stream).unwrap();
    stream.synchronize().unwrap();
    assert!(memory.results(device) == by_short && other.results(device) == by_short, "{}", device.name());

    if device.has_streams() {
        captured(device, &mut memory, plans, (&mut object, &mut long), [&by_long, &by_short]);
    }
    refuses(device, &mut memory, plans, &object, kernels.walk_lists);
    of_a_function(device, kernels);
}

/// Tests an object of a mask as code with its numbers, and with so many heads that kernels store it as bits.
fn of_a_function(device: &Device, kernels: Kernels) {
    let [of_forward, of_backward] = kernels.options();
    let dims = Dims { num_heads_q: 4, num_heads_kv: 2, head_dim_qk: 32, head_dim_v: 32, ..DIMS };
    let function: fmha_core::expr::Function = "w: int; q // w == k // w or k % w == 3".parse().unwrap();
    let problem = FwdProblem::batch(DType::Bf16, dims).write_lse(true).mask_code(function);
    let forward = device.plan_fwd(&problem.clone().validate().unwrap(), &of_forward).unwrap();
    let backward = device.plan_bwd(&BwdProblem::new(problem).validate().unwrap(), &of_backward).unwrap();
    let plans = (&forward, &backward);
    let lasts = [forward.has_lasting_lists(), backward.has_lasting_lists()];
    // AMD's kernels evaluate a function without other masks for each pair.
    let lists_it = kernels.walk_lists && kernels.names[0].starts_with("sm");
    assert_eq!(lasts, [lists_it; 2], "{}", device.name());
    let (mut memory, none) = (Memory::new(device, plans), MaskArgs::default());
    let mut object = MaskObject::new(Some(&forward), Some(&backward), Default::default()).unwrap();
    let error = object.build(&SeqArgs::default(), &none, &device.default_stream()).unwrap_err().to_string();
    assert!(error.contains("numbers: 0 given, but the functions capture 1"), "{error}");
    for width in [70, 37] {
        memory.numbers = vec![Number::Int(width)];
        let wanted = both(device, &mut memory, plans, none);
        // SAFETY: the default stream is always there.
        unsafe { object.build_on_raw(&SeqArgs::default(), &none, &memory.numbers, 0).unwrap() };
        assert!(both(device, &mut memory, plans, object.args()) == wanted, "{}: {width}", device.name());
    }
    memory.numbers = vec![Number::Int(41)];
    let error = memory.forward(&forward, object.args(), &device.default_stream()).unwrap_err().to_string();
    assert!(error.contains("mask: built for w Int(37), but the call has Int(41)"), "{error}");
}

fn documents_at(endpoints: DevSlice<'_>) -> MaskArgs<'_> {
    MaskArgs::default().intervals(endpoints)
}

/// A recorded build builds again at each replay.
fn captured(
    device: &Device,
    memory: &mut Memory,
    (forward, backward): (&FwdPlan, &BwdPlan),
    (object, endpoints): (&mut MaskObject, &mut DevBuffer),
    [by_long, by_short]: [&Vec<Vec<u16>>; 2],
) {
    let stream = device.stream().unwrap();
    // Before the first replay nobody has made the lists, so a call must not read them.
    let mut fresh = MaskObject::new(Some(forward), Some(backward), Default::default()).unwrap();
    let first =
        stream.capture(|| fresh.build(&SeqArgs::default(), &documents_at(endpoints.slice()), &stream));
    let error = first.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("mask: the object was built 0 times before a build that is captured"), "{error}");
    let recording = stream
        .capture(|| {
            object.build(&SeqArgs::default(), &documents_at(endpoints.slice()), &stream)?;
            memory.forward(forward, object.args(), &stream)?;
            memory.backward(backward, object.args(), &stream)
        })
        .unwrap();
    for (length, bits) in [(130, by_long), (70, by_short)] {
        device.memory().upload(&documents(length), endpoints).unwrap();
        // SAFETY: the memory that the recording uses is alive, and nothing else uses it.
        unsafe { recording.replay(&stream).unwrap() };
        stream.synchronize().unwrap();
        assert!(memory.results(device) == *bits, "{}: replayed over {length} tokens", device.name());
    }
}

fn refuses(
    device: &Device,
    memory: &mut Memory,
    (forward, backward): (&FwdPlan, &BwdPlan),
    object: &MaskObject,
    walks_lists: bool,
) {
    let stream = device.default_stream();
    let options = |plan: &FwdPlan| PlanOptions::default().kernel(plan.kernel());
    let mut refused = |problem: FwdProblem, words: &str| {
        let plan = device.plan_fwd(&problem.validate().unwrap(), &options(forward)).unwrap();
        let error = memory.forward(&plan, object.args(), &stream).unwrap_err().to_string();
        assert!(error.contains(words), "{}: {error}", device.name());
    };
    refused(problem().mask(fmha_core::MaskSpec::CAUSAL), "mask: built for band ");
    let mut four = problem();
    four.masks.intervals = Some(Intervals::batch(&four, MaskAxes::SHARED, 4));
    // Intervals with four endpoints reach beyond the copy, which has two.
    refused(four, "intervals has 2400 bytes, but its extents and strides reach 4800");
    refused(FwdProblem::batch(DType::Bf16, DIMS).write_lse(true), "intervals is given");
    let one_way = MaskObject::new(Some(forward), None, Default::default()).unwrap();
    let error = memory.backward(backward, one_way.args(), &stream).unwrap_err().to_string();
    let lists = format!("{} walks tiles of ", backward.kernel());
    let words = if walks_lists { &*lists } else { "the object was built 0 times before the call" };
    assert!(error.contains(words), "{}: {error}", device.name());
    let none = MaskObject::new(None, None, Default::default()).unwrap_err().to_string();
    assert!(none.contains("plan: a mask object has 0 of them"), "{none}");
}

#[test]
fn a_mask_object_has_the_bits_of_its_last_build_on_the_cpu() {
    let kernels = Kernels { names: ["cpu-fwd", "cpu-bwd"], walk_lists: false, in_order: true };
    holds_on(&fmha::Backend::Cpu.open().unwrap(), kernels);
}

fn emulated(arch: &str, kernels: Kernels) {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    let device = fmha_cuda::open(0, Some(arch)).unwrap();
    holds_on(&device, kernels);
    // The object's own launch makes the lists; the call has no such launch.
    let [of_forward, of_backward] = kernels.options();
    let forward = device.plan_fwd(&problem().validate().unwrap(), &of_forward).unwrap();
    let backward = device.plan_bwd(&BwdProblem::new(problem()).validate().unwrap(), &of_backward).unwrap();
    let mut memory = Memory::new(&device, (&forward, &backward));
    let endpoints = device.memory().place(&documents(70)).unwrap();
    let given = documents_at(endpoints.slice());
    let mut object = MaskObject::new(Some(&forward), Some(&backward), Default::default()).unwrap();
    object.build(&SeqArgs::default(), &given, &device.default_stream()).unwrap();
    let mut launches = |masks: MaskArgs<'_>| {
        let _ = fmha_cuda::emulated_launches();
        both(&device, &mut memory, (&forward, &backward), masks);
        let launches: Vec<serde_json::Value> =
            serde_json::from_str(&fmha_cuda::emulated_launches().unwrap()).unwrap();
        launches.len()
    };
    let makes = if kernels.walk_lists { 2 + usize::from(kernels.in_order) } else { 0 };
    assert_eq!(launches(given), launches(object.args()) + makes, "{arch}");
}

#[test]
fn a_mask_object_has_the_bits_of_its_last_build_on_an_emulated_sm_90a() {
    emulated("sm_90a", Kernels { names: ["sm90"; 2], walk_lists: true, in_order: true });
}

/// Tests one architecture in a process that [`each_architecture`] has started; elsewhere it does nothing.
#[test]
fn the_architecture_of_this_process() {
    match std::env::var("MASK_ARCH").as_deref() {
        Ok("sm_80") => {
            emulated("sm_80", Kernels { names: ["sm80"; 2], walk_lists: false, in_order: true });
        }
        Ok(arch) => emulated(arch, Kernels { names: ["sm100"; 2], walk_lists: true, in_order: false }),
        Err(_) => {}
    }
}

/// Each architecture needs a process, since a process emulates only one.
#[test]
#[ignore = "a minute: each architecture compiles kernels"]
fn each_architecture() {
    for arch in ["sm_80", "sm_100a"] {
        println!("{}", run_test("the_architecture_of_this_process", &[("MASK_ARCH", arch)]).unwrap());
    }
}

#[test]
fn a_mask_object_has_the_bits_of_its_last_build_on_an_emulated_gfx942() {
    if let Some(device) = amd::open("gfx942", "mask objects") {
        holds_on(&device, Kernels { names: ["cdna_fwd", "cdna_bwd"], walk_lists: true, in_order: true });
    }
}
