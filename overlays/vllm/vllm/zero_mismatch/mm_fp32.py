"""`bi_mm_fp32`: x @ weight.T with an fp32 result whose rows do not depend on the batch.

Invariant: out[m, n] is a function of x[m, :] and weight[n, :] alone. It has the same bits at every M, at every place of
the row in the batch and next to any other rows (NaN and infinity included).

The order of every element's sum is fixed by K, N and the dtypes: K is cut into SLICES runs of STEPS steps of BLOCK_K
(`_slices`; past K operands load as zero). A slice's partial p_i starts from zero and walks its run in order; the
element is (((0 + p_0) + p_1) + p_2) + ... in fp32.

Why it holds at every M:
- a step of an element is the same instructions whatever the tile's height: on SM90 16-bit operands go through a
  warpgroup's m64n128k16, and a tile of 128 rows is two warpgroups side by side. A row of an MMA is an independent dot
  product, and rows beyond M are loaded as zero and never stored. (SM100 has another instruction for each height: there
  this is unproven.);
- M chooses the height of the tile and the place of the slices, nothing else. With few tiles each slice has its own
  program, which writes 0 + p_i to a workspace, and `_add_slices_kernel` adds them in slice order. With many tiles one
  program walks all slices and adds them in registers, in slice order. Both are the sum above: a total that starts at +0
  is never -0 (x + -x and 0 + -0 are +0 when rounding to nearest), so adding 0 + p_i is adding p_i;
- one binary serves both places (the kernel is specialised neither on M nor on the slices a program owns), so nothing
  the compiler does to a partial depends on the place;
- a slice has at least two steps. With one, Triton rewrites total + dot(a, b, 0) as dot(a, b, total), which is another
  sum when a program owns several slices. With two the accumulator is carried by the loop, and the rewrite, which needs
  a constant zero there, does not match (a test compiles the kernel and looks);
- no atomics and no arrival order: the second kernel starts when the first is complete, so any number of streams may run
  products at once, and a graph replays them without a counter to reset.

Products of two BF16 (or FP16) numbers are exact in fp32 (8 + 8, 11 + 11 bits of significand against 24), so 16-bit
inputs use the tensor cores and only the accumulation rounds. An fp32 operand makes the whole product fp32 and "ieee":
Triton's default would round it to TF32.

Serves the router gate, the compressors' and the indexer's projections and an fp32 lm_head, which upstream gives to
cuBLAS (kernel chosen by M) or rounds to BF16.
"""
import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """BLOCK_N, BLOCK_K and SLICES are part of the contract: they fix the instruction and group the accumulation. The
    trainer must use them too.
    """

    heights: tuple[int, ...]  # rows of a tile, ascending: a batch takes the first that holds it, or the last
    block_n: int
    block_k: int
    slices: int  # at most; `_slices` has the number for a K
    stages: int
    rows_per_warp: int


# (largest N served, tile), the first row whose bound holds. 128 x 128 by two warpgroups is the largest tile whose total
# and partial both stay in registers, and the smallest that feeds the tensor cores from L2 at 8192 rows; a decode step's
# rows fit 64, which halves the work on rows that are not there. Slices are what a decode step's parallelism comes from,
# and each costs a partial of M x N: 256 rows, two tiles high, should make one wave of programs and no more.
_TILES_16BIT = (
    # Router gate, indexer weights: up to 4 strips. K = 4096 is 4 steps of 64 a slice.
    (256, Tile((64, 128), 64, 64, 16, 4, 16)),
    # Indexer compressor: 4 strips.
    (512, Tile((64, 128), 128, 64, 16, 4, 16)),
    # Compressors of ratio 128: 8 strips.
    (1024, Tile((64, 128), 128, 64, 8, 4, 16)),
    # Compressors of ratio 4: 16 strips.
    (2048, Tile((64, 128), 128, 64, 4, 4, 16)),
    # A small lm_head: up to 64 strips.
    (8192, Tile((64, 128), 128, 64, 2, 4, 16)),
    # lm_head: a thousand strips fill the GPU by themselves, two tiles an SM.
    (2**31 - 1, Tile((64, 128), 128, 64, 1, 3, 16)),
)
# fp32 has no exact tensor-core product; small tiles keep the FMA path's operands in registers.
_TILES_FP32 = ((2**31 - 1, Tile((16,), 32, 32, 4, 3, 4)),)

# Slices get programs of their own while that makes at most one wave on 132 multiprocessors; beyond, writing and reading
# the partials costs more than it wins. Moves programs only: any value gives the same bits.
_SPREAD = 132

# Row blocks that share a weight strip: 8 x 128 rows of K = 4096 are 8 MB, well inside the L2 cache.
_BAND = 8

# Elements an adding program owns: with 4 warps each thread reads 16 bytes of every slice.
_ADD_BLOCK = 512

_16BIT = (torch.bfloat16, torch.float16)
_DTYPES = (*_16BIT, torch.float32)

# Triton's interpreter multiplies the raw words of BF16 operands. Widening first is exact, so CPU tests widen.
_INTERPRETED = triton.knobs.runtime.interpret

