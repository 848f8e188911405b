//! Fused multi-head attention: one API and one meaning on every device.
//!
//! ```
//! use fmha::{Attention, Dims, MaskSpec};
//!
//! let dims = Dims {
//!     batch: 1, seqlen_q: 4, seqlen_k: 4, num_heads_q: 2, num_heads_kv: 1, head_dim_qk: 8, head_dim_v: 8,
//! };
//! let (q, k, v) = (vec![0.5f32; 64], vec![0.5f32; 32], vec![2.0f32; 32]);
//! let options = Attention { mask: MaskSpec::CAUSAL, ..Attention::new(dims) };
//! let result = fmha::attention(&q, &k, &v, &options)?;
//! assert!(result.o.iter().all(|&o| (o - 2.0).abs() < 1e-6));
//! # Ok::<(), fmha::Error>(())
//! ```
//!
//! - [`attention`] takes slices of `f32`, `f16` or `bf16` and gives O and LSE: where to start.
//! - [`Device::open`] gives the device that a [`Backend`] names; [`devices`] lists what there is, and
//!   why the rest is absent. On a device a [`FwdProblem`] becomes a plan and the plan runs: the
//!   life of a call, told in [`core`].
//! - [`register`] gives a backend of your own, an [`FmhaBackend`], a name.
//! - Everything of [`core`] is re-exported here, so that a user needs this crate alone.
//!
//! The command `fmha`, a crate of its own (`cli/`), is this library's first user.

mod attention;
mod memory;
mod registry;

pub use fmha_core as core;
pub use fmha_core::*;
pub use half::{bf16, f16};

pub use attention::{Attention, AttentionOutput, Element, attention, attention_on};
pub use registry::{Backend, Device, Found, PassedOver, all, devices, emulated_launches, register};
