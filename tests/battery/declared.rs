//! Refusals that a backend declares. Any other refusal is a failure.

use fmha_core::{Bias, DType, FwdProblem, KvLayout, PlanOptions, QLayout, Strides, VLayout};

use crate::case::{Body, Case};
use crate::law::LawKind;

/// One declared refusal.
pub struct Declared {
    /// Backends with this refusal, by [`fmha_core::Device::kind`].
    pub backends: &'static [&'static str],
    /// Which kernels may refuse, by spaces, each when it is named; empty: any.
    pub kernels: &'static str,
    /// Whether a slow kernel supports the case: it may then be refused only if fallbacks are not allowed, or one
    /// kernel is named.
    pub slowly: bool,
    /// Description of the refusal, for the report.
    pub what: &'static str,
    /// Whether a case may be refused for this reason.
    pub applies: fn(&Case, Option<&FwdProblem>) -> bool,
}

fn uses(problem: Option<&FwdProblem>, dtype: impl Fn(DType) -> bool) -> bool {
    problem.is_some_and(|p| dtype(p.dtypes.qk) || dtype(p.dtypes.v))
}

/// Whether the case's problem updates the cache, or the second call that a law makes.
fn updates_the_cache(case: &Case, problem: Option<&FwdProblem>) -> bool {
    problem.is_some_and(|p| p.refuse_cache_updates("").is_err())
        || matches!(&case.body, Body::Law(law) if matches!(law.kind, LawKind::AppendIsWritten(_)))
}

/// Whether a cache has FP8 elements under 16-bit queries, or a tree mask.
fn is_no_plain_cache(problem: &FwdProblem) -> bool {
    problem.cache.dtype.is_some() || problem.cache.tree_mask
}

fn dropout_between_quads(_: &Case, problem: Option<&FwdProblem>) -> bool {
    problem.is_some_and(|p| p.refuse_dropout_between_quads("").is_err())
}

fn alibi_beside_a_tiny_scale(problem: &FwdProblem) -> bool {
    let is_tiny = problem.score.softmax_scale.is_some_and(|scale| scale != 0.0 && scale.abs() < 1e-30);
    is_tiny && matches!(problem.score.bias, Bias::Alibi { .. })
}

/// Kernels that compute no score function and no mask function.
const CODELESS: &str = "sm90_mla sm80_widened sm90_widened sm100_mla sm100_widened sm100_mla_widened cdna_decode \
    cdna_widened rdna_decode rdna_widened";

/// A refusal of CUDA's kernels, whatever they are.
const ON_CUDA: Declared =
    Declared { backends: &["cuda"], kernels: "", slowly: false, what: "", applies: |_, _| false };
const ON_ROCM: Declared = Declared { backends: &["rocm"], ..ON_CUDA };
const ON_GPUS: Declared = Declared { backends: &["cuda", "rocm"], ..ON_CUDA };

/// A refusal of fast kernels, where a slow one serves.
const SLOW_ON_CUDA: Declared = Declared { slowly: true, ..ON_CUDA };
const SLOW_ON_ROCM: Declared = Declared { slowly: true, ..ON_ROCM };
const SLOW_ON_GPUS: Declared = Declared { slowly: true, ..ON_GPUS };

