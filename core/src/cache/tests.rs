#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::layout::KvLayout;
use crate::source::Header;

fn job(entry: &str) -> KernelJob {
    let headers =
        vec![Header::rendered("fmha/a.h", "a".to_owned()), Header::rendered("fmha/b.h", "b".to_owned())];
    KernelJob {
        kernel: "made-up",
        arch: "arch-1".to_owned(),
        flags: vec!["-x".to_owned()],
        source: KernelSource::with(entry.to_owned(), headers),
        image: ImageKind::Machine,
    }
}

/// A compiler that counts its calls and gives no assembly.
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
    let compiler = Counting::default();
    Arc::new(compile(&job, KernelName::new(job.key(), &compiler), &compiler).unwrap())
}

fn no_compiler() -> Result<&'static Counting> {
    Err(Error::NoDevice("no compiler: 0 places tried".to_owned()))
}

/// An endless file is refused by its first bytes, and bytes after a bundle are not read.
#[test]
#[cfg(target_os = "linux")]
fn a_bundle_is_read_no_further_than_its_header_says() {
    let error = Bundle::open(Path::new("/dev/zero")).unwrap_err().to_string();
    assert!(error.contains("/dev/zero") && error.contains("no bundle"), "{error}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b");
    std::fs::write(&path, Bundle::new("b", [made("one")]).to_bytes().unwrap()).unwrap();
    assert_eq!(Bundle::open(&path).unwrap().len(), 1);
    // A terabyte of zeros that takes no disk.
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    let error = Bundle::open(&path).unwrap_err().to_string();
    assert!(error.contains("bytes of"), "{error}");
}

