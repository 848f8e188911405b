//! The part of XLA's foreign-function interface that is used here: the C structs of `xla/ffi/api/c_api.h` (API 0.3),
//! whose fields keep their offsets from version to version. Nothing is linked: every call brings XLA's functions with
//! it.

use std::ffi::{CStr, c_char, c_void};

/// API version that is reported where the framework reports none.
const VERSION: (i32, i32) = (0, 3);

/// `XLA_FFI_Extension_Metadata`: type of the extension with which the framework queries a handler's API version without
/// a call.
const METADATA: i32 = 1;

/// Error code `XLA_FFI_Error_Code_INVALID_ARGUMENT`.
const INVALID_ARGUMENT: i32 = 3;

/// Attribute type `XLA_FFI_AttrType_ARRAY`.
const ARRAY: i32 = 1;

/// The greatest alignment in bytes for which XLA allocates memory; it refuses more (`Unsupported alignment: 256`,
/// jaxlib 0.11.2).
const MOST_ALIGNED: usize = 16;

/// Element type `XLA_FFI_DataType_S64`.
const S64: i32 = 5;

/// Error object of the framework, opaque here.
pub enum XlaError {}

#[repr(C)]
struct Extension {
    struct_size: usize,
    kind: i32,
    next: *mut Extension,
}

#[repr(C)]
struct ApiVersion {
    struct_size: usize,
    extension: *mut Extension,
    major: i32,
    minor: i32,
}

#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: ApiVersion,
    traits: u32,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

/// Buffer of an argument or a result, dense and row-major.
#[repr(C)]
pub(super) struct Buffer {
    struct_size: usize,
    extension: *mut Extension,
    pub(super) dtype: i32,
    pub(super) data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

impl Buffer {
    /// Sizes of the buffer's axes, outermost first.
    pub(super) fn shape(&self) -> &[i64] {
        // SAFETY: the framework lends as many sizes as there are axes while the call lasts; of none, no address.
        unsafe { lent(self.dims, self.rank) }
    }
}

/// The `count` values at an address; an empty slice where the count is 0 or below.
///
/// # Safety
/// The framework lends the values for the time of the call.
unsafe fn lent<'a, T>(first: *const T, count: i64) -> &'a [T] {
    match usize::try_from(count) {
        Ok(count) if count > 0 && !first.is_null() => {
            // SAFETY: the caller promises that the framework lends them for the time of the call.
            unsafe { std::slice::from_raw_parts(first, count) }
        }
        _ => &[],
    }
}

/// Arguments or results of a call. All of them are buffers, the only kind that exists.
#[repr(C)]
struct Buffers {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    types: *const i32,
    buffers: *const *const Buffer,
}

#[repr(C)]
struct Text {
    bytes: *const u8,
    len: usize,
}

#[repr(C)]
struct Array {
    dtype: i32,
    size: usize,
    data: *const u8,
}

#[repr(C)]
struct Attributes {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    types: *const i32,
    names: *const *const Text,
    values: *const *const c_void,
}

/// Frame with which the framework calls a handler or queries its metadata.
#[repr(C)]
pub struct CallFrame {
    struct_size: usize,
    extension: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: i32,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
    future: *mut c_void,
}

#[repr(C)]
struct ErrorCreate {
    struct_size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: i32,
}

#[repr(C)]
struct ErrorText {
    struct_size: usize,
    extension: *mut Extension,
    error: *mut XlaError,
    message: *const c_char,
    /// The framework writes this field from API 0.4 on, so the struct must have room for it.
    code: i32,
}

#[repr(C)]
struct ErrorDestroy {
    struct_size: usize,
    extension: *mut Extension,
    error: *mut XlaError,
}

#[repr(C)]
struct StreamGet {
    struct_size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    stream: *mut c_void,
}

#[repr(C)]
struct MemoryAllocate {
    struct_size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    size: usize,
    alignment: usize,
    data: *mut c_void,
}

#[repr(C)]
struct MemoryFree {
    struct_size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    size: usize,
    data: *mut c_void,
}

#[repr(C)]
struct OrdinalGet {
    struct_size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    ordinal: i32,
}

/// Stands for a function of XLA's table that this crate does not call.
type Unused = *const c_void;
type Function<T> = unsafe extern "C" fn(*mut T) -> *mut XlaError;

/// Table of the framework's functions.
#[repr(C)]
struct Api {
    struct_size: usize,
    extension: *mut Extension,
    version: ApiVersion,
    internal: *const c_void,
    error_create: Function<ErrorCreate>,
    error_text: unsafe extern "C" fn(*mut ErrorText),
    error_destroy: unsafe extern "C" fn(*mut ErrorDestroy),
    handler_register: Unused,
    stream_get: Function<StreamGet>,
    type_register: Unused,
    context_get: Unused,
    state_set: Unused,
    state_get: Unused,
    memory_allocate: Function<MemoryAllocate>,
    memory_free: Function<MemoryFree>,
    threads_schedule: Unused,
    threads_count: Unused,
    future_create: Unused,
    future_available: Unused,
    future_error: Unused,
    run_id: Unused,
    ordinal_get: Option<Function<OrdinalGet>>,
}

/// Declares a struct of arguments: its size, no extension, then the given fields.
macro_rules! arguments {
    ($type:ident { $($field:ident: $value:expr),* $(,)? }) => {
        $type { struct_size: size_of::<$type>(), extension: std::ptr::null_mut(), $($field: $value),* }
    };
}

/// Device memory that is returned when dropped. Work that is queued on the call's stream may still use it, since the
/// framework reuses memory in the order of that stream.
pub(super) struct Scratch<'a> {
    frame: &'a CallFrame,
    data: *mut c_void,
    bytes: usize,
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let mut free =
            arguments!(MemoryFree { context: self.frame.context, size: self.bytes, data: self.data });
        // SAFETY: allocated of this call, and freed once.
        let _ = unsafe { self.frame.said((self.frame.api().memory_free)(&raw mut free)) };
    }
}

