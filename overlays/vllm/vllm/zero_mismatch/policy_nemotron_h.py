"""What a batch-invariant Nemotron-H engine may be started with; `policy.py` says how a violation is reported."""
from vllm.zero_mismatch.policy import (
    CAPABILITIES, UNPROVEN, Family, Rule, _absent, _is, _linear_backends, _off, _one_of, _parallel,
)  # fmt: skip

# Keys of 32 positions in order, at every batch and for BF16 and FP8 caches alike. FlashAttention 3 keeps one split
# under batch invariance too, but has not been proven with this model.
HYBRID_ATTENTION = "TRITON_ATTN"


def _hybrid_attention(config, _) -> str:
    backend = config.attention_config.backend
    return "the default" if backend is None else backend.name


def _kernels(named, config) -> str:
    """A choice of kernels, and whether the checkpoint is quantised: the proven choice depends on it."""
    return f"{named}, {'BF16' if config.model_config.quantization is None else 'quantised'}"


def _linear(config, _) -> str:
    return _kernels(" and ".join(sorted(set(_linear_backends(config, _)))), config)


def _experts(config, _) -> str:
    return _kernels(config.kernel_config.moe_backend, config)


def _humming(config, facts) -> str:
    return "not needed" if config.model_config.quantization is None else facts.humming


def _aligned(tokens: int | None, config) -> str:
    """A user's block or match unit, judged by the model's chunk."""
    chunk = config.model_config.get_mamba_chunk_size()
    return "aligned" if tokens is None or tokens % chunk == 0 else f"{tokens}, chunks of {chunk}"


def _block(config, _) -> str:
    cache = config.cache_config
    return _aligned(cache.block_size if cache.user_specified_block_size else None, config)


def _mamba_sizes(config, _) -> str:
    from vllm.zero_mismatch.mamba2_mixer import sizes_of

    try:
        sizes_of(config)
    except ValueError as error:
        return str(error)
    return "supported"


NEMOTRON_H = Family(
    "Nemotron-H",
    frozenset({"NemotronHForCausalLM"}),
    (
        Rule("GPU", lambda _, f: f.capability, _one_of(*CAPABILITIES), "CUDA compute capability 9.0, 10.0 or 10.3",
             "Run on Hopper, or on Blackwell (unproven); other devices run other kernels."),
        Rule("VLLM_USE_V2_MODEL_RUNNER", lambda c, _: c.use_v2_model_runner, _is(True), "model runner V2",
             "Unset it, and drop the feature that makes vLLM take runner V1."),
        _parallel("tensor_parallel_size", "--tensor-parallel-size",
                  "Its reductions depend on the number of ranks."),
        _parallel("pipeline_parallel_size", "--pipeline-parallel-size", UNPROVEN),
        _parallel("data_parallel_size", "--data-parallel-size", "Start one engine a rank. " + UNPROVEN),
        _parallel("decode_context_parallel_size", "--decode-context-parallel-size",
                  "It splits a token's attention over ranks."),
        _parallel("prefill_context_parallel_size", "--prefill-context-parallel-size",
                  "It splits a prompt's attention over ranks."),
        _off("parallel_config", "use_ubatching", "--enable-dbo / --ubatch-size",
             "Micro-batches cut a step by its number of tokens."),
        _off("parallel_config", "enable_eplb", "--enable-eplb", UNPROVEN),
        _off("parallel_config", "enable_elastic_ep", "--enable-elastic-ep", UNPROVEN),
        _absent("speculative_config", "--speculative-config", "A ring has no rows for drafts that are rejected."),
        _absent("lora_config", "--enable-lora", UNPROVEN),
        _absent("kv_transfer_config", "--kv-transfer-config / --kv-offloading-size", UNPROVEN),
        _absent("watermark_config", "watermarking", "It changes the sampled distribution."),
        # Mamba-2
        Rule("--mamba-backend", lambda c, _: c.mamba_config.backend.name, _is("TRITON"), "triton",
             "Leave it unset: the replay takes the place of upstream's decode kernels."),
        _off("mamba_config", "enable_stochastic_rounding", "--enable-mamba-cache-stochastic-rounding",
             "The state must be a function of the tokens."),
        _off("cache_config", "use_replayssm", "--use-replayssm", "Its ring has another arithmetic."),
        Rule("--mamba-ssm-cache-dtype", lambda c, _: c.cache_config.mamba_ssm_cache_dtype, _is("float32"), "float32",
             "A rounded state would depend on where steps end."),
        Rule("--mamba-cache-dtype", lambda c, _: c.cache_config.mamba_cache_dtype, _one_of("auto", "bfloat16"), "auto",
             "The convolution's window holds activations as they are."),
        Rule("--block-size", _block, _is("aligned"), "unset, or a multiple of the chunk size",
             "Unset it: a cached state must be the state at a chunk's start."),
        Rule("--prefix-match-unit", lambda c, _: _aligned(c.cache_config.prefix_match_unit, c), _is("aligned"),
             "unset, or a multiple of the chunk size", "Unset it: a prefix hit must end at a chunk's start."),
        Rule("Mamba-2 sizes", _mamba_sizes, _is("supported"), "sizes the replay's tiles divide",
             "Unset VLLM_BATCH_INVARIANT for this model."),
        # Attention and kernels
        Rule("--attention-backend", _hybrid_attention, _is(HYBRID_ATTENTION), HYBRID_ATTENTION,
             f"Pass --attention-backend {HYBRID_ATTENTION}: the default depends on what is installed."),
        Rule("--kv-cache-dtype", lambda c, _: c.cache_config.cache_dtype,
             _one_of("auto", "bfloat16", "fp8", "fp8_e4m3"), "auto, bfloat16 or fp8", UNPROVEN),
        Rule("torch.compile", lambda c, _: int(c.compilation_config.mode), _is(0), "off",
             "Set VLLM_USE_BREAKABLE_CUDAGRAPH=1 (graphs of the eager kernels) or pass --enforce-eager: Inductor's "
             "fused kernels round where the eager ones do not."),
        Rule("custom_ops", lambda c, _: [op for op in c.compilation_config.custom_ops if op[0] == "-" or op == "none"],
             _is([]), "all", "Switch none off: the norms' own kernels keep a row's bits."),
        Rule("--linear-backend", _linear, _one_of("auto, BF16", "cutlass, quantised"), "auto (BF16) or cutlass (FP8)",
             "Pass --linear-backend cutlass for FP8 projections, whose tiles it chooses by N; others choose by M."),
        Rule("--moe-backend", _experts, _one_of("auto, BF16", "triton, BF16", "humming, quantised"),
             "auto or triton (BF16), or humming (NVFP4)",
             "Pass --moe-backend humming for NVFP4 experts; Marlin's stream-K splits a sum by the batch."),
        Rule("Humming", _humming, _one_of("not needed", "usable"), "usable",
             "Install humming-kernels and unset the VLLM_HUMMING_ variables named: its experts run at its defaults."),
        Rule("--dtype", lambda c, _: str(c.model_config.dtype), _is("torch.bfloat16"), "bfloat16",
             "The kernels' contract is BF16 between operators."),
        Rule("quantization", lambda c, _: c.model_config.quantization, _one_of(None, "modelopt_mixed"),
             "none or modelopt_mixed", "Use the BF16 or the MIXED_PRECISION checkpoint."),
    ),
)  # fmt: skip
