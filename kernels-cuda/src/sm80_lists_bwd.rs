//! The backward over lists of keys of every NVIDIA GPU from sm_80 on: its tile, its entries.
//!
//! A CTA has query heads of one token (`fmha/sm80/bwd/lists.cuh`). dK and dV are added to sums in global memory in
//! arbitrary order; or, if sums must be ordered, computed by CTAs that each have some keys and process all tokens.

pub mod recipe;

use fmha_core::abi::AbiLiteral as _;
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::memory::Size;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::BwdSpec;
use fmha_core::{Bias, BwdProblem, DType, Refusal, VLayout, abi_memory, abi_spec};

use crate::sm80::{self, MOST_DIM_QK, Room, padded_dim};
use crate::sm80_bwd::{ctas_of, odd_stride, takes_lengths, tile_size};
use crate::within;

/// The kernel's name in plans and refusals.
pub const NAME: &str = "sm80_lists";

/// The header that the entries include.
pub const HEADER: &str = "fmha/sm80/bwd/lists.cuh";

/// Warps of a CTA.
const WARPS: i32 = 8;

abi_spec! {
    /// How the kernel computes.
    pub struct Sm80ListsBwdTile {
        /// Query heads of a CTA, 16 to a row of fragments.
        pub rows: i32 = Takes::among(&[16, 32, 64]),
        /// Keys of a block.
        pub columns: i32 = Takes::among(&[16, 32, 64]),
        /// Warps of a CTA.
        pub warps: i32 = Takes::nothing(),
        /// Bytes that a copy takes, which divide every stride and address of Q, K, V and dO; 2: element by element.
        pub copy_bytes: i32 = Takes::among(&[2, 4, 8, 16]),
        /// Keys of a CTA that alone sums their dK and dV; 0 if sums have no order.
        pub range: i32 = Takes::multiples(32, 0, 1024),
        /// Soft-capped scores by one exponential and one reciprocal, for caps of 1e-3 to 64; else to f32's accuracy.
        pub fast_softcap: bool,
    }
}

abi_memory! {
    fn memory_text() as SmemParts;
    /// Dynamic shared memory of a CTA; the entry asserts that the device agrees.
    pub const fn smem_bytes(&self, spec: &BwdSpec) of tile: Sm80ListsBwdTile {
        /// Keys of the CTA's own range that a token's list names, and how often.
        range: "KeysOfRange<tile.range>" if self.range > 0 => Size::words(2 * self.range + self.range / 32);
        q: "ScoreTile<spec, tile.rows>" => tile_size(self.rows, spec.fwd.head_dim_qk);
        dout: "ValueTile<spec, tile.rows>" => tile_size(self.rows, spec.fwd.head_dim_v);
        k: "ScoreTile<spec, tile.columns>" => tile_size(self.columns, spec.fwd.head_dim_qk);
        v: "ValueTile<spec, tile.columns>" => tile_size(self.columns, spec.fwd.head_dim_v);
        probs: "SmemTile<uint16_t, tile.rows, tile.columns>" => tile_size(self.rows, self.columns);
        ds: "SmemTile<uint16_t, tile.rows, tile.columns>" => tile_size(self.rows, self.columns);
        stats: "QueryStats<tile.rows>" => Size::of(12 * self.rows, 16);
        /// The block's keys; -1: absent.
        keys: "int32_t" [self.columns] => Size::WORD;
        /// Factors of P and dS.
        times: "float" [self.columns] => Size::WORD;
    }
}

impl Sm80ListsBwdTile {
    /// Threads of a CTA.
    #[must_use]
    pub const fn num_threads(&self) -> i32 {
        32 * self.warps
    }

    /// Sets one field from its name and value.
    ///
    /// # Errors
    /// A text that names the field, the value and what the field takes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        self.set_field(name, value).map_err(|text| format!("tile {text}"))
    }
}

/// Checks that the kernel computes this problem.
///
/// # Errors
/// The first fact that it does not support.
pub fn accepts(problem: &BwdProblem) -> Result<(), Refusal> {
    takes_gathered(problem, NAME)?;
    let dims = problem.fwd.dims;
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > MOST_DIM_QK {
            return Err(Refusal::new(NAME, format!("{field} {dim} is larger than {MOST_DIM_QK}")));
        }
    }
    Ok(())
}

