"""The start-up policy: under VLLM_BATCH_INVARIANT=1 an engine keeps its bits or says, once, everything in the way.

Invariant: `enforce` raises one error that lists *every* setting outside what is supported, each with what was found,
what is expected and what to do; with none it does nothing. Nothing is corrected and nothing falls back.

A family of models has a table of rules, one a setting. A rule that cannot read its setting, because another vLLM
release renamed it, is a violation too: a rule is never lost. To support another family, add a `Family`; a model of no
family is left to upstream's own checks.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What the configuration does not say about the machine."""

    capability: tuple[int, int] | None  # of the CUDA device; None on another platform
    deep_gemm: bool  # installed, enabled and usable for dense layers
    moe_deep_gemm: bool  # enabled for experts
    humming: str = "not installed"  # or "usable", or the setting that changes what its kernels compute


@dataclass(frozen=True)
class Rule:
    setting: str  # as the user writes it
    read: Callable[[Any, Facts], object]
    allowed: Callable[[object], bool]
    expected: str
    remedy: str


@dataclass(frozen=True)
class Family:
    name: str
    architectures: frozenset[str]
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Violation:
    setting: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.setting}: found {self.found}, expected {self.expected}. {self.remedy}"


class PolicyError(ValueError):
    """Every violation at once."""

    def __init__(self, family: str, violations: list[Violation]):
        self.violations = violations
        listed = "\n".join(f"  {number}. {violation}" for number, violation in enumerate(violations, 1))
        super().__init__(
            f"VLLM_BATCH_INVARIANT=1 cannot keep {family}'s bits with {len(violations)} setting(s) of this engine:\n"
            f"{listed}\nChange them, or unset VLLM_BATCH_INVARIANT to run without the guarantee."
        )


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda found: found in values


def _is(value: object) -> Callable[[object], bool]:
    return lambda found: found == value


def _unset(found: object) -> bool:
    return found is None or found == {} or found == []


UNPROVEN = "It has not been proven yet."
# Combines that add an expert's rows at the token's owner, in fp32 and slot order, whatever the number of ranks.
EXPERT_EXCHANGES = ("deepep_low_latency",)
ATTENTION_BACKENDS = ("FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41")
CAPABILITIES = ((9, 0), (10, 0), (10, 3))


def _parallel(field: str, flag: str, remedy: str) -> Rule:
    return Rule(flag, lambda c, _: getattr(c.parallel_config, field), _is(1), "1", remedy)


def _off(section: str, field: str, flag: str, remedy: str) -> Rule:
    return Rule(flag, lambda c, _: getattr(getattr(c, section), field), _is(False), "off", remedy)


def _absent(field: str, flag: str, remedy: str) -> Rule:
    return Rule(flag, lambda c, _: getattr(c, field), _unset, "none", remedy)


def _expert_exchange(config, _) -> str:
    """How expert rows travel between data-parallel ranks; tensor parallelism has its own rule."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return "none"
    return parallel.all2all_backend if parallel.enable_expert_parallel else "experts split over ranks"


def _attention_backend(config, facts: Facts) -> str:
    """The backend's name. Without a choice upstream takes FlashMLA, except V4.1 on SM100 (mega attention)."""
    backend = config.attention_config.backend
    if backend is not None:
        return backend.name
    v41 = any("V41" in name for name in config.model_config.architectures)
    mega = v41 and facts.capability is not None and facts.capability[0] == 10
    return "FLASHMLA_MEGA_ATTN_DSV41 (the default)" if mega else ATTENTION_BACKENDS[0]


def _linear_backends(config, _) -> tuple[str, ...]:
    """Every backend that some linear layer may take."""
    per_quant = config.kernel_config.linear_backend_per_quant or {}
    return (config.kernel_config.linear_backend, *per_quant.values())


def _router(config, _) -> tuple[int, int]:
    return config.model_config.hf_config.n_routed_experts, config.model_config.hf_config.num_experts_per_tok


