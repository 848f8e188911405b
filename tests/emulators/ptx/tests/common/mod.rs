//! Helpers of the tests: a device with buffers, small kernels around one instruction, random numbers.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test file uses its own part, and a failure here fails its test"
)]

use fmha_emu_ptx::{Device, Fault, LaunchConfig, Options, Report};

pub(crate) const HEADER: &str = ".version 8.6\n.target sm_90a\n.address_size 64\n";

/// A launch of one block.
pub(crate) fn block(threads: u32, dynamic_shared: u32) -> LaunchConfig {
    LaunchConfig { grid: [1; 3], block: [threads, 1, 1], cluster: [1; 3], dynamic_shared, dependent: false }
}

/// Uploads words.
pub(crate) fn upload(device: &Device, words: &[u32]) -> u64 {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    upload_bytes(device, &bytes)
}

pub(crate) fn upload_bytes(device: &Device, bytes: &[u8]) -> u64 {
    let address = device.alloc(bytes.len() as u64);
    device.upload(address, bytes).unwrap();
    address
}

/// Downloads words.
pub(crate) fn download(device: &Device, address: u64, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; count * 4];
    device.download(address, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Loads and runs the only kernel of `ptx`.
pub(crate) fn run(
    device: &Device,
    ptx: &str,
    config: &LaunchConfig,
    args: &[u8],
    options: &Options,
) -> Result<Report, Fault> {
    let module = device.load(ptx)?;
    let name = module.kernel_names()[0].to_string();
    device.launch(module.kernel(&name).unwrap(), config, args, options)
}

/// Happens-before mode.
pub(crate) fn checked() -> Options {
    let mut options = Options::default();
    options.happens_before = true;
    options
}

/// Text of a kernel of `tcgen05`: the barrier of a pair of blocks, if there is one, and the commit of products, which
/// `%lead` issues and which arrives at `%done` in each block.
pub(crate) fn barrier_and_commit(pair: bool) -> (&'static str, &'static str) {
    if pair {
        (
            "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
            "@%lead tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster\
             .multicast::cluster.b64 [%done], %both;",
        )
    } else {
        ("", "@%lead tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%done];")
    }
}

/// Runs `body` on one warp: sources in `%a %b %c` (each lane its own words of 64 bits), result in `%d`. Registers
/// are `.b32` or `.b64` by `width`.
pub(crate) fn lanes(width: u32, body: &str, sources: [&[u64; 32]; 3]) -> [u64; 32] {
    let device = Device::new();
    let step = width / 8;
    let flat: Vec<u8> = sources
        .iter()
        .flat_map(|s| s.iter().flat_map(|v| v.to_le_bytes()[..step as usize].to_vec()))
        .collect();
    let input = upload_bytes(&device, &flat);
    let out = device.alloc(u64::from(32 * step));
    let ptx = format!(
        "{HEADER}.visible .entry k(.param .u64 i, .param .u64 o) {{
        .reg .b{width} %a, %b, %c, %d; .reg .b64 %i, %o, %l; .reg .b32 %t; .reg .pred %p, %q;
        .reg .b16 %h<4>; .reg .b32 %w<4>; .reg .b64 %x<4>;
        ld.param.u64 %i, [i]; ld.param.u64 %o, [o]; mov.u32 %t, %tid.x; mul.wide.u32 %l, %t, {step};
        add.s64 %i, %i, %l; add.s64 %o, %o, %l;
        ld.global.b{width} %a, [%i]; ld.global.b{width} %b, [%i+{}]; ld.global.b{width} %c, [%i+{}];
        mov.b{width} %d, 0;
        {body}
        st.global.b{width} [%o], %d; ret; }}",
        32 * step,
        64 * step
    );
    let args: Vec<u8> = [input, out].iter().flat_map(|a| a.to_le_bytes()).collect();
    run(&device, &ptx, &block(32, 0), &args, &Options::default()).unwrap_or_else(|f| panic!("{body}: {f}"));
    let mut bytes = vec![0; 32 * step as usize];
    device.download(out, &mut bytes).unwrap();
    std::array::from_fn(|i| {
        let cell = &bytes[i * step as usize..(i + 1) * step as usize];
        cell.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b))
    })
}

/// Deterministic random words.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let high = self.0 >> 32;
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        high << 32 | self.0 >> 32
    }

    /// An integer in `[-limit, limit]`.
    pub(crate) fn small(&mut self, limit: i32) -> i32 {
        (self.word() >> 33) as i32 % (2 * limit + 1) - limit
    }
}
