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


@pytest.fixture
def written(tmp_path):
    def write(name, data):
        (tmp_path / "recipes" / name).mkdir(parents=True)
        (tmp_path / "recipes" / name / "recipe.toml").write_bytes(data)
        return tmp_path
    return write


def test_a_path_is_no_name_of_a_recipe(written):
    root = written("x", b"")
    with pytest.raises(ValueError, match="is a path and no name; there are: x"):
        recipe.load("../recipes/x", None, root)


def test_a_recipe_that_is_its_own_base_says_by_which_way(written):
    written("x", b'base = "y"')
    with pytest.raises(ValueError, match="its own base, by way of x and y and x"):
        recipe.load("x", None, written("y", b'base = "x"'))


def test_a_recipe_that_is_no_text_is_named(written):
    with pytest.raises(ValueError, match="recipe.toml is not TOML"):
        recipe.load("x", None, written("x", b"\xff\xfe"))


@pytest.mark.parametrize("value", [[], {}, {"on": 3}])
def test_a_state_of_another_kind_is_a_finding(value):
    data = recipe.load("deepseek-v4", None).data
    assert any("expected one of proven" in one for one in recipe_schema.findings(data | {"status": {"state": value}}))
