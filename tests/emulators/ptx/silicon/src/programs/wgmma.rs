//! One `wgmma.mma_async` of a warpgroup, its operands any bytes in shared memory that a descriptor points at: a
//! wrong address, a wrong swizzle or a wrong fragment gives other sums. PTX ISA, Asynchronous Warpgroup Level Matrix
//! Instructions.

use std::fmt::Write as _;

use super::matrix::{Sums, registers};
use crate::fill::Element::{self, Bf16, E4m3, E5m2, F16, S8, Tf32, U8};
use crate::fill::Fill::{Unit, Whole};
use crate::program::{Program, Truth};

/// Layout of an operand in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    /// Bytes of the swizzle span; 0 for none.
    swizzle: u32,
    /// M or N runs faster than K.
    transposed: bool,
}

impl Layout {
    const fn new(swizzle: u32, transposed: bool) -> Self {
        Self { swizzle, transposed }
    }

    /// Descriptor bits (address aside), and bytes that an operand of `rows` rows and 32 bytes of K takes.
    fn place(self, element: Element, rows: u32) -> (u64, u32) {
        let code = match self.swizzle {
            128 => 1u64,
            64 => 2,
            32 => 3,
            _ => 0,
        };
        let (k, wide) = (32 / element.bytes(), rows * element.bytes());
        let (leading, stride, bytes) = match (self.swizzle, self.transposed) {
            // Eight rows of 16 bytes are together; then K, then M or N.
            (0, false) => (128, 256, rows / 8 * 256),
            // Eight k of 16 bytes are together; then K (leading), then M or N (stride).
            (0, true) => (128, k / 8 * 128, wide / 16 * (k / 8) * 128),
            (span, false) => (16, 8 * span, rows * span),
            (span, true) => (k * span, 8 * span, wide.div_ceil(span) * k * span),
        };
        let field = |bytes: u32, at: u32| u64::from(bytes >> 4) << at;
        (field(leading, 16) | field(stride, 32) | code << 62, bytes)
    }
}

/// One program.
#[derive(Clone, Copy)]
struct Product {
    n: u32,
    a: Element,
    b: Element,
    sums: Sums,
    /// `None`: A comes from registers.
    a_layout: Option<Layout>,
    b_layout: Layout,
    negate: bool,
    accumulate: bool,
    whole: bool,
}

impl Product {
    fn name(&self) -> String {
        let place =
            |layout: Layout| format!("{}{}", layout.swizzle, if layout.transposed { "t" } else { "" });
        format!(
            "wgmma/m64n{}k{}.{}.{}.{}/a {}/b {}/{}{}{}",
            self.n,
            32 / self.a.bytes(),
            self.sums.name(),
            self.a.name(),
            self.b.name(),
            self.a_layout.map_or("registers".into(), place),
            place(self.b_layout),
            if self.accumulate { "on sums" } else { "alone" },
            if self.negate { ", negated" } else { "" },
            if self.whole { "" } else { ", any numbers" },
        )
    }

