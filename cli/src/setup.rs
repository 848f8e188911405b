//! Conversion of options to a problem and its lengths.

use fmha::{
    Bias, BiasBroadcast, BiasGrad, BlockTable, BwdProblem, DType, DevSlice, Dims, DropoutSeed,
    ElementwiseBias, Extents, FwdProblem, MaskArgs, PlanOptions, ProblemError, QLayout, SeqArgs, Shape,
    Strides, Totals, VLayout,
};
use fmha_conformance::tensors::MaskNumbers;
use fmha_core::masks::HostMasks;
use fmha_core::seq::{SeqSpan, checked_spans};
use fmha_core::work::Work;

use crate::cache::CachePlaces;
use crate::failure::Failure;
use crate::lists_file::ListNumbers;
use crate::mask_file;
use crate::memory::room_for;
use crate::options::{BiasChoice, Lengths, Mode, OrSame, ProblemArgs};

/// A problem, and the lengths of its sequences.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) fwd: FwdProblem,
    /// The backward problem, with `--backward`.
    pub(super) bwd: Option<BwdProblem>,
    pub(super) cu_seqlens_q: Option<Vec<i32>>,
    pub(super) cu_seqlens_k: Option<Vec<i32>>,
    pub(super) seqused_q: Option<Vec<i32>>,
    pub(super) seqused_k: Option<Vec<i32>>,
    pub(super) dropout: DropoutSeed,
    /// Heads come before rows in files of Q, K and V, and of O.
    pub(super) iperm: bool,
    pub(super) operm: bool,
    /// Whether every run gives equal bits.
    pub(super) deterministic: bool,
    pub(super) cache: CachePlaces,
    /// Elements of the tensors of the call's masks.
    pub(super) masks: MaskNumbers,
    /// Elements of the tensors of the call's lists of keys.
    pub(super) lists: ListNumbers,
}

/// Types and shapes of the tensors that the user brings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Given {
    pub(super) dtype_qk: DType,
    pub(super) dtype_v: DType,
    pub(super) q: Shape,
    pub(super) k: Shape,
    pub(super) v: Shape,
    /// The type of a bias, if there is one.
    pub(super) bias: Option<DType>,
}

/// One side's sequences.
struct Side {
    longest: u32,
    /// Group mode: rows of the packed tensor, and where each sequence starts.
    packed: Option<(u32, Vec<i32>)>,
    used: Option<Vec<i32>>,
}

impl Setup {
    /// The type whose peak rate a run is compared with: the wider one if the two products differ.
    pub(super) fn product_dtype(&self) -> DType {
        let (qk, v) = (self.fwd.dtypes.qk, self.fwd.dtypes.v);
        if qk.size_bytes() > v.size_bytes() { qk } else { v }
    }

    /// Rows of packed tensors.
    pub(super) fn totals(&self) -> Totals {
        // The offsets were made here: the last is the sum of the lengths.
        let total = |offsets: &Option<Vec<i32>>| Some(offsets.as_ref()?.last()?.unsigned_abs());
        Totals {
            total_q: total(&self.cu_seqlens_q),
            total_k: total(&self.cu_seqlens_k),
            num_pages: self.cache.num_pages,
            ..Totals::NONE
        }
    }

    /// The tensors' extents.
    pub(super) fn extents(&self) -> Extents {
        self.fwd.extents(self.totals())
    }

    /// Work of the problem; for masks as data in the pairs that they show.
    pub(super) fn work(&self) -> Result<Work, Failure> {
        let spans = self.spans()?;
        let args = MaskArgs::default()
            .intervals(DevSlice::host(&self.masks.intervals))
            .bits(DevSlice::host(&self.masks.bits));
        Ok(match HostMasks::of(&self.fwd, &args, self.totals().total_q)? {
            Some(masks) => Work::count_shown(&self.fwd, &spans, &masks)?,
            None => Work::count(&self.fwd, &spans)?,
        })
    }

