//! A recipe: how one kernel family computes an operation on a vendor's devices.

use std::ops::Deref;

use fmha_core::fields::{Fields, knob_values, knobs};
use fmha_core::source::KernelSource;
use fmha_core::spec::BwdSpec;
use fmha_core::tune::{TileClass, TileOptions, TunedTiles};
use fmha_core::{
    Accuracy, Call, DType, PlanOptions, Problem, ProblemError, Promises, Refusal, ResourceUsage, Result,
    Roofline, ScoreSums, ValidBwd, ValidCombine, ValidFwd, Workspace,
};

use crate::driver::{Driver, Toolchain};
use crate::ranges::Ranges;
use crate::steps::Steps;

/// A vendor's seat.
pub trait Vendor: Family<ValidFwd> + Family<ValidBwd> + Family<ValidCombine> {
    /// The name that selects its backend: `cuda`.
    const KIND: &'static str;

    /// Its driver.
    type Driver: Driver;
    /// Its compiler.
    type Toolchain: Toolchain;
    /// What its recipes know of a device.
    type Facts: Facts;

    /// The ranges of its profiler; none where they are not asked for, or where their library is absent.
    fn ranges() -> Ranges {
        Ranges::default()
    }
}

/// A vendor's recipes of one operation.
pub trait Family<P: Problem>: Sized + Send + Sync + 'static {
    /// All of them, best first.
    fn recipes() -> Vec<Kernel<P, Self>>
    where
        Self: Vendor;
}

/// What a choice depends on besides the problem.
pub trait Facts: Send + Sync + 'static {
    /// The architecture, as the compiler spells it.
    fn arch(&self) -> &str;

    /// What the device could reach at best.
    fn roofline(&self, dtype: DType) -> Roofline;

    /// Tiles that were measured on it.
    fn tuned(&self) -> &TunedTiles;
}

/// One kernel family of one operation: what it takes, what it launches, how it binds its arguments.
pub trait Recipe<P: Problem, V: Vendor>: Send + Sync + 'static {
    /// The kernel's name in plans and refusals.
    fn name(&self) -> &'static str;

    /// The kernel that computes the rows: another one, whose bits they are, where this one only brings the operands to it.
    fn rows_of(&self) -> &'static str {
        self.name()
    }

    /// Correct for all, fast for none: chosen where the caller allows it or names it.
    fn is_fallback(&self) -> bool {
        false
    }

    /// Whether it can wait for keys that come while it runs.
    fn waits_for_keys(&self) -> bool {
        false
    }

    /// Takes the problem, or says why not.
    ///
    /// # Errors
    /// The field that it does not take, and its number.
    fn choose(
        &self,
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
    ) -> Result<Choice<Kernel<P, V>>, Refusal>;

    /// Tile fields that a choice has for problems like this one but for their sizes, beside its own: what is compiled ahead is
    /// compiled with them too.
    fn tiles_of_other_sizes(&self, _problem: &P) -> Vec<TileOptions> {
        Vec::new()
    }

    /// Sets what of a launch depends on what its kernel takes of the device, once that is compiled; nothing is known of
    /// it where there is no compiler.
    fn lay_out(&self, _launch: &mut Launch, _usage: Option<&ResourceUsage>) {}

    /// Takes the operands where they lie, or names the first that it does not: addresses are not known when a plan is
    /// made.
    ///
    /// # Errors
    /// The operand, its address and the alignment that it lacks.
    fn takes_addresses(&self, _call: &Call<'_, P>) -> Result<(), ProblemError> {
        Ok(())
    }

    /// What serves operands whose addresses this one does not take, where the caller allows that.
    fn for_any_address(&self, _problem: &P) -> AnyAddress<P, V> {
        AnyAddress::Fallback
    }

    /// Binds the arguments and queues the steps, which are those of its choice's launches.
    ///
    /// # Safety
    /// As [`fmha_core::Launch::launch`]; it takes the operands' addresses, the calling thread has entered the device.
    ///
    /// # Errors
    /// What the driver said.
    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, P>) -> Result<()>;

    /// Itself as a kernel whose tiles are measured, if it has tiles.
    fn tunable(&self) -> Option<&dyn Tunable<P, V>> {
        None
    }
}

/// A recipe whose tiles `fmha tune` measures.
pub trait Tunable<P: Problem, V: Vendor> {
    /// What its tiles are kept under.
    fn label(&self) -> &'static str;

