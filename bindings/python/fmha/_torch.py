"""Attention on torch's tensors: the operators ``torch.ops.fmha.*``, their fakes, and autograd outside of them.

An operator is called by every path; the :class:`torch.autograd.Function` around it alone where somebody wants a
gradient, since it costs as much as the rest of a call on the host.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.autograd import forward_ad

from . import _code, _native
from ._arguments import CACHE_SCALES, NO_TENSORS, TENSORS, with_seed
from ._mask_data import OUTPUTS, TENSORS as MASK_TENSORS, Masks
from ._numbers import shown
from ._trace import Code
from ._traced_torch import Dispatching as Dispatching, prepared as captured, stored as stored

_native.check(_native.library.fmha_py_register_torch())

forward = torch.ops.fmha.forward.default
forward_out = torch.ops.fmha.forward_out.default
forward_out_small = torch.ops.fmha.forward_out_small.default
backward = torch.ops.fmha.backward.default
kvcache_op = torch.ops.fmha.kvcache.default
kvcache_scaled_op = torch.ops.fmha.kvcache_scaled.default
combine_op = torch.ops.fmha.combine.default
add_parts_op = torch.ops.fmha.add_parts.default
add_parts_to = torch.ops.fmha.add_parts_to.default
forward_code = torch.ops.fmha.forward_code.default
backward_code = torch.ops.fmha.backward_code.default
plain = torch.ops.fmha.plain.default
plain_o = torch.ops.fmha.plain_o.default
plain_backward = torch.ops.fmha.plain_backward.default

#: A traced index is not wrapped: torch's tensor, indexed by it, calls the index's own method.
WRAPS = False

is_compiling = torch.compiler.is_compiling


def read_function(name: str, text: str, is_mask: bool) -> Tuple[str, Tuple[Tuple[str, str], ...]]:
    """As the library reads a text. A compiler takes what it gives for a constant: it depends on the text alone."""
    return _native.read_function(name, text, is_mask)


# torch.compiler.assume_constant_result sets this mark, but calling it imports the whole compiler.
read_function._dynamo_marked_constant = True  # type: ignore[attr-defined]


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_DTYPES = {code: getattr(torch, name) for name, code in _native.DTYPES.items() if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_F32 = _CODES[torch.float32]
_DETERMINISTIC, _WANTS_DBIAS, _WANTS_DSINK = (
    _native.OPTIONS[name] for name in ("deterministic", "wants_dbias", "wants_dsink")
)

#: Option of calls that keep their lists of tiles for later calls.
KEEPS_LISTS = _native.OPTIONS["keeps_lists"]

#: Positions of O's type and of the options among the numbers that all operators take.
_AT_DTYPE_O, _AT_OPTIONS = _native.NUMBERS.index("dtype_o"), _native.NUMBERS.index("options")
_AT_P_DROP, _AT_SEED = _native.NUMBERS.index("p_drop"), _native.NUMBERS.index("seed")
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
    of_call = names[: names.index("score_code")] if "score_code" in names else names
    num_numbers = sum(name in _native.NUMBERS for name in of_call)

    def fake(*arguments: Any) -> Any:
        # A seed that is a tensor follows the numbers; its value is unknown here.
        numbers = arguments[num_tensors : num_tensors + num_numbers]
        if names[-1] == "numbers":
            numbers = _SPELT[arguments[-1]]
        tensors = arguments[:num_tensors]
        code, wanted = _code_of(arguments[num_tensors + num_numbers :]) if "score_code" in names else (None, 0)
        given = {name: _strided(name, x) for name, x in zip(names, tensors) if x is not None}
        of_code = () if code is None else code.tensors
        if _is_known({**given, **{str(at): x for at, x in enumerate(of_code)}}, numbers):
            _refuse(operator._opname, given, numbers, code, wanted)
        else:
            _refuse_elsewhere(required, given)
        made = results(*tensors, numbers=numbers)
        if "wanted" not in names:
            return made
        return (*made, [x.new_empty(x.shape) for at, x in enumerate(of_code) if wanted >> at & 1])

    torch.library.register_fake(operator._schema.name)(fake)


def _code_of(arguments: Sequence[Any]) -> Tuple[Code, int]:
    """The code among an operator's arguments, and the bits of the gradients that are wanted."""
    score, mask, names, tensors, numbers, block_q, block_k, *rest = arguments
    named = tuple(name for name in names.split(",") if name)
    wanted = rest[0] if rest and isinstance(rest[0], int) else 0
    # The operator takes the tensors of masks as arguments of its own.
    masks = Masks(block_q=block_q, block_k=block_k)
    return Code(score, mask, named, tuple(tensors), tuple(numbers), masks), wanted


def _is_known(given: Dict[str, torch.Tensor], numbers: Tuple[Any, ...]) -> bool:
    """Whether a compiler has left no size open."""
    sizes = (size for x in given.values() for size in (*x.shape, *x.stride(), x.storage_offset()))
    return all(number is None or isinstance(number, (int, float)) for number in (*sizes, *numbers))


