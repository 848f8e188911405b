//! A backend over a vendor's driver and recipes (kernels with their checks and launches).

use std::path::PathBuf;
use std::sync::Arc;

use fmha_core::backend::unsupported;
use fmha_core::cache::{CompiledKernel, Compiler, ImageKind, KernelJob, Loader, Module, Modules, Target};
use fmha_core::quantize::ValidQuantize;
use fmha_core::source::{ENTRY, KernelSource};
use fmha_core::sparse::{ValidChoose, ValidIndexLoss};
use fmha_core::tune::{TileOptions, Tune, TunedKernel, TunedTile};
use fmha_core::{
    AnyProblem, DType, DeviceMemory, Error, Explain, FmhaBackend, LaunchShape, Peers, PlanOptions, PlanParts,
    Planned, Precompile, Queues, Refusal, Result, Roofline, Step as Explained, ValidBwd, ValidCombine,
    ValidFwd, Workspace,
};

use crate::driver::{Driver, Toolchain};
use crate::launches::Launch;
use crate::memory::Memory;
use crate::ranges::{Range, Ranges};
use crate::recipe::{AnyAddress, Choice, Facts as _, GpuProblem, Planned as Chosen, Recipe, Tiles, Vendor};
use crate::select::{Selected, select};
use crate::steps::{Handle, Ready, Small, Step, Steps};

/// Evaluates one expression for a problem of any operation.
macro_rules! whichever {
    ($any:expr, $problem:ident => $value:expr) => {
        match $any {
            AnyProblem::Forward($problem) => $value,
            AnyProblem::Backward($problem) => $value,
            AnyProblem::Combine($problem) => $value,
            AnyProblem::Choose($problem) => $value,
            AnyProblem::Quantize($problem) => $value,
            AnyProblem::IndexLoss($problem) => $value,
        }
    };
}

/// A GPU with its vendor's driver, or only an architecture without a device.
pub struct Backend<V: Vendor> {
    name: String,
    facts: V::Facts,
    modules: Modules<DeviceLoader<V>>,
    memory: Memory<V::Driver>,
    ranges: Ranges,
}

/// Compiles for one architecture, and loads kernels onto the device if there is one.
struct DeviceLoader<V: Vendor> {
    toolchain: V::Toolchain,
    driver: Option<Arc<V::Driver>>,
}

impl<V: Vendor> Loader for DeviceLoader<V> {
    type Kernel = <V::Driver as Driver>::Kernel;

    fn compiler(&self) -> Result<&dyn Compiler> {
        self.toolchain.compiler()
    }

    fn load(&self, image: &[u8], shared_bytes: u32) -> Result<Option<Self::Kernel>> {
        self.driver.as_ref().map(|driver| driver.load(image, ENTRY, shared_bytes)).transpose()
    }
}

/// A choice that accepts operands at any address, and the words with which a plan reports it.
type Other<P, V> = (Choice<Chosen<P, V>>, String);

/// A kernel on a vendor's device.
type LoadedModule<V> = Module<<<V as Vendor>::Driver as Driver>::Kernel>;

/// Compiled steps, and each step's description for the plan.
type Compiled<V> = (Vec<Step<<V as Vendor>::Driver>>, Vec<Explained>);

/// A choice whose launches were taken out, and these launches after compilation.
type StandIn<P, V> = (Choice<Chosen<P, V>>, Result<(usize, Compiled<V>)>);

/// The reason why compilation failed, if the compiler is missing.
fn lacking<V: Vendor>(compiled: &Result<(usize, Compiled<V>)>) -> Option<String> {
    match compiled {
        Ok((_, (steps, _))) => steps.iter().find_map(|step| step.module.as_ref().err().cloned()),
        Err(Error::NoDevice(why)) => Some(why.clone()),
        Err(_) => None,
    }
}

