//! `cdna_bwd`: backward on MFMA, deterministic.
//!
//! A launch before computes LSE and delta of each query; one sums dQ, one (of the widest rows two) dK and dV, each
//! workgroup the gradients of its own rows alone; one behind takes what the products cannot (`fmha/cdna/bwd/rest.h`).

pub mod recipe;
mod tiles;

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _, BwdParams, DevPtr};
use fmha_core::bwd_workspace::{BwdRows, BwdWorkspace};
use fmha_core::fields::Takes;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::BwdSpec;
use fmha_core::{
    Bias, BwdArgs, BwdProblem, DType, MaskKind, PlanOptions, ProblemError, Refusal, abi_enum, abi_spec,
    abi_struct, check_addresses,
};

use crate::device::{Device, needs_mfma, refuse};
use crate::simt::NUM_THREADS as ROW_THREADS;
use crate::{LoadPath, StorePath};
use tiles::{LoadsAndStores, tiles};

/// The kernel's name in plans and refusals.
pub const NAME: &str = "cdna_bwd";
/// The launch before: LSE and delta.
pub const STATS: &str = "cdna_bwd_stats";
/// The launch behind.
pub const REST: &str = "cdna_bwd_rest";
/// What the entries of products include.
pub const HEADER: &str = "fmha/cdna/bwd/main.h";
const REST_HEADER: &str = "fmha/cdna/bwd/rest.h";

/// Own rows of a wave, and walked rows of a block.
const WAVE_ROWS: u32 = 32;
const WAVE_THREADS: i32 = 64;
const MAX_HEAD_DIM: u32 = 256;
/// Rows are padded to these many elements: a line of LDS banks.
const LINE: u32 = 64;
const WAVES_OF_A_ROW_WORKGROUP: u64 = 4;
const DWORD: i64 = 4;
const ELEM_BYTES: i64 = 2;

/// What a launch sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BwdSums {
    /// dQ of a block of queries.
    Dq,
    /// dK and dV of a block of keys.
    DkDv,
    /// dK alone.
    Dk,
    /// dV alone.
    Dv,
}

abi_enum!(BwdSums { Dq, DkDv, Dk, Dv });

impl BwdSums {
    /// The launch's name in plans.
    #[must_use]
    pub const fn kernel(self) -> &'static str {
        match self {
            Self::Dq => "cdna_bwd_dq",
            Self::DkDv => "cdna_bwd_dkdv",
            Self::Dk => "cdna_bwd_dk",
            Self::Dv => "cdna_bwd_dv",
        }
    }

    const fn makes_ds(self) -> bool {
        !matches!(self, Self::Dv)
    }

    const fn makes_dv(self) -> bool {
        matches!(self, Self::DkDv | Self::Dv)
    }
}

abi_spec! {
    /// What the products of a backward call are compiled for: what changes the instructions of the main loops. All else
    /// of a problem is a number that they read.
    pub struct CdnaBwdSpec {
        /// Q, K, V and dO; P and dS as operands.
        pub dtype: DType,
        /// dQ, dK and dV.
        pub dtype_grad: DType,
        /// Elements of a query's or key's row, padded to whole 64.
        pub head_dim_qk: i32,
        /// Elements of a value's or output's row, padded to whole 64.
        pub head_dim_v: i32,
        /// `Full`: no band. Any other: the band of the call, bounded or not, and its sink columns.
        pub mask: MaskKind,
        /// Whether there may be a soft-cap, a bias or slopes.
        pub modifies: bool,
        /// Whether there may be dropout.
        pub dropout: bool,
    }
}

abi_spec! {
    /// How a launch of products computes.
    pub struct CdnaBwdTile {
        /// Own rows of a workgroup, whose gradients it sums: 32 a wave.
        pub rows: i32 = Takes::among(&[64, 128, 256]).tuned(),
        /// Walked rows of a block.
        pub columns: i32 = Takes::among(&[32, 64]).tuned(),
        /// Blocks in LDS at a time.
        pub stages: i32 = Takes::within(1, 2).tuned(),
        /// Waves of a SIMD that the compiler leaves registers for.
        pub waves: i32 = Takes::nothing(),
        /// How Q, K, V and dO are read.
        pub load: LoadPath = Takes::nothing(),
        /// How gradients are written.
        pub store: StorePath = Takes::nothing(),
        /// What is summed.
        pub sums: BwdSums = Takes::nothing(),
        /// Of a workgroup; the device's text asserts it.
        pub lds_bytes: i32 = Takes::nothing(),
    }
}