#[test]
fn a_key_changes_with_every_input_and_with_nothing_else() {
    let base = job("entry");
    let mut others: Vec<KernelJob> = (0..7).map(|_| base.clone()).collect();
    others[0].arch = "arch-2".to_owned();
    others[1].source.entry += " ";
    others[2].flags.push("-y".to_owned());
    let with = |job: &mut KernelJob, headers: [(&'static str, &str); 2]| {
        let headers = headers.map(|(name, text)| Header::rendered(name, text.to_owned())).to_vec();
        job.source = KernelSource::with(job.source.entry.clone(), headers);
    };
    with(&mut others[3], [("fmha/a.h", "c"), ("fmha/b.h", "b")]);
    with(&mut others[4], [("fmha/a.h", "a"), ("fmha/c.h", "b")]);
    // These texts are equal when joined, but divided at another place.
    with(&mut others[5], [("fmha/a.h", ""), ("afmha/b.h", "b")]);
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
    assert_eq!(read.kernels().unwrap(), bundle.kernels().unwrap());
    assert_eq!(read.get(job("two").key()).unwrap(), Some(made("two")));
    assert_eq!(read.get(job("three").key()).unwrap(), None);
    let plain = Bundle::from_bytes("b", &bundle.to_plain_bytes().unwrap()).unwrap();
    assert_eq!(plain.kernels().unwrap(), bundle.kernels().unwrap());
}

/// Kernels are packed in frames of eight, next to similar ones; only the frame of the wanted kernel is unpacked.
#[test]
fn alike_kernels_are_packed_together_and_unpacked_when_one_is_asked_for() {
    let code: Vec<u8> = (0u32..40_000).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let kernels: Vec<_> = (0..20)
        .map(|i| {
            let mut kernel = Arc::unwrap_or_clone(made(&format!("entry {i}")));
            kernel.machine.clone_from(&code);
            kernel.machine[i * 100] ^= 1;
            Arc::new(kernel)
        })
        .collect();
    let bundle = Bundle::new("b", kernels.iter().cloned());
    let bytes = bundle.to_bytes().unwrap();
    assert!(bytes.len() < 4 * code.len(), "{} bytes", bytes.len());
    assert!(bundle.to_plain_bytes().unwrap().len() > 20 * code.len());
    let read = Bundle::from_bytes("b", &bytes).unwrap();
    assert_eq!((read.len(), read.frames_unpacked()), (20, (0, 3)));
    for kernel in &kernels {
        assert_eq!(read.get(kernel.key).unwrap().as_ref(), Some(kernel));
        assert!(read.frames_unpacked().0 > 0);
    }
    assert_eq!(read.frames_unpacked(), (3, 3));
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
    let why = |bytes: &[u8]| Bundle::from_bytes("b", bytes).unwrap_err().to_string();
    let payload = bytes.len() - 52;
    let longer = [&bytes[..], &[0, 0]].concat();
    assert!(why(&longer).ends_with(&format!("it has {} or more bytes of {payload}", payload + 1)));
    assert!(why(&bytes[..bytes.len() - 1]).ends_with(&format!("it has {} bytes of {payload}", payload - 1)));
}

#[test]
fn a_bundle_is_written_beside_where_it_will_be_and_read_back_from_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b");
    let bundle = Bundle::new("b", [made("one")]);
    bundle.write(&path).unwrap();
    let read = Bundle::open(&path).unwrap();
    assert_eq!(read.kernels().unwrap(), bundle.kernels().unwrap());
    assert_eq!([read.is_empty(), Bundle::default().is_empty()], [false, true]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    // A cache that several users share is read by all of them.
    let ordinary = folder.path().join("ordinary");
    std::fs::write(&ordinary, "").unwrap();
    let permissions = |path| std::fs::metadata(path).unwrap().permissions();
    assert_eq!(permissions(&path), permissions(&ordinary));

    // Writing fails where the folder does not exist: a temporary file elsewhere might lie on another file
    // system, from which it could not be renamed.
    let Error::System { text, .. } = bundle.write(&folder.path().join("absent/b")).unwrap_err() else {
        panic!("another kind of error");
    };
    assert!(text.contains("absent") && text.contains(bundle::UNFINISHED), "{text}");
}

#[test]
fn what_a_program_embeds_serves_caches_that_are_open_and_those_to_come() {
    let open = Cache::from_env().unwrap();
    embed(Bundle::new("embedded", [made("in the program")]));
    for cache in [open, Cache::from_env().unwrap()] {
        let (kernel, from) = cache.get(&job("in the program"), no_compiler).unwrap();
        assert_eq!((kernel, from), (made("in the program"), Origin::Bundle("embedded".to_owned())));
    }
}

#[test]
fn with_no_bundle_the_error_is_the_compilers_own() {
    let error = Cache::new(Vec::new(), None).get(&job("one"), no_compiler).unwrap_err();
    assert_eq!(error.to_string(), no_compiler().err().unwrap().to_string());
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

    // A bundle that lacks the form that the device runs counts as lacking the kernel.
    let assembly = KernelJob { image: ImageKind::Assembly, ..job("one") };
    let error = cache.get(&assembly, no_compiler).unwrap_err().to_string();
    assert!(error.contains("no compiler") && error.contains("not in b (1 kernels)"), "{error}");
}

#[test]
fn another_compiler_or_another_flag_of_its_own_is_another_kernel_on_disk() {
    struct Made(&'static str, Vec<&'static str>, u8);
    impl Compiler for Made {
        fn identity(&self) -> String {
            self.0.to_owned()
        }
        fn own_flags(&self) -> &[&str] {
            &self.1
        }
        fn compile(&self, _: &KernelJob) -> Result<CompilerOutput> {
            Ok(CompilerOutput { machine: vec![self.2], ..CompilerOutput::default() })
        }
    }
    // A compiler without own flags adds none to a job's.
    assert!(made("one").own_flags.is_empty());
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(Vec::new(), Some(folder.path()));
    let compilers = [
        Made("made 1", vec![], 1),
        Made("made 2", vec![], 2),
        Made("made 1", vec!["-z"], 3),
        Made("made 1", vec!["-z", "-y"], 4),
        Made("made 1", vec!["-z-y"], 5),
    ];
    for round in ["compiled", "disk"] {
        for compiler in &compilers {
            let (kernel, origin) = cache.get(&job("one"), || Ok(compiler)).unwrap();
            assert_eq!(kernel.machine, [compiler.2]);
            assert!(origin.to_string().starts_with(round), "{origin}");
        }
    }
}

#[test]
fn what_a_killed_writer_has_left_is_removed_and_what_a_writer_still_writes_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Disk::new(folder.path());
    disk.store(&made("one")).unwrap();
    let [orphan, young, not_ours] =
        [(".fmha-old", 3600), (".fmha-new", 5), ("notes", 3600)].map(|(name, seconds)| {
            let path = disk.folder().join(name);
            std::fs::write(&path, "half a ker").unwrap();
            age(&path, seconds);
            path
        });
    disk.store(&made("two")).unwrap();
    assert_eq!([&orphan, &young, &not_ours].map(|path| path.exists()), [false, true, true]);
}

