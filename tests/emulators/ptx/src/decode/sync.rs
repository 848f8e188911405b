//! Decoding of barriers, collectives, fences and cluster control. PTX ISA 9.7.13 and 9.7.19.

use super::arith::last_type;
use super::memory::{atom_op, space};
use super::{Decoder, unknown};
use crate::ast::{Operand, RawInst, Ty};
use crate::fault::Fault;
use crate::op::{Code, Inst, Mbar, MbarOp, Reg, Shfl, Vote};

impl Decoder<'_> {
    pub(super) fn sync(&mut self, raw: &RawInst) -> Result<Option<Inst>, Fault> {
        let second = raw.words.get(1).map_or("", String::as_str);
        Ok(Some(match raw.words[0].as_str() {
            "bar" if second == "warp" => {
                let mut inst = Inst::new(Code::WarpSync);
                inst.src[0] = self.src(raw.operand(0)?, Ty::B32)?;
                inst
            }
            "barrier" if second == "cluster" => match raw.words.get(2).map(String::as_str) {
                Some("arrive") => Inst::new(Code::ClusterArrive { relaxed: raw.has("relaxed") }),
                Some("wait") => Inst::new(Code::ClusterWait),
                _ => return Err(unknown(raw)),
            },
            "bar" | "barrier" => self.barrier(raw)?,
            "membar" => Inst::new(Code::FenceMemory),
            "fence" => match (second, raw.words.get(2).map_or("", String::as_str)) {
                ("proxy", "async" | "async::generic") => Inst::new(Code::FenceProxyAsync),
                ("proxy", w) if w.starts_with("tensormap") => Inst::new(Code::FenceTensorMap),
                ("proxy", w) if w.starts_with("async") => Inst::new(Code::FenceProxyAsync),
                ("mbarrier_init", _) => Inst::new(Code::FenceMbarrierInit),
                ("acq_rel" | "sc" | "acquire" | "release", _) | ("proxy", "alias") => {
                    Inst::new(Code::FenceMemory)
                }
                _ => return Err(unknown(raw)),
            },
            "shfl" => {
                let mode = match raw.words.get(2).map(String::as_str) {
                    Some("up") => Shfl::Up,
                    Some("down") => Shfl::Down,
                    Some("bfly") => Shfl::Bfly,
                    Some("idx") => Shfl::Idx,
                    _ => return Err(unknown(raw)),
                };
                let mut inst = Inst::new(Code::Shfl(mode));
                self.pair(&mut inst, raw.operand(0)?, Ty::B32)?;
                for i in 0..4 {
                    inst.src[i] = self.src(raw.operand(i + 1)?, Ty::B32)?;
                }
                inst
            }
            "vote" => {
                let (vote, ty) = match raw.words.get(2).map(String::as_str) {
                    Some("all") => (Vote::All, Ty::Pred),
                    Some("any") => (Vote::Any, Ty::Pred),
                    Some("uni") => (Vote::Uni, Ty::Pred),
                    Some("ballot") => (Vote::Ballot, Ty::B32),
                    _ => return Err(unknown(raw)),
                };
                let mut inst = Inst::new(Code::Vote(vote));
                inst.dst[0] = self.dst(raw.operand(0)?, ty)?;
                let (p, negated) = self.pred_or_constant(raw.operand(1)?)?;
                (inst.src[0], inst.src_not) = (p, negated);
                inst.src[1] = self.src(raw.operand(2)?, Ty::B32)?;
                inst
            }
            "match" => {
                let ty = last_type(raw)?;
                let mut inst = Inst::new(if second == "any" { Code::MatchAny } else { Code::MatchAll });
                self.pair(&mut inst, raw.operand(0)?, Ty::B32)?;
                inst.src[0] = self.src(raw.operand(1)?, ty)?;
                inst.src[1] = self.src(raw.operand(2)?, Ty::B32)?;
                inst
            }
            "elect" => {
                let mut inst = Inst::new(Code::Elect);
                self.pair(&mut inst, raw.operand(0)?, Ty::B32)?;
                inst.src[0] = self.src(raw.operand(1)?, Ty::B32)?;
                inst
            }
            "redux" => {
                let op = atom_op(raw).ok_or_else(|| unknown(raw))?;
                let (ty, abs, nan) = (last_type(raw)?, raw.has("abs"), raw.has("NaN"));
                let mut inst = Inst::new(Code::Redux { op, ty, abs, nan });
                inst.dst[0] = self.dst(raw.operand(0)?, Ty::B32)?;
                inst.src[0] = self.src(raw.operand(1)?, Ty::B32)?;
                inst.src[1] = self.src(raw.operand(2)?, Ty::B32)?;
                inst
            }
            "activemask" => {
                let mut inst = Inst::new(Code::ActiveMask);
                inst.dst[0] = self.dst(raw.operand(0)?, Ty::B32)?;
                inst
            }
            "mbarrier" => self.mbarrier(raw)?,
            "setmaxnreg" => {
                let mut inst = Inst::new(Code::SetMaxNReg { increase: second == "inc" });
                inst.src[0] = self.src(raw.operand(0)?, Ty::U32)?;
                inst
            }
            "griddepcontrol" => match second {
                "wait" => Inst::new(Code::GridDepWait),
                "launch_dependents" => Inst::new(Code::GridDepLaunch),
                _ => return Err(unknown(raw)),
            },
            "nanosleep" | "pmevent" | "brkpt" => Inst::new(Code::Nop),
            _ => return Ok(None),
        }))
    }

    /// `d|p` or `d`.
    fn pair(&mut self, inst: &mut Inst, operand: &Operand, ty: Ty) -> Result<(), Fault> {
        match operand {
            Operand::Pair(d, p) => {
                inst.dst[0] = self.dst(d, ty)?;
                inst.dst[1] = self.dst(p, Ty::Pred)?;
            }
            d => inst.dst[0] = self.dst(d, ty)?,
        }
        Ok(())
    }

    fn pred_or_constant(&mut self, operand: &Operand) -> Result<(Reg, bool), Fault> {
        match operand {
            // No predicate at all reads as false.
            Operand::Int(v) => Ok((Reg::NONE, *v != 0)),
            other => self.pred(other),
        }
    }

    fn barrier(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let ops = &raw.operands;
        let mut inst;
        if raw.has("sync") || raw.has("arrive") {
            let arrive = raw.has("arrive");
            inst = Inst::new(Code::Bar { arrive, red: None, popc: false });
            inst.src[0] = self.src(raw.operand(0)?, Ty::U32)?;
            if let Some(count) = ops.get(1) {
                inst.src[1] = self.src(count, Ty::U32)?;
            }
        } else if raw.has("red") {
            let popc = raw.has("popc");
            let red = if raw.has("and") { Vote::All } else { Vote::Any };
            inst = Inst::new(Code::Bar { arrive: false, red: Some(red), popc });
            inst.dst[0] = self.dst(raw.operand(0)?, if popc { Ty::U32 } else { Ty::Pred })?;
            inst.src[0] = self.src(raw.operand(1)?, Ty::U32)?;
            if ops.len() == 4 {
                inst.src[1] = self.src(raw.operand(2)?, Ty::U32)?;
            }
            let last = ops.last().ok_or_else(|| unknown(raw))?;
            (inst.src[2], inst.src_not) = self.pred_or_constant(last)?;
        } else {
            return Err(unknown(raw));
        }
        Ok(inst)
    }

    fn mbarrier(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let ops = &raw.operands;
        let op = match raw.word(1) {
            "init" => MbarOp::Init,
            "inval" => MbarOp::Inval,
            "arrive" | "arrive_drop" => MbarOp::Arrive {
                expect: raw.has("expect_tx"),
                drop: raw.word(1) == "arrive_drop",
                no_complete: raw.has("noComplete"),
            },
            "expect_tx" => MbarOp::ExpectTx,
            "complete_tx" => MbarOp::CompleteTx,
            "test_wait" => MbarOp::Test { parity: raw.has("parity"), may_block: false },
            "try_wait" => MbarOp::Test { parity: raw.has("parity"), may_block: true },
            "pending_count" => MbarOp::PendingCount,
            _ => return Err(unknown(raw)),
        };
        // The results of some come before the address.
        let (dst, at) = match op {
            MbarOp::Arrive { .. } => (self.any(raw.operand(0)?, Ty::B64)?, 1),
            MbarOp::Test { .. } => (self.dst(raw.operand(0)?, Ty::Pred)?, 1),
            MbarOp::PendingCount => {
                let mut inst = Inst::new(Code::Mbar(Mbar {
                    op,
                    space: space(raw),
                    offset: 0,
                    relaxed: false,
                    of_cluster: false,
                }));
                inst.dst[0] = self.dst(raw.operand(0)?, Ty::U32)?;
                inst.src[1] = self.src(raw.operand(1)?, Ty::B64)?;
                return Ok(inst);
            }
            _ => (Reg::NONE, 0),
        };
        let (base, offset) = self.address(raw.operand(at)?)?;
        let (relaxed, of_cluster) = (raw.has("relaxed"), raw.has("cluster"));
        let mbar = Mbar { op, space: space(raw), offset, relaxed, of_cluster };
        let mut inst = Inst::new(Code::Mbar(mbar));
        inst.dst[0] = dst;
        inst.src[0] = base;
        if let Some(value) = ops.get(at + 1) {
            let state = matches!(op, MbarOp::Test { parity: false, .. });
            inst.src[1] = self.src(value, if state { Ty::B64 } else { Ty::U32 })?;
        }
        Ok(inst)
    }
}
