//! What schemes are written in: attention of pieces, merging, sums, and moves.

use fmha::{Bias, CombinePlan, CombineProblem, DType, Device, Merge, PlanOptions, Shape, Strides, VLayout};

use crate::arrivals::{Coming, Home};
use crate::error::{Error, Result};
use crate::group::{Block, Exchange, Parcel};
use crate::partition::Piece;
use crate::problem::{Gradients, Heads, Kind, Rows, Tensor, Whole};
use crate::program::{At, Backward, Buf, Part, Program, Scratch, Step};

/// A tensor in a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) buf: Buf,
    pub(crate) tensor: Tensor,
}

impl Held {
    pub(crate) fn new(buf: Buf, tensor: Tensor) -> Self {
        Self { buf, tensor }
    }

    pub(crate) fn at(&self, row: u32) -> At {
        At(self.buf, self.tensor.at(row))
    }

    pub(crate) fn rows(&self, row: u32, count: u32) -> Part {
        (self.buf, self.tensor.rows(row, count))
    }
}

/// An LSE in a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldLse {
    pub(crate) buf: Buf,
    pub(crate) rows: Rows,
    /// The first of its heads that a kernel writes.
    pub(crate) head: u32,
}

/// O in f32 and LSE of some queries over the keys so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partial {
    pub(crate) o: Held,
    pub(crate) lse: HeldLse,
}

/// Where the operands of a piece's attention lie.
pub(crate) struct Operands {
    pub(crate) q: Held,
    pub(crate) k: Held,
    pub(crate) v: Held,
    /// In how many pieces K and V come while kernels run; 0: they are there.
    pub(crate) arrivals: u32,
}

/// A side of an exchange that is being put together.
#[derive(Default)]
pub(crate) struct Moves {
    exchange: Exchange,
    sources: Vec<Buf>,
    sinks: Vec<Buf>,
}

fn number(bufs: &mut Vec<Buf>, buf: Buf) -> usize {
    bufs.iter().position(|&known| known == buf).unwrap_or_else(|| {
        bufs.push(buf);
        bufs.len() - 1
    })
}

impl Moves {
    pub(crate) fn send(&mut self, peer: u32, (buf, block): Part) {
        if block.bytes() > 0 {
            let buffer = number(&mut self.sources, buf);
            self.exchange.sends.push(Parcel { peer, buffer, block });
        }
    }

    pub(crate) fn receive(&mut self, peer: u32, (buf, block): Part) {
        if block.bytes() > 0 {
            let buffer = number(&mut self.sinks, buf);
            self.exchange.receives.push(Parcel { peer, buffer, block });
        }
    }

    /// What a rank sends to itself beside where it is to be, in parts of as many rows; none if they have other rows.
    fn of(&self, rank: u32) -> Option<Vec<(Part, Part)>> {
        let of = |parcels: &[Parcel], bufs: &[Buf]| -> Vec<Part> {
            let own = parcels.iter().filter(|parcel| parcel.peer == rank);
            own.map(|parcel| (bufs[parcel.buffer], parcel.block)).rev().collect()
        };
        let (mut from, mut to) =
            (of(&self.exchange.sends, &self.sources), of(&self.exchange.receives, &self.sinks));
        let mut pairs = Vec::new();
        while let (Some(source), Some(sink)) = (from.pop(), to.pop()) {
            if source.1.row_bytes != sink.1.row_bytes {
                return None;
            }
            let rows = source.1.rows.min(sink.1.rows);
            for (left, (buf, block)) in [(&mut from, source), (&mut to, sink)] {
                if block.rows > rows {
                    let offset = block.offset + rows * block.stride;
                    left.push((buf, Block { offset, rows: block.rows - rows, ..block }));
                }
            }
            pairs.push(((source.0, Block { rows, ..source.1 }), (sink.0, Block { rows, ..sink.1 })));
        }
        (from.is_empty() && to.is_empty()).then_some(pairs)
    }
}

/// Puts a program together for one rank.
pub(crate) struct Builder<'a> {
    pub(crate) whole: &'a Whole,
    device: &'a Device,
    options: &'a PlanOptions,
    program: Program,
    /// Scratch that later steps may use again, and its bytes.
    free: Vec<(Buf, u64)>,
    /// Bytes of an element of each scratch buffer, as it is used now; 0: not known.
    elem_bytes: Vec<u64>,
}

