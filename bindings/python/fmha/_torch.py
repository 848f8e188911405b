"""Attention on torch's tensors: the operators ``torch.ops.fmha.*``, their fakes, and autograd outside of them.

An operator is called by every path; the :class:`torch.autograd.Function` around it alone where somebody wants a
gradient, since it costs as much as the rest of a call on the host.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
from torch.autograd import forward_ad

from . import _native
from ._arguments import NO_TENSORS, TENSORS

_native.check(_native.library.fmha_py_register_torch())

forward = torch.ops.fmha.forward.default
forward_out = torch.ops.fmha.forward_out.default
backward = torch.ops.fmha.backward.default
kvcache_op = torch.ops.fmha.kvcache.default
combine_op = torch.ops.fmha.combine.default
add_parts_op = torch.ops.fmha.add_parts.default
add_parts_to = torch.ops.fmha.add_parts_to.default
plain = torch.ops.fmha.plain.default
plain_o = torch.ops.fmha.plain_o.default
plain_backward = torch.ops.fmha.plain_backward.default

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_DTYPES = {code: getattr(torch, name) for name, code in _native.DTYPES.items() if hasattr(torch, name)}
_DETERMINISTIC, _WANTS_DBIAS, _WANTS_DSINK = (
    _native.OPTIONS[name] for name in ("deterministic", "wants_dbias", "wants_dsink")
)

#: Where the type of O and the options are among the numbers that all operators take.
_AT_DTYPE_O, _AT_OPTIONS = _native.NUMBERS.index("dtype_o"), _native.NUMBERS.index("options")
_AT_P_DROP = _native.NUMBERS.index("p_drop")
_AT_HEAD_DIM_V = _native.NUMBERS.index("head_dim_v")


def _dtype_o(like: torch.Tensor, numbers: Tuple[Any, ...]) -> torch.dtype:
    asked = _DTYPES.get(numbers[_AT_DTYPE_O])
    return asked or (torch.bfloat16 if like.dtype in _FP8 else like.dtype)


def _o_and_lse(q: torch.Tensor, head_dim_v: Any, numbers: Tuple[Any, ...]) -> Tuple[torch.Tensor, torch.Tensor]:
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return (
        q.new_empty((*q.shape[:-1], head_dim_v), dtype=_dtype_o(q, numbers)),
        q.new_empty(shape, dtype=torch.float32),
    )


def _fake(operator: Any, results: Callable[..., Any]) -> None:
    """Gives an operator a fake: it refuses what the kernel refuses on every device, in the same words, then has
    ``results``. A fake answers for tensors on ``meta`` too, beside which no kernel is asked."""
    names = [argument.name for argument in operator._schema.arguments]
    required = [argument.name for argument in operator._schema.arguments if str(argument.type) == "Tensor"]
    num_tensors = sum(name in _native.SLOTS for name in names)

    def fake(*arguments: Any) -> Any:
        numbers = arguments[num_tensors:]
        if names[-1] == "numbers":
            numbers = _SPELT[numbers[0]]
        tensors = arguments[:num_tensors]
        given = {name: _strided(name, x) for name, x in zip(names, tensors) if x is not None}
        if _is_known(given, numbers):
            _refuse(operator._opname, given, numbers)
        else:
            _refuse_elsewhere(required, given)
        return results(*tensors, numbers=numbers)

    torch.library.register_fake(operator._schema.name)(fake)


def _is_known(given: Dict[str, torch.Tensor], numbers: Tuple[Any, ...]) -> bool:
    """Whether a compiler has left no size open."""
    sizes = (size for x in given.values() for size in (*x.shape, *x.stride(), x.storage_offset()))
    return all(isinstance(number, (int, float)) for number in (*sizes, *numbers))


def _refuse_elsewhere(required: Sequence[str], given: Dict[str, torch.Tensor]) -> None:
    """Raises what is wrong whatever the sizes; the kernel is the first to know the rest."""
    for name in required:
        if name not in given:
            raise RuntimeError(f"{name} is missing (0 given)")
    first = "q" if "q" in given else "o_parts"
    for name, tensor in given.items():
        if tensor.device != given[first].device:
            raise RuntimeError(f"{name} is on {tensor.device}, but {first} is on {given[first].device}")


def _refuse(operator: str, given: Dict[str, torch.Tensor], numbers: Tuple[Any, ...]) -> None:
    """Raises what the operator's kernel would."""
    request = _native.Request(numbers)
    # Tensors of one place have one address: V may be the front of K's rows.
    places: Dict[Any, int] = {}
    for name, tensor in given.items():
        storage = given["k"] if name == "v" and _may_be_front_of_keys(given) else tensor
        place = (storage.untyped_storage()._cdata, tensor.storage_offset())
        address = places.setdefault(place, 256 * (len(places) + 1))
        put(request, name, tensor, address if tensor.numel() else 0)
    _native.refuse(request, operator)


def _may_be_front_of_keys(given: Dict[str, torch.Tensor]) -> bool:
    """Whether new keys bring V's values with them if V is the front of K's rows, as by its strides it may be. A compiler
    that lowers a call describes V by shape and strides, in a storage of its own: there the kernel alone knows."""
    if "k" not in given or "k_new" not in given or "v_new" in given:
        return False
    k, v = given["k"], given["v"]
    return v.dtype == k.dtype and v.stride() == k.stride() and v.shape[-1] <= k.shape[-1]


