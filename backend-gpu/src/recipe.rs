//! A recipe: how one kernel computes an operation on a vendor's devices.

use fmha_core::fields::{Fields, knobs};
use fmha_core::quantize::ValidQuantize;
use fmha_core::source::Literal;
use fmha_core::sparse::{ValidChoose, ValidIndexLoss};
use fmha_core::spec::BwdSpec;
use fmha_core::tune::{TileClass, TileOptions, TunedTiles};
use fmha_core::{
    Accuracy, Call, DType, DevSlice, DevSliceMut, PlanOptions, Problem, ProblemError, Promises, Refusal,
    ResourceUsage, Result, Roofline, ScoreSums, ValidBwd, ValidCombine, ValidFwd, Workspace, check_addresses,
};

use crate::driver::{Driver, Toolchain};
use crate::launches::{Launch, Launches, Stage};
use crate::portable::tile_list::TileListPlan;
use crate::portable::{Choose, IndexLoss, NoIndexer, Quantize, RowKernel, SimtIndexer, SimtLists, small};
use crate::ranges::Ranges;
use crate::steps::{Step, Steps};
use crate::tile::settle;

/// A vendor of GPUs: its driver, its compiler, and its kernels for each operation.
pub trait Vendor: Sized + Send + Sync + 'static {
    /// The name that selects its backend: `cuda`.
    const KIND: &'static str;

    /// The vendor's driver.
    type Driver: Driver;
    /// The vendor's compiler.
    type Toolchain: Toolchain;
    /// Facts of a device on which the choice of kernel and tile depends.
    type Facts: Facts;

    /// The functions of the vendor's profiler for ranges; empty if ranges are off or the library is absent.
    fn ranges() -> Ranges {
        Ranges::default()
    }

    /// Recipes of the forward, one for each kernel (what it supports, and its launches), best first.
    fn forward() -> Vec<Recipe<ValidFwd, Self>>;

    /// Recipes of the backward, one for each kernel, best first.
    fn backward() -> Vec<Recipe<ValidBwd, Self>>;

    /// Recipes of the merging of partial results, one for each kernel, best first.
    fn combine() -> Vec<Recipe<ValidCombine, Self>>;

    /// Recipes of the choice of keys, one for each kernel, best first.
    fn choose() -> Vec<Recipe<ValidChoose, Self>> {
        vec![Recipe::of::<Choose<NoIndexer>>(), Recipe::of::<Choose<SimtIndexer>>()]
    }

    /// Recipes of the conversion to formats with scales by blocks, one for each kernel, best first.
    fn quantize() -> Vec<Recipe<ValidQuantize, Self>> {
        vec![Recipe::of::<Quantize>()]
    }

    /// Recipes of the loss that trains an indexer, one for each kernel, best first.
    fn index_loss() -> Vec<Recipe<ValidIndexLoss, Self>> {
        vec![Recipe::of::<IndexLoss<SimtLists>>()]
    }
}

/// A problem of an operation for which vendors can have kernels.
pub trait GpuProblem: Problem {
    /// A vendor's recipes of the operation, one for each kernel, best first.
    fn recipes<V: Vendor>() -> Vec<Recipe<Self, V>>;

    /// Addresses of the operands whose alignment may matter; 0 for an absent one.
    fn addresses(args: &Self::Args<'_>) -> impl IntoIterator<Item = (Operand, u64)>;

    /// Launches that write small outputs after the kernel, and the bytes of workspace that they share.
    ///
    /// # Errors
    /// Lengths that make more groups than a grid has.
    fn small_launches(&self, _facts: &impl Facts) -> Result<(Vec<Launch>, u64), String> {
        Ok((Vec::new(), 0))
    }

    /// Refuses problem features that exclude small outputs, in the name of a kernel.
    ///
    /// # Errors
    /// The small output, and the feature that excludes it.
    fn refuse_beside_small(&self, _kernel: &str) -> Result<(), Refusal> {
        Ok(())
    }

    /// Whether the call writes nothing but small outputs.
    fn has_small_outputs_alone(&self) -> bool {
        false
    }

    /// Queues the launches of [`small_launches`](Self::small_launches); `place` is the offset of their part of the
    /// workspace.
    ///
    /// # Safety
    /// As [`fmha_core::Launch::launch`]; the steps are those of these launches.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn launch_small<D: Driver>(_steps: &[Step<D>], _call: &Call<'_, Self>, _place: u64) -> Result<()> {
        Ok(())
    }
}