/// Where tensors that lie side by side in a buffer may begin: at multiples of what a buffer of its own is aligned to.
const PLACE: u64 = 256;

/// A block of more rows than this is one message, packed before it moves and unpacked where it arrives if its rows do not lie one
/// behind the other: of fewer each is a message, of some microseconds.
const MOST_ROWS: u64 = 32;

fn is_long(block: Block) -> bool {
    block.rows > MOST_ROWS
}

/// How many messages a block of so many rows is, which kernels pack or do not.
pub(crate) fn messages(rows: u64, packs: bool) -> u64 {
    if packs && rows > MOST_ROWS { 1 } else { rows }
}

/// What comes packed by an exchange, and the scratch that it leaves once it is in its place.
#[derive(Default)]
pub(crate) struct Came {
    unpack: Vec<(Part, Part, DType)>,
    scratch: Vec<(Buf, u64)>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(whole: &'a Whole, device: &'a Device, options: &'a PlanOptions) -> Self {
        let program = Program {
            steps: Vec::new(),
            scratch: Vec::new(),
            workspace: 0,
            coming: None,
            takes_turns: false,
            ranks: whole.ranks,
        };
        Self { whole, device, options, program, free: Vec::new(), elem_bytes: Vec::new() }
    }

    pub(crate) fn finish(self) -> Program {
        self.program
    }

    pub(crate) fn rank(&self) -> u32 {
        self.whole.rank
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.whole.ranks
    }

    fn wrong(&self, error: &fmha::Error) -> Error {
        Error::of(self.rank(), error)
    }

    pub(crate) fn push(&mut self, step: Step) {
        self.program.steps.push(step);
    }

    /// Forward launches from here on take turns on two streams.
    pub(crate) fn take_turns(&mut self) {
        self.program.takes_turns = true;
    }

    /// Keys come from here on, for kernels that wait for them.
    pub(crate) fn come(&mut self, coming: Coming) {
        self.push(Step::Send);
        self.push(Step::Fill { sinks: coming.buffers });
        self.program.coming = Some(coming);
    }

    /// No later step reads what has come, home or to be read.
    pub(crate) fn read_all_that_came(&mut self) {
        if let Some(coming) = &self.program.coming {
            let sinks = coming.all_buffers();
            self.push(Step::Release { sinks });
        }
    }

    /// dK and dV go home beside kernels that come.
    pub(crate) fn go_home(&mut self, home: Home) {
        if let Some(coming) = &mut self.program.coming {
            coming.home = Some(home);
        }
    }

    /// Behind so many kernels: what of these no later one changes, to its owners.
    pub(crate) fn send_home(&mut self, step: usize, sources: [Buf; 2]) {
        self.push(Step::SendHome { step, sources });
    }

    /// What others send home is here.
    pub(crate) fn await_home(&mut self, sinks: [Buf; 2]) {
        self.push(Step::AwaitHome { sinks });
    }

    pub(crate) fn scratch(&mut self, bytes: u64) -> Buf {
        if let Some(at) = self.free.iter().position(|&(_, free)| free == bytes) {
            return self.free.swap_remove(at).0;
        }
        self.new_scratch(0, bytes, None)
    }

    fn new_scratch(&mut self, elem_bytes: u64, bytes: u64, within: Option<(usize, u64)>) -> Buf {
        self.program.scratch.push(Scratch { bytes, within });
        self.elem_bytes.push(elem_bytes);
        Buf::Scratch(self.program.scratch.len() - 1)
    }

    /// What no later step reads: steps to come may write to it.
    pub(crate) fn release(&mut self, held: impl IntoIterator<Item = Held>) {
        self.free.extend(held.into_iter().map(|held| (held.buf, held.tensor.bytes())));
    }

    pub(crate) fn hold(&mut self, tensor: Tensor) -> Held {
        Held::new(self.scratch_of(tensor.size, tensor.bytes()), tensor)
    }

