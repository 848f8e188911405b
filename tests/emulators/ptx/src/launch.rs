//! The library's face: a device, modules, launches.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use crate::ast::{Space, Var};
use crate::class::class_of;
use crate::counters::Counters;
use crate::decode::{Symbol, decode};
use crate::exec::{Cluster, Launch, Status, detect};
use crate::fault::{Fault, FaultKind};
use crate::memory::GlobalMemory;
use crate::op::{Code, Program};
use crate::order::{Next, Order};
use crate::parse::parse;

/// Time at which asynchronous operations complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Asynchrony {
    /// Completion at once: fast, and blind to missing waits.
    #[default]
    Eager,
    /// Completion as late as the program permits, in an order and with a schedule of warps drawn from `seed`.
    Late {
        /// Any number; equal seeds give equal schedules.
        seed: u64,
    },
}

/// Which way `tcgen05.shift` and `tcgen05.mma.ashift` move the rows of tensor memory. PTX ISA 9.7.16.9
/// documents it in words only: all rows but the last are shifted down by one, which can be read in two ways.
/// We have not compared either with a device; NVIDIA's CUTLASS (`1cta_mma_a_from_tmem.py`, 2026) has what it
/// observed of `.ashift` on a B200, and describes `tcgen05.shift` in the same words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RowShift {
    /// Contents go from row i to row i + 1: row 0 keeps its own, those of the last row go nowhere. The literal reading.
    ToNext,
    /// Row i takes the contents of row i + 1, as in `shfl.down`: the last row of a warp's part keeps its own.
    /// So CUTLASS observed.
    #[default]
    FromNext,
}

/// Options of a launch: how it is run and what is checked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Time at which asynchronous operations complete.
    pub asynchrony: Asynchrony,
    /// Track happens-before and report races, missing fences and registers in flight.
    pub happens_before: bool,
    /// Report reads of bytes that nothing has written.
    pub check_uninitialised: bool,
    /// Report barriers initialised twice or left with bytes outstanding.
    pub check_barriers_at_exit: bool,
    /// Warp instructions without any change of state that count as a livelock.
    pub spin_limit: u64,
    /// Warp instructions of one cluster that count as a livelock, whatever they change.
    pub instruction_limit: u64,
    /// Multiprocessors of the device, as `%nsmid` and persistent kernels see them.
    pub num_sms: u32,
    /// Run blocks on all cores; off, they run one after another in order.
    pub parallel: bool,
    /// Clusters run piece by piece, one at a time, in an order that this seed decides: one that a device
    /// could have. The order in which blocks take tile indices from a counter in global memory then differs
    /// with each seed.
    pub cluster_order: Option<u64>,
    /// Which way `tcgen05.shift` and `.ashift` move rows.
    pub row_shift: RowShift,
    /// Happens-before: accesses to tensor memory need the waits and fences of `tcgen05` that the ISA
    /// requires. Off for published programs that leave some out.
    pub strict_tensor_memory: bool,
    /// Registers begin with finite garbage that this seed decides, and so do the bytes that a `cp.async` is
    /// to write until it is waited for. `None`: registers with a NaN, and copies are done when they are
    /// issued.
    pub garbage: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            asynchrony: Asynchrony::Eager,
            happens_before: false,
            check_uninitialised: true,
            check_barriers_at_exit: true,
            spin_limit: 20_000_000,
            instruction_limit: u64::MAX,
            num_sms: 132,
            parallel: true,
            cluster_order: None,
            row_shift: RowShift::default(),
            strict_tensor_memory: true,
            garbage: None,
        }
    }
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks of the grid.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Blocks of a cluster.
    pub cluster: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u32,
    /// Programmatic dependent launch: the grid may start before those before it in its stream have ended. Grids run one
    /// after the other here, so an access to global memory before `griddepcontrol.wait` is reported in their stead.
    pub dependent: bool,
}

