//! The choice of keys or blocks: from the numbers and addresses of a call to a problem of Rust, its plan and its run.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex};

use fmha::sparse::{
    BlockOverlap, CandidateKind, ChooseProblem, ChosenBlocks, IndexKeys, IndexStrides, Indexer, ScoreSource,
};
use fmha::{
    Accuracy, ChooseArgs, ChoosePlan, DType, DevSlice, DevSliceMut, ElemType, MemorySpace, PlanOptions,
};
use fmha_c::{FMHA_BF16, FMHA_E4M3FN, FMHA_E4M3FNUZ, FMHA_E5M2, FMHA_E5M2FNUZ, FMHA_F16, FMHA_F32};
use fmha_core::fork::PerProcess;

use crate::call::{Key, Wrong, ensure, word};
use crate::plans::{Kept, kept_or_made, said};
use crate::tensor::Device;

/// A struct of words of 8 bytes each: numbers, then addresses. Python makes its own from their names.
macro_rules! words {
    (numbers: $($number:ident)+; addresses: $($address:ident)+;) => {
        /// A choice as Python hands it over. Addresses are null where nothing is given; a tensor without elements has
        /// some address too. Tensors are contiguous, but for k and its scales.
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct Choose {
            $($number: i64,)+
            $($address: *mut c_void,)+
            /// Name of the kernel, a C string; null: the library chooses.
            kernel: *const c_char,
            /// Options of the kernel's tile, `name=value` separated by commas; null: none.
            tile: *const c_char,
            /// A stream of the device, 0: its default one.
            stream: i64,
        }

        /// Names of the numbers, and of the addresses, in order.
        pub const NAMES: [&str; 2] = [
            concat!($(stringify!($number), " "),+),
            concat!($(stringify!($address), " "),+),
        ];

        impl Choose {
            /// Everything of the call that a plan depends on.
            fn key(&self, kernel: &CStr, tile: &CStr) -> Key {
                // The first word differs from those of the keys of attention and of merges, so keys cannot collide.
                let mut key = Key::from_slice(&[u64::MAX - 6]);
                key.extend([$(self.$number),+].map(word));
                key.extend([$(self.$address),+].map(|address| u64::from(!address.is_null())));
                let text = kernel.to_bytes().iter().chain(b",").chain(tile.to_bytes());
                key.extend(text.map(|&byte| u64::from(byte)));
                key
            }
        }
    };
}

words! {
    numbers: batch seqlen_q seqlen_k topk num_heads head_dim dtype_q dtype_k page_size num_pages max_pages
        k_outer_stride k_key_stride scale_outer_stride scale_key_stride block compressed stride selected num_blocks
        first_blocks last_blocks candidates allow_fallback exact device_kind device_index;
    addresses: q k weights k_scale block_table given seqused_k first end indices scores;
}

/// Plans of choices by the numbers of their calls. Their scratch is the caller's.
static PLANS: PerProcess<Kept<ChoosePlan>> = PerProcess::of_first(Mutex::new(None));

/// # Errors
/// A number below 0 or past 32 bits, by its name.
fn size(field: &str, value: i64) -> Result<u32, Wrong> {
    u32::try_from(value).map_err(|_| format!("{field} {value} is not in 0..2^32"))
}

fn dtype(field: &str, code: i64) -> Result<DType, Wrong> {
    Ok(match i32::try_from(code) {
        Ok(FMHA_F16) => DType::F16,
        Ok(FMHA_BF16) => DType::Bf16,
        Ok(FMHA_F32) => DType::F32,
        Ok(FMHA_E4M3FN) => DType::E4m3Fn,
        Ok(FMHA_E5M2) => DType::E5m2,
        Ok(FMHA_E4M3FNUZ) => DType::E4m3Fnuz,
        Ok(FMHA_E5M2FNUZ) => DType::E5m2Fnuz,
        _ => return Err(format!("{field} {code} is no type of attention's operands")),
    })
}

impl Choose {
    fn device(&self) -> Device {
        let of = |number: i64| i32::try_from(number).unwrap_or(-1);
        Device { kind: of(self.device_kind), index: of(self.device_index) }
    }

