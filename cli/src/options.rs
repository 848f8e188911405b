//! The options that select what to compute and where, shared by `run`, `explain` and the rows of `bench`.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use fmha::expr::Function;
use fmha::{Accuracy, Backend, DType, MaskSpec, PassedOver, PlanOptions, ProblemError};

use crate::cache::CacheOptions;
use crate::failure::Failure;
use crate::lists_file::ListArgs;

/// Options that describe a problem.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Problem")]
pub(super) struct ProblemArgs {
    /// Sequences (default: 2, or as many as there are lengths)
    #[arg(short = 'b', long, alias = "b", value_name = "N", value_parser = at_least_0("batch"), allow_negative_numbers = true)]
    pub(super) batch: Option<u32>,

    /// Query heads (default: 8)
    #[arg(short = 'h', long = "heads", alias = "h", value_name = "N", value_parser = at_least_0("num_heads_q"), allow_negative_numbers = true)]
    pub(super) num_heads_q: Option<u32>,

    /// Key and value heads, of which the query heads are a multiple; -1 = as many
    #[arg(long = "heads-kv", visible_alias = "h_k", value_name = "N", value_parser = or_same("num_heads_kv"), allow_negative_numbers = true)]
    pub(super) num_heads_kv: Option<OrSame>,

    /// Queries of a sequence (default: 3328); with --mode 1 a list, one length a sequence
    #[arg(short = 's', long, alias = "s", value_name = "N[,N..]", value_parser = lengths("seqlen_q"), allow_hyphen_values = true)]
    pub(super) seqlen_q: Option<Lengths>,

    /// Keys of a sequence; -1 = as many as queries; with --mode 1 a list
    #[arg(long, visible_alias = "s_k", value_name = "N[,N..]", value_parser = lengths_or_same("seqlen_k"), allow_hyphen_values = true)]
    pub(super) seqlen_k: Option<Lengths>,

    /// Elements of a query's or key's row (default: 128)
    #[arg(short = 'd', long = "head-dim", alias = "d", value_name = "N", value_parser = at_least_0("head_dim_qk"), allow_negative_numbers = true)]
    pub(super) head_dim_qk: Option<u32>,

    /// Elements of a value's row; -1 = those of a key's
    #[arg(long, visible_alias = "d_v", value_name = "N", value_parser = or_same("head_dim_v"), allow_negative_numbers = true)]
    pub(super) head_dim_v: Option<OrSame>,

    /// 0 or batch: equal extents; 1 or group: packed sequences (varlen)
    #[arg(long, value_name = "0|1", default_value = "0", value_parser = mode)]
    pub(super) mode: Mode,

    /// Group mode: rows that each sequence takes in memory, at least its queries
    #[arg(long = "padded-q", visible_alias = "s_qpad", value_name = "N[,N..]", value_parser = lengths_or_same("padded_q"), allow_hyphen_values = true)]
    pub(super) padded_q: Option<Lengths>,

    /// Group mode: rows that each sequence takes in memory, at least its keys
    #[arg(long = "padded-k", visible_alias = "s_kpad", value_name = "N[,N..]", value_parser = lengths_or_same("padded_k"), allow_hyphen_values = true)]
    pub(super) padded_k: Option<Lengths>,

    /// Batch mode: logical queries of each sequence, within its extent
    #[arg(long, visible_alias = "q_eff_lens", value_name = "N[,N..]", value_parser = lengths("seqused_q"), allow_hyphen_values = true)]
    pub(super) seqused_q: Option<Lengths>,

    /// Batch mode: logical keys of each sequence, within its extent
    #[arg(long, visible_alias = "kv_eff_lens", value_name = "N[,N..]", value_parser = lengths("seqused_k"), allow_hyphen_values = true)]
    pub(super) seqused_k: Option<Lengths>,

    /// fp32, fp16, bf16, fp8 (e4m3fn), bf8 (e5m2), e4m3fnuz, e5m2fnuz; fp8-hybrid: V in f16
    /// (fp8-hybrid-bf16: in bf16); fp8bf16, fp8fp16: fp8 with that output (default: fp16)
    #[arg(long = "prec", visible_alias = "dtype", value_name = "TYPE", value_parser = precision)]
    pub(super) precision: Option<Precision>,

    /// Type of O (default: the inputs'; bf16 for FP8)
    #[arg(long = "prec-o", visible_alias = "dtype-o", value_name = "TYPE", value_parser = dtype("prec_o"))]
    pub(super) dtype_o: Option<DType>,

