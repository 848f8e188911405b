//! Wrong input: one line that names the field and the number, exit status 2, nothing written.

use std::path::Path;

use super::fmha_in;

/// `f4` zeros of `shape`, as numpy writes them.
fn npy(descr: &str, size: usize, shape: &[usize]) -> Vec<u8> {
    let extents: String = shape.iter().map(|extent| format!("{extent}, ")).collect();
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({extents}), }}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend_from_slice(&(dict.len() as u16).to_le_bytes());
    file.extend_from_slice(dict.as_bytes());
    file.resize(file.len() + size * shape.iter().product::<usize>(), 0);
    file
}

/// Tensors `q`, `k`, `v` of f32 `[1, 4, 2, 8]`, and `h` of f16, and `i` of i64.
fn archive() -> Vec<u8> {
    let tensor = |name: &str, dtype: &str, size: usize, at: usize| {
        format!(
            "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":[1,4,2,8],\"data_offsets\":[{at},{}]}}",
            at + 64 * size
        )
    };
    let header = format!(
        "{{{},{},{},{},{}}}",
        tensor("q", "F32", 4, 0),
        tensor("k", "F32", 4, 256),
        tensor("v", "F32", 4, 512),
        tensor("h", "F16", 2, 768),
        tensor("i", "I64", 8, 896)
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + 896 + 512, 0);
    file
}

fn put_files(folder: &Path) {
    let put = |name: &str, bytes: Vec<u8>| std::fs::write(folder.join(name), bytes).unwrap();
    put("q.npy", npy("<f4", 4, &[1, 4, 2, 8]));
    put("half.npy", npy("<f2", 2, &[1, 4, 2, 8]));
    put("double.npy", npy("<f8", 8, &[1, 4, 2, 8]));
    put("big_endian.npy", npy(">f4", 4, &[1, 4, 2, 8]));
    put("integer.npy", npy("<i4", 4, &[1, 4, 2, 8]));
    put("flat.npy", npy("<f4", 4, &[4, 16]));
    put("deep.npy", npy("<f4", 4, &[1, 1, 4, 2, 8]));
    put("three_heads.npy", npy("<f4", 4, &[1, 4, 3, 8]));
    put("five_rows.npy", npy("<f4", 4, &[1, 5, 2, 8]));
    put("wide.npy", npy("<f4", 4, &[1, 4, 2, 9]));
    put("two.npy", npy("<f4", 4, &[2, 4, 2, 8]));
    let whole = npy("<f4", 4, &[1, 4, 2, 8]);
    put("truncated.npy", whole[..whole.len() - 7].to_vec());
    put("overlong.npy", [whole.clone(), vec![0; 5]].concat());
    put("header_only.npy", whole[..9].to_vec());
    put("brain.npy", npy("<V2", 2, &[1, 4, 2, 8]));
    put("sink.npy", npy("<f4", 4, &[2]));
    put("sink16.npy", npy("<f2", 2, &[2]));
    put("sinks.npy", npy("<f4", 4, &[3]));
    let order = |word: &[u8; 5]| {
        let mut bytes = npy("<f4", 4, &[1, 4, 2, 8]);
        let at = bytes.windows(5).position(|window| window == b"False").unwrap();
        bytes[at..at + 5].copy_from_slice(word);
        bytes
    };
    put("seven.npy", order(b"7    "));
    let header = npy("<f4", 0, &[2_147_483_647, 0, 1, 8]);
    put("header.npy", header);
    std::fs::create_dir(folder.join("folder.npy")).unwrap();
    put("text.npy", b"not a tensor at all".to_vec());
    put("all.safetensors", archive());
    put("short.safetensors", archive()[..700].to_vec());
    put("table.toml", b"[[table]]\nname = 't'\ntitle = ''\nrows = [{ s = -1 }]\n".to_vec());
    put(
        "good.toml",
        b"[[table]]\nname = 't'\ntitle = ''\nrows = [{ b = 1, h = 1, s = 4, d = 8 }]\n".to_vec(),
    );
    put("twice.txt", b"latency = 1 # seconds\nlatency = 2\n".to_vec());
    put("rowless.toml", b"[[table]]\nname = 't'\ntitle = ''\nrows = []\n".to_vec());
    put("twice.toml", b"[[table]]\nname = 't'\nname = 't'\n".to_vec());
}