impl CallFrame {
    /// Answers a query of the handler's metadata; `false` means that the frame is a call.
    ///
    /// # Safety
    /// The frame comes from the framework.
    pub(super) unsafe fn answered(&self) -> bool {
        // SAFETY: an extension is null or one, and of this kind has metadata to be written.
        unsafe {
            match self.extension.as_ref() {
                Some(extension) if extension.kind == METADATA => {
                    let metadata = (*self.extension.cast::<MetadataExtension>()).metadata;
                    let theirs = self.api.as_ref().map(|api| (api.version.major, api.version.minor));
                    let stated = theirs.filter(|&version| version < VERSION).unwrap_or(VERSION);
                    ((*metadata).version.major, (*metadata).version.minor) = stated;
                    // The trait COMMAND_BUFFER_COMPATIBLE is not set: in a replay of a captured call its scratch would
                    // belong to other calls.
                    (*metadata).traits = 0;
                    true
                }
                _ => false,
            }
        }
    }

    fn api(&self) -> &Api {
        // SAFETY: every call brings the table of functions, which lives as long as the process.
        unsafe { &*self.api }
    }

    /// Input buffers of the call.
    pub(super) fn arguments(&self) -> &[&Buffer] {
        // SAFETY: the framework lends as many buffers as it says, none of them null.
        unsafe { lent(self.arguments.buffers.cast(), self.arguments.size) }
    }

    /// Output buffers of the call.
    pub(super) fn results(&self) -> &[&Buffer] {
        // SAFETY: the framework lends as many buffers as it says, none of them null.
        unsafe { lent(self.results.buffers.cast(), self.results.size) }
    }

    /// Numbers of an attribute; none if the attribute is absent.
    ///
    /// # Errors
    /// As [`numbers`](Self::numbers), for an attribute that is present.
    pub(super) fn optional_numbers(&self, name: &str) -> Result<Vec<i64>, String> {
        match self.numbers(name) {
            Err(text) if text == missing(name) => Ok(vec![]),
            read => read,
        }
    }

