//! What the kernels choose on the devices that NVIDIA states: launches, promises, words. Nothing is compiled or run.

use fmha_core::{
    Accuracy, BiasBroadcast, BiasGrad, BwdProblem, Dims, ElementwiseBias, FwdProblem, PlanOptions, Strides,
};
use fmha_core::{Bias, DType, ScoreSums, VLayout, ValidBwd, ValidFwd, Workspace};

use super::*;
use fmha_core::Operation;
use fmha_core::error::Refusal;
use fmha_gpu::{Choice, Grid, select};
use fmha_kernels_cuda::nvidia::Instructions;
use fmha_kernels_cuda::simt::recipe::Simt;
use fmha_kernels_cuda::simt::recipe_bwd::SimtBwd;
use fmha_kernels_cuda::sm80::recipe::Sm80;
use fmha_kernels_cuda::sm80_bwd::recipe::Sm80Bwd;
use fmha_kernels_cuda::sm90::recipe::Sm90;
use fmha_kernels_cuda::sm90_bwd::recipe::Sm90Bwd;
use fmha_kernels_cuda::sm100::recipe::Sm100;
use fmha_kernels_cuda::sm100_bwd::recipe::Sm100Bwd;

/// `seqlens` of `heads` query heads and as many kv heads, dimension `dim`, bf16.
pub(crate) fn of_lengths(seqlens: [u32; 2], heads: [u32; 2], dim: u32, mask: &str) -> FwdProblem {
    let dims = Dims {
        batch: 1,
        seqlen_q: seqlens[0],
        seqlen_k: seqlens[1],
        num_heads_q: heads[0],
        num_heads_kv: heads[1],
        head_dim_qk: dim,
        head_dim_v: dim,
    };
    FwdProblem::batch(DType::Bf16, dims).mask(mask.parse().unwrap())
}

/// The same with a bf16 bias for each head, whose rows lie `row` elements apart.
pub(super) fn biased(mut problem: FwdProblem, row: i64) -> FwdProblem {
    let rows = i64::from(problem.dims.seqlen_q);
    let strides = Strides { batch: 0, head: rows * row, seq: row, dim: 1 };
    let broadcast = BiasBroadcast::OneHead;
    problem.score.bias = Bias::Elementwise(ElementwiseBias { dtype: DType::Bf16, broadcast, strides });
    problem
}

pub(super) fn stated(arch: &str) -> DeviceFacts {
    DeviceFacts::stated(arch).unwrap()
}

pub(super) fn tile(words: &str) -> PlanOptions {
    PlanOptions::default().tile(words.split(',').filter_map(|pair| pair.split_once('=')))
}

fn on_hopper(problem: &FwdProblem, words: &str) -> Result<Choice<FwdKernel<Cuda>>, Refusal> {
    let problem = problem.clone().validate().unwrap();
    choose(&Sm90::default(), &problem, &stated("sm_90a"), &tile(words))
}

fn on_blackwell(problem: &FwdProblem, options: &PlanOptions) -> Result<Choice<FwdKernel<Cuda>>, Refusal> {
    let problem = problem.clone().validate().unwrap();
    choose(&Sm100::default(), &problem, &stated("sm_100a"), options)
}

fn backward(problem: &BwdProblem, options: &PlanOptions) -> Result<Choice<BwdKernel<Cuda>>, Refusal> {
    let problem = problem.clone().validate().unwrap();
    choose(&Sm90Bwd::default(), &problem, &stated("sm_90a"), options)
}

fn detail<K>(choice: &Choice<K>, name: &str) -> Option<String> {
    choice.details.iter().find(|(known, _)| *known == name).map(|(_, words)| words.clone())
}

fn schedule(choice: &Choice<FwdKernel<Cuda>>) -> Vec<String> {
    detail(choice, "schedule").unwrap().split(", ").map(str::to_owned).collect()
}

/// The words of a choice that has a knob as `off` and as `on` say `words` of the second alone, and of the first with no
/// other number either.
fn says(choose: impl Fn(&str) -> Choice<FwdKernel<Cuda>>, [off, on, words]: [&str; 3]) {
    let (off, on) = (schedule(&choose(off)), schedule(&choose(on)));
    let no_digits = |words: &str| words.replace(|c: char| c.is_ascii_digit(), "");
    assert!(!off.iter().any(|word| no_digits(word) == no_digits(words)), "{off:?} with {words}");
    assert!(on.iter().any(|word| word == words), "{on:?} without {words}");
}

