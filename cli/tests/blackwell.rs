//! The command on emulated Blackwell devices. Without NVRTC a test prints `absent`.

use super::{fmha, fmha_in};

/// Whether there is no compiler for its kernels here.
fn is_absent(arch: &str) -> bool {
    let plan: serde_json::Value =
        serde_json::from_str(&fmha(&format!("explain --arch {arch} --json")).out).unwrap();
    let reason = plan["code"].as_str().unwrap().strip_prefix("none: ");
    reason.inspect(|reason| println!("absent: {reason}")).is_some()
}

/// The clocks of units are those of docs/kernels/sm100-fwd.md and sm100-bwd.md; nothing is compiled for them.
#[test]
fn explain_says_the_clocks_of_units_the_busiest_one_and_the_modelled_time() {
    for (arch, exponentials) in [("sm_100a", 1024), ("sm_103a", 512)] {
        // NVFP4's shared memory has the transposition of V's rows.
        let of_pairs = if exponentials > 532 { "exponentials" } else { "shared memory" };
        for (direction, tensor, shared, busiest) in [
            ("", 1024, 768, "tensor cores"),
            ("--block-scales nvfp4", 256, 532, of_pairs),
            ("--backward", 2560, 3328, "shared memory"),
        ] {
            let plan =
                fmha(&format!("explain --arch {arch} -b 2 -d 128 -s 8192 --prec bf16 {direction}")).out;
            for words in [
                format!("tensor cores {tensor}, exponentials {exponentials}, f32 lanes "),
                format!("shared memory {shared}, tensor memory "),
                format!("busiest: {busiest} (modelled)"),
                "TFLOP/s: modelled, nobody has measured it".to_owned(),
            ] {
                assert!(plan.contains(&words), "{arch} {direction}: no `{words}` in\n{plan}");
            }
        }
    }
}

/// Loads of S from tensor memory find its maxima on sm_103a (`load_max`): equal numbers, so equal bits.
#[test]
fn maxima_that_the_loads_find_change_no_bit() {
    if is_absent("sm_103a") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for mask in ["0", "b"] {
        let written = ["0", "1"].map(|load_max| {
            let line = format!(
                "run --backend cuda --emulate sm_103a --kernel sm100 --warmup 0 --repeat 1 -b 1 --heads 2 -s 200 \
                 --seqlen-k 300 -d 64 --prec bf16 --lse --mask {mask} --tile load_max={load_max} --out {load_max}.safetensors"
            );
            let ran = fmha_in(folder.path(), &line);
            assert!(ran.out.ends_with("PASS\n"), "`fmha {line}`: {}{}", ran.out, ran.err);
            std::fs::read(folder.path().join(format!("{load_max}.safetensors"))).unwrap()
        });
        assert!(written[0] == written[1], "mask {mask}");
    }
}
