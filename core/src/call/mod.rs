//! Calls that core has checked, in the form in which a vendor launches them.

pub mod args;
pub mod backend;
pub mod device;
pub mod lengths;
pub mod lists;
pub mod mask_object;
pub(crate) mod peers;
pub mod queues;
pub mod scaled_rows;
pub mod second;
pub mod seq;
pub mod tree;

use std::fmt::Debug;

use crate::args::{
    BwdArgs, CacheSlice, ChooseArgs, CombineArgs, DevSliceMut, ElemType, FwdArgs, IndexLossArgs, MaskArgs,
    MemorySpace, QuantizeArgs, ScoreArgs, SeqArgs, check_bwd, check_choose, check_combine, check_fwd,
    check_index_loss, check_quantize,
};
use crate::built_in::BuiltIn;
use crate::bwd::{BwdProblem, ValidBwd};
use crate::cache::{of_other_sizes, of_other_sizes_bwd};
use crate::code_source::CodeSource;
use crate::combine::{CombineProblem, ValidCombine};
use crate::dtype::DType;
use crate::error::{ProblemError, Refusal, Result};
use crate::layout::{Shape, Strides};
use crate::mask_object::{ListsCall, TileLists};
use crate::masks::Masks;
use crate::operation::Operation;
use crate::plan::{PlanParts, Workspace};
use crate::problem::SmallOutputs;
use crate::problem::{CapturedGrad, CapturedTensor, Code, Dropout, FwdProblem, ValidFwd};
use crate::quantize::{QuantizeProblem, TensorScale, ValidQuantize};
use crate::score::Bias;
use crate::second::SecondCall;
use crate::seq::SeqSpan;
use crate::sparse::{ChooseProblem, IndexLossProblem, ValidChoose, ValidIndexLoss};

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::problem::ValidFwd {}
    impl Sealed for crate::bwd::ValidBwd {}
    impl Sealed for crate::combine::ValidCombine {}
    impl Sealed for crate::sparse::ValidChoose {}
    impl Sealed for crate::quantize::ValidQuantize {}
    impl Sealed for crate::sparse::ValidIndexLoss {}
}

