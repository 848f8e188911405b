//! Tests of the disk cache with several processes.

#![allow(clippy::unwrap_used)]

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fmha_core::Result;
use fmha_core::cache::{Cache, Compiler, CompilerOutput, ImageKind, KernelJob};
use fmha_core::source::{Header, KernelSource};

const FOLDER: &str = "CACHE_RACE_FOLDER";

/// Slow compiler that appends a byte to a file at each call.
struct Slow(PathBuf);

impl Compiler for Slow {
    fn identity(&self) -> String {
        "slow 1".to_owned()
    }

    fn compile(&self, _: &KernelJob) -> Result<CompilerOutput> {
        OpenOptions::new().create(true).append(true).open(&self.0).unwrap().write_all(b"x").unwrap();
        std::thread::sleep(Duration::from_millis(100));
        Ok(CompilerOutput { machine: machine(), ..CompilerOutput::default() })
    }
}

fn machine() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect()
}

fn job() -> KernelJob {
    let headers = vec![Header::rendered("fmha/a.h", "a".repeat(100_000))];
    KernelJob {
        kernel: "raced",
        arch: "arch".to_owned(),
        flags: Vec::new(),
        source: KernelSource::with("entry".to_owned(), headers),
        image: ImageKind::Machine,
    }
}

/// Runs one of the racing processes.
#[test]
#[ignore = "a process of the races below, which start it"]
fn a_process_of_the_race() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let compiler = Slow(folder.join("compilations"));
    let (kernel, _) = Cache::new(Vec::new(), Some(&folder)).get(&job(), || Ok(compiler)).unwrap();
    assert!(kernel.machine == machine(), "another kernel, or a part of it");
}

/// Starts 64 processes at once; returns how many of them compiled a kernel.
fn race(folder: &Path) -> usize {
    let log = folder.join("compilations");
    let before = std::fs::read(&log).unwrap_or_default().len();
    let start = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["a_process_of_the_race", "--exact", "--ignored"])
            .env(FOLDER, folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<Child> = (0..64).map(|_| start()).collect();
    for child in children {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    }
    std::fs::read(&log).unwrap().len() - before
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder.join("kernels")).unwrap().flatten().map(|entry| entry.path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "fmha")).collect()
}

#[test]
fn of_64_processes_that_want_one_kernel_one_compiles_and_all_get_it() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(race(folder.path()), 1);
    assert_eq!(entries(folder.path()).len(), 1);
    assert_eq!(race(folder.path()), 0);
}

#[test]
fn a_corrupt_entry_is_noticed_by_64_processes_and_rebuilt_once() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(race(folder.path()), 1);
    let entry = &entries(folder.path())[0];
    let whole = std::fs::read(entry).unwrap();

    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 4;
    for corrupt in [&flipped[..], &whole[..whole.len() / 2], &[]] {
        std::fs::write(entry, corrupt).unwrap();
        assert_eq!(race(folder.path()), 1, "{} bytes", corrupt.len());
        assert!(std::fs::read(entry).unwrap() == whole);
    }
}
