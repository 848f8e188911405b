//! Common parts of the backward kernels `cdna_bwd` and `rdna_bwd`: supported problems, launches and parameters, and
//! the recipe (the module `recipe`). Both are deterministic. A first launch computes LSE and delta of each query;
//! one launch sums dQ, and one (two for wide rows) sums dK and dV, where each workgroup sums the gradients of its
//! own rows alone; a last launch handles rows that the products cannot (`fmha/cdna/bwd/rest.h`).

mod access;
pub(crate) mod recipe;

use fmha_core::abi::{AbiLiteral as _, AbiStruct as _, BwdParams, DevPtr};
use fmha_core::bwd_workspace::{BwdRows, BwdWorkspace};
use fmha_core::fields::{Fields as _, Takes};
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_core::spec::BwdSpec;
use fmha_core::{Bias, BwdProblem, DType, MaskKind, PlanOptions, Refusal, abi_enum, abi_spec, abi_struct};

use crate::CDNA;
use fmha_core::masks::MaskDataParams;
use fmha_gpu::Operand;
use fmha_gpu::tile_list::{self, TileList, TileOf};

use crate::arch::Arch;
use crate::device::{Device, refuse};
use crate::paths::{LoadPath, StorePath};
use crate::rows::NUM_THREADS as ROW_THREADS;
pub(crate) use access::LoadsAndStores;

const REST_HEADER: &str = "fmha/cdna/bwd/rest.h";

/// Number of rows whose flags share a word, and number of walked rows of a block.
pub(crate) const BLOCK_ROWS: u32 = 32;
const MAX_HEAD_DIM: u32 = 256;
/// Most rows between the first row of a block and the last row that a buffer descriptor must reach.
const FURTHEST_ROW: i64 = 128;
const WAVES_OF_A_ROW_WORKGROUP: u64 = 4;
const DWORD: i64 = 4;
pub(crate) const ELEM_BYTES: i64 = 2;

/// Gradients that a launch sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BwdSums {
    /// dQ of a block of queries.
    Dq,
    /// dK and dV of a block of keys.
    DkDv,
    /// The launch computes only dK.
    Dk,
    /// The launch computes only dV.
    Dv,
    /// Gradients of captured tensors, of a block of queries.
    Captured,
}

abi_enum!(BwdSums { Dq, DkDv, Dk, Dv, Captured });

impl BwdSums {
    /// Whether a workgroup owns rows of queries and visits keys.
    pub(crate) const fn owns_queries(self) -> bool {
        matches!(self, Self::Dq | Self::Captured)
    }

    /// Whether dP is computed.
    pub(crate) const fn makes_dp(self) -> bool {
        !matches!(self, Self::Dv)
    }

    /// Whether dS is multiplied by the visited rows of Q or K.
    pub(crate) const fn makes_ds(self) -> bool {
        !matches!(self, Self::Dv | Self::Captured)
    }

    pub(crate) const fn makes_dv(self) -> bool {
        matches!(self, Self::DkDv | Self::Dv)
    }
}

abi_spec! {
    /// Compile-time spec of the products of a backward call: facts that change the main loops' instructions.
    /// Everything else of a problem is a run-time parameter.
    pub struct MatrixBwdSpec {
        /// Type of Q, K, V and dO, and of P and dS as operands.
        pub dtype: DType,
        /// Data type of dQ, dK and dV.
        pub dtype_grad: DType,
        /// Elements of a query's or key's row, padded to whole lines of the unit: 64 of MFMA, 32 of WMMA.
        pub head_dim_qk: i32,
        /// Elements of a row of V or O, padded like rows of Q and K.
        pub head_dim_v: i32,
        /// `Full`: no band. Any other value: the call's band, whose bounds and sink columns are parameters.
        pub mask: MaskKind,
        /// Whether there may be a soft-cap, a bias or slopes.
        pub modifies: bool,
        /// Whether there may be dropout.
        pub dropout: bool,
        /// Whether lists of tiles select the blocks: with masks as data, and with a mask as code in addition.
        pub masks: bool,
    }
}

