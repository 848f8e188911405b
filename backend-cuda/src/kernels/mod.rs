//! The closed family of forward kernels: which takes a problem, and how it is launched.

pub(crate) mod simt;
pub(crate) mod sm90;

use enum_dispatch::enum_dispatch;
use fmha_core::abi::FwdParams;
use fmha_core::error::{Error, ProblemError, Refusal, Result};
use fmha_core::source::KernelSource;
use fmha_core::tune::TunedTiles;
use fmha_core::{DType, FwdArgs, PlanOptions, Roofline, ValidFwd};
use fmha_kernels_cuda::sm90 as text;

use crate::driver::{Device, Grid, Kernel as Loaded};
use simt::Simt;
use sm90::Sm90;

/// CTAs of a row kernel that a multiprocessor holds at a time: 128 threads each, of 2048.
pub(crate) const ROW_CTAS_PER_SM: u32 = 16;

/// What a choice depends on besides the problem.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFacts {
    /// `sm_90a`.
    pub(crate) arch: String,
    pub(crate) num_sms: u32,
    /// Shared memory that one CTA can have, bytes.
    pub(crate) smem_bytes: u32,
    pub(crate) roofline: Roofline,
    /// `NVIDIA H200, sm_90a, 132 SMs`: what tiles are kept for.
    pub(crate) device: String,
    /// Tiles that were measured on it.
    pub(crate) tuned: TunedTiles,
}

/// Dense f16 and bf16 tensor work of a Hopper SM in a clock: floating-point operations (NVIDIA H100
/// Tensor Core GPU Architecture, 2022, table 2: 989 TFLOP/s at 1830 MHz with 132 SMs).
const HOPPER_FLOPS_PER_CLOCK: f64 = 4096.0;

impl DeviceFacts {
    /// What the driver says of a device.
    ///
    /// # Errors
    /// A value of `FMHA_CACHE_DIR` that is not UTF-8.
    pub(crate) fn of(device: &Device) -> Result<Self> {
        let (major, minor) = device.capability;
        // Kernels for 9.0 and 10.0 use instructions of that very architecture.
        let suffix = if major >= 9 { "a" } else { "" };
        let flops = (device.capability == (9, 0))
            .then(|| HOPPER_FLOPS_PER_CLOCK * f64::from(device.num_sms) * f64::from(device.clock_khz) * 1e3);
        let (memory_khz, bus_bits) = device.memory;
        // Two transfers a clock.
        let bytes = f64::from(memory_khz) * 1e3 * 2.0 * f64::from(bus_bits) / 8.0;
        let arch = format!("sm_{major}{minor}{suffix}");
        let mut facts = Self {
            device: format!("{}, {arch}, {} SMs", device.name, device.num_sms),
            tuned: TunedTiles::default(),
            arch,
            num_sms: device.num_sms,
            smem_bytes: device.smem_bytes,
            roofline: Roofline {
                flops_per_second: flops,
                bytes_per_second: Some(bytes),
                source: "stated peak: tensor rate times the highest clock, memory clock times bus".to_owned(),
            },
        };
        facts.tuned = facts.load_tuned()?;
        Ok(facts)
    }

    /// Hopper's FP8 runs at twice the rate of two bytes (1979 TFLOP/s in the same table).
    pub(crate) fn roofline_of(&self, dtype: DType) -> Roofline {
        let mut roofline = self.roofline.clone();
        if let (Some(flops), true) = (&mut roofline.flops_per_second, dtype.is_fp8()) {
            *flops *= 2.0;
            roofline.source += ", FP8 at twice that rate";
        }
        roofline
    }

    /// The device's tiles as they are kept now.
    ///
    /// # Errors
    /// A value of `FMHA_CACHE_DIR` that is not UTF-8.
    fn load_tuned(&self) -> Result<TunedTiles> {
        let kernels = [(text::NAME, text::HEADER)];
        TunedTiles::load(&self.device, &kernels, &fmha_kernels_cuda::headers())
    }