abi_struct! {
    /// What the launches of products read.
    pub struct CdnaBwdParams {
        /// What all backward kernels read.
        pub bwd: BwdParams,
        /// Elements of a query's or key's row.
        pub head_dim_qk: i32,
        /// Elements of a value's or output's row.
        pub head_dim_v: i32,
        /// The elementwise bias' type, as [`DType`] counts.
        pub dtype_bias: i32,
        /// 1: probabilities are dropped.
        pub drops: i32,
    }
}

impl CdnaBwdTile {
    /// Threads of a workgroup.
    #[must_use]
    pub const fn num_threads(&self) -> u32 {
        (self.rows / WAVE_ROWS.cast_signed() * WAVE_THREADS).unsigned_abs()
    }

    /// Walked rows lie in LDS as they are for scores and dP, and transposed for sums.
    fn with_lds(mut self, spec: &CdnaBwdSpec) -> Self {
        let forms_of_scores = 1 + i32::from(self.sums.makes_ds());
        let forms_of_values = i32::from(self.sums.makes_ds()) + i32::from(self.sums.makes_dv());
        let row_elems = spec.head_dim_qk * forms_of_scores + spec.head_dim_v * forms_of_values;
        // LSE and delta of walked queries, in f32.
        let stats_bytes = if self.sums == BwdSums::Dq { 0 } else { 2 * 4 };
        self.lds_bytes = self.stages * self.columns * (row_elems * ELEM_BYTES as i32 + stats_bytes);
        self
    }
}

/// The kernel, with all that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct CdnaBwd {
    spec: CdnaBwdSpec,
    rows_spec: BwdSpec,
    /// Of each launch of products, dQ's first.
    pub tiles: Vec<CdnaBwdTile>,
    workspace: BwdWorkspace,
    /// A number for each KV head of each sequence, in front of the workspace: whether it has far queries.
    far_bytes: u64,
    /// Of queries, each sequence's in whole words of 32.
    stats_rows: u64,
    rows: BwdRows,
}

/// Whether this kernel computes `problem` on `device`, and with which tiles.
///
/// # Errors
/// The field that it does not take, and its number.
pub fn accept(problem: &BwdProblem, device: Device, options: &PlanOptions) -> Result<CdnaBwd, Refusal> {
    needs_mfma(device.arch, NAME)?;
    let fwd = &problem.fwd;
    fwd.refuse_cache_updates(NAME)?;
    let (qk, v, o) = (fwd.dtypes.qk, fwd.dtypes.v, fwd.dtypes.o);
    if !matches!(qk, DType::F16 | DType::Bf16) || v != qk || o != qk {
        refuse!(NAME, "dtype_qk {qk}, dtype_v {v}, dtype_o {o} are not three times f16 or three times bf16");
    }
    let dims = fwd.dims;
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > MAX_HEAD_DIM {
            refuse!(NAME, "{field} {dim} is larger than {MAX_HEAD_DIM}");
        }
    }
    let rows = BwdRows::of(problem);
    let most_rows = u64::from(u32::MAX / ROW_THREADS) * WAVES_OF_A_ROW_WORKGROUP;
    let stats_rows = u64::from(dims.batch)
        * u64::from(dims.num_heads_q)
        * u64::from(dims.seqlen_q).next_multiple_of(WAVE_ROWS.into());
    if rows.all().max(stats_rows) > most_rows {
        refuse!(
            NAME,
            "lengths, heads and batch make {} rows of gradients, more than {most_rows}",
            rows.all()
        );
    }
    let spec = spec(problem);
    let by = LoadsAndStores::of(problem);
    let mut tiles = tiles(&spec, device.arch, by, (dims.seqlen_q, dims.seqlen_k), &options.tile)?;
    tiles.iter_mut().for_each(|tile| *tile = tile.with_lds(&spec));
    if let Some(tile) = tiles.iter().find(|tile| tile.columns > tile.rows / 2) {
        refuse!(NAME, "tile columns={} is more than half of rows={}", tile.columns, tile.rows);
    }
    if let Some(tile) = tiles.iter().find(|tile| tile.lds_bytes.unsigned_abs() > device.arch.lds_bytes()) {
        let most = device.arch.lds_bytes();
        refuse!(
            NAME,
            "tile columns={},stages={} takes {} bytes of LDS, more than {most}",
            tile.columns,
            tile.stages,
            tile.lds_bytes
        );
    }
    let words = |heads: u32, length: u32| {
        u64::from(dims.batch) * u64::from(heads) * u64::from(length.div_ceil(WAVE_ROWS))
    };
    let launches_of_keys = tiles.len() as u64 - 1;
    let flags =
        words(dims.num_heads_q, dims.seqlen_q) + launches_of_keys * words(dims.num_heads_kv, dims.seqlen_k);
    let Some(workspace) = BwdWorkspace::new(problem, WAVE_ROWS, None, flags) else {
        refuse!(NAME, "the workspace would be 2^62 bytes or more");
    };
    let far_bytes = (u64::from(dims.batch) * u64::from(dims.num_heads_kv) * 4).next_multiple_of(256);
    Ok(CdnaBwd { spec, rows_spec: BwdSpec::of(problem), tiles, workspace, far_bytes, stats_rows, rows })
}

