"""The command line: its options are these, every verb explains itself, and whatever the shell does to its streams,
its tools or its process is a line and an exit code, never a traceback."""
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import apply
import pytest
from checkout import hooked, pack

from patchset import completions, git, progress
from patchset.errors import NeedsWork

ROOT = Path(__file__).resolve().parents[2]
TARGET = {"--upstream", "--version", "--from", "--installed", "--site"}
OPTIONS = {
    "fetch": {"--upstream", "--version", "--git"},
    "plan": TARGET | {"--profile", "--without"},
    "apply": TARGET | {"--profile", "--without", "--git"},
    "verify": TARGET, "status": TARGET, "recover": TARGET,
    "revert": TARGET | {"--edits-to"},
    "new": {"--upstream"}, "refresh": {"--upstream", "--from", "--add"},
    "export": {"--check"}, "rebase": {"--upstream", "--to", "--out", "--install"},
    "report": {"--version"}, "lint": set(), "why": {"--version"}, "sbom": set(), "completions": set(),
}


def test_the_options_are_these():
    found = {verb.name: set(verb.flags.split()) for verb in completions.verbs(apply.parser())}
    assert found == {name: {"-h", "--help", "--json", *options} for name, options in OPTIONS.items()}


@pytest.mark.parametrize("verb", [None, *OPTIONS])
def test_every_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as left:
        apply.main([*([verb] if verb else []), "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and said.startswith("usage: apply.py")
    for one in completions.verbs(apply.parser()):
        assert one.help and all(option.help for option in one.options), one


@pytest.mark.parametrize("arguments", [["completions", "bash"], ["completions", "bash", "--json"]])
def test_a_reader_that_leaves_is_no_error(arguments):
    with subprocess.Popen([sys.executable, ROOT / "apply.py", *arguments], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, pipesize=4096) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_a_terminal_without_utf8_gets_escapes_not_a_traceback():
    env = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "POSIX"}
    done = subprocess.run([sys.executable, ROOT / "apply.py", "why", "vllm/models/deepseek_v4/attention.py"],
                          capture_output=True, env=env, check=False)
    assert done.returncode == 0 and b"\\u2014" in done.stdout and not done.stderr


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["nonsense"], 2), (["why"], 2), (["new", "Not A Slug"], 2),
                                                 (["new", "x", "--upstream", "vlm"], 2)])
