//! The pointers of a call, and the check that they fit their problem.

use std::marker::PhantomData;

use bytemuck::{AnyBitPattern, NoUninit};
use smallvec::SmallVec;

use crate::bwd::ValidBwd;
use crate::combine::ValidCombine;
use crate::dropout::DropoutSeed;
use crate::dtype::DType;
use crate::error::{ProblemError, ensure};
use crate::layout::{KvLayout, QLayout, Shape, Strides};
use crate::problem::{Extents, FwdProblem, ValidFwd};
use crate::score::Bias;
use crate::seq::Totals;

/// Who can read an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemorySpace {
    /// The processor that runs this code.
    Host,
    /// A device's own memory.
    Device,
}

/// Memory that a call reads.
#[derive(Clone, Copy, Debug)]
pub struct DevSlice<'a> {
    space: MemorySpace,
    ptr: *const u8,
    bytes: u64,
    memory: PhantomData<&'a [u8]>,
}

/// Memory that a call writes, and that nothing else touches until the call is done.
#[derive(Debug)]
pub struct DevSliceMut<'a> {
    space: MemorySpace,
    ptr: *mut u8,
    bytes: u64,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a DevSlice is a `&[u8]` and a DevSliceMut a `&mut [u8]` that may lie on a device; neither
// has interior mutability.
unsafe impl Send for DevSlice<'_> {}
// SAFETY: as above.
unsafe impl Sync for DevSlice<'_> {}
// SAFETY: as above.
unsafe impl Send for DevSliceMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for DevSliceMut<'_> {}

impl<'a> DevSlice<'a> {
    /// Host memory.
    #[must_use]
    pub fn host<T: NoUninit>(elems: &'a [T]) -> Self {
        let bytes: &[u8] = bytemuck::cast_slice(elems);
        Self { space: MemorySpace::Host, ptr: bytes.as_ptr(), bytes: bytes.len() as u64, memory: PhantomData }
    }

    /// Memory of any kind.
    ///
    /// # Safety
    /// `ptr .. ptr + bytes` is readable memory of `space` that lives, and is not written by others,
    /// until all work queued with it is done.
    #[must_use]
    pub unsafe fn from_raw(space: MemorySpace, ptr: *const u8, bytes: u64) -> Self {
        Self { space, ptr, bytes, memory: PhantomData }
    }

    /// Where it lies.
    #[must_use]
    pub fn space(&self) -> MemorySpace {
        self.space
    }

    /// Its first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes, if they are in host memory.
    #[must_use]
    pub fn as_host(&self) -> Option<&'a [u8]> {
        // SAFETY: `from_raw` or `host` promised readable host memory for 'a.
        (self.space == MemorySpace::Host)
            .then(|| unsafe { std::slice::from_raw_parts(self.ptr, self.bytes as usize) })
    }
}

impl<'a> DevSliceMut<'a> {
    /// Host memory.
    #[must_use]
    pub fn host<T: NoUninit + AnyBitPattern>(elems: &'a mut [T]) -> Self {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(elems);
        Self {
            space: MemorySpace::Host,
            ptr: bytes.as_mut_ptr(),
            bytes: bytes.len() as u64,
            memory: PhantomData,
        }
    }

    /// Memory of any kind.
    ///
    /// # Safety
    /// `ptr .. ptr + bytes` is writable memory of `space` that lives, and is not touched by others,
    /// until all work queued with it is done.
    #[must_use]
    pub unsafe fn from_raw(space: MemorySpace, ptr: *mut u8, bytes: u64) -> Self {
        Self { space, ptr, bytes, memory: PhantomData }
    }

    /// Where it lies.
    #[must_use]
    pub fn space(&self) -> MemorySpace {
        self.space
    }

    /// Its first byte. Writing through it is for the call that holds these arguments.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The same memory as an input of a later call.
    #[must_use]
    pub fn as_input(&self) -> DevSlice<'_> {
        DevSlice { space: self.space, ptr: self.ptr, bytes: self.bytes, memory: PhantomData }
    }
}

