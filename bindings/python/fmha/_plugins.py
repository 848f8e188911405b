"""Entry points by which serving engines find this package; each is called in every process of its engine, perhaps
twice, and imports nothing of the engine's that it does not have loaded."""

from __future__ import annotations


def vllm() -> None:
    """``vllm.general_plugins``: ``--attention-backend FMHA`` is there from then on."""
    from vllm.v1.attention.backends.registry import register_backend

    register_backend("FMHA", "fmha.vllm.Backend")


def sglang() -> None:
    """``sglang.srt.plugins``: ``--attention-backend fmha`` is there from then on."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    def backend(runner: object) -> object:
        from .sglang import Backend

        return Backend(runner)

    register_attention_backend("fmha")(backend)
    add_attention_backend_choices(["fmha"])
