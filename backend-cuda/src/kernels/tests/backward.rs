//! Backward plans: their launches, promises and texts.

use fmha_core::{Bias, BiasGrad, BwdProblem, DType, FwdProblem, PlanOptions, Refusal, Strides, VLayout};
use fmha_gpu::{Choice, Grid};
use fmha_kernels_cuda::sm80_bwd::recipe::Sm80Bwd;
use fmha_kernels_cuda::sm90_bwd::recipe::Sm90Bwd;
use fmha_kernels_cuda::sm100_bwd::recipe::Sm100Bwd;

use super::{biased, choose, detail, of_lengths, stated, tile};

fn backward(problem: &BwdProblem, options: &PlanOptions) -> Result<Choice<Sm90Bwd>, Refusal> {
    let problem = problem.clone().validate().unwrap();
    choose::<Sm90Bwd, _>(&problem, &stated("sm_90a"), options)
}

#[test]
fn dq_of_mma_sync_has_one_order_where_that_is_asked_for_and_one_pass_where_it_can() {
    let launches = |problem: &FwdProblem, options: &PlanOptions| {
        let problem = BwdProblem::new(problem.clone()).validate().unwrap();
        let choice = choose::<Sm80Bwd, _>(&problem, &stated("sm_80"), options);
        let choice = choice.map_err(|refusal| refusal.to_string())?;
        let names: Vec<_> = choice.launches.iter().map(|launch| launch.kernel).collect();
        Ok::<_, String>((names, choice.promises.deterministic))
    };
    let (long, wide) = (of_lengths([8192, 8192], [4, 4], 128, "b"), of_lengths([64, 64], [1, 1], 256, "b"));
    let two = (vec!["sm80_stats", "sm80_dq", "sm80_dkdv"], true);
    assert_eq!(
        launches(&long, &PlanOptions::default()),
        Ok((vec!["sm80_stats", "sm80_all", "sm80_finish_dq"], false))
    );
    assert_eq!(launches(&long, &PlanOptions::default().deterministic(true)), Ok(two.clone()));
    assert_eq!(launches(&long, &tile("one_pass=0")), Ok(two));
    let said = launches(&wide, &tile("one_pass=1")).unwrap_err();
    assert!(said.contains("one_pass=1: head_dim_qk 256 is larger than 128"), "{said}");
    let modified = [long.clone().softcap(2.0), long.mask_code(Some("q >= k".parse().unwrap()))];
    for problem in modified {
        let said = launches(&problem, &tile("one_pass=1")).unwrap_err();
        assert!(said.contains("one_pass=1: 1 of soft-cap, bias, code and dropout"), "{said}");
    }
}

#[test]
fn the_backward_of_blackwell_says_what_it_leaves_to_others() {
    let choose = |problem: FwdProblem, arch: &str, words: &str| {
        let problem = BwdProblem::new(problem).validate().unwrap();
        let choice = choose::<Sm100Bwd, _>(&problem, &stated(arch), &tile(words));
        let choice = choice.map_err(|refusal| refusal.to_string())?;
        let names: Vec<_> = choice.launches.iter().map(|launch| launch.kernel).collect();
        Ok::<_, String>((names, choice.promises.deterministic, detail(&choice, "stages").unwrap()))
    };
    let of = |keys: u32, dim: u32| of_lengths([512, keys], [4, 2], dim, "b");
    let names = vec!["sm100_stats", "sm100", "sm100_finish_dq"];
    // With one block of keys, each element of dQ is a sum of one term.
    for (problem, deterministic, stages) in [
        (of(512, 128), false, "2 Q, 1 dO"),
        (of(128, 64), true, "2 Q, 2 dO"),
        (of(129, 24), false, "2 Q, 2 dO"),
        (of(512, 136), false, "2 Q, 2 dO"),
        (of(128, 256), true, "2 Q, 2 dO"),
    ] {
        let expected = Ok((names.clone(), deterministic, stages.to_owned()));
        assert_eq!(choose(problem, "sm_100a", ""), expected);
    }
    let mut odd = of(512, 128);
    odd.strides.k.seq += 4;
    let mut columns = of(512, 128);
    (columns.layout.v, columns.strides.v) = (VLayout::ColMajor, Strides::bhds(columns.shape_v()));
    assert!(choose(columns.clone(), "sm_100a", "").is_ok());
    columns.strides.v.dim += 4;
    let wider = |head_dim_v: u32| {
        let mut wider = of(512, 64);
        wider.dims.head_dim_v = head_dim_v;
        (wider.strides.v, wider.strides.o) = (Strides::bshd(wider.shape_v()), Strides::bshd(wider.shape_o()));
        wider
    };
    assert!(choose(wider(192), "sm_100a", "").is_ok());
    for (problem, arch, words, said) in [
        (wider(200), "sm_100a", "", "head_dim_qk 64 with head_dim_v 200: dK and dV take 288 columns"),
        (columns, "sm_100a", "", "backward: v.dim stride 516 is not a multiple of 8"),
        (odd, "sm_100a", "", "backward: k.seq stride 260 is not a multiple of 8"),
        (of(512, 128), "sm_120a", "", "the device is sm_120a, which has no TMA with tcgen05"),
        (of(512, 128), "sm_90a", "", "the device is sm_90a, which has no TMA with tcgen05"),
        (of(512, 128), "sm_100a", "stages_q=3", "bytes of shared memory"),
        (of(512, 128), "sm_100a", "stages_q=1", "stages_q"),
        (of(512, 128), "sm_100a", "block_m=64", "tile block_m"),
    ] {
        let refusal = choose(problem, arch, words).unwrap_err();
        assert!(refusal.contains(said), "{refusal}");
    }
}

