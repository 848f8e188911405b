//! The CUDA driver's C interface: the functions that this crate calls, with their types, resolved by name.
//!
//! Signatures, structs and numbers are those of CUDA 12's `cuda.h`; a test compares them with `cudarc`'s. No
//! function is linked: a machine without a driver gets an error, not an abort by the loader, and another
//! crate of the program may link the driver as well.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use fmha_core::Word;
use libloading::Library;
use once_cell::sync::OnceCell;

/// `CUresult`: 0 is success.
pub(crate) type Status = c_int;
/// A context, stream, module, function, event or graph. This crate never dereferences it.
pub(crate) type Handle = *mut c_void;
/// Driver type `CUdevice`.
pub(crate) type DeviceHandle = c_int;
/// Driver type `CUdeviceptr`.
pub(crate) type Address = u64;
/// `CUmemGenericAllocationHandle`.
pub(crate) type MemoryHandle = u64;

pub(crate) const CUDA_SUCCESS: Status = 0;
/// Status that stands for a call of a function that the library lacks.
pub(crate) const CUDA_ERROR_NOT_FOUND: Status = 500;

/// Numbers of `CUdevice_attribute`.
pub(crate) mod attribute {
    use super::c_int;

    pub(crate) const CLOCK_RATE: c_int = 13;
    pub(crate) const MULTIPROCESSOR_COUNT: c_int = 16;
    pub(crate) const MEMORY_CLOCK_RATE: c_int = 36;
    pub(crate) const GLOBAL_MEMORY_BUS_WIDTH: c_int = 37;
    pub(crate) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub(crate) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    pub(crate) const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
}

/// `CUtensorMapDataType`, `CUtensorMapInterleave`, `CUtensorMapSwizzle`, `CUtensorMapL2promotion`,
/// `CUtensorMapFloatOOBfill`.
pub(crate) mod tensor_map {
    use super::c_int;

    pub(crate) const DATA_TYPE_UINT8: c_int = 0;
    pub(crate) const DATA_TYPE_FLOAT16: c_int = 6;
    pub(crate) const DATA_TYPE_BFLOAT16: c_int = 9;
    pub(crate) const INTERLEAVE_NONE: c_int = 0;
    pub(crate) const SWIZZLE_32B: c_int = 1;
    pub(crate) const SWIZZLE_64B: c_int = 2;
    pub(crate) const SWIZZLE_128B: c_int = 3;
    pub(crate) const L2_PROMOTION_L2_64B: c_int = 1;
    pub(crate) const FLOAT_OOB_FILL_NONE: c_int = 0;
}

/// `CU_STREAM_NON_BLOCKING`: a stream that does not wait for the default one.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: calls of other threads do not invalidate the capture.
pub(crate) const CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
/// `CU_STREAM_CAPTURE_STATUS_NONE`: the stream is not capturing, so queued work runs.
pub(crate) const CAPTURE_STATUS_NONE: c_int = 0;
/// Driver constant `CU_EVENT_DEFAULT`.
pub(crate) const EVENT_DEFAULT: c_uint = 0;
/// Driver constant `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(crate) const FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
/// Driver constant `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
pub(crate) const LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;

/// `CUlaunchAttribute`, for attributes whose value is an int.
#[repr(C, align(8))]
pub(crate) struct LaunchAttribute {
    pub(crate) id: c_int,
    pub(crate) pad: [c_char; 4],
    pub(crate) value: c_int,
    pub(crate) rest: [c_int; 15],
}

/// Driver struct `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: Handle,
    pub(crate) attributes: *mut LaunchAttribute,
    pub(crate) num_attributes: c_uint,
}

/// Driver constant `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const MEM_LOCATION_DEVICE: c_int = 1;
/// Driver constant `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(crate) const MEM_ALLOCATION_PINNED: c_int = 1;
/// Driver constant `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub(crate) const MEM_GRANULARITY_MINIMUM: c_int = 0;
/// Driver constant `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const MEM_ACCESS_READWRITE: c_int = 3;

/// Driver struct `CUmemLocation`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// Driver struct `CUmemAllocationProp`.
#[repr(C)]
pub(crate) struct MemAllocationProp {
    pub(crate) kind: c_int,
    /// 0: the memory is shared with no other process.
    pub(crate) handle_types: c_int,
    pub(crate) location: MemLocation,
    pub(crate) win32_metadata: Handle,
    /// Flags of the allocation; all zero: neither compressed nor for GPUDirect RDMA.
    pub(crate) flags: [c_uchar; 8],
}

