//! The double, used as a program uses the real library: loaded by path, called by name.
#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

use std::ffi::{CString, c_int, c_uint, c_void};
use std::path::PathBuf;

use libloading::Library;

const SCALE: &str = r#"
.version 8.0
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 data, .param .u32 n, .param .f32 by)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [data];
    ld.param.u32 %r0, [n];
    ld.param.f32 %f0, [by];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    setp.ge.s32 %p, %r4, %r0;
    @%p bra DONE;
    mul.wide.s32 %rd1, %r4, 4;
    add.s64 %rd2, %rd0, %rd1;
    ld.global.f32 %f1, [%rd2];
    mul.f32 %f2, %f1, %f0;
    st.global.f32 [%rd2], %f2;
DONE:
    ret;
}
"#;

fn library() -> Library {
    let exe = std::env::current_exe().unwrap();
    let folder = exe.parent().unwrap();
    let candidates: [PathBuf; 2] =
        [folder.join("libfmha_emu_libcuda.so"), folder.parent().unwrap().join("libfmha_emu_libcuda.so")];
    let path = candidates.iter().find(|p| p.exists()).expect("cargo builds the library before its tests");
    // SAFETY: the library's initialisers are Rust's own.
    unsafe { Library::new(path) }.unwrap()
}

macro_rules! call {
    ($lib:expr, $name:literal, ($($ty:ty),*), $($arg:expr),*) => {{
        // SAFETY: the signature is the driver API's.
        let f = unsafe { $lib.get::<unsafe extern "C" fn($($ty),*) -> c_uint>($name.as_bytes()) }.unwrap();
        // SAFETY: the arguments are valid for that signature.
        let code = unsafe { f($($arg),*) };
        code
    }};
}

struct Session {
    lib: Library,
    function: usize,
    data: u64,
}

impl Session {
    fn new(values: &[f32]) -> Self {
        let lib = library();
        assert_eq!(call!(lib, "cuInit", (c_uint), 0), 0);
        let (mut context, mut module, mut function, mut data) = (0usize, 0usize, 0usize, 0u64);
        assert_eq!(call!(lib, "cuDevicePrimaryCtxRetain", (*mut usize, c_int), &raw mut context, 0), 0);
        assert_eq!(call!(lib, "cuCtxSetCurrent", (usize), context), 0);
        let text = CString::new(SCALE).unwrap();
        let image: *const c_void = text.as_ptr().cast();
        assert_eq!(call!(lib, "cuModuleLoadData", (*mut usize, *const c_void), &raw mut module, image), 0);
        let name = CString::new("scale").unwrap();
        let code = call!(
            lib,
            "cuModuleGetFunction",
            (*mut usize, usize, *const std::ffi::c_char),
            &raw mut function,
            module,
            name.as_ptr()
        );
        assert_eq!(code, 0);
        let bytes = size_of_val(values);
        assert_eq!(call!(lib, "cuMemAlloc_v2", (*mut u64, usize), &raw mut data, bytes), 0);
        let from: *const c_void = values.as_ptr().cast();
        assert_eq!(call!(lib, "cuMemcpyHtoD_v2", (u64, *const c_void, usize), data, from, bytes), 0);
        Self { lib, function, data }
    }

    fn launch(&self, stream: usize, n: u32, by: f32) -> u32 {
        let (mut data, mut n, mut by) = (self.data, n, by);
        let mut params: [*mut c_void; 3] =
            [(&raw mut data).cast(), (&raw mut n).cast(), (&raw mut by).cast()];
        call!(
            self.lib,
            "cuLaunchKernel",
            (
                usize,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                usize,
                *mut *mut c_void,
                *mut *mut c_void
            ),
            self.function,
            n.div_ceil(64),
            1,
            1,
            64,
            1,
            1,
            0,
            stream,
            params.as_mut_ptr(),
            std::ptr::null_mut()
        )
    }

    fn read(&self, n: usize) -> Vec<f32> {
        let mut out = vec![0f32; n];
        let to: *mut c_void = out.as_mut_ptr().cast();
        assert_eq!(call!(self.lib, "cuMemcpyDtoH_v2", (*mut c_void, u64, usize), to, self.data, n * 4), 0);
        out
    }
}

#[test]
fn a_kernel_runs_through_the_driver_api() {
    let values: Vec<f32> = (0..100u8).map(f32::from).collect();
    let session = Session::new(&values);
    assert_eq!(session.launch(0, 100, 3.0), 0);
    let want: Vec<f32> = values.iter().map(|v| v * 3.0).collect();
    assert_eq!(session.read(100), want);
}

#[test]
fn a_captured_launch_runs_only_when_its_graph_is_replayed() {
    let session = Session::new(&[1.0; 64]);
    let lib = &session.lib;
    let (mut stream, mut graph, mut exec) = (0usize, 0usize, 0usize);
    assert_eq!(call!(lib, "cuStreamCreate", (*mut usize, c_uint), &raw mut stream, 0), 0);
    assert_eq!(call!(lib, "cuStreamBeginCapture_v2", (usize, c_uint), stream, 0), 0);
    assert_eq!(session.launch(stream, 64, 2.0), 0);
    assert_eq!(call!(lib, "cuStreamEndCapture", (usize, *mut usize), stream, &raw mut graph), 0);
    assert_eq!(session.read(64), vec![1.0; 64]);
    let code = call!(lib, "cuGraphInstantiateWithFlags", (*mut usize, usize, u64), &raw mut exec, graph, 0);
    assert_eq!(code, 0);
    for _ in 0..3 {
        assert_eq!(call!(lib, "cuGraphLaunch", (usize, usize), exec, stream), 0);
    }
    assert_eq!(session.read(64), vec![8.0; 64]);
}

#[test]
fn a_tensor_map_wants_a_context_and_an_inner_box_within_the_swizzle_span() {
    #[repr(align(64))]
    struct Map([u8; 128]);
    let lib = library();
    let mut map = Map([0; 128]);
    let encode = |map: &mut Map, inner: u32| {
        let (dims, strides, boxes, steps) = ([128u64, 64], [256u64], [inner, 64], [1u32, 1]);
        call!(
            lib,
            "cuTensorMapEncodeTiled",
            (
                *mut [u8; 128],
                c_uint,
                c_uint,
                u64,
                *const u64,
                *const u64,
                *const u32,
                *const u32,
                c_uint,
                c_uint,
                c_uint,
                c_uint
            ),
            &raw mut map.0,
            9,
            2,
            0x1_0000,
            dims.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            0,
            3,
            0,
            0
        )
    };
    const INVALID_CONTEXT: c_uint = 201;
    assert_eq!(encode(&mut map, 64), INVALID_CONTEXT);
    let mut context = 0usize;
    assert_eq!(call!(lib, "cuInit", (c_uint), 0), 0);
    assert_eq!(call!(lib, "cuDevicePrimaryCtxRetain", (*mut usize, c_int), &raw mut context, 0), 0);
    assert_eq!(call!(lib, "cuCtxSetCurrent", (usize), context), 0);
    assert_eq!(encode(&mut map, 64), 0);
    assert_eq!(encode(&mut map, 128), 1);
}
