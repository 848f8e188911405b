//! Tests of the texts of a backend and of its plans, and of the memory that it allocates.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fmha_core::{
    Accuracy, BwdProblem, CombineProblem, DType, DevBuffer, Device, Dims, Error, FwdProblem, MemorySpace,
    PlanOptions, Shape,
};
use fmha_cpu::{Config, CpuBackend, Isa};

fn with(threads: usize) -> CpuBackend {
    CpuBackend::with(Config { threads: Some(threads), isa: Some(Isa::Portable) }).unwrap()
}

fn backend(threads: usize) -> Device {
    Device::new(with(threads))
}

#[test]
fn an_instruction_set_has_one_name_everywhere() {
    let names = ["amx", "avx512bf16", "avx512vbmi", "avx512", "avx2", "neon", "portable"];
    assert_eq!(Isa::ALL.map(Isa::name), names);
    for isa in Isa::ALL {
        assert_eq!(isa.to_string(), isa.name());
        assert_eq!(isa.name().parse(), Ok(isa));
    }
    let text = "sse".parse::<Isa>().unwrap_err().text;
    assert!(text.contains("`sse`") && names.iter().all(|name| text.contains(name)), "{text}");
}

#[test]
fn what_another_architecture_has_is_refused_and_what_this_one_lacks_is_not_taken() {
    assert!(Isa::Portable.is_available());
    let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
    assert!(!foreign.is_available());
    let refused = CpuBackend::with(Config { threads: Some(1), isa: Some(foreign) }).map(|_| ()).unwrap_err();
    assert!(matches!(&refused, Error::NoDevice(text) if text.contains(foreign.name())), "{refused}");
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with(Config { threads: Some(1), isa: Some(isa) }).unwrap();
        assert_eq!(backend.isa(), isa);
    }
}

#[test]
fn a_backend_names_its_kind_its_kernels_its_threads_and_its_instructions() {
    assert_eq!([with(1).threads(), with(3).threads()], [1, 3]);
    let (one, three) = (backend(1), backend(3));
    assert_eq!(one.kind(), "cpu");
    assert_eq!(
        one.kernels(),
        ["cpu-fwd", "cpu-bwd", "cpu-combine", "cpu-choose", "cpu-quantize", "cpu-index-loss"]
    );
    let name = |backend: &Device| backend.name().to_owned();
    assert!(
        name(&one).starts_with("cpu (") && name(&one).ends_with(", 1 thread, portable)"),
        "{}",
        name(&one)
    );
    assert!(name(&three).ends_with(", 3 threads, portable)"), "{}", name(&three));
    // Linux names the processor in /proc/cpuinfo.
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpuinfo.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    let processor = model.map_or(std::env::consts::ARCH, |(_, name)| name.trim());
    assert!(!processor.is_empty() && name(&one).contains(processor), "{}: {processor}", name(&one));
}

/// The roofline is a measured rate with its source: at least ten million operations per second, a thousandth of any
/// processor's rate, so that a time or 0 in its place fails.
#[test]
fn the_roofline_is_a_measured_rate_with_its_source() {
    let backend = backend(2);
    let roofline = backend.roofline(DType::F32);
    assert!(roofline.flops_per_second.unwrap() > 1e7, "{roofline}");
    assert_eq!(roofline.bytes_per_second, None);
    assert!(roofline.source.contains("FMA"), "{roofline}");
    assert_eq!(backend.roofline(DType::F32).flops_per_second, roofline.flops_per_second, "measured once");
}

#[test]
fn memory_takes_and_gives_back_what_fits() {
    let backend = backend(1);
    let memory = backend.memory();
    assert!(!memory.checks_bounds(), "it is the process's own");
    let mut buffer = memory.alloc(8).unwrap();
    memory.upload(&[1u8, 2, 3, 4, 5, 6, 7, 8], &mut buffer).unwrap();
    memory.upload(&[9u8, 10], &mut buffer).unwrap();
    let (mut all, mut front) = ([0u8; 8], [0u8; 3]);
    memory.download(&buffer, &mut all).unwrap();
    assert_eq!(all, [9, 10, 3, 4, 5, 6, 7, 8]);
    memory.download(&buffer, &mut front).unwrap();
    assert_eq!(front, [9, 10, 3]);
    let text = memory.upload(&[0u8; 9], &mut buffer).unwrap_err().to_string();
    assert!(text.contains("to has 8 bytes, fewer than the 9"), "{text}");
    let text = memory.download(&buffer, &mut [0u8; 9]).unwrap_err().to_string();
    assert!(text.contains("from has 8 bytes, fewer than the 9"), "{text}");
}

