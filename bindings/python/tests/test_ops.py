"""The operators under torch's own tools: opcheck, compile, export, threads, fork."""

import contextlib
import functools
import json
import math
import os
import shutil
import sysconfig
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fmha
from fmha import _arguments, _native, _torch
from reference import DEVICE, appends_in_f32, attention as by_definition, tensors
from run import others_run_during, run_python

#: Operators take all numbers by position, so slow GPU kernels for f32 are allowed here.
NUMBERS = _arguments.bind(mask="causal", allow_fallback=DEVICE != "cpu")[1]
NONE7 = (None,) * 7

#: Compiler backend that traces a call and its autograd, as Inductor does. Inductor itself compiles only one test,
#: since its headers take a busy machine a minute.
TRACER = "aot_eager"


def test_opcheck_forward_and_backward():
    q, k, v = tensors()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(_torch.forward, (q, k, v, *NONE7, None, None, None, None, *NUMBERS), test_utils=tests)
    o, lse = fmha.attention(q, k, v, mask="causal", return_lse=True)
    torch.library.opcheck(_torch.backward, (o, q, k, v, o, lse, None, *NONE7, *NUMBERS), test_utils=tests)


def test_opcheck_of_plain_calls_and_their_numbers():
    q, k, v = tensors()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    at = _torch._kept(NUMBERS)
    assert at == _torch._kept(NUMBERS) != _torch._kept(_arguments.bind()[1])
    torch.library.opcheck(_torch.plain, (q, k, v, at), test_utils=tests)
    o, lse = _torch.plain(q, k, v, at)
    wanted = _torch.forward(q, k, v, *NONE7, None, None, None, None, *NUMBERS)
    assert torch.equal(o, wanted[0]) and torch.equal(lse, wanted[1])
    torch.library.opcheck(_torch.plain_o, (q, k, v, at), test_utils=tests)
    assert torch.equal(_torch.plain_o(q, k, v, at), o)
    torch.library.opcheck(_torch.plain_backward, (o, q, k, v, o, lse, None, at), test_utils=tests)
    for other in (-1, 1 << 40, 4095):
        with pytest.raises(RuntimeError, match=f"numbers {other} is none"):
            _torch.plain(q, k, v, other)


def test_opcheck_of_code_and_its_gradients():
    q, k, v = tensors()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    slopes, ids, by = torch.randn(4), torch.arange(11), [0.5]
    mask = "ids: i64[_]; ids[k] % 3 != 1"
    code = ("slopes: f32[_]; by: float; s + by * slopes[h]", mask, "slopes,ids,by", [slopes, ids], by, 0, 0)
    given = (q, k, v, *NONE7, None, None, None, None, *(None,) * 9, *NUMBERS, *code)
    torch.library.opcheck(_torch.forward_code, given, test_utils=tests)
    o, lse = _torch.forward_code(*given)
    back = (o, q, k, v, o, lse, None, *NONE7, *(None,) * 6, *NUMBERS, *code)
    torch.library.opcheck(_torch.backward_code, (*back, 1), test_utils=tests)
    *_, captured = _torch.backward_code(*back, 1)
    assert [x.shape for x in captured] == [slopes.shape] and captured[0].any()
    assert _torch.backward_code(*back, 0)[-1] == []
    refused = (
        ((*back, 2), "dtype_grad 104 is not in 0..=6"),
        ((*back[:-5], "slopes,by", [slopes, ids], by, 0, 0, 1), "captured_names has 2 names, but 3 are captured"),
        ((*back[:-4], [slopes.double(), ids], by, 0, 0, 1), "captured slopes is of float64, but the function reads f32"),
        ((*back[:-4], [slopes, ids.to("meta")], by, 0, 0, 1), "captured ids is on"),
    )
    for arguments, words in refused:
        with pytest.raises(RuntimeError, match=words):
            _torch.backward_code(*arguments)
    # A compiler must get the error while it traces.
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="captured slopes is of float16"):
        like = lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x
        captured = [torch.empty(4, dtype=torch.float16), torch.empty_like(ids)]
        _torch.forward_code(*map(like, given[:-4]), captured, by, 0, 0)