/// An operand whose alignment may matter to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Tensor Q of the call.
    Q,
    /// Tensor K of the call.
    K,
    /// Tensor V of the call.
    V,
    /// K of the second cache.
    SecondK,
    /// V of the second cache.
    SecondV,
    /// Tensor O of the call.
    O,
    /// The elementwise bias.
    Bias,
    /// Tensor dO of the call.
    Dout,
    /// Tensor dQ of the call.
    Dq,
    /// Tensor dK of the call.
    Dk,
    /// Tensor dV of the call.
    Dv,
}

impl Operand {
    /// The operand's name in refusals.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::SecondK => "second.k",
            Self::SecondV => "second.v",
            Self::O => "o",
            Self::Bias => "bias",
            Self::Dout => "dout",
            Self::Dq => "dq",
            Self::Dk => "dk",
            Self::Dv => "dv",
        }
    }
}

impl GpuProblem for ValidFwd {
    fn recipes<V: Vendor>() -> Vec<Recipe<Self, V>> {
        V::forward()
    }

    fn addresses(args: &Self::Args<'_>) -> impl IntoIterator<Item = (Operand, u64)> {
        [
            (Operand::Q, args.q.as_ptr() as u64),
            (Operand::K, args.k_slice().as_ptr() as u64),
            (Operand::V, args.v_slice().as_ptr() as u64),
            (Operand::SecondK, args.second.map_or(0, |second| second.k.as_ptr() as u64)),
            (
                Operand::SecondV,
                args.second.and_then(|second| second.v).map_or(0, |slice| slice.as_ptr() as u64),
            ),
            (Operand::O, args.o.as_mut_ptr() as u64),
            (Operand::Bias, args.score.bias.as_ref().map_or(0, |bias| bias.as_ptr() as u64)),
        ]
    }

    fn small_launches(&self, facts: &impl Facts) -> Result<(Vec<Launch>, u64), String> {
        small::plan(self, facts)
    }

    fn refuse_beside_small(&self, kernel: &str) -> Result<(), Refusal> {
        small::takes(self, kernel)
    }

    fn has_small_outputs_alone(&self) -> bool {
        self.dims.seqlen_q == 0 && self.cache.append.is_none() && !self.outputs.is_empty()
    }

    unsafe fn launch_small<D: Driver>(steps: &[Step<D>], call: &Call<'_, Self>, place: u64) -> Result<()> {
        // SAFETY: the caller keeps the contract of `launch_small`.
        unsafe { small::run(steps, call, place) }
    }
}

impl GpuProblem for ValidBwd {
    fn recipes<V: Vendor>() -> Vec<Recipe<Self, V>> {
        V::backward()
    }

    fn addresses(args: &Self::Args<'_>) -> impl IntoIterator<Item = (Operand, u64)> {
        [
            (Operand::Q, args.q.as_ptr() as u64),
            (Operand::K, args.k.as_ptr() as u64),
            (Operand::V, args.v.as_ptr() as u64),
            (Operand::O, args.o.as_ptr() as u64),
            (Operand::Dout, args.dout.as_ptr() as u64),
            (Operand::Dq, args.dq.as_mut_ptr() as u64),
            (Operand::Dk, args.dk.as_mut_ptr() as u64),
            (Operand::Dv, args.dv.as_mut_ptr() as u64),
        ]
    }
}

impl GpuProblem for ValidCombine {
    fn recipes<V: Vendor>() -> Vec<Recipe<Self, V>> {
        V::combine()
    }

    fn addresses(_: &Self::Args<'_>) -> impl IntoIterator<Item = (Operand, u64)> {
        []
    }
}

impl GpuProblem for ValidChoose {
    fn recipes<V: Vendor>() -> Vec<Recipe<Self, V>> {
        V::choose()
    }

    fn addresses(args: &Self::Args<'_>) -> impl IntoIterator<Item = (Operand, u64)> {
        let address = |slice: &Option<DevSlice<'_>>| slice.map_or(0, |slice| slice.as_ptr() as u64);
        [(Operand::Q, address(&args.q)), (Operand::K, address(&args.k))]
    }
}

impl GpuProblem for ValidQuantize {
    fn recipes<V: Vendor>() -> Vec<Recipe<Self, V>> {
        V::quantize()
    }

