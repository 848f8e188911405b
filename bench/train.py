"""Trains a small language model with `fmha`'s attention, and once more with PyTorch's: `python3 train.py [FOLDER]`.

    FMHA_LIB=target/release/libfmha_c.so python3 bench/train.py docs/measured/train-h200

A byte-level transformer on the text that Python ships (its language reference, then its standard library's sources):
f32 master weights, products in bf16, AdamW. Layers alternate between head dimensions 64 and 128. Every run has the same
first weights and sees the same bytes; what differs is who computes attention, forward and backward:

    fmha                 this library, through its C ABI and a torch.autograd.Function
    fmha-deterministic   the same with the deterministic backward, twice: at the end all weights must have the same bits
    torch-flash          PyTorch's scaled_dot_product_attention with FlashAttention-2
    torch-other          PyTorch's with cuDNN (on a CPU: by products and softmax): how far PyTorch is from itself

Writes FOLDER.csv (the loss on the training batch, each step) and FOLDER.svg, prints each run's loss on text that no run
has seen. Exit status 1: a loss of ours is further from PyTorch's than twice PyTorch's own two are apart, by the mean over
the last tenth of the steps and at least 1 % of it; or the deterministic runs' weights differ in a bit.
"""

import argparse
import csv
import os
import sys
import sysconfig
import time
from ctypes import c_float, pointer, sizeof
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS' same bits every run

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from ours import DTYPE, Call, FmhaOptions, _runner  # noqa: E402

# -------------------------------------------------------------------------------------------- attention


class Fmha:
    """Plans for causal attention of one shape, [batch, seqlen, heads, head_dim]; a run takes any addresses."""

    def __init__(self, q, deterministic):
        batch, seqlen, heads, dim = q.shape
        self.scale = c_float(dim**-0.5)
        self.call = Call(
            batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads, num_heads_kv=heads, head_dim_qk=dim,
            head_dim_v=dim, mask=b"b:-1,0", softmax_scale=pointer(self.scale), write_lse=1,
            dtype_qk=DTYPE[q.dtype], dtype_v=DTYPE[q.dtype], dtype_o=DTYPE[q.dtype],
        )  # fmt: skip
        self.call.device = b"cuda" if q.is_cuda else b"cpu"
        options = FmhaOptions(struct_bytes=sizeof(FmhaOptions), deterministic=deterministic)
        self.bind(self.call, q, q, q, q, torch.empty(1, device=q.device))
        self.back = self.call.backward(DTYPE[q.dtype], dout=q, dq=q, dk=q, dv=q)
        self.forward, self.backward = _runner(self.call, options), _runner(self.back, options)

    def bind(self, call, q, k, v, o, lse):
        call.tensors(q=q, k=k, v=v, o=o)
        call.args.lse = lse.data_ptr()
        call.args.stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else None

    def run_forward(self, q, k, v):
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        self.bind(self.call, q, k, v, o, lse)
        self.forward()
        return o, lse

    def run_backward(self, q, k, v, o, lse, dout):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        self.bind(self.back, q, k, v, o, lse)
        for name, x in zip(("dout", "dq", "dk", "dv"), (dout, *grads)):
            setattr(self.back.args, name, x.data_ptr())
        self.backward()
        return grads


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plans):
        q, k, v = (x.contiguous() for x in (q, k, v))
        o, lse = plans.run_forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.plans = plans
        return o

    @staticmethod
    def backward(ctx, dout):
        return *ctx.plans.run_backward(*ctx.saved_tensors, dout.contiguous()), None


class Ours:
    def __init__(self, deterministic):
        self.deterministic, self.plans = deterministic, {}

    def __call__(self, q, k, v):
        if q.shape not in self.plans:
            self.plans[q.shape] = Fmha(q.detach().contiguous(), self.deterministic)
        return Attention.apply(q, k, v, self.plans[q.shape])


class Torch:
    def __init__(self, backend):
        self.backend = backend

    def __call__(self, q, k, v):
        with sdpa_kernel(self.backend):
            o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        return o.transpose(1, 2)


# ------------------------------------------------------------------------------------------------ model


