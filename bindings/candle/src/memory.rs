//! Candle's memory as the slices that a call takes: where a call's tensors lie, what it reads, what it writes.

use candle_core::{CpuStorage, CudaStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};
use fmha::{Backend, DevSlice, DevSliceMut, Device, ElemType, Strides};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{
    CudaStorageSlice,
    cudarc::driver::{DevicePtr, DevicePtrMut, SyncOnDrop},
};

/// The storage behind a tensor, borrowed.
#[derive(Clone, Copy)]
pub(crate) enum Stored<'a> {
    Cpu(&'a CpuStorage),
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "its tensors are refused without the feature")
    )]
    Cuda(&'a CudaStorage),
}

impl<'a> Stored<'a> {
    pub(crate) fn of(field: &'static str, storage: &'a Storage) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Ok(Self::Cpu(storage)),
            Storage::Cuda(storage) => Ok(Self::Cuda(storage)),
            Storage::Metal(_) => bail!("{field} lies on a Metal device, for which fmha has no kernels"),
        }
    }

    /// Device and stream on which the call runs.
    pub(crate) fn place(self) -> Result<Place> {
        match self {
            Self::Cpu(_) => Ok(Place { device: open(Backend::Cpu)?, candle: candle_core::Device::Cpu }),
            #[cfg(feature = "cuda")]
            Self::Cuda(storage) => {
                let candle = candle_core::Device::Cuda(storage.device.clone());
                let candle_core::DeviceLocation::Cuda { gpu_id } = candle.location() else {
                    bail!("candle calls its CUDA device {:?}", candle.location());
                };
                let backend = Backend::Cuda { ordinal: gpu_id as u32, emulate: None };
                Ok(Place { device: open(backend)?, candle })
            }
            #[cfg(not(feature = "cuda"))]
            Self::Cuda(_) => bail!("q lies on a CUDA device: build fmha-candle with its feature `cuda`"),
        }
    }
}

fn open(backend: Backend) -> Result<Device> {
    backend.open().map_err(candle_core::Error::wrap)
}

/// The device of a call, as candle and as fmha represent it.
pub(crate) struct Place {
    pub(crate) device: Device,
    pub(crate) candle: candle_core::Device,
}

impl Place {
    pub(crate) fn is_cpu(&self) -> bool {
        self.candle.is_cpu()
    }

    /// The stream on which candle queues its own work on this device, so that a call runs in order with that work.
    pub(crate) fn stream(&self) -> fmha::Stream {
        match &self.candle {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(device) => {
                let handle = device.cuda_stream().cu_stream() as u64;
                // SAFETY: candle and fmha compute in the device's primary context, and candle keeps its
                // stream as long as the tensors of the call, which the caller holds.
                unsafe { fmha::Stream::from_raw(&self.device, handle) }
            }
            _ => self.device.default_stream(),
        }
    }

    /// New memory: zeroed, or on a GPU left uninitialised if `written_whole`.
    pub(crate) fn memory(
        &self,
        shape: impl Into<Shape>,
        dtype: DType,
        #[cfg_attr(
            not(feature = "cuda"),
            expect(unused_variables, reason = "zeros of the host are for free")
        )]
        written_whole: bool,
    ) -> Result<Output> {
        let shape = shape.into();
        let storage = match &self.candle {
            candle_core::Device::Cpu => {
                let count = shape.elem_count();
                Storage::Cpu(match dtype {
                    DType::U8 => CpuStorage::U8(vec![0; count]),
                    DType::F32 => CpuStorage::F32(vec![0.0; count]),
                    DType::F16 => CpuStorage::F16(vec![half::f16::ZERO; count]),
                    DType::BF16 => CpuStorage::BF16(vec![half::bf16::ZERO; count]),
                    other => bail!("fmha writes no {}", other.as_str()),
                })
            }
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(device) => {
                use candle_core::backend::BackendDevice;
                Storage::Cuda(if written_whole {
                    // SAFETY: nobody reads it before the call has written it.
                    unsafe { device.alloc_uninit(&shape, dtype)? }
                } else {
                    device.zeros_impl(&shape, dtype)?
                })
            }
            _ => bail!("fmha has no kernels for {:?}", self.candle.location()),
        };
        #[cfg(feature = "cuda")]
        let stream = self.candle.as_cuda_device().ok().map(|device| device.cuda_stream());
        Ok(Output {
            storage,
            shape,
            dtype,
            #[cfg(feature = "cuda")]
            stream,
        })
    }
}

