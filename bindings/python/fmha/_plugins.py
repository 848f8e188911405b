"""Entry points by which serving engines find this package; each is called in every process of its engine, perhaps
twice, and imports nothing of the engine's that it does not have loaded."""

from __future__ import annotations

import os

#: vLLM's names of sparse backends that ``FMHA_VLLM_SPARSE`` may redirect to this library.
VLLM_SPARSE = ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")

#: SGLang's name of its sparse backend, and the backend's former name.
SGLANG_SPARSE = ("dsa", "nsa")


def vllm() -> None:
    """``vllm.general_plugins``: ``--attention-backend FMHA`` is there from then on, and ``FMHA_SPARSE``; before vLLM
    0.32 ``CUSTOM`` is the first, and the second has vLLM's own names alone."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = "fmha.vllm.Backend"
    if not hasattr(AttentionBackendEnum, "register"):
        # vLLM of this version accepts a backend under a new name, but then does not find it.
        register_backend(AttentionBackendEnum.CUSTOM, path)
    elif "FMHA" not in AttentionBackendEnum.__members__:
        # A process registers the name once: a second registration is an error.
        register_backend("FMHA", path)
        register_backend("FMHA_SPARSE", "fmha.vllm_sparse.Backend")
    for name in filter(None, os.environ.get("FMHA_VLLM_SPARSE", "").split(",")):
        if name not in VLLM_SPARSE:
            raise ValueError(f"FMHA_VLLM_SPARSE: {name!r} is none of {', '.join(VLLM_SPARSE)}")
        register_backend(AttentionBackendEnum[name], f"fmha.vllm_sparse.{name}")


def sglang() -> None:
    """``sglang.srt.plugins``: ``--attention-backend fmha`` is there from then on; ``FMHA_SGLANG_SPARSE=dsa`` has
    SGLang's own sparse backend compute here."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    def backend(runner: object) -> object:
        from .sglang import Backend

        return Backend(runner)

    def sparse(runner: object) -> object:
        from .sglang_sparse import Backend

        return Backend(runner)

    for name in filter(None, os.environ.get("FMHA_SGLANG_SPARSE", "").split(",")):
        if name not in SGLANG_SPARSE:
            raise ValueError(f"FMHA_SGLANG_SPARSE: {name!r} is none of {', '.join(SGLANG_SPARSE)}")
        register_attention_backend(name)(sparse)
    register_attention_backend("fmha")(backend)
    add_attention_backend_choices(["fmha"])
