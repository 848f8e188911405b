//! Helpers of the integration tests: compiling this crate's kernels, and reporting what could not be run.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::path::PathBuf;
use std::process::Command;

use fmha_emu_cdna::{Arch, Checks, Device, Options};

/// Compiles `kernels/<name>` for an architecture. Without a compiler says so, and gives nothing.
pub(crate) fn compile(name: &str, arch: Arch) -> Option<Vec<u8>> {
    compile_with(name, arch, &[])
}

/// Compiles as [`compile`] does, with further options for clang.
pub(crate) fn compile_with(name: &str, arch: Arch, options: &[&str]) -> Option<Vec<u8>> {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels").join(name);
    let tag: String = options.concat().chars().filter(char::is_ascii_alphanumeric).collect();
    let thread = format!("{:?}", std::thread::current().id()).replace(['(', ')'], "");
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{arch}.{tag}.{thread}.co"));
    let compiler = std::env::var("FMHA_CLANG").unwrap_or_else(|_| "clang-22".to_owned());
    let run = Command::new(&compiler)
        .args(["-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib", "--no-gpu-bundle-output"])
        .args([
            "-fuse-cuid=none",
            "-O3",
            "-std=c++17",
            "-gline-tables-only",
            &format!("--offload-arch={arch}"),
        ])
        .args(arch_options(arch))
        .args(options)
        .arg(&source)
        .arg("-o")
        .arg(&out)
        .output();
    match run {
        Ok(output) => {
            let log = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name} does not compile for {arch}:\n{log}");
            let code = std::fs::read(&out).expect("clang wrote it");
            // One file per test and thread: nothing else reads it.
            let _ = std::fs::remove_file(&out);
            Some(code)
        }
        Err(_) => {
            absent(&format!("{compiler} (kernel {name} for {arch} was not compiled, nothing was run)"));
            None
        }
    }
}

/// Options that fmha gives clang for an architecture.
fn arch_options(arch: Arch) -> &'static [&'static str] {
    match arch {
        Arch::Gfx1100 => &["-Xclang", "-target-feature", "-Xclang", "-real-true16"],
        _ => &[],
    }
}

/// The line by which the test runner knows that something was not tested.
pub(crate) fn absent(what: &str) {
    println!("absent: {what}");
}

/// A device with all checks, running workgroups in order.
pub(crate) fn device(arch: Arch) -> Device {
    Device::new(arch, Options { sequential: true, ..Options::default() })
}

/// A device without checks.
pub(crate) fn fast_device(arch: Arch) -> Device {
    Device::new(arch, Options { checks: Checks::NONE, sequential: true, ..Options::default() })
}

/// A reproducible stream of numbers in [-1, 1).
pub(crate) struct Random(pub u64);

impl Random {
    /// The next 32 bits.
    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// The next number.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Little-endian bytes of 32-bit values.
pub(crate) fn bytes(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// 32-bit values from bytes.
pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
