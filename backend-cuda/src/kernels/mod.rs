//! The kernels, a closed family for each operation: which takes a problem, what it launches.

pub(crate) mod combine;
mod maps;
#[cfg(test)]
mod operands;
#[cfg(test)]
pub(crate) mod plans;
pub(crate) mod simt;
pub(crate) mod simt_bwd;
pub(crate) mod sm100;
pub(crate) mod sm80;
pub(crate) mod sm80_bwd;
pub(crate) mod sm90;
pub(crate) mod sm90_bwd;
mod tile;

use std::fmt::Debug;

use enum_dispatch::enum_dispatch;
use fmha_core::error::{Error, ProblemError, Refusal, Result};
use fmha_core::source::KernelSource;
use fmha_core::tune::{TunedKernel, TunedTiles};
use fmha_core::{
    BwdArgs, CombineArgs, DType, FwdArgs, PlanOptions, Promises, Roofline, ScoreSums, ValidBwd, ValidCombine,
    ValidFwd, Workspace,
};
use fmha_kernels_cuda::{
    sm80 as sm80_text, sm90 as sm90_text, sm90_bwd as sm90_bwd_text, sm100 as sm100_text,
};

use crate::driver::{Device, Grid};
use crate::steps::Step;
use combine::Merge;
pub(crate) use maps::LastMaps;
use simt::Simt;
use simt_bwd::SimtBwd;
use sm80::Sm80;
use sm80_bwd::Sm80Bwd;
use sm90::Sm90;
use sm90_bwd::Sm90Bwd;
use sm100::Sm100;

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
    /// How its tensor cores add.
    pub(crate) score_sums: MatrixSums,
    /// `NVIDIA H200, sm_90a, 132 SMs`: what tiles are kept for.
    pub(crate) device: String,
    /// Tiles that were measured on it.
    pub(crate) tuned: TunedTiles,
}

/// The kernels whose tiles are measured.
pub(crate) const TUNED_KERNELS: [TunedKernel<'_>; 4] = [
    TunedKernel { label: sm90_text::NAME, headers: &[sm90_text::HEADER] },
    TunedKernel { label: sm90_bwd_text::LABEL, headers: &sm90_bwd_text::HEADERS },
    TunedKernel { label: sm100_text::NAME, headers: &[sm100_text::HEADER] },
    TunedKernel { label: sm80_text::NAME, headers: &[sm80_text::HEADER] },
];

/// Dense f16 and bf16 tensor work of a Hopper SM in a clock: floating-point operations (NVIDIA H100
/// Tensor Core GPU Architecture, 2022, table 2: 989 TFLOP/s at 1830 MHz with 132 SMs).
const HOPPER_FLOPS_PER_CLOCK: f64 = 4096.0;

/// How tensor cores add the products of a score.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MatrixSums {
    of_16_bits: ScoreSums,
    of_fp8: ScoreSums,
}

impl MatrixSums {
    /// Hopper's, a step being the products of one instruction along the head dim. DeepSeek-V3's report (2024, section
    /// 3.5.2) says of the H800's FP8 that some 14 bits are kept; how was found by models of an H200's LSE: docs/kernels/sm90-fwd.md.
    const HOPPER: Self = Self {
        of_16_bits: ScoreSums::Cut { products: 16, bits: 26 },
        of_fp8: ScoreSums::Cut { products: 32, bits: 14 },
    };

    /// Of an architecture; f32 where nothing is known.
    fn of_arch(arch: &str) -> Self {
        if arch == "sm_90a" { Self::HOPPER } else { Self::default() }
    }

