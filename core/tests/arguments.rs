//! Arguments that do not fit their problem are refused with the field and the number.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use fmha_core::args::{check_bwd, check_combine, check_fwd};
use fmha_core::{
    Append, Bias, BiasBroadcast, BiasGrad, BlockTable, BwdArgs, BwdProblem, CacheSlice, CombineArgs,
    CombineProblem, DType, Descale, DevSlice, DevSliceMut, Dims, DropoutSeed, ElemType, ElementwiseBias,
    FwdArgs, FwdProblem, KvLayout, MaskSpec, MemorySpace, PartialResult, QLayout, Rotary, RotaryPairs, Shape,
    Strides, Totals, Workspace, bind,
};

use support::{bwd_args, input, output};

const DIMS: Dims = Dims::batch(2).seqlens(3, 5).heads(4, 2).head_dim(8);

fn args() -> FwdArgs<'static> {
    FwdArgs::new(input(0x10000, 192), input(0x20000, 160), input(0x30000, 160), output(0x40000, 192))
}

fn changed(change: impl FnOnce(&mut FwdArgs<'static>)) -> FwdArgs<'static> {
    let mut args = args();
    change(&mut args);
    args
}

fn refusal(problem: FwdProblem, args: &FwdArgs<'_>) -> String {
    let problem = problem.validate().unwrap();
    check_fwd(&problem, args, Workspace::NONE, MemorySpace::Host).unwrap_err().text
}

#[test]
fn arguments_that_fit_pass() {
    let problem = FwdProblem::batch(DType::F32, DIMS).validate().unwrap();
    check_fwd(&problem, &args(), Workspace::NONE, MemorySpace::Host).unwrap();
}

#[test]
fn what_each_of_no_sequences_has_is_given_and_empty() {
    let mut problem =
        FwdProblem::batch(DType::F32, Dims { batch: 0, ..DIMS }).bias(Bias::Alibi { per_batch: true });
    (problem.scales.descale_q, problem.scales.descale_k, problem.scales.descale_v) =
        (Descale::PerKvHead, Descale::PerKvHead, Descale::PerKvHead);
    (problem.dtypes.qk, problem.dtypes.v) = (DType::E4m3Fn, DType::E4m3Fn);
    let args = changed(|args| {
        let none = || Some(input(0x50000, 0));
        args.score.alibi_slopes = none();
        (args.score.descale_q, args.score.descale_k, args.score.descale_v) = (none(), none(), none());
    });
    let problem = problem.validate().unwrap();
    check_fwd(&problem, &args, Workspace::NONE, MemorySpace::Host).unwrap();
}

#[test]
fn short_misplaced_missing_and_superfluous_arguments_are_named() {
    let problem = FwdProblem::batch(DType::F32, DIMS);
    let short = changed(|args| args.k = input(0x20000, 159).into());
    assert_eq!(refusal(problem.clone(), &short), "k has 636 bytes, but its extents and strides reach 640");
    let odd = changed(|args| args.v = input(0x30002, 160).into());
    assert_eq!(
        refusal(problem.clone(), &odd),
        "v starts at 0x30002, which is no multiple of the 4 bytes that it is aligned to"
    );
    let superfluous = args().lse(output(0x50000, 24));
    assert_eq!(refusal(problem.clone(), &superfluous), "lse is given, but the problem has none");

    let mut with_lse = problem.clone();
    with_lse.write_lse = true;
    assert_eq!(refusal(with_lse.clone(), &args()), "lse is missing: 96 bytes are wanted");
    assert_eq!(
        refusal(with_lse, &args().lse(output(0x50000, 23))),
        "lse has 92 bytes, but its extents and strides reach 96"
    );
    let mut group = FwdProblem::group(DType::F32, DIMS);
    group.layout.seqused_k = true;
    assert_eq!(refusal(group.clone(), &args()), "total_q is missing: Q is packed");
    let mut packed = args();
    packed.seq.totals = Totals::packed(6, 10);
    assert_eq!(refusal(group, &packed), "cu_seqlens_q is missing: 12 bytes are wanted");

    let problem = problem.validate().unwrap();
    let elsewhere = check_fwd(&problem, &args(), Workspace::NONE, MemorySpace::Device).unwrap_err();
    assert_eq!(
        (elsewhere.field, elsewhere.text.as_str()),
        ("q", "q is in Host memory, not in Device memory")
    );
}

#[test]
fn an_output_over_an_input_or_another_output_is_refused() {
    let problem = FwdProblem::batch(DType::F32, DIMS);
    let over_v = changed(|args| args.o = output(0x30000 + 636, 192));
    assert!(refusal(problem.clone(), &over_v).starts_with("o (768 bytes at 0x3027c) overlaps v (640 bytes"));
    let mut with_lse = problem;
    with_lse.write_lse = true;
    let lse_in_o = args().lse(output(0x40000 + 4, 24));
    assert!(refusal(with_lse, &lse_in_o).contains("overlaps"));
    // One row of O lies between K's three rows. Its stride from row to row is unused, so it does not count as
    // overlap.
    let dims = Dims { batch: 1, seqlen_q: 1, seqlen_k: 3, num_heads_q: 1, num_heads_kv: 1, ..DIMS };
    let mut one_row = FwdProblem::batch(DType::F32, dims);
    one_row.strides.o.seq = 960;
    let in_k = changed(|args| args.o = output(0x20000 + 12 * 4, 8));
    assert!(refusal(one_row, &in_k).starts_with("o (32 bytes at 0x20030) overlaps k (96 bytes"));
}

#[test]
fn tensors_that_touch_end_to_end_share_no_byte() {
    let problem = FwdProblem::batch(DType::F32, DIMS).validate().unwrap();
    // O begins where K ends, and ends where V begins.
    let (k, o, v) = (0x20000, 0x20000 + 640, 0x20000 + 640 + 768);
    let touching = changed(|args| {
        args.k = input(k, 160).into();
        args.v = input(v, 160).into();
        args.o = output(o, 192);
    });
    check_fwd(&problem, &touching, Workspace::NONE, MemorySpace::Host).unwrap();
    for o in [o - 4, o + 4] {
        let over = changed(|args| {
            args.o = output(o, 192);
            args.k = input(k, 160).into();
            args.v = input(v, 160).into();
        });
        assert!(refusal((*problem).clone(), &over).contains("overlaps"));
    }
}

#[test]
fn tensors_of_unlike_types_or_batches_do_not_interleave() {
    // Rows lie 64 elements apart and have 32 elements each: in bytes, O's are twice as long as Q's.
    let dims = Dims { num_heads_kv: 4, ..DIMS };
    let rows = Strides { batch: 192, seq: 64, head: 8, dim: 1 };
    let types = FwdProblem::batch(DType::F16, dims).dtype_o(DType::F32).strides_q(rows).strides_o(rows);
    let behind = changed(|args| args.o = output(0x10000 + 128, 400));
    assert!(
        refusal(types, &behind).starts_with("o (1408 bytes at 0x10080) overlaps q (704 bytes at 0x10000)")
    );

    // Six rows of O follow the three of K's first sequence and overlap its second sequence.
    let dims = Dims { seqlen_k: 3, ..dims };
    let rows = Strides { batch: 320, seq: 96, head: 8, dim: 1 };
    let batches = FwdProblem::new(QLayout::Packed, KvLayout::Strided, DType::F32, dims);
    let batches = batches.clone().strides_k(rows).strides_o(rows);
    let mut behind = changed(|args| {
        args.o = output(0x20000 + 128, 600);
        args.k = input(0x20000, 600).into();
    });
    (behind.seq.totals.total_q, behind.seq.cu_seqlens_q) = (Some(6), Some(input(0x50000, 3)));
    behind.v = input(0x30000, 192).into();
    assert!(
        refusal(batches, &behind).starts_with("o (2048 bytes at 0x20080) overlaps k (2176 bytes at 0x20000)")
    );
}

/// An unused stride does not prevent interleaving.
#[test]
fn tensors_of_one_head_and_one_sequence_interleave_whatever_steps_between_others() {
    let dims = Dims { batch: 1, seqlen_q: 3, seqlen_k: 3, num_heads_q: 1, num_heads_kv: 1, ..DIMS };
    let problem = FwdProblem::batch(DType::F32, dims)
        .strides_k(Strides { batch: 5, seq: 16, head: 3, dim: 1 })
        .strides_o(Strides { batch: 999, seq: 16, head: 777, dim: 1 });
    let problem = problem.validate().unwrap();
    let between = |o| {
        changed(|args| {
            args.o = output(o, 40);
            args.k = input(0x20000, 40).into();
        })
    };
    let check = |args: &FwdArgs<'_>| check_fwd(&problem, args, Workspace::NONE, MemorySpace::Host);
    assert_eq!(check(&between(0x20000 + 32)), Ok(()));
    assert!(check(&between(0x20000 + 28)).unwrap_err().text.contains("overlaps"));
}

/// dQ, dK and dV in one buffer, with dK and dV at these element offsets from dQ. Rows of dQ lie `q_row`
/// elements apart, rows of dK and dV `kv_row`.
fn gradients(dims: Dims, [dk, dv]: [usize; 2], [q_row, kv_row]: [i64; 2]) -> Option<String> {
    let mut problem = BwdProblem::new(FwdProblem::batch(DType::F32, dims));
    let strides = |row| Strides { batch: 3 * row, seq: row, head: i64::from(dims.head_dim_qk), dim: 1 };
    (problem.dq, problem.dk, problem.dv) = (strides(q_row), strides(kv_row), strides(kv_row));
    let address = |elems: usize| 0x70000 + elems * 4;
    let mut args = bwd_args();
    (args.dq, args.dk, args.dv) =
        (output(address(0), 7000), output(address(dk), 600), output(address(dv), 600));
    let checked = check_bwd(&problem.validate().unwrap(), &args, Workspace::NONE, MemorySpace::Host);
    checked.err().map(|error| format!("{}: {}", error.field, error.text))
}

#[test]
fn gradients_may_interleave_in_one_packed_buffer_but_not_collide() {
    let dims = Dims { num_heads_kv: 4, seqlen_k: 3, ..DIMS };
    let collides = |dims, places, rows, [one, other]: [&str; 2]| {
        let found = gradients(dims, places, rows).unwrap();
        assert!(
            found.starts_with(one) && found.contains(&format!("overlaps {other} ")),
            "{places:?}: {found}"
        );
    };
    assert_eq!(gradients(dims, [32, 64], [96, 96]), None);
    collides(dims, [32, 63], [96, 96], ["dk", "dv"]);
    // The offsets place a row into dQ's next row.
    collides(dims, [32, 95], [96, 96], ["dq", "dv"]);
    // Two heads of dK lie after the first two of dQ's four heads.
    let grouped = Dims { num_heads_kv: 2, ..dims };
    collides(grouped, [16, 48], [64, 64], ["dq", "dk"]);
    // Narrow rows of dV lie inside dQ's rows, of one head.
    let narrow = Dims { num_heads_q: 1, num_heads_kv: 1, head_dim_v: 4, ..dims };
    collides(narrow, [200, 4], [8, 8], ["dq", "dv"]);
}

/// Layout of Q, K and V in one buffer: the buffer's axes from the outermost on, and the offsets of K and V.
struct Fused {
    name: &'static str,
    /// Strides of dQ. Those of dK and dV are equal, apart from the batch axis.
    strides: Strides,
    /// Offsets in elements of dK and dV from dQ.
    places: [usize; 2],
}

fn fused(dims: Dims) -> [Fused; 5] {
    let Dims { batch, seqlen_q: s, num_heads_q: hq, num_heads_kv: hkv, head_dim_qk: d, .. } = dims;
    let [b, s, hq, hkv, d] = [batch, s, hq, hkv, d].map(i64::from);
    let strides = |batch, seq, head| Strides { batch, seq, head, dim: 1 };
    let places = |k: i64, v: i64| [k as usize, v as usize];
    let all = hq + 2 * hkv;
    [
        Fused {
            name: "[b, s, hq + 2 hkv, d]",
            strides: strides(s * all * d, all * d, d),
            places: places(hq * d, (hq + hkv) * d),
        },
        Fused {
            name: "[b, hq + 2 hkv, s, d]",
            strides: strides(s * all * d, d, s * d),
            places: places(hq * s * d, (hq + hkv) * s * d),
        },
        Fused {
            name: "[s, b, (hq + 2 hkv) d]",
            strides: strides(all * d, b * all * d, d),
            places: places(hq * d, (hq + hkv) * d),
        },
        // Buffers of equal numbers of query and kv heads; for other numbers only the first heads are used.
        Fused {
            name: "[b, s, h, 3, d]",
            strides: strides(s * hq * 3 * d, hq * 3 * d, 3 * d),
            places: places(d, 2 * d),
        },
        Fused {
            name: "[s, b, h, 3 d]",
            strides: strides(hq * 3 * d, b * hq * 3 * d, 3 * d),
            places: places(d, 2 * d),
        },
    ]
}

#[test]
fn gradients_in_any_fused_buffer_are_apart_and_one_element_nearer_collide() {
    let small = Dims { seqlen_k: 3, ..DIMS };
    let large = Dims::batch(7).seqlens(4099, 4099).heads(48, 8).head_dim(128);
    let mha = |dims: Dims| Dims { num_heads_kv: dims.num_heads_q, ..dims };
    for dims in [small, mha(small), large, mha(large)] {
        for dtype in [DType::F32, DType::Bf16] {
            for Fused { name, strides, places } in fused(dims) {
                let mut problem = BwdProblem::new(FwdProblem::batch(dtype, dims));
                (problem.dq, problem.dk, problem.dv) = (strides, strides, strides);
                let problem = problem.validate().unwrap();
                let check = |[dk, dv]: [usize; 2]| {
                    let base = 0x1000_0000_0000;
                    let slice = |elems: usize| output(base + elems * dtype.size_bytes() as usize, 1 << 40);
                    let read = |nth: usize| input(nth << 40, 1 << 37);
                    let args = BwdArgs::new(
                        [1, 2, 3].map(read),
                        [4, 5, 6].map(read),
                        [slice(0), slice(dk), slice(dv)],
                    );
                    check_bwd(&problem, &args, Workspace::NONE, MemorySpace::Host)
                };
                assert_eq!(check(places), Ok(()), "{name} {dims:?}");
                let [dk, dv] = places;
                for near in [[dk - 1, dv], [dk, dv - 1], [dk, dk + 1]] {
                    let text = check(near).map_err(|error| error.text).unwrap_err();
                    assert!(text.contains("overlaps"), "{name} {dims:?} {near:?}: {text}");
                }
            }
        }
    }
}

/// An output may lie between rows of an input: in [b, s, hq + 2 hkv + hq, d] rows that are written and rows that
/// are read alternate.
#[test]
fn an_output_may_lie_between_the_rows_of_an_input() {
    let strides = Strides { batch: 3 * 96, seq: 96, head: 8, dim: 1 };
    let dims = Dims { seqlen_k: 3, ..DIMS };
    let problem = FwdProblem::batch(DType::F32, dims);
    let problem = problem.strides_q(strides).strides_k(strides).strides_v(strides).strides_o(strides);
    let checked = |o: usize| {
        let place = |elems: usize| 0x10000 + 4 * elems;
        let (q, k, v) = (input(place(0), 600), input(place(32), 600), input(place(48), 600));
        let args = FwdArgs::new(q, k, v, output(place(o), 600));
        let problem = problem.clone().validate().unwrap();
        check_fwd(&problem, &args, Workspace::NONE, MemorySpace::Host).map_err(|error| error.text)
    };
    assert_eq!(checked(64), Ok(()));
    assert!(checked(63).unwrap_err().contains("overlaps v "));
    assert!(checked(65).unwrap_err().contains("overlaps q "));
}

/// An append may write K and V whose rows alternate: a server's cache with K and V of a page side by side.
#[test]
fn an_append_may_write_keys_and_values_that_lie_in_turns() {
    let paged = KvLayout::Paged { page_size: 4 };
    let problem = FwdProblem::new(QLayout::Batch, paged, DType::F32, DIMS);
    let page = Strides { batch: 2 * 4 * 2 * 8, seq: 2 * 8, head: 8, dim: 1 };
    let append = Append::batch(&problem, 2);
    let problem = problem.strides_k(page).strides_v(page).seqused_k(true).append(append);
    let checked = |v: usize| {
        let (k, v) = (output(0x20000, 2000), output(0x20000 + 4 * v, 2000));
        let mut args = FwdArgs::new(input(0x10000, 192), k, v, output(0x40000, 192));
        args.seq.totals.num_pages = Some(9);
        args.seq.block_table = Some(BlockTable { pages: input(0x50000, 4), max_pages: 2 });
        args.seq.seqused_k = Some(input(0x51000, 2));
        args.cache.k_new = Some(input(0x52000, 64));
        args.cache.v_new = Some(input(0x53000, 64));
        let problem = problem.clone().validate().unwrap();
        check_fwd(&problem, &args, Workspace::NONE, MemorySpace::Host).map_err(|error| error.text)
    };
    assert_eq!(checked(64), Ok(()));
    assert!(checked(63).unwrap_err().contains("overlaps"));
}

#[test]
fn what_may_share_a_byte_and_would_take_too_long_to_know_is_refused_in_these_words() {
    let dims = Dims::batch(3000).seqlens(3000, 1).heads(1, 1).head_dim(1);
    let problem = FwdProblem::batch(DType::F32, dims)
        .strides_q(Strides { batch: 100_000_000_000_007, seq: 30_000_000_013, head: 0, dim: 1 })
        .strides_o(Strides { batch: 100_000_007_000_043, seq: 30_000_037_001, head: 0, dim: 1 });
    let at = |place: usize| input(place << 61, 1 << 59);
    let args = FwdArgs::new(at(1), at(2), at(3), output((1 << 61) + 4, 1 << 59));
    let text = refusal(problem, &args);
    assert!(
        text.starts_with("o (") && text.contains("lies between the first and the last byte of q ("),
        "{text}"
    );
    assert!(text.ends_with("is not searched out"), "{text}");
}

/// A tensor without elements shares no byte with others, and may lie inside another or at null.
#[test]
fn a_tensor_of_no_elements_may_lie_inside_another_or_nowhere() {
    let none = |address: usize| output(address, 0);
    let problem = FwdProblem::batch(DType::F32, Dims { seqlen_q: 0, ..DIMS });
    let problem = problem.write_lse(true).validate().unwrap();
    for address in [0, 0x20004] {
        let args = changed(|args| {
            args.q = input(address, 0);
            args.o = none(address);
            args.lse = Some(none(address));
        });
        assert_eq!(check_fwd(&problem, &args, Workspace::NONE, MemorySpace::Host), Ok(()));
    }
    let mut problem = BwdProblem::new(FwdProblem::batch(DType::F32, Dims { seqlen_q: 0, ..DIMS }));
    problem.has_dlse = true;
    let problem = problem.validate().unwrap();
    for address in [0, 0x72004] {
        let mut args = bwd_args().dlse(input(address, 0));
        (args.q, args.o, args.lse, args.dout) =
            (input(address, 0), input(address, 0), input(address, 0), input(address, 0));
        args.dq = none(address);
        assert_eq!(check_bwd(&problem, &args, Workspace::NONE, MemorySpace::Host), Ok(()));
    }
}

/// Totals of packed tensors are unknown to a plan, so checks that depend on them are made with the tensors.
#[test]
fn totals_are_checked_with_the_tensors_that_have_them() {
    let offsets = [0i32, 3, 6];
    let lengths = DevSlice::host(&offsets);
    let mut group = FwdProblem::group(DType::F32, DIMS);
    // Layout b·h·s·d with 6 rows: heads are 6 rows apart, even if the call has other row counts.
    group.strides.o = Strides { batch: 0, seq: 8, head: 6 * 8, dim: 1 };
    let packed = |totals| {
        let mut args = changed(|args| args.o = output(0x40000, 4000));
        (args.seq.totals, args.seq.cu_seqlens_q, args.seq.cu_seqlens_k) =
            (totals, Some(lengths), Some(lengths));
        args
    };
    let valid = group.clone().validate().unwrap();
    check_fwd(&valid, &packed(Totals::packed(6, 6)), Workspace::NONE, MemorySpace::Host).unwrap();
    let overlapping = refusal(group.clone(), &packed(Totals::packed(7, 6)));
    assert!(overlapping.starts_with("o strides") && overlapping.contains("one address"), "{overlapping}");
    let long = refusal(group.clone(), &packed(Totals::packed(6, 1000)));
    assert!(long.starts_with("k has 640 bytes, but its extents and strides reach"), "{long}");
    let huge = refusal(group, &packed(Totals::packed(1 << 31, 6)));
    assert_eq!(huge, "total_q 2147483648 is larger than 2147418112");

    let mut batch = args();
    batch.seq.totals = Totals::packed(6, 10);
    assert_eq!(
        refusal(FwdProblem::batch(DType::F32, DIMS), &batch),
        "total_q 6 is given, but it is not so that Q is packed"
    );
}

/// The size is that of 3 x 5 elements of f32.
#[test]
fn a_missing_bias_or_its_gradient_is_refused_with_the_bytes_that_it_takes() {
    let mut fwd = FwdProblem::batch(DType::F32, DIMS);
    let broadcast = BiasBroadcast::OneOne;
    let strides = Strides::bhsd(fwd.shape_bias(broadcast));
    fwd.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
    assert_eq!(refusal(fwd.clone(), &args()), "bias is missing: 60 bytes are wanted");
    let mut problem = BwdProblem::new(fwd);
    problem.dbias = Some(BiasGrad { dtype: DType::F32, strides });
    let mut args = bwd_args();
    args.score.bias = Some(input(0x80000, 15));
    let error = check_bwd(&problem.validate().unwrap(), &args, Workspace::NONE, MemorySpace::Host);
    assert_eq!(error.unwrap_err().text, "dbias is missing: 60 bytes are wanted");
}

/// Gradients' strides are checked with the totals too, since a plan has only the longest sequence's rows.
#[test]
fn totals_are_checked_with_the_gradients_that_have_them() {
    let mut group = BwdProblem::new(FwdProblem::group(DType::F32, DIMS));
    group.dq = Strides { batch: 0, seq: 8, head: 6 * 8, dim: 1 };
    let checked = |total_q| {
        let offsets = Some(input(0x80000, 3));
        let mut args = bwd_args();
        args.seq.totals = Totals::packed(total_q, 6);
        (args.seq.cu_seqlens_q, args.seq.cu_seqlens_k) = (offsets, offsets);
        let problem = group.clone().validate().unwrap();
        check_bwd(&problem, &args, Workspace::NONE, MemorySpace::Host).map_err(|error| error.text)
    };
    assert_eq!(checked(6), Ok(()));
    assert!(checked(7).unwrap_err().starts_with("dq strides"));
}

#[test]
fn a_slice_says_where_it_lies_and_how_large_it_is() {
    let mut elems = [1.0f32, 2.0, 3.0];
    let address = elems.as_mut_ptr().cast::<u8>();
    let read = DevSlice::host(&elems);
    assert_eq!((read.as_ptr(), read.bytes(), read.space()), (address.cast_const(), 12, MemorySpace::Host));
    assert_eq!(CacheSlice::from(read).space(), Some(MemorySpace::Host));
    let written = DevSliceMut::host(&mut elems);
    assert_eq!((written.as_mut_ptr(), written.bytes(), written.space()), (address, 12, MemorySpace::Host));
    assert_eq!((written.as_input().as_ptr(), written.as_input().bytes()), (address.cast_const(), 12));
    assert_eq!(CacheSlice::from(written).space(), Some(MemorySpace::Host));
    // SAFETY: nothing is written to it.
    let on_device = unsafe { DevSliceMut::from_raw(MemorySpace::Device, address, 12, DType::F32) };
    assert_eq!(CacheSlice::from(on_device).space(), Some(MemorySpace::Device));
    assert_eq!(CacheSlice::InK.space(), None);
}

#[test]
fn a_block_table_has_room_for_the_longest_sequence() {
    let table = [0i32; 4];
    let mut problem = FwdProblem::new(QLayout::Batch, KvLayout::Paged { page_size: 2 }, DType::F32, DIMS);
    let paged = |max_pages, num_pages| {
        let mut args = args();
        args.seq.totals.num_pages = num_pages;
        args.seq.block_table = Some(BlockTable { pages: DevSlice::host(&table), max_pages });
        args
    };
    assert_eq!(
        refusal(problem.clone(), &paged(2, Some(5))),
        "block_table has max_pages 2 of page_size 2: 4 keys, fewer than seqlen_k 5"
    );
    assert_eq!(
        refusal(problem.clone(), &paged(3, Some(5))),
        "block_table has 16 bytes, but its extents and strides reach 24"
    );
    assert!(refusal(problem.clone(), &paged(2, None)).starts_with("num_pages is missing"));
    let mut without = paged(3, Some(5));
    without.seq.block_table = None;
    assert_eq!(refusal(problem.clone(), &without), "block_table is missing: 8 bytes are wanted");
    problem.layout.kv = KvLayout::Strided;
    problem.strides.k = Strides::bshd(problem.shape_k());
    problem.strides.v = Strides::bshd(problem.shape_v());
    assert_eq!(refusal(problem, &paged(3, None)), "block_table is given, but the problem has none");
}

/// In a call without sequences, tensors with a batch axis have no elements, and may be given or not.
#[test]
fn of_no_sequences_nothing_is_missing_and_nothing_too_much() {
    let mut problem = FwdProblem::new(
        QLayout::Batch,
        KvLayout::Paged { page_size: 2 },
        DType::E4m3Fn,
        Dims { batch: 0, ..DIMS },
    )
    .dtype_o(DType::F16)
    .seqused_q(true)
    .seqused_k(true)
    .write_lse(true);
    problem.score.bias = Bias::Alibi { per_batch: true };
    problem.scales.descale_q = Descale::PerKvHead;
    problem.scales.descale_k = Descale::PerKvHead;
    problem.scales.descale_v = Descale::PerKvHead;
    let problem = problem.validate().unwrap();
    let nothing = || DevSlice::host::<u8>(&[]);
    let check = |args: FwdArgs<'_>| check_fwd(&problem, &args, Workspace::NONE, MemorySpace::Host);
    let bare = || {
        let mut args = FwdArgs::new(nothing(), nothing(), nothing(), DevSliceMut::host::<u8>(&mut []));
        args.seq.totals.num_pages = Some(0);
        args
    };
    check(bare()).unwrap();
    let mut given = bare().lse(DevSliceMut::host::<u8>(&mut []));
    given.seq.seqused_q = Some(nothing());
    given.seq.seqused_k = Some(nothing());
    given.seq.block_table = Some(BlockTable { pages: nothing(), max_pages: 3 });
    given.score.alibi_slopes = Some(nothing());
    given.score.descale_q = Some(nothing());
    given.score.descale_k = Some(nothing());
    given.score.descale_v = Some(nothing());
    check(given).unwrap();
    let mut sink = bare();
    sink.score.sink = Some(DevSlice::host(&[0f32; 4]));
    assert_eq!(check(sink).unwrap_err().text, "sink is given, but the problem has none");
}

#[test]
fn every_argument_is_aligned_to_its_elements() {
    let mut problem = FwdProblem::group(DType::F32, DIMS);
    problem.score.sink = true;
    problem.write_lse = true;
    problem.layout.seqused_q = true;
    problem.score.bias = Bias::Alibi { per_batch: false };
    let problem = problem.validate().unwrap();
    let workspace = Workspace { bytes: 512, zeroed_bytes: 4 };
    let fitting = || {
        let mut args = args();
        args.lse = Some(output(0x50000, 24));
        args.seq.totals = Totals::packed(6, 10);
        args.seq.cu_seqlens_q = Some(input(0x60000, 3));
        args.seq.cu_seqlens_k = Some(input(0x61000, 3));
        args.seq.seqused_q = Some(input(0x62000, 2));
        args.score.sink = Some(input(0x63000, 4));
        args.score.alibi_slopes = Some(input(0x64000, 4));
        args.workspace = Some(output(0x65000, 128));
        args
    };
    let check = |args: &FwdArgs<'_>| check_fwd(&problem, args, workspace, MemorySpace::Host);
    assert_eq!(check(&fitting()), Ok(()));
    type Crook = fn(&mut FwdArgs<'static>);
    let crooked: [(&str, Crook); 7] = [
        ("lse", |args| args.lse = Some(output(0x50001, 24))),
        ("cu_seqlens_q", |args| args.seq.cu_seqlens_q = Some(input(0x60002, 3))),
        ("cu_seqlens_k", |args| args.seq.cu_seqlens_k = Some(input(0x61003, 3))),
        ("seqused_q", |args| args.seq.seqused_q = Some(input(0x62001, 2))),
        ("sink", |args| args.score.sink = Some(input(0x63002, 4))),
        ("alibi_slopes", |args| args.score.alibi_slopes = Some(input(0x64002, 4))),
        ("workspace", |args| args.workspace = Some(output(0x65080, 128))),
    ];
    for (name, crook) in crooked {
        let mut args = fitting();
        crook(&mut args);
        let error = check(&args).unwrap_err();
        assert_eq!(error.field, name);
        assert!(error.text.contains("is aligned to"), "{error}");
    }
}

#[test]
fn a_workspace_is_there_where_it_is_wanted_and_shares_no_byte() {
    let problem = FwdProblem::batch(DType::F32, DIMS).validate().unwrap();
    let check = |args: &FwdArgs<'_>, wanted| check_fwd(&problem, args, wanted, MemorySpace::Host);
    let wanted = Workspace::zeroed(256);
    assert_eq!(check(&args(), wanted).unwrap_err().text, "workspace is missing: 256 bytes are wanted");
    let short = args().workspace(output(0x50000, 63));
    assert_eq!(check(&short, wanted).unwrap_err().field, "workspace");
    let over_q = args().workspace(output(0x10000, 64));
    assert!(check(&over_q, wanted).unwrap_err().text.contains("overlaps"));
    // A caller may give scratch to a plan that needs none.
    assert_eq!(check(&over_q, Workspace::NONE), Ok(()));
}

/// Packed queries, keys and new keys, a rotary embedding and a tree mask: every array that a cache's update reads.
fn update() -> FwdProblem {
    let problem = FwdProblem::group(DType::F32, Dims { head_dim_v: 4, ..DIMS });
    problem
        .clone()
        .seqused_q(true)
        .seqused_k(true)
        .append(Append::packed(&problem, 2))
        .rotary(Rotary { dim: 4, pairs: RotaryPairs::Half, max_pos: 16, dtype: DType::F32 })
        .tree_mask(true)
        .mask(MaskSpec::CAUSAL)
}

/// Arguments with six queries, ten keys and four new keys. Each slice is exactly as large as needed.
fn update_args() -> FwdArgs<'static> {
    let mut args =
        FwdArgs::new(input(0x10000, 192), output(0x20000, 160), output(0x30000, 80), output(0x40000, 96));
    args.seq.totals = Totals { total_new: Some(4), ..Totals::packed(6, 10) };
    args.seq.cu_seqlens_q = Some(input(0x50000, 3));
    args.seq.cu_seqlens_k = Some(input(0x51000, 3));
    args.seq.cu_seqlens_new = Some(input(0x52000, 3));
    args.seq.seqused_q = Some(input(0x53000, 2));
    args.seq.seqused_k = Some(input(0x54000, 2));
    args.cache.k_new = Some(input(0x55000, 64));
    args.cache.v_new = Some(input(0x56000, 32));
    args.cache.cos = Some(input(0x57000, 32));
    args.cache.sin = Some(input(0x58000, 32));
    args.cache.tree_mask = Some(input(0x59000, 6));
    args
}

#[test]
fn each_count_of_an_argument_is_checked_to_the_element() {
    let problem = update().validate().unwrap();
    check_fwd(&problem, &update_args(), Workspace::NONE, MemorySpace::Host).unwrap();
    type Take = for<'a> fn(&'a mut FwdArgs<'static>) -> &'a mut Option<DevSlice<'static>>;
    let counts: [(&str, u64, Take); 10] = [
        ("cu_seqlens_q", 3, |args| &mut args.seq.cu_seqlens_q),
        ("cu_seqlens_k", 3, |args| &mut args.seq.cu_seqlens_k),
        ("cu_seqlens_new", 3, |args| &mut args.seq.cu_seqlens_new),
        ("seqused_q", 2, |args| &mut args.seq.seqused_q),
        ("seqused_k", 2, |args| &mut args.seq.seqused_k),
        ("k_new", 64, |args| &mut args.cache.k_new),
        ("v_new", 32, |args| &mut args.cache.v_new),
        ("cos", 32, |args| &mut args.cache.cos),
        ("sin", 32, |args| &mut args.cache.sin),
        ("tree_mask", 6, |args| &mut args.cache.tree_mask),
    ];
    for (name, count, argument) in counts {
        let mut args = update_args();
        *argument(&mut args) = Some(input(0x60000, count - 1));
        let (has, wants) = (4 * (count - 1), 4 * count);
        let text = format!("{name} has {has} bytes, but its extents and strides reach {wants}");
        assert_eq!(refusal(update(), &args), text);

        let mut args = update_args();
        *argument(&mut args) = None;
        assert_eq!(refusal(update(), &args), format!("{name} is missing: {wants} bytes are wanted"));
    }
}

/// Bounds of the lengths do not bound packed rows: a smaller total puts the rows of a head closer together.
#[test]
fn heads_before_rows_have_room_for_as_many_rows_as_a_call_has() {
    let cu_seqlens = [0i32, 1, 2];
    let mut problem = FwdProblem::group(DType::F32, DIMS);
    problem.strides.o =
        Strides::bhsd(Shape { batch: 1, seq: 2, head: DIMS.num_heads_q, dim: DIMS.head_dim_v });
    let mut packed = args();
    packed.seq.totals = Totals::packed(2, 10);
    packed.seq.cu_seqlens_q = Some(DevSlice::host(&cu_seqlens));
    packed.seq.cu_seqlens_k = Some(DevSlice::host(&cu_seqlens));
    check_fwd(&problem.clone().validate().unwrap(), &packed, Workspace::NONE, MemorySpace::Host).unwrap();

    packed.seq.totals = Totals::packed(3, 10);
    let text = refusal(problem, &packed);
    assert!(
        text.starts_with("o strides") && text.contains("seq: 3") && text.contains("one address"),
        "{text}"
    );
}

#[test]
fn an_argument_of_an_update_that_the_problem_lacks_is_refused() {
    let plain = FwdProblem::batch(DType::F32, DIMS);
    type Add = fn(&mut FwdArgs<'static>);
    let added: [(&str, Add); 6] = [
        ("cu_seqlens_new", |args| args.seq.cu_seqlens_new = Some(input(0x50000, 3))),
        ("k_new", |args| args.cache.k_new = Some(input(0x50000, 64))),
        ("v_new", |args| args.cache.v_new = Some(input(0x50000, 64))),
        ("cos", |args| args.cache.cos = Some(input(0x50000, 32))),
        ("sin", |args| args.cache.sin = Some(input(0x50000, 32))),
        ("tree_mask", |args| args.cache.tree_mask = Some(input(0x50000, 6))),
    ];
    for (name, add) in added {
        let mut args = args();
        add(&mut args);
        assert_eq!(refusal(plain.clone(), &args), format!("{name} is given, but the problem has none"));
    }
    // New values are part of new keys if V lies in K.
    let in_k = plain
        .clone()
        .seqused_k(true)
        .v_in_k(true)
        .strides_v(plain.strides.k)
        .append(Append::batch(&plain, 2));
    let appended = |v_new| {
        let mut args = changed(|args| {
            args.k = output(0x20000, 160).into();
            args.v = CacheSlice::InK;
        });
        args.seq.seqused_k = Some(input(0x50000, 2));
        (args.cache.k_new, args.cache.v_new) = (Some(input(0x51000, 64)), v_new);
        args
    };
    let valid = in_k.clone().validate().unwrap();
    check_fwd(&valid, &appended(None), Workspace::NONE, MemorySpace::Host).unwrap();
    let both = appended(Some(input(0x52000, 64)));
    assert_eq!(refusal(in_k, &both), "v_new is given, but the problem has none");
}

#[test]
fn k_and_v_are_read_appended_to_or_in_ks_rows_as_the_problem_has_it() {
    let read = FwdProblem::batch(DType::F32, DIMS);
    let append = read.clone().seqused_k(true).append(Append::batch(&read, 2));
    let in_k = |problem: &FwdProblem| problem.clone().v_in_k(true).strides_v(problem.strides.k);
    let (read_in_k, append_in_k) = (in_k(&read), in_k(&append));
    let reads = |address| CacheSlice::from(input(address, 160));
    let appends = |address| CacheSlice::from(output(address, 160));
    let (k, v) = (0x20000, 0x30000);
    let table = [
        (&read, appends(k), reads(v), "k is not memory to read"),
        (&read, CacheSlice::InK, reads(v), "k is not memory to read"),
        (&read, reads(k), appends(v), "v is not memory to read"),
        (&read, reads(k), CacheSlice::InK, "v is not memory to read"),
        (&append, reads(k), appends(v), "k is not memory to append to"),
        (&append, appends(k), reads(v), "v is not memory to append to"),
        (&append, appends(k), CacheSlice::InK, "v is not memory to append to"),
        (&read_in_k, CacheSlice::InK, CacheSlice::InK, "k is not memory to read"),
        (&read_in_k, reads(k), reads(v), "v is not in K's rows"),
        (&read_in_k, reads(k), appends(v), "v is not in K's rows"),
        (&append_in_k, appends(k), reads(v), "v is not in K's rows"),
        (&append_in_k, appends(k), appends(v), "v is not in K's rows"),
    ];
    for (problem, k, v, wanted) in table {
        let mut args = changed(|args| {
            args.k = k;
            args.v = v;
        });
        args.seq.seqused_k = problem.layout.seqused_k.then(|| input(0x50000, 2));
        assert_eq!(refusal(problem.clone(), &args), format!("{wanted}, as the problem has it"));
    }
}

#[test]
fn combine_arguments_that_do_not_fit_are_named() {
    let rows = Shape { batch: 2, seq: 3, head: 4, dim: 8 };
    let problem = CombineProblem::new(2, DType::F32, DType::F32, rows).write_lse(true);
    let problem = problem.validate().unwrap();
    let part = |o, lse| PartialResult { o: input(0x10000, o), lse: input(0x20000, lse) };
    let check = |parts: &[PartialResult<'_>], o, lse| {
        let args = CombineArgs::new(parts, o).lse(lse);
        check_combine(&problem, &args, MemorySpace::Host).map_err(|error| error.text)
    };
    let lse = |elems| Some(output(0x40000, elems));
    let parts = [part(192, 24); 2];
    assert_eq!(check(&parts, output(0x30000, 192), lse(24)), Ok(()));
    let refused = |parts: &[PartialResult<'_>], o, lse, text: &str| {
        assert_eq!(check(parts, o, lse), Err(text.to_owned()));
    };
    let reach = |name: &str, has: u32| {
        format!("{name} has {has} bytes, but its extents and strides reach {}", has + 4)
    };
    refused(&parts[..1], output(0x30000, 192), lse(24), "parts: 1 given, but num_parts is 2");
    refused(&[parts[0], part(191, 24)], output(0x30000, 192), lse(24), &reach("parts.o", 764));
    refused(&[parts[0], part(192, 23)], output(0x30000, 192), lse(24), &reach("parts.lse", 92));
    refused(&parts, output(0x30000, 191), lse(24), &reach("o", 764));
    refused(&parts, output(0x30000, 192), lse(23), &reach("lse", 92));
    refused(&parts, output(0x30000, 192), None, "lse is missing: 96 bytes are wanted");
    let over = check(&parts, output(0x10000 + 4, 192), lse(24)).unwrap_err();
    assert!(over.starts_with("o (768 bytes at 0x10004) overlaps parts.o (768 bytes at 0x10000)"), "{over}");
}

#[test]
fn a_bias_is_bound_with_steps_of_zero_along_the_axes_that_it_lacks() {
    let strides = Strides { batch: 60, seq: 5, head: 15, dim: 1 };
    for (broadcast, batch, head) in [
        (BiasBroadcast::OneOne, 0, 0),
        (BiasBroadcast::OneHead, 0, 15),
        (BiasBroadcast::BatchOne, 60, 0),
        (BiasBroadcast::BatchHead, 60, 15),
    ] {
        let bias = Bias::Elementwise(ElementwiseBias { dtype: DType::F32, broadcast, strides });
        let problem = FwdProblem::batch(DType::F32, DIMS).bias(bias);
        let mut args = args();
        args.score.bias = Some(input(0x50000, 120));
        let bound = bind::fwd_params(&problem, &args).bias;
        assert_eq!((bound.data.0, bound.row, bound.dim), (0x50000, 5, 1));
        assert_eq!((bound.batch, bound.head), (batch, head), "{broadcast:?}");
    }
}

#[test]
fn a_slice_of_another_type_is_refused_by_its_name_and_both_types() {
    let dims = Dims::batch(1).seqlens(1, 1).heads(1, 1).head_dim(8);
    let problem = FwdProblem::batch(DType::Bf16, dims).write_lse(true).seqused_k(true);
    let problem = problem.validate().unwrap();
    let (wide, narrow, halves) = ([0f32; 8], [half::bf16::ZERO; 8], [half::f16::ZERO; 8]);
    let (used, words, mut o, mut lse) = ([1i32], [1u32], [half::bf16::ZERO; 8], [0f32; 1]);
    let said = |q: DevSlice<'_>, used: DevSlice<'_>, o: &mut [half::bf16], lse: DevSliceMut<'_>| {
        let other = DevSlice::host(&narrow);
        let mut args = FwdArgs::new(q, other, other, DevSliceMut::host(o)).lse(lse);
        args.seq.seqused_k = Some(used);
        check_fwd(&problem, &args, Workspace::NONE, MemorySpace::Host).map_err(|error| error.text)
    };
    let (q, i32s) = (DevSlice::host(&narrow), DevSlice::host(&used));
    assert_eq!(said(q, i32s, &mut o, DevSliceMut::host(&mut lse)), Ok(()));
    let text = |name, given, wanted| {
        Err(format!("{name} has elements of {given}, but the problem has it in {wanted}"))
    };
    let [wide, halves] = [DevSlice::host(&wide), DevSlice::host(&halves)];
    assert_eq!(said(wide, i32s, &mut o, DevSliceMut::host(&mut lse)), text("q", "f32", "bf16"));
    assert_eq!(said(halves, i32s, &mut o, DevSliceMut::host(&mut lse)), text("q", "f16", "bf16"));
    let u32s = DevSlice::host(&words);
    assert_eq!(said(q, u32s, &mut o, DevSliceMut::host(&mut lse)), text("seqused_k", "u32", "i32"));
    let mut ints = [0i32; 1];
    assert_eq!(said(q, i32s, &mut o, DevSliceMut::host(&mut ints)), text("lse", "i32", "f32"));
    // Bytes have no type until a caller sets one. The type then stays, except for the sign of words.
    let bytes = DevSlice::host(&[0u8; 16]);
    assert_eq!(said(bytes, i32s, &mut o, DevSliceMut::host(&mut lse)), Ok(()));
    assert_eq!(said(q, u32s.typed(ElemType::I32), &mut o, DevSliceMut::host(&mut lse)), Ok(()));
    for told in [ElemType::Bytes, DType::Bf16.into()] {
        assert_eq!(
            said(wide.typed(told), i32s, &mut o, DevSliceMut::host(&mut lse)),
            text("q", "f32", "bf16")
        );
    }
    // SAFETY: host memory of 16 bytes that lives.
    let raw = unsafe { DevSlice::from_raw(MemorySpace::Host, bytes.as_ptr(), 16, DType::F16) };
    assert_eq!(said(raw, i32s, &mut o, DevSliceMut::host(&mut lse)), text("q", "f16", "bf16"));
    let fp8 = bytes.typed(DType::E4m3Fn);
    assert_eq!(said(fp8, i32s, &mut o, DevSliceMut::host(&mut lse)), text("q", "e4m3fn", "bf16"));
}

#[test]
fn a_call_that_drops_names_its_seed() {
    let problem = FwdProblem::batch(DType::F32, DIMS);
    let dropping = problem.clone().p_drop(0.25);
    let missing = "dropout has no seed, but p_drop is 0.25: calls without one would drop alike";
    assert_eq!(refusal(dropping.clone(), &args()), missing);
    let seeded = changed(|args| args.score.dropout = Some(DropoutSeed::default()));
    for (problem, args) in [(problem, &args()), (dropping.clone(), &seeded)] {
        check_fwd(&problem.validate().unwrap(), args, Workspace::NONE, MemorySpace::Host).unwrap();
    }
    let backward = BwdProblem::new(dropping.write_lse(true)).validate().unwrap();
    let said = |args: &BwdArgs<'_>| {
        check_bwd(&backward, args, Workspace::NONE, MemorySpace::Host).map_err(|error| error.text)
    };
    let mut args = bwd_args();
    assert_eq!(said(&args), Err(missing.to_owned()));
    args.score.dropout = Some(DropoutSeed { seed: 1, offset: 2 });
    assert_eq!(said(&args), Ok(()));
}
