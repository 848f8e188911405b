//! Packages that a registry would be given: every crate packed, whole, with what a registry shows, and enough
//! to build a program from.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Crates that are not published: the tests' own program, and the Python package's library, which a wheel
/// carries.
const UNPUBLISHED: [&str; 2] = ["xtask", "fmha-py"];

/// Folders of text that is compiled on a user's machine: a missing file there is no error for the Rust compiler.
const DEVICE_TEXT: [(&str, &str); 3] = [
    ("fmha-core", "core/device"),
    ("fmha-kernels-cuda", "kernels-cuda/fmha"),
    ("fmha-kernels-hip", "kernels-hip/fmha"),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn target() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().join("packages")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Unpacked packages, or the reason why Cargo can not make them here.
fn packages() -> Result<&'static [PathBuf], &'static str> {
    static PACKAGES: OnceLock<Result<Vec<PathBuf>, String>> = OnceLock::new();
    PACKAGES.get_or_init(packed).as_deref().map_err(String::as_str)
}

fn packed() -> Result<Vec<PathBuf>, String> {
    let folder = target().join("package");
    // Packages of an earlier version must not be taken for this version's.
    let _ = std::fs::remove_dir_all(&folder);
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["package", "--workspace", "--no-verify", "--allow-dirty", "--target-dir"]).arg(target());
    for name in UNPUBLISHED {
        cargo.args(["--exclude", name]);
    }
    let output = cargo.current_dir(root()).output().unwrap();
    let text = said(&output);
    if !output.status.success() {
        // Cargo looks up the versions of other crates in the registry's index. These words in its output show
        // that the index was out of reach.
        let offline =
            ["failed to download", "Could not resolve", "spurious network error", "failed to query"];
        if offline.iter().any(|words| text.contains(words)) {
            return Err(text);
        }
        panic!("cargo package: {text}");
    }
    assert!(!text.contains("warning"), "{text}");
    let mut unpacked = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "crate") {
            let ran = Command::new("tar").arg("xzf").arg(&path).arg("-C").arg(&folder).output().unwrap();
            assert!(ran.status.success(), "{}", said(&ran));
            unpacked.push(path.with_extension(""));
        }
    }
    unpacked.sort();
    Ok(unpacked)
}

fn manifest(package: &Path) -> toml::Table {
    std::fs::read_to_string(package.join("Cargo.toml")).unwrap().parse().unwrap()
}

fn name_of(manifest: &toml::Table) -> String {
    manifest["package"]["name"].as_str().unwrap().to_owned()
}

#[test]
fn every_crate_is_packed_with_what_a_registry_shows_and_its_device_text() {
    let packages = match packages() {
        Ok(packages) => packages,
        Err(reason) => return println!("absent: what cargo package makes: {reason}"),
    };
    let mut names = BTreeSet::new();
    for package in packages {
        let manifest = manifest(package);
        let name = name_of(&manifest);
        for field in
            ["description", "license", "repository", "readme", "keywords", "categories", "rust-version"]
        {
            let value = manifest["package"].get(field);
            assert!(value.is_some_and(|value| value.is_str() || value.is_array()), "{name} has no {field}");
        }
        assert!(package.join(manifest["package"]["readme"].as_str().unwrap()).is_file(), "{name}: readme");
        assert!(package.join("LICENSE-MIT").is_file(), "{name}: no licence");
        // Packages must not depend on each other by a path. A dependency without a version belongs to the tests only.
        for dependencies in ["dependencies", "dev-dependencies", "build-dependencies"] {
            for (other, wanted) in
                manifest.get(dependencies).and_then(|all| all.as_table()).into_iter().flatten()
            {
                assert!(wanted.get("path").is_none(), "{name}: {other} by path");
                assert!(
                    wanted.is_str() || wanted.get("version").is_some(),
                    "{name}: {other} without version"
                );
            }
        }
        names.insert(name);
    }
    assert_eq!(names, members(), "packed, and what there is");
    for (name, folder) in DEVICE_TEXT {
        let package = packages.iter().find(|package| name_of(&manifest(package)) == name).unwrap();
        let (_, inside) = folder.split_once('/').unwrap();
        let (here, there) = (files(&root().join(folder)), files(&package.join(inside)));
        assert!(!here.is_empty(), "{folder} is empty");
        assert_eq!(there, here, "{name}: {inside}");
    }
}

/// Crates of this workspace that are published according to their manifests.
fn members() -> BTreeSet<String> {
    let workspace = manifest(root());
    let members = workspace["workspace"]["members"].as_array().unwrap();
    let names = members.iter().map(|member| name_of(&manifest(&root().join(member.as_str().unwrap()))));
    names.filter(|name| !UNPUBLISHED.contains(&name.as_str())).collect()
}

/// Files below a folder, by their paths relative to it.
fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).unwrap().flatten() {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            } else {
                found.insert(entry.path().strip_prefix(folder).unwrap().to_owned());
            }
        }
    }
    found
}

/// Program of a user: it computes attention on the CPU, and gets the text of both vendors' kernels.
const PROGRAM: &str = r#"
use fmha::{Attention, Dims, MaskSpec, bf16};

fn main() -> Result<(), fmha::Error> {
    let dims = Dims {
        batch: 1, seqlen_q: 3, seqlen_k: 3, num_heads_q: 1, num_heads_kv: 1, head_dim_qk: 8, head_dim_v: 8,
    };
    let ones = vec![bf16::ONE; 24];
    let result = fmha::attention(&ones, &ones, &ones, &Attention::new(dims).mask(MaskSpec::CAUSAL))?;
    assert!(result.o.iter().all(|o| *o == bf16::ONE));
    println!("{} {}", fmha_kernels_cuda::headers().len(), fmha_kernels_hip::headers().len());
    Ok(())
}
"#;

#[test]
#[ignore = "every crate is built once more"]
fn the_packages_alone_make_a_program_with_its_device_text() {
    let packages = match packages() {
        Ok(packages) => packages,
        Err(reason) => return println!("absent: a program made of what cargo package makes: {reason}"),
    };
    let folder = target().join("program");
    std::fs::create_dir_all(folder.join("src")).unwrap();
    let mut text =
        "[workspace]\n[package]\nname = \"program\"\nedition = \"2024\"\n[dependencies]\n".to_owned();
    for name in ["fmha", "fmha-kernels-cuda", "fmha-kernels-hip"] {
        text += &format!("{name} = \"{}\"\n", env!("CARGO_PKG_VERSION"));
    }
    text += "[patch.crates-io]\n";
    for package in packages {
        text += &format!("{} = {{ path = {package:?} }}\n", name_of(&manifest(package)));
    }
    std::fs::write(folder.join("Cargo.toml"), text).unwrap();
    std::fs::write(folder.join("src/main.rs"), PROGRAM).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--quiet", "--target-dir"]).arg(target().join("built")).current_dir(&folder);
    // The environment is that of a machine without a device.
    let ran = cargo.env_remove("FMHA_EMULATE").output().unwrap();
    assert!(ran.status.success(), "{}", said(&ran));
    let counts = String::from_utf8_lossy(&ran.stdout).into_owned();
    let counts: Vec<usize> = counts.split_whitespace().map(|count| count.parse().unwrap()).collect();
    assert!(counts.len() == 2 && counts.iter().all(|&count| count > 10), "{counts:?}");
}
