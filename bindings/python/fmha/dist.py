"""Attention over the ranks of a torch process group: each has some rows of sequences that no rank has whole.

Every rank calls :func:`attention` with its own rows, at the same place of its program. Positions are those of the
whole sequence for mask, ALiBi and dropout, and the result is that of one device. On GPUs keys and values go over the
group's own NCCL communicator; on the CPU over TCP connections between the ranks, which meet by way of the group
and prove to each other a secret that its first rank draws, or that of FMHA_DIST_SECRET.
What goes wrong on one rank is an exception on all of them, which names the rank and the field.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import secrets
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as _torch_dist

from . import _c, _code, _native, _torch, flex
from ._arguments import by_causal, unknown, wants_rows
from ._mask import Mask
from ._mask_data import AnyMask, is_object, split
from ._numbers import flag, integer, real, scale, shown, word
from ._ranks_code import Operands, read
from ._torch import autocast, once, refuse_tangents, refuse_tracers, resolved

if TYPE_CHECKING:
    Group = Optional[_torch_dist.ProcessGroup]

    #: Rows of each rank: a scheme's name, or for each rank its runs ``[begin, end)``, ascending.
    Partition = Union[str, Sequence[Sequence[Tuple[int, int]]]]

__all__ = ["attention", "explain", "flex_attention", "leave", "rows", "shard"]

_PARTITIONS = {"contiguous": 0, "zig_zag": 1, "replicated": 2}
_RUNS = 3
_ELEMENTWISE, _ALIBI, _ALIBI_PER_BATCH = 1, 2, 3
_HOST, _NCCL = 0, 1

#: Seconds that ranks wait for a late rank, which may be compiling.
_TIMEOUT = 600.0


class _Joined:
    """A group of ours on the ranks of one of torch's, and its plans."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank, self.size = _torch_dist.get_rank(group), _torch_dist.get_world_size(group)
        join = _c.new(_c.FmhaJoin)
        join.rank, join.size, join.timeout_seconds = self.rank, self.size, _TIMEOUT
        handle = ctypes.c_void_p()
        with _meeting(group, self.rank) as (address, secret), _current(device):
            join.address = address.encode()
            join.secret = None if secret is None else secret.encode()
            if device.type == "cuda":
                join.space, join.nccl_comm = _NCCL, _communicator(group, device)
            _c.check(_c.library.fmha_dist_join(ctypes.byref(join), ctypes.byref(handle)))
        self.handle = _made(handle)
        #: Plans by all that they depend on; every rank has the same.
        self.plans: Dict[Any, _Plan] = {}
        self.lock = threading.Lock()
        weakref.finalize(self, _let_go, _c.library.fmha_dist_leave, self.handle, os.getpid())


def _made(handle: ctypes.c_void_p) -> int:
    if handle.value is None:
        raise _native.FmhaError("the library has made nothing, and said nothing")
    return handle.value


class _Plan:
    def __init__(self, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, _let_go, _c.library.fmha_dist_drop, handle, os.getpid())


def _let_go(drop: Any, handle: int, pid: int) -> None:
    """Gives back what the library made; in a forked child it is its parent's."""
    if os.getpid() == pid:
        drop(handle)


#: Joined groups by torch's group, then by the kind of memory.
_joined: "weakref.WeakKeyDictionary[Any, Dict[str, _Joined]]" = weakref.WeakKeyDictionary()


def _ours(group: Any, device: torch.device) -> _Joined:
    if group is None:
        group = _torch_dist.group.WORLD
    if group is None:
        raise ValueError("group: torch.distributed has no process group; call init_process_group first")
    if not isinstance(group, _torch_dist.ProcessGroup):
        raise TypeError(f"group: {type(group).__name__} is no process group that this rank is in")
    kinds = _joined.setdefault(group, {})
    if str(device) not in kinds:
        kinds[str(device)] = _Joined(group, device)
    return kinds[str(device)]


def leave(group: Group = None) -> None:
    """Leaves the groups that were joined for the ranks of ``group`` (by default all ranks), with their plans and the
    plans' memory. The next call joins anew. Before ``destroy_process_group`` of a group over NCCL it is needed."""
    if group is None:
        group = _torch_dist.group.WORLD
    if group is not None:
        _joined.pop(group, None)


@contextlib.contextmanager
def _meeting(group: Any, rank: int) -> Iterator[Tuple[str, Optional[str]]]:
    """Where rank 0 of the group listens, and a secret that it draws for this meeting and broadcasts over the group;
    ``None`` where the environment has one, FMHA_DIST_SECRET, which every rank then reads there. The port is held until the library has it: a socket that is bound and does
    not listen keeps others from it, and lets one that reuses addresses listen there."""
    with socket.socket() as held:
        said: List[Any] = [None]
        if rank == 0:
            try:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind((_host(), 0))
                drawn = None if os.environ.get("FMHA_DIST_SECRET") else secrets.token_hex(16)
                said = [("{}:{}".format(*held.getsockname()), drawn)]
            except OSError as error:
                said = [error]
        _torch_dist.broadcast_object_list(said, src=_torch_dist.get_global_rank(group, 0), group=group)
        if not isinstance(said[0], tuple):
            raise _native.FmhaError(f"rank 0, group: no address to listen at: {said[0]}")
        yield said[0]


