//! Conversion of a [`Request`] to the C struct of one call. Shapes are compared with each other here
//! (`shapes.rs`), since that struct has strides alone; the library checks everything else.

use std::ffi::CString;
use std::ptr;

use fmha_c::{
    FMHA_EXACT, FMHA_FAST, FmhaBlockScales, FmhaCache, FmhaCall, FmhaGradients, FmhaLists, FmhaMasks,
    FmhaOptions, FmhaTensor,
};
use smallvec::SmallVec;

use crate::cache::cache;
use crate::code::Coded;
use crate::lists::lists;
use crate::masks::masks;
use crate::operands::{fill_dims, fill_lengths, fill_modifiers, fill_operands, gradients};
use crate::request::{
    ALLOW_FALLBACK, BATCH_INVARIANT, CHECK_LENGTHS, DETERMINISTIC, EXACT, Numbers, ROW_INVARIANT, Request,
    Slot,
};
use crate::shapes::{one_device, sizes};
use crate::tensor::Device;

/// Text of an error as the user reads it: the argument first, then its numbers.
pub type Wrong = String;

/// Returns what is wrong unless a condition holds.
macro_rules! ensure {
    ($condition:expr, $($sentence:tt)+) => {
        if !$condition {
            return Err(format!($($sentence)+));
        }
    };
}
pub(crate) use ensure;

/// A call's structs, and what they point to in host memory.
pub struct Call {
    call: FmhaCall,
    gradients: Option<FmhaGradients>,
    cache: Option<FmhaCache>,
    lists: Option<FmhaLists>,
    code: Option<Coded>,
    masks: Option<FmhaMasks>,
    block_scales: Option<FmhaBlockScales>,
    mask: CString,
    softmax_scale: Option<f32>,
    softcap: Option<f32>,
    numbers: Numbers,
    /// The device that all of its tensors are on.
    pub device: Device,
}

/// Words that two calls share exactly if one plan serves both.
pub type Key = SmallVec<[u64; 128]>;

pub(crate) const NO_TENSOR: FmhaTensor =
    FmhaTensor { data: ptr::null_mut(), batch_stride: 0, seqlen_stride: 0, head_stride: 0, dim_stride: 0 };

/// Initialisation as `fmha.h` asks: everything 0 first, then the fields that are set.
// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_CALL: FmhaCall = unsafe { std::mem::zeroed() };

impl Call {
    /// Reads a request.
    ///
    /// # Errors
    /// The first argument that is missing, or whose shape, type, device or strides do not go with the
    /// others, with both numbers.
    pub fn new(request: &Request) -> Result<Self, Wrong> {
        let numbers = request.numbers;
        let device = one_device(request, Slot::Q)?;
        let sizes = sizes(request)?;
        let mut call = FmhaCall {
            struct_bytes: size_of::<FmhaCall>() as u64,
            stream: ptr::with_exposed_provenance_mut(request.stream.cast_unsigned() as usize),
            dropout_seed: numbers.seed.cast_unsigned(),
            dropout_offset: numbers.offset.cast_unsigned(),
            dropout_seeded: 1,
            p_drop: single("p_drop", numbers.p_drop)?,
            ..NO_CALL
        };
        fill_dims(&mut call, &sizes, request)?;
        fill_operands(&mut call, &sizes, request)?;
        fill_modifiers(&mut call, &sizes, request)?;
        fill_lengths(&mut call, &sizes, request)?;
        Ok(Self {
            call,
            gradients: request.is_backward().then(|| gradients(&sizes, request)).transpose()?,
            cache: cache(&sizes, request)?,
            // SAFETY: who made the request promised its lists.
            lists: unsafe { request.listed() }.map(|given| lists(&sizes, given, device)).transpose()?,
            // SAFETY: who made the request promised its code.
            code: unsafe { request.coded() }
                .map(|(code, captured)| Coded::new(code, captured, device))
                .transpose()?,
            masks: masks(&sizes, request)?,
            // SAFETY: who made the request promised its scales.
            block_scales: unsafe { request.scaled() }
                .map(|given| crate::scales::scales(&sizes, given, device))
                .transpose()?,
            mask: mask(&numbers)?,
            softmax_scale: (!numbers.softmax_scale.is_nan())
                .then(|| single("softmax_scale", numbers.softmax_scale))
                .transpose()?,
            softcap: (numbers.softcap != 0.0).then(|| single("softcap", numbers.softcap)).transpose()?,
            numbers,
            device,
        })
    }