/// Which pages hold the keys of each sequence, i32 `[batch, max_pages]`, read where the kernel runs. Key
/// j of a sequence is row `j % page_size` of page `pages[sequence][j / page_size]`; entries beyond a
/// sequence's length may hold anything, and a page may stand in several rows.
#[derive(Clone, Copy, Debug)]
pub struct BlockTable<'a> {
    /// The numbers of the pages.
    pub pages: DevSlice<'a>,
    /// Entries of a row: `max_pages * page_size` is at least the problem's `seqlen_k`.
    pub max_pages: u32,
}

/// Lengths and places, read where the kernel runs; totals, which the host knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct SeqArgs<'a> {
    /// Rows of packed tensors, pages of paged ones.
    pub totals: Totals,
    /// Packed Q: i32 `[batch + 1]`, first physical row of each sequence of Q and O.
    pub cu_seqlens_q: Option<DevSlice<'a>>,
    /// Packed K: i32 `[batch + 1]`, first physical row of each sequence of K and V.
    pub cu_seqlens_k: Option<DevSlice<'a>>,
    /// Paged K: the pages of each sequence.
    pub block_table: Option<BlockTable<'a>>,
    /// i32 `[batch]`: logical queries, where the problem says so.
    pub seqused_q: Option<DevSlice<'a>>,
    /// i32 `[batch]`: logical keys, where the problem says so.
    pub seqused_k: Option<DevSlice<'a>>,
}

/// Operands of the score and of the FP8 scales; each is there iff the problem says so.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScoreArgs<'a> {
    /// The elementwise bias.
    pub bias: Option<DevSlice<'a>>,
    /// f32 `[num_heads_q]` or `[batch, num_heads_q]`.
    pub alibi_slopes: Option<DevSlice<'a>>,
    /// f32 `[num_heads_q]`.
    pub sink: Option<DevSlice<'a>>,
    /// f32 `[1]` or `[batch, num_heads_kv]`.
    pub descale_q: Option<DevSlice<'a>>,
    /// f32 `[1]` or `[batch, num_heads_kv]`.
    pub descale_k: Option<DevSlice<'a>>,
    /// f32 `[1]` or `[batch, num_heads_kv]`.
    pub descale_v: Option<DevSlice<'a>>,
    /// Where the dropout generator stands.
    pub dropout: DropoutSeed,
}

/// The pointers of a forward call.
#[derive(Debug)]
pub struct FwdArgs<'a> {
    /// Q.
    pub q: DevSlice<'a>,
    /// K.
    pub k: DevSlice<'a>,
    /// V.
    pub v: DevSlice<'a>,
    /// O.
    pub o: DevSliceMut<'a>,
    /// LSE, iff the problem writes it.
    pub lse: Option<DevSliceMut<'a>>,
    /// Lengths.
    pub seq: SeqArgs<'a>,
    /// Operands of the score.
    pub score: ScoreArgs<'a>,
    /// f32 `[1]`, iff the problem has it.
    pub scale_o: Option<DevSlice<'a>>,
    /// The dropout keep mask, iff the problem writes it.
    pub keep_mask: Option<DevSliceMut<'a>>,
    /// Scratch of at least the plan's `workspace_bytes`, if that is not 0.
    pub workspace: Option<DevSliceMut<'a>>,
}

impl<'a> FwdArgs<'a> {
    /// The four tensors every call has; the rest by field.
    #[must_use]
    pub fn new(q: DevSlice<'a>, k: DevSlice<'a>, v: DevSlice<'a>, o: DevSliceMut<'a>) -> Self {
        Self {
            q,
            k,
            v,
            o,
            lse: None,
            seq: SeqArgs::default(),
            score: ScoreArgs::default(),
            scale_o: None,
            keep_mask: None,
            workspace: None,
        }
    }
}

