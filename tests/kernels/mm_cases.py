"""Operands and the exact comparison shared by the CPU and GPU tests of the fixed-order products."""
import torch


def operands(m, n, k, x_dtype=torch.bfloat16, w_dtype=torch.bfloat16, seed=0, device="cpu"):
    """x: [m, k], weight: [n, k], the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(x_dtype)
    weight = torch.randn(n, k, generator=generator).to(w_dtype)
    return x.to(device), weight.to(device)


def differing_words(got: torch.Tensor, want: torch.Tensor) -> int:
    assert got.shape == want.shape and got.dtype == want.dtype
    word = {4: torch.int32, 2: torch.int16}[got.element_size()]
    return int((got.contiguous().view(word) != want.contiguous().view(word)).sum())


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Fails with the count, the first coordinate and both values."""
    if count := differing_words(got, want):
        word = {4: torch.int32, 2: torch.int16}[got.element_size()]
        differs = got.contiguous().view(word) != want.contiguous().view(word)
        first = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(
            f"{what}: {count} of {differs.numel()} words differ, first at {first}: "
            f"{got[first].item()!r} != {want[first].item()!r}"
        )