    /// Multiplies the scores (default: 1/sqrt(head dim)); 0 is 0
    #[arg(long = "softmax-scale", visible_alias = "scale_s", value_name = "X", value_parser = real("softmax_scale"), allow_hyphen_values = true)]
    pub(super) softmax_scale: Option<f32>,

    /// softcap * tanh(score / softcap); 0 = none
    #[arg(long, visible_alias = "logits_soft_cap", value_name = "X", value_parser = real("softcap"), allow_hyphen_values = true)]
    pub(super) softcap: Option<f32>,

    /// 0; 1 or t (causal, top-left); 2 or b or causal (bottom-right); t:LEFT,RIGHT[,SINK] and
    /// b:LEFT,RIGHT[,SINK] (window, -1 = unbounded); g:Y,X[,SINK] (generic coordinates); or a .npy file:
    /// i32 [batch|1, heads, endpoints, seqlen_q] are intervals of keys, two endpoints each; bool
    /// [batch|1, heads, seqlen_q, seqlen_k] or u32 [.., seqlen_k / 32] are bits, 1 = seen (outer axes may
    /// be left out; packed [heads, endpoints, total_q], [heads, total_q, ..])
    #[arg(long, value_name = "MASK|FILE", default_value = "0", value_parser = mask)]
    pub(super) mask: MaskChoice,

    /// Score function, code over s, b, h, q, k, seqlen_q, seqlen_k that replaces a scaled score: "s +
    /// 0.5*(k-q)"
    #[arg(long, value_name = "CODE", value_parser = code("score"))]
    pub(super) score: Option<Function>,

    /// Which pairs are seen besides, as code: "k <= q and q - k < 128"
    #[arg(long, value_name = "CODE", value_parser = code("keep"))]
    pub(super) keep: Option<Function>,

    /// n; e[:0|1|2|3] elementwise over 1*1, 1*h, b*h or b*1; a[:0|1] ALiBi with slopes of h or b*h
    #[arg(long, value_name = "BIAS", default_value = "n", value_parser = bias)]
    pub(super) bias: BiasChoice,

    /// A learnable sink per head in the denominator
    #[arg(long, visible_alias = "init_sink")]
    pub(super) sink: bool,

    /// Probability that a P is dropped
    #[arg(long = "p-drop", visible_alias = "p_drop", value_name = "P", default_value = "0", value_parser = real("p_drop"), allow_hyphen_values = true)]
    pub(super) p_drop: f32,

    /// Key of the dropout generator
    #[arg(long = "drop-seed", visible_alias = "drop_seed", value_name = "N", default_value = "1", value_parser = word("drop_seed"), allow_negative_numbers = true)]
    pub(super) drop_seed: u64,

    /// Last word of its counter
    #[arg(long = "drop-offset", visible_alias = "drop_offset", value_name = "N", default_value = "0", value_parser = word("drop_offset"), allow_negative_numbers = true)]
    pub(super) drop_offset: u64,

    /// FP8 scales: n (none), pt (per tensor), kv (per sequence and kv head)
    #[arg(long, value_name = "KIND", default_value = "n", value_parser = qscale)]
    pub(super) qscale: fmha::Descale,

    /// r: V as [seq, dim]; c: V as [dim, seq]
    #[arg(long, value_name = "r|c", default_value = "r", value_parser = v_layout)]
    pub(super) vlayout: fmha::VLayout,

    /// Q, K, V lie as b*h*s*d, not b*s*h*d
    #[arg(long)]
    pub(super) iperm: bool,

    /// O lies as b*h*s*d, not b*s*h*d
    #[arg(long)]
    pub(super) operm: bool,

    /// Write the natural-log-sum-exp of each row too
    #[arg(long)]
    pub(super) lse: bool,

    /// The gradients, not the output
    #[arg(long)]
    pub(super) backward: bool,

    /// Backward: the gradient of the elementwise bias too
    #[arg(long)]
    pub(super) dbias: bool,

    /// Backward: the gradient of the sinks too
    #[arg(long, visible_alias = "sink_grad")]
    pub(super) dsink: bool,

    /// Backward: LSE has a gradient of its own
    #[arg(long)]
    pub(super) dlse: bool,

    /// Equal bits on every run, or a refusal (forward always keeps it)
    #[arg(long)]
    pub(super) deterministic: bool,

    #[command(flatten)]
    pub(super) cache: CacheOptions,