/// A launch's source text with the functions of its problem in place.
fn with_code<P: GpuProblem>(problem: &P, source: KernelSource) -> KernelSource {
    match problem.code_source() {
        None => source,
        Some(code) => source.with_code(&code),
    }
}

impl<V: Vendor> Backend<V> {
    /// Makes a backend on a device. Without a device (`driver` is `None`) it plans, compiles if there is a
    /// compiler, and runs nothing. `flags` are the compiler's options except the architecture; `image` is what the
    /// device runs.
    ///
    /// # Errors
    /// A bundle of `FMHA_BUNDLE` that is not whole.
    pub fn new(
        name: String,
        facts: V::Facts,
        toolchain: V::Toolchain,
        driver: Option<Arc<V::Driver>>,
        (flags, image): (Vec<String>, ImageKind),
    ) -> Result<Self> {
        let target = Target { arch: facts.arch().to_owned(), flags, image };
        let modules = Modules::from_env(target, DeviceLoader { toolchain, driver: driver.clone() })?;
        Ok(Self { name, facts, modules, memory: Memory { driver }, ranges: V::ranges() })
    }

    fn driver(&self) -> Option<&Arc<V::Driver>> {
        self.memory.driver.as_ref()
    }

    fn choose<P: GpuProblem>(&self, problem: &P, options: &PlanOptions) -> Result<Selected<P, V>> {
        // A plan over a quantised cache must be bit-equal to the call on the cache in Q's type, so it uses the
        // kernel chosen for that call. If no kernel takes that call, for instance because the named kernel only
        // converts caches, there is nothing to be equal to.
        let twin = problem.of_wide_cache()?.and_then(|wide| self.choose_for(&wide, options, None).ok());
        self.choose_for(problem, options, twin.map(|(choice, _)| choice.kernel.recipe.about.rows_of))
    }

    /// The choice among all kernels, or among those that give bit-equal rows to the kernel `of`.
    fn choose_for<P: GpuProblem>(
        &self,
        problem: &P,
        options: &PlanOptions,
        of: Option<&'static str>,
    ) -> Result<Selected<P, V>> {
        select(&self.name, &P::recipes::<V>(), options, |kernel| {
            if let Some(of) = of.filter(|&of| of != kernel.about.rows_of) {
                let why = format!(
                    "dtype_cache: the same call on a cache of 16 bits is {of}'s, whose bits it has not"
                );
                return Err(Refusal::new(kernel.name(), why));
            }
            if !kernel.about.waits_for_keys {
                problem.refuse_arrivals(kernel.name())?;
            }
            if let Some(fwd) = problem.forward().filter(|_| !kernel.about.takes_lists) {
                fwd.refuse_lists(kernel.name())?;
            }
            if let Some(fwd) = problem.forward().filter(|_| !kernel.about.takes_second) {
                fwd.refuse_second(kernel.name())?;
            }
            if let Some(fwd) = problem.forward().filter(|_| !kernel.about.reads_cache_rows) {
                fwd.refuse_cache_rows(kernel.name())?;
            }
            if let Some(fwd) = problem.forward().filter(|_| !kernel.about.reads_cache_scales) {
                fwd.refuse_cache_scales(kernel.name())?;
            }
            if let Some(fwd) = problem.forward().filter(|_| !kernel.about.reads_block_scales) {
                fwd.refuse_block_scales(kernel.name())?;
            }
            problem.refuse_beside_code(kernel.name())?;
            problem.refuse_beside_small(kernel.name())?;
            let has_code = problem.code_source().is_some();
            // Most kernels cannot compute functions with masks as data, because blocks of the full list must not
            // evaluate them.
            let beside_code = has_code && !kernel.about.computes_code_beside_masks;
            if let Some(masks) = problem.masks().filter(|_| beside_code || !kernel.about.reads_masks) {
                masks.refuse(kernel.name())?;
            }
            if let Some(code) = problem.code_source() {
                if !kernel.about.computes_code {
                    code.code.refuse(kernel.name())?;
                }
                code.refuse_words(kernel.name())?;
            }
            kernel.choose(problem, &self.facts, options)
        })
    }

