"""The command line: its options are frozen, misuse exits 2, and what an engine is given."""
import fcntl
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from prove import __main__ as cli
from prove import machine, recipe

COMMON = {"--help", "--recipe", "--tiny", "--json", "--out", "--logs", "--commit", "--cache", "--budget"}
OPTIONS = {
    "rollout": {"--cases", "--tokens", "--contrast"},
    "served": {"--url", "--tokens"},
    "bisect": {"--left", "--right", "--tokens", "--contrast"},
    "counter": {"--site", "--patches", "--tests-only", "--tokens", "--at-once"},
    "bench": {"--concurrent", "--prompt-tokens", "--out-tokens", "--seconds", "--turn"},
    "unchanged": {"--pristine", "--tokens", "--concurrent", "--out-tokens", "--turn"},
    "train": {"--updates", "--groups", "--answers", "--out-tokens", "--lr", "--restore-after", "--sleep",
              "--whole-vocab"},
    "async": {"--lag", "--updates", "--stop-after", "--synchronous", "--groups", "--answers", "--out-tokens", "--lr"},
    "cp": set(),
    "grad": set(),
    "cost": {"--runs"},
    "warm": {"--off"},
}


def test_the_options_are_these():
    verbs = next(a for a in cli.parser()._actions if isinstance(a.choices, dict)).choices
    found = {name: {o for a in one._actions for o in a.option_strings if o.startswith("--")}
             for name, one in verbs.items()}
    assert found == {name: COMMON | own for name, own in OPTIONS.items()}


def test_misuse_exits_2_and_says_what_there_is(capsys):
    assert cli.main(["rollout", "--recipe", "deepsek"]) == 2
    assert "there are: deepseek-v4" in capsys.readouterr().err
    assert cli.main(["rollout", "--recipe", "deepseek-v4", "--tiny", "--cases", "twic"]) == 2
    assert cli.main(["bisect", "--recipe", "deepseek-v4", "--tiny", "--left", "decoed"]) == 2


@pytest.mark.parametrize("line, said", [
    ("train --groups 0", "--groups: found '0', expected a whole number above 0"),
    ("train --updates -5", "--updates: found '-5', expected a whole number above 0"),
    ("train --restore-after -1", "--restore-after: found '-1', expected a whole number; 0 leaves it out"),
    ("train --whole-vocab -1", "--whole-vocab: found '-1', expected a whole number; 0 leaves it out"),
    ("train --lr nan", "--lr: found 'nan', expected a number above 0"),
    ("train --sleep 3", "--sleep: invalid choice: 3"),
    ("cost --runs 0", "--runs: found '0', expected a whole number above 0"),
    ("grad --budget -1", "--budget: found '-1', expected a number above 0"),
    ("bench --seconds x", "--seconds: found 'x', expected a number above 0"),
])
def test_a_number_that_makes_no_sense_is_refused_before_anything_starts(line, said, capsys):
    verb, *more = line.split()
    with pytest.raises(SystemExit) as stopped:
        cli.main([verb, "--recipe", "deepseek-v4", "--tiny", *more])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("verb, option", [("counter", "--site"), ("unchanged", "--pristine")])
