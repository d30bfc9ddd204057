"""Rotary embedding: against complex multiplication, and its inverse."""
import torch

from megatron.zero_mismatch.rotary import rotate


def table(positions=16, turned=4):
    angle = torch.arange(positions)[:, None].double() * torch.tensor([0.3, 0.01]).double()
    return torch.cat([angle.cos(), angle.sin()], -1)


def test_pairs_are_turned_as_complex_numbers():
    x = torch.randn(3, 2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 15])
    got = rotate(x, positions, table())
    turned = torch.view_as_complex(x[..., 3:].reshape(3, 2, 2, 2).contiguous())
    angle = table()[positions].chunk(2, -1)
    want = torch.view_as_real(turned * torch.complex(*angle)[:, None]).flatten(-2)
    assert torch.equal(got[..., :3], x[..., :3]) and torch.allclose(got[..., 3:], want, rtol=1e-14)


def test_back_is_the_inverse_and_the_transpose():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    positions = torch.tensor([1, 2, 3, 9])
    assert torch.allclose(rotate(rotate(x, positions, table()), positions, table(), back=True), x, rtol=1e-13)
    forward, back = (rotate(x, positions, table()) * y).sum(), (x * rotate(y, positions, table(), back=True)).sum()
    assert torch.allclose(forward, back, rtol=1e-13)
