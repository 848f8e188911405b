"""What the programs of drawn calls over ranks share: how results are compared, and gradients of a call."""

import torch

INF = float("inf")


def close(found, wanted, what):
    wanted = wanted.to(found.dtype)
    assert found.shape == wanted.shape, f"{what}: {found.shape}, not {wanted.shape}"
    hidden = wanted == -INF
    assert torch.equal(found == -INF, hidden), what
    off = (found - wanted).masked_fill(hidden, 0.0).abs() / (1 + wanted.masked_fill(hidden, 0.0).abs())
    assert not off.numel() or off.max() < 2e-4, f"{what} is off by {off.max()}"


def with_gradients(function, qkv, dout, tables, names):
    """O, LSE or ``None``, and the gradients of Q, K, V and the named tables."""
    tables = {name: x.detach().clone().requires_grad_(name in names) for name, x in tables.items()}
    qkv = [x.detach().clone().requires_grad_() for x in qkv]
    o, lse = function(*qkv, tables)
    gradients = torch.autograd.grad(o, [*qkv, *(tables[name] for name in names)], dout)
    return [o.detach(), None if lse is None else lse.detach(), *gradients]
