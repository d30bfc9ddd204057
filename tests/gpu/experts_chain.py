"""The routed experts of DeepSeek-V4's tiny model as vLLM runs them, with the tile height and the layout left open."""
import torch
from permute_cases import capacity, routing

from vllm.zero_mismatch.experts_deepgemm import expected_m, tile_height
from vllm.zero_mismatch.experts_permute import permute
from vllm.zero_mismatch.silu_mul_quant import gated_silu_quant_contiguous, gated_silu_quant_masked

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, LIMIT = 256, 6, 4096, 512, 10.0
TILES = (16, 32, 64, 128)


def _codes(*shape: int) -> torch.Tensor:
    """Every finite e4m3 value about equally often."""
    return (torch.randint(0, 127, shape, dtype=torch.uint8, device="cuda")
            | torch.randint(0, 2, shape, dtype=torch.uint8, device="cuda") << 7).view(torch.float8_e4m3fn)


class Experts:
    def __init__(self):
        from vllm.utils import deep_gemm

        torch.manual_seed(0)
        self.dg = deep_gemm
        self.scale_format = deep_gemm.DeepGemmQuantScaleFMT.from_oracle().name
        self.w1 = self._weight(2 * INTERMEDIATE, HIDDEN)
        self.w2 = self._weight(HIDDEN, INTERMEDIATE)

    @staticmethod
    def _weight(n: int, k: int):
        scales = torch.exp2(torch.randint(-14, -10, (EXPERTS, n // 128, k // 128), device="cuda").float())
        return _codes(EXPERTS, n, k), scales

    def inputs(self, tokens: int, kind: str = "uniform"):
        """BF16 rows, the same quantised, experts of each slot, their weights."""
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        generator = torch.Generator().manual_seed(2)
        rows = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().cuda()
        ids = routing(tokens, kind, EXPERTS, TOP_K)[0].cuda()
        weights = torch.rand(tokens, TOP_K, generator=generator).cuda()
        return rows, per_token_group_quant_fp8(rows, 128), ids, weights

    def _grouped(self, rows, weight, out, ends, expected):
        arguments = {} if expected is None else {"expected_m_for_psum_layout": expected}
        self.dg.m_grouped_fp8_gemm_nt_contiguous(rows, weight, out, ends, use_psum_layout=True, **arguments)

    def gemms(self, rows, ends, tile: int, expected: int | None):
        """Both GEMMs and the activation between them: [places, hidden] bf16."""
        places = len(rows[0])
        with self.dg.mk_alignment_scope(tile):
            middle = torch.empty(places, 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
            self._grouped(rows, self.w1, middle, ends, expected)
            activated = gated_silu_quant_contiguous(
                middle, scale_format=self.scale_format, limit=LIMIT, expert_ends=ends, alignment=tile)
            out = torch.empty(places, HIDDEN, dtype=torch.bfloat16, device="cuda")
            self._grouped(activated, self.w2, out, ends, expected)
        return out

    def placed(self, quantised, ids, tile: int):
        """(codes, scales), ends, places: the rows laid out."""
        codes, scales = quantised
        out = torch.empty(capacity(ids.numel(), EXPERTS, tile), HIDDEN, dtype=codes.dtype, device="cuda")
        scales, ends, place = permute(codes, scales, ids, EXPERTS, out, alignment=tile)
        return (out, scales), ends, place

    def combine(self, out, ids, weights, place):
        from vllm.model_executor.layers.fused_moe.deep_gemm_utils import ep_gather

        combined = torch.empty(len(ids), HIDDEN, dtype=torch.bfloat16, device="cuda")
        ep_gather(out, ids, weights, place, None, combined)
        return combined

    def run(self, quantised, ids, weights, tile: int | None = None) -> torch.Tensor:
        """The whole chain as patched vLLM runs it; `tile` overrides the height."""
        tile = tile or tile_height(ids.numel(), EXPERTS)
        rows, ends, place = self.placed(quantised, ids, tile)
        return self.combine(self.gemms(rows, ends, tile, tile), ids, weights, place)

    def stock(self, quantised, ids, weights) -> torch.Tensor:
        """Upstream's scatter, padded to 128 rows, the tile's width left to the padded rows."""
        from vllm.model_executor.layers.fused_moe.deep_gemm_utils import ep_scatter
        from vllm.model_executor.layers.fused_moe.utils import count_expert_num_tokens

        codes, scales = quantised
        places = capacity(ids.numel(), EXPERTS, 128)
        out = torch.empty(places, HIDDEN, dtype=codes.dtype, device="cuda")
        scales_out = torch.zeros(places, scales.shape[1], device="cuda")
        start, ends = (torch.empty(EXPERTS, dtype=torch.int32, device="cuda") for _ in range(2))
        place = torch.empty_like(ids)
        ep_scatter(codes, scales, ids, count_expert_num_tokens(ids, EXPERTS, None), None, start, out, scales_out, ends,
                   place, use_psum_layout=True)
        return self.combine(self.gemms((out, scales_out), ends, 128, None), ids, weights, place)

    def slabs(self, quantised, ids, place, ends, tile: int):
        """The masked layout's (codes, scales) [experts, capacity, ...] and counts, and the slab place of each slot."""
        starts = torch.cat([ends.new_zeros(1), (ends[:-1] + tile - 1) // tile * tile])
        room = -(-len(ids) // 64) * 64
        inside = place - starts[ids.long()] + ids * room
        codes = torch.zeros(EXPERTS * room, HIDDEN, dtype=torch.uint8, device="cuda")
        scales = torch.zeros(EXPERTS * room, HIDDEN // 128, device="cuda")
        token = torch.arange(len(ids), device="cuda")[:, None].expand_as(ids).flatten()
        codes[inside.flatten().long()] = quantised[0].view(torch.uint8)[token]
        scales[inside.flatten().long()] = quantised[1][token]
        shaped = codes.view(torch.float8_e4m3fn).view(EXPERTS, room, -1), scales.view(EXPERTS, room, -1)
        return shaped, ends - starts, inside

    def masked(self, slabs, counts) -> torch.Tensor:
        """The same GEMMs in the masked layout: [experts * capacity, hidden] bf16."""
        room = slabs[0].shape[1]
        middle = torch.empty(EXPERTS, room, 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
        self.dg.fp8_m_grouped_gemm_nt_masked(slabs, self.w1, middle, counts, expected_m(room))
        activated = gated_silu_quant_masked(middle, counts, scale_format=self.scale_format, limit=LIMIT)
        out = torch.empty(EXPERTS, room, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.dg.fp8_m_grouped_gemm_nt_masked(activated, self.w2, out, counts, expected_m(room))
        return out.view(-1, HIDDEN)

    def triton(self, rows, ids, weights) -> torch.Tensor:
        """What VLLM_BATCH_INVARIANT=0 runs: upstream's Triton experts, without the clamp, which moves no time."""
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        config = fp8_w8a8_moe_quant_config(w1_scale=self.w1[1], w2_scale=self.w2[1], block_shape=[128, 128])
        return fused_experts(rows, self.w1[0], self.w2[0], weights, ids, quant_config=config)

    def reference(self, quantised, ids, weights, tokens) -> torch.Tensor:
        """Plain fp32 PyTorch on dequantised values, for the tokens listed; no intermediate is quantised."""
        from vllm.zero_mismatch.silu_mul_quant import product_reference

        codes, scales = quantised
        out = torch.zeros(len(tokens), HIDDEN, dtype=torch.float64, device="cuda")
        for row, token in enumerate(tokens):
            x = codes[token].double() * scales[token].double().repeat_interleave(128)
            for slot in range(TOP_K):
                expert = int(ids[token, slot])
                w1, w2 = (w[0][expert].double() * w[1][expert].double().repeat_interleave(128, 0)
                          .repeat_interleave(128, 1) for w in (self.w1, self.w2))
                y = product_reference((w1 @ x)[None].float().bfloat16(), LIMIT)[0].bfloat16().double()
                out[row] += float(weights[token, slot]) * (w2 @ y)
        return out