abi_spec! {
    /// How a launch of products computes.
    pub struct MatrixBwdTile {
        /// Rows of a workgroup whose gradients it sums: 32 per wave, or 16 with WMMA.
        pub rows: i32 = Takes::among(&[64, 128, 256]).tuned(),
        /// Number of rows of a walked block.
        pub columns: i32 = Takes::among(&[32, 64]).tuned(),
        /// Number of blocks in LDS at a time.
        pub stages: i32 = Takes::within(1, 2).tuned(),
        /// Waves per SIMD for which the compiler must leave registers.
        pub waves: i32 = Takes::nothing(),
        /// How Q, K, V and dO are read.
        pub load: LoadPath = Takes::nothing(),
        /// How gradients are written.
        pub store: StorePath = Takes::nothing(),
        /// Gradients that the launch sums.
        pub sums: BwdSums = Takes::nothing(),
        /// Bytes of LDS of a workgroup; the device's text asserts the number.
        pub lds_bytes: i32 = Takes::nothing(),
    }
}

abi_struct! {
    /// Parameters of the launches of products.
    pub struct MatrixBwdParams {
        /// Parameters that all backward kernels read.
        pub bwd: BwdParams,
        /// Elements of a query's or key's row.
        pub head_dim_qk: i32,
        /// Elements of a value's or output's row.
        pub head_dim_v: i32,
        /// The elementwise bias' type, as a number of [`DType`].
        pub dtype_bias: i32,
        /// 1 if dropout sets probabilities to zero, otherwise 0.
        pub drops: i32,
    }
}

abi_struct! {
    /// Parameters of the product launches under masks as data (tensors).
    pub struct MaskedBwdParams {
        /// Parameters of the launches without masks.
        pub bwd: MatrixBwdParams,
        /// The masks as data.
        pub masks: MaskDataParams,
        /// Lists of the blocks that the rows of each workgroup see.
        pub list: TileList,
    }
}

/// A matrix unit's part of a backward kernel: its names, its device text, its tiles.
pub(crate) trait Unit: Clone + Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// The kernel's name in plans and refusals.
    const NAME: &'static str;
    /// Name of the launch before the products, which computes LSE and delta.
    const STATS: &'static str;
    /// Name of the launch after the main kernel.
    const REST: &'static str;
    /// Name of the last launch, which stores the sums of captured tensors' gradients.
    const FINISH_CAPTURED: &'static str;
    /// Header that the entries of products include.
    const HEADER: &'static str;
    /// Name of the products' class in that header.
    const CLASS: &'static str;
    /// Number of rows that a wave owns.
    const WAVE_ROWS: u32;
    /// Number of threads of a wave.
    const WAVE_THREADS: u32;
    /// Number of elements to a multiple of which rows are padded.
    const LINE: u32;

    /// Checks that an architecture has the unit.
    ///
    /// # Errors
    /// The architecture.
    fn needs(arch: Arch) -> Result<(), Refusal>;

    /// A launch's name in plans.
    fn launch(sums: BwdSums) -> &'static str;

    /// How operands are read and gradients written.
    fn access(problem: &BwdProblem) -> LoadsAndStores;

    /// Whether one launch sums dK and dV.
    fn sums_keys_at_once(spec: &MatrixBwdSpec, arch: Arch, by: LoadsAndStores) -> bool;

    /// The default tile of a launch; `lengths` are those of queries and keys.
    fn tile(
        spec: &MatrixBwdSpec,
        arch: Arch,
        by: LoadsAndStores,
        sums: BwdSums,
        lengths: (u32, u32),
    ) -> MatrixBwdTile;

    /// Sets the fields of a tile that follow from the others.
    ///
    /// # Errors
    /// A field, its value, and why the kernel has no such tile.
    fn settled(tile: MatrixBwdTile) -> Result<MatrixBwdTile, Refusal>;

    /// Bytes of LDS of this many rows with this many elements: in their own layout, and transposed.
    fn form_bytes(rows: i32, elems: i32) -> (i32, i32);

    /// Attributes that limit a tile's registers for the compiler.
    fn registers(tile: &MatrixBwdTile) -> String;
}

/// Threads of a workgroup.
pub(crate) const fn num_threads<U: Unit>(tile: &MatrixBwdTile) -> u32 {
    tile.rows.unsigned_abs() / U::WAVE_ROWS * U::WAVE_THREADS
}

