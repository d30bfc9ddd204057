"""Gated SiLU and FP8 quantisation between the two expert GEMMs: one arithmetic for both DeepGEMM layouts.

Invariant: the codes and scales of a row depend on that row's gate and up values only; the masked layout (rollout, one
slab of slots per expert) and the contiguous one (training, experts packed one after another) give the same bits.

    gate, up -> fp32;  gate = min(gate, limit);  up = clamp(up, -limit, limit)
    y     = (up + beta) * gate / (1 + exp(-alpha * gate))          fp32
    y     = BF16(y)                                                the only rounding of the product
    scale = max(|y| over 128 columns, EPS) / 448                   fp32, rounded up to a power of two unless "FLOAT32"
    code  = e4m3(y / scale)                                        round to nearest even

Why it holds: one kernel serves both layouts and only its row ranges differ; each row is reduced by a maximum, which has
no order; divisions are IEEE. Upstream has three other arithmetics: the masked kernel rounds silu, product, scale and
reciprocal to BF16 and never clamps (csrc/quantization/activation_kernels.cu:511-531, batched_deep_gemm_moe.py), the
contiguous one rounds silu to BF16 before the product (fp8_utils.py:437), only SM100's packed one rounds once
(fp8_utils.py:199).

The clamp is V4's `swiglu_limit` as in `SiluAndMulWithClamp` (layers/activation.py:212): gate from above, up on both
sides.
"""
import torch
import triton
import triton.language as tl

GROUP = 128  # columns that share a scale: the block size of the DeepGEMM recipe
GROUPS = 4  # groups of one program: one int32 holds four packed exponents
ROWS = 4  # rows of one program; rows are independent, so it fixes no order
NUM_WARPS = 4
MAX_PROGRAMS = 8192  # bounds empty programs when many experts have few rows; the rest loops
FP8_MAX = 448.0
EPS = 1e-10  # floor of a group's largest magnitude, as upstream's quantisers

# The names of vllm.utils.deep_gemm.DeepGemmQuantScaleFMT -> (power-of-two scale, packed four to an int32)
SCALE_FORMATS = {"FLOAT32": (False, False), "FLOAT32_CEIL_UE8M0": (True, False), "UE8M0": (True, True)}

# Against the fp64 product, relative to a group's largest magnitude: half an e4m3 step of the top binade (2**-4),
# doubled because a power-of-two scale may leave one binade unused.
TOLERANCE = 2.0**-3

