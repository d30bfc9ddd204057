"""On the GPU: the expert activation in both layouts, and the whole expert chain (GEMM, activation, GEMM) around it."""
import pytest
import torch
from silu_cases import FORMATS, HIDDENS, LIMIT, assert_same_bytes, data, expected, spread_contiguous, spread_masked

from vllm.zero_mismatch.experts_deepgemm import combine_reference, expected_m
from vllm.zero_mismatch.silu_mul_quant import gated_silu_quant_contiguous, gated_silu_quant_masked

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
COUNTS = [3, 0, 70, 1, 129]
ALIGNMENT = 128  # the contiguous layout's row alignment on SM90
EXPERTS, HIDDEN, INTERMEDIATE = len(COUNTS), 1024, 512


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("hidden", HIDDENS)
@pytest.mark.parametrize("scale_format", FORMATS)
def test_contiguous_has_the_bits_of_the_reference(scale_format, hidden, limit):
    rows = data(33, hidden)
    codes, scales = gated_silu_quant_contiguous(rows.cuda(), scale_format=scale_format, limit=limit)
    want_codes, want_scales = expected(rows, scale_format, limit)
    assert_same_bytes(scales, want_scales, "scales")
    assert_same_bytes(codes, want_codes, "codes")


@pytest.mark.parametrize("scale_format", FORMATS)
def test_masked_and_contiguous_rows_have_the_same_bits(scale_format):
    rows = data(sum(COUNTS), INTERMEDIATE).cuda()
    packed, starts, ends = spread_contiguous(rows, COUNTS, ALIGNMENT)
    codes, scales = gated_silu_quant_contiguous(
        packed, scale_format=scale_format, limit=LIMIT, expert_ends=ends, alignment=ALIGNMENT
    )
    slab_codes, slab_scales = gated_silu_quant_masked(
        spread_masked(rows, COUNTS, 256), torch.tensor(COUNTS, dtype=torch.int32, device="cuda"),
        scale_format=scale_format, limit=LIMIT,
    )
    for expert, count in enumerate(COUNTS):
        place = slice(starts[expert], starts[expert] + count)
        assert_same_bytes(slab_codes[expert, :count], codes[place], f"codes of expert {expert}")
        assert_same_bytes(slab_scales[expert, :count], scales[place], f"scales of expert {expert}")


def test_stock_layouts_differ():
    """Counter-test: upstream's two activation kernels give a row other codes, and only one of them clamps."""
    kernels = pytest.importorskip("vllm.model_executor.layers.fused_moe.experts.batched_deep_gemm_moe")
    from vllm.model_executor.layers.quantization.utils.fp8_utils import silu_mul_per_token_group_quant_fp8_colmajor

    rows = data(128, INTERMEDIATE).cuda()
    contiguous, _ = silu_mul_per_token_group_quant_fp8_colmajor(rows, use_ue8m0=False, clamp_limit=LIMIT)
    masked, _ = kernels.persistent_masked_m_silu_mul_quant(
        rows[None], torch.tensor([128], dtype=torch.int32, device="cuda")
    )
    assert int((contiguous.view(torch.uint8) != masked[0].view(torch.uint8)).sum()) > 0


