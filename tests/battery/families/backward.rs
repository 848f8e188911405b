//! Cases of every gradient, over all axes of a problem.

use fmha_core::{
    Bias, BiasBroadcast, BiasGrad, BwdProblem, DType, Dims, ElementwiseBias, FwdProblem, KvLayout, QLayout,
    Strides, Totals, VLayout,
};

use super::edges::{data, group, masked};
use super::pairwise::pairwise;
use super::recipe::{AXES, Recipe, random_levels, recipe};
use crate::case::{Backward, Body, Case, WIDE, seed_of};
use crate::init::{Init, mix};
use crate::memory::Placement;
use crate::tensor::{Operand, Room};
use crate::tensors::{Data, Lengths};

const RANDOM: u64 = 150;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let pairs = pairwise(&AXES, 0xb4d).into_iter().enumerate();
    let pairs = pairs.map(|(row, levels)| (format!("backward/pairs_{row:03}"), levels));
    let random =
        (0..RANDOM).map(|index| (format!("backward/random_{index:03}"), random_levels(0xbac5eed, index)));
    for (name, levels) in pairs.chain(random) {
        let seed = seed_of(&name);
        let Recipe { label, mut problem, lengths, data } = recipe(&levels, seed);
        if problem.dtypes.o.is_fp8() {
            problem.dtypes.o = DType::Bf16;
        }
        (problem.scales.scale_o, problem.dropout.write_keep_mask) = (false, false);
        let (problem, deterministic) = random_options(problem, lengths.totals, seed);
        let body = Backward { problem, lengths, data, deterministic, planted: Vec::new() };
        cases.push(Case { name: format!("{name}/{label}"), body: Body::Backward(Box::new(body)) });
    }
    edges(&mut cases);
    modifiers(&mut cases);
    modifier_pairs(&mut cases);
    field(&mut cases);
    over_blocks(&mut cases);
    any_softcap(&mut cases);
    beside_the_products(&mut cases);
    parts_in_turns(&mut cases);
    every_bit_in_turns(&mut cases);
    hidden_in_packed(&mut cases);
    packed_on_one_side(&mut cases);
    column_major(&mut cases);
    far_rows(&mut cases);
    far_products(&mut cases);
    any_nan(&mut cases);
    cases
}

/// V is column-major, with complete and incomplete blocks of keys, and with rows whose bytes are no multiple of a
/// copy's 16.
fn column_major(cases: &mut Vec<Case>) {
    for dtype in [DType::F16, DType::Bf16] {
        // The last case's rows of keys are a multiple of 16 bytes.
        let sizes = [(64, 101, "b"), (128, 101, "0"), (192, 101, "b:40,0"), (20, 101, "b"), (72, 136, "b")];
        for (head_dim, seqlen_k, mask) in sizes {
            let name = format!("backward/column_major_v/{dtype}/d{head_dim}/{mask}");
            let sizes = Dims::batch(2).seqlens(130, seqlen_k).heads(2, 1).head_dim(head_dim);
            let mut problem = masked(dtype, sizes, mask);
            (problem.layout.v, problem.strides.v) = (VLayout::ColMajor, Strides::bhds(problem.shape_v()));
            let numbers = data(&name);
            cases.push(Case::backward(name, BwdProblem::new(problem), Lengths::default(), numbers));
        }
    }
}

/// Modifiers between the product and its softmax, alone and together, over complete blocks of keys and an
/// incomplete one, with their gradients.
const MODIFIERS: [&str; 13] = [
    "softcap",
    "large_softcap",
    "alibi",
    "alibi_softcap_dropout",
    "bias_f32",
    "bias_16",
    "bias_softcap_dropout",
    "dbias_one_one",
    "dbias_one_head",
    "dbias_batch_head",
    "dropout",
    "sink",
    "dbias_batch_one",
];

fn modifiers(cases: &mut Vec<Case>) {
    for dtype in [DType::F16, DType::Bf16] {
        for (head_dim, head_dim_v) in [(64, 64), (72, 72), (128, 128), (136, 136), (168, 120), (200, 200)] {
            for (n, modifier) in MODIFIERS.into_iter().enumerate() {
                // Each modifier occurs with both layouts of the sequences and both kinds of mask, but not in every
                // combination.
                let packed = (n + head_dim as usize / 8 + usize::from(dtype == DType::F16)).is_multiple_of(2);
                let mask = ["b", "0", "b:60,3,2"][(n + head_dim as usize / 64) % 3];
                let dims = Dims::batch(2).seqlens(140, 150).heads(2, 1).head_dims(head_dim, head_dim_v);
                let sequences = [(140, 60), (30, 150)];
                let (fwd, lengths) = if packed {
                    (group(dtype, dims, &sequences, mask), Lengths::packed(&sequences))
                } else {
                    (masked(dtype, dims, mask), Lengths::default())
                };
                let layout = if packed { "group" } else { "batch" };
                let of = label(head_dim, head_dim_v);
                let name = format!("backward/modifiers/{dtype}/{of}/{modifier}/{layout}/{mask}");
                let data = data(&name);
                cases.push(Case::backward(name, modified(fwd, modifier), lengths, data));
            }
        }
    }
}