#[test]
fn the_words_of_a_hopper_schedule_are_those_of_its_tile() {
    let plain = of_lengths([4096, 4096], [4, 4], 128, "0");
    let choose = |tile: &str| on_hopper(&plain, tile).unwrap();
    assert_eq!(schedule(&choose("block_m=128"))[0], "2 consumer warpgroups");
    for knobs in [
        ["skip_row_max=0,lazy_rescale_log2=0", "skip_row_max=0,lazy_rescale_log2=8", "rescale beyond 2^8"],
        ["cluster=1", "cluster=2", "clusters of 2 query blocks"],
        ["ping_pong=off", "ping_pong=after_max", "ping-pong after a block's maxima"],
        ["lookahead=second_q", "lookahead=spare_piece", "Q in pieces"],
        ["dependent_launch=0", "dependent_launch=1", "starts while the grid before ends"],
    ] {
        says(choose, knobs);
    }
    let bias = biased(of_lengths([512, 512], [4, 4], 128, "0"), 512);
    let bias = |tile: &str| on_hopper(&bias, tile).unwrap();
    says(bias, ["bias_stages=0", "bias_stages=1", "bias by TMA"]);
    says(bias, ["bias_stages=0", "bias_stages=1", "1 blocks"]);
    // Rows of K 132 elements apart: 264 bytes, which 8 divides.
    let mut odd = plain.clone();
    odd.strides.k.seq = 4 * 128 + 4;
    let odd = |tile: &str| on_hopper(&odd, tile).unwrap();
    assert!(schedule(&odd("")).contains(&"loads by copies of 8 bytes".to_owned()));
    assert!(!schedule(&choose("")).iter().any(|word| word.contains("copies")));
}

/// `of_lengths` in FP8, O in bf16.
pub(super) fn in_fp8(seqlens: [u32; 2], heads: [u32; 2], dim: u32) -> FwdProblem {
    let dims = of_lengths(seqlens, heads, dim, "0").dims;
    FwdProblem::batch(DType::E4m3Fn, dims).dtype_o(DType::Bf16)
}

/// 8 blocks of 128 keys for each of 2 kv heads: 8 units of sixteen keys in f16, or 16 of 32 keys and 64 dimensions.
#[test]
fn a_v_of_fp8_is_prepared_by_a_launch_before_or_beside_the_tiles() {
    for (dim, block_bytes, units) in [(128, 128 * 128 * 2, 8), (256, 128 * 256, 16)] {
        let problem = in_fp8([1000, 1000], [4, 2], dim);
        let choose = |words: &str| on_hopper(&problem, &format!("{words},block_m=128,block_n=128")).unwrap();
        says(
            choose,
            [
                "prepare_v=in_tile,stages=2",
                "prepare_v=before",
                "V prepared in the workspace by a launch before",
            ],
        );
        says(
            choose,
            [
                "prepare_v=in_tile,stages=2",
                "prepare_v=beside",
                "V prepared in the workspace beside the tiles",
            ],
        );
        let before = choose("prepare_v=before");
        let [prepare, main] = &before.launches[..] else { panic!("{} launches", before.launches.len()) };
        assert_eq!((prepare.kernel, main.kernel), ("prepare_values", "sm90"));
        assert_eq!(prepare.grid, Grid { groups: 2 * 8 * units / 8, threads: 256, dependent: true });
        assert_eq!((prepare.tiles, prepare.tiles_at_once), (u64::from(2 * units), 8 * 132));
        let blocks = 2 * 8 * block_bytes;
        // 32 tiles for 132 CTAs: nobody claims a second, and there is no counter.
        assert_eq!(before.workspace, Workspace { bytes: blocks, zeroed_bytes: 0 });

        let beside = choose("prepare_v=beside");
        let [main] = &beside.launches[..] else { panic!("{} launches", beside.launches.len()) };
        assert_eq!(main.kernel, "sm90");
        // A number of units that are claimed, and one for each block; then whole lines.
        let expected = Workspace { bytes: blocks + 128, zeroed_bytes: 4 * (1 + 2 * 8) };
        assert_eq!(beside.workspace, expected);
    }
}

