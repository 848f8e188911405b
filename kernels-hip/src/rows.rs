//! The row kernels that every vendor has, as launched on AMD: a wave for each row; in a combine a thread for each
//! element.

use fmha_core::abi::c_constant;
use fmha_core::source::{Entry, Header, KernelSource, Literal};
use fmha_gpu::{Launch, OwnText, RowKernel, Stage};

use crate::device::{Device, launch};

/// The name of the launch that updates a KV cache, in plans.
pub(crate) const UPDATE: &str = "cdna_update";
/// Threads of a workgroup.
pub(crate) const NUM_THREADS: u32 = 256;
/// Threads of a workgroup that chooses keys: `ChooseGroup::threads`.
const CHOOSING_THREADS: u32 = 1024;

/// `fmha/rows.h`: the types that this file shares with the device.
pub(crate) fn header() -> Header {
    let definitions = [c_constant("kRowThreads", NUM_THREADS)];
    Header::shared("fmha/rows.h", "fmha", &["fmha/portable.h"], &definitions)
}

/// Cache rows per workgroup of the cache update; the next constant limits the workgroups, so that with many rows a
/// wave processes several.
const UPDATED_ROWS: u64 = 4;
const MOST_UPDATING: u64 = 1 << 14;

/// Source text of a row kernel for a spec.
fn source(kernel: RowKernel, spec: &dyn Literal) -> KernelSource {
    let [include, params, call] = kernel.shared_text().unwrap_or_else(|own| match own {
        OwnText::Combine => ["fmha/combine.h", "CombineParams p", "combine<kSpec>(p);"],
        OwnText::Choose => {
            ["fmha/amd/choose.h", "ChooseParams p", "choose::choose_rows<choose::ChooseGroup, kSpec>(p);"]
        }
        OwnText::UpdateCache => [
            "fmha/cdna/decode/update.h",
            "FwdParams p, CacheUpdate update",
            "cache::Update<kSpec, cache::Wave>{p, update}.run();",
        ],
    });
    let bounds = &crate::group_of(threads_of(kernel));
    let entry = Entry { include, constants: &[("kSpec", spec)], bounds, params, call };
    KernelSource::new(entry.render(), || {
        let mut headers = crate::headers();
        headers.extend([
            fmha_core::cache_update::header(),
            fmha_core::choose_params::header(),
            fmha_core::quantize_params::header(),
            fmha_core::index_loss_params::header(),
            fmha_core::scale_params::header(),
            fmha_core::value_params::header(),
            fmha_core::small_outputs::header(),
        ]);
        headers
    })
}

/// Threads of a workgroup.
fn threads_of(kernel: RowKernel) -> u32 {
    if kernel == RowKernel::Choose { CHOOSING_THREADS } else { NUM_THREADS }
}

/// A launch of a row kernel, as [`Facts::row_launch`](fmha_gpu::Facts::row_launch) specifies.
pub(crate) fn row_launch(
    device: Device,
    (stage, name): (Stage, &'static str),
    kernel: RowKernel,
    spec: &dyn Literal,
    [rows, elems]: [u64; 2],
) -> Result<Launch, String> {
    let threads = threads_of(kernel);
    let of_group = u64::from(NUM_THREADS / device.arch.wave_threads());
    let groups = match kernel {
        RowKernel::Combine => (rows * elems).div_ceil(NUM_THREADS.into()),
        RowKernel::UpdateCache => rows.div_ceil(UPDATED_ROWS).min(MOST_UPDATING),
        RowKernel::Choose => rows,
        RowKernel::Simt
        | RowKernel::SimtLists
        | RowKernel::SimtTwoCaches
        | RowKernel::SimtListsStats
        | RowKernel::SimtListsBwd
        | RowKernel::SimtStats
        | RowKernel::SimtBwd
        | RowKernel::SimtCaptured
        | RowKernel::MaskedSimt
        | RowKernel::ScaledSimt
        | RowKernel::MaskedSimtStats
        | RowKernel::MaskedSimtBwd
        | RowKernel::SmallRows { .. }
        | RowKernel::SmallHeads { .. }
        | RowKernel::SmallKeys { .. }
        | RowKernel::IndexScores
        | RowKernel::BlockScores
        | RowKernel::QuantizeMaxima
        | RowKernel::QuantizeScale
        | RowKernel::Quantize
        | RowKernel::IndexLossScores
        | RowKernel::IndexLoss { .. }
        | RowKernel::IndexLossQueries
        | RowKernel::IndexLossKeys
        | RowKernel::BlockValues => rows.div_ceil(of_group),
    };
    let most = u64::from(u32::MAX / threads);
    if groups > most {
        return Err(match kernel {
            RowKernel::Simt
            | RowKernel::SimtLists
            | RowKernel::SimtTwoCaches
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
            RowKernel::SmallRows { .. } | RowKernel::SmallHeads { .. } | RowKernel::SmallKeys { .. } => {
                format!("lengths, num_heads_q and batch make {groups} workgroups, more than {most}")
            }
            RowKernel::IndexScores | RowKernel::BlockScores | RowKernel::Choose => {
                format!("rows and keys make {groups} workgroups, more than {most}")
            }
            RowKernel::QuantizeMaxima
            | RowKernel::QuantizeScale
            | RowKernel::Quantize
            | RowKernel::BlockValues => {
                format!("batch, seq, head and dim make {groups} workgroups, more than {most}")
            }
            RowKernel::IndexLossScores
            | RowKernel::IndexLoss { .. }
            | RowKernel::IndexLossQueries
            | RowKernel::IndexLossKeys => {
                format!("lengths, batch, topk and heads make {groups} workgroups, more than {most}")
            }
            RowKernel::Combine => format!(
                "batch, seqlen_q, num_heads_q and head_dim_v make {groups} workgroups, more than {most}"
            ),
        });
    }
    let name = if kernel == RowKernel::UpdateCache { UPDATE } else { name };
    Ok(launch(stage, name, source(kernel, spec), groups, threads))
}
