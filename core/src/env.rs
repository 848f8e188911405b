//! The table of all environment variables.

use crate::error::{Error, Result};

/// One environment variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvVar {
    /// The variable's name.
    pub name: &'static str,
    /// Meaning of the variable's value.
    pub meaning: &'static str,
}

impl EnvVar {
    /// The variable's value, if set and not empty.
    ///
    /// # Errors
    /// [`Error::System`] if the value is not UTF-8: using the default would ignore the user's wish.
    pub fn get(self) -> Result<Option<String>> {
        let Some(value) = std::env::var_os(self.name) else { return Ok(None) };
        match value.into_string() {
            Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
            Err(value) => Err(Error::System {
                what: format!("environment variable {}", self.name),
                text: format!("its value {value:?} is not UTF-8"),
            }),
        }
    }
}

/// Declares each variable, and the list of all.
macro_rules! variables {
    ($($constant:ident = $name:literal, $meaning:literal;)*) => {
        $(#[doc = $meaning] pub const $constant: EnvVar = EnvVar { name: $name, meaning: $meaning };)*

        /// Every variable, in the order of the README's table.
        pub const ALL: &[EnvVar] = &[$($constant),*];
    };
}

variables! {
    NUM_THREADS = "FMHA_NUM_THREADS", "threads of the CPU backend, at most eight a core (default: one a core)";
    CPU_ISA = "FMHA_CPU_ISA",
        "highest instruction set of the CPU backend: amx, avx512bf16, avx512vbmi, avx512, avx2, neon, portable";
    NVRTC = "FMHA_NVRTC", "path of the NVRTC library (default: searched for)";
    HIP_CLANG = "FMHA_HIP_CLANG", "clang that compiles kernels for AMD (default: clang-22, clang, ROCm's, then hipRTC)";
    CACHE_DIR = "FMHA_CACHE_DIR",
        "folder of the cache of compiled kernels, at most 2 GiB, or none (default: fmha in the user's cache folder)";
    BUNDLE = "FMHA_BUNDLE", "files of compiled kernels, as `fmha bundle` writes them";
    DUMP = "FMHA_DUMP", "folder for each kernel's source, log, resources and metadata";
    EMULATE = "FMHA_EMULATE",
        "architecture that `auto` emulates (sm_90a, gfx942); of a test double that is opened without one, its devices'";
    EMULATOR_DIR = "FMHA_EMULATOR_DIR",
        "folder of the emulators' driver libraries (default: the source tree's, built when asked for, or beside the program)";
    DIST_SECRET = "FMHA_DIST_SECRET",
        "secret that the ranks of a job prove to each other, at least 16 bytes, the same on all (default: none)";
    DIST_LISTEN = "FMHA_DIST_LISTEN",
        "address of this host at which a rank listens (default: that by which it reaches rank 0)";
    FUZZ_SECONDS = "FMHA_FUZZ_SECONDS", "seconds, about, that each test of random input takes (default: 1)";
    DRAWN_PLANS = "FMHA_DRAWN_PLANS",
        "COUNT or SEED:COUNT of drawn problems whose plans the tests compile (default: 300)";
    DRAWN = "FMHA_DRAWN", "COUNT or SEED:COUNT of drawn problems that the tests hand to each door (default: 120)";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_set_has_its_value_and_another_has_none() {
        let get = |name| EnvVar { name, meaning: "" }.get().unwrap();
        let path = std::env::var("PATH").unwrap();
        assert!(!path.is_empty());
        assert_eq!(get("PATH"), Some(path));
        assert_eq!(get("NOBODY_SETS_THIS"), None);
    }
}
