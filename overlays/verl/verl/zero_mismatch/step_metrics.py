"""The bitwise gate as verl's step metrics.

Invariant: `differing_words` is 0 only if on every valid token both logprobs are there, finite, and the same 32 bits. It
holds because the comparison is of the fp32 words (`mismatch_metrics.word_gate`); a token without a logprob becomes NaN
first, and NaN always differs. verl's own metrics subtract exp(p), which is 0 on both sides once p is below -104.

rollout and recomputed: fp32 [B, T]; mask: [B, T], not 0 where a token was sampled, at least once.
"""
import torch
import torch.nn.functional as F
from megatron.zero_mismatch.mismatch_metrics import word_gate

PREFIX = "zero_mismatch"


def word_metrics(rollout: torch.Tensor, recomputed: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """What a step logs. The maximum, mean and k3 leave tokens out that are NaN or infinite; the counts do not."""
    valid = mask.bool()
    gate = word_gate(_filled(recomputed, valid, "old_log_probs"), _filled(rollout, valid, "rollout_log_probs"), valid)
    return {
        f"{PREFIX}/tokens": gate.tokens,
        f"{PREFIX}/differing_words": gate.differing_words,
        f"{PREFIX}/invalid_tokens": gate.invalid_tokens,
        f"{PREFIX}/max_dp": gate.max_dp,
        f"{PREFIX}/mean_dp": gate.mean_dp,
        f"{PREFIX}/k3": gate.k3,
    }


def _filled(logprobs: torch.Tensor, valid: torch.Tensor, name: str) -> torch.Tensor:
    """On the mask's device, with NaN in the columns that were never recorded."""
    if logprobs.dtype != torch.float32:
        raise ValueError(
            f"found {name} in {logprobs.dtype}, expected torch.float32: rounded words cannot be compared; compute the "
            "logprob in fp32 (for the FSDP engine, keep its logits in fp32)"
        )
    lacking = valid.shape[-1] - logprobs.shape[-1]
    if logprobs.dim() != 2 or logprobs.shape[0] != valid.shape[0] or lacking < 0:
        raise ValueError(
            f"found {name} {tuple(logprobs.shape)} and a response mask {tuple(valid.shape)}, expected one row a "
            "response and no column beyond the mask's; slice to the response first"
        )
    return F.pad(logprobs.detach().to(valid.device), (0, lacking), value=float("nan"))