def _host() -> str:
    """This host's address on the way to where torch's ranks have met."""
    master = os.environ.get("MASTER_ADDR")
    store: Any = _torch_dist.distributed_c10d._get_default_store()
    while store is not None:
        master = getattr(store, "host", master)
        store = getattr(store, "underlying_store", None)
    try:
        if master is None:
            own = socket.gethostbyname(socket.gethostname())
            with socket.socket() as tried:
                tried.bind((own, 0))
            return own
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((master, 9))
            return way.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def _communicator(group: Any, device: torch.device) -> Optional[int]:
    """The ``ncclComm_t`` of torch's group on this device; None where torch does not show it: ours is made then."""
    try:
        backend = group._get_backend(device)
        # torch creates its communicator at the first collective operation.
        _torch_dist.all_reduce(torch.zeros(1, device=device), group=group)
        return int(backend._comm_ptr()) or None
    except (AttributeError, RuntimeError):
        return None


def _current(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def rows(seqlen: int, group: Group = None, partition: str = "zig_zag") -> List[Tuple[int, int]]:
    """The rows ``[begin, end)`` of a sequence of ``seqlen`` that this rank has.

    Args:
        seqlen: rows of the whole: of a sequence, or of a packed tensor.
        group: torch's process group; ``None`` is all ranks.
        partition: ``"zig_zag"``: of twice as many runs as ranks the r-th and the r-th from the end, which a causal
            mask gives equal work; ``"contiguous"``: one run a rank; ``"replicated"``: all rows. Lengths differ by 1
            at most.
    """
    return _rows(integer("seqlen", seqlen), _torch_dist.get_rank(group), _torch_dist.get_world_size(group), partition)


def _rows(seqlen: int, rank: int, size: int, partition: str) -> List[Tuple[int, int]]:
    if partition not in _PARTITIONS:
        raise ValueError(f"partition: {shown(partition)} is none of {', '.join(map(repr, _PARTITIONS))}")
    runs, count = (_c.FmhaRun * 2)(), ctypes.c_int64()
    _c.check(_c.library.fmha_dist_rows(_PARTITIONS[partition], seqlen, size, rank, runs, ctypes.byref(count)))
    return [(run.begin, run.end) for run in runs[: count.value]]


def shard(x: torch.Tensor, dim: int = 1, group: Group = None, partition: str = "zig_zag") -> torch.Tensor:
    """This rank's rows of a tensor that every rank has whole, along ``dim``: a copy; of an LSE ``dim`` is the
    last."""
    runs = rows(x.shape[dim], group, partition)
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in runs] or [x.narrow(dim, 0, 0)], dim)


def _text(mask: Mask) -> bytes:
    kind, left, right, sink_columns = mask
    if kind == 0:
        return b"0"
    sink = f",{sink_columns}" if sink_columns else ""
    return f"{'tbg'[kind - 1]}:{left},{right}{sink}".encode()


class _Side:
    """Queries or keys: who has which rows, how many the whole has, and where packed sequences begin."""

    def __init__(
        self, side: str, x: torch.Tensor, ours: _Joined, seqlen: Optional[int], cu_seqlens: Any, partition: Any
    ) -> None:
        packed = x.dim() == 3
        if x.dim() not in (3, 4):
            raise ValueError(f"{side} has {x.dim()} axes of {tuple(x.shape)}, neither 4 nor, packed, 3")
        if packed != (cu_seqlens is not None):
            raise ValueError(f"cu_seqlens_{side} goes with packed rows, of 3 axes; {side} has {x.dim()}")
        self.own = x.shape[0 if packed else 1]
        self.offsets: Optional[Tuple[int, ...]] = None
        if packed:
            offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
            self.offsets = tuple(integer(f"cu_seqlens_{side}", offset) for offset in offsets)
            if len(self.offsets) < 2:
                raise ValueError(f"cu_seqlens_{side} has {len(self.offsets)} offsets, less than 2")
            self.seqlen = max(max(b - a for a, b in zip(self.offsets, self.offsets[1:])), 0)
            self.total = self.offsets[-1]
        self.batch = len(self.offsets) - 1 if self.offsets else x.shape[0]
        self.runs: Tuple[Tuple[int, int, int], ...] = ()
        if isinstance(partition, str):
            if partition not in _PARTITIONS:
                raise ValueError(f"partition: {shown(partition)} is none of {', '.join(map(repr, _PARTITIONS))}")
            self.kind = _PARTITIONS[partition]
            whole = self.own if partition == "replicated" else self.own * ours.size
        else:
            self.kind = _RUNS
            self.runs = tuple(
                (rank, integer("begin", begin), integer("end", end))
                for rank, of in enumerate(partition)
                for begin, end in of
            )
            whole = sum(end - begin for _, begin, end in self.runs)
        if not packed:
            self.seqlen = self.total = whole if seqlen is None else integer(f"seqlen_{side}", seqlen)

    def key(self) -> Any:
        return self.kind, self.runs, self.own, self.seqlen, self.offsets

    def begins(self, ours: _Joined) -> List[int]:
        """Where the runs of all ranks begin, of rows that are not packed."""
        if self.kind == _RUNS:
            return [begin for _, begin, end in self.runs if begin < end]
        name = next(name for name, kind in _PARTITIONS.items() if kind == self.kind)
        of_ranks = (_rows(self.seqlen, rank, ours.size, name) for rank in range(ours.size))
        return [begin for runs in of_ranks for begin, end in runs if begin < end]