    fn addresses(_: &Self::Args<'_>) -> impl IntoIterator<Item = (Operand, u64)> {
        []
    }
}

impl GpuProblem for ValidIndexLoss {
    fn recipes<V: Vendor>() -> Vec<Recipe<Self, V>> {
        V::index_loss()
    }

    fn addresses(args: &Self::Args<'_>) -> impl IntoIterator<Item = (Operand, u64)> {
        let written =
            |slice: &Option<DevSliceMut<'_>>| slice.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        [
            (Operand::Q, args.q.as_ptr() as u64),
            (Operand::K, args.k.as_ptr() as u64),
            (Operand::Dq, written(&args.dq)),
            (Operand::Dk, written(&args.dk)),
        ]
    }
}

/// Facts of a device on which a choice depends, beside the problem.
pub trait Facts: Send + Sync + 'static {
    /// The architecture, as the compiler spells it.
    fn arch(&self) -> &str;

    /// Peak rates of the device for products of `dtype`.
    fn roofline(&self, dtype: DType) -> Roofline;

    /// Measured tiles of the device.
    fn tuned(&self) -> &TunedTiles;

    /// Threads that a row kernel uses for each row, in words and as a number: `a warp`, 32.
    fn row_group(&self) -> (&'static str, u32);

    /// Number of thread groups that the device runs at a time with one on each multiprocessor.
    fn groups_at_once(&self) -> u32 {
        1
    }

    /// A launch of a row kernel, with this name, over this many rows of this many elements.
    ///
    /// # Errors
    /// The fields that give more groups than a grid can have, and the number.
    fn row_launch(
        &self,
        at: (Stage, &'static str),
        kernel: RowKernel,
        spec: &dyn Literal,
        rows: [u64; 2],
    ) -> Result<Launch, String>;

    /// The launch that writes the lists of this many rows with this many keys or blocks, and its description, if
    /// the device has a kernel of its own: one launch without histograms in memory, with clusters of `_ctas`, or of
    /// a size that it chooses.
    ///
    /// # Errors
    /// The fields that give more groups than a grid can have, and the number; clusters whose shared memory cannot
    /// hold a row.
    fn lists_launch(
        &self,
        _at: (Stage, &'static str),
        _rows: u64,
        _entries: u32,
        _ctas: Option<u32>,
    ) -> Result<Option<(Launch, String)>, String> {
        Ok(None)
    }

    /// Adjusts a launch to the resources of its compiled kernel, such as registers; without a compiler there are no
    /// such numbers.
    fn lay_out(&self, _launch: &mut Launch, _usage: Option<&ResourceUsage>) {}
}

/// Facts of a kernel that do not depend on a problem.
pub struct About<P> {
    /// The kernel's name in plans and refusals.
    pub name: &'static str,
    /// Name of the kernel whose bits the rows have: another kernel's name if this one only brings the operands into
    /// that kernel's layout.
    pub rows_of: &'static str,
    /// Whether this is the slow kernel that supports everything: it is chosen if the caller allows it or names it.
    pub is_fallback: bool,
    /// Whether the kernel can wait for keys that arrive while it runs.
    pub waits_for_keys: bool,
    /// Whether the kernel computes attention over lists of keys.
    pub takes_lists: bool,
    /// Whether the kernel computes attention over two caches in one softmax.
    pub takes_second: bool,
    /// Whether the kernel reads caches of rows of bytes, or refuses their formats by number.
    pub reads_cache_rows: bool,
    /// Whether the kernel reads FP8 caches with scales by rows.
    pub reads_cache_scales: bool,
    /// Whether the kernel reads masks as data (intervals, bits, lists of blocks).
    pub reads_masks: bool,
    /// Whether the kernel computes scores and masks as code.
    pub computes_code: bool,
    /// Whether the kernel also computes code together with masks as data, and skips the mask as code in blocks of
    /// the full list.
    pub computes_code_beside_masks: bool,
    /// Whether the kernel reads scales by blocks.
    pub reads_block_scales: bool,
    /// Tiles that `fmha tune` measures; `None`: the kernel has nothing to tune.
    pub tiles: Option<Tiles<P>>,
}

impl<P> About<P> {
    /// Facts of a kernel with this name; all optional features are off.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self {
            name,
            rows_of: name,
            is_fallback: false,
            waits_for_keys: false,
            takes_lists: false,
            takes_second: false,
            reads_cache_rows: false,
            reads_cache_scales: false,
            reads_masks: false,
            computes_code: false,
            computes_code_beside_masks: false,
            reads_block_scales: false,
            tiles: None,
        }
    }
}

