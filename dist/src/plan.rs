//! From a problem to a plan that runs: all ranks agree, a scheme is chosen, its steps are planned.

use std::fmt;
use std::sync::Arc;

use fmha::{
    BwdArgs, DType, DevBuffer, DevSlice, DevSliceMut, Device, DropoutSeed, FwdArgs, MAX_ARRIVALS,
    PlanOptions, ScoreArgs, Stream,
};

use crate::agree::agree;
use crate::arrivals::Meeting;
use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::model::{Estimate, Links, estimate};
use crate::problem::{Gradients, Kind, Problem, Whole};
use crate::program::{Buf, Buffers, Executor, Memory, Program, Scratch, Streams};
use crate::scheme::{SCHEMES, Scheme, most_groups};

/// What the caller asks of a plan over ranks. All ranks ask the same.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// This scheme or a refusal; `None`: the planner's.
    pub scheme: Option<Scheme>,
    /// What is asked of each kernel.
    pub kernels: PlanOptions,
    /// What the planner compares schemes by.
    pub links: Links,
    /// Whether `gather`'s keys and values come while its kernels run, which wait for each piece's flag: ranks of one host, a
    /// process each, whose devices share memory, rows that are not packed, a kernel that waits. `None`: where that can be and
    /// the model has it faster; `Some(true)`: a refusal where it cannot; `Some(false)`: all of them come first.
    pub flags: Option<bool>,
}

impl Options {
    /// This scheme or a refusal.
    #[must_use]
    pub fn scheme(mut self, scheme: impl Into<Option<Scheme>>) -> Self {
        self.scheme = scheme.into();
        self
    }

    /// What is asked of each kernel.
    #[must_use]
    pub fn kernels(mut self, kernels: PlanOptions) -> Self {
        self.kernels = kernels;
        self
    }

    /// Whether `gather`'s keys and values come while its kernels run.
    #[must_use]
    pub fn flags(mut self, flags: impl Into<Option<bool>>) -> Self {
        self.flags = flags.into();
        self
    }

    /// What the planner compares schemes by.
    #[must_use]
    pub fn links(mut self, links: Links) -> Self {
        self.links = links;
        self
    }
}

/// What became of each scheme.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Choice {
    /// The one that serves.
    pub scheme: Scheme,
    /// Why.
    pub reason: String,
    /// What each would cost, or why it does not take the problem.
    pub considered: Vec<(Scheme, Result<Estimate, String>)>,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "scheme      {}: {}", self.scheme, self.reason)?;
        for (scheme, outcome) in &self.considered {
            match outcome {
                Ok(estimate) => writeln!(f, "  {:<9} {estimate}", scheme.name())?,
                Err(refusal) => writeln!(f, "  {:<9} {refusal}", scheme.name())?,
            }
        }
        Ok(())
    }
}

/// Which scheme a group of `ranks` would take for a problem, and what each would cost; nothing is planned or sent.
///
/// # Errors
/// What is wrong with the problem; of no scheme that takes it, each one's refusal.
pub fn choose(problem: &Problem, ranks: u32, backward: bool, options: &Options) -> Result<Choice> {
    let whole = Whole::new(problem, 0, ranks)?.on_hosts(options.links.ranks_per_host);
    let whole = Whole { flags: may_wait(&whole, backward, options).is_ok(), ..whole };
    let whole = Whole { head_groups: head_groups(&whole, backward, options), ..whole };
    choose_for(&whole, backward, options)
}

