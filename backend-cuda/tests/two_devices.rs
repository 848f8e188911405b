//! Two devices of one process, on the test double of the driver. This program has only one test, since the double
//! reads the number of devices once. Kernels run if there is NVRTC; otherwise the test prints `absent` for them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use fmha_core::{DType, DevBuffer, Device, Dims, FwdArgs, FwdProblem, MaskSpec, PlanOptions, Stream};

/// Computes 64 rows of one head on `backend`, with values that depend on `salt`; returns the bytes of O.
fn attend(backend: &Device, stream: &Stream, salt: u64) -> Vec<u8> {
    let dims = Dims::batch(1).seqlens(64, 64).heads(1, 1).head_dim(64);
    let problem = FwdProblem::batch(DType::F16, dims).mask(MaskSpec::CAUSAL);
    let plan = backend.plan_fwd(&problem.validate().unwrap(), &PlanOptions::default()).unwrap();
    let memory = backend.memory();
    let filled = |salt: u64| {
        let value = |i: u64| half::f16::from_f64(((i * 37 + salt) % 101) as f64 / 50.0 - 1.0);
        let bytes: Vec<u8> = (0..64 * 64).flat_map(|i| value(i).to_le_bytes()).collect();
        let mut buffer = memory.alloc(bytes.len() as u64).unwrap();
        memory.upload(&bytes, &mut buffer).unwrap();
        buffer
    };
    let (q, k, v, mut o) = (filled(salt), filled(salt + 1), filled(salt + 2), filled(salt + 3));
    let mut workspace = memory.workspace(plan.workspace()).unwrap();
    let mut args = FwdArgs::new(q.slice(), k.slice(), v.slice(), o.slice_mut());
    args.workspace = workspace.as_mut().map(DevBuffer::slice_mut);
    plan.run(&mut args, stream).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = vec![0u8; o.bytes() as usize];
    memory.download(&o, &mut bytes).unwrap();
    bytes
}

#[test]
fn two_devices_of_one_process_have_memory_streams_and_kernels_of_their_own() {
    let open = |ordinal| fmha_cuda::open(ordinal, Some("sm_90a,sm_90a"));
    let backends = [0, 1].map(|ordinal| open(ordinal).unwrap());
    assert!(open(2).is_err(), "there are two");

    let mut buffers = backends.each_ref().map(|backend| backend.memory().alloc(64).unwrap());
    for (at, buffer) in buffers.iter_mut().enumerate() {
        backends[at].memory().upload(&[at as u8 + 3; 64], buffer).unwrap();
    }
    // The double's devices have no address in common, as with the driver's unified addressing.
    let mut bytes = [0u8; 64];
    assert!(backends[0].memory().download(&buffers[1], &mut bytes).is_err());

    let streams = backends.each_ref().map(|backend| backend.stream().unwrap());
    let absent = fmha_cuda::nvrtc::nvrtc().err();
    // Calls alternate, so that each one finds the context of the other device current.
    let mut outputs = Vec::new();
    for salt in [1, 50] {
        for (at, backend) in backends.iter().enumerate() {
            backend.memory().download(&buffers[at], &mut bytes).unwrap();
            assert_eq!(bytes, [at as u8 + 3; 64]);
            let seconds = streams[at].seconds(|| Ok(())).unwrap();
            assert!(seconds >= 0.0);
            if absent.is_none() {
                outputs.push(attend(backend, &streams[at], salt));
            }
        }
    }
    match (&outputs[..], absent) {
        ([one, two, three, four], _) => {
            assert_eq!((one, three), (two, four), "a device computes what the other does");
            assert_ne!(one, three, "from the operands that it is given");
        }
        (_, absent) => println!("absent: kernels of two devices: {absent:?}"),
    }
}
