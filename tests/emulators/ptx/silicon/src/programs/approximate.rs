//! Approximations, each within the error that the ISA documents for it. PTX ISA, Floating Point Instructions.

use crate::fill::Fill::{self, F32, Halves, Range};
use crate::program::{Error, Format, Program, Truth};

type Row = (&'static str, Fill, fn(f64) -> f64, Format, Error);

/// Pi to two decimals.
const NEARLY_PI: f32 = 314.0 / 100.0;

fn rcp(x: f64) -> f64 {
    1.0 / x
}

fn rsqrt(x: f64) -> f64 {
    1.0 / x.sqrt()
}

pub(super) fn programs() -> Vec<Program> {
    use Error::{Absolute, Relative};
    let p = |exponent: f64| 2f64.powf(exponent);
    let (f32, f16, bf16) = (Format::F32, Format::F16x2, Format::Bf16x2);
    let rows: Vec<Row> = vec![
        ("ex2.approx.ftz.f32 %o0, %i0;", F32, f64::exp2, f32, Relative(p(-22.0))),
        ("ex2.approx.f32 %o0, %i0;", F32, f64::exp2, f32, Relative(p(-22.0))),
        // Range of a softmax: from no weight to a rescaled one.
        ("ex2.approx.ftz.f32 %o0, %i0; // -32..8", Range(-32.0, 8.0), f64::exp2, f32, Relative(p(-22.0))),
        ("ex2.approx.f16x2 %o0, %i0;", Halves, f64::exp2, f16, Relative(p(-9.9))),
        ("ex2.approx.ftz.bf16x2 %o0, %i0;", Halves, f64::exp2, bf16, Relative(p(-7.0))),
        ("tanh.approx.f32 %o0, %i0;", F32, f64::tanh, f32, Relative(p(-11.0))),
        ("tanh.approx.f32 %o0, %i0; // -4..4", Range(-4.0, 4.0), f64::tanh, f32, Relative(p(-11.0))),
        ("tanh.approx.f16x2 %o0, %i0;", Halves, f64::tanh, f16, Absolute(p(-10.987))),
        // Documented: 2^-8. An H200 is 3e-7 beyond it at 0.746.
        ("tanh.approx.bf16x2 %o0, %i0;", Halves, f64::tanh, bf16, Absolute(p(-8.0) + p(-21.0))),
        ("rcp.approx.ftz.f32 %o0, %i0;", F32, rcp, f32, Relative(p(-23.0))),
        ("rcp.approx.f32 %o0, %i0; // 1..4096", Range(1.0, 4096.0), rcp, f32, Relative(p(-23.0))),
        (
            "rsqrt.approx.ftz.f32 %o0, %i0; // 0.001..1000",
            Range(0.001, 1000.0),
            rsqrt,
            f32,
            Relative(p(-22.9)),
        ),
        (
            "sqrt.approx.ftz.f32 %o0, %i0; // 0.001..1000",
            Range(0.001, 1000.0),
            f64::sqrt,
            f32,
            Relative(p(-23.0)),
        ),
        ("lg2.approx.ftz.f32 %o0, %i0; // 2..1e30", Range(2.0, 1e30), f64::log2, f32, Relative(p(-22.0))),
        ("lg2.approx.ftz.f32 %o0, %i0; // 0.5..2", Range(0.5, 2.0), f64::log2, f32, Absolute(p(-22.0))),
        (
            "sin.approx.ftz.f32 %o0, %i0; // -pi..pi",
            Range(-NEARLY_PI, NEARLY_PI),
            f64::sin,
            f32,
            Absolute(p(-20.5)),
        ),
        (
            "cos.approx.ftz.f32 %o0, %i0; // -pi..pi",
            Range(-NEARLY_PI, NEARLY_PI),
            f64::cos,
            f32,
            Absolute(p(-20.5)),
        ),
    ];
    let mut all: Vec<Program> = rows
        .into_iter()
        .map(|(text, fill, of, format, error)| {
            Program::new(format!("approx/{text}"), &[fill], text).truth(Truth::Approximate {
                of,
                format,
                error,
            })
        })
        .collect();
    // Powers of two come out whole, so that a row sum of 2^n divides exactly; but for negative logarithms,
    // which an H200 has one unit in the last place nearer to 0.
    for text in
        ["rcp.approx.ftz.f32 %o0, %w0;", "lg2.approx.ftz.f32 %o0, %w0;", "ex2.approx.ftz.f32 %o0, %w1;"]
    {
        let body = format!(
            "add.s32 %w0, %t, 63; shl.b32 %w0, %w0, 23; sub.s32 %w1, %t, 64; cvt.rn.f32.s32 %w1, %w1;\n{text}"
        );
        let truth = if text.starts_with("lg2") { Truth::Near(f32, p(-18.0)) } else { Truth::Exact };
        all.push(
            Program::new(format!("approx/of powers of two: {text}"), &[], body).shape(1, 128).truth(truth),
        );
    }
    all
}
