//! One problem with its tensors on a backend: planned once, called many times, read back.

use std::rc::Rc;

use fmha::{
    Bias, BwdArgs, BwdPlan, DType, DevBuffer, DevSlice, DevSliceMut, DeviceMemory, DropoutSeed, Error,
    FmhaBackend, FwdArgs, FwdPlan, MemorySpace, PlanOptions, ScoreArgs, SeqArgs, Stream, ValidFwd,
};

use super::data::{file_shape, lse_shape};
use super::failure::Failure;
use super::files::Tensor;
use super::inputs::HostTensors;
use super::setup::Setup;

/// Bytes in host memory at an address that every element type may have.
#[derive(Clone, Debug, Default)]
pub(super) struct Aligned {
    words: Vec<u64>,
    bytes: usize,
}

impl Aligned {
    /// `bytes` zeros for `what`, or an error that says how many they were to be.
    pub(super) fn zeros(what: &str, bytes: u64) -> Result<Self, Failure> {
        let no_memory = |reason: String| {
            Failure::from(Error::System { what: format!("{what} of {bytes} bytes"), text: reason })
        };
        let length = usize::try_from(bytes).map_err(|error| no_memory(error.to_string()))?;
        let mut words = Vec::new();
        words.try_reserve_exact(length.div_ceil(8)).map_err(|error| no_memory(error.to_string()))?;
        words.resize(length.div_ceil(8), 0);
        Ok(Self { words, bytes: length })
    }

    pub(super) fn of(what: &str, bytes: &[u8]) -> Result<Self, Failure> {
        let mut copy = Self::zeros(what, bytes.len() as u64)?;
        copy.as_mut().copy_from_slice(bytes);
        Ok(copy)
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }
}

impl AsMut<[u8]> for Aligned {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

/// A tensor where the backend wants it, and on the host.
pub(super) struct Placed {
    host: Aligned,
    device: Option<DevBuffer>,
}

impl Placed {
    fn new(memory: &dyn DeviceMemory, host: Aligned) -> Result<Self, Failure> {
        let device = match memory.space() {
            MemorySpace::Host => None,
            MemorySpace::Device => {
                let mut buffer = memory.alloc(host.bytes as u64)?;
                memory.upload(host.as_ref(), &mut buffer)?;
                Some(buffer)
            }
        };
        Ok(Self { host, device })
    }

    fn slice(&self) -> DevSlice<'_> {
        match &self.device {
            None => DevSlice::host(self.host.as_ref()),
            Some(buffer) => buffer.slice(),
        }
    }

    fn slice_mut(&mut self) -> DevSliceMut<'_> {
        match &mut self.device {
            None => DevSliceMut::host(self.host.as_mut()),
            Some(buffer) => buffer.slice_mut(),
        }
    }

    fn read_back(&mut self, memory: &dyn DeviceMemory) -> Result<&[u8], Failure> {
        if let Some(buffer) = &self.device {
            memory.download(buffer, self.host.as_mut())?;
        }
        Ok(self.host.as_ref())
    }
}

/// What the call computes, and the kernel that was chosen for it.
enum Plan {
    Forward(Rc<FwdPlan>),
    /// The backward kernel, and the forward one that made its O and LSE.
    Backward(Rc<BwdPlan>, Rc<FwdPlan>),
}

/// Every tensor of a call; those the problem does not have are `None`.
pub(super) struct Job<'a> {
    backend: &'a dyn FmhaBackend,
    setup: &'a Setup,
    plan: Plan,
    inputs: Inputs,
    lengths: [Option<Placed>; 4],
    o: Placed,
    lse: Option<Placed>,
    gradients: Option<Gradients>,
    workspace: Option<DevBuffer>,
}

/// What a call reads, but for the lengths.
struct Inputs {
    q: Placed,
    k: Placed,
    v: Placed,
    bias: Option<Placed>,
    alibi_slopes: Option<Placed>,
    sink: Option<Placed>,
    descale_q: Option<Placed>,
    descale_k: Option<Placed>,
    descale_v: Option<Placed>,
    scale_o: Option<Placed>,
    dropout: DropoutSeed,
}

