"""What a recipe becomes, and the start-up validation: everything in the way at once, the status never left unsaid."""
import json
import os
import subprocess
import sys

import pytest
from prove import recipe

from launch import __main__ as launch
from launch import check, command

NAMES = recipe.names()
LOCKED = {"state": "locked"}


def machine(made: recipe.Recipe, **change) -> check.Machine:
    """One that suits the recipe, but for what a test changes."""
    needs = made.section("requires")
    gpus = [check.Gpu("H200", needs["arch"][0])] * made.layout("rollout")["gpus"]
    sound = {"gpus": gpus, "environment": {"PATH": "/bin", **made.environment(True)},
             "modules": frozenset(needs.get("modules", ())), "engine": LOCKED}
    return check.Machine(**(sound | change))


FLASH = recipe.load("deepseek-v4-flash", None)


def said(made=FLASH, invariant=True, **change) -> list[str]:
    return [one.what for one in check.findings(made, machine(made, **change), invariant)]


def test_a_machine_that_suits_the_recipe_has_no_findings():
    assert said() == []


@pytest.mark.parametrize("change, what", [
    ({"gpus": []}, ["GPUs"]),
    ({"gpus": [check.Gpu("H200", "sm90")] * 7}, ["GPUs"]),
    ({"gpus": [check.Gpu("A100", "sm80")] * 8}, ["GPUs"]),
    ({"engine": {}}, ["vLLM"]),
    ({"engine": {"state": "pristine"}}, ["vLLM"]),
    ({"engine": {"state": "other"}}, ["vLLM"]),
    ({"modules": frozenset()}, ["Python module deep_ep"]),
    ({"environment": {**FLASH.environment(True), "VLLM_BATCH_INVARIANT": "0"}},
     ["environment variable VLLM_BATCH_INVARIANT"]),
])
def test_each_thing_in_the_way_is_found(change, what):
    assert said(**change) == what


def test_everything_in_the_way_is_said_at_once():
    found = said(gpus=[], engine={}, modules=frozenset(), environment={})
    assert len(found) == 3 + len(FLASH.environment(True)) and len(set(found)) == len(found)


def test_batch_invariance_off_needs_no_locked_tree():
    off = {**FLASH.environment(False)}
    assert said(invariant=False, engine={"state": "pristine"}, environment=off) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_planned_recipe_refuses_and_any_other_says_its_status(name, capsys, monkeypatch):
    made = recipe.load(name, None)
    monkeypatch.setattr(check, "look", lambda made, environment: machine(made))
    code, text = launch.checked(made, True, {}), capsys.readouterr().err
    assert f"{name}: status {made.status['state']}" in text
    assert code == (1 if made.status["state"] == "planned" else 0)
    assert made.status["state"] == "proven" or all(one in text for one in made.status["missing"])


def recorded(folder, passed=True, **versions) -> None:
    stack = {"torch": "2.11.0+cu130", "triton": "3.6.0"} | versions
    data = {"passed": passed, "engines": {"graph": {"versions": stack}}}
    (folder / f"rollout-{len(list(folder.iterdir()))}.json").write_text(json.dumps(data))


def test_a_stack_that_no_passed_record_was_made_on_is_said(tmp_path):
    recorded(tmp_path)
    recorded(tmp_path, passed=False, torch="2.14.0")
    here = {"torch": "2.14.0", "triton": "3.8.0"}
    said = check.unproven_stack(machine(FLASH, stack=here), tmp_path)
    assert said == ("torch 2.14.0 and triton 3.8.0 here; every record in evidence/ was made with "
                    "torch 2.11.0+cu130 and triton 3.6.0")
    assert check.unproven_stack(machine(FLASH, stack={"torch": "2.11.0+cu130", "triton": "3.6.0"}), tmp_path) is None
    assert check.unproven_stack(machine(FLASH, stack={}), tmp_path) is None


def test_a_stack_is_the_recorded_one_by_its_public_version_and_in_a_folder_of_its_own(tmp_path):
    recorded(tmp_path)
    (tmp_path / "torch-2.14").mkdir()
    recorded(tmp_path / "torch-2.14", torch="2.14.0+cu130", triton="3.8.0")
    assert check.unproven_stack(machine(FLASH, stack={"torch": "2.14.0", "triton": "3.8.0"}), tmp_path) is None
    for other in ("2.14.0+cu126", "2.14.0+rocm7.2"):
        assert check.unproven_stack(machine(FLASH, stack={"torch": other, "triton": "3.8.0"}), tmp_path)
    said = check.unproven_stack(machine(FLASH, stack={"torch": "2.14.1", "triton": "3.8.0"}), tmp_path)
    assert said.endswith("torch 2.11.0+cu130 and triton 3.6.0 or torch 2.14.0+cu130 and triton 3.8.0")


