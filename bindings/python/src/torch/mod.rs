//! Operators of PyTorch, registered from Rust. Python (`fmha/_torch.py`) adds autograd, fake kernels and defaults.

mod operators;
mod shims;

use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use fmha_c::FMHA_F32;
use smallvec::SmallVec;

use crate::call::{Wrong, ensure};
use crate::plans;
use crate::request::{Captured, Code, Numbers, Request, Slot, name};
use crate::shapes::{attention_type, of_type};
use crate::tensor::{Device, I64, Tensor, U8};
use operators::{Coding, DRAWN_SEED, OPERATORS, Operator, Spelt, Take};
use shims::{Owned, Shims, Value};

static SHIMS: OnceLock<Shims> = OnceLock::new();

/// Tensors that an operator returns, in the order of its torch schema.
type Results = SmallVec<[Owned; 5]>;

/// Defines the operators `fmha::*` once, in the torch that the process has imported.
///
/// # Errors
/// A process without torch, or a torch without the stable interface.
pub fn register() -> Result<(), Wrong> {
    if SHIMS.get().is_some() {
        return Ok(());
    }
    let shims = Shims::new()?;
    // A kernel may be called as soon as it is registered.
    SHIMS.get_or_init(|| shims).register(&OPERATORS)
}

/// The kernel of the operator at `AT` in the table, for every device.
///
/// A refusal leaves it as a C++ exception. Nothing here has a destructor, so the frame has no handler of
/// Rust's, and whoever unwinds passes over it: in a wheel Rust's handlers are bound to another unwinder than
/// C++'s.
///
/// # Safety
/// `stack` has `num_args` arguments of the operator's schema, which are the kernel's, and room for its results.
unsafe extern "C-unwind" fn kernel<const AT: usize>(stack: *mut Value, num_args: u64, _num_results: u64) {
    let Some(shims) = SHIMS.get() else { return };
    // SAFETY: the caller keeps the contract of `kernel`.
    let ran = unsafe { run_kept(shims, &OPERATORS[AT], stack, num_args) };
    if !ran {
        shims.raise(crate::fmha_py_text());
    }
}

/// Runs an operator and puts its results on the stack. On an error it keeps the text for this thread and returns
/// `false`.
///
/// # Safety
/// As [`kernel`].
#[inline(never)]
unsafe fn run_kept(shims: &'static Shims, operator: &Operator, stack: *mut Value, num_args: u64) -> bool {
    // SAFETY: the caller keeps the contract of `run_kept`.
    let body = || unsafe { execute(shims, operator, stack, num_args) };
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok((results, list))) => {
            let results = results.into_iter().map(Owned::into_value).chain(list);
            for (i, result) in results.enumerate() {
                // SAFETY: torch's schema of the operator has as many results, and the stack has room for them.
                unsafe { *stack.add(i) = result };
            }
            return true;
        }
        Ok(Err(text)) => crate::keep(&text),
        Err(_) => crate::keep("internal error: a panic was caught at torch's boundary"),
    }
    false
}

/// Reads the arguments, makes the results and runs.
///
/// # Safety
/// As [`kernel`].
unsafe fn execute(
    shims: &'static Shims,
    operator: &Operator,
    stack: *const Value,
    num_args: u64,
) -> Result<(Results, Option<Value>), Wrong> {
    // SAFETY: as many arguments as the schema has, which torch holds to be true.
    let mut words = unsafe { std::slice::from_raw_parts(stack, num_args as usize) }.iter().copied();
    let mut next = || words.next().unwrap_or_default();
    // Each handle belongs to this call from here on and is released at the call's end, even after an error.
    let tensors: SmallVec<[(Slot, Option<Owned>); 24]> = operator
        .tensors
        .iter()
        .map(|&(slot, take)| {
            let word = next();
            // SAFETY: torch's schema has a tensor, or an optional one, at this place of the stack.
            let handle = unsafe {
                match take {
                    Take::Given | Take::Written => Some(shims.own(word)),
                    Take::Optional | Take::OptionalWritten => shims.own_optional(word),
                }
            };
            (slot, handle)
        })
        .collect();
    let mut request = Request::new();
    request.numbers = match operator.numbers {
        Spelt::Each(count) => Numbers::read(count, |spelt| match spelt {
            // SAFETY: torch's schema has an optional number at this place of the stack.
            "float?" => unsafe { shims.optional(next()) }.unwrap_or(f64::NAN.to_bits()),
            _ => next(),
        }),
        Spelt::Kept => crate::request::kept(next().cast_signed())?,
    };
    let mut code = None;
    if operator.code != Coding::None {
        let words = [(); 5].map(|()| next());
        (request.numbers.block_q, request.numbers.block_k) = (next().cast_signed(), next().cast_signed());
        let wanted = if operator.code == Coding::Backward { next().cast_signed() } else { 0 };
        // SAFETY: in the schema these arguments are three texts, a list of tensors and a list of numbers.
        code = Some(unsafe { Taken::new(shims, words, wanted)? });
    }
    // SAFETY: torch's schema has an optional tensor at this place of the stack.
    if let Some(seed) = operator.is_seeded.then(|| unsafe { shims.own_optional(next()) }).flatten() {
        request.numbers.seed = drawn(&seed.describe(DRAWN_SEED)?)?;
    }
    for (slot, tensor) in &tensors {
        if let Some(tensor) = tensor {
            request.set(*slot, tensor.describe(name(*slot))?);
        }
    }
    let mut making = Making { request: &mut request, torch: Some(shims), results: Results::new() };
    (operator.results)(&mut making)?;
    let results = making.results;
    let Some(mut taken) = code else {
        run(shims, &mut request)?;
        return Ok((results, None));
    };
    let gradients = taken.gradients(shims, &request)?;
    let code = taken.code();
    request.code = &raw const code;
    run(shims, &mut request)?;
    let list = (operator.code == Coding::Backward).then(|| shims.list(gradients.into_iter())).transpose()?;
    Ok((results, list))
}

