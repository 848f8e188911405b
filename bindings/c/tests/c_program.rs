//! The shared library as C and C++ programs meet it: every field of every struct, the installed library, the examples.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../install.rs"]
mod install;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Folder of the built libraries, which is that of the test programs.
fn built() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    for library in ["libfmha_c.so", "libfmha_c.a"] {
        let library = folder.join(library);
        assert!(library.is_file(), "{} is not there", library.display());
    }
    folder
}

fn source() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library, installed under a prefix of its own.
struct Installed(TempDir);

impl Installed {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        install::install(&folder.path().join("prefix"), &built(), source()).unwrap();
        Self(folder)
    }

    fn lib(&self) -> PathBuf {
        self.0.path().join("prefix/lib")
    }

    /// Output of pkg-config; `None` if it is missing.
    fn flags(&self, words: &[&str]) -> Option<Vec<String>> {
        let asked = Command::new("pkg-config")
            .args(words)
            .arg("fmha")
            .env("PKG_CONFIG_PATH", self.lib().join("pkgconfig"))
            .output();
        let Ok(asked) = asked else {
            println!("absent: what pkg-config says of the installed library: there is no pkg-config");
            return None;
        };
        assert!(asked.status.success(), "{}", said(&asked));
        Some(said(&asked).split_whitespace().map(str::to_owned).collect())
    }

    /// Path of the program that `compiler` builds from `source`.
    fn compiled(&self, compiler: &str, source: &Path, words: &[String]) -> PathBuf {
        let program = self.0.path().join(source.file_stem().unwrap());
        let compiled = Command::new(compiler)
            .args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"])
            .args([&program, source])
            .args(words)
            .output();
        // Linking a Rust program needs a C compiler, so a missing one is a broken machine and not a reason to
        // pass.
        let compiled = compiled.unwrap_or_else(|error| panic!("{compiler}: {error}"));
        assert!(compiled.status.success(), "{}", said(&compiled));
        program
    }

    fn run(&self, program: &Path, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(words).env("LD_LIBRARY_PATH", self.lib());
        command
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn compiler(variable: &str, otherwise: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| otherwise.to_owned())
}

/// The structs of `fmha.h`, each with its fields: the type and the name.
fn structs() -> Vec<(String, Vec<(String, String)>)> {
    let header = std::fs::read_to_string(source().join("fmha.h")).unwrap();
    let field = |line: &str| {
        let line = line.trim().strip_suffix(';').filter(|line| !line.starts_with("//"))?;
        let line = line.split('[').next()?;
        let at = line.rfind([' ', '*'])? + 1;
        Some((line[..at].trim().to_owned(), line[at..].to_owned()))
    };
    let bodies = header.split("typedef struct ").skip(1).filter_map(|text| text.split_once(" {\n"));
    let bodies = bodies.filter(|(name, _)| !name.contains([' ', ';']));
    bodies
        .map(|(name, body)| {
            (name.to_owned(), body.split("\n}").next().unwrap().lines().filter_map(field).collect())
        })
        .collect()
}

/// Tables of fields for `every_field.c`, which says of each struct named here itself how its errors name a field.
fn tables() -> String {
    const OWN: [&str; 5] = ["FmhaLists", "FmhaMasks", "FmhaBlockScales", "FmhaCaptured", "FmhaCapturedArgs"];
    let kind = |of: &str, kind: &str, field: &str| match (of, field) {
        (_, "struct_bytes") => "BYTES",
        (_, "softmax_scale" | "softcap") => "NUMBER",
        (_, "captured" | "parts") | ("FmhaArgs", "second") => "POINTER",
        // A mask object that is none is not to be told from one: `built_masks` tries it. Scales of a cache are not
        // read where scale_block is 0: the library's own tests make them wrong.
        (_, "stream" | "built" | "dropout_seed" | "dropout_offset")
        | ("FmhaCache", "k_scale" | "v_scale")
        | ("FmhaIndexLoss", "dloss" | "loss" | "dq" | "dk" | "dweights" | "workspace" | "workspace_bytes") => {
            "FREE"
        }
        (_, "workspace_bytes") => "MORE",
        _ => match kind {
            "int32_t" => "CODE",
            "float" => "PROBABILITY",
            "int64_t" if of.ends_with("Args") => "MORE",
            "int64_t" => "SIZE",
            "const char *" => "TEXT",
            "struct FmhaStrides" => "STRIDE",
            // Structs with tables of their own.
            _ if kind.contains("struct Fmha") => "FREE",
            _ => "POINTER",
        },
    };
    let mut text = String::new();
    for (of, fields) in structs().iter().filter(|(of, _)| !OWN.contains(&&**of)) {
        text += &format!("__attribute__((unused)) static const Field {of}_FIELDS[] = {{\n");
        for (of_type, field) in fields {
            text += &format!("  FIELD({of}, {field}, {}),\n", kind(of, of_type, field));
        }
        text += "};\n";
    }
    text
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "links as ELF does")]
fn a_c_program_that_changes_any_field_is_refused_by_its_name() {
    let installed = Installed::new();
    let library = installed.lib().join("libfmha.so").display().to_string();
    std::fs::write(installed.0.path().join("fields.h"), tables()).unwrap();
    let words = ["-std=c11".to_owned(), format!("-I{}", installed.0.path().display()), library];
    let program = installed.compiled(&compiler("CC", "cc"), &source().join("tests/every_field.c"), &words);
    let ran = installed.run(&program, &[]).output().unwrap();
    let text = said(&ran);
    assert!(ran.status.success(), "{text}");
    let tried: u32 = text.split_whitespace().next().unwrap().parse().unwrap();
    assert!(tried > 120, "{text}");
}