def _refuse_elsewhere(required: Sequence[str], given: Dict[str, torch.Tensor]) -> None:
    """Raises what is wrong whatever the sizes; the kernel is the first to know the rest."""
    for name in required:
        if name not in given:
            raise RuntimeError(f"{name} is missing")
    first = "q" if "q" in given else "o_parts"
    for name, tensor in given.items():
        if tensor.device != given[first].device:
            raise RuntimeError(f"{name} is on {tensor.device}, but {first} is on {given[first].device}")


def _refuse(
    operator: str, given: Dict[str, torch.Tensor], numbers: Tuple[Any, ...], code: Optional[Code], wanted: int
) -> None:
    """Raises what the operator's kernel would."""
    request = _native.Request(numbers)
    # Tensors of the same memory share an address: V may be the front of K's rows.
    places: Dict[Any, int] = {}
    for name, tensor in given.items():
        storage = given["k"] if name == "v" and _may_be_front_of_keys(given) else tensor
        place = (storage.untyped_storage()._cdata, tensor.storage_offset())
        address = places.setdefault(place, 256 * (len(places) + 1))
        put(request, name, tensor, address if tensor.numel() else 0)
    alive = [] if code is None else _code.put(_Nowhere, request, code, wanted)
    del alive
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
_fake(forward_out_small, _nothing)
_fake(backward, _backward)
_fake(kvcache_op, _kvcache)
_fake(kvcache_scaled_op, _kvcache)
_fake(combine_op, _combine)
_fake(add_parts_op, _add_parts)
_fake(add_parts_to, _nothing)
_fake(forward_code, _forward)
_fake(backward_code, _backward)
_fake(plain, _forward)
_fake(plain_o, lambda *tensors, numbers: _forward(*tensors, numbers=numbers)[0])
_fake(plain_backward, lambda dout, *qkv_and_more, numbers: tuple(x.new_empty(x.shape) for x in qkv_and_more[:3]))


def _in_front(x: Any, axis: Optional[int], size: int) -> torch.Tensor:
    return x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)


def _maps(operator: Any) -> None:
    """Gives an operator of attention a rule for ``vmap``: the mapped axis joins the batch where a call has Q, K and V
    alone and no dropout, whose mask knows the place in a batch; else one call after another."""
    names = [argument.name for argument in operator._schema.arguments]
    count = sum(name in _native.SLOTS for name in names)
    rows = ("dout", "q", "k", "v", "o", "lse", "dlse")

    def rule(info: Any, in_dims: Tuple[Optional[int], ...], *arguments: Any) -> Any:
        given = {
            at: _in_front(x, in_dims[at], info.batch_size) for at, x in enumerate(arguments[:count]) if x is not None
        }
        numbers = arguments[count:]
        spelt = _SPELT[numbers[0]] if names[-1] == "numbers" else numbers
        batched = given[names.index("q")].dim() == 5 and all(names[at] in rows for at in given)
        if batched and not spelt[_AT_P_DROP]:
            batch = given[names.index("q")].shape[1]
            folded = (given[at].flatten(0, 1).contiguous() if at in given else None for at in range(count))
            results = operator(*folded, *numbers)
            apart = [x if x.dim() < 3 else x.unflatten(0, (info.batch_size, batch)) for x in _listed(results)]
            # A gradient that is not wanted is a tensor of one axis, and vmap does not map it.
            dims = tuple(None if x.dim() < 3 else 0 for x in apart)
        else:
            calls = [
                _listed(
                    operator(*(given[at][i].contiguous() if at in given else None for at in range(count)), *numbers)
                )
                for i in range(info.batch_size)
            ]
            apart, dims = [torch.stack(results) for results in zip(*calls)], (0,) * len(calls[0])
        return (tuple(apart), dims) if len(apart) > 1 else (apart[0], dims[0])

    torch.library.register_vmap(operator._schema.name, rule)


def _listed(results: Any) -> Tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _maps_parts(operator: Any) -> None:
    """Likewise one that merges parts: the mapped axis joins the batch, which is behind the parts."""

    def rule(info: Any, in_dims: Tuple[Optional[int], ...], *arguments: Any) -> Any:
        count = sum(isinstance(x, torch.Tensor) for x in arguments)
        given = [_in_front(x, axis, info.batch_size) for x, axis in zip(arguments[:count], in_dims)]
        batch = given[0].shape[2]
        results = operator(*(x.transpose(0, 1).flatten(1, 2).contiguous() for x in given), *arguments[count:])
        apart = [x.unflatten(0, (info.batch_size, batch)) for x in _listed(results)]
        return (tuple(apart), (0, 0)) if len(apart) > 1 else (apart[0], 0)

    torch.library.register_vmap(operator._schema.name, rule)