/// A validated problem of one operation: [`ValidFwd`], [`ValidBwd`], [`ValidCombine`], [`ValidChoose`]. It defines
/// which arguments its calls have, and how they are checked.
pub trait Problem: Clone + Debug + Send + Sync + sealed::Sealed + 'static {
    /// The arguments of a call: [`FwdArgs`], [`BwdArgs`], [`CombineArgs`], [`ChooseArgs`],
    /// [`QuantizeArgs`], [`IndexLossArgs`].
    type Args<'a>;

    /// Operation of the problem.
    const OPERATION: Operation;

    /// Checks that the arguments fit: extents, alignment, memory, and no output over another operand.
    ///
    /// # Errors
    /// The first field that does not, with its number.
    fn check(
        &self,
        args: &Self::Args<'_>,
        workspace: Workspace,
        space: MemorySpace,
    ) -> Result<(), ProblemError>;

    /// Problems of the bundle tables that differ from this one in sizes alone, nearest first.
    #[doc(hidden)]
    fn of_other_sizes_in_tables(&self) -> Vec<Self> {
        Vec::new()
    }

    /// Whether a call may have lengths.
    #[doc(hidden)]
    const HAS_LENGTHS: bool;

    /// The lengths of a call, and the forward problem that limits them; `None` for a combine.
    #[doc(hidden)]
    fn lengths<'a>(&'a self, args: &'a Self::Args<'_>) -> Option<(&'a FwdProblem, &'a SeqArgs<'a>)>;

    /// Scratch memory that the caller has passed.
    #[doc(hidden)]
    fn workspace<'a>(args: &'a Self::Args<'_>) -> Option<&'a DevSliceMut<'a>>;

    /// Whether the call has nothing to write.
    #[doc(hidden)]
    fn is_empty(&self) -> bool;

    /// Sets the element types of the buffers that a call writes.
    #[doc(hidden)]
    fn tell_types(&self, args: &Self::Args<'_>);

    /// The problem with one sequence that is planned in place of a problem with none: kernels need one at least.
    ///
    /// # Errors
    /// What makes that problem invalid.
    #[doc(hidden)]
    fn of_one_sequence(&self) -> Result<Option<Self>, ProblemError>;

    /// The problem whose results are bit-equal to this one's: for a quantised cache, the problem with the cache in
    /// Q's type.
    ///
    /// # Errors
    /// What makes that problem invalid.
    #[doc(hidden)]
    fn of_wide_cache(&self) -> Result<Option<Self>, ProblemError> {
        Ok(None)
    }

    /// Outputs that a call with no sequences sets to zero, as addresses and bytes: they are sums over all
    /// sequences.
    #[doc(hidden)]
    fn sums_of_no_sequence(&self, _args: &Self::Args<'_>) -> Vec<(*mut u8, u64)> {
        Vec::new()
    }

    /// Number of pieces in which the keys arrive while the call runs; 0 if all keys are there before.
    #[doc(hidden)]
    fn arrivals(&self) -> u32 {
        0
    }

    /// Dropout of a call; `None` for a combine.
    #[doc(hidden)]
    fn dropout(&self) -> Option<Dropout> {
        None
    }

    /// Refuses a problem for kernels that need all of K and V at their start.
    ///
    /// # Errors
    /// Pieces of keys that come while the call runs.
    #[doc(hidden)]
    fn refuse_arrivals(&self, kernel: &str) -> Result<(), Refusal> {
        match self.arrivals() {
            0 => Ok(()),
            pieces => {
                Err(Refusal::new(kernel, format!("arrivals {pieces}: it does not wait for pieces of keys")))
            }
        }
    }

    /// The forward problem inside this problem, or this problem itself; `None` for a combine.
    #[doc(hidden)]
    fn forward(&self) -> Option<&FwdProblem> {
        None
    }

    /// The problem's score and mask functions.
    #[doc(hidden)]
    fn code(&self) -> Option<&Code> {
        None
    }

    /// The problem's masks that tensors give (intervals, bits, lists of blocks).
    #[doc(hidden)]
    fn masks(&self) -> Option<&Masks> {
        None
    }

    /// The tensors of a call's masks.
    #[doc(hidden)]
    fn mask_args<'a>(_args: &'a Self::Args<'_>) -> Option<&'a MaskArgs<'a>> {
        None
    }

    /// The small outputs of a forward problem.
    #[doc(hidden)]
    fn outputs(&self) -> SmallOutputs {
        SmallOutputs::default()
    }

    /// The score and mask functions for which a call's kernels are compiled; `None` if it has none.
    #[doc(hidden)]
    fn code_source(&self) -> Option<CodeSource<'_>> {
        let code = self.code().filter(|code| !code.is_empty())?;
        Some(CodeSource { code, gradients: self.captured_gradients() })
    }

    /// The problem in which kernels' built-in features (bands, soft-cap, ALiBi) replace equal parts of its functions. A
    /// plan computes it in place of this one.
    ///
    /// # Errors
    /// What that problem is refused for.
    #[doc(hidden)]
    fn built_in(&self) -> Result<Option<BuiltIn<Self>>, ProblemError> {
        Ok(None)
    }

    /// Operands of the score of a call; `None` for a combine.
    #[doc(hidden)]
    fn score_args<'a, 'b>(_args: &'b mut Self::Args<'a>) -> Option<&'b mut ScoreArgs<'a>> {
        None
    }

    /// Gradients that the problem wants of the tensors that its score function captures.
    #[doc(hidden)]
    fn captured_gradients(&self) -> &[CapturedGrad] {
        &[]
    }

    /// Refuses a problem for kernels that compute functions, or read masks as data.
    ///
    /// # Errors
    /// Features that such kernels do not combine with: a tree mask and lists of keys.
    #[doc(hidden)]
    fn refuse_beside_code(&self, _kernel: &str) -> Result<(), Refusal> {
        Ok(())
    }

    /// The second cache of a call, where there is one.
    ///
    /// # Errors
    /// Operands that are missing.
    #[doc(hidden)]
    fn second<'a>(&self, _args: &'a Self::Args<'_>) -> Result<Option<SecondCall<'a>>, ProblemError> {
        Ok(None)
    }

    /// The arguments with the shorter lifetime of this borrow.
    #[doc(hidden)]
    fn borrowed<'a>(args: &'a Self::Args<'_>) -> &'a Self::Args<'a>;
}