    /// Scratch for elements of so many bytes.
    pub(crate) fn scratch_of(&mut self, elem_bytes: u64, bytes: u64) -> Buf {
        let buf = self.scratch(bytes);
        if let Buf::Scratch(number) = buf {
            self.elem_bytes[number] = elem_bytes;
        }
        buf
    }

    /// Scratch that no other step has before or behind: other ranks write it.
    pub(crate) fn keep(&mut self, elem_bytes: u64, bytes: u64) -> Buf {
        self.new_scratch(elem_bytes, bytes, None)
    }

    /// A type whose values a copy by numbers keeps to the bit; none of 8 bits.
    fn dtype_of(&self, buf: Buf) -> Option<DType> {
        let dtypes = self.whole.fwd.dtypes;
        let all = [dtypes.qk, dtypes.v, dtypes.o, DType::F32];
        let dtype = match buf {
            Buf::Q | Buf::K => dtypes.qk,
            Buf::V => dtypes.v,
            Buf::O | Buf::Dout => dtypes.o,
            Buf::Lse | Buf::Dsink => DType::F32,
            Buf::Dq | Buf::Dk | Buf::Dv => return None,
            Buf::Scratch(number) => {
                let bytes = self.elem_bytes[number];
                all.into_iter().find(|dtype| dtype.size_bytes() == bytes)?
            }
        };
        (!dtype.is_fp8()).then_some(dtype)
    }

    pub(crate) fn hold_lse(&mut self, rows: Rows) -> HeldLse {
        HeldLse { buf: self.scratch_of(4, rows.bytes()), rows, head: 0 }
    }

    /// The type of elements of a tensor of the call.
    pub(crate) fn dtype(&self, kind: Kind) -> DType {
        let dtypes = self.whole.fwd.dtypes;
        match kind {
            Kind::Q | Kind::K => dtypes.qk,
            Kind::V => dtypes.v,
            Kind::O => dtypes.o,
        }
    }

    fn heads_of(&self, kind: Kind) -> u32 {
        let dims = self.whole.fwd.dims;
        if matches!(kind, Kind::Q | Kind::O) { dims.num_heads_q } else { dims.num_heads_kv }
    }

    /// A tensor of the call: what `rank` has of it.
    pub(crate) fn tensor_of(&self, kind: Kind, rank: u32, dtype: DType) -> Tensor {
        let axis = if matches!(kind, Kind::Q | Kind::O) { &self.whole.q } else { &self.whole.k };
        self.whole.tensor(kind, axis.partition.rows_of(rank), self.heads_of(kind), dtype)
    }

    /// What one device would have of it, with these heads.
    pub(crate) fn tensor_of_all(&self, kind: Kind, heads: u32, dtype: DType) -> Tensor {
        let axis = if matches!(kind, Kind::Q | Kind::O) { &self.whole.q } else { &self.whole.k };
        self.whole.tensor(kind, axis.partition.rows(), heads, dtype)
    }

    /// This rank's own tensor of the call.
    pub(crate) fn own(&self, kind: Kind) -> Held {
        let buf = match kind {
            Kind::Q => Buf::Q,
            Kind::K => Buf::K,
            Kind::V => Buf::V,
            Kind::O => Buf::O,
        };
        Held::new(buf, self.tensor_of(kind, self.rank(), self.dtype(kind)))
    }

    /// This rank's own dO, dQ, dK or dV.
    pub(crate) fn own_as(&self, buf: Buf, kind: Kind, dtype: DType) -> Held {
        Held::new(buf, self.tensor_of(kind, self.rank(), dtype))
    }

    /// This rank's own LSE.
    pub(crate) fn own_lse(&self) -> HeldLse {
        let axis = &self.whole.q;
        let rows = axis.partition.rows_of(self.rank());
        let heads = self.whole.fwd.dims.num_heads_q;
        HeldLse { buf: Buf::Lse, rows: Rows { batch: axis.tensor_batch(), heads, rows }, head: 0 }
    }

    pub(crate) fn queries(&self) -> Vec<Piece> {
        self.whole.q.pieces(self.rank())
    }

    pub(crate) fn keys_of(&self, rank: u32) -> Vec<Piece> {
        self.whole.k.pieces(rank)
    }

