//! Registers that `wgmma` reads or writes until its group is waited for. PTX ISA 9.7.15.7.

use super::{Exec, Tracker};
use crate::exec::Warp;
use crate::fault::{Fault, FaultKind};
use crate::op::{Code, File, Program, Reg};

/// Registers of a warp in flight.
#[derive(Clone, Debug, Default)]
pub(super) struct Flight {
    /// Group of the last product that writes, or reads, each word row.
    accumulator: Vec<u32>,
    operand: Vec<u32>,
    /// Time at which an ordinary instruction last wrote, or read, each word row, and at which `wgmma.fence`
    /// last ran.
    written: Vec<u64>,
    read: Vec<u64>,
    fence: u64,
    done: u32,
    newest: u32,
}

impl Tracker {
    pub(crate) fn wgmma_done(&mut self, warp: &Warp) {
        let id = self.id(warp);
        self.advance(id, self.wgmma_track(id), warp.asynchrony.wgmma_done);
        self.flights[id as usize].done = warp.asynchrony.wgmma_done;
    }

    pub(crate) fn wgmma_fence(&mut self, warp: &Warp) {
        let id = self.id(warp) as usize;
        self.flights[id].fence = warp.executed;
    }

    /// Reports an instruction that touches a register in flight, before it runs.
    pub(crate) fn step(&mut self, warp: &Warp, program: &Program, pc: u32, active: u32) -> Exec<()> {
        if self.lines.is_empty() {
            self.lines.clone_from(&program.lines);
        }
        let id = self.id(warp) as usize;
        self.step_tensor(id, program, pc)?;
        let flight = &mut self.flights[id];
        if flight.written.is_empty() {
            let rows = program.words as usize;
            flight.accumulator = vec![0; rows];
            flight.operand = vec![0; rows];
            flight.written = vec![0; rows];
            flight.read = vec![0; rows];
        }
        let inst = &program.code[pc as usize];
        if matches!(inst.code, Code::Wgmma(_)) || active == 0 {
            return Ok(());
        }
        let (list_dst, list_src) = program.list(inst);
        let word = |r: &&Reg| r.file() == Some(File::Word);
        let busy = flight.newest > flight.done;
        for reg in inst.dst.iter().chain(list_dst).filter(word) {
            let row = reg.row();
            if busy && (flight.accumulator[row] > flight.done || flight.operand[row] > flight.done) {
                return Err(in_flight(flight, row, "written"));
            }
            flight.written[row] = warp.executed;
        }
        for reg in inst.src.iter().chain(list_src).filter(word) {
            if busy && flight.accumulator[reg.row()] > flight.done {
                return Err(in_flight(flight, reg.row(), "read"));
            }
            flight.read[reg.row()] = warp.executed;
        }
        Ok(())
    }

    /// A `wgmma` is issued: its registers must be fenced, and are in flight from here.
    pub(crate) fn wgmma_issue(&mut self, warp: &Warp, group: u32, dst: &[Reg], a: &[Reg]) -> Exec<()> {
        let id = self.id(warp) as usize;
        let flight = &mut self.flights[id];
        let missing = |what: &str| Box::new(Fault::new(FaultKind::MissingWgmmaFence, what));
        if flight.fence == 0 {
            return Err(missing("the first wgmma of the warp, and no wgmma.fence before it"));
        }
        if dst.iter().any(|r| flight.written[r.row()].max(flight.read[r.row()]) > flight.fence) {
            return Err(missing("an accumulator was accessed after the last wgmma.fence"));
        }
        if a.iter().any(|r| flight.written[r.row()] > flight.fence) {
            return Err(missing("a register of operand A was written after the last wgmma.fence"));
        }
        for reg in a {
            if flight.accumulator[reg.row()] > flight.done {
                return Err(in_flight(flight, reg.row(), "read as operand A"));
            }
            flight.operand[reg.row()] = group;
        }
        for reg in dst {
            if flight.operand[reg.row()] > flight.done {
                return Err(in_flight(flight, reg.row(), "overwritten by another wgmma"));
            }
            flight.accumulator[reg.row()] = group;
        }
        flight.newest = group;
        Ok(())
    }
}

fn in_flight(flight: &Flight, row: usize, verb: &str) -> Box<Fault> {
    let group = flight.accumulator[row].max(flight.operand[row]);
    let text = format!(
        "a register of wgmma group {group} is {verb}, but wgmma.wait_group has covered only {} groups",
        flight.done
    );
    Box::new(Fault::new(FaultKind::RegisterInFlight, text))
}
