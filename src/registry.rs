//! Registry of backends: those of this library, and those that third parties register by name.

use std::collections::HashMap;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::str::FromStr;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use fmha_core::fork::PerProcess;
use fmha_core::{Device, Error, ProblemError, Result, env};

/// Backend to run on. As text: `auto`, `cpu`, `cuda`, `cuda:1`, `rocm`, `rocm:0`, and the names given to
/// [`register`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// The best device that is present; the CPU if there is no other.
    #[default]
    Auto,
    /// The processor that runs this code.
    Cpu,
    /// An NVIDIA device.
    Cuda {
        /// Index of the device, from 0.
        ordinal: u32,
        /// Architecture (`sm_90a`) for which kernels are interpreted, in place of running them on a device.
        emulate: Option<String>,
    },
    /// An AMD device.
    Rocm {
        /// Index of the device, from 0.
        ordinal: u32,
        /// Architecture (`gfx942`) for which kernels are interpreted, in place of running them on a device.
        emulate: Option<String>,
    },
    /// A device of a backend that was [registered](register).
    Registered {
        /// Name of the registered backend.
        name: String,
        /// Index of the device among the backend's devices, from 0.
        ordinal: u32,
    },
}

impl Backend {
    /// The first NVIDIA device.
    pub const CUDA: Self = Self::Cuda { ordinal: 0, emulate: None };
    /// The first AMD device.
    pub const ROCM: Self = Self::Rocm { ordinal: 0, emulate: None };

    /// Backend whose kernels for `arch` are interpreted on this machine's processor: correct and slow. Every
    /// report says that it is emulated.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an architecture of another vendor's, and for a choice that names no vendor's backend.
    pub fn emulated(self, arch: &str) -> Result<Self> {
        let emulate = Some(arch.to_owned());
        match self {
            Self::Cuda { ordinal, .. } if arch.starts_with("sm_") => Ok(Self::Cuda { ordinal, emulate }),
            Self::Rocm { ordinal, .. } if arch.starts_with("gfx") => Ok(Self::Rocm { ordinal, emulate }),
            Self::Auto if arch.starts_with("sm_") => Ok(Self::Cuda { ordinal: 0, emulate }),
            Self::Auto if arch.starts_with("gfx") => Ok(Self::Rocm { ordinal: 0, emulate }),
            _ => Err(Error::NoDevice(format!(
                "backend {self} emulates no `{arch}` (known: cuda with sm_..., rocm with gfx...)"
            ))),
        }
    }

    /// The device that this names, opened at the first call and kept for the life of the process, with the kernels
    /// that it has loaded. An explicit choice is honoured or refused; `auto` takes the best that is present, and
    /// [`passed_over`] says what it tried first. Where the environment has `FMHA_EMULATE`, `auto` is the emulated
    /// device of that architecture (`sm_90a`, `gfx942`).
    ///
    /// ```
    /// use fmha::Backend;
    ///
    /// let (device, again) = (Backend::Cpu.open()?, "cpu".parse::<Backend>()?.open()?);
    /// assert!(device.is(&again), "it is opened once");
    /// # Ok::<(), fmha::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason, which is looked for anew at the next call; for `auto`, only when not even
    /// the CPU can serve.
    pub fn open(self) -> Result<Device> {
        Ok(self.opened()?.device)
    }

    /// No device: plans for `arch` (`sm_90a`, `gfx942`), compiles where there is a compiler, and runs nothing.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an architecture that no backend of this build knows.
    pub fn pretend(arch: &str) -> Result<Device> {
        match Self::Auto.emulated(arch) {
            Ok(Self::Cuda { .. }) => cuda_pretended(arch),
            Ok(Self::Rocm { .. }) => rocm_pretended(arch),
            _ => Err(Error::NoDevice(format!(
                "arch `{arch}`: no backend plans for it (known: sm_..., gfx...)"
            ))),
        }
    }

    fn opened(self) -> Result<Opened> {
        if let Some((_, opened)) = kept().iter().find(|(name, _)| *name == self) {
            return Ok(opened.clone());
        }
        // The lock is released while a slow driver opens a device, since a backend may open another one.
        let opened = self.opened_anew()?;
        let mut kept = kept();
        if let Some((_, first)) = kept.iter().find(|(name, _)| *name == self) {
            return Ok(first.clone());
        }
        kept.push((self, opened.clone()));
        Ok(opened)
    }

