//! Kernels broken on purpose: each instruction that synchronises, left out or given a wrong count, one at a time.
//!
//! A checker that says nothing about such a kernel is blind, or the instruction was not needed.

use std::ops::Range;

/// One way to break one instruction of a PTX text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutant {
    /// PTX line of the instruction, from 1.
    pub line: u32,
    /// The instruction, without its guard.
    pub instruction: String,
    /// Change to the instruction.
    pub what: &'static str,
    /// Range of the instruction in the text, guard included, and its replacement.
    range: Range<usize>,
    replacement: String,
}

impl Mutant {
    /// `ptx`, the text that the mutant was made from, with this one instruction broken. Lines keep their numbers.
    #[must_use]
    pub fn apply(&self, ptx: &str) -> String {
        format!("{}{}{}", &ptx[..self.range.start], self.replacement, &ptx[self.range.end..])
    }

    /// Whether other clusters may see the difference: what products and barriers in shared memory do stays in
    /// their own.
    #[must_use]
    pub fn may_order_clusters(&self) -> bool {
        let own = ["wgmma.", "mbarrier.", "barrier.cluster.", "fence.proxy.async.shared"];
        !own.iter().any(|own| self.instruction.starts_with(own))
    }
}

/// One instruction in the text.
struct Found<'a> {
    /// `@p ` or nothing.
    guard: &'a str,
    opcode: &'a str,
    operands: &'a str,
}