    /// The LSE of a piece alone.
    fn lse_rows(&self, q: &Piece, heads: u32) -> Rows {
        Rows { batch: q.sequences.end - q.sequences.start, heads, rows: q.rows() }
    }

    /// A contiguous tensor of a piece's rows alone.
    pub(crate) fn piece_tensor(&self, kind: Kind, piece: &Piece, heads: u32, dtype: DType) -> Tensor {
        let tensor = self.whole.tensor(kind, piece.rows(), heads, dtype);
        Tensor { batch: piece.sequences.end - piece.sequences.start, ..tensor }
    }

    pub(crate) fn exchange(&mut self, moves: &Moves) -> Result<()> {
        let came = self.begin_exchange(moves)?;
        self.unpack(came)
    }

    /// An exchange of which what comes packed is not in its place before [`unpack`](Self::unpack).
    pub(crate) fn begin_exchange(&mut self, moves: &Moves) -> Result<Came> {
        let (mut packed, mut came, mut scratch) = (Moves::default(), Came::default(), Vec::new());
        // What stays on this rank is copied at once where it is no copy of few rows.
        let own = moves.of(self.rank());
        let copies = own.filter(|own| own.iter().any(|(from, to)| is_long(from.1) || is_long(to.1)));
        let copies = copies.and_then(|own| {
            own.into_iter()
                .map(|(from, to)| Some((from, to, self.dtype_of(from.0)?)))
                .collect::<Option<Vec<_>>>()
        });
        let stays = |peer: u32, rank: u32| copies.is_some() && peer == rank;
        let rank = self.rank();
        for &Parcel { peer, buffer, block } in
            moves.exchange.sends.iter().filter(|one| !stays(one.peer, rank))
        {
            let part = (moves.sources[buffer], block);
            let as_one = self.as_one(part);
            if let Some((to, dtype)) = as_one.filter(|(to, _)| to.0 != part.0) {
                self.merge(to, vec![part], (dtype, dtype), Merge::Sum)?;
                scratch.push((to.0, block.bytes()));
            }
            packed.send(peer, as_one.map_or(part, |(to, _)| (to.0, to.1.as_one_row())));
        }
        for &Parcel { peer, buffer, block } in
            moves.exchange.receives.iter().filter(|one| !stays(one.peer, rank))
        {
            let part = (moves.sinks[buffer], block);
            let as_one = self.as_one(part);
            if let Some((from, dtype)) = as_one.filter(|(from, _)| from.0 != part.0) {
                came.unpack.push((from, part, dtype));
                came.scratch.push((from.0, block.bytes()));
            }
            packed.receive(peer, as_one.map_or(part, |(from, _)| (from.0, from.1.as_one_row())));
        }
        for (from, to, dtype) in copies.into_iter().flatten() {
            self.merge(to, vec![from], (dtype, dtype), Merge::Sum)?;
        }
        if packed.exchange != Exchange::default() {
            let Moves { exchange, sources, sinks } = packed;
            self.push(Step::Exchange { exchange, sources, sinks });
        }
        self.free.extend(scratch);
        Ok(came)
    }

    /// Brings what has come packed to its places.
    pub(crate) fn unpack(&mut self, came: Came) -> Result<()> {
        for (from, to, dtype) in came.unpack {
            self.merge(to, vec![from], (dtype, dtype), Merge::Sum)?;
        }
        self.free.extend(came.scratch);
        Ok(())
    }

    /// Where a block of many rows lies in one, and the type of its elements: itself, if it does, or scratch. What is one on a
    /// rank is so on the other one, whose rows are as many and of the same type.
    fn as_one(&mut self, (buf, block): Part) -> Option<(Part, DType)> {
        let dtype = self.dtype_of(buf).filter(|_| is_long(block))?;
        if block.stride == block.row_bytes {
            return Some(((buf, block), dtype));
        }
        let whole = Block { offset: 0, stride: block.row_bytes, ..block };
        Some(((self.scratch_of(dtype.size_bytes(), block.bytes()), whole), dtype))
    }