def test_opcheck_of_masks_as_data_and_small_outputs():
    q, k, v = tensors()
    tests = ("test_schema", "test_faketensor")
    ends = torch.tensor([[[[0] * 7, list(range(3, 10))]]], dtype=torch.int32)
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 3, dtype=torch.int32)
    masks = (ends, None, counts, indices, None, None)
    small = (torch.empty(2, 4, 7), torch.empty(4), torch.empty(2, 4, 11))
    code = ("", "", "", [], [], 4, 8)
    given = (q, k, v, *NONE7, None, None, None, None, *masks, *small, *NUMBERS, *code)
    torch.library.opcheck(_torch.forward_code, given, test_utils=tests)
    o, lse = _torch.forward_code(*given)
    back = (o, q, k, v, o, lse, None, *NONE7, *masks, *NUMBERS, *code, 0)
    torch.library.opcheck(_torch.backward_code, back, test_utils=tests)
    out = (q, k, v, *NONE7, None, None, None, None, None, torch.empty_like(q), None, None, *small, *NUMBERS)
    torch.library.opcheck(_torch.forward_out_small, out, test_utils=tests)
    # A compiler learns what is wrong while it traces.
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="kv_num_blocks has 2 rows"):
        like = lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x
        _torch.forward_code(*map(like, given[:-2]), 8, 8)


def test_what_no_kernel_computes_is_refused_and_not_answered():
    q, k, v = tensors()
    with pytest.raises(RuntimeError, match="^k is on meta, but q is on"):
        fmha.attention(q, k.to("meta"), v)
    with pytest.raises(RuntimeError, match="^v is on meta, but q is on"):
        fmha.attention(q, k, v.to("meta"), sink=torch.zeros(4))
    assert fmha.attention(*(x.to("meta") for x in (q, k, v))).is_meta
    with pytest.raises(RuntimeError, match="^v is missing"):
        fmha.attention(q, k, None)
    # Forward mode must be refused: an operator would drop the tangent, and the derivative would be 0.
    for named, given in (("q", (q, k, v)), ("k", (q, k, v))):
        with pytest.raises(NotImplementedError, match=f"^{named} has a tangent"):
            at = "qkv".index(named)
            torch.func.jvp(lambda x: fmha.attention(*given[:at], x, *given[at + 1 :]), (given[at],), (given[at],))


def _calls():
    """A sound call of each operator: its tensors by their names, and its numbers."""
    q, k, v = tensors()
    o, lse = torch.empty_like(q), torch.empty(2, 4, 7)
    parts = torch.stack([o, o]), torch.stack([lse, lse])
    qkv, backward = dict(q=q, k=k, v=v), dict(dout=o, q=q, k=k, v=v, o=o, lse=lse, dlse=lse)
    more = dict(bias=torch.zeros(1, 4, 7, 11), sink=torch.zeros(4), seqused_q=_lengths(3, 7))
    pages = dict(k=torch.zeros(6, 4, 2, 16), v=torch.zeros(6, 4, 2, 16), block_table=_lengths(1, 2, 3, 4).view(2, 2))
    new = torch.zeros(2, 1, 2, 16)
    cache = dict(k_new=new, v_new=new, rotary_cos=torch.zeros(20, 4), rotary_sin=torch.zeros(20, 4))
    causal, tree = dict(mask=2, right=0), _lengths(*range(14)).view(2, 7, 1)
    packed = dict(q=q[0], k=k[0], v=v[0], cu_seqlens_q=_lengths(0, 3, 7), cu_seqlens_k=_lengths(0, 5, 11))
    return [
        ("forward", {**qkv, **more}, {}),
        ("forward", {**qkv, "alibi_slopes": torch.zeros(4)}, {}),
        ("forward", packed, dict(max_seqlen_q=4, max_seqlen_k=6)),
        ("forward_out", {**qkv, "o": o, "lse": lse, "keep_mask": torch.zeros(2, 4, 7, 11, dtype=torch.uint8)}, {}),
        ("backward", {**backward, **more}, dict(options=_native.OPTIONS["wants_dbias"])),
        ("kvcache", {**qkv, **cache, "seqused_k": _lengths(3, 4)}, {}),
        ("kvcache", {**qkv, **pages, "seqused_k": _lengths(3, 4), "tree_mask": tree}, causal),
        ("kvcache", {"q": q, "k": k}, dict(head_dim_v=8)),
        ("combine", dict(zip(("o_parts", "lse_parts"), parts)), {}),
        ("plain", qkv, {}),
        ("plain_o", qkv, {}),
        ("plain_backward", backward, {}),
        ("add_parts", dict(o_parts=parts[0]), {}),
        ("add_parts_to", dict(o_parts=parts[0], o=o), {}),
    ]


