//! Small CUDA C++ kernels, as NVRTC compiles them, against the same arithmetic in Rust.
#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

use fmha_core::cache::{Compiler, ImageKind, KernelJob};
use fmha_core::source::KernelSource;
use fmha_emu_ptx::{Device, Fault, FaultKind, LaunchConfig, Options, SourceMap};

const THREADS: u32 = 128;

/// The PTX of one kernel `k(const unsigned* in, unsigned* out, unsigned n)`; `None` where there is no compiler.
fn compile(body: &str) -> Option<String> {
    let nvrtc = match fmha_cuda::nvrtc::nvrtc() {
        Ok(nvrtc) => nvrtc,
        Err(reason) => {
            println!("absent: {reason}");
            return None;
        }
    };
    let entry = format!(
        "extern \"C\" __global__ void k(const unsigned* in, unsigned* out, unsigned n) {{\n{body}\n}}\n"
    );
    let job = KernelJob {
        kernel: "k",
        arch: "sm_90a".to_owned(),
        flags: vec!["-lineinfo".to_owned()],
        source: KernelSource::with(entry, Vec::new()),
        image: ImageKind::Assembly,
    };
    let compiled = nvrtc.compile(&job).unwrap_or_else(|error| panic!("{body}: {error}"));
    Some(String::from_utf8(compiled.assembly).unwrap().trim_end_matches('\0').to_owned())
}

