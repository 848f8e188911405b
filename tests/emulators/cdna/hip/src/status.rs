//! `hipError_t`: codes, names and texts.

use std::ffi::{CStr, c_char, c_int};

use fmha_emu_cdna::FaultKind;

/// A `hipError_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Status(pub c_int);

macro_rules! statuses {
    ($($constant:ident = $code:literal, $name:literal, $text:literal;)*) => {
        impl Status {
            $(pub(crate) const $constant: Self = Self($code);)*

            fn name(self) -> &'static CStr {
                match self { $(Self::$constant => $name,)* _ => c"hipErrorUnknown" }
            }

            fn text(self) -> &'static CStr {
                match self { $(Self::$constant => $text,)* _ => c"unknown error" }
            }
        }
    };
}

statuses! {
    SUCCESS = 0, c"hipSuccess", c"no error";
    INVALID_VALUE = 1, c"hipErrorInvalidValue", c"invalid argument";
    NOT_INITIALIZED = 3, c"hipErrorNotInitialized", c"initialization error";
    INVALID_CONFIGURATION = 9, c"hipErrorInvalidConfiguration", c"invalid configuration argument";
    INVALID_DEVICE_POINTER = 17, c"hipErrorInvalidDevicePointer", c"invalid device pointer";
    INVALID_MEMCPY_DIRECTION = 21, c"hipErrorInvalidMemcpyDirection", c"invalid copy direction for memcpy";
    NO_DEVICE = 100, c"hipErrorNoDevice", c"no ROCm-capable device is detected";
    INVALID_DEVICE = 101, c"hipErrorInvalidDevice", c"invalid device ordinal";
    INVALID_IMAGE = 200, c"hipErrorInvalidImage", c"device kernel image is invalid";
    NO_BINARY_FOR_GPU = 209, c"hipErrorNoBinaryForGpu", c"no kernel image is available for execution on the device";
    FILE_NOT_FOUND = 301, c"hipErrorFileNotFound", c"file not found";
    INVALID_HANDLE = 400, c"hipErrorInvalidHandle", c"invalid resource handle";
    ILLEGAL_STATE = 401, c"hipErrorIllegalState", c"the operation cannot be performed in the present state";
    NOT_FOUND = 500, c"hipErrorNotFound", c"named symbol not found";
    NOT_READY = 600, c"hipErrorNotReady", c"device not ready";
    ILLEGAL_ADDRESS = 700, c"hipErrorIllegalAddress", c"an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, c"hipErrorLaunchOutOfResources", c"too many resources requested for launch";
    LAUNCH_TIMEOUT = 702, c"hipErrorLaunchTimeOut", c"the launch timed out and was terminated";
    LAUNCH_FAILURE = 719, c"hipErrorLaunchFailure", c"unspecified launch failure";
    NOT_SUPPORTED = 801, c"hipErrorNotSupported", c"operation not supported";
    CAPTURE_UNSUPPORTED = 900, c"hipErrorStreamCaptureUnsupported", c"operation not permitted when stream is capturing";
    UNKNOWN = 999, c"hipErrorUnknown", c"unknown error";
}

impl Status {
    /// Status of a kernel's fault at the next wait.
    pub(crate) fn of_fault(kind: FaultKind) -> Self {
        match kind {
            FaultKind::OutOfBounds | FaultKind::Misaligned => Self::ILLEGAL_ADDRESS,
            FaultKind::Timeout => Self::LAUNCH_TIMEOUT,
            _ => Self::LAUNCH_FAILURE,
        }
    }
}

/// Result of a call, before it becomes a code.
pub(crate) type Call<T = ()> = Result<T, Status>;

/// Turns a result into the code, and remembers failures for `hipGetLastError`.
pub(crate) fn report(result: Call) -> Status {
    match result {
        Ok(()) => Status::SUCCESS,
        Err(status) => {
            if status != Status::NOT_READY {
                crate::runtime::set_last_error(status);
            }
            status
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(error: Status) -> *const c_char {
    error.name().as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(error: Status) -> *const c_char {
    error.text().as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDrvGetErrorName(error: Status, name: *mut *const c_char) -> Status {
    // SAFETY: the caller gives a place for the pointer or null.
    report(unsafe { crate::runtime::put(name, error.name().as_ptr()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDrvGetErrorString(error: Status, text: *mut *const c_char) -> Status {
    // SAFETY: the caller gives a place for the pointer or null.
    report(unsafe { crate::runtime::put(text, error.text().as_ptr()) })
}