    fn problem(&self) -> Result<ChooseProblem, Wrong> {
        let (batch, topk) = (size("batch", self.batch)?, size("topk", self.topk)?);
        let (seqlen_q, seqlen_k) = (size("seqlen_q", self.seqlen_q)?, size("seqlen_k", self.seqlen_k)?);
        let source = match size("num_heads", self.num_heads)? {
            0 => ScoreSource::Given,
            num_heads => ScoreSource::Index(self.indexer(num_heads, seqlen_k)?),
        };
        let candidates = match self.candidates {
            0 => CandidateKind::Causal,
            1 => CandidateKind::All,
            2 => CandidateKind::Ranges,
            other => return Err(format!("candidates {other} is none of 0 to 2")),
        };
        Ok(ChooseProblem::new(batch, seqlen_q, seqlen_k, topk, source)
            .candidates(candidates)
            .seqused_k(!self.seqused_k.is_null())
            .blocks(self.blocks()?)
            .write_scores(!self.scores.is_null()))
    }

    fn indexer(&self, num_heads: u32, seqlen_k: u32) -> Result<Indexer, Wrong> {
        let (of_q, of_k) = (dtype("dtype_q", self.dtype_q)?, dtype("dtype_k", self.dtype_k)?);
        let mut indexer = Indexer::new(num_heads, size("head_dim", self.head_dim)?, of_q, of_k, seqlen_k);
        if !self.block_table.is_null() {
            let (pages, most) = (size("num_pages", self.num_pages)?, size("max_pages", self.max_pages)?);
            indexer = indexer.paged(size("page_size", self.page_size)?, pages, most);
        }
        let strides = |outer: (&str, i64), key: (&str, i64)| {
            let of = |(field, value): (&str, i64)| {
                u64::try_from(value).map_err(|_| format!("{field} {value} is negative"))
            };
            Ok::<_, Wrong>(IndexStrides { outer: of(outer)?, key: of(key)? })
        };
        indexer = indexer.strides_k(strides(
            ("k_outer_stride", self.k_outer_stride),
            ("k_key_stride", self.k_key_stride),
        )?);
        if self.k_scale.is_null() {
            return Ok(indexer);
        }
        Ok(indexer.k_scale(true).strides_scale(strides(
            ("scale_outer_stride", self.scale_outer_stride),
            ("scale_key_stride", self.scale_key_stride),
        )?))
    }

    fn blocks(&self) -> Result<Option<ChosenBlocks>, Wrong> {
        let (block, compressed) = (size("block", self.block)?, size("compressed", self.compressed)?);
        let (first, last) =
            (size("first_blocks", self.first_blocks)?, size("last_blocks", self.last_blocks)?);
        let blocks = if block > 0 {
            ChosenBlocks::maximum(block)
        } else if compressed > 0 {
            let (stride, selected) = (size("stride", self.stride)?, size("selected", self.selected)?);
            let overlap = BlockOverlap { compressed, stride, selected };
            ChosenBlocks::sum(overlap, size("num_blocks", self.num_blocks)?)
        } else {
            for (field, value) in [("first_blocks", first), ("last_blocks", last)] {
                ensure!(value == 0, "{field} {value}: keys are chosen, not blocks");
            }
            return Ok(None);
        };
        Ok(Some(blocks.first(first).last(last)))
    }

    /// # Safety
    /// `kernel` and `tile` are null or C strings.
    unsafe fn plan(&self) -> Result<Arc<ChoosePlan>, Wrong> {
        let [kernel, tile] = [self.kernel, self.tile].map(|text| match text.is_null() {
            true => c"",
            // SAFETY: the caller's promise.
            false => unsafe { CStr::from_ptr(text) },
        });
        kept_or_made(&PLANS, self.key(kernel, tile), self.device(), |device| {
            let accuracy = if self.exact != 0 { Accuracy::Exact } else { Accuracy::Fast };
            let mut options =
                PlanOptions::default().allow_fallback(self.allow_fallback != 0).accuracy(accuracy);
            if !kernel.is_empty() {
                options = options.kernel(kernel.to_string_lossy());
            }
            if !tile.is_empty() {
                options = options.tile(said(fmha_c::tile_options(&tile.to_string_lossy()))?);
            }
            said(device.plan_choose(&said(self.problem()?.validate())?, &options))
        })
    }

