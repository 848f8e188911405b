//! HIP's C interface: the functions that this crate calls, with their types, resolved by name.
//!
//! Signatures are those of ROCm 6's `hip_runtime_api.h`. No function is linked: a machine without ROCm gets an
//! error, not an abort by the loader.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// `hipError_t`: 0 is success.
pub(crate) type HipStatus = c_int;
/// Device memory, a stream, a module or the like. This crate never dereferences it.
pub(crate) type Handle = *mut c_void;

/// `hipDeviceProp_tR0600` as raw bytes; the offsets of the fields read here are those of ROCm 6 and 7.
#[repr(C, align(8))]
pub(crate) struct DeviceProperties(pub(crate) [u8; DeviceProperties::BYTES]);

impl DeviceProperties {
    /// Size in ROCm 6 and 7, with room to grow: a larger struct must not write past the end.
    pub(crate) const BYTES: usize = 4096;
    /// Offset of `gcnArchName`, a C string of at most 256 bytes.
    pub(crate) const GCN_ARCH_NAME: usize = 1160;
    /// Offset of `name`, a C string of at most 256 bytes.
    pub(crate) const NAME: usize = 0;
    /// Offset of `multiProcessorCount`, an i32.
    pub(crate) const MULTI_PROCESSOR_COUNT: usize = 388;
}

macro_rules! functions {
    ($(#[$meta:meta])* pub(crate) struct $table:ident;
     $($kind:ident fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        pub(crate) struct $table {
            $(pub(crate) $name: functions!(@type $kind, unsafe extern "C" fn($($type),*) -> $result),)*
            /// Keeps the library loaded, so that its functions stay valid.
            _library: Library,
        }

        #[allow(non_snake_case)]
        impl $table {
            /// Looks up every function.
            ///
            /// # Errors
            /// The names of the required functions that `library` lacks.
            pub(crate) fn resolve(library: Library) -> Result<Self, Vec<&'static str>> {
                let missing: Vec<&'static str> =
                    [$(functions!(@missing $kind, library, $name)),*].into_iter().flatten().collect();
                if !missing.is_empty() {
                    return Err(missing);
                }
                $(
                    // SAFETY: HIP exports this name, and its header gives this type.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($type),*) -> $result>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        )
                    }
                    .map(|symbol| *symbol);
                )*
                Ok(Self { $($name: functions!(@take $kind, $name),)* _library: library })
            }
        }
    };
    (@type required, $type:ty) => { $type };
    (@type optional, $type:ty) => { Option<$type> };
    (@missing required, $library:ident, $name:ident) => {
        // SAFETY: only looked for; nothing is called.
        unsafe { $library.get::<*const c_void>(concat!(stringify!($name), "\0").as_bytes()) }
            .err()
            .map(|_| stringify!($name))
    };
    (@missing optional, $library:ident, $name:ident) => { None };
    (@take required, $name:ident) => {
        match $name {
            Ok(function) => function,
            Err(_) => return Err(vec![stringify!($name)]),
        }
    };
    (@take optional, $name:ident) => { $name.ok() };
}

