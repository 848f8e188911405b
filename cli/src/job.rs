//! One problem with its tensors on a backend: planned once, called many times, read back.

use fmha::{BwdPlan, Error, Extents, FmhaBackend, FwdPlan, PlanOptions, ValidFwd, Workspace};
use fmha_conformance::execute::{CallTime, Resident};
use fmha_conformance::init::Init;
use fmha_conformance::tensor::{Operand, Operands, Room};
use fmha_conformance::tensors::{Data, HostBwd, HostFwd, Lengths};

use crate::data::{OwnData, file_shape, lse_shape};
use crate::failure::Failure;
use crate::files::Tensor;
use crate::setup::Setup;

/// Reads the battery's names and Composable Kernel's: `uf` or `1`, `nf`, `ui`, `ni` or `0`, `tf` or
/// `2`.
pub(super) fn init(text: &str) -> Result<Init, String> {
    match text {
        "uf" | "1" => Ok(Init::Uniform),
        "nf" => Ok(Init::Normal),
        "ui" | "ni" | "0" => Ok(Init::Integers),
        "tf" | "2" => Ok(Init::Trig),
        other => other.parse().map_err(|error| format!("{error}, and uf, nf, ui, ni, tf")),
    }
}

/// What the tensors hold.
pub(super) struct Source {
    pub(super) own: Option<OwnData>,
    pub(super) init: Init,
    pub(super) seed: u64,
}

/// A problem, its tensors, the kernel chosen for it.
pub(super) struct Job<'a> {
    setup: &'a Setup,
    call: Call,
    resident: Resident<'a>,
}

/// What is called.
pub(super) enum Call {
    Forward(Box<HostFwd>, Box<FwdPlan>),
    Backward(Box<HostBwd>, Box<BwdPlan>),
}

impl<'a> Job<'a> {
    /// Plans `setup` on `backend` and puts its tensors there. Outputs are NaN until they are written.
    pub(super) fn new(
        backend: &'a dyn FmhaBackend,
        setup: &'a Setup,
        options: &PlanOptions,
        source: Source,
    ) -> Result<Self, Failure> {
        let valid = setup.fwd.clone().validate()?;
        let Source { own, init, seed } = source;
        let data = Data { init, seed, room: Room::default() };
        let (call, resident) = match &setup.bwd {
            None => {
                let plan = backend.plan_fwd(&valid, options)?;
                there_is_room(&valid, setup.extents(), 1, plan.workspace())?;
                let mut host = HostFwd::new(setup.fwd.clone(), &setup.lengths(), data)?;
                host.dropout = setup.dropout;
                overwrite(&mut host.operands, own);
                let resident = Resident::place(backend, &host.operands, plan.workspace())?;
                (Call::Forward(Box::new(host), Box::new(plan)), resident)
            }
            Some(bwd) => {
                let plan = backend.plan_bwd(&bwd.clone().validate()?, options)?;
                // Makes O and LSE; which kernel does is not what was asked about.
                let auxiliary = PlanOptions { allow_fallback: true, ..PlanOptions::default() };
                let forward = backend.plan_fwd(&valid, &auxiliary)?;
                let workspace = plan.workspace().max(forward.workspace());
                there_is_room(&valid, setup.extents(), 2, workspace)?;
                let mut host = HostBwd::new(bwd.clone(), &setup.lengths(), data)?;
                host.dropout = setup.dropout;
                overwrite(&mut host.operands, own);
                let mut resident = Resident::place(backend, &host.operands, workspace)?;
                resident.run_fwd_of(&forward, &mut host)?;
                (Call::Backward(Box::new(host), Box::new(plan)), resident)
            }
        };
        Ok(Self { setup, call, resident })
    }

    /// The kernel's name.
    pub(super) fn kernel(&self) -> &str {
        match &self.call {
            Call::Forward(_, plan) => plan.kernel(),
            Call::Backward(_, plan) => plan.kernel(),
        }
    }

    /// The whole plan, one fact a line.
    pub(super) fn plan_text(&self) -> String {
        match &self.call {
            Call::Forward(_, plan) => plan.to_string(),
            Call::Backward(_, plan) => plan.to_string(),
        }
    }

    /// Queues the call and waits until it is done; how long it took.
    pub(super) fn run(&mut self) -> Result<CallTime, Failure> {
        Ok(match &mut self.call {
            Call::Forward(host, plan) => self.resident.run_fwd(plan, host)?,
            Call::Backward(host, plan) => self.resident.run_bwd(plan, host)?,
        })
    }

