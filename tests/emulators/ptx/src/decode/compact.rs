//! Rows for registers. PTX names a register for every value, thousands a kernel; two whose lives never meet share a
//! row, so that a warp's registers stay in the cache. Linear scan over live intervals (Poletto and Sarkar, TOPLAS
//! 1999), the intervals widened over the blocks where a register is live.
//!
//! A register that may be read before it is written lives from the entry, and so keeps its poison. What
//! `wgmma` reads or writes lives until each `wgmma.wait_group` that can follow: it is in flight until then.
//! What it writes lives from the `wgmma.fence` before it, behind which no other instruction may touch its
//! row.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::op::{Code, File, Inst, Program, Reg};

/// A set of small numbers.
#[derive(Clone, PartialEq, Eq)]
struct Set(Vec<u64>);

impl Set {
    fn new(n: usize) -> Self {
        Self(vec![0; n.div_ceil(64)])
    }

    fn insert(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }

    fn contains(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 != 0
    }

    fn each(&self, mut f: impl FnMut(usize)) {
        for (n, &word) in self.0.iter().enumerate() {
            let mut rest = word;
            while rest != 0 {
                f(n * 64 + rest.trailing_zeros() as usize);
                rest &= rest - 1;
            }
        }
    }
}

struct Block {
    first: usize,
    /// One past the last instruction.
    end: usize,
    next: Vec<usize>,
    uses: Set,
    kills: Set,
    live_in: Set,
    live_out: Set,
}

/// Numbers of registers over the three files.
struct Numbers {
    words: usize,
    doubles: usize,
    all: usize,
}

impl Numbers {
    fn of(&self, reg: Reg) -> Option<usize> {
        Some(match reg.file()? {
            File::Word => reg.row(),
            File::Double => self.words + reg.row(),
            File::Pred => self.words + self.doubles + reg.row(),
        })
    }
}

/// Targets of an instruction besides the next one, and whether it can go on to the next.
fn successors(program: &Program, inst: &Inst) -> (Vec<usize>, bool) {
    let guarded = inst.guard.is_some();
    match inst.code {
        Code::Bra { target } => (vec![target as usize], guarded),
        Code::Brx { table } => {
            (program.tables[table as usize].iter().map(|t| *t as usize).collect(), guarded)
        }
        Code::Exit | Code::Trap => (Vec::new(), guarded),
        _ => (Vec::new(), true),
    }
}

fn operands<'a>(
    program: &'a Program,
    inst: &'a Inst,
) -> (impl Iterator<Item = Reg>, impl Iterator<Item = Reg>) {
    let (dst, src) = program.list(inst);
    (inst.dst.iter().chain(dst).copied(), inst.src.iter().chain(src).chain([&inst.guard]).copied())
}

fn blocks(program: &Program, numbers: &Numbers, in_flight: &Set) -> Vec<Block> {
    let code = &program.code;
    let mut leader = vec![false; code.len() + 1];
    leader[0] = true;
    for (pc, inst) in code.iter().enumerate() {
        let (targets, goes_on) = successors(program, inst);
        if !targets.is_empty() || !goes_on || inst.guard.is_some() && matches!(inst.code, Code::Exit) {
            leader[pc + 1] = true;
        }
        targets.iter().for_each(|&t| leader[t] = true);
    }
    let starts: Vec<usize> = (0..code.len()).filter(|&pc| leader[pc]).collect();
    let block_at = |pc: usize| starts.partition_point(|&s| s <= pc) - 1;
    let empty = || Set::new(numbers.all);
    let mut out = Vec::new();
    for (i, &first) in starts.iter().enumerate() {
        let end = starts.get(i + 1).copied().unwrap_or(code.len());
        let (targets, goes_on) = successors(program, &code[end - 1]);
        let mut next: Vec<usize> =
            targets.iter().filter(|&&t| t < code.len()).map(|&t| block_at(t)).collect();
        if goes_on && end < code.len() {
            next.push(block_at(end));
        }
        let (mut uses, mut kills) = (empty(), empty());
        for inst in &code[first..end] {
            let (dst, src) = operands(program, inst);
            for n in src.filter_map(|r| numbers.of(r)).filter(|n| !kills.contains(*n)).collect::<Vec<_>>() {
                uses.insert(n);
            }
            if inst.code == Code::WgmmaWait {
                for (u, (f, k)) in uses.0.iter_mut().zip(in_flight.0.iter().zip(&kills.0)) {
                    *u |= f & !k;
                }
            }
            // A guarded write may leave lanes as they were.
            if !inst.guard.is_some() {
                dst.filter_map(|r| numbers.of(r)).for_each(|n| kills.insert(n));
            }
        }
        out.push(Block { first, end, next, live_in: uses.clone(), uses, kills, live_out: empty() });
    }
    out
}

/// Grows the live sets until nothing changes, last block first.
fn solve(blocks: &mut [Block]) {
    let mut changed = true;
    while changed {
        changed = false;
        for i in (0..blocks.len()).rev() {
            let mut out = std::mem::replace(&mut blocks[i].live_out, Set(Vec::new()));
            for next in blocks[i].next.clone() {
                out.0.iter_mut().zip(&blocks[next].live_in.0).for_each(|(o, n)| *o |= n);
            }
            let b = &mut blocks[i];
            for (at, o) in out.0.iter().enumerate() {
                let live = b.uses.0[at] | o & !b.kills.0[at];
                changed |= live != b.live_in.0[at];
                b.live_in.0[at] = live;
            }
            b.live_out = out;
        }
    }
}

