//! A device, its modules, and launches: from a kernel descriptor to running waves (LLVM, "User Guide for AMDGPU
//! Backend", Initial Kernel Execution State).

use rayon::prelude::*;

use crate::checks::Checks;
use crate::checks::lds::Lds;
use crate::counters::Counters;
use crate::decode::Program;
use crate::elf::{Arch, CodeObject, KernelInfo};
use crate::error::{Fault, LaunchError, LoadError, Stop};
use crate::exec::{Group, PRIVATE_BUFFER, USEFUL, salu};
use crate::inst::{EXEC, MemKind, Space};
use crate::memory::{DeviceMemory, View};
use crate::order;
use crate::wave::{LANES, State, Wave};

/// Options of a device's execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Checks to make.
    pub checks: Checks,
    /// Whether LDS bank conflicts and cache lines are counted.
    pub profile: bool,
    /// Run workgroups one after the other on the calling thread: the same order of float atomics every time.
    pub sequential: bool,
    /// Run workgroups one after the other on the calling thread, in an order that this seed draws.
    pub order: Option<u64>,
    /// LDS and private memory begin with finite garbage that this seed decides; `None`: with NaN.
    pub garbage: Option<u64>,
    /// Instructions that one wave may execute before it counts as hung.
    pub limit: u64,
}

impl Default for Options {
    /// Default options: all checks, no profile, all cores, ten thousand million instructions a wave.
    fn default() -> Self {
        Self {
            checks: Checks::ALL,
            profile: false,
            sequential: false,
            order: None,
            garbage: None,
            limit: 10_000_000_000,
        }
    }
}

/// An emulated GPU.
pub struct Device {
    /// Architecture whose code the device executes.
    pub arch: Arch,
    /// Memory of the device.
    pub memory: DeviceMemory,
    /// Options of the execution.
    pub options: Options,
}

/// A code object on a device.
pub struct Module {
    object: CodeObject,
    program: Program,
    /// Device address of the image's first byte.
    pub(crate) base: u64,
    /// The code object as it was loaded.
    pub(crate) bytes: Vec<u8>,
}

impl Module {
    /// Kernels of the module.
    #[must_use]
    pub fn kernels(&self) -> &[KernelInfo] {
        &self.object.kernels
    }

    /// The kernel of that name.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<&KernelInfo> {
        self.object.kernel(name)
    }

    /// Device address and bytes of a global variable.
    #[must_use]
    pub fn global(&self, name: &str) -> Option<(u64, u64)> {
        let (address, bytes) = *self.object.globals.get(name)?;
        Some((self.base + address, bytes))
    }
}

/// Arguments of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch<'a> {
    /// Workgroups in x, y, z.
    pub grid: [u32; 3],
    /// Work-items of a workgroup in x, y, z.
    pub block: [u32; 3],
    /// LDS beyond the kernel's own, in bytes.
    pub dynamic_lds: u32,
    /// The kernel's explicit arguments as they lie in memory; hidden ones are added.
    pub args: &'a [u8],
}

/// Packs arguments one behind the other, each aligned to its own size; enough for scalars and pointers.
#[must_use]
pub fn pack_args(args: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for arg in args {
        let align = arg.len().next_power_of_two().clamp(1, 8);
        out.resize(out.len().next_multiple_of(align), 0);
        out.extend_from_slice(arg);
    }
    out
}

impl Device {
    /// A device of that architecture with no memory in use.
    #[must_use]
    pub fn new(arch: Arch, options: Options) -> Self {
        Self { arch, memory: DeviceMemory::new(), options }
    }

    /// A device whose addresses no device with another index (0..16) uses.
    #[must_use]
    pub fn with_index(arch: Arch, options: Options, index: u8) -> Self {
        Self { arch, memory: DeviceMemory::with_index(index), options }
    }

