"""A first call: NumPy's arrays, four query heads over each key and value head, a causal mask."""

import numpy as np

import fmha


def main():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 100, 8, 64), dtype=np.float32)  # batch, queries, heads, head dimension
    k = rng.standard_normal((2, 120, 2, 64), dtype=np.float32)
    v = rng.standard_normal((2, 120, 2, 64), dtype=np.float32)

    o, lse = fmha.attention(q, k, v, mask="causal", return_lse=True)
    print(f"O {o.shape}, LSE {lse.shape}")
    print(fmha.explain(q, k, v, mask="causal").splitlines()[0])

    # The causal mask counts from the end, so the last query sees every key. The same row of one head, written out:
    scores = k[0, :, 1] @ q[0, -1, 7] / 8  # 8 is the root of 64; head 7 is one of the four of key head 1
    weights = np.exp(scores - scores.max())
    assert np.allclose(o[0, -1, 7], weights / weights.sum() @ v[0, :, 1], atol=1e-5)
    assert np.isclose(lse[0, 7, -1], np.log(np.exp(scores).sum()), atol=1e-5)

    try:
        fmha.attention(q, k[:1], v)
    except fmha.FmhaError as error:
        print(f"a wrong call: {error}")
        return
    raise AssertionError("a batch of 1 beside a batch of 2 was taken")


if __name__ == "__main__":
    main()
