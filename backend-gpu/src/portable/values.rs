//! Backward of Q, K and V with scales by blocks: a first launch writes their values to the workspace, and a kernel of
//! 16 bits or f32 reads them there.

use fmha_core::abi::View;
use fmha_core::args::{DevSlice, DevSliceMut, MemorySpace};
use fmha_core::scale_params::block_scale_params;
use fmha_core::tune::TileOptions;
use fmha_core::value_params::{BlockValuesParams, BlockValuesSpec, VALUE_COLUMNS};
use fmha_core::{
    Call, PlanOptions, QLayout, Refusal, Result, Shape, Strides, Totals, ValidBwd, Workspace, bind,
};

use super::RowKernel;
use super::tile_list::TileListPlan;
use crate::driver::Driver;
use crate::launches::{Launch, Stage};
use crate::recipe::{About, Choice, Facts as _, Kernel, Operand, Vendor};
use crate::steps::Steps;

/// The name of the launch that writes the values.
const NAME: &str = "block_values";

/// The values of a problem's Q, K and V in the workspace, and the problem over them.
#[derive(Clone, Debug)]
pub struct BlockValues {
    problem: ValidBwd,
    spec: BlockValuesSpec,
    /// Offsets in the workspace at which the values of Q, K and V begin, and at which those of V end.
    places: [u64; 4],
    /// Number of pieces of rows; each lane converts one.
    pieces: u64,
}

impl BlockValues {
    /// The values of a problem; `None` if it has no scales by blocks.
    ///
    /// # Errors
    /// Packed rows of Q, whose number no plan knows, and values of 2^62 bytes or more.
    pub fn of(problem: &ValidBwd) -> Result<Option<Self>, String> {
        let fwd = problem.fwd();
        let Some((scales, spec)) = fwd.block_scales.zip(BlockValuesSpec::of(fwd)) else { return Ok(None) };
        let format = scales.format;
        if fwd.layout.q == QLayout::Packed {
            return Err(format!(
                "q_layout packed beside block_scales {format}: the workspace has values of seqlen_q {} rows of each \
                 sequence",
                fwd.dims.seqlen_q
            ));
        }
        let Some(mut values) = problem.over_values(Totals::NONE) else { return Ok(None) };
        let whole = |shape: Shape| Shape { dim: shape.dim.next_multiple_of(VALUE_COLUMNS), ..shape };
        let shapes = [fwd.shape_q(), fwd.shape_k(), fwd.shape_v()].map(whole);
        let strides = &mut values.fwd.strides;
        [strides.q, strides.k, strides.v] = shapes.map(Strides::bshd);
        let mut places = [0; 4];
        for (i, shape) in shapes.into_iter().enumerate() {
            let bytes = shape.num_elems().checked_mul(spec.dtype.size_bytes());
            let end = bytes.and_then(|bytes| bytes.checked_next_multiple_of(256)?.checked_add(places[i]));
            places[i + 1] =
                end.filter(|&end| end < 1 << 62).ok_or("the workspace would be 2^62 bytes or more")?;
        }
        let pieces = shapes.map(|shape| shape.num_elems() / u64::from(VALUE_COLUMNS)).iter().sum();
        let problem = values.validate().map_err(|error| format!("its values: {error}"))?;
        Ok(Some(Self { problem, spec, places, pieces }))
    }

    /// The problem whose Q, K and V are the values in the workspace.
    #[must_use]
    pub fn problem(&self) -> &ValidBwd {
        &self.problem
    }

    /// Places the values behind the workspace of the kernel that reads them, and returns the whole.
    ///
    /// # Errors
    /// A workspace of 2^62 bytes or more.
    pub fn behind(&mut self, own: Workspace) -> Result<Workspace, String> {
        let first = own.bytes.next_multiple_of(256);
        for place in &mut self.places {
            let moved = place.checked_add(first).filter(|&at| at < 1 << 62);
            *place = moved.ok_or("the workspace would be 2^62 bytes or more")?;
        }
        Ok(Workspace { bytes: self.places[3], ..own })
    }

    /// A detail for `explain` about the values.
    #[must_use]
    pub fn words(&self) -> (&'static str, String) {
        let bytes = self.places[3] - self.places[0];
        ("block_scales", format!("values in {} in {bytes} bytes of the workspace", self.spec.dtype))
    }

    /// The launch that writes the values.
    ///
    /// # Errors
    /// More pieces of rows than a grid has lanes.
    pub fn launch<V: Vendor>(&self, facts: &V::Facts) -> Result<Launch, String> {
        let groups = self.pieces.div_ceil(facts.row_group().1.into());
        facts.row_launch((Stage::Widen, NAME), RowKernel::BlockValues, &self.spec, [groups, 0])
    }