/// The score and mask code of a call, with their captures, as an operator takes them.
struct Taken {
    texts: [CString; 2],
    /// Owner of the names that `captured` points to.
    _names: Vec<CString>,
    tensors: Vec<Owned>,
    captured: Vec<Captured>,
    /// Captured tensors whose gradients are wanted: bit i for tensor i.
    wanted: i64,
}

impl Taken {
    /// # Safety
    /// `words` are three texts, a list of tensors and a list of numbers, owned by this call.
    unsafe fn new(shims: &'static Shims, words: [Value; 5], wanted: i64) -> Result<Self, Wrong> {
        // SAFETY: the caller keeps the contract of `new`. All go back, whatever is wrong with one.
        let (score, mask, names, tensors, numbers) = unsafe {
            let texts = (shims.text(words[0]), shims.text(words[1]), shims.text(words[2]));
            (texts.0, texts.1, texts.2, shims.listed(words[3]), shims.listed(words[4]))
        };
        // SAFETY: the caller keeps the contract of `new`. All go back, whatever is wrong with one: each
        // handle is this call's.
        let tensors: Vec<Owned> = tensors?.into_iter().map(|word| unsafe { shims.own(word) }).collect();
        let numbers = numbers?;
        let names = names?.into_string().map_err(|error| error.to_string())?;
        let names: Vec<CString> = names
            .split(',')
            .filter(|name| !name.is_empty())
            .map(|name| CString::new(name).map_err(|error| error.to_string()))
            .collect::<Result<_, _>>()?;
        let count = tensors.len() + numbers.len();
        ensure!(names.len() == count, "captured_names has {} names, but {count} are captured", names.len());
        let mut captured = Vec::with_capacity(count);
        for (at, name) in names.iter().enumerate() {
            let shown = || format!("captured {}", name.to_string_lossy());
            let tensor = tensors.get(at).map(|tensor| tensor.describe(&shown())).transpose()?;
            let real = numbers.get(at.wrapping_sub(tensors.len())).map_or(0.0, |&bits| f64::from_bits(bits));
            let (tensor, gradient) = (tensor.unwrap_or(Tensor::ABSENT), Tensor::ABSENT);
            captured.push(Captured { name: name.as_ptr(), tensor, gradient, real, integer: real as i64 });
        }
        Ok(Self { texts: [score?, mask?], _names: names, tensors, captured, wanted })
    }

    /// Makes the wanted gradients of captured tensors, and stores each beside its tensor.
    fn gradients(&mut self, shims: &'static Shims, request: &Request) -> Result<Vec<Owned>, Wrong> {
        let mut gradients = vec![];
        let leaves_out = leaves_rows_out(request, Slot::Dbias);
        for (at, captured) in self.captured.iter_mut().enumerate().take(self.tensors.len()) {
            let is_wanted = at < 63 && self.wanted >> at & 1 == 1;
            if !is_wanted {
                continue;
            }
            let of = captured.tensor;
            let made = shims.empty(of.shape(), of.dtype, of.device)?;
            if leaves_out {
                made.clear()?;
            }
            captured.gradient = made.describe("dcaptured")?;
            gradients.push(made);
        }
        Ok(gradients)
    }

    /// The request's functions; the pointers are valid as long as `self`.
    fn code(&self) -> Code {
        let [score, mask] = &self.texts;
        let text = |text: &CString| if text.is_empty() { std::ptr::null() } else { text.as_ptr() };
        Code {
            score: text(score),
            mask: text(mask),
            captured: self.captured.as_ptr(),
            num_captured: self.captured.len() as i64,
        }
    }
}

