//! PyTorch's stable C interface (`torch/csrc/stable/c/shim.h`, `torch/csrc/inductor/aoti_torch/c/shim.h`), found in the
//! process that has imported torch: nothing is linked, so one library serves every torch from 2.10 on.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::ffi::{CString, c_char, c_void};
use std::ptr;

#[cfg(unix)]
use libloading::os::unix::Library;
#[cfg(windows)]
use libloading::os::windows::Library;

use super::operators::Operator;
use crate::call::Wrong;
use crate::tensor::{BOOL, Device, F64, I32, I64, MAX_DIMS, OTHER, Tensor, U8, U32, element_bytes};

/// Torch's `StableIValue`: a tensor's handle, an integer, or the bits of an f64. For an optional it is 0 or the address
/// of such a value.
pub(super) type Value = u64;

/// Kernel of an operator: it reads its arguments from the stack and writes its results to the start of the stack.
pub(super) type Kernel = unsafe extern "C-unwind" fn(*mut Value, u64, u64);

type Handle = *mut c_void;
type Code = i32;

/// PyTorch version that is passed where the interface wants one: the first with every function used here.
const VERSION_2_10: u64 = 2 << 56 | 10 << 48;

/// Declares the C functions that are looked up by name.
macro_rules! shims {
    ($($name:ident: $type:ty;)*) => {
        /// Pointers to PyTorch's C functions; each has the name that PyTorch's headers give it.
        #[allow(non_snake_case)]
        pub(super) struct Shims {
            $($name: $type,)*
            delete_value: Delete,
            current_stream: Option<unsafe extern "C" fn(i32, *mut *mut c_void) -> Code>,
            dtypes: [(i32, i32); 13],
            device_cpu: i32,
            device_cuda: i32,
            is_rocm: bool,
        }

        impl Shims {
            fn find(library: &Library) -> Result<($($type,)*), Wrong> {
                // SAFETY: the types are those of PyTorch's headers.
                unsafe { Ok(($(symbol::<$type>(library, stringify!($name))?,)*)) }
            }

            fn assemble(($($name,)*): ($($type,)*), rest: Rest) -> Self {
                let Rest { delete_value, current_stream, dtypes, device_cpu, device_cuda, is_rocm } = rest;
                Self { $($name,)* delete_value, current_stream, dtypes, device_cpu, device_cuda, is_rocm }
            }
        }
    };
}

/// Function that frees an optional's cell: the C interface's from torch 2.13 on, and C++'s `operator delete` before.
#[derive(Clone, Copy)]
enum Delete {
    Interface(unsafe extern "C" fn(*mut Value) -> Code),
    Operator(unsafe extern "C" fn(*mut c_void)),
}

struct Rest {
    delete_value: Delete,
    current_stream: Option<unsafe extern "C" fn(i32, *mut *mut c_void) -> Code>,
    dtypes: [(i32, i32); 13],
    device_cpu: i32,
    device_cuda: i32,
    is_rocm: bool,
}

shims! {
    aoti_torch_library_init_fragment: unsafe extern "C" fn(*const c_char, *const c_char, u32, *mut Handle) -> Code;
    aoti_torch_library_init_impl: unsafe extern "C" fn(*const c_char, *const c_char, *const c_char, u32, *mut Handle) -> Code;
    aoti_torch_library_def: unsafe extern "C" fn(Handle, *const c_char) -> Code;
    torch_library_impl: unsafe extern "C" fn(Handle, *const c_char, Kernel, u64) -> Code;
    aoti_torch_get_data_ptr: unsafe extern "C" fn(Handle, *mut *mut c_void) -> Code;
    aoti_torch_get_dim: unsafe extern "C" fn(Handle, *mut i64) -> Code;
    aoti_torch_get_sizes: unsafe extern "C" fn(Handle, *mut *const i64) -> Code;
    aoti_torch_get_strides: unsafe extern "C" fn(Handle, *mut *const i64) -> Code;
    aoti_torch_get_storage_size: unsafe extern "C" fn(Handle, *mut i64) -> Code;
    aoti_torch_get_storage_offset: unsafe extern "C" fn(Handle, *mut i64) -> Code;
    aoti_torch_get_dtype: unsafe extern "C" fn(Handle, *mut i32) -> Code;
    aoti_torch_get_device_type: unsafe extern "C" fn(Handle, *mut i32) -> Code;
    aoti_torch_get_device_index: unsafe extern "C" fn(Handle, *mut i32) -> Code;
    aoti_torch_delete_tensor_object: unsafe extern "C" fn(Handle) -> Code;
    aoti_torch_empty_strided: unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Code;
    aoti_torch_zero_: unsafe extern "C" fn(Handle) -> Code;
    torch_new_list_reserve_size: unsafe extern "C" fn(usize, *mut Handle) -> Code;
    torch_list_size: unsafe extern "C" fn(Handle, *mut usize) -> Code;
    torch_list_get_item: unsafe extern "C" fn(Handle, usize, *mut Value) -> Code;
    torch_list_push_back: unsafe extern "C" fn(Handle, Value) -> Code;
    torch_delete_list: unsafe extern "C" fn(Handle) -> Code;
    torch_string_length: unsafe extern "C" fn(Handle, *mut usize) -> Code;
    torch_string_c_str: unsafe extern "C" fn(Handle, *mut *const c_char) -> Code;
    torch_delete_string: unsafe extern "C" fn(Handle) -> Code;
    aoti_torch_check: unsafe extern "C-unwind" fn(bool, *const c_char, *const c_char, u32, *const c_char);
}