def _lengths(*lengths):
    return torch.tensor(lengths, dtype=torch.int32)


def _wrong_tensors(x):
    """In another type, of another shape, with a last axis that is not dense."""
    yield from (x.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64))
    yield from (x[None], x[0], torch.empty(0))
    for axis, size in enumerate(x.shape):
        yield x.new_zeros([*x.shape[:axis], size + 1, *x.shape[axis + 1 :]])
    yield x.repeat_interleave(2, -1)[..., ::2]
    yield x.transpose(-1, 0).contiguous().transpose(-1, 0)


_WRONG_NUMBERS = dict(
    softmax_scale=(math.inf,),
    softcap=(-1.0, 1e-60),
    mask=(7,),
    left=(-5,),
    sink_columns=(-1, 1 << 40),
    p_drop=(1.5, -0.5),
    max_seqlen_q=(-1, 1 << 40),
    max_seqlen_k=(-1, 1 << 40),
    head_dim_v=(-1, 400),
    max_seqlen_new=(-1,),
    dtype_o=(2, _native.DTYPES["int32"]),
)


def _said(name, given, numbers, as_fake=None):
    """What an operator refuses a call with; ``None`` where it takes it."""
    operator = getattr(torch.ops.fmha, name).default
    numbers = {"softmax_scale": math.nan, "left": -1, "right": -1, "dtype_o": -1, **numbers}
    names = [argument.name for argument in operator._schema.arguments]
    tensors = [given.get(name) for name in names if name in _native.SLOTS]
    rest = [numbers.get(name, 0.0 if name in _native.FLOATS else 0) for name in _native.NUMBERS]
    rest = [_torch._kept(tuple(rest[:-3]))] if names[-1] == "numbers" else rest[: sum(name in _native.NUMBERS for name in names)]
    try:
        if as_fake is None:
            operator(*tensors, *rest)
        else:
            with FakeTensorMode() if as_fake is _as_fake else contextlib.nullcontext() as mode:
                operator(*(x if x is None else as_fake(mode, x) for x in tensors), *rest)
    except (RuntimeError, ValueError) as error:
        # torch appends a second possible cause to the message for a missing tensor, which is cut off.
        return str(error).replace("is on meta", "is on cpu").split(", or a tensor that torch does not")[0]
    return None


def _as_fake(mode, x):
    return mode.from_tensor(x)


