//! Forward plans: their launches, promises and texts.

use fmha_core::{
    Accuracy, BwdProblem, DType, Dims, FwdProblem, Intervals, KvLayout, MaskAxes, PlanOptions, Refusal,
    ScoreSums, Strides, VLayout, Workspace,
};
use fmha_gpu::{Choice, Grid};
use fmha_kernels_cuda::nvidia::DeviceFacts;
use fmha_kernels_cuda::sm80::recipe::Sm80;
use fmha_kernels_cuda::sm80_bwd::recipe::Sm80Bwd;
use fmha_kernels_cuda::sm90::recipe::Sm90;
use fmha_kernels_cuda::sm100::recipe::Sm100;

use super::{biased, choose, detail, in_fp8, of_lengths, stated, tile};

fn on_hopper(problem: &FwdProblem, words: &str) -> Result<Choice<Sm90>, Refusal> {
    let problem = problem.clone().validate().unwrap();
    choose::<Sm90, _>(&problem, &stated("sm_90a"), &tile(words))
}

fn on_blackwell(problem: &FwdProblem, options: &PlanOptions) -> Result<Choice<Sm100>, Refusal> {
    let problem = problem.clone().validate().unwrap();
    choose::<Sm100, _>(&problem, &stated("sm_100a"), options)
}

fn schedule<K>(choice: &Choice<K>) -> Vec<String> {
    detail(choice, "schedule").unwrap().split(", ").map(str::to_owned).collect()
}

/// Checks that the details of a choice contain `words` with the tile field `on`, and do not with `off`, not even
/// with another number.
fn says<K>(choose: impl Fn(&str) -> Choice<K>, [off, on, words]: [&str; 3]) {
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
    // Rows of K are 132 elements apart, which is 264 bytes, a multiple of 8 but not of 16.
    let mut odd = plain.clone();
    odd.strides.k.seq = 4 * 128 + 4;
    let odd = |tile: &str| on_hopper(&odd, tile).unwrap();
    assert!(schedule(&odd("")).contains(&"loads by copies of 8 bytes".to_owned()));
    assert!(!schedule(&choose("")).iter().any(|word| word.contains("copies")));
}

/// FP8 V is prepared by a launch before the kernel or inside its launch: 8 blocks of 128 keys for each of 2 kv
/// heads give 8 units of 16 keys in f16, or 16 of 32 keys and 64 dimensions.
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
        // There are 32 tiles for 132 CTAs: no CTA takes a second tile, so there is no counter.
        assert_eq!(before.workspace, Workspace { bytes: blocks, zeroed_bytes: 0 });

        let beside = choose("prepare_v=beside");
        let [main] = &beside.launches[..] else { panic!("{} launches", beside.launches.len()) };
        assert_eq!(main.kernel, "sm90");
        // The workspace has one counter for the units and one for each block, rounded up to whole cache lines.
        let expected = Workspace { bytes: blocks + 128, zeroed_bytes: 4 * (1 + 2 * 8) };
        assert_eq!(beside.workspace, expected);
    }
}