/// The tile with its bytes of LDS: walked rows lie there untransposed for scores and dP, and transposed for sums.
pub(crate) fn with_lds<U: Unit>(mut tile: MatrixBwdTile, spec: &MatrixBwdSpec) -> MatrixBwdTile {
    let [makes_ds, makes_dp, makes_dv] =
        [tile.sums.makes_ds(), tile.sums.makes_dp(), tile.sums.makes_dv()].map(i32::from);
    let (scores, scores_transposed) = U::form_bytes(tile.columns, spec.head_dim_qk);
    let (values, values_transposed) = U::form_bytes(tile.columns, spec.head_dim_v);
    // LSE and delta, in f32, of the queries of a block that the loop visits.
    let stats = if tile.sums.owns_queries() { 0 } else { 2 * 4 * tile.columns };
    let forms = scores + makes_ds * scores_transposed + makes_dp * values + makes_dv * values_transposed;
    tile.lds_bytes = tile.stages * (forms + stats);
    tile
}

/// The backward kernel as chosen for a problem.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Backward<U> {
    unit: std::marker::PhantomData<U>,
    spec: MatrixBwdSpec,
    rows_spec: BwdSpec,
    /// `Some` under masks as data: whether the problem also has a mask as code.
    masks_rows: Option<bool>,
    /// Tiles of the launches of products, dQ's first.
    pub(crate) tiles: Vec<MatrixBwdTile>,
    workspace: BwdWorkspace,
    /// Bytes of the flags at the start of the workspace: one for each KV head of each sequence, whether it has far
    /// queries.
    far_bytes: u64,
    /// Number of rows of the queries' statistics; each sequence's rows are rounded up to a multiple of 32.
    stats_rows: u64,
    rows: BwdRows,
}

/// Checks that this kernel computes `problem` on `device`, and chooses its tiles.
///
/// # Errors
/// The field that it does not support, and its value.
pub(crate) fn accept<U: Unit>(
    problem: &BwdProblem,
    device: Device,
    options: &PlanOptions,
) -> Result<Backward<U>, Refusal> {
    U::needs(device.arch)?;
    let fwd = &problem.fwd;
    fwd.refuse_cache_updates(U::NAME)?;
    let (qk, v, o) = (fwd.dtypes.qk, fwd.dtypes.v, fwd.dtypes.o);
    if !matches!(qk, DType::F16 | DType::Bf16) || v != qk || o != qk {
        refuse!(
            U::NAME,
            "dtype_qk {qk}, dtype_v {v}, dtype_o {o} are not three times f16 or three times bf16"
        );
    }
    let dims = fwd.dims;
    for (field, dim) in [("head_dim_qk", dims.head_dim_qk), ("head_dim_v", dims.head_dim_v)] {
        if dim > MAX_HEAD_DIM {
            refuse!(U::NAME, "{field} {dim} is larger than {MAX_HEAD_DIM}");
        }
    }
    let rows = BwdRows::of(problem);
    let most_rows = u64::from(u32::MAX / ROW_THREADS) * WAVES_OF_A_ROW_WORKGROUP;
    let stats_rows = (u64::from(dims.batch) * u64::from(dims.num_heads_q))
        .saturating_mul(u64::from(dims.seqlen_q).next_multiple_of(BLOCK_ROWS.into()));
    let all_rows = rows.all().max(stats_rows);
    if all_rows > most_rows {
        refuse!(U::NAME, "lengths, heads and batch make {all_rows} rows of gradients, more than {most_rows}");
    }
    let spec = spec::<U>(problem);
    let by = U::access(problem);
    let has_captured = !problem.dcaptured.is_empty();
    let lengths = (dims.seqlen_q, dims.seqlen_k);
    let mut tiles = tiles::<U>(&spec, device.arch, by, lengths, has_captured, &options.tile)?;
    tiles.iter_mut().for_each(|tile| *tile = with_lds::<U>(*tile, &spec));
    if let Some(tile) = tiles.iter().find(|tile| tile.columns > tile.rows / 2) {
        refuse!(U::NAME, "tile columns={} is more than half of rows={}", tile.columns, tile.rows);
    }
    if let Some(tile) = tiles.iter().find(|tile| tile.lds_bytes.unsigned_abs() > device.arch.lds_bytes()) {
        let most = device.arch.lds_bytes();
        refuse!(
            U::NAME,
            "tile columns={},stages={} takes {} bytes of LDS, more than {most}",
            tile.columns,
            tile.stages,
            tile.lds_bytes
        );
    }
    let words = |heads: u32, length: u32| {
        u64::from(dims.batch) * u64::from(heads) * u64::from(length.div_ceil(BLOCK_ROWS))
    };
    let launches_of_keys = launches_of_keys(&tiles) as u64;
    let flags =
        words(dims.num_heads_q, dims.seqlen_q) + launches_of_keys * words(dims.num_heads_kv, dims.seqlen_k);
    let workspace = BwdWorkspace::new(problem, BLOCK_ROWS, None, flags)
        .and_then(|workspace| workspace.with_captured(problem, 1));
    let Some(workspace) = workspace else {
        refuse!(U::NAME, "the workspace would be 2^62 bytes or more");
    };
    let far_bytes = (u64::from(dims.batch) * u64::from(dims.num_heads_kv) * 4).next_multiple_of(256);
    let unit = std::marker::PhantomData;
    Ok(Backward {
        unit,
        spec,
        rows_spec: rows_spec(problem),
        masks_rows: (!fwd.masks.is_empty()).then(|| fwd.code.mask.is_some()),
        tiles,
        workspace,
        far_bytes,
        stats_rows,
        rows,
    })
}