/// How the measured tiles of a kernel are stored.
pub struct Tiles<P> {
    /// Key under which measured tiles are stored.
    pub label: &'static str,
    /// The headers that the entries of its launches include: tiles measured with other texts are ignored.
    pub headers: &'static [&'static str],
    /// The class of problems under which a plan's tile is stored.
    pub class: fn(&P, &PlanOptions) -> TileClass,
    /// Whether measured tiles apply to a plan with these options.
    pub are_measured_for: fn(&PlanOptions) -> bool,
    /// The fields that tuning tries, each with its values in the order to try them.
    pub knobs: fn() -> Vec<(&'static str, Vec<String>)>,
}

impl Tiles<ValidFwd> {
    /// Tiles of a forward kernel. They apply to plans that ask for neither exact maxima nor batch invariance.
    #[must_use]
    pub const fn of_forward<T: Fields>(label: &'static str, headers: &'static [&'static str]) -> Self {
        let are_measured_for =
            |options: &PlanOptions| options.accuracy == Accuracy::Fast && !options.batch_invariant;
        Self {
            label,
            headers,
            class: |problem, _| TileClass::of_fwd(problem),
            are_measured_for,
            knobs: knobs::<T>,
        }
    }
}

impl Tiles<ValidBwd> {
    /// Tiles of a backward kernel.
    #[must_use]
    pub const fn of_backward<T: Fields>(label: &'static str, headers: &'static [&'static str]) -> Self {
        let class = |problem: &ValidBwd, options: &PlanOptions| {
            let spec = BwdSpec { deterministic: options.deterministic, ..BwdSpec::of(problem) };
            TileClass::of_bwd(problem, &spec)
        };
        Self { label, headers, class, are_measured_for: |_| true, knobs: knobs::<T> }
    }
}

/// One kernel of an operation. A value of this type is the kernel after it was chosen for a problem: its tile, and
/// the numbers that its launches need. Functions without `self` are called before there is such a value.
pub trait Kernel<P: GpuProblem, V: Vendor>: Send + Sync + 'static {
    /// The kernel's settings for a problem: its tile, and numbers found while choosing it.
    type Tile
    where
        Self: Sized;

    /// Facts of the kernel that do not depend on a problem.
    fn about() -> About<P>
    where
        Self: Sized;

    /// Checks that the device has what its instructions need.
    ///
    /// # Errors
    /// The architecture, and what it lacks.
    fn runs_on(_facts: &V::Facts) -> Result<(), String>
    where
        Self: Sized,
    {
        Ok(())
    }

    /// The tunable fields of the kernel's own choice, for each launch that has a tile. Setting a field sets it for
    /// all launches; fields in which they differ are left to each launch.
    ///
    /// # Errors
    /// Why the kernel refuses the problem.
    fn own_tiles(_problem: &P, _facts: &V::Facts, _options: &PlanOptions) -> Result<Vec<TileOptions>, Refusal>
    where
        Self: Sized,
    {
        Ok(Vec::new())
    }

    /// Microseconds of a call with a tile that has these fields, by the cost model; `None` without a model, or for
    /// a tile that does not fit.
    fn modelled_micros(_problem: &P, _facts: &V::Facts, _tile: &TileOptions) -> Option<f64>
    where
        Self: Sized,
    {
        None
    }

    /// Accepts the problem with the kernel's own tile, some fields of which are set; or refuses with the reason.
    ///
    /// # Errors
    /// The field that the kernel does not support, and its value.
    fn fit(
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
        fields: &TileOptions,
    ) -> Result<Self::Tile, Refusal>
    where
        Self: Sized;