@pytest.mark.parametrize("text", ["{", "", "[]", "{}", '{"passed": true}', '{"passed": true, "engines": [1]}',
                                  '{"passed": true, "engines": {"a": 3}}',
                                  '{"passed": true, "engines": {"a": {"versions": {"torch": [], "triton": 3}}}}'])
def test_a_damaged_record_does_not_stop_the_check(text, tmp_path):
    recorded(tmp_path)
    (tmp_path / "damaged.json").write_text(text)
    (tmp_path / "folder.json").mkdir()
    said = check.unproven_stack(machine(FLASH, stack={"torch": "2.14.0"}), tmp_path)
    assert said.startswith("torch 2.14.0 and triton none here; every record") and "torch 2.11.0+cu130" in said


def test_a_command_that_is_not_there_is_said_and_not_thrown(monkeypatch, capsys):
    monkeypatch.setattr(check, "look", lambda made, environment: machine(made))
    assert launch.main(["train", "deepseek-v4-flash", "no-such-command"]) == 2
    assert "cannot start no-such-command: No such file or directory" in capsys.readouterr().err


def test_a_damaged_lock_is_said_and_not_thrown(monkeypatch, capsys):
    def broken(made, environment):
        raise ValueError("patchset.lock is damaged")
    monkeypatch.setattr(check, "look", broken)
    assert launch.main(["check", "deepseek-v4-flash"]) == 2
    assert "launch check: patchset.lock is damaged" in capsys.readouterr().err


def test_records_that_list_no_stack_say_nothing_of_one(tmp_path):
    """A server names vLLM's version alone (`prove served`); `prove counter` keeps the engine's tree and no version."""
    engines = {"served": {"versions": {"vllm": "0.33.0"}}, "with": {"lock": {"state": "locked"}}}
    (tmp_path / "served.json").write_text(json.dumps({"passed": True, "engines": engines}))
    assert check.unproven_stack(machine(FLASH, stack={"torch": "2.14.0"}), tmp_path) is None
    recorded(tmp_path)
    said = check.unproven_stack(machine(FLASH, stack={"torch": "2.14.0"}), tmp_path)
    assert said.endswith("was made with torch 2.11.0+cu130 and triton 3.6.0")


def test_the_check_says_the_stack_and_is_not_stopped_by_it(monkeypatch, capsys):
    monkeypatch.setattr(check, "look", lambda made, environment: machine(made, stack={"torch": "9"}))
    assert launch.checked(FLASH, True, {}) == 0
    assert "torch 9 and triton none here" in capsys.readouterr().err
    launch.checked(FLASH, False, {})
    assert "triton" not in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_ray_workers_get_every_variable_of_the_recipe(name):
    made = recipe.load(name, None)
    carried = json.loads(json.dumps(command.runtime_env(made, True)))["env_vars"]
    assert carried == made.environment(True) and carried["VLLM_BATCH_INVARIANT"] == "1"
    assert said(made, environment=carried) == (["status"] if made.status["state"] == "planned" else [])


def test_what_is_handed_to_ray_is_json_and_the_status_is_said_beside_it(capsys):
    assert launch.main(["ray", "deepseek-v4-flash"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == command.runtime_env(FLASH, True)
    assert "deepseek-v4-flash: status written" in said.err


@pytest.mark.parametrize("name", NAMES)
def test_run_sh_is_the_recipe_and_nothing_else(name, tmp_path):
    """Run it with a vllm and a launch check that only write down what they got."""
    made = recipe.load(name, None)
    root = tmp_path / "checkout"
    script = root / "recipes" / name / "run.sh"
    (root / "launch").mkdir(parents=True)
    (root / "launch/__main__.py").write_text("import sys; assert sys.argv[1:3] == ['check', '--here']\n")
    script.parent.mkdir(parents=True)
    script.write_text(command.script_path(recipe.ROOT, name).read_text())
    seen = tmp_path / "seen.json"
    vllm = tmp_path / "vllm"
    vllm.write_text(f"#!{sys.executable}\nimport json, os, sys\n"
                    f"json.dump([sys.argv[1:], dict(os.environ)], open({str(seen)!r}, 'w'))\n")
    vllm.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.path.dirname(sys.executable)}:/usr/bin:/bin"}
    subprocess.run(["bash", script, "--port", "8001"], check=True, env=environment, cwd=tmp_path)
    line, got = json.loads(seen.read_text())
    assert line == command.serve(made, True, ["--port", "8001"])[1:]
    assert made.environment(True).items() <= got.items()


def test_a_failed_check_keeps_run_sh_from_starting(tmp_path):
    root = tmp_path / "checkout"
    script = root / "recipes/r/run.sh"
    (root / "launch").mkdir(parents=True)
    (root / "launch/__main__.py").write_text("raise SystemExit(1)\n")
    script.parent.mkdir(parents=True)
    script.write_text(command.run_script(FLASH))
    (tmp_path / "vllm").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "vllm").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.path.dirname(sys.executable)}:/usr/bin:/bin"}
    assert subprocess.run(["bash", script], env=environment, check=False, cwd=tmp_path).returncode == 1
    assert not (tmp_path / "started").exists()


