"""Torch's FlexAttention by this library: :func:`flex_attention` and :func:`create_block_mask` with torch's names,
defaults and meaning.

``score_mod`` and ``mask_mod`` are called once, with traced values in place of tensors, and become text of a small
language that backends compute; a new function compiles one kernel, a new value of what it captures none. Tensors
that they read by index are captured, and have gradients where they are floats that require one. A Python number of a
closure or of a module is an argument of the call; so is a tensor of no axes on the CPU.
"""

from __future__ import annotations

import functools
import math
import types
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from torch.nn.attention import flex_attention as _torchs
from torch.nn.attention.flex_attention import BlockMask, and_masks, noop_mask, or_masks

from . import _code, _native, _torch
from ._explain import described
from ._mask_data import BlockLists, Masks, split
from ._numbers import flag, shown
from ._theirs import bind
from ._trace import facts, same

__all__ = ["BlockMask", "and_masks", "create_block_mask", "flex_attention", "noop_mask", "or_masks"]

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]

#: Torch's default for the rows and the columns of a block.
_BLOCK_SIZE = 128
#: Blocks of this size are of a mask that hides nothing.
_WHOLE = 1 << 30

AuxRequest: Any = getattr(_torchs, "AuxRequest", None)
AuxOutput: Any = getattr(_torchs, "AuxOutput", None)

#: Options of torch's kernels that state what holds of a mask, and ask for nothing.
_STATEMENTS = ("ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS")


