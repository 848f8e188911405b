//! Attention over several devices: each rank has some rows of a sequence that no rank has whole.
//!
//! ```text
//!  Problem    the whole, as one device would have it, and which rows each rank has (Partition)
//!      │ FwdPlan::new(&problem, group, &device, &options)   all ranks together: they agree, or all hear who does not
//!  FwdPlan    a scheme, chosen and why; its steps on this rank
//!      │ plan.run(&mut args, &stream)                       a rank's own tensors; many times
//!  O, LSE     of the rank's own queries                     Err: the rank and the field, the same on every rank
//! ```
//!
//! - [`Group`]: the ranks. [`threads`] of a process, processes that [`connect`] over TCP.
//! - [`Scheme`]: what travels. Positions are those of the whole sequence for mask, ALiBi and dropout, however
//!   it is cut.
//! - [`choose`] says what each scheme would cost over any number of ranks, by a [model](Links) of kernels and links.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use fmha::{Backend, DType, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem, MaskSpec};
//! use fmha_dist::{FwdPlan, Options, Partition, Problem, threads};
//!
//! let dims = Dims::batch(1).seqlens(100, 100).heads(2, 1).head_dim(8);
//! let whole = FwdProblem::batch(DType::F32, dims).mask(MaskSpec::CAUSAL);
//! let problem = Problem::new(whole, Partition::zig_zag(100, 3));
//! let groups = threads(3, Duration::from_secs(10));
//! std::thread::scope(|scope| {
//!     for (rank, group) in (0..).zip(groups) {
//!         let problem = &problem;
//!         scope.spawn(move || {
//!             let device = Backend::Cpu.open()?;
//!             let mut plan = FwdPlan::new(problem, Arc::new(group), &device, &Options::default()).unwrap();
//!             let rows = problem.q.rows_of(rank) as usize;
//!             let (q, k, v) = (vec![0.5f32; rows * 16], vec![0.5f32; rows * 8], vec![2.0f32; rows * 8]);
//!             let mut o = vec![0.0f32; rows * 16];
//!             let [q, k, v] = [&q, &k, &v].map(|elems| DevSlice::host(elems));
//!             let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut o));
//!             plan.run(&mut args, &device.default_stream()).unwrap();
//!             assert!(o.iter().all(|&o| (o - 2.0).abs() < 1e-5));
//!             Ok::<(), fmha::Error>(())
//!         });
//!     }
//! });
//! ```

mod agree;
mod arrivals;
mod builder;
mod error;
mod group;
mod model;
mod partition;
mod plan;
mod problem;
mod program;
mod scheme;

pub use agree::refuse;
pub use error::{Error, Result};
pub use group::{Block, Exchange, Group, Host, MAX_RANKS, Nccl, Parcel, Rendezvous, connect, threads};
pub use model::{Estimate, Links};
pub use partition::Partition;
pub use plan::{BwdPlan, Choice, FwdPlan, Options, choose};
pub use problem::Problem;
pub use scheme::{SCHEMES, Scheme};
