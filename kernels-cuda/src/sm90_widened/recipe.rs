//! The recipe for an FP8 or paged cache that is first converted for the kernel of 16-bit caches: supported
//! problems, and the converting launch.

use fmha_core::args::{CacheSlice, DevSlice, DevSliceMut, FwdArgs, MemorySpace};
use fmha_core::error::{Refusal, Result};
use fmha_core::tune::TileOptions;
use fmha_core::{Call, FwdProblem, KvLayout, PlanOptions, ValidFwd, Workspace, bind};
use fmha_gpu::{About, Choice, Grid, Kernel, Launches, Operand, Stage, Steps, update};

use crate::nvidia::{DeviceFacts, FwdCall, Nvidia, row_launch};
use crate::operands::ALIGN;
use crate::sm80;
use crate::sm80::recipe::{Sm80, room};
use crate::sm90::{self, recipe::Sm90};
use crate::sm90_mla::{DIM_QK, DIM_V};
use crate::sm90_widened::{self as text, Costs, Places, WidenSpec};
use crate::sm100::{self, recipe::Sm100};
use crate::sm100_mla::{self, recipe::Sm100Mla};

/// The name of the kernel that updates the cache.
const UPDATE_NAME: &str = "widened_update";

/// A kernel that reads the converted cache in the workspace.
pub trait Reader<V: Nvidia>: Kernel<ValidFwd, V> + Sized {
    /// Name of the kernel that reads the cache after its conversion to Q's type.
    const WIDENED: &'static str;
    /// Whether 16-bit caches in other layouts are gathered for the reading kernel, if that is cheaper. Otherwise it
    /// reads them in place.
    const GATHERS: bool;
    /// Most elements of a key's and of a value's row that the reading kernel supports.
    const MOST_DIMS: [u32; 2] = text::NARROW;

    /// The reading kernel's choice for a problem, with the tile of `like`, the same problem with another cache
    /// layout.
    ///
    /// # Errors
    /// The field that the kernel does not support, and its value.
    fn choose_like(
        like: &ValidFwd,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal>;

    /// Whether its parts of the keys begin and end where no mask says, so that it reads blocks that no row sees.
    fn has_fixed_parts(&self) -> bool;
}

impl<V: Nvidia> Reader<V> for Sm90 {
    const WIDENED: &'static str = text::NAME;
    const GATHERS: bool = true;

    fn choose_like(
        like: &ValidFwd,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let fit = |fields: &TileOptions| sm90::recipe::fit_like(like, problem, facts, options, fields);
        <Self as Kernel<ValidFwd, V>>::choose_with(like, problem, facts, options, fit)
    }

    fn has_fixed_parts(&self) -> bool {
        Self::has_fixed_parts(self)
    }
}

impl<V: Nvidia> Reader<V> for Sm100 {
    const WIDENED: &'static str = text::NAME_OF_SM100;
    const GATHERS: bool = false;

    fn choose_like(
        like: &ValidFwd,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let fit = |fields: &TileOptions| sm100::recipe::fit_like(like, problem, facts, options, fields);
        <Self as Kernel<ValidFwd, V>>::choose_with(like, problem, facts, options, fit)
    }

    fn has_fixed_parts(&self) -> bool {
        Self::has_fixed_parts(self)
    }
}

impl<V: Nvidia> Reader<V> for Sm100Mla {
    const WIDENED: &'static str = text::NAME_OF_SM100_MLA;
    const GATHERS: bool = false;
    const MOST_DIMS: [u32; 2] = [DIM_QK, DIM_V];

    fn choose_like(
        like: &ValidFwd,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let fit = |fields: &TileOptions| sm100_mla::recipe::fit_like(like, problem, facts, options, fields);
        <Self as Kernel<ValidFwd, V>>::choose_with(like, problem, facts, options, fit)
    }

    fn has_fixed_parts(&self) -> bool {
        false
    }
}

impl<V: Nvidia> Reader<V> for Sm80 {
    const WIDENED: &'static str = text::NAME_OF_SM80;
    const GATHERS: bool = false;

    fn choose_like(
        like: &ValidFwd,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let fit = |fields: &TileOptions| sm80::recipe::fit_like(like, problem, facts, options, fields);
        <Self as Kernel<ValidFwd, V>>::choose_with(like, problem, facts, options, fit)
    }

