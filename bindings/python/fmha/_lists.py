"""Lists of keys on torch's tensors, on any device: the library's requests, called by ctypes, and autograd around them."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch

from . import _native, _torch

_AT_OPTIONS = _native.NUMBERS.index("options")
_AT_DTYPE_O = _native.NUMBERS.index("dtype_o")
_AT_HEAD_DIM_V = _native.NUMBERS.index("head_dim_v")
_DETERMINISTIC = _native.OPTIONS["deterministic"]

_ARE = "indices: lists of keys are"

#: Tensors that a call may have beside its lists, by name.
Named = Sequence[Tuple[str, Optional[torch.Tensor]]]


class Second:
    """A second cache in the same softmax, V in the front of its rows, and the lists of its keys."""

    def __init__(self, k: torch.Tensor, lists: Lists) -> None:
        self.k, self.lists = _torch.last_is_dense(_torch.resolved(k)), lists


class Lists:
    """Which keys each token sees."""

    def __init__(
        self,
        indices: torch.Tensor,
        topk_length: Optional[torch.Tensor] = None,
        block: int = 1,
        addresses: bool = False,
        lse_without_sink: bool = False,
        second: Optional[Second] = None,
    ) -> None:
        for name, tensor in (("indices", indices), ("topk_length", topk_length)):
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}: {type(tensor).__name__} is no tensor of torch's")
        # A kernel reads a tensor's memory, and a tensor with torch's negative bit has other numbers there.
        indices = _torch.resolved(indices)
        self.indices = indices if indices.dim() == 0 or indices.stride(-1) == 1 else indices.contiguous()
        self.topk_length = topk_length if topk_length is None else _torch.resolved(topk_length).contiguous()
        self.block, self.addresses, self.lse_without_sink = block, addresses, lse_without_sink
        self.second = second

    def put(self, request: _native.Request) -> None:
        indices, length = _described("indices", self.indices), _described("topk_length", self.topk_length)
        request.put_lists(indices, length, self.block, self.addresses, self.lse_without_sink)

    def put_second(self, request: _native.Request, numbers: Tuple[Any, ...], named: Named) -> None:
        """A call of the same queries over the second cache."""
        if self.second is None:
            return
        second = _native.Request(numbers)
        shared = ("q", "o", "cu_seqlens_q", "seqused_q")
        for name, tensor in [*((name, x) for name, x in named if name in shared), ("k", self.second.k)]:
            _torch.put(second, name, tensor)
        self.second.lists.put(second)
        request.put_second(second)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Tuple[Any, ...], numbers: Tuple[Any, ...]
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """O and LSE of a bound call."""
        _torch.refuse_tracers(_ARE)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: {type(x).__name__} is no tensor of torch's")
            if x.dim() not in (3, 4):
                raise ValueError(f"{name} has {x.dim()} axes of shape {tuple(x.shape)}, not 3 or 4")
        _torch.refuse_tangents(q, k, v, *tensors)
        if torch.are_deterministic_algorithms_enabled():
            numbers = (*numbers[:_AT_OPTIONS], numbers[_AT_OPTIONS] | _DETERMINISTIC, *numbers[_AT_OPTIONS + 1 :])
        (q, k, v), tensors = _torch.prepared((q, k, v), tensors)
        numbers, _ = _torch._seeded(q, numbers)
        named = dict(zip(_torch.TENSORS, tensors))
        sink = named.pop("sink")
        rest = [(name, x) for name, x in named.items() if x is not None]
        if not _torch._want_gradients(q, k, v, sink, *(x for _, x in rest)):
            return forward(q, k, v, [("sink", sink), *rest], numbers, self)
        for name, x in rest:
            if x.requires_grad or name in ("block_table", "descale_q", "descale_k", "descale_v"):
                raise NotImplementedError(f"{name} beside indices has no gradient")
        return _Attention.apply(q, k, v, sink, rest, numbers, self)


def _described(name: str, tensor: Optional[torch.Tensor]) -> _native.Tensor:
    if tensor is None:
        return _native.ABSENT
    device, dtype = _torch._described(name, tensor, False)
    return _native.described(tensor.data_ptr(), dtype, tensor.shape, tensor.stride(), device)


def _run(numbers: Tuple[Any, ...], named: Named, lists: Any, what: str = _ARE) -> None:
    """Runs a request on its tensors' device and its current stream, with scratch of torch's allocator. ``lists`` put
    what the request has beside its tensors."""
    _torch.refuse_tracers(what)
    request = _native.Request(numbers)
    # Copies of negative views have to outlive the run.
    named = [(name, _torch.resolved(x)) for name, x in named]
    for name, tensor in named:
        _torch.put(request, name, tensor)
    lists.put(request)
    if isinstance(lists, Lists):
        lists.put_second(request, numbers, named)
    q = dict(named)["q"]
    assert q is not None

    def allocate(size: int) -> Tuple[torch.Tensor, int]:
        scratch = torch.empty(size + 256, dtype=torch.uint8, device=q.device)
        return scratch, -(-scratch.data_ptr() // 256) * 256

    if q.device.type == "cpu":
        _native.run_with(request, allocate)
        return
    with torch.cuda.device(q.device):
        request.stream = torch.cuda.current_stream(q.device).cuda_stream
        _native.run_with(request, allocate)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: Optional[torch.Tensor], more: Named, numbers: Tuple[Any, ...], lists: Lists
) -> Tuple[torch.Tensor, torch.Tensor]:
    """O and LSE. Without ``v`` it is the front of K's rows, of as many elements as ``numbers`` say. Rows that lengths
    leave out are zeros."""
    _torch.refuse_tracers(_ARE)
    _torch.refuse_tangents(q, k, v, **dict(more))
    head_dim_v = v.shape[-1] if v is not None else numbers[_AT_HEAD_DIM_V]
    made = _torch._o_and_lse(q, head_dim_v, numbers)
    given = {name for name, x in more if x is not None}
    o, lse = (x.zero_() for x in made) if given & {"seqused_q", "cu_seqlens_q"} else made
    _run(numbers, [("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), *more], lists)
    return o, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, rest, numbers, lists):
        o, lse = forward(q, k, v, [("sink", sink), *rest], numbers, lists)
        ctx.save_for_backward(q, k, v, o, lse, sink, lists.indices, lists.topk_length, *(x for _, x in rest))
        ctx.rest, ctx.numbers, ctx.lists = [name for name, _ in rest], numbers, lists
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 7
        # Unpacking raises an error for tensors that were changed in place since the forward pass.
        q, k, v, o, lse, sink, _, _, *rest = ctx.saved_tensors
        dout = torch.zeros_like(o) if dout is None else _torch.last_is_dense(dout)
        dlse = None if dlse is None else dlse.contiguous()
        # Rows that no query lists and rows that lengths leave out have gradients of 0.
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        dsink = None if sink is None or not ctx.needs_input_grad[3] else torch.zeros_like(sink)
        named = [("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("sink", sink), *zip(ctx.rest, rest)]
        named += [("dout", dout), ("dlse", dlse), ("dq", dq), ("dk", dk), ("dv", dv), ("dsink", dsink)]
        with torch.no_grad():
            _run(ctx.numbers, named, ctx.lists)
        made = [x if wanted else None for x, wanted in zip((dq, dk, dv, dsink), ctx.needs_input_grad)]
        return (*_torch.once(made, q=q, k=k, v=v, sink=sink, dout=dout, dlse=dlse), None, None, None)
