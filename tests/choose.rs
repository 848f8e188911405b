//! The choice of keys and blocks on every backend, against its definition: scores of an indexer in f64, the greatest of
//! them in a total order. Emulated devices, and the CPU.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amd;

use fmha_conformance::apart::run_test;
use fmha_core::cache::{Bundle, CompiledKernel, embed};
use fmha_core::source::KernelSource;
use fmha_core::sparse::{
    BlockOverlap, BlockScore, CandidateKind, ChooseProblem, ChosenBlocks, IndexKeys, IndexStrides, Indexer,
    ScoreSource, block_maxima, block_sums, choose, choose_blocks,
};
use fmha_core::{AnyProblem, ChooseArgs, DType, DevBuffer, Device, Error, PlanOptions};

/// A choice and its operands.
#[derive(Clone)]
struct Case {
    name: &'static str,
    problem: ChooseProblem,
    q: Vec<u8>,
    k: Vec<u8>,
    weights: Vec<f32>,
    scale: Vec<f32>,
    table: Vec<i32>,
    given: Vec<f32>,
    used: Vec<i32>,
    ranges: [Vec<i32>; 2],
    /// Number of thread groups that share a row, where the test states it for the plan.
    parts: Option<u32>,
    /// Number of groups of a cluster that share a row, where the test states it for the plan.
    cluster: Option<u32>,
}

/// Numbers by a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn below(&mut self, end: u32) -> u32 {
        self.next() % end
    }

    /// Elements of a type. `whole`: -2 to 2, so that every sum is exact and many are equal.
    fn elems(&mut self, dtype: DType, count: usize, whole: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..count {
            let x = if whole { self.below(5) as f32 - 2.0 } else { self.below(2048) as f32 / 1024.0 - 1.0 };
            match dtype {
                DType::F32 => bytes.extend(x.to_le_bytes()),
                DType::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
                DType::Bf16 => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
                // Codes of -2 to 2, or any that is a number of at most 2.
                _ if whole => bytes.push([0xc0, 0xb8, 0, 0x38, 0x40][(x + 2.0) as usize]),
                _ => bytes.push((self.below(0x40) | self.below(2) << 7) as u8),
            }
        }
        bytes
    }

    fn floats(&mut self, count: usize, whole: bool) -> Vec<f32> {
        (0..count)
            .map(|_| if whole { self.below(5) as f32 - 2.0 } else { self.below(2048) as f32 / 1024.0 - 1.0 })
            .collect()
    }
}

impl Case {
    /// Random operands for a problem.
    fn new(name: &'static str, problem: ChooseProblem, whole: bool, seed: u64) -> Self {
        let mut random = Random(seed);
        let rows = problem.rows() as usize;
        let mut case = Self {
            name,
            q: Vec::new(),
            k: Vec::new(),
            weights: Vec::new(),
            scale: Vec::new(),
            table: Vec::new(),
            given: Vec::new(),
            used: Vec::new(),
            ranges: [Vec::new(), Vec::new()],
            parts: None,
            cluster: None,
            problem,
        };
        let problem = &case.problem;
        match problem.source {
            ScoreSource::Given => case.given = random.floats(rows * problem.seqlen_k as usize, whole),
            ScoreSource::Index(indexer) => {
                let (heads, dim) = (indexer.num_heads as usize, indexer.head_dim as usize);
                let [outer, keys] = match indexer.keys {
                    IndexKeys::Batch => [problem.batch, problem.seqlen_k],
                    IndexKeys::Paged { page_size, num_pages, max_pages } => {
                        let entries = problem.batch * max_pages;
                        // Pages in any order; one is outside of k, and is clamped into it.
                        case.table = (0..entries).map(|_| random.below(num_pages) as i32).collect();
                        *case.table.last_mut().unwrap() = num_pages as i32 + 5;
                        [num_pages, page_size]
                    }
                };
                let reach = |strides: IndexStrides, dim: usize| {
                    let last =
                        strides.outer * u64::from(outer - 1) + strides.key * u64::from(keys.max(1) - 1);
                    last as usize + dim
                };
                case.q = random.elems(indexer.dtype_q, rows * heads * dim, whole);
                case.k = random.elems(indexer.dtype_k, reach(indexer.strides_k, dim), whole);
                case.weights = random.floats(rows * heads, whole);
                if indexer.k_scale {
                    case.scale = random.floats(reach(indexer.strides_scale, 1), whole);
                }
            }
        }
        if problem.seqused_k {
            case.used = (0..problem.batch).map(|_| random.below(problem.seqlen_k + 9) as i32 - 4).collect();
        }
        if problem.candidates == CandidateKind::Ranges {
            let any = problem.num_entries().max(problem.seqlen_k) + 9;
            case.ranges = [0, 1].map(|side: u32| {
                (0..rows).map(|_| (random.below(any) * (1 + side) / 2) as i32 - 4).collect::<Vec<i32>>()
            });
        }
        case
    }

