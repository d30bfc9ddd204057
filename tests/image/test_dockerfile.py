"""The Dockerfile, without Docker: what it names exists, stages have what steps read, no version is written twice."""
import fnmatch
import json
import os
import re
import subprocess

import dockerfile
import image_pins
import pytest
from image_stage import ROOT, tool

from patchset import pins

STAGES = dockerfile.stages(ROOT / "Dockerfile")
NAMED = dockerfile.by_name(STAGES)
SCRIPTS = sorted([*ROOT.glob("docker/*.sh"), *ROOT.glob("docker/steps/*.sh")])
RUN_SCRIPTS = sorted(ROOT.glob("recipes/*/run.sh"))


def test_hadolint_has_nothing_to_say():
    done = subprocess.run([tool("hadolint"), "--failure-threshold", "info", ROOT / "Dockerfile"], capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", [*SCRIPTS, *RUN_SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck_has_nothing_to_say(script):
    done = subprocess.run([tool("shellcheck"), "--external-sources", script], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout


def test_every_script_but_the_library_can_be_run():
    assert [path.name for path in SCRIPTS if not os.access(path, os.X_OK)] == ["lib.sh"]


def test_every_stage_is_built_on_one_that_stands_before_it():
    seen = set()
    for stage in STAGES[1:]:
        assert stage.base == "${BASE}" or stage.base in seen, stage.name
        for rest in stage.all("COPY"):
            if source := re.match(r"--from=(\S+)", rest):
                assert source[1] in seen, rest
        seen.add(stage.name)
    assert [stage.name for stage in STAGES[1:]] == ["base", "deps", "wheels", "vllm", "megatron", "runtime"]


def test_every_argument_is_declared_where_it_is_used_and_used_where_it_is_declared():
    for stage in STAGES[1:]:
        declared = {rest.partition("=")[0] for rest in stage.all("ARG")}
        known = declared | {rest.partition("=")[0] for rest in NAMED[""].all("ARG")} & {"BASE"} & declared
        known |= {word.partition("=")[0] for below in dockerfile.lineage(STAGES, stage.name)
                  for rest in below.all("ENV") for word in rest.split()} | {"PATH"}
        used = {name for word, rest in stage.instructions if word != "ARG" for name in re.findall(r"\$\{(\w+)\}", rest)}
        assert used <= known, (stage.name, used - known)
        assert declared <= used, (stage.name, declared - used)


def test_every_file_that_is_copied_exists_and_is_let_in_by_dockerignore():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = [rule[1:] for rule in rules if rule.startswith("!")]
    assert all((ROOT / one).exists() for one in let_in)
    for source, _ in dockerfile.copied(STAGES, "runtime") + [pair for stage in NAMED if stage
                                                             for pair in dockerfile.copied(STAGES, stage)]:
        assert (ROOT / source).exists(), source
        assert source == "." or any(fnmatch.fnmatch(source, one) or source.startswith(f"{one}/") for one in let_in)


def test_the_context_has_no_history_no_build_and_no_secrets():
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert not {".git", "build", ".venv"} & let_in


def test_the_image_has_the_records_that_its_start_up_check_compares_with():
    """`launch check` says on which torch and Triton the records were made (check.unproven_stack)."""
    assert "!evidence" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.name], ids=lambda stage: stage.name)
def test_every_step_that_is_run_was_copied_into_its_stage(stage):
    targets = {target + source.rsplit("/", 1)[-1] if target.endswith("/") else target
               for source, target in dockerfile.copied(STAGES, stage.name)}
    for rest in stage.all("RUN"):
        for step in re.findall(r"/opt/zero-mismatch/(docker/steps/\S+)", rest):
            assert os.access(ROOT / step, os.X_OK)
            assert f"/opt/zero-mismatch/{step}" in targets or "/opt/zero-mismatch" in targets, step


def test_the_image_ends_unprivileged_with_a_health_check_and_our_entry():
    runtime = NAMED["runtime"].instructions
    words = [word for word, _ in runtime]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    user = dict(runtime)["USER"]
    assert user.isdigit() and int(user) > 0
    for word in ("ENTRYPOINT", "HEALTHCHECK"):
        command = json.loads(re.search(r"\[.*\]", dict(runtime)[word])[0])
        assert os.access(ROOT / command[-1].removeprefix("/opt/zero-mismatch/"), os.X_OK)


def test_the_base_is_named_once_and_by_digest():
    assert re.fullmatch(r"\S+:13\.\S+-devel-ubuntu24\.04@sha256:[0-9a-f]{64}", image_pins.base())
    assert [rest for stage in STAGES for rest in stage.all("ARG") if "sha256" in rest] == [f"BASE={image_pins.base()}"]


def test_no_version_is_written_twice():
    """What a pin decides may stand in patchset.toml, the lock resolved from it and documents; never in a step."""
    known = pins.load(ROOT)
    versions = {value for one in known.upstreams.values() for release in one.releases.values()
                for value in (release.version, release.commit, release.sdist, release.wheel) if value}
    versions |= {line.partition("==")[2] for line in image_pins.requirements()}
    versions |= {re.match(r"\S+==([^\s;]+)", lines)[1] for name, lines in image_pins.lock().items()
                 if name in ("torch", "nvidia-nvshmem-cu13", "nvidia-nccl-cu13", "flashinfer-python", "tilelang")}
    texts = {path: path.read_text() for path in [ROOT / "Dockerfile", *SCRIPTS, *ROOT.glob("launch/*.py"),
                                                 *ROOT.glob("docker/*.py")]}
    assert len(versions) > 10
    assert not [(path.name, version) for path, text in texts.items() for version in versions
                if re.search(rf"(?<![\w.]){re.escape(version)}(?![\w.])", text.replace("vLLM 0.33.0 wheel", ""))]