    /// The headers that the entries of its launches include: the tiles of another text say nothing.
    fn headers(&self) -> &'static [&'static str];

    /// Whether the device has what its instructions need.
    fn runs_on(&self, facts: &V::Facts) -> bool;

    /// Its own choice for a problem, all fields spelt out.
    ///
    /// # Errors
    /// Why it does not take the problem.
    fn own_tile(&self, problem: &P, facts: &V::Facts, options: &PlanOptions) -> Result<TileOptions, Refusal>;

    /// The class of problems that a plan's tile is kept for.
    fn class(&self, problem: &P, options: &PlanOptions) -> TileClass;

    /// Each field's values, in the order to try them.
    fn fields(&self) -> Vec<(&'static str, Vec<String>)>;

    /// Microseconds of a call with a tile whose fields are these, by a model; `None` without one, or of a tile that does not fit.
    fn modelled_micros(&self, _problem: &P, _facts: &V::Facts, _tile: &TileOptions) -> Option<f64> {
        None
    }
}

/// A problem whose tiles are kept by class.
pub trait Classed: Problem {
    /// The class of problems that a plan's tile is kept for.
    fn tile_class(&self, options: &PlanOptions) -> TileClass;
}

impl Classed for ValidFwd {
    fn tile_class(&self, _: &PlanOptions) -> TileClass {
        TileClass::of_fwd(self)
    }
}

impl Classed for ValidBwd {
    fn tile_class(&self, options: &PlanOptions) -> TileClass {
        let spec = BwdSpec { deterministic: options.deterministic, ..BwdSpec::of(self) };
        TileClass::of_bwd(self, &spec)
    }
}

/// A recipe whose tile is a struct of listed fields, and so [`Tunable`].
pub trait Tiled<P: Classed, V: Vendor>: Recipe<P, V> {
    /// Its tile.
    type Tile: Fields;

    /// As [`Tunable::headers`].
    const HEADERS: &'static [&'static str];

    /// As [`Tunable::label`].
    fn label(&self) -> &'static str {
        self.name()
    }

    /// As [`Tunable::runs_on`].
    fn runs_on(&self, _facts: &V::Facts) -> bool {
        true
    }

    /// Its own choice for a problem that it takes: of each launch that has a tile. A field that is set is set for all of
    /// them; those in which they differ are left to each.
    ///
    /// # Errors
    /// Why it does not take the problem.
    fn table_tiles(
        &self,
        problem: &P,
        facts: &V::Facts,
        options: &PlanOptions,
    ) -> Result<Vec<Self::Tile>, Refusal>;

    /// As [`Tunable::class`].
    fn class(&self, problem: &P, options: &PlanOptions) -> TileClass {
        problem.tile_class(options)
    }

    /// As [`Tunable::modelled_micros`].
    fn modelled_micros(&self, _problem: &P, _facts: &V::Facts, _tile: &TileOptions) -> Option<f64> {
        None
    }
}

impl<P: Classed, V: Vendor, R: Tiled<P, V>> Tunable<P, V> for R {
    fn label(&self) -> &'static str {
        Tiled::label(self)
    }

    fn headers(&self) -> &'static [&'static str] {
        R::HEADERS
    }

    fn runs_on(&self, facts: &V::Facts) -> bool {
        Tiled::runs_on(self, facts)
    }

    fn own_tile(&self, problem: &P, facts: &V::Facts, options: &PlanOptions) -> Result<TileOptions, Refusal> {
        let mut launches =
            self.table_tiles(problem, facts, options)?.into_iter().map(|tile| knob_values(&tile));
        let mut common = launches.next().unwrap_or_default();
        launches.for_each(|others| common.retain(|knob| others.contains(knob)));
        Ok(common)
    }

    fn class(&self, problem: &P, options: &PlanOptions) -> TileClass {
        Tiled::class(self, problem, options)
    }

    fn fields(&self) -> Vec<(&'static str, Vec<String>)> {
        knobs::<R::Tile>()
    }

    fn modelled_micros(&self, problem: &P, facts: &V::Facts, tile: &TileOptions) -> Option<f64> {
        Tiled::modelled_micros(self, problem, facts, tile)
    }
}

/// A recipe of an operation, whichever it is.
pub struct Kernel<P, V>(Box<dyn Recipe<P, V>>);

