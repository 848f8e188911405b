"""FlashMLA's names over lists of keys, against the definition in float64."""

from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch

import fmha
from fmha import flash_mla
from fmha.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from reference import DEVICE


pytestmark = pytest.mark.usefixtures("on_the_device")


def defined(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    head_dim_v: int,
    sink: Optional[torch.Tensor] = None,
    used: Optional[int] = None,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """O, greatest score and LSE of one token: q ``(heads, dim)``, rows ``(keys, dim)``, indices ``(topk,)``."""
    listed = indices[:used]
    keys = rows[listed[(listed >= 0) & (listed < len(rows))].long()].double()
    if not len(keys):
        least = torch.full((q.shape[0],), -torch.inf)
        return torch.zeros(q.shape[0], head_dim_v).double(), least, -least
    scores = q.double() @ keys.T * scale
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double())
    return (scores - total[:, None]).exp() @ keys[:, :head_dim_v], scores.amax(-1), lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(576, 512, 16), (48, 32, 3)])
def test_sparse_prefill_is_the_definition(dtype: torch.dtype, dims: Tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    dim, dim_v, heads = dims
    q, kv = torch.randn(5, heads, dim).to(dtype), torch.randn(40, 1, dim).to(dtype)
    indices = torch.randint(-3, 44, (5, 1, 24), dtype=torch.int32)
    indices[2] = -1
    kv[7] = torch.nan
    indices[indices == 7] = 8
    sink = torch.randn(heads)
    lengths = torch.tensor([24, 3, 24, 0, 17], dtype=torch.int32)
    out, logits, lse = flash_mla_sparse_fwd(q, kv, indices, 0.1, dim_v, sink, lengths)
    assert (out.shape, logits.shape, lse.shape, out.dtype) == ((5, heads, dim_v), (5, heads), (5, heads), dtype)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for row in range(5):
        wanted = defined(q[row], kv[:, 0], indices[row, 0], 0.1, dim_v, sink, int(lengths[row]))
        for found, exact in zip((out[row], logits[row], lse[row]), wanted):
            torch.testing.assert_close(found.double(), exact.double(), rtol=close, atol=close)
    assert (lse[2:4] == torch.inf).all() and (out[2:4] == 0).all()


def test_decode_takes_addresses_of_pages() -> None:
    torch.manual_seed(1)
    q, cache = torch.randn(2, 2, 4, 48).bfloat16(), torch.randn(6, 16, 1, 48).bfloat16()
    indices = torch.randint(-2, 99, (2, 2, 20), dtype=torch.int32)
    lengths = torch.tensor([20, 9], dtype=torch.int32)
    for sink in (None, torch.tensor([0.5, torch.inf, -torch.inf, -1.0])):
        out, lse = flash_mla_with_kvcache(
            q, cache, None, None, 32, get_mla_metadata()[0], indices=indices, attn_sink=sink, topk_length=lengths
        )
        assert (out.shape, lse.shape) == ((2, 2, 4, 32), (2, 4, 2))
        for b, i in ((b, i) for b in range(2) for i in range(2)):
            wanted, _, exact = defined(
                q[b, i], cache.reshape(96, 48), indices[b, i], 48**-0.5, 32, sink, int(lengths[b])
            )
            torch.testing.assert_close(out[b, i].double(), wanted, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse[b, :, i].double(), exact, rtol=1e-4, atol=1e-4)


def packed(rows: torch.Tensor, page_size: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """A cache of FlashMLA's rows of bytes, by its layout, and the rows that it stands for in float32."""
    dim = rows.shape[-1]
    group, num_groups = (128, 4) if dim == 576 else (64, 7)
    narrow, rotary = rows[:, : group * num_groups].float(), rows[:, group * num_groups :].bfloat16()
    exponents = torch.randint(-3, 4, (len(rows), num_groups))
    scales = torch.exp2(exponents.float())
    values = (narrow.unflatten(-1, (num_groups, group)) / scales[..., None]).to(torch.float8_e4m3fn)
    stands = torch.cat(((values.float() * scales[..., None]).flatten(-2), rotary.float()), -1)
    of_values, of_rotary = values.flatten(-2).view(torch.uint8), rotary.view(torch.uint8)
    if dim == 576:
        whole = torch.cat((of_values, scales.view(torch.uint8), of_rotary), -1)
        return whole.view(-1, page_size, 1, 656), stands
    bytes_of_scales = torch.nn.functional.pad((exponents + 127).to(torch.uint8), (0, 1))
    pages = torch.cat(
        (
            torch.cat((of_values, of_rotary), -1).view(-1, page_size * 576),
            bytes_of_scales.view(-1, page_size * 8),
        ),
        -1,
    )
    # A page is padded to a multiple of 576 bytes.
    padded = torch.nn.functional.pad(pages, (0, -pages.shape[-1] % 576), value=255)
    return padded.as_strided((len(pages), page_size, 1, 584), (padded.shape[-1], 584, 584, 1)), stands


@pytest.mark.parametrize("dim", [576, 512])
def test_new_rows_of_bytes_are_quantised_and_seen(dim: int) -> None:
    torch.manual_seed(9)
    group, num_groups = (128, 4) if dim == 576 else (64, 7)
    cache, rows = packed(torch.randn(64, dim), 16)
    table, used = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.tensor([20, 15], dtype=torch.int32)
    q, new = torch.randn(2, 1, 3, dim).bfloat16(), torch.randn(2, 2, 1, dim).bfloat16()
    given: Dict[str, Any] = dict(head_dim_v=512, block_table=table, seqused_k=used, mask="causal")
    before = cache.clone()
    out = fmha.attention_with_kvcache(q, cache, None, new, **given)
    values, rotary = new.float()[..., : group * num_groups].unflatten(-1, (num_groups, group)), new[..., -64:]
    scales = torch.exp2((values.abs().amax(-1) / 448).log2().ceil())
    quantised = (values / scales[..., None]).to(torch.float8_e4m3fn).float() * scales[..., None]
    stands = torch.cat((quantised.flatten(-2), rotary.float()), -1)[:, :, 0]
    there = rows.view(4, 16, dim)[table.long()].flatten(1, 2).clone()
    for b in range(2):
        first = int(used[b])
        there[b, first : first + 2] = stands[b]
        page, at = table[b, torch.arange(first, first + 2) // 16].long(), torch.arange(first, first + 2) % 16
        assert torch.equal(flash_mla._widened(cache, page, at), stands[b])
        keys = there[b, : first + 2]
        wanted, _, _ = defined(q[b, 0], keys, torch.arange(first + 2), dim**-0.5, 512)
        torch.testing.assert_close(out[b, 0].double(), wanted, rtol=3e-2, atol=3e-2)
        # No other row may have changed.
        others = torch.arange(first)
        page, at = table[b, others // 16].long(), others % 16
        assert torch.equal(flash_mla._widened(cache, page, at), flash_mla._widened(before, page, at))
    turns = dict(rotary_cos=torch.ones(40, 32), rotary_sin=torch.zeros(40, 32))
    with pytest.raises(RuntimeError, match="rotary"):
        fmha.attention_with_kvcache(q, cache, None, new, **given, **turns)
    with pytest.raises(RuntimeError, match=rf"k has shape .*, not \[2, 2, 1, {dim}\]"):
        fmha.attention_with_kvcache(q, cache, None, new[..., :-1], **given)
    with pytest.raises(RuntimeError, match="k is of float16"):
        fmha.attention_with_kvcache(q, cache, None, new.half(), **given)


@pytest.mark.parametrize("dim", [576, 512])
def test_rows_of_bytes_and_a_second_cache_are_read(dim: int) -> None:
    torch.manual_seed(2)
    cache, rows = packed(torch.randn(64, dim), 16)
    extra, extra_rows = packed(torch.randn(12, dim), 4)
    q, sink = torch.randn(2, 2, 3, dim).bfloat16(), torch.randn(3)
    indices = torch.randint(-2, 70, (2, 2, 20), dtype=torch.int32)
    extra_indices = torch.randint(-2, 14, (2, 2, 8), dtype=torch.int32)
    lengths, extra_lengths = torch.tensor([20, 9], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)
    for second in (False, True):
        more: Dict[str, Any] = {}
        if second:
            more = dict(extra_k_cache=extra, extra_indices_in_kvcache=extra_indices, extra_topk_length=extra_lengths)
        out, lse = flash_mla_with_kvcache(
            q, cache, None, None, 512, is_fp8_kvcache=True, indices=indices, attn_sink=sink, topk_length=lengths, **more
        )
        assert (out.shape, lse.shape) == ((2, 2, 3, 512), (2, 3, 2))
        for b, i in ((b, i) for b in range(2) for i in range(2)):
            own = indices[b, i, : int(lengths[b])]
            own = own[(own >= 0) & (own < 64)].long()
            other = extra_indices[b, i, : int(extra_lengths[b])]
            other = other[(other >= 0) & (other < 12)].long()
            keys = torch.cat((rows[own], extra_rows[other])) if second else rows[own]
            wanted, _, exact = defined(q[b, i], keys, torch.arange(len(keys)), dim**-0.5, 512, sink)
            torch.testing.assert_close(out[b, i].double(), wanted, rtol=3e-2, atol=3e-2)
            torch.testing.assert_close(lse[b, :, i].double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dim", [576, 512])
def test_rows_of_bytes_are_read_where_they_lie(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    cache, _ = packed(torch.randn(64, dim), 16)
    extra, _ = packed(torch.randn(12, dim), 4)
    q, sink = torch.randn(2, 2, 3, dim).bfloat16(), torch.randn(3)
    indices = torch.randint(-2, 70, (2, 2, 20), dtype=torch.int32)
    extra_indices = torch.randint(-2, 14, (2, 2, 8), dtype=torch.int32)
    seconds: List[Dict[str, Any]] = [{}, dict(extra_k_cache=extra, extra_indices_in_kvcache=extra_indices)]
    for second in seconds:

        def call() -> Tuple[torch.Tensor, torch.Tensor]:
            own = dict(is_fp8_kvcache=True, indices=indices, attn_sink=sink)
            return flash_mla_with_kvcache(q, cache, None, None, 512, **own, **second)

        with monkeypatch.context() as patch:
            patch.setattr(flash_mla, "_bytes_in_place", lambda *_: False)
            gathered = call()
        with monkeypatch.context() as patch:
            patch.setattr(flash_mla, "_gathered", None)
            in_place = call()
        for found, wanted in zip(in_place, gathered):
            torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_a_second_cache_of_other_heads_or_types_is_refused() -> None:
    q, cache = torch.randn(1, 2, 4, 24), torch.randn(3, 7, 2, 24)
    indices = torch.zeros(1, 2, 3, dtype=torch.int32)
    for extra, said in (
        (torch.randn(3, 7, 1, 24), "second.num_heads_kv is 1, but the first cache's 2"),
        (torch.randn(3, 7, 2, 24).bfloat16(), "second.k is of bfloat16, but q of float32"),
        (torch.randn(3, 7, 2, 16), r"second.k has shape \[3, 7, 2, 16\]"),
        (torch.randn(3, 7, 2), "extra_k_cache has shape"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            flash_mla_with_kvcache(
                q, cache, None, None, 16, indices=indices, extra_k_cache=extra, extra_indices_in_kvcache=indices
            )


@pytest.mark.parametrize(("dim", "dim_v", "heads_kv"), [(576, 512, 1), (24, 16, 2)])
def test_a_second_cache_joins_in_the_softmax_where_it_lies(dim: int, dim_v: int, heads_kv: int) -> None:
    torch.manual_seed(5)
    cache, extra = torch.randn(3, 7, heads_kv, dim), torch.randn(5, 4, heads_kv, dim)
    # A page that no list names may hold anything, and rows of the second page may have gaps.
    cache[2] = torch.nan
    extra = torch.cat((extra, torch.full_like(extra, torch.nan)), -1)[..., :dim]
    q, sink = torch.randn(2, 3, 4, dim), torch.randn(4)
    indices = torch.randint(-2, 14, (2, 3, 9), dtype=torch.int32)
    extra_indices = torch.randint(-2, 30, (2, 3, 11), dtype=torch.int32)
    extra_indices[0, 1] = -1
    indices[0, 1:] = 99
    extra_lengths = torch.tensor([11, 4], dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(
        q,
        cache,
        None,
        None,
        dim_v,
        indices=indices,
        attn_sink=sink,
        extra_k_cache=extra,
        extra_indices_in_kvcache=extra_indices,
        extra_topk_length=extra_lengths,
    )
    per_kv = 4 // heads_kv
    for b, i, kv in ((b, i, kv) for b in range(2) for i in range(3) for kv in range(heads_kv)):
        own = [int(e) for e in indices[b, i] if 0 <= e < 21]
        other = [int(e) for e in extra_indices[b, i, : int(extra_lengths[b])] if 0 <= e < 20]
        keys = torch.cat((cache.reshape(-1, heads_kv, dim)[own, kv], extra.reshape(-1, heads_kv, dim)[other, kv]))
        heads = slice(per_kv * kv, per_kv * kv + per_kv)
        listed = torch.arange(len(keys))
        wanted, _, exact = defined(q[b, i, heads], keys, listed, dim**-0.5, dim_v, sink[heads])
        torch.testing.assert_close(out[b, i, heads].double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b, heads, i].double(), exact.double(), rtol=1e-5, atol=1e-5)
    assert (lse[0, :, 1] == torch.inf).all() and (out[0, 1] == 0).all()


def test_what_is_not_taken_is_refused_by_its_name() -> None:
    q, kv = torch.randn(2, 2, 8), torch.randn(4, 1, 8)
    indices = torch.zeros(2, 1, 3, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="indexer_topk 512"):
        flash_mla_sparse_fwd(q, kv, indices, 1.0, 8, indexer_topk=512)
    with pytest.raises(RuntimeError, match="indices is of int64, not of int32"):
        flash_mla_sparse_fwd(q, kv, indices.long(), 1.0, 8)
    with pytest.raises(ValueError, match="d_v 9 is not in 1..=8"):
        flash_mla_sparse_fwd(q, kv, indices, 1.0, 9)
    with pytest.raises(NotImplementedError, match="q requires a gradient"):
        flash_mla_sparse_fwd(q.requires_grad_(), kv, indices, 1.0, 8)
    cache, lists = torch.randn(3, 4, 1, 8), indices[:, 0, None]
    query = torch.randn(2, 1, 2, 8)
    for keywords, text in (
        ({"num_splits": 4}, "num_splits is given"),
        ({"indices": None}, "indices is None"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            given: Dict[str, Any] = {"indices": lists, **keywords}
            flash_mla_with_kvcache(query, cache, None, None, 8, **given)
    for keywords, text in (
        ({"is_fp8_kvcache": True}, "no rows of 656 or 584 bytes"),
        ({"extra_k_cache": cache}, "extra_indices_in_kvcache is None"),
        ({"extra_topk_length": indices[:, 0, 0]}, "extra_topk_length is given"),
    ):
        with pytest.raises(ValueError, match=text):
            flash_mla_with_kvcache(query, cache, None, None, 8, indices=lists, **keywords)
    with pytest.raises(ValueError, match="causal True"):
        flash_mla_with_kvcache(query, cache, None, None, 8, causal=True, indices=lists)


@pytest.mark.parametrize("way", ["in place", "bytes", "second"])
def test_lists_have_the_same_types_and_shapes_in_every_way_of_a_cache(way: str) -> None:
    dim = 576 if way == "bytes" else 32
    cache = packed(torch.randn(8, 576), 4)[0] if way == "bytes" else torch.randn(2, 4, 1, dim)
    q, indices = torch.randn(3, 2, 2, dim), torch.zeros(3, 2, 5, dtype=torch.int32)
    lengths = torch.tensor([5, 2, 0], dtype=torch.int32)
    prefixes = [""]
    given: Dict[str, Any] = dict(indices=indices, topk_length=lengths, is_fp8_kvcache=way == "bytes")
    if way == "second":
        given |= dict(extra_k_cache=cache, extra_indices_in_kvcache=indices, extra_topk_length=lengths)
        prefixes.append("extra_")

    def call(**changed: Any) -> torch.Tensor:
        return flash_mla_with_kvcache(q, cache, None, None, dim // 2, **{**given, **changed})[0]

    wanted = call()
    for prefix in prefixes:
        of_indices, length = "extra_indices_in_kvcache" if prefix else "indices", f"{prefix}topk_length"
        for name, wrong, text in (
            (of_indices, indices.long(), f"{of_indices} is of int64, not of int32"),
            (of_indices, indices.float(), f"{of_indices} is of float32, not of int32"),
            (length, lengths.long(), f"{length} is of int64, not of int32"),
            (length, lengths[:, None], f"{length} has shape"),
            (length, lengths[:2], f"{length} has shape"),
            (length, lengths[0], f"{length} has shape"),
        ):
            with pytest.raises((RuntimeError, ValueError), match=text):
                call(**{name: wrong})
        of_tokens = lengths[:, None].expand(3, 2).contiguous()
        assert torch.equal(call(**{length: of_tokens}), wanted)


@pytest.mark.parametrize("gathered", [1, 1 << 26])
def test_greatest_scores_of_several_heads_are_the_definition(gathered: int, monkeypatch: Any) -> None:
    import fmha.flash_mla

    monkeypatch.setattr(fmha.flash_mla, "_GATHERED", gathered)
    torch.manual_seed(4)
    q, kv = torch.randn(5, 6, 8), torch.randn(9, 2, 8)
    indices = torch.randint(-3, 12, (5, 2, 7), dtype=torch.int32)
    # A key of NaN that no list names is not seen.
    kv[0] = torch.nan
    indices[indices == 0] = -1
    lengths = torch.tensor([7, 0, 3, 9, 1], dtype=torch.int32)
    _, logits, _ = flash_mla_sparse_fwd(q, kv, indices, 0.3, 8, topk_length=lengths)
    for row, head in ((row, head) for row in range(5) for head in range(2)):
        heads = slice(3 * head, 3 * head + 3)
        _, wanted, _ = defined(q[row, heads], kv[:, head], indices[row, head], 0.3, 8, used=int(lengths[row]))
        torch.testing.assert_close(logits[row, heads].double(), wanted.double())
    empty = flash_mla_sparse_fwd(q, kv[:0], indices, 0.3, 8)[1]
    assert (empty == -torch.inf).all()


@pytest.mark.parametrize(("hip", "bytes_apart"), [(None, 16), ("7.0", 4)])
def test_pages_that_begin_on_no_loads_have_their_rows_gathered_on_gpus(
    hip: Optional[str], bytes_apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    whole = torch.zeros(3, 2, 1, 584, dtype=torch.uint8)
    assert flash_mla._begins_on_loads(whole)
    apart = torch.zeros(3 * (1168 + bytes_apart), dtype=torch.uint8)
    odd = apart.as_strided((3, 2, 1, 584), (1168 + bytes_apart // 2, 584, 584, 1))
    assert not flash_mla._begins_on_loads(odd)
    assert flash_mla._begins_on_loads(apart.as_strided((3, 2, 1, 584), (1168 + bytes_apart, 584, 584, 1)))