def _strides(rows: int, heads: int, dim: int) -> _c.FmhaStrides:
    return _c.FmhaStrides(rows * heads * dim, heads * dim, dim, 1)


def _address(x: Optional[torch.Tensor]) -> Optional[int]:
    return None if x is None or not x.numel() else x.data_ptr()


def _dtype(name: str, x: torch.Tensor) -> int:
    code = _native.DTYPES.get(str(x.dtype).rpartition(".")[2], _native.OTHER)
    if not 0 <= code < 100:
        raise TypeError(f"{name} is of {x.dtype}, which attention does not take")
    return code


def _of(name: str, x: Any, like: torch.Tensor, dtype: Optional[torch.dtype] = None) -> Any:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: {type(x).__name__} is no tensor of torch")
    if x.device != like.device or dtype is not None and x.dtype != dtype:
        wanted = f"{dtype or x.dtype} on {like.device}"
        raise ValueError(f"{name} is {x.dtype} on {x.device}, not {wanted}")
    return x


class _Call:
    """A call's numbers, and what its plans are made and kept by."""

    def __init__(self, q, k, v, ours, sides, mask, numbers, modifiers, options, scheme, coded) -> None:
        self.ours, self.sides, self.scheme, self.coded = ours, sides, scheme, coded
        self.mask = _text(mask)
        self.softmax_scale, self.softcap, self.p_drop, self.seed, self.offset = numbers
        self.bias, self.alibi_slopes = modifiers
        self.options = options
        #: Whether the LSE is a result whose gradient is refused by name; elsewhere it has none, as documented.
        self.refuses_dlse = False
        self.heads = q.shape[-2], k.shape[-2]
        self.dims = q.shape[-1], v.shape[-1]
        self.device = q.device
        self.dtypes = _dtype("q", q), _dtype("v", v)
        bias = self.bias
        of_bias = None if bias is None else (bias.shape, bias.stride(), bias.dtype)
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.dim()
        self.key = (
            *(side.key() for side in sides),
            sides[0].batch,
            self.mask,
            self.softmax_scale,
            self.softcap,
            self.p_drop,
            of_bias,
            slopes,
            options,
            scheme,
            self.heads,
            self.dims,
            self.dtypes,
            coded.key(),
        )

    def problem(
        self, has_sink: bool, wants_dsink: Optional[bool], wanted: Tuple[int, ...]
    ) -> Tuple[_c.FmhaProblem, List[Any]]:
        """The problem in C, and what has to outlive it; backward unless `wants_dsink` is None, with gradients of the
        captured tensors `wanted`."""
        queries, keys = self.sides
        problem = _c.new(_c.FmhaProblem)
        alive = self.coded.put(problem, wanted)
        problem.batch = queries.batch
        problem.seqlen_q, problem.seqlen_k = queries.seqlen, keys.seqlen
        (heads, heads_kv), (dim_qk, dim_v) = self.heads, self.dims
        problem.num_heads_q, problem.num_heads_kv = heads, heads_kv
        problem.head_dim_qk, problem.head_dim_v = dim_qk, dim_v
        problem.q, problem.o = _strides(queries.own, heads, dim_qk), _strides(queries.own, heads, dim_v)
        problem.k, problem.v = _strides(keys.own, heads_kv, dim_qk), _strides(keys.own, heads_kv, dim_v)
        problem.packed_q = problem.packed_k = int(queries.offsets is not None)
        problem.sink, problem.write_lse = int(has_sink), 1
        if self.alibi_slopes is not None:
            problem.bias_kind = _ALIBI_PER_BATCH if self.alibi_slopes.dim() == 2 else _ALIBI
        if self.bias is not None:
            batch, head = (0 if size == 1 else step for size, step in zip(self.bias.shape[:2], self.bias.stride()))
            problem.bias = _c.FmhaStrides(batch, self.bias.stride(2), head, 1)
            problem.bias_kind, problem.dtype_bias = _ELEMENTWISE, _dtype("bias", self.bias)
        problem.mask = self.mask
        for name in ("softmax_scale", "softcap"):
            number = getattr(self, name)
            if number is not None:
                number = ctypes.c_float(number)
                alive.append(number)
                setattr(problem, name, ctypes.pointer(number))
        problem.p_drop = self.p_drop
        problem.dtype_qk, problem.dtype_v = self.dtypes
        problem.dtype_o = self.dtypes[0]
        if wants_dsink is not None:
            gradients = _c.new(_c.FmhaGradients)
            gradients.dout, gradients.dq, gradients.dk, gradients.dv = problem.o, problem.q, problem.k, problem.v
            gradients.dtype_grad, gradients.write_dsink = self.dtypes[0], int(wants_dsink)
            problem.gradients = ctypes.pointer(gradients)
        return problem, alive

    def args(self, **tensors: Optional[torch.Tensor]) -> _c.FmhaArgs:
        args = _c.new(_c.FmhaArgs)
        for name, x in (*tensors.items(), ("bias", self.bias), ("alibi_slopes", self.alibi_slopes)):
            setattr(args, name, _address(x))
        args.dropout_seed, args.dropout_offset, args.dropout_seeded = self.seed, self.offset, 1
        if self.device.type == "cuda":
            args.stream = torch.cuda.current_stream(self.device).cuda_stream or None
        return args

    def plan(self, has_sink: bool, wants_dsink: Optional[bool] = None, wanted: Tuple[int, ...] = ()) -> _Plan:
        """The plan of this call, backward unless `wants_dsink` is None, with gradients of the captured tensors
        `wanted`: made by all ranks together, once."""
        key = (self.key, has_sink, wants_dsink, wanted)
        plan = self.ours.plans.get(key)
        if plan is not None:
            return plan
        ranks = _c.new(_c.FmhaRanks)
        queries, keys = self.sides
        ranks.own_rows_q, ranks.own_rows_k = queries.own, keys.own
        for side, name in ((queries, "q"), (keys, "k")):
            if side.offsets is not None:
                setattr(ranks, f"cu_seqlens_{name}", (ctypes.c_int32 * len(side.offsets))(*side.offsets))
            setattr(ranks, f"partition_{name}", side.kind)
            if side.kind == _RUNS:
                setattr(ranks, f"runs_{name}", (_c.FmhaRun * len(side.runs))(*side.runs))
                setattr(ranks, f"num_runs_{name}", len(side.runs))
        ranks.scheme = None if self.scheme is None else self.scheme.encode()
        options = _c.new(_c.FmhaOptions)
        kind = {"cpu": "cpu", "cuda": "rocm" if torch.version.hip else "cuda"}.get(self.device.type)
        if kind is None:
            raise ValueError(f"q is on {self.device}, neither the CPU nor a GPU")
        device = (kind if kind == "cpu" else f"{kind}:{self.device.index or 0}").encode()
        options.allow_fallback, options.accuracy, options.deterministic = self.options[:3]
        options.batch_invariant, options.row_invariant = self.options[3:]
        problem, alive = self.problem(has_sink, wants_dsink, wanted)
        made = ctypes.c_void_p()
        with _current(self.device):
            self._held(
                _c.library.fmha_dist_plan(
                    device,
                    ctypes.byref(problem),
                    ctypes.byref(ranks),
                    ctypes.byref(options),
                    self.ours.handle,
                    ctypes.byref(made),
                )
            )
        del alive
        plan = self.ours.plans[key] = _Plan(_made(made))
        return plan

    def _held(self, code: int) -> None:
        if code:
            _forget(self.ours)
        _c.check(code)

    def run(self, plan: _Plan, args: _c.FmhaArgs) -> None:
        with _current(self.device):
            self._held(_c.library.fmha_dist_run(plan.handle, ctypes.byref(args)))

    def forward(self, q, k, v, sink, operands: Operands) -> Tuple[torch.Tensor, torch.Tensor]:
        o = q.new_empty((*q.shape[:-1], self.dims[1]))
        packed = q.dim() == 3
        lse = q.new_empty(
            (self.heads[0], q.shape[0]) if packed else (q.shape[0], self.heads[0], q.shape[1]), dtype=torch.float32
        )
        args = self.args(q=q, k=k, v=v, o=o, lse=lse, sink=sink)
        alive = self.coded.put_args(args, operands)
        with self.ours.lock:
            self.run(self.plan(sink is not None), args)
        del alive
        return o, lse

    def backward(self, q, k, v, o, lse, sink, dout, operands, wants_dsink, wanted) -> Tuple[Any, ...]:
        queries, keys = self.sides
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dsink = torch.empty_like(sink) if wants_dsink else None
        args = self.args(q=q, k=k, v=v, o=o, lse=lse, sink=sink, dout=dout, dq=dq, dk=dk, dv=dv, dsink=dsink)
        captured = operands[1]
        of_captured = {at: captured[at].new_empty(captured[at].shape) for at in wanted}
        alive = self.coded.put_args(args, operands, of_captured)
        with self.ours.lock:
            self.run(self.plan(sink is not None, wants_dsink, wanted), args)
        del alive
        return (dq, dk, dv, dsink, *map(of_captured.get, range(len(captured))))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, call, masks, *captured):
        o, lse = call.forward(q, k, v, sink, (masks, captured))
        ctx.save_for_backward(q, k, v, o, lse, sink, *masks, *captured)
        ctx.call, ctx.num_masks = call, len(masks)
        if not call.refuses_dlse:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dlse is not None and ctx.call.refuses_dlse:
            error = NotImplementedError("lse: a gradient of it is wanted, which ranks do not compute: detach it")
            _tell(ctx.call.ours, error)
            raise error
        try:
            q, k, v, o, lse, sink, *rest = ctx.saved_tensors
        except RuntimeError as error:
            # A tensor was changed in place on this rank: the others would wait for it.
            _tell(ctx.call.ours, error)
            raise
        dout = torch.zeros_like(o) if dout is None else dout
        operands = tuple(rest[: ctx.num_masks]), tuple(rest[ctx.num_masks :])
        wants_dsink = sink is not None and ctx.needs_input_grad[3]
        wanted = tuple(at for at, moves in enumerate(ctx.needs_input_grad[6:]) if moves)
        dense = resolved(dout).contiguous()
        with torch.no_grad():
            made = ctx.call.backward(q, k, v, o, lse, sink, dense, operands, wants_dsink, wanted)
        made = once(made, q=q, k=k, v=v, sink=sink, dout=dout, **ctx.call.coded.named(operands[1]))
        return (*made[:4], None, None, *made[4:])