    fn plan<P: GpuProblem>(&self, problem: &P, options: &PlanOptions) -> Result<Planned<P>> {
        let _range = self.ranges.named(format_args!("fmha plan {}", P::OPERATION)).open();
        let (mut choice, refusals) = self.choose(problem, options)?;
        let mut compiled = self.compiled_of(problem, &mut choice);
        if let Some(why) = lacking::<V>(&compiled)
            && let Some((mut other, of_other)) = self.stand_in(problem, options)
        {
            other.details.push(("stands in", format!("for a tile that is in no bundle: {why}")));
            (choice, compiled) = (other, of_other);
        }
        let (main, (steps, mut explained)) = compiled?;
        let Choice { kernel, mut workspace, promises, details: own, .. } = choice;
        let mut details = vec![("arch", self.facts.arch().to_owned())];
        details.extend(own);
        let range = self.range_of_runs(&kernel);
        let chosen = Ready { planned: kernel, steps: Steps::new(steps, main), range };
        let fallback = match self.for_any_address(&chosen.planned, problem, options) {
            Ok(None) => None,
            // The slow kernel need not support everything that a fast one does.
            Err(Error::Unsupported { refusals, .. }) => {
                let why: Vec<String> = refusals.iter().map(ToString::to_string).collect();
                details.push(("unaligned operands", format!("refused: {}", why.join("; "))));
                None
            }
            Err(error) => return Err(error),
            Ok(Some((other, words))) => {
                let Choice { kernel, launches, workspace: wants, .. } = other;
                workspace = workspace.max(wants);
                let (launches, main) = launches.into_parts();
                let (served, ready) = match self.compiled(problem, Some(&kernel), launches) {
                    Ok((all, _)) => {
                        let refused = all.iter().find_map(|step| step.module.as_ref().err());
                        let served = refused.map_or_else(|| words, |why| format!("refused: {why}"));
                        let range = self.range_of_runs(&kernel);
                        (served, Some(Ready { planned: kernel, steps: Steps::new(all, main), range }))
                    }
                    // A bundle with the chosen kernel makes a compiler unnecessary.
                    Err(Error::NoDevice(why)) => (format!("refused: {why}"), None),
                    Err(error) => return Err(error),
                };
                details.push(("unaligned operands", served));
                ready
            }
        };
        let (small, of_small) = self.small(problem, &chosen.planned, &mut workspace)?;
        explained.extend(of_small);
        if !small.steps.is_empty() {
            details.push((
                "small outputs",
                "scores are computed again behind the kernel: correct, not fast".to_owned(),
            ));
        }
        let parts = PlanParts {
            kernel: chosen.planned.name().to_owned(),
            details,
            steps: explained,
            refusals,
            is_fallback: chosen.planned.recipe.about.is_fallback,
            workspace,
            promises,
        };
        let launch = Handle { driver: self.driver().cloned(), chosen, fallback, small };
        Ok(Planned { parts, launch: Box::new(launch) })
    }

    /// The compiled launches that write small outputs after the kernel, and their descriptions. Their part of the
    /// workspace follows all others.
    fn small<P: GpuProblem>(
        &self,
        problem: &P,
        chosen: &Chosen<P, V>,
        workspace: &mut Workspace,
    ) -> Result<(Small<V::Driver>, Vec<Explained>)> {
        let refused = |why| unsupported(&self.name, vec![Refusal::new(chosen.name(), why)]);
        let (launches, bytes) = problem.small_launches(&self.facts).map_err(refused)?;
        let place = workspace.bytes.next_multiple_of(256);
        if bytes > 0 {
            workspace.bytes = place.saturating_add(bytes);
        }
        let (steps, explained) = self.compiled(problem, None, launches)?;
        Ok((Small { steps, place }, explained))
    }

