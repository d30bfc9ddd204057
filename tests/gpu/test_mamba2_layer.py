"""On the GPU: what surrounds the replay in a Nemotron-H layer, upstream's own kernels under its real shapes."""
import types

import pytest
import torch
from mamba2_cases import assert_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
WIDTH, DIM = 4, 3072  # the tiny model's convolution: 1024 + 2 * 8 * 128 channels
LENGTH = 300


def _conv_scene(seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(LENGTH, DIM + 1040, generator=generator).to("cuda", torch.bfloat16)
    weight = torch.randn(DIM, WIDTH, generator=generator).to("cuda", torch.bfloat16)
    bias = torch.randn(DIM, generator=generator).to("cuda", torch.bfloat16)
    state = torch.full((3, WIDTH - 1, DIM), float("nan"), device="cuda", dtype=torch.bfloat16)
    return wide, weight, bias, state


def _prefill(x, weight, bias, state, slot, resumed):
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    start = torch.tensor([0, x.shape[0]], dtype=torch.int32)
    nums, batch, offset = compute_causal_conv1d_metadata(start, device=x.device)
    metadata = types.SimpleNamespace(nums_dict=nums, batch_ptr=batch, token_chunk_offset_ptr=offset)
    return causal_conv1d_fn(
        x.transpose(0, 1), weight, bias, activation="silu", conv_states=state.transpose(-1, -2),
        has_initial_state=torch.tensor([resumed], device=x.device),
        cache_indices=torch.tensor([slot], dtype=torch.int32, device=x.device), metadata=metadata,
        query_start_loc=start.to(x.device),
    ).transpose(0, 1)


@pytest.mark.parametrize("prompt", [1, 2, 3, 8, 127, 128, 200])
def test_convolution_decodes_with_the_bits_of_its_prefill(prompt):
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    wide, weight, bias, state = _conv_scene()
    x = wide[:, 1024:1024 + DIM]
    whole = _prefill(x, weight, bias, state, 1, False)
    parts = [_prefill(x[:prompt], weight, bias, state, 2, False)]
    for at in range(prompt, LENGTH):
        row = wide[at:at + 1].clone()[:, 1024:1024 + DIM]
        slots = torch.tensor([[2]], dtype=torch.int32, device="cuda")
        parts.append(causal_conv1d_update(row, state.transpose(-1, -2), weight, bias, "silu",
                                          conv_state_indices=slots))
    assert_same_bits(torch.cat(parts), whole.contiguous(), f"convolution after a prompt of {prompt}")
    assert_same_bits(state[2], state[1], "convolution windows")


@pytest.mark.parametrize("cuts", [(1,), (2, 3, 5), (127, 129), (8, 16, 256)])
def test_convolution_of_a_cut_prompt_equals_the_whole(cuts):
    wide, weight, bias, state = _conv_scene()
    x = wide[:, 1024:1024 + DIM]
    whole = _prefill(x, weight, bias, state, 1, False)
    edges = [0, *cuts, LENGTH]
    parts = [_prefill(x[a:b], weight, bias, state, 2, a > 0) for a, b in zip(edges, edges[1:], strict=False)]
    assert_same_bits(torch.cat(parts), whole.contiguous(), f"convolution, cuts at {cuts}")


@pytest.mark.parametrize("channels,groups", [(1024, 8), (4096, 8)])
def test_gated_norm_row_keeps_its_bits_in_any_batch(channels, groups):
    from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated

    x, wide = (torch.randn(513, n, device="cuda").to(torch.bfloat16) for n in (channels, 2 * channels + 16))
    weight = torch.rand(channels, device="cuda").to(torch.bfloat16)

    def norm(rows):
        return rms_norm_gated(x[rows], weight, None, z=wide[rows, :channels], eps=1e-5, group_size=channels // groups,
                              norm_before_gate=False)

    whole = norm(slice(0, 513))
    for rows in (slice(0, 1), slice(0, 2), slice(5, 6), slice(0, 16), slice(3, 131), slice(0, 257)):
        assert_same_bits(norm(rows), whole[rows], f"rows {rows}")
    z = wide[:, :channels].double()
    gated = (x.double() * z * torch.sigmoid(z)).view(513, groups, -1)
    want = (gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + 1e-5)).view(513, -1) * weight.double()
    assert ((whole.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-6).all()
