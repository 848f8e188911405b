//! Operand addresses that kernels accept, and the tensor maps made for them. The addresses point to no memory.

use fmha_core::spec::BwdSpec;
use fmha_core::{
    Bias, BiasBroadcast, BwdArgs, BwdProblem, Call, DType, DevSlice, DevSliceMut, Dims, ElementwiseBias,
    FwdArgs, FwdProblem, MemorySpace, PlanOptions, Problem, ProblemError, Strides, Totals, VLayout, ValidFwd,
};
use fmha_gpu::{Choice, Planned};
use fmha_kernels_cuda::sm90::{PrepareV, ValueProduct};
use fmha_kernels_cuda::sm90_bwd as bwd_text;

use super::{Cuda, biased, choose, of_lengths, stated, tile};
use fmha_kernels_cuda::maps::{BlocksOfV, Boxes, MapFacts};
use fmha_kernels_cuda::sm90::recipe::{Sm90, boxes as sm90_boxes};
use fmha_kernels_cuda::sm90_bwd::recipe::{Sm90Bwd, map_facts};
use fmha_kernels_cuda::sm100::recipe::Sm100;

/// Addresses of operands that are 64 KiB apart, with one of them moved by `off` bytes.
#[derive(Clone, Copy)]
struct Places {
    moved: &'static str,
    off: u64,
}

/// A call on the default stream whose lengths lie on the device.
fn call<'a, P: Problem>(problem: &'a P, args: &'a P::Args<'a>) -> Call<'a, P> {
    Call { problem, args, spans: &[], stream: 0 }
}

const NAMES: [&str; 10] = ["q", "k", "v", "o", "lse", "dout", "dq", "dk", "dv", "bias"];

impl Places {
    fn of(self, name: &str) -> u64 {
        let at = NAMES.iter().position(|known| *known == name).unwrap() as u64;
        ((at + 1) << 16) + if name == self.moved { self.off } else { 0 }
    }

    fn read(self, name: &str) -> DevSlice<'static> {
        // SAFETY: nothing reads the memory.
        unsafe {
            DevSlice::from_raw(MemorySpace::Device, self.of(name) as *const u8, 1, fmha_core::ElemType::Bytes)
        }
    }

    fn written(self, name: &str) -> DevSliceMut<'static> {
        // SAFETY: nothing writes the memory.
        unsafe {
            DevSliceMut::from_raw(
                MemorySpace::Device,
                self.of(name) as *mut u8,
                1,
                fmha_core::ElemType::Bytes,
            )
        }
    }

    fn forward(self, totals: Totals) -> FwdArgs<'static> {
        let mut args = FwdArgs::new(self.read("q"), self.read("k"), self.read("v"), self.written("o"));
        args.score.bias = Some(self.read("bias"));
        args.seq.totals = totals;
        args
    }

    fn backward(self) -> BwdArgs<'static> {
        BwdArgs::new(
            [self.read("q"), self.read("k"), self.read("v")],
            [self.read("o"), self.read("lse"), self.read("dout")],
            [self.written("dq"), self.written("dk"), self.written("dv")],
        )
    }
}

/// Rows of (operand, its distance from a multiple of 64 KiB, the alignment that the kernel then requires); 0 if the
/// kernel accepts the operand there.
type Rows = &'static [(&'static str, u64, u64)];

fn takes(what: &str, rows: Rows, takes: impl Fn(Places) -> Result<(), ProblemError>) {
    for &(moved, off, align) in rows {
        match takes(Places { moved, off }) {
            Ok(()) => assert_eq!(align, 0, "{what}: {moved} at {off}"),
            Err(error) => {
                let text = error.to_string();
                let address = Places { moved, off }.of(moved);
                let words = format!("starts at {address:#x}, which is no multiple of the {align} bytes");
                assert!(text.contains(&words) && text.contains(moved), "{what}: {moved} at {off}: {text}");
            }
        }
    }
}

fn forward_takes(what: &str, arch: &str, problem: FwdProblem, words: &str, rows: Rows) {
    let problem = problem.validate().unwrap();
    let (facts, options) = (stated(arch), tile(words));
    let planned: Choice<Planned<_, Cuda>> = match arch {
        "sm_90a" => choose::<Sm90, _>(&problem, &facts, &options).unwrap().planned(),
        _ => choose::<Sm100, _>(&problem, &facts, &options).unwrap().planned(),
    };
    takes(what, rows, |places| {
        let args = places.forward(Totals::NONE);
        planned.kernel.takes_addresses(&call(&problem, &args))
    });
}

