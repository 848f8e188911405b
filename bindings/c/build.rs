//! The shared library's soname. A struct's size is part of each call, so a library of another minor version refuses it.
//! Before 1.0 the soname therefore has the major and the minor version, as Cargo's rule of compatible versions does.
//!
//! By `rustc-link-arg`: `rustc-cdylib-link-arg` would reach every shared library that is built on this crate.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        let (major, minor) = (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"));
        let abi = if major == "0" { format!("0.{minor}") } else { major.to_owned() };
        println!("cargo::rustc-link-arg=-Wl,-soname,libfmha.so.{abi}");
    }
}
