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
from fmha import flash_attn as fa2, flash_attn_3 as fa3, flash_attn_4 as fa4
from reference import DEVICE, appends_in_f32, offsets, tensors
from test_engines import Mode, Pool, layer, sglang, vllm, vllm_batch  # noqa: F401

ABSENT = object()


class Case(NamedTuple):
    """A keyword's value; the call with it stands beside one with ``plain`` in its place, or without it."""

    kind: str
    value: Any
    said: str = ""
    plain: Any = ABSENT
    beside: Dict[str, Any] = {}


def changes(value, plain=ABSENT, **beside):
    return Case("changes", value, "", plain, beside)


def refused(value, said="", **beside):
    """``said`` stands for the keyword where a message has another door's word for it."""
    return Case("refused", value, said, ABSENT, beside)


def hint(value, why, **beside):
    assert why
    return Case("hint", value, why, ABSENT, beside)


class Door(NamedTuple):
    function: Any
    base: Dict[str, Any]
    #: A case or a list of cases of each keyword with a default.
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
            # Whatever it hands on, a keyword that nobody knows is named.
            try:
                run(door.function, {**door.base, "teleport": 1})
                found.append("teleport is swallowed")
            except Exception as error:
                if "teleport" not in str(error):
                    found.append(f"teleport: {error!r} does not name it")
            continue
        if parameter.kind is parameter.VAR_POSITIONAL or parameter.default is parameter.empty:
            continue
        if name not in door.cases:
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
    return dict(
        TAIL, dropout_p=changes(0.5), alibi_slopes=changes(torch.rand(4)), return_attn_probs=changes(True)
    )


def tail3(descales=True):
    to8 = dict(zip("qkv", (x.to(torch.float8_e4m3fn) for x in tensors(hk=4)))) if descales else {}
    scales = lambda name: [changes(torch.full((2, 4), 1.5), **to8)] if descales else []
    return dict(
        TAIL,
        **{name: scales(name) + [refused(torch.full((2, 2), 1.5), "descale")] for name in
           ("q_descale", "k_descale", "v_descale")},
        qv=refused(torch.zeros(2, 7, 4, 16)),
        attention_chunk=refused(4),
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
        k=[changes(k, plain=-k, **without(new, "k")), refused(k, "v", cache_seqlens=used)],
        v=[changes(v, plain=-v, **without(new, "v")), refused(v, "k", cache_seqlens=used)],
        rotary_cos=[changes(cos, plain=-cos, rotary_sin=sin, **new), refused(cos, cache_seqlens=used),
                    refused(cos, "rotary_sin", **new)],
        rotary_sin=[changes(sin, plain=-sin, rotary_cos=cos, **new), refused(sin, cache_seqlens=used),
                    refused(sin, "rotary_cos", **new)],
        rotary_interleaved=[changes(False, plain=True, rotary_cos=cos, rotary_sin=sin, **new),
                            hint(False, "it says how rotary_cos and rotary_sin turn, which are not there")],
        cache_seqlens=[changes(used), changes(5), refused(12), refused(i32(12, 1))],
        cache_batch_idx=[changes(i32(1, 0)), refused(i32(1, 0), **{table: order}, **paged)],
        cache_leftpad=[changes(i32(2, 5)), refused(i32(2, 5), **without(new, "cache_seqlens")),
                       refused(i32(2, 5), cache_batch_idx=i32(1, 0))],
        **{table: changes(order, plain=order.flip(0, 1), **paged)},
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
    cases = dict(tail2(), block_table=changes(table, plain=table.flip(0, 1), **paged))
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
        num_heads_q=[changes(4, plain=8, qkv=torch.randn(2, 7, 12, 16)), refused(3), refused(11, qkv=torch.randn(2, 7, 12, 16))],
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
        cu_seqlens_q=[changes(cu(2, 7), plain=cu(7, 2), **rows), refused(cu(2, 7), "max_seqlen_q", q=rows["q"])],
        cu_seqlens_k_new=[changes(cu(2, 3), plain=cu(4, 1), **new), refused(cu(2, 3))],
        max_seqlen_q=[refused(3, "maximal length 3", cu_seqlens_q=cu(2, 7), q=rows["q"]), hint(3, BOUND)],
        rotary_seqlens=refused(i32(1, 2)),
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
    name: refused(torch.zeros(2))
    for name in "qv gather_kv_indices score_mod score_mod_bwd mask_mod aux_tensors aux_scalars".split()
}


@door
def flash_attn_4():
    cases = dict(
        TAIL,
        **REFUSED_BY_4,
        block_sparse_tensors=refused((torch.zeros(2),)),
        block_sparse_tensors_bwd=refused((torch.zeros(2),)),
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
    packed_k = dict(rows, q=torch.randn(2, 7, 4, 16), cu_seqlens_q=None, max_seqlen_q=None)
    packed_q = dict(rows, k=torch.randn(2, 11, 2, 16), v=torch.randn(2, 11, 2, 16), cu_seqlens_k=None, max_seqlen_k=None)
    cases = dict(
        TAIL,
        **REFUSED_BY_4,
        learnable_sink=changes(torch.randn(4)),
        num_splits=[hint(1, CHOICE), hint(3, CHOICE)],
        pack_gqa=hint(True, SPEED),
        return_lse=changes(True),
        cu_seqlens_q=[changes(cu(3, 11), plain=cu(11, 3), **without(rows, "cu_seqlens_q")),
                      refused(cu(3, 11), "max_seqlen_q", **dict(rows, max_seqlen_q=None))],
        cu_seqlens_k=[changes(cu(9, 13), plain=cu(13, 9), **without(rows, "cu_seqlens_k")),
                      refused(cu(9, 13), "max_seqlen_k", **dict(rows, max_seqlen_k=None))],
        max_seqlen_q=[refused(10, "maximal length 10", **without(rows, "max_seqlen_q")), hint(3, BOUND)],
        max_seqlen_k=[refused(12, "maximal length 12", **without(rows, "max_seqlen_k")), hint(3, BOUND)],
        min_seqlen_k=hint(1, SPEED),
        seqused_q=changes(i32(2, 5)),
        seqused_k=changes(i32(4, 6)),
        page_table=changes(table, plain=table.flip(0, 1), **paged),
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
        seqused=refused(i32(1, 2)),
        virtual_batch_idx=refused(i32(1, 0)),
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


def test_every_function_of_flash_attention_has_a_case():
    named = {
        function
        for module in (fa2, fa3, fa4)
        for name, function in vars(module).items()
        if name.startswith("flash_attn_") and inspect.isfunction(function) and function.__module__ == module.__name__
    }
    assert named <= {make().function for make in DOORS.values()}