def _forward(q, k, v, *_rest, numbers):
    return _o_and_lse(q, v.shape[-1], numbers)


def _backward(dout, q, k, v, o, lse, dlse, bias, alibi_slopes, sink, *_rest, numbers):
    def like(x, wanted=True):
        return x.new_empty(x.shape) if wanted and x is not None else q.new_empty((0,), dtype=torch.float32)

    options = numbers[_AT_OPTIONS]
    return like(q), like(k), like(v), like(bias, options & _WANTS_DBIAS), like(sink, options & _WANTS_DSINK)


def _kvcache(q, k, v, *_rest, numbers):
    return _o_and_lse(q, v.shape[-1] if v is not None else numbers[_AT_HEAD_DIM_V], numbers)


def _add_parts(o_parts, *, numbers):
    return o_parts.new_empty(o_parts.shape[1:], dtype=_dtype_o(o_parts, numbers))


def _combine(o_parts, lse_parts, *, numbers):
    return _add_parts(o_parts, numbers=numbers), lse_parts.new_empty(lse_parts.shape[1:])


def _nothing(*_tensors, numbers):
    return None


_fake(forward, _forward)
_fake(forward_out, _nothing)
_fake(backward, _backward)
_fake(kvcache_op, _kvcache)
_fake(combine_op, _combine)
_fake(add_parts_op, _add_parts)
_fake(add_parts_to, _nothing)
_fake(plain, _forward)
_fake(plain_o, lambda *tensors, numbers: _forward(*tensors, numbers=numbers)[0])
_fake(plain_backward, lambda dout, *qkv_and_more, numbers: tuple(x.new_empty(x.shape) for x in qkv_and_more[:3]))


#: What the library keeps for the process: numbers by the number that stands for them, and the reverse.
_SPELT: Dict[int, Tuple[Any, ...]] = {}
_KEPT: Dict[Tuple[Any, ...], int] = {}


def _kept(numbers: Tuple[Any, ...]) -> int:
    """The number that stands for these; -1 where there is no room for more."""
    at = _KEPT.get(numbers)
    if at is None:
        at = _native.keep(numbers)
        if at >= 0:
            # First what is looked up by it: another thread may have it at once.
            _SPELT[at] = numbers
            _KEPT[numbers] = at
    return at


class _Plain(torch.autograd.Function):
    """Of Q, K and V alone."""

    @staticmethod
    def forward(ctx, q, k, v, numbers):
        o, lse = plain(q, k, v, numbers)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None
        q, k, v, o, lse = ctx.saved_tensors
        dout = torch.zeros_like(o) if dout is None else last_is_dense(dout)
        dlse = None if dlse is None else dlse.contiguous()
        return (*plain_backward(dout, q, k, v, o, lse, dlse, ctx.numbers), None)


def last_is_dense(x: torch.Tensor) -> torch.Tensor:
    """A gradient that autograd made may be broadcast or transposed: rows have to be rows."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, sink, alibi_slopes, lengths, numbers):
        o, lse = forward(q, k, v, bias, alibi_slopes, sink, *lengths, None, None, None, None, *numbers)
        ctx.save_for_backward(q, k, v, o, lse, bias, sink, alibi_slopes, *lengths)
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, o, lse, bias, sink, alibi_slopes, *lengths = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 8
        wants = ctx.needs_input_grad
        numbers = list(ctx.numbers)
        if bias is not None and wants[3]:
            numbers[_AT_OPTIONS] |= _WANTS_DBIAS
        if sink is not None and wants[4]:
            numbers[_AT_OPTIONS] |= _WANTS_DSINK
        dout = torch.zeros_like(o) if dout is None else last_is_dense(dout)
        gradients = backward(
            dout,
            q,
            k,
            v,
            o,
            lse,
            None if dlse is None else dlse.contiguous(),
            bias,
            alibi_slopes,
            sink,
            *lengths,
            *numbers,
        )
        return (*(gradient if wanted else None for gradient, wanted in zip(gradients, wants)), None, None, None)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tuple[Any, ...],
    numbers: Tuple[Any, ...],
    lse: bool = True,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """O and LSE of a bound call; ``None`` for an LSE that is not asked for and costs something."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(q, k, v, *tensors)
    if torch.are_deterministic_algorithms_enabled():
        numbers = (*numbers[:-1], numbers[-1] | _DETERMINISTIC)
    if _is_plain(tensors, numbers):
        at = _kept(numbers)
        if at >= 0:
            if _moves(q, k, v):
                return _Plain.apply(q, k, v, at)
            return plain(q, k, v, at) if lse else (plain_o(q, k, v, at), None)
    bias, sink = tensors[0], tensors[2]
    try:
        wants_grad = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or bias is not None
            and bias.requires_grad
            or sink is not None
            and sink.requires_grad
        )
    except AttributeError:
        # The operator says which of them is no tensor.
        wants_grad = False
    if wants_grad:
        for name, given in zip(("block_table", "descale_q", "descale_k", "descale_v"), tensors[7:]):
            if given is not None:
                raise ValueError(f"{name} is given (1), but there is no gradient of paged or FP8 tensors")
        return _Attention.apply(q, k, v, bias, sink, tensors[1], tensors[3:7], numbers)
    return forward(q, k, v, *tensors, *numbers)


