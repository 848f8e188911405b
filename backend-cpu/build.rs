//! Tells the crate whether it is compiled without optimisation, whatever else the profile sets, and declares the
//! flag `--cfg baseline_alone` to the compiler (`src/isa.rs`).

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(unoptimised, baseline_alone)");
    if std::env::var("OPT_LEVEL").is_ok_and(|level| level == "0") {
        println!("cargo::rustc-cfg=unoptimised");
    }
}