    pub(crate) fn of(self, dtype: DType) -> ScoreSums {
        if dtype.is_fp8() { self.of_fp8 } else { self.of_16_bits }
    }
}

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
            score_sums: MatrixSums::of_arch(&arch),
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

    /// Of `sm_90a` 90; 0 of a name that has no number.
    pub(crate) fn sm(&self) -> u32 {
        let number = self.arch.trim_start_matches("sm_").trim_end_matches(char::is_alphabetic);
        number.parse().unwrap_or(0)
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
        TunedTiles::load(&self.device, &TUNED_KERNELS, &fmha_kernels_cuda::headers())
    }

    /// That a CTA of a tile finds its shared memory, `smem_bytes` of it, and each of a cluster of `cluster` a multiprocessor.
    ///
    /// # Errors
    /// A text that names both numbers.
    fn has_room_for(&self, tile: &dyn Debug, smem_bytes: i32, cluster: i32) -> Result<(), String> {
        if smem_bytes.unsigned_abs() > self.smem_bytes {
            let there = self.smem_bytes;
            return Err(format!("{tile:?} takes {smem_bytes} bytes of shared memory, {there} are there"));
        }
        if cluster.unsigned_abs() > self.num_sms {
            let there = self.num_sms;
            return Err(format!("tile cluster={cluster}: multiprocessors of the device are {there}"));
        }
        Ok(())
    }

    /// An architecture without a device: the numbers that NVIDIA states of one that has it.
    pub(crate) fn stated(arch: &str) -> Result<Self> {
        // Shared memory that one CTA can have: CUDA C++ Programming Guide, technical specifications per compute capability.
        const LARGE_SMEM: u32 = 227 << 10;
        const SMALL_SMEM: u32 = 99 << 10;
        let (num_sms, smem_bytes, flops_per_second, bytes_per_second, source) = match arch {
            // NVIDIA A100 Tensor Core GPU Architecture (2020); data sheet of the A100 80GB SXM.
            "sm_80" => (
                108,
                163 << 10,
                312e12,
                2.039e12,
                "an A100 80GB SXM as NVIDIA states it: 312 TFLOP/s, 2.039 TB/s",
            ),
            // NVIDIA Ampere GA102 GPU Architecture (2021), with f32 sums.
            "sm_86" => {
                (82, SMALL_SMEM, 71e12, 0.936e12, "an RTX 3090 as NVIDIA states it: 71 TFLOP/s, 936 GB/s")
            }
            // NVIDIA Ada GPU Architecture (2022), with f32 sums.
            "sm_89" => (
                128,
                SMALL_SMEM,
                165.2e12,
                1.008e12,
                "an RTX 4090 as NVIDIA states it: 165.2 TFLOP/s, 1008 GB/s",
            ),
            "sm_90a" => {
                let flops = HOPPER_FLOPS_PER_CLOCK * 132.0 * 1.83e9;
                (132, LARGE_SMEM, flops, 4.8e12, "an H200 SXM as NVIDIA states it: 989 TFLOP/s, 4.8 TB/s")
            }
            "sm_100a" => {
                (148, LARGE_SMEM, 2.25e15, 8e12, "a B200 of an HGX as NVIDIA states it: 2.25 PFLOP/s, 8 TB/s")
            }
            "sm_103a" => {
                (148, LARGE_SMEM, 2.25e15, 8e12, "a B300 of an HGX as NVIDIA states it: 2.25 PFLOP/s, 8 TB/s")
            }
            // NVIDIA RTX Blackwell GPU Architecture (2025), with f32 sums.
            "sm_120a" => (
                170,
                SMALL_SMEM,
                209.5e12,
                1.792e12,
                "an RTX 5090 as NVIDIA states it: 209.5 TFLOP/s, 1792 GB/s",
            ),
            _ => {
                return Err(Error::NoDevice(format!(
                    "no device is known for architecture {arch}: cuda plans without one for sm_80, sm_86, sm_89, sm_90a, \
                     sm_100a, sm_103a, sm_120a"
                )));
            }
        };
        Ok(Self {
            arch: arch.to_owned(),
            device: String::new(),
            score_sums: MatrixSums::of_arch(arch),
            tuned: TunedTiles::default(),
            num_sms,
            smem_bytes,
            roofline: Roofline {
                flops_per_second: Some(flops_per_second),
                bytes_per_second: Some(bytes_per_second),
                source: source.to_owned(),
            },
        })
    }
}

/// One launch of a plan, its kernel not yet compiled.
pub(crate) struct Launch {
    /// The kernel's name in the plan.
    pub(crate) kernel: &'static str,
    pub(crate) source: KernelSource,
    pub(crate) grid: Grid,
    pub(crate) smem_bytes: u32,
    /// As in [`LaunchShape`](fmha_core::LaunchShape).
    pub(crate) tiles: u64,
    pub(crate) tiles_at_once: u64,
}

/// A kernel that takes a problem: what is launched for it, in which order, and what that promises.
pub(crate) struct Choice<K> {
    /// The kernel again, with what its launches need.
    pub(crate) kernel: K,
    pub(crate) launches: Vec<Launch>,
    pub(crate) workspace: Workspace,
    pub(crate) promises: Promises,
    pub(crate) details: Vec<(&'static str, String)>,
}

/// One run's problem and operands, which have passed their check.
pub(crate) struct Call<'a, P, A> {
    pub(crate) problem: &'a P,
    pub(crate) args: &'a A,
    pub(crate) stream: u64,
}