    /// Scores of keys by definition, in f64.
    fn key_scores(&self) -> Vec<f64> {
        let problem = &self.problem;
        let Some(indexer) = problem.indexer() else {
            return self.given.iter().map(|&x| x.into()).collect();
        };
        let (heads, dim) = (indexer.num_heads as usize, indexer.head_dim as usize);
        let read =
            |bytes: &[u8], dtype: DType, at: usize| dtype.read(&bytes[at * dtype.size_bytes() as usize..]);
        let mut scores = Vec::new();
        for row in 0..problem.rows() as usize {
            for j in 0..problem.seqlen_k as usize {
                let b = row / problem.seqlen_q as usize;
                let (outer, inner) = match indexer.keys {
                    IndexKeys::Batch => (b, j),
                    IndexKeys::Paged { page_size, num_pages, max_pages } => {
                        let page = self.table[b * max_pages as usize + j / page_size as usize];
                        (page.clamp(0, num_pages as i32 - 1) as usize, j % page_size as usize)
                    }
                };
                let place =
                    |strides: IndexStrides| outer * strides.outer as usize + inner * strides.key as usize;
                let scale =
                    if indexer.k_scale { self.scale[place(indexer.strides_scale)].into() } else { 1.0 };
                let score: f64 = (0..heads)
                    .map(|h| {
                        let product: f64 = (0..dim)
                            .map(|d| {
                                read(&self.q, indexer.dtype_q, (row * heads + h) * dim + d)
                                    * read(&self.k, indexer.dtype_k, place(indexer.strides_k) + d)
                            })
                            .sum();
                        let product: f64 = product * scale;
                        (if product <= 0.0 { 0.0 } else { product })
                            * f64::from(self.weights[row * heads + h])
                    })
                    .sum();
                scores.push(score);
            }
        }
        scores
    }

    /// Candidates among keys (of sums: blocks) of each row.
    fn candidates(&self, row: usize) -> std::ops::Range<u32> {
        let problem = &self.problem;
        let used = self.used.get(row / problem.seqlen_q as usize);
        let used = used.map_or(problem.seqlen_k, |&used| used.max(0) as u32);
        let range = [0, 1].map(|side: usize| self.ranges[side].get(row).copied().unwrap_or(0));
        problem.candidates_of(row as u64, used, range)
    }

    /// Scores that are chosen among and lists of them, from scores of keys.
    fn expected(&self, keys: &[f32]) -> (Vec<f32>, Vec<i32>) {
        let problem = &self.problem;
        let (n, entries, topk) =
            (problem.seqlen_k as usize, problem.num_entries() as usize, problem.topk as usize);
        let (mut scores, mut lists) = (Vec::new(), Vec::new());
        for row in 0..problem.rows() as usize {
            let of_keys = &keys[row * n..][..n];
            let mut candidates = self.candidates(row);
            let mut of_row = vec![0.0; entries];
            let mut list = vec![7; topk];
            match problem.blocks {
                None => {
                    of_row.copy_from_slice(of_keys);
                    choose(of_keys, candidates.clone(), &mut list).unwrap();
                }
                Some(blocks) => {
                    match blocks.score {
                        BlockScore::Maximum { block } => {
                            block_maxima(of_keys, candidates.clone(), block, &mut of_row).unwrap();
                            let end = if candidates.is_empty() { 0 } else { candidates.end.div_ceil(block) };
                            candidates = candidates.start / block..end.max(candidates.start / block);
                        }
                        BlockScore::Sum { overlap, .. } => block_sums(of_keys, overlap, &mut of_row).unwrap(),
                    }
                    let firsts = candidates.clone().take(blocks.first as usize);
                    let forced: Vec<u32> =
                        firsts.chain(candidates.clone().rev().take(blocks.last as usize)).collect();
                    choose_blocks(&of_row, candidates.clone(), &forced, &mut list).unwrap();
                }
            }
            let is_in = |at: usize| candidates.contains(&(at as u32));
            scores.extend((0..entries).map(|at| if is_in(at) { of_row[at] } else { f32::NEG_INFINITY }));
            lists.extend(list);
        }
        (scores, lists)
    }

