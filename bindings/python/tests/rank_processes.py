"""Ranks of a process group on the CPU, forked from a process that imports torch once: ``PROGRAM SIZE FOLDER``."""

import os
import pathlib
import socket
import sys
import traceback

import torch
import torch.distributed as dist


def main(program):
    """Calls ``program(rank, size)`` on each rank, and ends with an error where one of them fails."""
    size, folder = int(sys.argv[1]), sys.argv[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (pathlib.Path(folder) / "port").write_text(str(free.getsockname()[1]))
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                _one_rank(program, rank, size, folder)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(codes)
    sys.exit(any(codes))


def _one_rank(program, rank, size, folder):
    # The ranks use the loopback interface, since this machine's name may have no address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if size == 2:
        where = f"file://{folder}/meeting"
    else:
        where = "tcp://127.0.0.1:" + (pathlib.Path(folder) / "port").read_text()
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    torch.set_num_threads(1)
    program(rank, size)
    dist.destroy_process_group()