/// Checks all but the rows' sizes, for a kernel `name` that gathers rows of a token's keys and sums in 32 bits.
///
/// # Errors
/// The first fact that such a kernel does not support.
pub(crate) fn takes_gathered(problem: &BwdProblem, name: &'static str) -> Result<(), Refusal> {
    let refuse = |reason: String| Err(Refusal::new(name, reason));
    let fwd = &problem.fwd;
    let types = fwd.dtypes;
    let Some(lists) = &fwd.lists else {
        return refuse("indices are not given: this kernel walks lists of keys".to_owned());
    };
    fwd.refuse_mixed_layouts(name)?;
    problem.refuse_gradients_beside_lists(name)?;
    let beside = if fwd.score.bias != Bias::None {
        Some(format!("bias {:?}", fwd.score.bias))
    } else if fwd.drops() {
        Some(format!("p_drop {}", fwd.dropout.p_drop))
    } else if fwd.layout.v == VLayout::ColMajor {
        Some("v_layout col-major".to_owned())
    } else {
        None
    };
    if let Some(beside) = beside {
        return refuse(format!("{beside} beside indices of topk {} is not in this kernel", lists.topk));
    }
    if !matches!(types.qk, DType::F16 | DType::Bf16) || types.v != types.qk || types.o != types.qk {
        return refuse(format!(
            "dtype_qk {}, dtype_v {}, dtype_o {} are not three times f16 or three times bf16",
            types.qk, types.v, types.o
        ));
    }
    takes_lengths(problem).map_err(|reason| Refusal::new(name, reason))
}

/// The tile for a problem that the kernel [`accepts`], on a device with these limits: all of a token's heads, up to
/// 64, and then as many keys, up to 64, as fit. `ordered`: sums have a fixed order.
#[must_use]
pub fn choose_tile(problem: &BwdProblem, spec: &BwdSpec, room: Room, ordered: bool) -> Sm80ListsBwdTile {
    let heads = problem.fwd.gqa_ratio();
    let copy_bytes = [16, 8, 4].into_iter().find(|&bytes| odd_stride(problem, bytes).is_none()).unwrap_or(2);
    let fast_softcap = problem.fwd.score.softcap.is_some_and(|cap| (1e-3..=64.0).contains(&cap));
    // Heads and columns have the room that the longest range leaves: a batch decides the range alone, and no sum.
    let longest = if ordered { MOST_RANGE } else { 0 };
    let of = |rows, columns| Sm80ListsBwdTile {
        rows,
        columns,
        warps: WARPS,
        copy_bytes,
        range: longest,
        fast_softcap,
    };
    let most = if heads <= 16 {
        16
    } else if heads <= 32 {
        32
    } else {
        64
    };
    let candidates = [64, 32, 16].into_iter().filter(|&rows| rows <= most);
    let mut candidates = candidates.flat_map(|rows| [64, 32, 16].map(|columns| of(rows, columns)));
    let tile = candidates.find(|tile| tile.smem_bytes(spec) <= room.smem_bytes).unwrap_or_else(|| of(16, 16));
    Sm80ListsBwdTile { range: if ordered { range(problem, room) } else { 0 }, ..tile }
}

/// Keys of a CTA, at most.
const MOST_RANGE: i32 = 1024;

/// Keys of a CTA, in whole groups of 32, such that each multiprocessor has two CTAs.
fn range(problem: &BwdProblem, room: Room) -> i32 {
    let dims = problem.fwd.dims;
    let keys = u64::from(dims.batch) * u64::from(dims.num_heads_kv) * u64::from(dims.seqlen_k);
    let even = keys.div_ceil(2 * u64::from(room.num_sms.max(1)));
    even.next_multiple_of(32).clamp(32, MOST_RANGE.unsigned_abs().into()) as i32
}

/// CTAs of the launch over keys; `None` if 2^31 or more.
#[must_use]
pub fn key_ctas(problem: &BwdProblem, tile: &Sm80ListsBwdTile) -> Option<u32> {
    let dims = problem.fwd.dims;
    let ranges = u64::from(dims.seqlen_k.div_ceil(tile.range.unsigned_abs().max(1)));
    ctas_of([dims.batch, dims.num_heads_kv], ranges)
}

/// Number of f32 in the sums of dK and dV; `None` if 2^62 or more.
#[must_use]
pub fn sum_elems(problem: &BwdProblem) -> Option<u64> {
    let dims = problem.fwd.dims;
    let padded = |dim: u32| u64::from(padded_dim(dim.cast_signed()).unsigned_abs());
    let rows = u64::from(dims.batch) * u64::from(dims.seqlen_k);
    let elems = rows.checked_mul(dims.num_heads_kv.into())?;
    elems.checked_mul(padded(dims.head_dim_qk) + padded(dims.head_dim_v)).filter(|&elems| elems < 1 << 60)
}