/// Modifiers, two and three together, under each kind of mask, with and without ordered sums: a kernel's registers,
/// and whether ptxas can overlap its products, depend on these and on the head dimension.
fn modifier_pairs(cases: &mut Vec<Case>) {
    let pairs =
        ["softcap_dropout", "alibi_softcap", "alibi_dropout", "alibi_softcap_dropout", "bias_f32_softcap"]
            .into_iter()
            .chain(["bias_16_dropout", "dbias_one_one_dropout", "dbias_one_one_softcap_dropout", "dropout"]);
    for (n, modifier) in pairs.enumerate() {
        for (m, (qk, v)) in
            [(64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (232, 232), (256, 256)]
                .into_iter()
                .enumerate()
        {
            for (mask, deterministic) in
                ["0", "b", "b:40,3,2"].into_iter().flat_map(|mask| [(mask, false), (mask, true)])
            {
                let dtype = if (n + m).is_multiple_of(2) { DType::Bf16 } else { DType::F16 };
                let order = if deterministic { "in_order" } else { "any_order" };
                let name = format!("backward/pairs/{dtype}/{}/{modifier}/{mask}/{order}", label(qk, v));
                let dims = Dims::batch(1).seqlens(70, 75).heads(2, 1).head_dims(qk, v);
                let (problem, data) = (modified(masked(dtype, dims, mask), modifier), data(&name));
                let (lengths, planted) = (Lengths::default(), Vec::new());
                let body = Backward { problem, lengths, data, deterministic, planted };
                cases.push(Case { name, body: Body::Backward(Box::new(body)) });
            }
        }
    }
}

fn label(head_dim: u32, head_dim_v: u32) -> String {
    if head_dim == head_dim_v { format!("d{head_dim}") } else { format!("d{head_dim}x{head_dim_v}") }
}

pub(super) fn modified(mut fwd: FwdProblem, modifier: &str) -> BwdProblem {
    let has = |what: &str| modifier.contains(what);
    if has("softcap") {
        fwd.score.softcap = Some(if has("large") { 70.0 } else { 2.0 });
    }
    if has("large") {
        // The scale places the largest scores of a row, which alone have a gradient, where the cap bends.
        fwd.score.softmax_scale = Some(30.0 / (fwd.dims.head_dim_qk as f32).sqrt());
    }
    if has("dropout") {
        fwd.dropout.p_drop = 0.3;
    }
    fwd.score.sink = has("sink");
    let broadcast = match modifier {
        word if word.starts_with("dbias_one_one") => BiasBroadcast::OneOne,
        "dbias_batch_one" => BiasBroadcast::BatchOne,
        "dbias_batch_head" => BiasBroadcast::BatchHead,
        _ => BiasBroadcast::OneHead,
    };
    if has("alibi") {
        fwd.score.bias = Bias::Alibi { per_batch: true };
    } else if has("bias") {
        let dtype = if has("bias_16") || has("one_head") { fwd.dtypes.qk } else { DType::F32 };
        let strides = Strides::bhsd(fwd.shape_bias(broadcast));
        fwd.score.bias = Bias::Elementwise(ElementwiseBias { dtype, broadcast, strides });
    }
    let mut problem = BwdProblem::new(fwd);
    problem.write_dsink = problem.fwd.score.sink;
    problem.has_dlse = has("sink") || modifier == "alibi";
    if let (Bias::Elementwise(bias), true) = (problem.fwd.score.bias, has("dbias")) {
        problem.dbias = Some(BiasGrad { dtype: bias.dtype, strides: bias.strides });
    }
    problem
}

/// Calls that the backward of other libraries has computed wrongly: sequences with no token or one, next to others that
/// end anywhere in a block; dO with another layout than O; very different head dimensions.
fn field(cases: &mut Vec<Case>) {
    let sequences = [(0, 0), (1, 1), (65, 65), (0, 5), (127, 130), (1, 0), (129, 64)];
    let dims = |head_dim_qk, head_dim_v| {
        Dims::batch(2).seqlens(129, 130).heads(2, 1).head_dims(head_dim_qk, head_dim_v)
    };
    for dtype in [DType::F16, DType::Bf16] {
        for head_dim in [64, 128] {
            let dims = Dims { batch: sequences.len() as u32, ..dims(head_dim, head_dim) };
            for mask in ["0", "b"] {
                let name = format!("backward/field/short_sequences/{dtype}/d{head_dim}/{mask}");
                let problem = BwdProblem::new(group(dtype, dims, &sequences, mask));
                let data = data(&name);
                cases.push(Case::backward(name, problem, Lengths::packed(&sequences), data));
            }
        }
        for (qk, v) in [(192, 128), (256, 64), (64, 256), (64, 192), (96, 96)] {
            let name = format!("backward/field/unlike_head_dims/{dtype}/d{qk}x{v}");
            let data = data(&name);
            let problem = BwdProblem::new(masked(dtype, dims(qk, v), "b"));
            cases.push(Case::backward(name, problem, Lengths::default(), data));
        }
        // Tiles of different heads run at the same time, and the last group of heads is smaller.
        for mask in ["b", "b:40,0"] {
            let name = format!("backward/field/more_heads_than_run_together/{dtype}/{mask}");
            let data = data(&name);
            let many =
                Dims { seqlen_q: 12, seqlen_k: 1030, num_heads_q: 35, num_heads_kv: 35, ..dims(64, 64) };
            let problem = BwdProblem::new(masked(dtype, many, mask));
            cases.push(Case::backward(name, problem, Lengths::default(), data));
        }
        // With one block of queries, its only CTA prepares the data that many blocks of keys read.
        let name = format!("backward/field/one_query_block/{dtype}");
        let numbers = data(&name);
        let one = Dims { batch: 1, seqlen_q: 60, seqlen_k: 700, num_heads_q: 1, ..dims(64, 64) };
        let problem = BwdProblem::new(masked(dtype, one, "0"));
        cases.push(Case::backward(name, problem, Lengths::default(), numbers));
        // The rows of gradients have a distance that is no multiple of 16 bytes.
        let name = format!("backward/field/gradients_of_odd_strides/{dtype}");
        let numbers = data(&name);
        let mut problem = BwdProblem::new(masked(dtype, Dims { num_heads_kv: 2, ..dims(64, 64) }, "b"));
        for strides in [&mut problem.dq, &mut problem.dk, &mut problem.dv] {
            let rows = strides.batch / strides.seq;
            strides.seq += 2;
            strides.batch = rows * strides.seq;
        }
        cases.push(Case::backward(name, problem, Lengths::default(), numbers));
        // The bytes of the head dimension are no multiple of 16, but the distance of rows is.
        let name = format!("backward/field/ragged_head_dim/{dtype}");
        let numbers = data(&name);
        let mut ragged = masked(dtype, dims(60, 44), "b");
        for strides in
            [&mut ragged.strides.q, &mut ragged.strides.k, &mut ragged.strides.v, &mut ragged.strides.o]
        {
            let dim = strides.head;
            (strides.seq, strides.batch) = (strides.seq / dim * 64, strides.batch / dim * 64);
            strides.head = 64;
        }
        cases.push(Case::backward(name, BwdProblem::new(ragged), Lengths::default(), numbers));
        // A sequence's queries end within a block of dBias, and NaN follows.
        let name = format!("backward/field/dbias_of_used_rows/{dtype}");
        let numbers = data(&name);
        let mut used = masked(dtype, dims(64, 64), "0");
        (used.layout.seqused_q, used.layout.seqused_k) = (true, true);
        let (seqused_q, seqused_k) = (vec![129, 70], vec![9, 130]);
        let lengths = Lengths { seqused_q, seqused_k, ..Lengths::default() };
        cases.push(Case::backward(name, modified(used, "dbias_one_one"), lengths, numbers));
        // Keys end within a block of dBias after the first block, and the mask hides none of them.
        for mask in ["0", "b:200,200"] {
            let name = format!("backward/field/dbias_of_used_rows/{dtype}/second_block/{mask}");
            let numbers = data(&name);
            let mut used = masked(dtype, Dims { seqlen_q: 40, seqlen_k: 180, ..dims(64, 64) }, mask);
            (used.layout.seqused_q, used.layout.seqused_k) = (true, true);
            let (seqused_q, seqused_k) = (vec![40, 30], vec![140, 180]);
            let lengths = Lengths { seqused_q, seqused_k, ..Lengths::default() };
            cases.push(Case::backward(name, modified(used, "dbias_one_one"), lengths, numbers));
        }
        // A bias that ends with its last row; queries fill their blocks, and keys end within a thread's group of
        // eight.
        for bias in ["bias_16", "bias_f32"] {
            let name = format!("backward/field/{bias}_of_whole_query_blocks/{dtype}");
            let numbers = data(&name);
            let whole = masked(dtype, Dims { batch: 1, seqlen_q: 128, seqlen_k: 74, ..dims(64, 64) }, "0");
            cases.push(Case::backward(name, modified(whole, bias), Lengths::default(), numbers));
        }
        // Rows end where their blocks end, followed directly by another head's rows.
        let name = format!("backward/field/sink_of_whole_blocks/{dtype}");
        let whole = masked(dtype, Dims { seqlen_q: 128, seqlen_k: 100, ..dims(64, 64) }, "b");
        let numbers = data(&name);
        cases.push(Case::backward(name, modified(whole, "sink"), Lengths::default(), numbers));
        // Every warp that sums dSink has rows, and each row contributes much.
        let name = format!("backward/field/sink_of_many_rows/{dtype}");
        let many = masked(dtype, Dims { seqlen_q: 250, seqlen_k: 8, ..dims(64, 64) }, "0");
        let numbers = data(&name);
        cases.push(Case::backward(name, modified(many, "sink"), Lengths::default(), numbers));
        // The mask has more sink columns than there are queries.
        let name = format!("backward/field/few_queries_many_sinks/{dtype}");
        let few = masked(dtype, Dims { seqlen_q: 5, ..dims(64, 64) }, "b:9,4,40");
        let numbers = data(&name);
        cases.push(Case::backward(name, BwdProblem::new(few), Lengths::default(), numbers));
        // Queries without visible keys and a sink of -inf: LSE and sink are both -inf.
        let name = format!("backward/field/sink_of_no_weight/{dtype}");
        let (numbers, planted) = (data(&name), vec![(Operand::Sink, [0, 0, 0, 1], f64::NEG_INFINITY)]);
        let few_keys = masked(dtype, Dims { seqlen_q: 129, seqlen_k: 60, ..dims(64, 64) }, "b");
        let problem = modified(few_keys, "sink");
        let (lengths, deterministic) = (Lengths::default(), false);
        let body = Backward { problem, lengths, data: numbers, deterministic, planted };
        cases.push(Case { name, body: Body::Backward(Box::new(body)) });
        let name = format!("backward/field/dout_of_its_own_strides/{dtype}");
        let data = data(&name);
        let mut problem = BwdProblem::new(masked(dtype, dims(64, 64), "b"));
        problem.dout = Strides::bhsd(problem.fwd.shape_o());
        cases.push(Case::backward(name, problem, Lengths::default(), data));
    }
}

/// Soft-caps up to f32's largest number, where the factor log2(e) must not overflow, and down to caps that make all
/// scores tiny.
fn any_softcap(cases: &mut Vec<Case>) {
    for dtype in WIDE {
        for (cap, head_dim, mask) in
            [(3e38, 64, "0"), (f32::MAX, 128, "b"), (3e38, 160, "b"), (1e6, 64, "b"), (1e-2, 64, "0")]
        {
            let name = format!("backward/any_softcap/{dtype}/{}/{mask}/{cap:e}", label(head_dim, head_dim));
            let dims = Dims::batch(1).seqlens(40, 70).heads(2, 1).head_dim(head_dim);
            let mut fwd = masked(dtype, dims, mask);
            fwd.score.softcap = Some(cap);
            let (problem, data) = (BwdProblem::new(fwd), data(&name));
            cases.push(Case::backward(name, problem, Lengths::default(), data));
        }
    }
}

/// Enough heads and keys that a kernel can prepare the last heads' rows while it computes the first.
fn beside_the_products(cases: &mut Vec<Case>) {
    for (head_dim, heads, seqlen, mask) in [(64, 36, 1024, "0"), (128, 18, 2048, "b")] {
        let name = format!("backward/delta_beside/bf16/{}/{mask}", label(head_dim, head_dim));
        let dims = Dims::batch(1).seqlens(seqlen, seqlen).heads(heads, heads).head_dim(head_dim);
        let (problem, data) = (BwdProblem::new(masked(DType::Bf16, dims, mask)), data(&name));
        cases.push(Case::backward(name, problem, Lengths::default(), data));
    }
}

/// Calls with several blocks of keys: dQ is summed in order, and a mask hides non-finite numbers from some queries of a
/// block and shows them to others.
fn over_blocks(cases: &mut Vec<Case>) {
    let mut push = |name: String, dims: Dims, dtype, mask: &str, deterministic, planted| {
        let (problem, data) = (BwdProblem::new(masked(dtype, dims, mask)), data(&name));
        let body = Backward { problem, lengths: Lengths::default(), data, deterministic, planted };
        cases.push(Case { name, body: Body::Backward(Box::new(body)) });
    };
    for (head_dim, head_dim_v) in [(64, 64), (128, 128), (160, 160), (192, 128), (200, 200)] {
        let of = label(head_dim, head_dim_v);
        let dims = |seqlen_q, seqlen_k| {
            Dims::batch(1).seqlens(seqlen_q, seqlen_k).heads(2, 1).head_dims(head_dim, head_dim_v)
        };
        // Masks: a window with both ends beyond the diagonal; sink columns alone, a few and more than a block of
        // keys.
        for mask in ["0", "b", "b:170,3,2", "b:20,3,2", "b:0,0", "b:60,140", "g:-30,1,2", "g:-100,-10,140"] {
            let name = format!("backward/in_turns/bf16/{of}/{mask}");
            push(name, dims(290, 420), DType::Bf16, mask, true, Vec::new());
        }
        // Additions to dQ have no order, so a key block may be the first to reach a block of queries or a later one.
        for mask in ["0", "b", "b:170,3,2", "b:20,3,2"] {
            let name = format!("backward/over_blocks/bf16/{of}/{mask}");
            push(name, dims(290, 420), DType::Bf16, mask, false, Vec::new());
        }
        let name = format!("backward/over_blocks/queries_without_keys/bf16/{of}/b");
        push(name, dims(290, 100), DType::Bf16, "b", false, Vec::new());
        // Two key blocks and two blocks of 64 queries: each key block is first at one query block and second at the
        // other.
        let name = format!("backward/over_blocks/in_a_circle/bf16/{of}/0");
        let two = Dims { num_heads_q: 12, num_heads_kv: 12, ..dims(128, 256) };
        push(name, two, DType::Bf16, "0", false, Vec::new());
        // On four multiprocessors the last group of key blocks is smaller than the other groups.
        let name = format!("backward/in_turns/short_group/bf16/{of}/0");
        push(name, dims(290, 620), DType::Bf16, "0", true, Vec::new());
        // A window that leaves a whole block of keys before the last queries do.
        let name = format!("backward/in_turns/more_queries/bf16/{of}/b:150,3");
        push(name, dims(290, 200), DType::Bf16, "b:150,3", true, Vec::new());
        // There are more sink columns than queries, and the keys of the band fit one block.
        let name = format!("backward/in_turns/many_sinks/bf16/{of}/b:4,3,300");
        push(name, dims(30, 420), DType::Bf16, "b:4,3,300", true, Vec::new());
        // Some blocks of queries receive no additions from any key block.
        let name = format!("backward/in_turns/queries_without_keys/bf16/{of}/b");
        push(name, dims(290, 100), DType::Bf16, "b", true, Vec::new());
        // Every eighth kv head adds to dQ in the opposite order.
        if matches!(head_dim, 64 | 128 | 200) {
            for mask in ["b", "b:70,3,2", "b:0,0", "g:-30,1,2"] {
                let name = format!("backward/in_turns/many_heads/bf16/{of}/{mask}");
                let dims = Dims { batch: 2, num_heads_q: 9, num_heads_kv: 9, ..dims(180, 270) };
                push(name, dims, DType::Bf16, mask, true, Vec::new());
            }
            // A sequence has two such heads, and the call has 17 heads, one more than twice eight.
            let name = format!("backward/in_turns/seventeen_heads/bf16/{of}/b");
            let dims = Dims { batch: 2, num_heads_q: 17, num_heads_kv: 17, ..dims(100, 150) };
            push(name, dims, DType::Bf16, "b", true, Vec::new());
        }
        // Heads that add to dQ in the opposite order, with more key blocks before the last than four
        // multiprocessors can run at a time.
        if head_dim == 128 {
            let name = format!("backward/in_turns/many_keys/bf16/{of}/b");
            let dims = Dims { batch: 2, num_heads_q: 8, num_heads_kv: 8, ..dims(60, 1200) };
            push(name, dims, DType::Bf16, "b", true, Vec::new());
        }
        // Four key blocks in a circle that begin two blocks of queries apart.
        if head_dim == 128 {
            let name = format!("backward/in_turns/two_blocks_apart/bf16/{of}/0");
            let dims = Dims { num_heads_q: 1, ..dims(460, 400) };
            push(name, dims, DType::Bf16, "0", true, Vec::new());
        }
        for (dtype, mask) in [DType::F16, DType::Bf16].into_iter().flat_map(|t| [(t, "b"), (t, "b:60,3,2")]) {
            let planted = vec![
                (Operand::K, [0, 140, 0, head_dim - 1], f64::NAN), // the last ten queries see it
                (Operand::Q, [0, 2, 1, 0], f64::NAN),              // sees the first keys alone
                (Operand::Dout, [0, 5, 1, 7], f64::NAN),
            ];
            let name = format!("backward/hidden/{dtype}/{of}/{mask}");
            push(name, dims(150, 150), dtype, mask, false, planted);
        }
        // A query without visible keys has NaN in Q's last column, which only the last of the consumers that divide
        // the head dimension reads.
        let planted = vec![(Operand::Q, [0, 2, 1, head_dim - 1], f64::NAN)];
        let name = format!("backward/hidden/last_column/bf16/{of}/b");
        push(name, dims(150, 140), DType::Bf16, "b", false, planted);
        // A NaN in dO of queries that see no key, which a P of 0 multiplies in the sums of dV and dK.
        for mask in ["b", "b:60,3,2"] {
            let planted =
                vec![(Operand::Dout, [0, 2, 1, 7], f64::NAN), (Operand::Dout, [0, 5, 0, 1], f64::NAN)];
            let name = format!("backward/hidden/dout_alone/bf16/{of}/{mask}");
            push(name, dims(150, 140), DType::Bf16, mask, false, planted);
        }
        // The number of queries exceeds that of keys, and a hidden key reaches the excess queries.
        let planted = vec![(Operand::K, [0, 95, 0, head_dim - 1], f64::NAN)];
        let name = format!("backward/hidden/more_queries/bf16/{of}/b");
        push(name, dims(150, 100), DType::Bf16, "b", false, planted);
    }
    // More clusters of key blocks, with ordered additions, than four multiprocessors run at a time.
    let name = "backward/in_turns/more_clusters_than_run/bf16/d256/0".to_owned();
    let dims = Dims::batch(1).seqlens(200, 300).heads(1, 1).head_dim(256);
    push(name, dims, DType::Bf16, "0", true, Vec::new());
}

/// Four parts of a packed sequence's kv head that add to dK and dV in order, with another sequence beside them.
fn parts_in_turns(cases: &mut Vec<Case>) {
    let sequences = [(70, 300), (300, 200)];
    let dims = Dims::batch(2).seqlens(300, 300).heads(8, 1).head_dim(64);
    let name = "backward/in_turns/parts/bf16/d64/b".to_owned();
    let (problem, data) = (BwdProblem::new(group(DType::Bf16, dims, &sequences, "b")), data(&name));
    let lengths = Lengths::packed(&sequences);
    let body = Backward { problem, lengths, data, deterministic: true, planted: Vec::new() };
    cases.push(Case { name, body: Body::Backward(Box::new(body)) });
}

/// Sums of dQ whose last bits show another order of additions: five blocks of keys that start together, and a
/// window's.
fn every_bit_in_turns(cases: &mut Vec<Case>) {
    for mask in ["0", "b:170,3,2"] {
        let name = format!("backward/in_turns/f32_gradients/bf16/d64/{mask}");
        let dims = Dims::batch(1).seqlens(290, 520).heads(2, 2).head_dim(64);
        let mut problem = BwdProblem::new(masked(DType::Bf16, dims, mask));
        problem.dtype_grad = DType::F32;
        let (lengths, data) = (Lengths::default(), data(&name));
        let body = Backward { problem, lengths, data, deterministic: true, planted: Vec::new() };
        cases.push(Case { name, body: Body::Backward(Box::new(body)) });
    }
}

/// A hidden number reaches rows of the second of two packed sequences, whose queries and keys begin at different rows.
fn hidden_in_packed(cases: &mut Vec<Case>) {
    let sequences = [(40, 90), (150, 150)];
    for (head_dim, head_dim_v) in [(64, 64), (128, 128), (192, 128)] {
        let dims = Dims::batch(2).seqlens(150, 150).heads(2, 1).head_dims(head_dim, head_dim_v);
        for mask in ["b", "b:60,3,2"] {
            let name = format!("backward/hidden/packed/bf16/{}/{mask}", label(head_dim, head_dim_v));
            let planted = vec![
                (Operand::K, [0, 90 + 140, 0, head_dim - 1], f64::NAN), // the last ten queries see it
                (Operand::Q, [0, 40 + 2, 1, 0], f64::NAN),              // sees the first keys alone
            ];
            let (problem, data) = (BwdProblem::new(group(DType::Bf16, dims, &sequences, mask)), data(&name));
            let lengths = Lengths::packed(&sequences);
            let body = Backward { problem, lengths, data, deterministic: false, planted };
            cases.push(Case { name, body: Body::Backward(Box::new(body)) });
        }
    }
}

/// Queries packed and keys not, or keys alone: the next sequence's NaN lies in the block with which this
/// one's rows end, and no mask has rows computed again.
fn packed_on_one_side(cases: &mut Vec<Case>) {
    for (head_dim, head_dim_v) in [(64, 64), (192, 128), (256, 256)] {
        let dims = Dims::batch(2).seqlens(70, 70).heads(2, 1).head_dims(head_dim, head_dim_v);
        for side in ["queries", "keys"] {
            let queries = side == "queries";
            let name = format!("backward/field/packed_{side}/bf16/{}/0", label(head_dim, head_dim_v));
            let (q_layout, kv_layout) = if queries {
                (QLayout::Packed, KvLayout::Strided)
            } else {
                (QLayout::Batch, KvLayout::Packed)
            };
            let mut fwd = FwdProblem::new(q_layout, kv_layout, DType::Bf16, dims);
            fwd.write_lse = true;
            let mut lengths = Lengths::packed(&[(40, 40), (70, 70)]);
            let planted = if queries {
                (lengths.totals.total_k, lengths.cu_seqlens_k) = (None, Vec::new());
                vec![(Operand::Q, [0, 40, 1, 5], f64::NAN), (Operand::Dout, [0, 41, 0, 7], f64::NAN)]
            } else {
                (lengths.totals.total_q, lengths.cu_seqlens_q) = (None, Vec::new());
                vec![(Operand::K, [0, 40, 0, 5], f64::NAN), (Operand::V, [0, 41, 0, 7], f64::NAN)]
            };
            let (problem, data) = (BwdProblem::new(fwd), data(&name));
            let body = Backward { problem, lengths, data, deterministic: false, planted };
            cases.push(Case { name, body: Body::Backward(Box::new(body)) });
        }
    }
}

/// Rows with so large an LSE that f32 cannot resolve differences between scores, next to normal rows in the same
/// block. The cause is a bias of the kind used as a mask, equal for every key of a row or with one key above the
/// rest. Gradients of other modifiers are included. Two such rows have a dO; one has dO = 0 and contributes
/// nothing.
fn far_rows(cases: &mut Vec<Case>) {
    const ROWS: [u32; 3] = [3, 17, 41];
    let dims = |head_dim| Dims::batch(1).seqlens(70, 90).heads(2, 1).head_dim(head_dim);
    let without_dout = |planted: &mut Vec<_>, head_dim: u32| {
        for (head, d) in (0..2).flat_map(|head| (0..head_dim).map(move |d| (head, d))) {
            planted.push((Operand::Dout, [0, ROWS[2], head, d], 0.0));
        }
    };
    let mut push = |name: String, problem: BwdProblem, planted| {
        let (lengths, deterministic, data) = (Lengths::default(), false, data(&name));
        let body = Backward { problem, lengths, data, deterministic, planted };
        cases.push(Case { name, body: Body::Backward(Box::new(body)) });
    };
    for dtype in WIDE {
        let of_inputs = (dtype != DType::F32).then_some("bias_16");
        for (modifier, bias) in [(Some("dbias_batch_head"), DType::F32), (of_inputs, dtype)] {
            let Some(modifier) = modifier else { continue };
            let values = [-65504.0, -1e9, -1e10, 1e10, DType::Bf16.max_finite(), -DType::Bf16.max_finite()];
            let all = values.into_iter().chain([-DType::F32.max_finite()]);
            for value in all.filter(|value: &f64| value.abs() <= bias.max_finite()) {
                for (head_dim, mask) in [(64, "0"), (128, "b")] {
                    let problem = modified(masked(dtype, dims(head_dim), mask), modifier);
                    let at = |row, key, value| (0..2).map(move |h| (Operand::Bias, [0, row, h, key], value));
                    let mut planted: Vec<_> = ROWS
                        .into_iter()
                        .flat_map(|row| (0..90).flat_map(move |key| at(row, key, value)))
                        .collect();
                    planted.extend(at(ROWS[1], 5, value / 2.0));
                    without_dout(&mut planted, head_dim);
                    push(
                        format!("backward/far_rows/{dtype}/{modifier}/{value:e}/d{head_dim}/{mask}"),
                        problem,
                        planted,
                    );
                }
            }
        }
        // Keys on the diagonal, at ALiBi distance 0, are hidden.
        let mut problem = modified(masked(dtype, dims(64), "g:40,-2"), "alibi");
        problem.fwd.score.bias = Bias::Alibi { per_batch: false };
        let slopes = [1e9, -3e8].into_iter().zip(0..);
        let planted = slopes.map(|(slope, head)| (Operand::AlibiSlopes, [0, 0, 0, head], slope)).collect();
        push(format!("backward/far_rows/{dtype}/alibi/g:40,-2"), problem, planted);
        // The sink is far above every key, or, in rows masked by a bias, similar to the keys.
        for (sink, value) in [(1e10, 0.0), (-1e10, -1e10)] {
            let mut problem = modified(masked(dtype, dims(64), "b"), "bias_f32");
            (problem.fwd.score.sink, problem.write_dsink, problem.has_dlse) = (true, true, true);
            let mut planted: Vec<_> = (0..2).map(|head| (Operand::Sink, [0, 0, 0, head], sink)).collect();
            let rows = ROWS.into_iter().flat_map(|row| (0..90).map(move |key| (row, key)));
            planted.extend(
                rows.flat_map(|(row, key)| (0..2).map(move |h| (Operand::Bias, [0, row, h, key], value))),
            );
            without_dout(&mut planted, 64);
            push(format!("backward/far_rows/{dtype}/sink/{sink:e}"), problem, planted);
        }
    }
}

/// Rows whose scores are so large by Q and K alone that f32 can not resolve them: one key of row 33 is far above the
/// rest, and two keys of row 47; or the same some rows later, with none in the first half of a block. Their LSE is
/// about 2.6e5, where a lost row still exceeds the bound that f32's rounding allows.
fn far_products(cases: &mut Vec<Case>) {
    // Twice this number, as at a head dimension of 256, still fits f16.
    const SIZE: f64 = 32000.0;
    const PEAK: f64 = 64.0;
    let mut push = |name: String,
                    dtype,
                    [heads_q, heads_kv]: [u32; 2],
                    [head_dim_qk, head_dim_v]: [u32; 2],
                    mask: &str,
                    later: u32| {
        let (num_heads_q, num_heads_kv) = (heads_q, heads_kv);
        let (batch, seqlen_q, seqlen_k) = (1, 70 + later, 90);
        let dims = Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v };
        let size = SIZE * (f64::from(head_dim_qk) / 64.0).sqrt();
        let mut planted: Vec<_> = (0..heads_kv)
            .flat_map(|head| [(5, 0), (9, 1), (10, 1)].map(|(key, d)| (Operand::K, [0, key, head, d], PEAK)))
            .collect();
        for head in 0..heads_q {
            planted.extend([(33, 0), (47, 1)].map(|(row, d)| (Operand::Q, [0, row + later, head, d], size)));
        }
        let (lengths, deterministic, data) = (Lengths::default(), false, data(&name));
        let problem = BwdProblem::new(masked(dtype, dims, mask));
        let body = Backward { problem, lengths, data, deterministic, planted };
        cases.push(Case { name, body: Body::Backward(Box::new(body)) });
    };
    for dtype in WIDE {
        for (dims, mask) in [
            ([64, 64], "0"),
            ([64, 64], "b"),
            ([128, 128], "0"),
            ([192, 128], "b"),
            ([192, 192], "0"),
            ([256, 256], "b"),
        ] {
            let of = label(dims[0], dims[1]);
            push(format!("backward/far_products/{dtype}/{of}/{mask}"), dtype, [2, 1], dims, mask, 0);
        }
        push(format!("backward/far_products/second_half/{dtype}/d64/0"), dtype, [2, 1], [64, 64], "0", 64);
    }
}