    /// Makes the launches of a fitted kernel and states its promises. For a kernel whose tiles are measured,
    /// the first detail is its tile.
    ///
    /// # Errors
    /// The fields whose numbers exceed a grid or workspace.
    fn plan(
        tile: Self::Tile,
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal>
    where
        Self: Sized;

    /// Accepts the problem, or refuses with the reason.
    ///
    /// # Errors
    /// The field that the kernel does not support, and its value.
    fn choose(problem: &P, facts: &V::Facts, options: &PlanOptions) -> Result<Choice<Self>, Refusal>
    where
        Self: Sized,
    {
        let fit = |fields: &TileOptions| Self::fit(problem, facts, options, fields);
        Self::choose_with(problem, problem, facts, options, fit)
    }

    /// The choice whose tile `fit` makes from given fields. The user's fields take precedence over a tile measured
    /// for the class of `like`. The measured tile is used only if it fits, since problems of one class differ in
    /// numbers.
    ///
    /// # Errors
    /// As of [`choose`](Self::choose).
    fn choose_with(
        like: &P,
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
        fit: impl Fn(&TileOptions) -> Result<Self::Tile, Refusal>,
    ) -> Result<Choice<Self>, Refusal>
    where
        Self: Sized,
    {
        let About { name, tiles, .. } = Self::about();
        Self::runs_on(facts).map_err(|why| Refusal::new(name, why))?;
        let Some(tiles) = tiles else {
            return Self::plan(fit(&options.tile)?, problem, facts, options);
        };
        let (fit, tile_from) = settle(&tiles, like, facts, options, fit)?;
        let mut choice = Self::plan(fit, problem, facts, options)?;
        let after_tile = choice.details.len().min(1);
        choice.details.insert(after_tile, tile_from.detail());
        Ok(choice)
    }

    /// Tile fields that this choice would have for problems that differ only in size, besides its own: kernels are
    /// compiled ahead with these tiles too.
    fn tiles_of_other_sizes(&self, _problem: &P) -> Vec<TileOptions> {
        Vec::new()
    }

    /// Adjusts a launch to the resources of its compiled kernel, as [`Facts::lay_out`] does.
    fn lay_out(&self, facts: &V::Facts, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        facts.lay_out(launch, usage);
    }

    /// Required alignment of an operand's address in bytes, a power of two; 1 if any address will do. A plan is
    /// made before addresses are known.
    fn alignment(&self, _problem: &P, _operand: Operand) -> u64 {
        1
    }

    /// Names the alternative for operands whose addresses this kernel does not accept, if the caller allows one.
    fn for_any_address(&self, _problem: &P, _facts: &V::Facts, _options: &PlanOptions) -> AnyAddress<P, V> {
        AnyAddress::Fallback
    }

    /// Lists of tiles that the launches read under masks, in the order of the steps that make them.
    fn lists(&self) -> &[TileListPlan] {
        &[]
    }

    /// Binds the arguments and queues the steps, which are the compiled launches of this choice.
    ///
    /// # Safety
    /// As [`fmha_core::Launch::launch`]; the kernel accepts the operands' addresses, and the calling thread has
    /// entered the device.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, P>) -> Result<()>;
}

/// A kernel in a vendor's list: its facts, and the functions that are called before it is chosen.
pub struct Recipe<P: GpuProblem, V: Vendor> {
    pub(crate) about: About<P>,
    pub(crate) runs_on: fn(&V::Facts) -> Result<(), String>,
    pub(crate) own_tiles: OfProblem<P, V, Vec<TileOptions>>,
    pub(crate) modelled_micros: fn(&P, &V::Facts, &TileOptions) -> Option<f64>,
    choose: OfProblem<P, V, Choice<Planned<P, V>>>,
}

/// Function that derives a value from a problem, or refuses the problem with a reason.
type OfProblem<P, V, T> = fn(&P, &<V as Vendor>::Facts, &PlanOptions) -> Result<T, Refusal>;

impl<P: GpuProblem, V: Vendor> Recipe<P, V> {
    /// The recipe of kernel `K`: what it supports, and its launches.
    #[must_use]
    pub fn of<K: Kernel<P, V>>() -> Self {
        Self {
            about: K::about(),
            runs_on: K::runs_on,
            own_tiles: K::own_tiles,
            modelled_micros: K::modelled_micros,
            choose: |problem, facts, options| K::choose(problem, facts, options).map(Choice::planned),
        }
    }

    /// The fields and values that the tiles of all launches of a kernel have in common, for a problem that it
    /// supports.
    pub(crate) fn own_tile(
        &self,
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
    ) -> Result<TileOptions, Refusal> {
        let mut launches = (self.own_tiles)(problem, facts, options)?.into_iter();
        let mut common = launches.next().unwrap_or_default();
        launches.for_each(|others| common.retain(|knob| others.contains(knob)));
        Ok(common)
    }

