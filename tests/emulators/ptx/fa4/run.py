"""Runs flash-attn-4's programs for sm_100a, as its own host code compiles and launches them, on the emulator.

    python run.py [--driver libfmha_emu_libcuda.so] [--mode eager|hb|late:SEED] [--only TEXT] [--counters]

Needs flash-attn-4 with the CUTLASS DSL, PyTorch (no GPU) and a C compiler. Tensors are torch's fake ones: each of their
storages is memory of the emulated device. Results are held to f64, as far from it as twice a plain computation in bf16.
"""

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]

# (name, backward, head_dim, causal, seqlen_q, seqlen_k, heads, kv heads, blocks that multiply together)
CASES = [
    (f"{'backward' if backward else 'forward'}/d{d}/{'causal' if causal else 'full'}/s{sq}x{sk}/h{h}kv{hk}/{ctas}cta",
     backward, d, causal, sq, sk, h, hk, ctas)
    for backward in (False, True)
    for d in (64, 128)
    for causal in (False, True)
    for sq, sk, h, hk in ((384, 384, 1, 1), (300, 450, 2, 1))
    for ctas in (1, 2)
    # Two blocks: forward without a mask, backward always, at head dimension 128.
    if ctas == 1 or d == 128 and (backward or not causal)
]


class DlTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
                ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class OnDevice:
    """A tensor of the emulated device, for whoever takes DLPack."""

    def __init__(self, address, shape, strides, dtype):
        import torch

        code, bits = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32),
                      torch.int32: (0, 32)}[dtype]
        numbers = ctypes.c_int64 * max(len(shape), 1)
        self.parts = numbers(*shape), numbers(*strides)
        self.tensor = DlTensor(address, 2, 0, len(shape), code, bits, 1, *self.parts, 0, None, None)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


class Memory:
    """Memory of the emulated device behind the storages of fake tensors."""

    def __init__(self, shim):
        self.shim, self.of, self.kept = shim, {}, []

    def address(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.of:
            self.kept.append(tensor)
            size = storage.nbytes()
            at = self.shim.fa4_alloc(ctypes.c_size_t(size))
            self.shim.fa4_upload(ctypes.c_uint64(at), bytes(size), ctypes.c_size_t(size))
            self.of[storage._cdata] = at
        return self.of[storage._cdata] + tensor.storage_offset() * tensor.element_size()

    def argument(self, value):
        import torch
        import tvm_ffi

        if isinstance(value, torch.Tensor):
            tensor = OnDevice(self.address(value), value.shape, value.stride(), value.dtype)
            self.kept.append(tensor)
            return tvm_ffi.from_dlpack(tensor)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.argument(part) for part in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self.argument(part) for part in value)
        return value

    def fill(self, fake, data):
        self.shim.fa4_upload(ctypes.c_uint64(self.address(fake)), data, ctypes.c_size_t(len(data)))

    def read(self, fake):
        import torch

        out = torch.empty(tuple(fake.shape), dtype=fake.dtype)
        assert fake.is_contiguous(), fake.stride()
        status = self.shim.fa4_download(ctypes.c_void_p(out.data_ptr()), ctypes.c_uint64(self.address(fake)),
                                        ctypes.c_size_t(out.numel() * out.element_size()))
        assert status == 0, f"download: {status}"
        return out