/// Of a plan whose bits no batch may change V is prepared as of others: its bits are the same either way.
#[test]
fn a_plan_of_fp8_whose_bits_no_batch_changes_has_the_blocks_of_its_table() {
    for (dim, block_n) in [(64, 128), (128, 80), (256, 128)] {
        for rows in [70, 4096] {
            let problem = in_fp8([rows, 4096], [4, 4], dim).validate().unwrap();
            let options = PlanOptions::default().batch_invariant(true);
            let choice = choose(&Sm90::default(), &problem, &stated("sm_90a"), &options).unwrap();
            assert!(choice.promises.batch_invariant);
            assert!(
                detail(&choice, "tile").unwrap().contains(&format!(" x {block_n},")),
                "{dim}, {rows} rows"
            );
        }
    }
}

#[test]
fn a_v_that_cannot_be_prepared_once_is_refused_so_with_its_field() {
    let fp8 = || in_fp8([4096, 4096], [4, 4], 128);
    let mut columns = fp8();
    columns.layout.v = VLayout::ColMajor;
    columns.strides.v = Strides::bhds(columns.shape_v());
    let wide = fp8().dtype_v(DType::F16);
    let sequences = of_lengths([1024, 1 << 20], [2, 2], 128, "0").dims;
    let many = Dims { batch: 1 << 13, ..sequences };
    let many = FwdProblem::batch(DType::E4m3Fn, many).dtype_o(DType::Bf16);
    for (problem, words, said) in [
        (columns, "prepare_v=before", &["prepare_v=before", "v_layout is column-major"][..]),
        (wide, "prepare_v=beside", &["prepare_v=beside", "dtype_v is f16"]),
        (of_lengths([64, 64], [1, 1], 64, "0"), "prepare_v=before", &["prepare_v=before", "dtype_v is bf16"]),
        (many, "prepare_v=beside,block_m=128,block_n=128", &["16384 kv heads of 1048576 keys", "2^30"]),
    ] {
        let refusal = on_hopper(&problem, words).err().unwrap().to_string();
        assert!(said.iter().all(|word| refusal.contains(word)), "{words}: {refusal}");
    }
}

#[test]
fn the_words_of_a_blackwell_schedule_are_those_of_its_tile() {
    let plain = of_lengths([4096, 300], [4, 4], 128, "0");
    let choose = |words: &str| on_blackwell(&plain, &tile(words)).unwrap();
    assert_eq!(schedule(&choose(""))[0], "two query tiles");
    let wide = of_lengths([4096, 300], [4, 4], 192, "0");
    let first = schedule(&on_blackwell(&wide, &tile("")).unwrap());
    assert_eq!(first[..2], ["one query tile", "two score slots"]);
    for knobs in [
        ["lazy_rescale_log2=0", "lazy_rescale_log2=8", "rescale beyond 2^8"],
        ["exp2_polynomial_pairs=0", "exp2_polynomial_pairs=4", "4 of 16 exponentials by a polynomial"],
        ["cluster=1", "cluster=2", "pairs of CTAs"],
        ["dependent_launch=0", "dependent_launch=1", "starts while the grid before ends"],
    ] {
        says(choose, knobs);
    }
    let short = of_lengths([1, 4096], [4, 4], 128, "0");
    let short = |words: &str| on_blackwell(&short, &tile(words)).unwrap();
    says(short, ["split_keys=0", "split_keys=512", "keys in parts of 512"]);
    // 1028 bytes from row to row, of which 4 is the largest power of two that divides.
    let mut odd = plain.clone();
    odd.strides.k.seq = 4 * 128 + 2;
    let odd = schedule(&on_blackwell(&odd, &tile("")).unwrap());
    assert!(odd.contains(&"loads by copies of 4 bytes".to_owned()), "{odd:?}");
    assert!(!schedule(&choose("")).iter().any(|word| word.contains("copies")));
}

#[test]
fn a_forward_grid_starts_early_where_its_tile_says_so() {
    let problem = of_lengths([4096, 4096], [4, 4], 128, "0");
    for (words, dependent) in [("dependent_launch=0", false), ("dependent_launch=1", true)] {
        assert_eq!(on_hopper(&problem, words).unwrap().launches[0].grid.dependent, dependent);
        assert_eq!(on_blackwell(&problem, &tile(words)).unwrap().launches[0].grid.dependent, dependent);
    }
}

