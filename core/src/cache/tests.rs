#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::source::Header;

fn job(entry: &str) -> KernelJob {
    let headers =
        vec![Header::rendered("fmha/a.h", "a".to_owned()), Header::rendered("fmha/b.h", "b".to_owned())];
    KernelJob {
        kernel: "made-up",
        arch: "arch-1".to_owned(),
        flags: vec!["-x".to_owned()],
        source: KernelSource { entry: entry.to_owned(), headers },
        image: ImageKind::Machine,
    }
}

/// Counts how often it is used; has no assembly.
#[derive(Default)]
struct Counting(AtomicU32);

impl Compiler for Counting {
    fn identity(&self) -> String {
        "counting 1".to_owned()
    }

    fn compile(&self, job: &KernelJob) -> Result<CompilerOutput> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let machine = job.source.entry.as_bytes().repeat(100);
        Ok(CompilerOutput { machine, log: "fine".to_owned(), ..CompilerOutput::default() })
    }
}

fn made(entry: &str) -> Arc<CompiledKernel> {
    let job = job(entry);
    Arc::new(compile(&job, job.key(), &Counting::default(), "counting 1").unwrap())
}

fn no_compiler() -> Result<&'static Counting> {
    Err(Error::NoDevice("no compiler: 0 places tried".to_owned()))
}

#[test]
fn a_key_changes_with_every_input_and_with_nothing_else() {
    let base = job("entry");
    let mut others: Vec<KernelJob> = (0..7).map(|_| base.clone()).collect();
    others[0].arch = "arch-2".to_owned();
    others[1].source.entry += " ";
    others[2].flags.push("-y".to_owned());
    others[3].source.headers[0].text = "c".into();
    others[4].source.headers[1].name = "fmha/c.h".into();
    // The same text, divided otherwise.
    others[5].source.headers[0].text = "".into();
    others[5].source.headers[1].name = "afmha/b.h".into();
    others[6].flags = vec!["-".to_owned(), "x".to_owned()];
    for other in &others {
        assert_ne!(other.key(), base.key(), "{other:?}");
    }
    assert_eq!(job("entry").key(), base.key());
    assert_eq!(KernelJob { kernel: "renamed", image: ImageKind::Assembly, ..job("entry") }.key(), base.key());
}

#[test]
fn a_bundle_reads_back_whole() {
    let bundle = Bundle::new("b", [made("one"), made("two")]);
    let read = Bundle::from_bytes("b", &bundle.to_bytes().unwrap()).unwrap();
    assert_eq!(read.len(), 2);
    assert!(read.kernels().eq(bundle.kernels()));
    assert_eq!(read.get(job("two").key()), Some(made("two")));
    assert_eq!(read.get(job("three").key()), None);
}

#[test]
fn a_bundle_with_any_byte_changed_or_missing_is_refused() {
    let bytes = Bundle::new("b", [made("one")]).to_bytes().unwrap();
    for length in 0..bytes.len() {
        assert!(Bundle::from_bytes("b", &bytes[..length]).is_err(), "{length} bytes");
    }
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        assert!(Bundle::from_bytes("b", &changed).is_err(), "byte {at}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(Bundle::from_bytes("b", &longer).is_err());
}

#[test]
fn the_order_is_bundle_disk_compiler() {
    let folder = tempfile::tempdir().unwrap();
    let compiler = Counting::default();
    let uses = || compiler.0.load(Ordering::Relaxed);
    let cache = Cache::new(vec![Arc::new(Bundle::new("b", [made("one")]))], Some(folder.path()));

    let (_, from) = cache.get(&job("one"), no_compiler).unwrap();
    assert_eq!(from, Origin::Bundle("b".to_owned()));
    let (first, from) = cache.get(&job("two"), || Ok(&compiler)).unwrap();
    assert!(matches!(from, Origin::Compiler { not_kept: None, .. }), "{from}");
    let (second, from) = cache.get(&job("two"), || Ok(&compiler)).unwrap();
    assert!(matches!(from, Origin::Disk(_)), "{from}");
    assert_eq!((first, uses()), (second, 1));

    // What a bundle has not in the form that the device runs, it has not.
    let assembly = KernelJob { image: ImageKind::Assembly, ..job("one") };
    let error = cache.get(&assembly, no_compiler).unwrap_err().to_string();
    assert!(error.contains("no compiler") && error.contains("not in b (1 kernels)"), "{error}");
}

#[test]
fn another_compiler_is_another_key_on_disk() {
    struct Newer;
    impl Compiler for Newer {
        fn identity(&self) -> String {
            "counting 2".to_owned()
        }
        fn compile(&self, _: &KernelJob) -> Result<CompilerOutput> {
            Ok(CompilerOutput { machine: vec![2], ..CompilerOutput::default() })
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(Vec::new(), Some(folder.path()));
    cache.get(&job("one"), || Ok(Counting::default())).unwrap();
    let (kernel, _) = cache.get(&job("one"), || Ok(Newer)).unwrap();
    assert_eq!(kernel.machine, [2]);
}

#[test]
fn a_folder_that_cannot_be_made_costs_the_cache_and_nothing_else() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let cache = Cache::new(Vec::new(), Some(file.path()));
    let (kernel, from) = cache.get(&job("one"), || Ok(Counting::default())).unwrap();
    assert_eq!(kernel.machine, made("one").machine);
    assert!(matches!(&from, Origin::Compiler { not_kept: Some(_), .. }), "{from}");
}

#[test]
fn beyond_its_limit_the_cache_forgets_what_was_unused_for_longest() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = ["one", "two", "three"].map(made);
    let size = Bundle::new("", [Arc::clone(&kernels[0])]).to_bytes().unwrap().len() as u64;
    let disk = Disk::with_limit(folder.path(), 2 * size + 500);
    for (age, kernel) in [(300, &kernels[0]), (200, &kernels[1])] {
        disk.store(kernel).unwrap();
        let file = std::fs::OpenOptions::new().append(true).open(disk.path(kernel.key, &kernel.compiler));
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(age);
        file.unwrap().set_modified(then).unwrap();
    }
    // A use makes the older one the younger.
    assert!(disk.load(kernels[0].key, &kernels[0].compiler).is_some());
    disk.store(&kernels[2]).unwrap();
    let there = kernels.each_ref().map(|kernel| disk.load(kernel.key, &kernel.compiler).is_some());
    assert_eq!(there, [true, false, true]);
}

#[test]
fn the_table_names_each_problem_once() {
    let table = forward_table().unwrap();
    let names: std::collections::BTreeSet<_> = table.iter().map(|entry| &entry.name).collect();
    assert_eq!((names.len(), table.len()), (2160, 2160));
}
