//! A third vendor: a driver over host memory, and two recipes. Selection, stages, workspace, fallback, promises,
//! tuning and precompilation come from the crate.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod told;

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use fmha_core::cache::{Compiler, CompilerOutput, ImageKind, KernelJob};
use fmha_core::fields::{Field, Fields, Takes, knob_values};
use fmha_core::source::{KernelSource, Literal};
use fmha_core::tune::{TileOptions, TunedTiles};
use fmha_core::{
    Accuracy, AnyProblem, Call, DType, DevBuffer, DevSlice, Device, Dims, Error, FwdArgs, FwdProblem,
    MemorySpace, PlanOptions, Promises, Queues, Refusal, ResourceUsage, Result, Roofline, ValidBwd,
    ValidCombine, ValidFwd, Workspace,
};
use fmha_gpu::{
    About, Backend, Choice, Driver, Facts, Grid, Kernel, Launch, Launches, Operand, Ranges, Recipe,
    RowKernel, Stage, Steps, Tiles, Toolchain, Vendor, deterministic_rows,
};

/// Parameters of this vendor's kernel.
#[repr(C)]
struct Params {
    at: *mut f32,
    count: usize,
}

#[derive(Default)]
struct Toy {
    sizes: Mutex<HashMap<u64, Layout>>,
    /// Names of the launches that were queued.
    log: Arc<Mutex<Vec<String>>>,
}

impl Toy {
    fn add(&self, line: String) {
        self.log.lock().unwrap().push(line);
    }
}

/// Number that makes the driver refuse the launch of a kernel that adds it.
const REFUSED: f32 = 999.0;

/// A loaded kernel. Its "machine code" is its entry text, which contains a number that it adds to each element.
struct Loaded {
    driver: Arc<Toy>,
    adds: f32,
}

// SAFETY: the system's allocator gives memory to one owner; the only queue has completed its work when a call returns.
unsafe impl Driver for Toy {
    type Kernel = Loaded;
    type Kept = ();
    type Entered<'a> = ();

    fn is_emulated(&self) -> bool {
        false
    }

    fn enter(&self) -> Result<()> {
        Ok(())
    }

    fn alloc(&self, bytes: u64) -> Result<u64> {
        let layout = Layout::from_size_align(bytes.max(1) as usize, 256).unwrap();
        // SAFETY: at least a byte.
        let address = unsafe { alloc(layout) };
        // SAFETY: allocated above.
        unsafe { address.write_bytes(0xC1, layout.size()) };
        self.sizes.lock().unwrap().insert(address as u64, layout);
        Ok(address as u64)
    }

    unsafe fn free(&self, address: u64) {
        let layout = self.sizes.lock().unwrap().remove(&address).unwrap();
        // SAFETY: allocated with this layout.
        unsafe { dealloc(address as *mut u8, layout) };
    }

