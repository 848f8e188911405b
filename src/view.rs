//! Tensor as a value: its address, type, shape and strides.

use bytemuck::AnyBitPattern;
use fmha_core::{
    DType, DevSlice, DevSliceMut, Elem, ElemType, MemorySpace, ProblemError, Shape, Strides, ValidFwd,
};
use half::{bf16, f16};

/// A Rust type that a tensor's elements can have: `f32`, `f16`, `bf16`.
pub trait Element: Elem + AnyBitPattern + Default + sealed::Sealed {
    /// [`DType`] of the element.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! element {
    ($($elem:ty = $dtype:ident),*) => {$(
        impl sealed::Sealed for $elem {}
        impl Element for $elem {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
element!(f32 = F32, f16 = F16, bf16 = Bf16);

/// A borrowed tensor `[batch, seq, head, dim]` that a call reads, in host or device memory.
///
/// The fields are what ndarray, candle, DLPack and torch give of a tensor: a pointer, a type, a shape, and
/// strides in elements. The axes are logical and keep this order, whatever the order in memory: a tensor
/// stored b·h·s·d has [`Strides::bhsd`]. Safe functions make the view from host slices:
///
/// ```
/// use fmha::{Attention, MaskSpec, Shape, Strides, TensorView, TensorViewMut};
///
/// // Q, K and V of one projection: [batch, seq, 3, head, dim] in one buffer.
/// let (shape, qkv) = (Shape { batch: 2, seq: 5, head: 4, dim: 16 }, vec![0.5f32; 2 * 5 * 3 * 4 * 16]);
/// let strides = Strides { batch: 5 * 3 * 4 * 16, seq: 3 * 4 * 16, head: 16, dim: 1 };
/// let [q, k, v] = [0, 1, 2].map(|i| TensorView::host_strided(&qkv[i * 4 * 16..], shape, strides));
///
/// // O stored [batch, head, seq, dim].
/// let mut o = vec![0f32; 2 * 5 * 4 * 16];
/// let o_view = TensorViewMut::host_strided(&mut o, shape, Strides::bhsd(shape));
/// let options = Attention::of(&q, &k, &v).mask(MaskSpec::CAUSAL).allow_fallback(true); // f32 on a GPU
/// let lse = fmha::attention_into(&q, &k, &v, o_view, &options)?;
/// assert!(lse.len() == 2 * 4 * 5 && o.iter().all(|&o| (o - 0.5).abs() < 1e-6));
/// # Ok::<(), fmha::Error>(())
/// ```
///
/// From a pointer of another library ([`from_raw`](Self::from_raw)) it takes that library's word for the memory.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Memory from the first element to the last, at least; it may be longer.
    pub data: DevSlice<'a>,
    /// Type of the elements.
    pub dtype: DType,
    /// Extents of the axes.
    pub shape: Shape,
    /// Strides between elements along each axis, in elements; 0 repeats an element along an axis.
    pub strides: Strides,
}

/// A borrowed tensor that a call writes. No two of its elements share an address.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    /// Memory from the first element to the last, at least. Bytes between its elements stay as they are.
    pub data: DevSliceMut<'a>,
    /// Type of the elements.
    pub dtype: DType,
    /// Extents of the axes.
    pub shape: Shape,
    /// Strides between elements along each axis, in elements.
    pub strides: Strides,
}

impl<'a> TensorView<'a> {
    /// Contiguous host memory, `[batch, seq, head, dim]`. Whether it is long enough is checked by the call.
    #[must_use]
    pub fn host<T: Element>(elems: &'a [T], shape: Shape) -> Self {
        Self::host_strided(elems, shape, Strides::bshd(shape))
    }

    /// View of host memory. The tensor's first element is that of `elems`.
    #[must_use]
    pub fn host_strided<T: Element>(elems: &'a [T], shape: Shape, strides: Strides) -> Self {
        Self { data: DevSlice::host(elems), dtype: T::DTYPE, shape, strides }
    }

    /// Memory of any kind: a device's, or another library's. Strides that are negative, or reach beyond 2^63 elements,
    /// make a view that every call refuses.
    ///
    /// # Safety
    /// From `ptr`, the first element, to the last that `shape` and `strides` reach, this is readable memory of `space`
    /// that lives for `'a`, and that nothing writes until all work queued with it is done.
    #[must_use]
    pub unsafe fn from_raw(
        space: MemorySpace,
        ptr: *const u8,
        dtype: DType,
        shape: Shape,
        strides: Strides,
    ) -> Self {
        let bytes = reach(strides, shape, dtype).unwrap_or(0);
        // SAFETY: the caller keeps the contract of `from_raw`.
        let data = unsafe { DevSlice::from_raw(space, ptr, bytes, dtype) };
        Self { data, dtype, shape, strides }
    }

    /// Checks that `data` has elements of `dtype` or bytes, that strides are not negative and that `data`
    /// covers what they reach. `name` is the tensor's in errors.
    ///
    /// # Errors
    /// Both types, the axis and its stride, or both numbers of bytes.
    pub fn check(&self, name: &'static str) -> Result<(), ProblemError> {
        check(name, (self.data.elem(), self.data.bytes()), self.strides, self.shape, self.dtype)
    }
}

impl<'a> TensorViewMut<'a> {
    /// Contiguous host memory, `[batch, seq, head, dim]`. Whether it is long enough is checked by the call.
    #[must_use]
    pub fn host<T: Element>(elems: &'a mut [T], shape: Shape) -> Self {
        Self::host_strided(elems, shape, Strides::bshd(shape))
    }

    /// Host memory; the tensor's first element is that of `elems`.
    #[must_use]
    pub fn host_strided<T: Element>(elems: &'a mut [T], shape: Shape, strides: Strides) -> Self {
        Self { data: DevSliceMut::host(elems), dtype: T::DTYPE, shape, strides }
    }

    /// Memory of any kind: a device's, or another library's.
    ///
    /// # Safety
    /// As [`TensorView::from_raw`], but writable, and nothing else reads or writes it until all work queued with it is
    /// done. Host memory is initialised.
    #[must_use]
    pub unsafe fn from_raw(
        space: MemorySpace,
        ptr: *mut u8,
        dtype: DType,
        shape: Shape,
        strides: Strides,
    ) -> Self {
        let bytes = reach(strides, shape, dtype).unwrap_or(0);
        // SAFETY: the caller keeps the contract of `from_raw`.
        let data = unsafe { DevSliceMut::from_raw(space, ptr, bytes, dtype) };
        Self { data, dtype, shape, strides }
    }

    /// View of the tensor as the input of a later call.
    #[must_use]
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView { data: self.data.as_input(), dtype: self.dtype, shape: self.shape, strides: self.strides }
    }

    /// Checks as [`TensorView::check`] does, and that no two elements share an address.
    ///
    /// # Errors
    /// As there, or the strides.
    pub fn check(&self, name: &'static str) -> Result<(), ProblemError> {
        check(name, (self.data.elem(), self.data.bytes()), self.strides, self.shape, self.dtype)?;
        if !self.strides.is_injective(self.shape) {
            let Shape { batch, seq, head, dim } = self.shape;
            let text = format!(
                "{name} strides {:?} give two elements of [{batch}, {seq}, {head}, {dim}] one address",
                self.strides
            );
            return Err(ProblemError::new(name, text));
        }
        Ok(())
    }
}

/// Bytes from the first element to the last; `None` if a stride is negative or the number does not fit.
fn reach(strides: Strides, shape: Shape, dtype: DType) -> Option<u64> {
    let bytes = ValidFwd::extent_bytes(strides, shape, dtype);
    (bytes < u64::MAX).then_some(bytes)
}

fn check(
    name: &'static str,
    (elem, given): (ElemType, u64),
    strides: Strides,
    shape: Shape,
    dtype: DType,
) -> Result<(), ProblemError> {
    if !elem.serves(dtype.into()) {
        let text = format!("{name} is {dtype}, but its memory has elements of {elem}");
        return Err(ProblemError::new(name, text));
    }
    let axes = [
        ("batch", shape.batch, strides.batch),
        ("seq", shape.seq, strides.seq),
        ("head", shape.head, strides.head),
        ("dim", shape.dim, strides.dim),
    ];
    for (axis, extent, stride) in axes {
        if extent > 1 && stride < 0 {
            return Err(ProblemError::new(name, format!("{name}.{axis} stride {stride} is negative")));
        }
    }
    match reach(strides, shape, dtype) {
        Some(wanted) if wanted <= given => Ok(()),
        Some(wanted) => {
            let text = format!("{name} has {given} bytes, but its extents and strides reach {wanted}");
            Err(ProblemError::new(name, text))
        }
        None => {
            let text = format!("{name} strides {strides:?} reach beyond 2^63 elements over {shape:?}");
            Err(ProblemError::new(name, text))
        }
    }
}

/// Views of arrays whose axes are `[batch, seq, head, dim]`, whatever their order in memory.
#[cfg(feature = "ndarray")]
mod arrays {
    use ndarray::{ArrayView4, ArrayViewMut4};