/// A batch-invariant plan prepares an FP8 V as other plans do, since the prepared bits are equal.
#[test]
fn a_plan_of_fp8_whose_bits_no_batch_changes_has_the_blocks_of_its_table() {
    for (dim, block_n) in [(64, 128), (128, 80), (256, 128)] {
        for rows in [70, 4096] {
            let problem = in_fp8([rows, 4096], [4, 4], dim).validate().unwrap();
            let options = PlanOptions::default().batch_invariant(true);
            let choice = choose::<Sm90, _>(&problem, &stated("sm_90a"), &options).unwrap();
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
    // Rows are 1028 bytes apart, whose largest divisor that is a power of two is 4.
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
        choose::<Sm90, _>(&problem, &facts, &PlanOptions::default())
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
        choose::<Sm90, _>(&problem, &facts, &tile("cluster=2")).err().map(|why| why.to_string())
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
    // A multiprocessor holds 2048 threads, so 16 CTAs of 128, and the device has 148 multiprocessors.
    assert_eq!(merge.tiles_at_once, 16 * 148);
    assert!(merge.grid.dependent);

    let sinks = of_lengths([1, 4096], [4, 4], 128, "b:100,0,2");
    assert_eq!(on_blackwell(&sinks, &tile("")).unwrap().launches.len(), 1);
    let refusal = on_blackwell(&sinks, &tile("split_keys=512")).err().unwrap().to_string();
    assert!(refusal.contains("tile split_keys=512: sink_columns 2"), "{refusal}");
}

/// Blackwell promises batch invariance where a short query's keys are not split and no problem of the spec uses
/// pairs of CTAs.
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
fn tiles_of_mma_sync_follow_the_shared_memory_of_the_device() {
    let tile_on = |arch: &str, dim: u32| {
        let problem = of_lengths([4096, 4096], [4, 4], dim, "0").validate().unwrap();
        let choice = choose::<Sm80, _>(&problem, &stated(arch), &PlanOptions::default()).unwrap();
        let smem_bytes = choice.launches[0].shared_bytes;
        assert!(smem_bytes <= stated(arch).smem_bytes, "{arch}: {smem_bytes}");
        detail(&choice, "tile").unwrap()
    };
    assert_eq!(tile_on("sm_90a", 128), "128 x 64, 2 stages");
    assert_eq!(tile_on("sm_80", 128), "128 x 64, 1 stages");
    assert_eq!(tile_on("sm_80", 256), "128 x 64, 1 stages");
    assert_eq!(tile_on("sm_89", 256), "64 x 48, 1 stages");
}

/// Text of the schedule of kernel `sm80`, or of its refusal.
fn schedule_of_mma_sync(problem: &FwdProblem, arch: &str, words: &str) -> Result<String, String> {
    let problem = problem.clone().validate().unwrap();
    let choice =
        choose::<Sm80, _>(&problem, &stated(arch), &tile(words)).map_err(|error| error.to_string())?;
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
    let choose = |words: &str| choose::<Sm80, _>(&problem, &stated("sm_80"), &tile(words));
    let words = detail(&choose("").unwrap(), "schedule").unwrap();
    assert!(words.contains("copies of 4 bytes"), "{words}");
    let refusal = choose("copy_bytes=16").err().unwrap().to_string();
    assert!(refusal.contains("copy_bytes=16: k.seq stride 514"), "{refusal}");
}

/// On every architecture `sm80` computes row-invariant plans, with parts of a fixed number of keys.
#[test]
fn rows_of_equal_bits_are_taken_on_every_architecture() {
    let options = PlanOptions::default().row_invariant(true);
    for arch in ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"] {
        for (seqlens, mask) in
            [([4096, 4096], "b"), ([1, 4096], "b"), ([1, 4096], "0"), ([100, 100], "b:7,0")]
        {
            let problem = of_lengths(seqlens, [8, 8], 128, mask).validate().unwrap();
            let choice = choose::<Sm80, _>(&problem, &stated(arch), &options).unwrap();
            assert!(choice.promises.row_invariant && choice.promises.batch_invariant, "{arch}, {seqlens:?}");
            let is_cut = seqlens[1] > fmha_kernels_cuda::split::FIXED_KEYS.unsigned_abs();
            assert_eq!(choice.launches.len(), 1 + usize::from(is_cut), "{arch}, {seqlens:?}, {mask}");
            let unasked = choose::<Sm80, _>(&problem, &stated(arch), &PlanOptions::default()).unwrap();
            assert!(!unasked.promises.row_invariant, "{arch}, {seqlens:?}");
        }
    }
}

/// Hopper's two kernels agree on everything that decides a row's bits: blocks of keys, parts, and the lag of the
/// running maximum.
#[test]
fn kernels_of_hopper_that_share_rows_have_one_order_of_their_keys() {
    let facts = stated("sm_90a");
    for accuracy in [Accuracy::Fast, Accuracy::Exact] {
        let options = PlanOptions::default().row_invariant(true).accuracy(accuracy);
        for dim in [64, 80, 96, 128, 192, 256] {
            for (seqlens, mask) in [([9000, 9000], "b"), ([1, 9000], "0"), ([16, 700], "b:100,0")] {
                let problem = of_lengths(seqlens, [8, 8], dim, mask).validate().unwrap();
                let what = format!("D {dim}, {seqlens:?}, {mask}, {accuracy}");
                let wgmma = choose::<Sm90, _>(&problem, &facts, &options).unwrap();
                let sync = choose::<Sm80, _>(&problem, &facts, &options).unwrap();
                assert!(wgmma.promises.row_invariant && sync.promises.row_invariant, "{what}");
                assert_eq!(wgmma.promises.accuracy, sync.promises.accuracy, "{what}");
                let blocks = |words: Option<String>| {
                    let words = words.unwrap();
                    words.split([' ', ',']).nth(2).unwrap().parse::<u32>().unwrap()
                };
                assert_eq!(blocks(detail(&wgmma, "tile")), blocks(detail(&sync, "tile")), "{what}");
                let words = |words: Option<String>, part: &str| {
                    let words = words.unwrap();
                    words.split(", ").find(|word| word.contains(part)).map(str::to_owned)
                };
                for part in ["rescale beyond", "in parts of"] {
                    let (of_wgmma, of_sync) = (detail(&wgmma, "schedule"), detail(&sync, "schedule"));
                    assert_eq!(words(of_wgmma, part), words(of_sync, part), "{what}");
                }
            }
        }
    }
}

/// If tiles fill the device, Hopper's CTAs merge the parts of their rows themselves, in one launch; with few tiles
/// each CTA computes one part, and a second launch merges.
#[test]
fn parts_of_many_rows_are_folded_by_the_ctas_that_walk_them() {
    let facts = stated("sm_90a");
    let options = PlanOptions::default().row_invariant(true);
    for (seqlens, heads, dim, folds) in [
        ([4096, 4096], [16, 16], 128, true),
        ([16384, 16384], [16, 16], 128, true),
        ([8192, 8192], [32, 8], 64, true),
        ([8192, 8192], [16, 16], 256, true),
        ([1, 4096], [32, 8], 128, false),
        ([16, 131_072], [32, 8], 128, false),
        ([512, 65536], [8, 1], 128, false),
    ] {
        let problem = of_lengths(seqlens, heads, dim, "b").validate().unwrap();
        let choice = choose::<Sm90, _>(&problem, &facts, &options).unwrap();
        let what = format!("{seqlens:?}, {heads:?} heads, D {dim}");
        assert!(choice.promises.row_invariant, "{what}");
        let words = detail(&choice, "schedule").unwrap();
        assert_eq!(words.contains("folded by their CTA"), folds, "{what}: {words}");
        assert_eq!(choice.launches.len(), if folds { 1 } else { 2 }, "{what}");
    }
}

/// `sm80` is the only row-invariant kernel for calls that `sm90` does not support.
#[test]
fn rows_that_only_one_kernel_takes_in_every_layout_are_refused_by_the_others_by_name() {
    let options = PlanOptions::default().row_invariant(true);
    let plain = of_lengths([300, 300], [4, 4], 128, "b");
    let mut capped = plain.clone();
    capped.score.softcap = Some(20.0);
    let (plain, capped) = (plain.validate().unwrap(), capped.validate().unwrap());
    let refusals = [
        choose::<Sm90, _>(&capped, &stated("sm_90a"), &options).err(),
        choose::<Sm100, _>(&plain, &stated("sm_100a"), &options).err(),
    ];
    for refusal in refusals {
        let refusal = refusal.unwrap().to_string();
        assert!(refusal.contains("row_invariant true") && refusal.contains("sm80"), "{refusal}");
    }
    assert!(choose::<Sm80, _>(&capped, &stated("sm_90a"), &options).unwrap().promises.row_invariant);
}

/// Batch-invariant calls over pages of one size are all computed by one kernel, whatever the number of queries: `sm90`
/// if TMA can read the pages. FP8 caches are treated like 16-bit ones.
#[test]
fn hopper_has_batch_invariant_calls_over_pages_by_the_kernel_that_reads_them() {
    let (facts, options) = (stated("sm_90a"), PlanOptions::default().batch_invariant(true));
    for (page_size, is_read) in [(64, true), (16, true), (8, true), (37, false), (1, false)] {
        for (batch, seqlens) in [
            (1, [1, 4096]),
            (1, [1, 32768]),
            (64, [1, 700]),
            (3, [4, 9000]),
            (1, [16, 300]),
            (2, [4000, 4000]),
        ] {
            for cache in [None, Some(DType::E4m3Fn)] {
                let mut problem = of_lengths(seqlens, [32, 8], 128, "b");
                problem.dims.batch = batch;
                problem.layout.kv = KvLayout::Paged { page_size };
                problem.cache.dtype = cache;
                let choice = choose::<Sm90, _>(&problem.validate().unwrap(), &facts, &options);
                let what = format!("pages of {page_size}, {batch} x {seqlens:?}, {cache:?}");
                match choice {
                    Ok(choice) => assert!(is_read && choice.promises.batch_invariant, "{what}"),
                    Err(refusal) if is_read => {
                        assert!(refusal.to_string().contains("sm90_widened once"), "{what}: {refusal}");
                    }
                    // Core has planned the call on a 16-bit cache before the one on the FP8 cache.
                    Err(refusal) => assert!(
                        cache.is_some()
                            || refusal.to_string().contains("batch_invariant: dtype_qk bf16 over pages"),
                        "{what}: {refusal}"
                    ),
                }
            }
        }
    }
}

/// Row invariance is refused for FP8 queries and under a mask as code, since no pair of such calls is tested: the
/// refusal names the field and its value.
#[test]
fn rows_of_equal_bits_are_of_16_bits_and_under_a_band() {
    let options = PlanOptions::default().row_invariant(true);
    let plain = of_lengths([300, 300], [4, 4], 128, "b");
    let masked = plain.clone().mask_code("k % 7 < 6".parse().ok());
    for arch in ["sm_89", "sm_90a", "sm_100a", "sm_120a"] {
        for (qk, o) in
            [(DType::E4m3Fn, DType::Bf16), (DType::E5m2, DType::F16), (DType::E4m3Fn, DType::E4m3Fn)]
        {
            let problem = plain.clone().dtype_qk(qk).dtype_v(qk).dtype_o(o).validate().unwrap();
            assert!(
                choose::<Sm80, _>(&problem, &stated(arch), &PlanOptions::default()).is_ok(),
                "{arch}, {qk}"
            );
            let refusal = choose::<Sm80, _>(&problem, &stated(arch), &options).err().unwrap().to_string();
            assert!(refusal.contains(&format!("row_invariant true: dtype_qk {qk}")), "{arch}: {refusal}");
        }
        let problem = masked.clone().validate().unwrap();
        let refusal = choose::<Sm80, _>(&problem, &stated(arch), &options).err().unwrap().to_string();
        assert!(refusal.contains("row_invariant true: mask_code \"k % 7 < 6\""), "{arch}: {refusal}");
        let backward = BwdProblem::new(masked.clone().write_lse(true)).validate().unwrap();
        let refusal = choose::<Sm80Bwd, _>(&backward, &stated(arch), &options).err().unwrap().to_string();
        assert!(refusal.contains("row_invariant true: mask_code"), "{arch}: {refusal}");
    }
}

/// The problem under intervals with two endpoints a row, which all sequences and heads share.
fn under_intervals(mut problem: FwdProblem) -> FwdProblem {
    let rows = i64::from(problem.dims.seqlen_q);
    let strides = Strides { batch: 0, head: 0, dim: rows, seq: 1 };
    problem.masks.intervals = Some(Intervals { axes: MaskAxes::SHARED, endpoints: 2, strides });
    problem
}

/// Masks as data are refused for keys that arrive during the call: lists of tiles are made before the call, and roles
/// that use them do not wait for pieces of keys.
#[test]
fn keys_that_arrive_beside_masks_as_data_are_refused_with_their_number() {
    let masked = under_intervals(of_lengths([512, 512], [4, 4], 128, "0"));
    assert!(on_hopper(&masked, "").is_ok());
    let refusal = on_hopper(&masked.arrivals(2), "").err().unwrap().to_string();
    assert!(refusal.contains("arrivals 2"), "{refusal}");
}

/// Lists of tiles of 4 GiB and more are refused; `sm80` serves such problems, since it needs no lists.
#[test]
fn lists_of_tiles_that_would_take_gigabytes_are_refused_with_their_bytes() {
    let mut problem = under_intervals(of_lengths([1 << 20, 1 << 20], [32, 32], 128, "0"));
    problem.masks.intervals = problem.masks.intervals.map(|it| Intervals {
        axes: MaskAxes { per_batch: false, heads: 32 },
        strides: Strides { head: 2 << 20, ..it.strides },
        ..it
    });
    let refusal = on_hopper(&problem, "").err().unwrap().to_string();
    assert!(refusal.contains("bytes of workspace, more than 4294967296"), "{refusal}");
}

/// Rows under masks as data are not batch-invariant: a list begins with the blocks that are partly masked for any row
/// of a tile, so a row's order of keys depends on its tile.
#[test]
fn rows_under_masks_as_data_are_not_batch_invariant() {
    for seqlen_q in [1, 300] {
        let mut problem = under_intervals(of_lengths([seqlen_q, 300], [32, 8], 128, "0"));
        problem.dims.batch = 1;
        if let Ok(choice) = on_hopper(&problem, "skip_row_max=0") {
            assert!(!choice.promises.batch_invariant, "{seqlen_q}");
        } else {
            assert_eq!(seqlen_q, 1, "many rows are sm90's");
        }
    }
}
