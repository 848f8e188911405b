//! Conversion of a [`Request`] to the C structs of its problem and its arguments. Shapes are compared with each other
//! here (`shapes.rs`), since those structs have strides alone; the library checks everything else.

use std::ptr;

use fmha::{Accuracy, MaskAlign, MaskShape, MaskSpec, PlanOptions};
use fmha_c::{
    Choice, FmhaArgs, FmhaBlockScales, FmhaCache, FmhaGradients, FmhaLists, FmhaMasks, FmhaProblem,
    FmhaSecond, FmhaSecondArgs,
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

/// Text of an error for the user: the argument's name first, then its numbers.
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

/// The C structs of a call, with the host memory that they point to.
pub struct Call {
    /// The problem, with null for every pointer.
    problem: FmhaProblem,
    args: FmhaArgs,
    gradients: Option<FmhaGradients>,
    cache: Option<FmhaCache>,
    lists: Option<FmhaLists>,
    code: Option<Coded>,
    masks: Option<FmhaMasks>,
    block_scales: Option<FmhaBlockScales>,
    second: Option<Box<Second>>,
    /// Mask that decides which keys a query sees. The problem's own mask text stays null.
    pub mask: MaskSpec,
    softmax_scale: Option<f32>,
    softcap: Option<f32>,
    numbers: Numbers,
    /// Device of all tensors of the call.
    pub device: Device,
}

/// Words of a plan's key: two calls have equal words exactly if one plan serves both.
pub type Key = SmallVec<[u64; 128]>;

// Struct of zeros: `fmha.h` wants everything set to 0 before fields are filled in. SAFETY: numbers and pointers, of
// which all bits may be 0.
const NO_PROBLEM: FmhaProblem = unsafe { std::mem::zeroed() };
// SAFETY: numbers and pointers, of which all bits may be 0.
const NO_ARGS: FmhaArgs = unsafe { std::mem::zeroed() };

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
        let mut problem = FmhaProblem {
            struct_bytes: size_of::<FmhaProblem>() as u64,
            p_drop: single("p_drop", numbers.p_drop)?,
            ..NO_PROBLEM
        };
        let mut args = FmhaArgs {
            struct_bytes: size_of::<FmhaArgs>() as u64,
            stream: ptr::with_exposed_provenance_mut(request.stream.cast_unsigned() as usize),
            dropout_seed: numbers.seed.cast_unsigned(),
            dropout_offset: numbers.offset.cast_unsigned(),
            dropout_seeded: 1,
            ..NO_ARGS
        };
        fill_dims(&mut problem, &mut args, &sizes, request)?;
        fill_operands(&mut problem, &mut args, &sizes, request)?;
        fill_modifiers(&mut problem, &mut args, &sizes, request)?;
        fill_lengths(&mut problem, &mut args, &sizes, request)?;
        let gradients = request.is_backward().then(|| gradients(&mut args, &sizes, request)).transpose()?;
        let cache = cache(&mut args, &sizes, request)?;
        // SAFETY: who made the request promised its lists.
        let lists =
            unsafe { request.listed() }.map(|given| lists(&mut args, &sizes, given, device)).transpose()?;
        // SAFETY: who made the request promised its code.
        let code = unsafe { request.coded() }
            .map(|(code, captured)| Coded::new(code, captured, device))
            .transpose()?;
        let masks = masks(&mut args, &sizes, request)?;
        // SAFETY: who made the request promised its scales.
        let block_scales = unsafe { request.scaled() }
            .map(|given| crate::scales::scales(&mut args, &sizes, given, device))
            .transpose()?;
        // SAFETY: who made the request promised its second cache.
        let second = unsafe { request.second() }
            .map(|given| {
                Second::new(given, &problem, cache.as_ref(), device)
                    .map_err(|wrong| format!("second.{wrong}"))
            })
            .transpose()?;
        Ok(Self {
            problem,
            args,
            gradients,
            cache,
            lists,
            code,
            masks,
            block_scales,
            second,
            mask: mask(&numbers)?,
            softmax_scale: (!numbers.softmax_scale.is_nan())
                .then(|| single("softmax_scale", numbers.softmax_scale))
                .transpose()?,
            softcap: (numbers.softcap != 0.0).then(|| single("softcap", numbers.softcap)).transpose()?,
            numbers,
            device,
        })
    }

    /// Runs `body` with the problem and its pointers, which are valid until `body` returns.
    pub fn with<R>(&self, body: impl FnOnce(&FmhaProblem) -> R) -> R {
        fn pointer<T>(value: Option<&T>) -> *const T {
            value.map_or(ptr::null(), ptr::from_ref)
        }
        let code = self.code.as_ref().map(Coded::pointed);
        let second = self.second.as_ref().map(|second| second.pointed());
        body(&FmhaProblem {
            softmax_scale: pointer(self.softmax_scale.as_ref()),
            softcap: pointer(self.softcap.as_ref()),
            gradients: pointer(self.gradients.as_ref()),
            cache: pointer(self.cache.as_ref()),
            lists: pointer(self.lists.as_ref()),
            code: pointer(code.as_ref()),
            masks: pointer(self.masks.as_ref()),
            block_scales: pointer(self.block_scales.as_ref()),
            second: pointer(second.as_ref()),
            ..self.problem
        })
    }

    /// Arguments of a run, valid until this call is moved or dropped.
    pub fn args(&self) -> FmhaArgs {
        let second = self.second.as_ref().map_or(ptr::null(), |second| &raw const second.args);
        FmhaArgs { captured: self.code.as_ref().map_or(ptr::null(), Coded::args), second, ..self.args }
    }

    /// Returns an error if a captured tensor has another type than the functions read; called once, when the plan
    /// is made.
    ///
    /// # Errors
    /// The first of them, by its name.
    pub fn check_types(&self) -> Result<(), Wrong> {
        self.code.as_ref().map_or(Ok(()), Coded::check_types)
    }

    /// Options with which the call is planned.
    pub fn options(&self) -> Choice {
        options(self.numbers.options)
    }

    /// Key of a call's lists of tiles under a mask as code: the plan's key, captured numbers, and the stream that makes
    /// the lists.
    pub fn key_of_lists(&self) -> Key {
        let mut key = self.key();
        if let Some(code) = &self.code {
            code.key_numbers(&mut key);
        }
        key.push(self.args.stream.addr() as u64);
        key
    }

    /// Key of a plan: numbers for everything of the call that the plan depends on.
    pub fn key(&self) -> Key {
        let numbers = &self.numbers;
        let mut key = Key::new();
        let bits = |value: Option<f32>| value.map_or(1 << 40, |value| u64::from(value.to_bits()));
        key.extend([bits(self.softmax_scale), bits(self.softcap)]);
        key.extend(
            [numbers.options, numbers.mask, numbers.left, numbers.right, numbers.sink_columns].map(word),
        );
        key.extend([i64::from(self.device.kind), i64::from(self.device.index)].map(word));
        add(&mut key, Some(&self.problem));
        add(&mut key, self.gradients.as_ref());
        add(&mut key, self.cache.as_ref());
        add(&mut key, self.lists.as_ref());
        add(&mut key, self.masks.as_ref());
        add(&mut key, self.block_scales.as_ref());
        if let Some(code) = &self.code {
            code.key(&mut key);
        }
        if let Some(second) = &self.second {
            // This word begins no key of score or mask code.
            key.push(u64::MAX - 5);
            add(&mut key, Some(&second.given));
            add(&mut key, second.lists.as_ref());
            add(&mut key, second.masks.as_ref());
        }
        key
    }
}