    #[command(flatten)]
    pub(super) listed: ListArgs,
}

/// Device and kernel of a command.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Device and kernel")]
pub(super) struct BackendArgs {
    /// auto (the best that is present), cpu, cuda, cuda:N, rocm, rocm:N
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = backend)]
    backend: Backend,

    /// This kernel or a refusal (`fmha explain` lists them)
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    kernel: Option<String>,

    /// Tile parameters of that kernel, honoured or refused: block_m=128,stages=3
    #[arg(long, value_name = "K=V", value_delimiter = ',', value_parser = tile)]
    tile: Vec<(String, String)>,

    /// A kernel that is correct but far from fast may serve
    #[arg(long)]
    allow_fallback: bool,

    /// fast: the running maximum of a row may lag by a bounded factor; exact: it is the true one, or a refusal
    #[arg(long, value_name = "HOW", default_value = "fast", value_parser = accuracy)]
    accuracy: Accuracy,

    /// The bits of a sequence do not depend on the batch around it, or a refusal
    #[arg(long, visible_alias = "batch_invariant")]
    batch_invariant: bool,

    /// The bits of a query row depend on that row and the keys that it sees alone, or a refusal
    #[arg(long, visible_alias = "row_invariant")]
    row_invariant: bool,

    /// Each run reads the lengths back and checks them first
    #[arg(long)]
    check_lengths: bool,

    /// Interpret the kernels of this architecture (sm_80, sm_90a, sm_100a, gfx942, gfx1100): no device needed, slow
    #[arg(long, value_name = "ARCH", value_parser = NonEmptyStringValueParser::new())]
    emulate: Option<String>,
}

impl BackendArgs {
    /// The device of the backend.
    pub(super) fn open(&self) -> Result<fmha::Device, Failure> {
        Ok(self.choice()?.open()?)
    }

    /// Backends that `auto` has tried before this one; empty for an explicit choice.
    pub(super) fn passed_over(&self) -> Result<Arc<[PassedOver]>, Failure> {
        match self.choice()? {
            Backend::Auto => Ok(fmha::passed_over()?),
            _ => Ok(Arc::new([])),
        }
    }

    /// Device on which a rank of this command computes: the CPU, or the first GPU that it sees.
    pub(super) fn open_for_ranks(&self, ranks: u32) -> Result<fmha::Device, Failure> {
        match self.choice()? {
            Backend::Auto | Backend::Cpu => Ok(Backend::Cpu.open()?),
            first @ (Backend::Cuda { ordinal: 0, emulate: None }
            | Backend::Rocm { ordinal: 0, emulate: None }) => Ok(first.open()?),
            _ => Err(Failure::wrong(format!(
                "ranks {ranks} are processes of the CPU, or a GPU each: --backend cpu, cuda or rocm"
            ))),
        }
    }

    /// Whether an architecture is to be emulated.
    pub(super) fn emulates(&self) -> bool {
        self.emulate.is_some()
    }

    pub(super) fn choice(&self) -> Result<Backend, Failure> {
        Ok(match &self.emulate {
            Some(arch) => self.backend.clone().emulated(arch)?,
            None => self.backend.clone(),
        })
    }

    /// Options that repeat this choice of backend in another command, for a report.
    pub(super) fn words(&self) -> Vec<String> {
        let emulate = self.emulate.iter().map(|arch| format!("--emulate={arch}"));
        let kernel = self.kernel.iter().map(|kernel| format!("--kernel={kernel}"));
        let tile = self.tile.iter().map(|(name, value)| format!("--tile={name}={value}"));
        let accuracy =
            (self.accuracy != Accuracy::default()).then(|| format!("--accuracy={}", self.accuracy));
        let flags = [
            (self.allow_fallback, "--allow-fallback"),
            (self.batch_invariant, "--batch-invariant"),
            (self.row_invariant, "--row-invariant"),
            (self.check_lengths, "--check-lengths"),
        ];
        let flags = flags.into_iter().filter(|(given, _)| *given).map(|(_, word)| word.to_owned());
        emulate.chain(kernel).chain(tile).chain(accuracy).chain(flags).collect()
    }

    /// All words of the options, the backend's name first, in the form for another process of this command.
    pub(super) fn all_words(&self) -> Vec<String> {
        [vec![format!("--backend={}", self.backend)], self.words()].concat()
    }