/// The seed in a host tensor of one element.
fn drawn(seed: &Tensor) -> Result<i64, Wrong> {
    let (shape, device) = (seed.shape(), seed.device);
    ensure!(shape.iter().product::<i64>() == 1, "{DRAWN_SEED} has shape {shape:?}, not one element");
    ensure!(device.kind == 0, "{DRAWN_SEED} is on {}, not on the host", device.name());
    of_type(DRAWN_SEED, seed, &[I64])?;
    ensure!(!seed.data.is_null(), "{DRAWN_SEED} has no memory (address 0)");
    // SAFETY: torch lends an element of 64 bits, in host memory.
    Ok(unsafe { seed.data.cast::<i64>().read_unaligned() })
}

/// Reports the errors that an operator's kernel reports on every device, for arguments that may have no memory.
///
/// # Errors
/// What is wrong with the arguments, in the kernel's words.
pub fn check(operator: &str, mut request: Request) -> Result<(), Wrong> {
    let found = OPERATORS.iter().find(|known| known.name == operator);
    let operator = found.ok_or_else(|| format!("{operator} is none of {} operators", OPERATORS.len()))?;
    for &(slot, take) in operator.tensors {
        if matches!(take, Take::Given | Take::Written) {
            request.required(slot)?;
        }
    }
    (operator.results)(&mut Making { request: &mut request, torch: None, results: Results::new() })?;
    plans::check(&request)
}

/// Runs a request with scratch from torch's allocator: a graph then has the scratch in its own pool, and no two streams
/// share it. The allocator reuses the memory only after the work that is queued on this stream.
fn run(shims: &'static Shims, request: &mut Request) -> Result<(), Wrong> {
    let device = plans::device(request)?;
    request.stream = shims.stream(device)?;
    plans::run(request, |bytes| {
        let bytes = i64::try_from(bytes).map_err(|error| format!("workspace of {bytes} bytes: {error}"))?;
        let scratch = shims.empty(&[bytes + plans::ALIGNMENT as i64], U8, device)?;
        let start = scratch.describe("workspace")?.data.cast::<u8>();
        // The aligned address stays inside the allocation, which has room for the alignment.
        Ok((scratch, start.wrapping_add(start.align_offset(plans::ALIGNMENT))))
    })
}

/// Results of an operator: tensors that torch allocates, or only their descriptions where arguments are checked.
struct Making<'a> {
    request: &'a mut Request,
    torch: Option<&'static Shims>,
    results: Results,
}

/// Whether lengths may leave out rows of a result. Kernels do not write such rows, so they are set to 0: undefined
/// memory must not become a gradient.
fn leaves_rows_out(request: &Request, result: Slot) -> bool {
    let of_q = [Slot::CuSeqlensQ, Slot::SequsedQ];
    let of_k = [Slot::CuSeqlensK, Slot::SequsedK];
    let given = |slots: [Slot; 2]| slots.into_iter().any(|slot| request.get(slot).is_some());
    match result {
        Slot::O | Slot::Lse | Slot::Dq => given(of_q),
        Slot::Dk | Slot::Dv => given(of_k),
        Slot::Dbias | Slot::Dsink => given(of_q) || given(of_k),
        _ => false,
    }
}

impl Making<'_> {
    /// Makes the next result and notes it in the request.
    fn make(&mut self, slot: Slot, sizes: &[i64], dtype: i32, device: Device) -> Result<(), Wrong> {
        let tensor = match self.torch {
            Some(shims) => {
                let made = shims.empty(sizes, dtype, device);
                let made = made.map_err(|text| format!("{}: {text}", name(slot)))?;
                let tensor = made.describe(name(slot))?;
                if leaves_rows_out(self.request, slot) && !sizes.contains(&0) {
                    made.clear().map_err(|text| format!("{}: {text}", name(slot)))?;
                }
                self.results.push(made);
                tensor
            }
            None => Tensor::described(sizes, dtype, device),
        };
        self.request.set(slot, tensor);
        Ok(())
    }

    /// Makes a gradient in the shape and type of the tensor `of`.
    fn gradient(&mut self, slot: Slot, of: Slot) -> Result<(), Wrong> {
        let of = *self.request.required(of)?;
        attention_type(name(slot), &of)?;
        self.make(slot, of.shape(), of.dtype, of.device)
    }

    /// Returns an empty tensor in place of a result that is not wanted.
    fn nothing(&mut self, device: Device) -> Result<(), Wrong> {
        self.results.extend(self.torch.map(|shims| shims.empty(&[0], FMHA_F32, device)).transpose()?);
        Ok(())
    }
}