/// Spec of the launches that work row by row. Under masks as data these also evaluate a mask as code.
fn rows_spec(problem: &BwdProblem) -> BwdSpec {
    let mut spec = BwdSpec::of(problem);
    if !problem.fwd.masks.is_empty() {
        spec.fwd.code = tile_list::code_beside_lists(&problem.fwd);
    }
    spec
}

/// Spec of the products. One kernel serves all modifiers of scores and all masks.
fn spec<U: Unit>(problem: &BwdProblem) -> MatrixBwdSpec {
    let fwd = &problem.fwd;
    let dropout = fwd.drops();
    let modifies = dropout || crate::forward::modifies_score(fwd);
    let masks = !fwd.masks.is_empty();
    let padded = |dim: u32| dim.max(1).next_multiple_of(U::LINE).cast_signed();
    MatrixBwdSpec {
        dtype: fwd.dtypes.qk,
        dtype_grad: problem.dtype_grad,
        head_dim_qk: padded(fwd.dims.head_dim_qk),
        head_dim_v: padded(fwd.dims.head_dim_v),
        mask: if modifies || masks || fwd.mask.kind() != MaskKind::Full {
            MaskKind::Band
        } else {
            MaskKind::Full
        },
        modifies,
        dropout,
        masks,
    }
}

fn tiles<U: Unit>(
    spec: &MatrixBwdSpec,
    arch: Arch,
    by: LoadsAndStores,
    lengths: (u32, u32),
    has_captured: bool,
    asked: &[(String, String)],
) -> Result<Vec<MatrixBwdTile>, Refusal> {
    let keys: &[BwdSums] =
        if U::sums_keys_at_once(spec, arch, by) { &[BwdSums::DkDv] } else { &[BwdSums::Dk, BwdSums::Dv] };
    let tile_of = |&sums: &BwdSums| {
        let mut tile = U::tile(spec, arch, by, sums, lengths);
        for (name, value) in asked {
            tile.set_field(name, value).map_err(|text| Refusal::new(U::NAME, format!("tile {text}")))?;
        }
        U::settled(tile)
    };
    let captured = has_captured.then_some(&BwdSums::Captured);
    [BwdSums::Dq].iter().chain(keys).chain(captured).map(tile_of).collect()
}

/// Number of launches that sum gradients of keys.
fn launches_of_keys(tiles: &[MatrixBwdTile]) -> usize {
    tiles.iter().filter(|tile| !tile.sums.owns_queries()).count()
}

