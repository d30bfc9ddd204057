"""The part of Mamba-2 chunk replay that knows the engine: page layout, a step's tables, the forward of one layer.

Decode rows come first in a step, one token each; then whole prompts or parts of them. Both parts are pieces of chunks
(`mamba2_pieces`); a part of one token is a piece of one row whichever way it came. The convolution is upstream's own:
its prefill and its update kernels share the arithmetic of a row.
"""
import functools

import torch
from vllm.zero_mismatch import mamba2_pieces, mamba2_replay, mamba2_scan

ARCHITECTURES = frozenset({"NemotronHForCausalLM"})


def sizes_of(config) -> tuple[int, int, int, int, int]:
    """(H, P, G, N, Q) of a Nemotron-H model, Q the replay's. config: VllmConfig or anything with its model_config."""
    model = config.model_config
    if not ARCHITECTURES & set(model.architectures):
        raise ValueError(
            f"batch-invariant Mamba-2: found {', '.join(model.architectures)}, expected one of "
            f"{', '.join(sorted(ARCHITECTURES))}. Unset VLLM_BATCH_INVARIANT for this model."
        )
    hf = model.hf_config
    sizes = (hf.mamba_num_heads, hf.mamba_head_dim, hf.n_groups, hf.ssm_state_size, mamba2_replay.CHUNK)
    mamba2_replay.check_sizes(sizes)
    if model.get_mamba_chunk_size() % mamba2_replay.CHUNK:  # cached states lie at multiples of the model's chunk
        raise ValueError(
            f"batch-invariant Mamba-2: found chunk_size={model.get_mamba_chunk_size()}, expected a multiple of "
            f"{mamba2_replay.CHUNK}. Unset VLLM_BATCH_INVARIANT for this model."
        )
    return sizes


def state_shapes(base: tuple, config) -> tuple[tuple[int, ...], ...]:
    """The states of a slot: upstream's (conv window, S), then the ring."""
    return (*base, *mamba2_replay.ring_shapes(sizes_of(config)))


def state_dtypes(base: tuple, config) -> tuple[torch.dtype, ...]:
    """Refuses any S but fp32 here too: the rollout's policy speaks first, other users of the layer do not pass it."""
    if base[1] != torch.float32:
        raise ValueError(
            f"batch-invariant Mamba-2: found an SSM cache of {base[1]}, expected torch.float32. "
            "Pass --mamba-ssm-cache-dtype float32."
        )
    return (*base, *mamba2_replay.ring_dtypes(config.model_config.dtype))


def state_copies(base: tuple) -> tuple:
    """How a block's states are copied to the next block and from a prefix hit: the ring whole, as S is."""
    _, whole = base
    return (*base, whole, whole, whole)  # x, B, (dt, decay)


class Tables:
    """A metadata builder's tables. Decode's has one address for the builder's life; a prefill's are made each step."""

    def __init__(self, vllm_config, kv_cache_spec, device) -> None:
        *_, self.chunk = sizes_of(vllm_config)
        self.device = device
        if kv_cache_spec.mamba_cache_mode == "align" and kv_cache_spec.block_size % self.chunk:
            raise ValueError(
                f"batch-invariant Mamba-2: found a Mamba block of {kv_cache_spec.block_size} tokens, expected a "
                f"multiple of {self.chunk}. Leave --block-size and --mamba-block-size unset."
            )
        most = vllm_config.scheduler_config.max_num_seqs
        graph = vllm_config.compilation_config.max_cudagraph_capture_size
        self.decodes = mamba2_pieces.DecodeTable(max(most, graph or 0), self.chunk, device)

    def decode(self, metadata) -> mamba2_pieces.Pieces | None:
        """Of a step's decode rows, a graph's padding rows included."""
        slots = metadata.state_indices_tensor_d
        if slots is None or slots.shape[0] == 0:
            return None
        return self.decodes.fill(metadata.seq_lens[:slots.shape[0]])

    def prefill(self, computed: torch.Tensor, query_start: torch.Tensor) -> mamba2_pieces.Pieces:
        """computed: [requests] and query_start: [requests + 1], both on the CPU."""
        from vllm.utils.torch_utils import async_tensor_h2d

        def to_device(rows):
            return async_tensor_h2d(rows, dtype=torch.int32, device=self.device)

        return mamba2_pieces.prefill(computed.tolist(), query_start.diff().tolist(), self.chunk,
                                     mamba2_scan.TILE, to_device)


@functools.cache
def _self_test(sizes, device) -> None:
    mamba2_replay.self_test(sizes, device)


def _profile(mixer, projected: torch.Tensor) -> None:
    """The profiling run: compile and prove the kernels, and let the profiler see the largest step's scratch."""
    from vllm.config import get_current_vllm_config_or_none

    config, sizes = get_current_vllm_config_or_none(), sizes_of(mixer)
    _self_test(sizes, projected.device)
    most = config.scheduler_config.max_num_seqs if config is not None else 256
    # Each request adds at most two pieces, the ends of its part, to those that full chunks make, in every cohort.
    mamba2_replay.prefill_scratch(projected.shape[0] // sizes[-1] + 2 * most, sizes, projected.device)


def _step(mixer, xbc: torch.Tensor, dt: torch.Tensor) -> mamba2_replay.Step:
    x, b, c = mixer.split_hidden_states_B_C_fn(xbc)
    return mamba2_replay.Step(x, b, c, dt, mixer.A, mixer.D, mixer.dt_bias, sizes_of(mixer))


def forward(mixer, projected: torch.Tensor, output: torch.Tensor) -> None:
    """`MambaMixer2.conv_ssm_forward`: projected [tokens, gate + conv + H] bf16 -> output [tokens, H * P] bf16."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

    per_layer = get_forward_context().attn_metadata
    metadata = per_layer.get(mixer.prefix) if per_layer is not None else None
    if metadata is None:
        _profile(mixer, projected)
        return
    conv, ssm, *ring = mixer.kv_cache
    cache = mamba2_replay.Cache(ssm, *ring)
    conv = conv if is_conv_state_dim_first() else conv.transpose(-1, -2)
    decodes, tokens = metadata.num_decode_tokens, metadata.num_decode_tokens + metadata.num_prefill_tokens
    _, xbc, dt = projected.split([mixer.tped_intermediate_size, mixer.tped_conv_size, mixer.tped_dt_size], dim=-1)
    if metadata.num_prefills:
        new = causal_conv1d_fn(
            xbc[decodes:tokens].transpose(0, 1), mixer.conv_weights, mixer.conv1d.bias, activation=mixer.activation,
            conv_states=conv, has_initial_state=metadata.has_initial_states_p,
            cache_indices=metadata.state_indices_tensor_p, metadata=metadata,
            query_start_loc=metadata.query_start_loc_p,
        ).transpose(0, 1)  # fmt: skip
        mamba2_replay.prefill(_step(mixer, new, dt[decodes:tokens]), cache, metadata.replay_p,
                              metadata.state_indices_tensor_p, output[decodes:tokens])
    if metadata.num_decodes:
        slots = metadata.state_indices_tensor_d
        new = causal_conv1d_update(
            xbc[:decodes], conv, mixer.conv_weights, mixer.conv1d.bias, mixer.activation, conv_state_indices=slots,
        )  # fmt: skip
        mamba2_replay.decode(_step(mixer, new, dt[:decodes]), cache, metadata.replay_d, slots, output[:decodes])