#[test]
fn a_bias_that_tma_does_not_take_is_refused_to_a_tile_that_brings_it_so() {
    let problem = biased(of_lengths([512, 500], [4, 4], 128, "0"), 500);
    assert!(on_hopper(&problem, "bias_stages=0").is_ok());
    let refusal = on_hopper(&problem, "bias_stages=1").err().unwrap().to_string();
    assert!(refusal.contains("tile bias_stages=1: bias.seq stride 500"), "{refusal}");
}

#[test]
fn a_tile_that_wants_more_shared_memory_than_there_is_is_refused_with_both_numbers() {
    let problem = of_lengths([4096, 4096], [4, 4], 128, "0").validate().unwrap();
    let of = |smem_bytes| {
        let facts = DeviceFacts { smem_bytes, ..stated("sm_90a") };
        choose(&Sm90::default(), &problem, &facts, &PlanOptions::default())
    };
    let wanted = of(232_448).unwrap().launches[0].shared_bytes;
    assert!(of(wanted).is_ok());
    let refusal = of(wanted - 1).err().unwrap().to_string();
    let words = format!("takes {wanted} bytes of shared memory, {} are there", wanted - 1);
    assert!(refusal.contains(&words), "{refusal}");
}

#[test]
fn a_cluster_of_more_ctas_than_there_are_multiprocessors_is_refused() {
    let problem = of_lengths([4096, 4096], [4, 4], 128, "0").validate().unwrap();
    let forward = |num_sms| {
        let facts = DeviceFacts { num_sms, ..stated("sm_90a") };
        choose(&Sm90::default(), &problem, &facts, &tile("cluster=2")).err().map(|why| why.to_string())
    };
    assert_eq!(forward(2), None);
    assert!(forward(1).unwrap().contains("tile cluster=2: multiprocessors of the device are 1"));
}

#[test]
fn exact_plans_of_blackwell_rescale_by_every_maximum() {
    let problem = of_lengths([4096, 300], [4, 4], 128, "0");
    for (accuracy, rescales_late) in [(Accuracy::Fast, true), (Accuracy::Exact, false)] {
        let options = PlanOptions::default().accuracy(accuracy);
        let choice = on_blackwell(&problem, &options).unwrap();
        assert_eq!(choice.promises.accuracy, accuracy);
        assert_eq!(schedule(&choice).contains(&"rescale beyond 2^8".to_owned()), rescales_late);
    }
}

#[test]
fn a_long_cache_is_split_and_merged_where_no_sink_columns_forbid_it() {
    let choice = on_blackwell(&of_lengths([1, 4096], [4, 4], 128, "0"), &tile("")).unwrap();
    let [fwd, merge] = &choice.launches[..] else { panic!("{} launches", choice.launches.len()) };
    assert_eq!((fwd.kernel, merge.kernel), ("sm100", "sm100_merge"));
    // A multiprocessor holds 2048 threads, a CTA has 256, and there are 148.
    assert_eq!(merge.tiles_at_once, 8 * 148);
    assert!(merge.grid.dependent);

    let sinks = of_lengths([1, 4096], [4, 4], 128, "b:100,0,2");
    assert_eq!(on_blackwell(&sinks, &tile("")).unwrap().launches.len(), 1);
    let refusal = on_blackwell(&sinks, &tile("split_keys=512")).err().unwrap().to_string();
    assert!(refusal.contains("tile split_keys=512: sink_columns 2"), "{refusal}");
}

/// A row's bits are its own where a short query's keys would not be split, and no problem of the spec has pairs of CTAs.
#[test]
fn blackwell_promises_bits_that_no_batch_changes_where_no_length_changes_the_arithmetic() {
    let invariant = PlanOptions::default().batch_invariant(true);
    for (what, seqlens, dim, options, promised) in [
        ("few keys", [4096, 300], 128, tile(""), true),
        ("so many that one query's are split", [4096, 4096], 128, tile(""), false),
        ("as many, and it was asked for", [4096, 4096], 128, invariant.clone(), true),
        ("split", [1, 4096], 128, tile(""), false),
        ("one query, and it was asked for", [1, 4096], 128, invariant, true),
        ("a pair of CTAs", [4096, 300], 128, tile("cluster=2"), false),
        ("alone where others have pairs", [100, 300], 256, tile(""), false),
    ] {
        let choice = on_blackwell(&of_lengths(seqlens, [4, 4], dim, "0"), &options).unwrap();
        assert_eq!(choice.promises.batch_invariant, promised, "{what}");
    }
}

