//! Gives the library the driver's soname: loaded once by path, it answers every later `dlopen("libcuda.so.1")`.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