/// The pointers of a backward call.
#[derive(Debug)]
pub struct BwdArgs<'a> {
    /// Q.
    pub q: DevSlice<'a>,
    /// K.
    pub k: DevSlice<'a>,
    /// V.
    pub v: DevSlice<'a>,
    /// O, as the forward call wrote it.
    pub o: DevSlice<'a>,
    /// LSE, as the forward call wrote it.
    pub lse: DevSlice<'a>,
    /// Gradient of O.
    pub dout: DevSlice<'a>,
    /// Gradient of LSE, f32 and laid out like it, iff the problem has it.
    pub dlse: Option<DevSlice<'a>>,
    /// Gradient of Q.
    pub dq: DevSliceMut<'a>,
    /// Gradient of K.
    pub dk: DevSliceMut<'a>,
    /// Gradient of V.
    pub dv: DevSliceMut<'a>,
    /// Gradient of the elementwise bias, iff the problem asks for it.
    pub dbias: Option<DevSliceMut<'a>>,
    /// Gradient of the sinks, f32 `[num_heads_q]`, iff the problem asks for it.
    pub dsink: Option<DevSliceMut<'a>>,
    /// Lengths.
    pub seq: SeqArgs<'a>,
    /// Operands of the score, as in the forward call.
    pub score: ScoreArgs<'a>,
    /// Scratch of at least the plan's `workspace_bytes`, if that is not 0.
    pub workspace: Option<DevSliceMut<'a>>,
}

/// One partial result.
#[derive(Clone, Copy, Debug)]
pub struct PartialResult<'a> {
    /// O of this part.
    pub o: DevSlice<'a>,
    /// LSE of this part, f32 `[batch, num_heads_q, seqlen_q]`.
    pub lse: DevSlice<'a>,
}

/// The pointers of a combine call.
#[derive(Debug)]
pub struct CombineArgs<'a> {
    /// The parts, `num_parts` of them, all with the problem's strides.
    pub parts: &'a [PartialResult<'a>],
    /// The combined O.
    pub o: DevSliceMut<'a>,
    /// The combined LSE, iff the problem writes it.
    pub lse: Option<DevSliceMut<'a>>,
}

/// Checks forward arguments against their problem: each there iff wanted, in `space`, large enough,
/// and no output over an input or another output.
///
/// # Errors
/// The first argument that does not fit, with both byte counts.
pub fn check_fwd(problem: &ValidFwd, args: &FwdArgs<'_>, space: MemorySpace) -> Result<(), ProblemError> {
    let mut operands = Operands::new(space);
    let extents = operands.inputs(problem, args.q, args.k, args.v, &args.seq, &args.score)?;
    operands.tensor("o", Access::out(&args.o), problem.o, extents.o, problem.dtype_o)?;
    let lse_bytes = extents.lse_elems * 4;
    operands.optional("lse", args.lse.as_ref().map(Access::out), problem.write_lse, lse_bytes)?;
    operands.optional("scale_o", args.scale_o.as_ref().map(Access::input), problem.scale_o, 4)?;
    let keep_mask = args.keep_mask.as_ref().map(Access::out);
    operands.optional("keep_mask", keep_mask, problem.write_keep_mask, problem.keep_mask_bytes())?;
    operands.disjoint()
}