    /// Runs `body` with the whole struct, whose host pointers are good meanwhile.
    pub fn with<R>(&mut self, body: impl FnOnce(&mut FmhaCall) -> R) -> R {
        fn pointer<T>(value: Option<&T>) -> *const T {
            value.map_or(ptr::null(), ptr::from_ref)
        }
        self.call.mask = self.mask.as_ptr();
        self.call.softmax_scale = pointer(self.softmax_scale.as_ref());
        self.call.softcap = pointer(self.softcap.as_ref());
        self.call.gradients = pointer(self.gradients.as_ref());
        self.call.cache = pointer(self.cache.as_ref());
        self.call.lists = pointer(self.lists.as_ref());
        self.call.code = pointer(self.code.as_mut().map(Coded::pointed));
        self.call.masks = pointer(self.masks.as_ref());
        self.call.block_scales = pointer(self.block_scales.as_ref());
        body(&mut self.call)
    }

    /// Refuses captures of other types than the functions read: once, with the plan.
    ///
    /// # Errors
    /// The first of them, by its name.
    pub fn check_types(&self) -> Result<(), Wrong> {
        self.code.as_ref().map_or(Ok(()), Coded::check_types)
    }

    /// The options under which it is planned. `backend` is the device's name.
    pub fn options(&self, backend: &CString) -> FmhaOptions {
        options(self.numbers.options, backend)
    }

    /// Everything of the call that a plan depends on, in numbers.
    pub fn key(&self) -> Key {
        let (call, numbers) = (&self.call, &self.numbers);
        let mut key = Key::new();
        let bits = |value: Option<f32>| value.map_or(1 << 40, |value| u64::from(value.to_bits()));
        key.extend([bits(self.softmax_scale), bits(self.softcap), u64::from(call.p_drop.to_bits())]);
        key.extend(
            [numbers.options, numbers.mask, numbers.left, numbers.right, numbers.sink_columns].map(word),
        );
        key.extend([i64::from(self.device.kind), i64::from(self.device.index)].map(word));
        let dims = [
            call.batch,
            call.seqlen_q,
            call.seqlen_k,
            call.num_heads_q,
            call.num_heads_kv,
            call.head_dim_qk,
            call.head_dim_v,
            call.page_size,
        ];
        key.extend(dims.map(word));
        for tensor in [&call.q, &call.k, &call.v, &call.o] {
            lattice(&mut key, tensor);
        }
        present_lattice(&mut key, &call.bias);
        codes(
            &mut key,
            &[
                call.dtype_qk,
                call.dtype_v,
                call.dtype_o,
                call.dtype_bias,
                call.v_layout,
                call.alibi_per_batch,
                call.descale_per_tensor,
            ],
        );
        presence(
            &mut key,
            &[
                call.lse.is_null(),
                call.keep_mask.is_null(),
                call.row_max.is_null(),
                call.head_max.is_null(),
                call.key_sum.is_null(),
                call.cu_seqlens_q.is_null(),
                call.cu_seqlens_k.is_null(),
                call.seqused_q.is_null(),
                call.seqused_k.is_null(),
                call.block_table.is_null(),
                call.alibi_slopes.is_null(),
                call.sink.is_null(),
                call.descale_q.is_null(),
                call.descale_k.is_null(),
                call.descale_v.is_null(),
                call.scale_o.is_null(),
            ],
        );
        // A number that no presence has parts what may be there from what may not.
        key.push(u64::MAX);
        if let Some(gradients) = &self.gradients {
            for tensor in [&gradients.dout, &gradients.dq, &gradients.dk, &gradients.dv] {
                lattice(&mut key, tensor);
            }
            present_lattice(&mut key, &gradients.dbias);
            presence(&mut key, &[gradients.dlse.is_null(), gradients.dsink.is_null()]);
            codes(&mut key, &[gradients.dtype_grad, gradients.dtype_dbias]);
        }
        key.push(u64::MAX - 1);
        if let Some(cache) = &self.cache {
            present_lattice(&mut key, &cache.k_new);
            present_lattice(&mut key, &cache.v_new);
            presence(
                &mut key,
                &[cache.cu_seqlens_new.is_null(), cache.rotary_cos.is_null(), cache.tree_mask.is_null()],
            );
            key.extend([cache.seqlen_new, cache.max_pos].map(word));
            codes(
                &mut key,
                &[
                    cache.rotary_dim,
                    cache.rotary_interleaved,
                    cache.dtype_rotary,
                    cache.dtype_cache,
                    cache.v_in_k,
                ],
            );
        }
        key.push(u64::MAX - 2);
        if let Some(lists) = &self.lists {
            key.extend([lists.topk, lists.batch_stride, lists.seqlen_stride, lists.head_stride].map(word));
            presence(&mut key, &[lists.topk_length.is_null()]);
            codes(&mut key, &[lists.length_per_token, lists.addresses, lists.block, lists.lse_without_sink]);
        }
        key.push(u64::MAX - 3);
        if let Some(code) = &self.code {
            code.key(&mut key);
        }
        key.push(u64::MAX - 3);
        if let Some(masks) = &self.masks {
            crate::masks::key(masks, &mut key);
        }
        key.push(u64::MAX - 4);
        if let Some(scales) = &self.block_scales {
            crate::scales::key(scales, &mut key);
        }
        key
    }
}

/// The library's options from the bits of a request's. Scratch is always the caller's: two streams may run one plan.
pub(crate) fn options(bits: i64, backend: &CString) -> FmhaOptions {
    let bit = |mask: i64| i32::from(bits & mask != 0);
    FmhaOptions {
        struct_bytes: size_of::<FmhaOptions>() as u64,
        backend: backend.as_ptr(),
        kernel: ptr::null(),
        tile: ptr::null(),
        allow_fallback: bit(ALLOW_FALLBACK),
        accuracy: if bit(EXACT) == 1 { FMHA_EXACT } else { FMHA_FAST },
        deterministic: bit(DETERMINISTIC),
        batch_invariant: bit(BATCH_INVARIANT),
        check_lengths: bit(CHECK_LENGTHS),
        caller_workspace: 1,
        row_invariant: bit(ROW_INVARIANT),
        reserved: 0,
    }
}

pub(crate) fn word(number: i64) -> u64 {
    number.cast_unsigned()
}

pub(crate) fn lattice(key: &mut Key, tensor: &FmhaTensor) {
    key.extend([tensor.batch_stride, tensor.seqlen_stride, tensor.head_stride, tensor.dim_stride].map(word));
}

pub(crate) fn present_lattice(key: &mut Key, tensor: &FmhaTensor) {
    key.push(u64::from(tensor.data.is_null()));
    lattice(key, tensor);
}

fn codes(key: &mut Key, codes: &[i32]) {
    key.extend(codes.iter().map(|&code| word(code.into())));
}

fn presence(key: &mut Key, absent: &[bool]) {
    key.push(absent.iter().fold(0, |bits, &null| bits << 1 | u64::from(null)));
}

/// A Python number in the C struct's 32 bits. Which numbers are sound is the library's to say; here, that it
/// is asked of the number that was given: a soft-cap of 1e-60 is no call without one.
fn single(name: &str, given: f64) -> Result<f32, Wrong> {
    let rounded = given as f32;
    ensure!(
        (rounded == 0.0) == (given == 0.0)
            && rounded.is_finite() == given.is_finite()
            && (name != "p_drop" || (rounded < 1.0) == (given < 1.0)),
        "{name} {given:?} is {rounded} as a 32-bit number, and not what was asked for"
    );
    Ok(rounded)
}

/// The text form of a mask.
fn mask(numbers: &Numbers) -> Result<CString, Wrong> {
    let Numbers { mask, left, right, sink_columns, .. } = *numbers;
    for (name, value) in [("left", left), ("right", right)] {
        ensure!(value >= -1 || mask == 3, "mask: {name} {value} is below -1, which is unbounded");
    }
    ensure!(sink_columns >= 0, "mask: sink_columns {sink_columns} is below 0");
    let sink = if sink_columns == 0 { String::new() } else { format!(",{sink_columns}") };
    let text = match mask {
        0 => "0".to_owned(),
        1 => format!("t:{left},{right}{sink}"),
        2 => format!("b:{left},{right}{sink}"),
        3 => format!("g:{left},{right}{sink}"),
        other => return Err(format!("mask: kind {other} is none of 0 to 3")),
    };
    CString::new(text).map_err(|error| error.to_string())
}