@torch.compiler.disable
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Group = None,
    causal: bool = False,
    mask: AnyMask = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    bias: Optional[torch.Tensor] = None,
    alibi_slopes: Optional[torch.Tensor] = None,
    sink: Optional[torch.Tensor] = None,
    score_code: Optional[_code.Function] = None,
    mask_code: Optional[_code.Function] = None,
    captured: Optional[Mapping[str, Any]] = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqlen_q: Optional[int] = None,
    seqlen_k: Optional[int] = None,
    partition: Partition = "zig_zag",
    partition_k: Optional[Partition] = None,
    p_drop: float = 0.0,
    seed: Optional[int] = None,
    offset: int = 0,
    scheme: Optional[str] = None,
    allow_fallback: bool = False,
    accuracy: str = "fast",
    deterministic: bool = False,
    batch_invariant: bool = False,
    row_invariant: Optional[bool] = None,
    return_lse: bool = False,
    **wrong: Any,
) -> Any:
    """Attention of the rows of this rank's queries over the keys of all ranks; differentiable.

    All ranks call it, and then its backward, in the same order and with the same arguments but for the tensors. The
    first call of a kind plans it, which waits for all ranks; later ones queue work and, on a GPU, wait for nobody.
    Use one thread a rank.

    Args:
        q: this rank's rows ``[batch, own rows, num_heads_q, head_dim_qk]``; packed ``[own rows, num_heads_q, ..]``.
        k, v: this rank's rows ``[batch, own rows, num_heads_kv, ..]``, or packed. 16 bits or f32, which a GPU computes
            where ``allow_fallback`` is given; copied where they are not contiguous.
        group: torch's process group: NCCL's for tensors on GPUs, any other's for those of the CPU; ``None`` is all
            ranks.
        causal: bottom-right, over the whole sequence.
        mask: as in :func:`fmha.attention`: a band, :class:`fmha.Intervals`, :class:`fmha.MaskBits`,
            :class:`fmha.BlockLists`, or a list of them, whose tensors are those of the whole, alike on every rank. A
            :class:`fmha.MaskObject` is refused.
        softmax_scale, softcap, p_drop, seed, offset: as in :func:`fmha.attention`; the same on every rank,
            where nobody draws a seed.
        bias: this rank's queries against all keys, ``[batch or 1, num_heads_q or 1, own rows, seqlen_k]``, with no
            gradient.
        alibi_slopes: f32 ``[num_heads_q]`` or ``[batch, num_heads_q]``, the same on every rank.
        sink: f32 ``[num_heads_q]``, the same on every rank; its gradient is that of all ranks' rows, on each of them.
        score_code, mask_code, captured: as in :func:`fmha.attention`. Functions see sequences, heads and places of the
            whole, and what they capture is alike on every rank. The gradient of a captured tensor is that of all ranks'
            rows, with the same bits on each of them: nobody sums it again.
        cu_seqlens_q, cu_seqlens_k: ``[batch + 1]`` offsets of the packed sequences of the *whole*, numbers of the
            host (those of a GPU's tensor are read back).
        seqlen_q, seqlen_k: rows of the whole sequence; ``None``: as many as this rank has, times the ranks.
        partition: who has which rows: ``"zig_zag"``, ``"contiguous"`` (:func:`rows`, :func:`shard`),
            ``"replicated"`` (queries of a step of decoding), or for each rank its runs ``[(begin, end), ...]``. Of
            packed rows they may span sequences.
        partition_k: the same for keys; ``None``: as the queries.
        scheme: ``"gather"``, ``"ring"``, ``"mixed"``, ``"ulysses"`` or ``"decode"``; ``None``: what the model of
            kernels and links finds fastest. :func:`explain` says what was chosen.
        allow_fallback: whether the slow kernel may serve where no fast one takes the call.
        deterministic: gradients with the same bits in every run; also where torch's deterministic algorithms are on.
        batch_invariant: bits that do not depend on the number of ranks, or a refusal.
        row_invariant: a row's bits depend on that row and the keys that it sees alone, by ``"gather"``, or a refusal;
            ``None``: as :class:`fmha.row_invariant` says. Beside this and ``batch_invariant`` there are no gradients.
        return_lse: whether LSE comes too, f32 ``[batch, num_heads_q, own rows]`` or ``[num_heads_q, own rows]``; it
            has no gradient here.

    Returns:
        O of this rank's queries, or ``(O, LSE)``.

    Raises:
        FmhaError: on every rank: the rank that is wrong, late (by 10 minutes) or gone, the field, and the numbers.
            No output is then a result; the next call joins anew.
        TypeError, ValueError: an argument of this rank that is no tensor or no number, by its name.
    """
    _refuse_unknown(wrong)
    del wrong
    may_move = True
    o, lse = _attended(*_bound(**locals()))
    return (o, lse) if flag("return_lse", return_lse) else o