/// What a backward call reads and writes besides.
struct Gradients {
    dout: Placed,
    dlse: Option<Placed>,
    dq: Placed,
    dk: Placed,
    dv: Placed,
    dbias: Option<Placed>,
    dsink: Option<Placed>,
}

impl Inputs {
    fn place(
        memory: &dyn DeviceMemory,
        host: &mut HostTensors,
        dropout: DropoutSeed,
    ) -> Result<Self, Failure> {
        let mut required = |name| Placed::new(memory, host.take(name).unwrap_or_default());
        let (q, k, v) = (required("q")?, required("k")?, required("v")?);
        let mut optional = |name| host.take(name).map(|bytes| Placed::new(memory, bytes)).transpose();
        Ok(Self {
            q,
            k,
            v,
            bias: optional("bias")?,
            alibi_slopes: optional("alibi_slopes")?,
            sink: optional("sink")?,
            descale_q: optional("descale_q")?,
            descale_k: optional("descale_k")?,
            descale_v: optional("descale_v")?,
            scale_o: optional("scale_o")?,
            dropout,
        })
    }

    fn score(&self) -> ScoreArgs<'_> {
        ScoreArgs {
            bias: self.bias.as_ref().map(Placed::slice),
            alibi_slopes: self.alibi_slopes.as_ref().map(Placed::slice),
            sink: self.sink.as_ref().map(Placed::slice),
            descale_q: self.descale_q.as_ref().map(Placed::slice),
            descale_k: self.descale_k.as_ref().map(Placed::slice),
            descale_v: self.descale_v.as_ref().map(Placed::slice),
            dropout: self.dropout,
        }
    }
}

fn seq_args(lengths: &[Option<Placed>; 4]) -> SeqArgs<'_> {
    let [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k] =
        lengths.each_ref().map(|lengths| lengths.as_ref().map(Placed::slice));
    SeqArgs { cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k }
}

