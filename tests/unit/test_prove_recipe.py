"""Recipes that are shipped: they read, name files that exist, and lay [env.on] / [env.off] over [env]."""
import pathlib

import pytest
from prove import recipe

NAMES = sorted(path.parent.name for path in (recipe.ROOT / "recipes").glob("*/recipe.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipe_names_files_that_exist(name):
    tiny = recipe.load(name, tiny=True)
    assert pathlib.Path(tiny.model, "config.json").is_file() and pathlib.Path(tiny.weights_script).is_file()
    for invariant in (True, False):
        assert all(isinstance(value, str) for value in tiny.environment(invariant).values())
        assert not {"on", "off"} & set(tiny.engine_flags(invariant))


def test_environment_of_one_mode_is_laid_over_the_shared_one(tmp_path):
    made = recipe.Recipe("r", tmp_path, False, {"env": {"A": "1", "B": "1", "on": {"B": "2"}, "off": {"C": "3"}}})
    assert made.environment(True) == {"A": "1", "B": "2", "VLLM_BATCH_INVARIANT": "1"}
    assert made.environment(False) == {"A": "1", "B": "1", "C": "3", "VLLM_BATCH_INVARIANT": "0"}
