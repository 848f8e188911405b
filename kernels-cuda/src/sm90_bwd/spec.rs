//! Properties of a spec that the kernels need.

use fmha_core::spec::{BiasKind, BwdSpec, CodeKind, FwdSpec};

use fmha_core::{BwdProblem, MaskKind};

use crate::{round_up, tile_list};

/// Head dimension of Q, K and V in the tiles; TMA fills the rest with zeros.
#[must_use]
pub const fn padded_dim(spec: &BwdSpec) -> i32 {
    let (qk, v) = (spec.fwd.head_dim_qk, spec.fwd.head_dim_v);
    let dim = if qk > v { qk } else { v };
    round_up(dim, 64)
}

/// A head dimension rounded up to whole steps of the products, 16 each.
pub(super) const fn own_width(dim: i32) -> i32 {
    round_up(dim, 16)
}

/// Spec of a problem under masks and functions, which hide keys as a band does.
#[must_use]
pub fn masked_spec(problem: &BwdProblem) -> BwdSpec {
    let (fwd, mut spec) = (&problem.fwd, BwdSpec::of(problem));
    if tile_list::serve(fwd) {
        spec.fwd.code = tile_list::code_beside_lists(fwd);
    }
    if (tile_list::serve(fwd) || !fwd.code.is_empty()) && spec.fwd.mask == MaskKind::Full {
        spec.fwd.mask = MaskKind::Upper;
    }
    spec
}

/// Whether scores have modifiers, so that rows have score origins.
#[must_use]
pub fn modifies_score(spec: &BwdSpec) -> bool {
    spec.fwd.softcap || spec.fwd.bias != BiasKind::None || spec.fwd.code != CodeKind::None
}

/// Number of modifiers among functions, bias, soft-cap and dropout: each needs registers.
pub(super) fn num_modifiers(spec: &BwdSpec) -> i32 {
    let FwdSpec { bias, softcap, dropout, code, .. } = spec.fwd;
    i32::from(code != CodeKind::None)
        + i32::from(bias != BiasKind::None)
        + i32::from(softcap)
        + i32::from(dropout)
}

/// Whether a mask may hide a key or a query from only a part of a block: an infinity in it times P = 0 is then NaN
/// in rows that do not see it, and such rows are recomputed.
#[must_use]
pub fn repairs(spec: &BwdSpec) -> bool {
    spec.fwd.mask != MaskKind::Full
}

/// Whether queries with a large LSE are left to [`repair`](super::repair), with P = 0 in the main kernel: if scores
/// have no modifiers. Handling them in the main kernel's loop costs 2 to 10 %.
#[must_use]
pub fn leaves_far_queries(spec: &BwdSpec) -> bool {
    !modifies_score(spec)
}