/// A loader of tests: it counts loads, and a loaded kernel is a number.
struct Numbers {
    compiler: Counting,
    loads: AtomicU32,
    has_device: bool,
}

impl Loader for Numbers {
    type Kernel = (usize, u32);

    fn compiler(&self) -> Result<&dyn Compiler> {
        Ok(&self.compiler)
    }

    fn load(&self, image: &[u8], shared_bytes: u32) -> Result<Option<Self::Kernel>> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        Ok(self.has_device.then_some((image.len(), shared_bytes)))
    }
}

fn modules(has_device: bool, image: ImageKind) -> Modules<Numbers> {
    let target = Target { arch: "arch-1".to_owned(), flags: vec!["-x".to_owned()], image };
    let loader = Numbers { compiler: Counting::default(), loads: AtomicU32::new(0), has_device };
    Modules::new(target, loader, Cache::new(Vec::new(), None))
}

#[test]
fn whoever_wants_a_kernel_at_the_same_time_gets_the_same_one_compiled_once() {
    let modules = modules(true, ImageKind::Machine);
    let load = |shared_bytes| modules.load("made-up", job("one").source, shared_bytes).unwrap();
    let first = load(0);
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|_| scope.spawn(|| load(0))).collect();
        for module in all {
            assert!(Arc::ptr_eq(&module.join().unwrap(), &first));
        }
    });
    assert_eq!(*first.loaded().unwrap(), (300, 0));
    // Another amount of shared memory is another attribute of the function, so the driver loads another kernel.
    assert_eq!(*load(64).loaded().unwrap(), (300, 64));
    assert_eq!(modules.job("made-up", job("one").source), job("one"));
}

#[test]
fn a_loaded_kernel_is_found_by_its_entry_and_its_headers_are_not_even_made() {
    let modules = modules(true, ImageKind::Machine);
    let made = Arc::new(AtomicU32::new(0));
    let source = |entry: &str| {
        let made = Arc::clone(&made);
        KernelSource::new(entry.to_owned(), move || {
            made.fetch_add(1, Ordering::Relaxed);
            Vec::new()
        })
    };
    let load = |entry, shared_bytes| modules.load("made-up", source(entry), shared_bytes).unwrap();
    let first = load("one", 0);
    assert_eq!(made.load(Ordering::Relaxed), 1, "made once for key, compiler and dump");
    assert!(Arc::ptr_eq(&load("one", 0), &first));
    assert_eq!(made.load(Ordering::Relaxed), 1, "and not again");
    for other in [load("two", 0), load("one", 64)] {
        assert!(!Arc::ptr_eq(&other, &first));
    }
    assert_eq!(made.load(Ordering::Relaxed), 3);
}

#[test]
fn without_a_device_a_kernel_is_compiled_and_cannot_be_launched() {
    let module = modules(false, ImageKind::Machine).load("made-up", job("one").source, 0).unwrap();
    assert_eq!(module.compiled.machine.len(), 300);
    assert!(module.loaded().unwrap_err().to_string().contains("no device"));
}

