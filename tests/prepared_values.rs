//! FP8 V that is prepared once on Hopper gives the same bits as V that each tile prepares, block for block. Emulated.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fmha_conformance::case::{Body, Case, Forward, all};
use fmha_conformance::execute::run_fwd;
use fmha_conformance::run::tile_fields;
use fmha_conformance::tensor::Operand;
use fmha_conformance::tensors::HostFwd;
use fmha_core::{Device, Error, PlanOptions};

/// Cases, each with the fields of its tile that all ways share.
const CASES: [(&str, &str); 7] = [
    ("fp8/blocks/e4m3fn/d128x128/b/r", "block_m=128,block_n=128,stages=2,wait_anchor=0"),
    ("fp8/blocks/e4m3fn/d128x128/b/r", "block_m=192,block_n=80,stages=3,wait_anchor=0"),
    ("fp8/blocks/e5m2/d96x96/b/r", "block_n=112,stages=2,wait_anchor=0"),
    ("fp8/blocks/e4m3fn/group", "block_m=128,block_n=64,stages=2,wait_anchor=0"),
    ("fp8/blocks/e4m3fn/window", "block_m=64,block_n=48,stages=2,wait_anchor=0"),
    ("fp8/blocks/e5m2/d160x160/0/r", "stages=2"),
    ("fp8/blocks/e4m3fn/d256x256/b/r", "stages=2"),
];

fn forward(name: &str) -> Box<Forward> {
    let case: Option<Case> = all().into_iter().find(|case| case.name == name);
    match case.map(|case| case.body) {
        Some(Body::Forward(forward)) => forward,
        _ => panic!("{name} is no forward case"),
    }
}

/// Computes O and returns the bits of every element.
fn output(backend: &Device, case: &Forward, tile: &str) -> Result<Vec<u64>, Error> {
    let options = PlanOptions::default().tile(tile_fields(tile)).kernel("sm90");
    let mut host = HostFwd::new(case.problem.clone(), &case.lengths, case.data)?;
    let plan = backend.plan_fwd(&host.problem, &options)?;
    run_fwd(backend, &plan, &mut host)?;
    let o = host.operands.expect(Operand::O);
    let shape = o.shape;
    let rows = (0..shape.batch)
        .flat_map(|b| (0..shape.seq).flat_map(move |i| (0..shape.head).map(move |h| [b, i, h])));
    let elements = rows.flat_map(|[b, i, h]| (0..shape.dim).map(move |d| [b, i, h, d]));
    Ok(elements.map(|at| o.get(at[0], at[1], at[2], at[3]).to_bits()).collect())
}

#[test]
fn a_v_that_is_prepared_once_has_the_bits_of_one_that_each_tile_prepares() {
    let backend = match fmha_cuda::open(0, Some("sm_90a")) {
        Ok(backend) => backend,
        Err(error) => return println!("absent: {error}"),
    };
    for (name, tile) in CASES {
        let case = forward(name);
        let of = |prepare_v: &str| output(&backend, &case, &format!("{tile},prepare_v={prepare_v}"));
        let in_tile = match of("in_tile") {
            Ok(bits) => bits,
            Err(Error::NoDevice(reason)) => return println!("absent: {reason}"),
            Err(error) => panic!("{name}: {error}"),
        };
        for once in ["before", "beside"] {
            let bits = of(once).unwrap_or_else(|error| panic!("{name}, {once}: {error}"));
            let other = bits.iter().zip(&in_tile).filter(|(a, b)| a != b).count();
            assert_eq!(other, 0, "{name}, {tile}, {once}: of {} elements", bits.len());
        }
        println!("{name}, {tile}: {} elements", in_tile.len());
    }
}
