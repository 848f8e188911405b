"""``attn_implementation="fmha"`` for Hugging Face transformers: attention and mask function are registered together.

::

    import fmha.transformers
    fmha.transformers.install()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fmha")

The mask function matters: without one of its own, transformers gives an implementation no mask at all, and padded
batches come out wrong. Ours reads what transformers asks for, and layers compute it:

* causal, sliding windows and both-way attention, over dynamic and static caches: a band of the kernel's.
* Right padding: lengths. Left padding and rows between: packed rows. Sequences packed into one row, by ``position_ids``
  or ``cu_seq_lens_q``: packed. Chunks without padding: packed.
* Images that see themselves both ways, prefixes, chunks over a cache or beside padding, packed sequences beside padding:
  ranges of keys for each query, and a row of bits for padding; see :class:`fmha.Intervals`.
* Everything else, as a 4-D mask of the caller's, T5's ``position_bias``, and whatever a compiler traces: a bias,
  ``[batch or 1, heads or 1, seqlen_q, seqlen_k]`` in memory.

A row of padding, whose output a model does not use, is another one than eager attention's: 0 where packed rows leave it
out or it sees no key, where eager attention averages over keys that it hides. Rows in use are eager attention's within
rounding. ``generate_batch``, continuous batching, takes ``attn_implementation="fmha_flash"``: requests of any lengths
packed into one row, over transformers' own cache of pages. A model that lists flash implementations of its own, as
gpt-oss does, is given one of those by transformers. ``output_attentions``, pages that attention itself would
read (``block_table``), and every keyword that is not in the list below are refused by name. A model that does not ask
the attention interface computes with eager attention's mask, as it does without us.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from transformers import AttentionInterface, masking_utils
from transformers.utils.import_utils import is_tracing

from . import _keywords
from ._mask import NONE, Mask
from ._theirs import attention
from ._visible import Dense, Facts, Packed, Visible, recognise

NAME = "fmha"

#: Name under which continuous batching finds this attention: it wants "flash" in the name, and packs requests without
#: a mask.
CONTINUOUS = "fmha_flash"

#: Mask that lets every query see every key, used where a bias masks.
_ALL = Dense(NONE, (1 << 63) - 1, None)

#: Keyword arguments of a model's forward that reach attention and do not change it, each with the reason.
HARMLESS: Dict[str, str] = {
    "position_ids": "the rotary embedding and the mask have read them",
    "cache_position": "the cache and the mask have read it",
    "use_cache": "the cache is written before attention",
    "num_items_in_batch": "the loss reads it",
    "output_hidden_states": "the model keeps hidden states, whoever computes attention",
    "output_router_logits": "the model keeps them, whoever computes attention",
    "return_dict": "it is about the model's outputs",
    "token_type_ids": "embeddings and the mask have read them",
    "mm_token_type_ids": "rotary embeddings and the mask have read them",
    "cache": "the cache of continuous batching, which is written and read before attention",
    "read_index": "it has read them",
    "write_index": "it has read them",
    "logits_indices": "the model's head reads them",
    "logits_processor_args": "sampling reads them",
    "seq_idx": "layers of linear attention read it; position_ids or cu_seq_lens say the same to attention",
}


#: Further arguments that attention ignores if its mask is a function, which already contains them.
_OF_FLEX = (*HARMLESS, "sliding_window", "is_causal")

#: Arguments that transformers passes to a mask function. Its own functions, which write masks out, take them here.
_MASK_OPTIONS = (
    "local_size",
    "allow_is_causal_skip",
    "allow_is_bidirectional_skip",
    "allow_torch_fix",
    "use_vmap",
    "config",
)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Optional[torch.Tensor] = None,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    **rest: Any,
) -> Optional[torch.Tensor]:
    """transformers' mask function for this implementation: a :class:`fmha._visible.Visible`, or the mask that eager
    attention adds where only that says it. ``None``, to a tracer alone, means what it means to torch's own attention:
    causal by the module's word, or all keys for a single query."""
    _keywords.refuse(rest, _MASK_OPTIONS)
    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    call = dict(
        rest,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
    )

    def spell() -> torch.Tensor:
        return masking_utils.eager_mask(**{**call, "allow_is_bidirectional_skip": False}, dtype=dtype)

    if _traced(attention_mask) or _traced(q_offset):
        if masking_utils.sdpa_mask(**call) is None:
            return None
        return spell()
    if q_length == 1 and not rest.get("allow_is_causal_skip", True) and rest.get("allow_is_bidirectional_skip") is None:
        # The mask of a static cache's next token is written out: it is small, and the compiled step needs a plain
        # tensor.
        return spell()
    # A cache changes its offsets in place before a layer reads the mask, so the offsets are read now.
    first = call["q_offset"], call["kv_offset"] = int(q_offset), int(kv_offset)
    pattern = recognise(mask_function)
    if pattern is None:
        return spell()
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        if padding.dim() != 2 or padding.shape[0] != batch_size or padding.dtype is not torch.bool:
            return spell()
        padding = padding[:, kv_offset : kv_offset + kv_length]
    facts = Facts(pattern, padding, spell, (batch_size, q_length, kv_length), first, device)
    return Visible(facts, dtype, device)


