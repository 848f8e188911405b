//! A launch as a file: the code object, the arguments and the memory it starts from. Run again, it needs no compiler,
//! no backend and no tensors: for timing the emulator, and for breaking a kernel on purpose.

use rmpv::Value;

use crate::counters::Counters;
use crate::elf::CodeObject;
use crate::error::{LaunchError, LoadError};
use crate::launch::{Device, Launch, Module, Options};

/// A launch, and the memory from which it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// The code object.
    pub code: Vec<u8>,
    /// The kernel's name.
    pub kernel: String,
    /// Workgroups in x, y, z.
    pub grid: [u32; 3],
    /// Work-items of a workgroup in x, y, z.
    pub block: [u32; 3],
    /// LDS beyond the kernel's own, in bytes.
    pub dynamic_lds: u32,
    /// The explicit arguments; addresses in them are those of `memory`.
    pub args: Vec<u8>,
    /// Base, bytes, and which bytes had been written (0 or 1 a byte) of each allocation, by address.
    memory: Vec<(u64, Vec<u8>, Vec<u8>)>,
}

/// Result of a recorded launch.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Counters of the launch.
    pub counters: Counters,
    /// The bytes of each of the recording's allocations afterwards.
    pub memory: Vec<Vec<u8>>,
}

fn refused(text: impl Into<String>) -> LaunchError {
    LaunchError::Refused(format!("recorded launch: {}", text.into()))
}

impl From<LoadError> for LaunchError {
    fn from(error: LoadError) -> Self {
        refused(error.to_string())
    }
}

impl Recording {
    /// The environment variable that names the folder into which the driver's double writes every launch.
    pub const FOLDER_VARIABLE: &'static str = "FMHA_EMULATE_RECORD";

    /// The launch as it stands before it runs.
    #[must_use]
    pub fn new(device: &Device, module: &Module, kernel: &str, launch: &Launch<'_>) -> Self {
        Self {
            code: module.bytes.clone(),
            kernel: kernel.to_owned(),
            grid: launch.grid,
            block: launch.block,
            dynamic_lds: launch.dynamic_lds,
            args: launch.args.to_vec(),
            memory: device.memory.contents_but(module.base),
        }
    }

    /// A file's content: MessagePack.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let triple = |x: [u32; 3]| Value::Array(x.map(Value::from).to_vec());
        let memory = self.memory.iter().map(|(base, bytes, written)| {
            Value::Array(vec![(*base).into(), Value::Binary(bytes.clone()), Value::Binary(written.clone())])
        });
        let all = Value::Array(vec![
            Value::Binary(self.code.clone()),
            self.kernel.as_str().into(),
            triple(self.grid),
            triple(self.block),
            self.dynamic_lds.into(),
            Value::Binary(self.args.clone()),
            Value::Array(memory.collect()),
        ]);
        let mut out = Vec::new();
        // Writing to memory does not fail.
        let _ = rmpv::encode::write_value(&mut out, &all);
        out
    }

    /// Recording from the bytes that [`Self::to_bytes`] made.
    ///
    /// # Errors
    /// [`LaunchError::Refused`] for anything else.
    pub fn from_bytes(mut bytes: &[u8]) -> Result<Self, LaunchError> {
        let parsed = rmpv::decode::read_value(&mut bytes).ok();
        parsed.and_then(|value| parse(&value)).ok_or_else(|| refused("no such file's content"))
    }

    /// A device of its own with that memory, and `code` in its code object's place.
    ///
    /// # Errors
    /// As [`Device::load`]; an allocation that a device would not give.
    pub fn prepare(&self, code: &[u8], options: Options) -> Result<Ready<'_>, LaunchError> {
        let arch = CodeObject::parse(code)?.arch;
        let device = Device::new(arch, options);
        for (base, bytes, written) in &self.memory {
            if !device.memory.restore(*base, bytes, written) {
                return Err(refused(format!(
                    "an allocation at {base:#x}, out of order or no device address"
                )));
            }
        }
        let module = device.load(code)?;
        Ok(Ready { recording: self, device, module })
    }

    /// Runs it once on a device of its own, with `code` in its code object's place.
    ///
    /// # Errors
    /// As [`Self::prepare`] and [`Device::launch`].
    pub fn run_as(&self, code: &[u8], options: Options) -> Result<Ended, LaunchError> {
        let ready = self.prepare(code, options)?;
        let counters = ready.run()?;
        let now =
            |(base, bytes, _): &(u64, Vec<u8>, Vec<u8>)| ready.device.memory.read_vec(*base, bytes.len());
        let memory = self.memory.iter().map(now).collect::<Result<_, _>>();
        Ok(Ended { counters, memory: memory.map_err(|error| refused(error.to_string()))? })
    }
}

/// A recorded launch on its device.
pub struct Ready<'a> {
    recording: &'a Recording,
    device: Device,
    module: Module,
}

impl Ready<'_> {
    /// Runs it.
    ///
    /// # Errors
    /// As [`Device::launch`].
    pub fn run(&self) -> Result<Counters, LaunchError> {
        let Recording { grid, block, dynamic_lds, ref args, ref kernel, .. } = *self.recording;
        self.device.launch(&self.module, kernel, &Launch { grid, block, dynamic_lds, args })
    }
}

fn parse(value: &Value) -> Option<Recording> {
    let word = |value: &Value| value.as_u64().and_then(|x| u32::try_from(x).ok());
    let bytes = |value: &Value| value.as_slice().map(<[u8]>::to_vec);
    let triple = |value: &Value| {
        let [x, y, z] = &value.as_array()?[..] else { return None };
        Some([word(x)?, word(y)?, word(z)?])
    };
    let [code, kernel, grid, block, dynamic_lds, args, memory] = &value.as_array()?[..] else { return None };
    let allocation = |value: &Value| {
        let [base, data, written] = &value.as_array()?[..] else { return None };
        Some((base.as_u64()?, bytes(data)?, bytes(written)?))
    };
    Some(Recording {
        code: bytes(code)?,
        kernel: kernel.as_str()?.to_owned(),
        grid: triple(grid)?,
        block: triple(block)?,
        dynamic_lds: word(dynamic_lds)?,
        args: bytes(args)?,
        memory: memory.as_array()?.iter().map(allocation).collect::<Option<_>>()?,
    })
}