/// All declared refusals. The CPU backend supports the whole contract and has none.
pub const DECLARED: &[Declared] = &[
    Declared {
        what: "scales by blocks are the slow kernel's",
        applies: |_, problem| problem.is_some_and(|p| p.block_scales.is_some()),
        ..SLOW_ON_GPUS
    },
    Declared {
        what: "masks as data beside scales by blocks are Blackwell's and the CPU's, forward",
        applies: |case, problem| {
            matches!(case.body, Body::Forward(_))
                && problem.is_some_and(|p| p.block_scales.is_some() && !p.masks.is_empty())
        },
        ..ON_GPUS
    },
    Declared {
        what: "gradients under masks as data and functions beside scales by blocks are Blackwell's and the CPU's",
        applies: |case, problem| {
            matches!(case.body, Body::Backward(_))
                && problem
                    .is_some_and(|p| p.block_scales.is_some() && !p.masks.is_empty() && !p.code.is_empty())
        },
        ..ON_GPUS
    },
    Declared {
        what: "gradients of packed queries beside scales by blocks are the CPU's",
        applies: |case, problem| {
            matches!(case.body, Body::Backward(_))
                && problem.is_some_and(|p| p.block_scales.is_some() && p.layout.q == QLayout::Packed)
        },
        ..ON_GPUS
    },
    Declared {
        what: "rows of bytes in pages that begin on no dwords are the slow kernel's",
        applies: |_, problem| {
            problem.is_some_and(|p| {
                let second = p.second.map_or(0, |second| second.k.batch);
                p.cache.rows.is_some() && (p.strides.k.batch % 4 != 0 || second % 4 != 0)
            })
        },
        ..SLOW_ON_ROCM
    },
    Declared {
        kernels: "cdna_fwd cdna_widened rdna_fwd rdna_widened",
        what: "rows of bytes and second caches are the decode kernels'",
        applies: |_, problem| problem.is_some_and(|p| p.cache.rows.is_some() || p.second.is_some()),
        ..ON_ROCM
    },
    Declared {
        what: "rows of bytes in pages that are no whole 16 bytes apart are the slow kernel's",
        applies: |_, problem| {
            problem.is_some_and(|p| {
                let second = p.second.map_or(0, |second| second.k.batch);
                p.cache.rows.is_some() && (p.strides.k.batch % 16 != 0 || second % 16 != 0)
            })
        },
        ..SLOW_ON_CUDA
    },
    Declared {
        kernels: "sm90 sm90_widened sm100 sm100_widened sm100_mla_widened simt_widened",
        what: "rows of bytes of a latent cache are sm80's, sm90_mla's and sm100_mla's",
        applies: |_, problem| problem.is_some_and(|p| p.cache.rows.is_some()),
        ..ON_CUDA
    },
    Declared {
        what: "lists of keys in FP8, gradients over them on RDNA, and second caches are the slow kernel's",
        applies: |case, problem| {
            let is_gradient = matches!(case.body, Body::Backward(_));
            problem.is_some_and(|p| {
                p.walks_lists() && (is_gradient || p.dtypes.qk.is_fp8() || p.second.is_some())
            })
        },
        ..SLOW_ON_ROCM
    },
    Declared {
        what: "lists of keys beside what needs positions, and in f32, are the slow kernel's",
        applies: |_, problem| {
            problem.is_some_and(|p| {
                let needs_positions = p.score.bias != Bias::None || p.drops() || !p.code.is_empty();
                p.walks_lists() && (needs_positions || p.dtypes.qk == DType::F32)
            })
        },
        ..SLOW_ON_GPUS
    },
    Declared {
        kernels: "cdna_fwd cdna_bwd cdna_widened rdna_fwd rdna_bwd rdna_widened",
        what: "lists of keys are the decode kernels', and gradients over them cdna_lists'",
        applies: |_, problem| problem.is_some_and(|p| p.lists.is_some()),
        ..ON_ROCM
    },
    Declared {
        kernels: "sm90 sm90_widened sm100 sm100_widened sm100_mla_widened",
        what: "lists of keys are sm80's, and sm90_mla's and sm100_mla's of wide rows",
        applies: |_, problem| problem.is_some_and(FwdProblem::walks_lists),
        ..ON_CUDA
    },
    Declared {
        kernels: "sm90_mla sm100_mla",
        what: "lists of keys in rows of 256 or fewer elements, and gradients over them, are sm80's",
        applies: |case, problem| {
            let is_narrow = problem.is_some_and(|p| p.walks_lists() && p.dims.head_dim_qk <= 256);
            is_narrow
                || matches!(case.body, Body::Backward(_)) && problem.is_some_and(FwdProblem::walks_lists)
        },
        ..ON_CUDA
    },
    Declared {
        kernels: "sm80",
        what: "gradients over lists of keys are sm80_lists'",
        applies: |case, problem| {
            matches!(case.body, Body::Backward(_)) && problem.is_some_and(FwdProblem::walks_lists)
        },
        ..ON_CUDA
    },
    Declared {
        kernels: "simt",
        what: "lists of keys in caches of FP8 beside 16 bits are not the slow kernel's",
        applies: |_, problem| problem.is_some_and(|p| p.walks_lists() && p.cache.dtype.is_some()),
        ..ON_GPUS
    },
    Declared {
        what: "lists of keys in caches of FP8 of AMD's types are the CPU backend's",
        applies: |_, problem| {
            problem.is_some_and(|p| {
                let cache = p.cache.dtype.filter(|dtype| !matches!(dtype, DType::E4m3Fn | DType::E5m2));
                p.walks_lists() && cache.is_some()
            })
        },
        ..ON_CUDA
    },
    Declared {
        what: "second caches of FP8 beside 16 bits are the CPU backend's",
        applies: |_, problem| problem.is_some_and(|p| p.second.is_some() && p.cache.dtype.is_some()),
        ..ON_ROCM
    },
    Declared {
        kernels: CODELESS,
        what: "a score or a mask as code is not in every kernel",
        applies: |_, problem| problem.is_some_and(|p| !p.code.is_empty()),
        ..ON_GPUS
    },
    Declared {
        kernels: "sm90 sm100",
        what: "a score or a mask as code is in Hopper's and Blackwell's backward to head dimension 128, a mask without an order of additions: sm80 has all",
        applies: |case, problem| {
            matches!(case.body, Body::Backward(_)) && problem.is_some_and(|p| !p.code.is_empty())
        },
        ..ON_CUDA
    },
    Declared {
        what: "masks as data beside a score or a mask as code are sm80's but for full lists beside a mask, sm90's and sm100's where no mask reads the head, else the CPU backend's",
        applies: |_, problem| {
            let is_slow = uses(problem, |dtype| dtype == DType::F32 || dtype.is_fp8());
            let of_sm80 = |p: &FwdProblem| {
                p.code.mask.is_some() && p.masks.block_lists.is_some_and(|lists| lists.full.is_some())
            };
            problem.is_some_and(|p| !p.masks.is_empty() && !p.code.is_empty() && (is_slow || of_sm80(p)))
        },
        ..ON_CUDA
    },
    Declared {
        kernels: "simt",
        what: "masks as data beside a score or a mask as code are not the slow kernel's",
        applies: |_, problem| problem.is_some_and(|p| !p.masks.is_empty() && !p.code.is_empty()),
        ..ON_ROCM
    },
    Declared {
        what: "masks as data beside a score or a mask as code, in f32 or FP8 or over pages, are the CPU backend's",
        applies: |_, problem| {
            let is_slow = uses(problem, |dtype| dtype == DType::F32 || dtype.is_fp8())
                || problem.is_some_and(|p| p.layout.kv.page_size().is_some());
            is_slow && problem.is_some_and(|p| !p.masks.is_empty() && !p.code.is_empty())
        },
        ..ON_ROCM
    },
    Declared {
        what: "masks as data are read by sm80, by sm90, by sm100 and by the slow kernels",
        applies: |_, problem| problem.is_some_and(|p| !p.masks.is_empty()),
        ..SLOW_ON_CUDA
    },
    Declared {
        kernels: "cdna_decode cdna_widened rdna_decode rdna_widened",
        what: "masks as data are read by AMD's tile kernels and by the slow ones",
        applies: |_, problem| problem.is_some_and(|p| !p.masks.is_empty()),
        ..ON_ROCM
    },
    Declared {
        kernels: "cdna_fwd cdna_bwd rdna_fwd rdna_bwd",
        what: "masks as data over pages are the slow kernel's",
        applies: |_, problem| {
            problem.is_some_and(|p| !p.masks.is_empty() && p.layout.kv.page_size().is_some())
        },
        ..SLOW_ON_ROCM
    },
    Declared {
        what: "f32 inputs are the CPU backend's",
        applies: |_, problem| uses(problem, |dtype| dtype == DType::F32),
        ..SLOW_ON_GPUS
    },
    Declared {
        what: "NVIDIA computes in the OCP FP8 types, not in FNUZ",
        applies: |_, problem| uses(problem, |dtype| matches!(dtype, DType::E4m3Fnuz | DType::E5m2Fnuz)),
        ..SLOW_ON_CUDA
    },
    Declared {
        what: "Hopper's kernel takes ALiBi's slope from scores that are not scaled: a scale below 1e-30 is simt's",
        applies: |_, problem| problem.is_some_and(alibi_beside_a_tiny_scale),
        ..SLOW_ON_CUDA
    },
    Declared {
        what: "dropout of a part whose keys begin amid four of the whole's: kernels of tiles decide for four keys at once",
        applies: dropout_between_quads,
        ..SLOW_ON_GPUS
    },
    Declared {
        what: "gfx942 computes in the FNUZ FP8 types, gfx950 and gfx1201 in OCP, gfx90a and gfx1100 in none",
        applies: |_, problem| uses(problem, DType::is_fp8),
        ..SLOW_ON_ROCM
    },
    Declared {
        what: "f32 rows are not appended, turned or seen by a tree mask",
        applies: |case, problem| {
            uses(problem, |dtype| dtype == DType::F32) && updates_the_cache(case, problem)
        },
        ..ON_GPUS
    },
    Declared {
        kernels: "sm90",
        what: "appends, rotary embedding, tree masks, and FP8 caches beside 16 bits that TMA does not bring in words of 16: sm80 and sm90_widened take them",
        applies: |case, problem| {
            let Some(read) = problem.map(|p| {
                let mut read = p.clone();
                read.cache.dtype = None;
                read
            }) else {
                return updates_the_cache(case, problem);
            };
            updates_the_cache(case, Some(&read)) || problem.is_some_and(is_no_box_of_a_narrow_cache)
        },
        ..ON_CUDA
    },
    Declared {
        kernels: "sm90_mla sm80_widened sm90_widened sm100_widened sm100_mla sm100_mla_widened",
        what: "what of appends, rotary embedding, FP8 caches beside 16 bits and tree masks other kernels take",
        applies: updates_the_cache,
        ..ON_CUDA
    },
    Declared {
        kernels: "sm80 sm90 sm90_mla sm100 sm100_mla simt",
        what: "FP8 caches with scales by rows are widened before, or read by AMD's decode kernels",
        applies: |_, problem| problem.is_some_and(|p| p.cache.scales.is_some()),
        ..ON_GPUS
    },
    Declared {
        what: "FP8 caches with scales by rows of more than 256 elements: most kernels of 16-bit rows that are widened before are narrower",
        applies: |_, problem| {
            problem
                .is_some_and(|p| p.cache.scales.is_some() && p.dims.head_dim_qk.max(p.dims.head_dim_v) > 256)
        },
        ..ON_CUDA
    },
    Declared {
        kernels: "sm100 sm100_mla",
        what: "FP8 caches beside 16 bits are widened before (sm100_widened, sm100_mla_widened), but for lists of keys",
        applies: |_, problem| problem.is_some_and(|p| p.cache.dtype.is_some() && !p.walks_lists()),
        ..ON_CUDA
    },
    Declared {
        kernels: "simt",
        what: "FP8 caches beside 16 bits and tree masks are other kernels'",
        applies: |_, problem| problem.is_some_and(is_no_plain_cache),
        ..ON_CUDA
    },
    Declared {
        what: "FP8 caches in FNUZ, or with a column-major V: they are widened from OCP, along their rows",
        applies: |_, problem| {
            let is_col_major = problem.is_some_and(|p| p.layout.v == VLayout::ColMajor);
            let cache = problem.and_then(|p| p.cache.dtype);
            cache.is_some_and(|cache| is_col_major || matches!(cache, DType::E4m3Fnuz | DType::E5m2Fnuz))
        },
        ..ON_CUDA
    },
    Declared {
        what: "a cache of FP8 or under a tree mask with a V wider than 256 and not of 384, 512 or 576",
        applies: |_, problem| {
            let dim = problem.map_or(0, |p| p.dims.head_dim_v);
            dim > 256 && ![384, 512, 576].contains(&dim) && problem.is_some_and(is_no_plain_cache)
        },
        ..ON_CUDA
    },
    Declared {
        kernels: "cdna_fwd rdna_fwd simt",
        what: "FP8 caches are the decode kernels', or widened before",
        applies: |_, problem| problem.is_some_and(|p| p.cache.dtype.is_some()),
        ..ON_ROCM
    },
    Declared {
        what: "FP8 caches with dropout or rows wider than 576 and 512 are no kernel's but the CPU's",
        applies: |_, problem| {
            problem.is_some_and(|p| {
                let is_wide = p.dims.head_dim_qk > 576 || p.dims.head_dim_v > 512;
                p.cache.dtype.is_some() && (is_wide || p.drops() || p.dropout.write_keep_mask)
            })
        },
        ..ON_ROCM
    },
    Declared {
        kernels: "sm90",
        what: "a packed column-major V: a sequence's keys begin at any element, boxes of TMA at multiples of 16 bytes",
        applies: |_, problem| {
            problem.is_some_and(|p| p.layout.v == VLayout::ColMajor && p.layout.kv == KvLayout::Packed)
        },
        ..ON_CUDA
    },
    Declared {
        kernels: "cdna_widened rdna_widened sm80_widened sm100_widened sm100_mla_widened",
        what: "rows that a forward kernel reads as they lie: a launch before it brings FP8 caches that lie as Q does, and no others",
        applies: |case, problem| {
            let is_one = problem.is_some_and(|problem| {
                let own =
                    if problem.layout.q == QLayout::Packed { KvLayout::Packed } else { KvLayout::Strided };
                let cache = &problem.cache;
                let is_read = cache.rotary.is_none() && !cache.tree_mask && problem.layout.kv == own;
                let widest = problem.dims.head_dim_qk.max(problem.dims.head_dim_v);
                cache.dtype.is_some() && is_read && widest <= 256
            });
            !is_one || matches!(&case.body, Body::Law(law) if law.kind == LawKind::WidenedCache)
        },
        ..ON_GPUS
    },
    Declared {
        kernels: "sm90_widened",
        what: "rows that sm90 reads as they lie: sm90_widened brings caches of FP8 or in another layout than Q's, and no others",
        applies: is_no_cache_to_widen,
        ..ON_CUDA
    },
];

