//! The environment variables, all of them.

/// One environment variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvVar {
    /// Its name.
    pub name: &'static str,
    /// What it sets.
    pub meaning: &'static str,
}

impl EnvVar {
    /// Its value, if set and not empty.
    #[must_use]
    pub fn get(self) -> Option<String> {
        std::env::var(self.name).ok().filter(|value| !value.is_empty())
    }
}

/// How many threads the CPU backend uses.
pub const NUM_THREADS: EnvVar =
    EnvVar { name: "FMHA_NUM_THREADS", meaning: "threads of the CPU backend (default: one a core)" };

/// Which instructions the CPU backend may use.
pub const CPU_ISA: EnvVar = EnvVar {
    name: "FMHA_CPU_ISA",
    meaning: "highest instruction set of the CPU backend: amx, avx512bf16, avx512, avx2, neon, portable",
};

/// Where NVRTC is.
pub const NVRTC: EnvVar =
    EnvVar { name: "FMHA_NVRTC", meaning: "path of the NVRTC library (default: searched for)" };

/// Where compiled kernels are kept.
pub const CACHE_DIR: EnvVar = EnvVar {
    name: "FMHA_CACHE_DIR",
    meaning: "folder of the cache of compiled kernels, at most 1 GiB, or none (default: fmha in the user's cache folder)",
};

/// Kernels that were compiled elsewhere.
pub const BUNDLE: EnvVar =
    EnvVar { name: "FMHA_BUNDLE", meaning: "files of compiled kernels, as `fmha bundle` writes them" };

/// Where kernels are written for a reader.
pub const DUMP: EnvVar =
    EnvVar { name: "FMHA_DUMP", meaning: "folder for each kernel's source, log, resources and metadata" };

/// What the test doubles of the drivers are; set by the backends themselves.
pub const EMULATE: EnvVar = EnvVar {
    name: "FMHA_EMULATE",
    meaning: "architecture of a test double's device; a backend sets it when asked to emulate",
};

/// Which clang compiles AMD kernels.
pub const HIP_CLANG: EnvVar = EnvVar {
    name: "FMHA_HIP_CLANG",
    meaning: "clang that compiles kernels for AMD (default: clang-22, clang, ROCm's, then hipRTC)",
};

/// Where the emulator's driver library lies.
pub const EMULATOR_DIR: EnvVar = EnvVar {
    name: "FMHA_EMULATOR_DIR",
    meaning: "folder of the emulators' driver libraries (default: beside the program)",
};

/// How long the tests try random input.
pub const FUZZ_SECONDS: EnvVar = EnvVar {
    name: "FMHA_FUZZ_SECONDS",
    meaning: "seconds, about, that each test of random input takes (default: 1)",
};

/// Every variable, in the order of the README's table.
pub const ALL: &[EnvVar] =
    &[NUM_THREADS, CPU_ISA, NVRTC, HIP_CLANG, CACHE_DIR, BUNDLE, DUMP, EMULATE, EMULATOR_DIR, FUZZ_SECONDS];