# Triton's interpreter truncates to BF16 and misrounds some e4m3 values; CPU tests round by hand, the GPU in hardware.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _nearest_bf16(x):
    """fp32 -> BF16 -> fp32, to nearest even."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _nearest_e4m3(x):
    """fp32 within [-448, 448] -> e4m3, to nearest even."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 0xFF, 121)  # 2**-6 is the smallest normal
        step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        magnitude = (tl.abs(x) / step + 8388608.0 - 8388608.0) * step  # adding 2**23 rounds to an integer
        x = (magnitude.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def _gated_silu_quant_kernel(
    input_ptr,  # [rows, 2 * hidden] bf16: gate, then up
    code_ptr,  # [rows, hidden] e4m3
    scale_ptr,  # fp32, or int32 when PACKED
    bounds_ptr,  # masked: rows of each expert; packed experts: exclusive end of each expert; otherwise unused
    rows, capacity, scale_expert_stride, scale_group_stride,
    limit, alpha, beta,
    HIDDEN: tl.constexpr, MASKED: tl.constexpr, ALIGNMENT: tl.constexpr, CLAMP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, PACKED: tl.constexpr, EPS: tl.constexpr, FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):
    expert = tl.program_id(2)
    # [first, last): the expert's rows, counted from the first row of the tensor.
    first = 0
    last = rows
    slot = 0  # the row whose scale is the first of the expert's scale slab
    if MASKED:
        slot = expert * capacity
        first = slot
        last = first + tl.load(bounds_ptr + expert)
    elif ALIGNMENT:
        previous = tl.load(bounds_ptr + expert - 1, mask=expert > 0, other=0)
        first = tl.cdiv(previous, ALIGNMENT) * ALIGNMENT
        last = tl.load(bounds_ptr + expert)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    inside = group < HIDDEN // GROUP
    for start in range(first + tl.program_id(0) * ROWS, last, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        live = (row < last)[:, None] & inside[None, :]
        source = input_ptr + row.to(tl.int64)[:, None, None] * (2 * HIDDEN) + column
        gate = tl.load(source, mask=live[:, :, None], other=0.0).to(tl.float32)
        up = tl.load(source + HIDDEN, mask=live[:, :, None], other=0.0).to(tl.float32)
        if CLAMP:
            gate = tl.minimum(gate, limit)
            up = tl.maximum(tl.minimum(up, limit), -limit)
        silu = tl.div_rn(gate, 1.0 + tl.exp(-gate * alpha))
        y = _nearest_bf16((up + beta) * silu)

        largest = tl.maximum(tl.max(tl.abs(y), axis=2), EPS)
        scale = largest * (1.0 / FP8_MAX)
        if POWER_OF_TWO:
            # Any mantissa bit carries into the exponent field: the next power of two, exactly.
            exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
            scale = (exponent << 23).to(tl.float32, bitcast=True)
        code = tl.minimum(tl.maximum(tl.div_rn(y, tl.broadcast_to(scale[:, :, None], y.shape)), -FP8_MAX), FP8_MAX)
        target = code_ptr + row.to(tl.int64)[:, None, None] * HIDDEN + column
        tl.store(target, _nearest_e4m3(code), mask=live[:, :, None])

        scales = scale_ptr + expert * scale_expert_stride + (row - slot).to(tl.int64)
        if PACKED:
            word = tl.sum(tl.where(live, exponent, 0) << (8 * tl.arange(0, GROUPS))[None, :], axis=1)
            tl.store(scales + tl.program_id(1) * scale_group_stride, word, mask=row < last)
        else:
            tl.store(scales[:, None] + group[None, :] * scale_group_stride, scale, mask=live)


def _check(rows: torch.Tensor, scale_format: str) -> None:
    if rows.dtype != torch.bfloat16 or not rows.is_contiguous() or rows.shape[-1] % (2 * GROUP):
        raise ValueError(
            f"the expert activation takes contiguous BF16 rows of gate and up in multiples of {2 * GROUP}; found "
            f"{rows.dtype}, shape {tuple(rows.shape)}. Use a moe_intermediate_size in multiples of {GROUP}."
        )
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale format {scale_format!r} is not one of {sorted(SCALE_FORMATS)}")


def _launch(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bounds: torch.Tensor | None, capacity: int,
    alignment: int, scale_format: str, limit: float | None, alpha: float, beta: float,
) -> None:
    hidden = codes.shape[-1]
    experts = 1 if bounds is None else bounds.shape[0]
    power_of_two, packed = SCALE_FORMATS[scale_format]
    columns = triton.cdiv(hidden, GROUPS * GROUP)
    masked = bounds is not None and not alignment
    # Packed experts get the programs that the average expert needs; those of a fuller one loop.
    most = triton.cdiv(capacity if masked else triton.cdiv(len(rows), experts), ROWS)
    tiles = min(most, max(1, MAX_PROGRAMS // (columns * experts)))
    _gated_silu_quant_kernel[(tiles, columns, experts)](
        rows, codes, scales, rows if bounds is None else bounds,
        len(rows), capacity, scales.stride(0) if scales.ndim == 3 else 0, scales.stride(-1),
        0.0 if limit is None else limit, alpha, beta,
        HIDDEN=hidden, MASKED=masked, ALIGNMENT=alignment, CLAMP=limit is not None,
        POWER_OF_TWO=power_of_two, PACKED=packed, EPS=EPS, FP8_MAX=FP8_MAX, ROWS=ROWS, GROUPS=GROUPS, GROUP=GROUP,
        num_warps=NUM_WARPS,
    )


def gated_silu_quant_contiguous(
    rows: torch.Tensor,  # [rows, 2 * hidden] bf16
    codes: torch.Tensor | None = None,  # [rows, hidden] e4m3, out
    *,
    scale_format: str,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    expert_ends: torch.Tensor | None = None,  # [experts] int32: exclusive end of each expert's rows
    alignment: int = 0,  # an expert starts at the previous end rounded up to it
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, hidden] and column-major scales [rows, groups]; without `expert_ends` every row is live."""
    _check(rows, scale_format)
    count, hidden = rows.shape[0], rows.shape[1] // 2
    if codes is None:
        codes = torch.empty(count, hidden, dtype=torch.float8_e4m3fn, device=rows.device)
    packed = SCALE_FORMATS[scale_format][1]
    columns = triton.cdiv(hidden // GROUP, GROUPS) if packed else hidden // GROUP
    # TMA wants each column of scales to start on 16 bytes.
    scales = torch.empty(
        columns, triton.cdiv(count, 4) * 4, dtype=torch.int32 if packed else torch.float32, device=rows.device
    ).T[:count]
    _launch(rows, codes, scales, expert_ends, 0, alignment, scale_format, limit, alpha, beta)
    return codes, scales


def gated_silu_quant_masked(
    rows: torch.Tensor,  # [experts, capacity, 2 * hidden] bf16
    counts: torch.Tensor,  # [experts] int32: live rows of each expert
    *,
    scale_format: str,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [experts, capacity, hidden] and scales [experts, capacity, groups], column-major within an expert."""
    _check(rows, scale_format)
    experts, capacity, hidden = rows.shape[0], rows.shape[1], rows.shape[2] // 2
    codes = torch.empty(experts, capacity, hidden, dtype=torch.float8_e4m3fn, device=rows.device)
    packed = SCALE_FORMATS[scale_format][1]
    columns = triton.cdiv(hidden // GROUP, GROUPS) if packed else hidden // GROUP
    scales = torch.empty(
        experts, columns, capacity, dtype=torch.int32 if packed else torch.float32, device=rows.device
    ).transpose(1, 2)
    _launch(rows.view(-1, 2 * hidden), codes, scales, counts, capacity, 0, scale_format, limit, alpha, beta)
    return codes, scales


def product_reference(
    rows: torch.Tensor, limit: float | None = None, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """The gated product in fp64, not rounded."""
    gate, up = rows.double().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + beta) * gate / (1 + torch.exp(-alpha * gate))


def quantise_reference(y: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and one fp32 scale per group of BF16 `y: [..., hidden]`; packing is a matter of layout and left out."""
    groups = y.float().unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=EPS) * torch.tensor(1.0 / FP8_MAX, dtype=torch.float32)
    if SCALE_FORMATS[scale_format][0]:
        scale = (((scale.view(torch.int32) + 0x7FFFFF) >> 23) << 23).view(torch.float32)
    codes = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale.squeeze(-1)


def reference(
    rows: torch.Tensor, scale_format: str, limit: float | None = None, alpha: float = 1.0, beta: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch: the product in fp64, rounded once to BF16, then quantised per 128 columns."""
    return quantise_reference(product_reference(rows, limit, alpha, beta).to(torch.bfloat16), scale_format)
