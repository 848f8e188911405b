//! Installs the C library under a prefix, for a package manager: the header, the shared and static library with the
//! links that a linker and a loader need, and the file for pkg-config. `cargo xtask c-install` and the tests share this
//! file.

use std::fs;
use std::io::{Error, ErrorKind, Result};
use std::path::Path;

/// Libraries that the static library needs: `rustc --print native-static-libs` on Linux.
const STATIC_LIBRARIES: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// The numbers of a version that a program is bound to: before 1.0 the minor one too.
fn abi(version: &str) -> Option<&str> {
    let (major, rest) = version.split_once('.')?;
    let (minor, _) = rest.split_once('.')?;
    Some(if major == "0" { &version[..major.len() + 1 + minor.len()] } else { major })
}

/// Version of the workspace, for any crate that includes this file.
fn version(source: &Path) -> Result<String> {
    let manifest = source.join("../../Cargo.toml");
    let text = fs::read_to_string(&manifest).map_err(|error| at(&manifest, &error))?;
    let package = text.split("[workspace.package]").nth(1).unwrap_or_default();
    let line = package.lines().find_map(|line| line.strip_prefix("version = "));
    let version = line.map(|version| version.trim_matches('"').to_owned());
    version.ok_or_else(|| at(&manifest, &Error::new(ErrorKind::InvalidData, "the workspace has no version")))
}

/// Installs the libraries that lie in `built` with the header `fmha.h` of `source`, the folder `bindings/c`.
/// `prefix` may be moved afterwards.
///
/// # Errors
/// What cannot be read or written, with its path.
pub(crate) fn install(prefix: &Path, built: &Path, source: &Path) -> Result<()> {
    let version = version(source)?;
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    let pkgconfig = lib.join("pkgconfig");
    for folder in [&include, &pkgconfig] {
        fs::create_dir_all(folder).map_err(|error| at(folder, &error))?;
    }
    copy(&source.join("fmha.h"), &include.join("fmha.h"))?;
    copy(&built.join("libfmha_c.a"), &lib.join("libfmha.a"))?;
    let shared = format!("libfmha.so.{version}");
    copy(&built.join("libfmha_c.so"), &lib.join(&shared))?;
    let abi = abi(&version).ok_or_else(|| Error::new(ErrorKind::InvalidData, version.clone()))?;
    for name in [format!("libfmha.so.{abi}"), "libfmha.so".to_owned()] {
        link(&shared, &lib.join(name))?;
    }
    let file = pkgconfig.join("fmha.pc");
    fs::write(&file, pkg_config(&version)).map_err(|error| at(&file, &error))
}

fn pkg_config(version: &str) -> String {
    format!(
        "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\nName: fmha\n\
         Description: Fused multi-head attention on NVIDIA, AMD and the CPU\n\
         URL: https://github.com/fmha-rs/fmha\nVersion: {version}\n\
         Libs: -L${{libdir}} -lfmha\nLibs.private: {STATIC_LIBRARIES}\nCflags: -I${{includedir}}\n"
    )
}

/// Writes a new file instead of overwriting the old one, since a running program may have mapped the old one.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let _ = fs::remove_file(to);
    fs::copy(from, to).map(|_| ()).map_err(|error| at(from, &error))
}

fn link(to: &str, name: &Path) -> Result<()> {
    let _ = fs::remove_file(name);
    #[cfg(unix)]
    let made = std::os::unix::fs::symlink(to, name);
    #[cfg(not(unix))]
    let made = Err(Error::new(ErrorKind::Unsupported, format!("no link to {to}: only Unix is installed to")));
    made.map_err(|error| at(name, &error))
}

fn at(path: &Path, error: &Error) -> Error {
    Error::new(error.kind(), format!("{}: {error}", path.display()))
}