    /// Loads a code object.
    ///
    /// # Errors
    /// [`LoadError`], also when it was compiled for another architecture.
    pub fn load(&self, bytes: &[u8]) -> Result<Module, LoadError> {
        let object = CodeObject::parse(bytes)?;
        if object.arch != self.arch {
            return Err(LoadError::OtherArch { object: object.arch, device: self.arch });
        }
        let program = Program::decode(&object);
        let base = self.memory.insert(object.image.len(), false);
        // The allocation was just made with the image's size.
        let _ = self.memory.write(base, &object.image);
        Ok(Module { object, program, base, bytes: bytes.to_vec() })
    }

    /// Frees a module's image; its kernels can no longer be launched.
    pub fn unload(&self, module: &Module) {
        let _ = self.memory.free(module.base);
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// [`LaunchError::Refused`] before anything runs, [`LaunchError::Fault`] when the kernel did wrong; what it wrote
    /// until then stays.
    pub fn launch(
        &self,
        module: &Module,
        kernel: &str,
        launch: &Launch<'_>,
    ) -> Result<Counters, LaunchError> {
        let refuse = |text: String| Err(LaunchError::Refused(text));
        let Some(info) = module.kernel(kernel) else {
            return refuse(format!("the code object has no kernel {kernel}"));
        };
        let items = launch.block.iter().map(|n| u64::from(*n)).product::<u64>();
        if items == 0 || items > u64::from(info.max_workgroup_size.max(1)) {
            return refuse(format!(
                "block {:?} has {items} work-items, kernel {kernel} takes 1 to {}",
                launch.block, info.max_workgroup_size
            ));
        }
        if launch.grid.contains(&0) {
            return refuse(format!("grid {:?} has an empty axis", launch.grid));
        }
        let lds_bytes = info.lds_bytes + launch.dynamic_lds;
        if lds_bytes > self.arch.lds_bytes() {
            return refuse(format!("{lds_bytes} bytes of LDS, {} has {}", self.arch, self.arch.lds_bytes()));
        }
        let explicit = explicit_bytes(info);
        if launch.args.len() < explicit as usize || launch.args.len() > info.kernarg_bytes as usize {
            return refuse(format!(
                "{} bytes of arguments, kernel {kernel} takes {explicit}",
                launch.args.len()
            ));
        }
        let kernarg = self.memory.alloc_from(&kernarg(info, launch));
        let packet = self.memory.alloc_from(&dispatch_packet(launch, info, lds_bytes, kernarg));
        let run = Run {
            device: self,
            module,
            info,
            launch,
            view: self.memory.view(),
            lds_bytes,
            grain: lds_grain(&module.program),
            kernarg,
            packet,
        };
        let result = run.all();
        let _ = self.memory.free(kernarg);
        let _ = self.memory.free(packet);
        result
    }
}

fn explicit_bytes(info: &KernelInfo) -> u32 {
    let explicit = info.args.iter().filter(|a| !a.kind.starts_with("hidden"));
    explicit.map(|a| a.offset + a.size).max().unwrap_or(0)
}

/// The argument segment: explicit arguments, then the hidden ones that the kernel requires.
fn kernarg(info: &KernelInfo, launch: &Launch<'_>) -> Vec<u8> {
    let mut bytes = vec![0; info.kernarg_bytes.max(1) as usize];
    bytes[..launch.args.len()].copy_from_slice(launch.args);
    for arg in info.args.iter().filter(|a| a.kind.starts_with("hidden")) {
        let axis = match arg.kind.as_bytes().last() {
            Some(b'y') => 1,
            Some(b'z') => 2,
            _ => 0,
        };
        let value = match arg.kind.trim_end_matches(['x', 'y', 'z']) {
            "hidden_block_count_" => launch.grid[axis],
            "hidden_group_size_" => launch.block[axis],
            "hidden_grid_dims" => 3,
            "hidden_dynamic_lds_size" => launch.dynamic_lds,
            // Global offsets and remainders are zero, and so are the pointers to services that are not there.
            _ => 0,
        };
        let (at, size) = (arg.offset as usize, (arg.size as usize).min(4));
        if at + size <= bytes.len() {
            bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        }
    }
    bytes
}

/// An AQL dispatch packet (HSA), for kernels that ask for sizes through it.
fn dispatch_packet(launch: &Launch<'_>, info: &KernelInfo, lds_bytes: u32, kernarg: u64) -> Vec<u8> {
    let mut packet = vec![0u8; 64];
    let mut put = |at: usize, bytes: &[u8]| packet[at..at + bytes.len()].copy_from_slice(bytes);
    put(2, &3u16.to_le_bytes());
    for axis in 0..3 {
        put(4 + 2 * axis, &(launch.block[axis] as u16).to_le_bytes());
        put(12 + 4 * axis, &launch.grid[axis].wrapping_mul(launch.block[axis]).to_le_bytes());
    }
    put(24, &info.scratch_bytes.to_le_bytes());
    put(28, &lds_bytes.to_le_bytes());
    put(40, &kernarg.to_le_bytes());
    packet
}

/// log2 of the smallest LDS access's bytes that a store makes: finer tracking costs time, coarser sees races where
/// there are none.
fn lds_grain(program: &Program) -> u32 {
    program
        .insts
        .iter()
        .filter_map(|inst| inst.mem)
        .filter(|mem| {
            !matches!(mem.space, Space::Global | Space::Scratch) || matches!(mem.kind, MemKind::ToLds { .. })
        })
        .filter_map(|mem| match mem.kind {
            MemKind::Store { bytes, .. } | MemKind::Store2 { bytes, .. } => {
                (mem.space != Space::Buffer).then_some(u32::from(bytes).trailing_zeros())
            }
            MemKind::ToLds { bytes, .. } => Some(u32::from(bytes.max(4)).trailing_zeros()),
            MemKind::Atomic { .. } => Some(2),
            _ => None,
        })
        .min()
        .unwrap_or(2)
}

/// One launch under way.
struct Run<'l> {
    device: &'l Device,
    module: &'l Module,
    info: &'l KernelInfo,
    launch: &'l Launch<'l>,
    view: View,
    lds_bytes: u32,
    grain: u32,
    kernarg: u64,
    packet: u64,
}

