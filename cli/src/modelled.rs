//! Work of a kernel for each unit of a multiprocessor, counted in the emulator, with times modelled from it.

use std::io::Write;

use fmha::{Device, FwdPlan, PlanOptions};
use fmha_conformance::init::Init;
use fmha_core::MaskKind;
use serde_json::Value;

use crate::failure::Failure;
use crate::job::{Job, Source};
use crate::options::{Lengths, OrSame, ProblemArgs};
use crate::setup::Setup;

/// Rates of a multiprocessor per cycle, and their source.
struct Rates {
    /// Multiply-adds of 16-bit numbers.
    tensor_macs: f64,
    /// Results of the special-function unit.
    special: f64,
    /// Results of f32 multiplication and addition.
    floats: f64,
    /// Bytes of memory, the device's bandwidth shared out.
    memory: f64,
    source: &'static str,
}

/// Multiply-adds from NVIDIA H100 Tensor Core GPU Architecture (2022), table 2: 989 TFLOP/s of dense 16-bit
/// products on 132 SMs at 1830 MHz; the rest from the CUDA C++ Programming Guide, throughput of native arithmetic
/// instructions, compute capability 9.0 (results a cycle and SM), its four warp schedulers, and 32 banks of 4 bytes.
/// Memory: the H200's data sheet, 4.8 TB/s over the same SMs and clock.
const HOPPER: Rates = Rates {
    tensor_macs: 2048.0,
    special: 16.0,
    floats: 128.0,
    memory: 4.8e12 / 132.0 / 1.83e9,
    source: "H100 whitepaper (tensor), CUDA C++ Programming Guide for 9.0 (others), H200 data sheet (memory)",
};

/// Multiply-adds: an HGX B200's 2.25 PFLOP/s of dense 16-bit products on 148 SMs at 1.85 GHz. Nobody here has one.
const BLACKWELL: Rates = Rates {
    tensor_macs: 4096.0,
    special: 16.0,
    floats: 128.0,
    memory: 8e12 / 148.0 / 1.85e9,
    source: "HGX B200 data sheet (tensor, memory), CUDA C++ Programming Guide (others)",
};

/// A Jetson T5000, by NVIDIA's page (nvidia.com, autonomous-machines/embedded-systems/jetson-thor): 273 GB/s, 20 SMs at
/// 1.575 GHz, and 2070 TFLOP/s of sparse FP4, an eighth of which is a B200's rate for each SM. Nobody here has one.
const THOR: Rates = Rates {
    memory: 0.273e12 / 20.0 / 1.575e9,
    source: "NVIDIA's page of Jetson Thor (tensor, memory), CUDA C++ Programming Guide (others)",
    ..BLACKWELL
};

/// An A100 80GB SXM: 312 TFLOP/s of dense 16-bit products and 2.039 TB/s on 108 SMs at 1410 MHz.
const AMPERE: Rates = Rates {
    tensor_macs: 1024.0,
    special: 16.0,
    floats: 64.0,
    memory: 2.039e12 / 108.0 / 1.41e9,
    source: "A100 whitepaper (tensor), its data sheet (memory), CUDA C++ Programming Guide for 8.0 (others)",
};

/// An RTX 4090: 165.2 TFLOP/s of dense 16-bit products with f32 sums and 1008 GB/s on 128 SMs at 2520 MHz.
const ADA: Rates = Rates {
    tensor_macs: 256.0,
    special: 16.0,
    floats: 128.0,
    memory: 1.008e12 / 128.0 / 2.52e9,
    source: "Ada whitepaper (tensor, memory), CUDA C++ Programming Guide for 8.9 (others)",
};

/// An RTX 5090: 209.5 TFLOP/s of dense 16-bit products with f32 sums and 1792 GB/s on 170 SMs at 2407 MHz.
const RTX_BLACKWELL: Rates = Rates {
    tensor_macs: 256.0,
    special: 16.0,
    floats: 128.0,
    memory: 1.792e12 / 170.0 / 2.407e9,
    source: "RTX Blackwell whitepaper (tensor, memory), CUDA C++ Programming Guide for 12.0 (others)",
};

/// A unit of a multiprocessor, and its work per cycle.
struct Unit {
    name: &'static str,
    /// Amount of work, from the counters of a launch.
    work: fn(&Counted) -> f64,
    unit: &'static str,
    a_cycle: fn(&Rates) -> f64,
    /// Whether the unit is inside the multiprocessor. Data in the L2 cache cause no memory traffic.
    inside: bool,
}