    use super::{Element, TensorView, TensorViewMut};
    use crate::{MemorySpace, ProblemError, Shape, Strides};

    /// Extents and strides of an array whose elements lie in one piece, nothing of others between them: only then is
    /// its memory its own from the first element to the last, since `ndarray` lends pieces of one array to several.
    fn layout(shape: &[usize], strides: &[isize]) -> Result<(Shape, Strides), ProblemError> {
        let refused = |text| Err(ProblemError::new("array", text));
        let mut extents = [0u32; 4];
        let (mut elems, mut last) = (1u128, 0i128);
        for (axis, name) in ["batch", "seq", "head", "dim"].into_iter().enumerate() {
            let (extent, stride) = (shape[axis], strides[axis]);
            let Ok(fits) = u32::try_from(extent) else {
                return refused(format!("array.{name} {extent} is larger than {}", u32::MAX));
            };
            if extent > 1 && stride < 0 {
                return refused(format!("array.{name} stride {stride} is negative"));
            }
            extents[axis] = fits;
            // With a stride of 0, one element stands for many.
            if stride != 0 || extent == 0 {
                elems *= extent as u128;
            }
            last += stride as i128 * (extent as i128 - 1).max(0);
        }
        let [batch, seq, head, dim] = extents;
        let reach = if elems == 0 { 0 } else { last.unsigned_abs() + 1 };
        if reach > elems {
            let gaps = reach - elems;
            return refused(format!(
                "array strides {strides:?} over {shape:?} leave {gaps} elements that are not its own: copy it by \
                 as_standard_layout, or give the slice that all of them lie in to TensorView::host_strided"
            ));
        }
        let [b, s, h, d] = [0, 1, 2, 3].map(|axis| strides[axis] as i64);
        Ok((Shape { batch, seq, head, dim }, Strides { batch: b, seq: s, head: h, dim: d }))
    }

