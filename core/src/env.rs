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

/// Variable for the number of threads of the CPU backend.
pub const NUM_THREADS: EnvVar = EnvVar {
    name: "FMHA_NUM_THREADS",
    meaning: "threads of the CPU backend, at most eight a core (default: one a core)",
};

/// Variable that limits the instructions that the CPU backend uses.
pub const CPU_ISA: EnvVar = EnvVar {
    name: "FMHA_CPU_ISA",
    meaning: "highest instruction set of the CPU backend: amx, avx512bf16, avx512vbmi, avx512, avx2, neon, portable",
};

/// Variable for the path of NVRTC.
pub const NVRTC: EnvVar =
    EnvVar { name: "FMHA_NVRTC", meaning: "path of the NVRTC library (default: searched for)" };

/// Variable for the folder of compiled kernels.
pub const CACHE_DIR: EnvVar = EnvVar {
    name: "FMHA_CACHE_DIR",
    meaning: "folder of the cache of compiled kernels, at most 2 GiB, or none (default: fmha in the user's cache folder)",
};

/// Variable for files of compiled kernels that a process loads.
pub const BUNDLE: EnvVar =
    EnvVar { name: "FMHA_BUNDLE", meaning: "files of compiled kernels, as `fmha bundle` writes them" };

/// Variable for the folder to which compiled kernels are written for people to read.
pub const DUMP: EnvVar =
    EnvVar { name: "FMHA_DUMP", meaning: "folder for each kernel's source, log, resources and metadata" };

/// Variable for the device that is emulated if the program chooses none.
pub const EMULATE: EnvVar = EnvVar {
    name: "FMHA_EMULATE",
    meaning: "architecture that `auto` emulates (sm_90a, gfx942); of a test double that is opened without one, its devices'",
};

/// Variable for the clang that compiles AMD kernels.
pub const HIP_CLANG: EnvVar = EnvVar {
    name: "FMHA_HIP_CLANG",
    meaning: "clang that compiles kernels for AMD (default: clang-22, clang, ROCm's, then hipRTC)",
};

/// Variable for the folder of the emulator's driver library.
pub const EMULATOR_DIR: EnvVar = EnvVar {
    name: "FMHA_EMULATOR_DIR",
    meaning: "folder of the emulators' driver libraries (default: the source tree's, built when asked for, or beside the program)",
};

/// Variable for the secret that the ranks of a job share.
pub const DIST_SECRET: EnvVar = EnvVar {
    name: "FMHA_DIST_SECRET",
    meaning: "secret that the ranks of a job prove to each other, at least 16 bytes, the same on all (default: none)",
};

/// Variable for the address at which a rank listens.
pub const DIST_LISTEN: EnvVar = EnvVar {
    name: "FMHA_DIST_LISTEN",
    meaning: "address of this host at which a rank listens (default: that by which it reaches rank 0)",
};

/// Variable for the time that tests spend on random input.
pub const FUZZ_SECONDS: EnvVar = EnvVar {
    name: "FMHA_FUZZ_SECONDS",
    meaning: "seconds, about, that each test of random input takes (default: 1)",
};

/// Variable for the number of random problems whose plans a test compiles.
pub const DRAWN_PLANS: EnvVar = EnvVar {
    name: "FMHA_DRAWN_PLANS",
    meaning: "COUNT or SEED:COUNT of drawn problems whose plans the tests compile (default: 300)",
};

/// Number of random calls that the tests make through each binding.
pub const DRAWN: EnvVar = EnvVar {
    name: "FMHA_DRAWN",
    meaning: "COUNT or SEED:COUNT of drawn problems that the tests hand to each door (default: 120)",
};

/// Every variable, in the order of the README's table.
pub const ALL: &[EnvVar] = &[
    NUM_THREADS,
    CPU_ISA,
    NVRTC,
    HIP_CLANG,
    CACHE_DIR,
    BUNDLE,
    DUMP,
    EMULATE,
    EMULATOR_DIR,
    DIST_SECRET,
    DIST_LISTEN,
    FUZZ_SECONDS,
    DRAWN_PLANS,
    DRAWN,
];

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
