//! Kernels that wait for keys which arrive while they run, on the test double of the driver. With all flags set,
//! their results equal those of kernels that do not wait; if a flag is never set, they report it and end. Needs
//! NVRTC; without it a test says `absent` and checks nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use fmha_core::{
    Arrivals, BwdArgs, BwdProblem, DType, DevBuffer, Device, Dims, FwdArgs, FwdProblem, PlanOptions,
};
use half::bf16;

fn device() -> Option<Device> {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        println!("absent: {reason}");
        return None;
    }
    Some(fmha_cuda::open(0, Some("sm_90a")).unwrap())
}

fn uploaded(device: &Device, bytes: &[u8]) -> DevBuffer {
    let mut buffer = device.memory().alloc(bytes.len() as u64).unwrap();
    device.memory().upload(bytes, &mut buffer).unwrap();
    buffer
}

fn words(device: &Device, words: &[u32]) -> DevBuffer {
    uploaded(device, bytemuck::cast_slice(words))
}

fn downloaded(device: &Device, buffer: &DevBuffer) -> Vec<u8> {
    let mut bytes = vec![0u8; buffer.bytes() as usize];
    device.memory().download(buffer, &mut bytes).unwrap();
    bytes
}

fn numbers(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

const QUERIES: u32 = 130;
const KEYS: u32 = 400;
/// Ends of the pieces: one inside a block of keys, one at a block's end.
const ENDS: [u32; 3] = [100, 256, KEYS];

fn problem(arrivals: u32) -> FwdProblem {
    let dims = Dims::batch(1).seqlens(QUERIES, KEYS).heads(2, 1).head_dim(64);
    FwdProblem::batch(DType::Bf16, dims).mask("b".parse().unwrap()).write_lse(true).arrivals(arrivals)
}

fn noise(device: &Device, seed: u64, rows: u32, heads: u32) -> DevBuffer {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    let elems: Vec<bf16> = (0..rows * heads * 64).map(next).collect();
    uploaded(device, bytemuck::cast_slice(&elems))
}

/// Runs a forward; returns O and LSE, and the flags afterwards. Without flags (`None`) all keys are in memory before
/// the call.
fn forward(device: &Device, flags: Option<([u32; 4], u64)>) -> ([Vec<u8>; 2], Vec<u32>) {
    let arrivals = if flags.is_some() { 3 } else { 0 };
    // Tile options prevent the plan without flags from splitting the keys of so few queries.
    let options = PlanOptions::default().kernel("sm90").tile([("split_keys", "0")]);
    let plan = device.plan_fwd(&problem(arrivals).validate().unwrap(), &options).unwrap();
    let (q, k, v) = (noise(device, 1, QUERIES, 2), noise(device, 2, KEYS, 1), noise(device, 3, KEYS, 1));
    let mut o = uploaded(device, &vec![0; (QUERIES * 256) as usize]);
    let mut lse = uploaded(device, &vec![0; (QUERIES * 8) as usize]);
    let mut workspace = device.memory().workspace(plan.workspace()).unwrap();
    let (ends, words_of) = (words(device, &ENDS), words(device, &flags.map_or([0; 4], |(flags, _)| flags)));
    let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut())
        .lse(lse.slice_mut())
        .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
    args.seq.arrivals = flags.map(|(_, here)| Arrivals {
        ends: ends.slice(),
        flags: words_of.slice(),
        here,
        timeout_ns: 1000,
    });
    plan.run(&mut args, &device.default_stream()).unwrap();
    device.synchronize().unwrap();
    ([downloaded(device, &o), downloaded(device, &lse)], numbers(&downloaded(device, &words_of)))
}

fn backward(device: &Device, of: &[Vec<u8>; 2], flags: Option<[u32; 4]>) -> [Vec<u8>; 3] {
    let problem = BwdProblem::new(problem(if flags.is_some() { 3 } else { 0 })).validate().unwrap();
    let options = PlanOptions::default().kernel("sm90").deterministic(true);
    let plan = device.plan_bwd(&problem, &options).unwrap();
    let inputs = [(1, QUERIES, 2), (2, KEYS, 1), (3, KEYS, 1), (4, QUERIES, 2)]
        .map(|(seed, rows, heads)| noise(device, seed, rows, heads));
    let [q, k, v, dout] = &inputs;
    let [o, lse] = of.each_ref().map(|bytes| uploaded(device, bytes));
    let mut grads =
        [QUERIES * 256, KEYS * 128, KEYS * 128].map(|bytes| uploaded(device, &vec![0; bytes as usize]));
    let mut workspace = device.memory().workspace(plan.workspace()).unwrap();
    let (ends, words_of) = (words(device, &ENDS), words(device, &flags.unwrap_or([0; 4])));
    let [dq, dk, dv] = &mut grads;
    let mut args = BwdArgs::new(
        [q.slice(), k.slice(), v.slice()],
        [o.slice(), lse.slice(), dout.slice()],
        [dq.slice_mut(), dk.slice_mut(), dv.slice_mut()],
    )
    .workspace(workspace.as_mut().map(DevBuffer::slice_mut));
    args.seq.arrivals =
        flags.map(|_| Arrivals { ends: ends.slice(), flags: words_of.slice(), here: 0, timeout_ns: 1000 });
    plan.run(&mut args, &device.default_stream()).unwrap();
    device.synchronize().unwrap();
    grads.each_ref().map(|grad| downloaded(device, grad))
}

#[test]
fn keys_that_come_in_pieces_give_the_bits_of_those_that_are_there() {
    let Some(device) = device() else { return };
    let (plain, _) = forward(&device, None);
    assert!(plain[0].iter().any(|&byte| byte != 0));
    for (flags, here) in [([1, 1, 1, 0], 0), ([1, 0, 1, 0], 0b010)] {
        let (arrived, after) = forward(&device, Some((flags, here)));
        assert!(arrived == plain, "flags {flags:?}");
        assert_eq!(after[3], 0);
    }
    assert!(backward(&device, &plain, Some([1, 1, 1, 0])) == backward(&device, &plain, None));
}

#[test]
fn a_piece_that_does_not_come_is_named_within_the_timeout() {
    let Some(device) = device() else { return };
    let (_, after) = forward(&device, Some(([1, 0, 1, 0], 0)));
    assert_eq!(after, [1, 0, 1, 2]);
    // A call whose last word is set, which tells every thread to stop waiting, does not wait.
    let (_, after) = forward(&device, Some(([0, 0, 0, 9], 0)));
    assert_eq!(after, [0, 0, 0, 9]);
}

#[test]
fn kernels_that_do_not_wait_refuse_pieces_by_their_number() {
    let Some(device) = device() else { return };
    for kernel in ["sm80", "simt"] {
        let options = PlanOptions::default().kernel(kernel);
        let error = device.plan_fwd(&problem(3).validate().unwrap(), &options).unwrap_err().to_string();
        assert!(error.contains("arrivals 3: it does not wait for pieces of keys"), "{kernel}: {error}");
    }
    // Splitting keys into parts uses another kind of launch, which does not wait.
    let options = PlanOptions::default().kernel("sm90").tile([("split_keys", "128")]);
    let error = device.plan_fwd(&problem(3).validate().unwrap(), &options).unwrap_err().to_string();
    assert!(error.contains("arrivals 3"), "{error}");
}
