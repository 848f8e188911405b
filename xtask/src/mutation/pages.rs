//! Kernels that `cargo xtask mutation` breaks: a page of evidence for each kernel, a line of it for each form
//! of the kernel.

use crate::kernels::HOPPER_ARCH;

/// Page of evidence for one kernel.
pub(crate) struct Page {
    /// Name of the page, and of its reasons in `tests/evidence`.
    pub(crate) name: &'static str,
    /// Name of the kernel in plans.
    pub(crate) kernel: &'static str,
    pub(crate) arch: &'static str,
    /// Arguments of `fmha run` that all problems share.
    pub(crate) operation: &'static [&'static str],
    pub(crate) broken: &'static [Broken],
    /// Additional problems for `cargo xtask coverage`: tile fields that no table chooses, and hidden values, which
    /// neither the battery nor the broken kernels run.
    pub(crate) also_covered: &'static [&'static str],
}

/// One form of a kernel, and problems that make each of its instructions matter: long tiles, tiles of one
/// block, both in turn.
pub(crate) struct Broken {
    pub(crate) title: &'static str,
    /// File with the kernel's entry. Of a call's launches, those with code of this file are broken.
    pub(crate) entry: &'static str,
    /// Number of multiprocessors, as few as possible, so that a CTA computes several tiles.
    pub(crate) multiprocessors: u32,
    pub(crate) problems: &'static [&'static str],
}

impl Page {
    /// Words of the command that runs one of the problems once.
    pub(crate) fn run(&self, problem: &str) -> Vec<String> {
        let run = ["run", "--backend", "cuda", "--kernel", self.kernel, "--emulate", self.arch];
        let once = ["--warmup", "0", "--repeat", "1"];
        let words = run.iter().chain(&once).chain(self.operation).copied();
        words.chain(problem.split_whitespace()).map(str::to_owned).collect()
    }
}

pub(crate) const PAGES: [Page; 4] = [
    Page {
        name: "sm90",
        kernel: "sm90",
        arch: HOPPER_ARCH,
        operation: &[],
        broken: HOPPER,
        also_covered: HOPPER_KNOBS,
    },
    Page {
        name: "sm90-bwd",
        kernel: "sm90",
        arch: HOPPER_ARCH,
        operation: &["--backward"],
        broken: HOPPER_BACKWARD,
        also_covered: HOPPER_BACKWARD_KNOBS,
    },
    Page {
        name: "sm100",
        kernel: "sm100",
        arch: "sm_100a",
        operation: &[],
        broken: BLACKWELL,
        also_covered: &[],
    },
    Page {
        name: "sm100-bwd",
        kernel: "sm100",
        arch: "sm_100a",
        operation: &["--backward"],
        broken: BLACKWELL_BACKWARD,
        also_covered: &[],
    },
];

const HOPPER_FORWARD: Broken =
    Broken { title: "", entry: "fmha/sm90/fwd/fwd.cuh", multiprocessors: 1, problems: &[] };

const BLACKWELL_FORWARD: Broken = Broken { entry: "fmha/sm100/fwd/fwd.cuh", ..HOPPER_FORWARD };

const BLACKWELL_MAIN: Broken = Broken { entry: "fmha/sm100/bwd/main.cuh", ..HOPPER_FORWARD };

const MAIN: Broken = Broken { entry: "fmha/sm90/bwd/main.cuh", ..HOPPER_FORWARD };