/// Report of a launch.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// Totals over all blocks.
    pub counters: Counters,
    /// Warp instructions by kind.
    pub instructions: BTreeMap<&'static str, u64>,
    /// Warp instructions executed on each PTX line.
    pub lines: BTreeMap<u32, u64>,
    /// Warp instructions executed on each source line, where `.loc` says.
    pub source_lines: BTreeMap<u32, u64>,
    /// The first block of each cluster, and bytes that the cluster has read.
    pub reads: Vec<([u32; 3], u64)>,
}

/// A device: memory, and modules loaded on it.
#[derive(Debug, Default)]
pub struct Device {
    memory: GlobalMemory,
}

/// A module loaded on a device.
#[derive(Debug)]
pub struct Module {
    kernels: HashMap<String, Kernel>,
    globals: HashMap<String, (u64, u64)>,
    target: String,
    version: String,
}

/// A kernel, ready to launch.
#[derive(Clone, Debug)]
pub struct Kernel(Arc<Program>, Arc<str>);

impl Kernel {
    /// Name of the kernel.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The PTX of its module.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.1
    }

    /// Offset and bytes of each parameter in the argument buffer.
    #[must_use]
    pub fn params(&self) -> Vec<(u32, u32)> {
        self.0.params.iter().map(|p| (p.offset, p.bytes)).collect()
    }

    /// Bytes of static shared memory.
    #[must_use]
    pub fn static_shared(&self) -> u32 {
        self.0.static_shared
    }

    /// Bytes of local memory a thread.
    #[must_use]
    pub fn local_bytes(&self) -> u32 {
        self.0.local_bytes
    }

    /// Most threads a block may have.
    #[must_use]
    pub fn max_threads(&self) -> u32 {
        self.0.required_block.map(|b| b.iter().product()).or(self.0.max_threads).unwrap_or(1024)
    }

    /// The cluster that the kernel demands.
    #[must_use]
    pub fn required_cluster(&self) -> Option<[u32; 3]> {
        self.0.cluster
    }

    /// Registers a thread: PTX does not say, so the most that the launch bounds leave, as compilers choose for
    /// kernels that use `setmaxnreg`.
    #[must_use]
    pub fn registers(&self) -> u32 {
        let per_thread = 65536 / self.max_threads().next_multiple_of(32).max(1) / 8 * 8;
        self.0.max_registers.unwrap_or(per_thread).clamp(24, 255) / 8 * 8
    }
}

impl Module {
    /// The kernel of that name.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.get(name)
    }

    /// Kernels of the module, by name.
    #[must_use]
    pub fn kernel_names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.kernels.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Address and bytes of a global variable.
    #[must_use]
    pub fn global(&self, name: &str) -> Option<(u64, u64)> {
        self.globals.get(name).copied()
    }

    /// `.target`, for example `sm_90a`.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// `.version`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }
}

impl Device {
    /// A device with nothing in its memory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Device `ordinal` of several, at most 32, with nothing in its memory: no address of it is another's.
    #[must_use]
    pub fn numbered(ordinal: u32) -> Self {
        Self { memory: GlobalMemory::behind(u64::from(ordinal) << 43) }
    }

    pub(crate) fn memory(&self) -> &GlobalMemory {
        &self.memory
    }

    /// Allocates `bytes`; the address is no host address.
    #[must_use]
    pub fn alloc(&self, bytes: u64) -> u64 {
        self.memory.allocate(bytes)
    }

    /// Frees an allocation; false when `address` is none.
    #[must_use]
    pub fn free(&self, address: u64) -> bool {
        self.memory.free(address)
    }

