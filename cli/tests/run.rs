//! `fmha run` on made-up data: Composable Kernel's options, exit status, pipes, memory.

use std::process::Stdio;

use super::{Ran, command, fmha};

fn passes(line: &str) {
    let ran = fmha(line);
    assert_eq!(ran.status, 0, "`fmha {line}`: {}{}", ran.out, ran.err);
    assert!(ran.out.ends_with("PASS\n"), "`fmha {line}`: {}", ran.out);
}

#[test]
fn a_run_ends_in_pass() {
    passes("run -b 2 -h 4 -s 64 -d 32 --mask b");
}

#[test]
fn composable_kernels_spelling_is_taken() {
    passes(
        "run -b=1 -h=4 -h_k=2 -s=40 -s_k=50 -d=24 -d_v=16 -mask=b:7,0 -prec=bf16 -iperm=1 -operm=0 -lse=1 -v=1 -warmup=0 -repeat=1",
    );
}

/// Only a scale that is not given is the default, in the contract and in C too.
#[test]
fn a_softmax_scale_of_zero_is_zero_and_not_the_default() {
    let said = |options: &str| {
        let ran = fmha(&format!("run -b 1 -h 1 -s 8 -d 16 --backend cpu --repeat 1 {options}"));
        assert!(ran.out.ends_with("PASS\n"), "{options}: {}{}", ran.out, ran.err);
        ran.out
    };
    assert!(said("--softmax-scale 0").contains(", scale 0\n"));
    assert!(said("-scale_s=0").contains(", scale 0\n"));
    assert!(!said("").contains("scale"));
}

#[test]
fn every_option_of_the_problem_runs_and_is_checked() {
    for options in [
        "--prec fp32 --bias e:2 --softcap 20",
        "--prec bf16 --bias a:1 --mask t",
        "--prec fp16 --sink --lse --p-drop 0.3 --drop-seed 7 --drop-offset 9",
        "--prec fp8 --qscale kv --prec-o fp16",
        "--prec fp8-hybrid --qscale pt",
        "--vlayout c --iperm",
        "--vlayout c --operm",
        "--mode 1 -s 30,0,17 --seqlen-k 30,5,0 --lse",
        "--mode 1 -s 30,9 --padded-q 32,16 --padded-k 31,12",
        "-b 2 --seqused-q 3,0 --seqused-k 30,1 --mask g:5,2",
    ] {
        let base = if options.contains("--mode 1") { "run -h 2 -d 16" } else { "run -b 2 -h 2 -s 32 -d 16" };
        let base = if options.starts_with("-b") { "run -h 2 -s 32 -d 16" } else { base };
        passes(&format!("{base} {options} --repeat 1"));
    }
}

#[test]
fn a_score_and_a_mask_as_code_run_and_are_checked() {
    for options in [
        "--score 's + 0.5*(k-q)' --keep 'k <= q'",
        "--score 's * sigmoid(s)' --softcap 9 --prec bf16",
        "--keep 'q // 8 == k // 8 or k < 2' --backward --mask b",
        "--score 'select(abs(q-k) < 9, s, -inf)' --backward --prec fp32",
    ] {
        let mut words = vec!["run -b 1 -h 2 -s 40 -d 16 --backend cpu --repeat 1".to_owned()];
        words.push(options.to_owned());
        let ran = quoted(&words.join(" "));
        assert_eq!(ran.status, 0, "{options}: {}{}", ran.out, ran.err);
        assert!(ran.out.ends_with("PASS\n"), "{options}: {}", ran.out);
    }
    for (options, said) in [
        ("--score 's + foo'", "score: column 5, `foo`: the name is neither"),
        ("--score 'k <= q'", "it is a mask, which --keep takes"),
        ("--keep 'k + q'", "keep `k + q` is a number, not a bool"),
        ("--score 'rate: float; s * rate'", "score: rate is captured, and the command has no value for it"),
    ] {
        let ran = quoted(&format!("run -b 1 -h 1 -s 8 -d 16 --backend cpu {options}"));
        assert_ne!(ran.status, 0, "{options}");
        assert!(ran.err.contains(said), "{options}: {}", ran.err);
    }
}