/// New memory is zeroed and aligned, and does not show the bytes of its previous owner.
#[test]
fn new_memory_is_zeros_and_aligned_whatever_lay_there() {
    let backend = backend(1);
    let memory = backend.memory();
    for bytes in [1, 24, 256, 1000, 4096, 100_000, 3 << 20] {
        let secret = vec![0xabu8; bytes];
        for _ in 0..3 {
            let mut buffer = memory.alloc(bytes as u64).unwrap();
            assert!(buffer.as_ptr().addr().is_multiple_of(256), "{bytes}");
            let mut read = vec![1u8; bytes];
            memory.download(&buffer, &mut read).unwrap();
            assert!(read.iter().all(|&byte| byte == 0), "{bytes}");
            assert_eq!(buffer.slice().as_host(), Some(read.as_slice()));
            memory.upload(&secret, &mut buffer).unwrap();
        }
    }
    let none = memory.alloc(0).unwrap();
    assert_eq!(none.slice().as_host(), Some([].as_slice()));
}

#[test]
fn more_threads_than_a_processor_can_use_are_not_made_and_nonsense_is_refused() {
    let with = |threads| CpuBackend::with(Config { threads: Some(threads), isa: None });
    let backend = with(4096).unwrap();
    let most = 8 * std::thread::available_parallelism().map_or(1, usize::from);
    assert_eq!(backend.threads(), most.min(4096));
    let threads = backend.threads().to_string();
    let plan =
        Device::new(backend).plan_fwd(&problem().validate().unwrap(), &PlanOptions::default()).unwrap();
    assert_eq!(detail(plan.details(), "threads"), Some(threads.as_str()));
    for threads in [0, 4097, usize::MAX] {
        let text = with(threads).err().unwrap().to_string();
        assert!(text.contains("FMHA_NUM_THREADS") && text.contains(&format!("{threads} threads")), "{text}");
    }
}

#[test]
fn memory_that_is_called_a_devices_is_neither_read_nor_written() {
    let backend = backend(1);
    // SAFETY: nothing reads or writes the memory.
    let mut foreign =
        unsafe { DevBuffer::from_raw(MemorySpace::Device, 0x1000 as *mut u8, 8, Box::new(|_| ())) };
    for (name, error) in [
        ("to", backend.memory().upload(&[1u8; 8], &mut foreign)),
        ("from", backend.memory().download(&foreign, &mut [0u8; 8])),
    ] {
        let text = error.unwrap_err().to_string();
        assert_eq!(text, format!("{name} of 8 bytes is a device's memory, and not the host's"));
    }
}

fn problem() -> FwdProblem {
    let dims = Dims::batch(1).seqlens(16, 16).heads(1, 1).head_dim(8);
    FwdProblem::batch(DType::F32, dims)
}

fn options(tile: &[(&str, &str)]) -> PlanOptions {
    PlanOptions::default().tile(tile.iter().copied())
}