/// # Safety
/// `T` is the type of the function called `name`.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, Wrong> {
    // SAFETY: the caller promises that `T` is the function's type.
    unsafe { library.get::<T>(name.as_bytes()) }
        .map(|symbol| *symbol)
        .map_err(|error| format!("torch lacks {name}, which torch 2.10 has: {error}"))
}

/// Opens a library that the process has loaded.
#[cfg(unix)]
fn loaded(name: &str) -> Result<Library, Wrong> {
    use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};
    /// `dlopen` finds only a library that is loaded already.
    const RTLD_NOLOAD: i32 = if cfg!(target_vendor = "apple") { 0x10 } else { 4 };
    // SAFETY: the library is loaded already, so no initialiser runs.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) }
        .map_err(|error| error.to_string())
}

/// A library that the process has loaded.
#[cfg(windows)]
fn loaded(name: &str) -> Result<Library, Wrong> {
    Library::open_already_loaded(name).map_err(|error| error.to_string())
}

/// File name of one of torch's libraries: `libtorch_cpu.so`, `libtorch_cpu.dylib` or `torch_cpu.dll`.
fn file_of(library: &str) -> String {
    format!("{DLL_PREFIX}{library}{DLL_SUFFIX}")
}

impl Shims {
    /// Finds the functions in the loaded libraries.
    ///
    /// # Errors
    /// A torch that was not imported, or is too old.
    pub(super) fn new() -> Result<Self, Wrong> {
        let library =
            loaded(&file_of("torch_cpu")).map_err(|error| format!("torch is not imported: {error}"))?;
        let functions = Self::find(&library)?;
        type Constant = unsafe extern "C" fn() -> i32;
        // SAFETY: functions without arguments that give a number.
        let constant = |name: &str| unsafe { symbol::<Constant>(&library, name).map(|function| function()) };
        let dtypes = [
            ("aoti_torch_dtype_float16", fmha_c::FMHA_F16),
            ("aoti_torch_dtype_bfloat16", fmha_c::FMHA_BF16),
            ("aoti_torch_dtype_float32", fmha_c::FMHA_F32),
            ("aoti_torch_dtype_float8_e4m3fn", fmha_c::FMHA_E4M3FN),
            ("aoti_torch_dtype_float8_e5m2", fmha_c::FMHA_E5M2),
            ("aoti_torch_dtype_float8_e4m3fnuz", fmha_c::FMHA_E4M3FNUZ),
            ("aoti_torch_dtype_float8_e5m2fnuz", fmha_c::FMHA_E5M2FNUZ),
            ("aoti_torch_dtype_int32", I32),
            ("aoti_torch_dtype_uint8", U8),
            ("aoti_torch_dtype_uint32", U32),
            ("aoti_torch_dtype_float64", F64),
            ("aoti_torch_dtype_int64", I64),
            ("aoti_torch_dtype_bool", BOOL),
        ];
        let mut codes = [(0, 0); 13];
        for (to, (name, ours)) in codes.iter_mut().zip(dtypes) {
            *to = (constant(name)?, ours);
        }
        // SAFETY: the types are those of PyTorch's headers.
        let delete_value = unsafe {
            match symbol(&library, "torch_delete_stable_ivalue") {
                Ok(delete) => Delete::Interface(delete),
                Err(_) => Delete::Operator(symbol(&loaded("libstdc++.so.6")?, "_ZdlPv")?),
            }
        };
        let gpu = ["torch_cuda", "torch_hip"]
            .into_iter()
            .find_map(|name| Some((name, loaded(&file_of(name)).ok()?)));
        // SAFETY: the types are those of PyTorch's headers.
        let current_stream = gpu
            .as_ref()
            .and_then(|(_, library)| unsafe { symbol(library, "aoti_torch_get_current_cuda_stream").ok() });
        let rest = Rest {
            delete_value,
            current_stream,
            dtypes: codes,
            device_cpu: constant("aoti_torch_device_type_cpu")?,
            device_cuda: constant("aoti_torch_device_type_cuda")?,
            is_rocm: gpu.is_some_and(|(name, _)| name == "torch_hip"),
        };
        // The library stays as long as the process: torch cannot be unloaded.
        std::mem::forget(library);
        Ok(Self::assemble(functions, rest))
    }