def test_a_folder_without_vllm_is_refused_before_anything_starts(verb, option, tmp_path, capsys):
    assert cli.main([verb, "--recipe", "deepseek-v4", "--tiny", option, str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "found no vllm there; name the folder that holds it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--out", "--logs", "--cache"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(option, tmp_path, capsys):
    (tmp_path / "file").touch()
    folders = {"--out": tmp_path, "--logs": tmp_path} | {option: tmp_path / "file" / "x"}
    line = [str(word) for pair in folders.items() for word in pair]
    assert cli.main(["rollout", "--recipe", "deepseek-v4", "--tiny", *line]) == 2
    said = capsys.readouterr().err
    assert option in said and "nothing can be written there (Not a directory); name another folder" in said


@pytest.mark.parametrize("verb, file", [("bench", "folder"), ("unchanged", "file/turn")])
def test_a_turn_that_could_not_be_waited_for_is_refused_before_anything_starts(verb, file, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "vllm").mkdir()
    where = ["--out", str(tmp_path / "out"), "--logs", str(tmp_path / "logs"), "--turn", str(tmp_path / file)]
    pristine = ["--pristine", str(tmp_path)] if verb == "unchanged" else []
    assert cli.main([verb, "--recipe", "deepseek-v4", "--tiny", *pristine, *where]) == 2
    assert f"--turn {tmp_path / file}: it cannot be opened and locked (" in capsys.readouterr().err
    assert not any((tmp_path / "logs").iterdir())


def test_the_file_of_a_turn_keeps_what_was_in_it(tmp_path):
    (tmp_path / "mine").write_text("not a lock")
    machine.require_turn(tmp_path / "mine")
    with machine.turn(tmp_path / "mine", lambda said: None, 0.0):
        assert (tmp_path / "mine").read_text() == "not a lock"


def test_a_turn_that_another_has_now_is_waited_for_later(tmp_path):
    with (tmp_path / "turn").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        machine.require_turn(tmp_path / "turn")


def test_ctrl_c_ends_at_once_though_the_server_never_answers(tmp_path):
    site = tmp_path / "site" / "vllm"
    site.mkdir(parents=True)
    (site / "__init__.py").touch()
    (site / "_version.py").write_text("__version__ = '0.33.0'\n")
    server = socket.create_server(("127.0.0.1", 0), backlog=256)
    command = [sys.executable, "-m", "prove", "served", "--recipe", "deepseek-v4", "--tiny", "--out", str(tmp_path),
               "--logs", str(tmp_path), "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]
    path = os.pathsep.join([str(site.parent), str(recipe.ROOT)])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as started:
        for body in (b'{"version": "0.33.0"}', b'vllm:cache_config_info{block_size="256"} 1.0'):
            with server.accept()[0] as asked:
                asked.recv(1 << 16)
                asked.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + body)
        waiting = server.accept()  # the first of the requests: nothing is answered to it
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=20)
    waiting[0].close()
    server.close()
    assert started.returncode == 130 and said == "prove served: interrupted; the record has the rows that were done\n"


def test_no_case_at_all_is_not_every_case(capsys):
    assert cli.main(["rollout", "--recipe", "deepseek-v4", "--tiny", "--cases", ""]) == 2
    assert "no such case" in capsys.readouterr().err


def test_no_engine_is_no_proof(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")  # no vLLM here
    code = cli.main(["rollout", "--recipe", "deepseek-v4", "--tiny", "--tokens", "100", "--cases", "twice", "--out",
                     str(tmp_path), "--logs", str(tmp_path)])
    said = capsys.readouterr().out
    assert code == 1 and "NOT passed (incomplete)" in said and "its engine did not start" in said
    assert "start prove with the interpreter that the patched engines are installed for" in said


@pytest.mark.parametrize("states, code, said", [
    (["equal", "differs"], 0, "1 of 2 comparisons differ;"),
    (["equal", "equal"], 1, "0 of 2 comparisons differ;"),  # stock shows no difference: the workload cannot fail
    (["failed", "not run"], 1, "0 of 2 comparisons differ (incomplete);"),
])
def test_a_contrast_holds_only_if_something_differs(states, code, said, monkeypatch, capsys):
    rows = [{"state": state} for state in states]
    data = {"verb": "contrast", "subject": "s", "rows": rows, "passed": "differs" not in states,
            "complete": "failed" not in states}
    monkeypatch.setattr(cli, "run", lambda args, screen: data)
    assert cli.main(["rollout", "--recipe", "deepseek-v4", "--contrast"]) == code
    assert capsys.readouterr().out.startswith(said)


def test_a_run_that_asked_for_less_says_which_record_stays(tmp_path, monkeypatch, capsys):
    data = {"verb": "train", "subject": "s", "passed": True, "complete": True, "asks_less": {"updates": "3"}}
    monkeypatch.setattr(cli, "run", lambda args, screen: data)
    assert cli.main(["train", "--recipe", "deepseek-v4", "--updates", "3", "--out", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("passed; record: ") and first.endswith("/train-s.updates-3.json")
    assert second.endswith("stays: train-s.json; this run was asked for less: updates")


def test_the_cache_folder_becomes_the_engines_home(tmp_path):
    args = cli.parser().parse_args(["warm", "--recipe", "x", "--cache", str(tmp_path / "jit")])
    env = cli.environment(args)
    assert env["HOME"] == str(tmp_path / "jit") and (tmp_path / "jit").is_dir()
    assert env["TRITON_CACHE_DIR"] == str(tmp_path / "jit" / ".triton" / "cache")  # one for every engine's flags


def test_both_arms_of_the_recipe_differ_only_where_it_says():
    made = recipe.load("deepseek-v4", tiny="tiny")
    on, off = made.environment(True), made.environment(False)
    assert {k for k in on if on[k] != off[k]} == {"VLLM_BATCH_INVARIANT"}
    assert made.engine_flags(True) == made.engine_flags(False)
    assert pathlib.Path(made.model, "config.json").is_file() and made.engine_flags(True)["load_format"] == "dummy"
    full = recipe.load("deepseek-v4", tiny=None)
    assert full.weights_script is None and "load_format" not in full.engine_flags(True)


def test_each_arm_has_its_own_flags_and_environment(tmp_path):
    made = recipe.Recipe("x", tmp_path, "tiny", {
        "tiny": {"engine": {"b": 2}}, "engine": {"a": 1, "b": 1, "on": {"c": 3}, "off": {"b": 9}},
        "env": {"A": "1", "on": {"A": "2"}}})
    assert made.engine_flags(True) == {"a": 1, "b": 2, "c": 3} and made.engine_flags(False) == {"a": 1, "b": 9}
    assert made.environment(True) == {"A": "2", "VLLM_BATCH_INVARIANT": "1"}
    assert made.environment(False) == {"A": "1", "VLLM_BATCH_INVARIANT": "0"}


def test_an_unknown_section_is_refused(tmp_path):
    folder = tmp_path / "recipes" / "x"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text("[engin]\n")
    with pytest.raises(ValueError, match=r"unknown section \['engin'\]"):
        recipe.load("x", None, root=tmp_path)


def test_a_pipe_gets_no_progress_bar(capsys):
    from prove.ui import UI

    screen = UI(stream=sys.stdout)
    with screen.bar("working", 3) as advance:
        advance("one")
    assert capsys.readouterr().out == ""
    UI(json_only=True).say("nothing")
    assert capsys.readouterr().out == ""
