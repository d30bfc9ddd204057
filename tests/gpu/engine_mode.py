"""The engine's process-wide settings, on for a file of tests and off again.

vLLM's `init_batch_invariance` (model_executor/determinism/batch_invariant.py:1433 of 0.33.0) replaces aten operators of
the GPU, sets flags of PyTorch's GEMMs and variables of the environment, and has no way back. An actor keeps them for
life. In the process of the other tests they are in the way: the replacements know no fp64, in which references are
computed. Not undone is what a library has read meanwhile: cuBLAS asks for CUBLAS_WORKSPACE_CONFIG once.
"""
import contextlib
import os
import sys

import torch

INVARIANT = "vllm.model_executor.determinism.batch_invariant"


def _flags() -> list[tuple]:
    """(holder, name, value) of what init_batch_invariance sets in PyTorch. Needs torch 2.10."""
    from torch._inductor import config as inductor  # not before vLLM, which sets variables that it reads

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    reductions = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    found = [(matmul, name, (getattr(matmul, name), getattr(matmul, f"{name}_split_k"))) for name in reductions]
    found += [(holder, "fp32_precision", holder.fp32_precision) for holder in (matmul, cudnn.conv, cudnn.rnn)]
    if hasattr(inductor, "batch_invariant"):  # as vLLM asks: not every torch that it runs on has it
        found.append((inductor, "batch_invariant", inductor.batch_invariant))
    return found


def _drop_operators(engine) -> None:
    if engine._batch_invariant_LIB is not None:
        engine._batch_invariant_LIB._destroy()
    engine._batch_invariant_LIB, engine._batch_invariant_MODE = None, False


@contextlib.contextmanager
def as_in_an_actor():
    """Needs VLLM_BATCH_INVARIANT=1, which conftest.py sets."""
    from vllm.model_executor.determinism import batch_invariant as engine

    assert not engine._batch_invariant_MODE, "batch invariance is on already: nothing would be found as it was"
    flags, blas, environment = _flags(), torch.backends.cuda.preferred_blas_library(), dict(os.environ)
    set_here = set()
    try:
        engine.init_batch_invariance()
        set_here = {name for name, value in os.environ.items() if environment.get(name) != value}
        assert engine._batch_invariant_MODE, "VLLM_BATCH_INVARIANT is not 1: vLLM left everything as it was"
        yield
    finally:
        _drop_operators(engine)
        for holder, name, value in flags:
            setattr(holder, name, value)
        torch.backends.cuda.preferred_blas_library(blas)
        for name in set_here:
            if name in environment:
                os.environ[name] = environment[name]
            else:
                os.environ.pop(name, None)


def left_behind() -> list[str]:
    """What tests after these would trip over, in words."""
    engine, envs = (sys.modules.get(name) for name in (INVARIANT, "vllm.envs"))
    found = []
    if engine is not None and engine._batch_invariant_MODE:
        found.append("with the engine's aten operators (use the fixture `actor`)")
    if "VLLM_BATCH_INVARIANT" in vars(envs or object):
        # monkeypatch.setattr "restores" what the module computes at each access by storing it, once for all.
        found.append("with a fixed vllm.envs.VLLM_BATCH_INVARIANT (set the variable of the environment instead)")
    if os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        found.append("without VLLM_BATCH_INVARIANT=1")
    return found