/// An f32 NaN from the caller with any bits: rounding by an addition to its bits may turn it into a number. It is
/// in a bias that some queries see, in LSE's gradient, or in a head's slope.
fn any_nan(cases: &mut Vec<Case>) {
    let dims = Dims::batch(1).seqlens(70, 90).heads(2, 1).head_dim(64);
    for (bits, value) in [("positive", i64::MAX as u64), ("negative", u64::MAX)] {
        for dtype in [DType::F16, DType::Bf16] {
            let value = f64::from_bits(value);
            for (modifier, planted) in [
                ("bias_f32", (Operand::Bias, [0, 17, 1, 5], value)),
                ("dlse", (Operand::Dlse, [0, 0, 0, 41], value)),
                ("alibi", (Operand::AlibiSlopes, [0, 0, 0, 1], value)),
            ] {
                let name = format!("backward/any_nan/{modifier}/{dtype}/{bits}");
                let (mut problem, data) = (modified(masked(dtype, dims, "b"), modifier), data(&name));
                problem.has_dlse |= modifier == "dlse";
                let (lengths, planted) = (Lengths::default(), vec![planted]);
                let body = Backward { problem, lengths, data, deterministic: false, planted };
                cases.push(Case { name, body: Body::Backward(Box::new(body)) });
            }
        }
    }
}