/// A tensor that a call reads.
pub(crate) struct Input<'a> {
    pub(crate) field: &'static str,
    pub(crate) dtype: DType,
    layout: &'a Layout,
    slice: DevSlice<'a>,
    /// When dropped, tells candle that work on the stream reads the memory.
    #[cfg(feature = "cuda")]
    _in_use: Option<SyncOnDrop<'a>>,
}

/// An extent, of axis `axis` of the tensor `field`.
pub(crate) fn extent(field: &str, axis: &str, extent: usize) -> Result<u32> {
    match u32::try_from(extent) {
        Ok(extent) => Ok(extent),
        Err(_) => bail!("{field} has {extent} along {axis}, more than 2^32 - 1"),
    }
}

impl<'a> Input<'a> {
    pub(crate) fn new(
        field: &'static str,
        stored: Stored<'a>,
        layout: &'a Layout,
        place: &'a Place,
    ) -> Result<Self> {
        let start = layout.start_offset();
        match (stored, &place.candle) {
            (Stored::Cpu(storage), candle_core::Device::Cpu) => {
                let (dtype, slice) = match storage {
                    CpuStorage::F32(elems) => (DType::F32, elems.get(start..).map(DevSlice::host)),
                    CpuStorage::F16(elems) => (DType::F16, elems.get(start..).map(DevSlice::host)),
                    CpuStorage::BF16(elems) => (DType::BF16, elems.get(start..).map(DevSlice::host)),
                    // Offsets and page numbers, which the library reads as i32.
                    CpuStorage::U32(elems) => (
                        DType::U32,
                        elems.get(start..).map(|elems| DevSlice::host(elems).typed(ElemType::I32)),
                    ),
                    CpuStorage::I32(elems) => (DType::I32, elems.get(start..).map(DevSlice::host)),
                    // Whole numbers and bools, which only a function captures.
                    CpuStorage::I64(elems) => (DType::I64, elems.get(start..).map(bytes)),
                    CpuStorage::U8(elems) => (DType::U8, elems.get(start..).map(bytes)),
                    other => {
                        bail!("{field} is {}, which fmha does not take from candle", dtype_of(other).as_str())
                    }
                };
                let Some(slice) = slice else {
                    bail!("{field} begins at element {start}, beyond its storage");
                };
                Ok(Self {
                    field,
                    dtype,
                    layout,
                    slice,
                    #[cfg(feature = "cuda")]
                    _in_use: None,
                })
            }
            #[cfg(feature = "cuda")]
            (Stored::Cuda(storage), candle_core::Device::Cuda(device))
                if storage.device.id() == device.id() =>
            {
                macro_rules! part {
                    ($elems:expr, $dtype:expr, $elem:expr) => {{
                        let elems = $elems;
                        if start > elems.len() {
                            bail!("{field} begins at element {start}, beyond its storage");
                        }
                        let (ptr, in_use) = elems.device_ptr(elems.stream());
                        let size = $dtype.size_in_bytes();
                        let bytes = ((elems.len() - start) * size) as u64;
                        let ptr = (ptr as usize + start * size) as *const u8;
                        // SAFETY: candle's memory, borrowed for 'a; `in_use` orders what frees it behind the call.
                        let slice = unsafe { DevSlice::from_raw(fmha::MemorySpace::Device, ptr, bytes, $elem) };
                        Ok(Self { field, dtype: $dtype, layout, slice, _in_use: Some(in_use) })
                    }};
                }
                match &storage.slice {
                    CudaStorageSlice::F32(elems) => part!(elems, DType::F32, fmha::DType::F32),
                    CudaStorageSlice::F16(elems) => part!(elems, DType::F16, fmha::DType::F16),
                    CudaStorageSlice::BF16(elems) => part!(elems, DType::BF16, fmha::DType::Bf16),
                    CudaStorageSlice::U32(elems) => part!(elems, DType::U32, ElemType::I32),
                    CudaStorageSlice::I32(elems) => part!(elems, DType::I32, ElemType::I32),
                    CudaStorageSlice::I64(elems) => part!(elems, DType::I64, ElemType::Bytes),
                    CudaStorageSlice::U8(elems) => part!(elems, DType::U8, ElemType::Bytes),
                    _ => bail!("{field} has a type that fmha does not take from candle"),
                }
            }
            _ => bail!("{field} does not lie on q's device, {:?}", place.candle.location()),
        }
    }

