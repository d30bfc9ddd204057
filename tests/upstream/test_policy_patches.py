"""The start-up policy at the end of upstream's configuration, and the declaration of support: both arms of each."""
import ast
import types

import pytest
from upstream_source import define, patched, stock

from vllm.zero_mismatch import policy
from vllm.zero_mismatch.policy import Facts, PolicyError

CONFIG = "vllm/config/vllm.py"
SECTIONS = {
    "parallel_config": ("vllm/config/parallel.py", "ParallelConfig"),
    "cache_config": ("vllm/config/cache.py", "CacheConfig"),
    "attention_config": ("vllm/config/attention.py", "AttentionConfig"),
    "kernel_config": ("vllm/config/kernel.py", "KernelConfig"),
    "model_config": ("vllm/config/model.py", "ModelConfig"),
}


def _class(source, name):
    return next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)


def _last_statement(source):
    body = next(n for n in _class(source, "VllmConfig").body if getattr(n, "name", None) == "__post_init__").body
    return ast.unparse(body[-1])


def _bad_config():
    architectures = ["DeepseekV4ForCausalLM"]
    return types.SimpleNamespace(model_config=types.SimpleNamespace(architectures=architectures))


def test_configuration_ends_with_the_policy(monkeypatch):
    monkeypatch.setattr(policy, "_facts", lambda: Facts(None, False, False))
    last = _last_statement(patched(CONFIG))
    with pytest.raises(PolicyError):
        exec(last, {"envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=True), "self": _bad_config()})
    exec(last, {"envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=False), "self": None})  # off: nothing is read


def test_stock_configuration_accepts_what_the_policy_refuses():
    assert "log_enabled_passes" in _last_statement(stock(CONFIG)), "stock ends by logging"
    assert "zero_mismatch" not in stock(CONFIG)


def _fields(path, name):
    """Attributes and properties that a configuration class of this release has."""
    names = set()
    for node in _class(stock(path), name).body:
        if isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


class _Only:
    """Has the fields of one upstream class and no other."""

    def __init__(self, names, known=()):
        self.__dict__.update(dict.fromkeys(names))
        self.__dict__.update(known)


def test_policy_reads_fields_that_this_release_has():
    sections = {name: _Only(_fields(*where)) for name, where in SECTIONS.items()}
    hf_config = types.SimpleNamespace(n_routed_experts=256, num_experts_per_tok=6)
    sections["model_config"].__dict__.update(architectures=["DeepseekV41ForCausalLM"], hf_config=hf_config)
    sections["parallel_config"].__dict__.update(data_parallel_size=2)
    config = _Only(_fields(CONFIG, "VllmConfig"), sections)
    unread = [v for v in policy.violations(config, Facts((9, 0), True, True)) if "nothing to read" in v.found]
    assert unread == []


YES = {
    "vllm/models/deepseek_v4/sparse_mla.py": "DeepseekV4FlashMLABackend",
    "vllm/models/deepseek_v41/sparse_mla.py": "DeepseekV4FlashMLABackend",
    "vllm/models/deepseek_v4/nvidia/flashmla.py": "DeepseekSparseSWAFlashMLABackend",
    "vllm/models/deepseek_v41/nvidia/flashmla.py": "DeepseekSparseSWAFlashMLABackend",
    "vllm/models/deepseek_v4/compressor.py": "CompressorBackend",
    "vllm/models/deepseek_v41/compressor.py": "CompressorBackend",
    "vllm/v1/attention/backends/mla/indexer.py": "DeepseekV4IndexerBackend",
}
NO = {
    "vllm/models/deepseek_v41/sparse_mla.py": "FlashMLAMegaAttnBackend",
    "vllm/v1/attention/backends/mla/sparse_indexer.py": "DeepseekV41SparseIndexerBackend",
}


def _declares(source, name, on_cuda=True):
    """What the class itself says, or None if it says nothing."""
    if not any(getattr(node, "name", None) == "supports_batch_invariance" for node in _class(source, name).body):
        return None
    scope = {"Base": object, "current_platform": types.SimpleNamespace(is_cuda=lambda: on_cuda)}
    method = define(source, [f"{name}.supports_batch_invariance"], scope)[name].supports_batch_invariance
    return method(None)  # `define` strips the classmethod decorator


@pytest.mark.parametrize("path", YES)
def test_flashmla_backends_declare_support(path):
    assert _declares(patched(path), YES[path]) is True


@pytest.mark.parametrize("path", NO)
def test_heirs_that_differ_declare_none(path):
    assert _declares(patched(path), NO[path]) is False


def test_other_platforms_indexers_inherit_no_claim():
    path = "vllm/v1/attention/backends/mla/indexer.py"
    assert _declares(patched(path), YES[path], on_cuda=False) is False


@pytest.mark.parametrize("path", [*YES, *NO])
def test_stock_declares_no_support(path):
    for name in {YES.get(path), NO.get(path)} - {None}:
        assert _declares(stock(path), name) is None
