//! The TMA tensor maps of a forward call, for Q, K, V and the bias.

use std::sync::Mutex;

use fmha_core::abi::View;
use fmha_core::args::ElemType;
use fmha_core::error::Result;
use fmha_core::{Bias, DType, FwdProblem, Shape, Strides, Totals, VLayout};

use crate::nvidia::FwdCall;
use crate::tma::{EncodeTensorMap, TensorMap, TensorMapFacts, stride_bytes};

/// A kernel argument with the tensor maps one after another. A kernel that does not load a bias by TMA may declare only
/// the first three.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub struct Maps {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    bias: TensorMap,
}

/// Extents of the boxes that a kernel's TMA instructions load.
pub struct Boxes {
    /// Box of Q: (dim, heads of a group, rows, kv heads, batch).
    pub q: [i32; 5],
    /// Box of K: (dim, rows, heads, batch).
    pub k: [i32; 4],
    /// Box of V; (rows, dim, heads, batch) for a column-major V.
    pub v: [i32; 4],
    /// Box (key, query, head, batch) of an elementwise bias, if TMA loads it.
    pub bias: Option<[i32; 4]>,
    /// Place of a prepared V; `None` if V is read from the caller's memory.
    pub prepared_v: Option<BlocksOfV>,
    /// Place of rotated queries, which have a batch axis even if they are packed; `None` if Q is read from the
    /// caller's memory.
    pub turned_q: Option<View>,
}

/// A V that lies in the workspace as blocks in the order of a kernel's tiles.
#[derive(Clone, Copy)]
pub struct BlocksOfV {
    /// Address of the first block, on the device.
    pub address: u64,
    /// Type of the elements.
    pub dtype: DType,
    /// (columns, rows, blocks, sequences times kv heads).
    pub dims: [u64; 4],
}

impl BlocksOfV {
    fn facts(&self, box_dims: [i32; 4]) -> TensorMapFacts<4, 3> {
        let row = self.dims[0] * self.dtype.size_bytes();
        let block = row * self.dims[1];
        TensorMapFacts {
            name: "v",
            dtype: self.dtype,
            address: self.address,
            dims: self.dims.map(|extent| extent.max(1)),
            strides_bytes: [row, block, block * self.dims[2].max(1)],
            box_dims: box_dims.map(i32::unsigned_abs),
        }
    }
}

/// Inputs of tensor maps besides the plan: addresses of Q, K, V and the bias, and rows of packed tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Places {
    addresses: [u64; 4],
    totals: Totals,
}

/// The maps of a step's last call, for reuse: most calls have the addresses of the call before. On the host of an
/// H200 the driver takes 65 ns to encode each map, of some 3.7 us that a call of the C library takes from Python.
#[derive(Default)]
pub struct LastMaps(Mutex<Option<(Places, Maps)>>);

impl LastMaps {
    /// Encodes the tensor maps of a call, or returns those of the last call. If another thread's call holds the lock of
    /// the last maps, this call encodes its own maps instead of waiting. `v` is a V in the workspace; the boxes are
    /// computed only if maps are encoded.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn of<D: EncodeTensorMap>(
        &self,
        call: &FwdCall<'_>,
        v: Option<BlocksOfV>,
        boxes: impl FnOnce() -> Boxes,
    ) -> Result<Maps> {
        self.of_turned::<D>(call, None, v, boxes)
    }

    /// Like [`Self::of`], for a call whose queries an earlier launch has rotated and written to the workspace at `q`.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn of_turned<D: EncodeTensorMap>(
        &self,
        call: &FwdCall<'_>,
        q: Option<View>,
        v: Option<BlocksOfV>,
        boxes: impl FnOnce() -> Boxes,
    ) -> Result<Maps> {
        let args = call.args;
        let bias = args.score.bias.as_ref().map_or(0, |bias| bias.as_ptr() as u64);
        let v = v.map_or(args.v_slice().as_ptr() as u64, |prepared| prepared.address);
        let q = q.map_or(args.q.as_ptr() as u64, |turned| turned.data.0);
        let addresses = [q, args.k_slice().as_ptr() as u64, v, bias];
        let places = Places { addresses, totals: args.seq.totals };
        if let Ok(last) = self.0.try_lock()
            && let Some((known, maps)) = &*last
            && *known == places
        {
            return Ok(*maps);
        }
        let maps = MapFacts::of(call, &boxes()).encode::<D>()?;
        if let Ok(mut last) = self.0.try_lock() {
            *last = Some((places, maps));
        }
        Ok(maps)
    }
}

impl Maps {
    /// Maps with no content, for a kernel that copies without TMA.
    pub(crate) const UNREAD: Self =
        Self { q: TensorMap::UNREAD, k: TensorMap::UNREAD, v: TensorMap::UNREAD, bias: TensorMap::UNREAD };
}

/// Contents of the tensor maps: Q `(dim, head in group, row, kv head, batch)`, K and V `(dim, row, head,
/// batch)`, the bias `(key, query, head, batch)`.
pub struct MapFacts {
    /// Tensor map of Q.
    pub q: TensorMapFacts<5, 4>,
    /// Tensor map of K.
    pub k: TensorMapFacts<4, 3>,
    /// Tensor map of V, or of the V that is prepared in the workspace.
    pub v: TensorMapFacts<4, 3>,
    /// Tensor map of the bias, if TMA loads it.
    pub bias: Option<TensorMapFacts<4, 3>>,
}

