"""The command line: its options are these, every verb explains itself, and a reader that leaves is no error."""
import os
import subprocess
import sys
from pathlib import Path

import apply
import pytest

from patchset import completions

ROOT = Path(__file__).resolve().parents[2]
TARGET = {"--upstream", "--version", "--from", "--installed", "--site"}
OPTIONS = {
    "fetch": {"--upstream", "--version", "--git"},
    "plan": TARGET | {"--profile", "--without"},
    "apply": TARGET | {"--profile", "--without", "--git"},
    "verify": TARGET, "status": TARGET, "recover": TARGET,
    "revert": TARGET | {"--edits-to"},
    "new": {"--upstream"}, "refresh": {"--upstream", "--from"},
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