    /// The lengths as arguments in host memory.
    pub(super) fn seq_args(&self) -> SeqArgs<'_> {
        fn host(lengths: &Option<Vec<i32>>) -> Option<DevSlice<'_>> {
            lengths.as_deref().map(DevSlice::host)
        }
        SeqArgs::default()
            .totals(self.totals())
            .block_table(self.cache.num_pages.filter(|_| !self.fwd.lists_addresses()).map(|_| BlockTable {
                pages: DevSlice::host(&self.cache.block_table),
                max_pages: self.cache.max_pages,
            }))
            .cu_seqlens_q(host(&self.cu_seqlens_q))
            .cu_seqlens_k(host(&self.cu_seqlens_k))
            .seqused_q(host(&self.seqused_q))
            .seqused_k(host(&self.seqused_k))
    }

    /// Options of a plan that the problem itself asks for, added to the command's.
    pub(super) fn options(&self, options: &PlanOptions) -> PlanOptions {
        options.clone().deterministic(options.deterministic || self.deterministic)
    }

    /// Every sequence, checked.
    pub(super) fn spans(&self) -> Result<Vec<SeqSpan>, ProblemError> {
        checked_spans(&self.fwd, &self.seq_args())
    }
}

impl ProblemArgs {
    /// The problem that these options, and the user's tensors if there are any, describe. Validated.
    pub(super) fn setup(&self, given: Option<&Given>) -> Result<Setup, Failure> {
        self.backward_options_fit()?;
        let group = self.mode == Mode::Group;
        self.cache.fit(group, given.is_some(), self.backward)?;
        self.listed.fit(self.cache.kv_layout())?;
        let batch = self.batch(given)?;
        // Memory for offsets, lengths and places of each sequence, here and where they are checked.
        room_for(&format_args!("batch {batch}"), u128::from(batch) * 8 * size_of::<SeqSpan>() as u128)?;
        let num_heads_q = agree("num_heads_q", self.num_heads_q, given.map(|g| g.q.head), 8)?;
        let asked_kv = self.num_heads_kv.map(|n| OrSame::or(Some(n), num_heads_q));
        let num_heads_kv = agree("num_heads_kv", asked_kv, given.map(|g| g.k.head), num_heads_q)?;
        let head_dim_qk = agree("head_dim_qk", self.head_dim_qk, given.map(|g| g.q.dim), 128)?;
        let asked_v = self.head_dim_v.map(|n| OrSame::or(Some(n), head_dim_qk));
        let head_dim_v = agree("head_dim_v", asked_v, given.map(|g| g.v.dim), head_dim_qk)?;

        let q = self.side(
            "seqlen_q",
            self.seqlen_q.as_ref(),
            self.padded_q.as_ref(),
            self.seqused_q.as_ref(),
            batch,
            given.map(|g| g.q),
            3328,
        )?;
        let same_as_q = self.seqlen_k.as_ref().is_none_or(|lengths| lengths.0.is_empty());
        let k_lengths = if same_as_q && (given.is_none() || group) {
            self.seqlen_q.as_ref()
        } else {
            self.seqlen_k.as_ref()
        };
        let mut k = self.side(
            "seqlen_k",
            k_lengths,
            self.padded_k.as_ref(),
            self.seqused_k.as_ref(),
            batch,
            given.map(|g| g.k),
            3328,
        )?;

        let mut dims = Dims::batch(batch)
            .seqlens(q.longest, k.longest)
            .heads(num_heads_q, num_heads_kv)
            .head_dims(head_dim_qk, head_dim_v);
        if self.cache.wants_lengths() && k.used.is_none() {
            let before = self.cache.length_before(k.longest)?;
            k.used = Some(vec![before.cast_signed(); batch as usize]);
        }
        let cache = self.cache.places(dims)?;
        if self.listed.list_addresses {
            // An address has a page of its own, and no sequence: K's sequences have no length.
            dims.seqlen_k = 0;
        }
        let totals = match (&q.packed, &k.packed) {
            (Some((total_q, _)), Some((total_k, _))) => Totals::packed(*total_q, *total_k),
            _ => Totals { num_pages: cache.num_pages, ..Totals::NONE },
        };
        let mut fwd = self.forward(totals, dims, given, q.used.is_some(), k.used.is_some())?;
        let masks = match &self.mask.file {
            Some(path) => mask_file::load(&mut fwd, totals, path)?,
            None => MaskNumbers::default(),
        };
        let lists = self.listed.load(&mut fwd, totals)?;
        let bwd = self.backward.then(|| self.backward_of(&fwd));
        match &bwd {
            Some(bwd) => bwd.clone().validate().map(|_| ())?,
            None => fwd.clone().validate().map(|_| ())?,
        }
        let setup = Setup {
            fwd,
            bwd,
            cu_seqlens_q: q.packed.map(|(_, cu)| cu),
            cu_seqlens_k: k.packed.map(|(_, cu)| cu),
            seqused_q: q.used,
            seqused_k: k.used,
            dropout: DropoutSeed { seed: self.drop_seed, offset: self.drop_offset },
            iperm: self.iperm,
            operm: self.operm,
            deterministic: self.deterministic,
            cache,
            masks,
            lists,
        };
        setup.spans()?;
        Ok(setup)
    }

