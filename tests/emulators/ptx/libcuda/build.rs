//! Gives the library the name that the backend tries first: loaded once by path, it answers every later
//! `dlopen("libcuda.so")`.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo:rerun-if-changed=build.rs");
}