    pub(crate) fn slice(&self) -> DevSlice<'a> {
        self.slice
    }

    pub(crate) fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    /// The strides of `[batch, seq, head, dim]`, or of a packed tensor's `[seq, head, dim]`.
    pub(crate) fn strides(&self) -> Result<Strides> {
        let strides: Vec<i64> = self.layout.stride().iter().map(|&stride| stride as i64).collect();
        match strides[..] {
            [batch, seq, head, dim] => Ok(Strides { batch, seq, head, dim }),
            [seq, head, dim] => Ok(Strides { batch: 0, seq, head, dim }),
            _ => bail!("{} has {} axes, where 3 or 4 are wanted", self.field, strides.len()),
        }
    }

    /// The tensor's type as attention names it.
    pub(crate) fn float(&self) -> Result<fmha::DType> {
        match self.dtype {
            DType::F32 => Ok(fmha::DType::F32),
            DType::F16 => Ok(fmha::DType::F16),
            DType::BF16 => Ok(fmha::DType::Bf16),
            other => bail!("{} is {}, where f32, f16 or bf16 is wanted", self.field, other.as_str()),
        }
    }
}

/// Elements that are read as their bytes.
fn bytes<T>(elems: &[T]) -> DevSlice<'_> {
    // SAFETY: host memory that is borrowed as long, of so many bytes.
    unsafe {
        let size = size_of_val(elems) as u64;
        DevSlice::from_raw(fmha::MemorySpace::Host, elems.as_ptr().cast(), size, ElemType::Bytes)
    }
}

fn dtype_of(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

/// A contiguous output tensor of a call, which nothing else refers to yet.
pub(crate) struct Output {
    storage: Storage,
    shape: Shape,
    dtype: DType,
    /// The CUDA stream that orders accesses to the memory.
    #[cfg(feature = "cuda")]
    stream: Option<std::sync::Arc<candle_core::cuda_backend::cudarc::driver::CudaStream>>,
}

/// An [`Output`] while a call writes it.
pub(crate) struct Written<'a> {
    slice: Option<DevSliceMut<'a>>,
    #[cfg(feature = "cuda")]
    _in_use: Option<SyncOnDrop<'a>>,
}

impl<'a> Written<'a> {
    /// Returns the output's memory; may be called once.
    pub(crate) fn slice(&mut self) -> Result<DevSliceMut<'a>> {
        self.slice.take().ok_or_else(|| candle_core::Error::msg("an output is written by one call"))
    }
}

impl Output {
    /// Bytes of the output.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.elem_count() * self.dtype.size_in_bytes()
    }

    pub(crate) fn write(&mut self) -> Result<Written<'_>> {
        let unwritten = |dtype: DType| candle_core::Error::msg(format!("fmha writes no {}", dtype.as_str()));
        #[cfg(feature = "cuda")]
        let bytes = self.bytes() as u64;
        match &mut self.storage {
            Storage::Cpu(storage) => {
                let slice = match storage {
                    CpuStorage::U8(elems) => DevSliceMut::host(elems),
                    CpuStorage::F32(elems) => DevSliceMut::host(elems),
                    CpuStorage::F16(elems) => DevSliceMut::host(elems),
                    CpuStorage::BF16(elems) => DevSliceMut::host(elems),
                    _ => return Err(unwritten(self.dtype)),
                };
                Ok(Written {
                    slice: Some(slice),
                    #[cfg(feature = "cuda")]
                    _in_use: None,
                })
            }
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) => {
                let Some(stream) = &self.stream else { return Err(unwritten(self.dtype)) };
                macro_rules! whole {
                    ($elems:expr, $elem:expr) => {{
                        let (ptr, in_use) = $elems.device_ptr_mut(stream);
                        // SAFETY: memory that this output alone has; `in_use` orders what frees it behind the call.
                        let slice =
                            unsafe { DevSliceMut::from_raw(fmha::MemorySpace::Device, ptr as usize as *mut u8, bytes, $elem) };
                        (slice, in_use)
                    }};
                }
                let (slice, in_use) = match &mut storage.slice {
                    CudaStorageSlice::U8(elems) => whole!(elems, ElemType::Bytes),
                    CudaStorageSlice::F32(elems) => whole!(elems, fmha::DType::F32),
                    CudaStorageSlice::F16(elems) => whole!(elems, fmha::DType::F16),
                    CudaStorageSlice::BF16(elems) => whole!(elems, fmha::DType::Bf16),
                    _ => return Err(unwritten(self.dtype)),
                };
                Ok(Written { slice: Some(slice), _in_use: Some(in_use) })
            }
            _ => Err(unwritten(self.dtype)),
        }
    }

    /// The output as a candle custom op returns it.
    pub(crate) fn into_storage(self) -> (Storage, Shape) {
        (self.storage, self.shape)
    }

    /// The output as a tensor without a backward operation.
    pub(crate) fn into_tensor(self) -> Tensor {
        Tensor::from_storage(self.storage, self.shape, candle_core::op::BackpropOp::none(), false)
    }
}
