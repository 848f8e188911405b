//! A bundle: one file of compiled kernels, which a program may ship. The disk cache stores each kernel as a bundle of
//! one.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::{Read, Write as _};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};
use serde::{Deserialize, Serialize};

use super::{CompiledKernel, SourceKey, hash};
use crate::error::{Error, Result};

/// Kilobytes that unpacking may take: the window of [`PRESET`] is 4 MB.
const MOST_UNPACKING_KB: u32 = 64 << 10;

/// First bytes of a bundle's file.
const MAGIC: &[u8; 8] = b"fmha-krn";

/// Version of a file whose payload is kernels without packing. The disk cache wrote such files once; it packs one
/// when it reads it. Both versions change with every change of [`CompiledKernel`].
const PLAIN: u32 = 2;

/// Version of a bundle whose payload is frames of packed kernels.
const PACKED: u32 = 3;

/// Number of kernels that are packed together. Similar kernels are neighbours, so that each takes little more than
/// its difference from the one before: 27 kernels for Hopper, 6.7 MB, take 0.71 MB in frames of eight and 0.67 MB
/// in frames of sixteen, and a frame of eight unpacks in 12 to 140 ms on a busy core. A wheel's own compression,
/// with a window of 32 kB, leaves 1.43 MB.
const FRAME_KERNELS: usize = 8;

/// Effort of the packer for a bundle, from 0 to 9.
const PRESET: u32 = 4;

/// Effort of the packer for one kernel that was just compiled.
const QUICK_PRESET: u32 = 1;

/// Bytes of a file's header: magic, version, the payload's length and its hash.
const HEADER_BYTES: usize = 8 + 4 + 8 + 32;

/// Compiled kernels by their keys. A file of them is read whole or refused: it has its version, its
/// length and its hash in front. Its kernels are packed, a few to a frame, and a frame is unpacked when
/// the first of its kernels is asked for.
#[derive(Clone, Debug, Default)]
pub struct Bundle {
    name: String,
    frames: Vec<Arc<Frame>>,
    /// Index of the frame that has a kernel, by the kernel's key.
    places: BTreeMap<SourceKey, usize>,
    /// Whether the bundle was read from a file of packed kernels.
    packed: bool,
}

/// Kernels that are packed together, and unpacked together.
#[derive(Debug)]
struct Frame {
    stored: Stored,
    kernels: OnceLock<std::result::Result<Vec<Arc<CompiledKernel>>, String>>,
}

/// A compiled kernel as a bundle's file stores it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Stored {
    keys: Vec<SourceKey>,
    /// Bytes of the kernel when it is unpacked.
    plain_bytes: u64,
    /// The kernels in the order of their keys, packed by LZMA.
    bytes: Vec<u8>,
}

impl Frame {
    fn made(kernels: Vec<Arc<CompiledKernel>>) -> Self {
        Self { stored: Stored::default(), kernels: Ok(kernels).into() }
    }

    fn kernels(&self) -> std::result::Result<&[Arc<CompiledKernel>], String> {
        self.kernels.get_or_init(|| self.stored.unpacked()).as_ref().map(Vec::as_slice).map_err(String::clone)
    }
}

impl Stored {
    fn new(kernels: &[&CompiledKernel], preset: u32) -> std::result::Result<Self, String> {
        let keys = kernels.iter().map(|kernel| kernel.key).collect();
        let plain = postcard::to_allocvec(kernels).map_err(|error| error.to_string())?;
        let plain_bytes = plain.len() as u64;
        let pack = || -> std::io::Result<Vec<u8>> {
            let options = LzmaOptions::with_preset(preset);
            let mut writer = LzmaWriter::new_use_header(Vec::new(), &options, Some(plain_bytes))?;
            writer.write_all(&plain)?;
            writer.finish()
        };
        Ok(Self { keys, plain_bytes, bytes: pack().map_err(|error| error.to_string())? })
    }

    fn unpacked(&self) -> std::result::Result<Vec<Arc<CompiledKernel>>, String> {
        let mut plain = Vec::new();
        LzmaReader::new_mem_limit(self.bytes.as_slice(), MOST_UNPACKING_KB, None)
            .and_then(|reader| reader.take(self.plain_bytes).read_to_end(&mut plain))
            .map_err(|error| error.to_string())?;
        let kernels: Vec<CompiledKernel> = postcard::from_bytes(&plain).map_err(|error| error.to_string())?;
        if !kernels.iter().map(|kernel| kernel.key).eq(self.keys.iter().copied()) {
            return Err(format!("a frame of {} kernels has others", self.keys.len()));
        }
        Ok(kernels.into_iter().map(Arc::new).collect())
    }
}

impl Bundle {
    /// Makes a bundle of these kernels; `name` is for messages.
    #[must_use]
    pub fn new(name: impl Into<String>, kernels: impl IntoIterator<Item = Arc<CompiledKernel>>) -> Self {
        let kernels: BTreeMap<_, _> = kernels.into_iter().map(|kernel| (kernel.key, kernel)).collect();
        let places = kernels.keys().map(|&key| (key, 0)).collect();
        let frames = vec![Arc::new(Frame::made(kernels.into_values().collect()))];
        Self { name: name.into(), frames, places, packed: false }
    }

