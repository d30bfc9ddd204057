"""Completion offers every verb and option of the real command line, in bash, zsh and fish."""
import argparse
import os
import shutil
import subprocess
from pathlib import Path

import apply
import pytest

from patchset import completions

VERBS = completions.verbs(apply.parser())


def script(shell: str, parser=None) -> str:
    return "\n".join(completions.run(parser or apply.parser(), shell).lines) + "\n"


def bash(words: list[str], folder: Path, text: str = "") -> list[str]:
    """What bash offers for the last of `words`."""
    line = " ".join(f"'{word}'" for word in ["apply.py", *words])
    code = f"{text or script('bash')}\nCOMP_WORDS=({line}) COMP_CWORD={len(words)}\n_zero_mismatch\n" \
           'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "--norc", "-eu", "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [word for word in done.stdout.split("\n") if word]


def test_bash_offers_every_verb(tmp_path):
    assert set(bash([""], tmp_path)) == {*apply.VERBS, "-h", "--help"}
    assert bash(["re"], tmp_path) == [name for name in apply.VERBS if name.startswith("re")]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_bash_offers_every_option_of_a_verb(verb, tmp_path):
    assert "--json" in verb.flags
    assert set(bash([verb.name, "-"], tmp_path)) == set(verb.flags.split())


def test_bash_offers_choices_folders_and_files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert bash(["completions", ""], tmp_path) == ["bash", "zsh", "fish"]
    assert bash(["completions", "f"], tmp_path) == ["fish"]
    assert bash(["apply", "--from", ""], tmp_path) == ["folder"]
    assert bash(["apply", "--json", "--site", "f"], tmp_path) == ["folder"]
    assert sorted(bash(["why", "f"], tmp_path)) == ["file", "folder"]
    assert bash(["apply", "--version", ""], tmp_path) == []
    assert set(bash(["export", ""], tmp_path)) == {"-h", "--help", "--json", "--check"}
    assert bash(["nonsense", ""], tmp_path) == []


def odd_parser() -> argparse.ArgumentParser:
    """Help texts and choices that a shell could trip over."""
    parser = argparse.ArgumentParser()
    sub = parser.add_subparsers().add_parser("go", help="it's a \"test\" [of] $HOME: `date` \\ 100%%")
    sub.add_argument("--mode", choices=["a-b", "c.d"], help="one's $(date) [mode]: `x` \\ \"y\"")
    return parser


def test_bash_takes_odd_texts(tmp_path):
    text = script("bash", odd_parser())
    assert bash(["go", "--mode", "c"], tmp_path, text) == ["c.d"]
    assert bash(["go", "--"], tmp_path, text) == ["--help", "--mode"]


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_offers_verbs_options_and_choices(tmp_path):
    def ask(line: str, text: str) -> list[str]:
        path = tmp_path / "completions.fish"
        path.write_text(text)
        command = ["fish", "--no-config", "-c", f"source {path}; complete -C '{line}'"]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True,
                              env={**os.environ, "HOME": str(tmp_path)})
        assert done.stderr == ""
        return [row.split("\t")[0] for row in done.stdout.splitlines()]

    text = script("fish")
    assert set(ask("apply.py ", text)) == set(apply.VERBS)
    for verb in VERBS:
        long = {flag for flag in verb.flags.split() if flag.startswith("--")}
        assert set(ask(f"apply.py {verb.name} --", text)) == long
    assert ask("apply.py completions ", text) == ["bash", "fish", "zsh"]
    assert ask("apply.py go --mode ", script("fish", odd_parser())) == ["a-b", "c.d"]


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
@pytest.mark.parametrize("parser", [apply.parser, odd_parser])
def test_zsh_takes_the_script_and_names_every_option(parser, tmp_path):
    text = script("zsh", parser())
    said = {}
    for verb in completions.verbs(parser()):
        code = "compdef() { }; _arguments() { print -rl -- \"$@\" }; _describe() { }\n" + text + \
               f"words=(apply.py {verb.name} '') CURRENT=3; _zero_mismatch"
        done = subprocess.run(["zsh", "-f", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        said[verb.name] = {line[1:].split("[")[0] for line in done.stdout.splitlines() if line.startswith("*")}
        assert said[verb.name] == set(verb.flags.split())