#[test]
fn a_compiler_that_leaves_nothing_the_device_runs_is_said_so() {
    let error = modules(true, ImageKind::Assembly).load("made-up", job("one").source, 0).unwrap_err();
    assert!(error.to_string().contains("counting 1 left no assembly"), "{error}");
}

#[test]
fn a_comment_in_a_header_that_no_entry_includes_changes_no_key() {
    let entry = "#include <fmha/a.h>";
    let key = |unused: &str| {
        let headers = vec![
            Header::rendered("fmha/a.h", "a".to_owned()),
            Header::rendered("fmha/b.h", unused.to_owned()),
        ];
        let all = move || headers.clone();
        KernelJob { source: KernelSource::new(entry.to_owned(), all), ..job(entry) }.key()
    };
    assert_eq!(key("b"), key("b // why"));
}

#[test]
fn a_folder_that_cannot_be_made_costs_the_cache_and_nothing_else() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let cache = Cache::new(Vec::new(), Some(file.path()));
    let (kernel, from) = cache.get(&job("one"), || Ok(Counting::default())).unwrap();
    assert_eq!(kernel.machine, made("one").machine);
    assert!(matches!(&from, Origin::Compiler { not_kept: Some(_), .. }), "{from}");
}

/// Sets a file's modification time to `seconds` ago.
fn age(path: &Path, seconds: u64) {
    let then = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
    std::fs::OpenOptions::new().append(true).open(path).unwrap().set_modified(then).unwrap();
}

/// Stores a kernel as if it was last used so many seconds ago.
fn store_aged(disk: &Disk, kernel: &Arc<CompiledKernel>, seconds: u64) {
    disk.store(kernel).unwrap();
    age(&disk.path(&KernelName::of(kernel)), seconds);
}

/// Bytes of a kernel's file.
fn size_of(kernel: &Arc<CompiledKernel>) -> u64 {
    Bundle::new("", [Arc::clone(kernel)]).to_bytes_quickly().unwrap().len() as u64
}

const DAY: u64 = 24 * 60 * 60;

/// Bytes by which the file sizes of four equal kernels may differ.
const SLACK: u64 = 40;

#[test]
fn as_many_kernels_go_as_the_limit_asks_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = ["one", "two", "six", "ten"].map(made);
    let disk = Disk::new(folder.path());
    for (kernel, days) in kernels.iter().zip([4, 3, 2]) {
        store_aged(&disk, kernel, days * DAY);
    }
    let disk = Disk::with_limit(folder.path(), 2 * size_of(&kernels[0]) + SLACK);
    // A file that is not the cache's is neither counted nor removed.
    let notes = disk.folder().join("notes");
    std::fs::write(&notes, vec![0; 10_000]).unwrap();
    disk.store(&kernels[3]).unwrap();
    let there = kernels.each_ref().map(|kernel| disk.load(&KernelName::of(kernel)).is_some());
    assert_eq!((there, notes.exists()), ([false, false, true, true], true));
}