    fn program(self) -> Program {
        let round = |bytes: u32| bytes.next_multiple_of(1024);
        let (a_bits, a_bytes) = self.a_layout.map_or((0, 0), |layout| layout.place(self.a, 64));
        let (b_bits, b_bytes) = self.b_layout.place(self.b, self.n);
        let (a_words, b_words) = ((round(a_bytes) / 512) as usize, (round(b_bytes) / 512) as usize);
        let fill = |element| if self.whole { Whole(element) } else { Unit(element) };
        let a_registers = if self.a_layout.is_none() { 4 } else { 0 };
        let mut inputs = vec![fill(self.a); a_words];
        inputs.extend(vec![fill(self.b); b_words]);
        inputs.extend(vec![fill(self.a); a_registers]);

        let results = (self.n / if self.sums == Sums::F16 { 4 } else { 2 }) as usize;
        let mut body = String::from("mov.u32 %w0, operands; shl.b32 %w1, %t, 2; add.s32 %w1, %w1, %w0;\n");
        for word in 0..a_words + b_words {
            let _ = writeln!(body, "st.shared.b32 [%w1+{}], %i{word};", 512 * word);
        }
        body.extend((0..results).map(|at| self.sums.begin(at, self.whole)));
        let a = match self.a_layout {
            Some(_) => "%x1".into(),
            None => registers('i', a_words + b_words, 4),
        };
        let k = 32 / self.a.bytes();
        let scales = match (self.sums, self.negate) {
            (Sums::S32, _) => "",
            (_, true) => ", -1, 1",
            (_, false) => ", 1, 1",
        };
        let flag = |layout: Layout| format!(", {}", u32::from(layout.transposed));
        let transposes = match self.a_layout {
            _ if self.a.bytes() != 2 => String::new(),
            Some(layout) => flag(layout) + &flag(self.b_layout),
            None => flag(self.b_layout),
        };
        let _ = write!(
            body,
            "fence.proxy.async;\nbar.sync 0;\nshr.u32 %w2, %w0, 4; cvt.u64.u32 %x0, %w2;\n\
             or.b64 %x1, %x0, {a_bits}; add.s64 %x0, %x0, {}; or.b64 %x2, %x0, {b_bits};\n\
             setp.ne.b32 %p0, {}, 0;\nwgmma.fence.sync.aligned;\n\
             wgmma.mma_async.sync.aligned.m64n{}k{k}.{}.{}.{} {}, {a}, %x2, %p0{scales}{transposes};\n\
             wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;",
            round(a_bytes) >> 4,
            u32::from(self.accumulate),
            self.n,
            self.sums.name(),
            self.a.name(),
            self.b.name(),
            registers('o', 0, results),
        );
        let truth = if self.whole { Truth::Exact } else { self.sums.near(self.a, k) };
        let program = Program::new(self.name(), &inputs, body).shape(1, 128).outputs(results).truth(truth);
        let bytes = round(a_bytes) + round(b_bytes);
        Program { declare: format!(".shared .align 1024 .b8 operands[{bytes}];"), ..program }
    }
}

pub(super) fn programs() -> Vec<Program> {
    let rows = Layout::new(128, false);
    let columns = Layout::new(128, true);
    let plain = Product {
        n: 128,
        a: Bf16,
        b: Bf16,
        sums: Sums::F32,
        a_layout: Some(rows),
        b_layout: rows,
        negate: false,
        accumulate: true,
        whole: true,
    };
    let mut all = Vec::new();
    // Every N that the kernels' tiles have, and the ends.
    for n in [8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256] {
        all.push(Product { n, ..plain });
        all.push(Product { n, a: F16, b: F16, a_layout: None, b_layout: columns, ..plain });
    }
    // Every layout of either operand.
    for swizzle in [0, 32, 64, 128] {
        for transposed in [false, true] {
            let layout = Layout::new(swizzle, transposed);
            all.push(Product { n: 96, b_layout: layout, accumulate: false, ..plain });
            all.push(Product { n: 96, a_layout: Some(layout), accumulate: false, ..plain });
            all.push(Product {
                n: 64,
                a: F16,
                b: F16,
                a_layout: None,
                b_layout: layout,
                negate: true,
                ..plain
            });
        }
    }
    for sums in [Sums::F32, Sums::F16] {
        for a_layout in [Some(rows), None] {
            for whole in [true, false] {
                all.push(Product { n: 64, a: F16, b: F16, sums, a_layout, whole, ..plain });
                all.push(Product {
                    n: 160,
                    a: F16,
                    b: F16,
                    sums,
                    a_layout,
                    b_layout: columns,
                    whole,
                    ..plain
                });
            }
        }
    }
    for a_layout in [Some(rows), None] {
        all.push(Product { a_layout, whole: false, ..plain });
        all.push(Product { a_layout, a: Tf32, b: Tf32, ..plain });
        all.push(Product { a_layout, a: Tf32, b: Tf32, whole: false, ..plain });
        for (a, b) in [(E4m3, E4m3), (E4m3, E5m2), (E5m2, E4m3), (E5m2, E5m2)] {
            for n in [64, 256] {
                all.push(Product { n, a, b, a_layout, ..plain });
                all.push(Product { n, a, b, a_layout, whole: false, ..plain });
            }
            all.push(Product { n: 128, a, b, a_layout, sums: Sums::F16, ..plain });
        }
        for (a, b) in [(S8, S8), (U8, U8), (S8, U8)] {
            all.push(Product { a, b, a_layout, sums: Sums::S32, ..plain });
        }
    }
    let mut programs: Vec<Program> = all.into_iter().map(Product::program).collect();
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    programs.dedup_by(|a, b| a.name == b.name);
    programs
}