/// Arguments, and what the error line must contain: the field, and the wrong number or text.
const TABLE: &[(&str, &[&str])] = &[
    // Sizes.
    ("run -h 10 --heads-kv 4", &["num_heads_q 10", "num_heads_kv 4"]),
    ("run -h_k=3", &["num_heads_q 8", "num_heads_kv 3"]),
    ("run -h 0", &["num_heads_q 0"]),
    ("run -h 8 --heads-kv 0", &["num_heads_kv 0"]),
    ("run -b -2", &["batch -2"]),
    ("run -b two", &["batch", "two"]),
    ("run -s -5", &["seqlen_q -5"]),
    ("run -s 1024,300", &["seqlen_q 1024,300", "--mode 1"]),
    ("run -s 99999999999", &["seqlen_q 99999999999"]),
    ("run --seqlen-k 1,2", &["seqlen_k 1,2"]),
    ("run -d 0", &["head_dim_qk 0"]),
    ("run -d 2000", &["head_dim_qk 2000", "1024"]),
    ("run --d_v=0", &["head_dim_v 0"]),
    ("run -d 64.5", &["head_dim_qk", "64.5"]),
    ("explain -b 1 -h 1073741824 -s 16777216 -d 1024", &["q", "2^62 bytes"]),
    ("run -b 70000 -h 70000 -s 1 -d 1", &["num_heads_q 70000", "batch 70000"]),
    // Lengths.
    ("run --mode 2", &["mode", "2"]),
    ("run --mode 1 -b 3 -s 10,20", &["seqlen_q", "2 lengths", "batch is 3"]),
    ("run --mode 1 -s 10,20 --seqlen-k 1,2,3", &["seqlen_k", "3 lengths", "batch is 2"]),
    ("run --mode 1 -s 10,20 --padded-q 9,20", &["padded_q[0] 9", "seqlen_q[0] 10"]),
    ("run --mode 1 -s 2147418112,65536", &["cu_seqlens_q", "2147483648"]),
    ("run --mode 1 -s 10 --seqused-q 5", &["seqused_q 5", "--mode 0"]),
    ("run -b 2 -s 16 --seqused-q 8,17", &["seqused_q[1] 17", "0..=16"]),
    ("run -b 2 -s 16 --seqused-k 1,2,3", &["seqused_k", "3 lengths"]),
    ("run --padded-q 16", &["padded_q 16", "--mode 1"]),
    // Score.
    ("run --mask z", &["mask", "`z`"]),
    ("run -mask=b:1", &["mask", "`b:1`"]),
    ("run --softmax-scale NaN", &["softmax_scale NaN"]),
    ("run --scale_s=inf", &["softmax_scale inf"]),
    ("run --scale_s=fast", &["softmax_scale", "fast"]),
    ("run --softcap -3", &["softcap -3"]),
    ("run --qscale pt", &["qscale", "f16"]),
    ("run --p_drop 1.5", &["p_drop 1.5"]),
    ("run --p-drop -0.1", &["p_drop -0.1"]),
    ("run --drop-seed -1", &["drop_seed", "-1"]),
    ("run --bias e:4", &["bias", "e:4"]),
    ("run --dbias", &["dbias", "--backward"]),
    ("run --backward --dbias", &["dbias", "bias is none"]),
    ("run --backward --dsink", &["dsink", "sink is false"]),
    ("run --softcap 1e-60", &["softcap 1e-60", "32-bit"]),
    ("run --softmax-scale 1e-300", &["softmax_scale 1e-300", "32-bit"]),
    ("run --softmax-scale 1e300", &["softmax_scale 1e300", "32-bit"]),
    ("run --accuracy best", &["accuracy", "`best`"]),
    // The cache.
    ("run --page-size -1", &["page_size -1"]),
    ("run --page-size 16 --mode 1", &["page_size 16", "--mode 0"]),
    ("run --page-size 16 --backward", &["page_size 16", "--backward"]),
    ("run --append -2", &["append -2"]),
    ("run -s 4 --append 5", &["append 5", "seqlen_k 4"]),
    ("run -b 2 -s 8 --append 3 --seqused-k 6,5", &["seqused_k[0] 6", "3"]),
    ("run -s 4 --rotary 7", &["rotary_dim 7"]),
    ("run -s 4 -d 16 --rotary 18", &["rotary_dim 18", "16"]),
    ("run -s 4 --rotary 8 --max-pos 2 --mask b", &["2"]),
    ("run -s 4 --max-pos 9", &["max_pos 9", "--rotary"]),
    ("run -s 4 --interleaved", &["interleaved 1", "--rotary"]),
    ("run -s 4 --tree", &["tree_mask"]),
    ("run -s 4 --cache-type fp16 --prec bf16", &["dtype_cache f16", "bf16"]),
    ("run -s 4 --cache-type fp8 --prec fp32", &["dtype_cache e4m3fn", "f32"]),
    ("run -s 4 --cache-type fp8 --append 1", &["dtype_cache e4m3fn", "append"]),
    ("run -s 4 --cache-type fp8 --backward", &["cache_type e4m3fn", "the forward"]),
    ("run -s 4 -d 16 --d_v=24 --v-in-k", &["v_in_k", "24", "16"]),
    ("run --q q.npy --k q.npy --v q.npy --page-size 4", &["page_size 4", "made-up"]),
    ("run -page_block_size=-16", &["page_size -16"]),
    // A problem that would need too much memory is refused before the memory is taken.
    ("run -b 300000000 -h 1 -s 0 -d 1", &["batch 300000000", "bytes"]),
    ("explain -b 2000000000 -h 1 -s 0 -d 1", &["batch 2000000000", "bytes"]),
    ("run --mode 1 -b 2000000000 -h 1 -s 0 -d 1", &["batch 2000000000", "bytes"]),
    ("run --q header.npy --k header.npy --v header.npy", &["batch 2147483647", "bytes"]),
    // Types.
    ("run --prec fp7", &["prec", "fp7"]),
    ("run --prec fp16 --prec-o fp8", &["dtype_o e4m3fn", "f16"]),
    ("run --vlayout x", &["vlayout", "`x`"]),
    ("run --qscale 7", &["qscale", "7"]),
    // Backend.
    ("run --backend tpu", &["backend", "tpu"]),
    ("run --backend cuda:999", &["cuda"]),
    ("run -b 1 -h 1 -s 4 -d 8 --kernel no-such-kernel", &["no-such-kernel"]),
    ("run --tile 128", &["tile", "128"]),
    ("run --backend cpu --emulate sm_90a", &["cpu", "sm_90a"]),
    ("run --init zz", &["init", "zz"]),
    ("run --seed -1", &["seed", "-1"]),
    ("run --repeat many", &["repeat", "many"]),
    ("run --repeat 0", &["repeat 0"]),
    ("run -v 7", &["verify", "7"]),
    ("run -num_splits=4", &["num_splits 4"]),
    ("run -lse=2", &["lse 2"]),
    ("run --banana 1", &["banana"]),
    ("jog", &["jog"]),
    ("", &["0 commands"]),
    // Files.
    ("run --q absent.npy --k q.npy --v q.npy", &["q absent.npy"]),
    ("run --q q.npy --k q.npy --v folder.npy", &["v folder.npy", "a folder"]),
    ("run --q q.npy --k q.npy --v q.npy --expect absent.npy", &["expect absent.npy"]),
    ("run --q q.npy --k q.npy --v q.npy --sink --operand sink=absent.npy", &["operand sink absent.npy"]),
    ("run --q q.npy --k q.npy --v q.npy --out o", &["out o", "no ending", ".npy or .safetensors"]),
    ("run --q q.npy --k q.npy", &["v", "1 of q, k, v"]),
    ("run --q truncated.npy --k q.npy --v q.npy", &["truncated.npy", "256 bytes", "249"]),
    ("run --q overlong.npy --k q.npy --v q.npy", &["overlong.npy", "256 bytes", "261"]),
    ("run --q header_only.npy --k q.npy --v q.npy", &["header_only.npy", "9 bytes"]),
    ("run --q text.npy --k q.npy --v q.npy", &["text.npy", "19 bytes"]),
    ("run --q double.npy --k q.npy --v q.npy", &["double.npy", "f64"]),
    ("run --q big_endian.npy --k q.npy --v q.npy", &["big_endian.npy", ">f4"]),
    ("run --q integer.npy --k q.npy --v q.npy", &["integer.npy", "<i4"]),
    ("run --q half.npy --k q.npy --v q.npy", &["dtype_qk", "f16", "f32"]),
    ("run --q q.npy --k q.npy --v half.npy", &["dtype_v f16", "dtype_qk f32"]),
    ("run --q seven.npy --k q.npy --v q.npy", &["seven.npy", "fortran_order `7`"]),
    ("run --q brain.npy --k brain.npy --v brain.npy", &["brain.npy", "<V2", "--prec bf16"]),
    ("run --q brain.npy --k brain.npy --v brain.npy --prec fp8", &["brain.npy", "2 bytes", "e4m3fn"]),
    ("run --q /dev/zero --k q.npy --v q.npy", &["/dev/zero", "a file"]),
    ("run --input /dev/zero", &["/dev/zero", "a file"]),
    ("bench /dev/zero", &["/dev/zero", "a file"]),
    ("run --q folder.npy --k q.npy --v q.npy", &["folder.npy", "a folder"]),
    ("run --q q.npy --k q.npy --v q.npy --out q.npy", &["out q.npy", "q is the same file"]),
    ("run --q q.npy --k q.npy --v q.npy --out ./q.npy", &["out ./q.npy", "q is the same file"]),
    (
        "run --q q.npy --k q.npy --v q.npy --lse --out o.npy --out-lse o.npy",
        &["out_lse o.npy", "out is the same"],
    ),
    (
        "run --q q.npy --k q.npy --v q.npy --out-row-max m.npy --out-key-sum m.npy",
        &["out_key_sum m.npy", "out_row_max is the same"],
    ),
    ("run --q q.npy --k q.npy --v q.npy --out-head-max m.txt", &["out_head_max m.txt", "npy"]),
    ("run --backward --out-row-max m.npy", &["out_row_max", "--backward"]),
    ("run --q q.npy --k q.npy --v q.npy --out folder.npy", &["out folder.npy", "no file"]),
    ("run --q q.npy --k q.npy --v q.npy --out o.npy --lse --out-lse no/l.npy", &["out_lse no/l.npy"]),
    ("run --q q.npy --k q.npy --v q.npy --sink", &["sink is not given", "--operand sink=FILE"]),
    ("run --q q.npy --k q.npy --v q.npy --bias e:2", &["bias", "is not given"]),
    ("run --q q.npy --k q.npy --v q.npy --bias a", &["alibi_slopes", "is not given"]),
    ("run --q q.npy --k q.npy --v q.npy --backward", &["dout", "is not given"]),
    ("run --q q.npy --k q.npy --v q.npy --sink --operand sink=sinks.npy", &["sink", "[3]", "[2]"]),
    ("run --q q.npy --k q.npy --v q.npy --sink --operand sink=sink16.npy", &["sink", "f16", "f32"]),
    (
        "run --q q.npy --k q.npy --v q.npy --operand sink=sink.npy",
        &["operand sink", "no operand of that name"],
    ),
    ("run --operand sink=sink.npy --sink", &["operand sink", "none of q, k, v"]),
    ("run --operand sinks=sink.npy", &["operand `sinks`"]),
    ("run --operand sink", &["operand sink", "no file"]),
    ("run --q flat.npy --k q.npy --v q.npy", &["q has rank 2"]),
    ("run --q q.npy --k deep.npy --v q.npy", &["k has rank 5"]),
    ("run --q q.npy --k three_heads.npy --v q.npy", &["num_heads_kv is 3 in k", "2 in v"]),
    ("run --q q.npy --k three_heads.npy --v three_heads.npy", &["num_heads_q 2", "num_heads_kv 3"]),
    ("run --q q.npy --k five_rows.npy --v q.npy", &["seqlen_k is 5 in k", "4 in v"]),
    ("run --q q.npy --k wide.npy --v q.npy", &["head_dim_qk is 8 in q", "9 in k"]),
    ("run --q two.npy --k q.npy --v q.npy", &["batch is 2 in q", "1 in k"]),
    ("run --q q.npy --k q.npy --v q.npy -d 16", &["head_dim_qk 16", "8"]),
    ("run --q q.npy --k q.npy --v q.npy --prec bf16", &["dtype_qk bf16", "f32"]),
    ("run --q q.npy --k q.npy --v q.npy --mode 1 -s 3,2", &["seqlen_q", "sum to 5", "4 rows"]),
    ("run --q q.npy --k q.npy --v q.npy --out no/o.npy", &["no/o.npy"]),
    ("run --q q.npy --k q.npy --v q.npy --out o.txt", &["o.txt", ".txt"]),
    ("run --q q.npy --k q.npy --v q.npy --prec-o bf16 --out o.npy", &["o.npy", "bf16"]),
    ("run --q q.npy --k q.npy --v q.npy --out-lse l.npy", &["l.npy", "--lse"]),
    ("run --q q.npy --k q.npy --v q.npy --expect wide.npy", &["wide.npy", "[1, 4, 2, 9]", "[1, 4, 2, 8]"]),
    ("run --input all.safetensors --q queries", &["queries", "5 (h, i, k, q, v)"]),
    ("run --input all.safetensors --k h", &["dtype_qk", "f16"]),
    ("run --input all.safetensors --q i", &["I64", "`i`"]),
    ("run --input short.safetensors", &["input short.safetensors"]),
    ("run --input q.npy", &["q.npy"]),
    ("run --input .", &[".", "a folder"]),
    // Commands other than `run`.
    ("explain -h 10 --heads-kv 4", &["num_heads_q 10"]),
    ("explain --kernel no-such-kernel", &["none takes"]),
    ("bench absent.toml", &["absent.toml"]),
    ("tune --backend cpu -s 16", &["cpu", "0 of its kernels"]),
    ("bench table.toml --rounds 0", &["rounds 0"]),
    ("bench table.toml --rounds -1", &["rounds -1"]),
    ("bench table.toml --budget -1", &["budget -1"]),
    ("bench rowless.toml", &["rowless.toml", "no rows"]),
    ("tune -s 16 --rounds 2", &["rounds 2", "3..=1000"]),
    ("tune -s 16 --rounds -7", &["rounds -7"]),
    ("tune -s 16 --rounds x", &["rounds `x`"]),
    ("tune -s 16 --seconds 86401", &["seconds 86401", "0..=86400"]),
    ("tune -s 16 --seconds -1", &["seconds -1"]),
    ("bench good.toml --plot x.png", &["plot x.png", ".svg"]),
    ("bench good.toml --out no/x.md", &["out no/x.md", "no folder"]),
    ("bench good.toml --out good.toml", &["out good.toml", "same file"]),
    ("bundle --arch sm_90a --out no/k.fmha", &["out no/k.fmha", "no folder"]),
    ("conformance --filter edges --junit no/x.xml", &["junit no/x.xml", "no folder"]),
    ("run -h", &["heads", "has none", "--help"]),
    ("tune --backend cpu -s 16 --backward --deterministic", &["cpu", "0 of its kernels"]),
    ("bench table.toml", &["table t, row 1", "seqlen_q -1"]),
    ("bench twice.toml", &["line 3", "duplicate"]),
    ("bench", &["FILE"]),
    ("conformance --filter no-such-case", &["no-such-case", "0 of"]),
    ("conformance --filter (", &["filter", "("]),
    ("conformance --drawn -3", &["drawn `-3`"]),
    ("conformance --deal -1/2", &["deal `-1/2`"]),
    ("conformance --list --json", &["--list", "--json"]),
    ("conformance --list --junit x.xml", &["--list", "--junit"]),
    ("conformance --drawn 3:0", &["drawn", "`3:0`", "100000"]),
    ("conformance --drawn 3:2 --filter nobody", &["nobody", "0 of 2"]),
    ("conformance --backend rocm", &["rocm"]),
    ("conformance --backend cpu --filter edges --kernel sm90", &["kernel `sm90`", "cpu-fwd"]),
    // Ranks.
    ("run -s 4 --ranks 65", &["ranks 65", "64"]),
    ("explain -s 4 --ranks 1000000000", &["ranks 1000000000", "16384"]),
    ("run -s 4 --ranks 2 --bias e", &["ranks 2", "bias e"]),
    ("run -s 4 --ranks 2 --backward --dlse", &["ranks 2", "dlse"]),
    ("run -s 4 --ranks 4 --page-size 2", &["rank 0, kv_layout: pages", "here 4"]),
    ("explain -s 4 --ranks 4 --links twice.txt", &["`latency = 2`", "2 times"]),
    ("run -s 4 --ranks -1", &["ranks -1"]),
    ("run -s 4 --ranks 2.5", &["ranks", "2.5"]),
    ("run -s 4 --scheme ring", &["--ranks"]),
    ("run -s 4 --ranks 2 --partition even", &["partition", "even"]),
    ("run -s 4 --ranks 2 --links absent.txt", &["links absent.txt"]),
    ("run -s 4 --emulate gfx942 --backend cuda", &["backend cuda", "gfx942"]),
    ("run -s 4 --emulate sm_90a --backend rocm", &["backend rocm", "sm_90a"]),
    ("run -s 4 --emulate sm_42", &["sm_42", "sm_90a"]),
    ("run -s 4 --emulate sm_90a,sm_42", &["sm_42", "sm_90a"]),
    ("run -s 4 --emulate gfx1", &["gfx1", "gfx942"]),
    ("run -s 4 --prec-o int8", &["prec_o `int8`"]),
    ("run -s 4 --cache-type int8", &["cache_type `int8`"]),
    ("run -s 4 --mode 1 --padded-q 3", &["padded_q[0] 3", "seqlen_q[0] 4"]),
    ("run -s 4 --mode 1 -b 2 --padded-k 9,3", &["padded_k[1] 3", "seqlen_k[1] 4"]),
    ("run -s 4 --kernel=", &["--kernel"]),
    ("bundle --arch foo --out b.fmha", &["arch `foo`"]),
    ("bench good.toml --peers absent.csv", &["peers absent.csv"]),
    ("run -s 4 --ranks 2 --links q.npy", &["q.npy"]),
    ("explain -s 4 --ranks 2 --links .", &["."]),
    ("run -s 4 --ranks 2 --scheme decode", &["decode: each of 2 ranks needs all queries"]),
    ("run -s 4 --ranks 2 --scheme mixed", &["mixed: ranks_per_host 2 does not cut 2 ranks"]),
    ("run -s 4 --ranks 2 --backward --batch-invariant", &["batch_invariant true", "2 ranks"]),
    ("run -s 4 --ranks 2 --backward --row-invariant", &["row_invariant true", "2 ranks"]),
    ("run -s 4 --ranks 2 --emulate sm_90a --backend cuda", &["ranks 2", "--backend cpu"]),
    ("run -s 4 --ranks 2 --rank-of x", &["rank-of `x`"]),
    ("run -s 4 --ranks 2 --rank-of=-1,.", &["rank-of `-1,.`"]),
];