def _attended(call: _Call, tensors: Any, operands: Operands, wants_grad: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    q, k, v, sink = tensors
    if not wants_grad:
        return call.forward(q, k, v, sink, operands)
    masks, captured = operands
    return _Attention.apply(q, k, v, sink, call, masks, *captured)


@torch.compiler.disable
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[flex.ScoreMod] = None,
    block_mask: Optional[flex.BlockMask] = None,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Optional[Dict[str, Any]] = None,
    *,
    return_aux: Any = None,
    group: Group = None,
    seqlen_q: Optional[int] = None,
    seqlen_k: Optional[int] = None,
    partition: Partition = "zig_zag",
    partition_k: Optional[Partition] = None,
    scheme: Optional[str] = None,
    **wrong: Any,
) -> Any:
    """:func:`fmha.flex.flex_attention` of the rows of this rank's queries over the keys of all ranks; differentiable.

    All ranks call it, and then its backward, as they do :func:`attention`. Functions see sequences, heads and places of
    the whole.

    Args:
        query: this rank's rows ``[B, Hq, own rows, E]``, as ``shard(whole, dim=2)`` gives them, any strides.
        key: ``[B, Hkv, own rows, E]``; ``value``: ``[B, Hkv, own rows, Ev]``.
        score_mod: as in :func:`fmha.flex.flex_attention`. What it captures is alike on every rank; the gradient of a
            captured tensor is that of all ranks' rows, with the same bits on each of them: nobody sums it again.
        block_mask: of the whole, alike on every rank, of :func:`fmha.flex.create_block_mask` or torch's. Where ranks
            cut its blocks, the mask's function reads its lists as a table: the meaning is the same.
        scale, enable_gqa, kernel_options: as in :func:`fmha.flex.flex_attention`.
        return_lse: whether the LSE of this rank's queries comes too, f32 ``[B, Hq, own rows]``. Over ranks it has no
            gradient: backward through it raises.
        return_aux: torch's ``AuxRequest``, which may ask for ``lse`` alone.
        group, partition, partition_k, scheme: as in :func:`attention`.
        seqlen_q, seqlen_k: rows of the whole sequence; ``None``: those of ``block_mask``, or else as many as this rank
            has, times the ranks.

    Returns:
        ``[B, Hq, own rows, Ev]``; with ``return_lse`` that and the LSE; with ``return_aux`` that and torch's
        ``AuxOutput``.

    Raises:
        FmhaError: on every rank, as of :func:`attention`.
        NotImplementedError: an operation that the language has not, by its name; ``max_scores``; a gradient of the LSE.
        TypeError, ValueError: an argument of this rank, by its name.
    """
    if wrong:
        raise unknown("flex_attention", wrong, inspect.signature(flex_attention).parameters)
    given = dict(score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa)
    given.update(return_lse=return_lse, kernel_options=kernel_options, return_aux=return_aux)
    given.update(seqlens=(seqlen_q, seqlen_k), partition=partition, partition_k=partition_k, scheme=scheme)
    q = _of("query", query, query)
    made, aux = _told(q, group, "dist.flex_attention", lambda ours: _bind_flex(q, key, value, ours, **given))
    o, lse = _attended(*made)
    o = o.transpose(1, 2)
    if aux is not None:
        return o, flex.AuxOutput(lse=lse if aux.lse else None)
    return (o, lse) if return_lse else o