/// First and last instruction of each register's life.
fn intervals(program: &Program, numbers: &Numbers) -> Vec<(usize, usize)> {
    let mut in_flight = Set::new(numbers.all);
    for inst in program.code.iter().filter(|i| matches!(i.code, Code::Wgmma(_))) {
        let (dst, src) = program.list(inst);
        dst.iter().chain(src).filter_map(|r| numbers.of(*r)).for_each(|n| in_flight.insert(n));
    }
    let mut blocks = blocks(program, numbers, &in_flight);
    solve(&mut blocks);
    let mut lives = vec![(usize::MAX, 0); numbers.all];
    let mut extend = |n: usize, pc: usize| lives[n] = (lives[n].0.min(pc), lives[n].1.max(pc));
    for b in &blocks {
        b.live_in.each(|n| extend(n, b.first));
        b.live_out.each(|n| extend(n, b.end - 1));
        let mut fence = None;
        for pc in b.first..b.end {
            let inst = &program.code[pc];
            let (dst, src) = operands(program, inst);
            dst.chain(src).filter_map(|r| numbers.of(r)).for_each(|n| extend(n, pc));
            match (&inst.code, fence) {
                (Code::WgmmaFence, _) => fence = Some(pc),
                (Code::Wgmma(_), Some(fence)) => {
                    program.list(inst).0.iter().filter_map(|r| numbers.of(*r)).for_each(|n| extend(n, fence));
                }
                _ => {}
            }
        }
        // Registers that may be in flight at a wait live to it.
        if program.code[b.first..b.end].iter().any(|inst| inst.code == Code::WgmmaWait) {
            let mut defined = b.live_in.clone();
            for pc in b.first..b.end {
                let inst = &program.code[pc];
                if inst.code == Code::WgmmaWait {
                    in_flight.each(|n| {
                        if defined.contains(n) {
                            extend(n, pc);
                        }
                    });
                }
                operands(program, inst).0.filter_map(|r| numbers.of(r)).for_each(|n| defined.insert(n));
            }
        }
    }
    lives
}

/// Gives the registers whose lives are `lives` rows; returns the rows and their number.
fn assign(lives: &[(usize, usize)], fixed: &[bool]) -> (Vec<u32>, u32) {
    let mut rows = vec![0; lives.len()];
    let mut count = 0;
    for (row, _) in rows.iter_mut().zip(fixed).filter(|(_, fixed)| **fixed) {
        *row = count;
        count += 1;
    }
    let mut order: Vec<usize> = (0..lives.len()).filter(|&n| !fixed[n] && lives[n].0 != usize::MAX).collect();
    order.sort_by_key(|&n| lives[n]);
    let (mut busy, mut free) = (BinaryHeap::new(), Vec::new());
    for n in order {
        let (from, to) = lives[n];
        while let Some(&Reverse((end, row))) = busy.peek()
            && end < from
        {
            busy.pop();
            free.push(row);
        }
        rows[n] = free.pop().unwrap_or_else(|| {
            count += 1;
            count - 1
        });
        busy.push(Reverse((to, rows[n])));
    }
    (rows, count)
}

/// Gives registers that never live at the same time one row.
pub(super) fn compact(program: &mut Program) {
    if program.code.is_empty() {
        return;
    }
    let numbers = Numbers {
        words: program.words as usize,
        doubles: program.doubles as usize,
        all: (program.words + program.doubles + program.preds) as usize,
    };
    let lives = intervals(program, &numbers);
    // Constants and special registers are written once, before the first instruction.
    let mut fixed = vec![false; numbers.all];
    let constants = program.const_words.iter().map(|c| c.0).chain(program.const_doubles.iter().map(|c| c.0));
    let constants = constants.chain(program.const_preds.iter().map(|c| c.0));
    let written_once = constants.chain(program.specials.iter().map(|s| s.0));
    written_once.filter_map(|r| numbers.of(r)).for_each(|n| fixed[n] = true);

    let first_pred = numbers.words + numbers.doubles;
    let part = |range: std::ops::Range<usize>| assign(&lives[range.clone()], &fixed[range]);
    let (words, word_count) = part(0..numbers.words);
    let (doubles, double_count) = part(numbers.words..first_pred);
    let (preds, pred_count) = part(first_pred..numbers.all);
    let place = |reg: &mut Reg| {
        let rows = match reg.file() {
            Some(File::Word) => &words,
            Some(File::Double) => &doubles,
            Some(File::Pred) => &preds,
            None => return,
        };
        if let Some(file) = reg.file() {
            *reg = Reg::new(file, rows[reg.row()]);
        }
    };
    for inst in &mut program.code {
        inst.dst.iter_mut().chain(&mut inst.src).for_each(place);
        place(&mut inst.guard);
    }
    program.pool.iter_mut().for_each(place);
    program.specials.iter_mut().for_each(|s| place(&mut s.0));
    program.const_words.iter_mut().for_each(|c| place(&mut c.0));
    program.const_doubles.iter_mut().for_each(|c| place(&mut c.0));
    program.const_preds.iter_mut().for_each(|c| place(&mut c.0));
    (program.words, program.doubles, program.preds) = (word_count, double_count, pred_count);
}
