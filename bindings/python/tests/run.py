"""Programs in interpreters of their own; without torch, which not every test needs."""

import os
import pathlib
import subprocess
import sys


def run_python(*words):
    """A program, or a file and its arguments, in an interpreter of its own; what it printed."""
    folders = [*map(str, list(pathlib.Path(__file__).parents)[1::-1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, *(words if words[0].endswith(".py") or words[0] == "-m" else ("-c", *words))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, f"ended with {ran.returncode}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout
