//! The machine: one cluster of blocks, its warps, and what each instruction does.

mod alu;
mod barrier;
mod bulk;
mod cluster;
mod collective;
mod convert;
mod fragment;
mod ldst;
mod matrix;
mod mbarrier;
mod rare;
mod tensor;
mod tmem;
mod tmma;
mod warp;
mod wgmma;

pub(crate) use alu::detect;
pub(crate) use cluster::{Cluster, Launch, Status};
pub(crate) use tensor::Swizzle;
pub use tensor::TensorMap;
pub(crate) use warp::Warp;

use crate::fault::{Fault, FaultKind};

type Exec<T> = Result<T, Box<Fault>>;

fn fault(kind: FaultKind, text: impl Into<String>) -> Box<Fault> {
    Box::new(Fault::new(kind, text))
}
