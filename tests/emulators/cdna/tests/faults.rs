//! Planted faults, each reported by its name and place.

mod common;

use common::{bytes, compile, words};
use fmha_emu_cdna::{Arch, Device, Fault, FaultKind, Launch, LaunchError, Options};

/// Runs a kernel of faults.hip on 128 work-items: the output, or the fault.
fn run(arch: Arch, code: &[u8], kernel: &str) -> Result<Vec<u32>, Box<Fault>> {
    let options = Options { sequential: true, limit: 10_000, ..Options::default() };
    let device = Device::new(arch, options);
    let module = device.load(code).expect("a code object");
    let input: Vec<u32> = (1..=128).collect();
    let (from, to) = (device.memory.alloc_from(&bytes(&input)), device.memory.alloc(512));
    let args: Vec<u8> = [from, to].iter().flat_map(|p| p.to_le_bytes()).collect();
    let launch = Launch { grid: [1; 3], block: [128, 1, 1], dynamic_lds: 0, args: &args };
    match device.launch(&module, kernel, &launch) {
        Ok(_) => Ok(words(&device.memory.read_vec(to, 512).expect("allocated above"))),
        Err(LaunchError::Fault(fault)) => Err(fault),
        Err(refused) => panic!("{arch} {kernel}: {refused}"),
    }
}

#[test]
fn each_planted_fault_is_caught_by_name() {
    let planted = [
        ("reads_past_the_end", FaultKind::OutOfBounds),
        ("writes_before_the_start", FaultKind::OutOfBounds),
        ("reads_unwritten_memory", FaultKind::UninitMemory),
        ("reads_unwritten_lds", FaultKind::UninitLds),
        ("leaves_lds", FaultKind::OutOfBounds),
        ("races", FaultKind::LdsRace),
        ("waits_in_one_wave", FaultKind::DivergentBarrier),
        ("waits_in_some_lanes", FaultKind::DivergentBarrier),
        ("uses_a_load_too_early", FaultKind::MissingWait),
        ("uses_an_unwritten_register", FaultKind::UninitRegister),
        ("stores_an_unwritten_register", FaultKind::UninitRegister),
        ("reads_unwritten_private_memory", FaultKind::UninitRegister),
        ("uses_a_spilled_unwritten_register", FaultKind::UninitRegister),
        ("never_ends", FaultKind::Timeout),
        ("traps", FaultKind::Trap),
    ];
    let reversed: Vec<u32> = (1..=128).rev().collect();
    for arch in Arch::CDNA {
        let Some(code) = compile("faults.hip", arch) else { return };
        assert_eq!(run(arch, &code, "right").expect("nothing is wrong with it"), reversed, "{arch}");
        let spilled = run(arch, &code, "spills_an_unwritten_register").expect("nothing uses it");
        assert_eq!(spilled, reversed, "{arch}");
        for (kernel, kind) in planted {
            let fault = run(arch, &code, kernel).expect_err(kernel);
            assert_eq!(fault.kind, kind, "{arch} {kernel}: {fault}");
            assert_eq!(fault.kernel, kernel);
            let source = fault.source.as_deref().unwrap_or_default();
            assert!(source.starts_with("kernels/faults.hip:"), "{arch} {kernel}: {fault}");
        }
        if arch != Arch::Gfx90a {
            assert_eq!(run(arch, &code, "direct_to_lds").expect("it waits"), reversed, "{arch}");
            let fault = run(arch, &code, "reads_a_direct_load_too_early").expect_err("it does not wait");
            assert_eq!(fault.kind, FaultKind::MissingLdsDmaWait, "{arch}: {fault}");
        }
    }
}

#[test]
fn a_fault_says_which_wave_and_lane() {
    let Some(code) = compile("faults.hip", Arch::Gfx942) else { return };
    let fault = run(Arch::Gfx942, &code, "reads_past_the_end").expect_err("it reads past the end");
    // Work-item 123 is the first whose read is behind the 128th element: lane 59 of wave 1.
    assert_eq!((fault.wave, fault.lane), (1, Some(59)), "{fault}");
    assert!(fault.detail.contains("512 bytes from the start of an allocation of 512 bytes"), "{fault}");
}
