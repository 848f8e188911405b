//! Facts of NVIDIA's devices on which choices depend, besides the problem.

use std::fmt::Debug;

use fmha_core::error::{Error, Result};
use fmha_core::source::{KernelSource, Literal};
use fmha_core::tune::TunedTiles;
use fmha_core::{DType, Roofline, ScoreSums, ValidBwd, ValidFwd};
use fmha_gpu::{Driver, Facts, Grid, Launch, RowKernel, Stage, Vendor, tuned_kernels};

use crate::maps::LastMaps;
use crate::rows;
use crate::tma::EncodeTensorMap;

/// A backend that can use the recipes of this crate: its driver encodes tensor maps, and stores a step's maps
/// between calls.
pub trait Nvidia: Vendor<Facts = DeviceFacts, Driver: EncodeTensorMap + Driver<Kept = LastMaps>> {}

impl<V> Nvidia for V where V: Vendor<Facts = DeviceFacts, Driver: EncodeTensorMap + Driver<Kept = LastMaps>> {}

pub(crate) type FwdCall<'a> = fmha_core::Call<'a, ValidFwd>;
pub(crate) type BwdCall<'a> = fmha_core::Call<'a, ValidBwd>;

/// Properties of a device that the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability: major, minor.
    pub capability: (i32, i32),
    /// Number of multiprocessors.
    pub num_sms: u32,
    /// Shared memory that one CTA can have, bytes.
    pub smem_bytes: u32,
    /// The highest clock of the multiprocessors, kHz.
    pub clock_khz: i32,
    /// The memory clock in kHz, and the width of the memory bus in bits.
    pub memory: (i32, i32),
}

/// Threads that a multiprocessor holds at the same time.
const THREADS_PER_SM: u32 = 2048;

/// A launch whose CTAs process rows without dynamic shared memory: the threads of a multiprocessor limit how many
/// run at once.
pub(crate) fn row_launch(
    (stage, kernel): (Stage, &'static str),
    source: KernelSource,
    grid: Grid,
    facts: &DeviceFacts,
) -> Launch {
    Launch {
        stage,
        kernel,
        source,
        grid,
        shared_bytes: 0,
        tiles: grid.groups.into(),
        tiles_at_once: u64::from(THREADS_PER_SM / grid.threads * facts.num_sms),
    }
}

/// Facts of a device that choices depend on.
#[derive(Clone, Debug)]
pub struct DeviceFacts {
    /// Architecture, such as `sm_90a`.
    pub arch: String,
    /// Instructions that the device has.
    pub instructions: Instructions,
    /// Number of multiprocessors.
    pub num_sms: u32,
    /// Shared memory that one CTA can have, bytes.
    pub smem_bytes: u32,
    /// Peak rates, for f16 and bf16.
    pub roofline: Roofline,
    /// Arithmetic in which tensor cores sum the products of q and k to a score.
    pub score_sums: MatrixSums,
    /// Key of measured tiles: `NVIDIA H200, sm_90a, 132 SMs`.
    pub device: String,
    /// Tiles that were measured on this device.
    pub tuned: TunedTiles,
}

/// Dense f16 and bf16 tensor work of a Hopper SM in a clock: floating-point operations (NVIDIA H100
/// Tensor Core GPU Architecture, 2022, table 2: 989 TFLOP/s at 1830 MHz with 132 SMs).
const HOPPER_FLOPS_PER_CLOCK: f64 = 4096.0;

/// Instructions that only some architectures have, and which kernels require. All other code asks these fields:
/// nothing else reads an architecture's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instructions {
    /// Whether the device has TMA: `cp.async.bulk.tensor`.
    pub tma: bool,
    /// Products of a warpgroup: `wgmma`.
    pub wgmma: bool,
    /// Products into tensor memory: `tcgen05`.
    pub tcgen05: bool,
    /// Loads from tensor memory that find maxima: `tcgen05.ld.red`.
    pub reducing_loads: bool,
    /// Asynchronous copies to shared memory, and a warp's products of bf16: `cp.async`, `mma.sync`.
    pub mma_sync: bool,
    /// Whether the device has conversions to OCP FP8.
    pub converts_fp8: bool,
}

impl Instructions {
    /// Instructions of an architecture; for an unknown architecture none of the optional ones.
    fn of_arch(arch: &str) -> Self {
        let digits = arch.trim_start_matches("sm_").trim_end_matches(char::is_alphabetic);
        let number: u32 = digits.parse().unwrap_or(0);
        let every = Self { mma_sync: number >= 80, converts_fp8: number >= 89, ..Self::default() };
        let tma = Self { tma: true, ..every };
        match arch {
            "sm_90a" => Self { wgmma: true, ..tma },
            "sm_100a" => Self { tcgen05: true, ..tma },
            "sm_103a" | "sm_110a" => Self { tcgen05: true, reducing_loads: true, ..tma },
            "sm_120a" | "sm_121a" => tma,
            _ => every,
        }
    }
}