def _as_meta(_mode, x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@pytest.mark.skipif(DEVICE != "cpu", reason="what one device's kernels refuse besides is no fake's to say")
@pytest.mark.parametrize("as_fake", [_as_fake, _as_meta])
def test_what_a_kernel_refuses_of_every_device_its_fake_refuses_in_the_same_words(as_fake):
    refused = 0
    for name, given, numbers in _calls():
        assert _said(name, given, numbers) is None and _said(name, given, numbers, as_fake) is None, name
        changed = [({**given, at: wrong}, numbers) for at, x in given.items() for wrong in _wrong_tensors(x)]
        for out in given if len(given) > 1 else ():
            changed.append(({at: x for at, x in given.items() if at != out}, numbers))
        changed += [(given, {**numbers, at: wrong}) for at, wrongs in _WRONG_NUMBERS.items() for wrong in wrongs]
        for call in changed:
            kernels = _said(name, *call)
            if "k_new" in call[0] and "v_new" not in call[0]:
                # V is given as the front of K's rows, by its strides.
                kernels = None
            assert _said(name, *call, as_fake) == kernels, (name, {at: x.shape for at, x in call[0].items()}, call[1])
            refused += kernels is not None
    assert refused > 600


def test_a_tensor_that_is_elsewhere_is_refused_by_every_fake():
    for name, given, numbers in _calls():
        first = "o_parts" if "o_parts" in given else "q"
        for at, x in given.items():
            if at != first:
                said = _said(name, {**given, at: x.to("meta")}, numbers, lambda _mode, x: x)
                assert said == f"{at} is on cpu, but {first} is on {given[first].device}", (name, at, said)


def test_a_fake_knows_values_that_are_the_front_of_keys():
    q, k, new = (torch.empty(2, n, 1, 16, device="meta") for n in (1, 8, 1))
    used = _lengths(3, 4).to("meta")
    o = fmha.attention_with_kvcache(q, k, k[..., :8], new, seqused_k=used)
    assert o.shape == (2, 1, 1, 8)
    with pytest.raises(RuntimeError, match="^v is missing beside k"):
        fmha.attention_with_kvcache(q, k, torch.empty(2, 8, 1, 8, device="meta"), new, seqused_k=used)


def test_an_lse_that_nobody_asks_for_is_not_made(monkeypatch):
    q, k, v = tensors()
    grad = q.clone().requires_grad_()
    called = []
    for name in ("plain", "plain_o"):
        monkeypatch.setattr(_torch, name, lambda *x, name=name, op=getattr(_torch, name): called.append(name) or op(*x))
    for first, options in ((q, {}), (q, dict(return_lse=True)), (grad, {})):
        fmha.attention(first, k, v, **options)
    with torch.no_grad():
        fmha.attention(grad, k, v)
    fmha.attention(q, k, v, sink=torch.zeros(4))
    assert called == ["plain_o", "plain", "plain", "plain_o"]
    for first, rest, leaves_out in ((q, {}, True), (grad, {}, False), (q, dict(p_drop=0.1), False)):
        assert _torch.leaves_out_lse((first, k, v), *_arguments.bind(**rest)) == leaves_out


def test_where_no_more_numbers_are_kept_calls_go_on():
    run_python("""
import torch, fmha
from fmha import _torch
q, k, v = (torch.randn(1, 3, 1, 8, requires_grad=True) for _ in range(3))
for i in range(5000):
    o = fmha.attention(q, k, v, softmax_scale=i / 1000)
    if i in (1, 4999):
        wanted = torch.softmax(q[0, :, 0] @ k[0, :, 0].T * i / 1000, -1) @ v[0, :, 0]
        assert torch.allclose(o[0, :, 0], wanted, atol=1e-5)
        o.sum().backward()
assert len(_torch._KEPT) == len(_torch._SPELT) == 4096
""")


def test_opcheck_with_outputs_and_cache():
    q, k, v = tensors()
    o, lse = torch.empty_like(q), torch.empty(2, 4, 7)
    schema = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        _torch.forward_out, (q, k, v, *NONE7, None, None, None, None, None, o, lse, None, *NUMBERS), test_utils=schema
    )
    used = torch.tensor([3, 4], dtype=torch.int32)
    # The tensors have 16 bits, since a GPU's kernels append rows only then.
    q, k, v = tensors(dtype=torch.bfloat16)
    new = torch.randn(2, 1, 2, 16).bfloat16()
    rest = (None, None, None, None)
    torch.library.opcheck(
        _torch.kvcache_op,
        (
            q[:, :1].contiguous(),
            k.clone(),
            v.clone(),
            new,
            new.clone(),
            *rest,
            None,
            None,
            None,
            None,
            None,
            None,
            used,
            *rest,
            *NUMBERS,
            0,
            0,
            0,
        ),
        test_utils=schema,
    )
    torch.library.opcheck(_torch.add_parts_op, (torch.stack([o, o]), *NUMBERS), test_utils=schema)
    torch.library.opcheck(_torch.add_parts_to, (torch.stack([o, o]), o.clone(), *NUMBERS), test_utils=schema)
    torch.library.opcheck(
        _torch.combine_op, (torch.stack([o, o]), torch.stack([lse, lse]) * 0, *NUMBERS), test_utils=schema
    )


CAN_COMPILE = shutil.which(os.environ.get("CXX", "g++")) and Path(sysconfig.get_path("include"), "Python.h").exists()


@pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler or no headers of Python: inductor builds nothing")
def test_a_compiled_function_has_the_same_bits_and_gradients():
    def model(q, k, v):
        o, lse = fmha.attention(q * 2, k, v, mask="causal", return_lse=True)
        return o.sum() + lse.sum()

    compiled = torch.compile(model, fullgraph=True)
    results = []
    for function in (model, compiled):
        inputs = tensors(grad=True)
        torch.manual_seed(0)
        inputs = tensors(grad=True)
        loss = function(*inputs)
        loss.backward()
        results.append([loss, *(x.grad for x in inputs)])
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_a_compiled_function_takes_other_lengths():
    compiled = torch.compile(
        lambda q, k, v: fmha.attention(q, k, v, mask="causal"), fullgraph=True, dynamic=True, backend=TRACER
    )
    for length in (3, 5, 9):
        q, k, v = tensors(sq=length, sk=length)
        assert torch.equal(compiled(q, k, v), fmha.attention(q, k, v, mask="causal"))


def test_an_exported_program_runs():
    inputs = tensors()
    program = torch.export.export(_Causal(), inputs)
    assert torch.equal(program.module()(*inputs), _Causal()(*inputs))


def _dropped(q, k, v, **options):
    return fmha.attention(q, k, v, p_drop=0.5, **options)