/// Whether sm90 can not load an FP8 cache under 16-bit queries with TMA: rows or strides are not whole words of 16,
/// pages not a multiple of 8 rows, or K is neither laid out like Q nor paged.
fn is_no_box_of_a_narrow_cache(problem: &FwdProblem) -> bool {
    let dims = problem.dims;
    let is_odd =
        |strides: Strides| [strides.batch, strides.seq, strides.head].iter().any(|stride| stride % 16 != 0);
    let is_boxed = [dims.head_dim_qk, dims.head_dim_v].iter().all(|dim| dim % 16 == 0)
        && !is_odd(problem.strides.k)
        && !is_odd(problem.strides.v)
        && problem.layout.kv.page_size().is_none_or(|page_size| page_size.is_multiple_of(8));
    let lies_apart = !problem.layout.kv.is_paged() && problem.refuse_mixed_layouts("").is_err();
    problem.cache.dtype.is_some() && (!is_boxed || lies_apart)
}

/// Whether a cache cannot be converted for another kernel: convertible caches are FP8, or laid out differently from
/// Q, with whole words of 16 elements up to 256.
fn is_no_cache_to_widen(case: &Case, problem: Option<&FwdProblem>) -> bool {
    let is_one = problem.is_some_and(|problem| {
        let own = if problem.layout.q == QLayout::Packed { KvLayout::Packed } else { KvLayout::Strided };
        let dims = [problem.dims.head_dim_qk, problem.dims.head_dim_v];
        let whole =
            problem.layout.v == VLayout::RowMajor && dims.iter().all(|&dim| dim % 16 == 0 && dim <= 256);
        whole && (problem.cache.dtype.is_some() || problem.layout.kv != own)
    });
    // The second call of this law reads the converted cache, so its kernel may refuse it.
    !is_one || matches!(&case.body, Body::Law(law) if law.kind == LawKind::WidenedCache)
}