for _operator in (forward, backward, plain, plain_o, plain_backward):
    _maps(_operator)
for _operator in (combine_op, add_parts_op):
    _maps_parts(_operator)


#: Tuples of numbers that the library keeps for the process, by the number that stands for them, and the reverse.
_SPELT: Dict[int, Tuple[Any, ...]] = {}
_KEPT: Dict[Tuple[Any, ...], int] = {}


def _kept(numbers: Tuple[Any, ...]) -> int:
    """The number that stands for these; -1 where there is no room for more."""
    at = _KEPT.get(numbers)
    if at is None:
        at = _native.keep(numbers)
        if at >= 0:
            # The tuple is stored before its number, since another thread may look the number up at once.
            _SPELT[at] = numbers
            _KEPT[numbers] = at
    return at


class _Once(torch.autograd.Function):
    """Hands gradients on. They were computed outside of autograd: who differentiates them again is told so, where a
    derivative of 0 would come otherwise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count, _names, *tensors):
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.count, ctx.names = inputs[:2]

    @staticmethod
    def backward(ctx, *_gradients):
        moved = ctx.needs_input_grad[2 + ctx.count :]
        by = ", ".join(name for name, wanted in zip(ctx.names, moved) if wanted)
        raise NotImplementedError(f"{by}: attention has no second derivative, but its gradient is differentiated again")

    jvp = staticmethod(lambda ctx, *tangents: _no_tangents())


def _no_tangents() -> Any:
    raise NotImplementedError("attention has gradients backward alone, but is differentiated forward")


def once(gradients: Sequence[Any], /, **sources: Any) -> Tuple[Any, ...]:
    """Gradients that were made from ``sources`` without autograd, some of them ``None``."""
    # A compiler refuses second derivatives on its own.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tuple(gradients)
    given = [x for x in gradients if x is not None]
    named = {name: x for name, x in sources.items() if isinstance(x, torch.Tensor)}
    made = iter(_Once.apply(len(given), tuple(named), *given, *named.values()))
    return tuple(None if x is None else next(made) for x in gradients)


class _Forward(torch.autograd.Function):
    """Hands results on that have no gradient: who asks for one is told why, where none would come in silence."""

    generate_vmap_rule = True

    @staticmethod
    def forward(_why, o, lse, *_sources):
        # The results are detached tensors and not views, since autograd forbids in-place changes of such views.
        return o.detach(), lse.detach()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.why, ctx.rest = inputs[0], (None,) * len(inputs)

    @staticmethod
    def backward(ctx, *_gradients):
        raise NotImplementedError(ctx.why)

    jvp = staticmethod(lambda ctx, *tangents: _no_tangents())


def _without_gradients(
    o: torch.Tensor, lse: Optional[torch.Tensor], why: str, *sources: Any
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Results of ``sources``, of which some want a gradient; its backward raises ``why``."""
    given = [x for x in sources if isinstance(x, torch.Tensor) and x.requires_grad]
    written, of_rows = _Forward.apply(why, o, o.new_empty(0) if lse is None else lse, *given)
    return written, None if lse is None else of_rows


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
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None
        # Saved tensors are read once: a checkpoint does not give them a second time.
        q, k, v, o, lse = ctx.saved_tensors
        with torch.no_grad():
            gradients = plain_backward(_dense_dout(dout, o), q, k, v, o, lse, _dense_dlse(dlse), ctx.numbers)
        return (*once(gradients, q=q, k=k, v=v, dout=dout, dlse=dlse), None)