    /// Defines operators, each with a kernel for the CPU and one for GPUs.
    ///
    /// # Errors
    /// The operator that torch refused.
    pub(super) fn register(&self, operators: &[Operator]) -> Result<(), Wrong> {
        let ok = |code: Code, what: &str| match code {
            0 => Ok(()),
            code => Err(format!("torch did not take {what} (code {code})")),
        };
        let c_text = |text: &str| CString::new(text).map_err(|error| error.to_string());
        let (namespace, file) = (c"fmha", c"fmha");
        let mut library = ptr::null_mut();
        // SAFETY: torch copies the strings. The library's handle must live as long as its operators, so it is never
        // freed.
        unsafe {
            let code = (self.aoti_torch_library_init_fragment)(
                namespace.as_ptr(),
                file.as_ptr(),
                0,
                &raw mut library,
            );
            ok(code, "the library fmha")?;
            for operator in operators {
                let schema = operator.schema();
                ok((self.aoti_torch_library_def)(library, c_text(&schema)?.as_ptr()), &schema)?;
            }
            for key in [c"CPU", c"CUDA"] {
                let code = (self.aoti_torch_library_init_impl)(
                    namespace.as_ptr(),
                    key.as_ptr(),
                    file.as_ptr(),
                    0,
                    &raw mut library,
                );
                ok(code, "the library fmha")?;
                for operator in operators {
                    let name = c_text(operator.name)?;
                    let code =
                        (self.torch_library_impl)(library, name.as_ptr(), operator.kernel, VERSION_2_10);
                    ok(code, operator.name)?;
                }
            }
        }
        Ok(())
    }

    /// Raises `RuntimeError` in Python with a C string. A C++ exception leaves this function, so no frame that it
    /// passes may have anything to drop.
    #[inline]
    pub(super) fn raise(&self, text: *const c_char) {
        // SAFETY: strings that outlive the call: torch copies them into its exception.
        unsafe { (self.aoti_torch_check)(false, c"fmha".as_ptr(), c"fmha".as_ptr(), 0, text) }
    }

    /// Stream of a device on which work must be queued.
    ///
    /// # Errors
    /// An error of torch.
    pub(super) fn stream(&self, device: Device) -> Result<i64, Wrong> {
        if device.kind == 0 {
            return Ok(0);
        }
        let current = self
            .current_stream
            .ok_or("this torch tells no stream: it has no aoti_torch_get_current_cuda_stream")?;
        let mut stream = ptr::null_mut();
        // SAFETY: the type is that of the header.
        match unsafe { current(device.index, &raw mut stream) } {
            0 => Ok(stream as i64),
            code => Err(format!("aoti_torch_get_current_cuda_stream failed with {code}")),
        }
    }

    /// Torch's code for one of this library's element types.
    fn their_dtype(&self, ours: i32) -> i32 {
        self.dtypes.iter().find(|&&(_, own)| own == ours).map_or(-1, |&(theirs, _)| theirs)
    }

    /// The tensor of an argument `Tensor`.
    ///
    /// # Safety
    /// `word` is such an argument, owned by this call.
    pub(super) unsafe fn own(&'static self, word: Value) -> Owned {
        Owned { shims: self, handle: ptr::with_exposed_provenance_mut(word as usize) }
    }

