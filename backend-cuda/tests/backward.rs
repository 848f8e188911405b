//! Backward on the test double of the driver, against the definition. Needs NVRTC; without it a test prints
//! `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use fmha_core::reference::{Backward, Precision, backward, forward};
use fmha_core::{
    BwdArgs, BwdProblem, DType, DevBuffer, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem,
    PlanOptions, ScoreSums, SeqArgs, SeqSpan, Shape, Strides, Totals,
};
use half::bf16;

fn device() -> Option<Device> {
    match fmha_cuda::nvrtc::nvrtc() {
        Ok(_) => Some(fmha_cuda::open(0, Some("sm_90a")).unwrap()),
        Err(reason) => {
            println!("absent: {reason}");
            None
        }
    }
}

const DIMS: Dims = Dims::batch(1).seqlens(150, 150).heads(2, 1).head_dim(64);

fn problem(mask: &str, dims: Dims) -> BwdProblem {
    BwdProblem::new(FwdProblem::batch(DType::Bf16, dims).mask(mask.parse().unwrap()).write_lse(true))
}

/// Lengths of packed sequences, and the number of unused rows behind each.
#[derive(Clone, Copy, Default)]
struct Packed<'a> {
    lengths: &'a [(i32, i32)],
}

/// Operands in host memory.
struct Host {
    problem: BwdProblem,
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    o: Vec<bf16>,
    lse: Vec<f32>,
    dout: Vec<bf16>,
    cu: Option<[Vec<i32>; 2]>,
    totals: Totals,
}

fn noise(elems: u64, salt: u64) -> Vec<bf16> {
    let word = |i: u64| (i + salt).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    (0..elems).map(|i| bf16::from_f64(word(i) as f64 / f64::from(1 << 23) - 1.0)).collect()
}

impl Host {
    /// Makes random operands. `spoil` changes Q, K, V and dO before O and LSE are computed from them.
    fn new(problem: BwdProblem, packed: Packed<'_>, spoil: impl Fn([&mut [bf16]; 4])) -> Self {
        let (mut cu, mut totals) = (None, Totals::NONE);
        if !packed.lengths.is_empty() {
            let sums = |of: fn(&(i32, i32)) -> i32| {
                let mut sum = 0;
                std::iter::once(0)
                    .chain(packed.lengths.iter().map(|length| {
                        sum += of(length);
                        sum
                    }))
                    .collect::<Vec<i32>>()
            };
            let (q, k) = (sums(|l| l.0), sums(|l| l.1));
            totals = Totals::packed(*q.last().unwrap() as u32, *k.last().unwrap() as u32);
            cu = Some([q, k]);
        }
        let extents = problem.fwd.extents(totals);
        let elems = |shape: Shape| shape.num_elems();
        let mut host = Self {
            q: noise(elems(extents.q), 1),
            k: noise(elems(extents.k), 1 << 40),
            v: noise(elems(extents.v), 2 << 40),
            dout: noise(elems(extents.o), 3 << 40),
            o: vec![bf16::ZERO; elems(extents.o) as usize],
            lse: vec![0.0; extents.lse_elems as usize],
            cu,
            totals,
            problem,
        };
        spoil([&mut host.q, &mut host.k, &mut host.v, &mut host.dout]);
        host.attend();
        host
    }

