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