    /// Options for the plan of the case's lists.
    fn options(&self) -> PlanOptions {
        let groups = [("parts", self.parts), ("cluster", self.cluster)].into_iter();
        PlanOptions::default()
            .tile(groups.filter_map(|(name, count)| Some((name.to_owned(), count?.to_string()))))
    }

    /// Lists and scores of a device.
    fn run(&self, device: &Device, problem: &ChooseProblem, kernel: Option<&str>) -> (Vec<i32>, Vec<f32>) {
        let mut options = if problem.topk > 0 { self.options() } else { PlanOptions::default() };
        options.allow_fallback = true;
        options.kernel = kernel.map(str::to_owned);
        let valid = problem.clone().validate().unwrap();
        let plan = device.plan_choose(&valid, &options).unwrap();
        let memory = device.memory();
        fn place<T: fmha_core::Elem>(device: &Device, elems: &[T]) -> Option<DevBuffer> {
            (!elems.is_empty()).then(|| device.memory().place(elems).unwrap())
        }
        let typed =
            |bytes: &[u8], dtype: Option<DType>| place(device, bytes).map(|it| it.typed(dtype.unwrap()));
        let indexer = problem.indexer();
        let q = typed(&self.q, indexer.map(|it| it.dtype_q));
        let k = typed(&self.k, indexer.map(|it| it.dtype_k));
        let [weights, scale, given] = [&self.weights, &self.scale, &self.given].map(|it| place(device, it));
        let [table, used, first, end] =
            [&self.table, &self.used, &self.ranges[0], &self.ranges[1]].map(|it| place(device, it));
        let rows = problem.rows() as usize;
        let mut lists = vec![99; rows * problem.topk as usize];
        let mut scores =
            vec![9.0f32; if problem.write_scores { rows * problem.num_entries() as usize } else { 0 }];
        let (mut to_lists, mut to_scores) = (place(device, &lists), place(device, &scores));
        let mut scratch = memory.workspace(plan.workspace()).unwrap();
        let mut args = ChooseArgs::default()
            .q(q.as_ref().map(DevBuffer::slice))
            .k(k.as_ref().map(DevBuffer::slice))
            .weights(weights.as_ref().map(DevBuffer::slice))
            .k_scale(scale.as_ref().map(DevBuffer::slice))
            .given(given.as_ref().map(DevBuffer::slice))
            .block_table(table.as_ref().map(DevBuffer::slice))
            .seqused_k(used.as_ref().map(DevBuffer::slice))
            .first(first.as_ref().map(DevBuffer::slice))
            .end(end.as_ref().map(DevBuffer::slice))
            .indices(to_lists.as_mut().map(DevBuffer::slice_mut))
            .scores(to_scores.as_mut().map(DevBuffer::slice_mut))
            .workspace(scratch.as_mut().map(DevBuffer::slice_mut));
        let stream = device.default_stream();
        plan.run(&mut args, &stream).unwrap();
        stream.synchronize().unwrap();
        if let Some(from) = &to_lists {
            memory.download(from, &mut lists).unwrap();
        }
        if let Some(from) = &to_scores {
            memory.download(from, &mut scores).unwrap();
        }
        (lists, scores)
    }