impl<'a> Job<'a> {
    /// Plans `setup` on `backend` and puts its tensors there. Outputs are NaN until they are written.
    pub(super) fn new(
        backend: &'a dyn FmhaBackend,
        setup: &'a Setup,
        options: &PlanOptions,
        mut host: HostTensors,
    ) -> Result<Self, Failure> {
        let memory = backend.memory();
        let valid = setup.fwd.clone().validate()?;
        let (plan, workspace_bytes) = match &setup.bwd {
            None => {
                let plan = backend.plan_fwd(&valid, options)?;
                let bytes = plan.workspace_bytes;
                (Plan::Forward(Rc::new(plan)), bytes)
            }
            Some(bwd) => {
                let plan = backend.plan_bwd(&bwd.clone().validate()?, options)?;
                let forward = PlanOptions { allow_fallback: true, ..PlanOptions::default() };
                let forward = backend.plan_fwd(&valid, &forward)?;
                let bytes = plan.workspace_bytes.max(forward.workspace_bytes);
                (Plan::Backward(Rc::new(plan), Rc::new(forward)), bytes)
            }
        };
        let nan = |name: &'static str, bytes: u64| {
            let mut bytes = Aligned::zeros(name, bytes)?;
            bytes.as_mut().fill(0xff);
            Placed::new(memory, bytes)
        };
        let lengths = [&setup.cu_seqlens_q, &setup.cu_seqlens_k, &setup.seqused_q, &setup.seqused_k];
        let mut placed = [None, None, None, None];
        for (placed, lengths) in placed.iter_mut().zip(lengths) {
            if let Some(lengths) = lengths {
                let bytes = Aligned::of("cu_seqlens", bytemuck::cast_slice(lengths))?;
                *placed = Some(Placed::new(memory, bytes)?);
            }
        }
        let extent = ValidFwd::extent_bytes;
        let gradients = match &setup.bwd {
            None => None,
            Some(bwd) => Some(Gradients {
                dout: Placed::new(memory, host.take("dout").unwrap_or_default())?,
                dlse: host.take("dlse").map(|bytes| Placed::new(memory, bytes)).transpose()?,
                dq: nan("dq", extent(bwd.dq, valid.shape_q(), bwd.dtype_grad))?,
                dk: nan("dk", extent(bwd.dk, valid.shape_k(), bwd.dtype_grad))?,
                dv: nan("dv", extent(bwd.dv, valid.shape_v(), bwd.dtype_grad))?,
                dbias: match (bwd.dbias, valid.bias) {
                    (Some(dbias), Bias::Elementwise(bias)) => {
                        let shape = valid.shape_bias(bias.broadcast);
                        Some(nan("dbias", extent(dbias.strides, shape, dbias.dtype))?)
                    }
                    _ => None,
                },
                dsink: if bwd.write_dsink {
                    Some(nan("dsink", u64::from(valid.dims.num_heads_q) * 4)?)
                } else {
                    None
                },
            }),
        };
        let mut job = Self {
            backend,
            setup,
            plan,
            inputs: Inputs::place(memory, &mut host, setup.dropout)?,
            lengths: placed,
            o: nan("o", extent(valid.o, valid.shape_o(), valid.dtype_o))?,
            lse: if valid.write_lse { Some(nan("lse", valid.lse_elems() * 4)?) } else { None },
            gradients,
            workspace: if workspace_bytes > 0 { Some(memory.alloc(workspace_bytes)?) } else { None },
        };
        if let Plan::Backward(_, forward) = &job.plan {
            let forward = Rc::clone(forward);
            job.call_forward(&forward)?;
        }
        Ok(job)
    }

    /// The kernel's name.
    pub(super) fn kernel(&self) -> &str {
        match &self.plan {
            Plan::Forward(plan) => &plan.kernel,
            Plan::Backward(plan, _) => &plan.kernel,
        }
    }

    /// The whole plan, one fact a line.
    pub(super) fn plan_text(&self) -> String {
        match &self.plan {
            Plan::Forward(plan) => plan.to_string(),
            Plan::Backward(plan, _) => plan.to_string(),
        }
    }

    /// Queues the call and waits until it is done.
    pub(super) fn call(&mut self) -> Result<(), Failure> {
        match &self.plan {
            Plan::Forward(plan) => {
                let plan = Rc::clone(plan);
                self.call_forward(&plan)
            }
            Plan::Backward(plan, _) => {
                let plan = Rc::clone(plan);
                self.call_backward(&plan)
            }
        }
    }

    fn call_forward(&mut self, plan: &FwdPlan) -> Result<(), Failure> {
        let Inputs { q, k, v, scale_o, .. } = &self.inputs;
        let args = FwdArgs {
            lse: self.lse.as_mut().map(Placed::slice_mut),
            seq: seq_args(&self.lengths),
            score: self.inputs.score(),
            scale_o: scale_o.as_ref().map(Placed::slice),
            workspace: self.workspace.as_mut().filter(|_| plan.workspace_bytes > 0).map(DevBuffer::slice_mut),
            ..FwdArgs::new(q.slice(), k.slice(), v.slice(), self.o.slice_mut())
        };
        self.backend.run_fwd(plan, &args, Stream::DEFAULT)?;
        Ok(self.backend.memory().synchronize(Stream::DEFAULT)?)
    }

    fn call_backward(&mut self, plan: &BwdPlan) -> Result<(), Failure> {
        let (Some(gradients), Some(lse)) = (&mut self.gradients, &self.lse) else { return Ok(()) };
        let args = BwdArgs {
            q: self.inputs.q.slice(),
            k: self.inputs.k.slice(),
            v: self.inputs.v.slice(),
            o: self.o.slice(),
            lse: lse.slice(),
            dout: gradients.dout.slice(),
            dlse: gradients.dlse.as_ref().map(Placed::slice),
            dq: gradients.dq.slice_mut(),
            dk: gradients.dk.slice_mut(),
            dv: gradients.dv.slice_mut(),
            dbias: gradients.dbias.as_mut().map(Placed::slice_mut),
            dsink: gradients.dsink.as_mut().map(Placed::slice_mut),
            seq: seq_args(&self.lengths),
            score: self.inputs.score(),
            workspace: self.workspace.as_mut().filter(|_| plan.workspace_bytes > 0).map(DevBuffer::slice_mut),
        };
        self.backend.run_bwd(plan, &args, Stream::DEFAULT)?;
        Ok(self.backend.memory().synchronize(Stream::DEFAULT)?)
    }

    /// Brings every result to the host.
    pub(super) fn read_back(&mut self) -> Result<(), Failure> {
        let memory = self.backend.memory();
        let gradients = self.gradients.as_mut();
        let results = [Some(&mut self.o), self.lse.as_mut()].into_iter().chain(
            gradients.into_iter().flat_map(|Gradients { dq, dk, dv, dbias, dsink, .. }| {
                [Some(dq), Some(dk), Some(dv), dbias.as_mut(), dsink.as_mut()]
            }),
        );
        for result in results.flatten() {
            result.read_back(memory)?;
        }
        Ok(())
    }

    /// A result that was [read back](Self::read_back), as a file has it.
    pub(super) fn result(&self, name: &str) -> Option<Tensor> {
        let fwd = &self.setup.fwd;
        let like_input = |shape: fmha::Shape, strides: fmha::Strides| file_shape(shape, strides, fwd.mode);
        let tensor = |placed: &Placed, dtype: DType, shape: Vec<u64>| Tensor {
            dtype,
            shape,
            bytes: placed.host.as_ref().to_vec(),
        };
        if let (Some(bwd), Some(gradients)) = (&self.setup.bwd, &self.gradients) {
            let grad = bwd.dtype_grad;
            return match name {
                "dq" => Some(tensor(&gradients.dq, grad, like_input(fwd.shape_q(), bwd.dq))),
                "dk" => Some(tensor(&gradients.dk, grad, like_input(fwd.shape_k(), bwd.dk))),
                "dv" => Some(tensor(&gradients.dv, grad, like_input(fwd.shape_v(), bwd.dv))),
                "dbias" => match (&gradients.dbias, bwd.dbias, fwd.bias) {
                    (Some(placed), Some(dbias), Bias::Elementwise(bias)) => {
                        let shape = fwd.shape_bias(bias.broadcast);
                        let extents = [shape.batch, shape.head, shape.seq, shape.dim].map(u64::from).to_vec();
                        Some(tensor(placed, dbias.dtype, extents))
                    }
                    _ => None,
                },
                "dsink" => {
                    let heads = vec![u64::from(fwd.dims.num_heads_q)];
                    gradients.dsink.as_ref().map(|placed| tensor(placed, DType::F32, heads))
                }
                _ => None,
            };
        }
        match name {
            "o" => Some(tensor(&self.o, fwd.dtype_o, file_shape(fwd.shape_o(), fwd.o, fwd.mode))),
            "lse" => self.lse.as_ref().map(|placed| tensor(placed, DType::F32, lse_shape(self.setup))),
            _ => None,
        }
    }
}

