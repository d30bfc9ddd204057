"""One schema for every recipe: everything wrong is said at once, and a status cannot claim what it does not show."""
import copy
import tomllib

import pytest
from prove import recipe, recipe_schema

SOUND = tomllib.loads("""
[model]
path = "x/y"
vocab = 8
[status]
state = "written"
missing = ["a run"]
[requires]
platform = "cuda"
arch = ["sm90"]
[layout.rollout]
[env]
A = "1"
[engine]
dtype = "bfloat16"
[tiny]
model = "tiny"
weights = "w.py"
vocab = 8
[tiny.status]
state = "proven"
evidence = ["evidence/r.json"]
""")


def changed(path: str, value, data=SOUND) -> dict:
    made = copy.deepcopy(data)
    *tables, key = path.split("/")
    table = made
    for name in tables:
        table = table.setdefault(name, {})
    if value is None:
        del table[key]
    else:
        table[key] = value
    return made


def test_a_sound_recipe_has_no_findings():
    assert recipe_schema.findings(SOUND) == []


@pytest.mark.parametrize("path, value, said", [
    ("engin", {}, r"unknown section ['engin'] (did you mean 'engine'?)"),
    ("model/pth", "x", "[model] pth: no such key (did you mean 'path'?)"),
    ("model/vocab", "8", "[model] vocab = '8': expected a whole number above 0"),
    ("model/vocab", True, "expected a whole number above 0"),
    ("model/path", None, "[model] path is missing"),
    ("requires", None, "section [requires] is missing"),
    ("requires/platform", "tpu", "expected cuda or rocm"),
    ("status/state", "done", "expected one of proven, written, planned"),
    ("status/missing", None, "[status] state = written: say under missing what it lacks"),
    ("tiny/status/evidence", None, "[tiny.status] state = proven names no evidence"),
    ("tiny/status/missing", ["x"], "[tiny.status] state = proven, and something is missing"),
    ("tiny/status", None, "[tiny] status is missing"),
    ("tiny/model", "", "[tiny] model = '': expected a text"),
    ("env/A", 1, "[env] is not a table of texts"),
    ("env/on", {"A": 1}, "[env] is not a table of texts"),
    ("engine", [], "[engine] is not a table of engine flags"),
    ("layout/rollout/data", 2, "tensor x pipeline x data x context = 2 ranks on nodes x gpus = 1 GPUs"),
    ("layout/trainer", {"gpus": 4, "data": 4, "expert": 3}, "expert = 3 does not divide the 4 ranks"),
    ("layout/rollout", {"gpus": 4, "data": 4, "expert": 2}, "vLLM spreads experts over tensor x data ranks"),
    ("layout/rollout", {"gpus": 4, "data": 4, "expert": 4}, "[engine] all2all_backend is missing"),
    ("engine/data_parallel_size", 1, "[engine] data_parallel_size: the layout sets it"),
])
def test_each_fault_is_named_with_what_was_expected(path, value, said):
    assert [one for one in recipe_schema.findings(changed(path, value)) if said in one]


def test_every_fault_is_said_at_once():
    faulty = changed("model/vocab", 0, changed("requires/arch", [], changed("env/B", 2)))
    assert len(recipe_schema.findings(changed("requires/arch", "sm90", faulty))) == 3


def test_another_small_model_is_held_to_the_same_schema():
    second = changed("tiny-b", {"model": "b", "weights": "w", "vocab": 8, "status": {"state": "written"}})
    assert recipe_schema.findings(second) == ["[tiny-b.status] state = written: say under missing what it lacks"]
    assert "[tiny-b.status] state is missing" in recipe_schema.findings(changed("tiny-b/status", {}, second))


@pytest.fixture
def folder(tmp_path):
    def write(name: str, text: str):
        path = tmp_path / "recipes" / name / "recipe.toml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    write("below", """[model]\npath = "p"\nvocab = 8\n[status]\nstate = "proven"\nevidence = ["e"]
[requires]\nplatform = "cuda"\narch = ["sm90"]\n[layout.rollout]\n[env]\nA = "1"\nB = "1"\n[engine]\nx = 1
[tiny]\nmodel = "t"\nweights = "w"\nvocab = 8\n[tiny.status]\nstate = "proven"\nevidence = ["e"]\n""")
    write("above", """base = "below"\n[status]\nstate = "written"\nmissing = ["m"]\n[env]\nB = "2"\n""")
    write("unsaid", """base = "below"\n[env]\nB = "2"\n""")
    write("lost", """base = "belwo"\n""")
    return tmp_path


def test_a_recipe_is_laid_over_its_base_key_by_key(folder):
    made = recipe.load("above", None, folder)
    assert made.environment(True) == {"A": "1", "B": "2", "VLLM_BATCH_INVARIANT": "1"}
    assert made.engine_flags(True) == {"x": 1} and made.model == "p"


def test_neither_small_models_nor_halves_of_a_status_are_inherited(folder):
    made = recipe.load("above", None, folder)
    assert made.status == {"state": "written", "missing": ["m"]} and "tiny" not in made.data
    with pytest.raises(ValueError, match=r"no \[tiny\] section"):
        recipe.load("above", "tiny", folder)


def test_a_status_is_never_inherited_whole_either(folder):
    with pytest.raises(ValueError, match=r"section \[status\] is missing"):
        recipe.load("unsaid", None, folder)


def test_a_base_that_does_not_exist_is_named_with_those_that_do(folder):
    with pytest.raises(ValueError, match="no recipe 'belwo'.*there are: above, below"):
        recipe.load("lost", None, folder)


def test_the_proofs_refuse_a_recipe_of_several_gpus():
    with pytest.raises(ValueError, match="deepseek-v4-flash runs on 8 GPUs, and this proof drives one"):
        recipe.require_one_gpu(recipe.load("deepseek-v4-flash", None))
    assert recipe.require_one_gpu(recipe.load("deepseek-v4", "tiny")).name == "deepseek-v4"


def test_the_document_names_every_key_of_the_schema():
    text = (recipe.ROOT / "recipes/README.md").read_text()
    keys = {key for table in recipe_schema.SECTIONS.values() for key in table} - {"rollout", "trainer"}
    assert not [key for key in keys if f"`{key}`" not in text]
    assert all(f"| {state} |" in text for state in recipe_schema.STATES)
