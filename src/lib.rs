//! Fused multi-head attention: one API and one meaning on every device.
//!
//! ```
//! use fmha::{Attention, Dims, MaskSpec, bf16};
//!
//! let dims = Dims::batch(1).seqlens(4, 4).heads(2, 1).head_dim(8);
//! let two = bf16::from_f32(2.0);
//! let (q, k, v) = (vec![bf16::ONE; 64], vec![bf16::ONE; 32], vec![two; 32]);
//! let options = Attention::new(dims).mask(MaskSpec::CAUSAL);
//! let result = fmha::attention(&q, &k, &v, &options)?;
//! assert!(result.o.iter().all(|&o| o == two));
//! # Ok::<(), fmha::Error>(())
//! ```
//!
//! - [`attention`] takes slices of `f32`, `f16` or `bf16` and gives O and LSE: where to start.
//! - [`attention_into`] takes [`TensorView`]s: any strides, host or device memory, and with the feature
//!   `ndarray` arrays.
//! - [`Backend::open`] gives the device that a [`Backend`] names; [`devices`] lists what there is, and
//!   why the rest is absent. On a device a [`FwdProblem`] becomes a plan and the plan runs:
//!
//! ```text
//!  FwdProblem      shapes, dtypes, strides, mask, bias; no pointers
//!      │ validate()                     Err(Problem): the caller's, names field and number
//!  ValidFwd        cannot be made otherwise
//!      │ device.plan_fwd()              Err(Unsupported): every kernel's refusal
//!  FwdPlan         opaque: kernel, tile, steps, workspace, promises
//!      │ plan.run(&mut args, &stream)       many times
//!  O, LSE                               Err(Driver): which call, which code
//! ```
//!
//! - With the feature `log` plans, compiled kernels and tuning are records of the crate `log`, whose targets are
//!   `fmha::plan`, `fmha::compile` and `fmha::tune`; with `nvtx` and `roctx` a profiler of the vendor's shows each
//!   plan, run and launch as a range.
//! - [`register`] gives a backend of your own, an [`FmhaBackend`], a name.
//! - What a user needs of `fmha-core` is re-exported here by name. `use fmha::*` hides nothing of the language:
//!
//! ```
//! use fmha::*;
//!
//! fn bytes_of_dims(batch: &str) -> Result<usize, String> {
//!     let batch = batch.parse().map_err(|_| format!("batch {batch}"))?;
//!     let one = Dims::batch(batch).seqlens(4, 4).heads(2, 1).head_dim(8);
//!     Ok(core::mem::size_of_val(&one))
//! }
//! assert_eq!(bytes_of_dims("3"), Ok(core::mem::size_of::<Dims>()));
//! ```
//!
//! The command `fmha`, a crate of its own (`cli/`), is this library's first user.

mod attention;
mod memory;
mod registry;
pub mod sparse;
mod view;

pub use fmha_core::block_scales;
#[doc(hidden)]
pub use fmha_core::built_in;
pub use fmha_core::quantize::{QuantizeProblem, TensorScale, ValidQuantize};
pub use half::{bf16, f16};

// Items are named one by one: a glob would export internal items of the workspace, a `Result` that hides std's, and
// modules that hide `core`'s.
pub use fmha_core::{
    Accuracy, AnyProblem, Append, Arrivals, Bias, BiasBroadcast, BiasGrad, BlockFormat, BlockList,
    BlockLists, BlockScales, BlockTable, BwdArgs, BwdPlan, BwdProblem, CacheArgs, CacheRows, CacheScales,
    CacheSlice, CacheUse, Call, CapturedGrad, CapturedTensor, ChooseArgs, ChoosePlan, Code, CombineArgs,
    CombinePlan, CombineProblem, DType, DTypes, Descale, DevBuffer, DevSlice, DevSliceMut, Device,
    DeviceMemory, Dims, Dropout, DropoutSeed, Elem, ElemType, ElementwiseBias, Error, Event, Explain,
    Extents, FmhaBackend, FwdArgs, FwdPlan, FwdProblem, IndexLossArgs, IndexLossPlan, Intervals, KeyLists,
    KvLayout, Launch, LaunchShape, Layouts, ListEntries, ListLength, ListsCall, MAX_ARRIVALS, MaskAlign,
    MaskArgs, MaskAxes, MaskBits, MaskObject, MaskShape, MaskSpec, Masks, MemorySpace, Merge, Operation,
    Part, PartNumber, PartialResult, Peers, Plan, PlanOptions, PlanParts, Planned, Problem, ProblemError,
    Promises, QLayout, QuantizeArgs, QuantizePlan, Queues, Recording, Refusal, ResourceUsage, Roofline,
    Rotary, RotaryPairs, Scales, Score, ScoreArgs, ScoreSums, SecondArgs, SecondCache, SeqArgs, Shape,
    SmallOutputs, Step, Stream, Strides, TensorStrides, TileLists, TileOf, Totals, VLayout, ValidBwd,
    ValidCombine, ValidFwd, Word, Workspace, expr,
};

pub use attention::{Attention, AttentionOutput, attention, attention_into, attention_into_on, attention_on};
pub use registry::{Backend, Found, PassedOver, all, devices, emulated_launches, passed_over, register};
pub use view::{Element, TensorView, TensorViewMut};
