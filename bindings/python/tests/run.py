"""Programs in interpreters of their own, and threads; without torch, which not every test needs."""

import os
import pathlib
import subprocess
import sys
import threading
import time


def run_python(*words):
    """A program, or a file and its arguments, in an interpreter of its own; what it printed."""
    folders = [*map(str, list(pathlib.Path(__file__).parents)[1::-1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, *(words if words[0].endswith(".py") or words[0] == "-m" else ("-c", *words))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, f"ended with {ran.returncode}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


def others_run_during(call):
    """Whether another thread runs while a call computes, or the call is over within a few of that thread's steps."""
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    call()
    end = time.perf_counter()
    done.set()
    thread.join()
    return sum(start < at < end for at in ticks) >= 2 or end - start < 0.01
