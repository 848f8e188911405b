//! `fmha explain` for a device that is absent.

use super::fmha;

#[test]
fn an_emulated_kernel_is_counted_and_its_cycles_are_called_modelled() {
    let ran = fmha("explain --backend cuda --emulate sm_90a -b 3 --heads 2 -s 128 -d 128 --prec bf16");
    if ran.err.contains("NVRTC") || ran.err.contains("`cargo build` makes it") {
        println!("absent: {}", ran.err.trim());
        return;
    }
    assert_eq!((ran.status, ran.err.as_str()), (0, ""));
    // One tile of 128 x 128: two products of 128 deep, an exponential a score, Q, K and V by TMA.
    let lines: Vec<&str> = ran.out.lines().map(str::trim).collect();
    let said = |words: &str| lines.iter().any(|line| line.contains(words));
    assert!(said("1 tiles of 128 queries and 128 keys, 1 head, interpreted"), "{}", ran.out);
    assert!(said("tensor cores, 4194304 multiply-adds at 2048 a cycle"), "{}", ran.out);
    assert!(said("98304 bytes by bulk copies"), "{}", ran.out);
    assert!(said("0 bank conflicts"), "{}", ran.out);
    assert!(
        lines.iter().any(|line| line.starts_with("modelled") && line.contains("not measured")),
        "{}",
        ran.out
    );
    let special = lines.iter().find(|line| line.contains("special functions, ")).unwrap();
    let results = special.split("special functions, ").nth(1).unwrap().split(' ').next().unwrap();
    let results: f64 = results.parse().unwrap();
    // Each score has an exponential, and each row a few more.
    assert!((16384.0..16384.0 * 1.2).contains(&results), "{special}");
}

/// `--row-invariant` in text and in JSON: the plan of who promises it, and the name of who does not.
#[test]
fn explain_says_who_promises_rows_of_equal_bits() {
    let explain = |rest: &str| fmha(&format!("explain -b 1 --heads 2 -s 300 -d 64 --mask b {rest}"));
    for (device, kernel) in [
        ("--backend cpu", "cpu-fwd"),
        ("--arch sm_80", "sm80"),
        ("--arch sm_90a", "sm90"),
        ("--arch sm_100a", "sm80"),
        ("--arch gfx942", "cdna_decode"),
        ("--arch gfx1100", "rdna_decode"),
    ] {
        let ran = explain(&format!("{device} --row-invariant"));
        if ran.status != 0
            && (ran.err.contains("NVRTC") || ran.err.contains("hipcc") || ran.err.contains("clang"))
        {
            println!("absent: {}", ran.err.trim());
            continue;
        }
        assert_eq!((ran.status, ran.err.as_str()), (0, ""), "{device}");
        let line =
            |name: &str| ran.out.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
        assert!(line("kernel ").ends_with(kernel), "{device}: {}", ran.out);
        assert!(line("promises ").contains("row-invariant"), "{device}: {}", ran.out);
        let of_json = |wish: &str| {
            let ran = explain(&format!("{device} --json {wish}"));
            assert_eq!(ran.status, 0, "{device}: {}", ran.err);
            serde_json::from_str::<serde_json::Value>(&ran.out).unwrap()
        };
        let said = of_json("--row-invariant");
        assert_eq!((&said["kernel"], &said["row_invariant"]), (&kernel.into(), &true.into()), "{device}");
        if kernel == "cpu-fwd" {
            assert_eq!(of_json("")["row_invariant"], false, "{device}");
        }
    }
    // Kernels that do not promise it are named, with what breaks it.
    for (rest, said) in [
        ("--arch sm_90a --prec fp8", "sm80: row_invariant true: dtype_qk e4m3fn"),
        ("--arch sm_100a --kernel sm100", "sm100: row_invariant true"),
        ("--arch gfx942 --kernel cdna_fwd", "cdna_fwd: row_invariant true"),
        ("--backend cpu --keep k%3!=1", "row_invariant true: a mask as code"),
        ("--arch sm_80 --keep k%3!=1", "row_invariant true: mask_code"),
    ] {
        let ran = explain(&format!("{rest} --row-invariant"));
        assert!(
            ran.status != 0 && (ran.out.clone() + &ran.err).contains(said),
            "{rest}: {}{}",
            ran.out,
            ran.err
        );
    }
}