    fn seq(&self) -> SeqArgs<'_> {
        let mut seq = SeqArgs::default().totals(self.totals);
        if let Some([q, k]) = &self.cu {
            (seq.cu_seqlens_q, seq.cu_seqlens_k) = (Some(DevSlice::host(q)), Some(DevSlice::host(k)));
        }
        seq
    }

    fn attend(&mut self) {
        let fwd = &self.problem.fwd;
        let mut unused = vec![bf16::ZERO; self.o.len()];
        let mut args = FwdArgs::new(
            DevSlice::host(&self.q),
            DevSlice::host(&self.k),
            DevSlice::host(&self.v),
            DevSliceMut::host(&mut unused),
        );
        args.seq = self.seq();
        for head in forward(fwd, &args, Precision::Exact).unwrap() {
            let dim = fwd.dims.head_dim_v;
            for (at, &o) in head.o.iter().enumerate() {
                let (i, d) = (at as u32 / dim, at as u32 % dim);
                let offset = fwd.strides.o.offset(head.span.q_batch, head.span.q_row + i, head.i_head, d);
                self.o[offset as usize] = bf16::from_f64(o);
            }
            for (i, &lse) in head.lse.iter().enumerate() {
                let at = lse_index(fwd, self.totals, &head.span, head.i_head, i as u32);
                self.lse[at] = lse as f32;
            }
        }
    }

    fn reference(&self, precision: Precision) -> Backward {
        let mut grads = [self.q.clone(), self.k.clone(), self.v.clone()];
        let [dq, dk, dv] = &mut grads;
        let args = BwdArgs::new(
            [DevSlice::host(&self.q), DevSlice::host(&self.k), DevSlice::host(&self.v)],
            [DevSlice::host(&self.o), DevSlice::host(&self.lse), DevSlice::host(&self.dout)],
            [DevSliceMut::host(dq), DevSliceMut::host(dk), DevSliceMut::host(dv)],
        )
        .seq(self.seq());
        backward(&self.problem.clone().validate().unwrap(), &args, precision).unwrap()
    }

    /// dQ, dK and dV as the kernel computes them.
    fn run(&self, backend: &Device, options: &PlanOptions) -> [Vec<bf16>; 3] {
        self.run_in(backend, options, bf16::NAN)
    }

    /// Runs the kernel with gradients of type `T`, which is the problem's `dtype_grad`.
    fn run_in<T: bytemuck::Pod>(&self, backend: &Device, options: &PlanOptions, before: T) -> [Vec<T>; 3] {
        let plan = backend.plan_bwd(&self.problem.clone().validate().unwrap(), options).unwrap();
        let memory = backend.memory();
        let up = |bytes: &[u8]| {
            let mut buffer = memory.alloc(bytes.len().max(1) as u64).unwrap();
            memory.upload(bytes, &mut buffer).unwrap();
            buffer
        };
        let tensor = |elems: &[bf16]| up(bytemuck::cast_slice(elems));
        // Outputs hold NaN before the call, so that elements that are not written are found.
        let nan = |elems: usize| up(bytemuck::cast_slice(&vec![before; elems]));
        let (q, k, v, o, dout) =
            (tensor(&self.q), tensor(&self.k), tensor(&self.v), tensor(&self.o), tensor(&self.dout));
        let lse = up(bytemuck::cast_slice(&self.lse));
        let cu = self.cu.as_ref().map(|cu| cu.each_ref().map(|cu| up(bytemuck::cast_slice(cu))));
        let mut grads = [nan(self.q.len()), nan(self.k.len()), nan(self.v.len())];
        let mut workspace = memory.workspace(plan.workspace()).unwrap();
        if let Some(workspace) = &mut workspace {
            memory.upload(&vec![0xffu8; workspace.bytes() as usize], workspace).unwrap();
        }
        let [dq, dk, dv] = &mut grads;
        let mut seq = SeqArgs::default().totals(self.totals);
        if let Some([q, k]) = &cu {
            (seq.cu_seqlens_q, seq.cu_seqlens_k) = (Some(q.slice()), Some(k.slice()));
        }
        let mut args = BwdArgs::new(
            [q.slice(), k.slice(), v.slice()],
            [o.slice(), lse.slice(), dout.slice()],
            [dq.slice_mut(), dk.slice_mut(), dv.slice_mut()],
        )
        .seq(seq)
        .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
        plan.run(&mut args, &backend.default_stream()).unwrap();
        backend.synchronize().unwrap();
        let lengths = [self.q.len(), self.k.len(), self.v.len()];
        let mut index = 0;
        grads.map(|buffer| {
            let mut elems = vec![before; lengths[index]];
            index += 1;
            memory.download(&buffer, bytemuck::cast_slice_mut::<T, u8>(&mut elems)).unwrap();
            elems
        })
    }

    /// Checks the contract's error bound for every gradient element; NaN must be exactly where the definition has
    /// it.
    fn check(&self, got: &[Vec<bf16>; 3], what: &str) {
        let (exact, same) =
            (self.reference(Precision::Exact), self.reference(Precision::AsInput(ScoreSums::F32)));
        let fwd = &self.problem.fwd;
        let dims = fwd.dims;
        type Rows = Vec<(SeqSpan, u32, Vec<f64>)>;
        let tensors: [(&str, &Rows, &Rows, Strides, bool, u32); 3] = [
            ("dq", &exact.dq, &same.dq, self.problem.dq, true, dims.head_dim_qk),
            ("dk", &exact.dk, &same.dk, self.problem.dk, false, dims.head_dim_qk),
            ("dv", &exact.dv, &same.dv, self.problem.dv, false, dims.head_dim_v),
        ];
        for ((name, exact, same, strides, of_queries, dim), got) in tensors.into_iter().zip(got) {
            let (mut worst, mut worst_same, mut largest) = (0f64, 0f64, 0f64);
            for ((span, head, exact), (_, _, same)) in exact.iter().zip(same) {
                for (at, (&want, &same)) in exact.iter().zip(same).enumerate() {
                    let (row, d) = (at as u32 / dim, at as u32 % dim);
                    let (batch, row) = if of_queries {
                        (span.q_batch, span.q_row + row)
                    } else {
                        (span.k_batch, span.k_row + row)
                    };
                    let got = got[strides.offset(batch, row, *head, d) as usize].to_f64();
                    assert_eq!(got.is_nan(), want.is_nan(), "{what}: {name} row {row} head {head} dim {d}");
                    if want.is_finite() {
                        worst = worst.max((got - want).abs());
                        worst_same = worst_same.max((same - want).abs());
                        largest = largest.max(want.abs());
                    }
                }
            }
            let bound = 3.0 * worst_same + largest * 2f64.powi(-8);
            assert!(worst <= bound, "{what}: {name} is off by {worst}, beyond {bound}");
        }
    }
}