fn refuse_beside_code(problem: &FwdProblem, kernel: &str) -> Result<(), Refusal> {
    let refused = problem.code.refuse(kernel).and_then(|()| problem.masks.refuse(kernel));
    let Err(refusal) = refused else { return Ok(()) };
    let what = match (problem.cache.tree_mask, problem.lists) {
        (true, _) => "beside tree_mask".to_owned(),
        (false, Some(lists)) => format!("beside indices of topk {}", lists.topk),
        _ => return Ok(()),
    };
    let reason = format!("{} {what}", refusal.reason);
    Err(Refusal { reason, ..refusal })
}

impl Problem for ValidFwd {
    type Args<'a> = FwdArgs<'a>;
    const OPERATION: Operation = Operation::Forward;
    const HAS_LENGTHS: bool = true;

    fn of_other_sizes_in_tables(&self) -> Vec<Self> {
        of_other_sizes(self)
    }

    fn check(
        &self,
        args: &FwdArgs<'_>,
        workspace: Workspace,
        space: MemorySpace,
    ) -> Result<(), ProblemError> {
        check_fwd(self, args, workspace, space)
    }

    fn lengths<'a>(&'a self, args: &'a FwdArgs<'_>) -> Option<(&'a FwdProblem, &'a SeqArgs<'a>)> {
        Some((self, &args.seq))
    }

    fn workspace<'a>(args: &'a FwdArgs<'_>) -> Option<&'a DevSliceMut<'a>> {
        args.workspace.as_ref()
    }

    fn tell_types(&self, args: &FwdArgs<'_>) {
        args.o.tell(self.dtypes.o);
        args.lse.iter().for_each(|lse| lse.tell(DType::F32));
        for (slice, stored) in [(&args.k, self.stored_k()), (&args.v, self.stored_v())] {
            if let CacheSlice::Append(slice) = slice {
                slice.tell(stored);
            }
        }
        for slice in [&args.k_scale, &args.v_scale].into_iter().flatten() {
            if let CacheSlice::Append(slice) = slice {
                slice.tell(DType::F32);
            }
        }
    }

    fn of_one_sequence(&self) -> Result<Option<Self>, ProblemError> {
        let mut one = FwdProblem::clone(self);
        let has_some = std::mem::replace(&mut one.dims.batch, 1) > 0;
        if has_some { Ok(None) } else { one.validate().map(Some) }
    }

    fn of_wide_cache(&self) -> Result<Option<Self>, ProblemError> {
        self.over_wide_cache().map(FwdProblem::validate).transpose()
    }

    fn built_in(&self) -> Result<Option<BuiltIn<Self>>, ProblemError> {
        let Some(BuiltIn { problem, slopes, words }) = FwdProblem::built_in(self, false) else {
            return Ok(None);
        };
        Ok(Some(BuiltIn { problem: problem.validate()?, slopes, words }))
    }

    fn score_args<'a, 'b>(args: &'b mut Self::Args<'a>) -> Option<&'b mut ScoreArgs<'a>> {
        Some(&mut args.score)
    }

    fn is_empty(&self) -> bool {
        // A call without queries may still append rows to K and V, and may have small outputs that are not per row.
        self.dims.batch == 0
            || self.dims.seqlen_q == 0
                && self.cache.append.is_none()
                && !(self.outputs.head_max || self.outputs.key_sum)
    }

    fn arrivals(&self) -> u32 {
        self.arrivals
    }

    fn dropout(&self) -> Option<Dropout> {
        self.drops().then_some(self.dropout)
    }

    fn forward(&self) -> Option<&FwdProblem> {
        Some(self)
    }

    fn code(&self) -> Option<&Code> {
        Some(&self.code)
    }

    fn outputs(&self) -> SmallOutputs {
        self.outputs
    }

    fn masks(&self) -> Option<&Masks> {
        Some(&self.masks)
    }

    fn mask_args<'a>(args: &'a FwdArgs<'_>) -> Option<&'a MaskArgs<'a>> {
        Some(&args.masks)
    }

    fn refuse_beside_code(&self, kernel: &str) -> Result<(), Refusal> {
        refuse_beside_code(self, kernel)
    }

    fn second<'a>(&self, args: &'a FwdArgs<'_>) -> Result<Option<SecondCall<'a>>, ProblemError> {
        SecondCall::of(self, args.second, &args.seq)
    }

    fn borrowed<'a>(args: &'a FwdArgs<'_>) -> &'a FwdArgs<'a> {
        args
    }
}

