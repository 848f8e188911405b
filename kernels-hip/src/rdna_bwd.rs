//! `rdna_bwd`: backward on WMMA, gfx1100 and gfx1201.

use fmha_core::{BwdProblem, Refusal};

use crate::arch::Arch;
use crate::backward::{BLOCK_ROWS, BwdSums, ELEM_BYTES, LoadsAndStores, MatrixBwdSpec, MatrixBwdTile, Unit};
use crate::device::{needs_wmma, refuse};
use crate::paths::LoadPath;

/// The kernel's name in plans and refusals.
pub(crate) const NAME: &str = "rdna_bwd";

/// Bytes of padding between the end of a row in LDS and the next row.
const PAD: i32 = 16;

/// The unit WMMA: products of 16 rows, waves of 32 threads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wmma;

impl Unit for Wmma {
    const NAME: &'static str = NAME;
    const STATS: &'static str = "rdna_bwd_stats";
    const REST: &'static str = "rdna_bwd_rest";
    const FINISH_CAPTURED: &'static str = "rdna_bwd_finish_captured";
    const HEADER: &'static str = "fmha/rdna/bwd/main.h";
    const CLASS: &'static str = "rdna::bwd::OnWmma";
    const WAVE_ROWS: u32 = 16;
    const WAVE_THREADS: u32 = 32;
    const LINE: u32 = 32;

    fn needs(arch: Arch) -> Result<(), Refusal> {
        needs_wmma(arch, NAME)
    }

    fn launch(sums: BwdSums) -> &'static str {
        match sums {
            BwdSums::Dq => "rdna_bwd_dq",
            BwdSums::DkDv => "rdna_bwd_dkdv",
            BwdSums::Dk => "rdna_bwd_dk",
            BwdSums::Dv => "rdna_bwd_dv",
            BwdSums::Captured => "rdna_bwd_captured",
        }
    }

    /// How operands are accessed: by elements if rows end inside a chunk of 16 bytes.
    fn access(problem: &BwdProblem) -> LoadsAndStores {
        let by = LoadsAndStores::of(problem);
        if by.load == LoadPath::Chunks { by } else { LoadsAndStores::BY_ELEMENT }
    }

    /// Whether one launch sums dK and dV together. With wider rows both sums need too many of a lane's 256
    /// registers; with dropout gfx1100's compiler spills for rows beyond 64.
    fn sums_keys_at_once(spec: &MatrixBwdSpec, arch: Arch, _: LoadsAndStores) -> bool {
        let most = if spec.dropout && arch == Arch::Gfx1100 { 128 } else { 256 };
        spec.head_dim_qk + spec.head_dim_v <= most
    }

    /// Tile for these lengths: eight waves share the walked rows, or four if a workgroup owns few rows.
    fn tile(
        _: &MatrixBwdSpec,
        _: Arch,
        by: LoadsAndStores,
        sums: BwdSums,
        (seqlen_q, seqlen_k): (u32, u32),
    ) -> MatrixBwdTile {
        let own = if sums.owns_queries() { seqlen_q } else { seqlen_k };
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use fmha_core::{DType, Dims, FwdProblem, PlanOptions};

    use super::*;
    use crate::backward::accept;
    use crate::device::Device;

    fn problem((head_dim_qk, head_dim_v): (u32, u32), (seqlen_q, seqlen_k): (u32, u32)) -> BwdProblem {
        let heads = 2;
        BwdProblem::new(FwdProblem::batch(
            DType::Bf16,
            Dims::batch(1).seqlens(seqlen_q, seqlen_k).heads(heads, heads).head_dims(head_dim_qk, head_dim_v),
        ))
    }

    fn tiles(problem: &BwdProblem, arch: Arch) -> Vec<MatrixBwdTile> {
        let device = Device { arch, num_compute_units: 48 };
        accept::<Wmma>(problem, device, &PlanOptions::default()).unwrap().tiles
    }

    /// Gradients that each launch sums.
    fn sums(problem: &BwdProblem, arch: Arch) -> Vec<BwdSums> {
        tiles(problem, arch).iter().map(|tile| tile.sums).collect()
    }

    const LONG: (u32, u32) = (300, 300);
    const AT_ONCE: [BwdSums; 2] = [BwdSums::Dq, BwdSums::DkDv];
    const APART: [BwdSums; 3] = [BwdSums::Dq, BwdSums::Dk, BwdSums::Dv];

    #[test]
    fn wide_rows_and_dropout_where_it_spills_have_a_launch_for_each_gradient_of_keys() {
        for arch in Arch::RDNA {
            for (dims, expected) in [
                ((128, 128), &AT_ONCE[..]),
                ((192, 64), &AT_ONCE),
                ((192, 72), &APART),
                ((129, 128), &APART),
                ((256, 256), &APART),
            ] {
                assert_eq!(sums(&problem(dims, LONG), arch), expected, "{arch:?} {dims:?}");
            }
            for (dims, on_rdna3) in [((64, 64), &AT_ONCE[..]), ((65, 64), &APART), ((128, 128), &APART)] {
                let mut drops = problem(dims, LONG);
                drops.fwd.dropout.p_drop = 0.2;
                let expected = if arch == Arch::Gfx1100 { on_rdna3 } else { &AT_ONCE };
                assert_eq!(sums(&drops, arch), expected, "{arch:?} {dims:?}");
            }
        }
    }

    #[test]
    fn few_own_rows_have_a_smaller_workgroup() {
        for (lengths, rows) in [((64, 65), [64, 128]), ((65, 64), [128, 64]), ((1, 300), [64, 128])] {
            let tiles = tiles(&problem((64, 64), lengths), Arch::Gfx1201);
            assert_eq!([tiles[0].rows, tiles[1].rows], rows, "{lengths:?}");
        }
    }

    /// The device text copies 16 bytes at a time, or elements.
    #[test]
    fn rows_of_no_whole_chunks_are_read_by_elements() {
        let by = |problem: &BwdProblem| tiles(problem, Arch::Gfx1100)[0].load;
        for (dims, load) in [
            ((72, 64), LoadPath::Chunks),
            ((70, 64), LoadPath::Element),
            ((64, 70), LoadPath::Element),
            ((33, 33), LoadPath::Element),
        ] {
            assert_eq!(by(&problem(dims, LONG)), load, "{dims:?}");
        }
        let mut odd = problem((64, 64), LONG);
        odd.dout.seq += 1;
        assert_eq!(by(&odd), LoadPath::Element);
    }

    #[test]
    fn rows_are_padded_to_whole_32_elements() {
        // LDS of dQ: K twice, as 32 rows of 96 elements plus 16 bytes and transposed as 96 rows of 32 elements plus
        // 16 bytes; V once, untransposed.
        let dq = tiles(&problem((72, 72), LONG), Arch::Gfx1201)[0];
        assert_eq!(dq.lds_bytes, 2 * 32 * (96 * 2 + 16) + 96 * (32 * 2 + 16));
    }
}
