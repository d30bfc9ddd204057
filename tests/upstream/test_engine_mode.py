"""The way back from the engine's process-wide settings: upstream's own functions, over aten's operators of the CPU."""
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from upstream_source import ROOT, define, stock

from prove.scripts import load

SOURCE = "vllm/model_executor/determinism/batch_invariant.py"
FUNCTIONS = ["enable_batch_invariant_mode", "override_envs_for_invariance", "init_batch_invariance"]
REPLACED = ("mean_batch_invariant", "_log_softmax_batch_invariant", "softmax_batch_invariant", "bmm_batch_invariant",
            "bmm_out_batch_invariant")
mode = load(ROOT / "tests" / "gpu" / "engine_mode.py")


def no_fp64(name, tensor, *_, **__):
    raise KeyError(tensor.dtype)  # upstream's table of tiles


@pytest.fixture
def engine(monkeypatch):
    """Upstream's module as far as it needs no GPU: its operators are put in the place of the CPU's."""
    platform = types.SimpleNamespace(
        dispatch_key="CPU", is_cuda_alike=lambda: True, is_cuda=lambda: False, is_rocm=lambda: False,
        is_xpu=lambda: False, is_device_capability_family=lambda _: False)
    made = types.ModuleType(mode.INVARIANT)
    vars(made).update(
        {name: functools.partial(no_fp64, name) for name in REPLACED}, torch=torch, os=os, current_platform=platform,
        envs=types.SimpleNamespace(VLLM_BATCH_INVARIANT=True), resolve_tuned_matmul_configs=lambda: None,
        _resolve_block_sizes=lambda: None, is_torch_equal_or_newer=lambda _: True, pin_nccl_env=os.environ.update,
        _batch_invariant_MODE=False, _batch_invariant_LIB=None)
    define(stock(SOURCE), FUNCTIONS, vars(made))
    package = types.ModuleType(mode.INVARIANT.rpartition(".")[0])
    package.batch_invariant = made
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "as found")
    return made


def product():
    a = torch.arange(12, dtype=torch.float64).view(2, 2, 3)
    return torch.bmm(a, a.mT)


def state():
    from torch._inductor import config

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (dict(os.environ), torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
            torch._C._get_cublas_allow_bf16_reduced_precision_reduction(), matmul.fp32_precision,
            cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, config.batch_invariant)


def test_inside_an_fp64_product_fails_and_behind_it_everything_is_as_it_was(engine):
    want, before = product(), state()
    for _ in range(2):  # a second file of tests turns it on again
        with mode.as_in_an_actor():
            assert all(now != then for now, then in zip(state(), before, strict=True)), "upstream sets each of them"
            with pytest.raises(KeyError, match="float64"):
                product()
            with pytest.raises(KeyError, match="float64"):
                torch.softmax(want, -1)
            os.environ["SET_BY_A_LIBRARY"] = "1"
        assert torch.equal(product(), want) and torch.softmax(want, -1).sum() == 4
        assert os.environ.pop("SET_BY_A_LIBRARY") == "1", "what others set is theirs"
        assert state() == before and mode.left_behind() == []


def test_a_test_that_fails_leaves_nothing_either(engine):
    before = state()
    with pytest.raises(ZeroDivisionError), mode.as_in_an_actor():
        raise ZeroDivisionError
    assert state() == before and product().shape == (2, 2, 2)


def test_without_the_switch_it_is_an_error(engine):
    engine.envs.VLLM_BATCH_INVARIANT = False
    before = state()
    with pytest.raises(AssertionError, match="VLLM_BATCH_INVARIANT is not 1"), mode.as_in_an_actor():
        pass
    assert state() == before


def test_operators_that_stay_on_are_found(engine):
    engine.init_batch_invariance()
    try:
        assert len(mode.left_behind()) == 1 and "aten operators" in mode.left_behind()[0]
        with pytest.raises(AssertionError, match="on already"), mode.as_in_an_actor():
            pass
        assert engine._batch_invariant_MODE, "what another turned on is not undone"
    finally:
        mode._drop_operators(engine)


def test_a_switch_that_is_stored_in_vllms_envs_is_found(monkeypatch):
    """Upstream reads the variable at each access. pytest before 9.2 takes a monkeypatch.setattr back by storing
    what it had read: a test that then turned the switch off through the environment found it on."""
    envs = types.ModuleType("vllm.envs")
    vars(envs).update(environment_variables={"VLLM_BATCH_INVARIANT": lambda: os.getenv("VLLM_BATCH_INVARIANT")})
    define(stock("vllm/envs.py"), ["__getattr__"], vars(envs))
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert mode.left_behind() == []
    envs.VLLM_BATCH_INVARIANT = envs.VLLM_BATCH_INVARIANT
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert envs.VLLM_BATCH_INVARIANT == "1"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert len(mode.left_behind()) == 1 and "environment" in mode.left_behind()[0]


@pytest.mark.parametrize("gpu, found", [(True, "1"), (False, "0")])
def test_the_switch_is_on_before_any_gpu_test_is_imported_and_elsewhere_untouched(gpu, found, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "engine_mode", mode)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    load(pathlib.Path(ROOT, "tests", "gpu", "conftest.py"))
    assert os.environ["VLLM_BATCH_INVARIANT"] == found


FILES = {
    "test_a.py": """
        import sys, types

        def test_leaves_the_operators():
            engine = types.ModuleType("vllm.model_executor.determinism.batch_invariant")
            engine._batch_invariant_MODE = True
            sys.modules[engine.__name__] = engine
        """,
    "test_b.py": """
        import sys

        def test_mends_it():
            sys.modules["vllm.model_executor.determinism.batch_invariant"]._batch_invariant_MODE = False
        """,
}


def test_the_file_that_leaves_something_fails_and_not_the_next_one(tmp_path):
    for name in ("conftest.py", "engine_mode.py"):
        shutil.copy(ROOT / "tests" / "gpu" / name, tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rE", "."], cwd=tmp_path,
                          env=os.environ | {"VLLM_BATCH_INVARIANT": "1"}, capture_output=True, text=True, check=False)
    assert "2 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "ERROR test_a.py::test_leaves_the_operators" in done.stdout and "aten operators" in done.stdout
