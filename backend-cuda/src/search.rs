//! Search for NVIDIA's libraries that do not come with the driver: in `CUDA_HOME`, in the `nvidia` packages of
//! PyTorch's wheels (of the virtual environment, of each Python on the path, of the user and the system), and last
//! on the loader's path. `FMHA_NVRTC` sets NVRTC's path.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use fmha_core::env;
use fmha_core::error::Result;

/// NVRTC's names, the newest first.
const NVRTC: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Every place to search for NVRTC, in the order above.
///
/// # Errors
/// A value of `FMHA_NVRTC` that is not UTF-8.
pub(crate) fn nvrtc() -> Result<Vec<PathBuf>> {
    if let Some(path) = env::NVRTC.get()? {
        // A path that the user has set is used without any check.
        return Ok(vec![PathBuf::from(path)]);
    }
    Ok(libraries(&NVRTC))
}

/// Paths of a library by its names, the newest first: in installations, then on the loader's path.
pub(crate) fn libraries(names: &[&str]) -> Vec<PathBuf> {
    let found = installed(names, &|name| std::env::var_os(name), Path::new("/"));
    found.into_iter().chain(names.iter().map(PathBuf::from)).collect()
}

/// Paths of the libraries below the file system's `root` where toolkits and Python packages install them.
fn installed(names: &[&str], variable: &dyn Fn(&str) -> Option<OsString>, root: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(variable(name).map(|home| Path::new(&home).join("lib64")));
    }
    for prefix in python_prefixes(variable, root) {
        folders.extend(site_folders(&prefix).iter().flat_map(|site| packages(site)));
        // Folder of conda's own packages.
        folders.push(prefix.join("lib"));
    }
    let paths = variable("PYTHONPATH").unwrap_or_default();
    folders.extend(std::env::split_paths(&paths).flat_map(|site| packages(&site)));
    folders.push(root.join("usr/local/cuda/lib64"));
    let mut found: Vec<PathBuf> = Vec::new();
    for path in folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name))) {
        if path.exists() && !found.contains(&path) {
            found.push(path);
        }
    }
    found
}

/// The Python installations that a program started here would most likely use, in that order. No Python is run.
fn python_prefixes(variable: &dyn Fn(&str) -> Option<OsString>, root: &Path) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).map(PathBuf::from).collect();
    // An environment that is used without activation is found by the Python on the path alone.
    let path = variable("PATH").unwrap_or_default();
    let with_python = std::env::split_paths(&path).filter(|folder| folder.join("python3").exists());
    prefixes.extend(with_python.filter_map(|folder| folder.parent().map(Path::to_owned)));
    prefixes.extend(variable("PYTHONUSERBASE").map(PathBuf::from));
    prefixes.extend(variable("HOME").map(|home| Path::new(&home).join(".local")));
    prefixes.extend(["usr/local", "usr"].map(|folder| root.join(folder)));
    prefixes
}

/// `lib/python3.12/site-packages` and the like, below an installation of Python.
fn site_folders(prefix: &Path) -> Vec<PathBuf> {
    let is_python =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"));
    let versions = ["lib", "lib64"].into_iter().flat_map(|lib| subfolders(&prefix.join(lib)));
    versions
        .filter(is_python)
        .flat_map(|python| ["site-packages", "dist-packages"].map(|site| python.join(site)))
        .collect()
}

/// Library folders of the vendor's packages, such as `nvidia/cu13/lib` and `nvidia/cuda_nvrtc/lib`.
fn packages(site: &Path) -> Vec<PathBuf> {
    subfolders(&site.join("nvidia")).into_iter().map(|package| package.join("lib")).collect()
}

/// Subfolders of a folder, by name; empty if there is no such folder.
fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_place_is_looked_at_and_each_has_a_name() {
        let places = nvrtc().unwrap();
        assert!(!places.is_empty() && places.iter().all(|path| !path.as_os_str().is_empty()));
    }

    /// Creates an empty file below `root`, together with its folders.
    fn put(root: &Path, name: &str) -> PathBuf {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "").unwrap();
        path
    }

    #[test]
    fn the_library_is_found_beside_torch_in_each_sort_of_python_installation() {
        let wheel = "lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
        for (variable, value, file) in [
            ("CUDA_HOME", "toolkit", "toolkit/lib64/libnvrtc.so.12"),
            ("CUDA_PATH", "toolkit", "toolkit/lib64/libnvrtc.so"),
            ("VIRTUAL_ENV", "venv", &format!("venv/{wheel}")),
            ("VIRTUAL_ENV", "venv", "venv/lib64/python3.13t/site-packages/nvidia/cu13/lib/libnvrtc.so.13"),
            ("CONDA_PREFIX", "conda", &format!("conda/{wheel}")),
            ("CONDA_PREFIX", "conda", "conda/lib/libnvrtc.so.12"),
            ("PYTHONUSERBASE", "user", &format!("user/{wheel}")),
            ("PYTHONPATH", "none:vendored", "vendored/nvidia/cu13/lib/libnvrtc.so.13"),
            ("HOME", "home", &format!("home/.local/{wheel}")),
            // The system's own NVRTC, without any environment variable.
            ("", "", "usr/lib/python3/dist-packages/nvidia/cu13/lib/libnvrtc.so.13"),
            ("", "", "usr/local/lib/python3.11/dist-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
            ("", "", "usr/local/cuda/lib64/libnvrtc.so.13"),
        ] {
            let root = tempfile::tempdir().unwrap();
            let path = put(root.path(), file);
            let below = |folder: &str| root.path().join(folder).display().to_string();
            let value = value.split(':').map(below).collect::<Vec<_>>().join(":");
            let environment = |name: &str| (name == variable).then(|| OsString::from(&value));
            assert_eq!(installed(&NVRTC, &environment, root.path()), [path], "{variable}");
            let unset = installed(&NVRTC, &|_| None, root.path());
            assert_eq!(unset.is_empty(), !variable.is_empty(), "{variable}: {unset:?}");
        }
    }

    #[test]
    fn a_python_on_the_path_leads_to_its_packages_and_each_library_is_named_once() {
        let root = tempfile::tempdir().unwrap();
        let library = put(root.path(), "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
        let bin = root.path().join("venv/bin");
        let of_path = |name: &str| (name == "PATH").then(|| bin.clone().into_os_string());
        assert!(installed(&NVRTC, &of_path, root.path()).is_empty(), "a folder on the path without a Python");
        put(root.path(), "venv/bin/python3");
        assert_eq!(installed(&NVRTC, &of_path, root.path()), std::slice::from_ref(&library));
        let environment = root.path().join("venv");
        let both = |name: &str| match name {
            "VIRTUAL_ENV" => Some(environment.clone().into_os_string()),
            _ => of_path(name),
        };
        let older =
            put(root.path(), "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        assert_eq!(installed(&NVRTC, &both, root.path()), [library, older]);
    }
}