    /// An architecture without a device: the numbers that NVIDIA states of one that has it.
    pub(crate) fn stated(arch: &str) -> Result<Self> {
        if arch != "sm_90a" {
            return Err(Error::NoDevice(format!(
                "no device is known for architecture {arch}: cuda plans without one for sm_90a"
            )));
        }
        let num_sms = 132;
        Ok(Self {
            arch: arch.to_owned(),
            device: String::new(),
            tuned: TunedTiles::default(),
            num_sms,
            smem_bytes: fmha_kernels_cuda::sm90::MAX_SMEM_BYTES.unsigned_abs(),
            roofline: Roofline {
                flops_per_second: Some(HOPPER_FLOPS_PER_CLOCK * f64::from(num_sms) * 1.83e9),
                bytes_per_second: Some(4.8e12),
                source: "an H200 SXM as NVIDIA states it: 989 TFLOP/s, 4.8 TB/s".to_owned(),
            },
        })
    }
}

/// A kernel that takes a problem: what to compile and how much of it to launch.
pub(crate) struct Choice {
    pub(crate) source: KernelSource,
    pub(crate) grid: Grid,
    pub(crate) smem_bytes: u32,
    pub(crate) workspace_bytes: u64,
    /// As in [`LaunchShape`](fmha_core::LaunchShape).
    pub(crate) tiles: u64,
    pub(crate) tiles_at_once: u64,
    pub(crate) details: Vec<(&'static str, String)>,
    /// The kernel again, with what its launch needs.
    pub(crate) kernel: Kernel,
}

/// A forward kernel.
#[enum_dispatch]
pub(crate) trait Recipe {
    fn name(&self) -> &'static str;

    /// Correct for all, fast for none.
    fn is_fallback(&self) -> bool {
        false
    }

    /// Takes the problem, or says why not.
    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice, Refusal>;

    /// Takes the operands where they lie, or names the first that it does not: addresses are not known
    /// when a plan is made.
    fn takes_addresses(&self, _: &FwdParams) -> Result<(), ProblemError> {
        Ok(())
    }

    /// Queues a launch.
    fn launch(&self, loaded: &Loaded, call: &Call<'_>) -> Result<()>;
}

/// One launch's operands.
pub(crate) struct Call<'a> {
    pub(crate) problem: &'a ValidFwd,
    pub(crate) args: &'a FwdArgs<'a>,
    pub(crate) params: FwdParams,
    pub(crate) grid: Grid,
    pub(crate) stream: u64,
}

/// The family, best first.
#[enum_dispatch(Recipe)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kernel {
    Sm90,
    Simt,
}

impl Kernel {
    pub(crate) fn all() -> [Kernel; 2] {
        [Sm90::default().into(), Simt.into()]
    }
}

/// The first kernel that takes the problem, and why the ones before it did not.
pub(crate) fn select(
    backend: &str,
    problem: &ValidFwd,
    facts: &DeviceFacts,
    options: &PlanOptions,
) -> Result<(Choice, Vec<Refusal>)> {
    let mut refusals = Vec::new();
    for kernel in Kernel::all() {
        let wanted = match &options.kernel {
            Some(name) if name == kernel.name() => true,
            Some(_) => continue,
            None => !kernel.is_fallback() || options.allow_fallback,
        };
        if !wanted {
            refusals
                .push(Refusal::new(kernel.name(), "it is the slow fallback, and allow_fallback is false"));
            continue;
        }
        match kernel.choose(problem, facts, options) {
            Ok(choice) => return Ok((choice, refusals)),
            Err(refusal) => refusals.push(refusal),
        }
    }
    if let (Some(name), true) = (&options.kernel, refusals.is_empty()) {
        let known = Kernel::all().map(|kernel| kernel.name()).join(", ");
        refusals.push(Refusal::new(name.clone(), format!("there is no such kernel (known: {known})")));
    }
    Err(Error::Unsupported { backend: backend.to_owned(), refusals })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_is_held_against_twice_the_peak_of_two_bytes() {
        let facts = DeviceFacts::stated("sm_90a").unwrap();
        let [fp8, bf16] = [DType::E4m3Fn, DType::Bf16].map(|dtype| facts.roofline_of(dtype));
        assert_eq!(fp8.flops_per_second.unwrap(), 2.0 * bf16.flops_per_second.unwrap());
        assert!(fp8.source.contains("FP8") && !bf16.source.contains("FP8"), "{fp8}, {bf16}");
    }
}