    fn has_fixed_parts(&self) -> bool {
        Self::has_fixed_parts(self)
    }
}

/// A kernel that converts the cache in the workspace, followed by one that reads it there.
pub struct Widened<R> {
    wide: ValidFwd,
    places: Places,
    reader: R,
}

/// Refuses, unless the caller asks for this kernel, problems that by the model are cheaper in a kernel that reads
/// the cache in place, and too large workspaces.
fn is_worth_it(problem: &ValidFwd, facts: &DeviceFacts, places: &Places) -> Result<(), String> {
    if places.bytes > text::MOST_BYTES {
        return Err(format!(
            "its workspace of {} bytes is more than {}, unless it is asked for",
            places.bytes,
            text::MOST_BYTES
        ));
    }
    if sm80::accepts(problem, facts.instructions.converts_fp8).is_err() {
        return Ok(());
    }
    let tile = sm80::choose_tile(problem, room(facts));
    let costs = Costs::new(problem, facts.num_sms, tile.block_m.unsigned_abs(), tile.split_keys > 0);
    if costs.staged < costs.direct {
        return Ok(());
    }
    Err(format!(
        "by the model {:.0} us, and {:.0} where each tile of rows reads the cache as it lies",
        costs.staged, costs.direct
    ))
}

impl<V: Nvidia, R: Reader<V>> Kernel<ValidFwd, V> for Widened<R> {
    type Tile = Choice<Self>;

    fn about() -> About<ValidFwd> {
        About { rows_of: R::about().name, reads_cache_scales: true, ..About::new(R::WIDENED) }
    }

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        // For a reader that gathers nothing, the device is only checked if there is a cache to convert.
        if R::GATHERS { R::runs_on(facts) } else { Ok(()) }
    }

    /// The reading kernel's choice for a cache that has Q's type.
    fn fit(
        problem: &ValidFwd,
        facts: &DeviceFacts,
        options: &PlanOptions,
        _: &TileOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(R::WIDENED, reason);
        let cached = problem.cache.dtype.is_some();
        if !R::GATHERS && !cached {
            return Err(refuse(format!("dtype_cache: K and V are {} already", problem.dtypes.qk)));
        }
        let wide = text::wide_problem(R::WIDENED, R::MOST_DIMS, problem)?
            .validate()
            .map_err(|error| refuse(format!("the cache in 16 bits: {error}")))?;
        // The reader is chosen by name, since otherwise it would leave short queries to other kernels.
        let of_reader = options.clone().kernel(R::about().name);
        // A quantised cache has the tile, parts and order of the call on a 16-bit cache, if that is read in place.
        let twin = problem.over_wide_cache().filter(|twin| !R::GATHERS || sm90::reads_as_it_lies(twin));
        let twin = twin.map_or_else(|| Ok(wide.clone()), FwdProblem::validate);
        let twin = twin.map_err(|error| refuse(format!("the cache in 16 bits: {error}")))?;
        let choice = R::choose_like(&twin, &wide, facts, &of_reader)
            .map_err(|refusal| refuse(format!("the cache in 16 bits: {}", refusal.reason)))?;
        if let Some(append) = problem.cache.append.filter(|_| problem.cache.scales.is_none()) {
            return Err(refuse(format!("append of seqlen_new {} is not taken", append.seqlen_new)));
        }
        let fixed_parts = options.batch_invariant || options.row_invariant || choice.kernel.has_fixed_parts();
        let converted = if fixed_parts { text::Converted::All } else { text::Converted::Seen };
        let places = Places::new(problem, choice.workspace, converted).map_err(refuse)?;
        // A quantised cache must be bit-equal to the 16-bit cache, whatever the price: the reader computes it if it
        // computes that call.
        if options.kernel.is_none() && !cached {
            if sm90::reads_as_it_lies(problem) {
                return Err(refuse(format!("kv_layout {:?}: sm90 reads it as it lies", problem.layout.kv)));
            }
            if options.batch_invariant {
                // Whether gathering pays off depends on the batch and the number of queries.
                return Err(refuse(
                    "batch_invariant: rows in pages are read as they lie, by one kernel".to_owned(),
                ));
            }
            is_worth_it(problem, facts, &places).map_err(refuse)?;
        }
        Ok(choice.map(|reader| Self { wide, places, reader }))
    }

    fn plan(
        mut choice: Choice<Self>,
        problem: &ValidFwd,
        facts: &DeviceFacts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(R::WIDENED, reason);
        let Self { wide, places, .. } = &choice.kernel;
        let cache = places.cache(problem, 0);
        let groups = u64::from(problem.dims.batch) * u64::from(cache.num_blocks.unsigned_abs());
        let groups = i32::try_from(groups)
            .map_err(|_| refuse(format!("{groups} blocks of keys are not below 2^31")))?;
        let widen = row_launch(
            (Stage::Widen, text::WIDEN_NAME),
            text::widen(&WidenSpec {
                stored: problem.stored_k(),
                dtype: problem.dtypes.qk,
                head_dim_qk: problem.dims.head_dim_qk.cast_signed(),
                head_dim_v: problem.dims.head_dim_v.cast_signed(),
                kv_layout: problem.layout.kv.into(),
                v_in_k: wide.cache.v_in_k,
                by_element: text::is_by_element(problem),
                scaled: problem.cache.scales.is_some(),
                converts_fp8: facts.instructions.converts_fp8,
            }),
            Grid::new(groups.unsigned_abs(), text::NUM_THREADS),
            facts,
        );
        let how = match problem.cache.dtype {
            Some(stored) => format!("widened from {stored}"),
            None => "gathered".to_owned(),
        };
        let words = format!(
            "{how} in {} bytes of the workspace, read by {}",
            places.bytes - places.k,
            R::about().name
        );
        choice.workspace = update::workspace(problem, places.workspace(choice.workspace)).map_err(refuse)?;
        choice.details.push(("cache", words));
        choice.launches = choice.launches.behind(widen);
        // The reading kernel gets rotated queries; new rows are written to the cache in its own layout.
        if problem.cache.append.is_some() {
            let update = update::launch_before(UPDATE_NAME, problem, facts).map_err(refuse)?;
            choice.launches = update.into_iter().fold(choice.launches, Launches::behind);
        }
        Ok(choice)
    }