impl Problem for ValidBwd {
    type Args<'a> = BwdArgs<'a>;
    const OPERATION: Operation = Operation::Backward;
    const HAS_LENGTHS: bool = true;

    fn of_other_sizes_in_tables(&self) -> Vec<Self> {
        of_other_sizes_bwd(self)
    }

    fn check(
        &self,
        args: &BwdArgs<'_>,
        workspace: Workspace,
        space: MemorySpace,
    ) -> Result<(), ProblemError> {
        check_bwd(self, args, workspace, space)
    }

    fn lengths<'a>(&'a self, args: &'a BwdArgs<'_>) -> Option<(&'a FwdProblem, &'a SeqArgs<'a>)> {
        Some((self.fwd(), &args.seq))
    }

    fn workspace<'a>(args: &'a BwdArgs<'_>) -> Option<&'a DevSliceMut<'a>> {
        args.workspace.as_ref()
    }

    fn tell_types(&self, args: &BwdArgs<'_>) {
        [&args.dq, &args.dk, &args.dv].iter().for_each(|gradient| gradient.tell(self.dtype_grad));
        args.dcaptured.iter().zip(&self.dcaptured).for_each(|(slice, wanted)| slice.tell(wanted.dtype));
        args.dbias.iter().zip(&self.dbias).for_each(|(dbias, wanted)| dbias.tell(wanted.dtype));
        args.dsink.iter().for_each(|dsink| dsink.tell(DType::F32));
    }

    fn of_one_sequence(&self) -> Result<Option<Self>, ProblemError> {
        let mut one = BwdProblem::clone(self);
        let has_some = std::mem::replace(&mut one.fwd.dims.batch, 1) > 0;
        if has_some { Ok(None) } else { one.validate().map(Some) }
    }

    fn sums_of_no_sequence(&self, args: &BwdArgs<'_>) -> Vec<(*mut u8, u64)> {
        let mut sums = Vec::new();
        if let Some(dsink) = &args.dsink {
            sums.push((dsink.as_mut_ptr(), u64::from(self.fwd().dims.num_heads_q) * 4));
        }
        for (slice, wanted) in args.dcaptured.iter().zip(&self.dcaptured) {
            let elems = self.fwd().code.tensor(&wanted.name).map_or(0, CapturedTensor::num_elems);
            sums.push((slice.as_mut_ptr(), elems * wanted.dtype.size_bytes()));
        }
        if let (Some(wanted), Some(dbias), Bias::Elementwise(bias)) =
            (self.dbias, &args.dbias, self.fwd().score.bias)
        {
            let shape = self.fwd().shape_bias(bias.broadcast);
            sums.extend(stretches(dbias.as_mut_ptr(), wanted.strides, shape, wanted.dtype));
        }
        sums
    }

    fn built_in(&self) -> Result<Option<BuiltIn<Self>>, ProblemError> {
        let Some(BuiltIn { problem, slopes, words }) = self.fwd.built_in(!self.dcaptured.is_empty()) else {
            return Ok(None);
        };
        let problem = BwdProblem { fwd: problem, ..BwdProblem::clone(self) };
        Ok(Some(BuiltIn { problem: problem.validate()?, slopes, words }))
    }

    fn score_args<'a, 'b>(args: &'b mut Self::Args<'a>) -> Option<&'b mut ScoreArgs<'a>> {
        Some(&mut args.score)
    }

    fn is_empty(&self) -> bool {
        // A call without queries must still write zeros to dK and dV; a call without sequences must write the
        // gradients that all sequences share.
        self.fwd().dims.batch == 0 && self.dbias.is_none() && !self.write_dsink && self.dcaptured.is_empty()
    }

    fn arrivals(&self) -> u32 {
        self.fwd().arrivals
    }

    fn dropout(&self) -> Option<Dropout> {
        self.fwd().drops().then_some(self.fwd().dropout)
    }

    fn forward(&self) -> Option<&FwdProblem> {
        Some(self.fwd())
    }

    fn code(&self) -> Option<&Code> {
        Some(&self.fwd().code)
    }

    fn masks(&self) -> Option<&Masks> {
        Some(&self.fwd().masks)
    }

    fn mask_args<'a>(args: &'a BwdArgs<'_>) -> Option<&'a MaskArgs<'a>> {
        Some(&args.masks)
    }

    fn captured_gradients(&self) -> &[CapturedGrad] {
        &self.dcaptured
    }

    fn refuse_beside_code(&self, kernel: &str) -> Result<(), Refusal> {
        refuse_beside_code(self.fwd(), kernel)
    }

    fn borrowed<'a>(args: &'a BwdArgs<'_>) -> &'a BwdArgs<'a> {
        args
    }
}