    /// Brings an LSE of a piece alone into one of more rows, or back, by a kernel of this device.
    fn copy_lse(&mut self, from: &[Part], to: &[Part]) -> Result<()> {
        let shape = |part: &Part| (part.1.rows, part.1.row_bytes);
        if !from.iter().map(shape).eq(to.iter().map(shape)) {
            return self.copy(from, to);
        }
        from.iter()
            .zip(to)
            .try_for_each(|(&from, &to)| self.merge(to, vec![from], (DType::F32, DType::F32), Merge::Sum))
    }

    /// Copies rows of this rank.
    fn copy(&mut self, from: &[Part], to: &[Part]) -> Result<()> {
        let mut moves = Moves::default();
        let rank = self.rank();
        from.iter().for_each(|&part| moves.send(rank, part));
        to.iter().for_each(|&part| moves.receive(rank, part));
        self.exchange(&moves)
    }

    /// O and LSE of queries `q` over keys `k`, whose first rows lie at `rows` of their tensors.
    pub(crate) fn forward(
        &mut self,
        (q, k): (&Piece, &Piece),
        heads: &Heads,
        operands: &Operands,
        rows: (u32, u32),
        (o, lse): (Held, HeldLse),
        how: Forward,
    ) -> Result<()> {
        let o_row = how.row;
        let mut problem = self.whole.part(q, k, heads).write_lse(true);
        problem.score.sink &= how.sink;
        // ALiBi measures from the mask's diagonal, so it keeps the mask.
        if how.all_seen && !matches!(problem.score.bias, Bias::Alibi { .. }) {
            problem.mask = fmha::MaskSpec { shape: fmha::MaskShape::None, ..problem.mask };
        }
        let problem = problem
            .dtype_o(how.dtype)
            .v_layout(VLayout::RowMajor)
            .strides_q(operands.q.tensor.strides())
            .strides_k(operands.k.tensor.strides())
            .strides_v(operands.v.tensor.strides())
            .strides_o(o.tensor.strides())
            .arrivals(operands.arrivals);
        let valid = problem.validate().map_err(|error| self.wrong(&error.into()))?;
        let plan = self.device.plan_fwd(&valid, self.options).map_err(|error| self.wrong(&error))?;
        self.program.workspace = self.program.workspace.max(plan.workspace().bytes);
        let inputs = [operands.q.at(rows.0), operands.k.at(rows.1), operands.v.at(rows.1)];
        let score = self.whole.score_offsets(q, k, heads);
        self.push(Step::Forward { plan, inputs, o: o.at(o_row), lse: At(lse.buf, 0), score });
        Ok(())
    }

    /// As [`forward`](Self::forward), with O and LSE in rows of larger tensors.
    pub(crate) fn forward_into(
        &mut self,
        (q, k): (&Piece, &Piece),
        heads: &Heads,
        operands: &Operands,
        rows: (u32, u32),
        (o, lse): (Held, HeldLse),
    ) -> Result<()> {
        let how = Forward { dtype: self.whole.fwd.dtypes.o, row: rows.0, sink: true, all_seen: false };
        let alone = self.lse_rows(q, heads.num_q());
        let unwanted = !self.whole.fwd.write_lse && lse.buf == Buf::Lse;
        if alone == lse.rows || unwanted {
            let lse = if unwanted { self.hold_lse(alone) } else { lse };
            return self.forward((q, k), heads, operands, rows, (o, lse), how);
        }
        let part = self.hold_lse(alone);
        self.forward((q, k), heads, operands, rows, (o, part), how)?;
        let all = 0..heads.num_q();
        let from =
            alone.blocks(0, q.rows(), &all).into_iter().map(|block| (part.buf, block)).collect::<Vec<_>>();
        let to = lse_blocks(lse, q, rows.0, heads.num_q());
        // Not used again: a piece that wrote it too would wait until this one is copied.
        self.copy_lse(&from, &to)?;
        Ok(())
    }

    /// A partial result of a piece.
    pub(crate) fn partial(&mut self, q: &Piece, heads: u32) -> Partial {
        let tensor = self.piece_tensor(Kind::O, q, heads, DType::F32);
        let rows = self.lse_rows(q, heads);
        Partial { o: self.hold(tensor), lse: self.hold_lse(rows) }
    }