/// C structs of a second KV cache, with the host memory that they point to.
struct Second {
    /// The cache, with null for every pointer.
    given: FmhaSecond,
    args: FmhaSecondArgs,
    lists: Option<FmhaLists>,
    masks: Option<FmhaMasks>,
}

impl Second {
    /// Reads the second cache from a request for that cache alone, given the problem and the cache of the first.
    ///
    /// # Errors
    /// A fault of the second request; tensors on another device than `device`; sizes or types that differ from the
    /// first request's.
    fn new(
        request: &Request,
        first: &FmhaProblem,
        first_cache: Option<&FmhaCache>,
        device: Device,
    ) -> Result<Box<Self>, Wrong> {
        ensure!(request.second.is_null(), "second is given: there are two caches at most");
        let alone = Call::new(request)?;
        let (here, there) = (alone.device, device);
        ensure!(here == there, "k is on {}, but q is on {}", here.name(), there.name());
        let (problem, args) = (&alone.problem, &alone.args);
        let of_rows = |cache: Option<&FmhaCache>| {
            cache.map_or([0; 3], |cache| [cache.dtype_cache, cache.cache_rows, cache.v_in_k].map(i64::from))
        };
        let ([own_type, own_rows, own_v], [type_, rows, v]) =
            (of_rows(alone.cache.as_ref()), of_rows(first_cache));
        for (name, own, wanted) in [
            ("batch", problem.batch, first.batch),
            ("seqlen_q", problem.seqlen_q, first.seqlen_q),
            ("num_heads_q", problem.num_heads_q, first.num_heads_q),
            ("num_heads_kv", problem.num_heads_kv, first.num_heads_kv),
            ("head_dim_qk", problem.head_dim_qk, first.head_dim_qk),
            ("head_dim_v", problem.head_dim_v, first.head_dim_v),
            ("dtype_qk", problem.dtype_qk.into(), first.dtype_qk.into()),
            ("dtype_v", problem.dtype_v.into(), first.dtype_v.into()),
            ("v_layout", problem.v_layout.into(), first.v_layout.into()),
            ("packed_q", problem.packed_q.into(), first.packed_q.into()),
            ("dtype_cache", own_type, type_),
            ("cache_rows", own_rows, rows),
            ("v_in_k", own_v, v),
        ] {
            ensure!(own == wanted, "{name} is {own}, but the first cache's {wanted}");
        }
        let mut lists = alone.lists;
        // One flag of the call decides whether LSE excludes the sink. It is set if the lists of either cache set it.
        let lse_without_sink = lists.as_mut().map_or(0, |lists| std::mem::take(&mut lists.lse_without_sink));
        let given = FmhaSecond {
            struct_bytes: size_of::<FmhaSecond>() as u64,
            seqlen_k: problem.seqlen_k,
            page_size: problem.page_size,
            k: problem.k,
            v: problem.v,
            lists: ptr::null(),
            masks: ptr::null(),
            packed_k: problem.packed_k,
            seqused_k: problem.seqused_k,
            lse_without_sink,
            reserved: 0,
        };
        let args = FmhaSecondArgs {
            struct_bytes: size_of::<FmhaSecondArgs>() as u64,
            k: args.k,
            v: args.v,
            cu_seqlens_k: args.cu_seqlens_k,
            seqused_k: args.seqused_k,
            block_table: args.block_table,
            indices: args.indices,
            topk_length: args.topk_length,
            intervals: args.intervals,
            total_k: args.total_k,
            num_pages: args.num_pages,
            max_pages: args.max_pages,
        };
        Ok(Box::new(Self { given, args, lists, masks: alone.masks }))
    }

