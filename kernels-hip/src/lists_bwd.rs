//! The kernels `cdna_lists` and `rdna_lists`: the backward over lists of keys, on MFMA and on WMMA
//! (`fmha/amd/lists_bwd.h`). A first launch computes LSE and delta of each query. In the second a workgroup computes dQ
//! of a token's heads. In the third a workgroup alone sums dK and dV of a range of keys, and a last launch scales and
//! rounds these. All sums have a fixed order.

use std::marker::PhantomData;

use fmha_core::abi::{AbiStruct as _, BwdParams};
use fmha_core::bwd_workspace::{BwdRows, BwdWorkspace};
use fmha_core::lists::{ListParams, list_params};
use fmha_core::source::{Entry, Header, KernelSource};
use fmha_core::spec::BwdSpec;
use fmha_core::tune::TileOptions;
use fmha_core::{
    Call, DType, Dims, FwdProblem, PlanOptions, Refusal, Result, ValidBwd, Workspace, abi_struct, bind,
};
use fmha_gpu::{
    About, Choice, Facts as _, Kernel, Launch, Launches, Operand, RowKernel, Stage, Steps,
    deterministic_rows, lists,
};

use crate::backward::LoadsAndStores;
use crate::device::{Amd, DeviceFacts, launch, needs_unit, refuse};
use crate::paths::LoadPath;
use crate::rows;

/// Most elements of a row of Q and K, then of V: a wave has a part of their sums in registers.
const MAX_HEAD_DIM_QK: u32 = 576;
const MAX_HEAD_DIM_V: u32 = 512;
/// Entries of a list that are multiplied together.
const ENTRIES: u32 = 32;
/// Fewest and most keys of a workgroup; the most take 8 KB of LDS besides 32 KB of sums.
const RANGES: (u64, u64) = (64, 1024);
/// Workgroups of keys to aim at for each compute unit.
const GROUPS_OF_A_UNIT: u64 = 2;
const DWORD: u64 = 4;
/// Namespaces of the entries.
const LISTS: &str = "using namespace fmha::cdna;\nusing namespace fmha::cdna::bwd::lists;";

abi_struct! {
    /// Parameters of the launches.
    pub struct ListsBwdParams {
        /// Parameters that all backward kernels read.
        pub bwd: BwdParams,
        /// Parameters of the lists of keys.
        pub lists: ListParams,
    }
}

/// A matrix unit, and the text for it.
pub(crate) trait ListsUnit: Send + Sync + 'static {
    const NAME: &'static str;
    const STATS: &'static str;
    const KEYS: &'static str;
    const FINISH: &'static str;
    const HEADER: &'static str;
    /// The unit's class in the device text.
    const CLASS: &'static str;
    const IS_WMMA: bool;
    /// Own rows of a workgroup: heads or keys, and columns of a wave's block.
    const EDGE: u32;
    const WAVE_THREADS: u32;

    /// Waves of a workgroup, which share the columns of rows of these lengths.
    fn waves(dims: &Dims) -> u32;

    /// Checks that a lane has registers for the modifiers of a score.
    ///
    /// # Errors
    /// The modifier, and its number.
    fn takes_score(_fwd: &FwdProblem) -> std::result::Result<(), Refusal> {
        Ok(())
    }
}

/// Kernels for gradients over lists of keys, on the matrix instructions MFMA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MfmaLists;

impl ListsUnit for MfmaLists {
    const NAME: &'static str = "cdna_lists";
    const STATS: &'static str = "cdna_lists_stats";
    const KEYS: &'static str = "cdna_lists_keys";
    const FINISH: &'static str = "cdna_lists_finish";
    const HEADER: &'static str = "fmha/cdna/bwd/lists.h";
    const CLASS: &'static str = "UnitMfma";
    const IS_WMMA: bool = false;
    const EDGE: u32 = 32;
    const WAVE_THREADS: u32 = 64;

    fn waves(_: &Dims) -> u32 {
        4
    }
}

/// Kernels for gradients over lists of keys, on the matrix instructions WMMA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WmmaLists;

impl ListsUnit for WmmaLists {
    const NAME: &'static str = "rdna_lists";
    const STATS: &'static str = "rdna_lists_stats";
    const KEYS: &'static str = "rdna_lists_keys";
    const FINISH: &'static str = "rdna_lists_finish";
    const HEADER: &'static str = "fmha/rdna/bwd/lists.h";
    const CLASS: &'static str = "UnitWmma";
    const IS_WMMA: bool = true;
    const EDGE: u32 = 16;
    const WAVE_THREADS: u32 = 32;

