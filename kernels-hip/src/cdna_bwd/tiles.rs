//! Which tiles the launches of products have.

use fmha_core::fields::Fields as _;
use fmha_core::{BwdProblem, Refusal, Shape, Strides, VLayout};

use super::{BwdSums, CdnaBwdSpec, CdnaBwdTile, DWORD, ELEM_BYTES, LINE, NAME, WAVE_ROWS};
use crate::arch::Arch;
use crate::{LoadPath, StorePath};

const SIMDS: i32 = 4;

/// How operands are read and gradients written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LoadsAndStores {
    pub(super) load: LoadPath,
    pub(super) store: StorePath,
}

/// The strides in use, but that of a row's elements.
fn live(strides: Strides, shape: Shape) -> [i64; 3] {
    let of = |extent: u32, stride: i64| if extent > 1 { stride } else { 0 };
    [of(shape.batch, strides.batch), of(shape.seq, strides.seq), of(shape.head, strides.head)]
}

impl LoadsAndStores {
    pub(super) const BY_ELEMENT: Self = Self { load: LoadPath::Element, store: StorePath::Element };

    pub(super) fn of(problem: &BwdProblem) -> Self {
        let fwd = &problem.fwd;
        let reads = [
            (fwd.strides.q, fwd.shape_q()),
            (fwd.strides.k, fwd.shape_k()),
            (fwd.strides.v, fwd.shape_v()),
            (problem.dout, fwd.shape_o()),
        ];
        // A descriptor reaches every row of a block.
        let by_dwords = |&(strides, shape): &(Strides, Shape)| {
            i64::from(shape.dim) * ELEM_BYTES % DWORD == 0
                && live(strides, shape).iter().all(|stride| stride.wrapping_mul(ELEM_BYTES) % DWORD == 0)
                && strides.seq.saturating_mul(ELEM_BYTES * i64::from(2 * LINE)) < 1 << 28
        };
        let is_whole = |dim: u32| dim.is_multiple_of(8);
        let load = match fwd.layout.v == VLayout::RowMajor && reads.iter().all(by_dwords) {
            false => LoadPath::Element,
            true if is_whole(fwd.dims.head_dim_qk) && is_whole(fwd.dims.head_dim_v) => LoadPath::Chunks,
            true => LoadPath::Dwords,
        };
        let gradients =
            [(problem.dq, fwd.shape_q()), (problem.dk, fwd.shape_k()), (problem.dv, fwd.shape_v())];
        let by_runs = |&(strides, shape): &(Strides, Shape)| {
            shape.dim.is_multiple_of(4) && live(strides, shape).iter().all(|stride| stride % 4 == 0)
        };
        let runs = load != LoadPath::Element && gradients.iter().all(by_runs);
        Self { load, store: if runs { StorePath::Vector } else { StorePath::Element } }
    }
}

pub(super) fn tiles(
    spec: &CdnaBwdSpec,
    arch: Arch,
    by: LoadsAndStores,
    lengths: (u32, u32),
    asked: &[(String, String)],
) -> Result<Vec<CdnaBwdTile>, Refusal> {
    let of = |sums| default_tile(spec, arch, by, sums, lengths);
    let keys: &[BwdSums] =
        if sums_keys_at_once(spec, arch, by) { &[BwdSums::DkDv] } else { &[BwdSums::Dk, BwdSums::Dv] };
    let mut tiles: Vec<CdnaBwdTile> = [BwdSums::Dq].iter().chain(keys).map(|&sums| of(sums)).collect();
    for tile in &mut tiles {
        for (name, value) in asked {
            tile.set_field(name, value).map_err(|text| Refusal::new(NAME, format!("tile {text}")))?;
        }
        tile.waves = tile.waves.max(tile.rows / (SIMDS * WAVE_ROWS.cast_signed()));
    }
    Ok(tiles)
}

/// Whether one launch sums dK and dV. Rows of 128 leave no registers for two waves a SIMD then: on gfx950, whose products
/// take half as long, one wave with four products a block is as fast as two with five; on the others it is not. Rows of
/// 256 and their transposes fill the LDS.
fn sums_keys_at_once(spec: &CdnaBwdSpec, arch: Arch, by: LoadsAndStores) -> bool {
    let widest = spec.head_dim_qk.max(spec.head_dim_v);
    if widest > 128 {
        return spec.head_dim_qk + spec.head_dim_v <= 384;
    }
    widest <= 64 || arch == Arch::Gfx950 || is_busy(spec, by)
}

/// Whether modifiers or loads of single elements take the registers of a second wave.
fn is_busy(spec: &CdnaBwdSpec, by: LoadsAndStores) -> bool {
    spec.modifies || by.load == LoadPath::Element
}

/// Two waves a SIMD, each of which hides what the other waits for, where registers are left for them: eight waves share
/// the walked rows, or four where there are few own rows. Two stages where they fit the LDS.
fn default_tile(
    spec: &CdnaBwdSpec,
    arch: Arch,
    by: LoadsAndStores,
    sums: BwdSums,
    (seqlen_q, seqlen_k): (u32, u32),
) -> CdnaBwdTile {
    let widest = spec.head_dim_qk.max(spec.head_dim_v);
    let is_wide = widest > 128 || sums == BwdSums::DkDv && widest > 64;
    let waves = if is_wide || is_busy(spec, by) { 1 } else { 2 };
    let own = if sums == BwdSums::Dq { seqlen_q } else { seqlen_k };
    let rows = if waves == 2 && own > 128 { 256 } else { 128 };
    let tile = CdnaBwdTile {
        rows,
        columns: WAVE_ROWS.cast_signed(),
        stages: 2,
        waves,
        load: by.load,
        store: by.store,
        sums,
        lds_bytes: 0,
    }
    .with_lds(spec);
    // Of workgroups of four waves with half of the registers, a compute unit is to hold two.
    let groups = if waves == 2 && rows == 128 { 2 } else { 1 };
    // Two steps in a row take scalar registers, which modifiers need.
    if groups * tile.lds_bytes.unsigned_abs() <= arch.lds_bytes() && !is_busy(spec, by) {
        return tile;
    }
    CdnaBwdTile { stages: 1, ..tile }.with_lds(spec)
}
