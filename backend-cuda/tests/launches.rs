//! Launches of a run, on the test double of the driver. If a tensor has no rows, kernels without work are not launched;
//! if the chosen kernel does not accept an operand's address, the fallback is launched. Needs NVRTC; without it a test
//! prints `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use fmha_core::{
    Bias, BiasBroadcast, BiasGrad, BwdArgs, BwdPlan, BwdProblem, DType, DevBuffer, DevSlice, DevSliceMut,
    Device, Dims, ElementwiseBias, FwdArgs, FwdProblem, PlanOptions, Shape, Strides, Totals,
};
use fmha_cuda::emulated_launches;

/// The emulated device, for one test at a time, because the double's list of launches is shared.
fn device() -> Option<(Device, MutexGuard<'static, ()>)> {
    static ONE: Mutex<()> = Mutex::new(());
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        println!("absent: {reason}");
        return None;
    }
    let turn = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    Some((fmha_cuda::open(0, Some("sm_90a")).unwrap(), turn))
}

fn of_lengths([seqlen_q, seqlen_k]: [u32; 2], num_heads_kv: u32, mask: &str) -> FwdProblem {
    let dims =
        Dims { batch: 1, seqlen_q, seqlen_k, num_heads_q: 2, num_heads_kv, head_dim_qk: 64, head_dim_v: 64 };
    FwdProblem::batch(DType::Bf16, dims).mask(mask.parse().unwrap()).write_lse(true)
}

/// A backward problem with dBias for each head, whose rows are 8 elements longer than the number of keys.
fn with_dbias(fwd: &FwdProblem) -> BwdProblem {
    let (rows, row) = (i64::from(fwd.dims.seqlen_q), i64::from(fwd.dims.seqlen_k) + 8);
    let strides = Strides { batch: 0, head: rows * row, seq: row, dim: 1 };
    let bias = ElementwiseBias { dtype: DType::Bf16, broadcast: BiasBroadcast::OneHead, strides };
    let mut problem = BwdProblem::new(fwd.clone().bias(Bias::Elementwise(bias)));
    problem.dbias = Some(BiasGrad { dtype: DType::Bf16, strides });
    problem
}

/// A buffer of zeros in which operands begin at offset `off` bytes.
struct Room {
    buffer: DevBuffer,
    off: u64,
}

impl Room {
    fn new(backend: &Device, bytes: u64, off: u64) -> Self {
        let mut buffer = backend.memory().alloc(bytes + off + 64).unwrap();
        backend.memory().upload(&vec![0u8; (bytes + off) as usize], &mut buffer).unwrap();
        Self { buffer, off }
    }

    fn bytes(&self) -> u64 {
        self.buffer.bytes() - self.off
    }

    fn read(&self) -> DevSlice<'_> {
        let first = self.buffer.as_ptr().wrapping_add(self.off as usize);
        // SAFETY: within the buffer.
        unsafe {
            DevSlice::from_raw(
                fmha_core::MemorySpace::Device,
                first,
                self.bytes(),
                fmha_core::ElemType::Bytes,
            )
        }
    }

    fn written(&mut self) -> DevSliceMut<'_> {
        let first = self.buffer.as_ptr().wrapping_add(self.off as usize);
        // SAFETY: within the buffer, which is borrowed.
        unsafe {
            DevSliceMut::from_raw(
                fmha_core::MemorySpace::Device,
                first,
                self.bytes(),
                fmha_core::ElemType::Bytes,
            )
        }
    }
}

/// Launches of a backward run whose Q lies `off` bytes after a multiple of 16.
fn launches_of(backend: &Device, plan: &BwdPlan, off: u64) -> usize {
    let problem = plan.problem();
    let fwd = &problem.fwd;
    let room = |elems: u64| Room::new(backend, elems * 4, 0);
    let extents = fwd.extents(Totals::NONE);
    let [q, k, v, o] = [extents.q, extents.k, extents.v, extents.o].map(Shape::num_elems);
    let q_room = Room::new(backend, q * 2, off);
    let [k_room, v_room, o_room, dout] = [k, v, o, o].map(room);
    let [mut dq, mut dk, mut dv] = [q, k, v].map(room);
    let lse = room(extents.lse_elems);
    let bias_elems = match fwd.score.bias {
        Bias::Elementwise(bias) => (bias.strides.head * 2).unsigned_abs(),
        _ => 0,
    };
    let (bias, mut dbias) = (room(bias_elems), room(bias_elems));
    let mut workspace = backend.memory().workspace(plan.workspace()).unwrap();
    let mut args = BwdArgs::new(
        [q_room.read(), k_room.read(), v_room.read()],
        [o_room.read(), lse.read(), dout.read()],
        [dq.written(), dk.written(), dv.written()],
    )
    .dbias(problem.dbias.map(|_| dbias.written()))
    .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
    args.score.bias = problem.dbias.map(|_| bias.read());
    let _ = emulated_launches();
    plan.run(&mut args, &backend.default_stream()).unwrap();
    backend.synchronize().unwrap();
    count()
}