    /// The profiler range of each run of a kernel.
    fn range_of_runs<P: GpuProblem>(&self, kernel: &Chosen<P, V>) -> Range {
        self.ranges.named(format_args!("fmha {} {}", P::OPERATION, kernel.name()))
    }

    /// A choice's compiled launches, and the index of the main kernel among them; the launches are moved out of the
    /// choice.
    fn compiled_of<P: GpuProblem>(
        &self,
        problem: &P,
        choice: &mut Choice<Chosen<P, V>>,
    ) -> Result<(usize, Compiled<V>)> {
        let (launches, main) = choice.launches.take();
        Ok((main, self.compiled(problem, Some(&choice.kernel), launches)?))
    }

    /// Finds a fallback tile if there is no compiler and no bundle has the chosen tile's kernels. Among the tiles
    /// compiled ahead for problems that differ in size alone, it takes that of the nearest size whose kernels are
    /// there.
    fn stand_in<P: GpuProblem>(&self, problem: &P, options: &PlanOptions) -> Option<StandIn<P, V>> {
        // A batch-invariant plan gets none: the nearest size depends on the batch, so the sequence's bits would
        // too.
        if !options.tile.is_empty() || options.batch_invariant || !self.modules.has_bundles() {
            return None;
        }
        let mut tried = Vec::new();
        for like in problem.of_other_sizes_in_tables() {
            let Ok((ahead, _)) = self.choose(&like, options) else { continue };
            let name = ahead.kernel.name();
            let recipe = &ahead.kernel.recipe;
            if recipe.about.tiles.is_none() {
                continue;
            }
            let Ok(own) = recipe.own_tile(&like, &self.facts, options) else { continue };
            let others = ahead.kernel.kernel.tiles_of_other_sizes(&like);
            for fields in [TileOptions::default()].into_iter().chain(others) {
                // Later settings of a field replace earlier ones.
                let options = options.clone().kernel(name).tile(own.iter().cloned().chain(fields));
                if tried.contains(&options) {
                    continue;
                }
                tried.push(options.clone());
                let Ok((mut choice, _)) = self.choose(problem, &options) else { continue };
                let compiled = self.compiled_of(problem, &mut choice);
                if compiled.is_ok() && lacking::<V>(&compiled).is_none() {
                    return Some((choice, compiled));
                }
            }
        }
        None
    }

    /// Finds a choice that accepts operands at any address, and the words with which a plan reports it; `None` if
    /// the chosen kernel accepts any address, or the caller allows no other.
    fn for_any_address<P: GpuProblem>(
        &self,
        chosen: &Chosen<P, V>,
        problem: &P,
        options: &PlanOptions,
    ) -> Result<Option<Other<P, V>>> {
        if !options.allow_fallback || chosen.recipe.about.is_fallback {
            return Ok(None);
        }
        match chosen.kernel.for_any_address(problem, &self.facts, options) {
            AnyAddress::Itself => Ok(None),
            AnyAddress::ByElement(choice) => {
                let words = "the same kernel by elements takes them: correct, not fast";
                Ok(Some((*choice, words.to_owned())))
            }
            AnyAddress::Fallback => {
                let family = P::recipes::<V>();
                let Some(slow) = family.iter().find(|kernel| kernel.about.is_fallback) else {
                    return Ok(None);
                };
                let any = options.clone().kernel(slow.name()).tile(Vec::<(String, String)>::new());
                let words = format!("kernel {} takes them: correct, not fast", slow.name());
                Ok(Some((self.choose(problem, &any)?.0, words)))
            }
        }
    }