/// Arithmetic in which tensor cores sum the products of q and k to a score, by type of q and k.
#[derive(Clone, Copy, Debug, Default)]
pub struct MatrixSums {
    of_16_bits: ScoreSums,
    of_fp8: ScoreSums,
}

impl MatrixSums {
    /// Sums of Hopper's tensor cores; a step is the products of one instruction along the head dim. DeepSeek-V3's
    /// report (2024, section 3.5.2) says of the H800's FP8 that some 14 bits are kept; the exact rule was found by
    /// fitting models to an H200's LSE: docs/kernels/sm90-fwd.md.
    const HOPPER: Self = Self {
        of_16_bits: ScoreSums::Cut { products: 16, bits: 26 },
        of_fp8: ScoreSums::Cut { products: 32, bits: 14 },
    };

    /// Ada's FP8 sums keep 13 bits after the leading one (SageAttention2, arXiv 2411.10958); its 16-bit sums are
    /// unknown.
    const ADA: Self = Self { of_16_bits: ScoreSums::F32, of_fp8: ScoreSums::Cut { products: 32, bits: 14 } };

    /// Arithmetic in which an architecture's tensor cores sum products; f32 for an unknown one.
    fn of_arch(arch: &str) -> Self {
        match arch {
            "sm_90a" => Self::HOPPER,
            "sm_89" => Self::ADA,
            _ => Self::default(),
        }
    }

    /// How the tensor cores sum products of one type.
    #[must_use]
    pub fn of(self, dtype: DType) -> ScoreSums {
        if dtype.is_fp8() { self.of_fp8 } else { self.of_16_bits }
    }
}

impl DeviceFacts {
    /// Facts of a device that a driver reports.
    ///
    /// # Errors
    /// A value of `FMHA_CACHE_DIR` that is not UTF-8.
    pub fn of<V: Nvidia>(device: &DeviceInfo) -> Result<Self> {
        let (major, minor) = device.capability;
        // Kernels for 9.0 and 10.0 use instructions that only this exact architecture has (suffix `a`).
        let suffix = if major >= 9 { "a" } else { "" };
        let flops = (device.capability == (9, 0))
            .then(|| HOPPER_FLOPS_PER_CLOCK * f64::from(device.num_sms) * f64::from(device.clock_khz) * 1e3);
        let (memory_khz, bus_bits) = device.memory;
        // Memory makes two transfers a clock.
        let bytes = f64::from(memory_khz) * 1e3 * 2.0 * f64::from(bus_bits) / 8.0;
        let arch = format!("sm_{major}{minor}{suffix}");
        let mut facts = Self {
            device: format!("{}, {arch}, {} SMs", device.name, device.num_sms),
            tuned: TunedTiles::default(),
            score_sums: MatrixSums::of_arch(&arch),
            instructions: Instructions::of_arch(&arch),
            arch,
            num_sms: device.num_sms,
            smem_bytes: device.smem_bytes,
            roofline: Roofline {
                flops_per_second: flops,
                bytes_per_second: Some(bytes),
                source: "stated peak: tensor rate times the highest clock, memory clock times bus".to_owned(),
            },
        };
        facts.tuned = facts.load_tuned::<V>()?;
        Ok(facts)
    }

    /// Loads the measured tiles that are stored for the device now.
    ///
    /// # Errors
    /// A value of `FMHA_CACHE_DIR` that is not UTF-8.
    fn load_tuned<V: Nvidia>(&self) -> Result<TunedTiles> {
        TunedTiles::load(&self.device, &tuned_kernels::<V>(), &crate::headers())
    }

    /// Checks that the device has the instructions `what` that a kernel needs, as `there` says.
    ///
    /// # Errors
    /// The architecture, and the instructions that it lacks.
    pub fn needs(&self, there: bool, what: &str) -> Result<(), String> {
        if there { Ok(()) } else { Err(format!("the device is {}, which has no {what}", self.arch)) }
    }