# Tolerance of the result against fp64: K fp32 additions and one a slice, each at most half an ulp of a partial sum that
# is bounded by sum |x||w|. Tensor cores truncate instead of rounding, hence one whole ulp (2**-23) an addition.
ULP_PER_ADDITION = 2.0**-23


@triton.jit(do_not_specialize=["M", "owned"])
def _mm_fp32_kernel(
    x_ptr,
    w_ptr,
    out_ptr,  # fp32 [programs on axis 1, M, N]
    M,
    N,
    stride_xm,
    stride_wn,
    owned,  # slices a program walks: 1 or SLICES
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STEPS: tl.constexpr,  # of a slice
    BAND: tl.constexpr,
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Row blocks go in bands; inside a band a weight strip serves every row block before the next strip is read. The
    # order of programs decides what the cache holds and nothing else.
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    place = tl.program_id(1)
    if EARLY:
        if owned < SLICES:
            tl.extra.cuda.gdc_launch_dependents()
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
    tl.static_assert(SLICES == 1 or STEPS > 1, "a slice of one step is folded into the total")
    FITS: tl.constexpr = K == BLOCK_K * SLICES * STEPS
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # One loop over the steps of all owned slices, not one a slice, so that loads stay in flight across slices.
    for step in range(place * owned * STEPS, (place + 1) * owned * STEPS):
        k = step * BLOCK_K
        x_ok = row_ok if FITS else row_ok & (ks < K - k)[None, :]
        w_ok = col_ok if FITS else col_ok & (ks < K - k)[:, None]
        x = tl.load(x_ptrs + k, mask=x_ok, other=0.0)
        w = tl.load(w_ptrs + k, mask=w_ok, other=0.0)
        if WIDEN:
            acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc)
        if SLICES > 1:
            if step % STEPS == STEPS - 1:
                total += acc
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if SLICES == 1:
        total = acc
    out_ptrs = out_ptr + place.to(tl.int64) * M * N + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out_ptrs, total, mask=row_ok & col_ok)


@triton.jit
def _add_slices_kernel(parts_ptr, out_ptr, size, SLICES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """parts: fp32 [SLICES, size] -> out: fp32 [size], added in slice order from +0, as the product's own total is."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # _SPREAD tiles bound all parts far below 2**31
    ok = at < size
    if EARLY:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in tl.static_range(SLICES):
        total += tl.load(parts_ptr + s * size + at, mask=ok, other=0.0)
    tl.store(out_ptr + at, total, mask=ok)


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


def _tile(n: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> tuple[bool, Tile]:
    """(needs ieee fp32, tile): chosen by weight and dtypes, never by M."""
    ieee = not (x_dtype == w_dtype and x_dtype in _16BIT)
    table = _TILES_FP32 if ieee else _TILES_16BIT
    return ieee, next(tile for bound, tile in table if n <= bound)


def _slices(k: int, tile: Tile) -> tuple[int, int]:
    """(slices, steps of a slice), each slice with some of K and, where there are several, at least two steps."""
    steps = max(1, triton.cdiv(k, tile.block_k))
    steps_each = max(2, triton.cdiv(steps, tile.slices))
    slices = triton.cdiv(steps, steps_each)
    return slices, steps_each if slices > 1 else steps


def _height(m: int, tile: Tile) -> int:
    return next((height for height in tile.heights if m <= height), tile.heights[-1])


def _places(m: int, n: int, k: int, tile: Tile) -> int:
    """Programs that share an element's slices: one each, or one for all. Any answer gives the same bits."""
    tiles = triton.cdiv(m, _height(m, tile)) * triton.cdiv(n, tile.block_n)
    slices, _ = _slices(k, tile)
    return slices if tiles * slices <= _SPREAD else 1


@functools.cache
def _early(device: torch.device) -> bool:
    """Whether a dependent launch may overtake the end of the kernel it waits for: NVIDIA from Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


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
    ieee, tile = _tile(n, x.dtype, weight.dtype)
    slices, steps = _slices(k, tile)
    early = _early(x.device)
    height, places = _height(m, tile), _places(m, n, k, tile)
    parts = out if places == 1 else torch.empty((places, m, n), dtype=torch.float32, device=x.device)
    _mm_fp32_kernel[(triton.cdiv(m, height) * triton.cdiv(n, tile.block_n), places)](
        x, weight, parts, m, n, stride_xm, weight.stride(0), slices // places,
        K=k, BLOCK_M=height, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SLICES=slices, STEPS=steps, BAND=_BAND,
        WIDEN=ieee or _INTERPRETED, EARLY=early, num_stages=tile.stages, num_warps=height // tile.rows_per_warp,
    )  # fmt: skip
    if places > 1:
        _add_slices_kernel[(triton.cdiv(m * n, _ADD_BLOCK),)](
            parts, out, m * n, SLICES=places, BLOCK=_ADD_BLOCK, EARLY=early, num_warps=4,
            **({"launch_pdl": True} if early else {}),
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
    slices, _ = _slices(x.shape[1], _tile(weight.shape[0], x.dtype, weight.dtype)[1])
    return ULP_PER_ADDITION * (x.shape[1] + slices) * (x.double().abs() @ weight.double().abs().T)
