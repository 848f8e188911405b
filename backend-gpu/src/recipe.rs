//! A recipe: how one kernel computes an operation on a vendor's devices.

use fmha_core::DevSlice;
use fmha_core::fields::{Fields, knobs};
use fmha_core::quantize::ValidQuantize;
use fmha_core::source::Literal;
use fmha_core::sparse::ValidChoose;
use fmha_core::spec::BwdSpec;
use fmha_core::tune::{TileClass, TileOptions, TunedTiles};
use fmha_core::{
    Accuracy, Call, DType, PlanOptions, Problem, ProblemError, Promises, Refusal, ResourceUsage, Result,
    Roofline, ScoreSums, ValidBwd, ValidCombine, ValidFwd, Workspace, check_addresses,
};

use crate::driver::{Driver, Toolchain};
use crate::launches::{Launch, Launches, Stage};
use crate::portable::tile_list::TileListPlan;
use crate::portable::{Choose, NoIndexer, Quantize, RowKernel, SimtIndexer, small};
use crate::ranges::Ranges;
use crate::steps::{Step, Steps};
use crate::tile::settle;

/// A vendor's seat.
pub trait Vendor: Sized + Send + Sync + 'static {
    /// The name that selects its backend: `cuda`.
    const KIND: &'static str;

    /// The vendor's driver.
    type Driver: Driver;
    /// The vendor's compiler.
    type Toolchain: Toolchain;
    /// Facts of a device that recipes read.
    type Facts: Facts;

    /// The ranges of its profiler; none where they are not asked for, or where their library is absent.
    fn ranges() -> Ranges {
        Ranges::default()
    }

    /// Recipes of the forward, best first.
    fn forward() -> Vec<Recipe<ValidFwd, Self>>;

    /// Recipes of the backward, best first.
    fn backward() -> Vec<Recipe<ValidBwd, Self>>;

    /// Recipes of the merging of partial results, best first.
    fn combine() -> Vec<Recipe<ValidCombine, Self>>;

    /// Recipes of the choice of keys, best first.
    fn choose() -> Vec<Recipe<ValidChoose, Self>> {
        vec![Recipe::of::<Choose<NoIndexer>>(), Recipe::of::<Choose<SimtIndexer>>()]
    }

    /// Recipes of the conversion to formats with scales by blocks, best first.
    fn quantize() -> Vec<Recipe<ValidQuantize, Self>> {
        vec![Recipe::of::<Quantize>()]
    }
}

/// A problem of an operation for which vendors have recipes.
pub trait GpuProblem: Problem {
    /// A vendor's recipes of the operation, best first.
    fn recipes<V: Vendor>() -> Vec<Recipe<Self, V>>;

    /// Addresses of the operands whose alignment may matter; 0 for an absent one.
    fn addresses(args: &Self::Args<'_>) -> impl IntoIterator<Item = (Operand, u64)>;

    /// Launches that write small outputs behind the kernel, and the bytes of workspace that they share.
    ///
    /// # Errors
    /// Lengths that make more groups than a grid has.
    fn small_launches(&self, _facts: &impl Facts) -> Result<(Vec<Launch>, u64), String> {
        Ok((Vec::new(), 0))
    }

    /// Refuses, in the name of a kernel, what small outputs are not written beside.
    ///
    /// # Errors
    /// The small output, and what it is wanted beside.
    fn refuse_beside_small(&self, _kernel: &str) -> Result<(), Refusal> {
        Ok(())
    }

    /// Whether small outputs are all that the call has to write.
    fn has_small_outputs_alone(&self) -> bool {
        false
    }

    /// Queues the launches of [`small_launches`](Self::small_launches), whose part of the workspace begins at `place`.
    ///
    /// # Safety
    /// As [`fmha_core::Launch::launch`]; the steps are those of these launches.
    ///
    /// # Errors
    /// What the driver said.
    unsafe fn launch_small<D: Driver>(_steps: &[Step<D>], _call: &Call<'_, Self>, _place: u64) -> Result<()> {
        Ok(())
    }
}

/// An operand whose alignment may matter to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Q.
    Q,
    /// K.
    K,
    /// V.
    V,
    /// K of the second cache.
    SecondK,
    /// V of the second cache.
    SecondV,
    /// O.
    O,
    /// The elementwise bias.
    Bias,
    /// dO.
    Dout,
    /// dQ.
    Dq,
    /// dK.
    Dk,
    /// dV.
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

/// Facts of a device on which a choice depends, beside the problem.
pub trait Facts: Send + Sync + 'static {
    /// The architecture, as the compiler spells it.
    fn arch(&self) -> &str;