#: Lists of a mask that say which blocks are seen.
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class _OfAFunction(BlockMask):
    """A mask that its function says whole: lists of blocks are made where somebody asks for them."""

    def __init__(
        self, mask_mod: MaskMod, sizes: Tuple[int, int, int, int], block_size: Tuple[int, int], how: Any
    ) -> None:
        # Torch's own constructor wants the lists.
        self.mask_mod = mask_mod
        self.seq_lengths = sizes[2:]
        self.BLOCK_SIZE = block_size
        self._made_of, self._sizes, self._how = mask_mod, sizes, how

    from_kv_blocks = BlockMask.from_kv_blocks  # type: ignore[assignment]

    @property
    def shape(self) -> Tuple[int, ...]:
        return self._sizes

    def is_function(self) -> bool:
        """Whether its function is the one that it was made of, and so says all: its lists, where they were made, are
        as they were made."""
        if self.mask_mod is not self._made_of or tuple(self.BLOCK_SIZE) != self._how["BLOCK_SIZE"]:
            return False
        held = vars(self)
        made = held.get("_made")
        if made is None:
            return not any(name in held for name in _LISTS)
        # A compiler reads no count of changes in place.
        counts = not torch.compiler.is_compiling()
        return all(
            held.get(name) is x and (x is None or not counts or x._version == version)
            for name, (x, version) in made.items()
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_how" not in self.__dict__:
            raise AttributeError(name)
        made = _torchs.create_block_mask(self._made_of, *self._sizes, **self._how)
        lists = {
            key: value for key, value in vars(made).items() if key not in ("mask_mod", "seq_lengths", "BLOCK_SIZE")
        }
        self.__dict__["_made"] = {
            key: (value, None if value is None else value._version) for key, value in lists.items() if key in _LISTS
        }
        # A list that the caller has set stays.
        self.__dict__.update({key: value for key, value in lists.items() if key not in self.__dict__})
        if name not in self.__dict__:
            raise AttributeError(name)
        return self.__dict__[name]


def create_block_mask(
    mask_mod: MaskMod,
    B: Optional[int],
    H: Optional[int],
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: Union[int, Tuple[int, int]] = _BLOCK_SIZE,
    _compile: bool = False,
    **how: Any,
) -> BlockMask:
    """The mask that ``mask_mod(b, h, q_idx, kv_idx)`` says, as torch's function of this name gives it.

    Nothing is computed yet: :func:`flex_attention` takes the function. Lists of blocks, ``kv_indices`` and the others,
    are made by torch where they are asked for. ``device``, ``BLOCK_SIZE`` and torch's other arguments are for these.
    """
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: {shown(mask_mod)} is no function")
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    sizes = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    block_size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    how = {"device": device, "BLOCK_SIZE": block_size, **({"_compile": True} if _compile else {}), **how}
    return _OfAFunction(mask_mod, sizes, block_size, how)  # type: ignore[arg-type]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Optional[ScoreMod] = None,
    block_mask: Optional[BlockMask] = None,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Optional[Dict[str, Any]] = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention with a score and a mask of the caller's own, as ``torch.nn.attention.flex_attention.flex_attention``.

    Args:
        query: ``[B, Hq, L, E]``, any strides.
        key: ``[B, Hkv, S, E]``; ``value``: ``[B, Hkv, S, Ev]``. A batch of 1 serves every sequence of ``query`` where
            there is a ``block_mask``.
        score_mod: ``(score, b, h, q_idx, kv_idx)``: what the scaled score becomes. It is called once, with traced
            values: a Python ``if`` on one is refused, and so is by its name what the language has not.
        block_mask: of :func:`create_block_mask`, here or in torch. A mask with lists of its own means what torch's
            kernels make of it, and another one compiles nothing: a pair is seen if its block is in the full list, or in the other and ``mask_mod`` says yes.
        scale: multiplies ``Q K^T``; ``None`` is ``1 / sqrt(E)``.
        enable_gqa: whether ``key`` may have fewer heads than ``query``, whose count is a multiple.
        return_lse: whether the LSE comes too, f32 ``[B, Hq, L]``, natural logarithm, -inf for a row without keys.
        kernel_options: torch's; those that choose a kernel of torch's are refused by their names.
        return_aux: torch's ``AuxRequest``: the result is ``(out, AuxOutput)``, with the LSE where ``lse`` asks for it and,
            where ``max_scores`` does, each row's greatest score, f32 ``[B, Hq, L]``, which has no gradient.

    Returns:
        ``[B, Hq, L, Ev]``; with ``return_lse`` that and the LSE. Differentiable by ``query``, ``key``, ``value``, and
        by captured tensors of floats.

    Raises:
        NotImplementedError: an operation that the language has not, by its name; torch's second derivatives.
        TypeError: a Python ``if`` on a traced value.
        ValueError, RuntimeError: what is wrong with an argument, its name first; or why no kernel takes the call.
    """
    wants_lse = flag("return_lse", return_lse)
    aux = aux_of(return_aux, wants_lse)
    refuse_options(kernel_options)
    key, value = checked(query, key, value, block_mask, enable_gqa)
    bound = bind(softmax_scale=scale)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    code = code_of(score_mod, block_mask, (q, k, v), bound)
    if code is not None and _is_causal(code, query, key):
        bound, code = bind(softmax_scale=scale, mask="causal"), None
    bound = _keeping(block_mask, code, query, bound)
    greatest = None
    if aux is not None and getattr(aux, "max_scores", False):
        greatest = query.new_empty(query.shape[:-1], dtype=torch.float32)
        masks = Masks() if code is None else code.masks
        code = (code or _code.NOTHING)._replace(masks=masks._replace(outputs=(greatest, None, None)))
    o, lse = _torch.attention(q, k, v, *bound, True, code)
    o = o.transpose(1, 2)
    if aux is not None:
        # Releases of torch without max_scores have no such field.
        scores = {} if greatest is None else {"max_scores": greatest}
        return o, AuxOutput(lse=lse if aux.lse else None, **scores)
    return (o, lse) if wants_lse else o


#: Texts of the causal mask, which has a name: calls by names are kept whole, and take a third of the host's time.
_CAUSAL = ("q >= k", "k <= q")


def _is_causal(code: _code.Code, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a call's functions are the causal mask of equal lengths. A compiler's graph has the functions."""
    if code.mask not in _CAUSAL or code.score or code.names or not code.masks.is_empty():
        return False
    return query.shape[-2] == key.shape[-2] and not torch.compiler.is_compiling()


def _keeping(
    block_mask: Optional[BlockMask], code: Optional[_code.Code], query: torch.Tensor, bound: Tuple[Any, Any]
) -> Tuple[Any, Any]:
    """A call whose lists of tiles are kept: its mask is of :func:`create_block_mask`, whose caller builds once, and its
    function captures no tensor. A captured call makes its own, which its graph keeps."""
    if code is None or not code.mask or not isinstance(block_mask, _OfAFunction) or not query.is_cuda:
        return bound
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return bound
    tensors, numbers = bound
    numbers = _torch.as_asked(numbers)
    return tensors, (*numbers[:-1], numbers[-1] | _torch.KEEPS_LISTS)


def checked(
    query: Any, key: Any, value: Any, block_mask: Optional[BlockMask], enable_gqa: Any
) -> Tuple[torch.Tensor, torch.Tensor]:
    """K and V with the batch of Q. Raises for tensors that do not go together, with their names and numbers."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.dim() != 4:
            raise ValueError(f"{name}: {shown(tensor)} is no tensor of four axes [B, H, L, E]")
    key, value = _batches(query, key, value, block_mask)
    _check_heads(query, key, value, flag("enable_gqa", enable_gqa))
    return key, value


def aux_of(return_aux: Any, wants_lse: bool) -> Any:
    if return_aux is None:
        return None
    if AuxRequest is None or not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux: {shown(return_aux)} is no AuxRequest of torch's")
    if wants_lse:
        raise ValueError("return_lse and return_aux: both are given, of which return_aux says all")
    return return_aux


def refuse_options(options: Optional[Dict[str, Any]]) -> None:
    """Raises for the first of torch's options that asks for something."""
    for name, value in (options or {}).items():
        if value is None or name in _STATEMENTS or name == "BACKEND" and value == "AUTO":
            continue
        raise NotImplementedError(f"kernel_options: {name} {shown(value)} is of torch's kernels, and chooses none here")


def _batches(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Optional[BlockMask]
) -> Tuple[torch.Tensor, torch.Tensor]:
    batch = query.shape[0]
    for name, x in (("key", key), ("value", value)):
        if x.shape[0] != batch and (x.shape[0] != 1 or block_mask is None):
            raise ValueError(f"{name} has a batch of {x.shape[0]}, but query one of {batch}")
    return key.expand(batch, *key.shape[1:]), value.expand(batch, *value.shape[1:])


def _check_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    of_q, of_k = query.shape[1], key.shape[1]
    if of_q != of_k and not enable_gqa:
        raise ValueError(f"enable_gqa is False, but query has {of_q} heads and key {of_k}")
    if value.shape[1] != of_k:
        raise ValueError(f"value has {value.shape[1]} heads, but key {of_k}")
    if of_k == 0 or of_q % of_k:
        raise ValueError(f"query has {of_q} heads, no multiple of key's {of_k}")


def code_of(
    score_mod: Optional[ScoreMod],
    block_mask: Optional[BlockMask],
    qkv: Tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bound: Tuple[Tuple[Any, ...], Tuple[Any, ...]],
    names: Tuple[str, str] = ("score_mod", "mask_mod"),
) -> Optional[_code.Code]:
    """The functions and lists of blocks of a call, whose tensors are ``[B, L, H, E]``. Lists are data; beside functions
    they are a table that the mask's function reads where no fast kernel of the device has both."""
    query, key = (x.transpose(1, 2) for x in qkv[:2])
    mask, lists = mask_of(block_mask, query, key)
    if lists is None:
        return _traced(score_mod, mask, names, query.device)
    code = _code.bind(_torch, score_mod, mask, None, names, query.device, lists)
    if block_mask is None or lists is None or code is None or not code.is_text() or _takes_lists(qkv, bound, code):
        return code
    return _by_table(score_mod, block_mask, mask, names, query.device)


#: What was traced of a function, and all that it was made of.
_TRACED: "weakref.WeakKeyDictionary[Any, Tuple[List[Any], _code.Code]]" = weakref.WeakKeyDictionary()


def _traced(
    score_mod: Optional[ScoreMod], mask: Optional[MaskMod], names: Tuple[str, str], device: torch.device
) -> Optional[_code.Code]:
    """The functions of a call without lists. What was traced is kept with the first of them, and holds while all that it
    was made of is the same."""
    first = mask if score_mod is None else score_mod
    is_kept = isinstance(first, (types.FunctionType, functools.partial)) and not torch.compiler.is_compiling()
    of_score = [] if score_mod is None or not is_kept else facts(score_mod, _is_tensor)
    of_mask = [] if mask is None or not is_kept else facts(mask, _is_tensor)
    if not is_kept or of_score is None or of_mask is None:
        return _code.bind(_torch, score_mod, mask, None, names, device, folds=True)
    # Facts without the function itself, which goes when nobody else has it.
    parts = (None if x is first else x for x in (*of_score, "mask", *of_mask))
    known = [str(device), names[0], *parts]
    kept = _TRACED.get(first)
    if kept is not None and same(kept[0], known):
        return kept[1]
    code = _code.bind(_torch, score_mod, mask, None, names, device, folds=True)
    # A converted copy of a tensor does not see what changes in it.
    if code is not None and all(any(x is y for y in known) for x in code.tensors):
        _TRACED[first] = (known, code)
    return code


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


#: What :func:`_takes_lists` has found, by what a plan depends on.
_FOUND: Dict[Any, bool] = {}


def _takes_lists(qkv: Tuple[torch.Tensor, ...], bound: Tuple[Tuple[Any, ...], Any], code: _code.Code) -> bool:
    """Whether a kernel of the device takes functions beside lists, backward too where a gradient is wanted."""
    if qkv[0].device.type == "cpu":
        return True
    if torch.compiler.is_compiling():
        # Nothing is planned while a compiler traces.
        return False
    # A slow kernel that has both is no reason to leave a fast one that has the table.
    numbers = _torch.as_asked(bound[1])
    tensors, numbers = bound[0], (*numbers[:-1], numbers[-1] & ~_native.OPTIONS["allow_fallback"])
    given = (*qkv, *tensors, *code.masks.tensors, *code.tensors)
    moves = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    facts = tuple(x is not None and (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in given)
    like = (facts, moves, numbers, code.score, code.mask, code.names, code.masks.block_q, code.masks.block_k)
    found = _FOUND.get(like)
    if found is None:
        try:
            for backward in (False, True)[: 2 if moves else 1]:
                request, alive = described(_torch, qkv, tensors, numbers, backward, True, code)
                _native.plan(request)
                del alive
            found = True
        except _native.FmhaError:
            found = False
        if len(_FOUND) >= 4096:
            _FOUND.clear()
        _FOUND[like] = found
    return found


def over_ranks(
    score_mod: Optional[ScoreMod],
    block_mask: Optional[BlockMask],
    query: torch.Tensor,
    key: torch.Tensor,
    whole: Tuple[int, int],
    cuts: Callable[[int, int], bool],
) -> Optional[_code.Code]:
    """The functions and lists of blocks of a call over ranks, as :func:`code_of` gives those of one device. Lists that
    the ranks cut are a table that the mask's function reads.

    Args:
        query, key: this rank's ``[B, H, rows, E]``.
        whole: queries and keys of all ranks.
        cuts: of the rows and the columns of a block: whether some rank's rows begin inside one.
    """
    names = ("score_mod", "mask_mod")
    mask, lists = mask_of(block_mask, query, key, whole)
    if lists is None:
        return _traced(score_mod, mask, names, query.device)
    code = _code.bind(_torch, score_mod, mask, None, names, query.device, lists)
    # Kernels of GPUs do not all have functions beside lists; they have functions that read a table.
    is_data = query.device.type == "cpu" or code is None or not code.is_text()
    if block_mask is None or is_data and not cuts(*block_mask.BLOCK_SIZE):
        return code
    return _by_table(score_mod, block_mask, mask, names, query.device)


def _by_table(
    score_mod: Optional[ScoreMod],
    block_mask: BlockMask,
    mask_mod: Optional[MaskMod],
    names: Tuple[str, str],
    device: torch.device,
) -> Optional[_code.Code]:
    """The functions of a call, of which the mask's reads the lists of blocks as a table."""
    blocks, inner = _Blocks(block_mask), mask_mod or noop_mask

    def in_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return blocks.seen(inner, b, h, q_idx, kv_idx)

    return _code.bind(_torch, score_mod, in_blocks, None, names, device)


def lengths_of(block_mask: Any) -> Optional[Tuple[int, int]]:
    """Queries and keys that a mask is of; ``None`` where it has none of its own."""
    if not isinstance(block_mask, BlockMask) or min(block_mask.BLOCK_SIZE) >= _WHOLE:
        return None
    rows, columns = block_mask.seq_lengths
    return int(rows), int(columns)


def mask_of(
    block_mask: Optional[BlockMask], query: torch.Tensor, key: torch.Tensor, whole: Optional[Tuple[int, int]] = None
) -> Tuple[Optional[MaskMod], Optional[Masks]]:
    """A mask's function, and its lists of blocks as data; ``None`` for either that it has not. ``whole``: queries and
    keys of all ranks, where these are a rank's."""
    if block_mask is None:
        return None, None
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask: {shown(block_mask)} is no BlockMask; create_block_mask makes one of a function")
    mask_mod = block_mask.mask_mod
    if mask_mod is getattr(_torchs, "_sliced_mask_mod_error", _OfAFunction):
        raise RuntimeError(
            "block_mask is a slice of another, which has no mask_mod: set that of the whole, with its offset"
        )
    if mask_mod is None:
        mask_mod = noop_mask
    # A compiler that made the mask wraps its function.
    mask_mod = getattr(mask_mod, "fn", mask_mod)
    rows, columns = block_mask.BLOCK_SIZE
    if rows >= _WHOLE and columns >= _WHOLE:
        return (None if mask_mod is noop_mask else mask_mod), None
    wanted = (query.shape[-2], key.shape[-2]) if whole is None else whole
    if tuple(block_mask.seq_lengths) != wanted:
        of_all = "" if whole is None else " over all ranks"
        raise ValueError(
            f"block_mask is of lengths {tuple(block_mask.seq_lengths)}, but query and key have {wanted}{of_all}"
        )
    sizes = tuple(block_mask.shape[:-2])
    for name, size, whole in (("B", sizes[0], query.shape[0]), ("H", sizes[-1], query.shape[1])):
        if len(sizes) != 2 or size not in (1, whole):
            raise ValueError(f"block_mask has {name} {size}, neither 1 nor query's {whole}")
    if isinstance(block_mask, _OfAFunction) and block_mask.is_function():
        return mask_mod, None
    if block_mask.kv_indices.device != query.device:
        raise ValueError(f"block_mask is on {block_mask.kv_indices.device}, but query on {query.device}")
    has_function = mask_mod is not noop_mask
    return (mask_mod if has_function else None), split(BlockLists.of(block_mask))[1]


class _Blocks:
    """The lists of a mask as a matrix: 0 for a block in no list, 1 for one whose pairs the function decides, 2 and more
    for a full one. Made on the device, without a wait, and kept with the mask."""

    def __init__(self, mask: BlockMask) -> None:
        self.rows, self.columns = mask.BLOCK_SIZE
        self.has_full = mask.full_kv_num_blocks is not None
        lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        count = math.ceil(mask.seq_lengths[1] / self.columns)
        if torch.compiler.is_compiling():
            self.kinds = _kinds(lists, count)
            return
        # A list may be changed in place.
        state = tuple((id(x), x._version) for x in lists if x is not None)
        kept = vars(mask).get("_fmha_blocks")
        if kept is None or kept[0] != state:
            # The lists stay alive, so that no other tensor has their ids.
            kept = (state, _kinds(lists, count), lists)
            vars(mask)["_fmha_blocks"] = kept
        self.kinds = kept[1]

    def seen(self, mask_mod: MaskMod, b: Any, h: Any, q: Any, k: Any) -> Any:
        batch, heads = self.kinds.shape[:2]
        kind = self.kinds[b if batch > 1 else 0, h if heads > 1 else 0, q // self.rows, k // self.columns]
        inner = mask_mod(b, h, q, k)
        return (kind >= 2) | (kind == 1) & inner if self.has_full else (kind != 0) & inner


def _kinds(lists: Tuple[Any, ...], columns: int) -> torch.Tensor:
    kinds = _dense(lists[0], lists[1], columns)
    return kinds if lists[2] is None else kinds + 2 * _dense(lists[2], lists[3], columns)


def _dense(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """1 where a block is listed: i32 ``[B, H, rows, columns]``. Indices behind a count say nothing."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    at = torch.where(listed & (indices >= 0), indices, columns).clamp(max=columns).long()
    marks = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.int32, device=indices.device)
    return marks.scatter_(-1, at, 1)[..., :columns]
