"""On the GPU: decode through the gather has the bits of upstream's own prefill, at any batch size and in a graph."""
import types

import pytest
import torch
from flashmla_cases import HEADS, SCALE, attend, queries, stock_decode
from kv_scene import LAYERS, WINDOW, Scene, assert_same_bits, selected

from vllm.zero_mismatch.fp8_kv_gather import HEAD_DIM, RECORDS, gather, gather_reference
from vllm.zero_mismatch.prefill_decode import PrefillDecode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
LAST, TOKENS = 2199, 32  # one request of 2200 tokens; its last 32 are prefilled together and decoded one by one


def need_engine() -> None:
    pytest.importorskip("vllm._flashmla_C", reason="needs vLLM's compiled FlashMLA")


def one_request(kind: str, record: int = 584) -> Scene:
    positions = list(range(LAST + 1 - TOKENS, LAST + 1))
    width = {"sliding": 0, "csa": 512, "hca": 128}[kind]
    return Scene(RECORDS[record], kind, positions, owner=[0] * TOKENS, device="cuda", top_k=width)


def upstream_prefill(case: Scene, q: torch.Tensor, sink: torch.Tensor, first: int = 0) -> torch.Tensor:
    """deepseek_v4/nvidia/flashmla.py _forward_prefill for one request whose tokens [first, TOKENS) are new."""
    from vllm.models.deepseek_v4.common.ops import combine_topk_swa_indices, dequantize_and_gather_k_cache

    new = TOKENS - first
    seq_len = torch.tensor([LAST + 1], dtype=torch.int32, device="cuda")
    gather_len = torch.tensor([new + WINDOW - 1], dtype=torch.int32, device="cuda")
    compressed = (LAST + 1) // case.ratio if case.topk else 0
    kv = torch.empty(1, compressed + new + WINDOW - 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    local = torch.zeros(new, 1, dtype=torch.int32, device="cuda")
    if case.topk:
        dequantize_and_gather_k_cache(
            kv, case.topk.cache, seq_lens=seq_len // case.ratio, gather_lens=None, block_table=case.topk.block_table,
            block_size=case.topk.cache.shape[1], offset=0,
        )
        local = case.topk.local
        if local is None:  # what the ratio-128 metadata builder writes
            column = torch.arange(case.top_k, device="cuda")
            local = torch.where(column < ((case.positions + 1) // 128)[:, None], column, -1).int()
        local = local[first:].contiguous()
    dequantize_and_gather_k_cache(
        kv, case.window.cache, seq_lens=seq_len, gather_lens=gather_len, block_table=case.window_table,
        block_size=case.window.cache.shape[1], offset=compressed,
    )
    start = torch.tensor([0, new], dtype=torch.int32, device="cuda")
    indices, lengths = combine_topk_swa_indices(
        local, start, seq_len, gather_len, WINDOW, case.ratio, case.top_k, kv.shape[1], compressed
    )
    return attend(q[first:], sink, kv, indices, lengths)


@pytest.mark.parametrize("record", sorted(RECORDS))
@pytest.mark.parametrize("kind", LAYERS)
def test_gather_has_the_bits_of_the_reference(kind, record):
    case = Scene(RECORDS[record], kind, [0, 3, 126, 128, 511, 700], device="cuda")
    cpu = Scene(RECORDS[record], kind, [0, 3, 126, 128, 511, 700])
    rows, indices, lengths = case.run()
    want_rows, want_indices, want_lengths = gather_reference(
        cpu.positions, cpu.request, cpu.window, cpu.topk, cpu.width)
    assert_same_bits(indices, want_indices, "indices")
    assert_same_bits(lengths, want_lengths, "lengths")
    live = want_indices >= 0
    assert_same_bits(rows.cpu()[live], want_rows[live], "rows")


@pytest.mark.parametrize("kind", LAYERS)
def test_decode_has_the_bits_of_prefill(kind):
    need_engine()
    case, (q, sink) = one_request(kind), queries(TOKENS)
    prefill = upstream_prefill(case, q, sink)
    assert_same_bits(attend(q, sink, *case.run()), prefill, f"{kind}: decode in one batch")
    for token in range(0, TOKENS, 5):
        one = slice(token, token + 1)
        assert_same_bits(attend(q[one], sink, *case.run(one)), prefill[one], f"{kind}: token {token} decoded alone")


@pytest.mark.parametrize("kind", LAYERS)
def test_chunked_prefill_has_the_bits_of_prefill(kind):
    need_engine()
    case, (q, sink) = one_request(kind), queries(TOKENS)
    whole = upstream_prefill(case, q, sink)
    for first in (1, 17, 31):
        assert_same_bits(upstream_prefill(case, q, sink, first), whole[first:], f"{kind}: chunk from {first}")


def test_padding_query_gets_zeros():
    need_engine()
    case, (q, sink) = one_request("csa"), queries(TOKENS)
    case.window.lengths[3] = 0
    out = attend(q, sink, *case.run())
    assert (out[3] == 0).all() and out[2].abs().max() > 0


def layer_and_step(case: Scene, sink: torch.Tensor):
    """The attributes that PrefillDecode reads from a layer and a step's metadata."""
    layer = types.SimpleNamespace(
        compress_ratio=case.ratio, window_size=WINDOW, scale=SCALE, attn_sink=sink,
        topk_indices_buffer=case.topk.local if case.topk else None,
        swa_cache_layer=types.SimpleNamespace(kv_cache=case.window.cache),
    )
    swa = types.SimpleNamespace(
        decode_swa_indices=case.window.slots.unsqueeze(1), decode_swa_lens=case.window.lengths,
        token_to_req_indices=case.request,
    )
    return layer, swa, types.SimpleNamespace(block_table=case.topk.block_table if case.topk else None)


def make_decode(case: Scene, sink: torch.Tensor, max_num_seqs: int):
    from vllm.v1.worker import workspace

    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cuda"))
    layer, swa, metadata = layer_and_step(case, sink)
    config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
        speculative_config=None, model_config=types.SimpleNamespace(max_model_len=4096),
    )
    decode = PrefillDecode(layer, config, has_topk=case.topk is not None)
    decode.reserve()
    workspace.lock_workspace()
    cache = case.topk.cache if case.topk else None
    return lambda q, out: decode.run(q, case.positions, out, cache, metadata, swa)


@pytest.mark.parametrize("kind", LAYERS)
def test_slices_change_no_bit(kind):
    need_engine()
    case, (q, sink) = one_request(kind), queries(TOKENS)
    want = attend(q, sink, *case.run())
    for max_num_seqs in (5, 32, 256):
        out = torch.empty_like(q)
        make_decode(case, sink, max_num_seqs)(q, out)
        assert_same_bits(out, want, f"{kind}: slices of {max_num_seqs}")


@pytest.mark.parametrize("kind", LAYERS)
def test_graph_replay_has_the_bits_of_eager(kind):
    need_engine()
    case, (q, sink) = one_request(kind), queries(TOKENS)
    run, out = make_decode(case, sink, 256), torch.empty_like(q)
    run(q, out)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(q, out)
    case.window.lengths[TOKENS // 2:] -= 40  # another step through the same addresses
    case.positions[TOKENS // 2:] -= 1024
    graph.replay()
    replayed, eager = out.clone(), torch.empty_like(q)
    run(q, eager)
    assert_same_bits(replayed, eager, f"{kind}: graph")


def test_stock_decode_differs_from_prefill():
    """Counter-test: upstream's two phases disagree, though both are accurate to BF16."""
    need_engine()
    case, (q, sink) = one_request("csa"), queries(TOKENS)
    prefill, stock = upstream_prefill(case, q, sink), stock_decode(case, q, sink)
    assert int((prefill.view(torch.int16) != stock.view(torch.int16)).sum()) > 0
    scale = max(float(rows.float().abs().max()) for rows in selected(*case.run()))
    assert (prefill.float() - stock.float()).abs().max() <= 2.0**-6 * scale


def test_stock_decode_of_a_token_depends_on_its_batch():
    """Counter-test: the split-KV plan follows the batch."""
    need_engine()
    case, (q, sink) = one_request("csa"), queries(TOKENS)
    one = slice(0, 1)
    together, alone = stock_decode(case, q, sink), stock_decode(case.part(one), q[one], sink)
    assert int((together[one].view(torch.int16) != alone.view(torch.int16)).sum()) > 0


def test_gather_takes_no_host_sync():
    case = one_request("csa")
    args = case.step()
    rows = torch.empty(TOKENS, case.width, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    indices = torch.empty(TOKENS, case.width, dtype=torch.int32, device="cuda")
    lengths = torch.empty(TOKENS, dtype=torch.int32, device="cuda")
    gather(rows, indices, lengths, *args)  # compile
    torch.cuda.set_sync_debug_mode("error")
    try:
        gather(rows, indices, lengths, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cache_writer_keeps_a_rows_bits_on_both_sides_of_1024_tokens():
    """Upstream's writer of q and K takes another grid from 1024 tokens on (fused_deepseek_v4_qnorm_rope_kv_insert)."""
    need_engine()
    pytest.importorskip("vllm._custom_ops", reason="needs vLLM's compiled kernels")
    tokens, page = 1536, 64
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).to(torch.bfloat16).cuda()
    kv = (torch.randn(tokens, HEAD_DIM, generator=generator) * 3).to(torch.bfloat16).cuda()
    angles = torch.rand(tokens, 32, generator=generator) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).cuda()

    def write(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        slots = torch.arange(tokens, device="cuda")[part]
        cache = torch.zeros(tokens // page, page * 584 + 64, dtype=torch.uint8, device="cuda")  # 65 * 576
        rows = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q[part].contiguous(), kv[part].contiguous(), cache, slots, slots, cos_sin, HEADS, 1e-6, page
        )
        return rows, cache

    whole_q, whole_cache = write(slice(0, tokens))
    for part in (slice(0, 1), slice(0, 64), slice(64, 1024)):
        some_q, some_cache = write(part)
        assert_same_bits(some_q, whole_q[part], f"queries {part}")
        if part.stop % page == 0:  # whole pages: data and scales
            pages = slice(part.start // page, part.stop // page)
            assert torch.equal(some_cache[pages], whole_cache[pages]), f"K pages {part}"
