//! The architectures that the kernels know.

use fmha_core::{DType, Error, ResourceUsage, Result, Roofline};

/// An architecture with matrix instructions: MFMA on CDNA, WMMA on RDNA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// CDNA 2: MI210, MI250, MI250X. No FP8.
    Gfx90a,
    /// CDNA 3: MI300A, MI300X, MI325X. FP8 in the FNUZ forms.
    Gfx942,
    /// CDNA 4: MI350X, MI355X. FP8 in the OCP forms.
    Gfx950,
    /// RDNA 3: RX 7900 XTX, PRO W7900. No FP8.
    Gfx1100,
    /// RDNA 4: RX 9070 XT, AI PRO R9700. FP8 in the OCP forms.
    Gfx1201,
}

impl Arch {
    /// All architectures that have kernels.
    pub const ALL: [Arch; 5] = [Arch::Gfx90a, Arch::Gfx942, Arch::Gfx950, Arch::Gfx1100, Arch::Gfx1201];
    /// Architectures with MFMA and waves of 64, oldest first.
    pub const CDNA: [Arch; 3] = [Arch::Gfx90a, Arch::Gfx942, Arch::Gfx950];
    /// Architectures with WMMA and waves of 32, oldest first.
    pub const RDNA: [Arch; 2] = [Arch::Gfx1100, Arch::Gfx1201];

    /// Architecture of a `gcnArchName` such as `gfx942:sramecc+:xnack-`, or the bare name.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the name and the reason.
    pub fn from_gcn_name(name: &str) -> Result<Self> {
        let bare = name.split(':').next().unwrap_or(name);
        Self::ALL.into_iter().find(|arch| arch.name() == bare).ok_or_else(|| {
            Error::NoDevice(format!(
                "{name} is no architecture that these kernels know ({})",
                Self::ALL.map(Arch::name).join(", ")
            ))
        })
    }