/// Checks backward arguments against their problem, as [`check_fwd`] does.
///
/// # Errors
/// The first argument that does not fit, with both byte counts.
pub fn check_bwd(problem: &ValidBwd, args: &BwdArgs<'_>, space: MemorySpace) -> Result<(), ProblemError> {
    let fwd = problem.fwd();
    let extents = problem.checked_extents(args.seq.totals)?;
    let lse_bytes = extents.lse_elems * 4;
    let mut operands = Operands::new(space);
    operands.inputs(fwd, args.q, args.k, args.v, &args.seq, &args.score)?;
    operands.tensor("o", Access::input(&args.o), fwd.o, extents.o, fwd.dtype_o)?;
    operands.optional("lse", Some(Access::input(&args.lse)), true, lse_bytes)?;
    operands.tensor("dout", Access::input(&args.dout), problem.dout, extents.o, fwd.dtype_o)?;
    operands.optional("dlse", args.dlse.as_ref().map(Access::input), problem.has_dlse, lse_bytes)?;
    let grad = problem.dtype_grad;
    operands.tensor("dq", Access::out(&args.dq), problem.dq, extents.q, grad)?;
    operands.tensor("dk", Access::out(&args.dk), problem.dk, extents.k, grad)?;
    operands.tensor("dv", Access::out(&args.dv), problem.dv, extents.v, grad)?;
    let dbias = args.dbias.as_ref().map(Access::out);
    match (problem.dbias, fwd.bias, dbias) {
        (Some(wanted), Bias::Elementwise(bias), Some(access)) => {
            let shape = fwd.shape_bias(bias.broadcast);
            operands.tensor("dbias", access, wanted.strides, shape, wanted.dtype)?;
        }
        (wanted, _, access) => operands.optional("dbias", access, wanted.is_some(), 0)?,
    }
    let dsink_bytes = u64::from(fwd.dims.num_heads_q) * 4;
    operands.optional("dsink", args.dsink.as_ref().map(Access::out), problem.write_dsink, dsink_bytes)?;
    operands.disjoint()
}

/// Checks combine arguments against their problem, as [`check_fwd`] does.
///
/// # Errors
/// The first argument that does not fit, with both numbers.
pub fn check_combine(
    problem: &ValidCombine,
    args: &CombineArgs<'_>,
    space: MemorySpace,
) -> Result<(), ProblemError> {
    ensure!(
        args.parts.len() == problem.num_parts as usize,
        "parts",
        "parts: {} given, but num_parts is {}",
        args.parts.len(),
        problem.num_parts
    );
    let lse_bytes = problem.lse_elems() * 4;
    let mut operands = Operands::new(space);
    for part in args.parts {
        operands.tensor(
            "parts.o",
            Access::input(&part.o),
            problem.part,
            problem.shape(),
            problem.dtype_part,
        )?;
        operands.optional("parts.lse", Some(Access::input(&part.lse)), true, lse_bytes)?;
    }
    operands.tensor("o", Access::out(&args.o), problem.o, problem.shape(), problem.dtype_o)?;
    operands.optional("lse", args.lse.as_ref().map(Access::out), problem.write_lse, lse_bytes)?;
    operands.disjoint()
}

/// Checks that there is scratch of at least `needed` bytes.
///
/// # Errors
/// The two byte counts.
pub fn check_workspace(
    workspace: Option<&DevSliceMut<'_>>,
    needed: u64,
    space: MemorySpace,
) -> Result<(), ProblemError> {
    Operands::new(space).optional(
        "workspace",
        workspace.map(Access::out).filter(|_| needed > 0),
        needed > 0,
        needed,
    )
}

/// An argument, whichever its direction.
#[derive(Clone, Copy)]
struct Access {
    space: MemorySpace,
    address: usize,
    bytes: u64,
    writes: bool,
}

impl Access {
    fn input(slice: &DevSlice<'_>) -> Self {
        Self { space: slice.space, address: slice.ptr as usize, bytes: slice.bytes, writes: false }
    }

    fn out(slice: &DevSliceMut<'_>) -> Self {
        Self { space: slice.space, address: slice.ptr as usize, bytes: slice.bytes, writes: true }
    }
}

/// An argument that has passed, and the bytes the call touches of it.
struct Operand {
    name: &'static str,
    access: Access,
    touched: u64,
    /// For tensors: how they interleave.
    lattice: Option<(Strides, Shape, DType)>,
}

struct Operands {
    space: MemorySpace,
    /// A call allocates nothing, unless it merges a dozen parts or more.
    all: SmallVec<[Operand; 24]>,
}

impl Operands {
    fn new(space: MemorySpace) -> Self {
        Self { space, all: SmallVec::new() }
    }

