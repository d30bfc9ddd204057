"""mHC (the mixing of residual streams): one path and one split of K at every number of tokens.

Upstream computes post + next pre in two ways, and splits the projection's K over as many programs as the GPU has room
for, so both the arithmetic and the grouping of its sums follow the number of tokens (padded ones included: a captured
graph differs from eager). Under batch invariance there is one way, at every T:

    residual' = mhc_post(...)                        TileLang, one program a token, rounded to BF16 as it is stored
    partial[s], sqr[s] = residual' @ fn.T over K_s   DeepGEMM tf32_hc_prenorm_gemm, s = 0 .. SPLITS - 1
    mixes = rsqrt(sum_s sqr[s]) * sum_s partial[s]   TileLang, one program a token, s ascending

Invariant: each of the three gives a token's row the same bits at T = 1 and T = 8192, wherever the row stands.

Why it holds. The TileLang kernels start one program a token and read nothing of another token. DeepGEMM's kernel
(deep_gemm/impls/sm90_tf32_hc_prenorm_gemm.cuh) fixes its tile at 64 x 64 in M and K and takes N, K, the number of
splits and the tile as template arguments; only shape_m is a run-time value, and it only bounds the stores. With the
splits fixed one binary serves every T: the K range of split s is a function of s, the WGMMAs of a row run in ascending
K, and rows of a WGMMA are independent (rows beyond T are zeros from the TMA). sqr adds squares of BF16 numbers, exact
in fp32, so a fused multiply-add cannot change it between the upper and the lower eight rows of a warp; the four lanes
of a row are added in one butterfly. The SM100 kernel has the same structure and is unproven.

Why not upstream's other way (`mhc_fused_tilelang`, fp32 FMA, at most 32 tokens): it keeps residual' in fp32 for the
projection, so it is other arithmetic, and it reads the whole of fn once a token, 1.5 MB at K = 16384: 12.9 GB for a
prefill of 8192 tokens. Why not DeepGEMM below and the other above: a row's bits would depend on T.
"""
import torch

# How many programs share K. Any constant is invariant. 1 leaves a decode step of 256 tokens on 4 SMs, each walking 256
# blocks of K; 16 gives 64 SMs 16 blocks each, and costs a prefill of 8192 tokens 12.6 MB of partial sums. It is also
# the largest split that upstream's own bucketing keeps (kernels/mhc/warmup.py:20), so no new kernel variant appears.
SPLITS = 16
# A split gets at least this many blocks of K, upstream's own bound (tilelang_kernels.py:50).
MIN_BLOCKS = 4
BLOCK_K = 64

# TF32 keeps 10 bits of fn's fraction (x is BF16, exact); truncated, hence one ulp, 2**-10, a product.
TF32_ULP = 2.0**-10


def fixed_split(k: int | None, block_k: int) -> int:
    """The number of splits of K: a function of the weight's width alone."""
    if k is None:
        return SPLITS
    return max(1, min(SPLITS, -(-k // block_k) // MIN_BLOCKS))


def split_bounds(k: int, splits: int, block_k: int = BLOCK_K) -> list[tuple[int, int]]:
    """[start, end) of each split's K range, as DeepGEMM cuts it: whole blocks, the remainder to the first splits."""
    blocks = -(-k // block_k)
    each, rest = divmod(blocks, splits)
    starts = [(s * each + min(s, rest)) * block_k for s in range(splits + 1)]
    return [(a, min(b, k)) for a, b in zip(starts, starts[1:], strict=False)]


def reference_prenorm(x: torch.Tensor, fn: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The projection in fp64. x: [T, K] bf16, fn: [N, K] fp32 -> partial [splits, T, N], sqr [splits, T], fp64."""
    x, fn = x.double(), fn.double()
    parts = [(x[:, a:b], fn[:, a:b]) for a, b in split_bounds(x.shape[1], splits)]
    return torch.stack([p @ f.T for p, f in parts]), torch.stack([p.square().sum(-1) for p, _ in parts])


def tolerance(x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """Element-wise bound on |sum of DeepGEMM's partial sums - reference|: [T, N] fp64."""
    return TF32_ULP * (x.double().abs() @ fn.double().abs().T)