    /// Queues the launch that writes the values.
    ///
    /// # Safety
    /// As [`fmha_core::Launch::launch`]: the operands cover the problem, and the workspace is the plan's.
    ///
    /// # Errors
    /// An error of the driver.
    pub unsafe fn write<D: Driver>(&self, steps: &Steps<D>, call: &Call<'_, ValidBwd>) -> Result<()> {
        let Some(step) = steps.at(Stage::Widen) else { return Ok(()) };
        let fwd = call.problem.fwd();
        let mut params = bind::bwd_params(call.problem, call.args).fwd;
        let Some(mut scales) = block_scale_params(fwd, &call.args.score) else { return Ok(()) };
        let address = call.args.workspace.as_ref().map_or(0, |slice| slice.as_mut_ptr() as u64);
        let strides = &self.problem.fwd().strides;
        let view = |i: usize, strides| View::new(address + self.places[i], strides, false);
        let mut to = BlockValuesParams {
            q: view(0, strides.q),
            k: view(1, strides.k),
            v: view(2, strides.v),
            head_dim_qk: fwd.dims.head_dim_qk.cast_signed(),
            head_dim_v: fwd.dims.head_dim_v.cast_signed(),
        };
        let mut arguments = [(&raw mut params).cast(), (&raw mut scales).cast(), (&raw mut to).cast()];
        // SAFETY: the kernel takes FwdParams, BlockScaleParams and BlockValuesParams; the caller promises that the
        // memory covers the problem, and the values lie in the workspace as the plan has placed them.
        unsafe { step.launch(&mut arguments, call.stream) }
    }

    /// Calls `then` with the call over the values.
    pub fn with<T>(&self, call: &Call<'_, ValidBwd>, then: impl FnOnce(&Call<'_, ValidBwd>) -> T) -> T {
        let start = call.args.workspace.as_ref().map_or(std::ptr::null_mut(), DevSliceMut::as_mut_ptr);
        let [q, k, v, end] = self.places;
        let part = |from: u64, to: u64| {
            let at = start.wrapping_add(from as usize).cast_const();
            // SAFETY: a part of the workspace, which `check_bwd` saw to be as large as the plan says; the launch before
            // writes it.
            unsafe { DevSlice::from_raw(MemorySpace::Device, at, to - from, self.spec.dtype) }
        };
        let args = call.args.over_values([part(q, k), part(k, v), part(v, end)]);
        then(&Call { problem: &self.problem, args: &args, spans: call.spans, stream: call.stream })
    }
}

/// A backward kernel that reads converted values. It has another name in plans where a launch writes them for it.
pub trait ReadsValues<V: Vendor>: Kernel<ValidBwd, V> + Sized {
    /// Name of the kernel behind the launch that writes values.
    const OF_VALUES: &'static str;
}

/// A backward kernel that runs after the launch that writes values.
pub struct OfValues<K> {
    values: BlockValues,
    kernel: K,
}

impl<V: Vendor, K: ReadsValues<V>> Kernel<ValidBwd, V> for OfValues<K> {
    type Tile = Choice<Self>;

    fn about() -> About<ValidBwd> {
        let of = K::about();
        About { name: K::OF_VALUES, reads_block_scales: true, tiles: None, ..of }
    }

    fn runs_on(facts: &V::Facts) -> Result<(), String> {
        K::runs_on(facts)
    }

    fn fit(
        problem: &ValidBwd,
        facts: &V::Facts,
        options: &PlanOptions,
        _: &TileOptions,
    ) -> Result<Choice<Self>, Refusal> {
        let refuse = |reason: String| Refusal::new(K::OF_VALUES, reason);
        let Some(mut values) = BlockValues::of(problem).map_err(refuse)? else {
            return Err(refuse(format!(
                "block_scales None: Q, K and V are {} already",
                problem.fwd().dtypes.qk
            )));
        };
        let choice = K::choose(values.problem(), facts, &options.clone().kernel(K::about().name))
            .map_err(|refusal| refuse(format!("on its values: {}", refusal.reason)))?;
        let launch = values.launch::<V>(facts).map_err(refuse)?;
        let workspace = values.behind(choice.workspace).map_err(refuse)?;
        let words = values.words();
        let mut choice = choice.map(|kernel| Self { values, kernel });
        choice.workspace = workspace;
        choice.launches = choice.launches.behind(launch);
        choice.details.push(words);
        Ok(choice)
    }

    fn plan(
        choice: Choice<Self>,
        _: &ValidBwd,
        _: &V::Facts,
        _: &PlanOptions,
    ) -> Result<Choice<Self>, Refusal> {
        Ok(choice)
    }

    fn alignment(&self, _: &ValidBwd, operand: Operand) -> u64 {
        match operand {
            Operand::Q | Operand::K | Operand::V => 1,
            _ => self.kernel.alignment(self.values.problem(), operand),
        }
    }

    fn lists(&self) -> &[TileListPlan] {
        self.kernel.lists()
    }

    unsafe fn launch(&self, steps: &Steps<V::Driver>, call: &Call<'_, ValidBwd>) -> Result<()> {
        // SAFETY: the caller keeps the contract of `launch`.
        unsafe { self.values.write(steps, call)? };
        // SAFETY: the caller promises that the operands are valid. Q, K and V are others: they lie in the workspace,
        // behind the kernel's own part, and are as large as the problem over the values requires.
        self.values.with(call, |over| unsafe { self.kernel.launch(steps, over) })
    }
}