const UNITS: &[Unit] = &[
    Unit {
        name: "tensor cores",
        work: |c| c.counter("tensor_macs"),
        unit: "multiply-adds",
        a_cycle: |rates| rates.tensor_macs,
        inside: true,
    },
    Unit {
        name: "special functions",
        work: |c| c.counter("special_functions"),
        unit: "results",
        a_cycle: |rates| rates.special,
        inside: true,
    },
    Unit {
        name: "float multiply, add",
        work: |c| {
            32.0 * c.instructions("float multiply, add") + 64.0 * c.instructions("packed float multiply, add")
        },
        unit: "results",
        a_cycle: |rates| rates.floats,
        inside: true,
    },
    Unit {
        name: "integer, minimum",
        work: |c| {
            32.0 * (c.instructions("integer, move, predicate") + c.instructions("float minimum, maximum"))
        },
        unit: "results",
        a_cycle: |_| 64.0,
        inside: true,
    },
    Unit {
        name: "conversion",
        work: |c| 32.0 * c.instructions("conversion"),
        unit: "results",
        a_cycle: |_| 64.0,
        inside: true,
    },
    Unit {
        name: "warp schedulers",
        work: |c| c.counter("warp_instructions"),
        unit: "instructions",
        a_cycle: |_| 4.0,
        inside: true,
    },
    Unit {
        name: "shared memory",
        // A pass moves up to 128 bytes, even if less is used.
        work: |c| {
            128.0 * c.counter("shared_passes") + c.counter("shared_matrix_bytes") + c.counter("bulk_bytes")
        },
        unit: "bytes",
        a_cycle: |_| 128.0,
        inside: true,
    },
    Unit {
        name: "memory, no L2 hit",
        work: |c| c.counter("global_read") + c.counter("global_written"),
        unit: "bytes",
        a_cycle: |rates| rates.memory,
        inside: false,
    },
];

/// The counters of a launch, from the emulator.
struct Counted {
    launch: Value,
    tiles: f64,
}

impl Counted {
    /// A counter, a tile.
    fn counter(&self, name: &str) -> f64 {
        self.launch["counters"][name].as_f64().unwrap_or(0.0) / self.tiles
    }

    /// Warp instructions of a class, a tile.
    fn instructions(&self, class: &str) -> f64 {
        self.launch["instructions"][class].as_f64().unwrap_or(0.0) / self.tiles
    }
}

/// Runs a part of the problem in the emulator and prints the kernel's counters. Prints nothing if the emulator has
/// no counters, or there is nothing to run.
pub(super) fn write(
    out: &mut dyn Write,
    problem: &ProblemArgs,
    setup: &Setup,
    backend: &Device,
    options: &PlanOptions,
) -> Result<(), Failure> {
    // AMD's counters have no such units; `fmha bench` prints those counters.
    if setup.bwd.is_some() || backend.kind() != "cuda" || fmha::emulated_launches().is_none() {
        return Ok(());
    }
    let part = part(problem, setup).setup(None)?;
    let plan = backend.plan_fwd(&part.fwd.clone().validate()?, options)?;
    let mut job = Job::new(backend, &part, options, Source::made_up(Init::Normal, 1))?;
    let _ = fmha::emulated_launches();
    job.run()?;
    let launched = fmha::emulated_launches().and_then(|text| launch_of(&plan, &text));
    let Some(launch) = launched else { return Ok(()) };
    let tiles = tiles(&plan, &launch);
    let counted = Counted { launch, tiles };
    let dims = part.fwd.dims;
    writeln!(
        out,
        "{:<18} {tiles} tiles of {} queries and {} keys, {} head{}, interpreted; per tile:",
        "emulated",
        dims.seqlen_q,
        dims.seqlen_k,
        dims.num_heads_q,
        if dims.num_heads_q == 1 { "" } else { "s" }
    )?;
    if let Some(object) = counted.launch["instructions"].as_object() {
        let mut classes: Vec<_> = object.keys().map(|class| (class, counted.instructions(class))).collect();
        classes.retain(|(_, count)| *count > 0.0);
        classes.sort_by(|a, b| b.1.total_cmp(&a.1));
        for (class, count) in classes {
            writeln!(out, "{:<18} {count:>12.0} warp instructions: {class}", "")?;
        }
    }
    for (name, words) in [
        ("divergences", "times that lanes of a warp part"),
        ("barrier_waits", "barrier waits"),
        ("bulk_copies", "bulk copies"),
        ("bulk_bytes", "bytes by bulk copies"),
        ("global_read", "bytes read from global memory"),
        ("global_written", "bytes written to global memory"),
        ("shared_bytes", "bytes of shared memory by loads and stores"),
        ("shared_matrix_bytes", "bytes of shared memory by matrix products"),
        ("bank_conflicts", "bank conflicts: passes over the banks beyond the least"),
    ] {
        writeln!(out, "{:<18} {:>12.0} {words}", "", counted.counter(name))?;
    }
    let name = backend.name();
    if name.contains("sm_80") {
        shares(out, &counted, &AMPERE)?;
    } else if name.contains("sm_89") {
        shares(out, &counted, &ADA)?;
    } else if name.contains("sm_120") {
        shares(out, &counted, &RTX_BLACKWELL)?;
    } else if name.contains("sm_90a") {
        shares(out, &counted, &HOPPER)?;
    } else if name.contains("sm_100a") {
        shares(out, &counted, &BLACKWELL)?;
    } else if name.contains("sm_110a") {
        shares(out, &counted, &THOR)?;
    } else if name.contains("sm_103a") {
        // The special-function unit of sm_103a has twice the rate of exponentials.
        shares(out, &counted, &Rates { special: 32.0, ..BLACKWELL })?;
    }
    Ok(())
}