    /// Holds a device's lists and scores to the definition. `exact`: sums of this case have no rounding.
    fn holds(&self, device: &Device, exact: bool, kernel: Option<&str>) {
        let name = format!("{} on {}", self.name, device.name());
        let exact_scores: Vec<f32> = self.key_scores().iter().map(|&x| x as f32).collect();
        // Scores of keys as the device has them: what it chooses among.
        let mut keys = exact_scores.clone();
        if self.problem.indexer().is_some() {
            let mut scored = self.problem.clone().write_scores(true).blocks(None);
            scored.topk = 0;
            let (_, found) = self.run(device, &scored, kernel);
            let plain = Self { problem: scored, ..self.clone() };
            let (wanted, _) = plain.expected(&exact_scores);
            for (at, (&found, &wanted)) in found.iter().zip(&wanted).enumerate() {
                let is_equal = found == wanted || found.is_nan() && wanted.is_nan();
                let is_close = !exact && (found - wanted).abs() <= 2e-5 * wanted.abs().max(8.0);
                assert!(is_equal || is_close, "{name}: score {at} is {found}, should be {wanted}");
            }
            keys = found;
        }
        let (wanted_scores, wanted) = self.expected(&keys);
        let (lists, scores) = self.run(device, &self.problem, kernel);
        if lists != wanted {
            let (topk, differs) =
                (self.problem.topk as usize, lists.iter().zip(&wanted).position(|(a, b)| a != b));
            let at = differs.unwrap_or_default();
            let (found, wanted) = (lists[at], wanted[at]);
            panic!("{name}: entry {} of list {} is {found}, should be {wanted}", at % topk, at / topk);
        }
        if self.problem.write_scores {
            for (at, (&found, &wanted)) in scores.iter().zip(&wanted_scores).enumerate() {
                let is_equal = found == wanted || found.is_nan() && wanted.is_nan();
                assert!(is_equal, "{name}: written score {at} is {found}, should be {wanted}");
            }
        }
        assert_eq!(self.run(device, &self.problem, kernel).0, lists, "{name}: a second run");
    }
}

fn index(sizes: [u32; 3], topk: u32, indexer: Indexer) -> ChooseProblem {
    ChooseProblem::new(sizes[0], sizes[1], sizes[2], topk, ScoreSource::Index(indexer))
}

/// Cases whose sums are exact.
fn exact_cases() -> Vec<Case> {
    let bf16 = DType::Bf16;
    let dense = |heads, dim, keys| Indexer::new(heads, dim, bf16, bf16, keys);
    let whole = |name, problem, seed| Case::new(name, problem, true, seed);
    let mut cases = vec![
        whole("causal", index([2, 5, 150], 17, dense(4, 32, 150)), 1),
        whole("topk of all", index([1, 3, 40], 64, dense(2, 16, 40)), 2),
        whole("more queries than keys", index([1, 9, 4], 3, dense(1, 16, 4)), 3),
        whole("no keys", index([1, 2, 0], 3, dense(1, 16, 0)), 4),
        whole(
            "ranges, empty ones too",
            index([1, 12, 90], 11, dense(2, 16, 90)).candidates(CandidateKind::Ranges),
            5,
        ),
        whole("lengths", index([4, 2, 70], 9, dense(2, 16, 70)).seqused_k(true).write_scores(true), 6),
    ];
    let fp8 = |heads, dim, keys| Indexer::new(heads, dim, DType::E4m3Fn, DType::E4m3Fn, keys);
    // Pages as DeepGEMM has them: scales of a page behind its keys.
    let (page, dim) = (16, 32);
    let fused = fp8(8, dim, 0)
        .k_scale(true)
        .paged(page, 7, 9)
        .strides_k(IndexStrides { outer: u64::from(page * (dim + 4)), key: dim.into() });
    cases.push(whole("fp8 in pages", index([2, 2, 140], 30, fused).seqused_k(true), 7));
    let mut odd =
        whole("not finite", index([1, 4, 80], 60, dense(1, 16, 80)).candidates(CandidateKind::All), 8);
    for (key, bits) in [(3, 0x7fc0u16), (4, 0x7f80), (9, 0xff80), (70, 0x7fc0), (71, 0x7f80)] {
        odd.k[key * 32..][..2].copy_from_slice(&bits.to_le_bytes());
    }
    odd.q.chunks_mut(32).for_each(|row| row[..2].copy_from_slice(&half::bf16::from_f32(1.0).to_le_bytes()));
    odd.weights[..4].copy_from_slice(&[-1.0, 1.0, -1.0, 2.0]);
    cases.push(odd);
    let blocks = ChosenBlocks::maximum(16).first(1).last(2);
    cases.push(whole("blocks", index([2, 3, 200], 5, dense(2, 16, 200)).blocks(blocks), 9));
    cases.push(whole(
        "blocks and their scores",
        index([1, 3, 77], 2, dense(2, 16, 77))
            .blocks(ChosenBlocks::maximum(8))
            .candidates(CandidateKind::Ranges)
            .write_scores(true),
        10,
    ));
    cases
}