def _traced(tensor: Any) -> bool:
    """Whether a compiler or a graph's capture goes along, which must not wait for what a tensor holds."""
    return bool(is_tracing(tensor if isinstance(tensor, torch.Tensor) else None))


def _as_bias(name: str, mask: torch.Tensor, like: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """A 4-D mask as the kernels add it: in f32 or the queries' type, ``[batch or 1, heads or 1, seqlen_q, seqlen_k]``,
    with -inf where it hides a key, so that a row of hidden keys alone is an empty one on every device."""
    if isinstance(mask, Visible):
        mask = mask.facts.spelt()
    if mask.dim() != 4:
        raise ValueError(f"{name} has {mask.dim()} axes, not the 4 of [batch, heads, seqlen_q, seqlen_k]")
    batch, heads, seqlen_q, _ = like.shape
    for axis, (size, wanted) in enumerate(zip(mask.shape, (batch, heads, seqlen_q, seqlen_k))):
        if size not in (1, wanted):
            raise ValueError(f"{name} has {size} on axis {axis}, neither 1 nor {wanted}")
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=like.dtype, device=mask.device)
        mask = torch.where(mask, zero, torch.full_like(zero, -torch.inf))
    elif not mask.is_floating_point():
        raise TypeError(f"{name} is of {mask.dtype}, neither torch.bool nor a floating type")
    else:
        mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
        if mask.dtype not in (torch.float32, like.dtype):
            mask = mask.to(torch.float32)
    return mask.expand(mask.shape[0], mask.shape[1], seqlen_q, seqlen_k)


