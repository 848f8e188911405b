//! The kernels that every vendor has, as AMD launches them: a wave to a row, of a combine a thread to an element.

use fmha_core::source::{Entry, KernelSource, Literal};
use fmha_gpu::{Launch, RowKernel, Stage};

use crate::device::{Device, launch};

/// The name of the launch that updates a KV cache, in plans.
pub(crate) const UPDATE: &str = "cdna_update";
/// Threads of a workgroup.
pub(crate) const NUM_THREADS: u32 = 256;
/// Rows of a cache that are counted to a workgroup of its update, and workgroups at most: a wave of many takes several
/// rows.
const UPDATED_ROWS: u64 = 4;
const MOST_UPDATING: u64 = 1 << 14;

/// The backward's text over lists of keys.
const LISTS_BWD: &str = "fmha/simt/lists_bwd.h";

/// The text under masks as data.
const MASKED: &str = "fmha/simt/masked.h";

/// The text over scales by blocks.
const SCALED: &str = "fmha/simt/scaled.h";

/// Source text of a row kernel for a spec.
fn source(kernel: RowKernel, spec: &dyn Literal) -> KernelSource {
    let (include, params, call) = match kernel {
        RowKernel::Simt => ("fmha/simt/fwd.h", "FwdParams p", "simt::fwd<kSpec>(p);"),
        RowKernel::SimtLists => {
            ("fmha/simt/lists.h", "FwdParams p, ListParams lists", "simt::fwd_lists<kSpec>(p, lists);")
        }
        RowKernel::SimtListsStats => {
            (LISTS_BWD, "BwdParams p, ListParams lists", "simt::bwd_lists_stats<kSpec>(p, lists);")
        }
        RowKernel::SimtListsBwd => {
            (LISTS_BWD, "BwdParams p, ListParams lists", "simt::bwd_lists<kSpec>(p, lists);")
        }
        RowKernel::SimtStats => ("fmha/simt/bwd.h", "BwdParams p", "simt::bwd_stats<kSpec>(p);"),
        RowKernel::SimtBwd => ("fmha/simt/bwd.h", "BwdParams p", "simt::bwd<kSpec>(p);"),
        RowKernel::MaskedSimt => (MASKED, "FwdParams p, MaskDataParams m", "simt::masked_fwd<kSpec>(p, m);"),
        RowKernel::ScaledSimt => {
            (SCALED, "FwdParams p, BlockScaleParams scales", "simt::scaled_fwd<kSpec>(p, scales);")
        }
        RowKernel::MaskedSimtStats => {
            (MASKED, "BwdParams p, MaskDataParams m", "simt::masked_bwd_stats<kSpec>(p, m);")
        }
        RowKernel::MaskedSimtBwd => {
            (MASKED, "BwdParams p, MaskDataParams m", "simt::masked_bwd<kSpec>(p, m);")
        }
        RowKernel::SimtCaptured => ("fmha/simt/bwd.h", "BwdParams p", "simt::bwd_captured<kSpec>(p);"),
        RowKernel::Combine => ("fmha/combine.h", "CombineParams p", "combine<kSpec>(p);"),
        RowKernel::UpdateCache => (
            "fmha/cdna/decode/update.h",
            "FwdParams p, CacheUpdate update",
            "cache::Update<kSpec, cache::Wave>{p, update}.run();",
        ),
    };
    let bounds = &crate::group_of(NUM_THREADS);
    let entry = Entry { include, constants: &[("kSpec", spec)], bounds, params, call };
    KernelSource::new(entry.render(), move || {
        let mut headers = crate::headers();
        if kernel == RowKernel::UpdateCache {
            headers.push(fmha_core::cache_update::header());
        }
        if kernel == RowKernel::SimtLists || include == LISTS_BWD {
            headers.push(fmha_core::lists::header());
        }
        if include == SCALED {
            headers.push(fmha_core::scale_params::header());
        }
        if include == MASKED {
            headers.push(fmha_core::masks::header());
        }
        headers
    })
}

/// A launch of a kernel that every vendor has, as [`Facts::row_launch`](fmha_gpu::Facts::row_launch) says it.
pub(crate) fn row_launch(
    device: Device,
    (stage, name): (Stage, &'static str),
    kernel: RowKernel,
    spec: &dyn Literal,
    [rows, elems]: [u64; 2],
) -> Result<Launch, String> {
    let of_group = u64::from(NUM_THREADS / device.arch.wave_threads());
    let groups = match kernel {
        RowKernel::Combine => (rows * elems).div_ceil(NUM_THREADS.into()),
        RowKernel::UpdateCache => rows.div_ceil(UPDATED_ROWS).min(MOST_UPDATING),
        RowKernel::Simt
        | RowKernel::SimtLists
        | RowKernel::SimtListsStats
        | RowKernel::SimtListsBwd
        | RowKernel::SimtStats
        | RowKernel::SimtBwd
        | RowKernel::SimtCaptured
        | RowKernel::MaskedSimt
        | RowKernel::ScaledSimt
        | RowKernel::MaskedSimtStats
        | RowKernel::MaskedSimtBwd => rows.div_ceil(of_group),
    };
    let most = u64::from(u32::MAX / NUM_THREADS);
    if groups > most {
        return Err(match kernel {
            RowKernel::Simt
            | RowKernel::SimtLists
            | RowKernel::MaskedSimt
            | RowKernel::ScaledSimt
            | RowKernel::UpdateCache => {
                format!("seqlen_q, num_heads_q and batch make {groups} workgroups, more than {most}")
            }
            RowKernel::SimtListsStats
            | RowKernel::SimtListsBwd
            | RowKernel::SimtStats
            | RowKernel::SimtBwd
            | RowKernel::SimtCaptured
            | RowKernel::MaskedSimtStats
            | RowKernel::MaskedSimtBwd => {
                format!(
                    "lengths, heads and batch make {rows} rows of gradients, more than {}",
                    most * of_group
                )
            }
            RowKernel::Combine => format!(
                "batch, seqlen_q, num_heads_q and head_dim_v make {groups} workgroups, more than {most}"
            ),
        });
    }
    let name = if kernel == RowKernel::UpdateCache { UPDATE } else { name };
    Ok(launch(stage, name, source(kernel, spec), groups, NUM_THREADS))
}