#[test]
fn scores_are_summed_as_the_architecture_adds() {
    let bf16 = of_lengths([512, 512], [4, 4], 128, "0");
    let fp8 = FwdProblem::batch(DType::E4m3Fn, bf16.dims).dtype_o(DType::Bf16);
    let sums = |problem: &FwdProblem| on_hopper(problem, "").unwrap().promises.score_sums;
    assert_eq!(sums(&bf16), ScoreSums::Cut { products: 16, bits: 26 });
    assert_eq!(sums(&fp8), ScoreSums::Cut { products: 32, bits: 14 });
    let of_blackwell = stated("sm_100a").score_sums;
    assert_eq!([DType::Bf16, DType::E4m3Fn].map(|dtype| of_blackwell.of(dtype)), [ScoreSums::F32; 2]);
}

#[test]
fn a_stated_device_has_the_numbers_that_nvidia_states() {
    let large = 227 << 10;
    for (arch, num_sms, smem_bytes, flops, bytes) in [
        ("sm_80", 108, 163 << 10, 312e12, 2.039e12),
        ("sm_86", 82, 99 << 10, 71e12, 0.936e12),
        ("sm_89", 128, 99 << 10, 165.2e12, 1.008e12),
        ("sm_90a", 132, large, 989e12, 4.8e12),
        ("sm_100a", 148, large, 2.25e15, 8e12),
        ("sm_103a", 148, large, 2.25e15, 8e12),
        ("sm_120a", 170, 99 << 10, 209.5e12, 1.792e12),
    ] {
        let facts = stated(arch);
        assert_eq!((facts.num_sms, facts.smem_bytes), (num_sms, smem_bytes), "{arch}");
        let stated = facts.roofline.flops_per_second.unwrap();
        assert!((stated / flops - 1.0).abs() < 1e-3, "{arch}: {stated}");
        assert_eq!(facts.roofline.bytes_per_second, Some(bytes));
    }
    assert!(DeviceFacts::stated("sm_75").is_err());
}

/// Of a forward and a backward, without a fallback: the kernel that takes them, and what the refusals say.
fn chosen_on(facts: &DeviceFacts) -> [Result<&'static str, String>; 2] {
    let forward = of_lengths([512, 512], [4, 4], 128, "b").validate().unwrap();
    let backward = BwdProblem::new(FwdProblem::clone(&forward)).validate().unwrap();
    let options = PlanOptions::default();
    [
        select("here", Operation::Forward, &<Cuda as Family<ValidFwd>>::recipes(), &options, |k| {
            k.choose(&forward, facts, &options)
        })
        .map(|(choice, _)| choice.kernel.name())
        .map_err(|error| error.to_string()),
        select("here", Operation::Backward, &<Cuda as Family<ValidBwd>>::recipes(), &options, |k| {
            k.choose(&backward, facts, &options)
        })
        .map(|(choice, _)| choice.kernel.name())
        .map_err(|error| error.to_string()),
    ]
}

#[test]
fn every_architecture_since_ampere_has_a_fast_kernel_and_older_ones_a_refusal_with_the_number() {
    for (arch, forward, backward) in [
        ("sm_80", "sm80", "sm80"),
        ("sm_86", "sm80", "sm80"),
        ("sm_89", "sm80", "sm80"),
        ("sm_90a", "sm90", "sm90"),
        ("sm_100a", "sm100", "sm100"),
        ("sm_103a", "sm100", "sm100"),
        ("sm_120a", "sm80", "sm80"),
    ] {
        assert_eq!(chosen_on(&stated(arch)), [Ok(forward), Ok(backward)], "{arch}");
    }
    let turing =
        DeviceFacts { arch: "sm_75".to_owned(), instructions: Instructions::default(), ..stated("sm_80") };
    for chosen in chosen_on(&turing) {
        let said = chosen.unwrap_err();
        assert!(said.contains("sm80: the device is sm_75, which has no cp.async"), "{said}");
    }
}