class Block(nn.Module):
    def __init__(self, width, head_dim):
        super().__init__()
        self.heads, self.head_dim = width // head_dim, head_dim
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, attend):
        batch, seqlen, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, seqlen, 3, self.heads, self.head_dim)
        x = x + self.out(attend(*qkv.to(torch.bfloat16).unbind(2)).reshape(batch, seqlen, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Model(nn.Module):
    def __init__(self, layers, width, seqlen):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(seqlen, width))
        self.blocks = nn.ModuleList(Block(width, (64, 128)[i % 2]) for i in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens, attend):
        x = self.bytes(tokens) + self.places
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.last(x))


# ------------------------------------------------------------------------------------------------- text


def text(limit):
    """Bytes of what this Python ships: its language reference in words, then sources of its library."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        topics = {}
    parts = [topics[name] for name in sorted(topics)]
    size = sum(map(len, parts))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size >= limit:
            break
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
    return torch.frombuffer(bytearray("\n".join(parts).encode()[:limit]), dtype=torch.uint8)


class Batches:
    """Every run's batches, the same for all: places in the first nine tenths of the text; the last tenth is held out."""

    def __init__(self, args):
        self.args, self.data = args, text(args.text_bytes).to(args.device)
        self.seen = len(self.data) * 9 // 10
        generator = torch.Generator().manual_seed(1)
        self.starts = torch.randint(self.seen - args.seqlen - 1, (args.steps, args.batch), generator=generator)
        self.starts = self.starts.to(args.device)
        self.row = torch.arange(args.seqlen + 1, device=args.device)

    def at(self, starts):
        rows = self.data[starts[:, None] + self.row].long()
        return rows[:, :-1], rows[:, 1:]

    def held_out(self):
        for begin in range(self.seen, len(self.data) - self.args.seqlen * self.args.batch, self.args.seqlen * self.args.batch):
            yield self.at(begin + torch.arange(self.args.batch, device=self.args.device) * self.args.seqlen)


# ------------------------------------------------------------------------------------------------- runs


def loss_of(model, attend, tokens, targets):
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits = model(tokens, attend)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(args, batches, attend, steps):
    """The first `steps` of a run of `args.steps`."""
    torch.manual_seed(0)
    model = Model(args.layers, args.width, args.seqlen).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    warm = lambda step: min(1.0, (step + 1) / 100) * (1 - 0.9 * step / args.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm)
    losses = torch.empty(args.steps, device=args.device)
    started = time.monotonic()
    for step in range(steps):
        loss = loss_of(model, attend, *batches.at(batches.starts[step]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
        if step % 500 == 499:
            print(f"  step {step + 1}, loss {losses[step].item():.4f}, {time.monotonic() - started:.1f} s", flush=True)
    losses = losses.cpu()
    seconds = time.monotonic() - started
    with torch.no_grad():
        held_out = torch.stack([loss_of(model, attend, *batch) for batch in batches.held_out()]).mean().item()
    weights = torch.cat([p.detach().flatten().view(torch.int32) for p in model.parameters()]).cpu()
    return losses, held_out, weights, seconds


def smoothed(losses, over=50):
    return losses.unfold(0, over, over).mean(1) if len(losses) >= over else losses


def plot(path, curves, args):
    """Loss over steps as an SVG of our own, a mean over 50 steps to a point."""
    width, height, left, bottom = 760, 420, 50, 40
    points = {name: smoothed(losses) for name, losses in curves.items()}
    top = max(p.max().item() for p in points.values())
    low = min(p.min().item() for p in points.values())
    x = lambda i, n: left + (width - left - 10) * (i + 0.5) / n
    y = lambda v: 10 + (height - bottom - 10) * (top - v) / (top - low)
    colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{left} 10V{height - bottom}H{width - 10}" fill="none" stroke="black"/>',
    ]
    for i in range(5):
        value = low + (top - low) * i / 4
        lines.append(f'<text x="{left - 6}" y="{y(value) + 4:.0f}" text-anchor="end">{value:.2f}</text>')
        lines.append(f'<text x="{left + (width - left - 10) * i / 4:.0f}" y="{height - 22}" text-anchor="middle">{args.steps * i // 4}</text>')
    lines.append(f'<text x="{width / 2:.0f}" y="{height - 6}" text-anchor="middle">step; loss in nats a byte, mean of 50 steps</text>')
    for i, (name, p) in enumerate(points.items()):
        path_of = " ".join(f"{x(k, len(p)):.1f},{y(v.item()):.1f}" for k, v in enumerate(p))
        dash = f' stroke-dasharray="{4 + 2 * i} {2 * i}"' if i else ""
        lines.append(f'<polyline points="{path_of}" fill="none" stroke="{colours[i % 5]}" stroke-width="1.5"{dash}/>')
        lines.append(f'<text x="{width - 190}" y="{30 + 16 * i}" fill="{colours[i % 5]}">{name}</text>')
    Path(path).write_text("\n".join([*lines, "</svg>", ""]))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", default="train", help="what the CSV and the SVG are called, without their ends")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    for name, value in dict(steps=2000, batch=16, seqlen=512, layers=4, width=512, text_bytes=4 << 20).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--budget", type=float, help="seconds for everything: fewer steps, the same for all runs, if need be")
    return parser.parse_args()