/// A function that is a band is planned as the band, which keeps the promise.
#[test]
fn a_band_as_code_is_row_invariant() {
    let ran = fmha("explain --backend cpu -b 1 --heads 2 -s 300 -d 64 --mask b --keep k<=q --row-invariant");
    assert_eq!((ran.status, ran.err.as_str()), (0, ""));
    assert!(ran.out.contains("row-invariant") && ran.out.contains("the mask is the band"), "{}", ran.out);
}

#[test]
fn small_outputs_are_planned_and_belong_to_forward() {
    let ran = fmha("explain --backend cpu -s 64 -d 8 --row-max --head-max --key-sum");
    assert_eq!((ran.status, ran.err.as_str()), (0, ""));
    for (options, said) in [
        ("--backend cpu --row-max --backward", "row_max goes without --backward"),
        (
            "--arch sm_90a --prec bf16 --key-sum --block-scales nvfp4 --allow-fallback",
            "key_sum beside block_scales is not written on this device",
        ),
        ("--backend cpu --head-max --ranks 2", "--ranks"),
    ] {
        let ran = fmha(&format!("explain -s 64 -d 8 {options}"));
        assert!(ran.status != 0 && (ran.err + &ran.out).contains(said), "{options}");
    }
}

#[test]
fn a_mask_is_drawn_as_tiles() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("mask.svg");
    let explain = |rest: &str| {
        let _ = std::fs::remove_file(&picture);
        fmha(&format!("explain --backend cpu -s 256 -d 8 --plot {} {rest}", picture.display()))
    };
    // Causal in tiles of 64: 4 cut on the diagonal, 6 below it.
    let ran = explain("--plot-tile 64 --mask b");
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(ran.out.contains("6 tiles whole, 4 cut, 6 skipped, of 64 x 64"), "{}", ran.out);
    let text = std::fs::read_to_string(&picture).unwrap();
    assert!(text.starts_with("<svg") && text.contains("whole 6") && text.contains("skipped 6"));
    // Blocks that see themselves, as a function, and as intervals in a file.
    let ran = explain("--plot-tile 64,32 --keep q//64==k//64");
    assert!(ran.out.contains("8 tiles whole, 0 cut, 24 skipped, of 64 x 32"), "{}{}", ran.out, ran.err);
    let ends: Vec<u8> = [0, 64]
        .iter()
        .flat_map(|first| (0..256i32).map(move |q| q / 64 * 64 + first))
        .flat_map(i32::to_le_bytes)
        .collect();
    let mask = folder.path().join("mask.npy");
    std::fs::write(&mask, crate::run::npy("<i4", &[2, 256], &ends)).unwrap();
    let ran = explain(&format!("--plot-tile 64,32 --mask {}", mask.display()));
    assert!(ran.out.contains("8 tiles whole, 0 cut, 24 skipped, of 64 x 32"), "{}{}", ran.out, ran.err);
    // The picture has at most 192 tiles on a side, and the output says so if a tile was requested.
    let of_long = format!("explain --backend cpu -s 20000 -d 8 --plot {} --plot-tile 64", picture.display());
    let ran = fmha(&of_long);
    assert!(ran.out.contains("of 128 x 128, several of the 64 x 64 asked for"), "{}{}", ran.out, ran.err);
    // The kernel's own tile is the default, and wrong options are named.
    assert!(explain("--mask b").out.contains("of 512 x 128"));
    for (rest, said) in [
        ("--plot-tile 0", "plot_tile 0 is not in 1..="),
        ("-s_k 0", "none of 2 sequences has a query and a key"),
        ("--json", "--json"),
    ] {
        let ran = explain(rest);
        assert!(ran.status != 0 && ran.err.contains(said), "{rest}: {}", ran.err);
    }
    let ran = fmha("explain --backend cpu -s 64 --plot mask.png");
    assert!(ran.status == 2 && ran.err.contains("`.png` is not .svg"), "{}", ran.err);
}
