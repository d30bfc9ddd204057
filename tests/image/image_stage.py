"""A step of the image run outside it: in a folder laid out as its stage is, with a pip that only writes down."""
import os
import pathlib
import shutil
import stat
import subprocess
import sys

import dockerfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# In place of $VENV/bin/python: writes down every pip command and runs everything else.
PYTHON = """#!/bin/bash
if [[ $1 == -m && $2 == pip ]]; then printf '%s\\n' "$*" >> "$PIP_LOG"; exit "${PIP_EXIT:-0}"; fi
exec {python} "$@"
"""


def tool(name: str) -> str:
    """A linter of requirements-test.lock: beside this python, or on the path."""
    found = shutil.which(name, path=f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert found, f"{name} is not installed: make test installs requirements-test.lock"
    return found


class Stage:
    """A folder laid out as one stage of the Dockerfile is when a step runs, and the step run in it."""

    def __init__(self, root: pathlib.Path, venv: pathlib.Path, work: pathlib.Path):
        self.root, self.venv, self.work, self.log = root, venv, work, work / "pip.log"
        work.mkdir()
        python = venv / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON.replace("{python}", sys.executable))
        python.chmod(python.stat().st_mode | stat.S_IXUSR)

    def run(self, step: str, **more: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "ROOT": str(self.root), "VENV": str(self.venv), "WORK": str(self.work / "build"),
                       "WHEELS": str(self.work / "wheels"), "PIP_LOG": str(self.log), **more}
        return subprocess.run([self.root / "docker/steps" / step], env=environment, capture_output=True, text=True,
                              check=False)

    @property
    def pip(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def staged(name: str, folder: pathlib.Path) -> Stage:
    """A folder with the files that stage `name` of the Dockerfile has copied, and nothing else."""
    root = folder / name / "root"
    for source, target in dockerfile.copied(dockerfile.stages(ROOT / "Dockerfile"), name):
        place = root / target.removeprefix("/opt/zero-mismatch/")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, dirs_exist_ok=True)
        else:
            place = place / pathlib.Path(source).name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / source, place)
    return Stage(root, folder / name / "venv", folder / name / "work")