def last_is_dense(x: torch.Tensor) -> torch.Tensor:
    """A gradient that autograd made may be broadcast or transposed: rows have to be rows."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def _of_its_own(bias: torch.Tensor) -> torch.Tensor:
    """A bias that a view repeats over sequences or heads is read as one for all; its gradient has a matrix for each."""
    repeats = any(bias.stride(axis) == 0 and bias.shape[axis] > 1 for axis in range(bias.dim() - 2))
    return bias.contiguous() if repeats else bias


def _dense_dout(dout: Optional[torch.Tensor], o: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(o) if dout is None else last_is_dense(dout)


def _dense_dlse(dlse: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if dlse is None else dlse.contiguous()


def gradients(
    rows: Tuple[torch.Tensor, ...],
    lse: torch.Tensor,
    dlse: Optional[torch.Tensor],
    sink: Optional[torch.Tensor],
    lengths: Tuple[Optional[torch.Tensor], ...],
    numbers: Tuple[Any, ...],
) -> Tuple[torch.Tensor, ...]:
    """dQ, dK, dV, and in fifth place dSink where there is a sink, of dO, Q, K, V and O, which are ``rows``."""
    if sink is not None:
        numbers = (*numbers[:_AT_OPTIONS], numbers[_AT_OPTIONS] | _WANTS_DSINK, *numbers[_AT_OPTIONS + 1 :])
    return backward(*rows, lse.contiguous(), _dense_dlse(dlse), None, None, sink, *lengths, *numbers)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, sink, alibi_slopes, lengths, numbers, drawn):
        o, lse = forward(q, k, v, bias, alibi_slopes, sink, *lengths, None, None, None, None, *numbers, drawn)
        ctx.save_for_backward(q, k, v, o, lse, bias, sink, alibi_slopes, drawn, *lengths)
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 9
        q, k, v, o, lse, bias, sink, alibi_slopes, drawn, *lengths = ctx.saved_tensors
        wants = ctx.needs_input_grad
        if wants[5]:
            _refuse_gradients(alibi_slopes=alibi_slopes)
        numbers = list(ctx.numbers)
        if bias is not None and wants[3]:
            numbers[_AT_OPTIONS] |= _WANTS_DBIAS
            bias = _of_its_own(bias)
        if sink is not None and wants[4]:
            numbers[_AT_OPTIONS] |= _WANTS_DSINK
        with torch.no_grad():
            gradients = backward(
                _dense_dout(dout, o),
                q,
                k,
                v,
                o,
                lse,
                _dense_dlse(dlse),
                bias,
                alibi_slopes,
                sink,
                *lengths,
                *numbers,
                drawn,
            )
        gradients = tuple(gradient if wanted else None for gradient, wanted in zip(gradients, wants))
        return (*once(gradients, q=q, k=k, v=v, bias=bias, sink=sink, dout=dout, dlse=dlse), *(None,) * 4)


class _Coded(torch.autograd.Function):
    """With a score or a mask as code, whose captured tensors come last and have gradients too, or masks as data."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, alibi_slopes, lengths, numbers, drawn, texts, masks, outputs, *captured):
        pages = (None, None, None, None)
        rest = (*lengths, *pages, *masks, *outputs, *numbers, *texts[:3], captured, *texts[3:], drawn)
        o, lse = forward_code(q, k, v, bias, alibi_slopes, sink, *rest)
        ctx.save_for_backward(q, k, v, o, lse, bias, sink, alibi_slopes, drawn, *lengths, *masks, *captured)
        ctx.numbers, ctx.texts, ctx.num_lengths = numbers, texts, len(lengths) + len(masks)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, o, lse, bias, sink, alibi_slopes, drawn, *rest = ctx.saved_tensors
        lengths, captured = rest[: ctx.num_lengths], rest[ctx.num_lengths :]
        wants = ctx.needs_input_grad
        if wants[5]:
            _refuse_gradients(alibi_slopes=alibi_slopes)
        numbers = list(ctx.numbers)
        if numbers[_AT_OPTIONS] & KEEPS_LISTS and torch.cuda.is_current_stream_capturing():
            # A graph keeps its own lists of tiles, so this call need not keep any.
            numbers[_AT_OPTIONS] &= ~KEEPS_LISTS
        if bias is not None and wants[3]:
            numbers[_AT_OPTIONS] |= _WANTS_DBIAS
            bias = _of_its_own(bias)
        if sink is not None and wants[4]:
            numbers[_AT_OPTIONS] |= _WANTS_DSINK
        wanted = sum(1 << at for at, moves in enumerate(wants[12:]) if moves)
        with torch.no_grad():
            *made, of_captured = backward_code(
                _dense_dout(dout, o),
                q,
                k,
                v,
                o,
                lse,
                _dense_dlse(dlse),
                bias,
                alibi_slopes,
                sink,
                *lengths,
                *numbers,
                *ctx.texts[:3],
                captured,
                *ctx.texts[3:],
                wanted,
                drawn,
            )
        left = iter(of_captured)
        made = [gradient if moves else None for gradient, moves in zip(made, wants)]
        made += [next(left) if moves else None for moves in wants[12:]]
        names = {f"captured {name}": x for name, x in zip(ctx.texts[2].split(","), captured)}
        sources = {**names, "q": q, "k": k, "v": v, "bias": bias, "sink": sink, "dout": dout, "dlse": dlse}
        made = once(made, **sources)
        return (*made[:5], *(None,) * 7, *made[5:])