#[test]
fn dq_of_blackwell_has_one_order_where_that_is_asked_for() {
    let problem = BwdProblem::new(of_lengths([512, 512], [4, 2], 128, "b")).validate().unwrap();
    let promised = |options: &PlanOptions| {
        let choice = choose::<Sm100Bwd, _>(&problem, &stated("sm_100a"), options).unwrap();
        (choice.promises.deterministic, choice.promises.batch_invariant, choice.workspace.bytes)
    };
    let plain = promised(&PlanOptions::default());
    let ordered = promised(&PlanOptions::default().deterministic(true));
    assert_eq!((plain.0, plain.1), (false, false));
    // The workspace has one counter for each block of queries of each head.
    assert_eq!(ordered, (true, true, plain.2 + 4 * 4 * 4));
    assert_eq!(promised(&PlanOptions::default().batch_invariant(true)), ordered);
}

/// Blackwell launches two CTAs for each block of keys if dK and dV have 256 columns each; blocks of queries have 64
/// rows.
#[test]
fn the_grid_of_blackwell_has_two_ctas_to_a_block_of_keys_where_both_sums_do_not_fit() {
    let grids = |head_dim: u32| {
        let problem = BwdProblem::new(of_lengths([500, 512], [4, 2], head_dim, "b")).validate().unwrap();
        let choice = choose::<Sm100Bwd, _>(&problem, &stated("sm_100a"), &tile("")).unwrap();
        let groups: Vec<_> = choice.launches.iter().skip(1).map(|launch| launch.grid.groups).collect();
        (groups, detail(&choice, "gradients"))
    };
    assert_eq!(grids(128), (vec![2 * 4, 4 * 4], None));
    assert_eq!(grids(192), (vec![2 * 4, 4 * 8], None));
    assert_eq!(grids(256), (vec![2 * 2 * 4, 4 * 8], Some("dK and dQ of a CTA, dV of another".to_owned())));
}

/// Row-invariant gradients use one kernel for calls of all lengths, and the parts of a kv head depend on the number
/// of heads alone.
#[test]
fn gradients_of_rows_are_those_of_one_kernel_of_hopper_in_fixed_parts() {
    let (facts, options) = (stated("sm_90a"), PlanOptions::default().row_invariant(true));
    for (heads, words) in [
        ([16, 16], None),
        ([32, 8], None),
        ([32, 4], Some("8 of a kv head shared by 2 tiles")),
        ([32, 2], Some("16 of a kv head shared by 4 tiles")),
        ([32, 1], Some("32 of a kv head shared by 8 tiles")),
        ([3, 1], Some("3 of a kv head shared by 3 tiles")),
    ] {
        for (seqlens, mask) in
            [([64, 64], "b"), ([40, 8192], "b"), ([8192, 8192], "0"), ([700, 700], "b:100,0")]
        {
            let problem = BwdProblem::new(of_lengths(seqlens, heads, 128, mask));
            let choice = backward(&problem, &options).unwrap();
            let what = format!("{heads:?}, {seqlens:?}, {mask}");
            let promises = choice.promises;
            assert!(promises.row_invariant && promises.batch_invariant && promises.deterministic, "{what}");
            assert_eq!(detail(&choice, "query heads").as_deref(), words, "{what}");
            let refusal = choose::<Sm80Bwd, _>(&problem.validate().unwrap(), &facts, &options).err();
            let refusal = refusal.unwrap().to_string();
            assert!(refusal.contains("row_invariant true") && refusal.contains("sm90"), "{refusal}");
        }
    }
}

/// Row-invariant gradients with strides that TMA does not support are refused by `sm90` and by `sm80`: `sm80` would
/// give other bits.
#[test]
fn gradients_of_rows_that_hoppers_kernel_cannot_load_are_refused_by_name() {
    let (facts, options) = (stated("sm_90a"), PlanOptions::default().row_invariant(true));
    let mut odd = of_lengths([512, 512], [4, 4], 128, "b");
    odd.strides.k.seq = 4 * 128 + 2;
    let odd = BwdProblem::new(odd).validate().unwrap();
    let of_sm90 = choose::<Sm90Bwd, _>(&odd, &facts, &options).err().unwrap().to_string();
    assert!(of_sm90.contains("k.seq stride 514"), "{of_sm90}");
    let of_sm80 = choose::<Sm80Bwd, _>(&odd, &facts, &options).err().unwrap().to_string();
    assert!(of_sm80.contains("row_invariant true: rows have the bits of sm90"), "{of_sm80}");
    // `sm80` computes every layout of rows with this head dimension.
    let wide = BwdProblem::new(of_lengths([512, 512], [4, 4], 192, "b")).validate().unwrap();
    assert!(choose::<Sm80Bwd, _>(&wide, &facts, &options).unwrap().promises.row_invariant);
    let of_sm90 = choose::<Sm90Bwd, _>(&wide, &facts, &options).err().unwrap().to_string();
    assert!(of_sm90.contains("row_invariant true"), "{of_sm90}");
}

