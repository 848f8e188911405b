//! Wrong input through the library's API that the command cannot express.

use fmha::{
    Backend, DType, DevSlice, DevSliceMut, Dims, Error, FwdArgs, FwdProblem, MaskSpec, MemorySpace,
    PlanOptions, Workspace,
};
use fmha_core::args::check_fwd;
use fmha_core::seq::spans;

const DIMS: Dims = Dims::batch(2).seqlens(4, 4).heads(2, 2).head_dim(8);

/// Result of `spans` for these offsets, for two packed sequences of at most 4 of 8 rows.
fn said_of(cu_seqlens_q: &[i32]) -> String {
    let problem = FwdProblem::group(DType::F32, DIMS);
    let good = [0, 4, 8];
    let seq = fmha::SeqArgs::default()
        .totals(fmha::Totals::packed(8, 8))
        .cu_seqlens_q(DevSlice::host(cu_seqlens_q))
        .cu_seqlens_k(DevSlice::host(&good));
    spans(&problem, &seq).map(drop).unwrap_err().to_string()
}

#[test]
fn offsets_that_no_packing_has_are_refused_by_index() {
    assert_eq!(said_of(&[0, 4, 3]), "cu_seqlens_q[2] 3 is less than cu_seqlens_q[1] 4");
    assert_eq!(said_of(&[-1, 4, 8]), "cu_seqlens_q[0] -1 is negative");
    assert_eq!(said_of(&[0, 4, 9]), "cu_seqlens_q[2] 9 is larger than the 8 rows of the packed tensor");
    assert!(said_of(&[0, 4]).contains("cu_seqlens_q has 8 bytes"));
    assert!(said_of(&[0, 7, 8]).contains("sequence 0 has 7 rows, more than the maximal length 4"));
}

#[test]
fn buffers_that_are_short_or_overlap_are_refused_and_nothing_is_written() {
    let backend = Backend::Cpu.open().unwrap();
    let problem = FwdProblem::batch(DType::F32, DIMS).validate().unwrap();
    let plan = backend.plan_fwd(&problem, &PlanOptions::default()).unwrap();
    let q = vec![1.0f32; 128];
    let mut o = vec![7.0f32; 128];

    let run = |args: &mut FwdArgs<'_>| match plan.run(args, &backend.default_stream()) {
        Err(Error::Problem(error)) => error,
        other => panic!("{other:?}"),
    };
    let short = run(&mut FwdArgs::new(
        DevSlice::host(&q),
        DevSlice::host(&q[..100]),
        DevSlice::host(&q),
        DevSliceMut::host(&mut o),
    ));
    assert_eq!(
        (short.field, short.text.as_str()),
        ("k", "k has 400 bytes, but its extents and strides reach 512")
    );

    let overlapping = {
        // SAFETY: host memory of `o`, which lives; the call is refused before it touches it.
        let same = unsafe { DevSlice::from_raw(MemorySpace::Host, o.as_ptr().cast(), 512, DType::F32) };
        run(&mut FwdArgs::new(same, DevSlice::host(&q), DevSlice::host(&q), DevSliceMut::host(&mut o)))
    };
    assert_eq!(overlapping.field, "o");
    assert!(
        overlapping.text.contains("512 bytes") && overlapping.text.contains("overlaps q"),
        "{overlapping}"
    );

    // SAFETY: never read: the space is not the backend's.
    let elsewhere = unsafe { DevSlice::from_raw(MemorySpace::Device, q.as_ptr().cast(), 512, DType::F32) };
    let elsewhere =
        run(&mut FwdArgs::new(DevSlice::host(&q), elsewhere, DevSlice::host(&q), DevSliceMut::host(&mut o)));
    assert_eq!(elsewhere.text, "k is in Device memory, not in Host memory");
    assert!(o.iter().all(|&o| o == 7.0));
}

#[test]
fn operands_are_there_iff_the_problem_has_them() {
    let base = FwdProblem::batch(DType::F32, DIMS);
    let with_lse = base.clone().write_lse(true).validate().unwrap();
    let q = vec![1.0f32; 128];
    let mut o = vec![0.0f32; 128];
    let args =
        FwdArgs::new(DevSlice::host(&q), DevSlice::host(&q), DevSlice::host(&q), DevSliceMut::host(&mut o));
    let missing = check_fwd(&with_lse, &args, Workspace::NONE, MemorySpace::Host).unwrap_err();
    assert_eq!(missing.text, "lse is missing: 64 bytes are wanted");
    let sinks = [0.0f32; 2];
    let mut args = args;
    args.score.sink = Some(DevSlice::host(&sinks));
    let unwanted =
        check_fwd(&base.validate().unwrap(), &args, Workspace::NONE, MemorySpace::Host).unwrap_err();
    assert_eq!(unwanted.text, "sink is given, but the problem has none");
}

#[test]
fn layouts_that_contradict_themselves_are_refused() {
    let base = FwdProblem::batch(DType::F32, DIMS);
    let said = |change: &dyn Fn(&mut FwdProblem)| {
        let mut problem = base.clone();
        change(&mut problem);
        problem.validate().unwrap_err().to_string()
    };
    assert!(said(&|p| p.strides.q.dim = 2).contains("q.dim stride 2 is not 1"));
    assert!(said(&|p| p.strides.k.seq = -16).contains("k.seq stride -16 is negative"));
    assert!(said(&|p| p.strides.o.head = 0).contains("o strides"));
    assert!(said(&|p| p.score.softmax_scale = Some(f32::NAN)).contains("softmax_scale NaN"));
    assert!(said(&|p| p.strides.q.batch = i64::MAX).contains("q strides"));
    assert!("b:1,2,3,4".parse::<MaskSpec>().is_err());
}