class _Transformed(torch.autograd.Function):
    """:class:`_Attention` under ``torch.func``'s transforms, which want ``setup_context``. Apart, since torch binds the
    arguments of such a function by their signature, which costs more than a call does on the host."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, bias, sink, alibi_slopes, *rest):
        return forward(q, k, v, bias, alibi_slopes, sink, *rest[1:5], None, None, None, None, *rest[5:], rest[0])

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, bias, sink, alibi_slopes, *rest = inputs
        ctx.save_for_backward(q, k, v, *output, bias, sink, alibi_slopes, *rest[:5])
        ctx.numbers = rest[5:]

    @staticmethod
    def backward(ctx, dout, dlse):
        # Lengths and numbers are separate arguments here, since transforms pair each argument with a gradient.
        return (*_Attention.backward(ctx, dout, dlse)[:6], *(None,) * (5 + len(ctx.numbers)))

    jvp = staticmethod(lambda ctx, *tangents: _no_tangents())


def _is_transformed() -> bool:
    """Whether ``torch.func.grad``, ``vmap`` or another of them is about the call."""
    return torch._C._are_functorch_transforms_active()


def refuse_tracers(what: str) -> None:
    """Raises where a tracer follows the call: ``what`` goes by addresses, past torch's dispatcher, so that a tracer
    would keep memory that nobody writes."""
    if torch.compiler.is_compiling() or _is_transformed():
        raise NotImplementedError(f"{what} not traced by a compiler, nor under torch.func")
    if torch.jit.is_tracing():
        raise NotImplementedError(f"{what} not traced by torch.jit.trace")
    keys = torch._C._TorchDispatchModeKey
    modes = [torch._C._get_dispatch_mode(key) for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)]
    modes += [_get_dispatch_mode_pre_dispatch(key) for key in (keys.PROXY, keys.FUNCTIONAL)]
    for mode in modes:
        if mode is not None:
            raise NotImplementedError(f"{what} not traced under {type(mode).__name__}")


def _want_gradients(*given: Any) -> bool:
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in given)


def _refuse_gradients(**given: Any) -> None:
    """Raises for a tensor of which a gradient is wanted and there is none."""
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"{name} of shape {list(x.shape)} requires a gradient, of which attention has none")


def as_asked(numbers: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """A call's numbers, deterministic where torch's algorithms are."""
    if not torch.are_deterministic_algorithms_enabled():
        return numbers
    return (*numbers[:-1], numbers[-1] | _DETERMINISTIC)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tuple[Any, ...],
    numbers: Tuple[Any, ...],
    lse: bool = True,
    code: Optional[Code] = None,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """O and LSE of a bound call; ``None`` for an LSE that is not asked for and costs something."""
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v, *tensors, **({} if code is None else dict(zip(code.names, code.tensors))))
    numbers = as_asked(numbers)
    (q, k, v), tensors = prepared((q, k, v), tensors)
    if code is not None:
        return _with_code(q, k, v, tensors, numbers, code)
    if _is_transformed():
        # A transform's wrapped tensor does not tell whether the tensor inside it wants a gradient.
        _refuse_beside_gradients(tensors)
        numbers, drawn = _seeded(q, numbers)
        return _Transformed.apply(q, k, v, tensors[0], tensors[2], tensors[1], drawn, *tensors[3:7], *numbers)
    if _is_plain(tensors, numbers):
        at = _kept(numbers)
        if at >= 0:
            if _moves(q, k, v):
                return _Plain.apply(q, k, v, at)
            return plain(q, k, v, at) if lse else (plain_o(q, k, v, at), None)
    numbers, drawn = _seeded(q, numbers)
    if _want_gradients(q, k, v, *tensors[:3], *tensors[8:]):
        why = _no_gradient(tensors)
        if why is not None:
            if torch.compiler.is_compiling():
                raise ValueError(why)
            with torch.no_grad():
                o, of_rows = forward(q, k, v, *tensors, *numbers, drawn)
            return _without_gradients(o, of_rows, why, q, k, v, *tensors)
        if _want_gradients(tensors[1]):
            _refuse_gradients(alibi_slopes=tensors[1])
        return _Attention.apply(q, k, v, tensors[0], tensors[2], tensors[1], tensors[3:7], numbers, drawn)
    return forward(q, k, v, *tensors, *numbers, drawn)


def _check_outputs(outputs: Tuple[Any, ...]) -> None:
    """Raises for a small output that is no tensor, or one that autograd would take a gradient of."""
    for name, x in zip(OUTPUTS, outputs):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {shown(x)} is no tensor of torch's")
        if x.requires_grad:
            raise ValueError(f"{name} requires a gradient, but is written, and has none")
    _refuse_views(**dict(zip(OUTPUTS, outputs)))


def _with_code(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Tuple[Any, ...], numbers: Tuple[Any, ...], code: Code
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    if _is_transformed():
        what = "score_code, mask_code: torch.func's transforms have no rule for code"
        raise NotImplementedError(what if code.is_text() else "mask: torch.func's transforms have no rule for data")
    numbers, drawn = _seeded(q, numbers)
    masks = code.masks
    for name, x in zip(MASK_TENSORS, masks.tensors):
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"mask: {name}: {shown(x)} is no tensor of torch's")
    _check_outputs(masks.outputs)
    texts = (code.score, code.mask, ",".join(code.names), list(code.numbers), masks.block_q, masks.block_k)

    def run() -> Tuple[torch.Tensor, torch.Tensor]:
        rest = (*texts[:3], list(code.tensors), *texts[3:], drawn)
        return forward_code(q, k, v, *tensors, *masks.tensors, *masks.outputs, *numbers, *rest)

    if not _want_gradients(q, k, v, *tensors[:3], *tensors[8:], *code.tensors):
        return run()
    why = _no_gradient(tensors)
    if why is not None:
        if torch.compiler.is_compiling():
            raise ValueError(why)
        with torch.no_grad():
            o, of_rows = run()
        return _without_gradients(o, of_rows, why, q, k, v, *tensors, *code.tensors)
    if _want_gradients(tensors[1]):
        _refuse_gradients(alibi_slopes=tensors[1])
    rest = (tensors[0], tensors[2], tensors[1], tensors[3:7], numbers, drawn, texts, masks.tensors, masks.outputs)
    return _Coded.apply(q, k, v, *rest, *code.tensors)


#: Types that autocast converts. f64 stays, as in torch's own attention, and so does FP8.
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def autocast(*given: Any) -> Tuple[Any, ...]:
    """Tensors in autocast's type where it is on for their device."""
    if not torch._C._is_any_autocast_enabled() or not isinstance(given[0], torch.Tensor):
        return given
    kind = given[0].device.type
    if not torch.is_autocast_enabled(kind):
        return given
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in _CAST else x for x in given)