/// A `.npy` file of this type, shape and bytes.
pub(crate) fn npy(descr: &str, shape: &[usize], bytes: &[u8]) -> Vec<u8> {
    let extents: String = shape.iter().map(|extent| format!("{extent},")).collect();
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({extents}), }}");
    let length = (10 + dict.len() + 1).next_multiple_of(64) - 10;
    let header = format!("{dict:<width$}\n", width = length - 1);
    [b"\x93NUMPY\x01\x00", (length as u16).to_le_bytes().as_slice(), header.as_bytes(), bytes].concat()
}

#[test]
fn a_mask_of_a_file_is_intervals_or_bits_by_its_type_and_is_refused_by_its_axis() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, descr: &str, shape: &[usize], bytes: &[u8]| {
        let path = folder.path().join(format!("{name}.npy"));
        std::fs::write(&path, npy(descr, shape, bytes)).unwrap();
        path.display().to_string()
    };
    // Documents of 10 keys; each third pair; words of alternate keys, for each head of its own.
    let endpoints: Vec<u8> = (0..80i32)
        .map(|at| at % 40 / 10 * 10 + if at < 40 { 0 } else { 10 })
        .flat_map(i32::to_le_bytes)
        .collect();
    let pairs: Vec<u8> = (0..40 * 40).map(|at| u8::from(at % 3 == 0)).collect();
    let words: Vec<u8> =
        (0..2 * 40 * 2u32).flat_map(|at| (0x5555_5555u32 << (at / 80)).to_le_bytes()).collect();
    let intervals = file("intervals", "<i4", &[1, 1, 2, 40], &endpoints);
    let short = file("short", "<i4", &[2, 40], &endpoints);
    let of_pairs = file("pairs", "|b1", &[40, 40], &pairs);
    let bits = file("bits", "<u4", &[2, 40, 2], &words);
    for (options, said) in [
        (format!("--mask {intervals} --backward"), "intervals"),
        (format!("--mask {short} --keep k<=q"), "intervals"),
        (format!("--mask {of_pairs} --prec bf16"), "mask bits"),
        (format!("--mask {bits} --backward --prec fp32"), "mask bits"),
        (format!("--mask {short} --mode 1 -s 25,15"), "intervals"),
    ] {
        let size = if options.contains("--mode") { "-b 2" } else { "-b 2 -s 40" };
        let ran = quoted(&format!("run {size} -h 2 -d 16 --backend cpu --repeat 1 {options}"));
        assert_eq!(ran.status, 0, "{options}: {}{}", ran.out, ran.err);
        assert!(ran.out.contains(said) && ran.out.ends_with("PASS\n"), "{options}: {}", ran.out);
    }
    let floats = file("floats", "<f4", &[2, 40], &endpoints);
    for (options, said) in [
        (format!("-s 41 --mask {short}"), "i32 of shape [2, 40] has 40 queries (seqlen_q), not 41"),
        (format!("-s 40 -s_k 41 --mask {of_pairs}"), "bool of shape [40, 40] has 40 keys (seqlen_k), not 41"),
        (format!("-s 40 -s_k 70 --mask {bits}"), "has 2 words (seqlen_k / 32, rounded up), not 3"),
        (
            format!("-s 40 -h 3 --mask {bits}"),
            "mask_bits has 2 heads, not 1, num_heads_kv 3 or num_heads_q 3",
        ),
        (format!("-s 40 --mask {floats}"), "dtype <f4 is not i32 (<i4), u32 (<u4) or bool (|b1)"),
        ("-s 40 --mask nowhere.npy".to_owned(), "nowhere.npy"),
    ] {
        let heads = if options.contains("-h 3") { "" } else { "-h 2" };
        let ran = quoted(&format!("run -b 1 {heads} -d 16 --backend cpu {options}"));
        assert_ne!(ran.status, 0, "{options}");
        assert!(ran.err.contains(said), "{options}: {}", ran.err);
    }
}

/// Lists of keys with absent and repeated entries, drawn by a seed.
fn drawn_entries(count: usize, reach: i32, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let entry = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as i32 % (reach + 4) - 2).to_le_bytes()
    };
    (0..count).flat_map(entry).collect()
}