    /// Numbers of an attribute that is an array of integers.
    ///
    /// # Errors
    /// An attribute that is missing or has another type.
    pub(super) fn numbers(&self, name: &str) -> Result<Vec<i64>, String> {
        let attributes = &self.attributes;
        // SAFETY: the framework lends as many names, types and values as it says.
        let (names, types, values): (&[&Text], _, _) = unsafe {
            let count = attributes.size;
            (
                lent(attributes.names.cast(), count),
                lent(attributes.types, count),
                lent(attributes.values, count),
            )
        };
        // SAFETY: the framework lends a name's bytes for the time of the call.
        let is = |text: &&Text| unsafe { lent(text.bytes, text.len as i64) } == name.as_bytes();
        let at = names.iter().position(is).ok_or_else(|| missing(name))?;
        if types[at] != ARRAY {
            return Err(format!("the attribute {name} is of kind {}, no array", types[at]));
        }
        // SAFETY: an attribute of this kind is an array.
        let array = unsafe { &*values[at].cast::<Array>() };
        if array.dtype != S64 {
            return Err(format!("the attribute {name} is of type {}, not of int64", array.dtype));
        }
        // SAFETY: the array has as many numbers of 8 bytes as its size says, at any address.
        let number = |i: usize| unsafe { array.data.cast::<i64>().add(i).read_unaligned() };
        Ok((0..array.size).map(number).collect())
    }

    /// Stream on which the work must be queued.
    ///
    /// # Errors
    /// An error of the framework.
    pub(super) fn stream(&self) -> Result<i64, String> {
        let mut get = arguments!(StreamGet { context: self.context, stream: std::ptr::null_mut() });
        // SAFETY: the function's own struct.
        unsafe { self.said((self.api().stream_get)(&raw mut get))? };
        Ok(get.stream as i64)
    }

    /// Index of the call's device among those of its platform.
    ///
    /// # Errors
    /// A framework without this function, or an error of the framework.
    pub(super) fn ordinal(&self) -> Result<i32, String> {
        let api = self.api();
        // If the table ends before this function, other bytes are in its place.
        let has = api.struct_size >= std::mem::offset_of!(Api, ordinal_get) + size_of::<usize>();
        let function = has.then_some(()).and(api.ordinal_get).ok_or_else(|| {
            format!("this XLA tells no device's number: its table has {} bytes", api.struct_size)
        })?;
        let mut get = arguments!(OrdinalGet { context: self.context, ordinal: 0 });
        // SAFETY: the function's own struct.
        unsafe { self.said(function(&raw mut get))? };
        Ok(get.ordinal)
    }

    /// Device memory for this call, aligned to `alignment`, a power of two.
    ///
    /// # Errors
    /// An error of the framework.
    pub(super) fn scratch(&self, bytes: u64, alignment: usize) -> Result<(Scratch<'_>, *mut u8), String> {
        // Memory is aligned to 16 bytes at least; the extra bytes allow an address of the wanted alignment.
        let more = alignment.saturating_sub(MOST_ALIGNED);
        let bytes = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_add(more));
        let bytes = bytes.ok_or_else(|| format!("workspace of {bytes:?} bytes is beyond an address"))?;
        let mut allocate = arguments!(MemoryAllocate {
            context: self.context,
            size: bytes,
            alignment: alignment.min(MOST_ALIGNED),
            data: std::ptr::null_mut(),
        });
        // SAFETY: the function's own struct.
        unsafe { self.said((self.api().memory_allocate)(&raw mut allocate)) }
            .map_err(|text| format!("workspace of {bytes} bytes: {text}"))?;
        let scratch = Scratch { frame: self, data: allocate.data, bytes };
        let offset = allocate.data.addr().next_multiple_of(alignment) - allocate.data.addr();
        Ok((scratch, allocate.data.cast::<u8>().wrapping_add(offset)))
    }

    /// Makes an error that the framework reports to its user.
    pub(super) fn error(&self, text: &CStr) -> *mut XlaError {
        let mut create = arguments!(ErrorCreate { message: text.as_ptr(), code: INVALID_ARGUMENT });
        // SAFETY: the struct is this function's own argument, and the framework copies its text.
        unsafe { (self.api().error_create)(&raw mut create) }
    }

    /// Converts the framework's error, if there is one, to a text.
    ///
    /// # Safety
    /// `error` is null or an error that the caller owns.
    unsafe fn said(&self, error: *mut XlaError) -> Result<(), String> {
        if error.is_null() {
            return Ok(());
        }
        let mut text = arguments!(ErrorText { error: error, message: std::ptr::null(), code: 0 });
        let mut destroy = arguments!(ErrorDestroy { error: error });
        // SAFETY: an error is read, and then destroyed once; its text is a C string until then.
        unsafe {
            (self.api().error_text)(&raw mut text);
            let said = CStr::from_ptr(text.message).to_string_lossy().into_owned();
            (self.api().error_destroy)(&raw mut destroy);
            Err(said)
        }
    }
}

