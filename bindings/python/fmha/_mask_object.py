"""Masks as data that are built once and used by many calls."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, List, Optional

from . import _arguments, _code, _native
from ._explain import described
from ._mask_data import Masks, split
from ._numbers import flag, shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arguments import Tensor, Unmasked


class MaskObject:
    """Masks as data, built once and used by many calls: of every layer, forward and backward.

    Calls like the one that is described here take it for their ``mask``. They read what was last built: until the next
    :meth:`build` a change of the tensors changes nothing, and no call makes its lists of tiles again. Several calls may
    use it at a time; whoever builds waits for those on other streams.

    Args:
        q, k, v: tensors of such a call, of torch's; shapes, types and device count.
        mask: masks as data, or a list of them with a band, as :func:`fmha.attention` takes them.
        backward: whether gradients use it too; ``None``: where ``q``, ``k`` or ``v`` require one.
        mask_code: a mask as code beside it that captures nothing, as of the calls.
        options: what of :func:`fmha.attention` says which kernel takes the calls, and their lengths, which they have to
            share.

    Raises:
        FmhaError: as :func:`fmha.attention`; a function that captures something, of which there is no copy.
        TypeError: masks that are none, and tensors of another library.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        *,
        backward: Optional[bool] = None,
        mask_code: Optional[_code.Function] = None,
        **options: Unpack[Unmasked],
    ) -> None:
        import torch

        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"MaskObject: {name}: {shown(x)} is no tensor of torch's, whose calls take mask objects")
        from . import _torch as door

        band, masks = split(mask)
        if masks is None or masks.is_empty():
            raise TypeError(f"MaskObject: mask: {shown(mask)} is no mask as data")
        self._band, self._given = band, masks.tensors
        for x in masks.tensors:
            if x is not None and not isinstance(x, torch.Tensor):
                raise TypeError(f"MaskObject: mask: {shown(x)} is no tensor of torch's")
        # Calls find the object by these tensors' addresses, so no other tensor may share their memory.
        self._masks: Masks = masks._replace(tensors=tuple(None if x is None else x.clone() for x in masks.tensors))
        tensors, numbers = _arguments.bind(mask=band, **options)
        numbers = door.as_asked(numbers)
        code = _code.bind(door, None, mask_code, None, device=q.device, masks=self._masks)
        wants = any(x.requires_grad for x in (q, k, v)) if backward is None else flag("backward", backward)
        self._device = q.device
        self._request, alive = described(door, (q, k, v), tensors, numbers, False, True, code)
        behind: Optional[_native.Request] = None
        if wants:
            behind, of_gradients = described(door, (q, k, v), tensors, numbers, True, True, code)
            alive += of_gradients
        number = _native.mask_object(self._request, behind)
        self._number = number
        self._finalizer = weakref.finalize(self, _native.library.fmha_py_drop_mask_object, number)
        # Lengths are read at each build, so their tensors are kept.
        self._alive: List[Any] = [alive, [x for x in tensors if x is not None], self._masks]
        self.build()

    def build(self) -> None:
        """Queues on the current stream what copies the tensors and makes the lists; a graph may capture it, and builds at
        each replay. The first time is when the object is made."""
        import torch

        for own, given in zip(self._masks.tensors, self._given):
            if own is not None:
                own.copy_(given)
        on_gpu = self._device.type == "cuda"
        self._request.stream = torch.cuda.current_stream(self._device).cuda_stream if on_gpu else 0
        _native.build_mask(self._number, self._request)

    @property
    def masks(self) -> Masks:
        """The masks of a call, by tensors of the object's own."""
        return self._masks

    @property
    def band(self) -> Any:
        """The band beside them; ``None``: none."""
        return self._band
