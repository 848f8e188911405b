//! One rank's part of a plan, forward or backward: how the ranks come to agree on it, and how it runs.

use std::sync::Arc;

use fmha::{
    BlockList, CapturedTensor, DevSlice, DevSliceMut, Device, DropoutSeed, MaskArgs, MemorySpace, QLayout,
    ScoreArgs, Stream, Totals, built_in,
};

use super::built::Built;
use super::choice::{Choice, choose_for, head_groups, may_wait};
use super::options::Options;
use crate::agree::{AS_OTHERS, agree, agreed};
use crate::arrivals::Meeting;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::problem::{Gradients, Kind, Problem, Whole};
use crate::program::{Buf, Buffers, Executor, Memory, Streams};
use crate::scheme::Scheme;

/// A program with its buffers, on one rank.
pub(super) struct Planned {
    /// Meeting for keys that kernels wait for; dropped before the buffers.
    meeting: Option<Meeting>,
    /// Reason why gathered keys come before the kernels.
    why_not: Option<String>,
    group: Arc<dyn Group>,
    pub(super) whole: Whole,
    gradients: Option<Gradients>,
    /// Fields on which all ranks have agreed.
    says: Arc<[(String, String)]>,
    pub(super) choice: Choice,
    built: Built,
    streams: Option<Streams>,
}

/// Tensors of a call, checked.
pub(super) type Call<'a> = Vec<(Buf, Memory<'a>)>;

impl Planned {
    pub(super) fn new(
        problem: &Problem,
        group: Arc<dyn Group>,
        device: &Device,
        options: &Options,
        gradients: Option<Gradients>,
    ) -> Result<Self> {
        let rank = group.rank();
        let choose = |problem: &Problem| {
            let chosen = Chosen::new(problem, &*group, options, gradients);
            let says =
                chosen.as_ref().map_err(Clone::clone).map(|chosen| chosen.says(problem, options, gradients));
            (chosen, says)
        };
        let (mut chosen, mut says) = choose(problem);
        if let Some(settled) = agreed(&*group, &says)? {
            // A rank that has just learned its problem chooses once more; the others wait for it.
            if problem.is_open() {
                (chosen, says) = choose(&problem.clone().settled(&settled));
            }
            agree(&*group, &says)?;
        }
        let (Chosen { mut whole, choice, mut why_not }, says) = (chosen?, says?);
        let build =
            |whole: &Whole| Built::new(whole, choice.scheme, gradients, &*group, device, &options.kernels);
        let mut built = build(&whole);
        let mut meeting = None;
        if whole.flags && choice.scheme == Scheme::Gather {
            let mine = built.as_ref().map_err(|error| error.text.clone()).and_then(Built::coming);
            match Meeting::new(mine, &group, device)? {
                Ok(met) => meeting = Some(met),
                Err(reason) => {
                    if options.flags == Some(true) {
                        return Err(group.fail(Error::new(rank, "flags", reason)));
                    }
                    // Builds again, with all keys before the kernels, in the memory of the first program.
                    whole.flags = false;
                    drop(built);
                    built = build(&whole);
                    why_not = Some(reason);
                }
            }
        }
        // A rank whose device has no kernel for its part says so now, and not in the middle of a run.
        agree(&*group, &built.as_ref().map(|_| Vec::new()).map_err(Clone::clone))?;
        let built = built?;
        let streams = Streams::new(device, &built.program);
        let streams = streams.map_err(|error| group.fail(Error::of(rank, &error)))?;
        let says = says.into();
        Ok(Self { meeting, why_not, group, whole, gradients, says, choice, built, streams })
    }

    /// Runs the program. If it fails on this rank, all ranks get the error.
    pub(super) fn run(
        &mut self,
        call: Result<Call<'_>>,
        (score, masks): (&ScoreArgs<'_>, &MaskArgs<'_>),
        stream: &Stream,
    ) -> Result<()> {
        let brought = self.brought(score);
        let begun = if brought.is_empty() {
            self.group.begins(&self.says)
        } else {
            self.group.begins(&self.says.iter().cloned().chain(brought).collect())
        };
        let ran = begun.and_then(|()| self.run_begun(call, (score, masks), stream));
        self.group.ends();
        ran
    }