    /// Four waves' sums of rows of 512 elements would fill a lane's 256 registers.
    fn waves(dims: &Dims) -> u32 {
        if dims.head_dim_qk.max(dims.head_dim_v) > 256 { 8 } else { 4 }
    }

    fn takes_score(fwd: &FwdProblem) -> std::result::Result<(), Refusal> {
        match fwd.score.softcap {
            Some(softcap) if Self::waves(&fwd.dims) > 4 => {
                let Dims { head_dim_qk, head_dim_v, .. } = fwd.dims;
                refuse!(
                    Self::NAME,
                    "softcap {softcap} beside head_dim_qk {head_dim_qk} and head_dim_v {head_dim_v}: a lane has no \
                     registers for both"
                )
            }
            _ => Ok(()),
        }
    }
}

/// The backward over lists of keys on unit `U`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListsBwd<U> {
    workspace: BwdWorkspace,
    unit: PhantomData<U>,
}

/// Refusals of the kernel of this name that no tile would change.
fn accepts(problem: &ValidBwd, name: &'static str) -> std::result::Result<(), Refusal> {
    let fwd = problem.fwd();
    if fwd.lists.is_none() {
        refuse!(name, "indices are not given: this kernel walks lists of keys");
    }
    fwd.refuse_mixed_layouts(name)?;
    fwd.refuse_cache_updates(name)?;
    problem.refuse_gradients_beside_lists(name)?;
    lists::takes_places(fwd, name).map_err(|reason| Refusal::new(name, reason))?;
    let (qk, v, o) = (fwd.dtypes.qk, fwd.dtypes.v, fwd.dtypes.o);
    if !matches!(qk, DType::F16 | DType::Bf16) || v != qk || o != qk {
        refuse!(name, "dtype_qk {qk}, dtype_v {v}, dtype_o {o} are not three times f16 or three times bf16");
    }
    let dims = fwd.dims;
    let of =
        [("head_dim_qk", dims.head_dim_qk, MAX_HEAD_DIM_QK), ("head_dim_v", dims.head_dim_v, MAX_HEAD_DIM_V)];
    for (field, dim, most) in of {
        if dim > most {
            refuse!(name, "{field} {dim} is larger than {most}");
        }
        if !dim.is_multiple_of(8) {
            refuse!(name, "{field} {dim} is not whole loads of 8 elements");
        }
    }
    if LoadsAndStores::of(problem).load != LoadPath::Chunks {
        refuse!(
            name,
            "strides of Q, K, V or dO are not whole dwords, or reach beyond 2^28 bytes in 128 rows"
        );
    }
    Ok(())
}

/// Number of keys of a workgroup, chosen so that each compute unit has enough workgroups. No sum depends on it.
fn range(problem: &ValidBwd, num_units: u32) -> u64 {
    let keys = BwdRows::of(problem).keys;
    let even = keys.div_ceil(GROUPS_OF_A_UNIT * u64::from(num_units.max(1)));
    even.next_power_of_two().clamp(RANGES.0, RANGES.1)
}

/// f32 numbers of the sums of dK and dV; `None`: 2^60 or more.
fn sum_elems<U: ListsUnit>(problem: &ValidBwd) -> Option<u64> {
    let dims = problem.fwd().dims;
    let padded = |dim: u32| u64::from(dim.next_multiple_of(U::EDGE * U::waves(&dims)));
    let elems = BwdRows::of(problem).keys.checked_mul(padded(dims.head_dim_qk) + padded(dims.head_dim_v))?;
    (elems < 1 << 60).then_some(elems)
}

fn source<U: ListsUnit>(spec: &BwdSpec, call: &str, bounds: &str) -> KernelSource {
    let entry = Entry {
        include: U::HEADER,
        constants: &[("kSpec", spec)],
        bounds,
        params: "ListsBwdParams p",
        call: &format!("{call}(p);"),
    };
    crate::source(&entry, LISTS)
}

impl<V: Amd, U: ListsUnit> Kernel<ValidBwd, V> for ListsBwd<U> {
    type Tile = ();

    fn about() -> About<ValidBwd> {
        About { takes_lists: true, ..About::new(U::NAME) }
    }

    fn runs_on(facts: &DeviceFacts) -> std::result::Result<(), String> {
        needs_unit(facts.device.arch, U::IS_WMMA)
    }

    fn fit(
        problem: &ValidBwd,
        _: &DeviceFacts,
        options: &PlanOptions,
        _: &TileOptions,
    ) -> std::result::Result<(), Refusal> {
        accepts(problem, U::NAME)?;
        U::takes_score(problem.fwd())?;
        options.refuse_tile(U::NAME)
    }