    /// The operands of a run, without its scratch.
    ///
    /// # Safety
    /// Addresses are null or memory of `space` that is as large as the numbers say.
    unsafe fn args<'a>(&self, problem: &ChooseProblem, space: MemorySpace) -> Result<ChooseArgs<'a>, Wrong> {
        let indexer = problem.indexer();
        let [q, k, scale, table] = indexer.map_or([0; 4], |indexer| problem.index_bytes(indexer));
        let of = |dtype: fn(&Indexer) -> DType| indexer.map_or(DType::F32, dtype);
        let heads = indexer.map_or(0, |indexer| indexer.num_heads);
        let has = indexer.is_some();
        let numbers = |count: u32| problem.rows().saturating_mul(u64::from(count) * 4);
        let ranges = problem.candidates == CandidateKind::Ranges;
        let is_paged = indexer.is_some_and(|indexer| indexer.keys != IndexKeys::Batch);
        let has_scale = indexer.is_some_and(|indexer| indexer.k_scale);
        let here = |name: &str, wanted: bool, at: *mut c_void| {
            ensure!(
                wanted != at.is_null(),
                "{name} is {}",
                if wanted { "missing" } else { "given beside none" }
            );
            Ok::<bool, Wrong>(wanted)
        };
        // SAFETY: the caller keeps the contract of `args`.
        let read = |name: &str, wanted, at: *mut c_void, bytes, elem: ElemType| unsafe {
            Ok::<_, Wrong>(
                here(name, wanted, at)?
                    .then(|| DevSlice::from_raw(space, at.cast::<u8>().cast_const(), bytes, elem)),
            )
        };
        // SAFETY: the caller keeps the contract of `args`.
        let write = |name: &str, wanted, at: *mut c_void, bytes, elem: ElemType| unsafe {
            Ok::<_, Wrong>(
                here(name, wanted, at)?.then(|| DevSliceMut::from_raw(space, at.cast::<u8>(), bytes, elem)),
            )
        };
        let (floats, ints) = (ElemType::from(DType::F32), ElemType::I32);
        let used = u64::from(problem.batch) * 4;
        Ok(ChooseArgs::default()
            .q(read("q", has, self.q, q, of(|indexer| indexer.dtype_q).into())?)
            .k(read("k", has, self.k, k, of(|indexer| indexer.dtype_k).into())?)
            .weights(read("weights", has, self.weights, numbers(heads), floats)?)
            .k_scale(read("k_scale", has_scale, self.k_scale, scale, floats)?)
            .block_table(read("block_table", is_paged, self.block_table, table, ints)?)
            .given(read("scores", !has, self.given, numbers(problem.seqlen_k), floats)?)
            .seqused_k(read("seqused_k", problem.seqused_k, self.seqused_k, used, ints)?)
            .first(read("first", ranges, self.first, numbers(1), ints)?)
            .end(read("end", ranges, self.end, numbers(1), ints)?)
            .indices(write("indices", problem.topk > 0, self.indices, numbers(problem.topk), ints)?)
            .scores(write(
                "scores",
                problem.write_scores,
                self.scores,
                numbers(problem.num_entries()),
                floats,
            )?))
    }
}

/// Bytes of scratch that a run of a choice wants.
///
/// # Errors
/// A fault of the call, or why no kernel takes it.
///
/// # Safety
/// `kernel` of the call is null or a C string; no tensor is read.
pub unsafe fn workspace_bytes(call: &Choose) -> Result<u64, Wrong> {
    // SAFETY: the caller keeps the contract of `workspace_bytes`.
    Ok(unsafe { call.plan()? }.workspace().bytes)
}

/// Queues a choice on its stream, with scratch of as many bytes as [`workspace_bytes`] says.
///
/// # Errors
/// As [`workspace_bytes`]; what the driver said.
///
/// # Safety
/// As [`workspace_bytes`]; addresses are null or memory of the device as large as the numbers say, and so is the
/// scratch, which nobody else uses until the work is done.
pub unsafe fn run(call: &Choose, workspace: *mut u8, bytes: u64) -> Result<(), Wrong> {
    // SAFETY: the caller keeps the contract of `run`.
    unsafe {
        let plan = call.plan()?;
        let (space, wanted) = (plan.device().memory().space(), plan.workspace().bytes);
        ensure!(wanted <= bytes, "workspace has {bytes} bytes, but {wanted} are wanted");
        let mut args = call.args(plan.problem(), space)?;
        args.workspace =
            (wanted > 0).then(|| DevSliceMut::from_raw(space, workspace, bytes, ElemType::Scratch));
        said(plan.run_on_raw(&mut args, call.stream.cast_unsigned()))
    }
}
