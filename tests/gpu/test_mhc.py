"""On the GPU: the mHC path that is left gives a token's row the same bits at every number of tokens."""
import pytest
import torch
from mm_cases import assert_same_bits, differing_words

from vllm.zero_mismatch.mhc import SPLITS, fixed_split, reference_prenorm, tolerance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
STREAMS, HIDDEN = 4, 4096
MIX = STREAMS * (STREAMS + 2)
LONG = 8192
TOKENS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 128, 129, 256, 511, 513, 1025, LONG)


def _data(tokens=LONG):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "x": normal(tokens, HIDDEN).bfloat16().cuda(),
        "residual": normal(tokens, STREAMS, HIDDEN).bfloat16().cuda(),
        "post": normal(tokens, STREAMS, 1).sigmoid().cuda(),
        "comb": normal(tokens, STREAMS, STREAMS).softmax(-1).cuda(),
        "fn": (normal(MIX, STREAMS * HIDDEN) / 64).cuda(),
        "scale": normal(3).cuda(),
        "base": normal(MIX).cuda(),
        "norm": normal(HIDDEN).bfloat16().cuda(),
    }


def _prenorm(x, fn, splits):
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm", reason="needs vLLM's compiled DeepGEMM")
    partial = torch.empty(splits, x.shape[0], fn.shape[0], device="cuda")
    square = torch.empty(splits, x.shape[0], device="cuda")
    deep_gemm.tf32_hc_prenorm_gemm(x, fn, partial, square, splits)
    return partial, square


@pytest.mark.parametrize("k", [HIDDEN, STREAMS * HIDDEN])
def test_projection_row_keeps_its_bits_at_every_number_of_tokens(k):
    data = _data()
    x, fn = data["residual"].view(-1, STREAMS * HIDDEN)[:, :k].contiguous(), data["fn"][:, :k].contiguous()
    partial, square = _prenorm(x, fn, fixed_split(k, 64))
    for tokens in TOKENS:
        rows = slice(LONG - tokens, None)  # the last rows of the long batch are the first of the short one
        got, got_square = _prenorm(x[rows], fn, fixed_split(k, 64))
        assert_same_bits(got, partial[:, rows], f"projection of {tokens} tokens")
        assert_same_bits(got_square, square[:, rows], f"sum of squares of {tokens} tokens")


@pytest.mark.parametrize("k", [HIDDEN, STREAMS * HIDDEN])
def test_projection_is_the_product_within_tf32(k):
    data = _data(65)
    x, fn = data["residual"].view(-1, STREAMS * HIDDEN)[:, :k].contiguous(), data["fn"][:, :k].contiguous()
    partial, square = _prenorm(x, fn, SPLITS)
    want, want_square = reference_prenorm(x, fn, SPLITS)
    assert ((partial.double().sum(0) - want.sum(0)).abs() <= tolerance(x, fn)).all()
    assert torch.allclose(square.double(), want_square, rtol=1e-5, atol=0)


def test_nan_rows_leave_their_neighbours_alone():
    data = _data(64)
    x = data["residual"].view(64, -1)
    clean, _ = _prenorm(x, data["fn"], SPLITS)
    x[1::2] = float("nan")
    got, _ = _prenorm(x, data["fn"], SPLITS)
    assert_same_bits(got[:, ::2], clean[:, ::2], "rows beside NaN")


@pytest.fixture
def switch(monkeypatch):
    """Turns batch invariance on or off. The split of a shape is computed once: the other one's is forgotten."""
    kernels = pytest.importorskip("vllm.model_executor.kernels.mhc.tilelang_kernels", reason="needs vLLM and TileLang")

    def to(on):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(on)))
        kernels.compute_num_split.cache_clear()

    yield to
    kernels.compute_num_split.cache_clear()


def _post_pre(data, rows):
    from vllm.model_executor.kernels.mhc.tilelang import mhc_fused_post_pre_tilelang

    return mhc_fused_post_pre_tilelang(
        data["x"][rows], data["residual"][rows], data["post"][rows], data["comb"][rows], data["fn"], data["scale"],
        data["base"], 1e-6, 1e-6, 1e-6, 2.0, 20, norm_weight=data["norm"], norm_eps=1e-6,
    )


def test_post_and_next_pre_keep_a_tokens_bits(switch):
    switch(True)
    data = _data()
    whole = _post_pre(data, slice(None))
    for tokens in TOKENS:
        rows = slice(LONG - tokens, None)
        for name, got, want in zip(("residual", "post", "comb", "input"), _post_pre(data, rows), whole,
                                   strict=True):
            assert_same_bits(got, want[rows], f"{name} of {tokens} tokens")


def test_stock_post_and_next_pre_change_a_tokens_bits(switch):
    """Counter-test: without batch invariance the same call, at 1, 32, 33 and 8192 tokens."""
    switch(False)
    data = _data()
    whole = _post_pre(data, slice(None))
    changed = 0
    for tokens in (1, 32, 33):
        rows = slice(0, tokens)
        got = _post_pre(data, rows)
        changed += sum(differing_words(g, w[rows]) for g, w in zip(got, whole, strict=True))
    assert changed, "stock mHC gave the same bits at every T: the patches may no longer be needed"