    /// Peak rates of the device for products of `dtype`.
    fn roofline(&self, dtype: DType) -> Roofline;

    /// Measured tiles of the device.
    fn tuned(&self) -> &TunedTiles;

    /// Threads that a row kernel gives each row, in words and in number: `a warp`, 32.
    fn row_group(&self) -> (&'static str, u32);

    /// Groups of threads that the device runs at a time, where each has a multiprocessor to itself.
    fn groups_at_once(&self) -> u32 {
        1
    }

    /// A launch of such a kernel, under a name, over so many rows of so many elements.
    ///
    /// # Errors
    /// The fields that make more groups than a grid has, and the number.
    fn row_launch(
        &self,
        at: (Stage, &'static str),
        kernel: RowKernel,
        spec: &dyn Literal,
        rows: [u64; 2],
    ) -> Result<Launch, String>;

    /// The launch that writes the lists of so many rows of so many keys or blocks, and its words for readers, where the
    /// device has one of its own: one launch without histograms in memory, by clusters of `_ctas`, or of as many as
    /// serve.
    ///
    /// # Errors
    /// The fields that make more groups than a grid has, and the number; clusters that hold no row.
    fn lists_launch(
        &self,
        _at: (Stage, &'static str),
        _rows: u64,
        _entries: u32,
        _ctas: Option<u32>,
    ) -> Result<Option<(Launch, String)>, String> {
        Ok(None)
    }

    /// Sets what of a launch depends on what its kernel takes of the device, once that is compiled; nothing is known of
    /// it where there is no compiler.
    fn lay_out(&self, _launch: &mut Launch, _usage: Option<&ResourceUsage>) {}
}

/// Facts of a kernel that do not depend on a problem.
pub struct About<P> {
    /// The kernel's name in plans and refusals.
    pub name: &'static str,
    /// Name of the kernel that computes the rows, whose bits they have: another kernel where this one only
    /// brings the operands to it.
    pub rows_of: &'static str,
    /// Correct for all, fast for none: chosen where the caller allows it or names it.
    pub is_fallback: bool,
    /// Whether it can wait for keys that come while it runs.
    pub waits_for_keys: bool,
    /// Whether the kernel computes attention over lists of keys.
    pub takes_lists: bool,
    /// Whether the kernel computes attention over two caches in one softmax.
    pub takes_second: bool,
    /// Whether the kernel reads caches of rows of bytes, or refuses their formats by number.
    pub reads_cache_rows: bool,
    /// Whether the kernel reads FP8 caches with scales by rows.
    pub reads_cache_scales: bool,
    /// Whether the kernel reads masks as data.
    pub reads_masks: bool,
    /// Whether the kernel computes scores and masks as code.
    pub computes_code: bool,
    /// Whether the kernel does so beside masks as data too, and asks no mask as code in blocks of the full list.
    pub computes_code_beside_masks: bool,
    /// Whether the kernel reads scales by blocks.
    pub reads_block_scales: bool,
    /// Tiles that `fmha tune` measures; `None`: the kernel has nothing to tune.
    pub tiles: Option<Tiles<P>>,
}

impl<P> About<P> {
    /// A kernel of that name, without more.
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

/// How the measured tiles of a kernel are kept.
pub struct Tiles<P> {
    /// Key under which measured tiles are kept.
    pub label: &'static str,
    /// The headers that the entries of its launches include: the tiles of another text say nothing.
    pub headers: &'static [&'static str],
    /// The class of problems that a plan's tile is kept for.
    pub class: fn(&P, &PlanOptions) -> TileClass,
    /// Whether a plan with these options is one as tiles are measured for.
    pub are_measured_for: fn(&PlanOptions) -> bool,
    /// The fields that are tried, each with its values in the order to try them.
    pub knobs: fn() -> Vec<(&'static str, Vec<String>)>,
}

impl Tiles<ValidFwd> {
    /// Tiles of a forward kernel. They are measured as plans have them that ask for neither exact maxima nor batch
    /// invariance.
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

/// One kernel of an operation. A value of the type is the kernel as it was chosen for a problem: its tile, and what its
/// launches need. What is asked before there is such a value are functions without `self`.
pub trait Kernel<P: GpuProblem, V: Vendor>: Send + Sync + 'static {
    /// How it computes a problem: its tile, and what was found with it.
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

    /// The knobs of its own choice for a problem that it takes: of each launch that has a tile. A field that is set is
    /// set for all of them; those in which they differ are left to each.
    ///
    /// # Errors
    /// Why it does not take the problem.
    fn own_tiles(_problem: &P, _facts: &V::Facts, _options: &PlanOptions) -> Result<Vec<TileOptions>, Refusal>
    where
        Self: Sized,
    {
        Ok(Vec::new())
    }

    /// Microseconds of a call with a tile whose fields are these, by a model; `None` without one, or of a tile that
    /// does not fit.
    fn modelled_micros(_problem: &P, _facts: &V::Facts, _tile: &TileOptions) -> Option<f64>
    where
        Self: Sized,
    {
        None
    }

    /// Takes the problem with its own tile, of which some fields are set; or says why not.
    ///
    /// # Errors
    /// The field that it does not take, and its number.
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
    /// The fields whose numbers no grid or workspace has.
    fn plan(
        tile: Self::Tile,
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal>
    where
        Self: Sized;

    /// Takes the problem, or says why not.
    ///
    /// # Errors
    /// The field that it does not take, and its number.
    fn choose(problem: &P, facts: &V::Facts, options: &PlanOptions) -> Result<Choice<Self>, Refusal>
    where
        Self: Sized,
    {
        let fit = |fields: &TileOptions| Self::fit(problem, facts, options, fields);
        Self::choose_with(problem, problem, facts, options, fit)
    }

    /// The choice with what `fit` makes of a tile's fields. The user's fields come before what was measured of problems
    /// like `like`, which holds where it fits: problems of one class differ in numbers.
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

    /// Tile fields that a choice has for problems like this one but for their sizes, beside its own: what is compiled
    /// ahead is compiled with them too.
    fn tiles_of_other_sizes(&self, _problem: &P) -> Vec<TileOptions> {
        Vec::new()
    }

    /// Sets what of a launch depends on what its kernel takes of the device, as [`Facts::lay_out`] does.
    fn lay_out(&self, facts: &V::Facts, launch: &mut Launch, usage: Option<&ResourceUsage>) {
        facts.lay_out(launch, usage);
    }

    /// Bytes of which an operand's address has to be a multiple, a power of two; 1 where it may lie anywhere. Addresses
    /// are not known when a plan is made.
    fn alignment(&self, _problem: &P, _operand: Operand) -> u64 {
        1
    }

    /// Names the alternative for operands whose addresses this kernel does not take, where the caller allows
    /// one.
    fn for_any_address(&self, _problem: &P, _facts: &V::Facts, _options: &PlanOptions) -> AnyAddress<P, V> {
        AnyAddress::Fallback
    }

    /// Lists of tiles that the launches walk under masks, in the order of the steps that make them.
    fn lists(&self) -> &[TileListPlan] {
        &[]
    }

    /// Binds the arguments and queues the steps, which are those of its choice's launches.
    ///
    /// # Safety
    /// As [`fmha_core::Launch::launch`]; it takes the operands' addresses, the calling thread has entered the device.
    ///
    /// # Errors
    /// What the driver said.
    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, P>) -> Result<()>;
}

/// A kernel in a vendor's list: what is known of it, and what is asked of it before it is chosen.
pub struct Recipe<P: GpuProblem, V: Vendor> {
    pub(crate) about: About<P>,
    pub(crate) runs_on: fn(&V::Facts) -> Result<(), String>,
    pub(crate) own_tiles: OfProblem<P, V, Vec<TileOptions>>,
    pub(crate) modelled_micros: fn(&P, &V::Facts, &TileOptions) -> Option<f64>,
    choose: OfProblem<P, V, Choice<Planned<P, V>>>,
}

/// Function that derives something from a problem, or refuses it with a reason.
type OfProblem<P, V, T> = fn(&P, &<V as Vendor>::Facts, &PlanOptions) -> Result<T, Refusal>;

impl<P: GpuProblem, V: Vendor> Recipe<P, V> {
    /// The recipe of a kernel.
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

    /// The fields and values that all tiles of a kernel's launches have in common, for a problem that it
    /// takes.
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

    /// Takes the problem, or says why not.
    ///
    /// # Errors
    /// The field that it does not take, and its number.
    pub fn choose(
        &self,
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
    ) -> Result<Choice<Planned<P, V>>, Refusal> {
        (self.choose)(problem, facts, options)
    }
}

/// A kernel that was chosen for a problem, whichever it is.
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

    /// Takes the operands where they lie, or names the first that it does not.
    ///
    /// # Errors
    /// The operand, its address and the alignment that it lacks.
    pub fn takes_addresses(&self, call: &Call<'_, P>) -> Result<(), ProblemError> {
        let About { name, rows_of, .. } = self.recipe.about;
        // A kernel that only brings K and V to another kernel asks for their addresses; all other operands
        // are the reader's.
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

/// A kernel that takes a problem: what is launched for it, and what that promises.
pub struct Choice<K> {
    /// The kernel, with the numbers that its launches need.
    pub kernel: K,
    /// Launches in their stages.
    pub launches: Launches,
    /// Workspace that the launches share.
    pub workspace: Workspace,
    /// Promises that the launches keep.
    pub promises: Promises,
    /// How, for readers: tile, order, schedule.
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

    /// The choice with another kernel around its own, whose launches it makes.
    #[must_use]
    pub fn map<T>(self, kernel: impl FnOnce(K) -> T) -> Choice<T> {
        let Self { launches, workspace, promises, details, .. } = self;
        Choice { kernel: kernel(self.kernel), launches, workspace, promises, details }
    }
}

/// Alternative for operands whose addresses a kernel does not take.
pub enum AnyAddress<P: GpuProblem, V: Vendor> {
    /// The kernel takes operands at any address.
    Itself,
    /// The slow kernel of the family.
    Fallback,
    /// A kernel of the same name with loads and stores by elements.
    ByElement(Box<Choice<Planned<P, V>>>),
}

impl<P: GpuProblem, V: Vendor> AnyAddress<P, V> {
    /// A kernel with a tile that reads and writes by elements, where that is another one.
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

/// The promises of kernels in which a row is one group's work, its sums in one order, whatever the other rows are.
#[must_use]
pub const fn deterministic_rows() -> Promises {
    Promises {
        deterministic: true,
        batch_invariant: true,
        // Kernels beside them take the same rows in other calls.
        row_invariant: false,
        graph_capturable: true,
        accuracy: Accuracy::Exact,
        score_sums: ScoreSums::F32,
    }
}