    fn backward_options_fit(&self) -> Result<(), Failure> {
        for (name, wanted) in [("dbias", self.dbias), ("dsink", self.dsink), ("dlse", self.dlse)] {
            if wanted && !self.backward {
                return Err(Failure::wrong(format!("{name} 1 goes with --backward, which is not given")));
            }
        }
        Ok(())
    }

    fn batch(&self, given: Option<&Given>) -> Result<u32, Failure> {
        if self.mode == Mode::Batch {
            return agree("batch", self.batch, given.map(|g| g.q.batch), 2);
        }
        let lists = [
            ("seqlen_q", &self.seqlen_q),
            ("seqlen_k", &self.seqlen_k),
            ("padded_q", &self.padded_q),
            ("padded_k", &self.padded_k),
        ];
        let listed =
            lists.iter().filter_map(|(_, list)| list.as_ref()).map(|list| list.0.len()).find(|&n| n > 1);
        match (self.batch, listed) {
            (Some(batch), _) => Ok(batch),
            (None, Some(listed)) => Ok(listed as u32),
            (None, None) => Ok(if given.is_some() { 1 } else { 2 }),
        }
    }

    /// The sequences of one side.
    #[allow(clippy::too_many_arguments, reason = "the two calls differ in just these")]
    fn side(
        &self,
        field: &'static str,
        asked: Option<&Lengths>,
        padded: Option<&Lengths>,
        used: Option<&Lengths>,
        batch: u32,
        given: Option<Shape>,
        otherwise: u32,
    ) -> Result<Side, Failure> {
        let side = field.trim_start_matches("seqlen_");
        if self.mode == Mode::Batch {
            if let Some(padded) = padded.filter(|padded| !padded.0.is_empty()) {
                return Err(Failure::wrong(format!("padded_{side} {} needs --mode 1", join(&padded.0))));
            }
            let length = match asked.map(|lengths| lengths.0.as_slice()) {
                None | Some([]) => None,
                Some(&[one]) => Some(one),
                Some(many) => {
                    return Err(Failure::wrong(format!(
                        "{field} {}: {} lengths need --mode 1",
                        join(many),
                        many.len()
                    )));
                }
            };
            let longest = agree(field, length, given.map(|shape| shape.seq), otherwise)?;
            let used = used.map(|used| each(&format!("seqused_{side}"), used, batch)).transpose()?;
            return Ok(Side { longest, packed: None, used: used.map(|used| to_i32(&used)) });
        }

        if let Some(used) = used {
            return Err(Failure::wrong(format!(
                "seqused_{side} {} needs --mode 0 (in group mode: --seqlen-{side} and --padded-{side})",
                join(&used.0)
            )));
        }
        let whole = given.map(|shape| Lengths(vec![shape.seq])).filter(|_| batch == 1);
        let default = Lengths(vec![otherwise]);
        let asked = asked.filter(|asked| !asked.0.is_empty()).or(whole.as_ref());
        let Some(asked) = asked.or((given.is_none()).then_some(&default)) else {
            return Err(Failure::wrong(format!("{field}: batch {batch} needs its lengths as a list")));
        };
        let logical = each(field, asked, batch)?;
        let padded = padded.filter(|padded| !padded.0.is_empty());
        let physical = match padded {
            None => logical.clone(),
            Some(padded) => each(&format!("padded_{side}"), padded, batch)?,
        };
        let short = logical.iter().zip(&physical).position(|(logical, physical)| logical > physical);
        if let Some(at) = short {
            let (rows, length) = (physical[at], logical[at]);
            let text = format!("padded_{side}[{at}] {rows} is less than {field}[{at}] {length}");
            return Err(Failure::wrong(text));
        }
        let mut offsets = vec![0i32];
        let mut total: i64 = 0;
        for &length in &physical {
            total += i64::from(length);
            let offset = i32::try_from(total).map_err(|_| {
                Failure::wrong(format!("cu_seqlens_{side}: {total} rows are more than {}", i32::MAX))
            })?;
            offsets.push(offset);
        }
        if let Some(shape) = given
            && i64::from(shape.seq) != total
        {
            return Err(Failure::wrong(format!(
                "{field}: the lengths sum to {total}, but {side} has {} rows",
                shape.seq
            )));
        }
        Ok(Side {
            longest: logical.iter().copied().max().unwrap_or(0),
            packed: Some((total as u32, offsets)),
            used: padded.map(|_| to_i32(&logical)),
        })
    }

