//! The command on emulated Blackwell devices. Without NVRTC a test prints `absent`.

use super::{fmha, fmha_in};

/// Whether there is no compiler for its kernels here.
fn is_absent(arch: &str) -> bool {
    let plan: serde_json::Value =
        serde_json::from_str(&fmha(&format!("explain --arch {arch} --json")).out).unwrap();
    let reason = plan["code"].as_str().unwrap().strip_prefix("none: ");
    reason.inspect(|reason| println!("absent: {reason}")).is_some()
}

/// Maxima computed by loads from tensor memory (`load_max`, on sm_103a) are equal numbers, so bits are equal.
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