    /// Bytes allocated now.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        self.memory.live_bytes()
    }

    /// The allocation that holds `address`: its base and bytes.
    #[must_use]
    pub fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let view = self.memory.view();
        view.find(address, 1, &mut 0, "query").ok().map(|a| (a.base, a.bytes))
    }

    /// Copies `data` to the device.
    ///
    /// # Errors
    /// The range is not inside one allocation.
    pub fn upload(&self, address: u64, data: &[u8]) -> Result<(), Fault> {
        if data.is_empty() {
            return Ok(());
        }
        self.memory.view().write(address, data).map_err(|f| *f)
    }

    /// Copies from the device; bytes never written read as zero.
    ///
    /// # Errors
    /// The range is not inside one allocation.
    pub fn download(&self, address: u64, out: &mut [u8]) -> Result<(), Fault> {
        if out.is_empty() {
            return Ok(());
        }
        self.memory.view().read(address, out, false).map_err(|f| *f)
    }

    /// Downloads as [`download`](Self::download) does, but bytes never written are 0xff, NaN in every format:
    /// a device's are whatever its memory held.
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub fn download_poisoned(&self, address: u64, out: &mut [u8]) -> Result<(), Fault> {
        if out.is_empty() {
            return Ok(());
        }
        self.memory.view().read_poisoned(address, out).map_err(|f| *f)
    }

    /// Parses and loads a module.
    ///
    /// # Errors
    /// Text that is no PTX, or an instruction that this emulator does not know, with its line.
    pub fn load(&self, ptx: &str) -> Result<Module, Fault> {
        let ast = parse(ptx)?;
        let mut symbols = HashMap::new();
        let mut globals = HashMap::new();
        for var in ast.vars.iter().filter(|v| matches!(v.space, Space::Global | Space::Const)) {
            let address = self.memory.allocate(var.bytes.max(1));
            let mut bytes = var.init.clone();
            bytes.resize(var.bytes as usize, 0);
            self.upload(address, &bytes)?;
            symbols.insert(var.name.clone(), Symbol { address, space: var.space });
            globals.insert(var.name.clone(), (address, var.bytes));
        }
        let shared: Vec<Var> = ast.vars.iter().filter(|v| v.space == Space::Shared).cloned().collect();
        let source: Arc<str> = ptx.into();
        let mut kernels = HashMap::new();
        for func in &ast.kernels {
            let program = decode(func, &symbols, &shared)?;
            kernels.insert(func.name.clone(), Kernel(Arc::new(program), Arc::clone(&source)));
        }
        Ok(Module { kernels, globals, target: ast.target, version: ast.version })
    }

    /// Runs a kernel to its end. `args` is the argument buffer, each parameter at its offset.
    ///
    /// # Errors
    /// A launch that contradicts the kernel, or the first fault found while it ran.
    pub fn launch(
        &self,
        kernel: &Kernel,
        config: &LaunchConfig,
        args: &[u8],
        options: &Options,
    ) -> Result<Report, Fault> {
        check(kernel, config, args)?;
        let threads = config.block.iter().product::<u32>().next_multiple_of(32);
        let launch = Arc::new(Launch {
            program: Arc::clone(&kernel.0),
            config: *config,
            options: options.clone(),
            params: args.to_vec(),
            view: self.memory.view(),
            registers: launch_registers(&kernel.0, threads),
            simd: detect(),
            stop: AtomicBool::new(false),
            global_events: AtomicU64::new(0),
            wide_atomics: Mutex::new(()),
        });
        run_grid(&launch)
    }
}

/// Registers a thread holds at launch. Without `setmaxnreg` the number has no consequence; with it, compilers
/// give the most that fits the file, yet no more than any `setmaxnreg.inc` requests.
fn launch_registers(program: &Program, threads: u32) -> u32 {
    let value =
        |reg: crate::op::Reg| program.const_words.iter().find(|(r, _)| *r == reg).map(|&(_, value)| value);
    let mut uses = false;
    let mut most = 65536 / threads / 8 * 8;
    for inst in &program.code {
        if let Code::SetMaxNReg { increase } = inst.code {
            uses = true;
            if increase {
                most = most.min(value(inst.src[0]).unwrap_or(most));
            }
        }
    }
    if uses { most.min(248) } else { 32 }
}

fn refuse(text: String) -> Fault {
    Fault::new(FaultKind::Launch, text)
}

