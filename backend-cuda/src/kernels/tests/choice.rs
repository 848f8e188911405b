//! Choice of a kernel for each device, and the devices' data sheet numbers.

use fmha_core::{BwdProblem, FwdProblem, PlanOptions, ValidBwd, ValidFwd};
use fmha_gpu::{GpuProblem as _, Simt, SimtBwd, select};
use fmha_kernels_cuda::nvidia::{DeviceFacts, Instructions};

use super::{Cuda, choose, of_lengths, stated};

#[test]
fn a_stated_device_has_the_numbers_that_nvidia_states() {
    let large = 227 << 10;
    for (arch, num_sms, smem_bytes, flops, bytes) in [
        ("sm_80", 108, 163 << 10, 312e12, 2.039e12),
        ("sm_86", 82, 99 << 10, 71e12, 0.936e12),
        ("sm_89", 128, 99 << 10, 165.2e12, 1.008e12),
        ("sm_90a", 132, large, 989e12, 4.8e12),
        ("sm_100a", 148, large, 2.25e15, 8e12),
        ("sm_103a", 148, large, 2.25e15, 8e12),
        ("sm_110a", 20, large, 258.75e12, 0.273e12),
        ("sm_120a", 170, 99 << 10, 209.5e12, 1.792e12),
    ] {
        let facts = stated(arch);
        assert_eq!((facts.num_sms, facts.smem_bytes), (num_sms, smem_bytes), "{arch}");
        let stated = facts.roofline.flops_per_second.unwrap();
        assert!((stated / flops - 1.0).abs() < 1e-3, "{arch}: {stated}");
        assert_eq!(facts.roofline.bytes_per_second, Some(bytes));
    }
    assert!(DeviceFacts::stated("sm_75").is_err());
}

/// The kernels that take a forward and a backward problem without a fallback, or the texts of the refusals.
fn chosen_on(facts: &DeviceFacts) -> [Result<&'static str, String>; 2] {
    let forward = of_lengths([512, 512], [4, 4], 128, "b").validate().unwrap();
    let backward = BwdProblem::new(FwdProblem::clone(&forward)).validate().unwrap();
    let options = PlanOptions::default();
    [
        select("here", &ValidFwd::recipes::<Cuda>(), &options, |k| k.choose(&forward, facts, &options))
            .map(|(choice, _)| choice.kernel.name())
            .map_err(|error| error.to_string()),
        select("here", &ValidBwd::recipes::<Cuda>(), &options, |k| k.choose(&backward, facts, &options))
            .map(|(choice, _)| choice.kernel.name())
            .map_err(|error| error.to_string()),
    ]
}

#[test]
fn every_architecture_since_ampere_has_a_fast_kernel_and_older_ones_a_refusal_with_the_number() {
    for (arch, forward, backward) in [
        ("sm_80", "sm80", "sm80"),
        ("sm_86", "sm80", "sm80"),
        ("sm_89", "sm80", "sm80"),
        ("sm_90a", "sm90", "sm90"),
        ("sm_100a", "sm100", "sm100"),
        ("sm_103a", "sm100", "sm100"),
        ("sm_110a", "sm100", "sm100"),
        ("sm_120a", "sm80", "sm80"),
    ] {
        assert_eq!(chosen_on(&stated(arch)), [Ok(forward), Ok(backward)], "{arch}");
    }
    let turing =
        DeviceFacts { arch: "sm_75".to_owned(), instructions: Instructions::default(), ..stated("sm_80") };
    for chosen in chosen_on(&turing) {
        let said = chosen.unwrap_err();
        assert!(said.contains("sm80: the device is sm_75, which has no cp.async"), "{said}");
    }
}

#[test]
fn the_row_kernels_count_16_ctas_to_a_multiprocessor() {
    let problem = of_lengths([512, 512], [4, 4], 128, "0");
    let bwd: ValidBwd = BwdProblem::new(problem.clone()).validate().unwrap();
    let fwd: ValidFwd = problem.validate().unwrap();
    let (facts, options) = (stated("sm_90a"), PlanOptions::default());
    let forward = choose::<Simt, _>(&fwd, &facts, &options).unwrap().launches;
    let backward = choose::<SimtBwd, _>(&bwd, &facts, &options).unwrap().launches;
    for launch in forward.iter().chain(backward.iter()) {
        assert_eq!(launch.tiles_at_once, 16 * 132, "{}", launch.kernel);
    }
}

#[test]
fn the_fallback_is_taken_where_it_is_allowed_or_named() {
    let problem = of_lengths([64, 64], [1, 1], 584, "0").validate().unwrap();
    let backward = BwdProblem::new(FwdProblem::clone(&problem)).validate().unwrap();
    let facts = stated("sm_90a");
    let named = PlanOptions::default().kernel("simt");
    for (options, taken) in [
        (PlanOptions::default().allow_fallback(false), false),
        (PlanOptions::default().allow_fallback(true), true),
        (named.clone().allow_fallback(false), true),
    ] {
        let fwd =
            select("here", &ValidFwd::recipes::<Cuda>(), &options, |k| k.choose(&problem, &facts, &options));
        let bwd =
            select("here", &ValidBwd::recipes::<Cuda>(), &options, |k| k.choose(&backward, &facts, &options));
        assert_eq!((fwd.is_ok(), bwd.is_ok()), (taken, taken), "{options:?}");
        let error = (fwd.err(), bwd.err());
        if let (Some(fwd), Some(bwd)) = error {
            for text in [fwd.to_string(), bwd.to_string()] {
                assert!(text.contains("simt") && text.contains("the slow fallback"), "{text}");
            }
        }
    }
    let small = of_lengths([64, 64], [1, 1], 64, "0").validate().unwrap();
    let (choice, refusals) =
        select("here", &ValidFwd::recipes::<Cuda>(), &named, |k| k.choose(&small, &facts, &named)).unwrap();
    assert_eq!((choice.kernel.name(), refusals.len()), ("simt", 0), "others were not asked");
}
