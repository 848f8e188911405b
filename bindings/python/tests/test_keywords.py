"""No keyword is swallowed: each door's signature is read, and each keyword that has a default is given a value. The
result changes, or an error names the keyword. A hint alone changes nothing, and the table says why."""

import inspect
import types
from typing import Any, Dict, NamedTuple

import numpy
import pytest
import torch

import fmha
import fmha.sdpa
from fmha import _arguments, _marks, _serving, bert_padding, flash_mla, flex, sparse
from fmha import flash_attn as fa2, flash_attn_3 as fa3, flash_attn_4 as fa4
from reference import DEVICE, appends_in_f32, offsets, tensors
from test_engines import Mode, Pool, layer, sglang, vllm, vllm_batch  # noqa: F401

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="hints choose other bits on a GPU; keywords are the same")

ABSENT = object()


class Case(NamedTuple):
    """A keyword's value; the call with it stands beside one with ``plain`` in its place, or without it."""

    kind: str
    value: Any
    said: str = ""
    plain: Any = ABSENT
    beside: Dict[str, Any] = {}


def changes(value, plain=ABSENT, /, **beside):
    return Case("changes", value, "", plain, beside)


def refused(value, said="", /, **beside):
    """``said`` stands for the keyword where a message has another door's word for it."""
    return Case("refused", value, said, ABSENT, beside)


def hint(value, why, /, **beside):
    assert why
    return Case("hint", value, why, ABSENT, beside)


class Door(NamedTuple):
    function: Any
    base: Dict[str, Any]
    #: Test cases of each keyword that has a default: one case or a list.
    cases: Dict[str, Any]


def plain_values(result):
    """What came out, with every tensor as a list of bits that a NaN compares in."""
    if isinstance(result, (tuple, list)):
        return [plain_values(x) for x in result]
    if isinstance(result, torch.Tensor):
        whole = result.detach()
        if whole.is_floating_point():
            whole = whole.double().nan_to_num(nan=1e300)
        return (tuple(whole.shape), str(result.dtype), whole.tolist())
    if hasattr(result, "dtype"):
        return (result.shape, str(result.dtype), numpy.asarray(result).tolist())
    return result


def copied(arguments):
    """A cache is written to."""
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def run(function, arguments):
    torch.manual_seed(1)
    return plain_values(function(**copied(arguments)))