    /// The kernel's name in plans and refusals.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.about.name
    }

    /// Accepts the problem, or refuses it with a reason.
    ///
    /// # Errors
    /// The field that the kernel does not support, and its value.
    pub fn choose(
        &self,
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
    ) -> Result<Choice<Planned<P, V>>, Refusal> {
        (self.choose)(problem, facts, options)
    }
}

/// A kernel that was chosen for a problem, with its type erased.
pub struct Planned<P: GpuProblem, V: Vendor> {
    pub(crate) recipe: Recipe<P, V>,
    pub(crate) kernel: Box<dyn Kernel<P, V>>,
}

impl<P: GpuProblem, V: Vendor> Planned<P, V> {
    /// The kernel's name in plans and refusals.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.recipe.about.name
    }

    /// Checks the operands' addresses; names the first that the kernel does not accept.
    ///
    /// # Errors
    /// The operand, its address and the alignment that it lacks.
    pub fn takes_addresses(&self, call: &Call<'_, P>) -> Result<(), ProblemError> {
        let About { name, rows_of, .. } = self.recipe.about;
        // For a kernel that only brings K and V into another kernel's layout, only their addresses are its own
        // concern; all other operands are checked for the other kernel.
        let is_brought = |operand| name != rows_of && matches!(operand, Operand::K | Operand::V);
        for brought in [true, false] {
            for (operand, address) in P::addresses(call.args) {
                if is_brought(operand) == brought {
                    let align = self.kernel.alignment(call.problem, operand);
                    let kernel = if brought { name } else { rows_of };
                    check_addresses(kernel, [(operand.name(), address, align, true)])?;
                }
            }
        }
        Ok(())
    }
}

/// A kernel that accepts a problem: its launches, and their promises.
pub struct Choice<K> {
    /// The kernel, with the numbers that its launches need.
    pub kernel: K,
    /// Launches of the plan, each with its stage.
    pub launches: Launches,
    /// Workspace that the launches share.
    pub workspace: Workspace,
    /// Promises that the launches keep.
    pub promises: Promises,
    /// Facts about the choice for people to read, such as tile, order and schedule.
    pub details: Vec<(&'static str, String)>,
}

impl<K> Choice<K> {
    /// The choice with its kernel boxed, so that choices of different kernels have one type.
    #[must_use]
    pub fn planned<P: GpuProblem, V: Vendor>(self) -> Choice<Planned<P, V>>
    where
        K: Kernel<P, V>,
    {
        self.map(|kernel| Planned { recipe: Recipe::of::<K>(), kernel: Box::new(kernel) })
    }

    /// The choice with another kernel that wraps the present one and uses its launches.
    #[must_use]
    pub fn map<T>(self, kernel: impl FnOnce(K) -> T) -> Choice<T> {
        let Self { launches, workspace, promises, details, .. } = self;
        Choice { kernel: kernel(self.kernel), launches, workspace, promises, details }
    }
}

/// Alternative for operands whose addresses a kernel does not accept.
pub enum AnyAddress<P: GpuProblem, V: Vendor> {
    /// The kernel accepts operands at any address.
    Itself,
    /// The slow kernel of the operation computes such calls.
    Fallback,
    /// A kernel of the same name that loads and stores single elements.
    ByElement(Box<Choice<Planned<P, V>>>),
}

impl<P: GpuProblem, V: Vendor> AnyAddress<P, V> {
    /// The kernel with a tile that loads and stores single elements, if that tile differs from the present one.
    #[must_use]
    pub fn by_element<K: Kernel<P, V>>(
        tile: Option<K::Tile>,
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
    ) -> Self {
        match tile.and_then(|tile| K::plan(tile, problem, facts, options).ok()) {
            None => Self::Itself,
            Some(other) => Self::ByElement(Box::new(other.planned())),
        }
    }
}

/// Promises of kernels in which one thread group computes a row, with a fixed order of sums, whatever the other
/// rows are.
#[must_use]
pub const fn deterministic_rows() -> Promises {
    Promises {
        deterministic: true,
        batch_invariant: true,
        // Row invariance is not promised: another kernel may compute such a row in another call.
        row_invariant: false,
        graph_capturable: true,
        accuracy: Accuracy::Exact,
        score_sums: ScoreSums::F32,
    }
}
