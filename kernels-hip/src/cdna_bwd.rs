//! `cdna_bwd`: backward on MFMA.

use fmha_core::{BwdProblem, Refusal};

use crate::arch::Arch;
use crate::backward::{
    BLOCK_ROWS, BwdSums, ELEM_BYTES, LoadsAndStores, MatrixBwdSpec, MatrixBwdTile, Unit, with_lds,
};
use crate::device::needs_mfma;
use crate::paths::LoadPath;

/// The kernel's name in plans and refusals.
pub(crate) const NAME: &str = "cdna_bwd";

const SIMDS: i32 = 4;

/// The unit MFMA: products of 32 rows, waves of 64 threads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mfma;

impl Unit for Mfma {
    const NAME: &'static str = NAME;
    const STATS: &'static str = "cdna_bwd_stats";
    const REST: &'static str = "cdna_bwd_rest";
    const FINISH_CAPTURED: &'static str = "cdna_bwd_finish_captured";
    const HEADER: &'static str = "fmha/cdna/bwd/main.h";
    const CLASS: &'static str = "cdna::bwd::OnMfma";
    const WAVE_ROWS: u32 = 32;
    const WAVE_THREADS: u32 = 64;
    /// Bytes of a line of LDS banks.
    const LINE: u32 = 64;

    fn needs(arch: Arch) -> Result<(), Refusal> {
        needs_mfma(arch, NAME)
    }

    fn launch(sums: BwdSums) -> &'static str {
        match sums {
            BwdSums::Dq => "cdna_bwd_dq",
            BwdSums::DkDv => "cdna_bwd_dkdv",
            BwdSums::Dk => "cdna_bwd_dk",
            BwdSums::Dv => "cdna_bwd_dv",
            BwdSums::Captured => "cdna_bwd_captured",
        }
    }

    fn access(problem: &BwdProblem) -> LoadsAndStores {
        LoadsAndStores::of(problem)
    }

    /// Whether one launch sums dK and dV together. With rows of 128 that leaves registers for only one wave per
    /// SIMD. On gfx950, whose products take half the time, one wave with four products per block is as fast as two
    /// waves with five; on other architectures it is slower. With 384 columns together gfx950 spills 4 to 35
    /// registers. Rows of 256 and their transposes fill the LDS.
    fn sums_keys_at_once(spec: &MatrixBwdSpec, arch: Arch, by: LoadsAndStores) -> bool {
        let widest = spec.head_dim_qk.max(spec.head_dim_v);
        if widest > 128 {
            return spec.head_dim_qk + spec.head_dim_v <= 320;
        }
        widest <= 64 || arch == Arch::Gfx950 || is_busy(spec, by)
    }

    /// The tile has two waves per SIMD if registers suffice, so that one computes while the other waits: eight waves
    /// share the walked rows, or four if a workgroup owns few rows. Two stages are used if they fit the LDS.
    fn tile(
        spec: &MatrixBwdSpec,
        arch: Arch,
        by: LoadsAndStores,
        sums: BwdSums,
        (seqlen_q, seqlen_k): (u32, u32),
    ) -> MatrixBwdTile {
        let widest = spec.head_dim_qk.max(spec.head_dim_v);
        let is_wide = widest > 128 || sums == BwdSums::DkDv && widest > 64;
        let waves = if is_wide || is_busy(spec, by) { 1 } else { 2 };
        let own = if sums.owns_queries() { seqlen_q } else { seqlen_k };
        let rows = if waves == 2 && own > 128 { 256 } else { 128 };
        let tile = MatrixBwdTile {
            rows,
            columns: BLOCK_ROWS.cast_signed(),
            stages: 2,
            waves,
            load: by.load,
            store: by.store,
            sums,
            lds_bytes: 0,
        };
        let tile = with_lds::<Self>(tile, spec);
        // Two workgroups of four waves should fit a compute unit, each with half of the registers.
        let groups = if waves == 2 && rows == 128 { 2 } else { 1 };
        // Unrolling two steps takes scalar registers, which modifiers need.
        if groups * tile.lds_bytes.unsigned_abs() <= arch.lds_bytes() && !is_busy(spec, by) {
            return tile;
        }
        MatrixBwdTile { stages: 1, ..tile }
    }

    fn settled(tile: MatrixBwdTile) -> Result<MatrixBwdTile, Refusal> {
        Ok(MatrixBwdTile {
            waves: tile.waves.max(tile.rows / (SIMDS * Self::WAVE_ROWS.cast_signed())),
            ..tile
        })
    }

    fn form_bytes(rows: i32, elems: i32) -> (i32, i32) {
        let bytes = rows * elems * ELEM_BYTES as i32;
        (bytes, bytes)
    }

    fn registers(tile: &MatrixBwdTile) -> String {
        format!(", amdgpu_waves_per_eu({waves}, {waves})", waves = tile.waves)
    }
}

/// Whether modifiers or loads of single elements need the registers of a second wave.
fn is_busy(spec: &MatrixBwdSpec, by: LoadsAndStores) -> bool {
    spec.modifies || spec.masks || by.load == LoadPath::Element
}