    fn run_begun(
        &mut self,
        call: Result<Call<'_>>,
        (score, masks): (&ScoreArgs<'_>, &MaskArgs<'_>),
        stream: &Stream,
    ) -> Result<()> {
        let checked = self.check_score(score).and_then(|score| self.check_masks(masks).map(|()| score));
        let (score, call) = checked
            .and_then(|score| call.map(|call| (score, call)))
            .map_err(|error| self.group.fail(error))?;
        if let Some(error) = self.group.failure().filter(|_| self.meeting.is_some()) {
            return Err(self.group.fail(error));
        }
        let (streams, meeting) = (self.streams.as_ref(), self.meeting.as_ref());
        let part_numbers = &self.whole.part_numbers[..];
        let (group, masks) = (&*self.group, *masks);
        let executor = Executor { group, stream, streams, score, masks, part_numbers, meeting };
        let Built { program, scratch, workspaces } = &mut self.built;
        let mut buffers = Buffers::new(call, std::mem::take(scratch));
        let ran = executor.run(program, &mut buffers, workspaces);
        *scratch = buffers.into_scratch();
        ran.map_err(|error| self.group.fail(error))?;
        if self.group.space() == MemorySpace::Host && self.group.size() > 1 {
            // Waits for all ranks: no rank uses its output while another one fails.
            self.group.share(&[])?;
        }
        Ok(())
    }

    /// Values of a call that a plan does not know. Ranks with different dropout seeds, slopes, sinks or
    /// scales do not compute one problem. Values in device memory are not read.
    fn brought(&self, score: &ScoreArgs<'_>) -> Vec<(String, String)> {
        let mut says = Vec::new();
        if self.whole.fwd.dropout.p_drop > 0.0 {
            let said = match score.dropout {
                Some(DropoutSeed { seed, offset }) => format!("seed {seed}, offset {offset}"),
                None => "no seed".to_owned(),
            };
            says.push(("dropout".to_owned(), said));
        }
        if !self.whole.fwd.code.numbers().is_empty() {
            says.push(("numbers".to_owned(), format!("{:?}", score.numbers)));
        }
        for (field, slice) in [
            ("alibi_slopes", score.alibi_slopes),
            ("sink", score.sink),
            ("descale_q", score.descale_q),
            ("descale_k", score.descale_k),
            ("descale_v", score.descale_v),
        ] {
            if let Some(bytes) = slice.as_ref().and_then(DevSlice::as_host) {
                says.push((field.to_owned(), numbers(bytes)));
            }
        }
        says
    }

    pub(super) fn explain(&self) -> String {
        let rank = self.whole.rank;
        let keys = match (&self.meeting, &self.why_not) {
            (Some(_), _) => {
                "keys        come while the kernels run, which wait for each piece's flag\n".to_owned()
            }
            (None, Some(reason)) => format!("keys        come before the kernels: {reason}\n"),
            (None, None) => String::new(),
        };
        format!(
            "rank        {rank} of {}\n{}{keys}sends       {} bytes\n{}",
            self.whole.ranks,
            self.choice,
            self.built.program.bytes_sent(rank),
            self.built.program.explain(rank)
        )
    }

    pub(super) fn wrong(&self, field: &str, text: String) -> Error {
        Error::new(self.whole.rank, field, text)
    }