def test_a_seed_that_nobody_gives_is_torchs_generators():
    q, k, v = tensors(sq=16, sk=16)
    first, second = _dropped(q, k, v), _dropped(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    tensors(sq=16, sk=16)
    assert torch.equal(_dropped(q, k, v), first) and torch.equal(_dropped(q, k, v), second)
    assert torch.equal(_dropped(q, k, v, seed=3), _dropped(q, k, v, seed=3))
    state = torch.get_rng_state()
    fmha.attention(q, k, v)
    _dropped(q, k, v, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    o, cached = torch.empty_like(q), lambda: fmha.attention_with_kvcache(q, k, v, p_drop=0.5)
    assert not torch.equal(fmha.attention_out(o, q, k, v, p_drop=0.5).clone(), fmha.attention_out(o, q, k, v, p_drop=0.5))
    assert not torch.equal(cached(), cached())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_drops_the_same_elements_again(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    inputs = tensors(sq=16, sk=16, grad=True)
    torch.manual_seed(5)
    wanted = torch.autograd.grad(_dropped(*inputs).sum(), inputs)
    torch.manual_seed(5)
    checkpoint(_dropped, *inputs, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(x.grad, want) for x, want in zip(inputs, wanted))


@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_call_draws_its_seed_and_is_whole(grad):
    inputs = tensors(sq=16, sk=16, dv=16)
    eye = torch.eye(16).view(1, 16, 1, 16).expand(2, 16, 2, 16).contiguous().requires_grad_(grad)
    compiled = torch.compile(_dropped, fullgraph=True, backend=TRACER)
    first, second = (compiled(*inputs[:2], eye) for _ in range(2))
    assert not torch.equal(first == 0, second == 0)
    torch.manual_seed(7)
    again = compiled(*inputs[:2], eye)
    torch.manual_seed(7)
    assert torch.equal(compiled(*inputs[:2], eye), again)
    if grad:
        # V is the unit matrix, so O is P after dropout, and V's gradient has the same elements.
        (dv,) = torch.autograd.grad(again.sum(), eye)
        wanted = again.sum((1, 2)).detach()
        assert torch.allclose(dv.sum(2)[..., 0], wanted, atol=1e-4)


def test_a_seed_as_a_tensor_is_one_number_of_the_host():
    q, k, v = tensors()
    call = (q, k, v, *NONE7, None, None, None, None, *_arguments.bind(p_drop=0.5, seed=9)[1])
    drawn = torch.tensor(-5, dtype=torch.int64, device="cpu")
    wanted = _torch.forward(*call[:-1], call[-1], drawn)[0]
    assert torch.equal(wanted, fmha.attention(q, k, v, p_drop=0.5, seed=(1 << 64) - 5))
    for wrong, words in ((drawn.float(), "float32, not of int64"), (drawn.expand(2), "shape .2.")):
        with pytest.raises(RuntimeError, match=f"^drawn_seed .*{words}"):
            _torch.forward(*call, wrong)


def test_a_gradient_of_slopes_is_refused_by_name():
    q, k, v = tensors()
    slopes = torch.rand(4, requires_grad=True)
    for words in (dict(), dict(bias=None, sink=torch.zeros(4))):
        with pytest.raises(ValueError, match="^alibi_slopes of shape .4. requires a gradient"):
            fmha.attention(q, k, v, alibi_slopes=slopes, **words)
    with torch.no_grad():
        fmha.attention(q, k, v, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="^alibi_slopes of shape"):
        torch.func.grad(lambda x: fmha.attention(q, k, v, alibi_slopes=x).sum())(slopes.detach())
    eighths = [x.to(torch.float8_e4m3fn) for x in tensors(hk=4)]
    with pytest.raises(NotImplementedError, match="^descale_q is given, but there is no gradient"):
        fmha.attention(*eighths, descale_q=torch.ones(1, requires_grad=True)).float().sum().backward()


class _Causal(torch.nn.Module):
    def forward(self, q, k, v):
        return fmha.attention(q, k, v, mask="causal")


def test_an_exported_program_is_json_without_a_number_that_json_has_not():
    from torch._export.serde.serialize import serialize

    inputs = tensors()
    program = torch.export.export(_Causal(), inputs)
    text = serialize(program).exported_program.decode()
    assert json.loads(text, parse_constant=lambda word: pytest.fail(word))


@pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler or no headers of Python: inductor builds nothing")
@pytest.mark.skipif(
    DEVICE != "cpu", reason="torch 2.11 ends the process on a GPU where it loads a package, of its own operators too"
)
def test_a_package_made_ahead_of_time_is_loaded_and_computes(tmp_path):
    inputs = tensors()
    program = torch.export.export(_Causal(), inputs)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "causal.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(path)(*inputs), _Causal()(*inputs))


def test_threads_share_plans_and_agree():
    inputs = [tensors(sq=n, sk=n + 3) for n in range(1, 9)]
    wanted = [fmha.attention(*x, mask="causal") for x in inputs]
    wrong = []

    def work():
        for _ in range(20):
            for x, want in zip(inputs, wanted):
                if not torch.equal(fmha.attention(*x, mask="causal"), want):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(DEVICE != "cpu" or not hasattr(os, "fork"), reason="a device does not outlive fork")
def test_a_child_after_fork_computes_too():
    q, k, v = tensors(sq=64, sk=64)
    wanted = fmha.attention(q, k, v)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(fmha.attention(q, k, v), wanted) else 1)
    for _ in range(300):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the child hangs after 30 s")


@pytest.mark.parametrize("options", [dict(), dict(mask="causal", softcap=1.5), dict(bias=True, sink=True)], ids=str)
def test_gradcheck(options):
    """Torch's own differences, of the f32 kernel: the rounding of a difference is divided by its step."""
    q, k, v = (x.requires_grad_() for x in tensors(b=1, sq=3, sk=4, hq=2, hk=1, d=4))
    options = dict(options)
    extra = [name for name in ("bias", "sink") if options.pop(name, False)]
    leaves = [torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(2, requires_grad=True)] if extra else []

    def function(q, k, v, *rest):
        return fmha.attention(q, k, v, return_lse=True, **options, **dict(zip(extra, rest)))

    with warnings.catch_warnings():
        # gradcheck warns of inputs that are not float64.
        warnings.simplefilter("ignore")
        assert torch.autograd.gradcheck(function, (q, k, v, *leaves), eps=1e-2, atol=2e-3, rtol=2e-2, nondet_tol=0.0)


def _parts():
    return torch.randn(3, 2, 4, 2, 8), torch.randn(3, 2, 2, 4)


@pytest.mark.parametrize("options", [dict(), dict(sink=torch.zeros(4))], ids=["plain", "sink"])
@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["linear", "square"])
def test_every_way_to_a_second_derivative_is_refused_by_name(options, loss):
    q, k, v = tensors(grad=True)
    options = {name: x.to(DEVICE) for name, x in options.items()}

    def gradient():
        return torch.autograd.grad(loss(fmha.attention(q, k, v, **options)), q, create_graph=True)[0].sum()

    for again in (lambda: gradient().backward(), lambda: torch.autograd.grad(gradient(), (q, k), allow_unused=True)):
        with pytest.raises(NotImplementedError, match="^q, k, v.*: attention has no second derivative"):
            again()

    def function(*qkv):
        return loss(fmha.attention(*qkv, **options))

    given = tuple(x.detach() for x in (q, k, v))
    for twice in (torch.func.hessian(function), torch.func.jacrev(torch.func.jacrev(function))):
        with pytest.raises(NotImplementedError, match="no second derivative|differentiated forward|has a tangent"):
            twice(*given)
    with pytest.raises(NotImplementedError, match="has a tangent"):
        torch.func.jvp(lambda x: torch.vmap(lambda y: function(y, *given[1:]))(x), (q[None],), (q[None],))


def test_the_second_derivative_of_parts_is_refused_or_that_of_a_sum():
    o_parts, lse_parts = (x.requires_grad_() for x in _parts())
    (grad,) = torch.autograd.grad(fmha.combine(o_parts, lse_parts)[0].sum(), o_parts, create_graph=True)
    with pytest.raises(NotImplementedError, match="^o_parts, lse_parts"):
        grad.sum().backward()
    few = o_parts[:, :1, :1, :1, :2].detach()
    given, wanted = (
        torch.autograd.functional.hessian(lambda x: function(x).sin().sum(), few)
        for function in (fmha.add_parts, lambda x: x.sum(0))
    )
    assert torch.allclose(given, wanted)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_has_the_gradients_of_the_call(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    inputs = tensors(grad=True)

    def model(q, k, v):
        return fmha.attention(q, k, v, mask="causal").square().sum()

    wanted = torch.autograd.grad(model(*inputs), inputs)
    checkpoint(model, *inputs, use_reentrant=use_reentrant).backward()
    assert all(torch.equal(x.grad, want) for x, want in zip(inputs, wanted))


def _equal_transformed(transform, ours, theirs, given):
    """Of a function and its definition, in whatever the transform gives."""
    with warnings.catch_warnings():
        # torch warns of an operator without an autograd rule of its own.
        warnings.simplefilter("error", UserWarning)
        got = transform(ours)(*given)
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(got), leaves(transform(theirs)(*given))):
        assert a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=2e-5), transform


