//! Tensors of your own, planned once and run many times: `cargo run --release --example own_tensors`.

use fmha::{Backend, DType, DevSlice, DevSliceMut, Dims, FwdArgs, FwdProblem, PlanOptions, bf16};

fn main() -> Result<(), fmha::Error> {
    let dims = Dims::batch(1).seqlens(64, 1024).heads(8, 2).head_dim(64);
    let (q, k, v) = (ones(64 * 8 * 64), ones(1024 * 2 * 64), ones(1024 * 2 * 64));
    let mut o = vec![bf16::ZERO; 64 * 8 * 64];

    let device = "cpu".parse::<Backend>()?.open()?; // auto | cpu | cuda | cuda:1 | rocm
    let problem = FwdProblem::batch(DType::Bf16, dims); // shapes, types, strides, mask, bias; no pointers
    let problem = problem.mask("b:512,0".parse()?); // a window of 512 keys
    let problem = problem.validate()?; // names the field and the number that is wrong
    let plan = device.plan_fwd(&problem, &PlanOptions::default())?; // chooses and compiles, or every refusal

    let (q, k, v) = (DevSlice::host(&q), DevSlice::host(&k), DevSlice::host(&v)); // or DevSlice::from_raw: a device's
    let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut o));
    let stream = device.default_stream(); // or a stream of your own: device.stream()?, Stream::from_raw
    plan.run(&mut args, &stream)?; // checks the pointers, queues, returns
    stream.synchronize()?;

    // V is all ones, so O, which is a mean of V's rows, is all ones too.
    assert!(o.iter().all(|o| o.to_f32() == 1.0));
    println!("{plan}");
    Ok(())
}

fn ones(count: usize) -> Vec<bf16> {
    vec![bf16::ONE; count]
}