def _bind_flex(query, key, value, ours, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **more):
    """As :func:`_bind`, of torch's arguments; and torch's request for more results."""
    wants_lse = flag("return_lse", return_lse)
    aux = flex.aux_of(more.pop("return_aux"), wants_lse)
    if getattr(aux, "max_scores", False):
        raise NotImplementedError("return_aux: max_scores True is of calls of one device: ranks give no such output")
    flex.refuse_options(kernel_options)
    for name, x in (("key", key), ("value", value)):
        _of(name, x, query)
    key, value = flex.checked(query, key, value, block_mask, enable_gqa)
    of_mask = flex.lengths_of(block_mask) or (None, None)
    seqlens = [of if given is None else given for given, of in zip(more.pop("seqlens"), of_mask)]
    # Functions are traced when the sides are known: a mask is of the whole's lengths.
    def code(sides: Tuple[_Side, _Side]) -> Optional[_code.Code]:
        def cuts(rows: int, columns: int) -> bool:
            if more["scheme"] == "ulysses":
                return False
            # Gathered keys are whole.
            keys = [] if more["scheme"] == "gather" else sides[1].begins(ours)
            return any(at % rows for at in sides[0].begins(ours)) or any(at % columns for at in keys)

        whole = sides[0].seqlen, sides[1].seqlen
        return flex.over_ranks(score_mod, block_mask, query, key, whole, cuts)

    defaults = {name: x.default for name, x in inspect.signature(attention).parameters.items()}
    asked = {name: x for name, x in defaults.items() if name not in ("q", "k", "v", "group", "wrong")}
    asked.update(more, seqlen_q=seqlens[0], seqlen_k=seqlens[1], softmax_scale=scale)
    # Programs that were written for torch's function have no such option.
    asked.update(allow_fallback=True, return_lse=wants_lse, may_move=True, code=code)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    call, *made = _bind(q, ours, k, v, **asked)
    call.refuses_dlse = wants_lse or bool(getattr(aux, "lse", False))
    return (call, *made), aux


