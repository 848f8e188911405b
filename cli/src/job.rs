//! One problem with its tensors on a backend: planned once, run many times, read back.

use std::collections::BTreeMap;

use fmha::{BwdPlan, Device, Dims, Extents, FwdPlan, PlanOptions, Stream, VLayout, ValidFwd, Workspace};
use fmha_conformance::execute::{CallTime, Resident};
use fmha_conformance::init::Init;
use fmha_conformance::tensor::{Operand, Operands, Room};
use fmha_conformance::tensors::{Data, HostBwd, HostFwd, Lengths};

use crate::data::{OwnData, col_major_shape, file_shape, lse_shape, operands_of};
use crate::failure::Failure;
use crate::files::Tensor;
use crate::memory::room_for;
use crate::setup::Setup;

/// Reads the battery's names and Composable Kernel's: `uf` or `1`, `nf`, `ui`, `ni` or `0`, `tf` or
/// `2`.
pub(super) fn init(text: &str) -> Result<Init, String> {
    match text {
        "uf" | "1" => Ok(Init::Uniform),
        "nf" => Ok(Init::Normal),
        "ui" | "ni" | "0" => Ok(Init::Integers),
        "tf" | "2" => Ok(Init::Trig),
        other => {
            other.parse().map_err(|error: fmha::ProblemError| format!("{error}, and uf, nf, ui, ni, tf"))
        }
    }
}

/// Source of the tensors' values.
pub(super) struct Source {
    /// The user's tensors: all that the problem has, or none.
    pub(super) own: Option<OwnData>,
    pub(super) init: Init,
    pub(super) seed: u64,
}

impl Source {
    pub(super) fn made_up(init: Init, seed: u64) -> Self {
        Self { own: None, init, seed }
    }
}

/// A problem, its tensors, the kernel chosen for it.
pub(super) struct Job<'a> {
    setup: &'a Setup,
    call: Call,
    resident: Resident<'a>,
}

/// The operation to call, with its plan and arguments.
pub(super) enum Call {
    Forward(Box<HostFwd>, Box<FwdPlan>),
    Backward(Box<HostBwd>, Box<BwdPlan>),
}

/// A byte that makes a NaN of every type of a result when it fills an element.
const NAN_BYTE: u8 = 0xFF;

impl Call {
    /// Plans the problem again with other options.
    pub(super) fn replan(&mut self, backend: &Device, options: &PlanOptions) -> Result<(), fmha::Error> {
        match self {
            Self::Forward(host, plan) => **plan = backend.plan_fwd(&host.problem, options)?,
            Self::Backward(host, plan) => **plan = backend.plan_bwd(&host.problem, options)?,
        }
        Ok(())
    }

    pub(super) fn workspace(&self) -> Workspace {
        match self {
            Self::Forward(_, plan) => plan.workspace(),
            Self::Backward(_, plan) => plan.workspace(),
        }
    }

    pub(super) fn operands(&self) -> &Operands {
        match self {
            Self::Forward(host, _) => &host.operands,
            Self::Backward(host, _) => &host.operands,
        }
    }

    pub(super) fn operands_mut(&mut self) -> &mut Operands {
        match self {
            Self::Forward(host, _) => &mut host.operands,
            Self::Backward(host, _) => &mut host.operands,
        }
    }

    /// Makes every floating-point result NaN again, as it is before the first run.
    pub(super) fn forget_results(&mut self) {
        let results: &[Operand] = match self {
            Self::Forward(..) => &[Operand::O, Operand::Lse],
            Self::Backward(..) => &[Operand::Dq, Operand::Dk, Operand::Dv, Operand::Dbias, Operand::Dsink],
        };
        for &result in results {
            if let Some(tensor) = self.operands_mut().get_mut(result) {
                tensor.elems_mut().fill(NAN_BYTE);
            }
        }
    }

    /// Queues the call on placed operands, and returns without waiting.
    pub(super) fn queue(&mut self, resident: &mut Resident<'_>, stream: &Stream) -> Result<(), fmha::Error> {
        match self {
            Self::Forward(host, plan) => resident.queue_fwd(plan, host, stream),
            Self::Backward(host, plan) => resident.queue_bwd(plan, host, stream),
        }
    }
}