def _same_sequence(offsets_q: torch.Tensor, offsets_k: torch.Tensor, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """``[1, 1, seqlen_q, seqlen_k]``: whether query and key lie between the same offsets."""
    numbers = [
        torch.bucketize(torch.arange(rows, device=offsets.device), offsets, right=True)
        for offsets, rows in ((offsets_q, seqlen_q), (offsets_k, seqlen_k))
    ]
    return (numbers[0][:, None] == numbers[1][None, :])[None, None]


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    is_causal: Optional[bool] = None,
    s_aux: Optional[torch.Tensor] = None,
    position_bias: Optional[torch.Tensor] = None,
    deterministic: Optional[bool] = None,
    cu_seq_lens_q: Optional[torch.Tensor] = None,
    cu_seq_lens_k: Optional[torch.Tensor] = None,
    max_length_q: Optional[int] = None,
    max_length_k: Optional[int] = None,
    output_attentions: Optional[bool] = None,
    **rest: Any,
) -> Tuple[torch.Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        query, key, value: ``(batch, heads, seqlen, dim)``.
        attention_mask: what the mask function above gave; or a 4-D mask of the caller's, whose axes of size 1
            broadcast: boolean, true where a key is seen, or floating, added to the scores. A mask rules: a window and
            ``is_causal`` beside it change nothing, as in eager attention. Without one, ``is_causal``, or the module's
            attribute, and ``sliding_window`` say what a query sees; the first query stands at the first key then.
        position_bias: ``(batch or 1, heads, seqlen_q, seqlen_k)``, added to the scores; differentiable.
        s_aux: ``(heads,)``, sinks; differentiable.
        cu_seq_lens_q, cu_seq_lens_k: offsets of sequences that lie in a batch of 1; they rule over what the mask has
            read from ``position_ids``.

    Returns:
        O ``(batch, seqlen, heads, dim)``, and ``None`` where eager attention has its weights.

    Raises:
        NotImplementedError: a keyword that is not honoured, by its name.
        ValueError, TypeError: a mask or offsets of another shape or type, by name, with the numbers.
    """
    _keywords.refuse(rest, HARMLESS)
    if output_attentions:
        raise NotImplementedError("output_attentions is True: P is never in memory; take attn_implementation='eager'")
    if torch.is_autocast_enabled(query.device.type):
        # Q and K are converted as torch's own attention does: rotary embeddings leave them in f32 beside a V of 16
        # bits.
        to = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(to), key.to(to), value.to(to)
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    shared: Dict[str, Any] = dict(
        softmax_scale=scaling,
        softcap=softcap,
        sink=None if s_aux is None else s_aux.float(),
        p_drop=dropout,
        seed=int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu")) if dropout else 0,
        deterministic=bool(deterministic),
    )
    way: Any = None
    unmasked = NONE
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        unmasked = _band(bool(causal), sliding_window)
        # Without a mask, torch's attention aligns causal rows to the first key, and one query sees all keys.
        from_first = unmasked._replace(kind=1) if causal and seqlen_q > 1 else unmasked
        way = Dense(from_first, seqlen_k, None)
    elif isinstance(attention_mask, Visible):
        facts = attention_mask.facts
        if (facts.seqlen_q, facts.seqlen_k) != (seqlen_q, seqlen_k):
            raise ValueError(
                f"attention_mask is of {facts.seqlen_q} queries and {facts.seqlen_k} keys, "
                f"but query has {seqlen_q} and key {seqlen_k}"
            )
        way = facts.way()
    for name, longest, given in (
        ("max_length_q", max_length_q, cu_seq_lens_q),
        ("max_length_k", max_length_k, cu_seq_lens_k),
    ):
        if longest is not None and given is None:
            raise ValueError(f"{name} is given ({longest}), but the offsets cu_seq_lens_{name[-1]} are not")
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        offsets = _offsets(query, cu_seq_lens_q, cu_seq_lens_k)
        band: Optional[Mask] = unmasked
        if attention_mask is not None:
            band = attention_mask.facts.band() if isinstance(attention_mask, Visible) else None
        if band is not None:
            longest_q = seqlen_q if max_length_q is None else int(max_length_q)
            longest_k = seqlen_k if max_length_k is None else int(max_length_k)
            way = Packed(band, None, None, *offsets, longest_q, longest_k, seqlen_k)
        else:
            apart = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(
                ~_same_sequence(*offsets, seqlen_q, seqlen_k), -torch.inf
            )
            assert attention_mask is not None, "no mask is a band"
            attention_mask, way = _as_bias("attention_mask", attention_mask, query, seqlen_k) + apart, None
    if isinstance(way, Packed) and position_bias is None:
        return _packed(query, key, value, way, shared), None
    bias = None if position_bias is None else _as_bias("position_bias", position_bias, query, seqlen_k)
    if isinstance(way, Dense):
        key, value = key[:, :, : way.seqlen_k], value[:, :, : way.seqlen_k]
        return _dense(query, key, value, way, None if bias is None else bias[..., : way.seqlen_k], shared), None
    if attention_mask is None or cu_seq_lens_q is not None and way is not None:
        raise NotImplementedError("position_bias is given beside cu_seq_lens_q: no bias of packed sequences is taken")
    data = attention_mask.facts.data() if isinstance(attention_mask, Visible) and cu_seq_lens_q is None else None
    if data is not None:
        return _dense(query, key, value, _ALL, bias, {**shared, "mask": data}), None
    spelt = _as_bias("attention_mask", attention_mask, query, seqlen_k)
    return _dense(query, key, value, _ALL, spelt if bias is None else spelt + bias, shared), None


def flex_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Optional[torch.Tensor] = None,
    device: Any = "cpu",
    **rest: Any,
) -> Any:
    """transformers' mask function of ``flex_attention``: the mask is the function itself, and no list of blocks is
    made."""
    from transformers import masking_utils as made

    from . import flex

    _keywords.refuse(rest, (*_MASK_OPTIONS, "dtype"))
    # A cache changes its offsets in place before a layer reads the mask.
    if _traced(attention_mask) or _traced(q_offset):
        q_offset, kv_offset = (x.clone() if isinstance(x, torch.Tensor) else x for x in (q_offset, kv_offset))
    else:
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    function = made.causal_mask_function if mask_function is None else mask_function
    if attention_mask is not None:
        padding: Any = made.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        function = made.and_masks(function, made.padding_mask_function(padding))
    function = made.add_offsets_to_mask_function(function, q_offset, kv_offset)
    return flex.create_block_mask(function, batch_size, None, q_length, kv_length, device)


def flex_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: Optional[float] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    position_bias: Optional[torch.Tensor] = None,
    dropout: float = 0.0,
    kernel_options: Optional[Dict[str, Any]] = None,
    **rest: Any,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Attention of one layer under ``attn_implementation="flex_attention"``, as transformers calls it:
    ``attention_mask`` is a ``BlockMask``, whose function is the mask, or a tensor that is added to the scores.

    Returns:
        O ``(batch, seqlen, heads, dim)`` and LSE ``(batch, heads, seqlen)``, f32, sinks in it.

    Raises:
        NotImplementedError: a keyword that is not honoured, and what a mask function does that code has not, by its
            name.
    """
    from . import _arguments, flex

    _keywords.refuse(rest, _OF_FLEX)
    flex.refuse_options(kernel_options)
    seqlen_k = key.shape[2]
    bias = None if position_bias is None else _as_bias("position_bias", position_bias, query, seqlen_k)
    code, block_mask = None, attention_mask
    if isinstance(attention_mask, torch.Tensor):
        spelt = _as_bias("attention_mask", attention_mask[..., :seqlen_k], query, seqlen_k)
        bias, block_mask = (spelt if bias is None else bias + spelt), None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    sink = None if s_aux is None else s_aux.float()
    options: Dict[str, Any] = dict(softmax_scale=scaling, softcap=softcap, sink=sink, bias=bias, p_drop=dropout)
    if block_mask is not None:
        bound = _arguments.bind(**options)
        code = flex.code_of(None, block_mask, (q, k, v), bound, ("score_mod", "attention_mask"))
    return attention(q, k, v, **options, return_lse=True, score_code=code)


def _band(causal: bool, sliding_window: Optional[int]) -> Mask:
    """The band of a layer that has no mask; a window counts the query itself."""
    if causal:
        return Mask(2, -1 if sliding_window is None else sliding_window - 1, 0)
    return NONE if sliding_window is None else Mask(2, sliding_window - 1, sliding_window - 1)


def _offsets(
    query: torch.Tensor, cu_seq_lens_q: Optional[torch.Tensor], cu_seq_lens_k: Optional[torch.Tensor]
) -> Tuple[torch.Tensor, torch.Tensor]:
    for name, given in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if given is None:
            raise ValueError(f"{name} is missing beside the other offsets")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is given, but query has batch {query.shape[0]}, not the 1 of packed sequences")
    return (
        cu_seq_lens_q.to(query.device, torch.int32),  # type: ignore[union-attr]
        cu_seq_lens_k.to(query.device, torch.int32),  # type: ignore[union-attr]
    )


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    way: Dense,
    bias: Optional[torch.Tensor],
    shared: Dict[str, Any],
) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, **{"mask": way.mask, **shared}, seqused_k=way.seqused_k, bias=bias)


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, way: Packed, shared: Dict[str, Any]
) -> torch.Tensor:
    def rows(x: torch.Tensor, numbers: Optional[torch.Tensor]) -> torch.Tensor:
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if numbers is None else flat[numbers]

    batch, heads, seqlen_q, _ = query.shape
    o = attention(
        rows(query, way.rows_q),
        rows(key[:, :, : way.seqlen_k], way.rows_k),
        rows(value[:, :, : way.seqlen_k], way.rows_k),
        mask=way.mask,
        cu_seqlens_q=way.cu_seqlens_q,
        cu_seqlens_k=way.cu_seqlens_k,
        max_seqlen_q=way.max_seqlen_q,
        max_seqlen_k=way.max_seqlen_k,
        **shared,
    )
    if way.rows_q is not None:
        o = o.new_zeros((batch * seqlen_q, heads, o.shape[-1])).index_put((way.rows_q,), o)
    return o.view(batch, seqlen_q, heads, -1)


