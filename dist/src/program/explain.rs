//! A program for a reader.

use std::fmt::Write as _;

use fmha::{FwdProblem, Merge};

use super::{Program, Step};
use crate::arrivals::Coming;

impl Program {
    /// One line a step.
    pub(crate) fn explain(&self, rank: u32) -> String {
        let mut text = String::new();
        for (number, step) in self.steps.iter().enumerate() {
            let _ = writeln!(text, "{number:>4}  {}", self.line(step, rank));
        }
        text
    }

    fn line(&self, step: &Step, rank: u32) -> String {
        match step {
            Step::Send => {
                let sent = |coming: &Coming| (coming.sends.len(), coming.bytes_sent());
                let (pieces, bytes) = self.coming.as_ref().map_or((0, 0), sent);
                format!("send {bytes} bytes in {pieces} pieces by copy engines, a flag behind each")
            }
            Step::Fill { .. } => "copy".to_owned(),
            Step::Release { .. } => "let the next run send".to_owned(),
            &Step::SendHome { step, .. } => {
                format!("send {} bytes of dK and dV home by copy engines", self.sent_home(step))
            }
            Step::AwaitHome { .. } => "wait for the others' dK and dV".to_owned(),
            Step::Exchange { exchange, .. } => {
                let peers = exchange.sends.iter().map(|parcel| parcel.peer);
                let mut peers: Vec<u32> = peers.filter(|&peer| peer != rank).collect();
                peers.dedup();
                if peers.is_empty() {
                    "copy".to_owned()
                } else {
                    format!("send {} bytes to ranks {peers:?}", exchange.bytes_sent(rank))
                }
            }
            Step::AllGather { bytes, .. } => {
                format!("gather {bytes} bytes of each of {} ranks on all, at once", self.ranks)
            }
            Step::Forward { plan, .. } => {
                format!("forward, {}: {}", queries_and_keys(plan.problem()), plan.kernel())
            }
            Step::Backward(step) => {
                let fwd = step.plan.problem().fwd();
                format!("backward, {}: {}", queries_and_keys(fwd), step.plan.kernel())
            }
            Step::Combine { plan, parts, .. } => format!("combine {} parts: {}", parts.len(), plan.kernel()),
            Step::Sum { plan, terms, .. } => {
                let held = usize::from(plan.problem().merge == Merge::AddTo);
                format!("sum of {} f32 terms: {}", terms.len() + held, plan.kernel())
            }
        }
    }
}

fn queries_and_keys(part: &FwdProblem) -> String {
    let (i, j) = (part.part.position_q, part.part.position_k);
    format!("queries {i}..{} x keys {j}..{}", i + part.dims.seqlen_q, j + part.dims.seqlen_k)
}