/// Driver struct `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct MemAccessDesc {
    pub(crate) location: MemLocation,
    pub(crate) flags: c_int,
}

/// Driver struct `CUipcMemHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// Driver constant `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
pub(crate) const IPC_LAZY_PEER_ACCESS: c_uint = 1;
/// Driver constant `CU_STREAM_MEM_OP_WAIT_VALUE_32`.
pub(crate) const MEM_OP_WAIT_32: c_uint = 1;
/// Driver constant `CU_STREAM_MEM_OP_WRITE_VALUE_32`.
pub(crate) const MEM_OP_WRITE_32: c_uint = 2;
/// Driver constant `CU_STREAM_WAIT_VALUE_EQ`.
pub(crate) const WAIT_VALUE_EQ: c_uint = 1;
/// Largest number of operations in one call: the driver takes fewer than 256.
pub(crate) const MOST_MEM_OPS: usize = 128;

/// `CUstreamBatchMemOpParams`, for waits and writes, which have equal fields.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemOp {
    pub(crate) operation: c_uint,
    pub(crate) pad: c_uint,
    pub(crate) address: Address,
    pub(crate) value: u64,
    pub(crate) flags: c_uint,
    pub(crate) pad_flags: c_uint,
    pub(crate) rest: [u64; 2],
}

impl From<&Word> for MemOp {
    fn from(word: &Word) -> Self {
        let (operation, address, value, flags) = match *word {
            // By default the driver puts a memory barrier of system scope before each write.
            Word::Write { at, value } => (MEM_OP_WRITE_32, at, value, 0),
            Word::Await { at, value } => (MEM_OP_WAIT_32, at, value, WAIT_VALUE_EQ),
        };
        Self { operation, pad: 0, address, value: value.into(), flags, pad_flags: 0, rest: [0; 2] }
    }
}

macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        /// The driver's functions; `None` for a function that the library is too old to have.
        #[allow(non_snake_case, reason = "the driver's names")]
        pub(crate) struct Functions {
            $(pub(crate) $name: Option<unsafe extern "C" fn($($type),*) -> Status>,)*
            /// Keeps the driver's library loaded, so that the functions above stay valid.
            _library: Library,
        }

        impl Functions {
            fn of(library: Library) -> Self {
                Self {
                    $($name: {
                        // SAFETY: the driver exports this name, and its header gives this type.
                        unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .ok()
                            .map(|symbol| *symbol)
                    },)*
                    _library: library,
                }
            }
        }

        /// Each function with the sizes of its parameters, as declared here and as declared in cudarc.
        #[cfg(test)]
        fn declared_here_and_by_cudarc() -> Vec<(&'static str, Vec<usize>, Vec<usize>)> {
            use cudarc::driver::sys as theirs;
            vec![$((
                stringify!($name),
                vec![$(size_of::<$type>()),*],
                tests::Parameters::sizes(theirs::$name as unsafe fn($(functions!(@any $arg)),*) -> _),
            )),*]
        }
    };
    (@any $arg:ident) => { _ };
}

