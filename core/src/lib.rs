//! The meaning of attention in `fmha`: one contract for every backend, with no vendor's code in it.
//!
//! # The life of a call
//!
//! ```text
//!  FwdProblem      shapes, dtypes, strides, mask, bias; no pointers
//!      │ validate()                     Err(Problem): the caller's, names field and number
//!  ValidFwd        cannot be made otherwise
//!      │ device.plan_fwd()              Err(Unsupported): every kernel's refusal
//!  FwdPlan         opaque: kernel, tile, steps, workspace, promises, device
//!      │ plan.run(&mut args, &stream)   many times
//!      ├─ check    the stream is this device's; each slice covers its extent and is aligned; outputs
//!      │           overlap nothing; lengths, on the host and where they were asked for
//!      ├─ clear    what the workspace wants zero, on the caller's stream
//!      └─ launch   the backend's part: each step
//!  O, LSE                               Err(Driver): which call, which code
//! ```
//!
//! - [`FwdProblem`], [`BwdProblem`] and [`CombineProblem`] say what to compute. They are plain
//!   structs with public fields; [`validate`](FwdProblem::validate) turns them into [`ValidFwd`],
//!   [`ValidBwd`] and [`ValidCombine`], the only forms that a backend takes.
//! - [`MaskSpec`] is what a user asks for; `MaskBand` is the one form that kernels see.
//! - [`Device`] is a device that can run attention: [`plan_fwd`](Device::plan_fwd) chooses,
//!   [`run`](Plan::run) checks and queues.
//! - [`FmhaBackend`] is what a vendor writes: it chooses and launches, and leaves the checks to core.
//! - [`FwdArgs`] has the pointers. [`DevSlice::from_raw`] is where the caller promises that they are
//!   memory; everything after it is checked.
//! - [`mod@reference`] computes the same by definition, in f64.
//!
//! Words are those of the glossary in `ARCHITECTURE.md`.
//!
//! Items that a user needs are at the root, and in `fmha` under the same names. The modules that are not
//! shown here are public for the crates of this workspace alone: they change as those need.

// A floor has what one step of a call's life needs: problem, plan, call. Paths without a floor's name are those
// that other crates use.
#[doc(hidden)]
pub mod cache;
#[doc(hidden)]
pub mod call;
#[doc(hidden)]
pub mod plan;
#[doc(hidden)]
pub mod problem;
pub mod reference;
#[doc(hidden)]
pub mod text;
#[doc(hidden)]
pub mod tune;

#[doc(hidden)]
pub mod emulators;
#[doc(hidden)]
pub mod env;
#[doc(hidden)]
pub mod error;
// Public as a module, not re-exported: its `Score` is a different type than a problem's `Score`.
pub mod expr;
pub mod fork;
#[doc(hidden)]
pub mod host_memory;
mod records;
mod setters;
// Named in paths: `sparse::choose`.
pub mod sparse;
#[cfg(test)]
mod toy;

use call::peers;
#[doc(hidden)]
pub use call::{args, backend, device, lengths, lists, mask_object, queues, scaled_rows, second, seq, tree};
#[doc(hidden)]
pub use plan::{roofline, work};
#[doc(inline)]
pub use problem::{block_scales, fp8};
#[doc(hidden)]
pub use problem::{
    built_in, bwd, combine, dropout, dtype, kv, layout, mask, masks, operation, quantize, score,
};
#[doc(hidden)]
pub use text::{
    abi, bind, bwd_workspace, cache_update, choose_params, code_source, fields, functions, index_loss_params,
    memory, quantize_params, scale_params, small_outputs, source, spec, value_params,
};

#[doc(hidden)]
pub use args::check_addresses;
pub use args::{
    Arrivals, BlockTable, BwdArgs, CacheArgs, CacheSlice, ChooseArgs, CombineArgs, DevSlice, DevSliceMut,
    Elem, ElemType, FwdArgs, IndexLossArgs, MaskArgs, MemorySpace, PartialResult, QuantizeArgs, ScoreArgs,
    SecondArgs, SeqArgs,
};
pub use backend::{DevBuffer, DeviceMemory, FmhaBackend};
pub use block_scales::BlockFormat;
pub use bwd::{BiasGrad, BwdProblem, ValidBwd};
#[doc(hidden)]
pub use cache::{Bundle, Precompile};
pub use call::{Call, Launch, Planned, Problem};
pub use combine::{CombineProblem, Merge, ValidCombine};
pub use device::{Device, Event, Recording, Stream};
pub use dropout::DropoutSeed;
pub use dtype::DType;
pub use error::{Error, ProblemError, Refusal, Result};
pub use kv::{Append, Rotary, RotaryPairs};
pub use layout::{KvLayout, QLayout, Shape, Strides, Totals, VLayout};
#[doc(hidden)]
pub use mask::{BlockClass, MaskBand, MaskBounds, MaskKind};
pub use mask::{MaskAlign, MaskShape, MaskSpec};
pub use mask_object::{ListsCall, MaskObject, TileLists, TileOf};
pub use masks::{BlockList, BlockLists, Intervals, MaskAxes, MaskBits, Masks};
pub use operation::{AnyProblem, Operation};
pub use peers::{Peers, Word};
pub use plan::{
    Accuracy, BwdPlan, ChoosePlan, CombinePlan, Explain, FwdPlan, IndexLossPlan, LaunchShape, Plan,
    PlanOptions, PlanParts, Promises, QuantizePlan, ResourceUsage, ScoreSums, Step, Workspace,
};
pub use problem::{
    BlockScales, CacheRows, CacheScales, CacheUse, CapturedGrad, CapturedTensor, Code, DTypes, Dims, Dropout,
    Extents, FwdProblem, KeyLists, Layouts, ListEntries, ListLength, MAX_ARRIVALS, Part, PartNumber, Scales,
    Score, SecondCache, SmallOutputs, TensorStrides, ValidFwd,
};
pub use quantize::{QuantizeProblem, TensorScale, ValidQuantize};
pub use queues::Queues;
pub use roofline::Roofline;
pub use score::{Bias, BiasBroadcast, Descale, ElementwiseBias};
#[doc(hidden)]
pub use seq::SeqSpan;
#[doc(hidden)]
pub use spec::FwdSpec;
