"""Every flag and variable of every recipe is one that the pinned vLLM has, so none is misspelt."""
import ast

import pytest
import upstream_source
from prove import recipe, recipe_schema

from launch import command


def _tree(path: str) -> ast.Module:
    return ast.parse(upstream_source.stock(path))


@pytest.fixture(scope="module")
def engine_args() -> set[str]:
    body = next(node for node in _tree("vllm/engine/arg_utils.py").body
                if isinstance(node, ast.ClassDef) and node.name == "EngineArgs").body
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


@pytest.fixture(scope="module")
def variables() -> set[str]:
    return {node.value for node in ast.walk(_tree("vllm/envs.py"))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("VLLM_")}


CASES = [(name, section) for name in recipe.names()
         for section in (None, *recipe_schema.small(recipe.load(name, None).data))]


@pytest.mark.parametrize("name, section", CASES)
def test_every_flag_and_variable_is_one_of_vllms(name, section, engine_args, variables):
    made = recipe.load(name, section)
    for invariant in (True, False):
        flags = command.engine(made, invariant) if section is None else made.engine_flags(invariant)
        assert set(flags) <= engine_args
        assert set(made.environment(invariant)) <= variables


def test_the_check_would_find_a_misspelt_flag(engine_args, variables):
    assert "enable_expert_paralel" not in engine_args and "VLLM_BATCH_INVARIENT" not in variables