impl<'a> Found<'a> {
    fn of(statement: &'a str) -> Option<Self> {
        let (guard, rest) = if statement.starts_with('@') {
            let end = statement.find(char::is_whitespace)?;
            (&statement[..end], statement[end..].trim_start())
        } else {
            ("", statement)
        };
        let (opcode, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        Some(Self { guard, opcode, operands: operands.trim() })
    }

    /// Whether it goes round a loop again; `before`: the text up to it.
    fn is_branch_back(&self, before: &str) -> bool {
        !self.guard.is_empty()
            && self.opcode.starts_with("bra")
            && before.lines().any(|line| line.trim().strip_suffix(':') == Some(self.operands))
    }

    /// An instruction without effect, in place of this one.
    fn skipped(&self) -> String {
        format!("{} nanosleep.u32 0", self.guard)
    }

    /// The instruction with operand number `at` changed by `op` with `by`: `add.s32 …, 1`.
    fn changed(&self, at: usize, op: &str, by: u32) -> Option<String> {
        let operands = split(self.operands);
        let old = operands.get(at)?;
        let mut new: Vec<&str> = operands.clone();
        new[at] = "%mutant";
        Some(format!(
            "{{ .reg .b32 %mutant; {op} %mutant, {old}, {by}; {} {} {}; }}",
            self.guard,
            self.opcode,
            new.join(", ")
        ))
    }

    /// Every way to break it: what is done, and the text in its place.
    #[allow(clippy::unnested_or_patterns, reason = "a family of instructions a line")]
    fn broken(&self) -> Vec<(&'static str, String)> {
        let words: Vec<&str> = self.opcode.split('.').collect();
        let mut out = Vec::new();
        let mut change = |what, at, op, by| out.extend(self.changed(at, op, by).map(|text| (what, text)));
        match words.as_slice() {
            ["mbarrier", "try_wait" | "test_wait", ..] => {
                let done = split(self.operands).first().copied().unwrap_or_default().to_owned();
                out.push(("not waited for", format!("{} setp.eq.u32 {done}, 0, 0", self.guard)));
            }
            ["mbarrier", "init", ..] => {
                change("one arrival more", 1, "add.u32", 1);
                change("one arrival less", 1, "sub.u32", 1);
            }
            ["mbarrier", "arrive", "expect_tx", ..] => {
                change("half the bytes", 2, "shr.u32", 1);
                change("16 bytes more", 2, "add.u32", 16);
                out.push(("left out", self.skipped()));
            }
            ["mbarrier", "expect_tx", ..] => {
                change("half the bytes", 1, "shr.u32", 1);
                change("16 bytes more", 1, "add.u32", 16);
                out.push(("left out", self.skipped()));
            }
            ["wgmma", "wait_group", ..] => {
                out.push(("left out", self.skipped()));
                let more = self.operands.parse::<u32>().ok().map(|n| n + 1);
                out.extend(
                    more.map(|n| ("one group more pending", format!("{} {} {n}", self.guard, self.opcode))),
                );
            }
            ["bar" | "barrier", .., "red", _, "pred"] => {
                let all = split(self.operands);
                if let (Some(to), Some(own)) = (all.first(), all.last()) {
                    out.push(("each thread for itself", format!("{} mov.pred {to}, {own}", self.guard)));
                }
            }
            ["tcgen05", "alloc", ..] => {
                change("half the columns", 1, "shr.u32", 1);
                out.push(("left out", self.skipped()));
            }
            ["mbarrier", "arrive" | "arrive_drop", ..]
            | ["wgmma", "fence" | "commit_group", ..]
            | ["fence", "proxy" | "mbarrier_init" | "acq_rel", ..]
            | ["red", "release", ..]
            | ["griddepcontrol", "wait", ..]
            | ["cp", "async", "wait_group" | "wait_all" | "commit_group", ..]
            | ["cp", "async", "bulk", "wait_group" | "commit_group", ..]
            | ["tcgen05", "wait" | "wait::ld" | "wait::st" | "commit" | "dealloc", ..]
            | ["tcgen05", "fence::before_thread_sync" | "fence::after_thread_sync", ..]
            | ["bar" | "barrier", "sync" | "arrive" | "red" | "cta" | "cluster", ..] => {
                out.push(("left out", self.skipped()));
            }
            _ => {}
        }
        out
    }
}

/// Operands at the commas outside brackets.
fn split(operands: &str) -> Vec<&str> {
    let (mut out, mut depth, mut start) = (Vec::new(), 0, 0);
    for (i, c) in operands.char_indices() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                out.push(operands[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    out.push(operands[start..].trim());
    out
}

/// Every mutant of a PTX text, in the text's order. Instructions stand on one line each, as compilers write them.
#[must_use]
pub fn mutants(ptx: &str) -> Vec<Mutant> {
    let mut out = Vec::new();
    let mut line_start = 0;
    // An acquiring load whose value decides whether to go round again: the branch back is what waits.
    let mut acquired = None;
    for (number, line) in ptx.split('\n').enumerate() {
        let code = line.split("//").next().unwrap_or(line);
        let mut start = 0;
        for statement in code.split_inclusive(';').filter(|s| s.ends_with(';')) {
            let body = &statement[..statement.len() - 1];
            let skipped =
                body.len() - body.trim_start_matches(|c: char| c.is_whitespace() || "{}".contains(c)).len();
            let body = body[skipped..].trim_end();
            let from = line_start + start + skipped;
            if let Some(found) = Found::of(body) {
                if found.opcode.starts_with("ld.acquire") {
                    acquired = Some(format!("{} {}", found.opcode, found.operands));
                } else if found.is_branch_back(&ptx[..from]) {
                    out.extend(acquired.take().map(|instruction| Mutant {
                        line: number as u32 + 1,
                        instruction,
                        what: "not waited for",
                        range: from..from + body.len(),
                        replacement: found.skipped(),
                    }));
                }
                out.extend(found.broken().into_iter().map(|(what, replacement)| Mutant {
                    line: number as u32 + 1,
                    instruction: format!("{} {}", found.opcode, found.operands),
                    what,
                    range: from..from + body.len(),
                    replacement,
                }));
            }
            start += statement.len();
        }
        line_start += line.len() + 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mutant_changes_one_instruction_and_keeps_every_line() {
        let ptx = "\t@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512;\n// bar.sync 0;\n\
                   { .reg .pred p;\nW:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;\n@!p bra W; }\n\
                   wgmma.wait_group.sync.aligned 1;\n\tbar.sync \t0;\n";
        let all = mutants(ptx);
        let got: Vec<(u32, &str)> = all.iter().map(|m| (m.line, m.what)).collect();
        assert_eq!(
            got,
            [
                (1, "half the bytes"),
                (1, "16 bytes more"),
                (1, "left out"),
                (5, "not waited for"),
                (7, "left out"),
                (7, "one group more pending"),
                (8, "left out"),
            ]
        );
        for mutant in &all {
            let text = mutant.apply(ptx);
            let differing = text.lines().zip(ptx.lines()).filter(|(a, b)| a != b).count();
            assert_eq!((differing, text.lines().count()), (1, ptx.lines().count()), "{text}");
        }
        assert!(all[0].apply(ptx).contains("shr.u32 %mutant, 512, 1; @%p1 mbarrier"));
        assert!(all[3].apply(ptx).contains("setp.eq.u32 p, 0, 0;"));
        assert!(all[5].apply(ptx).contains("wait_group.sync.aligned 2;"));
    }

    #[test]
    fn a_loop_that_reads_until_another_block_has_counted_is_left_at_once() {
        let ptx = "$L1:\nld.acquire.gpu.global.s32 %r1, [%rd1];\nsetp.ne.s32 %p1, %r1, %r2;\n@%p1 bra $L1;\n\
                   @%p1 bra $L1;\nld.acquire.gpu.global.s32 %r1, [%rd1];\n@%p1 bra $L2;\n$L2:\n";
        let all = mutants(ptx);
        assert_eq!(all.iter().map(|m| (m.line, m.what)).collect::<Vec<_>>(), [(4, "not waited for")]);
        assert!(all[0].apply(ptx).contains("\n@%p1 nanosleep.u32 0;\n@%p1 bra $L1;"));
    }
}
