//! Update of the KV cache by a call, before a forward kernel reads it: one launch writes new keys and values
//! to the cache and rotates new keys and queries to their positions.
//!
//! The forward kernel then reads the lengths and, if queries are rotated, the queries that this launch has written
//! to the workspace.

use crate::RotaryPairs;
use crate::abi::{AbiLiteral as _, AbiStruct as _, DevPtr, FwdParams, Untyped, View};
use crate::args::{DevSlice, FwdArgs};
use crate::dtype::DType;
use crate::error::Refusal;
use crate::layout::{KvLayout, QLayout, Shape, Strides, VLayout};
use crate::problem::FwdProblem;
use crate::source::Header;
use crate::spec::KvKind;
use crate::{abi_spec, abi_struct};

abi_spec! {
    /// Compile-time properties of the launch.
    pub struct CacheSpec {
        /// Type of Q and K.
        pub dtype_qk: DType,
        /// Type of V.
        pub dtype_v: DType,
        /// Type of cos and sin.
        pub dtype_table: DType,
        /// Number of elements of a query's or key's row.
        pub head_dim_qk: i32,
        /// Number of elements of a value's row.
        pub head_dim_v: i32,
        /// Layout of Q.
        pub q_layout: QLayout,
        /// Layout of K and V.
        pub kv_layout: KvKind,
        /// Axis of V with stride 1.
        pub v_layout: VLayout,
        /// Whether there are new keys and values.
        pub appends: bool,
        /// Whether new keys and values are packed.
        pub packs_new: bool,
        /// Whether V lies in K's rows.
        pub v_in_k: bool,
        /// Number of rotated elements of a row; 0: none.
        pub rotary_dim: i32,
        /// Whether the rotation pairs elements 2i and 2i + 1, instead of i and i + `rotary_dim` / 2.
        pub interleaved: bool,
        /// Whether query i's position is i rows after the first query's; otherwise all queries have one position.
        pub positions_advance: bool,
        /// Bytes of a key's row, 584 or 656, if the cache has rows of bytes, otherwise 0.
        pub row_bytes: i32,
        /// Whether new rows are quantised to `stored`, each with a scale of its own.
        pub scaled: bool,
        /// Type of the cache if rows have scales; otherwise it is not used.
        pub stored: DType,
    }
}

abi_struct! {
    /// Parameters of the launch, apart from the call's operands.
    pub struct CacheUpdate {
        /// New keys, `[batch, seqlen_new, num_heads_kv, head_dim_qk]`, or packed.
        pub k_new: View,
        /// New values, `[batch, seqlen_new, num_heads_kv, head_dim_v]`, or packed.
        pub v_new: View,
        /// Where the rotated queries are written.
        pub q: View,
        /// Scales of K's rows in the cache, which are written with the rows; not used if rows have none.
        pub k_scale: View,
        /// Scales of V's rows in the cache, which are written with the rows; not used if rows have none.
        pub v_scale: View,
        /// `[batch + 1]`, first new row of each sequence; null where new rows have a batch axis.
        pub cu_seqlens_new: DevPtr<i32>,
        /// Cosines, `[max_pos, rotary_dim / 2]`.
        pub cos: DevPtr<Untyped>,
        /// Sines, laid out as the cosines.
        pub sin: DevPtr<Untyped>,
        /// Output `[batch]`: number of keys of each sequence, including new ones.
        pub seqused: DevPtr<i32>,
        /// Number of new rows of each sequence; with packed rows, an upper bound.
        pub seqlen_new: i32,
        /// Number of new rows of all sequences, if they are packed.
        pub total_new: i32,
        /// Number of rows of cos and sin.
        pub max_pos: i32,
        /// Padding, which is 0.
        pub reserved: i32,
    }
}

/// Whether a problem's call begins with this launch.
#[must_use]
pub fn is_wanted(problem: &FwdProblem) -> bool {
    problem.cache.append.is_some() || problem.cache.rotary.is_some()
}