const HOPPER: &[Broken] = &[
    Broken {
        title: "full, D 128",
        problems: &[
            "-b 1 --heads 4 -s 200 --seqlen-k 700 -d 128 --prec f16",
            "-b 1 --heads 8 -s 300 --seqlen-k 100 -d 128 --prec f16 --tile skip_row_max=1",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "causal, D 128",
        problems: &[
            "-b 1 --heads 2 -s 700 -d 128 --prec bf16 --mask t",
            "-b 1 --heads 4 -s 200 -d 128 --prec bf16 --mask t --tile lookahead=second_q,skip_row_max=1,ping_pong=at_issue",
            "-b 1 --heads 3 -s 200 -d 128 --prec bf16 --mask t --tile lookahead=second_q,skip_row_max=1,ping_pong=at_issue",
            "-b 1 --heads 3 -s 138 --seqlen-k 202 -d 128 --prec bf16 --mask b --tile lookahead=second_q,skip_row_max=1,ping_pong=at_issue",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "window with sinks, D 64, three consumers",
        problems: &[
            "-b 1 --heads 2 -s 700 -d 64 --prec f16 --mask b:100,0,20",
            "-b 1 --heads 3 -s 250 --seqlen-k 180 -d 64 --prec f16 --mask b:100,0,20",
            "-b 1 --heads 4 -s 250 --seqlen-k 180 -d 64 --prec f16 --mask b:100,0,20",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "causal, D 128, no lookahead",
        problems: &[
            "-b 1 --heads 2 -s 700 -d 128 --prec bf16 --mask b --tile lookahead=off",
            "-b 1 --heads 1 -s 300 --seqlen-k 437 -d 128 --prec bf16 --mask b --tile lookahead=off",
            "-b 1 --heads 4 -s 70 -d 128 --prec bf16 --mask b --tile lookahead=off,skip_row_max=1,ping_pong=at_issue",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "causal, D 256, Q in pieces",
        problems: &[
            "-b 1 --heads 2 -s 400 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 1 -s 300 --seqlen-k 437 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 4 -s 70 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 5 -s 70 --seqlen-k 60 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 5 -s 100 --seqlen-k 50 -d 256 --prec bf16 --mask b",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "packed query heads, one consumer",
        problems: &[
            "-b 3 --heads 8 --heads-kv 2 -s 5 --seqlen-k 600 -d 128 --prec bf16 --mask b",
            "-b 5 --heads 8 --heads-kv 2 -s 5 --seqlen-k 60 -d 128 --prec bf16 --mask b --tile lookahead=second_q,skip_row_max=1,ping_pong=at_issue",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "packed sequences, causal, D 128",
        problems: &[
            "--mode 1 -b 3 --heads 2 -s 150,300,40 --seqlen-k 200,330,100 -d 128 --prec bf16 --mask b",
            "--mode 1 -b 4 --heads 3 -s 50,30,40,100 --seqlen-k 20,30,200,70 -d 128 --prec bf16 --mask b",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "column-major V, packed sequences, causal, D 128",
        problems: &[
            "--mode 1 -b 3 --heads 2 -s 150,300,40 --seqlen-k 202,334,104 -d 128 --prec bf16 --mask b --vlayout c",
            "--mode 1 -b 4 --heads 3 -s 50,30,40,100 --seqlen-k 20,30,200,70 -d 128 --prec bf16 --mask b --vlayout c",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "causal with dropout, D 96, three consumers",
        problems: &[
            "-b 1 --heads 2 -s 500 -d 96 --prec f16 --mask t --p-drop 0.2",
            "-b 1 --heads 4 -s 200 -d 96 --prec f16 --mask t --p-drop 0.2",
            "-b 1 --heads 3 -s 200 --seqlen-k 290 -d 96 --prec f16 --mask b --p-drop 0.2",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "Q in registers, two buffers, causal, D 64",
        problems: &[
            "-b 1 --heads 2 -s 500 -d 64 --prec bf16 --mask t --tile q_in_registers=1",
            "-b 1 --heads 4 -s 200 -d 64 --prec bf16 --mask t --tile q_in_registers=1",
            "-b 1 --heads 3 -s 138 --seqlen-k 250 -d 64 --prec bf16 --mask b --tile q_in_registers=1",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "Q in registers, one buffer, causal, D 64",
        problems: &[
            "-b 1 --heads 2 -s 500 -d 64 --prec bf16 --mask t --tile q_in_registers=1,lookahead=off",
            "-b 1 --heads 3 -s 138 --seqlen-k 250 -d 64 --prec bf16 --mask b --tile q_in_registers=1,lookahead=off",
        ],
        ..HOPPER_FORWARD
    },
    Broken {
        title: "clusters of two, D 128",
        problems: &[
            "-b 1 --heads 4 -s 200 --seqlen-k 700 -d 128 --prec f16 --tile cluster=2",
            "-b 1 --heads 8 -s 300 --seqlen-k 100 -d 128 --prec f16 --tile cluster=2",
        ],
        multiprocessors: 2,
        ..HOPPER_FORWARD
    },
    Broken {
        title: "clusters of two that draw, causal, D 64",
        problems: &[
            "-b 1 --heads 4 -s 700 --seqlen-k 300 -d 64 --prec bf16 --mask b --tile cluster=2,order=dynamic,block_m=128",
            "-b 1 --heads 3 -s 600 -d 64 --prec bf16 --mask b --tile cluster=2,order=dynamic,block_m=128",
        ],
        multiprocessors: 2,
        ..HOPPER_FORWARD
    },
    Broken {
        title: "clusters of two heads that draw, causal, D 64",
        problems: &[
            "-b 1 --heads 4 --heads-kv 2 -s 500 -d 64 --prec bf16 --mask t \
             --tile cluster=2,cluster_heads=1,order=dynamic,pack_gqa=0,block_m=128",
            "-b 1 --heads 6 --heads-kv 3 -s 138 --seqlen-k 250 -d 64 --prec bf16 --mask b \
             --tile cluster=2,cluster_heads=1,order=dynamic,pack_gqa=0,block_m=128",
        ],
        multiprocessors: 2,
        ..HOPPER_FORWARD
    },
    Broken {
        title: "loads by copies, causal, D 64",
        problems: &[
            "-b 1 --heads 2 -s 500 -d 64 --prec bf16 --mask t --tile copy_bytes=8",
            "-b 1 --heads 3 -s 138 --seqlen-k 250 -d 64 --prec bf16 --mask b --tile copy_bytes=8",
            // A warp's lanes arrive together, so one arrival too few shows only after as many phases as a warp has
            // lanes.
            "-b 1 --heads 72 -s 100 -d 64 --prec bf16 --mask t --tile copy_bytes=8",
        ],
        ..HOPPER_FORWARD
    },
];

const HOPPER_KNOBS: &[&str] = &[
    "-b 1 --heads 2 -s 200 -d 64 --prec bf16 --mask t --tile copy_bytes=2",
    "-b 1 --heads 2 -s 200 -d 64 --prec bf16 --mask t --tile vector_store=0",
    "-b 1 --heads 2 -s 200 -d 64 --prec bf16 --prec-o fp32 --mask t --lse",
    "-b 1 --heads 2 -s 200 -d 64 --prec bf16 --mask t --tile dependent_launch=1",
];

/// Faults of the backward, on problems of two key blocks at most, so that sums of dQ have the same bits in
/// any order of additions. A missing arrival shows only after as many phases as a barrier has arrivals: hence
/// the many tiles.
const HOPPER_BACKWARD: &[Broken] = &[
    Broken {
        title: "full, D 128",
        problems: &[
            "-b 1 --heads 3 -s 300 --seqlen-k 200 -d 128 --prec f16",
            "-b 1 --heads 40 -s 20 -d 128 --prec f16",
        ],
        ..MAIN
    },
    Broken {
        title: "causal, D 128",
        problems: &[
            "-b 1 --heads 3 -s 250 -d 128 --prec bf16 --mask t",
            "-b 1 --heads 40 -s 20 -d 128 --prec bf16 --mask t",
            // Some key blocks are seen by all queries, and later ones are cut by the diagonal.
            "-b 1 --heads 3 -s 100 --seqlen-k 250 -d 128 --prec bf16 --mask b",
        ],
        ..MAIN
    },
    Broken {
        title: "several CTAs at a sum of dQ, full, D 128",
        problems: &["-b 1 --heads 6 -s 250 --seqlen-k 200 -d 128 --prec bf16"],
        multiprocessors: 4,
        ..MAIN
    },
    Broken {
        title: "several CTAs at a sum of dQ, delta beside the products, causal, D 64",
        problems: &[
            "-b 1 --heads 8 -s 250 -d 64 --prec bf16 --mask t --tile dq_finish=beside_with_delta,load_registers=40",
        ],
        multiprocessors: 4,
        ..MAIN
    },
    Broken {
        title: "zeros before the sums, causal, D 128",
        problems: &["-b 1 --heads 3 -s 250 -d 128 --prec bf16 --mask t --tile dq_path=store_warp"],
        ..MAIN
    },
    Broken {
        title: "one slot of dS, causal, D 128",
        problems: &[
            "-b 1 --heads 3 -s 250 -d 128 --prec bf16 --mask t --tile stages_ds=1",
            "-b 1 --heads 40 -s 20 -d 128 --prec bf16 --mask t --tile stages_ds=1",
            "-b 1 --heads 3 -s 100 --seqlen-k 250 -d 128 --prec bf16 --mask b --tile stages_ds=1",
        ],
        ..MAIN
    },
    Broken {
        title: "causal, D 64, packed sequences",
        problems: &[
            "--mode 1 -b 3 --heads 4 --heads-kv 2 -s 150,500,40 --seqlen-k 200,230,100 -d 64 --prec bf16 --mask b",
            "--mode 1 -b 4 --heads 10 -s 50,30,140,40 --seqlen-k 20,30,200,230 -d 64 --prec bf16 --mask b",
        ],
        ..MAIN
    },
    Broken {
        title: "query heads in parts, D 64",
        problems: &[
            "-b 1 --heads 8 --heads-kv 1 -s 300 --seqlen-k 100 -d 64 --prec bf16 --mask b",
            "-b 1 --heads 4 --heads-kv 1 -s 50 --seqlen-k 100 -d 64 --prec bf16 --mask b",
        ],
        ..MAIN
    },
    Broken {
        title: "dropout, causal, D 128",
        problems: &[
            "-b 1 --heads 8 -s 250 -d 128 --prec bf16 --mask t --p-drop 0.2",
            "-b 1 --heads 40 -s 20 -d 128 --prec bf16 --mask t --p-drop 0.2",
        ],
        ..MAIN
    },
    Broken {
        title: "bias, causal, D 64",
        problems: &[
            "-b 1 --heads 8 --heads-kv 4 -s 350 --seqlen-k 200 -d 64 --prec bf16 --mask b --bias e",
            "-b 1 --heads 40 -s 20 -d 64 --prec bf16 --mask b --bias e",
        ],
        ..MAIN
    },
    Broken {
        title: "a gradient each, causal, D 192",
        problems: &[
            "-b 1 --heads 3 -s 300 --seqlen-k 120 -d 192 --prec bf16 --mask b",
            // Key blocks that no query sees follow one another.
            "-b 1 --heads 40 -s 20 --seqlen-k 128 -d 192 --prec bf16 --mask t",
        ],
        multiprocessors: 2,
        ..MAIN
    },
    Broken {
        title: "clusters of two, causal, D 256",
        problems: &[
            "-b 1 --heads 2 -s 300 --seqlen-k 250 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 3 -s 50 -d 256 --prec bf16 --mask b",
            "-b 1 --heads 24 --heads-kv 2 -s 100 --seqlen-k 250 -d 256 --prec bf16 --mask b",
        ],
        multiprocessors: 2,
        ..MAIN
    },
    Broken {
        title: "clusters of two, packed sequences, full, D 256",
        problems: &[
            "--mode 1 -b 3 --heads 10 --heads-kv 2 -s 150,300,40 --seqlen-k 70,230,100 -d 256 --prec bf16",
        ],
        multiprocessors: 2,
        ..MAIN
    },
    Broken {
        title: "deterministic, full, D 128",
        problems: &[
            "-b 1 --heads 2 -s 400 --seqlen-k 500 -d 128 --prec bf16 --deterministic",
            "-b 1 --heads 3 -s 50 --seqlen-k 300 -d 128 --prec bf16 --deterministic",
        ],
        multiprocessors: 4,
        ..MAIN
    },
    Broken {
        title: "deterministic, causal, D 64",
        problems: &[
            "-b 1 --heads 4 --heads-kv 2 -s 500 -d 64 --prec bf16 --mask b --deterministic",
            "-b 1 --heads 3 -s 50 --seqlen-k 300 -d 64 --prec bf16 --mask b --deterministic",
        ],
        multiprocessors: 4,
        ..MAIN
    },
    Broken {
        title: "deterministic, persistent, causal, D 64",
        problems: &[
            "-b 1 --heads 4 --heads-kv 2 -s 300 -d 64 --prec bf16 --mask b --deterministic --tile persistent=1",
            "-b 1 --heads 12 -s 50 --seqlen-k 300 -d 64 --prec bf16 --mask b --deterministic --tile persistent=1",
        ],
        multiprocessors: 4,
        ..MAIN
    },
    Broken {
        title: "a gradient each, deterministic, causal, D 192",
        problems: &["-b 1 --heads 2 -s 300 --seqlen-k 250 -d 192 --prec bf16 --mask b --deterministic"],
        multiprocessors: 4,
        ..MAIN
    },
    Broken {
        // Clusters of several tiles, whose additions wait for those of other clusters.
        title: "in an order, persistent, clusters of two, causal, D 256",
        problems: &[
            "-b 1 --heads 2 -s 200 --seqlen-k 250 -d 256 --prec bf16 --mask b --deterministic",
            "-b 1 --heads 6 -s 50 -d 256 --prec bf16 --mask b --deterministic",
        ],
        multiprocessors: 4,
        ..MAIN
    },
    Broken {
        title: "deterministic, clusters of two, full, D 256",
        problems: &[
            "-b 1 --heads 2 -s 300 --seqlen-k 500 -d 256 --prec bf16 --deterministic",
            "-b 1 --heads 2 -s 50 --seqlen-k 500 -d 256 --prec bf16 --deterministic",
        ],
        multiprocessors: 8,
        ..MAIN
    },
    Broken {
        title: "gradient of a bias of all heads, D 64",
        entry: "fmha/sm90/bwd/dbias.cuh",
        problems: &[
            "-b 2 --heads 2 -s 150 --seqlen-k 200 -d 64 --prec bf16 --mask b --bias e --dbias",
            "-b 1 --heads 5 -s 50 -d 64 --prec bf16 --mask b --bias e --dbias",
        ],
        ..MAIN
    },
    Broken {
        title: "gradient of sinks, D 64",
        entry: "fmha/sm90/bwd/postprocess.cuh",
        problems: &["-b 2 --heads 2 -s 350 --seqlen-k 200 -d 64 --prec bf16 --mask b --sink --dsink"],
        ..MAIN
    },
];

const HOPPER_BACKWARD_KNOBS: &[&str] = &[
    "-b 1 --heads 2 -s 200 -d 128 --prec bf16 --mask t --tile walk=early_scores,stages_q=3,edges_apart=0",
    "-b 1 --heads 2 -s 200 -d 128 --prec bf16 --mask t --tile dq_path=registers",
    "-b 1 --heads 2 -s 200 -d 128 --prec bf16 --mask t --tile dq_path=store_warp",
    "-b 1 --heads 2 -s 200 -d 128 --prec bf16 --mask t --tile dq_finish=launch",
    "-b 1 --heads 2 -s 200 -d 256 --prec bf16 --tile walk=split_dims",
    "-b 1 --heads 2 -s 200 -d 256 --prec bf16 --mask t --tile walk=split_dims,stages_ds=1",
    "-b 1 --heads 2 -s 200 -d 64 --prec f16 --mask t",
];

const BLACKWELL: &[Broken] = &[
    Broken {
        title: "two query tiles, full, D 128",
        problems: &[
            "-b 1 --heads 3 -s 300 --seqlen-k 700 -d 128 --prec bf16",
            "-b 1 --heads 5 -s 150 --seqlen-k 100 -d 128 --prec bf16",
        ],
        ..BLACKWELL_FORWARD
    },
    Broken {
        title: "two query tiles, causal, packed sequences, D 64",
        problems: &[
            "--mode 1 -b 3 --heads 2 -s 150,300,40 --seqlen-k 200,430,100 -d 64 --prec f16 --mask b --tile stages=3",
            "--mode 1 -b 4 --heads 3 -s 150,30,140,100 --seqlen-k 20,30,200,70 -d 64 --prec f16 --mask b --tile stages=3",
        ],
        ..BLACKWELL_FORWARD
    },
    Broken {
        title: "a lone query tile, window, D 256",
        problems: &[
            "-b 1 --heads 3 -s 300 -d 256 --prec bf16 --mask b:100,0 --tile cluster=1,block_n=64",
            "-b 1 --heads 5 -s 70 --seqlen-k 50 -d 256 --prec bf16 --mask b:100,0 --tile cluster=1,block_n=64",
        ],
        ..BLACKWELL_FORWARD
    },
    Broken {
        title: "pairs of CTAs, causal, packed sequences, D 256",
        problems: &[
            "--mode 1 -b 2 --heads 2 -s 300,270 --seqlen-k 430,330 -d 256 --prec bf16 --mask b --tile cluster=2,block_n=128",
            "--mode 1 -b 4 --heads 3 -s 150,30,140,100 --seqlen-k 20,30,200,70 -d 256 --prec bf16 --mask b --tile cluster=2,block_n=128",
        ],
        multiprocessors: 2,
        ..BLACKWELL_FORWARD
    },
    Broken {
        title: "loads by copies, causal, D 64",
        problems: &[
            "-b 1 --heads 3 -s 300 --seqlen-k 437 -d 64 --prec bf16 --mask b --tile copy_bytes=8,stages=2",
            // A warp's lanes arrive together, so a missing arrival shows only after as many phases as a warp has lanes.
            "-b 1 --heads 72 -s 70 -d 64 --prec bf16 --mask b --tile copy_bytes=8,block_m=256,stages=2",
        ],
        ..BLACKWELL_FORWARD
    },
    Broken {
        title: "keys in parts, packed heads, D 128",
        problems: &[
            "-b 2 --heads 8 --heads-kv 2 -s 3 --seqlen-k 700 -d 128 --prec bf16 --mask b --tile stages=2",
        ],
        ..BLACKWELL_FORWARD
    },
];

/// Without ordered sums at most two blocks of keys add to a query, whose sum then does not depend on the order.
const BLACKWELL_BACKWARD: &[Broken] = &[
    Broken {
        title: "full, D 128",
        problems: &[
            "-b 1 --heads 2 --heads-kv 1 -s 300 --seqlen-k 200 -d 128 --prec bf16",
            "-b 1 --heads 3 -s 100 --seqlen-k 60 -d 128 --prec bf16",
        ],
        ..BLACKWELL_MAIN
    },
    Broken {
        title: "causal, packed sequences, two blocks of dO, D 64",
        problems: &[
            "--mode 1 -b 3 --heads 2 -s 150,300,40 --seqlen-k 200,230,100 -d 64 --prec f16 --mask b",
            "--mode 1 -b 4 --heads 2 --heads-kv 1 -s 50,30,140,40 --seqlen-k 20,30,200,230 -d 64 --prec f16 --mask b",
        ],
        ..BLACKWELL_MAIN
    },
    Broken {
        title: "in an order, full, D 64",
        problems: &["-b 1 --heads 2 -s 400 --seqlen-k 500 -d 64 --prec bf16 --deterministic"],
        multiprocessors: 4,
        ..BLACKWELL_MAIN
    },
    Broken {
        title: "in an order, window with sinks, D 128",
        problems: &[
            "-b 1 --heads 2 --heads-kv 1 -s 300 --seqlen-k 420 -d 128 --prec bf16 --mask b:170,3,20 --deterministic",
        ],
        multiprocessors: 4,
        ..BLACKWELL_MAIN
    },
    Broken {
        title: "causal, D 192 with V of 128",
        problems: &[
            "-b 1 --heads 2 --heads-kv 1 -s 200 --seqlen-k 200 -d 192 --head-dim-v 128 --prec bf16 --mask b",
        ],
        ..BLACKWELL_MAIN
    },
    Broken {
        title: "causal, D 192",
        problems: &["-b 1 --heads 2 --heads-kv 1 -s 200 --seqlen-k 200 -d 192 --prec bf16 --mask b"],
        ..BLACKWELL_MAIN
    },
    Broken {
        title: "causal, D 256",
        problems: &["-b 1 --heads 2 --heads-kv 1 -s 200 --seqlen-k 200 -d 256 --prec bf16 --mask b"],
        ..BLACKWELL_MAIN
    },
];