    /// The tensor of an argument `Tensor?`.
    ///
    /// # Safety
    /// As [`own`](Self::own).
    pub(super) unsafe fn own_optional(&'static self, word: Value) -> Option<Owned> {
        // SAFETY: the caller keeps the contract of `own_optional`.
        unsafe { self.optional(word).map(|word| self.own(word)) }
    }

    /// Value of an optional argument. `word` is 0 or the address of a cell with the value, which is freed.
    ///
    /// # Safety
    /// `word` is such an argument, owned by this call.
    pub(super) unsafe fn optional(&'static self, word: Value) -> Option<Value> {
        let cell = ptr::with_exposed_provenance_mut::<Value>(word as usize);
        if cell.is_null() {
            return None;
        }
        // SAFETY: the caller's promise: a cell that is this call's, and given back once.
        unsafe {
            let word = *cell;
            match self.delete_value {
                Delete::Interface(delete) => {
                    delete(cell);
                }
                Delete::Operator(delete) => delete(cell.cast()),
            }
            Some(word)
        }
    }

    /// Elements of a list argument: bits of numbers, or handles of tensors, which this call then owns.
    ///
    /// # Errors
    /// An error of torch.
    ///
    /// # Safety
    /// `word` is a list, owned by this call.
    pub(super) unsafe fn listed(&self, word: Value) -> Result<Vec<Value>, Wrong> {
        let list = ptr::with_exposed_provenance_mut(word as usize);
        let mut count = 0;
        // SAFETY: the list is live and freed once; its elements pass to the caller.
        unsafe {
            let mut code = (self.torch_list_size)(list, &raw mut count);
            let mut items = vec![0; count];
            for (at, item) in items.iter_mut().enumerate() {
                code |= (self.torch_list_get_item)(list, at, item);
            }
            code |= (self.torch_delete_list)(list);
            if code == 0 { Ok(items) } else { Err("a list that torch does not read".to_owned()) }
        }
    }

    /// Text of a string argument.
    ///
    /// # Errors
    /// An error of torch, or a text that contains a zero byte.
    ///
    /// # Safety
    /// `word` is a string, owned by this call.
    pub(super) unsafe fn text(&self, word: Value) -> Result<CString, Wrong> {
        let string = ptr::with_exposed_provenance_mut(word as usize);
        let (mut length, mut data) = (0, ptr::null());
        // SAFETY: a live string, which is copied before it goes back once.
        unsafe {
            let code = (self.torch_string_length)(string, &raw mut length)
                | (self.torch_string_c_str)(string, &raw mut data);
            let bytes = if code == 0 && !data.is_null() && length > 0 {
                std::slice::from_raw_parts(data.cast::<u8>(), length).to_vec()
            } else {
                vec![]
            };
            if code | (self.torch_delete_string)(string) != 0 {
                return Err("a text that torch does not read".to_owned());
            }
            CString::new(bytes).map_err(|error| error.to_string())
        }
    }

    /// Makes a list of tensors as a result.
    ///
    /// # Errors
    /// An error of torch.
    pub(super) fn list(&self, tensors: impl ExactSizeIterator<Item = Owned>) -> Result<Value, Wrong> {
        let mut list = ptr::null_mut();
        // SAFETY: the list is new and takes each handle over; who takes the list takes its handles.
        unsafe {
            let mut code = (self.torch_new_list_reserve_size)(tensors.len(), &raw mut list);
            for tensor in tensors {
                if code == 0 {
                    code = (self.torch_list_push_back)(list, tensor.into_value());
                }
            }
            if code == 0 { Ok(list as Value) } else { Err("torch makes no list of results".to_owned()) }
        }
    }

