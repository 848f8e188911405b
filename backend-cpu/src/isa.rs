//! The instruction set: the best that the processor has, limited by the configuration.

use std::fmt;
use std::str::FromStr;

use enum_dispatch::enum_dispatch;
use fmha_core::{Error, ProblemError, Result};

use crate::backward::Backward;
use crate::blocks::FmaLoop;
use crate::combine::Combine;
use crate::forward::{Blocks, Forward};
#[cfg(all(target_arch = "aarch64", not(any(test, baseline_alone))))]
use crate::simd::Neon;
#[cfg(all(target_arch = "x86_64", not(any(test, baseline_alone))))]
use crate::simd::{Amx, Avx2, Avx512, Avx512Bf16, Avx512Vbmi};
use crate::simd::{Portable, Simd};
use crate::sparse::Index;
use crate::tasks::Threads;

/// An instruction set, by rising rank within its architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// The target's baseline.
    Portable,
    /// AArch64 Advanced SIMD.
    Neon,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 F and VL.
    Avx512,
    /// AVX-512 with VBMI, whose byte permutations convert FP8.
    Avx512Vbmi,
    /// AVX-512 BF16: dot products of bf16 pairs.
    Avx512Bf16,
    /// AMX: products of tiles of bf16.
    Amx,
}

impl Isa {
    /// Every set, best first.
    pub const ALL: [Isa; 7] =
        [Isa::Amx, Isa::Avx512Bf16, Isa::Avx512Vbmi, Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];

    /// Whether processors of this program's architecture can have this set.
    fn is_of_this_architecture(self) -> bool {
        match self {
            Isa::Portable => true,
            Isa::Neon => cfg!(target_arch = "aarch64"),
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Vbmi | Isa::Avx512Bf16 | Isa::Amx => {
                cfg!(target_arch = "x86_64")
            }
        }
    }

    /// The name in `FMHA_CPU_ISA` and in plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vbmi => "avx512vbmi",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Amx => "amx",
        }
    }

    /// Whether this processor has this set.
    #[must_use]
    pub fn is_available(self) -> bool {
        Engine::new(self).is_some()
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = ProblemError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Isa::ALL.into_iter().find(|isa| isa.name() == text).ok_or_else(|| {
            let known = Isa::ALL.map(Isa::name).join(", ");
            ProblemError::new("isa", format!("isa `{text}` is no instruction set (known: {known})"))
        })
    }
}

/// The operations of an instruction set. Each is compiled once per set, and the set is chosen once at run time.
#[enum_dispatch]
pub(crate) trait Kernels {
    fn forward(&self, call: &Forward<'_>, threads: &Threads) -> Result<()>;
    fn backward(&self, call: &Backward<'_>, threads: &Threads) -> Result<()>;
    fn combine(&self, call: &Combine<'_>, threads: &Threads) -> Result<()>;
    fn index(&self, call: &Index<'_>, threads: &Threads) -> Result<()>;
    /// Runs a fixed number of FMAs in registers: how many operations.
    fn fma_loop(&self) -> f64;
    /// Number of queries that are computed together, in the lanes of vectors; `block_m` is a multiple.
    fn query_panel(&self) -> usize;
}

impl<S: Simd> Kernels for S {
    fn forward(&self, call: &Forward<'_>, threads: &Threads) -> Result<()> {
        call.run(*self, threads)
    }

    fn backward(&self, call: &Backward<'_>, threads: &Threads) -> Result<()> {
        call.run(self.plain(), threads)
    }

    fn combine(&self, call: &Combine<'_>, threads: &Threads) -> Result<()> {
        call.run(self.plain(), threads)
    }

    fn index(&self, call: &Index<'_>, threads: &Threads) -> Result<()> {
        call.run(self.plain(), threads)
    }

    fn fma_loop(&self) -> f64 {
        let mut flops = 0.0;
        self.run(FmaLoop { flops: &mut flops });
        flops
    }

    fn query_panel(&self) -> usize {
        S::PANEL
    }
}

// Kernels for six sets take most of the crate's compile time. Therefore the crate's own test program has only the
// baseline's kernels and those that a test names (`tests/` runs every set of the library), and `--cfg
// baseline_alone` leaves out the other sets, for tests of programs that use this crate.

/// An instruction set that this processor has, with the set's kernels.
#[cfg(all(target_arch = "x86_64", not(any(test, baseline_alone))))]
#[enum_dispatch(Kernels)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Engine {
    Portable,
    Avx2,
    Avx512,
    Avx512Vbmi,
    Avx512Bf16,
    Amx,
}

/// An instruction set that this processor has, with its kernels.
#[cfg(all(target_arch = "aarch64", not(any(test, baseline_alone))))]
#[enum_dispatch(Kernels)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Engine {
    Portable,
    Neon,
}

/// An instruction set that this processor has, with its kernels.
#[cfg(any(test, baseline_alone, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[enum_dispatch(Kernels)]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Engine {
    Portable,
}

impl Engine {
    /// The kernels of `isa`, if the processor has it.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        match isa {
            Isa::Portable => Some(Portable.into()),
            #[cfg(all(target_arch = "aarch64", not(any(test, baseline_alone))))]
            Isa::Neon => Neon::detect().map(Into::into),
            #[cfg(all(target_arch = "x86_64", not(any(test, baseline_alone))))]
            wide => Self::wide(wide),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }

    #[cfg(all(target_arch = "x86_64", not(any(test, baseline_alone))))]
    fn wide(isa: Isa) -> Option<Self> {
        match isa {
            Isa::Portable | Isa::Neon => None,
            Isa::Avx2 => Avx2::detect().map(Into::into),
            Isa::Avx512 => Avx512::detect().map(Into::into),
            Isa::Avx512Vbmi => Avx512Vbmi::detect().map(Into::into),
            Isa::Avx512Bf16 => Avx512Bf16::detect().map(Into::into),
            Isa::Amx => Amx::detect().map(Into::into),
        }
    }

    /// The best set that the processor has, not above `cap`.
    ///
    /// # Errors
    /// The cap names instructions of another processor.
    pub(crate) fn best(cap: Option<Isa>) -> Result<(Isa, Self)> {
        if let Some(cap) = cap.filter(|cap| !cap.is_of_this_architecture()) {
            let text = format!("instruction set {cap} is not one of {}", std::env::consts::ARCH);
            return Err(Error::NoDevice(text));
        }
        let best = Isa::ALL
            .into_iter()
            .filter(|&isa| is_wanted(isa, cap, &vendor()))
            .find_map(|isa| Engine::new(isa).map(|engine| (isa, engine)));
        best.ok_or_else(|| Error::NoDevice("no instruction set is available".into()))
    }
}

/// Whether `isa` is used if the processor has it. Without a cap, bf16 dot products are used only if they are faster
/// than f32 FMAs: on AMD they are (matrix products on an EPYC: 378 GFLOP/s in bf16, 181 in f32), on Intel they are
/// not (a Xeon with AMX: 109 against 199 GFLOP/s).
fn is_wanted(isa: Isa, cap: Option<Isa>, vendor: &str) -> bool {
    match cap {
        Some(cap) => isa <= cap,
        None => isa != Isa::Avx512Bf16 || vendor == "AuthenticAMD",
    }
}

/// Vendor of the processor as reported by `cpuid`; empty if it is not reported.
fn vendor() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = crate::simd::cpuid(0, 0);
        let word = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        String::from_utf8_lossy(word.as_flattened()).into_owned()
    }
    #[cfg(not(target_arch = "x86_64"))]
    String::new()
}

/// Sizes of forward tiles if the caller names none.
pub(crate) const FORWARD_BLOCKS: Blocks =
    Blocks { block_m: 512, block_n: 128, may_shrink: true, rows_only: false, exact_max: false };

/// Sizes of backward tiles if the caller names none.
pub(crate) const BACKWARD_BLOCKS: Blocks =
    Blocks { block_m: 96, block_n: 192, may_shrink: false, rows_only: false, exact_max: false };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn left_to_choose_bf16_dot_products_are_taken_where_they_are_fast_and_else_what_the_cap_allows() {
        for isa in Isa::ALL {
            assert!(is_wanted(isa, None, "AuthenticAMD"), "{isa}");
            assert_eq!(is_wanted(isa, None, "GenuineIntel"), isa != Isa::Avx512Bf16, "{isa}");
            for cap in Isa::ALL {
                assert_eq!(is_wanted(isa, Some(cap), "GenuineIntel"), isa <= cap, "{isa}, at most {cap}");
            }
        }
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn the_processor_is_of_the_vendor_that_the_system_names() {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let line = text.lines().find(|line| line.starts_with("vendor_id")).unwrap();
        assert_eq!(vendor(), line.split_once(':').unwrap().1.trim());
    }

    #[test]
    fn a_loop_of_fmas_counts_two_operations_a_lane() {
        fn counts<S: Simd>(s: S, lanes: u32) {
            assert_eq!(s.fma_loop(), f64::from(200_000 * 12 * 2 * lanes), "{lanes} lanes");
        }
        counts(Portable, 4);
        #[cfg(target_arch = "aarch64")]
        crate::simd::Neon::detect().into_iter().for_each(|s| counts(s, 4));
        #[cfg(target_arch = "x86_64")]
        {
            crate::simd::Avx2::detect().into_iter().for_each(|s| counts(s, 8));
            crate::simd::Avx512::detect().into_iter().for_each(|s| counts(s, 16));
            crate::simd::Amx::detect().into_iter().for_each(|s| counts(s, 16));
        }
    }
}
