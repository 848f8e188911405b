//! A launch as it was: kernel, arguments and memory, to be run again as often as one likes.

use crate::fault::{Fault, FaultKind};
use crate::launch::{Device, Kernel, LaunchConfig, Options, Report};

/// A launch and all that it depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// The module's text.
    pub ptx: String,
    /// The kernel's name in it.
    pub kernel: String,
    /// The shape of the launch.
    pub config: LaunchConfig,
    /// The argument buffer.
    pub args: Vec<u8>,
    /// Device memory before the launch.
    pub memory: Vec<Region>,
}

/// One allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its device address.
    pub base: u64,
    /// What it holds.
    pub bytes: Vec<u8>,
    /// One bit a byte, lowest first: whether something has written it.
    pub written: Vec<u8>,
}

/// What a launch left.
#[derive(Debug)]
pub struct Ended {
    /// What it did.
    pub report: Report,
    /// The bytes of each [`Recording::memory`] afterwards.
    pub memory: Vec<Vec<u8>>,
}

const MAGIC: &[u8; 8] = b"ptxlaun1";

impl Recording {
    /// The launch that `device` is about to carry out.
    #[must_use]
    pub fn take(device: &Device, ptx: &str, kernel: &Kernel, config: &LaunchConfig, args: &[u8]) -> Self {
        let view = device.memory.view();
        let memory = view.allocations().iter().map(|a| {
            let mut bytes = vec![0; a.bytes as usize];
            a.read(0, &mut bytes);
            Region { base: a.base, bytes, written: a.written() }
        });
        Self {
            ptx: ptx.to_owned(),
            kernel: kernel.name().to_owned(),
            config: *config,
            args: args.to_vec(),
            memory: memory.collect(),
        }
    }

    /// Carries the launch out on a device of its own, with `ptx` in its text's place.
    ///
    /// # Errors
    /// A text that does not load or has no such kernel, or the first fault of the launch.
    pub fn run(&self, ptx: &str, options: &Options) -> Result<Ended, Fault> {
        let refuse = |text: String| Fault::new(FaultKind::Launch, text);
        let device = Device::new();
        for region in &self.memory {
            if !device.memory.place(region.base, &region.bytes, &region.written) {
                return Err(refuse(format!("the recorded memory at {:#x} cannot be placed", region.base)));
            }
        }
        let module = device.load(ptx)?;
        let kernel =
            module.kernel(&self.kernel).ok_or_else(|| refuse(format!("no kernel `{}`", self.kernel)))?;
        let report = device.launch(kernel, &self.config, &self.args, options)?;
        let mut memory = Vec::new();
        for region in &self.memory {
            let mut bytes = vec![0; region.bytes.len()];
            device.download(region.base, &mut bytes)?;
            memory.push(bytes);
        }
        Ok(Ended { report, memory })
    }

    /// The launch as bytes of a file.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        let c = &self.config;
        for word in c.grid.iter().chain(&c.block).chain(&c.cluster).chain([&c.dynamic_shared]) {
            out.extend(word.to_le_bytes());
        }
        let mut blob = |bytes: &[u8]| {
            out.extend((bytes.len() as u64).to_le_bytes());
            out.extend(bytes);
        };
        blob(self.ptx.as_bytes());
        blob(self.kernel.as_bytes());
        blob(&self.args);
        for region in &self.memory {
            blob(&region.base.to_le_bytes());
            blob(&region.bytes);
            blob(&region.written);
        }
        out
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// The bytes are no recording, or not all of one.
    pub fn decode(bytes: &[u8]) -> Result<Self, Fault> {
        let bad = || Fault::new(FaultKind::Launch, format!("{} bytes are no recorded launch", bytes.len()));
        let mut rest = bytes.strip_prefix(MAGIC).ok_or_else(bad)?;
        let mut words = [0u32; 10];
        for word in &mut words {
            *word = u32::from_le_bytes(*rest.split_off(..4).and_then(<[u8]>::first_chunk).ok_or_else(bad)?);
        }
        let [gx, gy, gz, bx, by, bz, cx, cy, cz, dynamic_shared] = words;
        let config =
            LaunchConfig { grid: [gx, gy, gz], block: [bx, by, bz], cluster: [cx, cy, cz], dynamic_shared };
        let mut blob = || {
            let n = u64::from_le_bytes(*rest.split_off(..8).and_then(<[u8]>::first_chunk)?);
            rest.split_off(..usize::try_from(n).ok()?)
        };
        let text = |bytes: Option<&[u8]>| String::from_utf8(bytes?.to_vec()).ok();
        let ptx = text(blob()).ok_or_else(bad)?;
        let kernel = text(blob()).ok_or_else(bad)?;
        let args = blob().ok_or_else(bad)?.to_vec();
        let mut memory = Vec::new();
        while let Some(base) = blob() {
            let base = u64::from_le_bytes(*base.first_chunk().ok_or_else(bad)?);
            let bytes = blob().ok_or_else(bad)?.to_vec();
            let written = blob().ok_or_else(bad)?.to_vec();
            memory.push(Region { base, bytes, written });
        }
        Ok(Self { ptx, kernel, config, args, memory })
    }
}
