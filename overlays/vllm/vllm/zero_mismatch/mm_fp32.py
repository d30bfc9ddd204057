"""`bi_mm_fp32`: x @ weight.T with an fp32 result whose rows do not depend on the batch.

Invariant: out[m, n] is a function of x[m, :] and weight[n, :] alone. It has the same bits at every M, at every place of
the row in the batch and next to any other rows (NaN and infinity included).

Why it holds:
- one program owns an output tile and walks K from 0 to K in steps of BLOCK_K with one fp32 accumulator: no split-K, no
  atomics, no second pass;
- the tile comes from `_TILES`, keyed by the weight's N and the dtypes. M is not in the key, and the kernel is not
  specialised on M either, so one binary serves every M;
- a row of a tensor-core tile is an independent dot product, and rows beyond M are loaded as zero and never stored.

Products of two BF16 (or FP16) numbers are exact in fp32 (8 + 8, 11 + 11 bits of significand against 24), so 16-bit
inputs use the tensor cores and only the accumulation rounds. An fp32 operand makes the whole product fp32 and "ieee":
Triton's default would round it to TF32.

Serves the router gate, the compressors' projections and an fp32 lm_head, which upstream gives to cuBLAS (kernel chosen
by M) or rounds to BF16.
"""
import torch
import triton
import triton.language as tl

# (largest N served, BLOCK_M, BLOCK_N, BLOCK_K, stages, warps), the first row whose bound holds. BLOCK_K is part of the
# contract: it groups the accumulation. The trainer must use this table too.
_TILES_16BIT = (
    # Router gate and indexer compressor: a decode step has few rows, so parallelism comes from narrow column strips.
    (512, 16, 32, 128, 5, 4),
    # KV compressors: 64 rows fill one warpgroup MMA; 64 columns keep 128 programs busy at 256 rows of N = 2048.
    (8192, 64, 64, 64, 4, 4),
    # lm_head: bound by reading the weight once.
    (2**31 - 1, 64, 128, 64, 4, 4),
)
# fp32 has no exact tensor-core product; small tiles keep the FMA path's operands in registers.
_TILES_FP32 = ((2**31 - 1, 16, 32, 32, 3, 4),)

# Row blocks that share a weight strip: 8 x 64 rows of K = 4096 are 4 MB, well inside the L2 cache.
_BAND = 8

_16BIT = (torch.bfloat16, torch.float16)
_DTYPES = (*_16BIT, torch.float32)

# Triton's interpreter multiplies the raw words of BF16 operands. Widening first is exact, so CPU tests widen.
_INTERPRETED = triton.knobs.runtime.interpret

# Tolerance of the result against fp64: K fp32 additions, each at most half an ulp of a partial sum that is bounded by
# sum |x||w|. Tensor cores truncate instead of rounding, hence one whole ulp (2**-23) an addition.
ULP_PER_ADDITION = 2.0**-23


@triton.jit(do_not_specialize=["M"])
def _mm_fp32_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    M,
    N,
    stride_xm,
    stride_wn,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # Row blocks go in bands; inside a band a weight strip serves every row block before the next strip is read. The
    # order of programs decides what the cache holds and nothing else.
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    first_m = pid // (BAND * num_n) * BAND
    in_band = pid % (BAND * num_n)
    band = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, BAND)
    rows = (first_m + in_band % band) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (in_band // band) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    row_ok = (rows < M)[:, None]
    col_ok = (cols < N)[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_xm + ks[None, :]
    w_ptrs = w_ptr + cols.to(tl.int64)[None, :] * stride_wn + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        k_ok = ks < K - k
        x = tl.load(x_ptrs + k, mask=row_ok & k_ok[None, :], other=0.0)
        w = tl.load(w_ptrs + k, mask=col_ok & k_ok[:, None], other=0.0)
        if WIDEN:
            acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out_ptrs, acc, mask=row_ok & col_ok)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"bi_mm_fp32: found x {tuple(x.shape)} and weight {tuple(weight.shape)}; expected [M, K] and [N, K]. "
            "Flatten the leading dimensions of x and pass the weight untransposed."
        )
    if x.dtype not in _DTYPES or weight.dtype not in _DTYPES:
        raise ValueError(
            f"bi_mm_fp32: found x {x.dtype} and weight {weight.dtype}; expected bfloat16, float16 or float32. "
            "Dequantise before calling."
        )


def _tile(n: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> tuple[bool, tuple[int, int, int, int, int]]:
    """(needs ieee fp32, (BLOCK_M, BLOCK_N, BLOCK_K, stages, warps)): chosen by weight and dtypes, never by M."""
    ieee = not (x_dtype == w_dtype and x_dtype in _16BIT)
    table = _TILES_FP32 if ieee else _TILES_16BIT
    return ieee, next(row[1:] for row in table if n <= row[0])


def _launch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    m, k = x.shape
    n = weight.shape[0]
    out = torch.empty((m, n), dtype=torch.float32, device=x.device)
    if m == 0 or n == 0:
        return out
    # K runs along the last dimension of both operands; a transposed view is copied, which moves bits and adds nothing.
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    # The stride of a single row may be anything, and 1 would compile another binary.
    stride_xm = k if m == 1 else x.stride(0)
    ieee, (block_m, block_n, block_k, stages, warps) = _tile(n, x.dtype, weight.dtype)
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    _mm_fp32_kernel[grid](
        x, weight, out, m, n, stride_xm, weight.stride(0),
        K=k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BAND=_BAND, WIDEN=ieee or _INTERPRETED,
        num_stages=stages, num_warps=warps,
    )  # fmt: skip
    return out


# An operator, so that a compiled forward keeps it whole instead of tracing the launch at one M.
_LIB = torch.library.Library("zero_mismatch", "FRAGMENT")
_LIB.define("mm_fp32(Tensor x, Tensor weight) -> Tensor")
_LIB.impl("mm_fp32", _launch, "CompositeExplicitAutograd")


@torch.library.register_fake("zero_mismatch::mm_fp32", lib=_LIB)
def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


def bi_mm_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [M, K] bf16 | fp16 | fp32, weight: [N, K] bf16 | fp16 | fp32 -> [M, N] fp32, no gradient."""
    _check(x, weight)
    return torch.ops.zero_mismatch.mm_fp32(x, weight)


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same product in fp64. The kernel is within `tolerance` of it."""
    return x.double() @ weight.double().T


def tolerance(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Element-wise bound on |bi_mm_fp32 - reference|: [M, N] fp64."""
    return ULP_PER_ADDITION * x.shape[1] * (x.double().abs() @ weight.double().abs().T)