pub(crate) type FwdCall<'a> = Call<'a, ValidFwd, FwdArgs<'a>>;
pub(crate) type BwdCall<'a> = Call<'a, ValidBwd, BwdArgs<'a>>;
pub(crate) type CombineCall<'a> = Call<'a, ValidCombine, CombineArgs<'a>>;

/// A kernel of any operation.
#[enum_dispatch]
pub(crate) trait Named {
    fn name(&self) -> &'static str;

    /// Correct for all, fast for none.
    fn is_fallback(&self) -> bool {
        false
    }
}

/// A forward kernel.
#[enum_dispatch]
pub(crate) trait FwdRecipe {
    /// Takes the problem, or says why not.
    fn choose(
        &self,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<FwdKernel>, Refusal>;

    /// Takes the operands where they lie, or names the first that it does not: addresses are not known
    /// when a plan is made.
    fn takes_addresses(&self, _: &FwdCall<'_>) -> Result<(), ProblemError> {
        Ok(())
    }

    /// Queues the steps, which are those of its choice's launches, in their order.
    fn launch(&self, steps: &[Step], call: &FwdCall<'_>) -> Result<()>;
}

/// A backward kernel.
#[enum_dispatch]
pub(crate) trait BwdRecipe {
    /// Takes the problem, or says why not.
    fn choose(
        &self,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<BwdKernel>, Refusal>;

    /// As [`FwdRecipe::takes_addresses`].
    fn takes_addresses(&self, _: &BwdCall<'_>) -> Result<(), ProblemError> {
        Ok(())
    }

    /// As [`FwdRecipe::launch`].
    fn launch(&self, steps: &[Step], call: &BwdCall<'_>) -> Result<()>;
}

/// A combine kernel.
#[enum_dispatch]
pub(crate) trait CombineRecipe {
    /// Takes the problem, or says why not.
    fn choose(
        &self,
        problem: &ValidCombine,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<CombineKernel>, Refusal>;

    /// As [`FwdRecipe::launch`].
    fn launch(&self, steps: &[Step], call: &CombineCall<'_>) -> Result<()>;
}

/// The forward family, best first.
#[enum_dispatch(Named, FwdRecipe)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FwdKernel {
    Sm100,
    Sm90,
    Sm80,
    Simt,
}

impl FwdKernel {
    pub(crate) fn all() -> [Self; 4] {
        [Sm100::default().into(), Sm90::default().into(), Sm80::default().into(), Simt.into()]
    }
}

/// The backward family, best first.
#[enum_dispatch(Named, BwdRecipe)]
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(clippy::enum_variant_names, reason = "a variant has its recipe's name")]
pub(crate) enum BwdKernel {
    Sm90Bwd,
    Sm80Bwd,
    SimtBwd,
}

impl BwdKernel {
    pub(crate) fn all() -> [Self; 3] {
        [Sm90Bwd::default().into(), Sm80Bwd::default().into(), SimtBwd::default().into()]
    }
}

/// The combine family, best first.
#[enum_dispatch(Named, CombineRecipe)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CombineKernel {
    Merge,
}

impl CombineKernel {
    pub(crate) fn all() -> [Self; 1] {
        [Merge.into()]
    }
}

/// The first kernel of a family that takes the problem, and why the ones before it did not.
///
/// # Errors
/// [`Error::Unsupported`] with every refusal.
pub(crate) fn select<K: Named>(
    backend: &str,
    family: &[K],
    options: &PlanOptions,
    choose: impl Fn(&K) -> Result<Choice<K>, Refusal>,
) -> Result<(Choice<K>, Vec<Refusal>)> {
    let mut refusals = Vec::new();
    for kernel in family {
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
        let kept =
            |choice: Choice<K>| options.check_promises(kernel.name(), &choice.promises).map(|()| choice);
        match choose(kernel).and_then(kept) {
            Ok(choice) => return Ok((choice, refusals)),
            Err(refusal) => refusals.push(refusal),
        }
    }
    if let (Some(name), true) = (&options.kernel, refusals.is_empty()) {
        let known = family.iter().map(Named::name).collect::<Vec<_>>().join(", ");
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