def faults(door):
    """What is wrong with a door, a line for each keyword."""
    found = []
    for name, parameter in inspect.signature(door.function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            # A function must name an unknown keyword in its error, wherever it passes keywords on.
            try:
                run(door.function, {**door.base, "teleport": 1})
                found.append("teleport is swallowed")
            except Exception as error:
                if "teleport" not in str(error):
                    found.append(f"teleport: {error!r} does not name it")
            continue
        if name not in door.cases:
            if parameter.kind is parameter.VAR_POSITIONAL or parameter.default is parameter.empty:
                continue
            found.append(f"{name} has no case")
            continue
        cases = door.cases[name]
        for case in cases if isinstance(cases, list) else [cases]:
            beside = {**door.base, **case.beside}
            try:
                got = run(door.function, {**beside, name: case.value})
            except Exception as error:
                if case.kind != "refused":
                    found.append(f"{name}: {error!r}")
                elif (case.said or name) not in str(error):
                    found.append(f"{name}: {error!r} does not name it")
                continue
            if case.kind == "refused":
                found.append(f"{name} is not refused")
                continue
            plain = run(door.function, beside if case.plain is ABSENT else {**beside, name: case.plain})
            if (got == plain) is (case.kind == "changes"):
                found.append(f"{name} {'is swallowed' if got == plain else 'is more than a hint'}")
    unknown = set(door.cases) - set(inspect.signature(door.function).parameters)
    return found + [f"{name} is no keyword" for name in sorted(unknown)]


def i32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def qkv(names="q k v"):
    return dict(zip(names.split(), tensors()))


def packed(names="q k v"):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    return dict(zip(names.split(), (q, k, v)))


BITS = "the bits of gradients alone"
SPEED = "a speed hint"
BOUND = "a bound of lengths; without offsets the shape is one"
CHOICE = "how many parts a kernel works in is its own choice; 1 asks for bits that do not depend on the batch"

TAIL = dict(
    softmax_scale=changes(0.1),
    causal=changes(True),
    window_size=changes((1, 0)),
    softcap=changes(0.7),
    deterministic=hint(True, BITS),
)


def tail2():
    return dict(TAIL, dropout_p=changes(0.5), alibi_slopes=changes(torch.rand(4)), return_attn_probs=changes(True))


def tail3(descales=True):
    to8 = dict(zip("qkv", (x.to(torch.float8_e4m3fn) for x in tensors(hk=4)))) if descales else {}
    scales = lambda name: [changes(torch.full((2, 4), 1.5), **to8)] if descales else []
    return dict(
        TAIL,
        **{name: scales(name) + [refused(torch.full((2, 2), 1.5))] for name in ("q_descale", "k_descale", "v_descale")},
        qv=refused(torch.zeros(2, 7, 4, 15)),
        attention_chunk=[changes(4), refused(-1)],
        num_splits=[hint(1, CHOICE), hint(3, CHOICE)],
        pack_gqa=hint(True, SPEED),
        sm_margin=hint(4, SPEED),
        return_attn_probs=changes(True),
    )


def without(cases, *names):
    return {name: case for name, case in cases.items() if name not in names}


def cu(*lengths):
    return offsets(lengths)


def varlen():
    return dict(packed(), cu_seqlens_q=cu(3, 11), cu_seqlens_k=cu(9, 13), max_seqlen_q=11, max_seqlen_k=13)


def pages():
    """Keys as pages, and two tables that differ in every entry."""
    return torch.randn(6, 4, 2, 16), torch.randn(6, 4, 2, 16), i32(0, 1, 2, 3, 4, 5).view(2, 3)


def cache_cases(table):
    """Keywords of FlashAttention 2's and 3's functions over a cache."""
    k, v = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
    used = i32(3, 7)
    new = dict(k=k, v=v, cache_seqlens=used)
    cos, sin = torch.rand(16, 8), torch.rand(16, 8)
    k_pages, v_pages, order = pages()
    paged = dict(k_cache=k_pages, v_cache=v_pages, cache_seqlens=i32(11, 9))
    return dict(
        without(TAIL, "deterministic"),
        k=[changes(k, -k, **without(new, "k")), refused(k, "v", cache_seqlens=used)],
        v=[changes(v, -v, **without(new, "v")), refused(v, "k", cache_seqlens=used)],
        rotary_cos=[
            changes(cos, -cos, rotary_sin=sin, **new),
            refused(cos, cache_seqlens=used),
            refused(cos, "rotary_sin", **new),
        ],
        rotary_sin=[
            changes(sin, -sin, rotary_cos=cos, **new),
            refused(sin, cache_seqlens=used),
            refused(sin, "rotary_cos", **new),
        ],
        rotary_interleaved=[
            changes(False, True, rotary_cos=cos, rotary_sin=sin, **new),
            hint(False, "it says how rotary_cos and rotary_sin turn, which are not there"),
        ],
        cache_seqlens=[changes(used), changes(5), refused(12), refused(i32(12, 1))],
        cache_batch_idx=[
            changes(i32(1, 0)),
            changes(i32(1, 0), **{table: order}, **paged),
            refused(i32(1, 5), **{table: order}, **paged),
        ],
        cache_leftpad=[
            changes(i32(2, 5)),
            changes(i32(2, 1), **new),
            changes(i32(2, 5), cache_batch_idx=i32(1, 0)),
            changes(i32(2, 5), **{table: order}, **paged),
            refused(i32(2, 5), cache_seqlens=i32(1, 7)),
        ],
        **{table: changes(order, order.flip(0, 1), **paged)},
        num_splits=[hint(1, CHOICE), hint(3, CHOICE)],
        return_softmax_lse=changes(True),
    )


DOORS = {}


def door(function):
    DOORS[function.__name__.replace("_", " ")] = function
    return function


@door
def flash_attn_2():
    return Door(fa2.flash_attn_func, qkv(), tail2())


@door
def flash_attn_2_qkvpacked():
    return Door(fa2.flash_attn_qkvpacked_func, dict(qkv=torch.randn(2, 7, 3, 4, 16)), tail2())


@door
def flash_attn_2_kvpacked():
    base = dict(q=torch.randn(2, 7, 4, 16), kv=torch.randn(2, 11, 2, 2, 16))
    return Door(fa2.flash_attn_kvpacked_func, base, tail2())


@door
def flash_attn_2_varlen():
    k, v, table = pages()
    paged = dict(k=k, v=v, cu_seqlens_k=cu(9, 11), max_seqlen_k=11)
    cases = dict(tail2(), block_table=changes(table, table.flip(0, 1), **paged))
    return Door(fa2.flash_attn_varlen_func, varlen(), cases)


@door
def flash_attn_2_varlen_qkvpacked():
    base = dict(qkv=torch.randn(14, 3, 4, 16), cu_seqlens=cu(3, 11), max_seqlen=11)
    return Door(fa2.flash_attn_varlen_qkvpacked_func, base, tail2())


@door
def flash_attn_2_varlen_kvpacked():
    base = dict(without(varlen(), "k", "v"), kv=torch.randn(22, 2, 2, 16))
    return Door(fa2.flash_attn_varlen_kvpacked_func, base, tail2())


@door
def flash_attn_2_with_kvcache():
    cases = dict(cache_cases("block_table"), alibi_slopes=changes(torch.rand(4)))
    return Door(fa2.flash_attn_with_kvcache, qkv("q k_cache v_cache"), cases)


@door
def flash_attn_3():
    return Door(fa3.flash_attn_func, qkv(), tail3())


@door
def flash_attn_3_qkvpacked():
    cases = dict(
        without(tail3(False), "qv", "num_splits", "pack_gqa"),
        num_heads_q=[
            changes(4, 8, qkv=torch.randn(2, 7, 12, 16)),
            refused(3),
            refused(11, qkv=torch.randn(2, 7, 12, 16)),
        ],
    )
    return Door(fa3.flash_attn_qkvpacked_func, dict(qkv=torch.randn(2, 7, 3, 4, 16)), cases)


@door
def flash_attn_3_varlen():
    cases = dict(tail3(False), seqused_q=changes(i32(2, 5)), seqused_k=changes(i32(4, 6)))
    return Door(fa3.flash_attn_varlen_func, varlen(), cases)


@door
def flash_attn_3_with_kvcache():
    k, v = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    rows = dict(q=torch.randn(9, 4, 16), max_seqlen_q=7)
    new = dict(k=k, v=v, cache_seqlens=i32(3, 7))
    cases = dict(
        cache_cases("page_table"),
        **without(tail3(False), "return_attn_probs", "deterministic"),
        cu_seqlens_q=[changes(cu(2, 7), cu(7, 2), **rows), refused(cu(2, 7), "max_seqlen_q", q=rows["q"])],
        cu_seqlens_k_new=[changes(cu(2, 3), cu(4, 1), **new), refused(cu(2, 3))],
        max_seqlen_q=[refused(3, "maximal length 3", cu_seqlens_q=cu(2, 7), q=rows["q"]), hint(3, BOUND)],
        rotary_seqlens=[
            changes(
                i32(1, 2), rotary_cos=torch.rand(16, 8), rotary_sin=torch.rand(16, 8), cu_seqlens_k_new=cu(2, 3), **new
            ),
            refused(i32(1, 2)),
        ],
        scheduler_metadata=hint(torch.zeros(3), SPEED),
    )
    return Door(fa3.flash_attn_with_kvcache, qkv("q k_cache v_cache"), cases)


def parts(packed_rows=False):
    base = dict(out_partial=torch.randn(3, 2, 7, 4, 16), lse_partial=torch.randn(3, 2, 7, 4))
    return {name: x.flatten(1, 2) for name, x in base.items()} if packed_rows else base


COMBINE = lambda: dict(
    out=[changes(torch.zeros(2, 7, 4, 16, dtype=torch.bfloat16))],
    out_dtype=[changes(torch.bfloat16), refused(torch.bfloat16, out=torch.zeros(2, 7, 4, 16))],
)


@door
def flash_attn_3_combine():
    return Door(fa3.flash_attn_combine, parts(), COMBINE())


REFUSED_BY_4 = {
    name: refused(torch.zeros(2)) for name in "qv gather_kv_indices score_mod_bwd aux_tensors aux_scalars".split()
}
class BlockSparse(NamedTuple):
    """FlashAttention 4's lists, by the fields that are read of them."""

    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any = None
    full_block_idx: Any = None
    cu_total_m_blocks: Any = None
    block_size: Any = None


LISTS_OF_4 = (i32(1, 2).view(1, 1, 2), i32(1, 9, 0, 2).view(1, 1, 2, 2))

FUNCTIONS_OF_4 = dict(
    score_mod=changes(lambda s, *_: s * 2),
    mask_mod=changes(lambda b, h, q, k, *_: k % 2 == 0),
)


@door
def flash_attn_4():
    cases = dict(
        TAIL,
        **REFUSED_BY_4,
        **FUNCTIONS_OF_4,
        block_sparse_tensors=[
            changes(BlockSparse(*LISTS_OF_4, block_size=(4, 4))),
            refused((torch.zeros(2),)),
            refused(BlockSparse(*LISTS_OF_4)),
            refused(BlockSparse(*LISTS_OF_4, block_size=(4, 4), cu_total_m_blocks=i32(0, 2))),
        ],
        block_sparse_tensors_bwd=[
            refused(BlockSparse(*LISTS_OF_4, block_size=(4, 4))),
            hint(
                BlockSparse(*LISTS_OF_4, block_size=(4, 4)),
                "gradients follow the lists that forward has",
                block_sparse_tensors=BlockSparse(*LISTS_OF_4, block_size=(4, 4)),
            ),
        ],
        learnable_sink=changes(torch.randn(4)),
        num_splits=[hint(1, CHOICE), hint(3, CHOICE)],
        pack_gqa=hint(True, SPEED),
        return_lse=changes(True),
    )
    return Door(fa4.flash_attn_func, qkv(), cases)


@door
def flash_attn_4_varlen():
    k, v, table = pages()
    paged = dict(q=torch.randn(2, 7, 4, 16), k=k, v=v, seqused_k=i32(11, 9))
    rows = varlen()
    cases = dict(
        TAIL,
        **REFUSED_BY_4,
        **FUNCTIONS_OF_4,
        learnable_sink=changes(torch.randn(4)),
        num_splits=[hint(1, CHOICE), hint(3, CHOICE)],
        pack_gqa=hint(True, SPEED),
        return_lse=changes(True),
        cu_seqlens_q=[
            changes(cu(3, 11), cu(11, 3), **without(rows, "cu_seqlens_q")),
            changes(cu(3, 11), cu(11, 3), **without(rows, "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")),
        ],
        cu_seqlens_k=[
            changes(cu(9, 13), cu(13, 9), **without(rows, "cu_seqlens_k")),
            changes(cu(9, 13), cu(13, 9), **without(rows, "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")),
        ],
        max_seqlen_q=[refused(10, "maximal length 10", **without(rows, "max_seqlen_q")), hint(3, BOUND)],
        max_seqlen_k=[
            refused(12, "maximal length 12", **without(rows, "max_seqlen_k")),
            refused(i32(5, 8)),
            hint(3, BOUND),
        ],
        min_seqlen_k=hint(1, SPEED),
        seqused_q=changes(i32(2, 5)),
        seqused_k=changes(i32(4, 6)),
        page_table=changes(table, table.flip(0, 1), **paged),
        scheduler_metadata=hint(torch.zeros(3), SPEED),
        seqlen_k_per_split=hint(128, CHOICE),
        disable_scheduler_metadata=hint(True, SPEED),
    )
    return Door(fa4.flash_attn_varlen_func, qkv(), cases)


@door
def flash_attn_4_combine():
    cases = dict(
        COMBINE(),
        cu_seqlens=[hint(cu(3, 11), "rows are merged each on its own", **parts(True)), refused(cu(3, 11))],
        seqused=[changes(i32(1, 2)), refused(i32(1, 2, 3))],
        virtual_batch_idx=[hint(i32(1, 0), "the order in which sequences are merged"), refused(i32(1, 0, 2))],
        return_lse=changes(False),
    )
    return Door(fa4.flash_attn_combine, parts(), cases)


def test_the_test_sees_a_keyword_that_is_swallowed():
    def function(q, window=None, scale=1.0, name=None, new=None, **rest):
        if name is not None:
            raise ValueError("a word is given")
        return q * scale

    cases = dict(window=changes(3), scale=hint(2.0, SPEED), name=refused(3), old=changes(1))
    assert faults(Door(function, dict(q=torch.ones(2)), cases)) == [
        "window is swallowed",
        "scale is more than a hint",
        "name: ValueError('a word is given') does not name it",
        "new has no case",
        "teleport is swallowed",
        "old is no keyword",
    ]


@appends_in_f32
@pytest.mark.parametrize("name", DOORS)
def test_no_keyword_is_swallowed(name):
    assert not faults(DOORS[name]())


def test_prepare_hands_every_keyword_on():
    with pytest.raises(TypeError, match="teleport"):
        fmha.prepare(*tensors(), teleport=1)
    assert "promises" in fmha.prepare(*tensors(), backward=True)


def test_every_function_of_flash_attention_has_a_case():
    named = {
        function
        for module in (fa2, fa3, fa4)
        for name, function in vars(module).items()
        if name.startswith("flash_attn_") and inspect.isfunction(function) and function.__module__ == module.__name__
    }
    assert named <= {make().function for make in DOORS.values()}


def own_cases(cache=False):
    """Keywords of our own functions, which ``fmha.jax`` has too."""
    rows = packed()
    k, v, table = pages()
    where = ("k_cache", "v_cache") if cache else ("k", "v")
    eighths = [x.to(torch.float8_e4m3fn) for x in tensors(hk=4)]
    to8 = dict(zip(("q", *where), eighths))
    lengths = dict(
        q=rows["q"],
        **dict(zip(where, (rows["k"], rows["v"]))),
        cu_seqlens_q=cu(3, 11),
        cu_seqlens_k=cu(9, 13),
        max_seqlen_q=11,
        max_seqlen_k=13,
    )
    drops = dict(p_drop=0.4)
    return dict(
        mask=[changes("b:2,1"), changes(True, "t")] if not cache else changes("b:2,1"),
        causal=[changes(not cache), refused(True, "mask", mask="b:2,1")],
        softmax_scale=changes(0.1),
        softcap=changes(0.7),
        bias=changes(torch.randn(1, 4, 7, 11)),
        alibi_slopes=changes(torch.rand(4)),
        sink=changes(torch.randn(4)),
        cu_seqlens_q=[
            changes(cu(3, 11), cu(11, 3), **without(lengths, "cu_seqlens_q")),
            refused(cu(3, 11), "max_seqlen_q", **dict(lengths, max_seqlen_q=0)),
        ],
        cu_seqlens_k=[
            changes(cu(9, 13), cu(13, 9), **without(lengths, "cu_seqlens_k")),
            refused(cu(9, 13), "max_seqlen_k", **dict(lengths, max_seqlen_k=0)),
        ],
        max_seqlen_q=[refused(10, "maximal length 10", **without(lengths, "max_seqlen_q")), hint(3, BOUND)],
        max_seqlen_k=[refused(12, "maximal length 12", **without(lengths, "max_seqlen_k")), hint(3, BOUND)],
        seqused_q=changes(i32(2, 5)),
        seqused_k=changes(i32(4, 6)),
        block_table=changes(table, table.flip(0, 1), seqused_k=i32(11, 9), **dict(zip(where, (k, v)))),
        descale_q=[changes(torch.full((2, 4), 1.5), **to8), refused(torch.ones(2, 4))],
        descale_k=[changes(torch.full((2, 4), 1.5), **to8), refused(torch.ones(2, 4))],
        descale_v=[changes(torch.full((2, 4), 1.5), **to8), refused(torch.ones(2, 4))],
        p_drop=[changes(0.4, seed=1)],
        seed=[changes(3, 4, **drops), hint(3, "nothing is drawn without p_drop")],
        offset=[changes(3, 4, seed=1, **drops), hint(3, "nothing is drawn without p_drop")],
        dtype_o=changes("bfloat16"),
        allow_fallback=hint(True, "a fast kernel takes the call"),
        accuracy=hint("exact", "the CPU has one kernel, which is exact"),
        deterministic=hint(True, BITS),
        batch_invariant=hint(True, "the CPU's bits never depend on the batch"),
        row_invariant=hint(True, "a call says nothing of others"),
        check_lengths=[hint(True, "lengths are right"), refused(True, "seqused_k", seqused_k=i32(12, 1))],
        return_lse=changes(True),
    )


def small_cases():
    why = "it is written beside O, of which it changes no bit; tests of small outputs read it"
    sizes = dict(row_max=(2, 4, 7), head_max=(4,), key_sum=(2, 4, 11))
    return {name: [hint(torch.zeros(size), why), refused(torch.zeros(3))] for name, size in sizes.items()}


def code_cases():
    reads = dict(score_code="by: float; s * by")
    return dict(
        score_code=[changes("s - k", "s + k"), refused("s +")],
        mask_code=[changes("k > 2", lambda b, h, q, k: k != q), refused("k")],
        captured=[changes(dict(by=2), dict(by=3), **reads), refused(dict(to=2), **reads), refused(dict(by=2))],
    )


def list_cases():
    given = torch.randint(0, 11, (2, 7, 2, 5), dtype=torch.int32)
    beside = dict(indices=given)
    return dict(
        indices=[changes(given, given[:, :, :, :3]), refused(given[:, :4]), refused(given, "score_code", score_code="s")],
        topk_length=[changes(i32(2, 5), i32(3, 4), **beside), refused(i32(2, 5))],
        index_block=[changes(2, 3, **beside), refused(2), refused(0, **beside)],
    )


def scale_cases():
    q, k, v, scales = fmha.BlockScales.quantize(*tensors(), "mxfp8_e4m3")
    doubled = fmha.BlockScales(scales.q, scales.k, scales.v.view(torch.uint8) + 1, scales.format)
    beside = dict(q=q, k=k, v=v)
    return dict(
        block_scales=[
            changes(scales, doubled, **beside),
            refused(scales),
            refused("mxfp8_e4m3", **beside),
            refused(scales, "index_block", index_block=2, **beside),
            refused(scales, "key_sum", key_sum=torch.zeros(2, 4, 11), **beside),
        ]
    )


@door
def attention():
    cases = dict(own_cases(), **code_cases(), **list_cases(), **small_cases(), **scale_cases())
    return Door(fmha.attention, qkv(), cases)


@door
def attention_out():
    lse, keep = torch.zeros(2, 4, 7), torch.zeros(2, 4, 7, 11, dtype=torch.uint8)
    to8 = dict(zip("qkv", (x.to(torch.float8_e4m3fn) for x in tensors(hk=4))), o=torch.zeros(2, 7, 4, 16))

    def function(o, q, k, v, *, lse=None, keep_mask=None, scale_o=None, **options):
        fmha.attention_out(o, q, k, v, lse=lse, keep_mask=keep_mask, scale_o=scale_o, **options)
        return o, lse, keep_mask

    function.__signature__ = inspect.signature(fmha.attention_out)
    # The operator writes O in the caller's type, and leaves a row that lengths leave out as it was.
    cases = dict(
        without(own_cases(), "return_lse"),
        lse=changes(lse),
        keep_mask=changes(keep, p_drop=0.4, seed=3),
        scale_o=[
            changes(torch.tensor(2.0), **dict(to8, o=torch.zeros(2, 7, 4, 16, dtype=torch.float8_e4m3fn))),
            refused(torch.tensor(2.0)),
        ],
        dtype_o=refused("bfloat16"),
        **small_cases(),
    )
    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        cases[name] = [
            case._replace(beside=dict(case.beside, o=torch.zeros(14, 4, 16))) if case.beside else case
            for case in cases[name]
        ]
    return Door(function, dict(o=torch.zeros(2, 7, 4, 16), **qkv()), cases)


@door
def attention_with_kvcache():
    k, v = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
    flat = torch.randn(5, 2, 16)
    new = dict(k=k, v=v, seqused_k=i32(3, 7))
    packed_new = dict(k=flat, v=-flat, seqused_k=i32(3, 7), max_seqlen_new=5)
    cos, sin = torch.rand(16, 8), torch.rand(16, 8)
    tree = torch.randint(0, 128, (2, 7, 1), dtype=torch.int32)
    narrow = {name: torch.randn(2, 11, 2, 16).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    narrow["q"] = torch.randn(2, 7, 4, 16).half()
    short = {name: narrow[name][:, :8] for name in ("k_cache", "v_cache")}
    scale = torch.rand(2, 11, 2)
    cases = dict(
        own_cases(cache=True),
        k=[changes(k, -k, **without(new, "k")), refused(k, "v", seqused_k=i32(3, 7))],
        v=[changes(v, -v, **without(new, "v")), refused(v, "k", seqused_k=i32(3, 7))],
        cu_seqlens_new=[changes(cu(2, 3), cu(4, 1), **packed_new), refused(cu(2, 3))],
        rotary_cos=[changes(cos, -cos, rotary_sin=sin, **new), refused(cos, "rotary_sin", **new)],
        rotary_sin=[changes(sin, -sin, rotary_cos=cos, **new), refused(sin, "rotary_cos", **new)],
        rotary_interleaved=[
            changes(True, False, rotary_cos=cos, rotary_sin=sin, **new),
            hint(True, "it says how rotary_cos and rotary_sin turn, which are not there"),
        ],
        tree_mask=changes(tree),
        max_seqlen_new=[
            refused(1, "maximal length 1", cu_seqlens_new=cu(2, 3), **without(packed_new, "max_seqlen_new")),
            hint(3, BOUND),
        ],
        head_dim_v=[changes(16, 8, v_cache=None), refused(8)],
        k_scale=[changes(scale, 2 * scale, v_scale=scale, **narrow), refused(scale), refused(scale, v_scale=scale)],
        v_scale=[changes(scale, 2 * scale, k_scale=scale, **narrow), refused(scale)],
        scale_block=[
            refused(3, "not [2, 3, 2]", k_scale=scale[:, :4], v_scale=scale[:, :4], **{**narrow, **short}),
            refused(2),
            refused(0, k_scale=scale, v_scale=scale, **narrow),
        ],
    )
    return Door(fmha.attention_with_kvcache, qkv("q k_cache v_cache"), cases)


@door
def explain():
    """Words about a kernel, which few keywords change on the CPU; what it takes is what attention takes."""
    cases = {
        name: [
            case._replace(kind="hint", said="the CPU has one kernel")
            for case in listed(cases)
            if case.kind != "refused"
        ]
        for name, cases in dict(own_cases(), **code_cases(), **list_cases()).items()
    }
    # These keywords change what a plan promises.
    cases.update(batch_invariant=changes(True), row_invariant=changes(True), check_lengths=changes(True), backward=changes(True))
    return Door(fmha.explain, qkv(), cases)


def listed(cases):
    return cases if isinstance(cases, list) else [cases]


@door
def combine():
    base = dict(o_parts=torch.randn(3, 2, 7, 4, 16), lse_parts=torch.randn(3, 2, 4, 7))
    return Door(fmha.combine, base, dict(dtype_o=changes("bfloat16")))


@door
def add_parts():
    cases = dict(o=changes(torch.randn(2, 7, 4, 16)), dtype_o=changes("bfloat16"))
    return Door(fmha.add_parts, dict(o_parts=torch.randn(3, 2, 7, 4, 16)), cases)


def range_cases(rows, **beside):
    """Keywords of the candidates of ``rows`` queries over 12 keys; ``beside`` has every candidate in."""
    first, end = torch.full((1, rows), 3, dtype=torch.int32), torch.full((1, rows), 9, dtype=torch.int32)
    return dict(
        first=[changes(first, first - 1, end=end, **beside), refused(first)],
        end=[changes(end, end + 1, first=first, **beside), refused(end)],
        seqused_k=[changes(i32(8), **beside), refused(i32(8, 8))],
    )


def indexed():
    """An indexer's operands, and the cases that all of its functions have."""
    q, k, weights = torch.randn(1, 3, 2, 16), torch.randn(1, 12, 16), torch.rand(1, 3, 2)
    scale, table = torch.rand(1, 12), i32(2, 0, 1).view(1, 3)
    cases = dict(
        range_cases(3),
        k_scale=[changes(scale), refused(torch.rand(1, 13))],
        block_table=[
            changes(table, table.flip(1), k=k.view(3, 4, 16)),
            refused(table.long(), k=k.view(3, 4, 16)),
        ],
        causal=changes(False),
        block=[changes(4), refused(-1)],
        allow_fallback=hint(True, "the CPU has one kernel"),
        kernel=refused("sm80_index"),
        accuracy=[hint("exact", "the CPU's sums are f32"), refused("best")],
    )
    return dict(q=q, k=k, weights=weights), cases


@door
def index_scores():
    return Door(sparse.index_scores, *indexed())


@door
def index_lists():
    base, cases = indexed()
    every = range_cases(3, topk=12)
    # Each key has one element that is not 0, and q is 1, so a key's score is that element.
    q, k, weights = torch.ones(1, 3, 2, 16), torch.zeros(1, 12, 16), torch.ones(1, 3, 2)
    k[0, :, 0] = torch.tensor([0, 0, 0, 5, 7, 3, 2, 4, 6, 0, 0, 8.0])
    scale = torch.ones(1, 12)
    scale[0, 11] = 0
    out = torch.zeros(1, 3, 1, dtype=torch.int32)
    more = dict(
        every,
        k_scale=[changes(scale), refused(torch.rand(1, 13))],
        causal=changes(False),
        block=[changes(4), refused(-1)],
        first_blocks=[changes(1, block=3), refused(1), refused(5, "blocks.first 5", block=3)],
        last_blocks=[changes(1, block=3, k=k.flip(1)), refused(1), refused(5, "blocks.last 5", block=3)],
        out=[hint(out, "the same lists"), refused(out.long(), "indices")],
    )
    table = i32(0, 1, 2).view(1, 3)
    pages = [
        changes(table, table.flip(1), k=k.view(3, 4, 16)),
        refused(table.long(), k=k.view(3, 4, 16)),
    ]
    return Door(sparse.index_lists, dict(q=q, k=k, weights=weights, topk=1), dict(cases, **more, block_table=pages))


def given_scores(function, topk, **base):
    """Scores whose greatest is the last key's, which the first two queries do not see when they are causal."""
    scores = torch.rand(1, 3, 12)
    scores[..., 9:11], scores[..., 11] = -1, 2
    beside = dict(topk=topk) if topk else {}
    base.update(scores=scores, **({"topk": 1} if topk else {}))
    return Door(function, base, dict(range_cases(3, **beside), causal=changes(True)))


@door
def choose():
    own = given_scores(sparse.choose, 12)
    out = torch.zeros(1, 3, 1, dtype=torch.int32)
    return own._replace(cases=dict(own.cases, out=[hint(out, "the same lists"), refused(out.long(), "indices")]))


@door
def choose_blocks():
    own = given_scores(sparse.choose_blocks, 4, block=3)
    out = torch.zeros(1, 3, 1, dtype=torch.int32)
    more = dict(
        first_blocks=[changes(1), refused(5, "blocks.first 5")],
        last_blocks=[changes(1, scores=own.base["scores"].flip(2)), refused(5, "blocks.last 5")],
        out=[hint(out, "the same lists"), refused(out.long(), "indices")],
    )
    return own._replace(cases=dict(own.cases, **more))


@door
def block_maxima():
    return given_scores(sparse.block_maxima, 0, block=3)


@door
def block_sums():
    cases = dict(
        compressed=[changes(16), refused(0)], stride=[changes(8), refused(7)], selected=[changes(32), refused(40)]
    )
    return Door(sparse.block_sums, dict(probabilities=torch.rand(1, 2, 12), num_blocks=3), cases)


def latent_rows():
    """Queries over listed rows of a latent cache."""
    torch.manual_seed(4)
    return torch.randn(1, 2, 3, 24), torch.randn(3, 4, 1, 24), i32(0, 5, 9, 3, 1, 11).view(1, 2, 3)


@door
def flash_mla_sparse_fwd():
    q, cache, indices = latent_rows()
    cases = dict(
        d_v=[changes(16, 12), refused(0), refused(25)],
        attn_sink=[changes(torch.randn(3)), refused(torch.randn(4))],
        topk_length=[changes(i32(2, 1)), refused(i32(2, 1).long())],
        indexer_topk=refused(512),
    )
    base = dict(q=q[0], kv=cache.flatten(0, 1), indices=indices[0, :, None], sm_scale=0.2, d_v=16)
    return Door(flash_mla.flash_mla_sparse_fwd, base, cases)


@door
def flash_mla_with_kvcache():
    q, cache, indices = latent_rows()
    second = dict(extra_k_cache=torch.randn(2, 4, 1, 24), extra_indices_in_kvcache=i32(0, 5, 7, 3, 1, 2).view(1, 2, 3))
    extra, listed = second.values()
    none = dict(extra_k_cache=None, extra_indices_in_kvcache=None)
    cases = dict(
        tile_scheduler_metadata=hint(object(), "the library plans by itself"),
        num_splits=refused(2),
        softmax_scale=changes(0.3),
        causal=refused(True),
        is_fp8_kvcache=refused(True, "no rows of 656 or 584 bytes"),
        indices=[changes(indices.flip(2) + 1), refused(None), refused(indices.long())],
        attn_sink=[changes(torch.randn(3)), refused(torch.randn(4))],
        extra_k_cache=[changes(extra.flip(0)), refused(None), refused(extra[0])],
        extra_indices_in_kvcache=[changes(listed + 1), refused(None), refused(listed.long()), refused(listed[:, :1])],
        topk_length=[changes(i32(2)), refused(i32(2).long()), refused(i32(2, 2, 2))],
        extra_topk_length=[
            changes(i32(1)),
            refused(i32(1).long()),
            refused(i32(1, 1, 1)),
            refused(i32(1), "extra_k_cache", **none),
        ],
    )
    base = dict(q=q, k_cache=cache, block_table=None, cache_seqlens=None, head_dim_v=16, indices=indices, **second)
    return Door(flash_mla.flash_mla_with_kvcache, base, cases)


@door
def mask_object():
    """An object by the results of a call that uses it."""

    def function(q, k, v, mask, *, backward=None, mask_code=None, **options):
        built = fmha.MaskObject(q, k, v, mask, backward=backward, mask_code=mask_code, **options)
        return fmha.attention(q, k, v, mask=built, mask_code=mask_code, **options)

    q, k, v = tensors()
    ends = torch.stack([i32(*[0] * q.shape[1]), i32(*range(1, q.shape[1] + 1))])[None, None]
    cases = dict(
        backward=[hint(True, "gradients alone use it"), refused(torch.ones(2))],
        mask_code=[changes("k != 1"), refused("k +", "mask_code")],
    )
    return Door(function, dict(q=q, k=k, v=v, mask=fmha.Intervals(ends)), cases)


@door
def unpad_input():
    base = dict(hidden_states=torch.randn(2, 3, 4), attention_mask=torch.tensor([[1, 1, 0], [1, 0, 0]]))
    return Door(bert_padding.unpad_input, base, dict(unused_mask=changes(torch.tensor([[0, 0, 1], [0, 0, 0]]))))


@door
def sdpa_forward():
    base = dict(zip(("query", "key", "value"), (x.transpose(1, 2) for x in tensors(hk=4))))
    cases = dict(dropout_p=changes(0.4), is_causal=changes(True), scale=changes(0.1))
    cases["return_debug_mask"] = [changes(True, dropout_p=0.4), refused(True)]
    return Door(fmha.sdpa._sdpa_forward, base, cases)


#: What PyTorch says of dense tensors beside them.
WHOLE = dict(cum_seq_q=None, cum_seq_k=None, max_q=7, max_k=11, dropout_p=0.0, is_causal=False)


@door
def sdpa_backward():
    q, k, v = (x.transpose(1, 2) for x in tensors(hk=4))
    o, lse, *_, state, unused, _ = fmha.sdpa._sdpa_forward(q, k, v)
    results = dict(grad_out=o, out=o, logsumexp=lse, philox_seed=state, philox_offset=unused)
    base = dict(WHOLE, query=q, key=k, value=v, **results)
    return Door(fmha.sdpa._sdpa_backward, base, dict(scale=changes(0.1), is_causal=changes(True)))


FLASH = dict(scale=changes(0.1), window_size_left=changes(2), window_size_right=changes(1))


@door
def sdpa_rows_first_forward():
    q, k, v = tensors()
    k_pages, v_pages, table = pages()
    rows = varlen()
    paged = dict(query=rows["q"], key=k_pages, value=v_pages, cum_seq_q=rows["cu_seqlens_q"], cum_seq_k=cu(9, 11))
    paged.update(max_q=11, max_k=11)
    cases = dict(
        FLASH,
        seqused_k=changes(i32(4, 6)),
        alibi_slopes=changes(torch.rand(4)),
        block_table=changes(table, table.flip(0, 1), **paged),
        num_splits=[hint(1, CHOICE), hint(3, CHOICE)],
        cum_seq_q=refused(cu(7, 7)),
        cum_seq_k=refused(cu(11, 11)),
        dropout_p=changes(0.4),
        is_causal=changes(True),
        return_debug_mask=[changes(True, dropout_p=0.4), refused(True)],
    )
    return Door(fmha.sdpa._flash_forward, dict(WHOLE, query=q, key=k, value=v, return_debug_mask=False), cases)


@door
def sdpa_rows_first_backward():
    q, k, v = tensors()
    empty = torch.zeros(0, dtype=torch.int32)
    o, lse, state, unused, _ = fmha.sdpa._flash_forward(q, k, v, None, None, 7, 11, 0.0, False, False)
    results = dict(grad_out=o, out=o, logsumexp=lse, cum_seq_q=empty, cum_seq_k=empty, rng_state=state, unused=unused)
    base = dict(WHOLE, query=q, key=k, value=v, **results)
    cases = dict(FLASH, cum_seq_q=refused(cu(7, 7)), cum_seq_k=refused(cu(11, 11)), is_causal=changes(True))
    return Door(fmha.sdpa._flash_backward, base, cases)


@appends_in_f32
def test_no_keyword_of_jax_is_swallowed():
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    import fmha.jax

    def into(x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.dtype is torch.float8_e4m3fn:
            return jnp.asarray(x.float().numpy()).astype(jnp.float8_e4m3fn)
        return jnp.asarray(x.numpy())

    def case_into(case):
        return case._replace(
            value=into(case.value), plain=into(case.plain), beside={name: into(x) for name, x in case.beside.items()}
        )

    all_cases = dict(own_cases(), **code_cases())
    cases = {name: [case_into(case) for case in listed(cases)] for name, cases in all_cases.items()}
    cases["p_drop"] = [changes(0.4, seed=into(1)), refused(0.4, "seed")]
    cases["offset"] = [changes(3, 4, p_drop=0.4, seed=1), hint(3, "nothing is drawn without p_drop")]
    cases["small"] = [changes(("row_max",), ("head_max",)), refused(("sum",)), refused("row_max")]
    cases["axis_name"] = refused("rows", "axis_name: 'rows' is no axis of a jax.shard_map")
    assert not faults(Door(fmha.jax.attention, {name: into(x) for name, x in qkv().items()}, cases))


@appends_in_f32
def test_no_keyword_of_numpys_door_is_swallowed():
    """NumPy has no 8 bits."""
    into = lambda x: x.numpy() if isinstance(x, torch.Tensor) else x
    eight = ("descale_q", "descale_k", "descale_v")
    cases = {
        name: [
            case._replace(
                value=into(case.value), plain=into(case.plain), beside={at: into(x) for at, x in case.beside.items()}
            )
            for case in listed(cases)
            if name not in eight or case.kind == "refused"
        ]
        for name, cases in dict(own_cases(), **code_cases(), **small_cases()).items()
    }
    cases["dtype_o"] = changes("float16")
    # Lists are accepted only as torch's tensors.
    cases["indices"] = refused(numpy.zeros((2, 7, 4, 5), numpy.int32))
    cases.update(topk_length=refused(numpy.zeros(2, numpy.int32)), index_block=refused(2))
    cases["block_scales"] = refused(scale_cases()["block_scales"][0].value)
    assert not faults(Door(fmha.attention, {name: into(x) for name, x in qkv().items()}, cases))


def test_no_keyword_of_transformers_hook_is_swallowed():
    pytest.importorskip("transformers", reason="transformers is not installed")
    import fmha.transformers

    q, k, v = (x.transpose(1, 2) for x in tensors(b=1))
    module = types.SimpleNamespace(is_causal=True)
    base = dict(module=module, query=q, key=k, value=v, attention_mask=None)
    both = dict(cu_seq_lens_q=cu(3, 4), cu_seq_lens_k=cu(5, 6))
    cases = dict(
        attention_mask=changes(torch.rand(1, 1, 7, 11) < 0.5),
        dropout=changes(0.4),
        scaling=changes(0.1),
        sliding_window=changes(3),
        softcap=changes(0.7),
        is_causal=changes(False),
        s_aux=changes(torch.randn(4)),
        position_bias=[changes(torch.randn(1, 4, 7, 11)), refused(torch.randn(1, 4, 7, 11), **both)],
        deterministic=hint(True, BITS),
        cu_seq_lens_q=[
            changes(cu(3, 4), cu(4, 3), **without(both, "cu_seq_lens_q")),
            refused(cu(3, 4), "cu_seq_lens_k"),
        ],
        cu_seq_lens_k=[
            changes(cu(5, 6), cu(6, 5), **without(both, "cu_seq_lens_k")),
            refused(cu(5, 6), "cu_seq_lens_q"),
        ],
        max_length_q=[refused(4), refused(2, "maximal length 2", **both)],
        max_length_k=[refused(6), refused(4, "maximal length 4", **both)],
        output_attentions=refused(True),
    )
    assert not faults(Door(fmha.transformers.attention_forward, base, cases))
    for name, why in fmha.transformers.HARMLESS.items():
        assert why
        got = run(fmha.transformers.attention_forward, {**base, name: 1})
        assert got == run(fmha.transformers.attention_forward, base), name


def test_no_keyword_of_transformers_mask_function_is_swallowed():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import masking_utils

    import fmha.transformers

    def function(**call):
        return fmha.transformers.attention_mask(**call) + 0

    function.__signature__ = inspect.signature(fmha.transformers.attention_mask)
    both_ways = masking_utils.bidirectional_mask_function
    cases = dict(
        q_offset=changes(2),
        kv_offset=changes(3),
        mask_function=changes(both_ways),
        attention_mask=changes(torch.tensor([[True, False, True, True, True, True]])),
        dtype=changes(torch.bfloat16),
        device=hint("cpu", "the mask is there already"),
    )
    base = dict(batch_size=1, q_length=4, kv_length=6)
    assert not faults(Door(function, base, cases))
    plain = run(function, base)
    for name in fmha.transformers._MASK_OPTIONS:
        # These keywords tell transformers how its own functions may write the mask, or leave it out.
        assert run(function, {**base, name: False}) == plain


def test_no_keyword_of_vllms_backend_is_swallowed(vllm):  # noqa: F811
    size, heads, dim = 4, 4, 16
    pool = torch.randn(24, 2, size, 2 * dim, dtype=torch.bfloat16)
    builder = vllm.get_builder_cls()(types.SimpleNamespace(block_size=size), [], None, DEVICE)
    metadata = builder.build(0, vllm_batch((1, 4, 1), (6, 7, 9), size, 24))
    q = torch.randn(6, heads, dim, dtype=torch.bfloat16)
    one = torch.full((1,), 1.5)

    def made(pool=pool, **options):
        impl = vllm.get_impl_cls()(**options)
        impl.process_weights_after_loading(torch.bfloat16)
        scales = types.SimpleNamespace(_k_scale=one, _v_scale=one)
        return impl.forward(scales, q, None, None, pool, metadata, torch.zeros_like(q))

    signature = inspect.signature(vllm.get_impl_cls().__init__)
    made.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    eighths = torch.randint(0, 100, (24, 2, size, 2 * dim), dtype=torch.uint8)
    cases = dict(
        num_kv_heads=[refused(4), refused(1)],
        alibi_slopes=changes([0.1, 0.2, 0.3, 0.4]),
        sliding_window=[changes(3), refused(0), refused(-1)],
        kv_cache_dtype=[
            changes("fp8", "fp8_e5m2", pool=eighths),
            refused("int8"),
            refused("fp8_inc"),
            hint("bfloat16", "the cache is of that type"),
        ],
        logits_soft_cap=changes(0.7),
        attn_type=refused("encoder_only"),
        kv_sharing_target_layer_name=hint("layers.0", "vLLM reads it, and hands over that layer's cache"),
        sinks=changes(torch.randn(4, dtype=torch.bfloat16)),
    )
    assert not faults(Door(made, dict(num_heads=heads, head_size=dim, scale=0.3, num_kv_heads=2), cases))

    impl = vllm.get_impl_cls()(heads, dim, 0.3, num_kv_heads=2)
    base = dict(
        layer=None, query=q, key=None, value=None, kv_cache=pool, attn_metadata=metadata, output=torch.zeros_like(q)
    )
    cases = dict(output_scale=refused(one), output_block_scale=refused(one))
    assert not faults(Door(impl.forward, base, cases))


@pytest.mark.parametrize("name", ["forward_decode", "forward_extend"])
def test_no_keyword_of_sglangs_backend_is_swallowed(sglang, name):  # noqa: F811
    pool = Pool(16, 2, 16)
    pool.buffers.normal_()
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    runner = types.SimpleNamespace(
        req_to_token_pool=types.SimpleNamespace(req_to_token=table), token_to_kv_pool=pool, page_size=1
    )
    backend = sglang(runner)
    batch = types.SimpleNamespace(
        forward_mode=Mode.DECODE,
        req_pool_indices=torch.tensor([0, 1]),
        seq_lens=torch.tensor([5, 7]),
        seq_lens_cpu=torch.tensor([5, 7]),
        out_cache_loc=torch.tensor([4, 14]),
    )
    backend.init_forward_metadata(batch)
    kept = pool.buffers.clone()
    rows = [torch.randn(2, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]

    def function(**call):
        pool.buffers.copy_(kept)
        return getattr(backend, name)(**call)

    function.__signature__ = inspect.signature(getattr(backend, name))
    base = dict(zip("qkv", rows), layer=layer(), forward_batch=batch)
    assert not faults(Door(function, base, dict(save_kv_cache=changes(False))))
    sinks = dict(base, sinks=torch.randn(4))
    assert run(function, sinks) != run(function, base)
    pool.buffers = pool.buffers.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype: the pool is of torch.float8_e4m3fn"):
        getattr(backend, name)(**dict(base, save_kv_cache=False))


def test_no_keyword_over_ranks_is_swallowed():
    """A group of one rank; what ranks do with each other is in ``test_dist.py``."""
    import fmha.dist

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.new_group([0])
        rows = without(varlen(), "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        one = "one rank has all rows"
        own = without(
            own_cases(),
            "cu_seqlens_q",
            "cu_seqlens_k",
            "max_seqlen_q",
            "max_seqlen_k",
            "seqused_q",
            "seqused_k",
            "block_table",
            "descale_q",
            "descale_k",
            "descale_v",
            "dtype_o",
            "check_lengths",
        )
        over_ranks = dict(
            group=hint(group, one),
            seqlen_q=refused(5, "not the 5 rows"),
            seqlen_k=refused(9, "not the 9 rows"),
            partition=[hint("contiguous", one), refused("teleport")],
            partition_k=[hint("contiguous", one), refused("teleport", "partition")],
            scheme=[hint("ring", one), refused("teleport")],
        )
        cases = dict(
            own,
            **over_ranks,
            causal=[changes(True), refused(True, mask="b:2,1")],
            cu_seqlens_q=changes([0, 3, 14], [0, 11, 14], **rows, cu_seqlens_k=[0, 9, 22]),
            cu_seqlens_k=changes([0, 9, 22], [0, 13, 22], **rows, cu_seqlens_q=[0, 3, 14]),
            p_drop=[changes(0.4, seed=1), refused(0.4, "seed")],
            offset=[changes(3, 4, p_drop=0.4, seed=1), hint(3, "nothing is drawn without p_drop")],
            **code_cases(),
        )
        ends = torch.tensor([2, 9], dtype=torch.int32).view(1, 1, 2, 1).expand(-1, -1, -1, 7)
        few = torch.zeros(1, 1, 2, 6, dtype=torch.int32)
        cases["mask"] = [*cases["mask"], changes(fmha.Intervals(ends)), refused(fmha.Intervals(few))]
        assert not faults(Door(fmha.dist.attention, qkv(), cases))
        window = flex.create_block_mask(lambda b, h, q, k: k - q < 3, None, None, 6, 10, device="cpu")
        given = (torch.randn(2, heads, rows, 8) for heads, rows in ((4, 6), (2, 10), (2, 10)))
        base = dict(zip(("query", "key", "value"), given), enable_gqa=True)
        cases = dict(
            score_mod=changes(lambda s, b, h, q, k: s * 0.5 + k),
            block_mask=[changes(window), refused(torch.ones(6, 10))],
            scale=[changes(0.1), refused("wide")],
            enable_gqa=refused(False),
            return_lse=changes(True),
            kernel_options=refused({"BLOCK_M": 64}),
            return_aux=[changes(flex.AuxRequest(lse=True)), refused(flex.AuxRequest(max_scores=True), "max_scores")],
            **over_ranks,
        )
        assert not faults(Door(fmha.dist.flex_attention, base, cases))
        with pytest.raises(TypeError, match="teleport"):
            fmha.dist.explain(*tensors(), teleport=1)
        fmha.dist.leave()
    finally:
        torch.distributed.destroy_process_group()


def test_the_slow_kernel_is_allowed_by_other_libraries_names_alone(monkeypatch):
    """The option as each function hands it on: ours refuse unless a call allows it, theirs have no such option."""
    asked = []
    flag = _arguments.flag

    def seen(name, value):
        if name == "allow_fallback":
            asked.append(value)
        return flag(name, value)

    monkeypatch.setattr(_arguments, "flag", seen)
    q, k, v = (torch.randn(1, 5, 2, 32) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    moving = [x.clone().requires_grad_() for x in (q, k, v)]
    rows = torch.tensor([5], dtype=torch.int32)
    listed = torch.zeros(5, 1, 3, dtype=torch.int32)
    latent = torch.randn(5, 1, 32)
    ours = [
        lambda: fmha.attention(q, k, v),
        lambda: fmha.attention_out(torch.empty_like(q), q, k, v),
        lambda: fmha.attention_with_kvcache(q, k, v, seqused_k=rows),
        lambda: fmha.explain(q, k, v),
    ]
    theirs = [
        lambda: fa2.flash_attn_func(q, k, v),
        lambda: fa2.flash_attn_func(*moving)[0].sum().backward(),
        lambda: fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=rows),
        lambda: fa3.flash_attn_func(q, k, v),
        lambda: fa4.flash_attn_func(q, k, v),
        lambda: flash_mla.flash_mla_sparse_fwd(q[0], latent, listed, 0.1, 32),
        lambda: flex.flex_attention(*heads_first),
        lambda: fmha.sdpa._sdpa_forward(*heads_first),
        lambda: _serving.Numbers(1.0, 0.0, None, False),
        lambda: _marks.kept(q, (1, 2, 5, 5), 0.5, 1, 0),
    ]
    for functions, allows in ((ours, False), (theirs, True)):
        for at, function in enumerate(functions):
            asked.clear()
            function()
            assert asked and set(asked) == {allows}, (allows, at, asked)
    asked.clear()
    fmha.attention(q, k, v, allow_fallback=True)
    assert asked == [True]
