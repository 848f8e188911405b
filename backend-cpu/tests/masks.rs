//! Masks as data: properties beyond the battery's cases, namely lists in any order, the checking mode of a plan,
//! and refusals.

#![allow(clippy::unwrap_used)]

use fmha_core::{
    BlockLists, DType, DevSlice, DevSliceMut, Device, Dims, FwdArgs, FwdProblem, Intervals, MaskArgs,
    MaskAxes, MaskSpec, PlanOptions,
};

const DIMS: Dims = Dims::batch(1).seqlens(40, 70).heads(2, 2).head_dim(16);

fn device() -> Device {
    Device::new(fmha_cpu::CpuBackend::new().unwrap())
}

fn run(problem: &FwdProblem, masks: MaskArgs<'_>, options: &PlanOptions) -> Result<Vec<f32>, String> {
    let numbers = |count: u64, salt: u64| -> Vec<f32> {
        (0..count).map(|at| ((at * 7919 + salt) % 101) as f32 / 50.0 - 1.0).collect()
    };
    let q = numbers(problem.shape_q().num_elems(), 1);
    let k = numbers(problem.shape_k().num_elems(), 2);
    let v = numbers(problem.shape_v().num_elems(), 3);
    let mut o = vec![f32::NAN; q.len()];
    let device = device();
    let problem = problem.clone().validate().unwrap();
    let plan = device.plan_fwd(&problem, options).map_err(|error| error.to_string())?;
    let [q, k, v] = [&q, &k, &v].map(|x| DevSlice::host(x.as_slice()));
    let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut o)).masks(masks);
    plan.run(&mut args, &device.default_stream()).map_err(|error| error.to_string())?;
    Ok(o)
}

#[test]
fn bits_do_not_depend_on_the_order_of_a_list() {
    let problem = FwdProblem::batch(DType::F32, DIMS);
    let lists = BlockLists::dense(&problem, MaskAxes::SHARED, [16, 8], Some(5), Some(3));
    let problem = problem.block_lists(lists);
    let (counts, full_counts) = ([5, 2, 0], [1, 0, 3]);
    let attend = |indices: [i32; 15], full: [i32; 9]| {
        let args = MaskArgs::default()
            .kv_num_blocks(DevSlice::host(&counts))
            .kv_indices(DevSlice::host(&indices))
            .full_kv_num_blocks(DevSlice::host(&full_counts))
            .full_kv_indices(DevSlice::host(&full));
        run(&problem, args, &PlanOptions::default()).unwrap()
    };
    let first = attend([8, 1, 4, 0, 6, 3, 7, -1, 99, 5, 0, 0, 0, 0, 0], [3, -9, 77, 1, 2, 3, 5, 0, 8]);
    let second = attend([0, 1, 4, 6, 8, 7, 3, 2, 2, 2, 9, 9, 9, 9, 9], [3, 0, 0, 0, 0, 0, 8, 5, 0]);
    assert!(first.iter().all(|x| x.is_finite()));
    assert_eq!(first, second);
    let other = attend([0, 1, 4, 6, 7, 7, 3, 2, 2, 2, 9, 9, 9, 9, 9], [3, 0, 0, 0, 0, 0, 8, 5, 0]);
    assert_ne!(first, other);
}

#[test]
fn a_plan_that_checks_reports_an_endpoint_and_one_that_does_not_clamps_it() {
    let problem = FwdProblem::batch(DType::F32, DIMS);
    let problem = problem.clone().intervals(Intervals::batch(&problem, MaskAxes::SHARED, 2));
    let of = |end: i32| -> Vec<i32> { (0..80).map(|at| if at < 40 { 3 } else { end }).collect() };
    let attend = |end: i32, options: &PlanOptions| {
        let endpoints = of(end);
        run(&problem, MaskArgs::default().intervals(DevSlice::host(&endpoints)), options)
    };
    let checks = PlanOptions::default().check_lengths(true);
    let whole = attend(70, &checks).unwrap();
    assert_eq!(attend(1000, &PlanOptions::default()).unwrap(), whole);
    let error = attend(1000, &checks).unwrap_err();
    assert!(error.contains("endpoint 1 of sequence 0, head 0, query 0 is 1000, not in 0..=70"), "{error}");
}

#[test]
fn a_tree_mask_is_refused_beside_masks() {
    let problem = FwdProblem::batch(DType::F32, DIMS);
    let problem = problem.clone().intervals(Intervals::batch(&problem, MaskAxes::SHARED, 2));
    let tree = problem.mask(MaskSpec::CAUSAL).tree_mask(true).validate().unwrap();
    let error = device().plan_fwd(&tree, &PlanOptions::default()).unwrap_err().to_string();
    assert!(error.contains("intervals: a mask as data is not in this kernel beside tree_mask"), "{error}");
}