def _refuse_tangents(*given: Any) -> None:
    """An operator drops the tangents of forward-mode differentiation, and a derivative would be 0 in silence."""
    for name, x in zip(("q", "k", "v", *TENSORS), given):
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent (1), but attention has gradients backward alone")


def _is_plain(tensors: Tuple[Any, ...], numbers: Tuple[Any, ...]) -> bool:
    """Whether a call's numbers are worth keeping: a seed is another one each time, and what a compiler makes outlives
    the process that has kept them."""
    return tensors is NO_TENSORS and not numbers[_AT_P_DROP] and not torch.compiler.is_compiling()


def _moves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether somebody wants a gradient of Q, K or V."""
    try:
        return (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
    except AttributeError:
        # The operator says which of them is no tensor.
        return False


def leaves_out_lse(qkv: Tuple[Any, Any, Any], tensors: Tuple[Any, ...], numbers: Tuple[Any, ...]) -> bool:
    """Whether a call that does not ask for the LSE runs a kernel that does not write it."""
    return _is_plain(tensors, numbers) and not _moves(*qkv)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o_parts, lse_parts, numbers):
        o, lse = combine_op(o_parts, lse_parts, *numbers)
        ctx.save_for_backward(o_parts, lse_parts, o, lse)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        # A row that no part has any key of has LSE -inf throughout, and no gradient.
        o_parts, lse_parts, o, lse = ctx.saved_tensors
        weights = (
            torch.where(torch.isneginf(lse_parts), 0.0, torch.exp(lse_parts - lse)).transpose(-1, -2).unsqueeze(-1)
        )
        along = ((o_parts.float() - o.float()) * dout.float()).sum(-1, keepdim=True) + dlse.transpose(-1, -2).unsqueeze(
            -1
        )
        return (weights * dout.float()).to(o_parts.dtype), (weights * along).squeeze(-1).transpose(-1, -2), None


def combine(
    o_parts: torch.Tensor, lse_parts: torch.Tensor, numbers: Tuple[Any, ...]
) -> Tuple[torch.Tensor, torch.Tensor]:
    if isinstance(lse_parts, torch.Tensor) and lse_parts.layout is torch.strided:
        lse_parts = lse_parts.contiguous()
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (o_parts, lse_parts)):
        return _Combine.apply(o_parts, lse_parts, numbers)
    return combine_op(o_parts, lse_parts, *numbers)


class _AddParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o_parts, numbers):
        ctx.of = o_parts.shape, o_parts.dtype
        return add_parts_op(o_parts, *numbers)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        shape, dtype = ctx.of
        return dout.to(dtype).expand(shape), None


def add_parts(o_parts: torch.Tensor, o: Optional[torch.Tensor], numbers: Tuple[Any, ...]) -> torch.Tensor:
    wants_grad = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (o_parts, o))
    if o is None:
        return _AddParts.apply(o_parts, numbers) if wants_grad else add_parts_op(o_parts, *numbers)
    if wants_grad:
        raise ValueError("o is given (1), but there is no gradient of what is added in place")
    add_parts_to(o_parts, o, *numbers)
    return o


def attention_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tuple[Any, ...],
    numbers: Tuple[Any, ...],
    scale_o: Optional[torch.Tensor],
    o: torch.Tensor,
    lse: Optional[torch.Tensor],
    keep_mask: Optional[torch.Tensor],
) -> None:
    forward_out(q, k, v, *tensors, scale_o, o, lse, keep_mask, *numbers)


def kvcache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: Optional[torch.Tensor],
    cache: Tuple[Any, ...],
    tensors: Tuple[Any, ...],
    numbers: Tuple[Any, ...],
) -> Tuple[torch.Tensor, torch.Tensor]:
    return kvcache_op(q, k, v, *cache, *tensors, *numbers)


def _strided(name: str, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise TypeError(f"{name}: {type(tensor).__name__} is no tensor of torch that has strides")
    return tensor


def put(request: _native.Request, name: str, tensor: Optional[torch.Tensor], address: Optional[int] = None) -> None:
    """Puts a tensor into a request that is planned and not run; with an ``address`` into one that is checked alone,
    where it may have no memory."""
    if tensor is None:
        return
    kind = _strided(name, tensor).device.type
    kinds = {"cpu": 0, "cuda": 2 if torch.version.hip else 1, **({} if address is None else {"meta": 3})}
    if kind not in kinds:
        raise ValueError(f"{name} is on {tensor.device}, neither the CPU nor a GPU")
    device = _native.Device(kinds[kind], tensor.device.index or 0)
    dtype = str(tensor.dtype).rpartition(".")[2]
    if address is None:
        address = tensor.data_ptr()
    request.put(name, address, dtype, tensor.shape, tensor.stride(), device)