    /// Partial results of all ranks, side by side in one buffer: by piece and rank; and the step that brings each rank's to all.
    pub(crate) fn partials_of_all(&mut self, queries: &[Piece]) -> (Vec<Vec<Partial>>, Step) {
        let heads = self.whole.fwd.dims.num_heads_q;
        let (mut bytes, mut places) = (0u64, Vec::new());
        let mut place = |of: u64| {
            let at = bytes;
            bytes = (bytes + of).next_multiple_of(PLACE);
            at
        };
        for q in queries {
            let tensor = self.piece_tensor(Kind::O, q, heads, DType::F32);
            let rows = self.lse_rows(q, heads);
            places.push(((tensor, place(tensor.bytes())), (rows, place(rows.bytes()))));
        }
        let (rank, ranks) = (self.rank(), self.ranks());
        let number = self.program.scratch.len();
        let all = self.keep(4, bytes.saturating_mul(u64::from(ranks)));
        let (mut own, mut others) = (Vec::new(), Vec::new());
        let mut of = |((tensor, o), (rows, lse)): ((Tensor, u64), (Rows, u64)), of_rank: u32| {
            let first = u64::from(of_rank) * bytes;
            let o = self.new_scratch(4, tensor.bytes(), Some((number, first + o)));
            let lse = self.new_scratch(4, rows.bytes(), Some((number, first + lse)));
            if of_rank == rank { &mut own } else { &mut others }.extend([o, lse]);
            Partial { o: Held::new(o, tensor), lse: HeldLse { buf: lse, rows, head: 0 } }
        };
        let parts =
            places.into_iter().map(|place| (0..ranks).map(|rank| of(place, rank)).collect()).collect();
        (parts, Step::AllGather { all, bytes, own, others })
    }

    /// A part of no keys: O of 0 and an LSE of -inf, or of the sinks, if they are asked for and there are any.
    pub(crate) fn nothing(&mut self, q: &Piece, part: Partial, sinks: bool) -> Result<()> {
        let heads = self.whole.all_heads();
        let none = q.without_rows();
        let operands =
            Operands { q: self.own(Kind::Q), k: self.own(Kind::K), v: self.own(Kind::V), arrivals: 0 };
        let how = Forward { dtype: DType::F32, row: 0, sink: sinks, all_seen: true };
        self.forward((q, &none), &heads, &operands, (q.row, 0), (part.o, part.lse), how)
    }

    /// Merges parts of a piece, in this order.
    pub(crate) fn combine(
        &mut self,
        parts: &[Partial],
        (o, row, dtype): (Held, u32, DType),
        lse: Option<HeldLse>,
    ) -> Result<()> {
        let Some(first) = parts.first() else { return Ok(()) };
        let tensor = first.o.tensor;
        let shape = Shape { batch: tensor.batch, seq: tensor.rows, head: tensor.heads, dim: tensor.dim };
        let problem = CombineProblem::new(parts.len() as u32, DType::F32, dtype, shape)
            .strides_o(o.tensor.strides())
            .write_lse(lse.is_some());
        let plan = self.plan_combine(problem)?;
        let lse = At(lse.map_or(Buf::Lse, |lse| lse.buf), 0);
        let parts = parts.iter().map(|part| [At(part.o.buf, 0), At(part.lse.buf, 0)]).collect();
        self.push(Step::Combine { plan, parts, o: o.at(row), lse });
        Ok(())
    }

    /// Merges the last parts of a piece of this rank's queries, with the sinks, into the call's O and LSE.
    pub(crate) fn conclude(&mut self, q: &Piece, mut parts: Vec<Partial>) -> Result<()> {
        let heads = self.whole.fwd.dims.num_heads_q;
        if self.whole.fwd.score.sink || parts.is_empty() {
            let part = self.partial(q, heads);
            self.nothing(q, part, true)?;
            parts.push(part);
        }
        let (o, dtype) = (self.own(Kind::O), self.whole.fwd.dtypes.o);
        if !self.whole.fwd.write_lse {
            return self.combine(&parts, (o, q.row, dtype), None);
        }
        let alone = self.lse_rows(q, heads);
        let own = self.own_lse();
        if alone == own.rows {
            return self.combine(&parts, (o, q.row, dtype), Some(own));
        }
        let lse = self.hold_lse(alone);
        self.combine(&parts, (o, q.row, dtype), Some(lse))?;
        let all = 0..heads;
        let from =
            alone.blocks(0, q.rows(), &all).into_iter().map(|block| (lse.buf, block)).collect::<Vec<_>>();
        self.copy_lse(&from, &lse_blocks(own, q, q.row, heads))?;
        Ok(())
    }