const LONG: [u32; 2] = [512, 512];
const ALIGNED: Rows = &[("q", 16, 0), ("q", 8, 16), ("k", 8, 16), ("v", 8, 16), ("o", 8, 16), ("v", 1, 16)];
const NO_KEYS: Rows = &[("q", 8, 16), ("k", 8, 0), ("v", 2, 0), ("o", 8, 16)];

#[test]
fn forward_kernels_take_what_their_loads_and_stores_reach() {
    for arch in ["sm_90a", "sm_100a"] {
        let plain = of_lengths(LONG, [4, 4], 128, "0");
        forward_takes("TMA", arch, plain.clone(), "", ALIGNED);
        forward_takes("no keys", arch, of_lengths([512, 0], [4, 4], 128, "0"), "", NO_KEYS);
        let mut odd = plain.clone();
        (odd.strides.k.seq, odd.strides.k.head) = (4 * 128 + 8 + 4, 128);
        odd.strides.k.batch = 0;
        let copied = [("q", 8, 0), ("k", 8, 0), ("v", 8, 0), ("q", 4, 8), ("k", 4, 8), ("o", 8, 16)];
        forward_takes("copies", arch, odd, "copy_bytes=8", Box::leak(Box::new(copied)));
        // O whose rows are scattered is stored element by element.
        let mut scattered = plain;
        scattered.strides.o.seq += 1;
        forward_takes("no vectors", arch, scattered, "vector_store=0", &[("o", 2, 0), ("q", 2, 16)]);
    }
    let bias = || biased(of_lengths(LONG, [4, 4], 128, "0"), 512);
    forward_takes("bias by TMA", "sm_90a", bias(), "bias_stages=1", &[("bias", 16, 0), ("bias", 8, 16)]);
    forward_takes("bias from memory", "sm_90a", bias(), "bias_stages=0", &[("bias", 2, 0)]);
    // Parts store their O in the workspace; the merge writes the rows of the whole O element by element.
    let split = of_lengths([1, 4096], [4, 4], 128, "0");
    forward_takes("parts", "sm_100a", split, "split_keys=512", &[("o", 2, 0), ("k", 2, 16)]);
}

#[test]
fn the_backward_takes_what_its_loads_and_stores_reach() {
    let backward_takes = |what: &str, problem: BwdProblem, rows: Rows| {
        let problem = problem.validate().unwrap();
        let chosen = choose::<Sm90Bwd, _>(&problem, &stated("sm_90a"), &PlanOptions::default());
        let planned: Choice<Planned<_, Cuda>> = chosen.unwrap().planned();
        takes(what, rows, |places| {
            let args = places.backward();
            planned.kernel.takes_addresses(&call(&problem, &args))
        });
    };
    let plain = BwdProblem::new(of_lengths(LONG, [4, 4], 128, "0"));
    const ALL: Rows = &[
        ("q", 16, 0),
        ("q", 8, 16),
        ("k", 8, 16),
        ("v", 8, 16),
        ("o", 8, 16),
        ("dout", 8, 16),
        ("dq", 8, 16),
        ("dk", 8, 16),
        ("dv", 8, 16),
        ("lse", 4, 0),
    ];
    backward_takes("plain", plain.clone(), ALL);
    let no_keys = BwdProblem::new(of_lengths([512, 0], [4, 4], 128, "0"));
    backward_takes(
        "no keys",
        no_keys,
        &[("k", 8, 0), ("v", 8, 0), ("dk", 8, 0), ("dv", 8, 0), ("dq", 8, 16)],
    );
    let mut scattered = plain;
    scattered.dq.seq += 1;
    backward_takes("no vectors", scattered, &[("dq", 2, 0), ("dk", 2, 0), ("dv", 2, 0), ("k", 2, 16)]);
}

const HOME: Places = Places { moved: "", off: 0 };

fn facts_of(problem: FwdProblem, totals: Totals) -> MapFacts {
    let problem: ValidFwd = problem.validate().unwrap();
    let boxes = Boxes {
        q: [64, 2, 64, 1, 1],
        k: [64, 128, 1, 1],
        v: [64, 112, 1, 1],
        bias: matches!(problem.score.bias, Bias::Elementwise(_)).then_some([64, 64, 1, 1]),
        prepared_v: None,
        turned_q: None,
    };
    let args = HOME.forward(totals);
    MapFacts::of(&call(&problem, &args), &boxes)
}