def _refuse_unknown(wrong: Any) -> None:
    if wrong:
        raise unknown("attention", wrong, inspect.signature(attention).parameters)


def _bound(q: Any, group: Any, **given: Any) -> Any:
    """As :func:`_bind`, for a call of :func:`attention`."""
    return _told(_of("q", q, q), group, "dist.attention", lambda ours: _bind(q, ours, **given))


def _told(q: torch.Tensor, group: Any, function: str, bind: Callable[[_Joined], Any]) -> Any:
    """What ``bind`` makes of the ranks of a group; what is wrong here, the other ranks are told."""
    # All ranks trace alike: a tracer would follow the meeting of the ranks too.
    refuse_tracers(f"{function} is")
    ours = _ours(group, q.device)
    try:
        return bind(ours)
    except Exception as error:
        _tell(ours, error)
        raise


def _tell(ours: _Joined, error: Exception) -> None:
    """Tells the other ranks, who wait for this one, what is wrong here."""
    _c.library.fmha_dist_fail(ours.handle, b"arguments", f"{type(error).__name__}: {error}".encode())
    _forget(ours)


def _forget(ours: _Joined) -> None:
    """After an error no call of a group succeeds, on any rank: the next one joins anew."""
    for kinds in list(_joined.values()):
        for device in [device for device, other in kinds.items() if other is ours]:
            del kinds[device]