@pytest.mark.parametrize("more", ["", "bias", "lse"])
def test_torch_funcs_transforms_are_those_of_the_definition(more):
    q, k, v = tensors(sq=3, sk=4, hq=2, hk=1, d=4)
    options = dict(bias=torch.randn(1, 2, 3, 4)) if more == "bias" else {}

    def function(attention):
        def of(*qkv):
            o, lse = attention(*qkv, **options)
            return torch.cat([o.flatten(1), lse.flatten(1)], 1) if more == "lse" else o

        return of

    ours = function(functools.partial(fmha.attention, return_lse=True))
    theirs = function(by_definition)
    several = torch.stack([q, q * 2, q + 1], 4), torch.stack([k, k * 2, k + 1], 1), torch.stack([v, v + 1, v])
    numbers = (0, 1, 2)

    def gradient(f):
        return torch.func.grad(lambda *x: f(*x).sin().sum(), numbers)

    for transform, given in (
        (gradient, (q, k, v)),
        (lambda f: torch.vmap(f, in_dims=(4, 1, 0)), several),
        (lambda f: torch.vmap(f, in_dims=(4, None, None)), (several[0], k, v)),
        (lambda f: torch.vmap(gradient(f), in_dims=(4, None, 0)), (several[0], k, several[2])),
        (lambda f: gradient(torch.vmap(f, in_dims=(4, None, 0))), (several[0], k, several[2])),
        (lambda f: torch.func.jacrev(f, numbers), (q, k, v)),
        (lambda f: lambda *x: torch.autograd.functional.jacobian(f, x, vectorize=True), (q, k, v)),
    ):
        _equal_transformed(transform, ours, theirs, given)


