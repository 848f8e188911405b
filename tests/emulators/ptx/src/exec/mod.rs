//! The machine: one cluster of blocks, its warps, and what each instruction does.

mod alu;
mod atomic;
mod barrier;
mod bulk;
mod cluster;
mod collective;
mod compare;
mod convert;
mod dispatch;
mod ending;
mod fragment;
mod half;
mod ldst;
mod matrix;
mod mbarrier;
mod operand;
mod rare;
mod scaled;
mod specials;
mod tensor;
mod tmem;
mod tmma;
mod transfer;
mod warp;
mod wgmma;
mod wide;

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