    fn opened_anew(&self) -> Result<Opened> {
        let device = match self {
            Self::Auto => return auto(),
            Self::Cpu => cpu()?,
            Self::Cuda { ordinal, emulate } => cuda(*ordinal, emulate.as_deref())?,
            Self::Rocm { ordinal, emulate } => rocm(*ordinal, emulate.as_deref())?,
            Self::Registered { name, ordinal } => {
                let open = registered().get(name).cloned();
                let open = open.ok_or_else(|| Error::NoDevice(format!("no backend {name} is registered")))?;
                third_party(&open, self, *ordinal)?
            }
        };
        Ok(Opened { device, passed_over: Arc::new([]) })
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, ordinal, emulate) = match self {
            Self::Auto => return f.write_str("auto"),
            Self::Cpu => return f.write_str("cpu"),
            Self::Cuda { ordinal, emulate } => ("cuda", ordinal, emulate),
            Self::Rocm { ordinal, emulate } => ("rocm", ordinal, emulate),
            Self::Registered { name, ordinal } => (&**name, ordinal, &None),
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
            name if registered().contains_key(name) => {
                Ok(Self::Registered { name: name.to_owned(), ordinal })
            }
            _ => {
                let mut known = ["auto", "cpu", "cuda", "cuda:N", "rocm", "rocm:N"].join(", ");
                let mut others: Vec<String> = registered().keys().cloned().collect();
                others.sort();
                for name in others {
                    known += &format!(", {name}, {name}:N");
                }
                Err(wrong(format!("backend `{text}` is none of {known}")))
            }
        }
    }
}

/// A backend that `auto` would have preferred, and the reason why it is absent.
#[derive(Clone, Debug)]
pub struct PassedOver {
    /// Backend that was tried.
    pub backend: Backend,
    /// Reason why the device did not open.
    pub reason: Error,
}

/// Backends that `auto` tried before the one that it opened, with their reasons.
///
/// # Errors
/// [`Error::NoDevice`] when not even the CPU can serve.
pub fn passed_over() -> Result<Arc<[PassedOver]>> {
    Ok(Backend::Auto.opened()?.passed_over)
}

/// A device that is open, and the backends that were tried before it.
#[derive(Clone)]
struct Opened {
    device: Device,
    passed_over: Arc<[PassedOver]>,
}

fn auto() -> Result<Opened> {
    if let Some(archs) = env::EMULATE.get()? {
        let arch = archs.split(',').next().unwrap_or_default();
        return Backend::Auto.emulated(arch)?.opened();
    }
    let mut passed_over = Vec::new();
    for backend in [Backend::CUDA, Backend::ROCM] {
        match backend.clone().open() {
            Ok(device) => return Ok(Opened { device, passed_over: passed_over.into() }),
            Err(reason) => passed_over.push(PassedOver { backend, reason }),
        }
    }
    Ok(Opened { device: Backend::Cpu.open()?, passed_over: passed_over.into() })
}

/// Devices that this process has open: few, so a list suffices. A forked child begins with none.
fn kept() -> MutexGuard<'static, Vec<(Backend, Opened)>> {
    static KEPT: PerProcess<Mutex<Vec<(Backend, Opened)>>> = PerProcess::of_first(Mutex::new(Vec::new()));
    KEPT.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Backends that third parties have registered, by name.
fn registered() -> MutexGuard<'static, HashMap<String, Open>> {
    static REGISTERED: LazyLock<Mutex<HashMap<String, Open>>> = LazyLock::new(Mutex::default);
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a third party's function that opens a device. A panic in it only means that this device is absent.
fn third_party(open: &Open, choice: &Backend, ordinal: u32) -> Result<Device> {
    panic::catch_unwind(AssertUnwindSafe(|| open(ordinal))).unwrap_or_else(|payload| {
        let said = payload.downcast_ref::<&str>().copied();
        let said = said.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text");
        Err(Error::NoDevice(format!("backend {choice}: its opener panicked: {said}")))
    })
}

/// Function that opens a third party's device by its number.
type Open = Arc<dyn Fn(u32) -> Result<Device> + Send + Sync>;

/// Gives a third party's backend a name: [`Backend`] as text then takes `name` and `name:N`, and [`Backend::open`]
/// opens what `open` returns for N, once for each.
///
/// ```
/// # fn toy(_: u32) -> Result<fmha::Device, fmha::Error> { Err(fmha::Error::NoDevice("a toy".into())) }
/// fmha::register("toy", |ordinal| toy(ordinal))?;
/// let choice: fmha::Backend = "toy:1".parse()?;
/// assert_eq!(choice.to_string(), "toy:1");
/// # Ok::<(), fmha::Error>(())
/// ```
///
/// An `open` that panics is an absent device, with the panic's text as the reason.
///
/// # Errors
/// `name`, if it is taken, empty or has a colon in it.
pub fn register(name: &str, open: impl Fn(u32) -> Result<Device> + Send + Sync + 'static) -> Result<()> {
    let wrong = |why: &str| Err(ProblemError::new("name", format!("name `{name}` {why}")).into());
    if name.is_empty() || name.contains(':') {
        return wrong(if name.is_empty() {
            "is empty"
        } else {
            "has a colon, which comes before a device's number"
        });
    }
    let mut registered = registered();
    if ["auto", "cpu", "cuda", "rocm"].contains(&name) || registered.contains_key(name) {
        return wrong("is another backend's");
    }
    registered.insert(name.to_owned(), Arc::new(open));
    Ok(())
}

/// A device that exists here, or that could exist.
pub struct Found {
    /// Backend that opens the device.
    pub backend: Backend,
    /// The opened device, or the reason why it is absent.
    pub device: Result<Device>,
}

