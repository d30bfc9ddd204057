"""Recipes that are shipped: they read, name files that exist, and lay [env.on] / [env.off] over [env]."""
import pathlib

import pytest
from prove import recipe, recipe_schema

SMALL = [(name, section) for name in recipe.names() for section in recipe_schema.small(recipe.load(name, None).data)]


def test_every_recipe_reads_and_some_have_a_small_model():
    assert {"deepseek-v4", "nemotron-3.5-lightning"} <= {name for name, _ in SMALL}


@pytest.mark.parametrize("name, section", SMALL)
def test_shipped_recipe_names_files_that_exist(name, section):
    tiny = recipe.load(name, section)
    assert pathlib.Path(tiny.model, "config.json").is_file() and pathlib.Path(tiny.weights_script).is_file()
    for invariant in (True, False):
        assert all(isinstance(value, str) for value in tiny.environment(invariant).values())
        assert not {"on", "off"} & set(tiny.engine_flags(invariant))


def test_environment_of_one_mode_is_laid_over_the_shared_one(tmp_path):
    made = recipe.Recipe("r", tmp_path, False, {"env": {"A": "1", "B": "1", "on": {"B": "2"}, "off": {"C": "3"}}})
    assert made.environment(True) == {"A": "1", "B": "2", "VLLM_BATCH_INVARIANT": "1"}
    assert made.environment(False) == {"A": "1", "B": "1", "C": "3", "VLLM_BATCH_INVARIANT": "0"}