/// Runs the kernel on two blocks, with happens-before tracked.
fn run(ptx: &str, input: &[u32], outputs: usize) -> Result<Vec<u32>, Fault> {
    let device = Device::new();
    let bytes: Vec<u8> = input.iter().flat_map(|word| word.to_le_bytes()).collect();
    let (from, to) = (device.alloc(bytes.len() as u64), device.alloc(4 * outputs as u64));
    device.upload(from, &bytes)?;
    device.upload(to, &vec![0; 4 * outputs])?;
    let mut args: Vec<u8> = [from, to].iter().flat_map(|address| address.to_le_bytes()).collect();
    args.extend((input.len() as u32).to_le_bytes());
    let module = device.load(ptx)?;
    let mut options = Options::default();
    options.happens_before = true;
    let config = LaunchConfig {
        grid: [2, 1, 1],
        block: [THREADS, 1, 1],
        cluster: [1; 3],
        dynamic_shared: 0,
        dependent: false,
    };
    device.launch(module.kernel("k").unwrap(), &config, &args, &options)?;
    let mut out = vec![0; 4 * outputs];
    device.download(to, &mut out)?;
    Ok(out.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn input() -> Vec<u32> {
    (0..2 * THREADS).map(|i| (i ^ 0x55).wrapping_mul(2_654_435_761) >> (i % 13)).collect()
}

/// Runs a body that maps one word to one word in each thread.
fn each(body: &str, want: impl Fn(u32) -> u32) {
    let head = "const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, x = in[i]; unsigned y = 0;";
    let Some(ptx) = compile(&format!("{head}\n{body}\nout[i] = y;")) else { return };
    let input = input();
    let got = run(&ptx, &input, input.len()).unwrap_or_else(|fault| panic!("{body}: {fault}"));
    for (i, (x, y)) in input.iter().zip(got).enumerate() {
        assert_eq!(y, want(*x), "{body}: element {i}, {x:#x}");
    }
}

#[test]
fn integer_intrinsics_are_those_of_rust() {
    each("y = __popc(x) ^ __clz(x) << 8 ^ __brev(x);", |x| {
        x.count_ones() ^ x.leading_zeros() << 8 ^ x.reverse_bits()
    });
    each("y = __umulhi(x, 0x9e3779b9u) + __funnelshift_l(x, ~x, x & 31);", |x| {
        let high = ((u64::from(x) * 0x9e37_79b9) >> 32) as u32;
        let pair = u64::from(!x) << 32 | u64::from(x);
        high.wrapping_add((pair << (x & 31) >> 32) as u32)
    });
    each("y = __byte_perm(x, ~x, 0x7254);", |x| {
        let bytes: Vec<u8> = [x.to_le_bytes(), (!x).to_le_bytes()].concat();
        u32::from_le_bytes([bytes[4], bytes[5], bytes[2], bytes[7]])
    });
    each(
        "const long long a = (long long)(int)x * 1000003; y = unsigned(a / 97) ^ unsigned(a % -1009);",
        |x| {
            let a = i64::from(x as i32) * 1_000_003;
            (a / 97) as u32 ^ (a % -1009) as u32
        },
    );
}

#[test]
fn a_loop_of_another_length_in_each_lane_ends_in_each() {
    each(
        "unsigned a = x, b = x >> 7 | 1; while (b) { const unsigned t = a % b; a = b; b = t; } y = a;",
        |x| {
            let (mut a, mut b) = (x, x >> 7 | 1);
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a
        },
    );
}

#[test]
fn a_dense_switch_goes_to_the_case_of_each_lane() {
    let body =
        "switch (x % 9) { case 0: y = x + 1; break; case 1: y = x * 3; break; case 2: y = x ^ 77; break;
        case 3: y = ~x; break; case 4: y = x >> 3; break; case 5: y = x << 5; break; case 6: y = x - 9; break;
        case 7: y = x | 0xf0; break; default: y = 5; }";
    each(body, |x| match x % 9 {
        0 => x.wrapping_add(1),
        1 => x.wrapping_mul(3),
        2 => x ^ 77,
        3 => !x,
        4 => x >> 3,
        5 => x << 5,
        6 => x.wrapping_sub(9),
        7 => x | 0xf0,
        _ => 5,
    });
}

#[test]
fn an_array_indexed_at_run_time_lives_in_local_memory() {
    let body = "unsigned a[8]; for (int j = 0; j < 8; ++j) a[j] = x >> j * 4 & 15;
        for (unsigned j = 1; j < 8; ++j) for (unsigned k = j; k > 0 && a[k - 1] > a[k]; --k) {
          const unsigned t = a[k]; a[k] = a[k - 1]; a[k - 1] = t; }
        for (int j = 0; j < 8; ++j) y = y << 4 | a[(j + x) % 8];";
    each(body, |x| {
        let mut digits: Vec<u32> = (0..8).map(|j| x >> (j * 4) & 15).collect();
        digits.sort_unstable();
        (0..8).fold(0, |y, j| y << 4 | digits[(j + x as usize) % 8])
    });
}

#[test]
fn floats_round_as_rust_rounds_them() {
    each(
        "const float f = float(int(x)) * 0.37f; y = __float_as_uint(fmaf(f, f, -3.5f) / (1.f + fabsf(f)));",
        |x| {
            let f = x as i32 as f32 * 0.37;
            (f.mul_add(f, -3.5) / (1.0 + f.abs())).to_bits()
        },
    );
    each("y = unsigned(int(sqrt(double(x)) * 3.25 - 1e5));", |x| {
        (f64::from(x).sqrt() * 3.25 - 1e5) as i32 as u32
    });
}

#[test]
fn a_block_sums_through_shuffles_shared_memory_and_an_atomic() {
    let body = "__shared__ unsigned parts[4]; unsigned v = in[blockIdx.x * blockDim.x + threadIdx.x];
        for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(out, parts[0] + parts[1] + parts[2] + parts[3]);";
    let Some(ptx) = compile(body) else { return };
    let input = input();
    let sum = input.iter().fold(0u32, |sum, x| sum.wrapping_add(*x));
    assert_eq!(run(&ptx, &input, 1).unwrap(), [sum]);
    // Without the barrier the same kernel races.
    let Some(racing) = compile(&body.replace("__syncthreads();", "")) else { return };
    let fault = run(&racing, &input, 1).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
}

#[test]
fn a_fault_names_the_line_of_the_source() {
    let Some(ptx) = compile("if (threadIdx.x == 77)\nout[n] = 1;") else { return };
    let fault = run(&ptx, &input(), 2 * THREADS as usize).unwrap_err();
    assert_eq!(fault.kind, FaultKind::OutOfBounds, "{fault}");
    let chain = SourceMap::of(&ptx).chain(fault.line);
    assert_eq!((chain[0].file.as_str(), chain[0].line), ("entry.cu", 3));
    assert_eq!(fault.place.map(|place| (place.warp, place.lanes)), Some((2, 1 << 13)));
}