#[test]
fn lists_of_a_file_are_keys_blocks_or_addresses_and_are_refused_by_their_axis() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, descr: &str, shape: &[usize], bytes: &[u8]| {
        let path = folder.path().join(format!("{name}.npy"));
        std::fs::write(&path, npy(descr, shape, bytes)).unwrap();
        path.display().to_string()
    };
    let ints = |numbers: &[i32]| -> Vec<u8> { numbers.iter().flat_map(|n| n.to_le_bytes()).collect() };
    let of_heads = file("of_heads", "<i4", &[2, 6, 2, 9], &drawn_entries(216, 40, 1));
    let of_all = file("of_all", "<i4", &[2, 6, 9], &drawn_entries(108, 40, 2));
    let packed = file("packed", "<i4", &[6, 1, 9], &drawn_entries(54, 30, 3));
    let pages = file("pages", "<i4", &[2, 6, 9], &drawn_entries(108, 80, 4));
    let per_token = file("per_token", "<i4", &[2, 6], &ints(&[9, 3, 0, 12, -1, 5, 1, 2, 3, 4, 5, 6]));
    let per_sequence = file("per_sequence", "<i4", &[2], &ints(&[4, 9]));
    let size = "-b 2 -s 6 -s_k 40";
    for (options, said) in [
        (format!("{size} --lists {of_heads} --lse"), "lists of 9 keys"),
        (format!("{size} --lists {of_all} --mask b --bias a"), "lists of 9 keys"),
        (format!("{size} --lists {of_heads} --backward --deterministic"), "lists of 9 keys"),
        (format!("{size} --lists {of_all} --topk-length 3,7 --sink --lse --lse-without-sink"), "sinks"),
        (format!("{size} --lists {of_heads} --topk-length {per_token} --prec bf16"), "lists of 9 keys"),
        (format!("{size} --lists {of_all} -topk_length={per_sequence} --backward"), "lists of 9 keys"),
        (format!("{size} --lists {of_all} --list-block 4"), "lists of 9 blocks of 4 keys"),
        (format!("{size} --lists {of_all} --page-size 8"), "pages of 8, lists of 9 keys"),
        (format!("{size} --lists {pages} --page-size 8 --list-addresses"), "lists of 9 addresses"),
        (format!("--mode 1 -s 4,2 -s_k 30,11 --lists {packed} --lse"), "lists of 9 keys"),
    ] {
        let ran = fmha(&format!("run -h 4 --heads-kv 2 -d 16 --backend cpu --repeat 1 {options}"));
        assert_eq!(ran.status, 0, "{options}: {}{}", ran.out, ran.err);
        assert!(ran.out.contains(said) && ran.out.ends_with("PASS\n"), "{options}: {}", ran.out);
    }
    let floats = file("floats", "<f4", &[2, 6, 9], &drawn_entries(108, 9, 5));
    let short = file("short", "<i4", &[5], &ints(&[1; 5]));
    for (options, said) in [
        (format!("-s 7 --lists {of_all}"), "shape [2, 6, 9] has 6 for seqlen_q, not 7"),
        (format!("-s 6 --lists {packed}"), "shape [6, 1, 9] has 6 for batch, not 2"),
        (format!("-s 6 --heads-kv 1 --lists {of_heads}"), "has 2 heads, not 1 or num_heads_kv 1"),
        (format!("-s 6 --lists {short}"), "rank 1 (shape [5]) is not in 3..=4"),
        (format!("-s 6 --lists {floats}"), "dtype <f4 is not i32 (<i4)"),
        ("-s 6 --lists nowhere.npy".to_owned(), "nowhere.npy"),
        (format!("-s 6 --lists {of_all} --topk-length 1,2,3"), "topk_length has 3 lengths, but batch is 2"),
        (
            format!("-s 6 --lists {of_all} --topk-length {short}"),
            "shape [5] is neither [2] (batch) nor [2, 6]",
        ),
        (format!("-s 6 --lists {of_all} --list-addresses"), "list_addresses 1 goes with --page-size"),
        (format!("-s 6 --lists {of_all} --lse-without-sink"), "lse_without_sink"),
        ("-s 6 --topk-length 3".to_owned(), "topk_length 3 goes with --lists"),
        ("-s 6 --list-block 3".to_owned(), "list_block 3 goes with --lists"),
        (format!("-s 6 --lists {of_all} --list-block 0"), "list_block 0 is not in 1..=2147483647"),
    ] {
        let heads = if options.contains("heads-kv") { "" } else { "--heads-kv 2" };
        let ran = fmha(&format!("run -b 2 -h 4 {heads} -d 16 --backend cpu {options}"));
        assert_ne!(ran.status, 0, "{options}");
        assert!(ran.err.contains(said), "{options}: {}", ran.err);
    }
}