    /// Compiles launches and loads them if there is a device. A kernel, if given, adjusts its launches to the
    /// compiled resources.
    ///
    /// # Errors
    /// What the compiler or the driver said.
    fn compiled<P: GpuProblem>(
        &self,
        problem: &P,
        chosen: Option<&Chosen<P, V>>,
        mut launches: Vec<Launch>,
    ) -> Result<Compiled<V>> {
        for launch in &mut launches {
            launch.source = with_code(problem, std::mem::take(&mut launch.source));
        }
        let modules = self.loaded(&mut launches);
        let mut steps = Vec::with_capacity(launches.len());
        let mut explained = Vec::with_capacity(launches.len());
        for (mut launch, module) in launches.into_iter().zip(modules) {
            let (module, code) = match module {
                Ok(module) => {
                    let code = module.origin.to_string();
                    (Ok(module), code)
                }
                // A plan without a device may lack a compiler too.
                Err(Error::NoDevice(text)) if self.driver().is_none() => {
                    let code = format!("none: {text}");
                    (Err(text), code)
                }
                Err(error) => return Err(error),
            };
            let resources = module.as_ref().ok().map(|module| module.compiled.resources);
            match chosen {
                Some(chosen) => chosen.kernel.lay_out(&self.facts, &mut launch, resources.as_ref()),
                None => self.facts.lay_out(&mut launch, resources.as_ref()),
            }
            let Launch { stage, kernel, grid, shared_bytes, tiles, tiles_at_once, .. } = launch;
            let shape = LaunchShape {
                groups: grid.groups.into(),
                threads: grid.threads,
                shared_bytes,
                tiles,
                tiles_at_once,
            };
            let remarks = module.as_ref().map_or_else(|_| String::new(), |module| module.compiled.remarks());
            let explain = Explain { resources, launch: Some(shape), code, remarks };
            explained.push(Explained { kernel: kernel.to_owned(), explain });
            let range = self.ranges.named(format_args!("{kernel}"));
            steps.push(Step { stage, module, grid, range, kept: Default::default() });
        }
        Ok((steps, explained))
    }

