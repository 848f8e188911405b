//! The backward over lists of keys on mma.sync, for every architecture from sm_80 on.

use fmha_core::bwd_workspace::BwdWorkspace;
use fmha_core::error::{Refusal, Result};
use fmha_core::lists::list_params;
use fmha_core::spec::BwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{Accuracy, PlanOptions, Promises, ValidBwd, Workspace, bind};
use fmha_gpu::{About, Choice, Facts as _, Grid, Kernel, Launch, Launches, Operand, RowKernel, Stage, Steps};

use crate::nvidia::{BwdCall, DeviceFacts, Nvidia, row_launch};
use crate::sm80_bwd;
use crate::sm80_bwd::recipe::too_many_tiles;
use crate::sm80_lists_bwd::{self as lists, NAME, Sm80ListsBwdTile};

/// The kernel, with the numbers that its launches need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sm80ListsBwd {
    workspace: BwdWorkspace,
    copy_bytes: u64,
}

impl<V: Nvidia> Kernel<ValidBwd, V> for Sm80ListsBwd {
    type Tile = Sm80ListsBwdTile;

    fn about() -> About<ValidBwd> {
        About { takes_lists: true, ..About::new(NAME) }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        crate::sm80::recipe::needs(facts)
    }

    fn fit(
        problem: &ValidBwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Sm80ListsBwdTile, Refusal> {
        let refuse = |reason: String| Refusal::new(NAME, reason);
        lists::accepts(problem)?;
        let spec = BwdSpec::of(problem);
        let ordered = options.deterministic || options.batch_invariant;
        let mut tile = lists::choose_tile(problem, &spec, crate::sm80::recipe::room(facts), ordered);
        fields.iter().try_for_each(|(key, value)| tile.set(key, value)).map_err(refuse)?;
        if let Some((name, axis, stride)) = sm80_bwd::odd_stride(problem, tile.copy_bytes) {
            let bytes = tile.copy_bytes;
            let text = format!("tile copy_bytes={bytes}: {name}.{axis} stride {stride} is not whole copies");
            return Err(refuse(text));
        }
        facts.has_room_for(&tile, tile.smem_bytes(&spec), 1).map_err(refuse)?;
        Ok(tile)
    }

    fn plan(
        tile: Sm80ListsBwdTile,
        problem: &ValidBwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(NAME, reason);
        let spec = BwdSpec::of(problem);
        let dims = problem.fwd().dims;
        let workspace = workspace_of(problem).map_err(refuse)?;
        let parts = problem.fwd().gqa_ratio().div_ceil(tile.rows.unsigned_abs());
        let tokens = u64::from(dims.seqlen_q).saturating_mul(parts.into());
        let ctas = sm80_bwd::ctas_of([dims.batch, dims.num_heads_kv], tokens)
            .ok_or_else(|| refuse(too_many_tiles(dims)))?;
        let Around { stats, finish, dsink } = Around::of(problem, &spec, facts).map_err(refuse)?;
        let main = Launch {
            stage: Stage::Main,
            kernel: NAME,
            source: lists::main(&spec, &tile),
            grid: Grid::new(ctas, tile.num_threads().unsigned_abs()),
            shared_bytes: tile.smem_bytes(&spec).unsigned_abs(),
            tiles: ctas.into(),
            tiles_at_once: facts.num_sms.into(),
        };
        let ordered = tile.range > 0;
        let of_keys = if ordered {
            let ctas = lists::key_ctas(problem, &tile).ok_or_else(|| refuse(too_many_tiles(dims)))?;
            Some(Launch {
                stage: Stage::Gradients,
                kernel: "sm80_lists_keys",
                source: lists::keys(&spec, &tile),
                grid: Grid::new(ctas, tile.num_threads().unsigned_abs()),
                shared_bytes: tile.smem_bytes(&spec).unsigned_abs(),
                tiles: ctas.into(),
                tiles_at_once: facts.num_sms.into(),
            })
        } else {
            None
        };
        Ok(Choice {
            kernel: Self { workspace, copy_bytes: tile.copy_bytes.unsigned_abs().into() },
            launches: Launches::new([stats], main, of_keys.into_iter().chain([finish]).chain(dsink)),
            workspace: Workspace { bytes: workspace.bytes, zeroed_bytes: workspace.bytes },
            promises: Promises {
                // Either one CTA sums a key's gradients over tokens and heads in order, or sums are in global
                // memory in arbitrary order.
                deterministic: ordered,
                batch_invariant: ordered,
                row_invariant: false,
                graph_capturable: true,
                accuracy: Accuracy::Exact,
                score_sums: facts.score_sums.of(problem.fwd().dtypes.qk),
            },
            details: vec![
                ("tile", format!("{} heads of a token x {} entries", tile.rows, tile.columns)),
                ("sums", sums_words(&tile)),
            ],
        })
    }

    fn alignment(&self, problem: &ValidBwd, operand: Operand) -> u64 {
        alignment(self.copy_bytes, problem, operand)
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &BwdCall<'_>) -> Result<()> {
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { launch::<V>(self.workspace, steps, call) }
    }
}

/// The launches before and behind those that sum gradients over lists of keys.
pub(crate) struct Around {
    /// LSE and delta of the queries.
    pub stats: Launch,
    /// Scales and rounds dK and dV.
    pub finish: Launch,
    /// The sink's gradient.
    pub dsink: Option<Launch>,
}

impl Around {
    /// The launches of a problem.
    ///
    /// # Errors
    /// Rows that no grid has.
    pub(crate) fn of(problem: &ValidBwd, spec: &BwdSpec, facts: &DeviceFacts) -> Result<Self, String> {
        let dims = problem.fwd().dims;
        let rows = u64::from(dims.batch) * u64::from(dims.num_heads_q) * u64::from(dims.seqlen_q);
        let keys = u64::from(dims.batch) * u64::from(dims.num_heads_kv) * u64::from(dims.seqlen_k);
        let stats = facts.row_launch(
            (Stage::Prepare, "sm80_lists_stats"),
            RowKernel::SimtListsStats,
            spec,
            [rows, 0],
        )?;
        let finish =
            crate::rows::launch((Stage::Gradients, "sm80_lists_finish"), lists::finish(spec), keys, facts);
        let dsink = problem.write_dsink.then(|| {
            let grid = Grid::new(dims.num_heads_q.max(1), sm80_bwd::DSINK_THREADS);
            row_launch((Stage::Gradients, "sm80_dsink"), sm80_bwd::dsink(spec), grid, facts)
        });
        Ok(Self { stats, finish, dsink })
    }
}

/// The workspace: numbers of each query, and the sums of dK and dV.
///
/// # Errors
/// One of 2^62 bytes or more.
pub(crate) fn workspace_of(problem: &ValidBwd) -> Result<BwdWorkspace, String> {
    lists::sum_elems(problem)
        .and_then(|elems| BwdWorkspace::new(problem, 1, None, elems))
        .ok_or_else(|| "the workspace would be 2^62 bytes or more".to_owned())
}

/// Alignment of an operand that copies of `copy_bytes` need.
pub(crate) fn alignment(copy_bytes: u64, problem: &ValidBwd, operand: Operand) -> u64 {
    let fwd = problem.fwd();
    let (has_queries, has_keys) = (fwd.shape_q().seq > 0, fwd.shape_k().seq > 0);
    match operand {
        Operand::Q | Operand::Dout if has_queries => copy_bytes,
        Operand::K | Operand::V if has_keys => copy_bytes,
        _ => 1,
    }
}

/// Launches all steps of a backward over lists of keys.
///
/// # Safety
/// As [`Kernel::launch`], for a plan with this workspace.
pub(crate) unsafe fn launch<V: Nvidia>(
    workspace: BwdWorkspace,
    steps: &Steps<V::Driver>,
    call: &BwdCall<'_>,
) -> Result<()> {
    let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
    let mut params = workspace.bind(bind::bwd_params(call.problem, call.args), address);
    let mut lists = list_params(call.problem.fwd(), &call.args.seq);
    // SAFETY: every launch takes BwdParams and, but for those that finish, ListParams; `check_bwd` saw that their
    // memory covers the problem, and the workspace is as large as the plan said.
    unsafe { steps.launch_all(&mut [(&raw mut params).cast(), (&raw mut lists).cast()], call.stream) }
}

/// Text for `explain`: how the gradients are summed.
fn sums_words(tile: &Sm80ListsBwdTile) -> String {
    match tile.range {
        0 => "dQ in registers, dK and dV in memory, in no order; scores computed once".to_owned(),
        range => format!("dK and dV by CTAs of {range} keys, tokens in their order; scores computed twice"),
    }
}