    /// A tensor of the call that is read.
    pub(super) fn read<'a>(&self, buf: Buf, slice: DevSlice<'a>) -> Result<(Buf, Memory<'a>)> {
        self.check(buf, slice.bytes(), slice.space())?;
        Ok((buf, Memory::Read(slice)))
    }

    /// A tensor of the call that is written; of none that is wanted, nothing.
    pub(super) fn write<'a>(
        &self,
        buf: Buf,
        slice: Option<&'a mut DevSliceMut<'_>>,
    ) -> Result<(Buf, Memory<'a>)> {
        let slice = slice.map_or_else(|| DevSliceMut::host::<u8>(&mut []), |slice| slice.skip(0));
        self.check(buf, slice.bytes(), slice.space())?;
        Ok((buf, Memory::Write(slice)))
    }

    fn check(&self, buf: Buf, bytes: u64, space: MemorySpace) -> Result<()> {
        let (name, wanted) = self.own(buf);
        if bytes < wanted {
            return Err(self.wrong(name, format!("{name} has {bytes} bytes, but its rows here are {wanted}")));
        }
        if wanted > 0 && space != self.group.space() {
            let text =
                format!("{name}, of {bytes} bytes, is in {space:?} memory, not in {:?}", self.group.space());
            return Err(self.wrong(name, text));
        }
        Ok(())
    }

    /// The name of a tensor of the call, and the bytes that this rank has of it.
    fn own(&self, buf: Buf) -> (&'static str, u64) {
        let whole = &self.whole;
        let own = |kind, dtype| whole.tensor_of(kind, whole.rank, dtype).bytes();
        let input = |kind| own(kind, whole.dtype(kind));
        let grad = |kind| self.gradients.map_or(0, |gradients| own(kind, gradients.dtype));
        match buf {
            Buf::Q => ("q", input(Kind::Q)),
            Buf::K => ("k", input(Kind::K)),
            Buf::V => ("v", input(Kind::V)),
            Buf::O => ("o", input(Kind::O)),
            Buf::Lse => ("lse", whole.own_lse().bytes()),
            Buf::Dout => ("dout", input(Kind::O)),
            Buf::Dq => ("dq", grad(Kind::Q)),
            Buf::Dk => ("dk", grad(Kind::K)),
            Buf::Dv => ("dv", grad(Kind::V)),
            Buf::Dsink => ("dsink", 4 * u64::from(whole.fwd.dims.num_heads_q)),
            Buf::Dcaptured(at) => ("dcaptured", self.captured_bytes(at)),
            Buf::Scratch(_) => ("scratch", 0),
        }
    }

    /// Bytes of the gradient of a captured tensor.
    fn captured_bytes(&self, at: usize) -> u64 {
        let (code, wanted) = (&self.whole.fwd.code, self.whole.dcaptured.get(at));
        wanted.map_or(0, |wanted| {
            code.tensor(&wanted.name).map_or(0, CapturedTensor::num_elems) * wanted.dtype.size_bytes()
        })
    }

    /// Checks that every mask as data of the problem is there, whole, and no other.
    fn check_masks(&self, given: &MaskArgs<'_>) -> Result<()> {
        if given.built.is_some() {
            let text =
                format!("masks: a mask object is for one device alone, not for {} ranks", self.whole.ranks);
            return Err(self.wrong("masks", text));
        }
        let fwd = &self.whole.fwd;
        let rows = self.whole.q.partition.rows();
        let totals = Totals { total_q: fwd.layout.q.eq(&QLayout::Packed).then_some(rows), ..Totals::NONE };
        let lists = fwd.masks.block_lists;
        let of = |list: Option<BlockList>| {
            lists.zip(list).map(|(lists, list)| {
                [(list.counts, 1), (list.indices, list.max_blocks)]
                    .map(|(strides, most)| (strides, fwd.shape_block_lists(&lists, most)))
            })
        };
        let [num, index] = of(lists.and_then(|lists| lists.partial)).map_or([None; 2], |both| both.map(Some));
        let [full_num, full_index] =
            of(lists.and_then(|lists| lists.full)).map_or([None; 2], |both| both.map(Some));
        let intervals = fwd.masks.intervals.map(|it| (it.strides, fwd.shape_intervals(&it, totals)));
        let bits = fwd.masks.bits.map(|it| (it.strides, fwd.shape_mask_bits(&it, totals)));
        for (name, slice, wanted) in [
            ("intervals", given.intervals, intervals),
            ("mask_bits", given.bits, bits),
            ("kv_num_blocks", given.kv_num_blocks, num),
            ("kv_indices", given.kv_indices, index),
            ("full_kv_num_blocks", given.full_kv_num_blocks, full_num),
            ("full_kv_indices", given.full_kv_indices, full_index),
        ] {
            let wanted = wanted.map(|(strides, shape)| 4 * strides.extent(shape).unwrap_or(u64::MAX / 4));
            self.check_whole(name, slice.as_ref(), wanted)?;
        }
        Ok(())
    }

    /// Checks an operand that every rank has whole.
    fn check_whole(&self, name: &str, slice: Option<&DevSlice<'_>>, wanted: Option<u64>) -> Result<()> {
        match (slice, wanted) {
            (Some(slice), None) => {
                let text = format!("{name}: {} bytes given, but the problem has none", slice.bytes());
                Err(self.wrong(name, text))
            }
            (None, Some(wanted)) => {
                Err(self.wrong(name, format!("{name} is missing: {wanted} bytes are wanted, of the whole")))
            }
            (Some(slice), Some(wanted)) if slice.bytes() < wanted => {
                let text = format!("{name} has {} bytes, but the whole's are {wanted}", slice.bytes());
                Err(self.wrong(name, text))
            }
            (Some(slice), Some(wanted)) if wanted > 0 && slice.space() != self.group.space() => {
                let text = format!(
                    "{name}, of {wanted} bytes, is in {:?} memory, not in {:?}",
                    slice.space(),
                    self.group.space()
                );
                Err(self.wrong(name, text))
            }
            _ => Ok(()),
        }
    }

    /// Checks the score's operands, and gives them in the form that is computed.
    fn check_score<'a>(&self, given: &ScoreArgs<'a>) -> Result<ScoreArgs<'a>> {
        let said = |error: fmha::ProblemError| Error::of(self.whole.rank, &error.into());
        let code = &self.whole.fwd.code;
        let score = match self.whole.slopes {
            Some(at) => built_in::with_slopes(given, at, code.captured.len()).map_err(said)?,
            None => *given,
        };
        self.check_operands(&score)?;
        let (numbers, wanted) = (score.numbers, code.numbers());
        if numbers.len() != wanted.len() {
            let text =
                format!("numbers: {} given, but the functions capture {}", numbers.len(), wanted.len());
            return Err(self.wrong("numbers", text));
        }
        for (number, (name, kind)) in numbers.iter().zip(wanted) {
            if number.value_type() != kind {
                let text = format!("numbers: {name} is {number:?}, but the function reads {kind}");
                return Err(self.wrong("numbers", text));
            }
        }
        if score.captured.len() != code.captured.len() {
            let (given, wanted) = (score.captured.len(), code.captured.len());
            let text = format!("captured: {given} tensors given, but {wanted} wanted");
            return Err(self.wrong("captured", text));
        }
        for (slice, tensor) in score.captured.iter().zip(&code.captured) {
            let size = code.stored(&tensor.name).map_or(0, fmha::expr::Stored::size_bytes);
            self.check_whole("captured", Some(slice), Some(tensor.extent_elems().saturating_mul(size)))
                .map_err(|error| {
                    Error::new(error.rank, "captured", format!("{}: {}", tensor.name, error.text))
                })?;
        }
        Ok(score)
    }

    fn check_operands(&self, score: &ScoreArgs<'_>) -> Result<()> {
        if let Some(given) = score.block_scales().into_iter().flatten().next() {
            let bytes = given.bytes();
            return Err(
                self.wrong("block_scales", format!("block_scales: {bytes} bytes given, but ranks take none"))
            );
        }
        let sinks = 4 * u64::from(self.whole.fwd.dims.num_heads_q);
        let given = score.sink.as_ref().map_or(0, DevSlice::bytes);
        if self.whole.fwd.score.sink && given < sinks {
            return Err(self.wrong("sink", format!("sink has {given} bytes, but {sinks} are read")));
        }
        Ok(())
    }
}