    /// C struct of the second cache, with pointers to its lists and masks, valid while this borrow lives.
    fn pointed(&self) -> FmhaSecond {
        let lists = self.lists.as_ref().map_or(ptr::null(), ptr::from_ref);
        let masks = self.masks.as_ref().map_or(ptr::null(), ptr::from_ref);
        FmhaSecond { lists, masks, ..self.given }
    }
}

/// Adds a C struct to a plan's key, word by word, after its size; an absent struct adds a size of 0.
pub(crate) fn add<T>(key: &mut Key, of: Option<&T>) {
    const { assert!(size_of::<T>().is_multiple_of(8) && align_of::<T>() == 8) };
    key.push(of.map_or(0, |_| size_of::<T>() as u64));
    if let Some(of) = of {
        // SAFETY: structs of C consist of numbers, and of pointers that are null here, without a byte between them.
        key.extend_from_slice(unsafe {
            std::slice::from_raw_parts(ptr::from_ref(of).cast::<u64>(), size_of::<T>() / 8)
        });
    }
}

/// Converts the bits of a request's options. The caller always provides the scratch, since two streams may run one
/// plan.
pub(crate) fn options(bits: i64) -> Choice {
    let bit = |mask: i64| bits & mask != 0;
    let plan = PlanOptions::default()
        .allow_fallback(bit(ALLOW_FALLBACK))
        .accuracy(if bit(EXACT) { Accuracy::Exact } else { Accuracy::Fast })
        .deterministic(bit(DETERMINISTIC))
        .batch_invariant(bit(BATCH_INVARIANT))
        .row_invariant(bit(ROW_INVARIANT))
        .check_lengths(bit(CHECK_LENGTHS));
    Choice { plan, caller_workspace: true }
}

pub(crate) fn word(number: i64) -> u64 {
    number.cast_unsigned()
}

/// Converts a Python number to the C struct's 32 bits. The library checks its range; here only a number that becomes 0
/// or infinite is refused: a soft-cap of 1e-60 must not mean none.
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

/// Mask that a request's numbers describe.
fn mask(numbers: &Numbers) -> Result<MaskSpec, Wrong> {
    let Numbers { mask, left, right, sink_columns, .. } = *numbers;
    let sink_columns = u32::try_from(sink_columns)
        .map_err(|_| format!("mask: sink_columns {sink_columns} is not in 0..2^32"))?;
    let bound = |name: &str, value: i64| match value {
        -1 => Ok(None),
        _ => u32::try_from(value)
            .map(Some)
            .map_err(|_| format!("mask: {name} {value} is neither -1, which is unbounded, nor in 0..2^32")),
    };
    let window = |align| {
        Ok::<_, Wrong>(MaskShape::Window { left: bound("left", left)?, right: bound("right", right)?, align })
    };
    let coordinate = |name: &str, value: i64| {
        i32::try_from(value).map_err(|_| format!("mask: {name} {value} does not fit 32 bits"))
    };
    let shape = match mask {
        0 => return Ok(MaskSpec::NONE),
        1 => window(MaskAlign::TopLeft)?,
        2 => window(MaskAlign::BottomRight)?,
        3 => MaskShape::Generic { y: coordinate("y", left)?, x: coordinate("x", right)? },
        other => return Err(format!("mask: kind {other} is none of 0 to 3")),
    };
    let mut spec = MaskSpec::NONE;
    (spec.shape, spec.sink_columns) = (shape, sink_columns);
    Ok(spec)
}