/// The cycles that each unit would need for a tile alone, and which is the slowest.
fn shares(out: &mut dyn Write, counted: &Counted, rates: &Rates) -> Result<(), Failure> {
    let cycles = |unit: &Unit| (unit.work)(counted) / (unit.a_cycle)(rates);
    let slowest = UNITS.iter().filter(|unit| unit.inside).map(cycles).fold(1.0, f64::max);
    writeln!(
        out,
        "{:<18} cycles of each unit for a tile, from PTX, of which the assembler drops some; not measured",
        "modelled"
    )?;
    writeln!(out, "{:<18} rates: {}", "", rates.source)?;
    for unit in UNITS {
        writeln!(
            out,
            "{:<18} {:>12.0} {:>4.0} % of the slowest of the SM's: {}, {:.0} {} at {:.0} a cycle",
            "",
            cycles(unit),
            100.0 * cycles(unit) / slowest,
            unit.name,
            (unit.work)(counted),
            unit.unit,
            (unit.a_cycle)(rates)
        )?;
    }
    Ok(())
}

/// One kv head's group in one sequence, short enough to be interpreted in seconds; if lengths decide the tile, as
/// long as the same tile requires.
fn part(problem: &ProblemArgs, setup: &Setup) -> ProblemArgs {
    let dims = setup.fwd.dims;
    let seqlen_k = dims.seqlen_k.min(8192);
    let most_rows = if setup.fwd.mask.kind() != MaskKind::Full && seqlen_k <= 2048 { 1024 } else { 384 };
    let seqlen_q = dims.seqlen_q.min(most_rows);
    let one = |length: u32| Lengths(vec![length]);
    let mut part = problem.clone();
    part.batch = Some(1);
    part.num_heads_q = Some(setup.fwd.gqa_ratio());
    part.num_heads_kv = Some(OrSame::Value(1));
    part.seqlen_q = Some(one(seqlen_q));
    part.seqlen_k = Some(one(seqlen_k));
    part.padded_q = problem.padded_q.as_ref().map(|_| one(seqlen_q));
    part.padded_k = problem.padded_k.as_ref().map(|_| one(seqlen_k));
    part.seqused_q = problem.seqused_q.as_ref().map(|_| one(seqlen_q));
    part.seqused_k = problem.seqused_k.as_ref().map(|_| one(seqlen_k));
    part
}

/// Tiles of a launch: from the plan, or otherwise one per CTA.
fn tiles(plan: &FwdPlan, launch: &Value) -> f64 {
    let said = plan.details().iter().find(|(name, _)| *name == "tiles");
    let number: Option<f64> = said.and_then(|(_, words)| words.split(' ').next()?.parse().ok());
    let ctas = || launch["grid"].as_array().into_iter().flatten().filter_map(Value::as_f64).product();
    number.unwrap_or_else(ctas).max(1.0)
}

/// Launch of the kernel that names the plan, among the launches of the last run, one per step of the plan.
fn launch_of(plan: &FwdPlan, launches: &str) -> Option<Value> {
    let steps = plan.steps();
    let behind = steps.iter().rev().position(|step| step.kernel == plan.kernel())?;
    serde_json::from_str::<Vec<Value>>(launches).ok()?.into_iter().rev().nth(behind)
}