/// Whether gathered keys should come while kernels wait for them, as far as problem and model say: no device has been asked.
///
/// # Errors
/// Why not.
fn may_wait(whole: &Whole, backward: bool, options: &Options) -> Result<(), String> {
    if options.flags == Some(false) {
        return Err("flags false was asked for".to_owned());
    }
    if whole.ranks == 1 {
        return Err("1 rank has all keys".to_owned());
    }
    if whole.ranks_per_host < whole.ranks {
        return Err(format!("{} ranks are on hosts of {}", whole.ranks, whole.ranks_per_host));
    }
    if whole.k.cu_seqlens.is_some() {
        return Err(format!("packed rows of {} sequences are a launch each", whole.k.batch));
    }
    let runs: usize = (0..whole.ranks).map(|rank| whole.k.pieces(rank).len()).sum();
    if runs > MAX_ARRIVALS as usize {
        return Err(format!("{runs} runs of keys are more than {MAX_ARRIVALS}"));
    }
    if options.flags.is_none() {
        let of = |flags| {
            estimate(Scheme::Gather, &Whole { flags, ..whole.clone() }, backward, &options.links).seconds
                * 1e3
        };
        let [first, beside] = [false, true].map(of);
        if beside >= first {
            return Err(format!("{first:.3} ms, and {beside:.3} with kernels that wait, by the model"));
        }
    }
    Ok(())
}

/// In how many groups heads should travel by Ulysses: as many as can be, or one, whichever the model has faster. Backward takes one.
fn head_groups(whole: &Whole, backward: bool, options: &Options) -> u32 {
    let seconds = |head_groups| {
        let whole = Whole { head_groups, ..whole.clone() };
        estimate(Scheme::Ulysses, &whole, backward, &options.links).seconds
    };
    let most = if backward { 1 } else { most_groups(whole) };
    if most > 1 && seconds(most) < seconds(1) { most } else { 1 }
}

fn choose_for(whole: &Whole, backward: bool, options: &Options) -> Result<Choice> {
    let mut considered = Vec::new();
    for scheme in SCHEMES {
        considered.push((
            scheme,
            match scheme.takes(whole, backward, &options.kernels) {
                Ok(()) => Ok(estimate(scheme, whole, backward, &options.links)),
                Err(error) => Err(error.text),
            },
        ));
    }
    let found =
        |scheme: Scheme| considered.iter().find(|(other, _)| *other == scheme).map(|(_, outcome)| outcome);
    if let Some(scheme) = options.scheme {
        return match found(scheme) {
            Some(Err(refusal)) => Err(Error::new(whole.rank, "scheme", refusal.clone())),
            _ => Ok(Choice { scheme, reason: "asked for".to_owned(), considered }),
        };
    }
    let (memory, room) = (|estimate: &Estimate| estimate.memory, options.links.memory);
    let mut best: Option<(Scheme, Estimate)> = None;
    for (scheme, outcome) in &considered {
        let Ok(estimate) = outcome else { continue };
        let better = best.as_ref().is_none_or(|(_, best)| {
            let fits = [memory(estimate) <= room, memory(best) <= room];
            fits[0] && !fits[1] || fits[0] == fits[1] && estimate.seconds < best.seconds
        });
        if better {
            best = Some((*scheme, *estimate));
        }
    }
    let Some((scheme, estimate)) = best else {
        let refusals: Vec<&str> =
            considered.iter().filter_map(|(_, outcome)| outcome.as_ref().err().map(String::as_str)).collect();
        return Err(Error::new(
            whole.rank,
            "scheme",
            format!("no scheme takes this: {}", refusals.join("; ")),
        ));
    };
    let takers = considered.iter().filter(|(_, outcome)| outcome.is_ok()).count();
    let reason = match takers {
        1 => "the only one that takes the problem".to_owned(),
        _ if memory(&estimate) > room => format!("none fits {room:.3e} bytes, and it is the fastest"),
        _ => format!("the fastest of {takers} that fit {room:.3e} bytes"),
    };
    Ok(Choice { scheme, reason, considered })
}

/// A program with its buffers, on one rank.
struct Planned {
    /// Where keys come that kernels wait for; dropped before the buffers.
    meeting: Option<Meeting>,
    /// Why gathered keys come before the kernels.
    why_not: Option<String>,
    group: Arc<dyn Group>,
    device: Device,
    whole: Whole,
    /// What its ranks have agreed on, by field.
    says: Arc<[(String, String)]>,
    choice: Choice,
    program: Program,
    streams: Option<Streams>,
    scratch: Vec<DevBuffer>,
    /// Of each stream that attention is launched on.
    workspaces: [Option<DevBuffer>; 2],
}

