"""Inputs and expected outputs of the expert activation, for its tests on the CPU and on the GPU."""
import torch

from vllm.zero_mismatch.silu_mul_quant import SCALE_FORMATS, product_reference, reference

LIMIT = 10.0  # DeepSeek-V4's swiglu_limit
FORMATS = sorted(SCALE_FORMATS)
HIDDENS = [128, 512, 640]  # one group, one full program, a ragged last program


def data(count: int, hidden: int, seed: int = 0, spread: float = 6.0) -> torch.Tensor:
    """Rows wide enough that the clamp acts on some entries, without products next to a rounding tie."""
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(count, 2 * hidden, generator=generator) * spread).to(torch.bfloat16)
    # An fp32 product within 2**-20 of a BF16 tie may round either way; take its gate away.
    for limit in (None, LIMIT):
        y = product_reference(rows, limit)
        step = torch.exp2(torch.floor(torch.log2(y.abs().clamp(min=1e-30))) - 7)
        to_tie = (((y.abs() / step) % 1) - 0.5).abs()
        rows[:, :hidden][to_tie < 2.0**-11] = 0.0
    return rows


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    got, want = got.contiguous().view(words).cpu(), want.contiguous().view(words).cpu()
    differ = (got != want).nonzero()
    if len(differ):
        first = tuple(differ[0].tolist())
        raise AssertionError(f"{what}: {len(differ)} words differ, first {first}: {got[first]} != {want[first]}")


def packed_words(scale: torch.Tensor) -> torch.Tensor:
    """Four exponent bytes to an int32, the first group in the lowest byte."""
    exponents = (scale.view(torch.int32) >> 23).long()
    exponents = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4)).unflatten(-1, (-1, 4))
    return (exponents << torch.tensor([0, 8, 16, 24])).sum(-1).to(torch.int32)


def expected(rows: torch.Tensor, scale_format: str, limit: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = reference(rows, scale_format, limit)
    return codes, packed_words(scale) if SCALE_FORMATS[scale_format][1] else scale


def spread_masked(rows: torch.Tensor, counts: list[int], capacity: int, fill: float = float("nan")) -> torch.Tensor:
    """The rows, expert by expert, in slabs of `capacity`; empty slots hold NaN."""
    slabs = torch.full((len(counts), capacity, rows.shape[1]), fill, dtype=rows.dtype, device=rows.device)
    for expert, part in enumerate(rows.split(counts)):
        slabs[expert, : len(part)] = part
    return slabs


def spread_contiguous(rows: torch.Tensor, counts: list[int], alignment: int, fill: float = float("nan")):
    """The rows, expert by expert, each expert at a multiple of `alignment`; gaps hold NaN."""
    starts, ends, at = [], [], 0
    for count in counts:
        starts.append(at)
        ends.append(at + count)
        at = -(-(at + count) // alignment) * alignment
    packed = torch.full((at, rows.shape[1]), fill, dtype=rows.dtype, device=rows.device)
    for start, part in zip(starts, rows.split(counts), strict=True):
        packed[start: start + len(part)] = part
    return packed, starts, torch.tensor(ends, dtype=torch.int32, device=rows.device)