functions! {
    fn cuInit(flags: c_uint);
    fn cuGetErrorString(status: Status, text: *mut *const c_char);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut DeviceHandle, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: DeviceHandle);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: DeviceHandle);
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: DeviceHandle);
    fn cuDevicePrimaryCtxRelease_v2(device: DeviceHandle);
    fn cuCtxGetCurrent(context: *mut Handle);
    fn cuCtxSetCurrent(context: Handle);
    fn cuMemAlloc_v2(address: *mut Address, bytes: usize);
    fn cuMemFree_v2(address: Address);
    fn cuMemcpyHtoD_v2(to: Address, from: *const c_void, bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: Address, bytes: usize);
    fn cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: Address, bytes: usize, stream: Handle);
    fn cuIpcGetMemHandle(name: *mut IpcHandle, address: Address);
    fn cuIpcOpenMemHandle_v2(address: *mut Address, name: IpcHandle, flags: c_uint);
    fn cuIpcCloseMemHandle(address: Address);
    fn cuStreamBatchMemOp_v2(stream: Handle, count: c_uint, ops: *mut MemOp, flags: c_uint);
    fn cuMemsetD8Async(address: Address, byte: c_uchar, bytes: usize, stream: Handle);
    fn cuMemGetAllocationGranularity(granule: *mut usize, prop: *const MemAllocationProp, option: c_int);
    fn cuMemAddressReserve(base: *mut Address, bytes: usize, align: usize, wanted: Address, flags: c_ulonglong);
    fn cuMemAddressFree(base: Address, bytes: usize);
    fn cuMemCreate(memory: *mut MemoryHandle, bytes: usize, prop: *const MemAllocationProp, flags: c_ulonglong);
    fn cuMemRelease(memory: MemoryHandle);
    fn cuMemMap(at: Address, bytes: usize, offset: usize, memory: MemoryHandle, flags: c_ulonglong);
    fn cuMemUnmap(at: Address, bytes: usize);
    fn cuMemSetAccess(at: Address, bytes: usize, access: *const MemAccessDesc, count: usize);
    fn cuStreamCreate(stream: *mut Handle, flags: c_uint);
    fn cuStreamDestroy_v2(stream: Handle);
    fn cuStreamSynchronize(stream: Handle);
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint);
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int);
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle);
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_int);
    fn cuModuleLoadData(module: *mut Handle, image: *const c_void);
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
    fn cuModuleUnload(module: Handle);
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int);
    fn cuLaunchKernelEx(
        config: *const LaunchConfig, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    );
    fn cuTensorMapEncodeTiled(
        map: *mut c_void, dtype: c_int, rank: u32, address: *mut c_void, dims: *const u64, strides: *const u64,
        box_dims: *const u32, element_strides: *const u32, interleave: c_int, swizzle: c_int, l2_promotion: c_int,
        fill: c_int,
    );
    fn cuEventCreate(event: *mut Handle, flags: c_uint);
    fn cuEventDestroy_v2(event: Handle);
    fn cuEventRecord(event: Handle, stream: Handle);
    fn cuEventSynchronize(event: Handle);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, stop: Handle);
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: c_ulonglong);
    fn cuGraphLaunch(executable: Handle, stream: Handle);
    fn cuGraphDestroy(graph: Handle);
    fn cuGraphExecDestroy(executable: Handle);
}

/// File names of the driver's library. The unversioned development name comes first, since the test double has it.
const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

static FUNCTIONS: OnceCell<Functions> = OnceCell::new();

/// Opens the library once per process; if none is found, the next call searches again.
///
/// # Errors
/// What the loader said for each name.
pub(crate) fn load() -> Result<(), String> {
    FUNCTIONS.get_or_try_init(|| first(NAMES)).map(|_| ())
}

fn first(names: &[&str]) -> Result<Functions, String> {
    let mut said = Vec::new();
    for name in names {
        // SAFETY: the driver's initialisers only set up itself.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(Functions::of(library)),
            Err(error) => {
                let why =
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                said.push(format!("{name} ({why})"));
            }
        }
    }
    Err(said.join("; "))
}