/// Checks that the launch supports the cache update of `problem`, if it has one.
///
/// # Errors
/// Types that the launch does not support, as a refusal of `kernel`, which follows it.
pub fn takes(problem: &FwdProblem, kernel: &'static str) -> Result<(), Refusal> {
    let (qk, v) = (problem.dtypes.qk, problem.dtypes.v);
    if is_wanted(problem) && (qk == DType::F32 || v == DType::F32) {
        return Err(Refusal::new(
            kernel,
            format!("dtype_qk {qk} with dtype_v {v}: rows that are appended or turned are of 16 bits or FP8"),
        ));
    }
    Ok(())
}

/// Elements from one rotated query's row to the next: each row begins at a multiple of 16 bytes.
fn turned_row(problem: &FwdProblem) -> u32 {
    let elems = 16 / problem.dtypes.qk.size_bytes() as u32;
    problem.dims.head_dim_qk.next_multiple_of(elems)
}

/// Strides of the rotated queries. Every sequence has as many rows as the longest one, also if queries are
/// packed, when the shape counts at least two sequences.
fn turned_strides(problem: &FwdProblem) -> Strides {
    let shape = Shape { seq: problem.dims.seqlen_q, dim: turned_row(problem), ..problem.shape_q() };
    let strides = Strides::bshd(shape);
    Strides { dim: 1, ..strides }
}

/// Bytes of the workspace: lengths, then rotated queries.
#[must_use]
pub fn workspace_bytes(problem: &FwdProblem) -> u64 {
    let shape = problem.shape_q();
    let rows = turned_rows(problem).saturating_mul(shape.head.into());
    let row = u64::from(turned_row(problem)) * problem.dtypes.qk.size_bytes();
    first_query(problem) + if problem.cache.rotary.is_some() { rows.saturating_mul(row) } else { 0 }
}

/// Number of rows of Q in the workspace: each sequence has as many as the longest may have, also if queries are packed.
fn turned_rows(problem: &FwdProblem) -> u64 {
    u64::from(problem.dims.batch) * u64::from(problem.dims.seqlen_q)
}

/// Offset at which the rotated queries begin in the workspace.
fn first_query(problem: &FwdProblem) -> u64 {
    (u64::from(problem.dims.batch) * 4).next_multiple_of(256)
}

/// The launch's argument, for its part of the workspace at `workspace`, and the arguments of the forward kernel
/// after it.
#[must_use]
pub fn bind(
    problem: &FwdProblem,
    args: &FwdArgs<'_>,
    whole: &FwdParams,
    workspace: u64,
) -> (CacheUpdate, FwdParams) {
    let address = |slice: Option<&DevSlice<'_>>| slice.map_or(0, |slice| slice.as_ptr() as u64);
    let append = problem.cache.append;
    let packs = append.is_some_and(|append| append.layout == QLayout::Packed);
    let new = |slice, strides: Option<Strides>| {
        strides.map_or(View::NULL, |strides| View::new(address(slice), strides, packs))
    };
    let q = match problem.cache.rotary {
        // Packed queries have a batch axis here too: `query_offset` in `fmha/seq.h`.
        Some(_) => View::new(workspace + first_query(problem), turned_strides(problem), false),
        None => whole.q,
    };
    let of_cache = |slice: Option<DevSlice<'_>>, strides: Option<Strides>| {
        let packs = problem.layout.kv == KvLayout::Packed;
        strides.map_or(View::NULL, |strides| View::new(address(slice.as_ref()), strides, packs))
    };
    let [k_scale, v_scale] = args.scale_slices();
    let update = CacheUpdate {
        k_new: new(args.cache.k_new.as_ref(), append.map(|append| append.k_new)),
        v_new: new(args.cache.v_new.as_ref(), append.map(|append| append.v_new)),
        q,
        k_scale: of_cache(k_scale, problem.cache.scales.map(|scales| scales.k)),
        v_scale: of_cache(v_scale, problem.cache.scales.map(|scales| scales.v)),
        cu_seqlens_new: DevPtr::new(address(args.seq.cu_seqlens_new.as_ref())),
        cos: DevPtr::new(address(args.cache.cos.as_ref())),
        sin: DevPtr::new(address(args.cache.sin.as_ref())),
        seqused: DevPtr::new(workspace),
        seqlen_new: append.map_or(0, |append| append.seqlen_new as i32),
        total_new: args.seq.totals.total_new.unwrap_or(0) as i32,
        max_pos: problem.cache.rotary.map_or(1, |rotary| rotary.max_pos as i32),
        reserved: 0,
    };
    (update, FwdParams { q, seqused_k: DevPtr::new(workspace), ..*whole })
}