/// More kernels than fit are used in the same order twice: the second run finds as many as fit.
#[test]
fn a_second_run_of_more_kernels_than_there_is_room_for_finds_as_many_as_there_is_room_for() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> = (100..150).map(|i| format!("entry {i}")).collect();
    let room = 40;
    let size = names.iter().map(|name| size_of(&made(name))).max().unwrap();
    let disk = Disk::with_limit(folder.path(), room * size);
    let cache = Cache { disk: Some(disk.clone()), ..Cache::new(Vec::new(), None) };
    let run = || {
        let found = names.iter().map(|name| cache.get(&job(name), || Ok(Counting::default())).unwrap());
        found.fold((0, Vec::new()), |(on_disk, mut why), (kernel, from)| {
            assert_eq!(kernel.machine.len() % 100, 0);
            match from {
                Origin::Disk(_) => (on_disk + 1, why),
                Origin::Compiler { not_kept, .. } => {
                    why.extend(not_kept);
                    (on_disk, why)
                }
                Origin::Bundle(name) => panic!("{name}"),
            }
        })
    };
    let (found, why) = run();
    assert_eq!(found, 0);
    assert!(why.len() <= 10 && why[0].contains("used within 24 hours"), "{why:?}");
    let (found, _) = run();
    assert!(found >= room, "{found} of {room}");

    // 24 hours after their last use, kernels are evicted for new ones; kernels that are used meanwhile stay.
    for (at, name) in names.iter().enumerate() {
        let path = disk.path(&KernelName::of(&made(name)));
        if at % 2 == 0 && path.exists() {
            age(&path, 2 * DAY);
        }
    }
    let others: Vec<_> = (0..20).map(|i| made(&format!("other {}", 100 + i))).collect();
    others.iter().take(15).for_each(|kernel| disk.store(kernel).unwrap());
    let is_there = |name: &str| disk.load(&KernelName::of(&made(name))).is_some();
    let kept = names.iter().skip(1).step_by(2).filter(|name| is_there(name)).count();
    assert!(kept >= 20, "{kept} of those in use");
    assert!(others.iter().take(15).all(|kernel| disk.load(&KernelName::of(kernel)).is_some()));
}

/// A use with a time in the future, from a wrong clock, does not keep a kernel for ever.
#[test]
fn a_use_in_the_far_future_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["one", "two"].map(made);
    let disk = Disk::with_limit(folder.path(), size_of(&first) + SLACK);
    disk.store(&first).unwrap();
    let path = disk.path(&KernelName::of(&first));
    let then = std::time::SystemTime::now() + std::time::Duration::from_secs(365 * DAY);
    std::fs::OpenOptions::new().append(true).open(path).unwrap().set_modified(then).unwrap();
    disk.store(&second).unwrap();
    assert!(disk.load(&KernelName::of(&first)).is_none() && disk.load(&KernelName::of(&second)).is_some());
}

#[test]
fn what_an_earlier_cache_kept_unpacked_is_packed_when_it_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let kernel = made("one");
    let disk = Disk::new(folder.path());
    disk.store(&kernel).unwrap();
    let name = KernelName::of(&kernel);
    let packed = std::fs::read(disk.path(&name)).unwrap();
    let plain = Bundle::new("", [Arc::clone(&kernel)]).to_plain_bytes().unwrap();
    assert_ne!(packed, plain);
    std::fs::write(disk.path(&name), plain).unwrap();
    assert_eq!(disk.load(&name), Some(Arc::unwrap_or_clone(kernel)));
    assert_eq!(std::fs::read(disk.path(&name)).unwrap(), packed);
    // An entry of an unknown version counts as absent.
    let mut unknown = packed;
    unknown[8] = 1;
    std::fs::write(disk.path(&name), unknown).unwrap();
    assert_eq!(disk.load(&name), None);
}

/// A truncated file, a kernel under another kernel's name, and a file that is no kernel are each compiled anew and
/// replaced.
#[test]
fn a_file_that_is_cut_or_of_another_kernel_is_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(Vec::new(), Some(folder.path()));
    let [one, two] = ["one", "two"].map(made);
    let disk = Disk::new(folder.path());
    disk.store(&two).unwrap();
    let path = disk.path(&KernelName::of(&one));
    let whole = Bundle::new("", [Arc::clone(&one)]).to_bytes_quickly().unwrap();
    for wrong in [
        &whole[..whole.len() / 2],
        &[],
        b"no kernel",
        &std::fs::read(disk.path(&KernelName::of(&two))).unwrap(),
    ] {
        std::fs::write(&path, wrong).unwrap();
        let (kernel, from) = cache.get(&job("one"), || Ok(Counting::default())).unwrap();
        assert!(matches!(from, Origin::Compiler { not_kept: None, .. }), "{from}");
        assert_eq!((kernel, std::fs::read(&path).unwrap()), (Arc::clone(&one), whole.clone()));
    }
}