#[test]
fn tiles_of_mma_sync_follow_the_shared_memory_of_the_device() {
    let tile_on = |arch: &str, dim: u32| {
        let problem = of_lengths([4096, 4096], [4, 4], dim, "0").validate().unwrap();
        let choice = choose(&Sm80::default(), &problem, &stated(arch), &PlanOptions::default()).unwrap();
        let smem_bytes = choice.launches[0].shared_bytes;
        assert!(smem_bytes <= stated(arch).smem_bytes, "{arch}: {smem_bytes}");
        detail(&choice, "tile").unwrap()
    };
    assert_eq!(tile_on("sm_90a", 128), "128 x 64, 2 stages");
    assert_eq!(tile_on("sm_80", 128), "128 x 64, 1 stages");
    assert_eq!(tile_on("sm_80", 256), "128 x 64, 1 stages");
    assert_eq!(tile_on("sm_89", 256), "64 x 48, 1 stages");
}

#[test]
fn dq_of_mma_sync_has_one_order_where_that_is_asked_for_and_one_pass_where_it_can() {
    let launches = |problem: &FwdProblem, options: &PlanOptions| {
        let problem = BwdProblem::new(problem.clone()).validate().unwrap();
        let choice = choose(&Sm80Bwd::default(), &problem, &stated("sm_80"), options);
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
    let said = launches(&long.softcap(2.0), &tile("one_pass=1")).unwrap_err();
    assert!(said.contains("one_pass=1: 1 of soft-cap, bias and dropout"), "{said}");
}

#[test]
fn the_backward_of_blackwell_says_what_it_leaves_to_others() {
    let choose = |problem: FwdProblem, arch: &str, words: &str| {
        let problem = BwdProblem::new(problem).validate().unwrap();
        let choice = choose(&Sm100Bwd::default(), &problem, &stated(arch), &tile(words));
        let choice = choice.map_err(|refusal| refusal.to_string())?;
        let names: Vec<_> = choice.launches.iter().map(|launch| launch.kernel).collect();
        Ok::<_, String>((names, choice.promises.deterministic, detail(&choice, "stages").unwrap()))
    };
    let of = |keys: u32, dim: u32| of_lengths([512, keys], [4, 2], dim, "b");
    let names = vec!["sm100_stats", "sm100", "sm100_finish_dq"];
    // One block of keys adds to dQ alone.
    for (problem, deterministic, stages) in [
        (of(512, 128), false, "2 Q, 1 dO"),
        (of(128, 64), true, "2 Q, 2 dO"),
        (of(129, 24), false, "2 Q, 2 dO"),
    ] {
        let expected = Ok((names.clone(), deterministic, stages.to_owned()));
        assert_eq!(choose(problem, "sm_100a", ""), expected);
    }
    let mut odd = of(512, 128);
    odd.strides.k.seq += 4;
    for (problem, arch, words, said) in [
        (of(512, 136), "sm_100a", "", "backward: head_dim_qk 136 is larger than 128"),
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
        let choice = choose(&Sm100Bwd::default(), &problem, &stated("sm_100a"), options).unwrap();
        (choice.promises.deterministic, choice.promises.batch_invariant, choice.workspace.bytes)
    };
    let plain = promised(&PlanOptions::default());
    let ordered = promised(&PlanOptions::default().deterministic(true));
    assert_eq!((plain.0, plain.1), (false, false));
    // A count to each block of queries of each head.
    assert_eq!(ordered, (true, true, plain.2 + 4 * 4 * 4));
    assert_eq!(promised(&PlanOptions::default().batch_invariant(true)), ordered);
}

/// The kernel's schedule in words, or why it refuses.
fn schedule_of_mma_sync(problem: &FwdProblem, arch: &str, words: &str) -> Result<String, String> {
    let problem = problem.clone().validate().unwrap();
    let choice =
        choose(&Sm80::default(), &problem, &stated(arch), &tile(words)).map_err(|error| error.to_string())?;
    Ok(detail(&choice, "schedule").unwrap())
}

#[test]
fn products_of_fp8_are_refused_by_the_number_where_mma_sync_has_none() {
    let fp8 = in_fp8([4096, 4096], [4, 4], 128);
    for arch in ["sm_80", "sm_86"] {
        let said = schedule_of_mma_sync(&fp8, arch, "").unwrap_err();
        assert!(said.contains("dtype_qk e4m3fn: mma.sync multiplies FP8 from sm_89 on"), "{said}");
    }
    for arch in ["sm_89", "sm_120a"] {
        assert!(schedule_of_mma_sync(&fp8, arch, "").is_ok(), "{arch}");
    }
    let fnuz = FwdProblem::batch(DType::E4m3Fnuz, fp8.dims).dtype_o(DType::Bf16);
    let said = schedule_of_mma_sync(&fnuz, "sm_89", "").unwrap_err();
    assert!(said.contains("dtype_qk e4m3fnuz with dtype_v e4m3fnuz is not OCP FP8"), "{said}");
    let said = schedule_of_mma_sync(&in_fp8([64, 64], [1, 1], 512), "sm_89", "").unwrap_err();
    assert!(said.contains("head_dim_qk 512 is larger than 256, in FP8"), "{said}");
    let said = schedule_of_mma_sync(&fp8, "sm_89", "block_n=48").unwrap_err();
    assert!(said.contains("block_n=48 with dtype_v e4m3fn"), "{said}");
}

#[test]
fn geforce_s_loads_of_long_rows_are_tma_s_where_it_can_bring_them() {
    let loads = |problem: &FwdProblem, arch| {
        schedule_of_mma_sync(problem, arch, "").map(|words| words.contains("loads by TMA"))
    };
    let plain = of_lengths([4096, 4096], [4, 4], 128, "0");
    assert_eq!(["sm_89", "sm_120a", "sm_90a"].map(|arch| loads(&plain, arch)), [false, true, false].map(Ok));
    let mut odd = plain.clone();
    odd.strides.k.seq = 4 * 128 + 4;
    let short = of_lengths([1, 8192], [4, 4], 128, "0");
    let wide = of_lengths([4096, 4096], [4, 4], 512, "0");
    for problem in [&odd, &short, &wide] {
        assert_eq!(loads(problem, "sm_120a"), Ok(false));
    }
    let said = schedule_of_mma_sync(&odd, "sm_120a", "tma=1").unwrap_err();
    assert!(said.contains("copy_bytes=8") || said.contains("tma=1: k.seq stride 516"), "{said}");
    let said = schedule_of_mma_sync(&plain, "sm_89", "tma=1").unwrap_err();
    assert!(said.contains("the device is sm_89, which has no TMA"), "{said}");
}

#[test]
fn copies_of_mma_sync_are_as_wide_as_the_strides_allow() {
    let mut odd = of_lengths([512, 512], [4, 4], 128, "0");
    odd.strides.k.seq = 4 * 128 + 2;
    let problem = odd.validate().unwrap();
    let choose = |words: &str| choose(&Sm80::default(), &problem, &stated("sm_80"), &tile(words));
    let words = detail(&choose("").unwrap(), "schedule").unwrap();
    assert!(words.contains("copies of 4 bytes"), "{words}");
    let refusal = choose("copy_bytes=16").err().unwrap().to_string();
    assert!(refusal.contains("copy_bytes=16: k.seq stride 514"), "{refusal}");
}

/// 2 kv heads of 1024 keys are 16 blocks of 128; 1000 queries of 4 heads in blocks of 64 are 64.
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
    // The repair has a warp to a block, 8 to a CTA; dBias 4 heads of 16 by 8 blocks, a CTA to a multiprocessor at most.
    let expected = [
        ("preprocess", early(q_blocks, 256)),
        ("sm90", early(tiles, 384)),
        ("postprocess", early(q_blocks + 4, 256)),
        ("repair", early((q_blocks + tiles) / 8, 256)),
        ("dbias", Grid::new(132, 384)),
    ];
    assert_eq!(launches, expected);
    let at_once: Vec<_> = choice.launches.iter().map(|launch| launch.tiles_at_once).collect();
    // 2048 threads of a multiprocessor are 8 CTAs of 256.
    assert_eq!(at_once, [8 * 132, 132, 8 * 132, 8 * 132, 132]);
}