def prepared(qkv: Tuple[Any, Any, Any], tensors: Tuple[Any, ...]) -> Tuple[Tuple[Any, Any, Any], Tuple[Any, ...]]:
    """A call's tensors in autocast's type, and copied where an axis that has to be dense is not."""
    q, k, v = autocast(*qkv)
    try:
        if not (q.stride(-1) == k.stride(-1) == v.stride(-1) == 1):
            by_columns = v.dim() > 2 and v.stride(-3) == 1
            q, k, v = _rows(q), _rows(k), v if by_columns else _rows(v)
        # The compiler of torch 2.11 does not trace whether two tuples are one object.
        if torch.compiler.is_compiling() or tensors is not NO_TENSORS:
            bias = None if tensors[0] is None else _rows(tensors[0])
            tensors = (bias, *(x if x is None or x.is_contiguous() else x.contiguous() for x in tensors[1:]))
    except (AttributeError, IndexError, RuntimeError, TypeError):
        # The operator reports the argument that is no tensor.
        pass
    return (q, k, v), tensors


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def resolved(x: Any) -> Any:
    """A tensor with numbers of its own in memory, where a negative view shares another's."""
    return x.resolve_neg() if isinstance(x, torch.Tensor) else x


def _refuse_views(**written: Any) -> None:
    """Raises for an output whose memory has other numbers than it: torch ends the process where one is written to."""
    # A compiler writes to copies of tensors, so it checks nothing here.
    for name, x in () if torch.compiler.is_compiling() else written.items():
        for what in ("is_neg", "is_conj"):
            if isinstance(x, torch.Tensor) and getattr(x, what)():
                raise ValueError(
                    f"{name}: {what}() is true of this view, but it is written: give one in memory of its own"
                )


def _seeded(q: torch.Tensor, numbers: Tuple[Any, ...]) -> Tuple[Tuple[Any, ...], Optional[torch.Tensor]]:
    """Numbers with a seed of torch's generator where a call that drops elements has none; while a compiler traces, the
    seed as a tensor beside them."""
    # A captured call keeps its seed, which the host draws, so each replay would repeat one dropout mask.
    is_on_gpu = numbers[_AT_P_DROP] and not torch.compiler.is_compiling() and getattr(q, "is_cuda", False)
    if is_on_gpu and torch.cuda.is_current_stream_capturing():
        raise ValueError("p_drop: a graph is captured, whose replays would all drop the same elements")
    if numbers[_AT_SEED] is not None:
        return numbers, None
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device="cpu")
    if torch.compiler.is_compiling():
        return with_seed(numbers, 0), drawn
    return with_seed(numbers, int(drawn)), None


def _no_gradient(tensors: Tuple[Any, ...]) -> Optional[str]:
    """What a call has that has no gradient, in words."""
    for name, given in zip(TENSORS[7:], tensors[7:]):
        if given is not None:
            return f"{name} is given, but there is no gradient of paged or FP8 tensors"
    return None


def _refuse_beside_gradients(tensors: Tuple[Any, ...]) -> None:
    why = _no_gradient(tensors)
    if why is not None:
        raise ValueError(why)


def refuse_tangents(*given: Any, **captured: Any) -> None:
    """An operator drops the tangents of forward-mode differentiation, and a derivative would be 0 in silence."""
    if forward_ad._current_level < 0:
        return
    for name, x in (*zip(("q", "k", "v", *TENSORS), given), *captured.items()):
        while isinstance(x, torch.Tensor) and torch._C._functorch.is_batchedtensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent, but attention has gradients backward alone")


def _is_plain(tensors: Tuple[Any, ...], numbers: Tuple[Any, ...]) -> bool:
    """Whether a call's numbers are worth keeping: a seed is another one each time, and what a compiler makes outlives
    the process that has kept them."""
    return not torch.compiler.is_compiling() and tensors is NO_TENSORS and not numbers[_AT_P_DROP]