/// The grids of a backward: 2 kv heads of 1024 keys are 16 blocks of 128; 1000 queries of 4 heads are 64 blocks of 64.
#[test]
fn the_grids_of_a_backward_cover_its_rows_and_blocks() {
    let fwd = of_lengths([1000, 1024], [4, 2], 128, "b").sink(true);
    let mut problem = BwdProblem::new(biased(fwd, 1024)).write_dsink(true);
    let Bias::Elementwise(bias) = problem.fwd.score.bias else { panic!("it has one") };
    problem.dbias = Some(BiasGrad { dtype: DType::F32, strides: bias.strides });
    let choice = backward(&problem, &tile("block_m=64,head_parts=0,persistent=0")).unwrap();
    let launches: Vec<_> = choice.launches.iter().map(|launch| (launch.kernel, launch.grid)).collect();
    let early = |groups, threads| Grid { groups, threads, dependent: true };
    let (q_blocks, tiles) = (64, 16);
    // The repair launch has one warp for each block, 8 per CTA. dBias has 4 heads of 16 by 8 blocks, and at most
    // one CTA per multiprocessor.
    let expected = [
        ("preprocess", early(q_blocks, 256)),
        ("sm90", early(tiles, 384)),
        ("postprocess", early(q_blocks + 4, 256)),
        ("repair", early((q_blocks + tiles) / 8, 256)),
        ("dbias", Grid::new(132, 384)),
    ];
    assert_eq!(launches, expected);
    let at_once: Vec<_> = choice.launches.iter().map(|launch| launch.tiles_at_once).collect();
    // A multiprocessor holds 2048 threads, so 8 CTAs of 256.
    assert_eq!(at_once, [8 * 132, 132, 8 * 132, 8 * 132, 132]);
}

#[test]
fn a_kv_heads_query_heads_are_shared_out_where_tiles_are_few() {
    let few = BwdProblem::new(of_lengths([1024, 1024], [8, 1], 128, "0"));
    // There are 8 blocks of keys. With one or two parts of each head's query blocks the CTAs still do not fill the
    // device once.
    let choice = backward(&few, &tile("")).unwrap();
    let shared = detail(&choice, "query heads").unwrap();
    assert_eq!(shared, "8 of a kv head shared by 8 tiles, and their queries by 2 each");
    let sums: Vec<_> = choice.launches.iter().filter(|launch| launch.kernel == "head_sums").collect();
    assert_eq!(
        sums.iter().map(|launch| launch.grid.groups).collect::<Vec<_>>(),
        [8 * fmha_kernels_cuda::sm90_bwd::HEAD_SUMS_CTAS]
    );
    let apart = BwdProblem::new(of_lengths([8192, 8192], [8, 8], 128, "0"));
    assert_eq!(detail(&backward(&apart, &tile("")).unwrap(), "query heads"), None);
}

/// The launch over queries resets the counter from which tiles of keys take their index. Without queries there is
/// no such launch and no counter.
#[test]
fn tiles_of_keys_are_claimed_where_there_are_queries() {
    for (queries, ctas) in [(1024, 132), (0, 4 * 64)] {
        let problem = BwdProblem::new(of_lengths([queries, 8192], [4, 4], 128, "0"));
        let choice = backward(&problem, &tile("persistent=1")).unwrap();
        assert_eq!(choice.launches[1].grid.groups, ctas, "{queries} queries");
    }
}

#[test]
fn sums_have_an_order_where_one_cluster_has_all_keys() {
    let promised = |keys: u32, dim: u32, parts: &str| {
        let problem = BwdProblem::new(of_lengths([512, keys], [4, 4], dim, "0"));
        backward(&problem, &tile(parts)).unwrap().promises.deterministic
    };
    for (keys, dim, deterministic) in
        [(128, 128, true), (129, 128, false), (128, 256, true), (129, 256, false)]
    {
        for parts in ["head_parts=0", "head_parts=1"] {
            assert_eq!(promised(keys, dim, parts), deterministic, "{keys} keys of {dim}, {parts}");
        }
    }
}

#[test]
fn pairs_of_backward_ctas_are_told_of() {
    let wide = BwdProblem::new(of_lengths([512, 512], [4, 4], 256, "0"));
    assert_eq!(detail(&backward(&wide, &tile("")).unwrap(), "clusters").unwrap(), "2 key blocks");
    let narrow = BwdProblem::new(of_lengths([512, 512], [4, 4], 128, "0"));
    assert_eq!(detail(&backward(&narrow, &tile("")).unwrap(), "clusters"), None);
}