impl Problem for ValidCombine {
    type Args<'a> = CombineArgs<'a>;
    const OPERATION: Operation = Operation::Combine;
    const HAS_LENGTHS: bool = false;

    fn check(&self, args: &CombineArgs<'_>, _: Workspace, space: MemorySpace) -> Result<(), ProblemError> {
        check_combine(self, args, space)
    }

    fn lengths<'a>(&'a self, _: &'a CombineArgs<'_>) -> Option<(&'a FwdProblem, &'a SeqArgs<'a>)> {
        None
    }

    fn workspace<'a>(_: &'a CombineArgs<'_>) -> Option<&'a DevSliceMut<'a>> {
        None
    }

    fn tell_types(&self, args: &CombineArgs<'_>) {
        args.o.tell(self.dtype_o);
        args.lse.iter().for_each(|lse| lse.tell(DType::F32));
    }

    fn of_one_sequence(&self) -> Result<Option<Self>, ProblemError> {
        let mut one = CombineProblem::clone(self);
        let has_some = std::mem::replace(&mut one.batch, 1) > 0;
        if has_some { Ok(None) } else { one.validate().map(Some) }
    }

    fn is_empty(&self) -> bool {
        self.lse_elems() == 0
    }

    fn borrowed<'a>(args: &'a CombineArgs<'_>) -> &'a CombineArgs<'a> {
        args
    }
}

impl Problem for ValidChoose {
    type Args<'a> = ChooseArgs<'a>;
    const OPERATION: Operation = Operation::Choose;
    const HAS_LENGTHS: bool = false;

    fn check(
        &self,
        args: &ChooseArgs<'_>,
        workspace: Workspace,
        space: MemorySpace,
    ) -> Result<(), ProblemError> {
        check_choose(self, args, workspace, space)
    }

