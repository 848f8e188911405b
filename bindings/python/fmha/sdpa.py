"""``torch.nn.functional.scaled_dot_product_attention`` computed here, where torch would take its flash kernel.

Opt-in::

    import fmha.sdpa
    fmha.sdpa.activate()          # "fmha" of torch's registry of attention implementations
    fmha.sdpa.deactivate()

On Hopper and Blackwell torch asks cuDNN before its flash kernel: :func:`activate` says so, and
``torch.backends.cuda.enable_cudnn_sdp(False)`` ends it. ``torch.nn.attention.activate_flash_attention_impl("fmha")``
does what :func:`activate` does, once this module is imported.
"""

from __future__ import annotations

import warnings
from typing import Any, Optional, Tuple

import torch
from torch.nn import attention as _registry

from . import _arguments, _native, _torch
from ._marks import marks
from ._mask import CAUSAL_TOP_LEFT, NONE
from ._theirs import attention_out, bind

NAME = "fmha"

_WHERE = "CUDA"
_AT_SEED = _native.NUMBERS.index("seed")


def _seed(dropout_p: float) -> torch.Tensor:
    """From torch's generator of the CPU, which ``torch.manual_seed`` sets; backward is handed the same."""
    return (
        torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu")
        if dropout_p
        else torch.zeros((), dtype=torch.int64, device="cpu")
    )


def _state(seed: torch.Tensor, row_invariant: bool) -> torch.Tensor:
    """The seed as torch's kernels give it, two numbers of 64 bits: what torch compiled asserts shape and type. The
    second one is an offset there and has no use here: it says whether rows have equal bits, since backward may run
    where the context has ended."""
    return torch.stack([seed, torch.full_like(seed, row_invariant)]).view(torch.uint64)


