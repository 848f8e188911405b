//! Renders `fmha/ptx/wgmma_shapes.cuh`: the `wgmma.mma_async` of the shapes that one entry uses.
//!
//! Written out by hand the operand lists of all shapes are thousands of lines; each entry needs two.

use std::fmt::Write as _;

use fmha_core::DType;
use fmha_core::source::Header;

/// Where the A operand of a product is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandA {
    /// Shared memory, given by a descriptor.
    Shared,
    /// Registers, four a thread.
    Registers,
}

/// Type in which a product's sums are accumulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// Sums in f32, one register each.
    F32,
    /// Sums in f16, half a register each.
    F16,
}

/// A wgmma instruction: `m64 n k16` for 16-bit elements, `k32` for 8-bit ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WgmmaShape {
    /// Type of both operands: f16, bf16, e4m3fn or e5m2.
    pub dtype: DType,
    /// Columns of the product: a multiple of 8 up to 256.
    pub n: i32,
    /// Where the A operand lies.
    pub a: OperandA,
    /// Type of the accumulators.
    pub sums: Sums,
}

/// The header for these shapes.
#[must_use]
pub fn header(shapes: &[WgmmaShape]) -> Header {
    let mut text = String::from(
        "// Rendered for one entry. PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async\n\
         // https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma-async\n\
         #pragma once\n#include <fmha/spec.h>\n\nnamespace fmha::ptx {\n",
    );
    let mut seen = Vec::new();
    for &shape in shapes {
        if !seen.contains(&shape) {
            seen.push(shape);
            text.push_str(&function(shape));
        }
    }
    text.push_str("\n}  // namespace fmha::ptx\n");
    Header::rendered("fmha/ptx/wgmma_shapes.cuh", text)
}

/// Text of one function, which computes `d = scale_a * A B (+ d)` with 64 rows and n columns.
fn function(WgmmaShape { dtype, n, a, sums }: WgmmaShape) -> String {
    let (accumulators, sum, c_type, constraint) = match sums {
        Sums::F32 => (n / 2, "f32", "float", "+f"),
        Sums::F16 => (n / 4, "f16", "uint32_t", "+r"),
    };
    let (name, depth) = match dtype {
        DType::E4m3Fn => ("e4m3", 32),
        DType::E5m2 => ("e5m2", 32),
        two_bytes => (two_bytes.name(), 16),
    };
    // Only 16-bit tiles can be read across their rows; tiles of 8-bit elements are read along them.
    let transposable = depth == 16;
    let list =
        |from: i32, count: i32| (from..from + count).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
    let d_outputs =
        (0..accumulators).map(|i| format!("\"{constraint}\"(d[{i}])")).collect::<Vec<_>>().join(", ");
    let (suffix, a_param, a_text, a_input, num_a) = match a {
        OperandA::Shared => ("ss", "uint64_t a", format!("%{accumulators}"), "\"l\"(a)", 1),
        OperandA::Registers => (
            "rs",
            "const uint32_t (&a)[4]",
            format!("{{{}}}", list(accumulators, 4)),
            "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3])",
            4,
        ),
    };
    let b = accumulators + num_a;
    let transposed: &[&str] = if a == OperandA::Shared { &["trans_a", "trans_b"] } else { &["trans_b"] };
    let parameters: String = transposed.iter().map(|name| format!(", int {name}")).collect();
    let (mut immediates, mut inputs, mut condition) = (String::new(), String::new(), String::new());
    for (i, name) in transposed.iter().enumerate() {
        if transposable {
            let _ = write!(immediates, ", %{}", b + 3 + i as i32);
            let _ = write!(inputs, ", \"n\"({name})");
        } else {
            let _ = write!(condition, " && {name} == 0");
        }
    }
    let mut text = String::new();
    let _ = write!(
        text,
        "\n// needs: sm_90a. wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{sum}.{name}.{name}, A from {}.\n\
         template <DType dtype, int scale_a{parameters}>\n  requires(dtype == DType::{dtype:?}{condition})\n\
         __device__ __forceinline__ void wgmma_mma_async_{suffix}({c_type} (&d)[{accumulators}], {a_param}, uint64_t b, bool accumulate) {{\n\
         \x20 asm volatile(\n\
         \x20     \"{{ .reg .pred p; setp.ne.b32 p, %{}, 0;\\n\"\n\
         \x20     \"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{sum}.{name}.{name} {{{}}}, \"\n\
         \x20     \"{a_text}, %{b}, p, %{}, 1{immediates}; }}\"\n\
         \x20     : {d_outputs}\n\
         \x20     : {a_input}, \"l\"(b), \"r\"(int(accumulate)), \"n\"(scale_a){inputs});\n}}\n",
        if a == OperandA::Shared { "shared memory" } else { "registers" },
        b + 1,
        list(0, accumulators),
        b + 2,
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_rendered_once_and_counts_its_operands() {
        let shape = WgmmaShape { dtype: DType::Bf16, n: 16, a: OperandA::Registers, sums: Sums::F32 };
        let header = header(&[shape, shape]);
        assert_eq!(header.text.matches("__forceinline__").count(), 1);
        // The operands are eight accumulators, four registers of A, then B, the predicate and two immediates.
        assert!(header.text.contains("{%8, %9, %10, %11}, %12, p, %14, 1, %15;"), "{}", header.text);
        assert!(header.text.contains("setp.ne.b32 p, %13, 0"), "{}", header.text);
    }
}
