//! Tests of the environment at a process's start.

#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;

use fmha_core::cache::{Cache, Compiler, CompilerOutput, ImageKind, KernelJob, dump_source};
use fmha_core::source::KernelSource;
use fmha_core::{Result, env};

/// Prints the value of a variable, as the child process of a test below.
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

struct Made;

impl Compiler for Made {
    fn identity(&self) -> String {
        "made 1".to_owned()
    }

    fn compile(&self, _: &KernelJob) -> Result<CompilerOutput> {
        Ok(CompilerOutput { machine: vec![7], log: "fine".to_owned(), ..CompilerOutput::default() })
    }
}

fn job(kernel: &'static str) -> KernelJob {
    KernelJob {
        kernel,
        arch: "arch".to_owned(),
        flags: Vec::new(),
        source: KernelSource::with("entry".to_owned(), Vec::new()),
        image: ImageKind::Machine,
    }
}

/// Compiles one valid and one invalid kernel, as the child process of a test below.
#[test]
#[ignore = "a process of the tests below, which start it"]
fn a_process_that_compiles() {
    let (_, from) = Cache::from_env().unwrap().get(&job("sound"), || Ok(Made)).unwrap();
    println!("{from};");
    println!("left at {};", dump_source(&job("unsound"), "what is wrong").display());
}

/// Starts the child process in `folder`, where temporary files lie, with these variables. Returns its result.
fn compile_in(folder: &Path, variables: &[(&str, &str)]) -> String {
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["a_process_that_compiles", "--exact", "--ignored", "--nocapture"]);
    for name in [env::CACHE_DIR.name, env::BUNDLE.name, env::DUMP.name, "XDG_CACHE_HOME", "HOME"] {
        process.env_remove(name);
    }
    process.current_dir(folder).env("TMPDIR", folder).envs(variables.iter().copied());
    let output = process.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn compiled_kernels_are_kept_where_the_variables_say_and_nowhere_if_they_say_none() {
    let folder = tempfile::tempdir().unwrap();
    let inside = |path: &str| folder.path().join(path).display().to_string();
    for there in ["b", "e", "f"] {
        fs::create_dir(folder.path().join(there)).unwrap();
    }
    for (variables, kept) in [
        // A missing folder that the variable names is created.
        (&[("FMHA_CACHE_DIR", inside("a/a"))][..], "a/a/kernels"),
        (&[("XDG_CACHE_HOME", inside("b")), ("HOME", inside("c"))], "b/fmha/kernels"),
        // Paths that are not absolute are ignored, as the specification requires.
        (&[("XDG_CACHE_HOME", "d".to_owned()), ("HOME", inside("e"))], "e/.cache/fmha/kernels"),
        (&[("XDG_CACHE_HOME", inside("f/g")), ("HOME", inside("f"))], "f/g/fmha/kernels"),
    ] {
        let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let text = compile_in(folder.path(), &variables);
        assert!(text.contains("compiled by made 1;"), "{text}");
        let text = compile_in(folder.path(), &variables);
        assert!(text.contains(&format!("disk cache {};", inside(kept))), "{text}");
    }
    let none = tempfile::tempdir().unwrap();
    let text = compile_in(none.path(), &[("FMHA_CACHE_DIR", "none"), ("HOME", &inside("e"))]);
    assert!(text.contains("compiled by made 1, not kept: FMHA_CACHE_DIR is none;"), "{text}");
    assert!(!none.path().join("none").exists());
}

/// A home that does not exist is not created: root could create it, and service accounts have `HOME=/nonexistent`.
#[test]
fn a_home_that_is_not_there_is_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let inside = |path: &str| folder.path().join(path).display().to_string();
    fs::create_dir(folder.path().join("home")).unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    for variables in [
        &[("HOME", inside("nonexistent/x"))][..],
        &[("HOME", inside("file"))],
        &[("XDG_CACHE_HOME", inside("nonexistent")), ("HOME", inside("home"))],
        &[("XDG_CACHE_HOME", inside("nonexistent")), ("HOME", inside("nonexistent"))],
        &[],
    ] {
        let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let text = compile_in(folder.path(), &variables);
        assert!(text.contains("compiled by made 1, not kept: FMHA_CACHE_DIR is not set, and of"), "{text}");
        assert!(!folder.path().join("nonexistent").exists() && !folder.path().join("home/.cache").exists());
    }
}

#[test]
fn sources_are_left_in_the_folder_for_dumps_and_without_one_those_that_fail_in_a_temporary_one() {
    let folder = tempfile::tempdir().unwrap();
    let dumps = folder.path().join("dumps");
    let log = |folder: &Path| {
        assert_eq!(fs::read_to_string(folder.join("entry.txt")).unwrap(), "entry");
        fs::read_to_string(folder.join("log.txt")).unwrap()
    };
    let left_at = |text: &str| text.split_once("left at ").unwrap().1.split_once(';').unwrap().0.to_owned();
    let key = &job("sound").key().hex()[..12];

    let text = compile_in(folder.path(), &[(env::DUMP.name, dumps.to_str().unwrap())]);
    assert_eq!(log(&dumps.join(format!("sound-arch-{key}"))), "fine");
    let failed = dumps.join(format!("unsound-arch-{key}"));
    assert_eq!((log(&failed).as_str(), left_at(&text)), ("what is wrong", failed.display().to_string()));

    let text = compile_in(folder.path(), &[]);
    let failed = left_at(&text);
    assert!(Path::new(&failed).starts_with(folder.path()) && failed.contains("/fmha-dump-"), "{failed}");
    assert_eq!(log(Path::new(&failed)), "what is wrong");
}
