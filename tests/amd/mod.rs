//! Emulated AMD devices for tests.

use std::path::Path;
use std::process::Command;

use fmha_core::{Device, Error};

/// Opens an emulated device for the test `what`. `None`, with a message, where there is no clang or no emulator.
pub(crate) fn open(arch: &str, what: &str) -> Option<Device> {
    let clang = std::env::var("FMHA_HIP_CLANG").unwrap_or_else(|_| "clang-22".to_owned());
    if Command::new(Path::new(&clang)).arg("--version").output().is_err() {
        println!("absent: {what} on emulated {arch}: no {clang}");
        return None;
    }
    match fmha_rocm::open(0, Some(arch)) {
        Ok(backend) => Some(backend),
        Err(Error::NoDevice(reason)) => {
            println!("absent: {what} on emulated {arch}: {reason}");
            None
        }
        Err(error) => panic!("{arch}: {error}"),
    }
}