def main():
    args, began = arguments(), time.monotonic()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    batches = Batches(args)
    other = SDPBackend.CUDNN_ATTENTION if args.device == "cuda" else SDPBackend.MATH
    runs = {
        "fmha": Ours(False), "fmha-deterministic": Ours(True), "fmha-deterministic-again": Ours(True),
        "torch-flash": Torch(SDPBackend.FLASH_ATTENTION), "torch-other": Torch(other),
    }  # fmt: skip
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {len(batches.data)} bytes of text, {args.steps} steps of "
          f"{args.batch} x {args.seqlen} bytes, {args.layers} layers of width {args.width}")  # fmt: skip
    if args.budget:
        # A tenth of the time is left for the held-out text.
        slowest = 0.0
        for name, attend in runs.items():
            train(args, batches, attend, 3)  # compiles
            slowest += train(args, batches, attend, 20)[3] / 20
            print(f"  {name}: {time.monotonic() - began:.1f} s since the start", flush=True)
        left = args.budget - (time.monotonic() - began)
        args.steps = min(args.steps, int(0.9 * left / slowest))
        if args.steps < 1:
            sys.exit(f"--budget {args.budget:g}: compiling and trying took {args.budget - left:.0f} s of it, no step is left")
        print(f"{slowest * 1e3:.1f} ms a step of all {len(runs)}: {args.steps} steps", flush=True)
    curves, weights, ends = {}, {}, {}
    for name, attend in runs.items():
        losses, held_out, weights[name], seconds = train(args, batches, attend, args.steps)
        curves[name], ends[name] = losses, losses[-max(1, args.steps // 10) :].mean().item()
        print(f"{name:26} loss {ends[name]:.4f} (last tenth), held out {held_out:.4f}, {seconds:.1f} s", flush=True)
    with open(f"{args.out}.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["step", *curves])
        out.writerows([step, *(f"{curves[name][step].item():.5f}" for name in curves)] for step in range(args.steps))
    plot(f"{args.out}.svg", {n: c for n, c in curves.items() if not n.endswith("again")}, args)
    apart = abs(ends["torch-flash"] - ends["torch-other"])
    allowed = max(2 * apart, 0.01 * ends["torch-flash"])
    furthest = max(abs(ends[n] - ends["torch-flash"]) for n in runs if n.startswith("fmha"))
    differ = int((weights["fmha-deterministic"] != weights["fmha-deterministic-again"]).sum())
    print(f"PyTorch's two are {apart:.4f} apart, ours at most {furthest:.4f} from the first (allowed {allowed:.4f})")
    print(f"deterministic, twice: {differ} of {len(weights['fmha'])} weights differ in a bit")
    return int(furthest > allowed or differ > 0 or not all(torch.isfinite(c).all() for c in curves.values()))


if __name__ == "__main__":
    sys.exit(main())