/// Number of launches since the last call.
fn count() -> usize {
    emulated_launches().unwrap().matches("\"kernel\"").count()
}

#[test]
fn a_backward_launches_what_has_rows_to_work_on() {
    let Some((backend, _turn)) = device() else { return };
    for (what, problem, kernels, launched) in [
        // The launches: before the main kernel, the main kernel, the one that finishes dQ (which so short a call
        // needs), and with masked blocks the repair.
        ("all", BwdProblem::new(of_lengths([16, 16], 2, "b")), 4, 4),
        ("a bias", with_dbias(&of_lengths([16, 16], 2, "0")), 4, 4),
        // Without queries the main kernel writes dK and dV as zeros, and no launch finishes dQ.
        ("no queries", BwdProblem::new(of_lengths([0, 16], 1, "b")), 4, 1),
        // Without keys only dQ is written, as zeros.
        ("no keys", BwdProblem::new(of_lengths([16, 0], 1, "b")), 4, 3),
        ("no keys of a bias", with_dbias(&of_lengths([16, 0], 2, "0")), 4, 2),
    ] {
        let options = PlanOptions::default().kernel("sm90");
        let plan = backend.plan_bwd(&problem.validate().unwrap(), &options).unwrap();
        assert_eq!(plan.steps().len(), kernels, "{what}: {plan}");
        assert_eq!(launches_of(&backend, &plan, 0), launched, "{what}");
    }
}

/// The fallback computes operands at addresses that the chosen kernel does not accept. Its plan is equal except for the
/// tile, which the fallback lacks.
#[test]
fn operands_that_lie_where_the_kernel_does_not_take_them_are_the_fallbacks() {
    let Some((backend, _turn)) = device() else { return };
    let fwd = of_lengths([16, 16], 2, "b").validate().unwrap();
    let bwd = BwdProblem::new(FwdProblem::clone(&fwd)).validate().unwrap();
    let tile = |knob: &str| vec![(knob.to_owned(), "0".to_owned())];
    let with = |tile, allow_fallback| PlanOptions::default().tile(tile).allow_fallback(allow_fallback);
    let simt = |allow_fallback| with(Vec::new(), allow_fallback).kernel("simt");
    let tells = |details: &[(&str, String)]| details.iter().any(|(name, _)| *name == "unaligned operands");
    for (options, told) in
        [(with(tile("pack_gqa"), true), true), (with(Vec::new(), false), false), (simt(true), false)]
    {
        let plan = backend.plan_fwd(&fwd, &options).unwrap();
        assert_eq!(tells(plan.details()), told, "{plan}");
    }
    for (options, told) in
        [(with(tile("edges_apart"), true), true), (with(Vec::new(), false), false), (simt(true), false)]
    {
        let plan = backend.plan_bwd(&bwd, &options).unwrap();
        assert_eq!(tells(plan.details()), told, "{plan}");
    }

    let plan = backend.plan_bwd(&bwd, &with(tile("edges_apart"), true)).unwrap();
    assert_eq!(plan.kernel(), "sm90");
    assert_eq!([0, 2].map(|off| launches_of(&backend, &plan, off)), [4, 2]);

    let plan = backend.plan_fwd(&fwd, &with(tile("pack_gqa"), true)).unwrap();
    assert_eq!(plan.kernel(), "sm90");
    let room = |off| Room::new(&backend, 16 * 2 * 64 * 2, off);
    let (q, k, v, mut o, mut lse) = (room(2), room(0), room(0), room(0), room(0));
    let mut workspace = backend.memory().workspace(plan.workspace()).unwrap();
    let mut args = FwdArgs::new(q.read(), k.read(), v.read(), o.written());
    args.lse = Some(lse.written());
    args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
    plan.run(&mut args, &backend.default_stream()).unwrap();
    backend.synchronize().unwrap();
    assert_eq!(count(), 1);
}