#[test]
fn scales_of_a_cache_by_rows_run_and_are_refused_by_what_does_not_go_with_them() {
    for options in [
        "--prec bf16 --cache-type fp8 --cache-scales 1",
        "--cache-type bf8 --cache-scales 16 --mask b --lse",
        "--cache-type fp8 --cache-scales 4 --page-size 8 --seqused-k 40,3",
        "--cache-type fp8 --cache-scales 1 --page-size 8 --append 3 --mask b",
    ] {
        passes(&format!("run --backend cpu -b 2 -h 2 -s 5 --seqlen-k 40 -d 16 --repeat 1 {options}"));
    }
    for (options, said) in [
        ("--cache-scales 2", "cache_scales of blocks of 2 rows go with a dtype_cache in FP8"),
        (
            "--cache-type fp8 --cache-scales 2 --append 1",
            "append of seqlen_new 1 beside cache_scales of blocks of 2",
        ),
        ("--cache-type fp8 --cache-scales 3 --page-size 8", "page_size 8 is not a multiple of the 3 rows"),
        ("--cache-type fp8 --cache-scales 1 --qscale kv", "descale_k"),
        ("--cache-type fp8 --cache-scales 1 --backward", "goes with the forward"),
    ] {
        let ran = fmha(&format!("run --backend cpu -b 2 -h 2 -s 5 --seqlen-k 40 -d 16 {options}"));
        assert_ne!(ran.status, 0, "{options}");
        assert!(ran.err.contains(said), "{options}: {}", ran.err);
    }
}