/// Number of rows that the launch writes.
#[must_use]
pub fn num_rows(problem: &FwdProblem) -> u64 {
    let dims = problem.dims;
    let new = u64::from(problem.cache.append.map_or(0, |append| append.seqlen_new));
    let queries = if problem.cache.rotary.is_some() { u64::from(dims.seqlen_q) } else { 0 };
    let heads =
        (2 * new).saturating_mul(dims.num_heads_kv.into()) + queries.saturating_mul(dims.num_heads_q.into());
    heads.saturating_mul(dims.batch.into()).max(1)
}

impl CacheSpec {
    /// Compile-time properties of a problem's launch.
    #[must_use]
    pub fn of(problem: &FwdProblem) -> Self {
        let (append, rotary) = (problem.cache.append, problem.cache.rotary);
        Self {
            dtype_qk: problem.dtypes.qk,
            dtype_v: problem.dtypes.v,
            dtype_table: rotary.map_or(DType::F32, |rotary| rotary.dtype),
            head_dim_qk: problem.dims.head_dim_qk as i32,
            head_dim_v: problem.dims.head_dim_v as i32,
            q_layout: problem.layout.q,
            kv_layout: problem.layout.kv.into(),
            v_layout: problem.layout.v,
            appends: append.is_some(),
            packs_new: append.is_some_and(|append| append.layout == QLayout::Packed),
            v_in_k: problem.cache.v_in_k,
            rotary_dim: rotary.map_or(0, |rotary| rotary.dim as i32),
            interleaved: rotary.is_some_and(|rotary| rotary.pairs == RotaryPairs::Interleaved),
            positions_advance: problem.positions_advance(),
            row_bytes: problem.cache.rows.map_or(0, |rows| rows.row_bytes().cast_signed()),
            scaled: problem.cache.scales.is_some(),
            stored: problem.stored_k(),
        }
    }
}

/// `fmha/cache_update.h`: the structs of this file, for the device.
#[must_use]
pub fn header() -> Header {
    let definitions = [CacheSpec::c_definition(), CacheUpdate::c_definition()];
    Header::shared("fmha/cache_update.h", "fmha", &["fmha/params.h", "fmha/spec.h"], &definitions)
}

#[cfg(test)]
mod tests {
    use crate::{DevSliceMut, Dims, KvLayout, Rotary};

    use super::*;

    /// The workspace has a place for each row of each sequence: rows of a packed Q may lie anywhere, and there may
    /// be more rows than the sequences use.
    #[test]
    fn turned_queries_have_a_place_for_each_sequence_and_row_of_it() {
        for seqlen_q in [1, 9] {
            let dims = Dims::batch(3).seqlens(seqlen_q, 40).heads(2, 1).head_dims(20, 16);
            let mut problem = FwdProblem::new(QLayout::Packed, KvLayout::Strided, DType::Bf16, dims);
            problem.cache.rotary =
                Some(Rotary { dim: 16, pairs: RotaryPairs::Half, max_pos: 64, dtype: DType::F32 });
            let unread = || DevSlice::host::<u8>(&[]);
            let mut written: [u8; 0] = [];
            let mut args = FwdArgs::new(unread(), unread(), unread(), DevSliceMut::host(&mut written));
            args.seq.totals.total_q = Some(1000);
            let whole = crate::bind::fwd_params(&problem, &args);
            let (update, forward) = bind(&problem, &args, &whole, 0x1000);
            for q in [update.q, forward.q] {
                let row = 24;
                assert_eq!((q.head, q.row, q.batch), (row, 2 * row, i64::from(seqlen_q) * 2 * row));
                assert_eq!(q.data.0, 0x1000 + 256);
            }
            assert_eq!(workspace_bytes(&problem), 256 + 3 * u64::from(seqlen_q) * 2 * 24 * 2);
        }
    }
}