    /// Name of the bundle's source, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of kernels.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether the bundle has no kernels.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether the bundle was read from a file of packed kernels.
    pub(super) fn is_packed(&self) -> bool {
        self.packed
    }

    /// The kernel of a key; `None` if the bundle lacks it.
    ///
    /// # Errors
    /// [`Error::System`] with `name` where a file's hash is right and a kernel in it cannot be read.
    pub fn get(&self, key: SourceKey) -> Result<Option<Arc<CompiledKernel>>> {
        let Some(&frame) = self.places.get(&key) else { return Ok(None) };
        let kernels = self.frames[frame].kernels().map_err(|why| self.refused(&why))?;
        Ok(kernels.iter().find(|kernel| kernel.key == key).cloned())
    }

    /// Every kernel, by key.
    ///
    /// # Errors
    /// As of [`get`](Self::get).
    pub fn kernels(&self) -> Result<Vec<Arc<CompiledKernel>>> {
        Ok(self
            .places
            .keys()
            .map(|&key| self.get(key))
            .collect::<Result<Vec<_>>>()?
            .into_iter()
            .flatten()
            .collect())
    }

    /// Number of frames that are unpacked, and number of all frames.
    #[cfg(test)]
    pub(super) fn frames_unpacked(&self) -> (usize, usize) {
        let unpacked = self.frames.iter().filter(|frame| frame.kernels.get().is_some());
        (unpacked.count(), self.frames.len())
    }

    /// The file's bytes: its kernels packed, similar ones next to each other.
    ///
    /// # Errors
    /// What the encoder said.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.packed_by(PRESET)
    }

    /// Packs with less effort, for a kernel that was just compiled or is needed at once. A kernel for Hopper, 811
    /// kB with its assembly, is packed into 92 kB in 18 ms, or with [`PRESET`] into 84 kB in 90 ms; unpacking takes
    /// 5 ms.
    ///
    /// # Errors
    /// What the encoder said.
    pub(super) fn to_bytes_quickly(&self) -> Result<Vec<u8>> {
        self.packed_by(QUICK_PRESET)
    }

    fn packed_by(&self, preset: u32) -> Result<Vec<u8>> {
        let mut kernels = self.kernels()?;
        let of = |kernel: &CompiledKernel| (kernel.arch.clone(), kernel.kernel.clone(), kernel.entry.clone());
        kernels.sort_by_cached_key(|kernel| of(kernel));
        let kernels: Vec<&CompiledKernel> = kernels.iter().map(|kernel| &**kernel).collect();
        let frames = kernels.chunks(FRAME_KERNELS).map(|kernels| Stored::new(kernels, preset));
        let frames = frames.collect::<std::result::Result<Vec<_>, _>>().map_err(|why| self.refused(&why))?;
        self.file(PACKED, postcard::to_allocvec(&frames))
    }

    /// Writes a kernel without packing, in the disk cache's earlier format.
    ///
    /// # Errors
    /// What the encoder said.
    #[cfg(test)]
    pub(super) fn to_plain_bytes(&self) -> Result<Vec<u8>> {
        let kernels = self.kernels()?;
        let kernels: Vec<&CompiledKernel> = kernels.iter().map(|kernel| &**kernel).collect();
        self.file(PLAIN, postcard::to_allocvec(&kernels))
    }

    fn file(&self, version: u32, payload: postcard::Result<Vec<u8>>) -> Result<Vec<u8>> {
        let payload = payload.map_err(|error| self.refused(&error.to_string()))?;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&version.to_le_bytes());
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

    /// Reads a header, and then at most one byte more than the payload's length in the header.
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
        let version = number(8, 12);
        if version != u64::from(PLAIN) && version != u64::from(PACKED) {
            return refused(&format!("its format is version {version}, neither {PLAIN} nor {PACKED}"));
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
        if version == u64::from(PLAIN) {
            return match postcard::from_bytes::<Vec<CompiledKernel>>(&payload) {
                Ok(kernels) => Ok(Self::new(name, kernels.into_iter().map(Arc::new))),
                Err(error) => refused(&error.to_string()),
            };
        }
        let frames = match postcard::from_bytes::<Vec<Stored>>(&payload) {
            Ok(frames) => frames,
            Err(error) => return refused(&error.to_string()),
        };
        let keys =
            |(at, frame): (usize, &Stored)| frame.keys.iter().map(move |&key| (key, at)).collect::<Vec<_>>();
        let places = frames.iter().enumerate().flat_map(keys).collect();
        let made = |stored| Arc::new(Frame { stored, kernels: OnceLock::new() });
        Ok(Self { frames: frames.into_iter().map(made).collect(), places, packed: true, ..empty })
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
        write_whole(path, &self.to_bytes()?)
            .map_err(|error| Error::System { what: path.display().to_string(), text: error.to_string() })
    }

    fn refused(&self, why: &str) -> Error {
        Error::System { what: format!("bundle {}", self.name), text: why.to_owned() }
    }
}

/// Prefix of the name of a file that is not complete yet. A process that is killed leaves such a file behind.
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

/// Permissions of an ordinary new file, before the process' mask removes some.
#[cfg(unix)]
fn readable_by_all() -> Option<Permissions> {
    Some(std::os::unix::fs::PermissionsExt::from_mode(0o666))
}

#[cfg(not(unix))]
fn readable_by_all() -> Option<Permissions> {
    None
}
