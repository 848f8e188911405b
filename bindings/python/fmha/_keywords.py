"""Keywords that a caller hands on through ``**rest``: what changes a result and is not honoured is refused by name."""

from __future__ import annotations

from typing import Any, Collection, Mapping


def refuse(rest: Mapping[str, Any], harmless: Collection[str] = ()) -> None:
    """Raises for the first keyword that has a value and is not among the ``harmless`` ones.

    Raises:
        NotImplementedError: the keyword's name.
    """
    for name, value in rest.items():
        if value is not None and name not in harmless:
            raise NotImplementedError(f"{name} is given ({_said(value)}), which fmha does not take here")


def _said(value: Any) -> str:
    """A number as it is; of anything else its type, since a tensor's contents say nothing."""
    return str(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