/// Cases of given scores.
fn given_cases() -> Vec<Case> {
    let given =
        |sizes: [u32; 3], topk| ChooseProblem::new(sizes[0], sizes[1], sizes[2], topk, ScoreSource::Given);
    let all = CandidateKind::All;
    let mut cases = vec![
        Case::new("given, with ties", given([1, 2, 2500], 700).candidates(all), true, 20),
        Case::new("given", given([1, 2, 3000], 2048).candidates(all), false, 21),
        Case::new("given, one", given([2, 2, 33], 1), false, 22),
        Case::new("given blocks", given([1, 4, 900], 6).blocks(ChosenBlocks::maximum(64).last(1)), false, 23),
    ];
    let overlap = BlockOverlap { compressed: 32, stride: 16, selected: 64 };
    let sums = given([1, 6, 60], 4)
        .candidates(CandidateKind::Ranges)
        .blocks(ChosenBlocks::sum(overlap, 16).first(1));
    cases.push(Case::new("sums of blocks", sums.clone(), true, 24));
    cases.push(Case::new("written sums of blocks", sums.write_scores(true), true, 25));
    let mut odd = Case::new("given, not finite", given([1, 1, 3000], 1000).candidates(all), false, 26);
    for (at, score) in odd.given.iter_mut().enumerate() {
        match at % 7 {
            0 => *score = f32::NAN,
            1 => *score = f32::NEG_INFINITY,
            2 => *score = if at % 2 == 0 { 0.0 } else { -0.0 },
            3 => *score = f32::from_bits(at as u32),
            4 if at > 2000 => *score = f32::INFINITY,
            _ => {}
        }
    }
    cases.push(odd.clone());
    odd.problem.topk = 2900;
    cases.push(odd);
    let mut zeros = Case::new("given, both zeros", given([1, 1, 90], 20).candidates(all), false, 28);
    zeros.given.iter_mut().enumerate().for_each(|(at, score)| *score = if at % 3 == 0 { -0.0 } else { 0.0 });
    cases.push(zeros);
    let mut equal = Case::new("given, all equal", given([1, 1, 2500], 300).candidates(all), true, 27);
    equal.given.fill(1.5);
    cases.push(equal);
    cases
}

/// Cases of matrix units: several blocks of keys, rows of two sequences in a CTA, heads that fill no product, rows of
/// 256 elements, every pair of types.
fn matrix_cases() -> Vec<Case> {
    let of = |q, k, heads, dim, keys| Indexer::new(heads, dim, q, k, keys);
    let (bf16, fp8, f16) = (DType::Bf16, DType::E4m3Fn, DType::F16);
    let scaled = of(fp8, fp8, 64, 128, 300).k_scale(true);
    vec![
        Case::new("blocks of keys", index([2, 3, 600], 40, of(bf16, bf16, 5, 32, 600)), true, 40),
        Case::new("64 heads of fp8", index([1, 2, 300], 40, scaled).write_scores(true), true, 41),
        Case::new("256 elements", index([1, 1, 150], 9, of(f16, f16, 17, 256, 150)), true, 42),
        Case::new("fp8 q", index([1, 2, 40], 9, of(fp8, bf16, 16, 64, 40)), true, 43),
    ]
}

/// Cases of AMD's matrix units alone: an instruction of one chunk, NaN in codes that are widened, E4M3 in the form
/// without infinities, rows of other lengths than whole pairs of steps, more heads than a block has.
fn amd_cases(arch: &str) -> Vec<Case> {
    let of = |q, k, heads, dim, keys| Indexer::new(heads, dim, q, k, keys);
    let (bf16, fp8) = (DType::Bf16, DType::E4m3Fn);
    let mut odd =
        Case::new("units, codes without a number", index([1, 2, 70], 20, of(bf16, fp8, 3, 48, 70)), true, 70);
    for (key, code) in [(5, 0x7f), (6, 0xff), (64, 0x7f)] {
        odd.k[key * 48] = code;
    }
    let mut cases = vec![
        odd,
        Case::new("units, short rows of fp8", index([1, 2, 70], 20, of(fp8, fp8, 33, 32, 70)), true, 71),
        Case::new("units, rows of 112", index([1, 9, 300], 20, of(bf16, bf16, 40, 112, 300)), true, 72),
    ];
    if arch == "gfx942" {
        let own = of(DType::E4m3Fnuz, DType::E4m3Fnuz, 64, 128, 300).k_scale(true);
        cases.push(Case::new(
            "units, 64 heads of fnuz",
            index([1, 2, 300], 40, own).write_scores(true),
            true,
            73,
        ));
    }
    cases.extend(matrix_cases().into_iter().chain(warpgroup_cases()));
    // gfx90a's matrix unit flushes subnormal f16, and the kernel refuses the type.
    cases.retain(|case| {
        arch != "gfx90a" || case.problem.indexer().is_none_or(|indexer| indexer.dtype_q != DType::F16)
    });
    cases
}