fn lse_index(fwd: &FwdProblem, totals: Totals, span: &SeqSpan, i_head: u32, i: u32) -> usize {
    let rows = totals.total_q.unwrap_or(fwd.dims.seqlen_q);
    ((span.q_batch * fwd.dims.num_heads_q + i_head) * rows + span.q_row + i) as usize
}

fn with(tile: &str) -> PlanOptions {
    let pairs = tile.split(',').filter_map(|pair| pair.split_once('='));
    PlanOptions::default().kernel("sm90").tile(pairs)
}

const TILES: [&str; 4] = [
    "walk=in_order,persistent=0,dq_path=store_warp",
    "walk=early_scores,stages_q=3,head_parts=0,dq_path=store_warp",
    "walk=early_scores,persistent=1",
    "walk=in_order,edges_apart=1,head_parts=0",
];

#[test]
fn every_order_of_products_keeps_the_rule_under_every_kind_of_mask() {
    // This test runs masks whose number has one or three bits set: half of the masks run with each of `TILES`.
    keep_the_rule(|n| n.count_ones() % 2 == 1);
}

#[test]
#[ignore = "each mask once more, in one order or in any: cargo xtask test --all"]
fn every_order_of_products_keeps_the_rule_in_the_other_order_of_sums() {
    keep_the_rule(|n| n.count_ones() % 2 == 0);
}

/// Runs every mask `n`, with deterministic sums for those that `deterministic` selects.
fn keep_the_rule(deterministic: fn(usize) -> bool) {
    let Some(backend) = device() else { return };
    let wide = Dims { head_dim_qk: 128, head_dim_v: 72, seqlen_q: 70, ..DIMS };
    let split = Dims { head_dim_qk: 136, head_dim_v: 200, seqlen_q: 100, ..DIMS };
    // Two masks show no pair, or sink columns alone, although blocks touch the band.
    let narrow = Dims { seqlen_q: 20, ..DIMS };
    let masks = [
        ("0", DIMS),
        ("b", DIMS),
        ("b:40,9", wide),
        ("t:5,0,3", wide),
        ("g:1,-30", narrow),
        ("g:-30,1,2", narrow),
        ("b", split),
    ];
    for (n, (mask, dims)) in masks.into_iter().enumerate() {
        let deterministic = deterministic(n);
        // A fixed order of sums exists up to head dimension 128 for these tiles.
        let tile = if dims == split { "stages_ds=1" } else { TILES[(n + usize::from(deterministic)) % 4] };
        let host = Host::new(problem(mask, dims), Packed::default(), |_| ());
        let what = format!("mask {mask}, deterministic {deterministic}, {tile}");
        let options = with(tile).deterministic(deterministic);
        host.check(&host.run(&backend, &options), &what);
    }
}

#[test]
fn a_field_that_another_leaves_no_room_for_is_refused() {
    let Some(backend) = device() else { return };
    let plan = |tile: &str| backend.plan_bwd(&problem("b", DIMS).validate().unwrap(), &with(tile));
    for tile in ["dq_path=registers", "dq_path=first_stores,dq_finish=beside"] {
        assert!(plan(tile).is_ok(), "{tile}: {}", plan(tile).err().unwrap());
    }
    let refused = plan("dq_path=registers,dq_finish=beside").err().map(|error| error.to_string());
    assert!(
        refused.as_ref().is_some_and(|text| text.contains("dq_finish beside: not with dq_path registers")),
        "{refused:?}"
    );
}

