//! One row: checked, then timed.

use fmha::{DevBuffer, Device, Error, MemorySpace, PlanOptions};
use fmha_conformance::init::Init;
use fmha_conformance::memory::Bytes;

use super::counted::Counted;
use crate::check::{Verify, check};
use crate::explain::model_of;
use crate::failure::Failure;
use crate::job::{Job, Source};
use crate::progress::Progress;
use crate::report::{Speed, work_of};
use crate::setup::Setup;
use crate::timing::{Burst, Timing, back_to_back, is_emulated};

/// How calls are timed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Protocol {
    Burst(Burst),
    Hot,
}

impl Protocol {
    pub(crate) fn burst(rounds: u32) -> Self {
        Self::Burst(Burst { rounds, ..Burst::default() })
    }
}

/// Outcome of a row.
#[derive(Debug)]
pub(crate) enum Measured {
    Timed {
        kernel: String,
        timing: Timing,
        speed: Speed,
    },
    /// Run once on an emulated device, and not timed, since its seconds mean nothing for a GPU.
    Emulated {
        kernel: String,
        /// Whether the result was compared with f64.
        checked: bool,
        counted: Counted,
    },
    /// No kernel supports the row, or it was not run; with the reason.
    Absent(String),
    /// Wrong result; the row is not timed.
    Wrong(String),
}

/// More than any cache in front of the memory has.
const FLUSH_BYTES_HOST: usize = 64 << 20;
const FLUSH_BYTES_DEVICE: u64 = 256 << 20;

/// Runs one row. A row that the problem or the backend does not support is an outcome; an error is a failure.
pub(crate) fn measure(
    backend: &Device,
    setup: &Setup,
    options: &PlanOptions,
    protocol: Protocol,
    verify: Verify,
) -> Result<Measured, Failure> {
    let options = &setup.options(options);
    // Planned first: no tensors are made for a row that is refused.
    let planned = match &setup.bwd {
        None => backend.plan_fwd(&setup.fwd.clone().validate()?, options).map(|plan| model_of(&plan)),
        Some(bwd) => backend.plan_bwd(&bwd.clone().validate()?, options).map(|plan| model_of(&plan)),
    };
    let model = match planned {
        Err(error @ Error::Unsupported { .. }) => return Ok(Measured::Absent(error.to_string())),
        Err(other) => return Err(other.into()),
        Ok(model) => model,
    };
    let source = Source::made_up(Init::Normal, 0);
    let mut job = Job::new(backend, setup, options, source)?;
    // Forgets earlier launches.
    let _ = fmha::emulated_launches();
    job.run()?;
    let launches = fmha::emulated_launches();
    let progress = Progress::new("checking against f64");
    let checked = check(job.read_back()?, verify, None, &progress)?;
    progress.finish();
    if !checked.passed() {
        return Ok(Measured::Wrong(checked.lines().join("; ")));
    }
    if is_emulated(backend) {
        let (flops, bytes) = work_of(setup)?;
        let roofline = backend.roofline(setup.product_dtype());
        let modelled = model.and_then(|model| model.modelled_seconds(&roofline, flops, bytes));
        return Ok(Measured::Emulated {
            kernel: job.kernel().to_owned(),
            checked: verify != Verify::None,
            counted: Counted::new(launches.as_deref(), modelled),
        });
    }
    let timing = match protocol {
        Protocol::Hot => back_to_back(&mut || job.run(), 0.7)?,
        Protocol::Burst(burst) => {
            let mut flush = Flush::new(backend)?;
            burst.run(&mut || job.run(), &mut || flush.run(backend))?
        }
    };
    let speed = Speed::of(setup, &timing, &backend.roofline(setup.product_dtype()))?;
    Ok(Measured::Timed { kernel: job.kernel().to_owned(), timing, speed })
}

/// Memory that is written between calls, so that each call finds cold caches. A device writes its own memory:
/// copying 256 MiB from the host took a hundred times as long as a short call.
enum Flush {
    Host(Bytes),
    Device(DevBuffer),
}

impl Flush {
    fn new(backend: &Device) -> Result<Self, Failure> {
        let memory = backend.memory();
        Ok(match memory.space() {
            MemorySpace::Host => Self::Host(Bytes::filled(FLUSH_BYTES_HOST, 0)?),
            MemorySpace::Device => Self::Device(memory.alloc(FLUSH_BYTES_DEVICE)?),
        })
    }

    fn run(&mut self, backend: &Device) -> Result<(), Failure> {
        match self {
            Self::Device(buffer) => backend.memory().zero(buffer)?,
            Self::Host(bytes) => {
                let byte = bytes.first().copied().unwrap_or(0).wrapping_add(1);
                bytes.fill(byte);
                std::hint::black_box(bytes);
            }
        }
        Ok(())
    }
}