fn missing(name: &str) -> String {
    format!("the attribute {name} is missing")
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::mem::offset_of;
    use std::ptr;

    use super::*;

    /// Offsets and sizes equal those in the headers of jaxlib 0.10.2 and 0.11.2.
    #[test]
    fn structs_lie_as_the_header_has_them() {
        assert_eq!(size_of::<CallFrame>(), 176);
        assert_eq!(
            [
                offset_of!(CallFrame, arguments),
                offset_of!(CallFrame, results),
                offset_of!(CallFrame, attributes)
            ],
            [40, 80, 120]
        );
        assert_eq!([size_of::<Attributes>(), size_of::<Buffer>(), size_of::<Array>()], [48, 48, 24]);
        assert_eq!([offset_of!(Buffer, dims), offset_of!(Metadata, traits)], [40, 32]);
        assert_eq!(
            [size_of::<ErrorCreate>(), size_of::<ErrorText>(), size_of::<ErrorDestroy>()],
            [32, 40, 24]
        );
        assert_eq!(
            [size_of::<StreamGet>(), size_of::<OrdinalGet>(), offset_of!(OrdinalGet, ordinal)],
            [32, 32, 24]
        );
        assert_eq!([size_of::<MemoryAllocate>(), offset_of!(MemoryAllocate, data)], [48, 40]);
        assert_eq!([size_of::<MemoryFree>(), offset_of!(MemoryFree, data)], [40, 32]);
        assert_eq!(size_of::<Api>(), 192);
        assert_eq!([offset_of!(Api, error_create), offset_of!(Api, stream_get)], [48, 80]);
        assert_eq!([offset_of!(Api, memory_allocate), offset_of!(Api, memory_free)], [120, 128]);
        assert_eq!(offset_of!(Api, ordinal_get), 184);
    }

    thread_local! {
        /// Calls that the framework's test double received, in order.
        static ASKED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    fn asked(what: impl Into<String>) -> *mut XlaError {
        ASKED.with(|asked| asked.borrow_mut().push(what.into()));
        ptr::null_mut()
    }

    unsafe extern "C" fn create(args: *mut ErrorCreate) -> *mut XlaError {
        // SAFETY: the handler's own struct, with a C string.
        let text = unsafe { CStr::from_ptr((*args).message) };
        asked(text.to_string_lossy());
        ptr::with_exposed_provenance_mut(1)
    }

    unsafe extern "C" fn text(args: *mut ErrorText) {
        // SAFETY: the handler's own struct, with a C string.
        let args = unsafe { &mut *args };
        (args.message, args.code) = (c"no memory".as_ptr(), INVALID_ARGUMENT);
    }

    unsafe extern "C" fn destroy(_: *mut ErrorDestroy) {
        asked("destroy");
    }

    unsafe extern "C" fn stream(args: *mut StreamGet) -> *mut XlaError {
        // SAFETY: the handler's own struct, with a C string.
        unsafe { (*args).stream = ptr::with_exposed_provenance_mut(77) };
        ptr::null_mut()
    }

    unsafe extern "C" fn allocate(args: *mut MemoryAllocate) -> *mut XlaError {
        // SAFETY: the handler's own struct, with a C string.
        let args = unsafe { &mut *args };
        if args.size > 1 << 20 || args.alignment > 16 {
            return ptr::with_exposed_provenance_mut(1);
        }
        args.data = ptr::with_exposed_provenance_mut(4096 + 16);
        asked(format!("allocate {} by {}", args.size, args.alignment))
    }

    unsafe extern "C" fn free(args: *mut MemoryFree) -> *mut XlaError {
        // SAFETY: the handler's own struct, with a C string.
        let args = unsafe { &*args };
        asked(format!("free {} at {}", args.size, args.data as usize))
    }

    unsafe extern "C" fn ordinal(args: *mut OrdinalGet) -> *mut XlaError {
        // SAFETY: the handler's own struct, with a C string.
        unsafe { (*args).ordinal = 7 };
        ptr::null_mut()
    }

    fn api(bytes: usize) -> Api {
        let none = ptr::null();
        Api {
            struct_size: bytes,
            extension: ptr::null_mut(),
            version: ApiVersion { struct_size: 24, extension: ptr::null_mut(), major: 0, minor: 1 },
            internal: none,
            error_create: create,
            error_text: text,
            error_destroy: destroy,
            handler_register: none,
            stream_get: stream,
            type_register: none,
            context_get: none,
            state_set: none,
            state_get: none,
            memory_allocate: allocate,
            memory_free: free,
            threads_schedule: none,
            threads_count: none,
            future_create: none,
            future_available: none,
            future_error: none,
            run_id: none,
            ordinal_get: Some(ordinal),
        }
    }

    fn frame(api: &Api) -> CallFrame {
        // SAFETY: all fields are numbers or pointers, for which zero bits are valid and say that a field is absent.
        let mut frame: CallFrame = unsafe { std::mem::zeroed() };
        frame.api = api;
        frame
    }

    #[test]
    fn a_devices_call_has_its_stream_number_and_scratch_which_goes_back() {
        let api = api(size_of::<Api>());
        let frame = frame(&api);
        assert_eq!((frame.stream(), frame.ordinal()), (Ok(77), Ok(7)));
        let (scratch, address) = frame.scratch(1000, 256).unwrap();
        assert_eq!(address as usize, 4096 + 256);
        drop(scratch);
        let refused = frame.scratch(1 << 21, 256).err();
        assert_eq!(refused.as_deref(), Some("workspace of 2097392 bytes: no memory"));
        let seen = ASKED.with(RefCell::take);
        assert_eq!(seen, ["allocate 1240 by 16", "free 1240 at 4112", "destroy"]);
    }

    #[test]
    fn an_older_table_is_not_read_behind_its_end() {
        let api = api(size_of::<Api>() - 8);
        let refused = frame(&api).ordinal().err();
        assert_eq!(refused.as_deref(), Some("this XLA tells no device's number: its table has 184 bytes"));
    }

    #[test]
    fn a_handler_of_a_gpu_refuses_by_the_frameworks_error() {
        let api = api(size_of::<Api>());
        // SAFETY: a frame of this test's.
        let error = unsafe { crate::xla::fmha_xla_cuda(&raw const *Box::new(frame(&api))) };
        assert!(!error.is_null());
        assert_eq!(ASKED.with(RefCell::take), ["the attribute numbers is missing"]);
    }

    #[test]
    fn a_question_is_answered_by_no_newer_version_than_the_frameworks() {
        let api = api(size_of::<Api>());
        // SAFETY: numbers and pointers, of which all bits may be 0.
        let mut metadata: Metadata = unsafe { std::mem::zeroed() };
        let base = Extension { struct_size: 24, kind: METADATA, next: ptr::null_mut() };
        let mut extension = MetadataExtension { base, metadata: &raw mut metadata };
        let mut frame = frame(&api);
        frame.extension = (&raw mut extension).cast();
        // SAFETY: a frame of this test's.
        assert!(unsafe { frame.answered() });
        assert_eq!((metadata.version.major, metadata.version.minor, metadata.traits), (0, 1, 0));
        frame.api = ptr::null();
        // SAFETY: a frame of this test's.
        assert!(unsafe { frame.answered() });
        assert_eq!((metadata.version.major, metadata.version.minor), VERSION);
    }
}