def _o_like(query: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """O with the order of the query's axes in memory, as torch's own kernels have it."""
    if query.shape[-1] == head_dim_v:
        return torch.empty_like(query)
    order = sorted(range(query.dim()), key=lambda axis: (-query.stride(axis), axis))
    shape = [*query.shape[:-1], head_dim_v]
    made = query.new_empty([shape[axis] for axis in order])
    return made.permute([order.index(axis) for axis in range(query.dim())])


def _dense(*tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _refuse_debug_mask(return_debug_mask: bool, dropout_p: float, **beside: Any) -> None:
    if return_debug_mask and not dropout_p:
        raise RuntimeError(f"return_debug_mask is True, but dropout_p is {dropout_p}: marks are of dropout")
    for name, given in beside.items():
        if return_debug_mask and given is not None:
            raise NotImplementedError(f"return_debug_mask is given beside {name}: marks are of packed or dense keys")


def _debug_mask(return_debug_mask: bool, query: torch.Tensor, marks: Any) -> torch.Tensor:
    """Marks of dropout where torch's tests ask for them, as :mod:`fmha._marks` makes them."""
    return marks() if return_debug_mask else query.new_empty(0)


def _sdpa_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _refuse_debug_mask(return_debug_mask, dropout_p)
    seed, row_invariant = _seed(dropout_p), _arguments.wants_rows(None)
    o = _o_like(query, value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    # torch's causal mask is top-left, but torch takes a flash kernel for it only where Q and K have equal lengths.
    attention_out(
        *_dense(o, query, key, value),
        lse=lse,
        mask="t" if is_causal else None,
        softmax_scale=scale,
        p_drop=dropout_p,
        row_invariant=row_invariant,
        seed=int(seed),
    )
    return (
        o,
        lse,
        None,
        None,
        query.shape[2],
        key.shape[2],
        _state(seed, row_invariant),
        torch.zeros((), dtype=torch.uint64),
        _debug_mask(
            return_debug_mask,
            query,
            lambda: marks(
                *_dense(query, key), CAUSAL_TOP_LEFT if is_causal else NONE, dropout_p, int(seed), softmax_scale=scale
            ),
        ),
    )


def _as_torch_lays(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """With the strides of ``empty_like(x)``, which torch compiled asserts; a copy where the operator has others."""
    if gradient.stride() == x.stride():
        return gradient
    wanted = torch.empty_like(x)
    return gradient if gradient.stride() == wanted.stride() else wanted.copy_(gradient)


def _backward(
    dout, q, k, v, o, lse, lengths: Tuple[Any, ...], state: torch.Tensor, **call: Any
) -> Tuple[torch.Tensor, ...]:
    _, numbers = bind(
        seed=int(state[0]) if call["p_drop"] else 0,
        **call,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        row_invariant=bool(state[1]),
    )
    gradients = _torch.backward(_torch.last_is_dense(dout), q, k, v, o, lse, None, None, None, None, *lengths, *numbers)
    return tuple(_as_torch_lays(gradient, x) for gradient, x in zip(gradients, (q, k, v)))


def _sdpa_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    dout, q, k, v, o = _dense(grad_out, query, key, value, out)
    gradients = _backward(
        dout,
        q,
        k,
        v,
        o,
        logsumexp,
        (None,) * 4,
        philox_seed,
        mask="t" if is_causal else None,
        softmax_scale=scale,
        p_drop=dropout_p,
    )
    return _dense(*gradients)


def _window(left: Optional[int], right: Optional[int], is_causal: bool) -> Any:
    from ._mask import from_window_size

    return from_window_size((left, right), is_causal)


def _lengths(cum_seq_q, cum_seq_k, max_q, max_k) -> dict:
    if cum_seq_q is None:
        return {}
    return dict(cu_seqlens_q=cum_seq_q, max_seqlen_q=int(max_q), cu_seqlens_k=cum_seq_k, max_seqlen_k=int(max_k))


def _flash_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """Rows first: ``(b, s, h, d)`` or packed; causal and windows are bottom-right, as FlashAttention's."""
    if (cum_seq_q is None) is not (cum_seq_k is None):
        given, absent = ("cum_seq_q", "cum_seq_k") if cum_seq_k is None else ("cum_seq_k", "cum_seq_q")
        raise ValueError(f"{given} is given, but {absent} is not")
    _refuse_debug_mask(return_debug_mask, dropout_p, block_table=block_table, seqused_k=seqused_k)
    seed, row_invariant = _seed(dropout_p), _arguments.wants_rows(None)
    packed = query.dim() == 3
    lse = query.new_empty(
        (query.shape[1], query.shape[0]) if packed else (query.shape[0], query.shape[2], query.shape[1]),
        dtype=torch.float32,
    )
    o = _o_like(query, value.shape[-1])
    if cum_seq_q is not None:
        # The kernel does not write rows behind the last offset, so they are made 0.
        o.zero_()
        lse.zero_()
    call = _lengths(cum_seq_q, None if block_table is not None else cum_seq_k, max_q, max_k)
    if block_table is not None:
        call["max_seqlen_k"] = 0
        if seqused_k is None:
            seqused_k = cum_seq_k.diff().to(torch.int32)
    attention_out(
        o,
        query,
        key,
        value,
        lse=lse,
        mask=_window(window_size_left, window_size_right, is_causal),
        softmax_scale=scale,
        p_drop=dropout_p,
        row_invariant=row_invariant,
        seed=int(seed),
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        batch_invariant=num_splits == 1,
        **call,
    )
    mask = _window(window_size_left, window_size_right, is_causal)
    drops = dict(p_drop=dropout_p, seed=int(seed), softmax_scale=scale, alibi_slopes=alibi_slopes)
    debug = _debug_mask(return_debug_mask, query, lambda: marks(query, key, mask, **drops, **call))
    return o, lse, _state(seed, row_invariant), torch.zeros((), dtype=torch.uint64), debug


def _flash_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    # The schema always has offsets: a call that is not packed passes empty ones.
    packed = query.dim() == 3
    for name, offsets in (("cum_seq_q", cum_seq_q), ("cum_seq_k", cum_seq_k)):
        if not packed and offsets is not None and offsets.numel():
            raise ValueError(f"{name} is given, but query has {query.dim()} axes, not the 3 of packed rows")
    call = _lengths(cum_seq_q, cum_seq_k, max_q, max_k) if packed else {}
    lengths = (call.pop("cu_seqlens_q", None), call.pop("cu_seqlens_k", None), None, None)
    return _backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        lengths,
        rng_state,
        mask=_window(window_size_left, window_size_right, is_causal),
        softmax_scale=scale,
        p_drop=dropout_p,
        **call,
    )


_KERNELS = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
}


class _Handle:
    """What the registry keeps while this is torch's flash attention."""

    def __init__(self, where: str) -> None:
        self.library: Optional[torch.library.Library] = torch.library.Library("aten", "IMPL", where)
        with warnings.catch_warnings():
            # torch warns when a kernel replaces its own; here that is intended.
            warnings.simplefilter("ignore")
            for name, kernel in _KERNELS.items():
                self.library.impl(name, kernel)

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None


_active: Optional[_Handle] = None


def _register() -> _Handle:
    global _active
    if (
        torch.cuda.is_available()
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.cuda.get_device_capability()[0] >= 9
    ):
        warnings.warn(
            "torch asks cuDNN before its flash kernel on this device: torch.backends.cuda.enable_cudnn_sdp(False) "
            "lets fmha serve",
            stacklevel=3,
        )
    _remove()
    _active = _Handle(_WHERE)
    return _active


def _remove() -> None:
    global _active
    if _active is not None:
        _active.remove()
        _active = None


_registry.register_flash_attention_impl(NAME, register_fn=_register)


def activate() -> None:
    """torch's flash attention on GPUs is this library's until :func:`deactivate`."""
    _registry.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """torch's own kernels again, if they are not already."""
    # torch before 2.13 can not restore its own implementation, and goes on to report the replaced one as active.
    restore = getattr(_registry, "restore_flash_attention_impl", None)
    if restore is not None and _registry.current_flash_attention_impl() == NAME:
        restore()
    _remove()
