//! The kernels `cdna_index_loss` and `rdna_index_loss`: the loss that trains an indexer, and its gradients, on matrix
//! units (`fmha/amd/index_loss.h`). All sums have a fixed order.

use fmha_core::DType;
use fmha_core::index_loss_params::IndexLossSpec;
use fmha_core::source::{Entry, KernelSource};
use fmha_core::sparse::IndexLossProblem;
use fmha_gpu::{IndexProducts, MultipliesLists, Operand, Stage};

use crate::device::{Amd, DeviceFacts, launch, needs_unit};
use crate::rows::NUM_THREADS;

/// Most elements of a row: a wave has sums of whole rows in registers.
const MAX_HEAD_DIM: u32 = 128;
/// Keys of a wave that alone sums their dK: `kRange` of the device text.
const RANGE: u32 = 128;
const DWORD: u64 = 4;

/// A matrix unit and the text for it.
pub(crate) trait LossUnit: Copy + std::fmt::Debug + Send + Sync + 'static {
    const NAME: &'static str;
    const QUERIES: &'static str;
    const KEYS: &'static str;
    const IS_WMMA: bool;
    /// Rows and columns of a product.
    const EDGE: u32;
    /// The unit's class in the device text.
    const CLASS: &'static str;
    const HEADER: &'static str;
    const WORDS: &'static str;
}

/// MFMA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MfmaLoss;

impl LossUnit for MfmaLoss {
    const NAME: &'static str = "cdna_index_loss";
    const QUERIES: &'static str = "cdna_index_queries";
    const KEYS: &'static str = "cdna_index_keys";
    const IS_WMMA: bool = false;
    const EDGE: u32 = 32;
    const CLASS: &'static str = "UnitMfma";
    const HEADER: &'static str = "fmha/cdna/index_loss.h";
    const WORDS: &'static str = "MFMA, 32 heads and entries to a wave";
}

/// WMMA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WmmaLoss;

impl LossUnit for WmmaLoss {
    const NAME: &'static str = "rdna_index_loss";
    const QUERIES: &'static str = "rdna_index_queries";
    const KEYS: &'static str = "rdna_index_keys";
    const IS_WMMA: bool = true;
    const EDGE: u32 = 16;
    const CLASS: &'static str = "UnitWmma";
    const HEADER: &'static str = "fmha/rdna/index_loss.h";
    const WORDS: &'static str = "WMMA, 16 heads or entries to a wave, by 32";
}

/// An indexer's loss on unit `U`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixLoss<U>(std::marker::PhantomData<U>);

fn source<U: LossUnit>(spec: &IndexLossSpec, function: &str) -> KernelSource {
    let class = U::CLASS;
    let entry = Entry {
        include: U::HEADER,
        constants: &[("kSpec", spec)],
        bounds: &crate::group_of(NUM_THREADS),
        params: "IndexLossParams p",
        call: &format!("matrix_index_loss::{function}<kSpec, cdna::bwd::lists::{class}>(p);"),
    };
    KernelSource::new(entry.render(), || {
        let mut headers = crate::headers();
        headers.push(fmha_core::index_loss_params::header());
        headers
    })
}

impl<V: Amd, U: LossUnit> MultipliesLists<V> for MatrixLoss<U> {
    const NAME: &'static str = U::NAME;
    const IS_FALLBACK: bool = false;

    fn runs_on(facts: &DeviceFacts) -> Result<(), String> {
        needs_unit(facts.device.arch, U::IS_WMMA)
    }

    fn takes(problem: &IndexLossProblem, _: &DeviceFacts) -> Result<(), String> {
        for (field, dtype) in [("dtype_q", problem.dtype_q), ("dtype_k", problem.dtype_k)] {
            if dtype != DType::Bf16 {
                return Err(format!(
                    "{field} {dtype} is not bf16, in which gradients of products keep their range"
                ));
            }
        }
        if problem.k_scale {
            return Err("k_scale true: keys have no scales".to_owned());
        }
        let dim = problem.head_dim;
        if !dim.is_multiple_of(8) || dim > MAX_HEAD_DIM {
            return Err(format!("head_dim {dim} is not a multiple of 8 of at most {MAX_HEAD_DIM}"));
        }
        Ok(())
    }

    fn alignment(operand: Operand) -> u64 {
        if matches!(operand, Operand::Q | Operand::K) { DWORD } else { 1 }
    }

    fn launches(problem: &IndexLossProblem, facts: &DeviceFacts, _: bool) -> Result<IndexProducts, String> {
        let spec = IndexLossSpec::of(problem);
        let of_group = u64::from(NUM_THREADS / facts.device.arch.wave_threads());
        let on = |stage, kernel, function, waves: u64| {
            let (groups, most) = (waves.div_ceil(of_group), u64::from(u32::MAX / NUM_THREADS));
            if groups > most {
                let text =
                    format!("lengths, batch, topk and heads make {groups} workgroups, more than {most}");
                return Err(text);
            }
            Ok(launch(stage, kernel, source::<U>(&spec, function), groups, NUM_THREADS))
        };
        let rows = problem.rows();
        let entries = rows * u64::from(problem.topk.div_ceil(U::EDGE));
        let scores = on(Stage::Main, U::NAME, "scores", entries)?;
        let mut gradients = Vec::new();
        if problem.write_dq || problem.write_dweights {
            let heads = rows * u64::from(problem.num_heads.div_ceil(U::EDGE));
            gradients.push(on(Stage::Gradients, U::QUERIES, "queries", heads)?);
        }
        if problem.write_dk {
            let ranges = u64::from(problem.batch) * u64::from(problem.seqlen_k.div_ceil(RANGE));
            gradients.push(on(Stage::Gradients, U::KEYS, "keys", ranges)?);
        }
        Ok(IndexProducts { scores, gradients, adds_to_keys: false })
    }

    fn words() -> &'static str {
        U::WORDS
    }
}