fn detail<'a>(details: &'a [(&'static str, String)], name: &str) -> Option<&'a str> {
    details.iter().find(|(found, _)| *found == name).map(|(_, value)| value.as_str())
}

#[test]
fn a_plan_says_which_tile_it_has_and_whether_that_may_shrink() {
    let backend = backend(2);
    let fwd = problem().validate().unwrap();
    let details = |tile: &[(&str, &str)]| backend.plan_fwd(&fwd, &options(tile)).unwrap().details().to_vec();
    let shrinks = "halved while there are fewer than 3 tasks a thread";
    let default = details(&[]);
    assert_eq!(detail(&default, "block_m"), Some(&*format!("512, {shrinks}")));
    assert_eq!(detail(&default, "block_n"), Some("128"));
    assert_eq!(detail(&default, "isa"), Some("portable"));
    assert_eq!(detail(&default, "threads"), Some("2"));
    assert_eq!(detail(&default, "arithmetic"), Some("f32, f32 sums"));
    let keys = details(&[("block_n", "36")]);
    assert_eq!(detail(&keys, "block_m"), Some(&*format!("512, {shrinks}")));
    assert_eq!(detail(&keys, "block_n"), Some("36"));
    for tile in [[("block_m", "96"), ("block_n", "36")], [("block_n", "36"), ("block_m", "96")]] {
        assert_eq!(detail(&details(&tile), "block_m"), Some("96"), "{tile:?}");
    }

    let bwd = BwdProblem::new(problem()).validate().unwrap();
    let plan = backend.plan_bwd(&bwd, &PlanOptions::default()).unwrap();
    assert_eq!(detail(plan.details(), "block_m"), Some("96"));
    assert_eq!(detail(plan.details(), "block_n"), Some("192"));
}

#[test]
fn a_forward_plan_alone_says_what_is_taken_in_rows_and_is_batch_invariant_on_request() {
    let backend = backend(1);
    let fwd = problem().validate().unwrap();
    for batch_invariant in [false, true] {
        let options = PlanOptions::default().batch_invariant(batch_invariant);
        let plan = backend.plan_fwd(&fwd, &options).unwrap();
        assert_eq!(plan.promises().batch_invariant, batch_invariant);
        let rows = detail(plan.details(), "rows").unwrap();
        assert_eq!(rows.starts_with("every sequence"), batch_invariant, "{rows}");
        assert_eq!(rows.starts_with("sequences of at most 8 queries"), !batch_invariant, "{rows}");
    }
    let bwd = BwdProblem::new(problem()).validate().unwrap();
    let plan = backend.plan_bwd(&bwd, &PlanOptions::default()).unwrap();
    assert!(plan.promises().batch_invariant && detail(plan.details(), "rows").is_none());
}

#[test]
fn a_plan_whose_running_maximum_may_lag_says_fast_and_is_exact_on_request() {
    let dims = Dims { head_dim_qk: 64, head_dim_v: 32, ..problem().dims };
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = Device::new(CpuBackend::with(Config { threads: Some(1), isa: Some(isa) }).unwrap());
        for (dtype, batch_invariant) in [(DType::Bf16, false), (DType::Bf16, true), (DType::F16, false)] {
            let fwd = FwdProblem::batch(dtype, dims).validate().unwrap();
            // Only matrix tiles of bf16 let the maximum lag, and sequences in the row path do not use tiles.
            let lags = isa == Isa::Amx && dtype == DType::Bf16 && !batch_invariant;
            for accuracy in [Accuracy::Fast, Accuracy::Exact] {
                let options = PlanOptions::default().accuracy(accuracy).batch_invariant(batch_invariant);
                let promised = backend.plan_fwd(&fwd, &options).unwrap().promises().accuracy;
                let wanted = if lags { accuracy } else { Accuracy::Exact };
                assert_eq!(promised, wanted, "{isa}, {dtype}, batch_invariant {batch_invariant}");
            }
        }
    }
}

#[test]
fn a_combine_plan_has_no_tile_to_set() {
    let backend = backend(1);
    let shape = Shape { batch: 1, seq: 8, head: 1, dim: 8 };
    let problem = CombineProblem::new(2, DType::F32, DType::F32, shape).validate().unwrap();
    let plan = backend.plan_combine(&problem, &PlanOptions::default()).unwrap();
    assert_eq!(plan.kernel(), "cpu-combine");
    assert!(detail(plan.details(), "rows").is_none() && plan.promises().batch_invariant);
    for tile in [("block_m", "16"), ("block_n", "16"), ("block_k", "16")] {
        let text = backend.plan_combine(&problem, &options(&[tile])).unwrap_err().to_string();
        assert!(text.contains(&format!("{}=16: this kernel has no tile to set", tile.0)), "{text}");
    }
}

/// Whether the system grants this process AMX tiles: `ARCH_REQ_XCOMP_PERM` of `arch_prctl(2)`, for the component of
/// tile data.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_are_permitted() -> bool {
    // SAFETY: the call changes nothing but the permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, 0x1023, 18) == 0 }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn an_instruction_set_is_there_where_the_system_names_all_its_parts() {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("flags")).unwrap();
    let mut parts = vec!["avx2", "fma", "f16c"];
    for (isa, more) in [
        (Isa::Avx2, &[][..]),
        (Isa::Avx512, &["avx512f", "avx512vl"]),
        (Isa::Avx512Vbmi, &["avx512bw", "avx512vbmi"]),
        (Isa::Avx512Bf16, &["avx512_bf16"]),
        (Isa::Amx, &["avx512dq", "amx_tile", "amx_bf16"]),
    ] {
        parts.extend(more);
        let named = parts.iter().all(|part| line.split_whitespace().any(|flag| flag == *part));
        let wanted = named && (isa != Isa::Amx || tiles_are_permitted());
        assert_eq!(isa.is_available(), wanted, "{isa}");
    }
}