/// Every device: those present, and one entry with the reason for each kind that is absent.
#[must_use]
pub fn devices() -> Vec<Found> {
    let mut found = vec![Found { backend: Backend::Cpu, device: Backend::Cpu.open() }];
    let mut kinds: Vec<Box<dyn Fn(u32) -> Backend>> = vec![
        Box::new(|ordinal| Backend::Cuda { ordinal, emulate: None }),
        Box::new(|ordinal| Backend::Rocm { ordinal, emulate: None }),
    ];
    let mut others: Vec<String> = registered().keys().cloned().collect();
    others.sort();
    for name in others {
        kinds.push(Box::new(move |ordinal| Backend::Registered { name: name.clone(), ordinal }));
    }
    for nth in kinds {
        for ordinal in 0.. {
            let device = Found { backend: nth(ordinal), device: nth(ordinal).open() };
            let absent = device.device.is_err();
            // An absent device after the last one is not reported. If there is no device at all, the reason is.
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

/// Every device that is present.
#[must_use]
pub fn all() -> Vec<Device> {
    devices().into_iter().filter_map(|found| found.device.ok()).collect()
}

fn cpu() -> Result<Device> {
    Ok(Device::new(fmha_cpu::CpuBackend::new()?))
}

#[cfg(feature = "cuda")]
fn cuda(ordinal: u32, emulate: Option<&str>) -> Result<Device> {
    fmha_cuda::open(ordinal as usize, emulate)
}

#[cfg(feature = "cuda")]
fn cuda_pretended(arch: &str) -> Result<Device> {
    fmha_cuda::pretend(arch)
}

#[cfg(not(feature = "cuda"))]
fn cuda_pretended(_: &str) -> Result<Device> {
    cuda(0, None)
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: u32, _: Option<&str>) -> Result<Device> {
    Err(Error::NoDevice("this build has no cuda backend".into()))
}

#[cfg(feature = "rocm")]
fn rocm(ordinal: u32, emulate: Option<&str>) -> Result<Device> {
    fmha_rocm::open(ordinal as usize, emulate)
}

#[cfg(feature = "rocm")]
fn rocm_pretended(arch: &str) -> Result<Device> {
    fmha_rocm::pretend(arch)
}

#[cfg(not(feature = "rocm"))]
fn rocm_pretended(_: &str) -> Result<Device> {
    rocm(0, None)
}

#[cfg(not(feature = "rocm"))]
fn rocm(_: u32, _: Option<&str>) -> Result<Device> {
    Err(Error::NoDevice("this build has no rocm backend".into()))
}

/// Launches of this process's emulated GPU since the last call (at most 64): a JSON array, oldest first, of
/// `kernel`, `grid`, `block`, `counters` and `instructions`. The call clears them; an AMD device counts from
/// the first call on. `None` if no device is emulated.
#[must_use]
pub fn emulated_launches() -> Option<String> {
    #[cfg(feature = "cuda")]
    if let Some(launches) = fmha_cuda::emulated_launches() {
        return Some(launches);
    }
    #[cfg(feature = "rocm")]
    if let Some(launches) = fmha_rocm::emulated_launches() {
        return Some(launches);
    }
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
            match choice.clone().open() {
                Ok(device) => {
                    assert_eq!(device.kind(), choice.to_string());
                    assert!(choice.opened().unwrap().passed_over.is_empty());
                }
                Err(Error::NoDevice(reason)) => assert!(reason.contains(&choice.to_string()), "{reason}"),
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn a_device_is_opened_once_whoever_asks_for_it() {
        let (cpu, auto) = (Backend::Cpu.open().unwrap(), Backend::Auto.open().unwrap());
        assert!(cpu.is(&Backend::Cpu.open().unwrap()));
        assert!(auto.is(&Backend::Auto.open().unwrap()));
        assert_eq!(auto.is(&cpu), auto.kind() == "cpu");
    }

    #[test]
    fn auto_says_what_it_passed_over() {
        let device = Backend::Auto.open().unwrap();
        let expected = match device.kind() {
            "cuda" => 0,
            "rocm" => 1,
            _ => 2,
        };
        assert_eq!(passed_over().unwrap().len(), expected);
    }

    #[test]
    fn an_opener_that_panics_is_an_absent_device_with_its_reason() {
        register("panics-here", |ordinal| panic!("no card in slot {ordinal}")).unwrap();
        let found = devices();
        let absent = found.iter().find(|found| found.backend.to_string() == "panics-here").unwrap();
        let reason = absent.device.as_ref().unwrap_err().to_string();
        assert_eq!(reason, "backend panics-here: its opener panicked: no card in slot 0");
    }

    #[test]
    fn an_architecture_chooses_its_vendor() {
        assert!(matches!(Backend::Auto.emulated("sm_90a"), Ok(Backend::Cuda { .. })));
        assert!(matches!(Backend::Auto.emulated("gfx942"), Ok(Backend::Rocm { .. })));
        assert!(Backend::Cpu.emulated("sm_90a").is_err());
        assert!(Backend::Auto.emulated("avx2").is_err());
    }
}