    fn forward(
        &self,
        totals: Totals,
        dims: Dims,
        given: Option<&Given>,
        seqused_q: bool,
        seqused_k: bool,
    ) -> Result<FwdProblem, Failure> {
        let asked = self.precision;
        let (dtype_qk, dtype_v) = match (given, asked) {
            (Some(given), None) => (given.dtype_qk, given.dtype_v),
            (None, Some(asked)) => (asked.qk, asked.v),
            (None, None) => (DType::F16, DType::F16),
            (Some(given), Some(asked)) => {
                for (field, given, asked) in
                    [("dtype_qk", given.dtype_qk, asked.qk), ("dtype_v", given.dtype_v, asked.v)]
                {
                    if given != asked {
                        return Err(Failure::wrong(format!(
                            "{field} {asked} is asked for, but the file has {given}"
                        )));
                    }
                }
                (asked.qk, asked.v)
            }
        };
        let base = match totals.total_q {
            None => FwdProblem::new(QLayout::Batch, self.cache.kv_layout(), dtype_qk, dims),
            Some(_) => FwdProblem::group(dtype_qk, dims),
        };
        let extents = base.extents(totals);
        let dtype_o = self.dtype_o.or(asked.and_then(|asked| asked.o)).unwrap_or(base.dtypes.o);
        let inputs = if self.iperm { Strides::bhsd } else { Strides::bshd };
        let output = if self.operm { Strides::bhsd } else { Strides::bshd };
        let descale = |dtype: DType| if dtype.is_fp8() { self.qscale } else { fmha::Descale::None };
        let stored = |dtype| descale(self.cache.stored(dtype));
        let made_up = if dtype_qk.is_fp8() { DType::F32 } else { dtype_qk };
        let bias_dtype = given.and_then(|given| given.bias).unwrap_or(made_up);
        let mut problem = base
            .clone()
            .seqused_q(seqused_q)
            .seqused_k(seqused_k)
            .dtype_v(dtype_v)
            .dtype_o(dtype_o)
            .strides_q(inputs(extents.q))
            .strides_k(inputs(extents.k))
            .strides_v(match (self.vlayout, self.iperm) {
                (VLayout::RowMajor, _) => inputs(extents.v),
                (VLayout::ColMajor, true) => Strides::bhds(extents.v),
                (VLayout::ColMajor, false) => bdhs(extents.v),
            })
            .strides_o(output(extents.o))
            .v_layout(self.vlayout)
            .mask(self.mask.band)
            .score_code(self.score.clone())
            .mask_code(self.keep.clone())
            .softmax_scale(self.softmax_scale)
            .softcap(self.softcap.filter(|&softcap| softcap != 0.0))
            .bias(match self.bias {
                BiasChoice::None => Bias::None,
                BiasChoice::Alibi { per_batch } => Bias::Alibi { per_batch },
                BiasChoice::Elementwise(broadcast) => Bias::Elementwise(ElementwiseBias {
                    dtype: bias_dtype,
                    broadcast,
                    strides: bias_strides(&base, broadcast),
                }),
            })
            .sink(self.sink)
            .p_drop(self.p_drop)
            .descale_q(descale(dtype_qk))
            .descale_k(stored(dtype_qk))
            .descale_v(stored(dtype_v))
            .scale_o(dtype_o.is_fp8())
            .write_lse(self.lse || self.backward);
        self.cache.apply(&mut problem);
        if let Some(format) = self.cache.block_scales {
            if self.iperm {
                let text = format!("iperm 1 beside block_scales {format}: such tensors are made b s h d");
                return Err(Failure::wrong(text));
            }
            // Each tensor has a scale of its own in every format.
            problem = problem
                .with_block_scales(format)
                .descale_q(self.qscale)
                .descale_k(self.qscale)
                .descale_v(self.qscale);
        }
        let descales = [problem.scales.descale_q, problem.scales.descale_k, problem.scales.descale_v];
        if !descales.contains(&self.qscale) {
            return Err(Failure::wrong(format!(
                "qscale: none of Q, K and V is FP8; Q is {dtype_qk}, V {dtype_v}"
            )));
        }
        Ok(problem)
    }