/// What the products are compiled for. Modified scores have one kernel for all modifiers and masks.
fn spec(problem: &BwdProblem) -> CdnaBwdSpec {
    let fwd = &problem.fwd;
    let dropout = fwd.drops();
    let modifies = dropout || fwd.score.softcap.is_some() || fwd.score.bias != Bias::None;
    let padded = |dim: u32| dim.max(1).next_multiple_of(LINE).cast_signed();
    CdnaBwdSpec {
        dtype: fwd.dtypes.qk,
        dtype_grad: problem.dtype_grad,
        head_dim_qk: padded(fwd.dims.head_dim_qk),
        head_dim_v: padded(fwd.dims.head_dim_v),
        mask: if modifies || fwd.mask.kind() != MaskKind::Full { MaskKind::Band } else { MaskKind::Full },
        modifies,
        dropout,
    }
}

impl CdnaBwd {
    /// The launch before.
    #[must_use]
    pub fn stats_source(&self) -> KernelSource {
        self.row_source("cdna::bwd::stats<kSpec>(p);")
    }

    /// The launch behind.
    #[must_use]
    pub fn rest_source(&self) -> KernelSource {
        self.row_source(&format!("cdna::bwd::rest<kSpec, {}>(p);", self.tiles.len() > 2))
    }

    /// Workgroups of the launch before.
    #[must_use]
    pub fn stats_workgroups(&self) -> u64 {
        self.stats_rows.div_ceil(WAVES_OF_A_ROW_WORKGROUP)
    }

    /// Of the launch behind.
    #[must_use]
    pub fn rest_workgroups(&self, problem: &BwdProblem) -> u64 {
        let dims = problem.fwd.dims;
        let words = |heads: u32, length: u32| {
            u64::from(dims.batch) * u64::from(heads) * u64::from(length.div_ceil(WAVE_ROWS))
        };
        let words = words(dims.num_heads_q, dims.seqlen_q) + words(dims.num_heads_kv, dims.seqlen_k);
        (words + self.rows.bias + self.rows.sinks).div_ceil(WAVES_OF_A_ROW_WORKGROUP)
    }

    /// Of a launch of products.
    #[must_use]
    pub fn workgroups(problem: &BwdProblem, tile: &CdnaBwdTile) -> u64 {
        let dims = problem.fwd.dims;
        let (heads, rows) = match tile.sums {
            BwdSums::Dq => (dims.num_heads_q, dims.seqlen_q),
            BwdSums::DkDv | BwdSums::Dk | BwdSums::Dv => (dims.num_heads_kv, dims.seqlen_k),
        };
        let blocks = u64::from(rows).div_ceil(u64::from(tile.rows.unsigned_abs()));
        u64::from(dims.batch) * u64::from(heads) * blocks
    }

    /// A launch of products.
    #[must_use]
    pub fn source(&self, tile: &CdnaBwdTile) -> KernelSource {
        let (threads, waves) = (tile.num_threads(), tile.waves);
        let constants: [(&str, &dyn Literal); 2] = [("kSpec", &self.spec), ("kTile", tile)];
        let entry = Entry {
            include: HEADER,
            constants: &constants,
            bounds: &format!(
                "__attribute__((amdgpu_flat_work_group_size({threads}, {threads}), amdgpu_waves_per_eu({waves}, {waves})))"
            ),
            params: "CdnaBwdParams p",
            call: "cdna::bwd::main<kSpec, kTile>(p);",
        };
        let text = entry
            .render()
            .replace("using namespace fmha;", "using namespace fmha;\nusing namespace fmha::cdna;");
        KernelSource::new(text, crate::headers)
    }