def test_the_scripts_in_the_repository_are_the_recipes():
    assert launch.write(only_check=True) == []


def test_write_mends_a_script_and_check_only_names_it(tmp_path):
    folder = tmp_path / "recipes/deepseek-v4"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text((recipe.ROOT / "recipes/deepseek-v4/recipe.toml").read_text())
    assert launch.write(only_check=True, root=tmp_path) == ["recipes/deepseek-v4/run.sh"]
    assert not (folder / "run.sh").exists()
    assert launch.write(only_check=False, root=tmp_path) == ["recipes/deepseek-v4/run.sh"]
    assert os.access(folder / "run.sh", os.X_OK) and launch.write(only_check=True, root=tmp_path) == []


def test_flags_become_options_of_every_kind():
    flags = {"a_b": True, "c": False, "sizes": [1, 2], "config": {"x": True}, "n": 3, "name": "v"}
    assert sum(command.arguments(flags), []) == ["--a-b", "--no-c", "--sizes", "1", "2", "--config", '{"x":true}',
                                                 "--n", "3", "--name", "v"]


def test_the_layout_makes_the_flags_of_the_ranks():
    flags = command.engine(FLASH, True)
    assert (flags["data_parallel_size"], flags["enable_expert_parallel"]) == (8, True)
    assert not {"tensor_parallel_size", "pipeline_parallel_size"} & set(flags)
    assert "data_parallel_size" not in command.engine(recipe.load("nemotron-3.5-lightning", None), True)


def test_gpus_are_read_from_the_drivers_own_tools():
    csv = "NVIDIA H200, 9.0\nNVIDIA GB200, 10.0\n"
    assert check._cuda_gpus(lambda command: csv) == [check.Gpu("NVIDIA H200", "sm90"),
                                                     check.Gpu("NVIDIA GB200", "sm100")]
    agents = "".join(f"  Name:      {name}\n" for name in ("AMD EPYC 9575F", "gfx950", "amdgcn-amd-amdhsa--gfx950"))
    assert [gpu.arch for gpu in check._rocm_gpus(lambda command: agents)] == ["gfx950"]
    assert check._cuda_gpus(lambda command: None) == check._rocm_gpus(lambda command: None) == []


def test_misuse_exits_2_and_says_what_there_is(capsys):
    assert launch.main(["check", "deepsek"]) == 2
    assert "there are: deepseek-v4" in capsys.readouterr().err
    assert launch.main(["train", "deepseek-v4-flash"]) == 2
    assert "no command" in capsys.readouterr().err


def test_serve_and_train_start_nothing_that_the_check_refuses(monkeypatch, capsys):
    monkeypatch.setattr(check, "look", lambda made, environment: machine(made, gpus=[]))
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("started"))
    assert launch.main(["serve", "deepseek-v4-flash"]) == launch.main(["train", "deepseek-v4-flash", "true"]) == 1
    assert "GPUs: found none, expected 8 of sm90 or sm100" in capsys.readouterr().err


def test_train_runs_the_command_in_the_recipes_environment(monkeypatch):
    started = []
    monkeypatch.setattr(check, "look", lambda made, environment: machine(made))
    monkeypatch.setattr(os, "execvpe", lambda *arguments: started.append(arguments))
    launch.main(["train", "deepseek-v4-flash", "torchrun", "--nproc", "8", "train.py"])
    (program, line, environment), = started
    assert (program, line) == ("torchrun", ["torchrun", "--nproc", "8", "train.py"])
    assert FLASH.environment(True).items() <= environment.items() and "PATH" in environment


def test_serve_tells_the_health_check_its_port(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "look", lambda made, environment: machine(made))
    monkeypatch.setattr(os, "execvpe", lambda *_: None)
    monkeypatch.setenv(launch.SERVING, str(tmp_path / "serving"))
    launch.main(["serve", "deepseek-v4-flash"])
    assert (tmp_path / "serving").read_text() == "8000"
    for flags in (["--port", "8123"], ["--port=8123"], ["--port", "8001", "--port=8123", "--host", "0.0.0.0"]):
        launch.main(["serve", "deepseek-v4-flash", *flags])
        assert (tmp_path / "serving").read_text() == "8123"