/// A tensor of the call that a rank brings.
struct Operand {
    buf: Buf,
    name: &'static str,
    bytes: u64,
}

impl Planned {
    fn new(
        problem: &Problem,
        group: Arc<dyn Group>,
        device: &Device,
        options: &Options,
        gradients: Option<Gradients>,
    ) -> Result<Self> {
        let (rank, ranks) = (group.rank(), group.size());
        let backward = gradients.is_some();
        let chosen = Whole::new(problem, rank, ranks).and_then(|whole| {
            let whole =
                Whole { most_rows: group.most_rows(), ..whole.on_hosts(options.links.ranks_per_host) };
            let why_not = may_wait(&whole, backward, options).and_then(|()| match group.space() {
                fmha::MemorySpace::Host => Err("host memory is read at once".to_owned()),
                _ => Ok(()),
            });
            let whole = Whole { flags: why_not.is_ok(), ..whole };
            let whole = Whole { head_groups: head_groups(&whole, backward, options), ..whole };
            let choice = choose_for(&whole, backward, options)?;
            let why_not = why_not.err().filter(|_| choice.scheme == Scheme::Gather);
            if let (Some(true), Some(reason)) = (options.flags, &why_not) {
                return Err(Error::new(rank, "flags", reason.clone()));
            }
            Ok((whole, choice, why_not))
        });
        let says = chosen.as_ref().map_err(Clone::clone).map(|(whole, choice, _)| {
            let mut fields = vec![("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
            fields.extend(problem.description());
            fields.extend([
                ("gradients".to_owned(), format!("{gradients:?}")),
                ("scheme".to_owned(), choice.scheme.to_string()),
                ("flags".to_owned(), format!("{}, {:?}", whole.flags, options.flags)),
                ("head_groups".to_owned(), whole.head_groups.to_string()),
                ("ranks_per_host".to_owned(), format!("{:?}", options.links.ranks_per_host)),
                ("batch_invariant".to_owned(), options.kernels.batch_invariant.to_string()),
                ("deterministic".to_owned(), options.kernels.deterministic.to_string()),
            ]);
            fields
        });
        agree(&*group, &says)?;
        let ((mut whole, choice, mut why_not), says) = (chosen?, says?);
        let build =
            |whole: &Whole| Self::build(whole, choice.scheme, &*group, device, &options.kernels, gradients);
        let mut built = build(&whole);
        let mut meeting = None;
        if whole.flags && choice.scheme == Scheme::Gather {
            let mine = match &built {
                Ok((Program { coming: Some(coming), .. }, scratch, _)) => {
                    let buffer = |buf| match buf {
                        Buf::Scratch(number) => scratch.get(number).ok_or("no buffer for keys to come to"),
                        _ => Err("keys come to a buffer of the call"),
                    };
                    let all: Result<Vec<_>, _> = coming.all_buffers().into_iter().map(buffer).collect();
                    all.map(|all| (coming.clone(), all)).map_err(str::to_owned)
                }
                Ok(_) => Err("its program waits for no keys".to_owned()),
                Err(error) => Err(error.text.clone()),
            };
            match Meeting::new(mine, &group, device)? {
                Ok(met) => meeting = Some(met),
                Err(reason) => {
                    if options.flags == Some(true) {
                        return Err(group.fail(Error::new(rank, "flags", reason)));
                    }
                    // With all of the keys before the kernels, and in their memory what was for the others'.
                    whole.flags = false;
                    drop(built);
                    built = build(&whole);
                    why_not = Some(reason);
                }
            }
        }
        // A rank whose device has no kernel for its part says so now, and not in the middle of a run.
        agree(&*group, &built.as_ref().map(|_| Vec::new()).map_err(Clone::clone))?;
        let (program, scratch, workspaces) = built?;
        let streams =
            Streams::new(device, &program, ranks).map_err(|error| group.fail(Error::of(rank, &error)))?;
        let (device, says) = (device.clone(), says.into());
        Ok(Self {
            meeting,
            why_not,
            group,
            device,
            whole,
            says,
            choice,
            program,
            streams,
            scratch,
            workspaces,
        })
    }

    #[allow(clippy::type_complexity)]
    fn build(
        whole: &Whole,
        scheme: Scheme,
        group: &dyn Group,
        device: &Device,
        options: &PlanOptions,
        gradients: Option<Gradients>,
    ) -> Result<(Program, Vec<DevBuffer>, [Option<DevBuffer>; 2])> {
        let rank = whole.rank;
        let space = device.memory().space();
        if space != group.space() {
            let text = format!(
                "device computes in {space:?} memory, but the group moves {:?} memory",
                group.space()
            );
            return Err(Error::new(rank, "device", text));
        }
        let program = match gradients {
            None => scheme.forward(whole, device, options),
            Some(gradients) => scheme.backward(whole, gradients, device, options),
        }?;
        let (rows, most) = (program.most_rows(), group.most_rows());
        if rows > most {
            let text = format!(
                "{scheme}: an exchange of {rows} rows is more than the {most} that are sent one by one"
            );
            return Err(Error::new(rank, "scheme", text));
        }
        let alloc = |bytes: u64| {
            // What other processes map are whole pages of 2 MiB, which no other buffer shares.
            let page = if whole.flags && device.has_clock() { 2 << 20 } else { 1 };
            let mut buffer = device.memory().alloc(bytes.max(1).next_multiple_of(page))?;
            if device.memory().checks_bounds() {
                // Rows that no query sees do not come, and a block of keys may have some: an emulated device wants them written.
                device.memory().upload(&vec![0; buffer.bytes() as usize], &mut buffer)?;
            }
            Ok(buffer)
        };
        let alloc = |bytes| alloc(bytes).map_err(|error| Error::of(rank, &error));
        let mut scratch: Vec<DevBuffer> = Vec::new();
        for &Scratch { bytes, within } in &program.scratch {
            let buffer = match within.and_then(|(of, offset)| Some((scratch.get(of)?, offset))) {
                None => alloc(bytes)?,
                Some((of, offset)) => {
                    let place = of.as_ptr().wrapping_add(offset as usize);
                    // SAFETY: a stretch of a buffer that is dropped with it, of which each step names the whole or stretches.
                    unsafe { DevBuffer::from_raw(space, place, bytes, Box::new(|_| ())) }
                }
            };
            scratch.push(buffer);
        }
        let workspace =
            |wanted: bool| (wanted && program.workspace > 0).then(|| alloc(program.workspace)).transpose();
        let workspaces = [workspace(true)?, workspace(program.takes_turns && device.has_streams())?];
        Ok((program, scratch, workspaces))
    }

    fn operand(
        &self,
        builder: &Builder<'_>,
        buf: Buf,
        name: &'static str,
        kind: Kind,
        dtype: DType,
    ) -> Operand {
        Operand { buf, name, bytes: builder.own_as(buf, kind, dtype).tensor.bytes() }
    }

    /// What forward and backward both read.
    fn inputs(&self, options: &PlanOptions) -> (Vec<Operand>, Operand, Operand) {
        let builder = Builder::new(&self.whole, &self.device, options);
        let inputs = [(Buf::Q, "q", Kind::Q), (Buf::K, "k", Kind::K), (Buf::V, "v", Kind::V)]
            .map(|(buf, name, kind)| self.operand(&builder, buf, name, kind, builder.dtype(kind)));
        let o = self.operand(&builder, Buf::O, "o", Kind::O, builder.dtype(Kind::O));
        let lse = Operand { buf: Buf::Lse, name: "lse", bytes: builder.own_lse().rows.bytes() };
        (inputs.into(), o, lse)
    }

    /// Runs the program; what goes wrong on this rank, all ranks hear of.
    fn run<'a>(
        &mut self,
        call: Result<Vec<(Buf, Memory<'a>)>>,
        score: ScoreArgs<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let brought = self.brought(score);
        if brought.is_empty() {
            self.group.begins(&self.says)?;
        } else {
            self.group.begins(&self.says.iter().cloned().chain(brought).collect())?;
        }
        let call = call.map_err(|error| self.group.fail(error))?;
        if let Some(error) = self.group.failure().filter(|_| self.meeting.is_some()) {
            return Err(self.group.fail(error));
        }
        let (streams, meeting) = (self.streams.as_ref(), self.meeting.as_ref());
        let executor = Executor { group: &*self.group, stream, streams, score, meeting };
        let mut buffers = Buffers::new(call, std::mem::take(&mut self.scratch));
        let ran = executor.run(&self.program, &mut buffers, &mut self.workspaces);
        self.scratch = buffers.into_scratch();
        ran.map_err(|error| self.group.fail(error))?;
        if self.group.space() == fmha::MemorySpace::Host && self.group.size() > 1 {
            // No rank takes its output for a result while another one fails.
            self.group.share(&[])?;
        }
        Ok(())
    }

    /// What a plan does not know: ranks that drop by other seeds do not compute one problem, nor do those with other slopes, sinks
    /// or scales. What lies in a device's memory nobody here reads.
    fn brought(&self, score: ScoreArgs<'_>) -> Vec<(String, String)> {
        let mut says = Vec::new();
        if self.whole.fwd.dropout.p_drop > 0.0 {
            let DropoutSeed { seed, offset } = score.dropout;
            says.push(("dropout".to_owned(), format!("seed {seed}, offset {offset}")));
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

    fn explain(&self) -> String {
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
            self.program.bytes_sent(rank),
            self.program.explain(rank)
        )
    }

    fn check(&self, operand: &Operand, bytes: u64, space: fmha::MemorySpace) -> Result<()> {
        let Operand { name, bytes: wanted, .. } = *operand;
        let rank = self.whole.rank;
        if bytes < wanted {
            return Err(Error::new(
                rank,
                name,
                format!("{name} has {bytes} bytes, but its rows here are {wanted}"),
            ));
        }
        if wanted > 0 && space != self.group.space() {
            let text =
                format!("{name}, of {bytes} bytes, is in {space:?} memory, not in {:?}", self.group.space());
            return Err(Error::new(rank, name, text));
        }
        Ok(())
    }

    fn read<'a>(&self, operand: &Operand, slice: DevSlice<'a>) -> Result<(Buf, Memory<'a>)> {
        self.check(operand, slice.bytes(), slice.space())?;
        Ok((operand.buf, Memory::Read(slice)))
    }

    fn write<'a>(&self, operand: &Operand, slice: DevSliceMut<'a>) -> Result<(Buf, Memory<'a>)> {
        self.check(operand, slice.bytes(), slice.space())?;
        Ok((operand.buf, Memory::Write(slice)))
    }

    fn check_score(&self, score: &ScoreArgs<'_>) -> Result<()> {
        let sinks = 4 * u64::from(self.whole.fwd.dims.num_heads_q);
        let given = score.sink.as_ref().map_or(0, DevSlice::bytes);
        if self.whole.fwd.score.sink && given < sinks {
            return Err(Error::new(
                self.whole.rank,
                "sink",
                format!("sink has {given} bytes, but {sinks} are read"),
            ));
        }
        Ok(())
    }
}

/// Forward over ranks, planned once and run many times; every rank runs it at the same place of its program.
pub struct FwdPlan {
    planned: Planned,
    inputs: (Vec<Operand>, Operand, Operand),
}

impl FwdPlan {
    /// Plans this rank's part. All ranks call it together, with the same problem and options.
    ///
    /// # Errors
    /// On every rank the same: the rank that is wrong, or says something else than the others, and the field.
    pub fn new(problem: &Problem, group: Arc<dyn Group>, device: &Device, options: &Options) -> Result<Self> {
        let planned = Planned::new(problem, group, device, options, None)?;
        let inputs = planned.inputs(&options.kernels);
        Ok(Self { planned, inputs })
    }

