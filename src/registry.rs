//! Where backends plug in: one arm each.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use fmha_core::{Error, FmhaBackend, ProblemError, Result, env};

/// Which backend to run on. As text: `auto`, `cpu`, `cuda`, `cuda:1`, `rocm`, `rocm:0`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Backend {
    /// The best device that is present; the CPU if there is no other.
    #[default]
    Auto,
    /// The processor that runs this code.
    Cpu,
    /// An NVIDIA device.
    Cuda {
        /// Which of them, from 0.
        ordinal: u32,
        /// Interpret kernels for this architecture (`sm_90a`) instead of running them on a device.
        emulate: Option<String>,
    },
    /// An AMD device.
    Rocm {
        /// Which of them, from 0.
        ordinal: u32,
        /// Interpret kernels for this architecture (`gfx942`) instead of running them on a device.
        emulate: Option<String>,
    },
}

impl Backend {
    /// The first NVIDIA device.
    pub const CUDA: Self = Self::Cuda { ordinal: 0, emulate: None };
    /// The first AMD device.
    pub const ROCM: Self = Self::Rocm { ordinal: 0, emulate: None };

    /// The same backend, but its kernels for `arch` interpreted on this machine's processor: correct,
    /// slow, and called emulated wherever it is reported.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for a choice that names no vendor's backend.
    pub fn emulated(self, arch: &str) -> Result<Self> {
        let emulate = Some(arch.to_owned());
        match self {
            Self::Cuda { ordinal, .. } => Ok(Self::Cuda { ordinal, emulate }),
            Self::Rocm { ordinal, .. } => Ok(Self::Rocm { ordinal, emulate }),
            Self::Auto if arch.starts_with("sm_") => Ok(Self::Cuda { ordinal: 0, emulate }),
            Self::Auto if arch.starts_with("gfx") => Ok(Self::Rocm { ordinal: 0, emulate }),
            Self::Auto | Self::Cpu => Err(Error::NoDevice(format!(
                "backend {self} emulates no `{arch}` (known: cuda with sm_..., rocm with gfx...)"
            ))),
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, ordinal, emulate) = match self {
            Self::Auto => return f.write_str("auto"),
            Self::Cpu => return f.write_str("cpu"),
            Self::Cuda { ordinal, emulate } => ("cuda", ordinal, emulate),
            Self::Rocm { ordinal, emulate } => ("rocm", ordinal, emulate),
        };
        match emulate {
            Some(arch) => write!(f, "{kind} (emulated {arch})"),
            None if *ordinal == 0 => f.write_str(kind),
            None => write!(f, "{kind}:{ordinal}"),
        }
    }
}

impl FromStr for Backend {
    type Err = ProblemError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |text: String| ProblemError::new("backend", text);
        let (kind, ordinal) = match text.split_once(':') {
            None => (text, 0),
            Some((kind, ordinal)) => (
                kind,
                ordinal
                    .parse()
                    .map_err(|_| wrong(format!("backend {text}: `{ordinal}` is no device number")))?,
            ),
        };
        match kind {
            "auto" if text == kind => Ok(Self::Auto),
            "cpu" if text == kind => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda { ordinal, emulate: None }),
            "rocm" => Ok(Self::Rocm { ordinal, emulate: None }),
            _ => Err(wrong(format!("backend `{text}` is none of auto, cpu, cuda, cuda:N, rocm, rocm:N"))),
        }
    }
}

/// A backend that `auto` would have preferred, and why it is not there.
#[derive(Clone, Debug)]
pub struct PassedOver {
    /// What was tried.
    pub backend: Backend,
    /// Why it did not open.
    pub reason: Error,
}

/// What [`open_explained`] found.
#[derive(Clone)]
pub struct Opened {
    /// The backend.
    pub backend: Arc<dyn FmhaBackend>,
    /// What `auto` tried before it; empty for an explicit choice.
    pub passed_over: Vec<PassedOver>,
}

/// A device that there is, or that there could be.
pub struct Device {
    /// What opens it.
    pub backend: Backend,
    /// The backend on it, or why it is absent.
    pub found: Result<Arc<dyn FmhaBackend>>,
}

/// Opens the backend that `choice` names. An explicit choice is honoured or refused; `auto` takes
/// the best that is present, and [`open_explained`] says what it passed over. Where the environment has
/// `FMHA_EMULATE`, `auto` is the emulated device of that architecture (`sm_90a`, `gfx942`).
///
/// # Errors
/// [`Error::NoDevice`] with the reason; for `auto`, only when not even the CPU can serve.
pub fn open(choice: &Backend) -> Result<Arc<dyn FmhaBackend>> {
    open_explained(choice).map(|opened| opened.backend)
}

/// As [`open`], and says what `auto` tried first.
///
/// # Errors
/// As [`open`].
pub fn open_explained(choice: &Backend) -> Result<Opened> {
    let mut passed_over = Vec::new();
    if *choice == Backend::Auto {
        if let Some(archs) = env::EMULATE.get()? {
            let arch = archs.split(',').next().unwrap_or_default();
            return Ok(Opened { backend: open_one(&Backend::Auto.emulated(arch)?)?, passed_over });
        }
        for backend in [Backend::CUDA, Backend::ROCM] {
            match open_one(&backend) {
                Ok(backend) => return Ok(Opened { backend, passed_over }),
                Err(reason) => passed_over.push(PassedOver { backend, reason }),
            }
        }
    }
    Ok(Opened { backend: open_one(choice)?, passed_over })
}