def _moves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether somebody wants a gradient of Q, K or V."""
    try:
        return (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
    except AttributeError:
        # The operator reports the argument that is no tensor.
        return False


def leaves_out_lse(qkv: Tuple[Any, Any, Any], tensors: Tuple[Any, ...], numbers: Tuple[Any, ...]) -> bool:
    """Whether a call that does not ask for the LSE runs a kernel that does not write it."""
    return _is_plain(tensors, numbers) and not _moves(*qkv)


#: Most parts that a GPU's kernel takes at once.
_MOST_PARTS = 128


def _of_type(numbers: Tuple[Any, ...], dtype_o: int) -> Tuple[Any, ...]:
    return (*numbers[:_AT_DTYPE_O], dtype_o, *numbers[_AT_DTYPE_O + 1 :])


def _as_parts(parts: torch.Tensor, numbers: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """Numbers that name O's type, which else is that of the parts."""
    asked = numbers[_AT_DTYPE_O]
    return numbers if asked in _DTYPES else _of_type(numbers, _CODES.get(parts.dtype, asked))


def _merged(o_parts: torch.Tensor, lse_parts: torch.Tensor, numbers: Tuple[Any, ...]) -> Tuple[Any, Any]:
    """Parts merged by their LSE: more than a kernel takes in groups one after another, in f32."""
    if not _are_many(o_parts, lse_parts):
        return combine_op(o_parts, lse_parts, *numbers)
    wide = _of_type(numbers, _F32)
    groups = [combine_op(*group, *wide) for group in zip(o_parts.split(_MOST_PARTS), lse_parts.split(_MOST_PARTS))]
    o, lse = (torch.stack(parts) for parts in zip(*groups))
    return _merged(o, lse, _as_parts(o_parts, numbers))


def _are_many(*parts: torch.Tensor) -> bool:
    """Whether these are more than a kernel takes; what is no list of parts the operator refuses."""
    return all(isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape[0] > _MOST_PARTS for x in parts) and all(
        x.shape[0] == parts[0].shape[0] for x in parts
    )


class _Combine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(o_parts, lse_parts, *numbers):
        return _merged(o_parts, lse_parts, numbers)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2], *output)
        ctx.rest = (None,) * len(inputs[2:])

    @staticmethod
    def backward(ctx, dout, dlse):
        o_parts, lse_parts, o, lse = ctx.saved_tensors
        with torch.no_grad():
            # A row for which no part has a key has LSE -inf in every part, and no gradient.
            weights = torch.where(torch.isneginf(lse_parts), 0.0, torch.exp(lse_parts - lse))
            rows = weights.transpose(-1, -2).unsqueeze(-1)
            along = ((o_parts.float() - o.float()) * dout.float()).sum(-1) + dlse.transpose(-1, -2)
            gradients = (rows * dout.float()).to(o_parts.dtype), weights * along.transpose(-1, -2)
        return (*once(gradients, o_parts=o_parts, lse_parts=lse_parts, dout=dout, dlse=dlse), *ctx.rest)

    jvp = staticmethod(lambda ctx, *tangents: _no_tangents())


def combine(
    o_parts: torch.Tensor, lse_parts: torch.Tensor, numbers: Tuple[Any, ...]
) -> Tuple[torch.Tensor, torch.Tensor]:
    if isinstance(lse_parts, torch.Tensor) and lse_parts.layout is torch.strided:
        lse_parts = lse_parts.contiguous()
    if _is_transformed() or _want_gradients(o_parts, lse_parts):
        return _Combine.apply(o_parts, lse_parts, *numbers)
    return _merged(o_parts, lse_parts, numbers)


def _added(o_parts: torch.Tensor, numbers: Tuple[Any, ...]) -> torch.Tensor:
    """The sum of parts, in their order."""
    if not _are_many(o_parts):
        return add_parts_op(o_parts, *numbers)
    numbers = _as_parts(o_parts, numbers)
    first, *rest = o_parts.split(_MOST_PARTS)
    total = add_parts_op(first, *_of_type(numbers, _F32))
    for group in rest:
        add_parts_to(group, total, *_of_type(numbers, _F32))
    return total.to(_DTYPES[numbers[_AT_DTYPE_O]])