functions! {
    /// The functions of libamdhip64.
    pub(crate) struct Hip;
    required fn hipInit(flags: c_uint) -> HipStatus;
    required fn hipGetErrorString(status: HipStatus) -> *const c_char;
    required fn hipGetDeviceCount(count: *mut c_int) -> HipStatus;
    required fn hipGetDevice(ordinal: *mut c_int) -> HipStatus;
    required fn hipSetDevice(ordinal: c_int) -> HipStatus;
    optional fn hipRuntimeGetVersion(version: *mut c_int) -> HipStatus;
    // Libraries before ROCm 6 lack this function; the difference matters only on a machine with a device.
    optional fn hipGetDevicePropertiesR0600(properties: *mut DeviceProperties, ordinal: c_int) -> HipStatus;
    required fn hipMalloc(address: *mut Handle, bytes: usize) -> HipStatus;
    required fn hipFree(address: Handle) -> HipStatus;
    required fn hipMemcpyHtoD(to: Handle, from: *const c_void, bytes: usize) -> HipStatus;
    required fn hipMemcpyDtoH(to: *mut c_void, from: Handle, bytes: usize) -> HipStatus;
    optional fn hipMemcpyDtoDAsync(to: Handle, from: Handle, bytes: usize, stream: Handle) -> HipStatus;
    required fn hipMemsetAsync(to: Handle, value: c_int, bytes: usize, stream: Handle) -> HipStatus;
    required fn hipDeviceSynchronize() -> HipStatus;
    required fn hipStreamCreateWithFlags(stream: *mut Handle, flags: c_uint) -> HipStatus;
    required fn hipStreamDestroy(stream: Handle) -> HipStatus;
    required fn hipStreamSynchronize(stream: Handle) -> HipStatus;
    required fn hipModuleLoadData(module: *mut Handle, image: *const c_void) -> HipStatus;
    required fn hipModuleUnload(module: Handle) -> HipStatus;
    required fn hipModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> HipStatus;
    required fn hipModuleLaunchKernel(
        function: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        lds_bytes: c_uint,
        stream: Handle,
        kernel_params: *mut *mut c_void,
        extra: *mut *mut c_void
    ) -> HipStatus;
    optional fn hipEventCreate(event: *mut Handle) -> HipStatus;
    optional fn hipEventDestroy(event: Handle) -> HipStatus;
    optional fn hipEventRecord(event: Handle, stream: Handle) -> HipStatus;
    optional fn hipStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> HipStatus;
    optional fn hipEventSynchronize(event: Handle) -> HipStatus;
    optional fn hipEventElapsedTime(milliseconds: *mut f32, start: Handle, stop: Handle) -> HipStatus;
    optional fn hipStreamBeginCapture(stream: Handle, mode: c_int) -> HipStatus;
    optional fn hipStreamEndCapture(stream: Handle, graph: *mut Handle) -> HipStatus;
    optional fn hipStreamIsCapturing(stream: Handle, status: *mut c_int) -> HipStatus;
    optional fn hipGraphInstantiate(
        executable: *mut Handle, graph: Handle, error_node: *mut Handle, log: *mut c_char, log_bytes: usize
    ) -> HipStatus;
    optional fn hipGraphDestroy(graph: Handle) -> HipStatus;
    optional fn hipGraphExecDestroy(executable: Handle) -> HipStatus;
    optional fn hipGraphLaunch(executable: Handle, stream: Handle) -> HipStatus;
}

functions! {
    /// The functions of libhiprtc.
    pub(crate) struct Hiprtc;
    required fn hiprtcCreateProgram(
        program: *mut Handle,
        source: *const c_char, name: *const c_char,
        num_headers: c_int, headers: *const *const c_char, include_names: *const *const c_char
    ) -> c_int;
    optional fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int;
    required fn hiprtcCompileProgram(
        program: Handle, num_options: c_int, options: *const *const c_char
    ) -> c_int;
    required fn hiprtcDestroyProgram(program: *mut Handle) -> c_int;
    required fn hiprtcGetProgramLogSize(program: Handle, bytes: *mut usize) -> c_int;
    required fn hiprtcGetProgramLog(program: Handle, log: *mut c_char) -> c_int;
    required fn hiprtcGetCodeSize(program: Handle, bytes: *mut usize) -> c_int;
    required fn hiprtcGetCode(program: Handle, code: *mut c_char) -> c_int;
    required fn hiprtcGetErrorString(status: c_int) -> *const c_char;
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::DeviceProperties;

    #[test]
    fn device_properties_lie_where_hip_says() {
        use cubecl_hip_sys::hipDeviceProp_tR0600 as Theirs;
        assert!(size_of::<Theirs>() <= DeviceProperties::BYTES);
        assert_eq!(offset_of!(Theirs, name), DeviceProperties::NAME);
        assert_eq!(offset_of!(Theirs, gcnArchName), DeviceProperties::GCN_ARCH_NAME);
        assert_eq!(offset_of!(Theirs, multiProcessorCount), DeviceProperties::MULTI_PROCESSOR_COUNT);
    }
}
