//! Compiled kernels in one file: what a program ships, and what the disk cache keeps one by one.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::{Read, Write as _};
use std::path::Path;
use std::sync::Arc;

use super::{CompiledKernel, SourceKey, hash};
use crate::error::{Error, Result};

/// What a file begins with.
const MAGIC: &[u8; 8] = b"fmha-krn";

/// Changes with every change of [`CompiledKernel`] or of what is around it.
const VERSION: u32 = 2;

/// Magic, version, the payload's length and its hash.
const HEADER_BYTES: usize = 8 + 4 + 8 + 32;

/// Compiled kernels by their keys. A file of them is read whole or refused: it has its version, its
/// length and its hash in front.
#[derive(Clone, Debug, Default)]
pub struct Bundle {
    name: String,
    kernels: BTreeMap<SourceKey, Arc<CompiledKernel>>,
}

impl Bundle {
    /// These kernels; `name` is for messages.
    #[must_use]
    pub fn new(name: impl Into<String>, kernels: impl IntoIterator<Item = Arc<CompiledKernel>>) -> Self {
        let kernels = kernels.into_iter().map(|kernel| (kernel.key, kernel)).collect();
        Self { name: name.into(), kernels }
    }

    /// Where it came from.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many kernels it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kernels.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kernels.is_empty()
    }

    /// The kernel of a key.
    #[must_use]
    pub fn get(&self, key: SourceKey) -> Option<Arc<CompiledKernel>> {
        self.kernels.get(&key).cloned()
    }

    /// Every kernel, by key.
    pub fn kernels(&self) -> impl Iterator<Item = &CompiledKernel> {
        self.kernels.values().map(|kernel| &**kernel)
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// What the encoder said.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let kernels: Vec<&CompiledKernel> = self.kernels().collect();
        let payload = postcard::to_allocvec(&kernels).map_err(|error| self.refused(&error.to_string()))?;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&hash([payload.as_slice()]));
        bytes.extend_from_slice(&payload);
        Ok(bytes)
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote, such as a file that the program embeds.
    ///
    /// # Errors
    /// [`Error::System`] with `name` and what is wrong: another kind of file, another version, too
    /// short or too long, another hash.
    pub fn from_bytes(name: &str, mut bytes: &[u8]) -> Result<Self> {
        Self::read(name, &mut bytes)
    }

    /// Reads a header, and of what follows no more than one byte beyond what the header says.
    fn read(name: &str, from: &mut dyn Read) -> Result<Self> {
        let empty = Self { name: name.to_owned(), ..Self::default() };
        let refused = |why: &str| Err(empty.refused(why));
        let mut part = |bytes: u64| {
            let mut part = Vec::new();
            match from.take(bytes).read_to_end(&mut part) {
                Ok(_) => Ok(part),
                Err(error) => Err(empty.refused(&error.to_string())),
            }
        };
        let header = part(HEADER_BYTES as u64)?;
        if header.len() < HEADER_BYTES {
            return refused(&format!("{} bytes are fewer than a bundle's {HEADER_BYTES}", header.len()));
        }
        let number = |from: usize, to: usize| {
            header[from..to].iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte))
        };
        if &header[..8] != MAGIC {
            return refused("it is no bundle of kernels: its first 8 bytes are others");
        }
        if number(8, 12) != u64::from(VERSION) {
            return refused(&format!("its format is version {}, not {VERSION}", number(8, 12)));
        }
        let payload_bytes = number(12, 20);
        let payload = part(payload_bytes.saturating_add(1))?;
        if payload.len() as u64 != payload_bytes {
            let more = if payload.len() as u64 > payload_bytes { " or more" } else { "" };
            return refused(&format!("it has {}{more} bytes of {payload_bytes}", payload.len()));
        }
        if header[20..] != hash([payload.as_slice()]) {
            return refused(&format!("the hash of its {payload_bytes} bytes is another"));
        }
        match postcard::from_bytes::<Vec<CompiledKernel>>(&payload) {
            Ok(kernels) => Ok(Self::new(name, kernels.into_iter().map(Arc::new))),
            Err(error) => refused(&error.to_string()),
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// What the system said, or why the file is [refused](Self::from_bytes).
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        match std::fs::File::open(path) {
            Ok(mut file) => Self::read(&name, &mut file),
            Err(error) => Err(Error::System { what: format!("bundle {name}"), text: error.to_string() }),
        }
    }

    /// Writes a file: all of it or, after an error, nothing.
    ///
    /// # Errors
    /// What the system said.
    pub fn write(&self, path: &Path) -> Result<()> {
        let bytes = self.to_bytes()?;
        write_whole(path, &bytes)
            .map_err(|error| Error::System { what: path.display().to_string(), text: error.to_string() })
    }

    fn refused(&self, why: &str) -> Error {
        Error::System { what: format!("bundle {}", self.name), text: why.to_owned() }
    }
}

/// How the name of a file begins that is not whole yet. A process that is killed leaves it behind.
pub(super) const UNFINISHED: &str = ".fmha-";

/// Writes a file under another name and renames it: readers see the old one or the new one.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    let mode: Option<Permissions> = readable_by_all();
    if let Some(mode) = mode {
        builder.permissions(mode);
    }
    let mut file = builder.prefix(UNFINISHED).tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path).map(|_| ()).map_err(|error| error.error)
}

/// What an ordinary new file has; the process' mask takes from it.
#[cfg(unix)]
fn readable_by_all() -> Option<Permissions> {
    Some(std::os::unix::fs::PermissionsExt::from_mode(0o666))
}

#[cfg(not(unix))]
fn readable_by_all() -> Option<Permissions> {
    None
}