    /// What was chosen, and why.
    #[must_use]
    pub fn choice(&self) -> &Choice {
        &self.planned.choice
    }

    /// The choice and every step of this rank.
    #[must_use]
    pub fn explain(&self) -> String {
        self.planned.explain()
    }

    /// O, and LSE if the problem writes it, of this rank's queries from this rank's Q, K and V. `args` are a rank's own
    /// tensors, as [`Problem`] has them; lengths and workspace play no part.
    ///
    /// # Errors
    /// The rank and the field, on every rank. No output is then a result.
    pub fn run(&mut self, args: &mut FwdArgs<'_>, stream: &Stream) -> Result<()> {
        let score = args.score;
        let planned = &self.planned;
        let (inputs, o, lse) = &self.inputs;
        let call = planned.check_score(&score).and_then(|()| {
            let mut call = vec![planned.read(&inputs[0], args.q)?];
            match &args.k {
                fmha::CacheSlice::Read(k) => call.push(planned.read(&inputs[1], *k)?),
                _ => {
                    return Err(Error::new(
                        planned.whole.rank,
                        "k",
                        "k is appended to, in 1 part of several",
                    ));
                }
            }
            match &args.v {
                fmha::CacheSlice::Read(v) => call.push(planned.read(&inputs[2], *v)?),
                _ => {
                    return Err(Error::new(
                        planned.whole.rank,
                        "v",
                        "v is appended to, in 1 part of several",
                    ));
                }
            }
            call.push(planned.write(o, args.o.skip(0))?);
            if planned.whole.fwd.write_lse {
                let given =
                    args.lse.as_mut().map_or_else(|| DevSliceMut::host::<u8>(&mut []), |lse| lse.skip(0));
                call.push(planned.write(lse, given)?);
            }
            Ok(call)
        });
        self.planned.run(call, score, stream)
    }
}

/// Backward over ranks.
pub struct BwdPlan {
    planned: Planned,
    inputs: (Vec<Operand>, Operand, Operand),
    gradients: Gradients,
}

impl BwdPlan {
    /// As [`FwdPlan::new`]; gradients of type `dtype_grad`, and those of the sinks if they are wanted. Where dK and dV are
    /// summed over ranks they are so in f32, and rounded once.
    ///
    /// # Errors
    /// As [`FwdPlan::new`].
    pub fn new(
        problem: &Problem,
        (dtype_grad, write_dsink): (DType, bool),
        group: Arc<dyn Group>,
        device: &Device,
        options: &Options,
    ) -> Result<Self> {
        let gradients = Gradients { dtype: dtype_grad, dsink: write_dsink };
        let planned = Planned::new(problem, group, device, options, Some(gradients))?;
        let inputs = planned.inputs(&options.kernels);
        Ok(Self { planned, inputs, gradients })
    }