/// Stride of an axis with one element: the driver accepts any positive multiple of 16.
const ANY: u64 = 1 << 20;

#[test]
fn forward_maps_say_where_elements_lie() {
    let mut two = of_lengths([200, 300], [4, 2], 64, "0");
    two.dims.batch = 2;
    let two = FwdProblem::batch(DType::Bf16, two.dims);
    // Rows of four heads of 64 two-byte elements are 512 bytes long; those of two heads are 256.
    let facts = facts_of(two.clone(), Totals::NONE);
    assert_eq!((facts.q.dims, facts.q.strides_bytes), ([64, 2, 200, 2, 2], [128, 512, 256, 200 * 512]));
    assert_eq!((facts.k.dims, facts.k.strides_bytes), ([64, 300, 2, 2], [256, 128, 300 * 256]));
    assert_eq!((facts.v.dims, facts.v.strides_bytes), ([64, 300, 2, 2], [256, 128, 300 * 256]));
    assert_eq!((facts.q.box_dims, facts.k.box_dims[1], facts.v.box_dims[1]), ([64, 2, 64, 1, 1], 128, 112));
    let addresses = [facts.q.address, facts.k.address, facts.v.address];
    assert_eq!(addresses, ["q", "k", "v"].map(|name| HOME.of(name)));
    assert!(facts.bias.is_none());

    let mut columns = two.clone();
    columns.layout.v = VLayout::ColMajor;
    columns.dims.seqlen_k = 304;
    columns.strides.v = Strides::bhds(columns.shape_v());
    columns.strides.k = Strides::bshd(columns.shape_k());
    let v = facts_of(columns, Totals::NONE).v;
    assert_eq!((v.dims, v.strides_bytes), ([304, 64, 2, 2], [608, 64 * 608, 2 * 64 * 608]));

    // The call has one row, one head and one sequence.
    let one = facts_of(of_lengths([1, 1], [1, 1], 64, "0"), Totals::NONE);
    assert_eq!((one.q.dims, one.q.strides_bytes), ([64, 1, 1, 1, 1], [ANY; 4]));
    assert_eq!((one.k.dims, one.k.strides_bytes), ([64, 1, 1, 1], [ANY; 3]));

    // Packed sequences count as one sequence of all rows.
    let packed = facts_of(FwdProblem::group(DType::Bf16, two.dims), Totals::packed(333, 444));
    assert_eq!((packed.q.dims, packed.q.strides_bytes), ([64, 2, 333, 2, 1], [128, 512, 256, ANY]));
    assert_eq!((packed.k.dims, packed.k.strides_bytes), ([64, 444, 2, 1], [256, 128, ANY]));

    // Operands of absent keys are not read.
    let no_keys = facts_of(of_lengths([200, 0], [4, 2], 64, "0"), Totals::NONE);
    assert_eq!([no_keys.k.address, no_keys.v.address], [HOME.of("q"); 2]);
    assert_eq!(no_keys.k.dims, [64, 1, 2, 1]);
}

/// The tensor map of a prepared V covers its blocks in the workspace: 4 blocks of 96 keys for each of 2 sequences
/// and 2 kv heads.
#[test]
fn the_map_of_a_v_that_is_prepared_has_its_blocks() {
    let dims = Dims { batch: 2, ..of_lengths([200, 300], [4, 2], 64, "0").dims };
    let problem = FwdProblem::batch(DType::E4m3Fn, dims).dtype_o(DType::Bf16);
    let problem = problem.validate().unwrap();
    let mut tile = fmha_kernels_cuda::sm90::choose_tile(&problem);
    (tile.prepare_v, tile.block_n) = (PrepareV::Before, 96);
    let prepared = |dtype, columns, rows| BlocksOfV { address: 1 << 30, dtype, dims: [columns, rows, 4, 4] };
    for (pv, blocks, strides, box_dims) in [
        (ValueProduct::F16, prepared(DType::F16, 64, 96), [128, 96 * 128, 4 * 96 * 128], [64, 96, 1, 1]),
        (ValueProduct::Direct, prepared(DType::E4m3Fn, 96, 64), [96, 64 * 96, 4 * 64 * 96], [32, 64, 1, 1]),
    ] {
        tile.pv = pv;
        let args = HOME.forward(Totals::NONE);
        let facts = MapFacts::of(&call(&problem, &args), &sm90_boxes(&problem, &tile, Some(blocks)));
        assert_eq!((facts.v.address, facts.v.dtype), (1 << 30, blocks.dtype));
        assert_eq!((facts.v.dims, facts.v.strides_bytes), (blocks.dims, strides));
        assert_eq!(facts.v.box_dims, box_dims);
        assert_eq!(facts.k.address, HOME.of("k"));
    }
}