class _AddParts(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(o_parts, *numbers):
        return _added(o_parts, numbers)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.of = inputs[0].shape, inputs[0].dtype, (None,) * len(inputs[1:])

    @staticmethod
    def backward(ctx, dout):
        shape, dtype, rest = ctx.of
        return (dout.to(dtype).expand(shape), *rest)

    jvp = staticmethod(lambda ctx, *tangents: _no_tangents())


def add_parts(o_parts: torch.Tensor, o: Optional[torch.Tensor], numbers: Tuple[Any, ...]) -> torch.Tensor:
    wants_grad = _want_gradients(o_parts, o)
    if o is None:
        if wants_grad or _is_transformed():
            return _AddParts.apply(o_parts, *numbers)
        return _added(o_parts, numbers)
    if wants_grad:
        raise ValueError("o is given, but there is no gradient of what is added in place")
    _refuse_views(o=o)
    # The operator refuses an O that is no tensor.
    if not _are_many(o_parts) or getattr(o, "dtype", None) not in (torch.float32, torch.float16, torch.bfloat16, *_FP8):
        add_parts_to(o_parts, o, *numbers)
        return o
    # Groups of parts are added in f32, so that the sum is rounded once.
    total = o.float()
    for group in o_parts.split(_MOST_PARTS):
        add_parts_to(group, total, *numbers)
    return o.copy_(total)


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
    small: Tuple[Any, ...] = (None, None, None),
) -> None:
    _refuse_views(o=o, lse=lse, keep_mask=keep_mask)
    _check_outputs(small)
    numbers, drawn = _seeded(q, numbers)
    given = (q, k, v, *tensors, scale_o, o, lse, keep_mask)
    if all(x is None for x in small):
        forward_out(*given, *numbers, drawn)
    else:
        forward_out_small(*given, *small, *numbers, drawn)


_OF_A_CACHE = "k_cache is a cache, of which attention has no gradient"


def kvcache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: Optional[torch.Tensor],
    cache: Tuple[Any, ...],
    tensors: Tuple[Any, ...],
    numbers: Tuple[Any, ...],
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    _refuse_views(k=k, v=v, **dict(zip(CACHE_SCALES, cache[6:])))
    operator = kvcache_op if len(cache) == 6 else kvcache_scaled_op
    cast = autocast(q, *cache[:2])
    if isinstance(k, torch.Tensor) and k.dtype in (cast[0].dtype, *_FP8):
        q, cache = cast[0], (*cast[1:], *cache[2:])
    numbers, drawn = _seeded(q, numbers)
    sources = (q, k, v, *cache[:2], *cache[6:], *tensors[:3])
    if not _want_gradients(*sources):
        return operator(q, k, v, *cache, *tensors, *numbers, drawn)
    if torch.compiler.is_compiling():
        raise ValueError(_OF_A_CACHE)
    with torch.no_grad():
        o, lse = operator(q, k, v, *cache, *tensors, *numbers, drawn)
    return without_gradients_of_a_cache(o, lse, *sources)


def without_gradients_of_a_cache(o: torch.Tensor, lse: Optional[torch.Tensor], *sources: Any) -> Any:
    """Results of a call over a cache; their backward raises where one of ``sources`` wants a gradient."""
    return _without_gradients(o, lse, _OF_A_CACHE, *sources) if _want_gradients(*sources) else (o, lse)


def _strided(name: str, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise TypeError(f"{name}: {type(tensor).__name__} is no tensor of torch that has strides")
    return tensor


def put(request: _native.Request, name: str, tensor: Optional[torch.Tensor], address: Optional[int] = None) -> None:
    """Puts a tensor into a request that is planned and not run; with an ``address`` into one that is checked alone,
    where it may have no memory."""
    if tensor is None:
        return
    device, dtype = _described(name, tensor, address is not None)
    if address is None:
        address = tensor.data_ptr()
    request.put(name, address, dtype, tensor.shape, tensor.stride(), device)


def put_captured(
    request: _native.Request, at: int, name: str, tensor: torch.Tensor, grad: int, address: Optional[int] = None
) -> None:
    """Puts a captured tensor into a request, as :func:`put` does; ``grad`` is where its gradient would lie."""
    device, dtype = _described(f"captured {name}", tensor, address is not None)
    if address is None:
        address = tensor.data_ptr()
    request.put_captured(at, address, dtype, tensor.shape, tensor.stride(), device, grad)


class _Nowhere:
    """A door of captured tensors that may have no memory."""

    @staticmethod
    def put(request: _native.Request, name: str, tensor: Optional[torch.Tensor]) -> None:
        assert tensor is None, name

    @staticmethod
    def put_captured(request: _native.Request, at: int, name: str, tensor: torch.Tensor, grad: int) -> None:
        put_captured(request, at, name, tensor, grad, 256 if tensor.numel() else 0)


def _described(name: str, tensor: torch.Tensor, may_be_nowhere: bool) -> Tuple[_native.Device, str]:
    kind = _strided(name, tensor).device.type
    kinds = {"cpu": 0, "cuda": 2 if torch.version.hip else 1, **({"meta": 3} if may_be_nowhere else {})}
    if kind not in kinds:
        raise ValueError(f"{name} is on {tensor.device}, neither the CPU nor a GPU")
    return _native.Device(kinds[kind], tensor.device.index or 0), str(tensor.dtype).rpartition(".")[2]
