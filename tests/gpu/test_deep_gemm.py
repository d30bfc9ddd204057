"""On the GPU: DeepGEMM's dense block-FP8 product and the o_proj einsum give a row the same bits at every M."""
import pytest
import torch
from mm_cases import assert_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
BATCHES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 513, 1024, 2049, 4097)
# q and kv down-projection, q up-projection, output, shared expert: [N, K] of DeepSeek-V4's dense layers
SHAPES = [(1536, 4096), (32768, 1024), (4096, 8192), (1024, 4096), (4096, 512)]


def _deep_gemm():
    return pytest.importorskip("vllm.utils.deep_gemm", reason="needs vLLM's compiled DeepGEMM")


def _weight(n, k, e8m0):
    from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block

    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn).cuda()
    scales = (torch.rand(-(-n // 128), k // 128, generator=generator) + 0.5).cuda()
    return deepgemm_post_process_fp8_weight_block(codes, scales, (128, 128), use_e8m0=e8m0)


@pytest.mark.parametrize("n,k", SHAPES)
def test_dense_fp8_row_keeps_its_bits_at_every_m(n, k):
    deep_gemm = _deep_gemm()
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    e8m0 = deep_gemm.is_deep_gemm_e8m0_used()
    weight = _weight(n, k, e8m0)
    x = torch.randn(max(BATCHES), k, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()

    def product(rows):
        codes, scales = per_token_group_quant_fp8(rows, 128, column_major_scales=True, use_ue8m0=e8m0)
        out = torch.empty(rows.shape[0], n, dtype=torch.bfloat16, device="cuda")
        deep_gemm.fp8_gemm_nt((codes, scales), weight, out, is_deep_gemm_e8m0_used=e8m0)
        return out

    whole = product(x)
    for m in BATCHES:
        assert_same_bits(product(x[-m:]), whole[-m:], f"last {m} rows")


def test_output_einsum_row_keeps_its_bits_at_every_number_of_tokens():
    deep_gemm = _deep_gemm()
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the scale layout of this test is SM90's")
    from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block

    groups, width, rank = 8, 4096, 1024
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(groups * rank, width, generator=generator).to(torch.float8_e4m3fn).cuda()
    flat_scale = (torch.rand(groups * rank // 128, width // 128, generator=generator) + 0.5).cuda()
    weight = deepgemm_post_process_fp8_weight_block(
        flat, flat_scale, (128, 128), deep_gemm.is_deep_gemm_e8m0_used(), is_bmm=True, bmm_batch_size=groups
    )
    codes = torch.randn(groups, max(BATCHES), width, generator=generator).to(torch.float8_e4m3fn).cuda()
    scales = (torch.rand(groups, max(BATCHES), width // 128, generator=generator) + 0.5).cuda()

    def project(rows):
        """Group-major rows with token-contiguous scales, as fused_inv_rope_fp8_quant writes them."""
        a, s = codes[:, rows].contiguous(), scales[:, rows]
        tokens = a.shape[1]
        aligned = deep_gemm.get_tma_aligned_size(tokens, 4)
        laid_out = torch.empty(groups, width // 128, aligned, device="cuda").permute(0, 2, 1)[:, :tokens]
        laid_out.copy_(s)
        out = torch.empty(tokens, groups, rank, dtype=torch.bfloat16, device="cuda")
        operands = (a.transpose(0, 1), laid_out.transpose(0, 1))
        deep_gemm.fp8_einsum("bhr,hdr->bhd", operands, weight, out, recipe=(1, 128, 128))
        return out

    whole = project(slice(None))
    for tokens in BATCHES:
        rows = slice(max(BATCHES) - tokens, None)
        assert_same_bits(project(rows), whole[rows], f"last {tokens} tokens")


PAGE, HEADS, INDEX_DIM = 64, 64, 128


def _paged_scene():
    """Queries, a paged cache of FP8 keys with their fp32 scales, and rows of 0 to 700 entries, a few of them empty."""
    generator = torch.Generator().manual_seed(3)
    lengths = [0 if row % 7 == 3 else 1 + (row * 53) % 700 for row in range(320)]
    pages = 1 + max(lengths) // PAGE
    table = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages).int()
    keys = torch.randn(table.numel(), PAGE, INDEX_DIM, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(table.numel(), PAGE, generator=generator) + 0.5
    codes = keys.view(torch.uint8).view(-1, PAGE * INDEX_DIM)
    cache = torch.cat([codes, scales.view(torch.uint8).view(-1, PAGE * 4)], 1).view(-1, PAGE, 1, INDEX_DIM + 4)
    q = torch.randn(len(lengths), 1, HEADS, INDEX_DIM, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(len(lengths), HEADS, generator=generator)
    return lengths, table, keys, scales, cache.cuda(), q, weights


def _paged_logits(rows, scene, invariant, monkeypatch):
    from vllm.utils import deep_gemm

    lengths, table, _, _, cache, q, weights = scene
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    context = torch.tensor([[lengths[row]] for row in rows], dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context, PAGE, sms)
    return deep_gemm.fp8_fp4_paged_mqa_logits(
        (q[rows].cuda(), None), cache, weights[rows].cuda(), context, table[rows].cuda(), schedule, 1024)


def _far_from_fp64(row, logits, scene):
    """Largest error of a row against fp64, relative to its largest score."""
    lengths, table, keys, scales, _, q, weights = scene
    n = lengths[row]
    k = keys[table[row].long()].double().view(-1, INDEX_DIM)[:n] * scales[table[row].long()].double().view(-1, 1)[:n]
    exact = ((q[row, 0].double() @ k.T).relu() * weights[row].double()[:, None]).sum(0)
    return float((logits[:n].double().cpu() - exact).abs().max() / exact.abs().max())


def test_paged_logits_row_keeps_its_bits_beside_empty_rows(monkeypatch):
    _deep_gemm()
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the empty-row prefetch is SM90's")
    scene = _paged_scene()
    lengths = scene[0]
    rows = list(range(len(lengths)))
    together = _paged_logits(rows, scene, True, monkeypatch)
    for row in [r for r in rows if lengths[r] and r % 3 == 0 or r % 7 == 4]:
        alone = _paged_logits([row], scene, True, monkeypatch)
        assert_same_bits(together[row:row + 1, :lengths[row]], alone[:, :lengths[row]], f"row {row}")
        # FP8 tensor cores keep about 13 bits of a sum; another query's scores would be off by their own size.
        assert _far_from_fp64(row, together[row], scene) < 2e-3, row


def test_stock_paged_logits_give_the_row_after_an_empty_one_another_query(monkeypatch):
    _deep_gemm()
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the empty-row prefetch is SM90's")
    scene = _paged_scene()
    together = _paged_logits(list(range(len(scene[0]))), scene, False, monkeypatch)
    wrong = [row for row in range(len(scene[0])) if scene[0][row] and _far_from_fp64(row, together[row], scene) > 0.1]
    assert wrong and all(scene[0][row - 1] == 0 for row in wrong), wrong