impl<U: Unit> Backward<U> {
    /// Source of the launch before the main kernel, which computes LSE and delta.
    #[must_use]
    pub(crate) fn stats_source(&self) -> KernelSource {
        self.row_source(|masks| format!("cdna::bwd::stats<kSpec>(p{masks});"))
    }

    /// Source of the launch after the main kernel.
    #[must_use]
    pub(crate) fn rest_source(&self) -> KernelSource {
        let splits_keys = launches_of_keys(&self.tiles) > 1;
        self.row_source(|masks| format!("cdna::bwd::rest<kSpec, {splits_keys}>(p{masks});"))
    }

    /// Number of workgroups of the launch before the products.
    #[must_use]
    pub(crate) fn stats_workgroups(&self) -> u64 {
        self.stats_rows.div_ceil(WAVES_OF_A_ROW_WORKGROUP)
    }

    /// Number of workgroups of the launch after the products.
    #[must_use]
    pub(crate) fn rest_workgroups(&self, problem: &BwdProblem) -> u64 {
        let dims = problem.fwd.dims;
        let words = |heads: u32, length: u32| {
            u64::from(dims.batch) * u64::from(heads) * u64::from(length.div_ceil(BLOCK_ROWS))
        };
        let words = words(dims.num_heads_q, dims.seqlen_q) + words(dims.num_heads_kv, dims.seqlen_k);
        (words + self.rows.bias + self.rows.sinks).div_ceil(WAVES_OF_A_ROW_WORKGROUP)
    }

    /// Number of workgroups of a launch of products.
    #[must_use]
    pub(crate) fn workgroups(problem: &BwdProblem, tile: &MatrixBwdTile) -> u64 {
        let dims = problem.fwd.dims;
        let (heads, rows) = match tile.sums {
            BwdSums::Dq | BwdSums::Captured => (dims.num_heads_q, dims.seqlen_q),
            BwdSums::DkDv | BwdSums::Dk | BwdSums::Dv => (dims.num_heads_kv, dims.seqlen_k),
        };
        let blocks = u64::from(rows).div_ceil(u64::from(tile.rows.unsigned_abs()));
        u64::from(dims.batch) * u64::from(heads) * blocks
    }

    /// The lists that a launch of products reads under masks as data: whether tiles are of queries or keys, and the
    /// tile's numbers of queries and keys.
    pub(crate) fn list(&self, tile: &MatrixBwdTile) -> Option<(TileOf, [i32; 2])> {
        self.spec.masks.then_some(match tile.sums {
            BwdSums::Dq | BwdSums::Captured => (TileOf::Queries, [tile.rows, tile.columns]),
            BwdSums::DkDv | BwdSums::Dk | BwdSums::Dv => (TileOf::Keys, [tile.columns, tile.rows]),
        })
    }

    /// Source of a launch of the main kernel, which computes matrix products.
    #[must_use]
    pub(crate) fn source(&self, tile: &MatrixBwdTile) -> KernelSource {
        let threads = num_threads::<U>(tile);
        let constants: [(&str, &dyn Literal); 2] = [("kSpec", &self.spec), ("kTile", tile)];
        let entry = Entry {
            include: U::HEADER,
            constants: &constants,
            bounds: &format!(
                "__attribute__((amdgpu_flat_work_group_size({threads}, {threads}){}))",
                U::registers(tile)
            ),
            params: if self.spec.masks { "MaskedBwdParams p" } else { "MatrixBwdParams p" },
            call: &format!(
                "cdna::bwd::main<{}<kSpec, kTile>>({});",
                U::CLASS,
                if self.spec.masks { "p.bwd" } else { "p" }
            ),
        };
        crate::source(&entry, CDNA)
    }

    fn row_source(&self, call: impl Fn(&str) -> String) -> KernelSource {
        let masks =
            self.masks_rows.map(|has_function| format!(", ShownPairs<{has_function}>{{{{m}}, p.fwd}}"));
        let entry = Entry {
            include: REST_HEADER,
            constants: &[("kSpec", &self.rows_spec)],
            bounds: &crate::group_of(ROW_THREADS),
            params: if masks.is_some() { "BwdParams p, MaskDataParams m" } else { "BwdParams p" },
            call: &call(masks.as_deref().unwrap_or_default()),
        };
        KernelSource::new(entry.render(), crate::headers)
    }