    /// Brings every result to the host.
    pub(super) fn read_back(&mut self) -> Result<&Call, Failure> {
        match &mut self.call {
            Call::Forward(host, _) => self.resident.read_back(&mut host.operands)?,
            Call::Backward(host, _) => self.resident.read_back(&mut host.operands)?,
        }
        Ok(&self.call)
    }

    /// A result that was [read back](Self::read_back), as a file has it.
    pub(super) fn result(&self, name: &str) -> Option<Tensor> {
        let fwd = &self.setup.fwd;
        let extents = self.setup.extents();
        let rows = |shape, strides| file_shape(shape, strides, fwd.q_layout);
        let (operands, operand, shape) = match (&self.call, name) {
            (Call::Forward(host, _), "o") => (&host.operands, Operand::O, rows(extents.o, fwd.o)),
            (Call::Forward(host, _), "lse") => (&host.operands, Operand::Lse, lse_shape(self.setup)),
            (Call::Backward(host, plan), name) => {
                let bwd = plan.problem();
                let (operand, shape) = match name {
                    "dq" => (Operand::Dq, rows(extents.q, bwd.dq)),
                    "dk" => (Operand::Dk, rows(extents.k, bwd.dk)),
                    "dv" => (Operand::Dv, rows(extents.v, bwd.dv)),
                    "dbias" => {
                        let shape = host.operands.get(Operand::Dbias)?.shape;
                        (
                            Operand::Dbias,
                            [shape.batch, shape.head, shape.seq, shape.dim].map(u64::from).to_vec(),
                        )
                    }
                    "dsink" => (Operand::Dsink, vec![u64::from(fwd.dims.num_heads_q)]),
                    _ => return None,
                };
                (&host.operands, operand, shape)
            }
            (Call::Forward(..), _) => return None,
        };
        let tensor = operands.get(operand)?;
        Some(Tensor { dtype: tensor.dtype, shape, bytes: tensor.elems().to_vec() })
    }
}

impl Setup {
    fn lengths(&self) -> Lengths {
        let list = |lengths: &Option<Vec<i32>>| lengths.clone().unwrap_or_default();
        Lengths {
            totals: self.totals(),
            cu_seqlens_q: list(&self.cu_seqlens_q),
            cu_seqlens_k: list(&self.cu_seqlens_k),
            seqused_q: list(&self.seqused_q),
            seqused_k: list(&self.seqused_k),
        }
    }
}

/// The user's tensors in place of made-up ones. Their shapes made the problem, so they fit.
fn overwrite(operands: &mut Operands, own: Option<OwnData>) {
    let Some(own) = own else { return };
    for (operand, tensor) in [(Operand::Q, own.q), (Operand::K, own.k), (Operand::V, own.v)] {
        if let Some(made_up) = operands.get_mut(operand) {
            made_up.elems_mut().copy_from_slice(&tensor.bytes);
        }
    }
}

/// Asks for the bytes of all tensors at once, and gives them back: what does not fit is an error
/// here, with the number, and not an abort somewhere later. `copies` is 2 for gradients.
fn there_is_room(
    valid: &ValidFwd,
    extents: Extents,
    copies: u64,
    workspace: Workspace,
) -> Result<(), Failure> {
    let mut bytes = u128::from(workspace.bytes);
    for (strides, shape, dtype) in [
        (valid.q, extents.q, valid.dtype_qk),
        (valid.k, extents.k, valid.dtype_qk),
        (valid.v, extents.v, valid.dtype_v),
        (valid.o, extents.o, valid.dtype_o),
    ] {
        bytes += u128::from(ValidFwd::extent_bytes(strides, shape, dtype)) * u128::from(copies);
        // An index entry for each row while it is filled.
        bytes += u128::from(shape.batch) * u128::from(shape.seq) * 16;
    }
    if let fmha::Bias::Elementwise(bias) = valid.bias {
        let shape = valid.shape_bias(bias.broadcast);
        bytes += u128::from(ValidFwd::extent_bytes(bias.strides, shape, bias.dtype)) * u128::from(copies);
    }
    bytes += u128::from(extents.lse_elems) * 4 * u128::from(copies);
    // What the check, the threads and the kernels need besides.
    bytes += 32 << 20;

    let refuse = |text: String| {
        Failure::from(Error::System { what: format!("memory for {bytes} bytes of tensors"), text })
    };
    if let Some(available) = available_bytes()
        && bytes > u128::from(available)
    {
        return Err(refuse(format!("the system has {available} available")));
    }
    let probe = usize::try_from(bytes).map_err(|error| refuse(error.to_string()))?;
    Vec::<u8>::new().try_reserve_exact(probe).map_err(|error| refuse(error.to_string()))
}

/// What Linux says is free or can be freed; unknown elsewhere. It grants more than it has, and kills
/// who believes it.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}