class Experts:
    """Block-FP8 expert weights and the chain that upstream's two layouts run, with our activation."""

    def __init__(self):
        pytest.importorskip("vllm.third_party.deep_gemm", reason="needs vLLM's compiled DeepGEMM")
        from vllm.utils import deep_gemm

        if not deep_gemm.is_deep_gemm_supported():
            pytest.skip("DeepGEMM does not support this GPU")
        self.dg = deep_gemm
        self.scale_format = deep_gemm.DeepGemmQuantScaleFMT.from_oracle().name
        self.w1 = self._weight(2 * INTERMEDIATE, HIDDEN, seed=1)
        self.w2 = self._weight(HIDDEN, INTERMEDIATE, seed=2)

    def _weight(self, n: int, k: int, seed: int):
        from vllm.model_executor.layers.quantization.utils.fp8_utils import deepgemm_post_process_fp8_weight_block

        generator = torch.Generator().manual_seed(seed)
        codes = torch.randn(EXPERTS, n, k, generator=generator).clamp(-4, 4).to(torch.float8_e4m3fn).cuda()
        scale = torch.exp2(torch.randint(-7, -3, (EXPERTS, n // 128, k // 128), generator=generator).float()).cuda()
        return deepgemm_post_process_fp8_weight_block(
            wq=codes, ws=scale, quant_block_shape=(128, 128), use_e8m0=self.dg.is_deep_gemm_e8m0_used()
        )

    def quantise(self, rows: torch.Tensor):
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        return per_token_group_quant_fp8(rows.contiguous(), 128)

    def contiguous(self, rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """Per expert, the rows' outputs in the contiguous layout."""
        packed, starts, ends = spread_contiguous(rows, counts, ALIGNMENT, fill=0.0)
        kind = {"use_psum_layout": True}
        with self.dg.mk_alignment_scope(ALIGNMENT):
            middle = torch.empty(len(packed), 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
            self.dg.m_grouped_fp8_gemm_nt_contiguous(self.quantise(packed), self.w1, middle, ends, **kind)
            activated = gated_silu_quant_contiguous(
                middle, scale_format=self.scale_format, limit=LIMIT, expert_ends=ends, alignment=ALIGNMENT
            )
            out = torch.empty(len(packed), HIDDEN, dtype=torch.bfloat16, device="cuda")
            self.dg.m_grouped_fp8_gemm_nt_contiguous(activated, self.w2, out, ends, **kind)
        return [out[start: start + count] for start, count in zip(starts, counts, strict=True)]

    def masked(self, rows: torch.Tensor, counts: list[int], capacity: int) -> list[torch.Tensor]:
        """The same in the masked layout."""
        slabs = spread_masked(rows, counts, capacity, fill=0.0)
        live = torch.tensor(counts, dtype=torch.int32, device="cuda")
        codes, scales = self.quantise(slabs.view(-1, HIDDEN))
        quantised = codes.view(slabs.shape), scales.view(EXPERTS, capacity, -1)
        middle = torch.empty(EXPERTS, capacity, 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
        self.dg.fp8_m_grouped_gemm_nt_masked(quantised, self.w1, middle, live, expected_m(capacity))
        activated = gated_silu_quant_masked(middle, live, scale_format=self.scale_format, limit=LIMIT)
        out = torch.empty(EXPERTS, capacity, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.dg.fp8_m_grouped_gemm_nt_masked(activated, self.w2, out, live, expected_m(capacity))
        return [out[expert, :count] for expert, count in enumerate(counts)]


def inputs(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).cuda()


def test_expert_row_keeps_its_bits_in_both_layouts():
    experts, rows = Experts(), inputs(sum(COUNTS))
    contiguous = experts.contiguous(rows, COUNTS)
    for capacity in (256, 512):
        for expert, got in enumerate(experts.masked(rows, COUNTS, capacity)):
            assert_same_bytes(got, contiguous[expert], f"expert {expert}, slab of {capacity}")


@pytest.mark.parametrize("others", [0, 1, 5, 63, 300])
def test_expert_row_keeps_its_bits_next_to_any_rows(others):
    experts, rows = Experts(), inputs(301)
    row = rows[:1]
    alone = experts.contiguous(row, [0, 0, 1, 0, 0])[2]
    crowd = torch.cat([rows[1: 1 + others], row, rows[1: 1 + others]])
    got = experts.contiguous(crowd, [others // 2, others - others // 2, 1 + others, 0, 0])[2]
    assert_same_bytes(got[:1], alone, f"next to {others} rows")


def test_combine_is_the_fp32_sum_in_slot_order():
    """Upstream's ep_gather against the reference that fixes the order (it fuses multiply and add)."""
    utils = pytest.importorskip("vllm.model_executor.layers.fused_moe.deep_gemm_utils")
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(600, HIDDEN, generator=generator).to(torch.bfloat16).cuda()
    place = torch.randperm(600, generator=generator)[:384].view(64, 6).int().cuda()
    weights = torch.rand(64, 6, generator=generator).cuda()
    expert = torch.randint(0, EXPERTS, (64, 6), generator=generator).int().cuda()
    out = torch.empty(64, HIDDEN, dtype=torch.bfloat16, device="cuda")
    utils.ep_gather(rows, expert, weights, place, None, out)
    assert_same_bytes(out, combine_reference(rows, place, weights, expert), "combine")