/// Cases of wgmma: several tiles of keys, tokens that stay in shared memory and tokens that pass by, groups of them,
/// pages of fewer keys than a tile has, lengths and ranges, scales of both signs.
fn warpgroup_cases() -> Vec<Case> {
    let of = |dtype, heads, dim, keys| Indexer::new(heads, dim, dtype, dtype, keys);
    let (bf16, fp8, f16) = (DType::Bf16, DType::E4m3Fn, DType::F16);
    let scaled = of(fp8, 64, 128, 900).k_scale(true);
    let fused = |page: u32, heads| {
        let strides = IndexStrides { outer: u64::from(page * 132), key: 128 };
        let scales = IndexStrides { outer: u64::from(page * 33), key: 1 };
        of(fp8, heads, 128, 0).k_scale(true).paged(page, 19, 12).strides_k(strides).strides_scale(scales)
    };
    vec![
        Case::new("warpgroups, fp8", index([1, 2, 900], 40, scaled).write_scores(true), true, 50),
        Case::new("warpgroups, pages", index([3, 1, 700], 33, fused(64, 16)).seqused_k(true), true, 51),
        Case::new("warpgroups, tokens", index([2, 37, 450], 20, of(bf16, 8, 64, 450)), true, 52),
        Case::new(
            "warpgroups, ranges",
            index([1, 40, 600], 20, of(f16, 16, 32, 600))
                .candidates(CandidateKind::Ranges)
                .write_scores(true),
            true,
            53,
        ),
        Case::new("warpgroups, small pages", index([2, 3, 90], 20, fused(8, 8)).seqused_k(true), true, 54),
    ]
}

/// Cases of clusters: lists by a bound and by digits, CTAs without keys, rows that end anywhere, scores in order.
fn cluster_cases() -> Vec<Case> {
    let given = |sizes: [u32; 3], topk| {
        ChooseProblem::new(sizes[0], sizes[1], sizes[2], topk, ScoreSource::Given)
            .candidates(CandidateKind::All)
    };
    let of = |ctas, case: Case| Case { cluster: Some(ctas), ..case };
    let mut ascending = Case::new("clusters, ascending", given([1, 1, 9000], 500), false, 63);
    ascending.given.iter_mut().enumerate().for_each(|(at, score)| *score = at as f32);
    let mut equal = Case::new("clusters, all equal", given([1, 1, 9000], 300), false, 64);
    equal.given.fill(-1.5);
    let mut not_finite = Case::new("clusters, not finite", given([1, 1, 5000], 2400), false, 65);
    for (at, score) in not_finite.given.iter_mut().enumerate() {
        match at % 4 {
            0 => *score = f32::NAN,
            1 => *score = f32::NEG_INFINITY,
            2 if at > 4000 => *score = f32::INFINITY,
            _ => {}
        }
    }
    vec![
        of(1, Case::new("clusters of one", given([1, 1, 4500], 300), false, 60)),
        of(2, Case::new("clusters of two", given([1, 1, 9001], 700).seqused_k(true), false, 61)),
        of(4, Case::new("clusters, ties", given([1, 2, 9000], 2048), true, 62)),
        of(4, Case::new("clusters, few keys", given([1, 1, 700], 650), false, 66)),
        of(
            8,
            Case::new(
                "clusters, ranges",
                given([1, 2, 3000], 20).candidates(CandidateKind::Ranges),
                false,
                67,
            ),
        ),
        of(2, ascending),
        of(2, equal),
        of(4, not_finite),
    ]
}