#[test]
#[ignore = "a process of the test below, which starts it"]
fn a_process_that_stores_beyond_the_limit() {
    let Some(folder) = std::env::var_os("CACHE_TEST_FOLDER") else { return };
    let disk = Disk::with_limit(Path::new(&folder), 10 * size_of(&made("own 100")));
    for i in 100..140 {
        let kernel = made(&format!("own {i}"));
        disk.store(&kernel).unwrap();
        // Another process may have removed this kernel to make room; a file that is there is complete.
        assert!(disk.load(&KernelName::of(&kernel)).is_none_or(|read| read == *kernel));
        let path = disk.path(&KernelName::of(&kernel));
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(2 * DAY);
        let _ = std::fs::OpenOptions::new().append(true).open(path).and_then(|file| file.set_modified(then));
    }
}

#[test]
fn processes_that_make_room_at_once_keep_what_there_is_room_for() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        let mut process = std::process::Command::new(std::env::current_exe().unwrap());
        process.args(["cache::tests::a_process_that_stores_beyond_the_limit", "--exact", "--ignored"]);
        process.env("CACHE_TEST_FOLDER", folder.path()).stdout(std::process::Stdio::piped());
        process.stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    for process in [start(), start(), start()] {
        let output = process.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
    let disk = Disk::new(folder.path());
    let whole = (100..140).filter(|i| disk.load(&KernelName::of(&made(&format!("own {i}")))).is_some());
    let (whole, files) = (whole.count(), std::fs::read_dir(disk.folder()).unwrap().count());
    assert_eq!(whole, files, "files that are no whole kernels");
    // Each process may write a kernel that the others have not yet counted, and each then makes room for its own.
    assert!((7..=13).contains(&whole), "{whole} of 10");
}

#[test]
fn who_holds_a_kernels_lock_holds_it_alone_until_it_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Disk::new(folder.path());
    let lock = disk.lock(&KernelName::of(&made("one")), |line| panic!("{line}")).unwrap();
    let file = std::fs::read_dir(disk.folder()).unwrap().next().unwrap().unwrap().path();
    let other = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    assert!(matches!(other.try_lock(), Err(std::fs::TryLockError::WouldBlock)));
    drop(lock);
    other.try_lock().unwrap();
}

fn patience(says: u64, ends: u64) -> Patience {
    let [says_after, ends_after] = [says, ends].map(std::time::Duration::from_millis);
    Patience { says_after, ends_after }
}

#[test]
fn a_lock_that_stays_held_is_named_once_and_then_gone_without() {
    let folder = tempfile::tempdir().unwrap();
    let name = KernelName::of(&made("one"));
    let disk = Disk::with_patience(folder.path(), patience(20, 120));
    let held = disk.lock(&name, |line| panic!("{line}")).unwrap();
    let (start, mut lines) = (std::time::Instant::now(), Vec::new());
    assert!(disk.lock(&name, |line| lines.push(line.to_owned())).is_none());
    let waited = start.elapsed().as_millis();
    assert!((120..60_000).contains(&waited), "{waited} ms");
    let path = disk.lock_path(&name).display().to_string();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines.iter().all(|line| line.contains(&path)), "{lines:?}");

    // The full search: the kernel is compiled, and stored for later processes.
    let cache = Cache { disk: Some(disk.clone()), ..Cache::new(Vec::new(), None) };
    let (kernel, from) = cache.get(&job("one"), || Ok(Counting::default())).unwrap();
    assert_eq!(kernel, made("one"));
    assert!(matches!(from, Origin::Compiler { not_kept: None, .. }), "{from}");
    let (_, from) = cache.get(&job("one"), || Ok(Counting::default())).unwrap();
    assert!(matches!(from, Origin::Disk(_)), "{from}");
    drop(held);
    assert!(disk.lock(&name, |line| panic!("{line}")).is_some());
}