/// Every device: those present, and one entry with the reason for each kind that is absent.
#[must_use]
pub fn devices() -> Vec<Device> {
    let mut found = vec![Device { backend: Backend::Cpu, found: open_one(&Backend::Cpu) }];
    for nth in [
        |ordinal| Backend::Cuda { ordinal, emulate: None },
        |ordinal| Backend::Rocm { ordinal, emulate: None },
    ] {
        for ordinal in 0.. {
            let device = Device { backend: nth(ordinal), found: open_one(&nth(ordinal)) };
            let absent = device.found.is_err();
            // Beyond the last device there is nothing to report; where there is none at all, the reason.
            if !absent || ordinal == 0 {
                found.push(device);
            }
            if absent {
                break;
            }
        }
    }
    found
}

/// Every backend that is present, one for each device.
#[must_use]
pub fn all() -> Vec<Arc<dyn FmhaBackend>> {
    devices().into_iter().filter_map(|device| device.found.ok()).collect()
}

fn open_one(choice: &Backend) -> Result<Arc<dyn FmhaBackend>> {
    match choice {
        Backend::Auto | Backend::Cpu => cpu(),
        Backend::Cuda { ordinal, emulate } => cuda(*ordinal, emulate.as_deref()),
        Backend::Rocm { ordinal, emulate } => rocm(*ordinal, emulate.as_deref()),
    }
}

/// A backend without a device: plans for `arch` (`sm_90a`, `gfx942`), compiles where there is a
/// compiler, and runs nothing.
///
/// # Errors
/// [`Error::NoDevice`] for an architecture that no backend of this build knows.
pub fn pretend(arch: &str) -> Result<Arc<dyn FmhaBackend>> {
    match Backend::Auto.emulated(arch) {
        Ok(Backend::Cuda { .. }) => cuda_pretended(arch),
        Ok(Backend::Rocm { .. }) => rocm_pretended(arch),
        _ => Err(Error::NoDevice(format!("no backend plans for `{arch}` (known: sm_..., gfx...)"))),
    }
}

fn cpu() -> Result<Arc<dyn FmhaBackend>> {
    Ok(Arc::new(fmha_cpu::CpuBackend::new()?))
}

#[cfg(feature = "cuda")]
fn cuda(ordinal: u32, emulate: Option<&str>) -> Result<Arc<dyn FmhaBackend>> {
    Ok(Arc::new(fmha_cuda::CudaBackend::open(ordinal as usize, emulate)?))
}

#[cfg(feature = "cuda")]
fn cuda_pretended(arch: &str) -> Result<Arc<dyn FmhaBackend>> {
    Ok(Arc::new(fmha_cuda::CudaBackend::pretend(arch)?))
}

#[cfg(not(feature = "cuda"))]
fn cuda_pretended(_: &str) -> Result<Arc<dyn FmhaBackend>> {
    cuda(0, None)
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: u32, _: Option<&str>) -> Result<Arc<dyn FmhaBackend>> {
    Err(Error::NoDevice("this build has no cuda backend".into()))
}

#[cfg(feature = "rocm")]
fn rocm(ordinal: u32, emulate: Option<&str>) -> Result<Arc<dyn FmhaBackend>> {
    Ok(Arc::new(fmha_rocm::RocmBackend::open(ordinal as usize, emulate)?))
}

#[cfg(feature = "rocm")]
fn rocm_pretended(arch: &str) -> Result<Arc<dyn FmhaBackend>> {
    Ok(Arc::new(fmha_rocm::RocmBackend::pretend(arch)?))
}

#[cfg(not(feature = "rocm"))]
fn rocm_pretended(_: &str) -> Result<Arc<dyn FmhaBackend>> {
    rocm(0, None)
}

#[cfg(not(feature = "rocm"))]
fn rocm(_: u32, _: Option<&str>) -> Result<Arc<dyn FmhaBackend>> {
    Err(Error::NoDevice("this build has no rocm backend".into()))
}

/// What the last launches (at most 64) on this process's emulated NVIDIA device did: a JSON array, oldest
/// first, of `kernel`, `grid`, `block`, `counters` and `instructions`. Asking forgets them. `None` where
/// no such device is emulated.
#[must_use]
pub fn emulated_launches() -> Option<String> {
    #[cfg(feature = "cuda")]
    return fmha_cuda::emulated_launches();
    #[cfg(not(feature = "cuda"))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back() {
        for name in ["auto", "cpu", "cuda", "cuda:3", "rocm", "rocm:1"] {
            assert_eq!(name.parse::<Backend>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn an_unknown_name_is_refused_by_that_name() {
        for name in ["tpu", "cpu:1", "auto:0", "cuda:x", "cuda:-1", ""] {
            assert!(name.parse::<Backend>().unwrap_err().text.contains(name), "{name}");
        }
    }

    #[test]
    fn an_explicit_choice_is_honoured_or_refused_never_replaced() {
        for choice in [Backend::Cpu, Backend::CUDA, Backend::ROCM] {
            match open_explained(&choice) {
                Ok(opened) => {
                    assert_eq!(opened.backend.kind(), choice.to_string());
                    assert!(opened.passed_over.is_empty());
                }
                Err(Error::NoDevice(reason)) => assert!(reason.contains(&choice.to_string()), "{reason}"),
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn auto_says_what_it_passed_over() {
        let opened = open_explained(&Backend::Auto).unwrap();
        let expected = match opened.backend.kind() {
            "cuda" => 0,
            "rocm" => 1,
            _ => 2,
        };
        assert_eq!(opened.passed_over.len(), expected);
    }

    #[test]
    fn an_architecture_chooses_its_vendor() {
        assert!(matches!(Backend::Auto.emulated("sm_90a"), Ok(Backend::Cuda { .. })));
        assert!(matches!(Backend::Auto.emulated("gfx942"), Ok(Backend::Rocm { .. })));
        assert!(Backend::Cpu.emulated("sm_90a").is_err());
        assert!(Backend::Auto.emulated("avx2").is_err());
    }
}