def install_flex_attention() -> None:
    """From now on ``attn_implementation="flex_attention"`` computes here, in eager mode and forward and backward on
    every device that the library has; again is no harm."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("flex_attention", flex_attention_forward)
    AttentionMaskInterface.register("flex_attention", flex_attention_mask)


def install() -> None:
    """Registers ``"fmha"`` with transformers, and ``"fmha_flash"`` for continuous batching (``generate_batch``); again is
    no harm."""
    names = [NAME]
    if _serve_flash_functions():
        names.append(CONTINUOUS)
    for name in names:
        AttentionInterface.register(name, attention_forward)
        masking_utils.AttentionMaskInterface.register(name, attention_mask)


def _serve_flash_functions() -> bool:
    """Has transformers find FlashAttention's functions here for :data:`CONTINUOUS`: it looks for them by any name with
    "flash" in it, and would look on its hub. Whether this release has the place where it looks."""
    from transformers import modeling_flash_attention_utils as utils

    theirs = getattr(utils, "_lazy_imports", None)
    if theirs is None or getattr(theirs, "fmha", False):
        return theirs is not None

    def lazy_imports(implementation: Optional[str], *rest: Any, **named: Any) -> Any:
        if implementation != CONTINUOUS:
            return theirs(implementation, *rest, **named)
        from . import flash_attn

        # The function over pages is left out: requests whose pages are padding would have rows written to them.
        return (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input)

    lazy_imports.fmha = True  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports  # type: ignore[assignment]
    return True