    /// What was chosen, and why.
    #[must_use]
    pub fn choice(&self) -> &Choice {
        &self.planned.choice
    }

    /// The choice and every step of this rank.
    #[must_use]
    pub fn explain(&self) -> String {
        self.planned.explain()
    }

    /// dQ, dK and dV of this rank's rows, and the sinks' whole gradient, from this rank's Q, K, V, O, LSE and dO.
    ///
    /// # Errors
    /// The rank and the field, on every rank. No output is then a result.
    pub fn run(&mut self, args: &mut BwdArgs<'_>, stream: &Stream) -> Result<()> {
        let score = args.score;
        let planned = &self.planned;
        let builder_options = PlanOptions::default();
        let builder = Builder::new(&planned.whole, &planned.device, &builder_options);
        let grad = |buf, name, kind| planned.operand(&builder, buf, name, kind, self.gradients.dtype);
        let (inputs, o, lse) = &self.inputs;
        let dout = planned.operand(&builder, Buf::Dout, "dout", Kind::O, builder.dtype(Kind::O));
        let dsink_bytes = 4 * u64::from(planned.whole.fwd.dims.num_heads_q);
        let call = planned.check_score(&score).and_then(|()| {
            let mut call = vec![
                planned.read(&inputs[0], args.q)?,
                planned.read(&inputs[1], args.k)?,
                planned.read(&inputs[2], args.v)?,
                planned.read(o, args.o)?,
                planned.read(lse, args.lse)?,
                planned.read(&dout, args.dout)?,
                planned.write(&grad(Buf::Dq, "dq", Kind::Q), args.dq.skip(0))?,
                planned.write(&grad(Buf::Dk, "dk", Kind::K), args.dk.skip(0))?,
                planned.write(&grad(Buf::Dv, "dv", Kind::V), args.dv.skip(0))?,
            ];
            for (field, given) in [("dlse", args.dlse.is_some()), ("dbias", args.dbias.is_some())] {
                if given {
                    let text = format!("{field} is given, and is taken over 1 rank alone");
                    return Err(Error::new(planned.whole.rank, field, text));
                }
            }
            if self.gradients.dsink {
                let dsink = Operand { buf: Buf::Dsink, name: "dsink", bytes: dsink_bytes };
                let given = args
                    .dsink
                    .as_mut()
                    .map_or_else(|| DevSliceMut::host::<u8>(&mut []), |dsink| dsink.skip(0));
                call.push(planned.write(&dsink, given)?);
            }
            Ok(call)
        });
        self.planned.run(call, score, stream)
    }
}

/// f32 numbers that every rank has alike: the first of them to be read, and all by their hash, FNV-1a, which is that of any machine.
fn numbers(bytes: &[u8]) -> String {
    let numbers =
        bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    let (count, first): (_, Vec<_>) = (bytes.len() / 4, numbers.take(4).collect());
    let hash = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    format!("{first:?}, {count} numbers of hash {hash:016x}")
}

#[cfg(test)]
mod tests {
    use fmha::{Dims, FwdProblem, MaskSpec};