def _bind(
    q,
    ours,
    k,
    v,
    partition,
    partition_k,
    bias,
    alibi_slopes,
    sink,
    return_lse=False,
    may_move=False,
    code=None,
    **given,
):
    """The call, Q, K, V and the sinks as it takes them, its operands of masks and functions, and whether somebody wants
    a gradient of it. ``code`` makes the functions of the sides, where the door is another one's."""
    refuse_tangents(q, k, v, bias, alibi_slopes, sink)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _of(name, x, q)
    q, k, v, bias, alibi_slopes, sink = map(resolved, (*autocast(q, k, v), bias, alibi_slopes, sink))
    if alibi_slopes is not None and getattr(alibi_slopes, "requires_grad", False) and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires a gradient, of which attention has none")
    sides = (
        _Side("q", q, ours, given["seqlen_q"], given["cu_seqlens_q"], partition),
        _Side(
            "k", k, ours, given["seqlen_k"], given["cu_seqlens_k"], partition if partition_k is None else partition_k
        ),
    )
    for name, x in (("k", k), ("v", v)):
        if x.dim() != q.dim() or x.shape[:-1] != k.shape[:-1] or x.dtype != q.dtype:
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}, which does not go with q, {q.dtype} {tuple(q.shape)}, and k"
            )
    if k.shape[-1] != q.shape[-1] or sides[0].batch != sides[1].batch:
        raise ValueError(f"k has shape {tuple(k.shape)}, which does not go with q's {tuple(q.shape)}")
    heads = q.shape[-2]
    if bias is not None:
        _of("bias", bias, q)
        wanted = [sides[0].batch, heads, sides[0].own, sides[1].seqlen]
        pairs = enumerate(zip(bias.shape, wanted))
        fits = bias.dim() == 4 and all(a == b or at < 2 and a == 1 for at, (a, b) in pairs)
        if not fits or bias.stride(3) != 1:
            raise ValueError(f"bias has shape {tuple(bias.shape)} and strides {bias.stride()}, not {wanted}")
        if bias.requires_grad and torch.is_grad_enabled():
            raise ValueError("bias: there is no gradient of it over ranks, but it requires one")
    for name, x, shapes in (
        ("alibi_slopes", alibi_slopes, ((heads,), (sides[0].batch, heads))),
        ("sink", sink, ((heads,),)),
    ):
        if x is not None:
            _of(name, x, q, torch.float32)
            if tuple(x.shape) not in shapes:
                raise ValueError(f"{name} has shape {tuple(x.shape)}, not {' or '.join(map(str, shapes))}")
    if is_object(given["mask"]):
        raise NotImplementedError("mask: a fmha.MaskObject is of calls of one device; give what it was built of")
    band, masks = split(given["mask"])
    mask = by_causal(given["causal"], band)
    functions = given["score_code"], given["mask_code"]
    if code is None:
        code = _code.bind(_torch, *functions, given["captured"], device=q.device, masks=masks)
    else:
        code = code(sides)
    whole = sides[0].batch, sides[0].seqlen, sides[0].total if q.dim() == 3 else None, sides[1].seqlen
    coded, operands = read(code, q, whole)
    refuse_tangents(**coded.named(operands[1]))
    moving = (q, k, v, sink, *operands[1])
    wants_grad = may_move and torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in moving)
    if given["scheme"] is not None and not isinstance(given["scheme"], str):
        raise TypeError(f"scheme: {shown(given['scheme'])} is no name of a scheme")
    if given["accuracy"] not in ("fast", "exact"):
        raise ValueError(f"accuracy: {shown(given['accuracy'])} is neither 'fast' nor 'exact'")
    softmax_scale, softcap = given["softmax_scale"], given["softcap"]
    probability = real("p_drop", given["p_drop"])
    if probability and given["seed"] is None:
        raise ValueError(f"seed: none is given beside p_drop {probability}, and every rank has to have the same")
    numbers = (
        None if softmax_scale is None else scale(softmax_scale),
        real("softcap", softcap) or None if softcap is not None else None,
        probability,
        word("seed", given["seed"] or 0),
        word("offset", given["offset"]),
    )
    options = (
        int(flag("allow_fallback", given["allow_fallback"])),
        int(given["accuracy"] == "exact"),
        int(flag("deterministic", given["deterministic"]) or torch.are_deterministic_algorithms_enabled()),
        int(flag("batch_invariant", given["batch_invariant"])),
        int(wants_rows(given["row_invariant"])),
    )
    for name, asked in zip(("batch_invariant", "row_invariant"), options[3:]):
        if asked and wants_grad:
            raise ValueError(f"{name} True is not kept by gradients over ranks: dK and dV are sums over them")
    modifiers = bias, None if alibi_slopes is None else alibi_slopes.detach().contiguous()
    call = _Call(q, k, v, ours, sides, mask, numbers, modifiers, options, given["scheme"], coded)
    tensors = q.contiguous(), k.contiguous(), v.contiguous(), None if sink is None else sink.contiguous()
    return call, tensors, operands, wants_grad


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> str:
    """What :func:`attention` with these arguments would do: what each scheme would cost, the one that serves and
    why, every step of this rank. All ranks call it; it plans, and runs nothing."""
    bound = inspect.signature(attention).bind(q, k, v, **options)
    bound.apply_defaults()
    _refuse_unknown(bound.arguments.pop("wrong"))
    call, (*_, sink), *_ = _bound(**bound.arguments)
    with torch.no_grad(), call.ours.lock:
        plan = call.plan(sink is not None)
    return _c.library.fmha_dist_plan_text(plan.handle).decode("utf-8", "replace")