    unsafe fn upload(&self, bytes: &[u8], to: u64) -> Result<()> {
        // SAFETY: the caller keeps the contract of `upload`.
        unsafe { (to as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn load(self: &Arc<Self>, image: &[u8], _: &str, _: u32) -> Result<Loaded> {
        let adds = std::str::from_utf8(image).unwrap().parse().unwrap();
        Ok(Loaded { driver: Arc::clone(self), adds })
    }

    unsafe fn launch(kernel: &Loaded, grid: Grid, arguments: &mut [*mut c_void], stream: u64) -> Result<()> {
        if kernel.adds == REFUSED {
            return Err(Error::Driver { call: "launch", code: 7, text: "TOY_REFUSED".to_owned() });
        }
        kernel.driver.add(format!("+{} in {} groups on {stream}", kernel.adds, grid.groups));
        // SAFETY: every kernel here takes one Params, whose elements are there.
        unsafe {
            let Params { at, count } = &*arguments[0].cast::<Params>();
            (0..*count).for_each(|i| *at.add(i) += kernel.adds);
        }
        Ok(())
    }
}

impl Queues for Toy {
    fn create_stream(&self) -> Result<u64> {
        Ok(1)
    }

    unsafe fn destroy_stream(&self, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn synchronize(&self, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn zero(&self, address: *mut u8, bytes: u64, stream: u64) -> Result<()> {
        self.add(format!("zero {bytes} on {stream}"));
        // SAFETY: the caller keeps the contract of `zero`.
        unsafe { address.write_bytes(0, bytes as usize) };
        Ok(())
    }

    unsafe fn copy_bytes(&self, from: *const u8, to: *mut u8, bytes: u64, _: u64) -> Result<()> {
        // SAFETY: the caller keeps the contract of `copy_bytes`.
        unsafe { to.copy_from_nonoverlapping(from, bytes as usize) };
        Ok(())
    }

    unsafe fn read(&self, from: *const u8, to: &mut [u8]) -> Result<()> {
        // SAFETY: the caller keeps the contract of `read`.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, to.len()) };
        Ok(())
    }

    fn create_event(&self) -> Result<u64> {
        Ok(2)
    }

    unsafe fn destroy_event(&self, _: u64) {}

    unsafe fn record_event(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn wait_event(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn synchronize_event(&self, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn seconds_between(&self, _: u64, _: u64) -> Result<f64> {
        Ok(1.0)
    }

    unsafe fn is_capturing(&self, _: u64) -> Result<bool> {
        Ok(false)
    }

    unsafe fn capture(&self, _: u64, queue: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
        queue().map(|()| 3)
    }

    unsafe fn replay(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn destroy_graph(&self, _: u64) {}
}

struct Copies;

impl Compiler for Copies {
    fn identity(&self) -> String {
        "copies 1".to_owned()
    }

    fn compile(&self, job: &KernelJob) -> Result<CompilerOutput> {
        let machine = job.source.entry.clone().into_bytes();
        let resources = ResourceUsage { registers: Some(3), ..ResourceUsage::default() };
        Ok(CompilerOutput { machine, resources, ..CompilerOutput::default() })
    }
}

impl Toolchain for Copies {
    fn compiler(&self) -> Result<&dyn Compiler> {
        Ok(self)
    }
}

#[derive(Default)]
struct ToyFacts(TunedTiles);

impl Facts for ToyFacts {
    fn arch(&self) -> &str {
        "toy_1"
    }

    fn roofline(&self, _: DType) -> Roofline {
        Roofline::default()
    }

    fn tuned(&self) -> &TunedTiles {
        &self.0
    }

    fn row_group(&self) -> (&'static str, u32) {
        ("a toy", 1)
    }

    /// Row kernels of this vendor add 7 to each element.
    fn row_launch(
        &self,
        at: (Stage, &'static str),
        _: RowKernel,
        _: &dyn Literal,
        [rows, _]: [u64; 2],
    ) -> Result<Launch, String> {
        Ok(launch(at, 7.0, rows as u32))
    }
}

struct Third;

impl Vendor for Third {
    const KIND: &'static str = "third";

    type Driver = Toy;
    type Toolchain = Copies;
    type Facts = ToyFacts;

    fn ranges() -> Ranges {
        told::ranges()
    }

    fn forward() -> Vec<Recipe<ValidFwd, Self>> {
        vec![Recipe::of::<Staged>(), Recipe::of::<Slow>()]
    }

    fn backward() -> Vec<Recipe<ValidBwd, Self>> {
        Vec::new()
    }

    fn combine() -> Vec<Recipe<ValidCombine, Self>> {
        vec![Recipe::of::<fmha_gpu::Combine>()]
    }
}

/// A kernel of three launches: adds 1 to the workspace before, 20 to O, and the workspace to O afterwards. Accepts
/// only an aligned O.
#[derive(Clone, Copy)]
struct Staged;

fn launch((stage, kernel): (Stage, &'static str), adds: f32, groups: u32) -> Launch {
    let source = KernelSource::new(adds.to_string(), Vec::new);
    Launch { stage, kernel, source, grid: Grid::new(groups, 32), shared_bytes: 0, tiles: 1, tiles_at_once: 1 }
}

fn params(args: &FwdArgs<'_>, problem: &ValidFwd) -> Params {
    Params { at: args.o.as_mut_ptr().cast(), count: problem.shape_o().num_elems() as usize }
}

/// Number that the kernel adds.
struct Adds(f32);

impl Fields for Adds {
    fn fields() -> &'static [Field] {
        const ADDS: Field =
            Field { name: "adds", takes: Takes::among(&[20, 30]).tuned(), value_names: Vec::new };
        &[ADDS]
    }

    fn named_values(&self) -> Vec<(&'static str, String)> {
        vec![("adds", self.0.to_string())]
    }

    fn set_field(&mut self, name: &str, value: &str) -> Result<(), String> {
        self.0 = value.parse().map_err(|_| format!("tile {name}={value} is no number"))?;
        Ok(())
    }
}

impl Kernel<ValidFwd, Third> for Staged {
    type Tile = Adds;

    fn about() -> About<ValidFwd> {
        About { tiles: Some(Tiles::of_forward::<Adds>("staged", &[])), ..About::new("staged") }
    }

    fn own_tiles(_: &ValidFwd, _: &ToyFacts, _: &PlanOptions) -> Result<Vec<TileOptions>, Refusal> {
        Ok(vec![knob_values(&Adds(20.0))])
    }

    fn fit(problem: &ValidFwd, _: &ToyFacts, _: &PlanOptions, fields: &TileOptions) -> Result<Adds, Refusal> {
        if problem.dtypes.o != DType::F32 {
            return Err(Refusal::new("staged", format!("dtype_o {} is not f32", problem.dtypes.o)));
        }
        let mut tile = Adds(20.0);
        let set = fields.iter().try_for_each(|(name, value)| tile.set_field(name, value));
        set.map(|()| tile).map_err(|reason| Refusal::new("staged", reason))
    }

    fn plan(Adds(adds): Adds, _: &ValidFwd, _: &ToyFacts, _: &PlanOptions) -> Result<Choice<Self>, Refusal> {
        Ok(Choice {
            kernel: Self,
            launches: Launches::new(
                [launch((Stage::Prepare, "before"), 1.0, 1)],
                launch((Stage::Main, "staged"), adds, 1),
                [launch((Stage::Merge, "after"), 4.0, 2)],
            ),
            workspace: Workspace { bytes: 8, zeroed_bytes: 4 },
            promises: Promises { accuracy: Accuracy::Fast, ..deterministic_rows() },
            details: Vec::new(),
        })
    }

    fn lay_out(&self, _: &ToyFacts, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        if launch.stage == Stage::Main {
            launch.grid.groups = usage.and_then(|usage| usage.registers).unwrap_or(0);
        }
    }

    fn alignment(&self, _: &ValidFwd, operand: Operand) -> u64 {
        if operand == Operand::O { 16 } else { 1 }
    }

    unsafe fn launch(&self, steps: &Steps<Toy>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let scratch =
            call.args.workspace.as_ref().map_or(std::ptr::null_mut(), fmha_core::DevSliceMut::as_mut_ptr);
        let mut scratch = Params { at: scratch.cast(), count: 1 };
        let mut whole = params(call.args, call.problem);
        for step in steps.iter() {
            let params = if step.stage == Stage::Prepare { &mut scratch } else { &mut whole };
            // SAFETY: each kernel takes one Params; core saw that O and the workspace exist.
            unsafe { step.launch(&mut [(&raw mut *params).cast()], call.stream)? };
            // SAFETY: the first step has written it.
            whole.count = whole.count.min(unsafe { (*scratch.at * 1e6) as usize });
        }
        Ok(())
    }
}

/// A slow kernel that accepts any address: it adds 7 to O.
#[derive(Clone, Copy)]
struct Slow;

impl Kernel<ValidFwd, Third> for Slow {
    type Tile = ();

    fn about() -> About<ValidFwd> {
        About { is_fallback: true, ..About::new("slow") }
    }

    fn fit(_: &ValidFwd, _: &ToyFacts, _: &PlanOptions, _: &TileOptions) -> Result<(), Refusal> {
        Ok(())
    }

    fn plan((): (), _: &ValidFwd, _: &ToyFacts, _: &PlanOptions) -> Result<Choice<Self>, Refusal> {
        Ok(Choice {
            kernel: Self,
            launches: Launches::from(launch((Stage::Main, "slow"), 7.0, 1)),
            workspace: Workspace::zeroed(12),
            promises: deterministic_rows(),
            details: Vec::new(),
        })
    }

    unsafe fn launch(&self, steps: &Steps<Toy>, call: &Call<'_, ValidFwd>) -> Result<()> {
        let mut whole = params(call.args, call.problem);
        // SAFETY: the kernel takes one Params; core saw that O exists.
        unsafe { steps.main().launch(&mut [(&raw mut whole).cast()], call.stream) }
    }
}

fn open(has_device: bool) -> (Device, Arc<Mutex<Vec<String>>>) {
    let driver = Arc::new(Toy::default());
    let log = Arc::clone(&driver.log);
    let driver = has_device.then_some(driver);
    let target = (Vec::new(), ImageKind::Machine);
    let backend: Backend<Third> =
        Backend::new("third:0".to_owned(), ToyFacts::default(), Copies, driver, target).unwrap();
    (Device::new(backend), log)
}

const DIMS: Dims = Dims::batch(1).seqlens(2, 2).heads(1, 1).head_dim(4);

fn problem(dtype: DType) -> ValidFwd {
    FwdProblem::batch(dtype, DIMS).validate().unwrap()
}

/// Runs on zeros and returns O, which begins `off` bytes into its memory.
fn o_of(device: &Device, options: &PlanOptions, off: usize) -> Result<Vec<f32>> {
    let plan = device.plan_fwd(&problem(DType::F32), options)?;
    let memory = device.memory();
    let tensor = |bytes: u64| memory.alloc(bytes).unwrap();
    let (q, o) = (tensor(32), tensor(64));
    let mut workspace = memory.workspace(plan.workspace())?;
    // SAFETY: 32 bytes of 64, behind the first `off`.
    let slice = unsafe {
        fmha_core::DevSliceMut::from_raw(MemorySpace::Device, o.as_ptr().wrapping_add(off), 32, DType::F32)
    };
    let mut args = FwdArgs::new(q.slice(), q.slice(), q.slice(), slice);
    args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
    plan.run(&mut args, &device.default_stream())?;
    let mut bytes = [0u8; 64];
    memory.download(&o, &mut bytes)?;
    Ok(bytes[off..off + 32].chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect())
}

#[test]
fn stages_run_in_their_order_over_a_cleared_workspace() {
    let (device, log) = open(true);
    let plan = device.plan_fwd(&problem(DType::F32), &PlanOptions::default()).unwrap();
    let steps: Vec<_> = plan.steps().iter().map(|step| &*step.kernel).collect();
    assert_eq!((plan.kernel(), steps), ("staged", vec!["before", "staged", "after"]));
    assert_eq!(plan.explain().launch.unwrap().groups, 3, "as many as the compiler said registers");
    assert_eq!(plan.details()[0], ("arch", "toy_1".to_owned()));
    assert_eq!(o_of(&device, &PlanOptions::default(), 0).unwrap(), [24.0; 8]);
    let queued = [
        "zero 32 on 0",
        "zero 64 on 0",
        "zero 4 on 0",
        "+1 in 1 groups on 0",
        "+20 in 3 groups on 0",
        "+4 in 2 groups on 0",
    ];
    assert_eq!(*log.lock().unwrap(), queued);
}

#[test]
fn operands_that_the_kernel_does_not_take_are_the_fallbacks_or_refused_before_anything_is_queued() {
    let (device, log) = open(true);
    let error = o_of(&device, &PlanOptions::default(), 4).unwrap_err().to_string();
    assert!(error.ends_with("which is no multiple of the 16 bytes that kernel staged needs"), "{error}");
    assert!(error.starts_with("o starts at 0x"), "{error}");
    assert_eq!(*log.lock().unwrap(), ["zero 32 on 0", "zero 64 on 0"], "new memory alone is cleared");
    let options = PlanOptions::default().allow_fallback(true);
    assert_eq!(o_of(&device, &options, 4).unwrap(), [7.0; 8]);
    // The larger of the two workspaces, in size and in alignment.
    let plan = device.plan_fwd(&problem(DType::F32), &options).unwrap();
    assert_eq!((plan.kernel(), plan.workspace()), ("staged", Workspace::zeroed(12)));
    let words = "kernel slow takes them: correct, not fast";
    assert!(plan.details().contains(&("unaligned operands", words.to_owned())), "{plan}");
}

#[test]
fn a_kernel_that_refuses_or_keeps_no_promise_is_passed_over_with_its_reason() {
    let (device, _) = open(true);
    let exact = PlanOptions::default().accuracy(Accuracy::Exact);
    let refused = |problem: &ValidFwd, options: &PlanOptions| {
        device.plan_fwd(problem, options).unwrap_err().to_string()
    };
    for (text, reason) in [
        (refused(&problem(DType::F16), &PlanOptions::default()), "staged: dtype_o f16 is not f32"),
        (refused(&problem(DType::F32), &exact), "staged: accuracy exact is not kept"),
        (refused(&problem(DType::F16), &PlanOptions::default()), "slow: it is the slow fallback"),
    ] {
        assert!(text.contains(reason), "{text}");
    }
    let plan = device.plan_fwd(&problem(DType::F16), &exact.allow_fallback(true)).unwrap();
    assert_eq!((plan.kernel(), plan.is_fallback(), plan.refusals().len()), ("slow", true, 1));
    let named = PlanOptions::default().kernel("fast");
    let text = refused(&problem(DType::F32), &named);
    assert!(text.contains("there is no such forward kernel (known: staged, slow)"), "{text}");
}

#[test]
fn tiles_and_jobs_are_the_recipes() {
    let (device, _) = open(true);
    let (problem, options) = (problem(DType::F32), PlanOptions::default());
    let tuner = device.tuner().unwrap();
    assert_eq!(tuner.knobs(AnyProblem::Forward(&problem), &options).unwrap()[0].0, "adds");
    // The named kernel has no tile, so there is nothing to tune.
    assert!(tuner.knobs(AnyProblem::Forward(&problem), &options.clone().kernel("slow")).is_err());
    let tile = tuner.default_tile(AnyProblem::Forward(&problem), &options).unwrap();
    assert_eq!(tile, [("adds".to_owned(), "20".to_owned())]);
    let thirty = options.clone().tile([("adds", "30")]);
    assert_eq!(o_of(&device, &thirty, 0).unwrap(), [34.0; 8]);
    let jobs = device.precompiler().unwrap().jobs(AnyProblem::Forward(&problem), &options).unwrap();
    assert_eq!(jobs.iter().map(|job| job.kernel).collect::<Vec<_>>(), ["before", "staged", "after"]);
    assert_eq!(device.kernels(), ["staged", "slow", "combine", "choose", "simt", "quantize"]);
}

#[test]
fn without_a_device_it_plans_and_runs_nothing() {
    let (device, log) = open(false);
    let plan = device.plan_fwd(&problem(DType::F32), &PlanOptions::default()).unwrap();
    let none = || DevSlice::host::<u8>(&[]);
    let mut args = FwdArgs::new(none(), none(), none(), fmha_core::DevSliceMut::host::<u8>(&mut []));
    assert!(plan.run(&mut args, &device.default_stream()).is_err());
    for error in [device.synchronize(), device.memory().alloc(1).map(drop), device.stream().map(drop)] {
        assert!(error.unwrap_err().to_string().contains("it has no device"));
    }
    assert!(device.tuner().is_none() && log.lock().unwrap().is_empty());
}
