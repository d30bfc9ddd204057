"""The trainer's table of vLLM kernels: within tolerance of its PyTorch references, and rows that no packing moves."""
import pytest
import torch
from megatron.zero_mismatch import kernels
from megatron.zero_mismatch.mamba2 import Sizes
from megatron.zero_mismatch.packing import Packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
BF16 = torch.bfloat16
ALONE, PACKED = (300,), (129, 300, 1, 128, 5)  # the sequence of 300 tokens by itself, and second of five


def normal(*shape, dtype=BF16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def cases():
    """name -> (arguments by tokens, call): the first `tokens` arguments are cut to the sequence, the rest is shared."""
    hidden, m = 512, Sizes(16, 64, 8, 128, 128)
    conv = m.x_width + 2 * m.bc_width

    def projected(tokens):
        return normal(tokens, m.x_width + conv + m.heads)

    return {
        "linear": (lambda t: normal(t, hidden), lambda k, x, p: k.linear(x, normal(1536, hidden) / 20)),
        "rms_norm": (lambda t: normal(t, hidden), lambda k, x, p: k.rms_norm(x, normal(hidden), 1e-5)),
        "add_rms_norm": (lambda t: normal(t, hidden),
                         lambda k, x, p: torch.cat(k.add_rms_norm(x, x.flip(-1).contiguous(), normal(hidden), 1e-5))),
        "gated_rms_norm": (projected, lambda k, x, p: k.gated_rms_norm(
            x[:, m.x_width:2 * m.x_width].contiguous(), x[:, :m.x_width], normal(m.x_width), 1e-5, 128)),
        "relu2": (lambda t: normal(t, hidden), lambda k, x, p: k.relu2(x)),
        "conv1d": (projected, lambda k, x, p: k.conv1d(
            x[:, m.x_width:m.x_width + conv], normal(conv, 1, 4)[:, 0], normal(conv), p)),
        "mamba2": (projected, lambda k, x, p: k.mamba2(
            x[:, m.x_width:m.x_width + conv].contiguous(), x[:, -m.heads:], -normal(16, dtype=torch.float32).exp(),
            normal(16), normal(16) - 4, p, m)),
        "attention": (lambda t: normal(t, 12 * 128), lambda k, x, p: k.attention(
            *(part.unflatten(1, (-1, 128)) for part in x.split([1024, 256, 256], -1)), p, 128**-0.5).flatten(1)),
        "router": (lambda t: normal(t, hidden), lambda k, x, p: torch.cat(k.router_top_k(
            k.router_logits(x, normal(16, hidden, dtype=torch.float32) / 20), normal(16, dtype=torch.float32) / 10, 4,
            True))),
        "experts": (lambda t: normal(t, hidden), lambda k, x, p: k.experts(
            x, normal(16, 256, hidden) / 20, normal(16, hidden, 256) / 20,
            torch.rand(1, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).expand(len(x), 4)
            .contiguous(), (p.positions[:, None] * 3 + torch.arange(4, device="cuda") * 5).remainder(16).int())),
        "logprob": (lambda t: normal(t, 2048), lambda k, x, p: k.logprob(x, p.positions[:, None] * 7 % 2048)),
        "logprob_of_all": (lambda t: normal(t, 2048), lambda k, x, p: k.logprob(
            x, torch.arange(2048, device="cuda").expand(len(x), -1))),
    }  # fmt: skip


@pytest.fixture(scope="module")
def table():
    return kernels.from_vllm(page=1152)


def whole(lengths):
    return Packed(lengths, torch.device("cuda"))


def arguments(make):
    """The sequence of 300 tokens alone, and the same rows between others."""
    own = make(300)
    around = torch.cat([make(129), own, make(1), make(128), make(5)])
    return own, around


def rows(found, tokens, begin, end):
    """Some operators return two blocks of rows, one below the other."""
    return torch.cat([block[begin:end] for block in found.split(tokens)])


@pytest.mark.parametrize("name", cases())
def test_row_keeps_its_bits_in_any_packing(table, name):
    make, call = cases()[name]
    own, around = arguments(make)
    alone = call(table, own, whole(ALONE))
    packed = call(table, around, whole(PACKED))
    assert torch.equal(rows(alone, 300, 0, 300), rows(packed, sum(PACKED), 129, 429))


@pytest.mark.parametrize("name", cases())
def test_kernel_is_within_tolerance_of_its_reference(table, name):
    make, call = cases()[name]
    _, around = arguments(make)
    found, want = (call(k, around, whole(PACKED)).double() for k in (table, kernels.reference()))
    # BF16 rounds at 2**-9; the operators of most roundings have five in a row (mamba2_replay.TOLERANCE).
    assert (found - want).norm() <= 5 * 2**-9 * want.norm()