    /// The architecture's name for the compiler.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Gfx90a => "gfx90a",
            Arch::Gfx942 => "gfx942",
            Arch::Gfx950 => "gfx950",
            Arch::Gfx1100 => "gfx1100",
            Arch::Gfx1201 => "gfx1201",
        }
    }

    /// Whether the architecture has WMMA and waves of 32 lanes, instead of MFMA and waves of 64.
    #[must_use]
    pub const fn is_rdna(self) -> bool {
        matches!(self, Arch::Gfx1100 | Arch::Gfx1201)
    }

    /// Threads of a wave.
    #[must_use]
    pub const fn wave_threads(self) -> u32 {
        if self.is_rdna() { 32 } else { 64 }
    }

    /// LDS that one workgroup may use: all of a compute unit's on CDNA; on RDNA half of what a pair of compute
    /// units shares.
    #[must_use]
    pub const fn lds_bytes(self) -> u32 {
        match self {
            Arch::Gfx90a | Arch::Gfx942 | Arch::Gfx1100 | Arch::Gfx1201 => 64 * 1024,
            Arch::Gfx950 => 160 * 1024,
        }
    }

    /// Compute units of the largest device (one die of MI250X; MI300X; MI355X); for RDNA pairs of compute units,
    /// which HIP counts (RX 7900 XTX; RX 9070 XT).
    pub const fn num_compute_units(self) -> u32 {
        match self {
            Arch::Gfx90a => 110,
            Arch::Gfx942 => 304,
            Arch::Gfx950 => 256,
            Arch::Gfx1100 => 48,
            Arch::Gfx1201 => 32,
        }
    }

    /// Workgroups of `threads` threads that a compute unit holds. CDNA: four SIMDs, each with 512 vector registers
    /// per lane, allocated in eights, and at most eight waves. RDNA: a pair of compute units has four SIMDs, each
    /// with 1536 registers, allocated in twenty-fours, and at most sixteen waves. One if the compiler did not
    /// report the kernel's resources.
    pub fn workgroups_per_compute_unit(self, usage: &ResourceUsage, threads: u32) -> u32 {
        let (Some(registers), Some(lds_bytes)) = (usage.registers, usage.shared_bytes) else { return 1 };
        let waves = if self.is_rdna() {
            4 * (1536 / registers.max(1).next_multiple_of(24)).min(16)
        } else {
            4 * (512 / registers.max(1).next_multiple_of(8)).min(8)
        };
        let by_waves = waves / threads.div_ceil(self.wave_threads()).max(1);
        let lds = if self.is_rdna() { 2 * self.lds_bytes() } else { self.lds_bytes() };
        by_waves.min(lds / lds_bytes.max(1)).max(1)
    }

    /// Number of dies with an L2 of their own; the hardware assigns workgroups to them round-robin.
    pub const fn num_xcds(self) -> i32 {
        match self {
            Arch::Gfx90a | Arch::Gfx1100 | Arch::Gfx1201 => 1,
            Arch::Gfx942 | Arch::Gfx950 => 8,
        }
    }

    /// Whether the matrix instructions of this architecture support operands of this type.
    #[must_use]
    pub const fn multiplies(self, dtype: DType) -> bool {
        match dtype {
            DType::F32 => false,
            DType::F16 | DType::Bf16 => true,
            DType::E4m3Fn | DType::E5m2 => matches!(self, Arch::Gfx950 | Arch::Gfx1201),
            DType::E4m3Fnuz | DType::E5m2Fnuz => matches!(self, Arch::Gfx942),
        }
    }

    /// Peak rates of f16 and bf16 or of FP8, dense, and of memory, as AMD states them for the largest part. gfx90a
    /// has no FP8.
    pub fn roofline(self, dtype: DType) -> Roofline {
        let (two_bytes, fp8, bytes, part) = match self {
            Arch::Gfx90a => (383.0e12, None, 3.2e12, "MI250X"),
            Arch::Gfx942 => (1307.4e12, Some(2614.9e12), 5.3e12, "MI300X"),
            Arch::Gfx950 => (2516.6e12, Some(5033.2e12), 8.0e12, "MI355X"),
            Arch::Gfx1100 => (122.8e12, None, 0.96e12, "RX 7900 XTX"),
            Arch::Gfx1201 => (194.6e12, Some(389.3e12), 0.64e12, "RX 9070 XT"),
        };
        let (flops, types) = match fp8.filter(|_| dtype.is_fp8()) {
            Some(fp8) => (fp8, "FP8"),
            None => (two_bytes, "f16 and bf16"),
        };
        Roofline {
            flops_per_second: Some(flops),
            bytes_per_second: Some(bytes),
            source: format!("AMD's stated peak of {part}, {types}, dense"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_after_the_colon_do_not_change_the_architecture() {
        assert_eq!(Arch::from_gcn_name("gfx942:sramecc+:xnack-").ok(), Some(Arch::Gfx942));
        assert_eq!(Arch::from_gcn_name("gfx950").ok(), Some(Arch::Gfx950));
    }

    #[test]
    fn what_a_compute_unit_holds_is_bounded_by_registers_by_waves_and_by_lds() {
        let holds = |registers, lds_bytes, threads| {
            let usage = ResourceUsage {
                registers: Some(registers),
                shared_bytes: Some(lds_bytes),
                ..ResourceUsage::default()
            };
            Arch::Gfx942.workgroups_per_compute_unit(&usage, threads)
        };
        assert_eq!(holds(256, 16 << 10, 256), 2);
        assert_eq!(holds(257, 16 << 10, 256), 1);
        assert_eq!(holds(16, 0, 64), 32);
        assert_eq!(holds(16, 24 << 10, 64), 2);
        // A workgroup whose waves need more registers than there are would be a compiler fault; it counts as
        // running alone.
        assert_eq!(holds(512, 0, 512), 1);
        assert_eq!(Arch::Gfx942.workgroups_per_compute_unit(&ResourceUsage::default(), 64), 1);
        // RDNA: 1536 / 216 registers are 7 waves of 32 on each SIMD.
        let usage = ResourceUsage { registers: Some(200), shared_bytes: Some(0), ..ResourceUsage::default() };
        assert_eq!(Arch::Gfx1100.workgroups_per_compute_unit(&usage, 128), 7);
    }

    #[test]
    fn fp8_is_held_against_its_own_peak_where_there_is_one() {
        let peak = |arch: Arch, dtype| arch.roofline(dtype).flops_per_second.unwrap();
        assert_eq!(peak(Arch::Gfx90a, DType::E4m3Fnuz), peak(Arch::Gfx90a, DType::Bf16));
        for (arch, fp8) in
            [(Arch::Gfx942, DType::E4m3Fnuz), (Arch::Gfx950, DType::E4m3Fn), (Arch::Gfx1201, DType::E4m3Fn)]
        {
            let ratio = peak(arch, fp8) / peak(arch, DType::Bf16);
            assert!((ratio - 2.0).abs() < 1e-3, "{arch:?}: {ratio}");
        }
    }

    #[test]
    fn an_unknown_architecture_is_refused_by_its_name() {
        let error = Arch::from_gcn_name("gfx1030").unwrap_err().to_string();
        assert!(error.starts_with("gfx1030 is no architecture"), "{error}");
    }

    #[test]
    fn no_architecture_reads_one_fp8_form_as_the_other() {
        for arch in Arch::ALL {
            let ocp = arch.multiplies(DType::E4m3Fn) || arch.multiplies(DType::E5m2);
            let fnuz = arch.multiplies(DType::E4m3Fnuz) || arch.multiplies(DType::E5m2Fnuz);
            assert!(!(ocp && fnuz), "{arch:?}");
        }
    }
}
