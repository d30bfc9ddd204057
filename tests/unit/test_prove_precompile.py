"""Precompile jobs run each in a process of its own; a failing one is reported and stops nothing."""
import pathlib

from prove import precompile

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
