//! Source text of the kernel's entries, and the header that they share with the host.

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _, ArrivalParams};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::FwdSpec;

use super::{
    HEADER, Lookahead, MASKED_HEADER, PingPong, PrepareV, PreparedValues, Sm90Tile, ValueProduct, elem_bytes,
    memory_text, product_dim, rows_text, tile_text, values,
};
use crate::schedule;
use crate::wgmma::{self, OperandA, Sums, WgmmaShape};
use crate::{round_up, tile_list, within};

/// The forward kernel for a spec and a tile. The crate's README lists its arguments.
#[must_use]
pub fn fwd(spec: &FwdSpec, tile: &Sm90Tile) -> KernelSource {
    of_keys(spec, tile, false)
}

/// Forward kernel for keys that arrive while it runs, with the argument [`ArrivalParams`] after the others, for
/// tiles that [wait](Sm90Tile::waits_for_keys).
#[must_use]
pub fn fwd_of_arriving_keys(spec: &FwdSpec, tile: &Sm90Tile) -> KernelSource {
    of_keys(spec, tile, true)
}

/// Forward kernel under masks as data, with `has_function` also under a mask as code. It has the arguments
/// [`MaskDataParams`](fmha_core::masks::MaskDataParams) and [`TileList`](tile_list::TileList) after the others.
#[must_use]
pub fn fwd_masked(spec: &FwdSpec, tile: &Sm90Tile, has_function: bool) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: MASKED_HEADER,
        constants: &constants,
        bounds: BOUNDS,
        params: &format!("{OPERANDS}{}", tile_list::PARAMS),
        call: &format!(
            "{}sm90::fwd_masked<kSpec, kTile, {has_function}>(p, maps, schedule, masks, list);",
            assert_smem(spec, tile)
        ),
    };
    let (spec, tile) = (*spec, *tile);
    crate::source(entry.render(), move || {
        let [products, schedule, host, memory] = rendered(&spec, &tile);
        [products, schedule, host, memory, fmha_core::masks::header(), tile_list::header()]
    })
}

/// Parameters that every entry has.
const OPERANDS: &str = "const __grid_constant__ FwdParams p, const __grid_constant__ sm90::Maps maps, \
                        const __grid_constant__ TileSchedule schedule";
/// Launch bounds of an entry whose tile has no cluster.
const BOUNDS: &str = "__launch_bounds__(sm90::num_threads(kTile), 1)";

/// An entry's assertion that the device agrees on shared memory.
fn assert_smem(spec: &FwdSpec, tile: &Sm90Tile) -> String {
    format!(
        "static_assert(sizeof(sm90::Smem<kSpec, kTile>) == {}, \"Smem: host and device disagree\"); ",
        tile.smem_bytes(spec)
    )
}

fn of_keys(spec: &FwdSpec, tile: &Sm90Tile, arriving: bool) -> KernelSource {
    let beside = tile.prepare_v == PrepareV::Beside;
    let call = format!(
        "{}{}sm90::fwd<kSpec, kTile>(p, maps, schedule{});",
        assert_smem(spec, tile),
        if beside { values::assert_units(spec, tile) } else { String::new() },
        match (beside, arriving) {
            (true, _) => ", values",
            (false, true) => ", {}, ArrivingKeys<ArrivalParams>(arrivals)",
            (false, false) => "",
        },
    );
    let more = match (beside, arriving) {
        (true, _) => ", const __grid_constant__ PreparedValues values",
        (false, true) => ", const __grid_constant__ ArrivalParams arrivals",
        (false, false) => "",
    };
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let entry = Entry {
        include: HEADER,
        constants: &constants,
        bounds: if tile.cluster > 1 {
            "__cluster_dims__(kTile.cluster, 1, 1) __launch_bounds__(sm90::num_threads(kTile), 1)"
        } else {
            BOUNDS
        },
        params: &format!("{OPERANDS}{more}"),
        call: &call,
    };
    let (spec, tile) = (*spec, *tile);
    crate::source(entry.render(), move || rendered(&spec, &tile))
}

/// The rendered headers of an entry: its products, the schedule, and the types shared with the host.
pub(super) fn rendered(spec: &FwdSpec, tile: &Sm90Tile) -> [Header; 4] {
    let sums = Sums::F32;
    let q = if tile.q_in_registers { OperandA::Registers } else { OperandA::Shared };
    // Number of keys that one product of P V contracts; a partly computed block is rounded up to whole products.
    let operand_v = tile.operand_v(spec);
    let depth = 32 / elem_bytes(operand_v);
    let shapes = [
        WgmmaShape { dtype: spec.dtype_qk, n: tile.block_n, a: q, sums },
        WgmmaShape { dtype: spec.dtype_qk, n: round_up(tile.block_n / 2, depth), a: q, sums },
        WgmmaShape {
            dtype: operand_v,
            n: if tile.output_columns > 0 {
                tile.output_columns
            } else {
                product_dim(spec.head_dim_v, spec.dtype_v)
            },
            a: OperandA::Registers,
            sums,
        },
    ];
    let memory = Header::shared("fmha/sm90_memory.h", "fmha::sm90", &[], &[memory_text()]);
    [wgmma::header(&shapes), schedule::header(), host_header(), memory]
}

/// `fmha/sm90_host.h`: the types that this file shares with the device.
fn host_header() -> Header {
    let definitions = [
        PingPong::c_definition(),
        Lookahead::c_definition(),
        ValueProduct::c_definition(),
        PrepareV::c_definition(),
        Sm90Tile::c_definition(),
        PreparedValues::c_definition(),
        ArrivalParams::c_definition(),
        within("sm90", &[rows_text(), tile_text()]),
    ];
    Header::shared("fmha/sm90_host.h", "fmha", &["fmha/num.h", "fmha/tile_schedule.h"], &definitions)
}
