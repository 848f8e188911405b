//! Selects the first recipe (kernel with its checks and launches) of a family that accepts a problem.

use fmha_core::backend::unsupported;
use fmha_core::{PlanOptions, Refusal, Result};

use crate::recipe::{Choice, GpuProblem, Planned, Recipe, Vendor};

/// The accepting recipe's choice of tile and launches, and the reasons why the recipes before it refused.
pub type Selected<P, V> = (Choice<Planned<P, V>>, Vec<Refusal>);

/// The choice of the first recipe of a family that accepts the problem, and the refusals of those before it.
///
/// # Errors
/// [`Error::Unsupported`](fmha_core::Error::Unsupported) with every refusal.
pub fn select<P: GpuProblem, V: Vendor>(
    backend: &str,
    family: &[Recipe<P, V>],
    options: &PlanOptions,
    choose: impl Fn(&Recipe<P, V>) -> Result<Choice<Planned<P, V>>, Refusal>,
) -> Result<Selected<P, V>> {
    let mut refusals = Vec::new();
    for kernel in family {
        let wanted = match &options.kernel {
            Some(name) if name == kernel.name() => true,
            Some(_) => continue,
            None => !kernel.about.is_fallback || options.allow_fallback,
        };
        if !wanted {
            refusals
                .push(Refusal::new(kernel.name(), "it is the slow fallback, and allow_fallback is false"));
            continue;
        }
        let kept = |choice: Choice<Planned<P, V>>| {
            options.check_promises(kernel.name(), &choice.promises).map(|()| choice)
        };
        match choose(kernel).and_then(kept) {
            Ok(choice) => return Ok((choice, refusals)),
            Err(refusal) => refusals.push(refusal),
        }
    }
    if let (Some(name), true) = (&options.kernel, refusals.is_empty()) {
        let known = family.iter().map(Recipe::name).collect::<Vec<_>>().join(", ");
        let reason = format!("there is no such {} kernel (known: {known})", P::OPERATION);
        refusals.push(Refusal::new(name.clone(), reason));
    }
    Err(unsupported(backend, refusals))
}