    /// The LSE of a piece alone, out of one of more rows.
    fn lse_alone(&mut self, lse: HeldLse, q: &Piece, row: u32, heads: u32) -> Result<HeldLse> {
        let alone = self.lse_rows(q, heads);
        if alone == lse.rows {
            return Ok(lse);
        }
        let part = self.hold_lse(alone);
        let to = alone
            .blocks(0, q.rows(), &(0..heads))
            .into_iter()
            .map(|block| (part.buf, block))
            .collect::<Vec<_>>();
        self.copy_lse(&lse_blocks(lse, q, row, heads), &to)?;
        Ok(part)
    }

    /// dQ, dK and dV of queries `q` and keys `k`, in f32, each into a tensor at a row.
    pub(crate) fn backward(
        &mut self,
        (q, k): (&Piece, &Piece),
        heads: &Heads,
        operands: &Operands,
        rows: (u32, u32),
        given: &Given,
        Grads { parts: grads, dsink }: Grads,
    ) -> Result<()> {
        let lse = self.lse_alone(given.lse, q, rows.0, heads.num_q())?;
        let fwd = self
            .whole
            .part(q, k, heads)
            .write_lse(true)
            .strides_q(operands.q.tensor.strides())
            .strides_k(operands.k.tensor.strides())
            .strides_v(operands.v.tensor.strides())
            .strides_o(given.o.tensor.strides())
            .arrivals(operands.arrivals);
        let [dq, dk, dv] = grads;
        let problem = self
            .whole
            .part_bwd(fwd, dsink.is_some())
            .strides_dout(given.dout.tensor.strides())
            .strides_dq(dq.0.tensor.strides())
            .strides_dk(dk.0.tensor.strides())
            .strides_dv(dv.0.tensor.strides());
        let valid = problem.validate().map_err(|error| self.wrong(&error.into()))?;
        let plan = self.device.plan_bwd(&valid, self.options).map_err(|error| self.wrong(&error))?;
        self.program.workspace = self.program.workspace.max(plan.workspace().bytes);
        let inputs = [
            operands.q.at(rows.0),
            operands.k.at(rows.1),
            operands.v.at(rows.1),
            given.o.at(rows.0),
            At(lse.buf, 0),
            given.dout.at(rows.0),
        ];
        let grads = grads.map(|(held, row)| held.at(row));
        let score = self.whole.score_offsets(q, k, heads);
        self.push(Step::Backward(Box::new(Backward { plan, inputs, grads, dsink, score })));
        Ok(())
    }

    /// `to`, of type `dtype`, = the sum of f32 `terms`, in their order, rounded once; 0 without terms.
    pub(crate) fn sum(&mut self, to: Part, terms: Vec<Part>, dtype: DType) -> Result<()> {
        self.merge(to, terms, (DType::F32, dtype), Merge::Sum)
    }

    /// `to`, of f32, has `term` added.
    pub(crate) fn add(&mut self, to: Part, term: Part) -> Result<()> {
        self.merge(to, vec![term], (DType::F32, DType::F32), Merge::AddTo)
    }