    fn plan(
        (): (),
        problem: &ValidBwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> std::result::Result<Choice<Self>, Refusal> {
        let refuse = |text: String| Refusal::new(U::NAME, text);
        let (spec, rows, dims) = (BwdSpec::of(problem), BwdRows::of(problem), problem.fwd().dims);
        let workspace = sum_elems::<U>(problem)
            .and_then(|elems| BwdWorkspace::new(problem, 1, None, elems))
            .ok_or_else(|| refuse("the workspace would be 2^62 bytes or more".to_owned()))?;
        let stats = facts
            .row_launch((Stage::Prepare, U::STATS), RowKernel::SimtListsStats, &spec, [rows.queries, 0])
            .map_err(refuse)?;
        let (waves, edge) = (U::waves(&dims), U::EDGE);
        let threads = waves * U::WAVE_THREADS;
        let bounds = if U::IS_WMMA {
            crate::group_of(threads)
        } else {
            format!(
                "__attribute__((amdgpu_flat_work_group_size({threads}, {threads}), amdgpu_waves_per_eu(1, 1)))"
            )
        };
        let sequences = u64::from(dims.batch) * u64::from(dims.num_heads_kv);
        let of_token = u64::from(problem.fwd().gqa_ratio().div_ceil(edge));
        let range = range(problem, facts.device.num_compute_units);
        let tokens = sequences.saturating_mul(u64::from(dims.seqlen_q)).saturating_mul(of_token);
        let ranges = sequences.saturating_mul(u64::from(dims.seqlen_k).div_ceil(range));
        let finished = (rows.keys + rows.sinks).div_ceil(u64::from(rows::NUM_THREADS / U::WAVE_THREADS));
        let most = u64::from(u32::MAX / threads);
        let groups = tokens.max(ranges).max(finished);
        if groups > most {
            return Err(refuse(format!(
                "lengths, heads and batch make {groups} workgroups, more than {most}"
            )));
        }
        let on = |stage, kernel, call: &str, groups| -> Launch {
            launch(stage, kernel, source::<U>(&spec, call, &bounds), groups, threads)
        };
        let class = U::CLASS;
        let main = on(Stage::Main, U::NAME, &format!("dq<kSpec, {class}>"), tokens);
        let keys = on(Stage::Gradients, U::KEYS, &format!("keys<kSpec, {class}, {range}>"), ranges);
        let finish = launch(
            Stage::Gradients,
            U::FINISH,
            source::<U>(&spec, &format!("finish<kSpec, {class}>"), &crate::group_of(rows::NUM_THREADS)),
            finished,
            rows::NUM_THREADS,
        );
        Ok(Choice {
            kernel: Self { workspace, unit: PhantomData },
            launches: Launches::new([stats], main, [keys, finish]),
            workspace: Workspace { bytes: workspace.bytes, zeroed_bytes: workspace.bytes },
            promises: deterministic_rows(),
            details: vec![
                (
                    "tile",
                    format!("{edge} heads of a token x {ENTRIES} entries, columns shared by {waves} waves"),
                ),
                (
                    "sums",
                    format!(
                        "dK and dV by workgroups of {range} keys, tokens in their order; scores computed twice"
                    ),
                ),
            ],
        })
    }

    fn alignment(&self, problem: &ValidBwd, operand: Operand) -> u64 {
        let fwd = problem.fwd();
        match operand {
            Operand::Q | Operand::Dout if fwd.shape_q().seq > 0 => DWORD,
            Operand::K | Operand::V if fwd.shape_k().seq > 0 => DWORD,
            _ => 1,
        }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidBwd>) -> Result<()> {
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let mut bwd = self.workspace.bind(bind::bwd_params(call.problem, call.args), address);
        let mut lists = list_params(call.problem.fwd(), &call.args.seq);
        let mut params = ListsBwdParams { bwd, lists };
        for step in steps.iter() {
            let mut apart = [(&raw mut bwd).cast(), (&raw mut lists).cast()];
            let mut together = [(&raw mut params).cast()];
            let arguments = if step.stage == Stage::Prepare { &mut apart[..] } else { &mut together[..] };
            // SAFETY: the first launch takes BwdParams and ListParams, the others one ListsBwdParams; core saw that
            // their memory covers the problem, and the workspace is as large as the plan says.
            unsafe { step.launch(arguments, call.stream)? };
        }
        Ok(())
    }
}

/// `fmha/amd/lists_bwd_tile.h`: the types that this file shares with the device.
pub(crate) fn tile_header() -> Header {
    let definitions = [ListsBwdParams::c_definition()];
    Header::shared(
        "fmha/amd/lists_bwd_tile.h",
        "fmha::cdna",
        &["fmha/lists.h", "fmha/params.h"],
        &definitions,
    )
}