/// A program finds the library by the name that it was linked to, and this one has a version in it: a library
/// whose structs have other sizes has another name.
#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "links as ELF does")]
fn an_installed_library_is_found_by_a_name_with_its_abi_alone() {
    let installed = Installed::new();
    let version = env!("CARGO_PKG_VERSION");
    let abi = version.rsplit_once('.').unwrap().0;
    assert_eq!(installed.flags(&["--modversion"]).unwrap_or_else(|| vec![version.to_owned()]), [version]);
    let library = std::fs::read(installed.lib().join("libfmha.so")).unwrap();
    let soname = format!("\0libfmha.so.{abi}\0");
    // `cargo xtask c-install` shares the code of `install.rs`, but has another version.
    assert!(!include_str!("../install.rs").contains("CARGO_PKG_VERSION"), "of whichever crate compiles it");
    assert!(library.windows(soname.len()).any(|bytes| bytes == soname.as_bytes()), "no {soname:?}");

    let Some(flags) = installed.flags(&["--cflags", "--libs"]) else { return };
    let words: Vec<String> = flags.into_iter().chain(["-lm".to_owned()]).collect();
    let example = source().join("examples/first_call.c");
    let program = installed.compiled(&compiler("CC", "cc"), &example, &words);
    // Removes the link for the compiler; the link for the loader stays.
    std::fs::remove_file(installed.lib().join("libfmha.so")).unwrap();
    let ran = installed.run(&program, &["cpu"]).output().unwrap();
    assert!(ran.status.success(), "{}", said(&ran));
    std::fs::remove_file(installed.lib().join(format!("libfmha.so.{abi}"))).unwrap();
    let ran = installed.run(&program, &["cpu"]).output().unwrap();
    assert!(!ran.status.success() && said(&ran).contains(&format!("libfmha.so.{abi}")), "{}", said(&ran));
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "links as ELF does")]
fn the_static_library_needs_what_its_pkg_config_file_says_and_nothing_else() {
    let installed = Installed::new();
    let Some(flags) = installed.flags(&["--static", "--cflags", "--libs"]) else { return };
    // A linker prefers the shared library if a folder has both, so it is removed here.
    std::fs::remove_file(installed.lib().join("libfmha.so")).unwrap();
    let example = source().join("examples/first_call.c");
    let program = installed.compiled(&compiler("CC", "cc"), &example, &flags);
    let ran = Command::new(&program).arg("cpu").env_remove("LD_LIBRARY_PATH").output().unwrap();
    assert!(ran.status.success(), "{}", said(&ran));
}

/// Runs an example on the CPU and on an emulated Hopper: it compares its results with double, and says PASS.
fn passes_on_every_device(compiler: &str, example: &str, words: &[&str]) {
    let installed = Installed::new();
    let Some(flags) = installed.flags(&["--cflags", "--libs"]) else { return };
    let words: Vec<String> = words.iter().map(|&word| word.to_owned()).chain(flags).collect();
    // The order of the example's own first lines, in which -lm stands last.
    let words: Vec<String> = words.into_iter().chain(["-lm".to_owned()]).collect();
    let program = installed.compiled(compiler, &source().join("examples").join(example), &words);
    let on_cpu = installed.run(&program, &["cpu"]).output().unwrap();
    let text = said(&on_cpu);
    assert!(on_cpu.status.success() && text.contains("PASS") && text.contains("cpu"), "{text}");

    let refused = installed.run(&program, &["tpu"]).output().unwrap();
    assert!(!refused.status.success() && said(&refused).contains("tpu"), "{}", said(&refused));

    let emulated = installed.run(&program, &["auto"]).env("FMHA_EMULATE", "sm_90a").output().unwrap();
    let text = said(&emulated);
    // The test is skipped if the emulator's library or the kernels' compiler is missing.
    if !emulated.status.success() && (text.contains("no emulated device") || text.contains("NVRTC")) {
        println!("absent: {example} on an emulated sm_90a: {text}");
        return;
    }
    assert!(emulated.status.success() && text.contains("PASS") && text.contains("sm90"), "{text}");
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "links as ELF does")]
fn the_example_in_c_is_right_on_the_cpu_and_on_an_emulated_hopper() {
    passes_on_every_device(&compiler("CC", "cc"), "first_call.c", &["-std=c11"]);
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "links as ELF does")]
fn the_example_of_a_score_and_a_mask_is_right() {
    let installed = Installed::new();
    let Some(flags) = installed.flags(&["--cflags", "--libs"]) else { return };
    let words: Vec<String> = flags.into_iter().chain(["-lm".to_owned()]).collect();
    let example = source().join("examples/score_and_mask.c");
    let program = installed.compiled(&compiler("CC", "cc"), &example, &words);
    let ran = installed.run(&program, &[]).output().unwrap();
    assert!(ran.status.success() && said(&ran).contains("PASS"), "{}", said(&ran));
}

