//! A launch as a file: the PTX, the arguments and the memory it starts from. Run again, it needs no compiler, no
//! backend and no tensors: for timing the interpreter, for schedules, and for breaking a kernel on purpose.

use crate::fault::{Fault, FaultKind};
use crate::launch::{Device, Kernel, LaunchConfig, Options, Report};

/// A launch, and the memory from which it starts.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The module's text.
    pub ptx: String,
    /// The kernel's name.
    pub kernel: String,
    /// Shape of the launch.
    pub config: LaunchConfig,
    /// The argument buffer; addresses in it and in tensor maps are those of `memory`.
    pub args: Vec<u8>,
    /// Base, bytes, and which bytes have been written (one bit a byte) of each allocation.
    memory: Vec<(u64, Vec<u8>, Vec<u32>)>,
}

const MAGIC: &[u8; 8] = b"ptxlnch2";

fn broken(what: &str) -> Fault {
    Fault::new(FaultKind::Launch, format!("recorded launch: {what}"))
}

/// Writes the length, then the bytes.
fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: u64) -> Result<&'a [u8], Fault> {
        let Some((head, rest)) = usize::try_from(n).ok().and_then(|n| self.0.split_at_checked(n)) else {
            return Err(broken(&format!("{n} bytes wanted, {} left", self.0.len())));
        };
        self.0 = rest;
        Ok(head)
    }

    fn number(&mut self) -> Result<u64, Fault> {
        Ok(self.take(8)?.iter().rev().fold(0, |v, &b| v << 8 | u64::from(b)))
    }

    fn block(&mut self) -> Result<&'a [u8], Fault> {
        let n = self.number()?;
        self.take(n)
    }

    fn text(&mut self) -> Result<String, Fault> {
        String::from_utf8(self.block()?.to_vec()).map_err(|_| broken("text that is no UTF-8"))
    }
}

impl Recording {
    /// Records the launch that `device.launch(kernel, config, args, ..)` would start.
    #[must_use]
    pub fn new(device: &Device, kernel: &Kernel, config: &LaunchConfig, args: &[u8]) -> Self {
        Self {
            ptx: kernel.source().to_string(),
            kernel: kernel.name().to_string(),
            config: *config,
            args: args.to_vec(),
            memory: device.memory().view().contents(),
        }
    }

    /// Bytes of a recording's file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        put(&mut out, self.ptx.as_bytes());
        put(&mut out, self.kernel.as_bytes());
        let c = &self.config;
        let scalars = [c.dynamic_shared, u32::from(c.dependent)];
        let shape = c.grid.iter().chain(&c.block).chain(&c.cluster).chain(&scalars);
        out.extend(shape.flat_map(|n| u64::from(*n).to_le_bytes()));
        put(&mut out, &self.args);
        out.extend((self.memory.len() as u64).to_le_bytes());
        for (base, bytes, init) in &self.memory {
            out.extend(base.to_le_bytes());
            put(&mut out, bytes);
            let init: Vec<u8> = init.iter().flat_map(|w| w.to_le_bytes()).collect();
            put(&mut out, &init);
        }
        out
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// The bytes are no recorded launch, or cut short.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Fault> {
        let mut r = Reader(bytes);
        if r.take(8)? != MAGIC {
            return Err(broken("another kind of file"));
        }
        let (ptx, kernel) = (r.text()?, r.text()?);
        let mut shape = [0u32; 11];
        for n in &mut shape {
            *n = r.number()? as u32;
        }
        let three = |at: usize| [shape[at], shape[at + 1], shape[at + 2]];
        let config = LaunchConfig {
            grid: three(0),
            block: three(3),
            cluster: three(6),
            dynamic_shared: shape[9],
            dependent: shape[10] != 0,
        };
        let args = r.block()?.to_vec();
        let count = r.number()?;
        let mut memory = Vec::new();
        for _ in 0..count {
            let base = r.number()?;
            let bytes = r.block()?.to_vec();
            let init = r.block()?.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
            memory.push((base, bytes, init.collect()));
        }
        Ok(Self { ptx, kernel, config, args, memory })
    }

    /// A device of its own with that memory and module. Variables of the module begin as the PTX says.
    ///
    /// # Errors
    /// As [`Device::load`]; an allocation that a device would not give; PTX without the kernel.
    pub fn prepare(&self) -> Result<Ready<'_>, Fault> {
        self.prepare_as(&self.ptx)
    }

    /// Prepares the recording with `ptx` in place of its own text.
    fn prepare_as(&self, ptx: &str) -> Result<Ready<'_>, Fault> {
        let device = Device::new();
        for (base, bytes, init) in &self.memory {
            if !device.memory().restore(*base, bytes, init) {
                return Err(broken(&format!(
                    "an allocation at {base:#x}, out of order or no device address"
                )));
            }
        }
        let module = device.load(ptx)?;
        let kernel = module.kernel(&self.kernel).cloned();
        let kernel = kernel.ok_or_else(|| broken(&format!("no kernel `{}` in its PTX", self.kernel)))?;
        Ok(Ready { recording: self, device, kernel })
    }

    /// Runs it once on a device of its own, with `ptx` in its text's place.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare) and [`Device::launch`].
    pub fn run_as(&self, ptx: &str, options: &Options) -> Result<Ended, Fault> {
        let ready = self.prepare_as(ptx)?;
        let report = ready.run(options)?;
        let mut memory = Vec::new();
        for (base, bytes, _) in &self.memory {
            let mut now = vec![0; bytes.len()];
            ready.device.download(*base, &mut now)?;
            memory.push(now);
        }
        Ok(Ended { report, memory })
    }
}

/// Result of a recorded launch.
#[derive(Debug)]
pub struct Ended {
    /// Report of the launch.
    pub report: Report,
    /// The bytes of each of the recording's allocations afterwards.
    pub memory: Vec<Vec<u8>>,
}

/// A recorded launch on its device.
#[derive(Debug)]
pub struct Ready<'a> {
    recording: &'a Recording,
    /// The device, whose memory a run changes.
    pub device: Device,
    kernel: Kernel,
}

impl Ready<'_> {
    /// Runs it.
    ///
    /// # Errors
    /// As [`Device::launch`].
    pub fn run(&self, options: &Options) -> Result<Report, Fault> {
        self.device.launch(&self.kernel, &self.recording.config, &self.recording.args, options)
    }
}
