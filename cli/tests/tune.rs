//! `fmha tune` without a device to measure on: its refusals, and what it still compiles.

use super::{Ran, fmha};

/// `fmha tune` on an emulated H200; nothing where that or its compiler is absent.
fn emulated(options: &str) -> Option<Ran> {
    let ran = fmha(&format!("tune --backend cuda --emulate sm_90a -b 1 --heads 1 -s 128 {options}"));
    let absent = ran.err.contains("NVRTC") || ran.err.contains("`cargo build` makes it");
    if absent {
        println!("absent: {}", ran.err.trim());
    }
    (!absent).then_some(ran)
}

#[test]
fn what_cannot_be_tuned_is_refused_by_its_name() {
    for (options, wanted) in [
        ("-d 64", &["emulated", "times"][..]),
        ("-d 64 --backward", &["emulated", "times"]),
        ("-d 64 --backward --deterministic", &["emulated", "times"]),
        ("-d 64 --field dq_path", &["field dq_path", "forward", "ping_pong"]),
        ("-d 64 --backward --field ping_pong", &["field ping_pong", "backward", "dq_path"]),
        ("-d 320 --backward", &["sm90", "head_dim_qk 320", "256"]),
        ("-d 64 --prec fp32 --backward", &["sm90", "dtype_qk f32"]),
    ] {
        let Some(ran) = emulated(options) else { return };
        assert_eq!(ran.status, 2, "{options}: {}{}", ran.out, ran.err);
        assert_eq!(ran.err.lines().count(), 1, "{options}: {}", ran.err);
        for words in wanted {
            assert!(ran.err.contains(words), "{options} does not say `{words}`: {}", ran.err);
        }
    }
}

#[test]
fn backward_tiles_are_compiled_without_a_device_to_measure_them_on() {
    for (options, wanted) in [
        ("--field block_m", "1 tiles compiled, 3 refused"),
        // A short call finishes dQ with a launch, for which dQ may be added in every way. Separate sums are
        // for a fixed order alone.
        ("--field dq_path", "3 tiles compiled, 1 refused"),
        // Consumers that add dQ themselves also add in order; the first one to arrive is not the first in order.
        ("--field dq_path --deterministic", "3 tiles compiled, 1 refused"),
        // With a tile index taken ahead, a CTA would wait for its own present tile.
        ("--field persistent --deterministic", "1 tiles compiled, 1 refused"),
    ] {
        let Some(ran) = emulated(&format!("-d 64 --backward --compile {options}")) else { return };
        assert_eq!((ran.status, ran.err.as_str(), ran.out.trim()), (0, "", wanted), "{options}");
    }
}

#[test]
fn masks_as_data_are_tuned_alone_and_beside_functions() {
    let folder = tempfile::tempdir().unwrap();
    let mask = folder.path().join("mask.npy");
    let ends: Vec<u8> =
        [0, 64].iter().flat_map(|end| [end; 128]).flat_map(|end: &i32| end.to_le_bytes()).collect();
    std::fs::write(&mask, crate::run::npy("<i4", &[2, 128], &ends)).unwrap();
    let tune = |rest: &str| {
        let mask = mask.display();
        fmha(&format!(
            "tune --backend cuda --emulate sm_80 -b 1 --heads 1 -s 128 -d 64 --compile --field stages --mask {mask} {rest}"
        ))
    };
    let ran = tune("");
    if ran.err.contains("NVRTC") || ran.err.contains("`cargo build` makes it") {
        println!("absent: {}", ran.err.trim());
        return;
    }
    assert!(ran.status == 0 && ran.out.contains("tiles compiled"), "{}{}", ran.out, ran.err);
    assert!(!ran.out.starts_with("0 tiles"), "{}", ran.out);
    let ran = tune("--keep k<=q");
    assert!(ran.status == 0 && ran.out.contains("tiles compiled"), "{}{}", ran.out, ran.err);
    assert!(!ran.out.starts_with("0 tiles"), "{}", ran.out);
}