    fn backward_of(&self, fwd: &FwdProblem) -> BwdProblem {
        let dbias = match (self.dbias, fwd.score.bias) {
            (true, Bias::Elementwise(bias)) => Some(BiasGrad { dtype: bias.dtype, strides: bias.strides }),
            // A bias gradient without a bias, which `validate` refuses by name.
            (true, _) => Some(BiasGrad { dtype: DType::F32, strides: fwd.strides.o }),
            (false, _) => None,
        };
        BwdProblem::new(fwd.clone()).dbias(dbias).write_dsink(self.dsink).has_dlse(self.dlse)
    }
}

/// Contiguous `[batch, dim, head, seq]`: V column-major beside b·s·h·d tensors.
pub(super) fn bdhs(shape: Shape) -> Strides {
    let head = i64::from(shape.seq);
    let dim = head * i64::from(shape.head);
    Strides { batch: dim * i64::from(shape.dim), seq: 1, head, dim }
}

/// Contiguous `[batch or 1, head or 1, seqlen_q, seqlen_k]`.
fn bias_strides(problem: &FwdProblem, broadcast: BiasBroadcast) -> Strides {
    Strides::bhsd(problem.shape_bias(broadcast))
}

/// Combines a number from the options with that from the user's tensors, and refuses two different ones.
fn agree(field: &str, asked: Option<u32>, given: Option<u32>, otherwise: u32) -> Result<u32, Failure> {
    match (asked, given) {
        (Some(asked), Some(given)) if asked != given => {
            Err(Failure::wrong(format!("{field} {asked} is asked for, but the tensors have {given}")))
        }
        (asked, given) => Ok(given.or(asked).unwrap_or(otherwise)),
    }
}

/// One length for each sequence: from a list of that length, or one number for all.
pub(super) fn each(field: &str, lengths: &Lengths, batch: u32) -> Result<Vec<u32>, Failure> {
    match lengths.0.as_slice() {
        &[one] => {
            let mut all = Vec::new();
            all.try_reserve_exact(batch as usize)
                .map_err(|error| Failure::wrong(format!("batch {batch}: {error}")))?;
            all.resize(batch as usize, one);
            Ok(all)
        }
        list if list.len() == batch as usize => Ok(list.to_vec()),
        list => Err(Failure::wrong(format!("{field} has {} lengths, but batch is {batch}", list.len()))),
    }
}

fn to_i32(lengths: &[u32]) -> Vec<i32> {
    // Each is at most i32::MAX: the option's parser says so.
    lengths.iter().map(|&length| length as i32).collect()
}

pub(super) fn join(lengths: &[u32]) -> String {
    let words: Vec<_> = lengths.iter().map(ToString::to_string).collect();
    words.join(",")
}