#[test]
fn the_map_of_a_bias_has_the_axes_that_its_strides_have() {
    let of = |seqlen_q: u32, broadcast, strides| {
        let mut problem = of_lengths([seqlen_q, 96], [4, 4], 64, "0");
        problem.dims.batch = 3;
        let mut problem = FwdProblem::batch(DType::Bf16, problem.dims);
        problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::Bf16, broadcast, strides });
        let map = facts_of(problem, Totals::NONE).bias.unwrap();
        assert_eq!((map.address, map.box_dims), (HOME.of("bias"), [64, 64, 1, 1]));
        (map.dims, map.strides_bytes)
    };
    let strides = |batch, head| Strides { batch, seq: 104, head, dim: 1 };
    let each = of(40, BiasBroadcast::BatchHead, strides(4 * 4160, 4160));
    assert_eq!(each, ([96, 40, 4, 3], [208, 8320, 4 * 8320]));
    // An axis with stride 0 is passed to the kernel as an axis of one element.
    let shared = of(40, BiasBroadcast::BatchHead, strides(4160, 0));
    assert_eq!(shared, ([96, 40, 1, 3], [208, ANY, 8320]));
    let of_heads = of(40, BiasBroadcast::OneHead, strides(4160, 4160));
    assert_eq!(of_heads, ([96, 40, 4, 1], [208, 8320, ANY]));
    let one_row = of(1, BiasBroadcast::OneOne, strides(4160, 4160));
    assert_eq!(one_row, ([96, 1, 1, 1], [ANY; 3]));
}

#[test]
fn a_bias_has_a_map_where_its_tile_brings_it() {
    let problem = biased(of_lengths(LONG, [4, 4], 128, "0"), 512).validate().unwrap();
    let mut own = fmha_kernels_cuda::sm90::choose_tile(&problem);
    for (stages, boxed) in [(0, false), (1, true), (2, true)] {
        own.bias_stages = stages;
        assert_eq!(sm90_boxes(&problem, &own, None).bias.is_some(), boxed, "{stages} stages");
    }
}

#[test]
fn backward_maps_say_where_elements_lie() {
    let of = |fwd: FwdProblem| {
        let problem = BwdProblem::new(fwd).validate().unwrap();
        let tile = bwd_text::choose_tile(&problem, &BwdSpec::of(&problem));
        let args = HOME.backward();
        let maps = map_facts(&call(&problem, &args), &tile);
        assert_eq!(maps[0].box_dims, [64, (tile.block_m / tile.walk.cluster()) as u32, 1, 1]);
        assert_eq!(maps[1].box_dims, [64, tile.block_n as u32, 1, 1]);
        maps.map(|map| (map.address, map.dims, map.strides_bytes))
    };
    let mut two = of_lengths([200, 300], [4, 2], 64, "0").dims;
    two.batch = 2;
    let queries = ([64, 200, 4, 2], [512, 128, 200 * 512]);
    let keys = ([64, 300, 2, 2], [256, 128, 300 * 256]);
    let expected = [("q", queries), ("k", keys), ("v", keys), ("dout", queries), ("dout", queries)]
        .map(|(name, (dims, strides))| (HOME.of(name), dims, strides));
    assert_eq!(of(FwdProblem::batch(DType::Bf16, two)), expected);

    let one = of(of_lengths([1, 1], [1, 1], 64, "0"));
    assert!(one.iter().all(|&(_, dims, strides)| (dims, strides) == ([64, 1, 1, 1], [ANY; 3])), "{one:?}");

    // O has a tensor map if the kernel computes delta from it, which it does with enough heads.
    let long = of(of_lengths([2048, 2048], [64, 64], 64, "0"));
    assert_eq!(long[4].0, HOME.of("o"));

    // Operands of absent queries are not read.
    let no_queries = of(of_lengths([0, 300], [2, 2], 64, "0"));
    assert_eq!(no_queries.map(|(address, ..)| address), ["k", "k", "v", "k", "k"].map(|name| HOME.of(name)));
}
