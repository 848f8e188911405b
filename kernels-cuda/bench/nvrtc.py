"""Compiles rendered kernels with NVRTC, no GPU needed: `python3 nvrtc.py FOLDER... [-j N]`.

Each FOLDER is one that `examples/render.rs` wrote; its `kernel.cubin`, `kernel.ptx` and `log.txt` go beside the entry.
The architecture is that of its `meta.txt` (`arch=sm_100a`), or else sm_90a.
Prints registers, spills and warnings of each. Exit status 1: something failed to compile or spilled.
"""

import ctypes
import functools
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


@functools.cache
def library():
    import nvidia

    folders = [Path(p) / sub for p in nvidia.__path__ for sub in ("cu13/lib", "cuda_nvrtc/lib")]
    for folder in folders:
        for name in sorted(folder.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
        for name in folder.glob("libnvrtc.so.*"):
            return ctypes.CDLL(str(name))
    raise SystemExit("nvrtc.py: no libnvrtc in the nvidia packages of this Python")


def compile_folder(folder: Path) -> str:
    """The log; writes kernel.cubin."""
    lib, program = library(), ctypes.c_void_p()
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    headers = {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("fmha/**/*") if p.is_file()}
    names = (ctypes.c_char_p * len(headers))(*(n.encode() for n in headers))
    texts = (ctypes.c_char_p * len(headers))(*headers.values())
    entry = (folder / "entry.cu").read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(program), entry, b"entry.cu", len(headers), texts, names)
    arch = re.search(r"^arch=(\w+)", (folder / "meta.txt").read_text(), re.MULTILINE)
    options = [b"--gpu-architecture=" + (arch[1] if arch else "sm_90a").encode(), b"-std=c++20", b"-default-device", b"-Xptxas=-v"]
    status = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    if status:
        raise RuntimeError(log.value.decode())
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, cubin)
    (folder / "kernel.cubin").write_bytes(cubin.raw)
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    (folder / "kernel.ptx").write_bytes(ptx.value)
    (folder / "log.txt").write_bytes(log.value)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode()


def report(folder: Path) -> bool:
    started = time.monotonic()
    try:
        log = compile_folder(folder)
    except RuntimeError as error:
        print(f"{folder.name}: FAILED\n{str(error)[:6000]}", flush=True)
        return False
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    warnings = sorted(set(re.findall(r"C75\d\d", log)))
    stack = spills.groups() if spills else "?"
    words = [f"{registers[1] if registers else '?'} registers", f"stack/spill {'/'.join(stack)}", *warnings]
    print(f"{folder.name}: {', '.join(words)}, {time.monotonic() - started:.1f} s", flush=True)
    return not warnings and stack == ("0", "0", "0")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) > 1 and "-j" not in arguments:
        # NVRTC holds a lock per process for much of its work: one process a kernel.
        def child(folder):
            done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True)
            print(done.stdout + done.stderr, end="", flush=True)
            return done.returncode == 0

        with ThreadPoolExecutor(2) as pool:
            sys.exit(0 if all(list(pool.map(child, arguments))) else 1)
    sys.exit(0 if report(Path(arguments[0])) else 1)