    /// How to plan; what the problem itself wishes is added by [`Setup::options`](crate::setup::Setup::options).
    pub(super) fn plan_options(&self) -> PlanOptions {
        let mut options = PlanOptions::default()
            .tile(self.tile.clone())
            .allow_fallback(self.allow_fallback)
            .accuracy(self.accuracy)
            .batch_invariant(self.batch_invariant)
            .row_invariant(self.row_invariant)
            .check_lengths(self.check_lengths);
        options.kernel.clone_from(&self.kernel);
        options
    }
}

/// Equal extents or packed sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Batch,
    Group,
}

/// A number, or "as the other one".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OrSame {
    Same,
    Value(u32),
}

impl OrSame {
    pub(super) fn or(choice: Option<Self>, other: u32) -> u32 {
        match choice {
            Some(Self::Value(value)) => value,
            Some(Self::Same) | None => other,
        }
    }
}

/// Lengths of sequences; empty = "as the other side".
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lengths(pub(super) Vec<u32>);

/// Kind of bias, before the extents are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BiasChoice {
    None,
    Elementwise(fmha::BiasBroadcast),
    Alibi { per_batch: bool },
}

/// The types of Q and K, of V, and of O if the text has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Precision {
    pub(super) qk: DType,
    pub(super) v: DType,
    pub(super) o: Option<DType>,
}

const MOST: i64 = 0x7fff_ffff;

fn number(field: &str, text: &str, range: &RangeInclusive<i64>) -> Result<i64, String> {
    match text.parse::<i128>() {
        Ok(value) if (i128::from(*range.start())..=i128::from(*range.end())).contains(&value) => {
            Ok(value as i64)
        }
        Ok(value) => Err(format!("{field} {value} is not in {range:?}")),
        Err(_) => Err(format!("{field} `{text}` is not a whole number")),
    }
}

/// Numbers of a range that a `u32` holds.
pub(super) fn within(
    field: &'static str,
    range: RangeInclusive<i64>,
) -> impl Fn(&str) -> Result<u32, String> + Clone {
    move |text| number(field, text, &range).map(|value| value as u32)
}

pub(super) fn at_least_0(field: &'static str) -> impl Fn(&str) -> Result<u32, String> + Clone {
    within(field, 0..=MOST)
}

pub(super) fn at_least_1(field: &'static str) -> impl Fn(&str) -> Result<u32, String> + Clone {
    within(field, 1..=MOST)
}

fn or_same(field: &'static str) -> impl Fn(&str) -> Result<OrSame, String> + Clone {
    move |text| {
        number(field, text, &(-1..=MOST))
            .map(|value| u32::try_from(value).map_or(OrSame::Same, OrSame::Value))
    }
}

pub(super) fn lengths(field: &'static str) -> impl Fn(&str) -> Result<Lengths, String> + Clone {
    move |text| {
        let one = at_least_0(field);
        text.split(',').map(one).collect::<Result<_, _>>().map(Lengths)
    }
}

fn lengths_or_same(field: &'static str) -> impl Fn(&str) -> Result<Lengths, String> + Clone {
    move |text| if text == "-1" { Ok(Lengths(Vec::new())) } else { lengths(field)(text) }
}

/// Parses a number as written; `validate` decides later which numbers are valid.
fn real(field: &'static str) -> impl Fn(&str) -> Result<f32, String> + Clone {
    move |text| {
        let written: f64 = text.parse().map_err(|_| format!("{field} `{text}` is not a number"))?;
        let read = written as f32;
        if (read == 0.0 && written != 0.0) || (read.is_infinite() && written.is_finite()) {
            return Err(format!("{field} {text} is {read} as a 32-bit number, and not what was asked for"));
        }
        Ok(read)
    }
}

pub(super) fn word(field: &'static str) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| text.parse().map_err(|_| format!("{field} `{text}` is not in 0..={}", u64::MAX))
}

fn mode(text: &str) -> Result<Mode, String> {
    match text {
        "0" | "batch" => Ok(Mode::Batch),
        "1" | "group" => Ok(Mode::Group),
        _ => Err(format!("mode `{text}` is neither 0 (batch) nor 1 (group)")),
    }
}

pub(super) fn dtype(field: &'static str) -> impl Fn(&str) -> Result<DType, String> + Clone {
    move |text| text.parse().map_err(|error: ProblemError| error.text.replacen("dtype", field, 1))
}

fn mask(text: &str) -> Result<MaskChoice, String> {
    if text.ends_with(".npy") {
        return Ok(MaskChoice { band: MaskSpec::NONE, file: Some(text.into()) });
    }
    let band = text.parse().map_err(|error: ProblemError| error.text)?;
    Ok(MaskChoice { band, file: None })
}

