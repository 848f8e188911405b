//! A program: PTX around one instruction, its inputs, and how exact its result is.

use std::fmt::Write as _;

use crate::fill::{Fill, mix};

/// PTX around one instruction. Each thread reads its words of input, runs the body, writes its words of output.
#[derive(Clone, Debug)]
pub struct Program {
    /// Unique.
    pub name: String,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks.
    pub blocks: u32,
    /// Contents of `%i0`, `%i1`, ... of each thread.
    pub inputs: Vec<Fill>,
    /// Number of results: `%o0`, `%o1`, ...; they begin as 0.
    pub outputs: usize,
    /// Declarations inside the kernel, besides registers.
    pub declare: String,
    /// The instructions. Registers: `%i`, `%o`, `%w` and `%t` (the thread) of 32 bits, `%h` of 16, `%x` of
    /// 64, predicates `%p`.
    pub body: String,
    /// Exactness of a result.
    pub truth: Truth,
}

/// Exactness that the ISA gives a result.
#[derive(Clone, Copy, Debug)]
pub enum Truth {
    /// Every bit.
    Exact,
    /// An approximation of a function of `%i0`, singles or packed halves.
    Approximate {
        /// The function.
        of: fn(f64) -> f64,
        /// Format of the words.
        format: Format,
        /// Bound of a result's distance from the function.
        error: Error,
    },
    /// Sums in no documented order: results may differ by so much.
    Near(Format, f64),
}

/// Content of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A single.
    F32,
    /// Two halves.
    F16x2,
    /// Two bfloat16.
    Bf16x2,
}

/// A documented error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Error {
    /// Relative to the value.
    Relative(f64),
    /// Independent of the value.
    Absolute(f64),
}

impl Error {
    /// Bound at `value`.
    #[must_use]
    pub fn at(self, value: f64) -> f64 {
        match self {
            Error::Relative(share) => share * value.abs(),
            Error::Absolute(error) => error,
        }
    }
}

impl Format {
    /// The numbers of a word.
    #[must_use]
    pub fn values(self, word: u32) -> Vec<f64> {
        let halves = [word as u16, (word >> 16) as u16];
        match self {
            Format::F32 => vec![f64::from(f32::from_bits(word))],
            Format::F16x2 => halves.map(|h| fmha_core::DType::F16.read(&h.to_le_bytes())).to_vec(),
            Format::Bf16x2 => halves.map(|h| fmha_core::DType::Bf16.read(&h.to_le_bytes())).to_vec(),
        }
    }

    /// The largest number.
    #[must_use]
    pub fn most(self) -> f64 {
        match self {
            Format::F32 => f64::from(f32::MAX),
            Format::F16x2 => fmha_core::DType::F16.max_finite(),
            Format::Bf16x2 => fmha_core::DType::Bf16.max_finite(),
        }
    }

    /// The smallest number that is not subnormal.
    #[must_use]
    pub fn least_normal(self) -> f64 {
        if self == Format::F16x2 { 2f64.powi(-14) } else { 2f64.powi(-126) }
    }
}

/// Threads in all of a program that says nothing else: enough for every half.
const MANY: u32 = 65536;

impl Program {
    /// 65536 threads, an exact result in `%o0`.
    #[must_use]
    pub fn new(name: impl Into<String>, inputs: &[Fill], body: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            threads: 128,
            blocks: MANY / 128,
            inputs: inputs.to_vec(),
            outputs: 1,
            declare: String::new(),
            body: body.into(),
            truth: Truth::Exact,
        }
    }

    /// Returns this program with so many results.
    #[must_use]
    pub fn outputs(self, outputs: usize) -> Self {
        Self { outputs, ..self }
    }

    /// Returns this program with another shape.
    #[must_use]
    pub fn shape(self, blocks: u32, threads: u32) -> Self {
        Self { threads, blocks, ..self }
    }

    /// Returns this program with a result that is less than exact.
    #[must_use]
    pub fn truth(self, truth: Truth) -> Self {
        Self { truth, ..self }
    }

    /// Threads in all.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.threads * self.blocks
    }

    /// Input words: all threads' `%i0`, then all threads' `%i1`, ...
    #[must_use]
    pub fn input(&self) -> Vec<u32> {
        let seed = self.name.bytes().fold(0, |seed, byte| mix(seed ^ u64::from(byte)));
        let rows = self.inputs.iter().zip(0u64..);
        rows.flat_map(|(fill, row)| {
            (0..self.total()).map(move |index| fill.word(mix(seed ^ row << 32), index))
        })
        .collect()
    }

    /// PTX text of the program.
    #[must_use]
    pub fn ptx(&self) -> String {
        let (total, outputs) = (self.total(), self.outputs);
        let (mut loads, mut stores) = (String::new(), String::new());
        for word in 0..self.inputs.len() {
            let _ = writeln!(loads, "ld.global.b32 %i{word}, [%in+{}];", 4 * total as usize * word);
        }
        for word in 0..outputs {
            let _ = writeln!(loads, "mov.b32 %o{word}, 0;");
            let _ = writeln!(stores, "st.global.b32 [%out+{}], %o{word};", 4 * total as usize * word);
        }
        format!(
            ".version 8.6\n.target sm_90a\n.address_size 64\n\
             .visible .entry k(.param .u64 in, .param .u64 out)\n.maxntid {}, 1, 1\n{{\n\
             .reg .b32 %i<{}>, %o<{}>, %w<32>, %t, %at; .reg .b16 %h<16>; .reg .b64 %x<16>, %in, %out, %off;\n\
             .reg .pred %p<8>;\n{}\n\
             ld.param.u64 %in, [in]; ld.param.u64 %out, [out];\n\
             mov.u32 %t, %tid.x; mov.u32 %at, %ctaid.x; mad.lo.u32 %at, %at, {}, %t;\n\
             mul.wide.u32 %off, %at, 4; add.s64 %in, %in, %off; add.s64 %out, %out, %off;\n\
             {loads}{}\n{stores}ret;\n}}\n",
            self.threads,
            self.inputs.len().max(1),
            outputs.max(1),
            self.declare,
            self.threads,
            self.body,
        )
    }
}
