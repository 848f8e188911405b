//! Rungs of the ladder: the text of each, and the needs of its launch.

use fmha_core::DType;
use fmha_core::source::{ENTRY, Header, KernelSource};
use fmha_cuda::own::OwnKernels;
use fmha_kernels_cuda::wgmma::{self, OperandA, Sums, WgmmaShape};

/// Features of a device that a rung needs beyond mma.sync.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wants {
    Nothing,
    /// TMA, on Hopper and later.
    Tma,
    /// WGMMA, only on Hopper.
    Wgmma,
}

/// One step of the ladder.
pub(crate) struct Rung {
    pub(crate) name: &'static str,
    /// Name of the file below `rungs/`.
    pub(crate) file: &'static str,
    /// Threads and queries of a CTA.
    pub(crate) threads: u32,
    pub(crate) queries: u32,
    /// Bytes of shared memory for a head dimension: 16-bit elements, and barriers after them.
    smem: fn(u32) -> u32,
    pub(crate) wants: Wants,
    /// Namespace of the rung, and its name for the CTA's tile; empty if the kernel finds the tile itself.
    namespace: &'static str,
    work: &'static str,
}

/// Bytes of `rows` rows of `dim` elements.
const fn rows(rows: u32, dim: u32) -> u32 {
    2 * rows * dim
}

const TILES: &str = "ladder::work_of_cta<64>(call)";
const ORDERED: &str = "ladder::longest_first<64, kCausal>(call)";
const ORDERED_128: &str = "ladder::longest_first<128, kCausal>(call)";

/// Rungs from the naive kernel up.
pub(crate) const RUNGS: [Rung; 9] = [
    rung("naive", "naive.cuh", (256, 8), |_| 0, ""),
    rung("tiled", "tiled.cuh", (256, 64), |dim| 4 * 64 * (3 * (dim / 2 + 1) + 65), ""),
    rung("tensor cores", "tensor_cores.cuh", (128, 64), |dim| rows(192, dim) + rows(64, 64), ""),
    rung("cp.async", "cp_async.cuh", (128, 64), |dim| rows(320, dim) + rows(64, 64), ""),
    rung("P in registers", "p_in_registers.cuh", (128, 64), |dim| rows(320, dim), ""),
    rung("swizzle", "swizzle.cuh", (128, 64), |dim| rows(320, dim), TILES),
    rung("causal order", "order.cuh", (128, 64), |dim| rows(320, dim), ORDERED),
    Rung { wants: Wants::Tma, ..rung("TMA", "tma.cuh", (160, 64), |dim| rows(320, dim) + 1024, ORDERED) },
    Rung {
        wants: Wants::Wgmma,
        namespace: "ladder::wgmma",
        ..rung("wgmma", "wgmma.cuh", (384, 128), |dim| rows(640, dim) + 1024, ORDERED_128)
    },
];

const fn rung(
    name: &'static str,
    file: &'static str,
    (threads, queries): (u32, u32),
    smem: fn(u32) -> u32,
    work: &'static str,
) -> Rung {
    Rung { name, file, threads, queries, smem, wants: Wants::Nothing, namespace: "ladder", work }
}

impl Rung {
    /// Bytes of dynamic shared memory of a CTA.
    pub(crate) fn smem_bytes(&self, dim: u32) -> u32 {
        (self.smem)(dim)
    }

    /// Reason why the device can not run the rung.
    pub(crate) fn refusal(&self, device: &OwnKernels, dim: u32) -> Option<String> {
        let arch = device.arch();
        let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
        let number: u32 = digits.parse().unwrap_or(0);
        let (takes, has) = (self.smem_bytes(dim), device.smem_bytes());
        match self.wants {
            Wants::Tma if number < 90 => Some(format!("{arch} has no TMA, which came with sm_90")),
            Wants::Wgmma if number != 90 => Some(format!("{arch} has no wgmma, which sm_90 alone has")),
            _ if takes > has => Some(format!("a CTA of {takes} bytes of shared memory: {arch} has {has}")),
            _ => None,
        }
    }

    /// Source of the rung for a head dimension and a mask.
    pub(crate) fn source(&self, dim: u32, causal: bool) -> KernelSource {
        let Self { file, threads, namespace, work, .. } = self;
        let (mut include, mut maps, mut arguments) =
            (format!("#include <ladder/{file}>\n"), "", "call".to_owned());
        if *file == "order.cuh" {
            include += "#include <ladder/swizzle.cuh>\n";
        }
        if self.wants != Wants::Nothing {
            maps = ", const __grid_constant__ ladder::Maps maps";
            arguments += ", maps";
        }
        if !work.is_empty() {
            arguments = format!("{arguments}, {work}");
        }
        let bytes = self.smem_bytes(dim);
        let same = format!(
            "static_assert(sizeof({namespace}::Smem<{dim}>) == {bytes}, \"what the launch gives\");\n"
        );
        let entry = format!(
            "{include}constexpr bool kCausal = {causal};\n{}\
             extern \"C\" __global__ void __launch_bounds__({threads})\n\
             {ENTRY}(const __grid_constant__ ladder::Call call{maps}) {{\n  \
             {namespace}::attention<{dim}, kCausal>({arguments});\n}}\n",
            if bytes > 0 { same.as_str() } else { "" },
        );
        KernelSource::new(entry, move || headers(dim))
    }
}

/// Texts of the rungs, with the library's headers.
fn headers(dim: u32) -> Vec<Header> {
    macro_rules! embedded {
        ($($name:literal),* $(,)?) => {
            [$(Header::embedded(concat!("ladder/", $name), include_str!(concat!("rungs/", $name)))),*]
        };
    }
    let mut all = fmha_kernels_cuda::headers();
    all.extend(embedded!(
        "common.cuh",
        "cp_async.cuh",
        "naive.cuh",
        "order.cuh",
        "p_in_registers.cuh",
        "products.cuh",
        "swizzle.cuh",
        "tensor_cores.cuh",
        "tiled.cuh",
        "tma.cuh",
        "wgmma.cuh",
    ));
    let product = |n: u32, a| WgmmaShape { dtype: DType::Bf16, n: n as i32, a, sums: Sums::F32 };
    all.push(wgmma::header(&[product(128, OperandA::Shared), product(dim, OperandA::Registers)]));
    all
}
