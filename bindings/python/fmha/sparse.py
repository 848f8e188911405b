"""The choice of keys or blocks for models that are trained sparse, on torch's tensors on any device.

An indexer scores keys, ``I[i, j] = sum_h relu(q[i, h] . k[j]) weights[i, h]`` (DeepSeek-V3.2's lightning indexer), and
each query keeps the ``topk`` greatest: ties to the lower position, NaN last, in ascending position with -1 after them.
Such a list is what ``fmha.attention(indices=...)`` and ``fmha.flash_mla`` take. The same scores give the same list on
every run. Nothing waits for the device, and calls can be captured into graphs; choices have no gradient. An indexer
learns by :func:`index_loss`, which has.

Candidates of query i are keys up to its own position, where the last query stands on the last key; ``causal=False``:
all keys; ``first`` and ``end``, i32 ``[batch, seqlen_q]``: keys ``first .. end`` of each query.
"""

from __future__ import annotations

import ctypes
from typing import Any, Dict, Optional, Tuple

import torch

from . import _index_loss, _native, _torch
from ._numbers import flag as _flag, integer as _integer

__all__ = [
    "block_maxima",
    "block_sums",
    "choose",
    "choose_blocks",
    "index_lists",
    "index_loss",
    "index_scores",
    "index_target",
    "split_pages",
]

_WHAT = "choices of keys are"
_CAUSAL, _ALL, _RANGES = 0, 1, 2

_library = _native.library


class Choose(ctypes.Structure):
    _fields_ = _native.fields(
        _library.fmha_py_describe_choose(),
        "a choice of keys",
        ("kernel", ctypes.c_char_p),
        ("tile", ctypes.c_char_p),
        ("stream", ctypes.c_int64),
    )


_library.fmha_py_workspace_choose.argtypes = [ctypes.POINTER(Choose), ctypes.POINTER(ctypes.c_uint64)]
_library.fmha_py_run_choose.argtypes = [ctypes.POINTER(Choose), ctypes.c_void_p, ctypes.c_uint64]


