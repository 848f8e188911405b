"""A call of JAX over the devices of a mesh's axis, of which each has some rows: inside ``jax.shard_map``.

K and V are gathered, and each device computes its own queries against all keys. So a row's softmax is one device's, and
what is of the whole is said by masks as data and by functions that see places of the whole: no kernel knows of ranks.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp

from ._arguments import by_causal
from ._mask import Mask
from ._mask_data import TENSORS, Masks
from ._numbers import shown

#: Options that say which rows a sequence has, or that ask a kernel for the places of its own rows.
_OF_ONE_DEVICE = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table", "alibi_slopes")
#: Bounds of :class:`fmha._mask.Mask` that are none.
_UNBOUNDED = -1


class Whole(NamedTuple):
    """This device's rows in the whole: where they begin, traced; how many it has; and how many all devices have."""

    axis: Any
    first: Any
    rows: int
    seqlen_q: int
    seqlen_k: int


def gathered(
    axis: Any, q: Any, k: Any, v: Any, options: Mapping[str, Any], masks: Optional[Masks], band: Any
) -> Tuple[Whole, Any, Any, Dict[str, Any], Optional[Masks]]:
    """The place of this device's rows; all keys and values; the options of its call, which has no band, and its masks.

    Raises:
        NotImplementedError: an option that is of calls of one device, by its name.
        ValueError: an axis of no ``shard_map``, tensors and masks whose rows do not go with the whole.
    """
    for name in _OF_ONE_DEVICE:
        if options.get(name) is not None:
            raise NotImplementedError(f"{name} is given beside axis_name {shown(axis)}, but is of calls of one device")
    if options.get("p_drop"):
        raise NotImplementedError(
            f"p_drop {options['p_drop']} is given beside axis_name {shown(axis)}: each device would drop the same rows"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name} has {len(x.shape)} axes beside axis_name, not 4: [batch, own rows, heads, dim]")
    try:
        at = jax.lax.axis_index(axis)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(f"axis_name: {shown(axis)} is no axis of a jax.shard_map around this call") from error
    size = jax.lax.axis_size(axis) if hasattr(jax.lax, "axis_size") else jax.lax.psum(1, axis)
    rows = q.shape[1]
    whole = Whole(axis, jnp.asarray(at * rows, jnp.int32), rows, rows * size, k.shape[1] * size)
    masks = _masks_of(whole, masks or Masks(), by_causal(options.get("causal"), band))
    rest = {name: x for name, x in options.items() if name not in ("mask", "causal")}
    return whole, _all_rows(axis, k), _all_rows(axis, v), rest, None if masks.is_empty() else masks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rows(axis: Any, x: Any) -> Any:
    """The rows of all devices, in their order; the gradient is summed over them in f32."""
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def _all_rows_forward(axis: Any, x: Any) -> Tuple[Any, Any]:
    # The type of the gradient is known from it: an array of no elements keeps it.
    return _all_rows(axis, x), x[:0]


def _all_rows_backward(axis: Any, like: Any, gradient: Any) -> Tuple[Any]:
    wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
    return (jax.lax.psum_scatter(wide, axis, scatter_dimension=1, tiled=True).astype(like.dtype),)


_all_rows.defvjp(_all_rows_forward, _all_rows_backward)


def function_of(whole: Whole, name: str, function: Any, places: int) -> Any:
    """A function that sees the query's place in the whole, its ``places``-th argument."""
    if function is None:
        return None
    if not callable(function):
        raise NotImplementedError(f"{name}: {shown(function)} is a text beside axis_name; give a function instead")
    given: Callable[..., Any] = function
    first = whole.first
    if places == 3:
        return lambda s, b, h, q, k: given(s, b, h, q + first, k)
    return lambda b, h, q, k: given(b, h, q + first, k)


def small_of_all(whole: Whole, small: Dict[str, Any]) -> Dict[str, Any]:
    """Small outputs of the whole: a head's greatest score, and the sum of a key's probabilities, are of all rows."""
    over = {"head_max": jax.lax.pmax, "key_sum": jax.lax.psum}
    return {name: over[name](x, whole.axis) if name in over else x for name, x in small.items()}


def _masks_of(whole: Whole, masks: Masks, band: Mask) -> Masks:
    """Masks of this device's queries: their rows of the whole's, and the band as intervals."""
    tensors = dict(zip(TENSORS, masks.tensors))
    for name, axis in (("intervals", 3), ("mask_bits", 2)):
        x = tensors[name]
        if x is None:
            continue
        if len(x.shape) != 4 or x.shape[axis] != whole.seqlen_q:
            wanted = f"{whole.seqlen_q} queries on axis {axis}, those of all devices"
            raise ValueError(f"mask: {name} has shape {tuple(x.shape)}, not {wanted}")
        tensors[name] = _rows(x, whole.first, whole.rows, axis)
    for name in TENSORS:
        x = tensors[name]
        if name in ("intervals", "mask_bits") or x is None:
            continue
        if whole.rows % masks.block_q:
            text = f"block_size has {masks.block_q} queries, of which a device's {whole.rows} are no multiple"
            raise ValueError(f"mask: {name}: {text}")
        blocks = whole.seqlen_q // masks.block_q
        if len(x.shape) < 3 or x.shape[2] != blocks:
            raise ValueError(f"mask: {name} has shape {tuple(x.shape)}, not {blocks} rows of blocks on axis 2")
        tensors[name] = _rows(x, whole.first // masks.block_q, whole.rows // masks.block_q, 2)
    ends = _ends(whole, band)
    if ends and tensors["full_kv_num_blocks"] is not None:
        # The band becomes intervals here, which a block of the full list does not ask.
        beside = "BlockLists with full lists and axis_name"
        raise NotImplementedError(f"mask: {tuple(band)} beside {beside}: say it in the lists")
    if ends and tensors["intervals"] is None:
        tensors["intervals"] = jnp.stack(ends)[None, None]
    elif ends:
        if len(ends) > 2:
            raise NotImplementedError(
                f"mask: sink_columns {band.sink_columns} beside Intervals and axis_name: give both as one Intervals"
            )
        tensors["intervals"] = jnp.clip(tensors["intervals"], *ends)
    return masks._replace(tensors=tuple(tensors[name] for name in TENSORS))


def _rows(x: Any, first: Any, count: int, axis: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), first, count, axis)


def _ends(whole: Whole, band: Mask) -> Sequence[Any]:
    """Endpoints of the keys that a band shows each of this device's queries; none where it shows all."""
    kind, left, right, sinks = band
    if kind == 0:
        return ()
    if kind not in (1, 2, 3) or kind < 3 and min(left, right) < _UNBOUNDED or sinks < 0:
        raise ValueError(f"mask: {band} is no band")
    most = whole.seqlen_q + whole.seqlen_k + 1
    i = whole.first + jnp.arange(whole.rows, dtype=jnp.int32)
    if kind == 3:
        # Coordinates of the band: query i sees keys after i - y, and before i + x.
        low, high = 1 - left, right
    else:
        shift = whole.seqlen_k - whole.seqlen_q if kind == 2 else 0
        low = -most if left == _UNBOUNDED else shift - left
        high = most if right == _UNBOUNDED else shift + right + 1
    low, high = (max(-most, min(bound, most)) for bound in (low, high))
    ends = jnp.clip(i + low, 0, whole.seqlen_k), jnp.clip(i + high, 0, whole.seqlen_k)
    if not sinks:
        return ends
    return jnp.zeros_like(i), jnp.minimum(ends[1], min(sinks, whole.seqlen_k)), *ends
