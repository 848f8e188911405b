//! `fmha tune`, where there is no device to measure on: what it refuses, and what it compiles all the same.

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
        // Consumers that add dQ themselves add in order too; the first to come is not the first in the order.
        ("--field dq_path --deterministic", "3 tiles compiled, 1 refused"),
        // A tile whose index is taken ahead would wait behind its own CTA's present one.
        ("--field persistent --deterministic", "1 tiles compiled, 1 refused"),
    ] {
        let Some(ran) = emulated(&format!("-d 64 --backward --compile {options}")) else { return };
        assert_eq!((ran.status, ran.err.as_str(), ran.out.trim()), (0, "", wanted), "{options}");
    }
}