class _Call:
    """A call's numbers and tensors, which are all on one device."""

    # Fields of the kernel's tile, given for measurements: ``stages_k=2,parts=4``.
    tile: Optional[str] = None

    def __init__(self, like: Any, name: str) -> None:
        _torch.refuse_tracers(_WHAT)
        if not isinstance(like, torch.Tensor):
            raise TypeError(f"{name}: {type(like).__name__} is no tensor of torch's")
        self.device = like.device
        self.call = Choose()
        self.alive: Dict[str, torch.Tensor] = {}

    def numbers(self, **numbers: Any) -> None:
        for name, value in numbers.items():
            setattr(self.call, name, _integer(name, value))

    def put(
        self, name: str, tensor: Any, dtype: Optional[torch.dtype], shape: Optional[Tuple[int, ...]]
    ) -> Optional[torch.Tensor]:
        """Puts a tensor in; one that is read is made dense where ``shape`` says that it has to be."""
        if tensor is None:
            return None
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {type(tensor).__name__} is no tensor of torch's")
        if tensor.device != self.device:
            raise ValueError(f"{name} is on {tensor.device}, but the call is on {self.device}")
        if dtype is not None and tensor.dtype != dtype:
            raise TypeError(f"{name} is of {tensor.dtype}, not {dtype}")
        if shape is not None:
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
            tensor = _torch.resolved(tensor).contiguous()
        self.alive[name] = tensor
        # torch gives no address of a tensor without elements, but the library refuses a null one.
        setattr(self.call, name, tensor.data_ptr() or 256)
        return tensor

    def write(self, name: str, shape: Tuple[int, ...], dtype: torch.dtype, out: Any = None) -> torch.Tensor:
        """The tensor that a call writes: ``out``, or a new one."""
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=self.device)
        elif not isinstance(out, torch.Tensor) or not out.is_contiguous() or out.is_neg():
            raise ValueError("out is no dense tensor of torch's")
        self.put(name, out, dtype, shape)
        return out

    def candidates(self, causal: bool, first: Any, end: Any, seqused_k: Any) -> None:
        rows = (self.call.batch, self.call.seqlen_q)
        if (first is None) != (end is None):
            raise ValueError("first and end go together: candidates are keys first .. end")
        self.call.candidates = _RANGES if first is not None else _CAUSAL if causal else _ALL
        self.put("first", first, torch.int32, rows)
        self.put("end", end, torch.int32, rows)
        self.put("seqused_k", seqused_k, torch.int32, rows[:1])

    def run(self, kernel: Optional[str], allow_fallback: bool, accuracy: str = "fast") -> None:
        call = self.call
        if accuracy not in ("fast", "exact"):
            raise ValueError(f"accuracy: {accuracy!r} is neither 'fast' nor 'exact'")
        call.exact = accuracy == "exact"
        kind = {"cpu": 0, "cuda": 2 if torch.version.hip else 1}.get(self.device.type)
        if kind is None:
            raise ValueError(f"the call is on {self.device}, neither the CPU nor a GPU")
        call.device_kind, call.device_index = kind, self.device.index or 0
        call.kernel, call.allow_fallback = kernel.encode() if kernel else None, bool(allow_fallback)
        call.tile = self.tile.encode() if self.tile else None
        if kind == 0:
            self._run()
            return
        with torch.cuda.device(self.device):
            call.stream = torch.cuda.current_stream(self.device).cuda_stream
            self._run()

    def _run(self) -> None:
        wanted = ctypes.c_uint64()
        _native.check(_library.fmha_py_workspace_choose(ctypes.byref(self.call), ctypes.byref(wanted)))
        scratch, address = None, 0
        if wanted.value:
            scratch = torch.empty(wanted.value + 256, dtype=torch.uint8, device=self.device)
            address = -(-scratch.data_ptr() // 256) * 256
        _native.check(_library.fmha_py_run_choose(ctypes.byref(self.call), address, wanted.value))
        del scratch


def _count(name: str, value: Any) -> int:
    count: int = _integer(name, value)
    if count < 0:
        raise ValueError(f"{name} {count} is below 0")
    return count


def _dtype_code(name: str, tensor: torch.Tensor) -> int:
    code = _native.DTYPES.get(str(tensor.dtype).rpartition(".")[2], _native.OTHER)
    if not 0 <= code < 100:
        raise TypeError(f"{name} is of {tensor.dtype}, which an indexer does not take")
    return code


def _indexer(
    q: Any, k: Any, weights: Any, k_scale: Any, block_table: Any, causal: bool, first: Any, end: Any, seqused_k: Any
) -> _Call:
    it = _Call(q, "q")
    call = it.call
    for name, x, axes in (("q", q, 4), ("k", k, 3)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: {type(x).__name__} is no tensor of torch's")
        if x.dim() != axes:
            raise ValueError(f"{name} has {x.dim()} axes of shape {tuple(x.shape)}, not {axes}")
    batch, seqlen_q, heads, dim = q.shape
    if k.shape[2] != dim:
        raise ValueError(f"k has head_dim {k.shape[2]}, but q has {dim}")
    if heads == 0:
        raise ValueError("q has num_heads 0, not at least 1")
    it.numbers(batch=batch, seqlen_q=seqlen_q, num_heads=heads, head_dim=dim)
    if block_table is None:
        if k.shape[0] != batch:
            raise ValueError(f"k has batch {k.shape[0]}, but q has {batch}")
        it.numbers(seqlen_k=k.shape[1])
    else:
        if not isinstance(block_table, torch.Tensor) or block_table.dim() != 2:
            raise ValueError("block_table is no tensor [batch, max_pages]")
        max_pages = block_table.shape[1]
        it.numbers(page_size=k.shape[1], num_pages=k.shape[0], max_pages=max_pages, seqlen_k=k.shape[1] * max_pages)
        it.put("block_table", block_table, torch.int32, (batch, max_pages))
    if k.numel() and k.stride(2) != 1:
        raise ValueError(f"k has stride {k.stride(2)} on its last axis, not 1")
    it.put("q", q, None, tuple(q.shape))
    it.put("k", k, None, None)
    it.put("weights", weights, torch.float32, (batch, seqlen_q, heads))
    it.numbers(k_outer_stride=k.stride(0), k_key_stride=k.stride(1))
    if k_scale is not None:
        it.put("k_scale", k_scale, torch.float32, None)
        if tuple(k_scale.shape) != tuple(k.shape[:2]):
            raise ValueError(f"k_scale has shape {tuple(k_scale.shape)}, not {tuple(k.shape[:2])}")
        it.numbers(scale_outer_stride=k_scale.stride(0), scale_key_stride=k_scale.stride(1))
    call.dtype_q, call.dtype_k = _dtype_code("q", q), _dtype_code("k", k)
    it.candidates(causal, first, end, seqused_k)
    return it


def _blocks(it: _Call, block: int, first_blocks: int, last_blocks: int) -> int:
    """The keys or blocks of a row."""
    it.numbers(block=block, first_blocks=first_blocks, last_blocks=last_blocks)
    keys: int = it.call.seqlen_k
    return -(-keys // block) if block > 0 else keys


def index_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    *,
    k_scale: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    causal: bool = True,
    first: Optional[torch.Tensor] = None,
    end: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    block: int = 0,
    allow_fallback: bool = False,
    kernel: Optional[str] = None,
    accuracy: str = "fast",
) -> torch.Tensor:
    """Scores of an indexer, f32 ``[batch, seqlen_q, seqlen_k]``; -inf where a key is no candidate.

    Args:
        q: ``[batch, seqlen_q, num_heads, head_dim]``, f32, f16, bf16 or e4m3.
        k: ``[batch, seqlen_k, head_dim]``, or pages ``[num_pages, page_size, head_dim]`` with ``block_table``; its last
            axis is dense.
        weights: f32 ``[batch, seqlen_q, num_heads]``.
        k_scale: what each key is multiplied by, f32 ``[batch, seqlen_k]`` or ``[num_pages, page_size]``.
        block_table: i32 ``[batch, max_pages]``; then seqlen_k is ``max_pages * page_size``.
        causal, first, end: the candidates, as the module says.
        seqused_k: keys of each sequence, i32 ``[batch]``.
        block: keys of a block; then the scores are the greatest of each block's candidates.
        allow_fallback: whether a kernel that is right but slow may serve.
        kernel: name of the kernel to use, or to be refused.
        accuracy: ``"fast"``, or ``"exact"``: products are summed in f32. Of e4m3 Hopper's tensor cores keep some 14
            bits of a sum, and so the keys that it lists by default differ where scores are nearly equal.
    """
    it = _indexer(q, k, weights, k_scale, block_table, causal, first, end, seqused_k)
    entries = _blocks(it, _integer("block", block), 0, 0)
    scores = it.write("scores", (*q.shape[:2], entries), torch.float32)
    it.run(kernel, allow_fallback, accuracy)
    return scores


def index_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    topk: int,
    *,
    k_scale: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    causal: bool = True,
    first: Optional[torch.Tensor] = None,
    end: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    block: int = 0,
    first_blocks: int = 0,
    last_blocks: int = 0,
    allow_fallback: bool = False,
    kernel: Optional[str] = None,
    accuracy: str = "fast",
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The keys of greatest score of each query, i32 ``[batch, seqlen_q, topk]``. The matrix of all scores is never
    written: rows are scored and chosen some at a time.

    Args:
        topk: entries of a list.
        block: keys of a block; then blocks are listed, by the greatest score of their candidates.
        first_blocks, last_blocks: candidates of a row that are in whatever they score: so many first and last blocks.
        out: where the lists go.

    Other arguments are those of :func:`index_scores`.
    """
    it = _indexer(q, k, weights, k_scale, block_table, causal, first, end, seqused_k)
    _blocks(it, _integer("block", block), first_blocks, last_blocks)
    it.numbers(topk=topk)
    lists = it.write("indices", (*q.shape[:2], _count("topk", topk)), torch.int32, out)
    it.run(kernel, allow_fallback, accuracy)
    return lists


def _given(scores: Any, name: str) -> _Call:
    it = _Call(scores, name)
    if scores.dim() != 3:
        raise ValueError(f"{name} has {scores.dim()} axes of shape {tuple(scores.shape)}, not 3")
    batch, seqlen_q, keys = scores.shape
    it.numbers(batch=batch, seqlen_q=seqlen_q, seqlen_k=keys)
    it.put("given", scores, torch.float32, tuple(scores.shape))
    return it


def choose(
    scores: torch.Tensor,
    topk: int,
    *,
    causal: bool = False,
    first: Optional[torch.Tensor] = None,
    end: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The greatest of given scores, f32 ``[batch, seqlen_q, seqlen_k]``: lists i32 ``[batch, seqlen_q, topk]``.
    Arguments as in :func:`index_lists`; all keys are candidates unless something else is said."""
    return choose_blocks(scores, topk, 0, causal=causal, first=first, end=end, seqused_k=seqused_k, out=out)


def choose_blocks(
    scores: torch.Tensor,
    topk: int,
    block: int,
    *,
    causal: bool = False,
    first: Optional[torch.Tensor] = None,
    end: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    first_blocks: int = 0,
    last_blocks: int = 0,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """As :func:`choose`, of blocks of ``block`` keys, whose score is the greatest of their candidates'. A ``block`` of
    1 lists what ``scores`` are of, with the first and the last ones in."""
    it = _given(scores, "scores")
    it.candidates(causal, first, end, seqused_k)
    _blocks(it, _integer("block", block), first_blocks, last_blocks)
    it.numbers(topk=topk)
    lists = it.write("indices", (*scores.shape[:2], _count("topk", topk)), torch.int32, out)
    it.run(None, False)
    return lists


def block_maxima(
    scores: torch.Tensor,
    block: int,
    *,
    causal: bool = False,
    first: Optional[torch.Tensor] = None,
    end: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The greatest score of each block's candidates, f32 ``[batch, seqlen_q, blocks]``: -inf of a block without one,
    NaN where one is NaN."""
    it = _given(scores, "scores")
    it.candidates(causal, first, end, seqused_k)
    if _integer("block", block) < 1:
        raise ValueError(f"block {block} is not at least 1")
    entries = _blocks(it, block, 0, 0)
    maxima = it.write("scores", (*scores.shape[:2], entries), torch.float32)
    it.run(None, False)
    return maxima


def block_sums(
    probabilities: torch.Tensor, num_blocks: int, *, compressed: int = 32, stride: int = 16, selected: int = 64
) -> torch.Tensor:
    """NSA's scores of blocks (arXiv 2502.11089, equation 9), f32 ``[batch, seqlen_q, num_blocks]``: a compressed block
    of ``compressed`` tokens, one every ``stride``, counts once for each stride of it in a block of ``selected`` tokens.
    ``probabilities`` is f32 ``[batch, seqlen_q, compressed blocks]``; the caller adds the heads that share a choice."""
    it = _given(probabilities, "probabilities")
    it.candidates(False, None, None, None)
    it.numbers(compressed=compressed, stride=stride, selected=selected, num_blocks=num_blocks)
    if compressed < 1:
        raise ValueError(f"compressed {compressed} is not at least 1")
    sums = it.write("scores", (*probabilities.shape[:2], _count("num_blocks", num_blocks)), torch.float32)
    it.run(None, False)
    return sums


def index_target(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    *,
    softmax_scale: Optional[float] = None,
) -> torch.Tensor:
    """Attention's probabilities of listed keys, summed over heads, f32 ``[batch, seqlen_q, topk]``: what
    :func:`index_loss` takes for its target. By torch's operators, some queries at a time; it has no gradient.

    Args:
        q: attention's, ``[batch, seqlen_q, num_heads_q, head_dim]``.
        k: ``[batch, seqlen_k, num_heads_kv, head_dim]``, of q's type.
        lse: what ``fmha.attention(..., return_lse=True)`` gives, f32 ``[batch, num_heads_q, seqlen_q]``.
        indices: i32 ``[batch, seqlen_q, topk]``, one list for all heads.
        softmax_scale: attention's; ``None`` is ``1 / sqrt(head_dim)``.
    """
    return _index_loss.index_target(q, k, lse, indices, softmax_scale)


def index_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    target: torch.Tensor,
    *,
    allow_fallback: bool = False,
) -> torch.Tensor:
    """The loss that trains an indexer, f32 ``[batch, seqlen_q]``: KL divergence of the softmax of each list's scores
    from the target, which is divided by its sum. Differentiable by ``q``, ``k`` and ``weights``; each list is fixed.

    Args:
        q: the indexer's, ``[batch, seqlen_q, num_heads, head_dim]``, f32, f16 or bf16.
        k: ``[batch, seqlen_k, head_dim]``, f32, f16 or bf16.
        weights: f32 ``[batch, seqlen_q, num_heads]``.
        indices: i32 ``[batch, seqlen_q, topk]``, as :func:`index_lists` writes them. An entry that is negative, or at
            or past seqlen_k, is absent; one that stands twice counts twice.
        target: f32 ``[batch, seqlen_q, topk]``, as :func:`index_target` makes it; a constant.
        allow_fallback: whether torch's operators may serve what no kernel takes. On the CPU the library computes the
            loss, on one thread; on a GPU its kernels take bf16, ``head_dim`` a multiple of 8 up to 256 (AMD: 128), on
            NVIDIA up to 128 heads (64 of more than 128 elements). All else there, and float64, is refused without
            this.

    Returns:
        The loss of each query: 0 where its list has no key, or its target sums to 0.
    """
    return _index_loss.index_loss(
        q, k, weights, indices, target, allow_fallback=_flag("allow_fallback", allow_fallback)
    )


def split_pages(cache: torch.Tensor, head_dim: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """k and its scales, views into pages as DeepGEMM has them: uint8 ``[num_pages, page_size, 1, head_dim + 4]``, whose
    pages have ``page_size * head_dim`` bytes of e4m3 first and then an f32 scale a key."""
    if cache.dtype != torch.uint8 or cache.dim() != 4 or cache.shape[2:] != (1, head_dim + 4):
        wanted = f"uint8 [num_pages, page_size, 1, {head_dim + 4}]"
        raise ValueError(f"cache is {cache.dtype} of shape {tuple(cache.shape)}, not {wanted}")
    pages, page_size = cache.shape[:2]
    flat = cache.reshape(pages, -1)
    k = flat[:, : page_size * head_dim].unflatten(1, (page_size, head_dim)).view(torch.float8_e4m3fn)
    return k, flat[:, page_size * head_dim :].view(torch.float32)