    /// Loads the kernels of launches, and takes their sources out. Kernels that must be compiled or read from disk are
    /// processed in parallel, one thread each.
    fn loaded(&self, launches: &mut [Launch]) -> Vec<Result<Arc<LoadedModule<V>>>> {
        let new = launches
            .iter()
            .filter(|launch| self.modules.loaded(&launch.source, launch.shared_bytes).is_none());
        let one_by_one = new.count() < 2;
        let wanted = launches
            .iter_mut()
            .map(|launch| (launch.kernel, std::mem::take(&mut launch.source), launch.shared_bytes));
        if one_by_one {
            return wanted.map(|(kernel, source, bytes)| self.modules.load(kernel, source, bytes)).collect();
        }
        std::thread::scope(|scope| {
            let started: Vec<_> = wanted
                .map(|(kernel, source, bytes)| {
                    let again = source.clone();
                    let load = move || self.modules.load(kernel, source, bytes);
                    let thread =
                        std::thread::Builder::new().name(format!("fmha {kernel}")).spawn_scoped(scope, load);
                    // If no thread can be started, for lack of memory, the kernel is loaded in this thread.
                    thread.map_err(|_| self.modules.load(kernel, again, bytes))
                })
                .collect();
            let ended = started.into_iter().map(|thread| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(loaded) => loaded,
            });
            ended.collect()
        })
    }

    fn jobs_of<P: GpuProblem>(&self, problem: &P, options: &PlanOptions) -> Result<Vec<KernelJob>> {
        // Kernels are made for at least one sequence, so an empty batch is planned as one.
        let one = problem.of_one_sequence()?;
        let problem = one.as_ref().unwrap_or(problem);
        let own = self.choose(problem, options)?.0;
        let tiles = own.kernel.kernel.tiles_of_other_sizes(problem);
        let name = own.kernel.name();
        let mut jobs: Vec<KernelJob> = Vec::new();
        let refused = |why| unsupported(&self.name, vec![Refusal::new(name, why)]);
        let behind = problem.small_launches(&self.facts).map_err(refused)?.0;
        let mut add = |launches: Vec<Launch>| {
            for launch in launches {
                let job = self.modules.job(launch.kernel, with_code(problem, launch.source));
                if jobs.iter().all(|known| known.source.entry != job.source.entry) {
                    jobs.push(job);
                }
            }
        };
        add(own.launches.into_parts().0);
        add(behind);
        if options.tile.is_empty() {
            for tile in tiles {
                let options = options.clone().kernel(name).tile(tile);
                match self.choose(problem, &options) {
                    Ok((other, _)) => add(other.launches.into_parts().0),
                    // This recipe cannot keep the plan's promises, so the plan does not use its tile.
                    Err(Error::Unsupported { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(jobs)
    }

    /// The recipe whose tile a plan of the problem uses, how its tiles are stored, and that tile.
    ///
    /// # Errors
    /// Why the recipes with tiles refuse the problem, or that no recipe has tiles.
    fn tuned<P: GpuProblem, T>(
        &self,
        problem: &P,
        options: &PlanOptions,
        of: impl FnOnce(&Recipe<P, V>, &Tiles<P>, TileOptions) -> T,
    ) -> Result<T> {
        let mut refusals = Vec::new();
        let wanted = |name: &str| options.kernel.as_deref().is_none_or(|kernel| kernel == name);
        for recipe in P::recipes::<V>().iter().filter(|recipe| wanted(recipe.name())) {
            let Some(tiles) = &recipe.about.tiles else { continue };
            if (recipe.runs_on)(&self.facts).is_err() {
                continue;
            }
            match recipe.own_tile(problem, &self.facts, options) {
                Ok(tile) => return Ok(of(recipe, tiles, tile)),
                Err(refusal) => refusals.push(refusal),
            }
        }
        if refusals.is_empty() {
            let operation = P::OPERATION;
            let reason = format!("{operation}: 0 of its kernels have a tile to tune");
            refusals.push(Refusal::new(operation.name(), reason));
        }
        Err(unsupported(&self.name, refusals))
    }
}

/// The kernels of a vendor whose tiles can be measured.
#[must_use]
pub fn tuned_kernels<V: Vendor>() -> Vec<TunedKernel<'static>> {
    fn of<P: GpuProblem, V: Vendor>() -> Vec<TunedKernel<'static>> {
        let tuned = P::recipes::<V>().into_iter().filter_map(|recipe| recipe.about.tiles);
        tuned.map(|Tiles { label, headers, .. }| TunedKernel { label, headers }).collect()
    }
    [
        of::<ValidFwd, V>(),
        of::<ValidBwd, V>(),
        of::<ValidCombine, V>(),
        of::<ValidChoose, V>(),
        of::<ValidQuantize, V>(),
        of::<ValidIndexLoss, V>(),
    ]
    .concat()
}

// SAFETY: a plan's kernel was chosen for the problem by a recipe, whose launches keep to the operands of a checked
// call; memory and queues are those of one driver.
unsafe impl<V: Vendor> FmhaBackend for Backend<V> {
    fn kind(&self) -> &'static str {
        V::KIND
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn roofline(&self, dtype: DType) -> Roofline {
        self.facts.roofline(dtype)
    }

    fn takes_lists(&self) -> bool {
        true
    }

    fn takes_cache_rows(&self) -> bool {
        true
    }

    fn takes_second(&self) -> bool {
        true
    }

    fn kernels(&self) -> Vec<&'static str> {
        fn of<P: GpuProblem, V: Vendor>() -> Vec<&'static str> {
            P::recipes::<V>().iter().map(Recipe::name).collect()
        }
        let mut names = Vec::new();
        for name in [
            of::<ValidFwd, V>(),
            of::<ValidBwd, V>(),
            of::<ValidCombine, V>(),
            of::<ValidChoose, V>(),
            of::<ValidQuantize, V>(),
            of::<ValidIndexLoss, V>(),
        ]
        .concat()
        {
            // One name, such as `simt`, may belong to kernels of several operations.
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    fn precompiler(&self) -> Option<&dyn Precompile> {
        Some(self)
    }

    fn tuner(&self) -> Option<&dyn Tune> {
        self.driver().map(|_| -> &dyn Tune { self })
    }

    fn queues(&self) -> Option<&dyn Queues> {
        self.driver().map(|driver| -> &dyn Queues { &**driver })
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &self.memory
    }

    fn takes_code(&self) -> bool {
        true
    }

    fn peers(&self) -> Option<&dyn Peers> {
        self.driver()?.peers()
    }

    fn takes_masks(&self) -> bool {
        true
    }

    fn takes_outputs(&self) -> bool {
        true
    }

    fn takes_block_scales(&self) -> bool {
        true
    }

    fn plan_fwd(&self, problem: &ValidFwd, options: &PlanOptions) -> Result<Planned<ValidFwd>> {
        self.plan(problem, options)
    }

    fn plan_bwd(&self, problem: &ValidBwd, options: &PlanOptions) -> Result<Planned<ValidBwd>> {
        self.plan(problem, options)
    }

    fn plan_combine(&self, problem: &ValidCombine, options: &PlanOptions) -> Result<Planned<ValidCombine>> {
        self.plan(problem, options)
    }

    fn plan_choose(&self, problem: &ValidChoose, options: &PlanOptions) -> Result<Planned<ValidChoose>> {
        self.plan(problem, options)
    }

    fn plan_quantize(
        &self,
        problem: &ValidQuantize,
        options: &PlanOptions,
    ) -> Result<Planned<ValidQuantize>> {
        self.plan(problem, options)
    }

    fn plan_index_loss(
        &self,
        problem: &ValidIndexLoss,
        options: &PlanOptions,
    ) -> Result<Planned<ValidIndexLoss>> {
        self.plan(problem, options)
    }
}

impl<V: Vendor> Tune for Backend<V> {
    fn default_tile(&self, problem: AnyProblem<'_>, options: &PlanOptions) -> Result<TileOptions> {
        whichever!(problem, it => self.tuned(it, options, |_, _, tile| tile))
    }

    fn knobs(
        &self,
        problem: AnyProblem<'_>,
        options: &PlanOptions,
    ) -> Result<Vec<(&'static str, Vec<String>)>> {
        whichever!(problem, it => self.tuned(it, options, |_, tiles, _| (tiles.knobs)()))
    }

    fn modelled_micros(
        &self,
        problem: AnyProblem<'_>,
        options: &PlanOptions,
        tile: &TileOptions,
    ) -> Option<f64> {
        let facts = &self.facts;
        whichever!(problem, it => self.tuned(it, options, |of, _, _| (of.modelled_micros)(it, facts, tile)).ok()?)
    }

    fn keep(&self, problem: AnyProblem<'_>, options: &PlanOptions, tile: TunedTile) -> Result<PathBuf> {
        if self.driver().is_some_and(|driver| driver.is_emulated()) {
            return Err(Error::NoDevice("the device is emulated: its times are no device's".to_owned()));
        }
        let (label, class) = whichever!(problem, it => {
            self.tuned(it, options, |_, tiles, _| (tiles.label, (tiles.class)(it, options)))?
        });
        self.facts.tuned().keep(label, &class, tile)
    }
}

impl<V: Vendor> Precompile for Backend<V> {
    fn jobs(&self, problem: AnyProblem<'_>, options: &PlanOptions) -> Result<Vec<KernelJob>> {
        whichever!(problem, it => self.jobs_of(it, options))
    }

    fn precompile(&self, job: &KernelJob) -> Result<Arc<CompiledKernel>> {
        self.modules.compile(job).map(|(kernel, _)| kernel)
    }
}
