//! Tensors that are slices of one buffer: every backend must give the same bits as for separate tensors.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use fmha_core::{
    BwdArgs, BwdProblem, DType, DevBuffer, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem,
    PlanOptions, Shape, Strides,
};
use half::bf16;

const DIMS: Dims = Dims::batch(2).seqlens(24, 24).heads(4, 2).head_dim(64);
const HEADS: i64 = 4 + 2 + 2;
/// More elements than any of the buffers has.
const ELEMS: usize = 2 * 24 * 4 * 3 * 64;

/// Offsets of Q, K, V (or their gradients) and O (or dO) in one buffer of bf16, and their strides.
struct Layout {
    name: &'static str,
    dims: Dims,
    strides: Strides,
    places: [usize; 3],
}

fn layouts() -> [Layout; 3] {
    let mha = Dims { num_heads_kv: 4, ..DIMS };
    [
        Layout {
            name: "[b, s, hq + 2 hkv, d]",
            dims: DIMS,
            strides: Strides { batch: 24 * HEADS * 64, seq: HEADS * 64, head: 64, dim: 1 },
            places: [0, 4 * 64, 6 * 64],
        },
        Layout {
            name: "[b, s, h, 3, d]",
            dims: mha,
            strides: Strides { batch: 24 * 4 * 3 * 64, seq: 4 * 3 * 64, head: 3 * 64, dim: 1 },
            places: [0, 64, 2 * 64],
        },
        Layout {
            name: "[s, b, h, 3 d]",
            dims: mha,
            strides: Strides { batch: 4 * 3 * 64, seq: 2 * 4 * 3 * 64, head: 3 * 64, dim: 1 },
            places: [0, 64, 2 * 64],
        },
    ]
}

/// Memory of a backend: four buffers of bf16, and one of f32 for LSE.
struct Memory<'a> {
    backend: &'a Device,
    buffer: DevBuffer,
}

impl Memory<'_> {
    fn address(&self, elems: usize) -> *mut u8 {
        self.buffer.as_ptr().wrapping_add(2 * elems)
    }

    fn read(&self, elems: usize, len: u64) -> DevSlice<'_> {
        // SAFETY: inside `buffer`, which outlives the call; nothing is written there meanwhile.
        unsafe {
            DevSlice::from_raw(
                self.backend.memory().space(),
                self.address(elems),
                len,
                fmha_core::ElemType::Bytes,
            )
        }
    }

    fn write(&self, elems: usize, len: u64) -> DevSliceMut<'_> {
        // SAFETY: the slice lies inside `buffer`, which outlives the call. Nothing is written there meanwhile: the call
        // checks that it writes nothing that it reads.
        unsafe {
            DevSliceMut::from_raw(
                self.backend.memory().space(),
                self.address(elems),
                len,
                fmha_core::ElemType::Bytes,
            )
        }
    }
}