    fn inputs(
        &mut self,
        problem: &FwdProblem,
        q: DevSlice<'_>,
        k: DevSlice<'_>,
        v: DevSlice<'_>,
        seq: &SeqArgs<'_>,
        score: &ScoreArgs<'_>,
    ) -> Result<Extents, ProblemError> {
        let extents = problem.checked_extents(seq.totals)?;
        self.tensor("q", Access::input(&q), problem.q, extents.q, problem.dtype_qk)?;
        self.tensor("k", Access::input(&k), problem.k, extents.k, problem.dtype_qk)?;
        self.tensor("v", Access::input(&v), problem.v, extents.v, problem.dtype_v)?;

        let dims = problem.dims;
        let (packed_q, packed_k) =
            (problem.q_layout == QLayout::Packed, problem.kv_layout == KvLayout::Packed);
        let per_sequence = u64::from(dims.batch) * 4;
        for (name, slice, wanted, bytes) in [
            ("cu_seqlens_q", &seq.cu_seqlens_q, packed_q, per_sequence + 4),
            ("cu_seqlens_k", &seq.cu_seqlens_k, packed_k, per_sequence + 4),
            ("seqused_q", &seq.seqused_q, problem.seqused_q, per_sequence),
            ("seqused_k", &seq.seqused_k, problem.seqused_k, per_sequence),
        ] {
            self.optional(name, slice.as_ref().map(Access::input), wanted, bytes)?;
        }

        let table_bytes = match (problem.kv_layout.page_size(), &seq.block_table) {
            (Some(page_size), Some(table)) => {
                let keys = u64::from(table.max_pages) * u64::from(page_size);
                ensure!(
                    keys >= u64::from(dims.seqlen_k),
                    "block_table",
                    "block_table has max_pages {} of page_size {page_size}: {keys} keys, fewer than seqlen_k {}",
                    table.max_pages,
                    dims.seqlen_k
                );
                per_sequence * u64::from(table.max_pages)
            }
            _ => 0,
        };
        let table = seq.block_table.as_ref().map(|table| Access::input(&table.pages));
        self.optional("block_table", table, problem.kv_layout.page_size().is_some(), table_bytes)?;

        let bias = score.bias.as_ref().map(Access::input);
        match (problem.bias, bias) {
            (Bias::Elementwise(wanted), Some(access)) => {
                let shape = problem.shape_bias(wanted.broadcast);
                self.tensor("bias", access, wanted.strides, shape, wanted.dtype)?;
            }
            (wanted, access) => {
                self.optional("bias", access, matches!(wanted, Bias::Elementwise(_)), 0)?;
            }
        }
        let slopes = match problem.bias {
            Bias::Alibi { per_batch } => {
                u64::from(dims.num_heads_q) * if per_batch { u64::from(dims.batch) } else { 1 }
            }
            _ => 0,
        };
        for (name, slice, elems) in [
            ("alibi_slopes", &score.alibi_slopes, slopes),
            ("sink", &score.sink, if problem.sink { u64::from(dims.num_heads_q) } else { 0 }),
            ("descale_q", &score.descale_q, problem.descale_q.num_elems(dims.batch, dims.num_heads_kv)),
            ("descale_k", &score.descale_k, problem.descale_k.num_elems(dims.batch, dims.num_heads_kv)),
            ("descale_v", &score.descale_v, problem.descale_v.num_elems(dims.batch, dims.num_heads_kv)),
        ] {
            self.optional(name, slice.as_ref().map(Access::input), elems > 0, elems * 4)?;
        }
        Ok(extents)
    }

    fn tensor(
        &mut self,
        name: &'static str,
        access: Access,
        strides: Strides,
        shape: Shape,
        dtype: DType,
    ) -> Result<(), ProblemError> {
        let bytes = ValidFwd::extent_bytes(strides, shape, dtype);
        self.push(name, access, bytes, Some((strides, shape, dtype)))
    }