/// A band, or a file of a mask as data.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MaskChoice {
    pub(super) band: MaskSpec,
    pub(super) file: Option<PathBuf>,
}

/// Parses a function without captures: the command has no way to pass it a tensor.
fn code(field: &'static str) -> impl Fn(&str) -> Result<Function, String> + Clone {
    move |text| {
        let function: Function = text.parse().map_err(|error| format!("{field}: {error}"))?;
        if let Some(capture) = function.captures().first() {
            let name = &capture.name;
            return Err(format!("{field}: {name} is captured, and the command has no value for it"));
        }
        match (field, function.is_mask()) {
            ("score", true) => Err(format!("{field} `{text}` is a bool: it is a mask, which --keep takes")),
            ("keep", false) => Err(format!("{field} `{text}` is a number, not a bool")),
            _ => Ok(function),
        }
    }
}

fn backend(text: &str) -> Result<Backend, String> {
    text.parse().map_err(|error: ProblemError| error.text)
}

fn accuracy(text: &str) -> Result<Accuracy, String> {
    text.parse().map_err(|error: ProblemError| error.text)
}

fn precision(text: &str) -> Result<Precision, String> {
    let same = |dtype| Precision { qk: dtype, v: dtype, o: None };
    let e4m3 = same(DType::E4m3Fn);
    let hybrid = |v| Precision { qk: DType::E4m3Fn, v, o: Some(v) };
    match text {
        "fp8-hybrid" | "fp8-hybrid-f16" | "fp8-hybrid-fp16" => Ok(hybrid(DType::F16)),
        "fp8-hybrid-bf16" => Ok(hybrid(DType::Bf16)),
        "fp8bf16" => Ok(Precision { o: Some(DType::Bf16), ..e4m3 }),
        "fp8fp16" => Ok(Precision { o: Some(DType::F16), ..e4m3 }),
        "fp8fp32" => Ok(Precision { o: Some(DType::F32), ..e4m3 }),
        _ => match text.parse() {
            Ok(dtype) => Ok(same(dtype)),
            Err(ProblemError { text, .. }) => {
                let text = text.replacen("dtype", "prec", 1);
                Err(format!("{text}, and fp8-hybrid, fp8-hybrid-bf16, fp8bf16, fp8fp16, fp8fp32"))
            }
        },
    }
}

fn bias(text: &str) -> Result<BiasChoice, String> {
    use fmha::BiasBroadcast::{BatchHead, BatchOne, OneHead, OneOne};
    let (kind, rank) = text.split_once(':').unwrap_or((text, "0"));
    match (kind, rank) {
        ("n" | "0", "0") => Ok(BiasChoice::None),
        ("e" | "elementwise" | "1", "0") => Ok(BiasChoice::Elementwise(OneOne)),
        ("e" | "elementwise" | "1", "1") => Ok(BiasChoice::Elementwise(OneHead)),
        ("e" | "elementwise" | "1", "2") => Ok(BiasChoice::Elementwise(BatchHead)),
        ("e" | "elementwise" | "1", "3") => Ok(BiasChoice::Elementwise(BatchOne)),
        ("a" | "alibi" | "2", "0") => Ok(BiasChoice::Alibi { per_batch: false }),
        ("a" | "alibi" | "2", "1") => Ok(BiasChoice::Alibi { per_batch: true }),
        _ => Err(format!("bias `{text}` is no bias (known: n, e[:0|1|2|3], a[:0|1])")),
    }
}

fn v_layout(text: &str) -> Result<fmha::VLayout, String> {
    match text {
        "r" | "row" => Ok(fmha::VLayout::RowMajor),
        "c" | "col" => Ok(fmha::VLayout::ColMajor),
        _ => Err(format!("vlayout `{text}` is neither r (row-major) nor c (column-major)")),
    }
}

fn qscale(text: &str) -> Result<fmha::Descale, String> {
    match text {
        "n" | "0" => Ok(fmha::Descale::None),
        "pt" | "1" => Ok(fmha::Descale::PerTensor),
        "kv" => Ok(fmha::Descale::PerKvHead),
        _ => Err(format!("qscale `{text}` is none of n, pt (per tensor), kv (per kv head)")),
    }
}

fn tile(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err(format!("tile `{text}` is not of the form name=value")),
    }
}