    /// Terms of the first type into `to` of the second.
    fn merge(
        &mut self,
        to: Part,
        mut terms: Vec<Part>,
        (dtype_term, dtype): (DType, DType),
        merge: Merge,
    ) -> Result<()> {
        let (target, size) = (to.1, dtype.size_bytes());
        if target.bytes() == 0 {
            return Ok(());
        }
        // All parts of a call have the same strides: terms that lie otherwise than the first are copied to where they do not.
        let stride = |block: Block| if target.rows == 1 { block.row_bytes } else { block.stride };
        if terms.iter().any(|term| stride(term.1) != stride(terms[0].1)) {
            for term in &mut terms {
                let block = Block { offset: 0, stride: term.1.row_bytes, ..term.1 };
                let packed = (self.scratch_of(dtype_term.size_bytes(), block.bytes()), block);
                self.copy(&[*term], &[packed])?;
                *term = packed;
            }
        }
        let elems = target.row_bytes / size;
        // A warp adds a row at a time: as long a row as divides the elements and is not too long for one.
        let dim = (1..=256.min(elems)).rev().find(|dim| elems.is_multiple_of(*dim)).unwrap_or(1);
        let rows = Shape {
            batch: target.rows as u32,
            seq: u32::try_from(elems / dim).unwrap_or(u32::MAX),
            head: 1,
            dim: dim as u32,
        };
        let strides = |batch: u64| Strides { batch: batch as i64, ..Strides::bshd(rows) };
        let mut problem = CombineProblem::new(terms.len() as u32, dtype_term, dtype, rows)
            .strides_o(strides(stride(target) / size))
            .merge(merge);
        if let Some(first) = terms.first() {
            problem = problem.strides_part(strides(stride(first.1) / dtype_term.size_bytes()));
        }
        let plan = self.plan_combine(problem)?;
        let terms = terms.iter().map(|&(buf, block)| At(buf, block.offset)).collect();
        self.push(Step::Sum { plan, terms, to: At(to.0, target.offset) });
        Ok(())
    }

    fn plan_combine(&self, problem: CombineProblem) -> Result<CombinePlan> {
        let valid = problem.validate().map_err(|error| self.wrong(&error.into()))?;
        // The wishes for attention's kernel are not those for another one.
        let options = PlanOptions::default()
            .allow_fallback(self.options.allow_fallback)
            .deterministic(self.options.deterministic);
        self.device.plan_combine(&valid, &options).map_err(|error| self.wrong(&error))
    }

    /// The sinks' gradient: every rank's own part, to all, added in the order of the ranks.
    pub(crate) fn sum_dsink(&mut self, parts: &[At]) -> Result<()> {
        let row_bytes = 4 * u64::from(self.whole.fwd.dims.num_heads_q);
        let block = |offset| Block { offset, rows: 1, row_bytes, stride: row_bytes };
        let own = self.scratch(row_bytes);
        self.sum((own, block(0)), parts.iter().map(|at| (at.0, block(at.1))).collect(), DType::F32)?;
        let all = self.scratch(row_bytes * u64::from(self.ranks()));
        let mut moves = Moves::default();
        for rank in 0..self.ranks() {
            moves.send(rank, (own, block(0)));
            moves.receive(rank, (all, block(u64::from(rank) * row_bytes)));
        }
        self.exchange(&moves)?;
        let terms = (0..self.ranks()).map(|rank| (all, block(u64::from(rank) * row_bytes))).collect();
        self.sum((Buf::Dsink, block(0)), terms, DType::F32)
    }
}

/// Where a piece's rows of so many heads are in an LSE of more.
fn lse_blocks(lse: HeldLse, q: &Piece, row: u32, heads: u32) -> Vec<Part> {
    let heads = lse.head..lse.head + heads;
    lse.rows.blocks(row, q.rows(), &heads).into_iter().map(|block| (lse.buf, block)).collect()
}

/// What a forward call of a piece writes.
#[derive(Clone, Copy)]
pub(crate) struct Forward {
    pub(crate) dtype: DType,
    /// First row of O.
    pub(crate) row: u32,
    /// Whether the sinks enter.
    pub(crate) sink: bool,
    /// Whether every query sees every key, so that no mask need be compiled in.
    pub(crate) all_seen: bool,
}

/// What backward reads beside Q, K and V.
pub(crate) struct Given {
    pub(crate) o: Held,
    pub(crate) dout: Held,
    pub(crate) lse: HeldLse,
}

/// Where a piece's gradients go: dQ, dK and dV, f32, each at a row; the sinks' gradient.
pub(crate) struct Grads {
    pub(crate) parts: [(Held, u32); 3],
    pub(crate) dsink: Option<At>,
}

/// The gradients of a call.
pub(crate) type Wanted = Gradients;