    /// Describes the tensor behind a handle. `name` is the tensor's name in errors.
    fn describe(&self, name: &str, handle: Handle) -> Result<Tensor, Wrong> {
        let (mut dim, mut dtype, mut kind, mut index) = (0i64, 0i32, 0i32, 0i32);
        let (mut storage, mut offset) = (0i64, 0i64);
        let (mut sizes, mut strides) = (ptr::null(), ptr::null());
        let mut data = ptr::null_mut();
        // SAFETY: a live handle; each function writes one number.
        let codes = unsafe {
            [
                (self.aoti_torch_get_dim)(handle, &raw mut dim),
                (self.aoti_torch_get_dtype)(handle, &raw mut dtype),
                (self.aoti_torch_get_device_type)(handle, &raw mut kind),
                (self.aoti_torch_get_device_index)(handle, &raw mut index),
                (self.aoti_torch_get_sizes)(handle, &raw mut sizes),
                (self.aoti_torch_get_strides)(handle, &raw mut strides),
                (self.aoti_torch_get_data_ptr)(handle, &raw mut data),
                (self.aoti_torch_get_storage_size)(handle, &raw mut storage),
                (self.aoti_torch_get_storage_offset)(handle, &raw mut offset),
            ]
        };
        if codes != [0; 9] {
            return Err(format!("{name} is missing, or a tensor that torch does not describe"));
        }
        let num_dims = usize::try_from(dim).unwrap_or(usize::MAX);
        if num_dims > MAX_DIMS {
            return Err(format!("{name} has {dim} axes, more than {MAX_DIMS}"));
        }
        let mut tensor = Tensor { data, num_dims: dim as i32, ..Tensor::ABSENT };
        // SAFETY: torch lends as many numbers as there are axes while the handle lives.
        unsafe {
            for i in 0..num_dims {
                (tensor.sizes[i], tensor.strides[i]) = (*sizes.add(i), *strides.add(i));
            }
        }
        tensor.dtype =
            self.dtypes.iter().find(|&&(theirs, _)| theirs == dtype).map_or(OTHER, |&(_, ours)| ours);
        // The tensor's memory may have been freed or shrunk after the tensor was made.
        let spanned =
            tensor.spanned_elems().saturating_add(offset).saturating_mul(element_bytes(tensor.dtype));
        if spanned > storage && !tensor.shape().contains(&0) {
            return Err(format!(
                "{name}: its storage has {storage} bytes, fewer than the {spanned} that it spans"
            ));
        }
        tensor.device = if kind == self.device_cpu {
            Device { kind: 0, index: 0 }
        } else if kind == self.device_cuda {
            Device { kind: if self.is_rocm { 2 } else { 1 }, index }
        } else {
            return Err(format!("{name} is on a device of kind {kind}, neither the CPU nor a GPU"));
        };
        Ok(tensor)
    }

    /// Allocates a tensor with torch's allocator; its contents are undefined.
    ///
    /// # Errors
    /// An error of torch.
    pub(super) fn empty(&'static self, sizes: &[i64], dtype: i32, device: Device) -> Result<Owned, Wrong> {
        let strides = Tensor::described(sizes, dtype, device).strides;
        let kind = if device.kind == 0 { self.device_cpu } else { self.device_cuda };
        let mut handle = ptr::null_mut();
        // SAFETY: as many sizes and strides as axes.
        let code = unsafe {
            (self.aoti_torch_empty_strided)(
                sizes.len() as i64,
                sizes.as_ptr(),
                strides.as_ptr(),
                self.their_dtype(dtype),
                kind,
                device.index,
                &raw mut handle,
            )
        };
        if code != 0 {
            return Err(format!("torch has no memory for {sizes:?} of {}", crate::tensor::dtype_name(dtype)));
        }
        Ok(Owned { shims: self, handle })
    }
}

impl Owned {
    /// Fills the tensor with zeros, queued on the current stream.
    ///
    /// # Errors
    /// An error of torch.
    pub(super) fn clear(&self) -> Result<(), Wrong> {
        // SAFETY: a tensor that this call made.
        match unsafe { (self.shims.aoti_torch_zero_)(self.handle) } {
            0 => Ok(()),
            _ => Err("torch does not put zeros into it".to_owned()),
        }
    }
}

/// Owned handle of a torch tensor, released when dropped.
pub(super) struct Owned {
    shims: &'static Shims,
    handle: Handle,
}

impl Owned {
    pub(super) fn describe(&self, name: &str) -> Result<Tensor, Wrong> {
        self.shims.describe(name, self.handle)
    }

    /// Passes the handle to the caller as a stack value.
    pub(super) fn into_value(self) -> Value {
        let handle = self.handle;
        std::mem::forget(self);
        handle as Value
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: owned, and dropped once.
        unsafe { (self.shims.aoti_torch_delete_tensor_object)(self.handle) };
    }
}
