//! Compiling with clang.

use std::ffi::CString;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A source with its headers, and the result of its compilation.
#[derive(Default)]
pub(crate) struct Program {
    source: String,
    name: String,
    /// Name and text of each header.
    headers: Vec<(String, String)>,
    pub(crate) names: Vec<CString>,
    code: Vec<u8>,
    /// Ends in a zero.
    log: Vec<u8>,
}

impl Program {
    pub(crate) fn new(source: String, name: Option<String>, headers: Vec<(String, String)>) -> Self {
        let name = name.filter(|n| !n.is_empty()).unwrap_or_else(|| "program.hip".to_owned());
        Self { source, name, headers, log: vec![0], ..Self::default() }
    }

    pub(crate) fn code(&self) -> &[u8] {
        &self.code
    }

    pub(crate) fn log(&self) -> &[u8] {
        &self.log
    }

    /// Compiles; `false` with the reason in the log.
    pub(crate) fn compile(&mut self, options: &[String]) -> bool {
        let (code, log) = match self.run(options) {
            Ok((code, log)) => (code, log),
            Err(text) => (Vec::new(), text),
        };
        self.log = log.into_bytes();
        self.log.retain(|byte| *byte != 0);
        self.log.push(0);
        self.code = code;
        !self.code.is_empty()
    }

    fn run(&self, options: &[String]) -> Result<(Vec<u8>, String), String> {
        let folder = tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?;
        let write = |name: &str, text: &str| -> Result<(), String> {
            // A header's name may have folders in it; it may not leave the temporary one.
            if Path::new(name).components().any(|c| !matches!(c, std::path::Component::Normal(_))) {
                return Err(format!("{name} is not a plain relative path"));
            }
            let path = folder.path().join(name);
            let parent = path.parent().unwrap_or(folder.path());
            fs::create_dir_all(parent)
                .and_then(|()| fs::write(&path, text))
                .map_err(|e| format!("{name}: {e}"))
        };
        for (name, text) in &self.headers {
            write(name, text)?;
        }
        let source_name =
            Path::new(&self.name).file_name().map_or("program.hip".into(), |n| n.to_string_lossy());
        write(&source_name, &self.source)?;
        let mut command = Command::new(compiler()?);
        command
            .current_dir(folder.path())
            .args(["-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib"])
            .args(["--no-gpu-bundle-output", "-fuse-cuid=none", "-O3", "-std=c++17", "-I."])
            .args(options.iter().map(|o| o.replace("--gpu-architecture=", "--offload-arch=")))
            .arg(&*source_name)
            .args(["-o", "program.co"]);
        let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(if log.is_empty() { format!("clang: {}", output.status) } else { log });
        }
        let code = fs::read(folder.path().join("program.co")).map_err(|e| format!("program.co: {e}"))?;
        Ok((code, log))
    }
}

/// The first clang that starts.
fn compiler() -> Result<String, String> {
    let mut tried: Vec<String> = std::env::var("FMHA_CLANG").into_iter().collect();
    if tried.is_empty() {
        tried.extend((19..=24).rev().map(|version| format!("clang-{version}")));
        tried.extend(["clang".to_owned(), "/opt/rocm/llvm/bin/clang".to_owned()]);
    }
    let starts = |name: &&String| {
        Command::new(name.as_str()).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    tried.iter().find(starts).cloned().ok_or_else(|| format!("no clang found; tried {}", tried.join(", ")))
}