def test_a_usage_error_exits_2_without_a_traceback(arguments, code):
    done = subprocess.run([sys.executable, ROOT / "apply.py", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code and done.stderr and "Traceback" not in done.stderr


ANSWERS = {"a long answer": (["report"], 0), "json": (["report", "--json"], 0), "help": (["--help"], 0),
           "help of a verb": (["apply", "--help"], 0), "usage": (["nonsense"], 2),
           "refusal": (["new", "Not A Slug"], 2), "refusal as json": (["new", "Not A Slug", "--json"], 2)}


def shell(text: str, arguments: list[str], **options) -> subprocess.CompletedProcess:
    """apply.py with those arguments and redirections."""
    return subprocess.run(["bash", "-c", f'"$@" {text}', "-", sys.executable, str(ROOT / "apply.py"), *arguments],
                          capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_cannot_be_written_is_one_line_and_no_success(what):
    arguments, code = ANSWERS[what]
    done = shell(">/dev/full", arguments)
    assert done.returncode == (code or 1) and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if code == 0 or "--json" in arguments:
        assert done.stderr == "the answer could not be written: No space left on device\n"
    assert shell(">/dev/full 2>&1", arguments).returncode == (code or 1)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("what", ANSWERS)
def test_closed_streams_leave_the_exit_code_and_what_is_open(what, closed):
    arguments, code = ANSWERS[what]
    done = shell(closed, arguments)
    assert done.returncode == code and "Traceback" not in done.stderr
    if ">&-" != closed:
        assert not done.stderr
    if closed == "2>&-" and what == "refusal":
        assert not done.stdout, "what belongs on a closed stderr is not put on stdout"


# Ctrl-C at the very moment that a module is looked for.
INTERRUPTED = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
for name in ("argparse", "json", "pathlib"):
    sys.modules.pop(name, None)
sys.argv[:1] = [sys.argv[1]]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
EARLY, LATE = ["argparse", "json", "pathlib", "patchset", "patchset.pins", "patchset.git", "tomllib"], ["patchset.why"]


@pytest.mark.parametrize("module", EARLY + LATE)
def test_ctrl_c_is_quiet_whenever_it_comes(module):
    """While modules load it ends the process as by default; later it is a line. For a shell both are exit code 130."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, ROOT / "apply.py", "why", module], capture_output=True,
                          text=True, check=False)
    assert "Traceback" not in done.stderr and done.stdout == ""
    if module in EARLY:
        assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    else:
        assert done.returncode == apply.INTERRUPTED == 130 and done.stderr.startswith("interrupted; ")
        assert done.stderr.count("\n") == 1


def test_an_ignored_ctrl_c_stays_ignored():
    """As in the background of a script, or under nohup."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, ROOT / "apply.py", "report", "patchset.pins"],
                          capture_output=True, text=True, check=False,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 2 and "unrecognized arguments" in done.stderr


def with_git(folder: Path, version: str | None) -> dict[str, str]:
    """An environment whose only git says it is that version (and otherwise works), or that has none."""
    folder.mkdir()
    if version:
        real = subprocess.run(["bash", "-c", "type -p git"], capture_output=True, text=True, check=True).stdout.strip()
        (folder / "git").write_text(f"#!/bin/sh\n[ $1 = version ] && echo '{version}' && exit\nexec {real} \"$@\"\n")
        (folder / "git").chmod(0o755)
    return os.environ | {"PATH": str(folder)}


@pytest.mark.parametrize("version", [None, "git version 2.31.9", "git version 1.8.3.1", "hub 1"])
def test_no_git_or_an_old_one_is_named_before_anything_is_done(version, tmp_path):
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for verb in (["apply", "--upstream", "megatron"], ["apply", "--upstream", "vllm", "--git", "https://x.invalid"]):
        done = subprocess.run([sys.executable, ROOT / "apply.py", *verb], capture_output=True, text=True, check=False,
                              env=with_git(tmp_path / verb[-1].strip("htps:/"), version) | cache)
        assert done.returncode == 1 and "2.32 or newer" in done.stderr and "Traceback" not in done.stderr
        assert (version or "git was not found") in done.stderr and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("said", ["git version 2.34.1", "git version 2.39.2 (Apple Git-143)", "git version 3.0"])
def test_newer_gits_are_taken_and_a_merge_asks_for_more(said, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", with_git(tmp_path / "git", said)["PATH"] + ":/usr/bin:/bin")
    git.demand.cache_clear()
    try:
        git.demand()
        with pytest.raises(NeedsWork, match="needs git 2.38") if "2.34" in said else nullcontext():
            git.demand(git.MERGING, "a merge")
    finally:
        git.demand.cache_clear()


def test_an_old_python_is_told_which_one_is_needed():
    """The file must still compile there; 3.6 is the oldest that any system's python3 is."""
    import ast
    tree = ast.parse((ROOT / "apply.py").read_text(encoding="utf-8"), feature_version=(3, 6))
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    check = next(n for n, node in enumerate(tree.body) if isinstance(node, ast.If) and "version_info" in ast.dump(node))
    modules = {alias.name for node in tree.body[:check] if isinstance(node, ast.Import) for alias in node.names}
    assert modules <= {"signal", "sys"} and not any(isinstance(n, ast.ImportFrom) for n in tree.body[:check])


@pytest.mark.parametrize("arguments", [["lint"], ["export", "--check"],
                                       ["rebase", "--upstream", "toy", "--to", "1.0.0"]])
def test_long_work_shows_how_far_it_is_on_a_terminal_alone(arguments, tmp_path, monkeypatch, capsys):
    made = hooked(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(apply, "ROOT", tmp_path)
    pack(made)
    made.export()
    apply.main(arguments)
    assert "\x1b" not in capsys.readouterr().err
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    monkeypatch.setattr(progress, "INTERVAL", 0)
    apply.main(arguments)
    lines = capsys.readouterr().err.split(progress.CLEAR)
    assert any("2/2 patches" in line for line in lines) and lines[-1] == "", "the last is wiped"