    fn lengths<'a>(&'a self, _: &'a ChooseArgs<'_>) -> Option<(&'a FwdProblem, &'a SeqArgs<'a>)> {
        None
    }

    fn workspace<'a>(args: &'a ChooseArgs<'_>) -> Option<&'a DevSliceMut<'a>> {
        args.workspace.as_ref()
    }

    fn tell_types(&self, args: &ChooseArgs<'_>) {
        args.indices.iter().for_each(|indices| indices.tell(ElemType::I32));
        args.scores.iter().for_each(|scores| scores.tell(DType::F32));
    }

    fn of_one_sequence(&self) -> Result<Option<Self>, ProblemError> {
        let mut one = ChooseProblem::clone(self);
        let has_some = std::mem::replace(&mut one.batch, 1) > 0;
        if has_some { Ok(None) } else { one.validate().map(Some) }
    }

    fn is_empty(&self) -> bool {
        self.rows() == 0
    }

    fn borrowed<'a>(args: &'a ChooseArgs<'_>) -> &'a ChooseArgs<'a> {
        args
    }
}

impl Problem for ValidQuantize {
    type Args<'a> = QuantizeArgs<'a>;
    const OPERATION: Operation = Operation::Quantize;
    const HAS_LENGTHS: bool = false;

    fn check(
        &self,
        args: &QuantizeArgs<'_>,
        workspace: Workspace,
        space: MemorySpace,
    ) -> Result<(), ProblemError> {
        check_quantize(self, args, workspace, space)
    }

    fn lengths<'a>(&'a self, _: &'a QuantizeArgs<'_>) -> Option<(&'a FwdProblem, &'a SeqArgs<'a>)> {
        None
    }

    fn workspace<'a>(args: &'a QuantizeArgs<'_>) -> Option<&'a DevSliceMut<'a>> {
        args.workspace.as_ref()
    }

    fn tell_types(&self, args: &QuantizeArgs<'_>) {
        args.elements.tell(self.format.elem());
        args.scales.tell(self.format.scale_elem());
        args.written_scale.iter().for_each(|scale| scale.tell(DType::F32));
    }

    fn of_one_sequence(&self) -> Result<Option<Self>, ProblemError> {
        let mut one = QuantizeProblem::clone(self);
        // A scale that is to be written is written without a sequence too.
        let writes = self.tensor_scale == TensorScale::Written;
        let has_some = std::mem::replace(&mut one.shape.batch, 1) > 0 || writes;
        if has_some { Ok(None) } else { one.validate().map(Some) }
    }

    /// A tensor without elements still gets a scale, if one is to be written.
    fn is_empty(&self) -> bool {
        self.shape.num_elems() == 0 && self.tensor_scale != TensorScale::Written
    }

    fn borrowed<'a>(args: &'a QuantizeArgs<'_>) -> &'a QuantizeArgs<'a> {
        args
    }
}

impl Problem for ValidIndexLoss {
    type Args<'a> = IndexLossArgs<'a>;
    const OPERATION: Operation = Operation::IndexLoss;
    const HAS_LENGTHS: bool = false;

    fn check(
        &self,
        args: &IndexLossArgs<'_>,
        workspace: Workspace,
        space: MemorySpace,
    ) -> Result<(), ProblemError> {
        check_index_loss(self, args, workspace, space)
    }

    fn lengths<'a>(&'a self, _: &'a IndexLossArgs<'_>) -> Option<(&'a FwdProblem, &'a SeqArgs<'a>)> {
        None
    }

    fn workspace<'a>(args: &'a IndexLossArgs<'_>) -> Option<&'a DevSliceMut<'a>> {
        args.workspace.as_ref()
    }

    fn tell_types(&self, args: &IndexLossArgs<'_>) {
        let written = [&args.loss, &args.dq, &args.dk, &args.dweights];
        written.into_iter().flatten().for_each(|slice| slice.tell(DType::F32));
    }

    fn of_one_sequence(&self) -> Result<Option<Self>, ProblemError> {
        let mut one = IndexLossProblem::clone(self);
        let has_some = std::mem::replace(&mut one.batch, 1) > 0;
        if has_some { Ok(None) } else { one.validate().map(Some) }
    }

    /// Keys without a query have gradients of 0, which are written.
    fn is_empty(&self) -> bool {
        self.rows() == 0 && !(self.write_dk && self.keys() > 0)
    }

    fn borrowed<'a>(args: &'a IndexLossArgs<'_>) -> &'a IndexLossArgs<'a> {
        args
    }
}

