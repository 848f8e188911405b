//! Tests of both compilers without the cache: an installed clang, and the emulator's hipRTC, which calls a clang
//! itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_core::cache::{Compiler as _, ImageKind};
use fmha_core::emulators::Double;
use fmha_core::source::Header;

use super::*;
use crate::driver::sys::Hiprtc;

/// A kernel with 256 words of LDS; a constant in its header gives the number.
const ENTRY: &str = r#"
#include <part/words.h>
extern "C" __attribute__((global)) void fmha_kernel(int* p) {
  static __attribute__((shared)) volatile int words[WORDS];
  words[p[0]] = p[1];
  p[2] = words[p[3]];
}
"#;

fn job(header: &'static str) -> KernelJob {
    KernelJob {
        kernel: "words",
        arch: "gfx942".to_owned(),
        flags: crate::compile::COMPILE_OPTIONS.map(str::to_owned).to_vec(),
        source: KernelSource::new(ENTRY.to_owned(), move || vec![Header::embedded("part/words.h", header)]),
        image: ImageKind::Machine,
    }
}

/// A code object for gfx942 with the kernel `fmha_kernel`; `None` without a clang.
pub(crate) fn kernel() -> Option<Vec<u8>> {
    let compiler = compilers().into_iter().next()?;
    Some(compiler.compile(&job("#define WORDS 256\n")).unwrap().machine)
}

/// Compilers that are installed; prints those that are not.
fn compilers() -> Vec<Compiler> {
    let installed = Compiler::find().ok().filter(|found| matches!(found, Compiler::Clang { .. }));
    if installed.is_none() {
        println!("absent: no clang with target amdgcn, nothing was compiled");
    }
    let mut all: Vec<_> = installed.into_iter().collect();
    if clang(Path::new("clang-22")).is_some() {
        all.extend(hiprtc().map(|hiprtc| Compiler::Hiprtc(Box::new(hiprtc))));
    } else {
        println!("absent: clang-22 for the emulator's hipRTC");
    }
    all
}

/// The hipRTC library of the emulator.
fn hiprtc() -> Option<Hiprtc> {
    let double = Double { file: "libfmha_emu_hiprtc.so", package: "fmha-emu-hiprtc" };
    let found = double.find().and_then(|path| search::hiprtc_at(&[path]));
    found.map_err(|error| println!("absent: the emulator's hipRTC: {error}")).ok()
}

#[test]
fn either_compiler_makes_code_for_the_architecture_and_reads_what_it_takes() {
    for compiler in compilers() {
        let output = compiler.compile(&job("#define WORDS 256\n")).unwrap();
        let identity = compiler.identity();
        // The code object is an ELF file of 64 bits, little-endian, for AMDGPU (224).
        assert_eq!(output.machine[..6], *b"\x7fELF\x02\x01", "{identity}");
        assert_eq!(output.machine[18..20], 224u16.to_le_bytes(), "{identity}");
        assert_eq!(output.resources.shared_bytes, Some(1024), "{identity}");
        assert_eq!(output.resources.spill_bytes, Some(0), "{identity}");
        assert!(output.resources.registers > Some(0), "{identity}");
    }
}

#[test]
fn what_does_not_compile_comes_back_with_the_compilers_words_and_a_copy_of_the_source() {
    for compiler in compilers() {
        let Err(Error::Compile { kernel, dumped, log }) = compiler.compile(&job("#error no words\n")) else {
            panic!("{} compiled it", compiler.identity());
        };
        assert_eq!(kernel, "words");
        assert!(log.contains("no words"), "{log}");
        assert!(log.ends_with(|end: char| end != '\0'), "{log:?}");
        assert_eq!(std::fs::read_to_string(dumped.join("log.txt")).unwrap(), log);
        if fmha_core::env::DUMP.get().unwrap().is_none() {
            std::fs::remove_dir_all(dumped.parent().unwrap()).unwrap();
        }
    }
}

#[test]
fn a_compiler_is_told_by_its_version_and_a_clang_by_its_path_too() {
    let clang = Compiler::Clang { path: "some/clang".into(), version: "clang version 1.2".to_owned() };
    assert_eq!(clang.identity(), "clang version 1.2 (some/clang)");
    assert_eq!(clang.own_flags(), CLANG_FLAGS);
    let Some(mut hiprtc) = hiprtc() else { return };
    let named = |hiprtc| Compiler::Hiprtc(Box::new(hiprtc)).identity();
    // A function that an older library lacks is no error if it is optional.
    let version = hiprtc.hiprtcVersion.take();
    assert!(version.is_some());
    assert_eq!(named(hiprtc), "hipRTC without a version");
    let Some(hiprtc) = self::hiprtc() else { return };
    assert_eq!(named(hiprtc), "hipRTC 7.0");
}

#[test]
fn a_program_of_hiprtc_is_gone_when_dropped() {
    let Some(rtc) = hiprtc() else { return };
    let mut program = Program { rtc: &rtc, handle: std::ptr::null_mut() };
    // SAFETY: two C strings, and no headers.
    let status = unsafe {
        (rtc.hiprtcCreateProgram)(
            &raw mut program.handle,
            c"".as_ptr(),
            c"entry.hip".as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    };
    assert_eq!(status, 0);
    let (mut again, mut bytes) = (program.handle, 0);
    // SAFETY: places for a number and a handle; this library looks every handle up.
    let (before, after) = unsafe {
        let before = (rtc.hiprtcGetCodeSize)(again, &raw mut bytes);
        drop(program);
        (before, (rtc.hiprtcDestroyProgram)(&raw mut again))
    };
    assert_eq!(before, 0);
    assert_ne!(after, 0, "it was still there");
}
