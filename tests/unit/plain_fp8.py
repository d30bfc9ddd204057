"""UE8M0 block FP8 written out number by number, with Python's exact rationals: what the operators are compared with.

No torch cast and no logarithm: e4m3 is a table of 127 rationals, a scale is found by counting up powers of two.
"""
from bisect import bisect_left
from fractions import Fraction

import torch

E4M3 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)] + [
    (1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def scale_of(largest: Fraction, floor: Fraction) -> Fraction:
    """The smallest power of two that brings max(largest, floor) to at most 448."""
    scale = Fraction(2) ** -60
    while max(largest, floor) > 448 * scale:
        scale *= 2
    return scale


def code_of(x: Fraction) -> Fraction:
    """The nearest e4m3 value; a tie goes to the even code."""
    at = bisect_left(E4M3, abs(x))
    near = [i for i in (at - 1, at) if 0 <= i < len(E4M3)]
    best = min(near, key=lambda i: (abs(E4M3[i] - abs(x)), i % 2))
    return E4M3[best] if x >= 0 else -E4M3[best]


def quantise(block: list[float], floor: float) -> tuple[list[float], float]:
    exact = [Fraction(x) for x in block]
    scale = scale_of(max(map(abs, exact)), Fraction(floor))
    return [float(code_of(x / scale)) for x in exact], float(scale)


def blocks_of(weight: torch.Tensor, size: int = 128):
    """(row, column, block) of each size x size block of a matrix."""
    for i in range(0, weight.shape[0], size):
        for j in range(0, weight.shape[1], size):
            yield i // size, j // size, weight[i : i + size, j : j + size]