/// The functions, once [`load`] has found them.
#[inline]
pub(crate) fn functions() -> Option<&'static Functions> {
    FUNCTIONS.get()
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of};

    use cudarc::driver::sys as theirs;

    use super::*;

    /// The sizes of a function's parameters.
    pub(super) trait Parameters {
        fn sizes(self) -> Vec<usize>;
    }

    macro_rules! parameters {
        ($($type:ident)*) => {
            impl<$($type,)*> Parameters for unsafe fn($($type),*) -> theirs::CUresult {
                fn sizes(self) -> Vec<usize> {
                    vec![$(size_of::<$type>()),*]
                }
            }
        };
    }

    parameters!(A);
    parameters!(A B);
    parameters!(A B C);
    parameters!(A B C D);
    parameters!(A B C D E);
    parameters!(A B C D E F G H I J K L);

    #[test]
    fn functions_have_the_parameters_that_cudarc_gives_them() {
        let all = declared_here_and_by_cudarc();
        assert!(all.len() > 40);
        for (name, ours, cudarcs) in all {
            assert_eq!(ours, cudarcs, "{name}");
        }
    }

    /// Checks that a struct of ours and the one of cudarc agree in size, alignment and offsets of fields.
    macro_rules! alike {
        ($ours:ident, $theirs:ident: $($own:ident = $other:ident),*) => {
            assert_eq!(size_of::<$ours>(), size_of::<theirs::$theirs>());
            assert_eq!(align_of::<$ours>(), align_of::<theirs::$theirs>());
            $(assert_eq!(offset_of!($ours, $own), offset_of!(theirs::$theirs, $other), stringify!($own));)*
        };
    }

    #[test]
    fn structs_lie_as_cudarc_has_them() {
        alike!(LaunchAttribute, CUlaunchAttribute: id = id, value = value);
        alike!(LaunchConfig, CUlaunchConfig: grid = gridDimX, block = blockDimX, shared_bytes = sharedMemBytes,
               stream = hStream, attributes = attrs, num_attributes = numAttrs);
        alike!(MemLocation, CUmemLocation: kind = type_, id = id);
        alike!(MemAllocationProp, CUmemAllocationProp: kind = type_, handle_types = requestedHandleTypes,
               location = location, win32_metadata = win32HandleMetaData, flags = allocFlags);
        alike!(MemAccessDesc, CUmemAccessDesc: location = location, flags = flags);
        alike!(IpcHandle, CUipcMemHandle: );
        assert_eq!(size_of::<MemOp>(), size_of::<theirs::CUstreamBatchMemOpParams>());
        use theirs::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as TheirWrite;
        assert_eq!(offset_of!(MemOp, address), offset_of!(TheirWrite, address));
        assert_eq!(offset_of!(MemOp, value), offset_of!(TheirWrite, __bindgen_anon_1));
        assert_eq!(offset_of!(MemOp, flags), offset_of!(TheirWrite, flags));
    }

    #[test]
    fn numbers_are_those_of_cudarc() {
        macro_rules! same {
            ($($ours:expr => $kind:ident::$theirs:ident),* $(,)?) => {
                $(assert_eq!(i64::from($ours), theirs::$kind::$theirs as i64, stringify!($theirs));)*
            };
        }
        same! {
            CUDA_SUCCESS => CUresult::CUDA_SUCCESS,
            CUDA_ERROR_NOT_FOUND => CUresult::CUDA_ERROR_NOT_FOUND,
            attribute::CLOCK_RATE => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
            attribute::MULTIPROCESSOR_COUNT => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            attribute::MEMORY_CLOCK_RATE => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
            attribute::GLOBAL_MEMORY_BUS_WIDTH => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
            attribute::COMPUTE_CAPABILITY_MAJOR => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute::COMPUTE_CAPABILITY_MINOR => CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN =>
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            tensor_map::DATA_TYPE_UINT8 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            tensor_map::DATA_TYPE_FLOAT16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            tensor_map::DATA_TYPE_BFLOAT16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            tensor_map::INTERLEAVE_NONE => CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            tensor_map::SWIZZLE_32B => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            tensor_map::SWIZZLE_64B => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            tensor_map::SWIZZLE_128B => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            tensor_map::L2_PROMOTION_L2_64B => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
            tensor_map::FLOAT_OOB_FILL_NONE => CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            STREAM_NON_BLOCKING => CUstream_flags::CU_STREAM_NON_BLOCKING,
            CAPTURE_MODE_THREAD_LOCAL => CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CAPTURE_STATUS_NONE => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
            EVENT_DEFAULT => CUevent_flags::CU_EVENT_DEFAULT,
            IPC_LAZY_PEER_ACCESS => CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
            MEM_OP_WAIT_32 => CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32,
            MEM_OP_WRITE_32 => CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32,
            WAIT_VALUE_EQ => CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ,
            FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES =>
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION =>
                CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            MEM_LOCATION_DEVICE => CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            MEM_ALLOCATION_PINNED => CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            MEM_GRANULARITY_MINIMUM => CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            MEM_ACCESS_READWRITE => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    }

    #[test]
    fn an_absent_library_gives_every_name_that_was_tried() {
        let said = first(&["libno-such-driver.so", "libno-such-driver.so.1"]).err().unwrap();
        assert!(
            said.contains("libno-such-driver.so (") && said.contains("libno-such-driver.so.1 ("),
            "{said}"
        );
    }
}