class Launching(dict):
    """A cache of compiled functions that hands out functions of the emulated device's memory."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def __getitem__(self, key):
        compiled = super().__getitem__(key)
        return lambda *args: compiled(*(self.memory.argument(value) for value in args))


class Hardware:
    """What the host code asks of a device when it shapes a grid: few multiprocessors, so that blocks take turns."""

    def __init__(self, *_, **__):
        pass

    def get_device_multiprocessor_count(self):
        return 4

    def get_max_active_clusters(self, cluster_size, *_, **__):
        return 4 // cluster_size


def attention(q, k, v, causal, dtype):
    """By definition, with gradients: q, k, v of b, s, h, d; sums in `dtype`."""
    import torch

    q, k, v = (x.to(dtype).detach().requires_grad_() for x in (q, k, v))
    share = q.shape[2] // k.shape[2]
    kk, vv = (x.repeat_interleave(share, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, kk) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    o = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), vv)
    return (q, k, v), o, lse


def hold(what, got, exact, plain):
    error = (got.double() - exact.double()).abs().max().item()
    most = 2 * (plain.double() - exact.double()).abs().max().item() + 1e-5
    print(f"  {what}: max error {error:.3e}, may be {most:.3e}")
    return error <= most


def one(case):
    name, backward, d, causal, sq, sk, h, hk, _ = case
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import cutlass
    cutlass.utils.HardwareInfo = Hardware
    from flash_attn.cute import interface

    shim = ctypes.CDLL(os.environ["CUTE_DSL_LIBS"])
    shim.fa4_alloc.restype = ctypes.c_uint64
    assert shim.fa4_open() == 0
    memory = Memory(shim)
    # Fake tensors, but calls that launch.
    interface.is_fake_mode = lambda: False
    for function in (interface._flash_attn_fwd, interface._flash_attn_bwd, interface._bwd_preprocess,
                     interface._bwd_postprocess_convert):
        function.compile_cache = Launching(memory)

    torch.manual_seed(len(name))
    make = lambda s, heads: torch.randn(1, s, heads, d).to(torch.bfloat16)
    q, k, v, do = make(sq, h), make(sk, hk), make(sk, hk), make(sq, h)
    (qd, kd, vd), exact, lse = attention(q, k, v, causal, torch.float64)
    (qp, kp, vp), plain, plain_lse = attention(q, k, v, causal, torch.bfloat16)
    raw = lambda x: x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    inputs = [raw(x) for x in (q, k, v)]
    saved = [raw(x) for x in (exact.to(torch.bfloat16), lse.float(), do)]
    start = time.time()
    with FakeTensorMode():
        fake = lambda x: torch.empty(tuple(x.shape), dtype=x.dtype, device="cuda")
        fq, fk, fv = fake(q), fake(k), fake(v)
        for tensor, data in zip((fq, fk, fv), inputs):
            memory.fill(tensor, data)
        if backward:
            fo, flse, fdo = fake(q), torch.empty(1, h, sq, dtype=torch.float32, device="cuda"), fake(do)
            for tensor, data in zip((fo, flse, fdo), saved):
                memory.fill(tensor, data)
            results = interface._flash_attn_bwd(fq, fk, fv, fo, fdo, flse, causal=causal)[:3]
        else:
            results = interface._flash_attn_fwd(fq, fk, fv, causal=causal, return_lse=True)[:2]
    results = [memory.read(tensor) for tensor in results]
    print(f"{name}: {time.time() - start:.1f} s with the compilation")
    if os.environ.get("FA4_COUNTERS"):
        driver = ctypes.CDLL(os.environ["FA4_DRIVER"])
        driver.fmha_emu_launches.restype = ctypes.c_char_p
        launch = json.loads(driver.fmha_emu_launches())[-1]
        print("counters", json.dumps({"case": name} | launch["counters"] | launch["instructions"]))
    if not backward:
        return hold("o", results[0], exact, plain) & hold("lse", results[1], lse, plain_lse.float())
    exact.backward(do.double())
    plain.backward(do)
    pairs = zip(("dq", "dk", "dv"), results, (qd, kd, vd), (qp, kp, vp))
    return all([hold(what, got, e.grad, p.grad) for what, got, e, p in pairs])


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--driver", default=str(ROOT / "tests/emulators/target/release/libfmha_emu_libcuda.so"))
    options.add_argument("--mode", default="eager")
    options.add_argument("--only", default="", help="cases whose names have this text")
    options.add_argument("--counters", action="store_true", help="what the last kernel did, a JSON object a case")
    options.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.case is not None:
        sys.exit(0 if one(CASES[options.case]) else 1)
    failed, count = [], 0
    with tempfile.TemporaryDirectory() as folder:
        shim = os.path.join(folder, "shim.so")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, str(HERE / "shim.c"), "-ldl"], check=True)
        for number, case in enumerate(CASES):
            if options.only not in case[0]:
                continue
            # A process of its own: kernels of two cases bear one name.
            dump = os.path.join(folder, str(number))
            os.mkdir(dump)
            environment = os.environ | {
                "FLASH_ATTENTION_ARCH": "sm_100a", "CUTE_DSL_ARCH": "sm_100a", "FLASH_ATTENTION_NUM_SMS": "4",
                "FA_DISABLE_2CTA": "1" if case[-1] == 1 else "0", "CUTE_DSL_KEEP_PTX": "1",
                "CUTE_DSL_DUMP_DIR": dump, "CUTE_DSL_LIBS": shim, "FA4_DRIVER": options.driver,
                "FMHA_EMULATE": "sm_100a", "FMHA_EMULATE_MODE": options.mode,
                # The last stage of its rings is announced and never loaded.
                "FMHA_EMULATE_LOOSE_ENDS": "1", "PYTHONWARNINGS": "ignore",
            }
            if options.counters:
                environment["FA4_COUNTERS"] = "1"
            command = [sys.executable, __file__, "--case", str(number)]
            count += 1
            if subprocess.run(command, env=environment).returncode != 0:
                print(f"FAILED {case[0]}", flush=True)
                failed.append(case[0])
    print(f"{count - len(failed)} of {count} cases right", *failed, sep="\n  ")
    sys.exit(1 if failed or not count else 0)


if __name__ == "__main__":
    main()
