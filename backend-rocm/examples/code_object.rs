//! Writes the code object of one plain call:
//! `code_object ARCH DTYPE HEAD_DIM MASK FILE [kernel=NAME] [name=value ...]`.

use fmha_core::{AnyProblem, Dims, FwdProblem, PlanOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [arch, dtype, head_dim, mask, file, tile @ ..] = &args[..] else {
        return Err("usage: code_object ARCH DTYPE HEAD_DIM MASK FILE [name=value ...]".into());
    };
    let head_dim = head_dim.parse()?;
    let dims = Dims::batch(4).seqlens(8192, 8192).heads(64, 8).head_dim(head_dim);
    let mut problem = FwdProblem::batch(dtype.parse()?, dims);
    problem.mask = mask.parse()?;
    problem.write_lse = true;
    let (kernel, tile): (Vec<_>, Vec<_>) =
        tile.iter().filter_map(|pair| pair.split_once('=')).partition(|(name, _)| *name == "kernel");
    let options = PlanOptions::default().tile(tile);
    let options = kernel.iter().fold(options, |options, (_, name)| options.kernel(*name));
    let backend = fmha_rocm::pretend(arch)?;
    let problem = problem.validate()?;
    print!("{}", backend.plan_fwd(&problem, &options)?);
    let compiler = backend.precompiler().ok_or("no compiler")?;
    let jobs = compiler.jobs(AnyProblem::Forward(&problem), &options)?;
    std::fs::write(file, &compiler.precompile(&jobs[0])?.machine)?;
    Ok(())
}
