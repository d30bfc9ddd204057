"""Precompile jobs run each in a process of its own; a failing one is reported and stops nothing."""
import pathlib
import re
import tomllib

from prove import precompile
from prove.recipe import ROOT
from prove.scripts import load

SCRIPT = """
import os, pathlib
def touch(name): pathlib.Path(os.environ["WHERE"], name).write_text(str(os.getpid()))
def fail(): raise RuntimeError("no such kernel")
def hang(): __import__("time").sleep(60)
JOBS = {"a": lambda: touch("a"), "b": lambda: touch("b"), "bad": fail, "slow": hang}
"""


def test_jobs_run_in_their_own_processes_and_failures_are_named(tmp_path: pathlib.Path):
    script = tmp_path / "jobs.py"
    script.write_text(SCRIPT)
    said = []
    rows = precompile.run(script, {"WHERE": str(tmp_path)}, tmp_path / "logs", timeout=8.0, say=said.append, workers=4)
    by_name = {row["job"]: row for row in rows}
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()
    assert "error" not in by_name["a"] and "no such kernel" in by_name["bad"]["error"]
    assert by_name["slow"]["error"].startswith("time") and len(said) == 4


def test_only_the_wanted_jobs_run(tmp_path: pathlib.Path):
    script = tmp_path / "jobs.py"
    script.write_text(SCRIPT)
    rows = precompile.run(script, {"WHERE": str(tmp_path)}, tmp_path / "logs", timeout=8.0, say=lambda text: None,
                          wanted=["a|b"])
    assert sorted(row["job"] for row in rows) == ["a", "b"]


def test_each_mhc_variant_of_deepseek_v4_is_a_job_of_its_own(monkeypatch):
    def names():
        return [n for n in load(ROOT / "recipes" / "deepseek-v4" / "precompile.py").JOBS if n.startswith("mhc-")]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    splits = lambda tokens, most: min(132 // -(-tokens // 64), most)  # noqa: E731 - 132 SMs; tilelang_kernels.py:46
    for kind, most in (("pre", 64), ("broadcast", 16)):
        found = [splits(int(n.rpartition("-")[2]), most) for n in names() if n.startswith(f"mhc-{kind}-")]
        assert len(found) == len(set(found)) and set(found) == {splits(t, most) for t in range(1, 8193)}
    wanted = tomllib.loads((ROOT / "recipes/deepseek-v4/recipe.toml").read_text())["bench"]["precompile"]
    assert len([n for n in names() if any(re.fullmatch(w, n) for w in wanted)]) == 6
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert len(names()) == 4 + 1