    fn optional(
        &mut self,
        name: &'static str,
        access: Option<Access>,
        wanted: bool,
        bytes: u64,
    ) -> Result<(), ProblemError> {
        match access {
            Some(access) if wanted => self.push(name, access, bytes, None),
            None if wanted => Err(ProblemError::new(name, format!("{name} is missing: the problem has it"))),
            Some(_) => Err(ProblemError::new(name, format!("{name} is given, but the problem has none"))),
            None => Ok(()),
        }
    }

    fn push(
        &mut self,
        name: &'static str,
        access: Access,
        touched: u64,
        lattice: Option<(Strides, Shape, DType)>,
    ) -> Result<(), ProblemError> {
        let space = self.space;
        ensure!(
            access.space == space,
            name,
            "{name} is in {:?} memory, not in {space:?} memory",
            access.space
        );
        ensure!(
            access.bytes >= touched,
            name,
            "{name} has {} bytes, but its extents and strides reach {touched}",
            access.bytes
        );
        let align = lattice.map_or(1, |(_, _, dtype)| dtype.size_bytes() as usize);
        ensure!(
            touched == 0 || access.address.is_multiple_of(align),
            name,
            "{name} starts at {:#x}, which is no multiple of its element's {align} bytes",
            access.address
        );
        self.all.push(Operand { name, access, touched, lattice });
        Ok(())
    }

    /// No output shares a byte with another operand, except tensors that interleave.
    fn disjoint(&self) -> Result<(), ProblemError> {
        for (index, output) in self.all.iter().enumerate().filter(|(_, operand)| operand.access.writes) {
            for (other_index, other) in self.all.iter().enumerate() {
                if index == other_index || !output.overlaps(other) || output.interleaves(other) {
                    continue;
                }
                let (a, b) = (output.access.address, other.access.address);
                return Err(ProblemError::new(
                    output.name,
                    format!(
                        "{} ({} bytes at {a:#x}) overlaps {} ({} bytes at {b:#x})",
                        output.name, output.touched, other.name, other.touched
                    ),
                ));
            }
        }
        Ok(())
    }
}

impl Operand {
    fn overlaps(&self, other: &Operand) -> bool {
        let (a, b) = (self.access.address as u128, other.access.address as u128);
        a < b + u128::from(other.touched) && b < a + u128::from(self.touched)
    }

    /// Whether two tensors of the same strides, such as dQ, dK and dV of one packed b·s·3·h·d
    /// buffer, are slices along an axis that neither has.
    fn interleaves(&self, other: &Operand) -> bool {
        let (Some((strides, shape, dtype)), Some((other_strides, other_shape, other_dtype))) =
            (self.lattice, other.lattice)
        else {
            return false;
        };
        let size = dtype.size_bytes() as usize;
        let apart = self.access.address.abs_diff(other.access.address);
        if dtype != other_dtype || !apart.is_multiple_of(size) || shape.batch != other_shape.batch {
            return false;
        }
        let same = |a: i64, b: i64, extent: u32, other: u32| a == b || extent <= 1 && other <= 1;
        let aligned = same(strides.batch, other_strides.batch, shape.batch, other_shape.batch)
            && same(strides.seq, other_strides.seq, shape.seq, other_shape.seq)
            && same(strides.head, other_strides.head, shape.head, other_shape.head)
            && same(strides.dim, other_strides.dim, shape.dim, other_shape.dim);
        // Rows and heads as one axis pair of the larger extents; batch stays; the slices are two
        // along a fourth axis. `Strides` has four axes, so the innermost of stride 1 joins the head
        // axis: heads are contiguous or the rule says no.
        let dim = shape.dim.max(other_shape.dim);
        let heads = shape.head.max(other_shape.head);
        let dense_heads = heads <= 1 || strides.head == i64::from(dim);
        let joined = Shape {
            batch: shape.batch,
            seq: shape.seq.max(other_shape.seq),
            head: 2,
            dim: heads.saturating_mul(dim),
        };
        let slices = Strides { head: (apart / size) as i64, ..strides };
        aligned && dense_heads && slices.is_injective(joined)
    }
}
