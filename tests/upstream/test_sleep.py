"""What prove/sleep.py and `prove train --whole-vocab` take from vLLM 0.33.0 stands in its released source."""
import ast

import pytest
from upstream_source import stock

CUMEM, WORKER = "vllm/device_allocator/cumem.py", "vllm/v1/worker/gpu_worker.py"


def functions(path: str) -> dict[str, ast.FunctionDef]:
    """Also of classes, by "Class.name"."""
    found = {}
    for node in ast.parse(stock(path)).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + one.name: one for one in inner if isinstance(one, ast.FunctionDef)}
    return found


def text(path: str, name: str) -> str:
    return ast.unparse(functions(path)[name])


@pytest.mark.parametrize("path,name,arguments", [
    ("vllm/v1/engine/llm_engine.py", "LLMEngine.sleep", ["self", "level", "mode"]),
    ("vllm/v1/engine/llm_engine.py", "LLMEngine.wake_up", ["self", "tags"]),
    (CUMEM, "CuMemAllocator.get_instance", []),
    ("vllm/distributed/device_communicators/cuda_wrapper.py", "CudaRTLibrary.cudaMemset",
     ["self", "devPtr", "value", "count"]),
])
def test_function_is_there_with_these_arguments(path, name, arguments):
    assert [a.arg for a in functions(path)[name].args.args] == arguments


def test_an_allocation_has_a_handle_of_device_size_address_and_a_tag():
    source = stock("vllm/device_allocator/__init__.py")
    assert "py_device, py_size_or_aligned_size, py_ptr, py_handle" in source
    (data,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "AllocationData"]
    assert {"handle", "tag", "is_asleep"} <= {n.target.id for n in data.body if isinstance(n, ast.AnnAssign)}
    assert "self.pointer_to_data[py_d_mem] = AllocationData(" in stock(CUMEM)


def test_a_sleep_drops_and_keeps_by_these_tags():
    suspend = text("vllm/device_allocator/sleep_mode_backend.py", "CuMemBackend.suspend")
    assert "('runtime', 'cudagraph')" in suspend and "('weights', *offload_tags)" in suspend
    for tag in ("weights", "kv_cache", "workspace", "runtime"):
        assert f'"{tag}"' in stock(WORKER), tag
    assert "named_buffers" in text(WORKER, "Worker.sleep"), "at level 2 a model's buffers are kept, nothing else of it"


def test_the_prefix_cache_forgets_before_the_memory_goes():
    sleep = text("vllm/v1/engine/core.py", "EngineCore.sleep")
    assert "clear_prefix_cache = level >= 1" in sleep and sleep.index("pause_scheduler") < sleep.index(".sleep(level)")


def test_a_fresh_engines_caches_are_zero():
    assert "torch.zeros(buf_size" in text("vllm/v1/worker/utils.py", "allocate_kv_cache")


def test_minus_one_asks_for_the_logprob_of_every_token_and_the_sampled_one_comes_first():
    assert "num_logprobs = self.vocab_size" in text("vllm/v1/worker/gpu/sample/states.py", "SamplingStates.add_request")
    scores = text("vllm/v1/worker/gpu/sample/logprob.py", "compute_topk_scores")
    assert "torch.cat((logprob_token_ids, topk_indices), dim=1)" in scores
    assert "compute_token_logprobs(logits, logprob_token_ids)" in scores
