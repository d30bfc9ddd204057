"""Recipes that are shipped: they read, name files that exist, and lay [env.on] / [env.off] over [env]."""
import pathlib
import tomllib

import pytest
from prove import recipe

NAMES = sorted(path.parent.name for path in (recipe.ROOT / "recipes").glob("*/recipe.toml"))


SMALL = [(name, section) for name in NAMES
         for section in tomllib.loads((recipe.ROOT / "recipes" / name / "recipe.toml").read_text())
         if section.startswith("tiny")]


@pytest.mark.parametrize("name,section", SMALL)
def test_shipped_recipe_names_files_that_exist(name, section):
    tiny = recipe.load(name, tiny=section)
    assert pathlib.Path(tiny.model, "config.json").is_file() and pathlib.Path(tiny.weights_script).is_file()
    for invariant in (True, False):
        assert all(isinstance(value, str) for value in tiny.environment(invariant).values())
        assert not {"on", "off"} & set(tiny.engine_flags(invariant))


def test_environment_of_one_mode_is_laid_over_the_shared_one(tmp_path):
    made = recipe.Recipe("r", tmp_path, None, {"env": {"A": "1", "B": "1", "on": {"B": "2"}, "off": {"C": "3"}}})
    assert made.environment(True) == {"A": "1", "B": "2", "VLLM_BATCH_INVARIANT": "1"}
    assert made.environment(False) == {"A": "1", "B": "1", "C": "3", "VLLM_BATCH_INVARIANT": "0"}


def test_a_model_lays_its_own_flags_over_the_recipes(tmp_path):
    data = {"model": {"engine": {"on": {"b": 2}}}, "tiny": {"engine": {"a": 3}}, "tiny-b": {"engine": {"on": {"b": 4}}},
            "engine": {"a": 1, "off": {"c": 1}}}
    flags = {tiny: recipe.Recipe("r", tmp_path, tiny, data).engine_flags for tiny in (None, "tiny", "tiny-b")}
    assert [flags[tiny](True) for tiny in flags] == [{"a": 1, "b": 2}, {"a": 3}, {"a": 1, "b": 4}]
    assert [flags[tiny](False) for tiny in flags] == [{"a": 1, "c": 1}, {"a": 3, "c": 1}, {"a": 1, "c": 1}]
    assert recipe.Recipe("r", tmp_path, "tiny-b", data).subject == "r-tiny-b"


def test_a_small_model_the_recipe_has_not_is_refused_with_those_it_has():
    with pytest.raises(ValueError, match=r"no \[tiny-x\] section; --tiny can be tiny, tiny-quantised"):
        recipe.load("nemotron-3.5-lightning", tiny="tiny-x")