/// Cases whose sums round.
fn rounded_cases() -> Vec<Case> {
    let dense = |q, k, heads, dim, keys| Indexer::new(heads, dim, q, k, keys);
    let f32s = dense(DType::F32, DType::F32, 3, 24, 60);
    let mixed = dense(DType::Bf16, DType::E4m3Fn, 16, 64, 130).k_scale(true);
    let f16 = dense(DType::F16, DType::F16, 64, 128, 70);
    vec![
        Case::new("f32", index([1, 4, 60], 9, f32s), false, 30),
        Case::new("bf16 q, fp8 k", index([2, 1, 130], 20, mixed), false, 31),
        Case::new("f16, 64 heads", index([1, 1, 70], 20, f16), false, 32),
    ]
}

/// Every case, or one in `step`.
fn all_hold(device: &Device, step: usize) {
    fn each(cases: Vec<Case>, step: usize, hold: impl Fn(Case)) {
        cases.into_iter().step_by(step).for_each(hold);
    }
    each(exact_cases(), step, |case| case.holds(device, true, None));
    each(given_cases(), step, |case| case.holds(device, true, None));
    each(rounded_cases(), step, |case| case.holds(device, false, None));
    if device.kind() == "cpu" {
        return;
    }
    let in_parts = |case: Case| Case { parts: Some(3), ..case }.holds(device, true, None);
    each(given_cases(), 2 * step, in_parts);
    each(exact_cases(), 4 * step, in_parts);
    if device.kind() == "cuda" {
        each(matrix_cases(), step.min(2), |case| case.holds(device, true, Some("sm80_index")));
    }
    if step == 1 {
        // The slow kernel, where the fast one is chosen.
        let mut slow = exact_cases();
        slow.retain(|case| case.problem.indexer().is_some());
        each(slow, 3 * step, |case| case.holds(device, true, Some("simt")));
    }
}

#[test]
fn the_cpu_chooses_as_the_definition_does() {
    all_hold(&Device::new(fmha_cpu::CpuBackend::new().unwrap()), 1);
}

fn nvidia(arch: &str, step: usize) {
    if let Err(reason) = fmha_cuda::nvrtc::nvrtc() {
        return println!("absent: {reason}");
    }
    match fmha_cuda::open(0, Some(arch)) {
        Ok(device) => {
            if arch == "sm_90a" {
                let on_wgmma = |case: Case| case.holds(&device, true, Some("sm90_index"));
                warpgroup_cases().into_iter().for_each(on_wgmma);
                cluster_cases().into_iter().for_each(|case| case.holds(&device, true, None));
            }
            all_hold(&device, step);
        }
        Err(Error::NoDevice(reason)) => println!("absent: {reason}"),
        Err(error) => panic!("{arch}: {error}"),
    }
}

#[test]
fn sm80_chooses_as_the_definition_does() {
    nvidia("sm_80", 1);
}

/// Name of the test that does what another one asks of a process of its own.
const OWN: &str = "the_work_of_this_process";

#[test]
fn the_work_of_this_process() {
    if let Ok(arch) = std::env::var("CHOOSE_ARCH") {
        nvidia(&arch, 3);
    }
    if let Ok(fault) = std::env::var("CHOOSE_FAULT") {
        is_found(&FAULTS[fault.parse::<usize>().unwrap()]);
    }
}

/// A process emulates one architecture of NVIDIA's. Every access is ordered by vector clocks, so that a missing wait is
/// an error.
#[test]
fn hopper_chooses_as_the_definition_does() {
    run_test(OWN, &[("CHOOSE_ARCH", "sm_90a"), ("FMHA_EMULATE_MODE", "hb")]).unwrap();
}

/// A fault in a header: its name, the text, what stands in its place, and the case that finds it; `clusters` and
/// `warpgroups` are Hopper's, `units` AMD's.
type Fault = (&'static str, &'static str, &'static str, &'static str);

const FAULTS: [Fault; 10] = [
    ("fmha/choose_row.h", "rank < wanted))", "rank <= wanted))", "given, all equal"),
    (
        "fmha/choose.h",
        "return 0;\n  const uint32_t bits",
        "return kForced - 1;\n  const uint32_t bits",
        "given, not finite",
    ),
    ("fmha/choose.h", "score == 0.f ? 0.f : score", "score", "given, both zeros"),
    ("fmha/sm80/index/main.cuh", "* w[e / 2]", "* w[e % 2]", "64 heads of fp8"),
    (
        "fmha/sm90/index/main.cuh",
        "{ ptx::mbarrier_wait_parity(smem.q_full[q_slot.index], q_slot.phase); }",
        "{}",
        "warpgroups, tokens",
    ),
    (
        "fmha/common/choose_cluster.cuh",
        "ptx::redux_min(of_rank(shared.bound, ~0u))",
        "ptx::redux_max(of_rank(shared.bound, 0))",
        "clusters of two",
    ),
    (
        "fmha/common/choose_cluster.cuh",
        "gather(of_cta, room, bound);\n    wait_for_all();",
        "gather(of_cta, room, bound);\n    Cta::barrier();",
        "clusters of two",
    ),
    ("fmha/amd/index.h", "s_barrier_of_lds();\n", "\n", "units, rows of 112"),
    ("fmha/amd/index.h", "score[g] = there ? added : score[g];", "score[g] = added;", "units, rows of 112"),
    (
        "fmha/amd/widen_e4m3.h",
        "two_to_eighth) | no_number",
        "two_to_eighth)",
        "units, codes without a number",
    ),
];