    /// Bytes of the workspace, and how many of them each run clears: all, if there are sums for captured tensors.
    #[must_use]
    pub(crate) fn workspace_bytes(&self) -> (u64, u64) {
        let bytes = self.far_bytes + self.workspace.bytes;
        (bytes, if self.captured_elems() > 0 { bytes } else { self.far_bytes })
    }

    /// Number of elements of all gradients of captured tensors.
    #[must_use]
    pub(crate) fn captured_elems(&self) -> u64 {
        self.workspace.captured().0
    }

    /// Spec of the launches that work row by row.
    #[must_use]
    pub(crate) fn rows_spec(&self) -> &BwdSpec {
        &self.rows_spec
    }

    /// Parameters of the launches, with the workspace at `address`.
    #[must_use]
    pub(crate) fn params(&self, problem: &BwdProblem, params: &BwdParams, address: u64) -> MatrixBwdParams {
        let bwd = self.workspace.bind(*params, address + self.far_bytes);
        let fwd = &problem.fwd;
        let dtype_bias = match fwd.score.bias {
            Bias::Elementwise(bias) => bias.dtype,
            Bias::None | Bias::Alibi { .. } => DType::F32,
        };
        MatrixBwdParams {
            bwd: BwdParams { schedulers: DevPtr::new(address), ..bwd },
            head_dim_qk: fwd.dims.head_dim_qk as i32,
            head_dim_v: fwd.dims.head_dim_v as i32,
            dtype_bias: dtype_bias as i32,
            drops: fwd.drops().into(),
        }
    }

    /// Required alignment of an operand's address, in bytes.
    pub(crate) fn alignment(&self, problem: &BwdProblem, operand: Operand) -> u64 {
        let Some(tile) = self.tiles.first() else { return 1 };
        match operand {
            Operand::Q | Operand::K | Operand::V | Operand::Dout if tile.load != LoadPath::Element => {
                DWORD.unsigned_abs()
            }
            Operand::Dq | Operand::Dk | Operand::Dv if tile.store != StorePath::Element => {
                4 * problem.dtype_grad.size_bytes()
            }
            _ => 1,
        }
    }

    /// The kernel variant that accepts any address; `None` if this one does.
    #[must_use]
    pub(crate) fn for_any_address(&self) -> Option<Self> {
        let LoadsAndStores { load, store } = LoadsAndStores::BY_ELEMENT;
        let tiles: Vec<_> = self.tiles.iter().map(|&tile| MatrixBwdTile { load, store, ..tile }).collect();
        (tiles != self.tiles).then(|| Self { tiles, ..self.clone() })
    }

    /// The details that a plan prints.
    #[must_use]
    pub(crate) fn details(&self) -> Vec<(&'static str, String)> {
        let of = |tile: &MatrixBwdTile| {
            let MatrixBwdTile { rows, columns, stages, lds_bytes, .. } = tile;
            format!("{} {rows} x {columns}, {stages} stages, {lds_bytes} bytes of lds", U::launch(tile.sums))
        };
        let mut details = vec![("tile", self.tiles.iter().map(of).collect::<Vec<_>>().join("; "))];
        if let Some(tile) = self.tiles.first() {
            details.push(("loads", format!("{:?}", tile.load)));
            details.push(("stores", format!("{:?}", tile.store)));
        }
        details.push(("sums", "in registers, each row's in one order; scores computed twice".to_owned()));
        if self.captured_elems() > 0 {
            details.push(("captured", "sums in memory, by atomic additions in no order".to_owned()));
        }
        details
    }
}

/// `fmha/cdna/bwd/tile.h`: the types that this file shares with the device.
pub(crate) fn tile_header() -> Header {
    let definitions = [
        BwdSums::c_definition(),
        MatrixBwdSpec::c_definition(),
        MatrixBwdTile::c_definition(),
        MatrixBwdParams::c_definition(),
        MaskedBwdParams::c_definition(),
    ];
    Header::shared("fmha/cdna/bwd/tile.h", "fmha::cdna", &["fmha/cdna/tile.h"], &definitions)
}