/// Draws which gradients are wanted, their types and strides, and whether sums have an order.
pub(super) fn random_options(fwd: FwdProblem, totals: Totals, seed: u64) -> (BwdProblem, bool) {
    let word = mix(seed ^ 0xb);
    let mut problem = BwdProblem::new(fwd);
    problem.has_dlse = word & 1 == 1;
    problem.write_dsink = problem.fwd.score.sink;
    if word & 12 == 12 {
        problem.dtype_grad = DType::F32;
    }
    if let (Bias::Elementwise(bias), true) = (problem.fwd.score.bias, word & 16 == 16) {
        let strides = Strides::bhsd(problem.fwd.shape_bias(bias.broadcast));
        let dtype = if word & 32 == 32 { DType::F32 } else { bias.dtype };
        problem.dbias = Some(BiasGrad { dtype, strides });
    }
    if word & 64 == 64 {
        let extents = problem.fwd.extents(totals);
        problem.dq = Strides::bhsd(extents.q);
        problem.dk = Strides::bhsd(extents.k);
        problem.dv = Strides::bhsd(extents.v);
        problem.dout = Strides::bhsd(extents.o);
    }
    (problem, word & 2 == 2)
}

fn edges(cases: &mut Vec<Case>) {
    let dims = |seqlen_q, seqlen_k, head_dim| {
        Dims::batch(2).seqlens(seqlen_q, seqlen_k).heads(4, 2).head_dim(head_dim)
    };
    let mut push = |name: String, problem: BwdProblem, lengths: Lengths, room: Room, init: Init| {
        let data = Data { init, room, ..data(&name) };
        cases.push(Case::backward(name, problem, lengths, data));
    };
    let plain = Room::default();
    for dtype in WIDE {
        for mask in ["0", "b", "t", "b:3,1", "t:0,0,2", "g:0,-5", "g:1,-30"] {
            for (q, k) in [(0, 4), (4, 0), (1, 1), (33, 20), (20, 33), (65, 130)] {
                let mut problem = BwdProblem::new(masked(dtype, dims(q, k, 32), mask));
                problem.has_dlse = q % 2 == 1;
                let name = format!("backward/edges/{dtype}/s{q}x{k}/{mask}");
                push(name, problem, Lengths::default(), plain, Init::Normal);
            }
        }
        for init in Init::ALL {
            let problem = BwdProblem::new(masked(dtype, dims(40, 50, 32), "b"));
            push(format!("backward/numbers/{init}/{dtype}"), problem, Lengths::default(), plain, init);
        }
        for head_dim in [1, 3, 16, 40, 64, 96, 128, 192, 256] {
            let problem = BwdProblem::new(masked(dtype, dims(20, 27, head_dim), "b"));
            let name = format!("backward/head_dim/{dtype}/d{head_dim}");
            push(name, problem, Lengths::default(), plain, Init::Normal);
        }
        for (side, placement) in
            [("ends_at", Placement::EndsAtUnmapped), ("begins_at", Placement::BeginsAtUnmapped)]
        {
            for head_dim in [3, 24, 64] {
                let problem = BwdProblem::new(masked(dtype, dims(19, 37, head_dim), "b:9,2"));
                let name = format!("backward/{side}_unmapped/{dtype}/d{head_dim}");
                let room = Room { placement, shift: 0 };
                push(name, problem, Lengths::default(), room, Init::Normal);
            }
        }
        let sequences = [(9, 0), (0, 6), (33, 40), (1, 1)];
        let mut group = FwdProblem::group(dtype, Dims { batch: 4, ..dims(33, 40, 32) });
        group.score.sink = true;
        let mut problem = BwdProblem::new(group);
        problem.write_dsink = true;
        let name = format!("backward/group_with_empty_sequences/{dtype}");
        push(name, problem, Lengths::packed(&sequences), plain, Init::Normal);
        // Without sequences, the gradients that all sequences share are 0.
        for modifier in ["plain", "sink", "dbias_one_one", "dbias_one_head"] {
            let none = masked(dtype, Dims { batch: 0, ..dims(33, 40, 32) }, "b");
            let name = format!("backward/no_sequences/{dtype}/{modifier}");
            push(name, modified(none, modifier), Lengths::default(), plain, Init::Normal);
        }
    }
    // Several blocks for tiles whose consumers divide the head dimension, with a different V dimension.
    for (head_dim, head_dim_v) in [(192, 128), (136, 192), (256, 256)] {
        for mask in ["0", "b", "b:70,3"] {
            let mut dims = dims(210, 150, head_dim);
            (dims.batch, dims.num_heads_q, dims.num_heads_kv, dims.head_dim_v) = (1, 2, 1, head_dim_v);
            let problem = BwdProblem::new(masked(DType::Bf16, dims, mask));
            let name = format!("backward/wide/bf16/d{head_dim}x{head_dim_v}/{mask}");
            push(name, problem, Lengths::default(), plain, Init::Normal);
        }
    }
    // Lengths end within a pair of key blocks, or before its second block; NaN follows.
    for (head_dim, head_dim_v, mask) in [(256, 256, "0"), (256, 256, "b"), (192, 128, "0"), (192, 128, "b")] {
        let mut dims = dims(150, 260, head_dim);
        (dims.batch, dims.num_heads_q, dims.num_heads_kv, dims.head_dim_v) = (4, 2, 1, head_dim_v);
        let mut fwd = masked(DType::Bf16, dims, mask);
        (fwd.layout.seqused_q, fwd.layout.seqused_k) = (true, true);
        let lengths = Lengths {
            seqused_q: vec![150, 65, 3, 0],
            seqused_k: vec![193, 64, 257, 40],
            ..Lengths::default()
        };
        let name = format!("backward/wide/bf16/d{head_dim}x{head_dim_v}/used/{mask}");
        push(name, BwdProblem::new(fwd), lengths, plain, Init::Normal);
    }
    let mut long = BwdProblem::new(masked(DType::Bf16, dims(300, 520, 64), "b"));
    (long.fwd.dims.batch, long.fwd.dims.num_heads_q, long.fwd.dims.num_heads_kv) = (1, 2, 1);
    let long = BwdProblem::new(masked(DType::Bf16, long.fwd.dims, "b"));
    push("backward/long/bf16".into(), long, Lengths::default(), plain, Init::Normal);
}