    use super::*;
    use crate::partition::Partition;
    use crate::scheme::last_home;

    fn zig_zag(tokens: u32, ranks: u32) -> Whole {
        let dims = Dims {
            batch: 1,
            seqlen_q: tokens,
            seqlen_k: tokens,
            num_heads_q: 32,
            num_heads_kv: 8,
            head_dim_qk: 128,
            head_dim_v: 128,
        };
        let whole = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        Whole::new(&Problem::new(whole, Partition::zig_zag(tokens, ranks)), 0, ranks).unwrap()
    }

    fn waits(tokens: u32, options: &Options) -> Result<(), String> {
        may_wait(&zig_zag(tokens, 2).on_hosts(options.links.ranks_per_host), false, options)
    }

    /// Of two ranks the second one's shorter queries are the second of four runs: they see the first run, which is the other
    /// rank's, and its own. Of four, those of the last rank see the first three.
    #[test]
    fn what_goes_home_behind_the_last_kernel_is_what_the_shortest_queries_see_of_others() {
        for (ranks, part) in [(2, 0.25), (4, 0.375)] {
            assert!((last_home(&zig_zag(8192, ranks)) - part).abs() < 1e-9, "{ranks}");
        }
        let seconds = |flags| {
            let whole = Whole { flags, ..zig_zag(8192, 4) };
            estimate(Scheme::Gather, &whole, true, &Links::default())
        };
        let (first, beside) = (seconds(false), seconds(true));
        // Of 3 / 4 of dK and dV, half is beside the other kernels.
        let hidden = first.transfer - (beside.seconds - beside.compute);
        let home = 8192.0 * 8.0 * 256.0 * 4.0 * 0.375 / Links::default().bytes_per_second;
        assert!(hidden > home, "{first}, {beside}");
    }