fn check(kernel: &Kernel, config: &LaunchConfig, args: &[u8]) -> Result<(), Fault> {
    let program = &kernel.0;
    let volume = |sizes: [u32; 3]| sizes.iter().fold(1, |product: u64, &n| product.saturating_mul(n.into()));
    let threads = volume(config.block);
    if config.grid.contains(&0) || config.block.contains(&0) || config.cluster.contains(&0) {
        return Err(refuse(format!("an empty launch: {config:?}")));
    }
    if threads > kernel.max_threads().into() {
        return Err(refuse(format!("{threads} threads a block, the kernel allows {}", kernel.max_threads())));
    }
    if program.required_block.is_some_and(|b| b != config.block) {
        return Err(refuse(format!(
            "block {:?}, the kernel demands {:?}",
            config.block, program.required_block
        )));
    }
    if program.cluster.is_some_and(|c| c != config.cluster) {
        return Err(refuse(format!(
            "cluster {:?}, the kernel demands {:?}",
            config.cluster, program.cluster
        )));
    }
    for i in 0..3 {
        if !config.grid[i].is_multiple_of(config.cluster[i]) {
            return Err(refuse(format!(
                "grid {:?} is no multiple of cluster {:?}",
                config.grid, config.cluster
            )));
        }
    }
    if volume(config.grid) > u32::MAX.into() {
        return Err(refuse(format!("grid {:?} of more than {} blocks", config.grid, u32::MAX)));
    }
    if volume(config.cluster) > 16 {
        return Err(refuse(format!("cluster {:?} of more than 16 blocks", config.cluster)));
    }
    if args.len() < program.param_bytes as usize {
        return Err(refuse(format!(
            "{} bytes of arguments, the kernel has {}",
            args.len(),
            program.param_bytes
        )));
    }
    Ok(())
}

#[derive(Default)]
struct Shared {
    report: Report,
    hits: Vec<u64>,
    fault: Option<Fault>,
    order: Order,
    running: usize,
}

fn run_grid(launch: &Arc<Launch>) -> Result<Report, Fault> {
    let config = &launch.config;
    let count: u32 = (0..3).map(|i| config.grid[i] / config.cluster[i]).product();
    let order = Order::new(count, launch.options.cluster_order);
    let hits = vec![0; launch.program.code.len()];
    let shared = Mutex::new(Shared { hits, order, ..Shared::default() });
    let workers = if launch.options.parallel && launch.options.cluster_order.is_none() {
        rayon::current_num_threads().min(count as usize)
    } else {
        1
    };
    if workers == 1 {
        work(launch, &shared);
    } else {
        rayon::scope(|s| {
            for _ in 0..workers {
                s.spawn(|_| work(launch, &shared));
            }
        });
    }
    let mut shared = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(fault) = shared.fault {
        return Err(fault);
    }
    for (inst, hits) in launch.program.code.iter().zip(&shared.hits) {
        shared.report.counters.count_instruction(inst, *hits);
        *shared.report.instructions.entry(class_of(&inst.code)).or_default() += hits;
    }
    for (&(line, source), hits) in launch.program.lines.iter().zip(&shared.hits) {
        *shared.report.lines.entry(line).or_default() += hits;
        *shared.report.source_lines.entry(source).or_default() += hits;
    }
    Ok(shared.report)
}

fn work(launch: &Arc<Launch>, shared: &Mutex<Shared>) {
    let lock = || shared.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let (next, budget) = {
            let mut s = lock();
            if s.fault.is_some() {
                return;
            }
            // Others may still hand their cluster back, but each worker can finish its own.
            let Some(next) = s.order.next() else { return };
            s.running += 1;
            next
        };
        let mut cluster = match next {
            Next::Fresh(index) => Box::new(Cluster::new(launch, index)),
            Next::Resumed(cluster) => cluster,
        };
        let result = cluster.run(budget);
        let mut s = lock();
        s.running -= 1;
        match result {
            Ok(Status::Yield) => s.order.put(cluster),
            Ok(Status::Done) => {
                s.report.counters.add(&cluster.counters);
                s.report.reads.push((cluster.first_block(), cluster.counters.global_read));
                for (to, from) in s.hits.iter_mut().zip(&cluster.hits) {
                    *to += from;
                }
            }
            Err(fault) => {
                launch.stop.store(true, Relaxed);
                s.fault.get_or_insert(*fault);
            }
        }
    }
}
