//! The AMD kernels' text with a fault planted in it, compiled, and run by the backend as it is over the emulator's
//! driver library: each fault is found, by its name where the emulator has one, else by the numbers. Verified in
//! emulation, never on hardware.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use fmha_conformance::case::Case;
use fmha_conformance::run::{Options, Outcome};
use fmha_conformance::tensors::{Data, Lengths};
use fmha_core::cache::{Bundle, CompiledKernel, KernelJob, embed};
use fmha_core::{AnyProblem, DType, Dims, FmhaBackend, FwdProblem, PlanOptions};
use fmha_rocm::RocmBackend;

/// One fault. No two have a kernel in common, so that each has its place in the bundles.
struct Planted {
    what: &'static str,
    arch: &'static str,
    /// Type of Q, K and V, head dim.
    problem: (DType, u32),
    kernel: &'static str,
    header: &'static str,
    /// What stands in it once, and what is put there.
    text: [&'static str; 2],
    /// A part of what the battery or the emulator says.
    found_as: &'static str,
}

const WRONG_NUMBERS: &str = "max error";

const PLANTED: [Planted; 6] = [
    Planted {
        what: "a wrong lane map",
        arch: "gfx942",
        problem: (DType::F16, 64),
        kernel: "cdna_fwd",
        header: "fmha/mma/cdna.h",
        text: [
            "return 8 * (i / kRun) + 4 * half + i % kRun;",
            "return 4 * (i / kRun) + 16 * half + i % kRun;",
        ],
        found_as: WRONG_NUMBERS,
    },
    Planted {
        what: "a missing wait",
        arch: "gfx950",
        problem: (DType::Bf16, 128),
        kernel: "cdna_fwd",
        header: "fmha/cdna/main_loop.h",
        text: ["if constexpr (C::direct_k || C::direct_v) s_waitcnt_vmcnt<0>();", ""],
        found_as: "MissingLdsDmaWait",
    },
    Planted {
        what: "stages that overlap in LDS",
        arch: "gfx942",
        problem: (DType::Bf16, 128),
        kernel: "cdna_fwd",
        header: "fmha/cdna/main_loop.h",
        text: ["auto& next = lds_.stage[1 - parity];", "auto& next = lds_.stage[parity];"],
        found_as: "LdsRace",
    },
    Planted {
        what: "a mask of the last tile that is off by one",
        arch: "gfx90a",
        problem: (DType::F16, 64),
        kernel: "cdna_fwd",
        header: "fmha/cdna/tile_step.h",
        text: [
            "const bool seen = key < job.span.seqlen_k &&",
            "const bool seen = key <= job.span.seqlen_k &&",
        ],
        found_as: WRONG_NUMBERS,
    },
    Planted {
        what: "reads past a buffer",
        arch: "gfx942",
        problem: (DType::F16, 128),
        kernel: "cdna_fwd",
        header: "fmha/cdna/load.h",
        text: [
            "min((rows.num_rows - 1) * rows.stride_bytes + rows.row_bytes, kMost)",
            "min((rows.num_rows + 99) * rows.stride_bytes + rows.row_bytes, kMost)",
        ],
        found_as: "OutOfBounds",
    },
    Planted {
        what: "FNUZ read as OCP",
        arch: "gfx942",
        problem: (DType::E4m3Fnuz, 64),
        kernel: "simt",
        header: "fmha/num.h",
        text: [
            "case DType::E4m3Fnuz: return {4, 3, 8, false, true, true, 0x7f};",
            "case DType::E4m3Fnuz: return {4, 3, 7, false, false, true, 0x7e};",
        ],
        found_as: WRONG_NUMBERS,
    },
];

impl Planted {
    /// Two tiles of keys and a part of one.
    fn case(&self) -> Case {
        let (dtype, head_dim) = self.problem;
        let dims = Dims {
            batch: 1,
            seqlen_q: 70,
            seqlen_k: 150,
            num_heads_q: 2,
            num_heads_kv: 1,
            head_dim_qk: head_dim,
            head_dim_v: head_dim,
        };
        let mut problem = FwdProblem::batch(dtype, dims);
        problem.write_lse = true;
        Case::forward(self.what, problem, Lengths::default(), Data { seed: 7, ..Data::default() })
    }

    fn options(&self) -> Options {
        let kernel = Some(self.kernel.to_owned());
        let plan = PlanOptions { kernel, allow_fallback: true, ..PlanOptions::default() };
        Options { plan, ..Options::default() }
    }

    fn job(&self, backend: &RocmBackend) -> KernelJob {
        let problem = self.case().problem().unwrap().clone().validate().unwrap();
        let jobs = backend.precompiler().unwrap().jobs(AnyProblem::Forward(&problem), &self.options().plan);
        jobs.unwrap().remove(0)
    }

    /// The broken text, compiled, under the sound text's key: so the backend takes it for the sound one.
    fn compiled(&self, backend: &RocmBackend) -> CompiledKernel {
        let sound = self.job(backend);
        let mut broken = sound.clone();
        let header = broken.source.headers.iter_mut().find(|header| header.name == self.header).unwrap();
        assert_eq!(header.text.matches(self.text[0]).count(), 1, "{}: {}", self.what, self.text[0]);
        header.text = Cow::Owned(header.text.replace(self.text[0], self.text[1]));
        let kernel = Arc::unwrap_or_clone(backend.precompiler().unwrap().precompile(&broken).unwrap());
        CompiledKernel { key: sound.key(), ..kernel }
    }
}

/// The emulator's words of the last launch that it stopped: of the library that the backends have opened.
fn last_fault() -> String {
    const FILE: &str = "libfmha_emu_amdhip64.so";
    type LastFault = unsafe extern "C" fn(*mut u8, usize) -> usize;
    let program = std::env::current_exe().unwrap();
    let folder = std::env::var("FMHA_EMULATOR_DIR").map(PathBuf::from);
    let path = folder.map_or_else(
        |_| program.ancestors().skip(1).map(|up| up.join(FILE)).find(|path| path.exists()).unwrap(),
        |folder| folder.join(FILE),
    );
    let mut text = [0; 2000];
    // SAFETY: the library is loaded already, and ours; the function has this type, and as much room as it is told.
    let bytes = unsafe {
        let library = libloading::Library::new(path).unwrap();
        let last = library.get::<LastFault>(b"fmhaEmulatorLastFault").unwrap();
        last(text.as_mut_ptr(), text.len())
    };
    String::from_utf8_lossy(&text[..bytes.min(text.len() - 1)]).into_owned()
}

#[test]
fn each_fault_planted_in_the_kernels_text_is_found_and_its_sound_twin_passes() {
    let mut broken = Vec::new();
    for planted in &PLANTED {
        let Some(backend) = amd::open(planted.arch, "planted faults") else { return };
        let (outcome, text) = planted.case().run(&backend, &planted.options());
        assert_eq!(outcome, Outcome::Passed, "{}, without it: {text}", planted.what);
        broken.push(Arc::new(planted.compiled(&backend)));
    }
    // Of the backends that are opened from here on.
    embed(Bundle::new("planted faults", broken));
    let mut missed = Vec::new();
    for planted in &PLANTED {
        let backend = amd::open(planted.arch, "planted faults").unwrap();
        let (outcome, text) = planted.case().run(&backend, &planted.options());
        let text = if text.contains("hipEventSynchronize failed") { last_fault() } else { text };
        println!("{} ({}): {text}", planted.what, planted.arch);
        if outcome != Outcome::Failed || !text.contains(planted.found_as) {
            missed.push(planted.what);
        }
    }
    assert!(missed.is_empty(), "not found, or not as expected: {missed:?}");
}