#[test]
fn an_emulator_is_opened_where_the_environment_says_and_nowhere_else() {
    let folder = tempfile::tempdir().unwrap();
    for (words, file) in [
        ("cuda --emulate sm_90a", "libfmha_emu_libcuda.so"),
        ("rocm --emulate gfx942", "libfmha_emu_amdhip64.so"),
    ] {
        let mut command = super::command(folder.path(), &format!("explain --backend {words}"));
        let ran = super::Ran::of(command.env("FMHA_EMULATOR_DIR", folder.path()).output().unwrap());
        let place = folder.path().join(file).display().to_string();
        assert!(ran.status != 0 && ran.err.contains(&place), "{words}: {}{}", ran.out, ran.err);
    }
}

#[test]
fn every_wrong_input_gets_one_line_with_the_field_and_the_number() {
    let folder = tempfile::tempdir().unwrap();
    put_files(folder.path());
    let listing = || {
        let mut names: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort_unstable();
        names
    };
    let before = listing();
    for (line, wanted) in TABLE {
        let ran = fmha_in(folder.path(), line);
        assert_eq!(ran.status, 2, "`fmha {line}`: {}{}", ran.out, ran.err);
        assert_eq!(ran.err.lines().count(), 1, "`fmha {line}`: {}", ran.err);
        assert!(!ran.out.contains("\ntime "), "`fmha {line}` computes first: {}", ran.out);
        assert!(ran.err.starts_with("error: "), "`fmha {line}`: {}", ran.err);
        assert!(!ran.err.contains("mask mask") && !ran.err.contains("backend backend"), "{}", ran.err);
        assert!(ran.err.matches("--help").count() <= 1, "`fmha {line}`: {}", ran.err);
        for words in *wanted {
            assert!(ran.err.contains(words), "`fmha {line}` does not say `{words}`: {}", ran.err);
        }
        assert_eq!(listing(), before, "`fmha {line}` wrote a file");
    }
    assert!(TABLE.len() >= 30);
}
