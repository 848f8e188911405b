"""Modules under names that other programs import."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Iterable


def put(name: str, source: types.ModuleType, names: Iterable[str], force: bool) -> None:
    """``import name`` finds a module with these names of ``source``; its parent, which is there, has it as an
    attribute."""
    present = sys.modules.get(name)
    if present is not None and not hasattr(present, "__fmha__") and not force:
        raise ImportError(
            f"{name} is imported already ({getattr(present, '__file__', 'no file')}): install(force=True) replaces it"
        )
    module = types.ModuleType(name, source.__doc__)
    module.__fmha__ = source.__name__  # type: ignore[attr-defined]
    # Version of FlashAttention whose functions the module has, for callers that compare versions.
    module.__version__ = "2.8.3"  # type: ignore[attr-defined]
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    add(name, source, names)
    parent, dot, child = name.rpartition(".")
    if dot:
        setattr(sys.modules[parent], child, module)


def add(name: str, source: types.ModuleType, names: Iterable[str]) -> None:
    """More names for a module that :func:`put` has made."""
    for function in names:
        setattr(sys.modules[name], function, getattr(source, function))
