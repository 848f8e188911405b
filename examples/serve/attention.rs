//! Attention of the serving example: a paged cache, one plan for every step, and a CUDA graph of each layer's call, for
//! steps with at most one token for each request.

use std::time::{Duration, Instant};

use fmha::{
    Append, BlockTable, CacheArgs, DType, DevBuffer, Device, Dims, ElemType, Error, FwdArgs, FwdPlan,
    FwdProblem, KvLayout, MaskSpec, PlanOptions, QLayout, Recording, Rotary, RotaryPairs, SeqArgs, Stream,
    Totals, f16,
};

use crate::model::{HEAD_DIM, HEADS_KV, HEADS_Q, LAYERS, MAX_LEN, WIDTH, WIDTH_KV};

/// Tokens that a page holds.
pub(crate) const PAGE: u32 = 16;
/// Most pages of a request.
pub(crate) const MAX_PAGES: u32 = MAX_LEN / PAGE;

/// Capacity of an engine.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    /// Most requests in a step.
    pub(crate) slots: u32,
    /// Most tokens in a step, of all requests together.
    pub(crate) tokens: u32,
    /// Number of pages of the cache.
    pub(crate) pages: u32,
}

/// Input of a step for each slot.
pub(crate) struct Step<'a> {
    /// New tokens of each request, perhaps none.
    pub(crate) tokens: Vec<&'a [usize]>,
    /// Number of tokens of each request in the cache.
    pub(crate) cached: Vec<i32>,
    /// Block table, `[slots, MAX_PAGES]`.
    pub(crate) table: Vec<i32>,
}

/// Pages of one layer's cache.
struct Cache {
    k: DevBuffer,
    v: DevBuffer,
}

/// Device buffers that each call reads and writes.
struct Buffers {
    q: DevBuffer,
    k_new: DevBuffer,
    v_new: DevBuffer,
    o: DevBuffer,
    offsets: DevBuffer,
    cached: DevBuffer,
    table: DevBuffer,
    cos: DevBuffer,
    sin: DevBuffer,
    workspace: Option<DevBuffer>,
}

pub(crate) struct Attention {
    device: Device,
    stream: Stream,
    plan: FwdPlan,
    room: Room,
    /// Total tokens of the step.
    total: u32,
    layers: Vec<Cache>,
    buffers: Buffers,
    graphs: Vec<Recording>,
    /// Calls that were a replay of a graph.
    pub(crate) replayed: usize,
    /// Time spent in the library and on the device, with copies.
    pub(crate) time: Duration,
}

/// Problem of every step: the most requests, each with as many tokens as a step may have.
fn problem(room: Room) -> FwdProblem {
    let dims = Dims::batch(room.slots)
        .seqlens(room.tokens.min(MAX_LEN), MAX_LEN)
        .heads(HEADS_Q, HEADS_KV)
        .head_dim(HEAD_DIM);
    let mut problem = FwdProblem::new(QLayout::Packed, KvLayout::Paged { page_size: PAGE }, DType::F16, dims);
    (problem.mask, problem.layout.seqused_k) = (MaskSpec::CAUSAL, true);
    problem.cache.append = Some(Append::packed(&problem, dims.seqlen_q));
    problem.cache.rotary =
        Some(Rotary { dim: HEAD_DIM, pairs: RotaryPairs::Half, max_pos: MAX_LEN, dtype: DType::F32 });
    problem
}

impl Attention {
    /// # Errors
    /// The device's refusal, or an error of its driver.
    pub(crate) fn new(device: &Device, room: Room, cos: &[f32], sin: &[f32]) -> Result<Self, Error> {
        // Plans are batch-invariant: a request's bits depend neither on other requests of a step nor on the pieces of
        // its prompt.
        let options = PlanOptions::default().batch_invariant(true);
        let plan = device.plan_fwd(&problem(room).validate()?, &options)?;
        let memory = device.memory();
        let halves = |count: usize| memory.alloc_of(DType::F16, count as u64);
        let integers = |count: u64| memory.alloc_of(ElemType::I32, count);
        let elems = (room.pages * PAGE) as usize * WIDTH_KV;
        // Rows that were never written are NaN, so that reading one is noticed.
        let nan = vec![f16::NAN; elems];
        let cache = || Ok::<_, Error>(Cache { k: memory.place(&nan)?, v: memory.place(&nan)? });
        let (tokens, slots) = (room.tokens as usize, room.slots as usize);
        let buffers = Buffers {
            q: halves(tokens * WIDTH)?,
            k_new: halves(tokens * WIDTH_KV)?,
            v_new: halves(tokens * WIDTH_KV)?,
            o: halves(tokens * WIDTH)?,
            offsets: integers(slots as u64 + 1)?,
            cached: integers(slots as u64)?,
            table: integers(slots as u64 * u64::from(MAX_PAGES))?,
            cos: memory.place(cos)?,
            sin: memory.place(sin)?,
            workspace: memory.workspace(plan.workspace())?,
        };
        Ok(Self {
            stream: device.stream()?,
            device: device.clone(),
            plan,
            room,
            total: 0,
            layers: (0..LAYERS).map(|_| cache()).collect::<Result<_, _>>()?,
            buffers,
            graphs: Vec::new(),
            replayed: 0,
            time: Duration::ZERO,
        })
    }

    pub(crate) fn plan(&self) -> &FwdPlan {
        &self.plan
    }

    /// Uploads the data that all layers of a step share. Returns the first row of each request, and the number of rows.
    ///
    /// # Errors
    /// An error of the driver.
    pub(crate) fn begin(&mut self, step: &Step<'_>) -> Result<Vec<i32>, Error> {
        let began = Instant::now();
        let mut offsets = vec![0i32];
        for tokens in &step.tokens {
            offsets.push(offsets[offsets.len() - 1] + tokens.len() as i32);
        }
        self.total = offsets[offsets.len() - 1].unsigned_abs();
        let (memory, buffers) = (self.device.memory(), &mut self.buffers);
        memory.upload(&offsets, &mut buffers.offsets)?;
        memory.upload(&step.cached, &mut buffers.cached)?;
        memory.upload(&step.table, &mut buffers.table)?;
        self.time += began.elapsed();
        Ok(offsets)
    }

    /// Appends a layer's new keys and values to its pages and attends: rows of Q to rows of O.
    ///
    /// # Errors
    /// The run's refusal, or an error of the driver.
    pub(crate) fn layer(
        &mut self,
        at: usize,
        q: &[f32],
        k_new: &[f32],
        v_new: &[f32],
    ) -> Result<Vec<f32>, Error> {
        let began = Instant::now();
        let (memory, buffers) = (self.device.memory(), &mut self.buffers);
        for (rows, buffer) in [(q, &mut buffers.q), (k_new, &mut buffers.k_new), (v_new, &mut buffers.v_new)]
        {
            let halves: Vec<f16> = rows.iter().map(|&x| f16::from_f32(x)).collect();
            memory.upload(&halves, buffer)?;
        }
        if self.total <= self.room.slots && self.device.has_streams() {
            self.replay(at)?;
        } else {
            let mut args = arguments(&mut self.layers[at], &mut self.buffers, self.room, self.total);
            self.plan.run(&mut args, &self.stream)?;
        }
        self.stream.synchronize()?;
        let mut o = vec![f16::ZERO; q.len()];
        self.device.memory().download(&self.buffers.o, &mut o)?;
        self.time += began.elapsed();
        Ok(o.into_iter().map(f16::to_f32).collect())
    }

    /// Replays a graph for a step with at most as many tokens as slots. The graph was captured for the most, and reads
    /// the actual number on the device.
    fn replay(&mut self, at: usize) -> Result<(), Error> {
        if self.graphs.is_empty() {
            for cache in &mut self.layers {
                let mut args = arguments(cache, &mut self.buffers, self.room, self.room.slots);
                let graph = self.stream.capture(|| self.plan.run(&mut args, &self.stream))?;
                self.graphs.push(graph);
            }
        }
        self.replayed += 1;
        // SAFETY: the buffers live as long as the graphs, and `layer` waits for the stream before other code uses them.
        unsafe { self.graphs[at].replay(&self.stream) }
    }
}

fn arguments<'a>(cache: &'a mut Cache, buffers: &'a mut Buffers, room: Room, total: u32) -> FwdArgs<'a> {
    let totals =
        Totals { total_q: Some(total), total_new: Some(total), num_pages: Some(room.pages), ..Totals::NONE };
    let seq = SeqArgs::default()
        .totals(totals)
        .cu_seqlens_q(buffers.offsets.slice())
        .cu_seqlens_new(buffers.offsets.slice())
        .seqused_k(buffers.cached.slice())
        .block_table(BlockTable { pages: buffers.table.slice(), max_pages: MAX_PAGES });
    let updates = CacheArgs::default()
        .k_new(buffers.k_new.slice())
        .v_new(buffers.v_new.slice())
        .cos(buffers.cos.slice())
        .sin(buffers.sin.slice());
    FwdArgs::new(buffers.q.slice(), cache.k.slice_mut(), cache.v.slice_mut(), buffers.o.slice_mut())
        .seq(seq)
        .cache(updates)
        .workspace(buffers.workspace.as_mut().map(DevBuffer::slice_mut))
}