    fn row_source(&self, call: &str) -> KernelSource {
        let entry = Entry {
            include: REST_HEADER,
            constants: &[("kSpec", &self.rows_spec)],
            bounds: &format!("__attribute__((amdgpu_flat_work_group_size({ROW_THREADS}, {ROW_THREADS})))"),
            params: "BwdParams p",
            call,
        };
        KernelSource::new(entry.render(), crate::headers)
    }

    /// Bytes of the workspace, and how many of them each run clears.
    #[must_use]
    pub const fn workspace_bytes(&self) -> (u64, u64) {
        (self.far_bytes + self.workspace.bytes, self.far_bytes)
    }

    /// What the launches read, with the workspace at `address`.
    #[must_use]
    pub fn params(&self, problem: &BwdProblem, params: BwdParams, address: u64) -> CdnaBwdParams {
        let bwd = self.workspace.bind(params, address + self.far_bytes);
        let fwd = &problem.fwd;
        let dtype_bias = match fwd.score.bias {
            Bias::Elementwise(bias) => bias.dtype,
            Bias::None | Bias::Alibi { .. } => DType::F32,
        };
        CdnaBwdParams {
            bwd: BwdParams { schedulers: DevPtr::new(address), ..bwd },
            head_dim_qk: fwd.dims.head_dim_qk as i32,
            head_dim_v: fwd.dims.head_dim_v as i32,
            dtype_bias: dtype_bias as i32,
            drops: fwd.drops().into(),
        }
    }

    /// Takes the operands where they lie, or names the first that it does not: addresses are not known when a plan is
    /// made.
    ///
    /// # Errors
    /// The operand, its address and the alignment that it lacks.
    pub fn takes_addresses(&self, problem: &BwdProblem, args: &BwdArgs<'_>) -> Result<(), ProblemError> {
        let Some(tile) = self.tiles.first() else { return Ok(()) };
        let loads = if tile.load == LoadPath::Element { 1 } else { DWORD.unsigned_abs() };
        let stores = if tile.store == StorePath::Element { 1 } else { 4 * problem.dtype_grad.size_bytes() };
        let operands = [
            ("q", args.q.as_ptr() as u64, loads, true),
            ("k", args.k.as_ptr() as u64, loads, true),
            ("v", args.v.as_ptr() as u64, loads, true),
            ("dout", args.dout.as_ptr() as u64, loads, true),
            ("dq", args.dq.as_mut_ptr() as u64, stores, true),
            ("dk", args.dk.as_mut_ptr() as u64, stores, true),
            ("dv", args.dv.as_mut_ptr() as u64, stores, true),
        ];
        check_addresses(NAME, operands)
    }

    /// The kernel that takes any address, where it is another one.
    #[must_use]
    pub fn for_any_address(&self) -> Option<Self> {
        let LoadsAndStores { load, store } = LoadsAndStores::BY_ELEMENT;
        let tiles: Vec<_> = self.tiles.iter().map(|&tile| CdnaBwdTile { load, store, ..tile }).collect();
        (tiles != self.tiles).then(|| Self { tiles, ..self.clone() })
    }

    /// The rows that a plan prints.
    #[must_use]
    pub fn details(&self) -> Vec<(&'static str, String)> {
        let of = |tile: &CdnaBwdTile| {
            let CdnaBwdTile { rows, columns, stages, lds_bytes, .. } = tile;
            format!("{} {rows} x {columns}, {stages} stages, {lds_bytes} bytes of lds", tile.sums.kernel())
        };
        let mut details = vec![("tile", self.tiles.iter().map(of).collect::<Vec<_>>().join("; "))];
        if let Some(tile) = self.tiles.first() {
            details.push(("loads", format!("{:?}", tile.load)));
            details.push(("stores", format!("{:?}", tile.store)));
        }
        details.push(("sums", "in registers, each row's in one order; scores computed twice".to_owned()));
        details
    }
}

/// `fmha/cdna/bwd/tile.h`: what this file shares with the device.
pub(crate) fn tile_header() -> Header {
    let text = format!(
        "#pragma once\n#include <fmha/cdna/tile.h>\n\nnamespace fmha::cdna {{\n\n{}\n}}  // namespace fmha::cdna\n",
        [
            BwdSums::c_definition(),
            CdnaBwdSpec::c_definition(),
            CdnaBwdTile::c_definition(),
            CdnaBwdParams::c_definition(),
        ]
        .concat()
    );
    Header::rendered("fmha/cdna/bwd/tile.h", text)
}