/// The launch: arguments `BwdParams` and [`ListParams`](fmha_core::lists::ListParams).
#[must_use]
pub fn main(spec: &BwdSpec, tile: &Sm80ListsBwdTile) -> KernelSource {
    of_tile(spec, tile, "bwd")
}

/// The launch over keys, used if sums have a fixed order; its arguments are equal.
#[must_use]
pub fn keys(spec: &BwdSpec, tile: &Sm80ListsBwdTile) -> KernelSource {
    of_tile(spec, tile, "bwd_keys")
}

fn of_tile(spec: &BwdSpec, tile: &Sm80ListsBwdTile, function: &str) -> KernelSource {
    let constants: [(&str, &dyn Literal); 2] = [("kSpec", spec), ("kTile", tile)];
    let call = format!(
        "static_assert(sizeof(sm80::lists::Smem<kSpec, kTile>) == {}, \"Smem: host and device disagree\"); \
         sm80::lists::{function}<kSpec, kTile>(p, lists);",
        tile.smem_bytes(spec)
    );
    entry(&constants, &format!("__launch_bounds__({})", tile.num_threads()), crate::lists::PARAM, &call)
}

/// The launch that scales and rounds dK and dV: a warp to a row at a time.
#[must_use]
pub fn finish(spec: &BwdSpec) -> KernelSource {
    entry(&[("kSpec", spec)], "__launch_bounds__(128)", "", "sm80::lists::finish<kSpec>(p);")
}

fn entry(constants: &[(&str, &dyn Literal)], bounds: &str, last_param: &str, call: &str) -> KernelSource {
    let params = &format!("const __grid_constant__ BwdParams p{last_param}");
    let entry = Entry { include: HEADER, constants, bounds, params, call };
    crate::source(entry.render(), || {
        let [host, memory] = host_headers();
        [host, memory, fmha_core::lists::header()]
    })
}

/// `fmha/sm80_lists_bwd_host.h`, with the types that this file shares with the device, and
/// `fmha/sm80_lists_bwd_memory.h`.
pub(crate) fn host_headers() -> [Header; 2] {
    let definitions = [Sm80ListsBwdTile::c_definition(), within("sm80::lists", &[sm80::rows_text()])];
    let includes = ["fmha/num.h", "fmha/params.h"];
    [
        Header::shared("fmha/sm80_lists_bwd_host.h", "fmha", &includes, &definitions),
        Header::shared("fmha/sm80_lists_bwd_memory.h", "fmha::sm80::lists", &[], &[memory_text()]),
    ]
}

#[cfg(test)]
mod tests {
    use fmha_core::{DType, Dims, FwdProblem, KeyLists, MaskKind};

    use super::*;

    /// Heads of a CTA decide how terms are grouped, and a plan in one order promises that no batch changes a bit.
    #[test]
    fn heads_and_columns_of_a_tile_follow_no_batch() {
        for (qk, v) in [(512, 512), (320, 256), (464, 512), (128, 128), (576, 512)] {
            for smem_bytes in [101_376, 166_912, 232_448] {
                let room = Room { smem_bytes, num_sms: 132 };
                let tile = |batch| {
                    let dims = Dims::batch(batch).seqlens(4, 4096).heads(64, 1).head_dims(qk, v);
                    let problem = FwdProblem::batch(DType::Bf16, dims);
                    let lists = KeyLists::new(&problem, 64);
                    let problem = BwdProblem::new(problem.lists(lists));
                    let fwd = fmha_core::spec::FwdSpec {
                        head_dim_v: v as i32,
                        ..fmha_core::spec::FwdSpec::plain(DType::Bf16, qk as i32, MaskKind::Full)
                    };
                    let spec = BwdSpec { fwd, ..BwdSpec::of(&problem) };
                    choose_tile(&problem, &spec, room, true)
                };
                let (alone, of_many) = (tile(1), tile(64));
                assert!(alone.range < of_many.range, "{alone:?} {of_many:?}");
                let shape = |tile: Sm80ListsBwdTile| (tile.rows, tile.columns);
                assert_eq!(shape(alone), shape(of_many), "{qk}/{v} in {smem_bytes} bytes");
            }
        }
    }
}
