//! Classes of instructions: the few classes that share a pipe of the multiprocessor.

use crate::op::{Code, Hf, Wf};

const FLOAT: &str = "float multiply, add";

/// The class of an instruction, named for the pipe that it takes on the hardware, or for what it waits on.
pub(crate) fn class_of(code: &Code) -> &'static str {
    match code {
        Code::W { f, .. } => word(*f),
        // Two results a lane: half the instructions, the same work for the pipe.
        Code::Pair32(slow) if word(slow.f) == FLOAT => "packed float multiply, add",
        Code::WSlow(slow) | Code::Pair32(slow) => word(slow.f),
        Code::Half { f: Hf::Ex2 | Hf::Tanh, .. } => "special function",
        Code::Half { .. } => "16-bit float",
        // Between integers the assembler makes a move of it, or of the register pair that a wider one takes.
        Code::Cvt(cvt) if cvt.to.is_float() || cvt.from.is_float() => "conversion",
        Code::Ld(_) | Code::St(_) | Code::Atom(_) => "load, store, atomic",
        Code::LdMatrix { .. } | Code::StMatrix { .. } | Code::MovMatrix => "matrix load, store",
        Code::Shfl(_)
        | Code::Vote(_)
        | Code::MatchAny
        | Code::MatchAll
        | Code::Elect
        | Code::Redux { .. } => "shuffle, vote",
        Code::Bra { .. } | Code::Brx { .. } | Code::Exit => "branch",
        Code::Bar { .. }
        | Code::WarpSync
        | Code::ClusterArrive { .. }
        | Code::ClusterWait
        | Code::Mbar(_) => "barrier",
        Code::CpAsync { .. } | Code::Bulk(_) | Code::CpAsyncCommit | Code::BulkCommit => "asynchronous copy",
        Code::Wgmma(_) | Code::Mma(_) | Code::Tcgen { .. } => "tensor",
        Code::CpAsyncWait { .. }
        | Code::BulkWait { .. }
        | Code::WgmmaFence
        | Code::WgmmaCommit
        | Code::WgmmaWait
        | Code::FenceMemory
        | Code::FenceProxyAsync
        | Code::FenceMbarrierInit => "fence, group",
        _ => "integer, move, predicate",
    }
}

fn word(f: Wf) -> &'static str {
    match f {
        Wf::FEx2 | Wf::FLg2 | Wf::FRcp | Wf::FRsqrt | Wf::FSqrt | Wf::FTanh | Wf::FSin | Wf::FCos => {
            "special function"
        }
        Wf::FAdd | Wf::FSub | Wf::FMul | Wf::FFma | Wf::FDiv => FLOAT,
        // The comparing ones go down the integer pipe, at half the rate of multiply-adds.
        Wf::FMin | Wf::FMax | Wf::FMinNan | Wf::FMaxNan | Wf::FMin3 | Wf::FMax3 => "float minimum, maximum",
        _ => "integer, move, predicate",
    }
}