/// Plan of one rank, before the ranks have compared their problems.
struct Chosen {
    whole: Whole,
    choice: Choice,
    /// Reason why the keys of a gather come before the kernels.
    why_not: Option<String>,
}

impl Chosen {
    fn new(
        problem: &Problem,
        group: &dyn Group,
        options: &Options,
        gradients: Option<Gradients>,
    ) -> Result<Self> {
        let (rank, backward) = (group.rank(), gradients.is_some());
        let whole = Whole::new(problem, rank, group.size())?.on_hosts(options.links.ranks_per_host);
        let whole = Whole { most_rows: group.most_rows(), ..whole };
        let why_not = may_wait(&whole, backward, options).and_then(|()| match group.space() {
            MemorySpace::Host => Err("host memory is read at once".to_owned()),
            _ => Ok(()),
        });
        let whole = Whole { flags: why_not.is_ok(), ..whole };
        let whole = Whole { head_groups: head_groups(&whole, backward, options), ..whole };
        let choice = choose_for(&whole, backward, options)?;
        let why_not = why_not.err().filter(|_| choice.scheme == Scheme::Gather);
        if let (Some(true), Some(reason)) = (options.flags, &why_not) {
            return Err(Error::new(rank, "flags", reason.clone()));
        }
        Ok(Self { whole, choice, why_not })
    }

    /// Texts that must be equal on all ranks, by field.
    fn says(
        &self,
        problem: &Problem,
        options: &Options,
        gradients: Option<Gradients>,
    ) -> Vec<(String, String)> {
        let mut says = vec![("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
        says.extend(problem.description());
        let (whole, kernels) = (&self.whole, &options.kernels);
        let more = [
            ("gradients", format!("{gradients:?}")),
            ("scheme", self.choice.scheme.to_string()),
            ("flags", format!("{}, {:?}", whole.flags, options.flags)),
            ("head_groups", whole.head_groups.to_string()),
            ("ranks_per_host", format!("{:?}", options.links.ranks_per_host)),
            // Kernels of other ranks compute this rank's rows in Ulysses, so these must be equal.
            ("accuracy", kernels.accuracy.to_string()),
            ("batch_invariant", kernels.batch_invariant.to_string()),
            ("row_invariant", kernels.row_invariant.to_string()),
            ("deterministic", kernels.deterministic.to_string()),
        ];
        // Fields chosen from values that other ranks still have to send: not compared yet.
        let of_choice = |field: &str| ["scheme", "flags", "head_groups"].contains(&field);
        let more = more.map(|(field, text)| {
            (field, if problem.is_open() && of_choice(field) { AS_OTHERS.to_owned() } else { text })
        });
        says.extend(more.map(|(field, text)| (field.to_owned(), text)));
        says
    }
}

/// Text of f32 numbers that must be equal on every rank: the first of them, and a hash of all (FNV-1a), which
/// does not depend on the machine.
fn numbers(bytes: &[u8]) -> String {
    let numbers =
        bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    let (count, first): (_, Vec<_>) = (bytes.len() / 4, numbers.take(4).collect());
    let hash = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    format!("{first:?}, {count} numbers of hash {hash:016x}")
}
