//! Steps of a call, one by one: `cargo run --release --example explain`.

use fmha::{Backend, Dims, FwdProblem, MaskSpec, PlanOptions};

fn main() -> Result<(), fmha::Error> {
    // Every device is listed; an absent one with the reason.
    for found in fmha::devices() {
        match &found.device {
            Ok(device) => println!("{}: {}", found.backend, device.name()),
            Err(reason) => println!("{}: {reason}", found.backend),
        }
    }

    // A problem is plain data: shapes, types, strides, mask; no pointers.
    let dims = Dims::batch(2).seqlens(1, 4096).heads(32, 8).head_dim(128);
    let mask = "b:1024,0".parse::<MaskSpec>().expect("a window of 1024 keys before the diagonal");
    let problem = FwdProblem::batch(fmha::DType::Bf16, dims).mask(mask).write_lse(true);

    // An inconsistent problem is refused here; the error names the field and its numbers.
    let broken = problem.clone().dims(Dims { num_heads_kv: 5, ..dims });
    if let Err(error) = broken.validate() {
        println!("\nrefused: {error}");
    }

    // A problem that validates can be planned, and the plan describes itself.
    let device = Backend::Auto.open()?;
    let plan = device.plan_fwd(&problem.validate()?, &PlanOptions::default())?;
    println!("\n{plan}");

    // An explicit wish is granted, or refused with every kernel's reason.
    let wish = PlanOptions::default().kernel("no-such-kernel");
    if let Err(error) = device.plan_fwd(plan.problem(), &wish) {
        println!("refused: {error}");
    }
    Ok(())
}