    #[test]
    fn kernels_wait_where_the_keys_way_is_longer_than_waiting_costs_unless_told_otherwise() {
        let options = Options::default();
        assert_eq!(waits(8192, &options), Ok(()));
        let reason = waits(524_288, &options).unwrap_err();
        assert!(reason.ends_with("with kernels that wait, by the model"), "{reason}");
        assert_eq!(waits(524_288, &options.clone().flags(true)), Ok(()));
        assert_eq!(waits(8192, &options.clone().flags(false)).unwrap_err(), "flags false was asked for");
        let reason = may_wait(&zig_zag(8192, 64), false, &options).unwrap_err();
        assert_eq!(reason, "128 runs of keys are more than 64");
        let links: Links = "ranks_per_host = 1".parse().unwrap();
        let reason = waits(8192, &options.links(links)).unwrap_err();
        assert_eq!(reason, "2 ranks are on hosts of 1");
    }

    /// Four H200, of which one reads 1048576 keys in 0.931 ms, and an exchange of nothing takes 0.016.
    #[test]
    fn a_step_of_decoding_lasts_as_long_as_the_host_queues_its_message() {
        let dims = Dims { seqlen_q: 1, seqlen_k: 1 << 20, ..zig_zag(1 << 20, 4).fwd.dims };
        let whole = FwdProblem::batch(DType::Bf16, dims).write_lse(true);
        let problem =
            Problem::new(whole, Partition::replicated(1, 4)).keys(Partition::contiguous(1 << 20, 4));
        let whole = Whole::new(&problem, 0, 4).unwrap();
        let seconds = |queueing: &str| {
            // Of a device that has rested.
            let flops = 32.0 * 512.0 * f64::from(1 << 20) / (0.931e-3 * 1.2);
            let links = format!("latency = 16e-6\nfwd_flops = {flops}\n{queueing}").parse().unwrap();
            estimate(Scheme::Decode, &whole, false, &links).seconds
        };
        let alone = seconds("queueing = 1e-12");
        assert!((alone / 0.263e-3 - 1.0).abs() < 0.01, "{alone}");
        // One message, which costs the more the more ranks there are.
        assert_eq!(seconds(""), alone);
        assert!((seconds("queueing = 1e-3") - 4e-3).abs() < 1e-9);
    }