#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "links as ELF does")]
fn the_example_in_cpp_is_right_on_the_cpu_and_on_an_emulated_hopper() {
    let cpp = compiler("CXX", "c++");
    if Command::new(&cpp).arg("--version").output().is_err() {
        println!("absent: the example in C++: there is no {cpp}");
        return;
    }
    passes_on_every_device(&cpp, "gradients.cpp", &["-std=c++17"]);
}

/// Two processes that find each other by a file: each result is compared with that of one process.
#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "links as ELF does")]
fn the_example_over_two_processes_is_right_on_both() {
    let installed = Installed::new();
    let Some(flags) = installed.flags(&["--cflags", "--libs"]) else { return };
    let words: Vec<String> =
        ["-std=c11".to_owned()].into_iter().chain(flags).chain(["-lm".to_owned()]).collect();
    let program = installed.compiled(&compiler("CC", "cc"), &source().join("examples/ranks.c"), &words);
    let address = format!("file:{}", installed.0.path().join("rendezvous").display());
    let start = |rank: &str| {
        let piped = std::process::Stdio::piped;
        installed.run(&program, &[rank, "2", &address]).stdout(piped()).stderr(piped()).spawn().unwrap()
    };
    let ranks = ["0", "1"].map(start);
    let said = ranks.map(|rank| {
        let ran = rank.wait_with_output().unwrap();
        assert!(ran.status.success(), "{}", said(&ran));
        said(&ran)
    });
    assert!(said[0].contains("scheme ") && said[0].contains("rank 0: 25 of 51 rows"), "{}", said[0]);
    assert!(said[1].contains("rank 1: 26 of 51 rows") && said[1].contains("PASS"), "{}", said[1]);
}

#[test]
#[ignore = "cargo-c builds every crate once more"]
fn cargo_c_installs_what_xtask_does() {
    let cargo = || Command::new(env!("CARGO"));
    if !cargo().args(["cinstall", "--version"]).output().is_ok_and(|asked| asked.status.success()) {
        println!("absent: what cargo-c installs: there is no cargo-c");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let ours = Installed::new();
    let installed = cargo()
        .args(["cinstall", "--release", "--package", "fmha-c", "--libdir", "lib", "--prefix"])
        .arg(folder.path())
        .current_dir(source())
        .output()
        .unwrap();
    assert!(installed.status.success(), "{}", said(&installed));
    let version = env!("CARGO_PKG_VERSION");
    for file in
        ["include/fmha.h", "lib/pkgconfig/fmha.pc", "lib/libfmha.a", &format!("lib/libfmha.so.{version}")]
    {
        assert!(ours.0.path().join("prefix").join(file).is_file(), "xtask: no {file}");
        assert!(folder.path().join(file).is_file(), "cargo-c: no {file}");
    }
}

/// The adapter of the comparison kit (`bench/ours.py`) and Python's calls over ranks repeat the definitions of the
/// structs.
#[test]
fn what_python_spells_of_the_structs_has_the_headers_fields_in_their_order() {
    let structs = structs();
    let adapter = std::fs::read_to_string(source().join("../../bench/ours.py")).unwrap();
    let ranks = std::fs::read_to_string(source().join("../python/fmha/_c.py")).unwrap();
    let both = ["FmhaStrides", "FmhaGradients", "FmhaProblem", "FmhaArgs", "FmhaOptions"];
    let ours = both.into_iter().chain(["FmhaCache", "FmhaPart", "FmhaLists"]);
    let python = both.into_iter().chain([
        "FmhaJoin",
        "FmhaRun",
        "FmhaRanks",
        "FmhaMasks",
        "FmhaCaptured",
        "FmhaCode",
        "FmhaCapturedArgs",
    ]);
    let all = ours.map(|name| (name, &adapter)).chain(python.map(|name| (name, &ranks)));
    for (name, adapter) in all {
        let (_, fields) = structs.iter().find(|(of, _)| of == name).unwrap();
        let fields: Vec<&str> = fields.iter().map(|(_, field)| &**field).collect();
        let class = adapter.split(&format!("class {name}(Structure):")).nth(1).unwrap();
        let class = class.split("\n\n").next().unwrap();
        let quoted: Vec<&str> = class.split('"').skip(1).step_by(2).flat_map(str::split_whitespace).collect();
        assert_eq!(quoted, fields, "{name}");
    }
}