DEEPSEEK_V4 = Family(
    "DeepSeek-V4",
    frozenset({"DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM"}),
    (
        # The machine
        Rule("GPU", lambda _, f: f.capability, _one_of(*CAPABILITIES), "CUDA compute capability 9.0, 10.0 or 10.3",
             "Run on Hopper, or on Blackwell (unproven); other devices run other kernels."),
        Rule("DeepGEMM", lambda _, f: f.deep_gemm, _is(True), "usable",
             "Install vLLM's deep_gemm and leave VLLM_USE_DEEP_GEMM at 1: the stand-ins choose a kernel by the batch."),
        Rule("VLLM_MOE_USE_DEEP_GEMM", lambda _, f: f.moe_deep_gemm, _is(True), "1",
             "Unset it: the experts run on DeepGEMM."),
        Rule("VLLM_USE_V2_MODEL_RUNNER", lambda c, _: c.use_v2_model_runner, _is(True), "model runner V2",
             "Unset it, and drop the feature that makes vLLM take runner V1, which checks no attention backend."),
        # Ranks
        _parallel("tensor_parallel_size", "--tensor-parallel-size",
                  "Its reductions depend on the number of ranks; use data and expert parallelism."),
        _parallel("pipeline_parallel_size", "--pipeline-parallel-size", UNPROVEN),
        _parallel("decode_context_parallel_size", "--decode-context-parallel-size",
                  "It splits a token's attention over ranks."),
        _parallel("prefill_context_parallel_size", "--prefill-context-parallel-size",
                  "It splits a prompt's attention over ranks."),
        Rule("--all2all-backend", _expert_exchange, _one_of("none", *EXPERT_EXCHANGES),
             f"one rank, or --enable-expert-parallel with {' or '.join(EXPERT_EXCHANGES)}",
             "The other combines add partial sums a rank, so the number of ranks enters."),
        _off("parallel_config", "use_ubatching", "--enable-dbo / --ubatch-size",
             "Micro-batches cut a step by its number of tokens."),
        _off("parallel_config", "enable_eplb", "--enable-eplb", UNPROVEN),
        _off("parallel_config", "enable_elastic_ep", "--enable-elastic-ep", UNPROVEN),
        # What is added to the model
        _absent("speculative_config", "--speculative-config", UNPROVEN),
        _absent("lora_config", "--enable-lora", UNPROVEN),
        _absent("kv_transfer_config", "--kv-transfer-config / --kv-offloading-size", UNPROVEN),
        _absent("watermark_config", "watermarking", "It changes the sampled distribution."),
        # Attention and its cache
        Rule("--attention-backend", _attention_backend, _one_of(*ATTENTION_BACKENDS), "FLASHMLA_SPARSE",
             "Pass --attention-backend FLASHMLA_SPARSE; the others decode with other arithmetic than they prefill."),
        Rule("attention_config.backend_per_kind", lambda c, _: c.attention_config.backend_per_kind, _unset, "none",
             "Drop it: every layer runs FLASHMLA_SPARSE."),
        Rule("--kv-cache-dtype", lambda c, _: c.cache_config.cache_dtype, _one_of("auto", "fp8", "fp8_ds_mla"), "fp8",
             "Decode gathers rows of the fp8_ds_mla format."),
        Rule("--kv-cache-dtype-skip-layers", lambda c, _: c.cache_config.kv_cache_dtype_skip_layers, _unset, "none",
             "All layers share one format."),
        _off("cache_config", "swa_bounded_replay", "--swa-bounded-replay",
             "It recomputes the window after a prefix hit approximately; patch replay-exact turns it off."),
        _off("cache_config", "kv_sharing_fast_prefill", "--kv-sharing-fast-prefill", UNPROVEN),
        Rule("attention_config.indexer_kv_dtype", lambda c, _: c.attention_config.indexer_kv_dtype,
             _one_of("auto", "fp8"), "fp8", UNPROVEN),
        _off("attention_config", "indexer_sparse_logits", "attention_config.indexer_sparse_logits",
             "Its candidate blocks come from a Top-K whose ties follow the kernel."),
        Rule("attention_config.hisparse_config", lambda c, _: c.attention_config.hisparse_config, _unset, "none",
             UNPROVEN),
        # Kernels
        Rule("--linear-backend", _linear_backends, lambda found: set(found) <= {"auto", "deep_gemm"}, "deep_gemm",
             "Leave it at auto or set deep_gemm, here and in linear_backend_per_quant: others choose a kernel by M."),
        Rule("--moe-backend", lambda c, _: c.kernel_config.moe_backend, _one_of("auto", "deep_gemm"), "deep_gemm",
             "Leave it at auto or set deep_gemm."),
        # The checkpoint
        Rule("--dtype", lambda c, _: str(c.model_config.dtype), _is("torch.bfloat16"), "bfloat16",
             "The kernels' contract is BF16 between operators."),
        Rule("quantization", lambda c, _: c.model_config.quantization, _is("deepseek_v4_fp8"), "deepseek_v4_fp8",
             "Use the checkpoint's own block-FP8 format."),
        Rule("expert_dtype", lambda c, _: getattr(c.model_config.hf_config, "expert_dtype", "fp4"), _is("fp8"), "fp8",
             "Use a checkpoint with FP8 experts; the MXFP4 kernels are unproven."),
        Rule("n_routed_experts, num_experts_per_tok", _router, _one_of((256, 6), (384, 6)), "(256, 6) or (384, 6)",
             "Only these sizes have the row-wise router kernel."),
        Rule("vision_n_layers", lambda c, _: getattr(c.model_config.hf_config, "vision_n_layers", 0), _is(0), "0",
             "The image encoder is unproven: use the text model."),
    ),
)  # fmt: skip