    /// Checks that a CTA of a tile has room for its `smem_bytes` of shared memory, and that each CTA of a
    /// cluster of `cluster` has a multiprocessor.
    ///
    /// # Errors
    /// A text that names both numbers.
    pub(crate) fn has_room_for(&self, tile: &dyn Debug, smem_bytes: i32, cluster: i32) -> Result<(), String> {
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

    /// Facts of an architecture without a device: the data sheet numbers of a device with this architecture.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an architecture without known numbers.
    pub fn stated(arch: &str) -> Result<Self> {
        // Shared memory that one CTA can have: CUDA C++ Programming Guide, technical specifications per
        // compute capability.
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
            // NVIDIA Ampere GA102 GPU Architecture (2021), rates with f32 sums.
            "sm_86" => {
                (82, SMALL_SMEM, 71e12, 0.936e12, "an RTX 3090 as NVIDIA states it: 71 TFLOP/s, 936 GB/s")
            }
            // NVIDIA Ada GPU Architecture (2022), rates with f32 sums.
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
            // NVIDIA's page of the Jetson T5000 (nvidia.com, autonomous-machines/embedded-systems/jetson-thor): 10
            // TPCs of two multiprocessors, 273 GB/s, 2070 TFLOP/s of sparse FP4, of which dense 16-bit products are an
            // eighth. At 1.575 GHz, its highest clock, 20 multiprocessors of a B200's rate have 258.0.
            "sm_110a" => (
                20,
                LARGE_SMEM,
                258.75e12,
                0.273e12,
                "a Jetson T5000 as NVIDIA states it: 259 TFLOP/s, 273 GB/s",
            ),
            // NVIDIA RTX Blackwell GPU Architecture (2025), rates with f32 sums.
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
                     sm_100a, sm_103a, sm_110a, sm_120a"
                )));
            }
        };
        Ok(Self {
            arch: arch.to_owned(),
            instructions: Instructions::of_arch(arch),
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

impl Facts for DeviceFacts {
    fn row_group(&self) -> (&'static str, u32) {
        ("a warp", 32)
    }

    fn groups_at_once(&self) -> u32 {
        self.num_sms
    }

    fn row_launch(
        &self,
        at: (Stage, &'static str),
        kernel: RowKernel,
        spec: &dyn Literal,
        [rows, _]: [u64; 2],
    ) -> Result<Launch, String> {
        if kernel == RowKernel::Choose {
            return rows::choose(at, spec, rows, self);
        }
        Ok(rows::launch(at, rows::source(kernel, spec), rows, self))
    }

    fn lists_launch(
        &self,
        at: (Stage, &'static str),
        rows: u64,
        entries: u32,
        ctas: Option<u32>,
    ) -> Result<Option<(Launch, String)>, String> {
        rows::lists_by_clusters(at, rows, entries, ctas, self)
    }

    fn arch(&self) -> &str {
        &self.arch
    }

    /// Peak rates. Hopper's FP8 has twice the rate of 16-bit types (1979 TFLOP/s in the data sheet's table).
    fn roofline(&self, dtype: DType) -> Roofline {
        let mut roofline = self.roofline.clone();
        if let (Some(flops), true) = (&mut roofline.flops_per_second, dtype.is_fp8()) {
            *flops *= 2.0;
            roofline.source += ", FP8 at twice that rate";
        }
        roofline
    }

    fn tuned(&self) -> &TunedTiles {
        &self.tuned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_has_the_instructions_of_its_tensor_cores() {
        let of = |arch| {
            let Instructions { mma_sync, converts_fp8, tma, wgmma, tcgen05, reducing_loads } =
                Instructions::of_arch(arch);
            [mma_sync, converts_fp8, tma, wgmma, tcgen05, reducing_loads]
        };
        for (arch, has) in [
            ("sm_80", [true, false, false, false, false, false]),
            ("sm_89", [true, true, false, false, false, false]),
            ("sm_90a", [true, true, true, true, false, false]),
            ("sm_100a", [true, true, true, false, true, false]),
            ("sm_103a", [true, true, true, false, true, true]),
            ("sm_110a", [true, true, true, false, true, true]),
            ("sm_120a", [true, true, true, false, false, false]),
            ("sm_121a", [true, true, true, false, false, false]),
        ] {
            assert_eq!(of(arch), has, "{arch}");
        }
    }

    #[test]
    fn fp8_is_held_against_twice_the_peak_of_two_bytes() {
        let facts = DeviceFacts::stated("sm_90a").unwrap();
        let [fp8, bf16] = [DType::E4m3Fn, DType::Bf16].map(|dtype| facts.roofline(dtype));
        assert_eq!(fp8.flops_per_second.unwrap(), 2.0 * bf16.flops_per_second.unwrap());
        assert!(fp8.source.contains("FP8") && !bf16.source.contains("FP8"), "{fp8}, {bf16}");
    }
}