#[test]
fn a_lock_that_is_released_in_time_is_had_and_no_word_said_before_it_is_time() {
    let folder = tempfile::tempdir().unwrap();
    let name = KernelName::of(&made("one"));
    let disk = Disk::with_patience(folder.path(), patience(60_000, 120_000));
    let held = disk.lock(&name, |line| panic!("{line}")).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| disk.lock(&name, |line| panic!("{line}")).is_some());
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(!waiting.is_finished());
        drop(held);
        assert!(waiting.join().unwrap());
    });
    let Patience { says_after, ends_after } = Patience::USUAL;
    assert_eq!([says_after, ends_after].map(|time| time.as_secs()), [5, 60]);
}

#[test]
fn beyond_its_limit_the_cache_forgets_what_was_unused_for_longest() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = ["one", "two", "three"].map(made);
    let disk = Disk::with_limit(folder.path(), 2 * size_of(&kernels[0]) + SLACK);
    store_aged(&disk, &kernels[0], 4 * DAY);
    store_aged(&disk, &kernels[1], 3 * DAY);
    // Using the older kernel makes it the younger one.
    assert!(disk.load(&KernelName::of(&kernels[0])).is_some());
    disk.store(&kernels[2]).unwrap();
    let there = kernels.each_ref().map(|kernel| disk.load(&KernelName::of(kernel)).is_some());
    assert_eq!(there, [true, false, true]);
}

#[test]
fn a_dump_has_source_log_resources_and_metadata() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache { dump: Some(folder.path().to_owned()), ..Cache::new(Vec::new(), None) };
    cache.get(&job("one"), || Ok(Counting::default())).unwrap();
    let kernel = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    assert!(kernel.file_name().unwrap().to_string_lossy().starts_with("made-up-arch-1-"));
    let read = |name: &str| std::fs::read_to_string(kernel.join(name)).unwrap();
    assert_eq!(
        (read("entry.txt").as_str(), read("fmha/a.h").as_str(), read("log.txt").as_str()),
        ("one", "a", "fine")
    );
    let about = read("about.txt");
    for word in ["made-up", "arch-1", "counting 1", "-x", &job("one").key().hex(), "300 bytes", "not known"] {
        assert!(about.contains(word), "{about}");
    }
}

#[test]
fn the_table_names_each_problem_once() {
    let table = forward_table().unwrap();
    let names: std::collections::BTreeSet<_> = table.iter().map(|entry| &entry.name).collect();
    assert_eq!((names.len(), table.len()), (3888, 3888));
    let backward = backward_table().unwrap();
    let names: std::collections::BTreeSet<_> = backward.iter().map(|entry| &entry.name).collect();
    assert_eq!((names.len(), backward.len()), (1944, 1944));
}

#[test]
fn each_problem_of_the_table_is_what_its_name_says() {
    for TableEntry { name, problem } in forward_table().unwrap() {
        let dims = problem.dims;
        let mask = match problem.mask.to_string().as_str() {
            "0" => "full",
            "b" => "causal",
            "b:512,0" => "window",
            other => panic!("{name}: {other}"),
        };
        let said = format!(
            "{}/d{}x{}/{mask}/{}/{}/q{}k{}/gqa{}",
            problem.dtypes.qk,
            dims.head_dim_qk,
            dims.head_dim_v,
            if problem.layout.kv == KvLayout::Packed { "group" } else { "batch" },
            if problem.write_lse { "lse" } else { "no-lse" },
            dims.seqlen_q,
            dims.seqlen_k,
            problem.gqa_ratio()
        );
        assert_eq!(name, said);
    }
}

#[test]
fn remarks_are_the_lines_in_which_a_compiler_says_that_speed_is_lost() {
    let log = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized\n\
               ptxas info    : Used 168 registers\n  ptxas warning : setmaxnreg ignored\n";
    let compiled = made("entry");
    let said = CompiledKernel { log: log.to_owned(), ..CompiledKernel::clone(&compiled) }.remarks();
    assert_eq!(said.lines().count(), 2, "{said}");
    assert!(said.contains("serialized") && said.contains("setmaxnreg ignored"), "{said}");
    assert_eq!(compiled.remarks(), "", "{}", compiled.log);
}
