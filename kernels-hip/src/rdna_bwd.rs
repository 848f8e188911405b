//! `rdna_bwd`: backward on WMMA, gfx1100 and gfx1201.

use fmha_core::{BwdProblem, Refusal};

use crate::arch::Arch;
use crate::backward::{BLOCK_ROWS, ELEM_BYTES, LoadsAndStores, Unit};
use crate::device::refuse;
use crate::{BwdSums, LoadPath, MatrixBwdSpec, MatrixBwdTile};

/// The kernel's name in plans and refusals.
pub const NAME: &str = "rdna_bwd";

/// Bytes between the end of a row in LDS and the next.
const PAD: i32 = 16;

/// WMMA: 16 rows a wave of 32.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wmma;

impl Unit for Wmma {
    const NAME: &'static str = NAME;
    const STATS: &'static str = "rdna_bwd_stats";
    const REST: &'static str = "rdna_bwd_rest";
    const HEADER: &'static str = "fmha/rdna/bwd/main.h";
    const CLASS: &'static str = "rdna::bwd::OnWmma";
    const WAVE_ROWS: u32 = 16;
    const WAVE_THREADS: u32 = 32;
    const LINE: u32 = 32;

    fn needs(arch: Arch) -> Result<(), Refusal> {
        if !arch.is_rdna() {
            refuse!(NAME, "{} has no WMMA", arch.name());
        }
        Ok(())
    }

    fn launch(sums: BwdSums) -> &'static str {
        match sums {
            BwdSums::Dq => "rdna_bwd_dq",
            BwdSums::DkDv => "rdna_bwd_dkdv",
            BwdSums::Dk => "rdna_bwd_dk",
            BwdSums::Dv => "rdna_bwd_dv",
        }
    }

    /// Rows that end inside 16 bytes are read by elements.
    fn access(problem: &BwdProblem) -> LoadsAndStores {
        let by = LoadsAndStores::of(problem);
        if by.load == LoadPath::Chunks { by } else { LoadsAndStores::BY_ELEMENT }
    }

    /// Sums of both, of wider rows, leave a lane too few of its 256 registers; of dropout gfx1100's compiler spills those
    /// of rows beyond 64.
    fn sums_keys_at_once(spec: &MatrixBwdSpec, arch: Arch, _: LoadsAndStores) -> bool {
        let most = if spec.dropout && arch == Arch::Gfx1100 { 128 } else { 256 };
        spec.head_dim_qk + spec.head_dim_v <= most
    }

    /// Eight waves share the walked rows, or four where there are few own rows.
    fn tile(
        _: &MatrixBwdSpec,
        _: Arch,
        by: LoadsAndStores,
        sums: BwdSums,
        (seqlen_q, seqlen_k): (u32, u32),
    ) -> MatrixBwdTile {
        let own = if sums == BwdSums::Dq { seqlen_q } else { seqlen_k };
        MatrixBwdTile {
            rows: if own <= 64 { 64 } else { 128 },
            columns: BLOCK_ROWS.cast_signed(),
            stages: 1,
            waves: 1,
            load: by.load,
            store: by.store,
            sums,
            lds_bytes: 0,
        }
    }

    fn settled(tile: MatrixBwdTile) -> Result<MatrixBwdTile, Refusal> {
        if tile.stages != 1 {
            refuse!(
                NAME,
                "tile stages={} is not 1: blocks are copied where they are computed with",
                tile.stages
            );
        }
        Ok(tile)
    }

    fn form_bytes(rows: i32, elems: i32) -> (i32, i32) {
        let size = ELEM_BYTES as i32;
        (rows * (elems * size + PAD), elems * (rows * size + PAD))
    }

    fn registers(_: &MatrixBwdTile) -> String {
        String::new()
    }
}