#[test]
fn a_kv_heads_query_heads_are_shared_out_where_tiles_are_few() {
    let few = BwdProblem::new(of_lengths([1024, 1024], [8, 1], 128, "0"));
    // 8 blocks of keys: as many parts as there are heads, and two of each head's query blocks are still less than a round.
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

/// Tiles are claimed from a number that the launch over queries sets: without queries there is none.
#[test]
fn tiles_of_keys_are_claimed_where_there_are_queries() {
    for (queries, ctas) in [(1024, 132), (0, 4 * 64)] {
        let problem = BwdProblem::new(of_lengths([queries, 8192], [4, 4], 128, "0"));
        let choice = backward(&problem, &tile("persistent=1")).unwrap();
        assert_eq!(choice.launches[1].grid.groups, ctas, "{queries} queries");
    }
}

#[test]
fn sums_have_an_order_where_one_cluster_has_all_keys_and_tiles_share_none() {
    let promised = |keys: u32, dim: u32, parts: &str| {
        let problem = BwdProblem::new(of_lengths([512, keys], [4, 4], dim, "0"));
        backward(&problem, &tile(parts)).unwrap().promises.deterministic
    };
    for (keys, dim, deterministic) in
        [(128, 128, true), (129, 128, false), (128, 256, true), (129, 256, false)]
    {
        assert_eq!(promised(keys, dim, "head_parts=0"), deterministic, "{keys} keys of {dim}");
        assert!(
            !promised(keys, dim, "head_parts=1"),
            "{keys} keys of {dim}: tiles add to the same dK and dV"
        );
    }
}

#[test]
fn pairs_of_backward_ctas_are_told_of() {
    let wide = BwdProblem::new(of_lengths([512, 512], [4, 4], 256, "0"));
    assert_eq!(detail(&backward(&wide, &tile("")).unwrap(), "clusters").unwrap(), "2 key blocks");
    let narrow = BwdProblem::new(of_lengths([512, 512], [4, 4], 128, "0"));
    assert_eq!(detail(&backward(&narrow, &tile("")).unwrap(), "clusters"), None);
}

#[test]
fn the_row_kernels_count_16_ctas_to_a_multiprocessor() {
    let problem = of_lengths([512, 512], [4, 4], 128, "0");
    let bwd: ValidBwd = BwdProblem::new(problem.clone()).validate().unwrap();
    let fwd: ValidFwd = problem.validate().unwrap();
    let (facts, options) = (stated("sm_90a"), PlanOptions::default());
    let forward = choose(&Simt, &fwd, &facts, &options).unwrap().launches;
    let backward = choose(&SimtBwd::default(), &bwd, &facts, &options).unwrap().launches;
    for launch in forward.iter().chain(backward.iter()) {
        assert_eq!(launch.tiles_at_once, 16 * 132, "{}", launch.kernel);
    }
}

#[test]
fn the_fallback_is_taken_where_it_is_allowed_or_named() {
    let problem = of_lengths([64, 64], [1, 1], 584, "0").validate().unwrap();
    let backward = BwdProblem::new(FwdProblem::clone(&problem)).validate().unwrap();
    let facts = stated("sm_90a");
    let named = PlanOptions::default().kernel("simt");
    for (options, taken) in [
        (PlanOptions::default().allow_fallback(false), false),
        (PlanOptions::default().allow_fallback(true), true),
        (named.clone().allow_fallback(false), true),
    ] {
        let fwd = select("here", Operation::Forward, &<Cuda as Family<ValidFwd>>::recipes(), &options, |k| {
            k.choose(&problem, &facts, &options)
        });
        let bwd =
            select("here", Operation::Backward, &<Cuda as Family<ValidBwd>>::recipes(), &options, |k| {
                k.choose(&backward, &facts, &options)
            });
        assert_eq!((fwd.is_ok(), bwd.is_ok()), (taken, taken), "{options:?}");
        let error = (fwd.err(), bwd.err());
        if let (Some(fwd), Some(bwd)) = error {
            for text in [fwd.to_string(), bwd.to_string()] {
                assert!(text.contains("simt") && text.contains("the slow fallback"), "{text}");
            }
        }
    }
    let small = of_lengths([64, 64], [1, 1], 64, "0").validate().unwrap();
    let (choice, refusals) =
        select("here", Operation::Forward, &<Cuda as Family<ValidFwd>>::recipes(), &named, |k| {
            k.choose(&small, &facts, &named)
        })
        .unwrap();
    assert_eq!((choice.kernel.name(), refusals.len()), ("simt", 0), "others were not asked");
}