/// A forward recipe.
pub type FwdKernel<V> = Kernel<ValidFwd, V>;
/// A backward recipe.
pub type BwdKernel<V> = Kernel<ValidBwd, V>;
/// A combine recipe.
pub type CombineKernel<V> = Kernel<ValidCombine, V>;

impl<P: Problem, V: Vendor> Kernel<P, V> {
    /// A recipe of that operation.
    #[must_use]
    pub fn new(recipe: impl Recipe<P, V>) -> Self {
        Self(Box::new(recipe))
    }
}

impl<P: Problem, V: Vendor> Deref for Kernel<P, V> {
    type Target = dyn Recipe<P, V>;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// A kernel that takes a problem: what is launched for it, and what that promises.
pub struct Choice<K> {
    /// The recipe again, with what its launches need.
    pub kernel: K,
    /// In stages.
    pub launches: Launches,
    /// What they share.
    pub workspace: Workspace,
    /// What they hold to.
    pub promises: Promises,
    /// How, for readers: tile, order, schedule.
    pub details: Vec<(&'static str, String)>,
}

/// What takes operands whose addresses a kernel does not.
pub enum AnyAddress<P: Problem, V: Vendor> {
    /// The kernel takes them all.
    Itself,
    /// The slow kernel of its family.
    Fallback,
    /// This one; the words tell a reader which it is.
    Other(Box<Choice<Kernel<P, V>>>, &'static str),
}

/// How many groups of threads a launch has, and how they start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Groups of threads that share memory; 0: nothing is launched.
    pub groups: u32,
    /// Threads of a group.
    pub threads: u32,
    /// It may start before the grid before it in the stream has ended, and waits for that itself.
    pub dependent: bool,
}

impl Grid {
    /// One that starts when the grid before it has ended.
    #[must_use]
    pub const fn new(groups: u32, threads: u32) -> Self {
        Self { groups, threads, dependent: false }
    }
}

/// One launch of a plan, its kernel not yet compiled.
#[derive(Debug)]
pub struct Launch {
    /// The kernel's name in the plan.
    pub kernel: &'static str,
    /// What is compiled.
    pub source: KernelSource,
    /// How it lies over the device.
    pub grid: Grid,
    /// Dynamic shared memory of a group.
    pub shared_bytes: u32,
    /// As in [`LaunchShape`](fmha_core::LaunchShape).
    pub tiles: u64,
    /// As there.
    pub tiles_at_once: u64,
}

/// The launches of a plan in stages: what prepares the operands, the kernel that bears the plan's name, what completes
/// its results. They run in this order on one stream.
#[derive(Debug)]
pub struct Launches {
    all: Vec<Launch>,
    main: usize,
}

impl Launches {
    /// `before`, the kernel itself, `after`.
    #[must_use]
    pub fn new(
        before: impl IntoIterator<Item = Launch>,
        main: Launch,
        after: impl IntoIterator<Item = Launch>,
    ) -> Self {
        let mut all: Vec<Launch> = before.into_iter().collect();
        let index = all.len();
        all.push(main);
        all.extend(after);
        Self { all, main: index }
    }

    /// The same behind one that prepares the operands.
    #[must_use]
    pub fn behind(mut self, first: Launch) -> Self {
        self.all.insert(0, first);
        Self { main: self.main + 1, ..self }
    }

    /// All of them, and which is the kernel itself; none are left.
    pub(crate) fn take(&mut self) -> (Vec<Launch>, usize) {
        (std::mem::take(&mut self.all), self.main)
    }

    /// All, and which of them is the kernel itself.
    pub(crate) fn into_parts(self) -> (Vec<Launch>, usize) {
        (self.all, self.main)
    }
}

impl From<Launch> for Launches {
    /// The kernel alone.
    fn from(main: Launch) -> Self {
        Self::new([], main, [])
    }
}

impl Deref for Launches {
    type Target = [Launch];

    fn deref(&self) -> &[Launch] {
        &self.all
    }
}

/// Of kernels in which a row is one group's work, its sums in one order, whatever the other rows are.
#[must_use]
pub const fn deterministic_rows() -> Promises {
    Promises {
        deterministic: true,
        batch_invariant: true,
        graph_capturable: true,
        accuracy: Accuracy::Exact,
        score_sums: ScoreSums::F32,
    }
}