/// The command's words, where a quoted text is one word.
pub(crate) fn quoted(line: &str) -> Ran {
    let mut words: Vec<String> = vec![];
    for (at, part) in line.split('\'').enumerate() {
        match at % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    let folder = tempfile::tempdir().unwrap();
    Ran::of(command(folder.path(), "").args(words).output().unwrap())
}

#[test]
fn every_option_of_a_cache_runs_and_is_checked() {
    for options in [
        "--page-size 16 --seqused-k 40,3",
        "--page-size 7 --append 3 --mask b",
        "--append 5 --seqused-k 35,0 --rotary 8 --mask b --lse",
        "--rotary 16 --interleaved --page-size 8",
        "--prec bf16 --cache-type fp8 --qscale kv --page-size 16",
        "--d_v=8 --v-in-k --heads-kv 1",
        "--mask b --tree --page-size 5",
        "-s_knew=2 -rotary_dim=4 -rotary_interleaved=1 -page_block_size=16",
    ] {
        passes(&format!("run --backend cpu -b 2 -h 2 -s 5 --seqlen-k 40 -d 16 --repeat 1 {options}"));
    }
}

#[test]
fn gradients_run_and_are_checked() {
    for options in
        ["--prec fp32", "--mask b --prec bf16", "--bias e:1 --dbias --sink --dsink --dlse", "--heads-kv 1"]
    {
        passes(&format!("run --backward -b 2 -h 2 -s 24 -d 16 --repeat 1 {options}"));
    }
}

#[test]
fn a_sample_of_the_gradients_is_checked_where_all_would_take_long() {
    for options in ["--mask b --prec bf16", "--prec fp32 --bias e:0 --dbias --sink --dsink --heads-kv 1"] {
        let line = format!("run --backward -b 2 -h 2 -s 600 -d 64 --repeat 1 -v sample --json {options}");
        let ran = fmha(&line);
        assert_eq!(ran.status, 0, "`fmha {line}`: {}{}", ran.out, ran.err);
        let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
        assert!(report["check"]["extent"].as_str().unwrap().starts_with("a sample: "), "{}", ran.out);
        let names: Vec<&str> = report["check"]["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tensor| tensor["tensor"].as_str().unwrap())
            .collect();
        let wanted: &[&str] = if options.contains("--dbias") {
            &["dq", "dk", "dv", "dbias", "dsink", "o", "lse"]
        } else {
            &["dq", "dk", "dv", "o", "lse"]
        };
        assert_eq!(names, wanted);
    }
}

#[test]
fn the_same_seed_gives_the_same_figures() {
    let error = |seed: u32| {
        let ran = fmha(&format!("run -b 1 -h 1 -s 16 -d 16 --repeat 1 --seed {seed} --json"));
        serde_json::from_str::<serde_json::Value>(&ran.out).unwrap()["check"].clone()
    };
    assert_eq!(error(1), error(1));
    assert_ne!(error(1), error(2));
}

#[test]
fn json_is_one_object_with_the_verdict() {
    let ran = fmha("run -b 1 -h 2 -s 16 -d 8 --repeat 2 --json --kname");
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(report["passed"], true);
    assert_eq!(report["calls"], 2);
    assert!(report["median_seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn an_unchecked_run_does_not_claim_to_pass() {
    let ran = fmha("run -b 1 -h 1 -s 16 -d 8 -v 0 --repeat 1");
    assert_eq!(ran.status, 0);
    assert!(ran.out.ends_with("NOT CHECKED\n"), "{}", ran.out);
}

#[test]
fn help_is_help_and_a_question_mark_and_teaches() {
    for line in ["--help", "-?", "-h", "run --help", "run -?", "explain -?", "bench --help", "conformance -?"]
    {
        let ran = fmha(line);
        assert_eq!(ran.status, 0, "{line}");
        // A command of an example fits a terminal of 80 columns. Lines that do not begin with a command may
        // be longer.
        let examples =
            ran.out.lines().filter(|line| line.starts_with("  fmha ") || line.starts_with("  FMHA_"));
        for example in examples {
            assert!(example.len() <= 80, "`{line}`: {example}");
        }
        assert!(
            ran.out.contains("Usage:") && ran.out.contains("fmha run") || ran.out.contains("Examples:"),
            "{line}"
        );
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    for line in ["run --help", "run -b 1 -h 1 -s 20 -d 16 --repeat 1"] {
        // The reader closes before the first line, since one that closes later might not be noticed.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = command(folder.path(), line).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let ran = Ran::of(child.wait_with_output().unwrap());
        assert_eq!((ran.status, ran.err.as_str()), (141, ""), "`fmha {line}`");
    }
}

/// Under limits that the tensors, the threads or the kernels' scratch do not fit.
#[cfg(target_os = "linux")]
#[test]
fn too_little_memory_is_an_error_line() {
    let under = |kilobytes: &str, line: &str| {
        let script = format!("ulimit -v {kilobytes}; exec {} {line}", env!("CARGO_BIN_EXE_fmha"));
        let ran = Ran::of(std::process::Command::new("sh").args(["-c", &script]).output().unwrap());
        if ran.status != 0 {
            assert_eq!(ran.status, 2, "{kilobytes}: `{line}`: {}{}", ran.out, ran.err);
            assert_eq!(ran.err.lines().count(), 1, "{kilobytes}: `{line}`: {}", ran.err);
        }
        ran
    };
    // 2^31 rows of 8 heads and 128 elements are beyond any machine; the others beyond the limit.
    for (kilobytes, line) in [
        ("unlimited", "run -b 60000 -h 8 -s 2147418112 -d 128 -v 0"),
        ("400000", "run -b 4 -h 16 -s 8192 -d 128 -v 0 --repeat 1"),
        ("400000", "run -b 2 -h 8 -s 4096 -d 128 --bias e:2 -v 0 --repeat 1"),
    ] {
        let ran = under(kilobytes, line);
        assert_eq!(ran.status, 2, "`{line}`: {}{}", ran.out, ran.err);
        assert!(ran.err.starts_with("error: ") && ran.err.contains("bytes"), "`{line}`: {}", ran.err);
    }
    // Threads: as many as are sensible, whatever the environment says.
    for (threads, said) in [("3000000", "RAYON_NUM_THREADS `3000000`"), ("x", "RAYON_NUM_THREADS `x`")] {
        let mut command = command(std::env::temp_dir().as_path(), "run -b 1 -h 1 -s 16 -d 16 --repeat 1");
        let ran = Ran::of(command.env("RAYON_NUM_THREADS", threads).output().unwrap());
        assert_eq!((ran.status, ran.err.lines().count()), (2, 1), "{}", ran.err);
        assert!(ran.err.contains(said), "{}", ran.err);
    }
    let script = format!(
        "ulimit -v 400000; RAYON_NUM_THREADS=250 exec {} run -b 1 -h 1 -s 64 -d 16 --repeat 1",
        env!("CARGO_BIN_EXE_fmha")
    );
    let ran = Ran::of(std::process::Command::new("sh").args(["-c", &script]).output().unwrap());
    assert_eq!((ran.status, ran.err.lines().count()), (2, 1), "{}{}", ran.out, ran.err);
    assert!(ran.err.contains("memory for 250 threads for the check, "), "{}", ran.err);
    // Any limit between too little and enough gives an error or a result.
    let binary = std::fs::metadata(env!("CARGO_BIN_EXE_fmha")).unwrap().len() / 1000;
    let mut refused = 0;
    // Limits of memory from the least with which the program itself can be loaded.
    for kilobytes in (0..8).map(|step| binary + 4000 + step * 22_000) {
        refused += under(&kilobytes.to_string(), "run -b 1 -h 1 -s 64 -d 16 --repeat 1").status;
    }
    assert!(refused > 0);
}

#[test]
fn an_instruction_set_of_another_processor_is_refused() {
    let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
    let folder = tempfile::tempdir().unwrap();
    let mut command = command(folder.path(), "run -b 1 -h 1 -s 8 -d 8 --backend cpu");
    let ran = Ran::of(command.env("FMHA_CPU_ISA", foreign).output().unwrap());
    assert_eq!((ran.status, ran.err.lines().count()), (2, 1), "{}{}", ran.out, ran.err);
    assert!(ran.err.contains(foreign) && ran.err.contains(std::env::consts::ARCH), "{}", ran.err);
}

#[test]
fn bounds_that_say_nothing_are_no_pass() {
    // The tensors are made by hand: one large score per row, so that the check of each direction passes.
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, value: f32| {
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        let dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 4, 2, 8), }\n";
        bytes.extend_from_slice(&(dict.len() as u16).to_le_bytes());
        bytes.extend_from_slice(dict.as_bytes());
        let row = |i: u32| value * (1.0 + i as f32 / 100.0);
        bytes.extend((0..64).flat_map(|i| row(i).to_le_bytes()));
        std::fs::write(folder.path().join(name), bytes).unwrap();
    };
    file("q.npy", 1.0);
    file("k.npy", 1e20);
    file("v.npy", 1.0);
    let line = "run --q q.npy --k k.npy --v v.npy --repeat 1 --backend cpu";
    let ran = super::fmha_in(folder.path(), &format!("{line} --out o.npy"));
    assert_eq!(ran.status, 2, "{}{}", ran.out, ran.err);
    assert!(
        ran.err.starts_with("error: verify: scores of up to ") && !ran.out.contains("PASS"),
        "{}",
        ran.err
    );
    assert!(!folder.path().join("o.npy").exists());
    let ran = super::fmha_in(folder.path(), &format!("{line} -v 0 --out o.npy"));
    assert!(ran.status == 0 && ran.out.ends_with("NOT CHECKED\n"), "{}{}", ran.out, ran.err);
    file("k.npy", 1.0);
    let ran = super::fmha_in(folder.path(), line);
    assert!(ran.status == 0 && ran.out.ends_with("PASS\n"), "{}{}", ran.out, ran.err);
}
