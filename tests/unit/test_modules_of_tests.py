"""Files of tests in one process: none takes another's place, and none needs another to have run, or not, before it.

The folders of tests stand on sys.path together, so a bare name is the first file of that name. tests/gpu is a package:
pytest calls its files gpu.test_..., and those of the other folders test_....
"""
import collections
import pathlib
import re

TESTS = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))
OWN = pathlib.Path(__file__)
GPU = sorted((TESTS / "gpu").glob("*.py"))


def found(pattern: str, files) -> list[str]:
    """Also in code that a test hands to another Python as text."""
    lines = [(path, number, line) for path in files if path != OWN
             for number, line in enumerate(path.read_text().splitlines(), 1)]
    return [f"{path.relative_to(TESTS)}:{number}: {line.strip()}" for path, number, line in lines
            if re.search(pattern, line)]


def test_no_module_imports_a_file_of_tests():
    """What two files share is a module of its own name. Which of two test_x.py an import finds depends on sys.path."""
    assert found(r"^\s*(from|import)\s+(\w+\.)*test_\w+", FILES) == []
    assert found(r"import_module\(\W*([\w.]*\.)?test_", FILES) == []


def test_no_two_files_of_tests_have_one_name_for_pytest():
    names = collections.Counter(
        f"gpu.{path.stem}" if path in GPU else path.stem for path in FILES if path.stem.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
    assert [path.parent.name for path in TESTS.rglob("__init__.py")] == ["gpu"], "the names above are pytest's no more"


def test_no_helper_is_hidden_by_another_module():
    stems = collections.Counter(path.stem for path in FILES if path.stem not in ("conftest", "__init__"))
    helpers = {path.stem for path in FILES} - {stem for stem in stems if stem.startswith("test_")}
    packages = {path.name.removesuffix(".py") for path in TESTS.parent.iterdir() if path.suffix in ("", ".py")}
    assert [name for name in helpers if stems[name] > 1 or name in packages] == []


def test_only_their_conftest_turns_batch_invariance_on_for_gpu_tests():
    """A file that does so as it is imported does it behind those before it, which then skip or test another mode."""
    tests = [path for path in GPU if path.stem.startswith("test_")]
    assert found(r"\benviron\b|putenv", tests) == []
    assert found(r"(init_batch_invariance|enable_batch_invariant_mode)\(", tests) == [], "use the fixture `actor`"


def test_no_test_stores_a_variable_in_vllms_envs():
    """See tests/upstream/test_engine_mode.py: pytest before 9.2 leaves it there for good."""
    assert found(r"""setattr\((\w+\.)*envs,|setattr\(["']vllm\.envs\.""", FILES) == []