impl<'a> Job<'a> {
    /// Plans `setup` on `backend` and copies its tensors there. Outputs are NaN until they are written.
    pub(super) fn new(
        backend: &'a Device,
        setup: &'a Setup,
        options: &PlanOptions,
        source: Source,
    ) -> Result<Self, Failure> {
        let options = &setup.options(options);
        let valid = setup.fwd.clone().validate()?;
        let Source { own, init, seed } = source;
        let data = Data { init, seed, room: Room::default() };
        let (call, resident) = match &setup.bwd {
            None => {
                let plan = backend.plan_fwd(&valid, options)?;
                there_is_room(&valid, setup.extents(), 1, plan.workspace())?;
                let mut host = HostFwd::new(setup.fwd.clone(), &setup.lengths(), data)?;
                host.dropout = setup.dropout;
                overwrite(&mut host.operands, setup, own)?;
                let resident = Resident::place(backend, &host.operands, plan.workspace())?;
                (Call::Forward(Box::new(host), Box::new(plan)), resident)
            }
            Some(bwd) => {
                let plan = backend.plan_bwd(&bwd.clone().validate()?, options)?;
                // The auxiliary forward makes O and LSE; any kernel may compute it.
                let auxiliary = PlanOptions::default().allow_fallback(true);
                let forward = backend.plan_fwd(&valid, &auxiliary)?;
                let workspace = plan.workspace().max(forward.workspace());
                there_is_room(&valid, setup.extents(), 2, workspace)?;
                let mut host = HostBwd::new(bwd.clone(), &setup.lengths(), data)?;
                host.dropout = setup.dropout;
                overwrite(&mut host.operands, setup, own)?;
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

    /// Queues the call and waits until it is done; returns its duration.
    pub(super) fn run(&mut self) -> Result<CallTime, Failure> {
        Ok(match &mut self.call {
            Call::Forward(host, plan) => self.resident.run_fwd(plan, host)?,
            Call::Backward(host, plan) => self.resident.run_bwd(plan, host)?,
        })
    }

    /// Brings every result to the host.
    pub(super) fn read_back(&mut self) -> Result<&Call, Failure> {
        self.resident.read_back(self.call.operands_mut())?;
        Ok(&self.call)
    }

    /// The call with its arguments in host memory.
    pub(super) fn call_mut(&mut self) -> &mut Call {
        &mut self.call
    }

    /// The bytes of every result on the host.
    pub(super) fn results(&mut self) -> Result<Vec<Vec<u8>>, Failure> {
        let call = self.read_back()?;
        let results: &[Operand] = match call {
            Call::Forward(..) => {
                &[Operand::O, Operand::Lse, Operand::RowMax, Operand::HeadMax, Operand::KeySum]
            }
            Call::Backward(..) => &[Operand::Dq, Operand::Dk, Operand::Dv, Operand::Dsink],
        };
        let bytes = |&operand: &Operand| Some(call.operands().get(operand)?.elems().to_vec());
        Ok(results.iter().filter_map(bytes).collect())
    }

    /// The call with its arguments in host memory.
    pub(super) fn into_call(self) -> Call {
        self.call
    }

    /// Every input of floating-point numbers, by the name that `--input` and `--operand` take.
    pub(super) fn inputs(&self) -> BTreeMap<String, Tensor> {
        let (fwd, iperm, extents) = (&self.setup.fwd, self.setup.iperm, self.setup.extents());
        let operands = self.call.operands();
        let v = match (fwd.layout.v, iperm) {
            (VLayout::RowMajor, _) => file_shape(extents.v, iperm, fwd.layout.q),
            (VLayout::ColMajor, _) => col_major_shape(extents.v, iperm, fwd.layout.q),
        };
        let rows = [
            ("q", Operand::Q, file_shape(extents.q, iperm, fwd.layout.q)),
            ("k", Operand::K, file_shape(extents.k, iperm, fwd.layout.q)),
            ("v", Operand::V, v),
        ];
        let others =
            operands_of(self.setup).into_iter().map(|wanted| (wanted.name, wanted.operand, wanted.shape));
        rows.into_iter()
            .chain(others)
            .filter_map(|(name, operand, shape)| {
                let tensor = operands.get(operand)?;
                let bytes = tensor.elems().to_vec();
                Some((name.to_owned(), Tensor { dtype: tensor.dtype, shape, bytes }))
            })
            .collect()
    }

    /// A result that was [read back](Self::read_back), in the form for a file.
    pub(super) fn result(&self, name: &str) -> Option<Tensor> {
        let fwd = &self.setup.fwd;
        let extents = self.setup.extents();
        let (iperm, operm) = (self.setup.iperm, self.setup.operm);
        let rows = |shape, permuted| file_shape(shape, permuted, fwd.layout.q);
        let (operands, operand, shape) = match (&self.call, name) {
            (Call::Forward(host, _), "o") => (&host.operands, Operand::O, rows(extents.o, operm)),
            (Call::Forward(host, _), "lse") => (&host.operands, Operand::Lse, lse_shape(self.setup)),
            (Call::Forward(host, _), "row_max") => (&host.operands, Operand::RowMax, lse_shape(self.setup)),
            (Call::Forward(host, _), "head_max") => {
                (&host.operands, Operand::HeadMax, vec![u64::from(fwd.dims.num_heads_q)])
            }
            (Call::Forward(host, _), "key_sum") => {
                let dims = [fwd.dims.batch, fwd.dims.num_heads_q, fwd.dims.seqlen_k];
                (&host.operands, Operand::KeySum, dims.map(u64::from).to_vec())
            }
            (Call::Backward(host, _), name) => {
                let (operand, shape) = match name {
                    "dq" => (Operand::Dq, rows(extents.q, iperm)),
                    "dk" => (Operand::Dk, rows(extents.k, iperm)),
                    // dV is row-major for every layout of V, and b*s*h*d if V is not b*h*s*d.
                    "dv" => (Operand::Dv, rows(extents.v, iperm && fwd.layout.v == VLayout::RowMajor)),
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
    pub(super) fn lengths(&self) -> Lengths {
        let list = |lengths: &Option<Vec<i32>>| lengths.clone().unwrap_or_default();
        Lengths {
            totals: self.totals(),
            cu_seqlens_q: list(&self.cu_seqlens_q),
            cu_seqlens_k: list(&self.cu_seqlens_k),
            seqused_q: list(&self.seqused_q),
            seqused_k: list(&self.seqused_k),
            block_table: self.cache.block_table.clone(),
            indices: self.lists.indices.clone(),
            topk_length: self.lists.topk_length.clone(),
            tree_mask: self.cache.tree_mask.clone(),
            masks: self.masks.clone(),
            ..Lengths::default()
        }
    }
}

/// Replaces made-up tensors by the user's. Their shapes were checked against the problem, so they fit.
fn overwrite(operands: &mut Operands, setup: &Setup, own: Option<OwnData>) -> Result<(), Failure> {
    let Some(own) = own else { return Ok(()) };
    for (operand, tensor) in [(Operand::Q, &own.q), (Operand::K, &own.k), (Operand::V, &own.v)] {
        fill(operands, operand, tensor)?;
    }
    for wanted in operands_of(setup) {
        fill(operands, wanted.operand, &own.operand(&wanted)?)?;
    }
    Ok(())
}

fn fill(operands: &mut Operands, operand: Operand, tensor: &Tensor) -> Result<(), Failure> {
    let Some(made_up) = operands.get_mut(operand) else { return Ok(()) };
    let (wanted, given) = (made_up.elems().len(), tensor.bytes.len());
    if wanted != given {
        return Err(Failure::wrong(format!("{operand:?}: {given} bytes are given, {wanted} wanted")));
    }
    made_up.elems_mut().copy_from_slice(&tensor.bytes);
    Ok(())
}

/// Allocates the bytes of all tensors at once, and frees them: too large a problem is an error here, with the
/// number, instead of an abort later. `copies` is 2 for gradients.
fn there_is_room(
    valid: &ValidFwd,
    extents: Extents,
    copies: u64,
    workspace: Workspace,
) -> Result<(), Failure> {
    let mut bytes = u128::from(workspace.bytes);
    for (strides, shape, dtype) in [
        (valid.strides.q, extents.q, valid.dtypes.qk),
        (valid.strides.k, extents.k, valid.stored_k()),
        (valid.strides.v, extents.v, valid.stored_v()),
        (valid.strides.o, extents.o, valid.dtypes.o),
    ] {
        bytes += u128::from(ValidFwd::extent_bytes(strides, shape, dtype)) * u128::from(copies);
        // Each row needs an index entry while it is filled.
        bytes += u128::from(shape.batch) * u128::from(shape.seq) * 16;
    }
    if let fmha::Bias::Elementwise(bias) = valid.score.bias {
        let shape = valid.shape_bias(bias.broadcast);
        bytes += u128::from(ValidFwd::extent_bytes(bias.strides, shape, bias.dtype)) * u128::from(copies);
    }
    bytes += u128::from(extents.lse_elems) * 4 * u128::from(copies);
    // An allowance for the check, the threads and the kernels.
    bytes += 32 << 20;
    let Dims { batch, seqlen_q, seqlen_k, num_heads_q, head_dim_qk, head_dim_v, .. } = valid.dims;
    let what = format!(
        "the tensors of batch {batch}, num_heads_q {num_heads_q}, seqlen_q {seqlen_q}, seqlen_k {seqlen_k}, \
         head_dim_qk {head_dim_qk}, head_dim_v {head_dim_v}"
    );
    room_for(&what, bytes)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::check::{Verify, check};
    use crate::progress::Progress;
    use crate::{Action, Command};

    fn setup(options: &str) -> Setup {
        let line = format!("fmha explain -b 1 --heads 2 -s 40 -d 16 --prec bf16 {options}");
        match Command::try_parse_from(line.split(' ')).unwrap().action {
            Action::Explain(args) => args.problem().setup(None).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn results_that_were_forgotten_are_wrong_until_they_are_written_again() {
        let backend = "cpu".parse::<fmha::Backend>().unwrap().open().unwrap();
        let backend = &backend;
        let passes = |call: &Call| check(call, Verify::Full, None, &Progress::new("")).unwrap().passed();
        for options in ["--lse", "--backward --sink --dsink --bias e --dbias"] {
            let setup = setup(options);
            let plan_options = PlanOptions::default();
            let source = Source::made_up(Init::Normal, 0);
            let mut job = Job::new(backend, &setup, &plan_options, source).unwrap();
            job.run().unwrap();
            job.read_back().unwrap();
            let mut call = job.into_call();
            assert!(passes(&call), "{options}");

            call.forget_results();
            assert!(!passes(&call), "{options}");
            call.replan(backend, &plan_options).unwrap();
            let mut resident = Resident::place(backend, call.operands(), call.workspace()).unwrap();
            call.queue(&mut resident, &backend.default_stream()).unwrap();
            resident.read_back(call.operands_mut()).unwrap();
            assert!(passes(&call), "{options}");
        }
    }
}
