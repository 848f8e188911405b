//! Compile-time facts of a kernel are folded into its code: no kernel reads a constant of its own, its spec's
//! or its tile's, from memory, with any version of NVRTC. On `sm_100a` such a load comes before
//! `griddepcontrol.wait`.
//!
//! `FMHA_NVRTC` names the compiler; `cargo xtask test` runs this with the newest one too, and `--all` with CUDA 12.8's.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::cache::ImageKind;
use fmha_core::{
    Append, BwdProblem, DType, Dims, Error, FwdProblem, MaskSpec, PlanOptions, ValidBwd, ValidFwd,
};

fn forward(dtype: DType, seqlen_q: u32, (qk, v): (u32, u32)) -> FwdProblem {
    let dims = Dims::batch(2).seqlens(seqlen_q, 2048).heads(8, 2).head_dims(qk, v);
    FwdProblem::batch(dtype, dims).mask(MaskSpec::CAUSAL).write_lse(true)
}

/// Problems, one for each family of kernels.
fn problems() -> Vec<(&'static str, &'static str, AnyValid)> {
    let fwd = |problem: FwdProblem| AnyValid::Forward(problem.validate().unwrap());
    let bwd = |problem: FwdProblem| AnyValid::Backward(BwdProblem::new(problem).validate().unwrap());
    let long = |dim| forward(DType::Bf16, 2048, (dim, dim));
    let mut latent = forward(DType::Bf16, 4, (576, 512));
    (latent.dims.num_heads_kv, latent.cache.v_in_k) = (1, true);
    (latent.strides.k, latent.strides.v) = {
        let k = fmha_core::Strides::bshd(latent.shape_k());
        (k, k)
    };
    let mut appends = forward(DType::Bf16, 1, (128, 128)).seqused_k(true);
    appends.cache.append = Some(Append::batch(&appends, 1));
    let mut quantised = forward(DType::Bf16, 1, (128, 128));
    quantised.cache.dtype = Some(DType::E4m3Fn);
    vec![
        ("sm_80", "sm80", fwd(long(128))),
        ("sm_80", "sm80", fwd(appends)),
        ("sm_80", "sm80", fwd(quantised)),
        ("sm_80", "sm80", bwd(long(64))),
        ("sm_120a", "sm80", fwd(long(64))),
        ("sm_90a", "sm90", fwd(long(128))),
        ("sm_90a", "sm90", fwd(forward(DType::E4m3Fn, 2048, (128, 128)))),
        ("sm_90a", "sm90_mla", fwd(latent.clone())),
        ("sm_90a", "sm90", bwd(long(128))),
        ("sm_90a", "sm90", bwd(long(192))),
        ("sm_90a", "simt", fwd(long(64))),
        ("sm_100a", "sm100", fwd(long(128))),
        ("sm_100a", "sm100_mla", fwd(latent)),
        ("sm_100a", "sm100", bwd(long(128))),
    ]
}

#[allow(clippy::large_enum_variant, reason = "a handful of them")]
enum AnyValid {
    Forward(ValidFwd),
    Backward(ValidBwd),
}

impl AnyValid {
    fn any(&self) -> fmha_core::AnyProblem<'_> {
        match self {
            Self::Forward(problem) => fmha_core::AnyProblem::Forward(problem),
            Self::Backward(problem) => fmha_core::AnyProblem::Backward(problem),
        }
    }
}

/// Lines that load from a named object of the module. All such objects are constants, since kernels have no others.
fn loads_of_constants(assembly: &str) -> Vec<&str> {
    let named = |line: &&str| {
        let Some((_, operand)) = line.split_once("ld.global").and_then(|(_, rest)| rest.split_once('['))
        else {
            return false;
        };
        operand.starts_with(|first: char| first == '_' || first.is_ascii_alphabetic())
    };
    assembly.lines().filter(named).collect()
}

#[test]
fn no_kernel_loads_what_it_is_compiled_for() {
    for (arch, kernel, problem) in problems() {
        let device = fmha_cuda::pretend(arch).unwrap();
        let compiler = device.precompiler().unwrap();
        let jobs = compiler.jobs(problem.any(), &PlanOptions::default().kernel(kernel)).unwrap();
        // The first kernels are those of the plan. Other kernels of its table differ only in their tiles' numbers.
        for mut job in jobs.into_iter().take(3) {
            job.image = ImageKind::Assembly;
            let compiled = match compiler.precompile(&job) {
                Ok(compiled) => compiled,
                Err(Error::NoDevice(reason)) => return println!("absent: {reason}"),
                Err(error) => panic!("{arch} {}: {error}", job.kernel),
            };
            let assembly = String::from_utf8_lossy(&compiled.assembly);
            assert!(assembly.contains(".entry"), "{arch} {}: no assembly", job.kernel);
            let loads = loads_of_constants(&assembly);
            let of = format!("{arch} {} by {}", job.kernel, compiled.compiler);
            assert!(loads.is_empty(), "{of}: {} loads, such as {}", loads.len(), loads[0]);
            println!("{of}: folded");
        }
    }
}

#[test]
fn a_load_of_a_named_object_is_found_and_one_by_a_register_is_not() {
    let text = "ld.global.b32 %r1, [_ZTAX9Sm100Tile+36];\nld.global.b32 %r1, [%rd2];\nld.global.v4.u32 {%r1}, [kTile];\n\
                ld.param.u64 %rd1, [fmha_kernel_param_0];";
    assert_eq!(loads_of_constants(text).len(), 2);
}