/// The first trap register's number as an operand.
const TTMP: u8 = 108;

/// State that a thread keeps between workgroups.
struct Room {
    waves: Vec<Wave>,
    lds: Lds,
    /// See [`Group::marks`]; empty where nothing is checked.
    marks: Vec<u8>,
}

impl Run<'_> {
    fn all(&self) -> Result<Counters, LaunchError> {
        let [x, y, z] = self.launch.grid.map(u64::from);
        let room = || Room { waves: Vec::new(), lds: Lds::new(), marks: Vec::new() };
        let place = |i: u64| [(i % x) as u32, (i / x % y) as u32, (i / x / y) as u32];
        let Options { sequential, order: seed, .. } = self.device.options;
        if sequential || seed.is_some() {
            let mut room = room();
            let mut total = Counters::default();
            for i in order::of(x * y * z, seed) {
                total.add(&self.workgroup(&mut room, place(i))?);
            }
            return Ok(total);
        }
        (0..x * y * z).into_par_iter().map_init(room, |room, i| self.workgroup(room, place(i))).try_reduce(
            Counters::default,
            |mut a, b| {
                a.add(&b);
                Ok(a)
            },
        )
    }

    fn workgroup(&self, room: &mut Room, id: [u32; 3]) -> Result<Counters, LaunchError> {
        let options = &self.device.options;
        let items = self.launch.block.iter().product::<u32>();
        let count = items.div_ceil(self.device.arch.wave_lanes()) as usize;
        while room.waves.len() < count {
            room.waves.push(Wave::new());
        }
        room.lds.reset(self.lds_bytes, options.checks, self.grain, options.garbage);
        for w in 0..count {
            self.start(&mut room.waves[w], w as u32, id, items)?;
        }
        room.marks.clear();
        room.marks.resize(if options.checks.any() { self.module.program.insts.len() } else { 0 }, 0);
        let mut counters = Counters::default();
        let mut group = Group {
            program: &self.module.program,
            arch: self.device.arch,
            checks: options.checks,
            load_bias: self.module.base,
            memory: &self.view,
            lds: &mut room.lds,
            counters: &mut counters,
            profile: options.profile,
            marks: &mut room.marks,
            limit: options.limit,
        };
        loop {
            for wave in &mut room.waves[..count] {
                if wave.state != State::Ended {
                    group.run(wave).map_err(|stop| self.fault(*stop, wave, id))?;
                }
            }
            if room.waves[..count].iter().all(|w| w.state == State::Ended) {
                for (inst, mark) in
                    self.module.program.insts.iter().zip(&room.marks).filter(|(_, m)| **m != 0)
                {
                    counters.synchronised.insert(inst.pc);
                    if mark & USEFUL != 0 {
                        counters.useful_waits.insert(inst.pc);
                    }
                }
                if options.profile {
                    let [x, y, _] = self.launch.grid.map(u64::from);
                    let [i, j, k] = id.map(u64::from);
                    counters.end_group(i + x * (j + y * k));
                }
                return Ok(counters);
            }
            self.meet(&mut room.waves[..count], &mut group, id)?;
        }
    }

    /// Ends a phase: all waves have run to a barrier or their end.
    fn meet(&self, waves: &mut [Wave], group: &mut Group<'_>, id: [u32; 3]) -> Result<(), LaunchError> {
        if group.checks.barriers {
            let first = waves.iter().position(|w| w.state == State::AtBarrier).unwrap_or(0);
            let disagree = waves
                .iter()
                .find(|w| w.state == State::Ended || w.pc != waves[first].pc)
                .map(|w| (w.id, w.state == State::Ended));
            if let Some((other, ended)) = disagree {
                let what = if ended { "has ended" } else { "waits at another barrier" };
                let detail = format!("waits at a barrier while wave {other} {what}");
                let stop = Stop::new(crate::error::FaultKind::DivergentBarrier, detail);
                waves[first].pc -= 1;
                return Err(self.fault(*stop, &waves[first], id));
            }
        }
        group.lds.barrier();
        if group.checks.lds_races && group.checks.waits {
            for wave in waves.iter() {
                for access in wave.checks.queue.iter().filter(|a| a.lgkm) {
                    for touch in access.touches.iter().flatten() {
                        group.lds.postpone(touch, wave.id);
                    }
                }
            }
        }
        Ok(())
    }

    /// The registers as the hardware sets them before the first instruction.
    fn start(&self, wave: &mut Wave, w: u32, id: [u32; 3], items: u32) -> Result<(), LaunchError> {
        let descriptor = &self.info.descriptor;
        let checks = self.device.options.checks;
        let lanes = self.device.arch.wave_lanes();
        let first = w * lanes;
        let active = (items - first).min(lanes);
        let launched = if active == 64 { !0 } else { (1u64 << active) - 1 };
        wave.id = w;
        wave.scc = false;
        wave.state = State::Running;
        wave.signalled = false;
        wave.executed = 0;
        wave.launched = launched;
        wave.absent = if lanes == 64 { 0 } else { !0 << lanes };
        wave.checks.reset(checks);
        // A value that no correct kernel depends on.
        wave.s = [0xdead_beef; 128];
        wave.set_s64(EXEC, launched);
        wave.scratch_bytes = self.info.scratch_bytes;
        wave.scratch.clear();
        wave.scratch.resize(self.info.scratch_bytes as usize * LANES, 0xff);
        if let Some(seed) = self.device.options.garbage {
            for (at, bytes) in wave.scratch.chunks_exact_mut(4).enumerate() {
                bytes.copy_from_slice(&crate::garbage::word(seed, at as u64).to_le_bytes());
            }
        }
        wave.scratch_defined.clear();
        wave.scratch_defined.resize(wave.scratch.len(), false);
        salu::set_mode(wave, descriptor.rsrc1 >> 12 & 0xff).map_err(|stop| self.fault(*stop, wave, id))?;

        let next = std::cell::Cell::new(0u8);
        let push = |wave: &mut Wave, words: &[u32]| {
            for word in words {
                wave.s[usize::from(next.get())] = *word;
                wave.checks.define_s(next.get(), 1);
                next.set(next.get() + 1);
            }
        };
        let pair = |value: u64| [value as u32, (value >> 32) as u32];
        let has = |bit: u32| descriptor.properties >> bit & 1 == 1;
        if has(0) {
            let [lo, hi] = pair(PRIVATE_BUFFER);
            push(wave, &[lo, hi, u32::MAX, 0]);
        }
        if has(1) {
            push(wave, &pair(self.packet));
        }
        if has(2) {
            push(wave, &[0, 0]);
        }
        if has(3) {
            push(wave, &pair(self.kernarg));
        }
        if has(4) {
            push(wave, &[0, 0]);
        }
        if has(5) {
            push(wave, &[0, 0]);
        }
        if has(6) {
            push(wave, &[self.info.scratch_bytes]);
        }
        let preload = u32::from(descriptor.kernarg_preload & 0x7f);
        if preload > 0 {
            let offset = usize::from(descriptor.kernarg_preload >> 7);
            let bytes = kernarg(self.info, self.launch);
            for i in 0..preload as usize {
                let at = 4 * (offset + i);
                let word = bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                push(wave, &[word]);
            }
        }
        if self.device.arch == Arch::Gfx1201 {
            // Trap registers 9 and 7 hold the workgroup's place.
            for (reg, value) in [(TTMP + 9, id[0]), (TTMP + 7, id[1] | id[2] << 16)] {
                wave.s[usize::from(reg)] = value;
                wave.checks.define_s(reg, 1);
            }
        }
        // The workgroup's place stands behind as many as the descriptor says, of which gfx1100 has some for nothing.
        next.set(next.get().max((descriptor.rsrc2 >> 1 & 31) as u8));
        let user = self.device.arch != Arch::Gfx1201;
        for (axis, group) in id.iter().enumerate().filter(|_| user) {
            if descriptor.rsrc2 >> (7 + axis) & 1 == 1 {
                push(wave, &[*group]);
            }
        }
        if descriptor.rsrc2 >> 10 & 1 == 1 {
            push(wave, &[0]);
        }
        // gfx90a gets the wave's scratch offset, 0, since scratch is the lane's own; from gfx942 on scratch
        // has its own registers.
        if descriptor.rsrc2 & 1 == 1 && self.device.arch == Arch::Gfx90a {
            push(wave, &[0]);
        }
        let [bx, by, _] = self.launch.block;
        for l in 0..active {
            let item = first + l;
            let (x, y, z) = (item % bx, item / bx % by, item / bx / by);
            wave.v[0].0[l as usize] = x | y << 10 | z << 20;
        }
        wave.checks.define(0, launched);
        // Execution with preloaded arguments begins behind the 256 bytes that load them.
        let entry = self.info.entry + if preload > 0 { 256 } else { 0 };
        wave.pc = self.module.program.index_of(entry).ok_or_else(|| {
            LaunchError::Refused(format!("entry 0x{entry:x} of kernel {} is no instruction", self.info.name))
        })?;
        Ok(())
    }

    #[cold]
    fn fault(&self, stop: Stop, wave: &Wave, workgroup: [u32; 3]) -> LaunchError {
        let inst = self.module.program.insts.get(wave.pc as usize);
        let pc = inst.map_or(0, |i| i.pc);
        LaunchError::Fault(Box::new(Fault {
            kind: stop.kind,
            kernel: self.info.name.clone(),
            pc,
            instruction: inst.map_or_else(String::new, crate::inst::Inst::text),
            source: self.module.object.lines.find(pc),
            workgroup,
            wave: wave.id,
            lane: stop.lane,
            detail: stop.detail,
        }))
    }
}