    #[test]
    fn heads_travel_in_groups_where_their_way_is_longer_than_launches_cost() {
        let groups = |whole: &Whole, backward, links: &str| {
            let options = Options::default().links(links.parse().unwrap());
            head_groups(whole, backward, &options)
        };
        // Of two ranks each has 4 kv heads, of 16 a half.
        let [two, many] = [2, 16].map(|ranks| zig_zag(262_144, ranks));
        assert_eq!(groups(&two, false, ""), 4);
        assert_eq!(groups(&two, false, "latency = 1"), 1);
        assert_eq!(groups(&two, true, ""), 1);
        assert_eq!(groups(&many, false, ""), 1);
    }

    #[test]
    fn heads_whose_rows_the_group_would_refuse_do_not_travel() {
        let mut whole = Whole { most_rows: 4096, ..zig_zag(4096, 2) };
        assert!(choose_for(&whole, false, &Options::default().scheme(Scheme::Ulysses)).is_ok());
        whole.fwd = whole.fwd.dtype_o(DType::Bf16);
        whole.fwd.dtypes.qk = DType::E4m3Fn;
        whole.fwd.dtypes.v = DType::E4m3Fn;
        let error = choose_for(&whole, false, &Options::default().scheme(Scheme::Ulysses)).unwrap_err();
        assert_eq!(error.field, "scheme");
        assert!(error.text.starts_with("ulysses: 24") && error.text.contains("more than 4096"), "{error}");
        assert_ne!(choose_for(&whole, false, &Options::default()).unwrap().scheme, Scheme::Ulysses);
    }

    #[test]
    fn all_ranks_find_the_same_costs_whatever_their_rows() {
        let offsets = vec![0, 13, 13, 30, 41];
        let dims = Dims {
            batch: 4,
            seqlen_q: 17,
            seqlen_k: 17,
            num_heads_q: 4,
            num_heads_kv: 4,
            head_dim_qk: 16,
            head_dim_v: 16,
        };
        let whole = FwdProblem::group(DType::Bf16, dims).mask(MaskSpec::CAUSAL).write_lse(true);
        for ranks in [2, 3, 4] {
            let problem = Problem::new(whole.clone(), Partition::zig_zag(41, ranks));
            let problem = problem.packed(offsets.clone(), offsets.clone());
            let found = |rank| {
                let whole = Whole::new(&problem, rank, ranks).unwrap();
                format!("{:?}", choose_for(&whole, false, &Options::default()).unwrap())
            };
            let first = found(0);
            assert!((1..ranks).all(|rank| found(rank) == first), "{ranks} ranks");
        }
    }
}