    impl<'a, T: Element> TryFrom<ArrayView4<'a, T>> for TensorView<'a> {
        type Error = ProblemError;

        /// Conversion without a copy. An array with gaps between its elements, such as a slice of a larger one, is
        /// refused.
        fn try_from(array: ArrayView4<'a, T>) -> Result<Self, ProblemError> {
            let (shape, strides) = layout(array.shape(), array.strides())?;
            // SAFETY: the elements, borrowed for 'a, lie in one piece from the first one on: `layout`.
            Ok(unsafe { Self::from_raw(MemorySpace::Host, array.as_ptr().cast(), T::DTYPE, shape, strides) })
        }
    }

    impl<'a, T: Element> TryFrom<ArrayViewMut4<'a, T>> for TensorViewMut<'a> {
        type Error = ProblemError;

        /// Conversion without a copy, as for [`TensorView`].
        fn try_from(mut array: ArrayViewMut4<'a, T>) -> Result<Self, ProblemError> {
            let (shape, strides) = layout(array.shape(), array.strides())?;
            let ptr = array.as_mut_ptr().cast();
            // SAFETY: the elements, borrowed for 'a, lie in one piece from the first one on: `layout`, and
            // exclusively.
            Ok(unsafe { Self::from_raw(MemorySpace::Host, ptr, T::DTYPE, shape, strides) })
        }
    }

    #[cfg(test)]
    mod tests {
        use ndarray::{Array4, s};

        use super::*;
        use crate::{Attention, attention, attention_into};

        #[test]
        fn arrays_in_any_order_of_axes_give_the_bits_of_slices() {
            let wave = |step: f32| move |(b, s, h, d)| ((b * 97 + s * 31 + h * 7 + d) as f32 * step).sin();
            let [q, k, v] = [(5, 4, 0.7), (6, 2, 1.3), (6, 2, 0.3)]
                .map(|(seq, heads, step)| Array4::from_shape_fn((2, seq, heads, 8), wave(step)));
            // The tensor is stored [batch, head, seq, dim] and viewed [batch, seq, head, dim].
            let stored =
                |x: &Array4<f32>| x.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
            let [q_s, k_s, v_s] = [&q, &k, &v].map(stored);
            fn seen(array: &Array4<f32>) -> TensorView<'_> {
                TensorView::try_from(array.view().permuted_axes([0, 2, 1, 3])).unwrap()
            }
            let (q_v, k_v, v_v) = (seen(&q_s), seen(&k_s), seen(&v_s));
            let options = Attention::of(&q_v, &k_v, &v_v);
            let mut o = Array4::<f32>::zeros((2, 4, 5, 8));
            let o_view = TensorViewMut::try_from(o.view_mut().permuted_axes([0, 2, 1, 3])).unwrap();
            let lse = attention_into(&q_v, &k_v, &v_v, o_view, &options).unwrap();
            let [q, k, v] = [&q, &k, &v].map(|x| x.as_slice().unwrap());
            let by_slices = attention(q, k, v, &options).unwrap();
            assert_eq!(lse, by_slices.lse);
            let o = o.permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
            assert_eq!(o.as_slice().unwrap(), by_slices.o);
        }

        #[test]
        fn an_array_whose_gaps_may_be_anothers_is_refused_with_their_number() {
            let all = Array4::<f32>::zeros((2, 6, 3, 8));
            let error = TensorView::try_from(all.slice(s![.., .., 1..2, ..])).unwrap_err();
            assert!(error.text.contains("leave 176 elements"), "{error}");
            let error = TensorView::try_from(all.slice(s![.., ..;-1, .., ..])).unwrap_err();
            assert_eq!(error.text, "array.seq stride -24 is negative");
            let one = Array4::<f32>::zeros((1, 6, 1, 8));
            let repeated = one.broadcast((3, 6, 2, 8)).unwrap();
            let view = TensorView::try_from(repeated).unwrap();
            assert_eq!((view.strides.batch, view.strides.head, view.data.bytes()), (0, 0, 6 * 8 * 4));
            assert_eq!(view.check("q"), Ok(()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, seq: 3, head: 2, dim: 4 };

    #[test]
    fn a_view_is_refused_by_name_axis_and_number() {
        let elems = [0f32; 48];
        let said = |strides, len| {
            TensorView::host_strided(&elems[..len], SHAPE, strides).check("k").map_err(|error| error.text)
        };
        let bshd = Strides::bshd(SHAPE);
        assert_eq!(said(bshd, 48), Ok(()));
        assert_eq!(said(bshd, 47), Err("k has 188 bytes, but its extents and strides reach 192".to_owned()));
        assert_eq!(said(Strides { head: -4, ..bshd }, 48), Err("k.head stride -4 is negative".to_owned()));
        assert!(said(Strides { seq: i64::MAX, ..bshd }, 48).is_err_and(|text| text.contains("beyond 2^63")));
        // All queries share one row: this may be read but not written.
        let shared = Strides { seq: 0, ..bshd };
        assert_eq!(said(shared, 48), Ok(()));
        let mut elems = [0f32; 48];
        let error = TensorViewMut::host_strided(&mut elems, SHAPE, shared).check("o").unwrap_err();
        assert!(error.field == "o" && error.text.contains("one address"), "{error}");
        assert_eq!(TensorViewMut::host(&mut elems, SHAPE).check("o"), Ok(()));
    }

    #[test]
    fn a_view_whose_memory_has_another_type_is_refused_by_both() {
        let (halves, mut floats) = ([half::f16::ZERO; 48], [0f32; 48]);
        let view = TensorView { dtype: DType::Bf16, ..TensorView::host(&halves, SHAPE) };
        assert_eq!(view.check("q").unwrap_err().text, "q is bf16, but its memory has elements of f16");
        let view = TensorViewMut { dtype: DType::F16, ..TensorViewMut::host(&mut floats, SHAPE) };
        assert_eq!(view.check("o").unwrap_err().text, "o is f16, but its memory has elements of f32");
        let bytes = [0u8; 96];
        let view = TensorView {
            data: DevSlice::host(&bytes),
            dtype: DType::Bf16,
            ..TensorView::host(&halves, SHAPE)
        };
        assert_eq!(view.check("q"), Ok(()));
    }

    #[test]
    fn a_raw_view_covers_what_its_strides_reach_and_no_more() {
        let elems = [0u16; 48];
        let of = |strides| {
            let ptr = elems.as_ptr().cast();
            // SAFETY: never read, and no longer than `elems` where it is sound.
            unsafe { TensorView::from_raw(MemorySpace::Host, ptr, DType::Bf16, SHAPE, strides) }
        };
        assert_eq!(of(Strides::bhsd(SHAPE)).data.bytes(), 96);
        let negative = of(Strides { batch: -24, ..Strides::bshd(SHAPE) });
        assert_eq!(negative.data.bytes(), 0);
        assert_eq!(negative.check("v").unwrap_err().text, "v.batch stride -24 is negative");
    }
}
