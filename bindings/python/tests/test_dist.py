"""``fmha.dist``: ranks that are processes of the CPU, against one process; `ranks.py`, `ranks_masks.py` and
`ranks_flex.py` have the cases."""

import pathlib

import pytest
import torch
from run import run_python

HERE = pathlib.Path(__file__).parent


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_process_does_and_are_told_what_is_wrong_on_one(size, tmp_path):
    run_python(str(HERE / "ranks.py"), str(size), str(tmp_path))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_masks_and_functions_over_ranks_are_those_of_the_whole(size, tmp_path):
    run_python(str(HERE / "ranks_masks.py"), str(size), str(tmp_path))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
@pytest.mark.parametrize("size", [2, 3])
def test_flex_attention_over_ranks_is_that_of_the_whole(size, tmp_path):
    run_python(str(HERE / "ranks_flex.py"), str(size), str(tmp_path))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
def test_without_a_group_the_call_says_what_to_do():
    import fmha.dist

    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="init_process_group"):
        fmha.dist.attention(x, x, x)
    with pytest.raises(TypeError, match="group"):
        fmha.dist.attention(x, x, x, group="all")
    for function in (fmha.dist.attention, fmha.dist.explain):
        with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'; here it is causal"):
            function(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_maks'; here it is block_mask"):
        fmha.dist.flex_attention(x, x, x, block_maks=None)
    with pytest.raises(TypeError, match="query: list is no tensor"):
        fmha.dist.flex_attention([x], x, x)
    for name in fmha.dist.__all__:
        value = getattr(fmha.dist, name)
        assert value.__doc__ and "return" in value.__annotations__, name