#[test]
fn packed_sequences_are_apart_and_rows_of_empty_ones_are_zeros() {
    let Some(backend) = device() else { return };
    let lengths = [(9, 0), (0, 6), (70, 140), (1, 1)];
    let dims = Dims { batch: 4, seqlen_q: 70, seqlen_k: 140, ..DIMS };
    let packed =
        BwdProblem::new(FwdProblem::group(DType::Bf16, dims).mask("b".parse().unwrap()).write_lse(true));
    for deterministic in [false, true] {
        // Unless rows are zeroed, the first row of the last sequence would read into the sequence before it.
        let host = Host::new(packed.clone(), Packed { lengths: &lengths }, |[q, _, _, dout]| {
            let row = 79 * 2 * 64;
            q[row] = bf16::NAN;
            dout[row + 1] = bf16::INFINITY;
        });
        let options = with(TILES[2]).deterministic(deterministic);
        host.check(&host.run(&backend, &options), "packed");
    }
}

/// A deterministic packed sequence has equal bits alone and beside others. Each kv head is split into a number of
/// parts that depends on the sequence's queries (`num_head_parts`): here one in the first sequence, two in the
/// second, four in the last.
#[test]
fn a_deterministic_packed_sequence_has_the_same_bits_beside_a_long_one() {
    let Some(backend) = device() else { return };
    let long = (1100, 70);
    let of = |lengths: &[(i32, i32)], parts: &str| {
        let longest = |of: fn(&(i32, i32)) -> i32| lengths.iter().map(of).max().unwrap() as u32;
        let dims = Dims {
            batch: lengths.len() as u32,
            seqlen_q: longest(|l| l.0),
            seqlen_k: longest(|l| l.1),
            num_heads_q: 4,
            ..DIMS
        };
        let fwd = FwdProblem::group(DType::Bf16, dims).mask("b".parse().unwrap()).write_lse(true);
        let host =
            Host::new(BwdProblem::new(fwd).dtype_grad(DType::F32), Packed { lengths }, |[q, k, _, _]| {
                // Larger numbers give sums whose rounding depends on their order.
                q.iter_mut().chain(k).for_each(|x| *x = bf16::from_f32(x.to_f32() * 3.0));
            });
        let options = PlanOptions::default().kernel("sm90").deterministic(true);
        let plan = backend.plan_bwd(&host.problem.clone().validate().unwrap(), &options).unwrap();
        let said =
            plan.details().iter().find(|detail| detail.0 == "query heads").map(|detail| detail.1.clone());
        assert_eq!(said.unwrap_or_default(), parts);
        let [dq, dk, dv] = host.run_in(&backend, &options, f32::NAN);
        let (queries, keys) = (lengths[0].0 as usize * 4 * 64, lengths[0].1 as usize * 64);
        [&dq[..queries], &dk[..keys], &dv[..keys]]
            .map(|rows| rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    };
    for (own, parts) in [((70, 400), ""), ((300, 140), "4 of a kv head shared by 2 tiles")] {
        let (alone, beside) = (of(&[own], parts), of(&[own, long], "4 of a kv head shared by 4 tiles"));
        for (name, (alone, beside)) in ["dq", "dk", "dv"].iter().zip(alone.iter().zip(&beside)) {
            let differing = alone.iter().zip(beside).filter(|(a, b)| a != b).count();
            assert_eq!(differing, 0, "{name} of {own:?}: of {} numbers", alone.len());
        }
    }
}

#[test]
fn infinities_and_nan_reach_only_rows_that_see_them() {
    let Some(backend) = device() else { return };
    for (kernel, dim) in [("sm90", 64), ("sm90", 160), ("simt", 64)] {
        let dims = Dims { head_dim_qk: dim as u32, head_dim_v: dim as u32, ..DIMS };
        let host = Host::new(problem("b", dims), Packed::default(), |[q, k, _, dout]| {
            k[140 * dim + dim - 1] = bf16::NAN; // seen by the last ten queries alone
            q[2 * dim * 2] = bf16::INFINITY; // sees the first three keys alone
            dout[5 * dim * 2 + 7] = bf16::NAN;
        });
        let options = PlanOptions::default().kernel(kernel.to_owned());
        host.check(&host.run(&backend, &options), kernel);
    }
}