def test_a_mapped_bias_has_its_own_gradient():
    q, k, v = tensors(sq=3, sk=4)
    _equal_transformed(
        lambda attention: torch.vmap(torch.func.grad(lambda bias: attention(q, k, v, bias=bias)[0].sin().sum())),
        functools.partial(fmha.attention, return_lse=True),
        by_definition,
        (torch.randn(3, 1, 4, 3, 4),),
    )


def test_parts_are_mapped():
    def by_sum(o, lse):
        whole = torch.logsumexp(lse, 0)
        return (torch.exp(lse - whole).transpose(-1, -2).unsqueeze(-1) * o).sum(0), whole

    o_parts, lse_parts = _parts()
    several = torch.stack([o_parts, o_parts * 2], 1), torch.stack([lse_parts, lse_parts + 1])

    def gradient(f):
        function = torch.func.grad(lambda o, lse: sum(x.sin().sum() for x in f(o, lse)), (0, 1))
        return torch.vmap(function, in_dims=(1, 0))

    _equal_transformed(gradient, fmha.combine, by_sum, several)
    _equal_transformed(
        lambda f: torch.vmap(torch.func.grad(lambda o: f(o).sin().sum()), in_dims=1),
        fmha.add_parts,
        lambda o: o.sum(0),
        several[:1],
    )


def test_under_a_transform_there_are_no_pages():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="^block_table is given"):
        torch.vmap(lambda x: fmha.attention(x, k, v, block_table=_lengths(0, 1).view(2, 1)))(q[None])


def test_the_lock_of_the_interpreter_is_free_meanwhile():
    q, k, v = tensors(b=1, sq=2000, sk=2000, hq=8, hk=8, d=64)
    fmha.attention(q, k, v)
    assert others_run_during(lambda: fmha.attention(q, k, v))


def test_flash_attentions_functions_compile_too():
    from fmha import flash_attn

    def model(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True).square().sum()

    inputs = tensors(grad=True)
    wanted = torch.autograd.grad(model(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(model, fullgraph=True, backend=TRACER)(*inputs), inputs)
    for a, b in zip(got, wanted):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_gradient_of_a_cache_is_not_lost_under_a_compiler():
    from fmha import flash_attn

    q, cache = torch.randn(2, 1, 4, 16, requires_grad=True), torch.randn(2, 12, 2, 16)

    def step(q):
        return flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.full((2,), 3).int())

    with pytest.raises(Exception, match="k_cache is a cache, of which attention has no gradient"):
        torch.compile(step, fullgraph=True, backend=TRACER)(q)
    with pytest.raises(NotImplementedError, match="k_cache is a cache, of which attention has no gradient"):
        torch.compile(step, backend=TRACER)(q).sum().backward()


@appends_in_f32
def test_a_cache_that_a_compiled_step_writes_to_is_written():
    """The schema says what is written: a compiler that did not know would drop or reorder it."""

    def step(q, k, v, new, used):
        first = fmha.attention_with_kvcache(q, k, v, new, new, seqused_k=used)
        return first + k.sum() * 0, fmha.attention_with_kvcache(q, k, v, new * 2, new * 2, seqused_k=used + 1)

    q, k, v = tensors(sq=1, sk=8, hq=2)
    new, used = torch.randn(2, 1, 2, 16), torch.tensor([3, 5], dtype=torch.int32)
    caches = [[k.clone(), v.clone()] for _ in range(2)]
    wanted = step(q, *caches[0], new, used)
    got = torch.compile(step, fullgraph=True, backend=TRACER)(q, *caches[1], new, used)
    for a, b in zip((*got, *caches[1]), (*wanted, *caches[0])):
        assert torch.allclose(a, b, atol=1e-6)
    assert torch.equal(caches[1][0][0, 3], new[0, 0]) and torch.equal(caches[1][0][0, 4], new[0, 0] * 2)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_call_that_drops_is_not_captured_into_a_graph(monkeypatch, seed):
    """Played on the CPU: torch says that it captures, and the queries that they are on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu = types.SimpleNamespace(is_cuda=True)
    _, numbers = _arguments.bind(p_drop=0.5, seed=seed)
    with pytest.raises(ValueError, match="p_drop: a graph is captured"):
        _torch._seeded(on_gpu, numbers)
    _, whole = _arguments.bind()
    assert _torch._seeded(on_gpu, whole) == (whole, None)