/// Computes dQ, dK and dV, row by row, and O, for gradients laid out by `strides` and `places`, and `apart` more
/// elements from each other.
fn gradients(backend: &Device, layout: &Layout, apart: usize) -> Vec<Vec<bf16>> {
    let Layout { dims, strides, places, .. } = layout;
    let fwd = FwdProblem::batch(DType::Bf16, *dims).write_lse(true);
    let fwd = fwd.strides_q(*strides).strides_k(*strides).strides_v(*strides);
    let mut bwd = BwdProblem::new(fwd.clone());
    (bwd.dq, bwd.dk, bwd.dv) = (*strides, *strides, *strides);
    let options = PlanOptions::default().deterministic(true).allow_fallback(true);
    let shapes: [Shape; 3] = [fwd.shape_q(), fwd.shape_k(), fwd.shape_v()];
    let fwd = backend.plan_fwd(&fwd.validate().unwrap(), &options).unwrap();
    let bwd = backend.plan_bwd(&bwd.validate().unwrap(), &options).unwrap();

    let memory = backend.memory();
    let mut buffer = memory.alloc(2 * 8 * ELEMS as u64).unwrap();
    let numbers: Vec<bf16> = (0..8 * ELEMS)
        .map(|i| bf16::from_f32((i.wrapping_mul(0x9E37_79B1) >> 20 & 0xff) as f32 / 128.0 - 1.0))
        .collect();
    memory.upload(&numbers, &mut buffer).unwrap();
    let held = Memory { backend, buffer };
    let (fwd_scratch, bwd_scratch) =
        (memory.workspace(fwd.workspace()).unwrap(), memory.workspace(bwd.workspace()).unwrap());
    let scratch = |buffer: &Option<DevBuffer>| {
        let buffer = buffer.as_ref()?;
        // SAFETY: nothing else uses the memory.
        Some(unsafe { DevSliceMut::from_raw(memory.space(), buffer.as_ptr(), buffer.bytes(), buffer.elem()) })
    };
    let bytes = |shape: Shape| fmha_core::ValidFwd::extent_bytes(*strides, shape, DType::Bf16);
    let inputs = [0, 1, 2].map(|n| held.read(places[n], bytes(shapes[n])));
    let (o, lse, dout) = (ELEMS, 2 * ELEMS, 2 * ELEMS + ELEMS / 2);
    let (len, lse_len) = (2 * dense(shapes[0]), 4 * dense(Shape { dim: 1, ..shapes[0] }));
    let mut args = FwdArgs::new(inputs[0], inputs[1], inputs[2], held.write(o, len))
        .lse(held.write(lse, lse_len))
        .workspace(scratch(&fwd_scratch));
    let stream = backend.default_stream();
    fwd.run(&mut args, &stream).unwrap();
    let place = |n: usize| 3 * ELEMS + places[n] + n * apart;
    let of_forward = [held.read(o, len), held.read(lse, lse_len), held.read(dout, len)];
    let gradients = [0, 1, 2].map(|n| held.write(place(n), bytes(shapes[n])));
    let mut args = BwdArgs::new(inputs, of_forward, gradients).workspace(scratch(&bwd_scratch));
    bwd.run(&mut args, &stream).unwrap();
    stream.synchronize().unwrap();
    let mut all = vec![bf16::ZERO; numbers.len()];
    memory.download(&held.buffer, &mut all).unwrap();
    let rows = |n: usize| {
        let Shape { batch, seq, head, dim } = shapes[n];
        let mut rows = Vec::new();
        for (b, s, h) in
            (0..batch).flat_map(|b| (0..seq).flat_map(move |s| (0..head).map(move |h| (b, s, h))))
        {
            rows.extend_from_slice(&all[place(n) + strides.offset(b, s, h, 0) as usize..][..dim as usize]);
        }
        rows
    };
    vec![rows(0), rows(1), rows(2), all[o..][..dense(shapes[0]) as usize].to_vec()]
}

fn dense(shape: Shape) -> u64 {
    shape.num_elems()
}

fn holds_on(backend: &Device) {
    for layout in layouts() {
        let fused = gradients(backend, &layout, 0);
        let apart = gradients(backend, &layout, ELEMS);
        assert!(fused == apart, "{} on {}", layout.name, backend.name());
        assert!(fused.iter().all(|tensor| tensor.iter().all(|x| x.is_finite())), "{}", layout.name);
    }
}

#[test]
fn gradients_in_one_buffer_are_those_apart_on_the_cpu() {
    holds_on(&fmha::Backend::Cpu.open().unwrap());
}

#[test]
fn gradients_in_one_buffer_are_those_apart_on_an_emulated_sm_90a() {
    match fmha_cuda::nvrtc::nvrtc() {
        Ok(_) => holds_on(&fmha_cuda::open(0, Some("sm_90a")).unwrap()),
        Err(reason) => println!("absent: {reason}"),
    }
}

#[test]
fn gradients_in_one_buffer_are_those_apart_on_an_emulated_gfx942() {
    if let Some(backend) = amd::open("gfx942", "gradients in one buffer") {
        holds_on(&backend);
    }
}