/// The architecture whose case of that name finds a fault.
fn arch_of(case: &str) -> &'static str {
    match case.split([',', ' ']).next() {
        Some("clusters" | "warpgroups") => "sm_90a",
        Some("units") => "gfx942",
        _ => "sm_80",
    }
}

/// Holds that a case passes on the sound kernels, and not with the fault in them.
fn is_found(&(name, text, put, case): &Fault) {
    let arch = arch_of(case);
    let open = || {
        if arch.starts_with("gfx") {
            amd::open(arch, "a fault in the choice of keys")
        } else {
            fmha_cuda::nvrtc::nvrtc().ok().and_then(|_| fmha_cuda::open(0, Some(arch)).ok())
        }
    };
    let Some(device) = open() else { return println!("absent") };
    let cases = given_cases().into_iter().chain(matrix_cases()).chain(amd_cases("gfx942"));
    let mut cases = cases.chain(warpgroup_cases()).chain(cluster_cases());
    let case = cases.find(|it| it.name == case).unwrap();
    case.holds(&device, true, None);
    let compiler = device.precompiler().unwrap();
    let problem = case.problem.clone().validate().unwrap();
    let jobs = compiler.jobs(AnyProblem::Choose(&problem), &case.options()).unwrap();
    let mut broken = Vec::new();
    for job in jobs {
        let mut headers = job.source.headers().to_vec();
        let Some(header) = headers.iter_mut().find(|header| header.name == name) else { continue };
        assert_eq!(header.text.matches(text).count(), 1, "{name}: `{text}`");
        header.text = header.text.replace(text, put).into();
        let mut other = job.clone();
        other.source = KernelSource::with(job.source.entry.clone(), headers);
        let kernel = compiler.precompile(&other).unwrap();
        broken.push(CompiledKernel { key: job.key(), ..(*kernel).clone() }.into());
    }
    assert!(!broken.is_empty(), "no kernel of {} includes {name}", case.name);
    // Devices that are opened from here on take the broken kernels.
    embed(Bundle::new("planted", broken));
    let device = open().unwrap();
    let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case.holds(&device, true, None)));
    assert!(held.is_err(), "{}: `{put}` in {name} is not found", case.name);
}

#[test]
fn each_planted_fault_is_found() {
    for (at, fault) in FAULTS.iter().enumerate() {
        let mode = if arch_of(fault.3) == "sm_90a" { "hb" } else { "eager" };
        let said = run_test(OWN, &[("CHOOSE_FAULT", &at.to_string()), ("FMHA_EMULATE_MODE", mode)]);
        assert!(said.is_ok(), "{fault:?}: {said:?}");
    }
}

/// One in `own` of the cases of an architecture's matrix unit, then one in `step` of all choices of its backend.
fn amd_holds(arch: &str, own: usize, step: usize) {
    let Some(device) = amd::open(arch, "the choice of keys") else { return };
    let kernel = if arch.starts_with("gfx9") { "cdna_index" } else { "rdna_index" };
    for case in amd_cases(arch).into_iter().step_by(own) {
        case.holds(&device, true, Some(kernel));
    }
    all_hold(&device, step);
}

#[test]
fn cdna_and_rdna_choose_as_the_definition_does() {
    amd_holds("gfx942", 3, 1);
    amd_holds("gfx1201", 4, 4);
}

#[test]
#[ignore = "the sample's cases again: cargo xtask test --all"]
fn every_amd_device_chooses_as_the_definition_does() {
    for arch in ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"] {
        amd_holds(arch, 1, 1);
    }
}