    fn alignment(&self, problem: &ValidFwd, operand: Operand) -> u64 {
        // A tensor without rows may lie anywhere.
        let has_keys = problem.shape_k().seq > 0;
        let reads = match operand {
            Operand::K => has_keys,
            Operand::V => has_keys && !self.wide.cache.v_in_k,
            _ => return self.reader.alignment(&self.wide, operand),
        };
        if reads && !text::is_by_element(problem) { ALIGN } else { 1 }
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &FwdCall<'_>) -> Result<()> {
        let mut params = match call.problem.cache.append {
            // SAFETY: the caller keeps the contract of `launch`; the workspace is the plan's.
            Some(_) => unsafe { update::run_alone(steps, call, self.places.workspace(Workspace::NONE))? },
            None => bind::fwd_params(call.problem, call.args),
        };
        let cache = self.places.cache(call.problem, params.workspace.0);
        let mut cache = cache.scaled(call.problem, call.args);
        if let Some(widen) = steps.at(Stage::Widen) {
            let mut arguments = [(&raw mut params).cast(), (&raw mut cache).cast()];
            // SAFETY: the kernel takes FwdParams and WidenedCache; `check_fwd` saw that the memory covers the problem,
            // and that the workspace, in which the cache lies, is as large as the plan says.
            unsafe { widen.launch(&mut arguments, call.stream)? };
        }
        // SAFETY: the caller promises that the operands are valid. Only the cache is another one: it lies in the
        // workspace, after the reading kernel's part, and is as large as its problem requires.
        self.with_wide(call, |wide| unsafe { self.reader.launch(steps, wide) })
    }
}

impl<R> Widened<R> {
    /// Calls `then` with `call` changed to read the copy of the KV cache that has Q's type.
    fn with_wide<T>(&self, call: &FwdCall<'_>, then: impl FnOnce(&FwdCall<'_>) -> T) -> T {
        let (args, places) = (call.args, &self.places);
        let start = args.workspace.as_ref().map_or(std::ptr::null_mut(), DevSliceMut::as_mut_ptr);
        let written = |slice: &DevSliceMut<'_>| {
            // SAFETY: this is the memory of the call's operand, which only the reading kernel writes while it is
            // borrowed here.
            unsafe { DevSliceMut::from_raw(slice.space(), slice.as_mut_ptr(), slice.bytes(), slice.elem()) }
        };
        let part = |from: u64, to: u64| {
            // SAFETY: this is memory of the workspace, which `check_fwd` saw to be as large as the plan says; the
            // launch before the reading kernel writes it.
            unsafe {
                DevSlice::from_raw(
                    MemorySpace::Device,
                    start.wrapping_add(from as usize).cast_const(),
                    to - from,
                    self.wide.dtypes.qk,
                )
            }
        };
        let k = part(places.k, places.v);
        let v = match self.wide.cache.v_in_k {
            true => CacheSlice::InK,
            false => CacheSlice::Read(part(places.v, places.bytes)),
        };
        let mut wide = FwdArgs::new(args.q, k, v, written(&args.o));
        (wide.seq, wide.score, wide.cache) = (args.seq, args.score, args.cache);
        (wide.cache.k_new, wide.cache.v_new, wide.seq.cu_seqlens_new) = (None, None, None);
        wide.seq.totals.total_new = None;
        (wide.score.descale_k, wide.score.descale_v) = (None, None);
        wide.seq.block_table = None;
        (wide.seq.totals.num_pages, wide.seq.totals.total_k) = (None, None);
        wide.seq.cu_seqlens_k = None;
        if self.wide.layout.kv == KvLayout::Packed {
            wide.seq.cu_seqlens_k = Some(part(places.cu_seqlens_k, places.k));
            wide.seq.totals.total_k = Some(call.problem.dims.batch * call.problem.dims.seqlen_k);
        }
        if self.wide.layout.seqused_k {
            wide.seq.seqused_k = Some(part(places.seqused_k, places.cu_seqlens_k));
        }
        wide.scale_o = args.scale_o;
        wide.lse = args.lse.as_ref().map(written);
        wide.keep_mask = args.keep_mask.as_ref().map(written);
        wide.workspace = args.workspace.as_ref().map(written);
        then(&Call { problem: &self.wide, args: &wide, spans: call.spans, stream: call.stream })
    }
}