impl MapFacts {
    /// The contents of a call's tensor maps, for a kernel that loads `boxes`.
    #[must_use]
    pub fn of(call: &FwdCall<'_>, boxes: &Boxes) -> Self {
        let problem = call.problem;
        let ratio = problem.gqa_ratio();
        let mut extents = problem.extents(call.args.seq.totals);
        if let Some(scales) = problem.block_scales {
            [extents.q, extents.k, extents.v] = scales.stored(&extents, problem.layout.v);
        }
        let [dtype_qk, dtype_k, dtype_v] = stored_types(problem);
        let size = dtype_qk.size_bytes();
        let own = || (extents.q, problem.strides.q, call.args.q.as_ptr() as u64);
        let of_turned = |view: View| {
            let q = Shape { batch: problem.dims.batch, seq: problem.dims.seqlen_q, ..extents.q };
            let strides = Strides { batch: view.batch, seq: view.row, head: view.head, dim: view.dim };
            (q, strides, view.data.0)
        };
        let (q, strides, q_address) = boxes.turned_q.map_or_else(own, of_turned);
        let num_heads_kv = problem.dims.num_heads_kv;
        let q_facts = TensorMapFacts {
            name: "q",
            dtype: dtype_qk,
            address: q_address,
            dims: [q.dim, ratio, q.seq.max(1), num_heads_kv, q.batch.max(1)].map(u64::from),
            strides_bytes: [
                stride_bytes(strides.head, ratio, size),
                stride_bytes(strides.seq, q.seq, size),
                stride_bytes(strides.head * i64::from(ratio), num_heads_kv, size),
                stride_bytes(strides.batch, q.batch, size),
            ],
            box_dims: boxes.q.map(i32::unsigned_abs),
        };
        let (k, v) = (call.args.k_slice().as_ptr() as u64, call.args.v_slice().as_ptr() as u64);
        let of_k = ("k", dtype_k);
        let v_facts = || {
            let (of_v, strides) = (("v", dtype_v), problem.strides.v);
            let mut facts = TensorMapFacts::of_rows(of_v, [v, q_address], extents.v, strides, boxes.v);
            if problem.layout.v == VLayout::ColMajor {
                facts.dims.swap(0, 1);
                facts.strides_bytes[0] = stride_bytes(strides.dim, extents.v.dim, dtype_v.size_bytes());
            }
            facts
        };
        Self {
            q: q_facts,
            k: TensorMapFacts::of_rows(of_k, [k, q_address], extents.k, problem.strides.k, boxes.k),
            v: boxes.prepared_v.map_or_else(v_facts, |prepared| prepared.facts(boxes.v)),
            bias: boxes.bias.and_then(|box_dims| bias_facts(call, box_dims)),
        }
    }

    /// # Errors
    /// What the driver refuses.
    fn encode<D: EncodeTensorMap>(&self) -> Result<Maps> {
        let bias = self.bias.as_ref().map_or(Ok(TensorMap::UNREAD), TensorMapFacts::encode::<D>)?;
        Ok(Maps { q: self.q.encode::<D>()?, k: self.k.encode::<D>()?, v: self.v.encode::<D>()?, bias })
    }
}

/// Types of Q, K and V in memory: with scales by blocks, the type of their one-byte elements.
pub(crate) fn stored_types(problem: &FwdProblem) -> [DType; 3] {
    match problem.block_scales.map(|scales| scales.format.elem()) {
        Some(ElemType::Number(elem)) => [elem; 3],
        // NVFP4's pairs of elements are moved as bytes.
        Some(ElemType::E2m1Pair) => [DType::E4m3Fn; 3],
        _ => [problem.dtypes.qk, problem.stored_k(), problem.stored_v()],
    }
}

/// The map of an elementwise bias. A broadcast axis (stride 0) has extent 1, as the kernel assumes.
fn bias_facts(call: &FwdCall<'_>, box_dims: [i32; 4]) -> Option<TensorMapFacts<4, 3>> {
    let (Bias::Elementwise(bias), Some(data)) = (call.problem.score.bias, &call.args.score.bias) else {
        return None;
    };
    let shape = call.problem.shape_bias(bias.broadcast);
    let size = bias.dtype.size_bytes();
    let axes =
        [(bias.strides.head, shape.head), (bias.strides.batch, shape.batch)].map(|(stride, extent)| {
            if stride == 0 || extent <= 1 { (1 << 20, 1) } else { (stride.unsigned_abs() * size, extent) }
        });
    let rows = if shape.seq > 1 { bias.strides.seq.unsigned_abs() * size } else { 1 << 20 };
    Some(TensorMapFacts {
        name: "bias",
        dtype: bias.dtype,
        address: data.as_ptr() as u64,
        dims: [shape.dim.max(1), shape.seq.max(1), axes[0].1.max(1), axes[1].1.max(1)].map(u64::from),
        strides_bytes: [rows, axes[0].0, axes[1].0],
        box_dims: box_dims.map(i32::unsigned_abs),
    })
}