/// The reason why `backend` may refuse `case` when it plans with `options`; `None` if it must not.
#[must_use]
pub fn why(backend: &str, options: &PlanOptions, case: &Case) -> Option<&'static str> {
    let (problem, kernel) = (case.problem(), options.kernel.as_deref());
    let slow_serves = options.allow_fallback && kernel.is_none();
    let refuses = |declared: &&Declared| {
        let of_kernel = match kernel {
            Some(kernel) => {
                declared.kernels.is_empty() || declared.kernels.split_whitespace().any(|one| one == kernel)
            }
            None => declared.kernels.is_empty(),
        };
        declared.backends.contains(&backend)
            && of_kernel
            && !(declared.slowly && slow_serves)
            && (declared.applies)(case, problem)
    };
    DECLARED.iter().find(refuses).map(|declared| declared.what)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refusal declared for a named kernel excuses neither other kernels nor the backend.
    #[test]
    fn a_kernel_that_was_asked_for_may_refuse_what_another_one_reads_as_it_lies() {
        let declared = |kernel: Option<&str>, name: &str| {
            let case = crate::case::all().into_iter().find(|case| case.name == name);
            let mut options = PlanOptions::default();
            options.kernel = kernel.map(str::to_owned);
            case.map(|case| why("cuda", &options, &case).is_some())
        };
        let (as_it_lies, in_pages) = ("decode/score/softcap/bf16/q4/b", "decode/paged/bf16/p3/s17x90/b/hnd");
        assert_eq!(declared(Some("sm90_widened"), as_it_lies), Some(true));
        assert_eq!(declared(Some("sm90_widened"), in_pages), Some(false));
        for kernel in [None, Some("sm90"), Some("sm80")] {
            assert_eq!(declared(kernel, as_it_lies), Some(false), "{kernel:?}");
        }
    }
}
