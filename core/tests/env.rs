//! The environment as a process finds it.

#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::process::Command;

use fmha_core::cache::Cache;
use fmha_core::env;

/// What the child below prints.
#[test]
#[ignore = "a process of the test below, which starts it"]
fn a_process_with_a_variable() {
    let value = env::CACHE_DIR.get().map_err(|error| error.to_string());
    let cache = Cache::from_env().map(|_| ()).map_err(|error| error.to_string());
    println!("value {value:?}; cache {cache:?};");
}

fn with(value: Option<&[u8]>) -> String {
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["a_process_with_a_variable", "--exact", "--ignored", "--nocapture"]);
    match value {
        Some(value) => process.env(env::CACHE_DIR.name, OsStr::from_bytes(value)),
        None => process.env_remove(env::CACHE_DIR.name),
    };
    String::from_utf8_lossy(&process.output().unwrap().stdout).into_owned()
}

#[test]
fn a_value_that_is_not_utf8_is_an_error_and_no_default() {
    let text = with(Some(b"/nowhere/\xff"));
    assert!(
        text.contains("value Err(") && text.contains("FMHA_CACHE_DIR") && text.contains("UTF-8"),
        "{text}"
    );
    assert!(text.contains("cache Err("), "{text}");
}

#[test]
fn a_value_is_itself_and_an_empty_one_is_none() {
    assert!(with(Some(b"none")).contains("value Ok(Some(\"none\")); cache Ok(())"));
    assert!(with(Some(b"")).contains("value Ok(None)"));
    assert!(with(None).contains("value Ok(None)"));
}