/// The bytes of a tensor, without those between its rows.
fn stretches(first: *mut u8, strides: Strides, shape: Shape, dtype: DType) -> Vec<(*mut u8, u64)> {
    let (size, elems) = (dtype.size_bytes(), shape.num_elems());
    if ValidFwd::extent_bytes(strides, shape, dtype) == elems * size {
        return if elems == 0 { Vec::new() } else { vec![(first, elems * size)] };
    }
    let (columns, width) = if strides.dim == 1 { (1, shape.dim) } else { (shape.dim, 1) };
    let mut rows = Vec::new();
    for (b, h) in (0..shape.batch).flat_map(|b| (0..shape.head).map(move |h| (b, h))) {
        for (s, d) in (0..shape.seq).flat_map(|s| (0..columns).map(move |d| (s, d))) {
            let at = strides.offset(b, s, h, d).unsigned_abs() * size;
            rows.push((first.wrapping_add(at as usize), u64::from(width) * size));
        }
    }
    rows
}

/// One run's problem and operands, checked against each other.
#[derive(Debug)]
pub struct Call<'a, P: Problem> {
    /// The problem that was planned.
    pub problem: &'a P,
    /// The operands: device memory of the sizes that the problem gives; outputs overlap nothing else.
    pub args: &'a P::Args<'a>,
    /// The sequences, if the lengths lie in host memory and the operation has lengths; they are inside their
    /// tensors. Lengths on a device are not checked here: see
    /// [`PlanOptions::check_lengths`](crate::PlanOptions::check_lengths).
    pub spans: &'a [SeqSpan],
    /// The driver's handle of the stream; 0 is the default one.
    pub stream: u64,
}

/// A backend's answer to a problem: the plan's description, and the launcher.
pub struct Planned<P: Problem> {
    /// Description of the plan, with the workspace that a caller must provide.
    pub parts: PlanParts,
    /// Executable part of the plan.
    pub launch: Box<dyn Launch<P>>,
}

/// A chosen and loaded kernel. Only [`Plan::run`](crate::Plan::run) launches it, after all checks.
pub trait Launch<P: Problem>: Send + Sync {
    /// Checks the operands' addresses against the kernel's own requirements, before anything is queued.
    ///
    /// # Errors
    /// The operand, its address and the alignment that it lacks.
    fn takes_addresses(&self, _call: &Call<'_, P>) -> Result<(), ProblemError> {
        Ok(())
    }

    /// Lists of tiles that the launches read under masks; empty if the kernel evaluates the mask for each pair.
    fn tile_lists(&self) -> Vec<TileLists> {
        Vec::new()
    }

    /// Queues the kernels that make one of these lists in a mask object's memory.
    ///
    /// # Safety
    /// `call.problem` is the one that was planned, and its list is of [`tile_lists`](Self::tile_lists). Lengths and
    /// masks have passed the check of the object; the list's memory has the bytes that it takes, and nobody else uses
    /// it until the work is done. `call.stream` is a live queue of the backend's device.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn build_list(&self, _call: &ListsCall<'_, P>) -> Result<()> {
        Ok(())
    }

    /// Queues the work and returns; a backend without queues computes.
    ///
    /// # Safety
    /// `call.problem` is the one that was planned. `call.args` has passed [`Problem::check`] for it, for the plan's
    /// workspace and for the backend's memory, and its slices are memory that nobody else uses until the work is done;
    /// [`takes_addresses`](Self::takes_addresses) took them;
    /// the first [`zeroed_bytes`](Workspace::zeroed_bytes) of the workspace are cleared before it on the same stream.
    /// `call.stream` is a live queue of the backend's device.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn launch(&self, call: &Call<'_, P>) -> Result<()>;
}
