//! A client of hipRTC that opens the library by name.
#![allow(clippy::unwrap_used, reason = "a test stops where something is missing")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::process::Command;

use libloading::{Library, Symbol};

/// The library that cargo built for this test, beside the test's own binary.
fn library() -> Library {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap();
    let places =
        [folder.join("libfmha_emu_hiprtc.so"), folder.parent().unwrap().join("libfmha_emu_hiprtc.so")];
    let path = places.iter().find(|p| p.exists()).unwrap_or(&places[0]);
    // SAFETY: the library is ours; loading it runs no code.
    unsafe { Library::new(path) }.unwrap()
}

fn symbol<'l, T>(library: &'l Library, name: &str) -> Symbol<'l, T> {
    // SAFETY: each use gives the type that hipRTC's headers give.
    unsafe { library.get(name.as_bytes()) }.unwrap()
}

macro_rules! call {
    ($library:expr, $name:literal($($value:expr => $ty:ty),*)) => {{
        let function: Symbol<'_, unsafe extern "C" fn($($ty),*) -> c_int> = symbol($library, $name);
        // SAFETY: the arguments are what hipRTC's headers ask for.
        unsafe { function($($value),*) }
    }};
}

/// Compiles for gfx942: the result, the code, the log.
fn compile(library: &Library, source: &str, header: &str) -> (c_int, Vec<u8>, String) {
    let texts = [source, "kernel.hip", header, "lib/scale.h", "--offload-arch=gfx942"]
        .map(|t| CString::new(t).unwrap());
    let (headers, names, options) = ([texts[2].as_ptr()], [texts[3].as_ptr()], [texts[4].as_ptr()]);
    let mut program = 0usize;
    let created = call!(library, "hiprtcCreateProgram"(
        &mut program => *mut usize, texts[0].as_ptr() => *const c_char, texts[1].as_ptr() => *const c_char,
        1 => c_int, headers.as_ptr() => *const *const c_char, names.as_ptr() => *const *const c_char));
    assert_eq!(created, 0);
    let result = call!(library, "hiprtcCompileProgram"(
        program => usize, 1 => c_int, options.as_ptr() => *const *const c_char));
    let mut bytes = 0usize;
    assert_eq!(call!(library, "hiprtcGetCodeSize"(program => usize, &mut bytes => *mut usize)), 0);
    let mut code = vec![0u8; bytes];
    assert_eq!(call!(library, "hiprtcGetCode"(program => usize, code.as_mut_ptr() => *mut u8)), 0);
    assert_eq!(call!(library, "hiprtcGetProgramLogSize"(program => usize, &mut bytes => *mut usize)), 0);
    let mut log = vec![0u8; bytes];
    assert_eq!(call!(library, "hiprtcGetProgramLog"(program => usize, log.as_mut_ptr() => *mut u8)), 0);
    assert_eq!(call!(library, "hiprtcDestroyProgram"(&mut program => *mut usize)), 0);
    let log = CStr::from_bytes_with_nul(&log).unwrap().to_string_lossy().into_owned();
    (result, code, log)
}

#[test]
fn sources_with_headers_compile_and_errors_come_with_a_log() {
    let compiler = std::env::var("FMHA_CLANG").unwrap_or_else(|_| "clang-22".to_owned());
    if Command::new(&compiler).arg("--version").output().is_err() {
        println!("absent: {compiler} (nothing was compiled)");
        return;
    }
    let library = &library();
    let source = "#include <lib/scale.h>\nextern \"C\" __attribute__((global)) void twice(float *x) \
                  { x[__builtin_amdgcn_workitem_id_x()] *= SCALE; }\n";
    let (result, code, log) = compile(library, source, "#define SCALE 2.0f\n");
    assert_eq!((result, &code[..4]), (0, &b"\x7fELF"[..]), "{log}");
    let (result, code, log) = compile(library, source, "#define SCALE no_such_thing\n");
    assert_eq!((result, code.len()), (6, 0));
    assert!(log.contains("no_such_thing"), "{log}");
}