impl Job<'_> {
    /// The arguments of a forward call in host memory, with `unused` for O: for the reference.
    pub(super) fn host_forward<'h>(&'h self, unused: &'h mut [u8]) -> FwdArgs<'h> {
        let host = |placed: &'h Placed| DevSlice::host(placed.host.as_ref());
        let optional = |placed: &'h Option<Placed>| placed.as_ref().map(host);
        let Inputs { q, k, v, bias, alibi_slopes, sink, descale_q, descale_k, descale_v, scale_o, dropout } =
            &self.inputs;
        let mut args = FwdArgs::new(host(q), host(k), host(v), DevSliceMut::host(unused));
        args.seq = self.setup.seq_args();
        args.score = ScoreArgs {
            bias: optional(bias),
            alibi_slopes: optional(alibi_slopes),
            sink: optional(sink),
            descale_q: optional(descale_q),
            descale_k: optional(descale_k),
            descale_v: optional(descale_v),
            dropout: *dropout,
        };
        args.scale_o = optional(scale_o);
        args
    }

    pub(super) fn setup(&self) -> &Setup {
        self.setup
    }

    /// Bytes of a result that was [read back](Self::read_back).
    pub(super) fn host_o(&self) -> &[u8] {
        self.o.host.as_ref()
    }

    pub(super) fn host_lse(&self) -> Option<&[u8]> {
        self.lse.as_ref().map(|lse| lse.host.as_ref())
    }
}