def _check(rule: Rule, config: Any, facts: Facts) -> Violation | None:
    try:
        found = rule.read(config, facts)
    except AttributeError as error:
        return Violation(rule.setting, f"nothing to read ({error})", rule.expected,
                         "This vLLM is not one the policy was written for: use a pinned release or port the rule.")
    if rule.allowed(found):
        return None
    return Violation(rule.setting, str(found), rule.expected, rule.remedy)


def families() -> tuple[Family, ...]:
    from vllm.zero_mismatch.policy_nemotron_h import NEMOTRON_H

    return DEEPSEEK_V4, NEMOTRON_H


def family_of(config: Any) -> Family | None:
    names = set(config.model_config.architectures) if config.model_config is not None else set()
    return next((family for family in families() if names & family.architectures), None)


def violations(config: Any, facts: Facts) -> list[Violation]:
    """Every rule of the model's family that `config` (a VllmConfig) breaks; empty when it may start."""
    family = family_of(config)
    found = [_check(rule, config, facts) for rule in family.rules] if family else []
    return [violation for violation in found if violation is not None]


def _humming(envs) -> str:
    from vllm.utils.import_utils import has_humming

    changed = [name for name, kept in (("VLLM_HUMMING_USE_F16_ACCUM", (False,)),
                                       ("VLLM_HUMMING_INPUT_QUANT_CONFIG", (None, {})),
                                       ("VLLM_HUMMING_MOE_GEMM_TYPE", (None, "auto", "indexed")))
               if getattr(envs, name) not in kept]  # fmt: skip
    return ", ".join(changed) or "usable" if has_humming() else "not installed"


def _facts() -> Facts:
    import vllm.envs as envs
    from vllm.platforms import current_platform
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return Facts(
        capability=None if capability is None else (capability.major, capability.minor),
        deep_gemm=is_deep_gemm_supported(),
        moe_deep_gemm=envs.VLLM_MOE_USE_DEEP_GEMM,
        humming=_humming(envs),
    )


def enforce(config: Any) -> None:
    """Called with the final VllmConfig. Raises PolicyError with every violation, or returns."""
    family = family_of(config)
    if family is None:
        return
    found = violations(config, _facts())
    if found:
        raise PolicyError(family.name, found)
