//! `fmha bundle`: the table of some architectures, compiled into one file.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;
use fmha::{AnyProblem, Backend, Device, Error, PlanOptions};
use fmha_core::cache::{
    Bundle, CompiledKernel, KernelJob, Precompile, SourceKey, backward_table, forward_table,
};
use rayon::prelude::*;

use crate::Verdict;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::target;

/// Options of `fmha bundle`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fmha bundle --arch sm_90a --out kernels.fmha         every kernel of the table
  fmha bundle --arch sm_90a,gfx942 --out kernels.fmha  for two architectures
  fmha bundle --arch sm_90a --filter bf16/d128x128/causal --out kernels.fmha
  fmha bundle --arch sm_90a --backward --filter bf16/d128x128 --out kernels.fmha
  FMHA_BUNDLE=kernels.fmha fmha run ...                needs no compiler

No device is needed, only the vendor's compiler. The table is plain attention (no bias, soft-cap or
sink) in f16 and bf16; head dimensions 64, 96, 128, 192, 256 and 192x128; full, causal and window;
batch and group; with and without LSE; sequences from 1 to 16384; 1, 4 and 8 query heads a kv head.
A call of other sizes whose own tile is not in the file is served by the nearest one that is.")]
pub(super) struct BundleArgs {
    /// Architectures: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_110a, sm_120a, gfx90a, gfx942, gfx950,
    /// gfx1100, gfx1201
    #[arg(long, value_name = "ARCH", value_delimiter = ',', required = true)]
    arch: Vec<String>,

    /// The file; replaced whole, or not at all
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// Only problems with these parts in their names: bf16/d128x128/causal/batch/lse/q2048k2048/gqa4
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,

    /// The backward of those problems that have LSE too, and of 128 queries and keys, deterministic and not
    #[arg(long)]
    backward: bool,

    /// Keep the compiler's assembly too: an emulated NVIDIA device runs that
    #[arg(long)]
    keep_assembly: bool,
}

/// A kernel to compile, and where.
struct Wanted<'a> {
    compiler: &'a dyn Precompile,
    job: KernelJob,
}

impl BundleArgs {
    pub(super) fn carry_out(&self, out: &mut dyn Write) -> Result<Verdict, Failure> {
        // Compiling takes minutes, so the output path is checked first.
        target::check("out", &self.out, &[])?;
        let backends = self.arch.iter().map(|arch| Backend::pretend(arch)).collect::<Result<Vec<_>, _>>()?;
        let mut wanted = BTreeMap::new();
        for backend in &backends {
            self.collect(backend, &mut wanted, out)?;
        }
        if wanted.is_empty() {
            return Err(Failure::wrong(format!(
                "bundle: 0 problems of the table have `{}` in their names and a kernel",
                self.filter
            )));
        }
        let kernels = compile(&wanted.into_values().collect::<Vec<_>>())?;
        let kernels =
            kernels.into_iter().map(|kernel| if self.keep_assembly { kernel } else { bare(kernel) });
        let bundle = Bundle::new(self.out.display().to_string(), kernels);
        bundle.write(&self.out)?;
        let bytes = std::fs::metadata(&self.out).map_err(|error| Failure::file(&self.out, &error))?.len();
        writeln!(out, "{}: {} kernels, {:.1} MB", self.out.display(), bundle.len(), bytes as f64 / 1e6)?;
        Ok(Verdict::Right)
    }

    /// Whether a part of the name, beginning at its start or after a `/`, equals the filter.
    fn wants(&self, name: &str) -> bool {
        name.starts_with(&self.filter) || name.contains(&format!("/{}", self.filter))
    }

    /// Adds the kernels that a backend compiles for the table, each once.
    fn collect<'a>(
        &self,
        backend: &'a Device,
        wanted: &mut BTreeMap<SourceKey, Wanted<'a>>,
        out: &mut dyn Write,
    ) -> Result<(), Failure> {
        let name = backend.name();
        let compiler = backend
            .precompiler()
            .ok_or_else(|| Failure::wrong(format!("{name} compiles no kernel ahead of time")))?;
        let (mut problems, mut kernels, mut refused) = (0, 0, 0);
        // Most problems share their kernel, and a key is a hash of all headers: texts are compared first.
        let mut seen = std::collections::BTreeSet::new();
        let mut add = |problem: AnyProblem<'_>, options: &PlanOptions| {
            problems += 1;
            match compiler.jobs(problem, options) {
                Ok(jobs) => {
                    for job in jobs.into_iter().filter(|job| seen.insert(job.source.entry.clone())) {
                        kernels += 1;
                        wanted.insert(job.key(), Wanted { compiler, job });
                    }
                }
                Err(Error::Unsupported { .. }) => refused += 1,
                Err(other) => return Err(other),
            }
            Ok(())
        };
        for entry in forward_table()?.iter().filter(|entry| self.wants(&entry.name)) {
            add(AnyProblem::Forward(&entry.problem), &PlanOptions::default())?;
        }
        let backward = if self.backward { backward_table()? } else { Vec::new() };
        for entry in backward.iter().filter(|entry| self.wants(&entry.name)) {
            for deterministic in [false, true] {
                let options = PlanOptions::default().deterministic(deterministic);
                add(AnyProblem::Backward(&entry.problem), &options)?;
            }
        }
        writeln!(out, "{name}: {problems} problems, {kernels} kernels, {refused} problems refused")?;
        Ok(())
    }
}

/// Compiles on all cores, or finds in the cache.
fn compile(wanted: &[Wanted<'_>]) -> Result<Vec<Arc<CompiledKernel>>, Failure> {
    let progress = Progress::new("compile");
    let (done, total) = (AtomicU64::new(0), wanted.len() as u64);
    let compiled: Result<Vec<_>, Error> = wanted
        .par_iter()
        .map(|Wanted { compiler, job }| {
            let kernel = compiler.precompile(job)?;
            progress.at(done.fetch_add(1, Ordering::Relaxed) + 1, total);
            Ok(kernel)
        })
        .collect();
    progress.finish();
    Ok(compiled?)
}

fn bare(kernel: Arc<CompiledKernel>) -> Arc<CompiledKernel> {
    Arc::new(CompiledKernel { assembly: Vec::new(), ..Arc::unwrap_or_clone(kernel) })
}
