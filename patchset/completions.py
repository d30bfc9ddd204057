"""`apply.py completions SHELL`: completion scripts for bash, zsh and fish, made from the argument parser itself."""
from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from .ui import Result

NAME = "apply.py"
DIR, FILE, WORD = "<dir>", "<file>", "<word>"


@dataclass(frozen=True)
class Option:
    """An option, or with no flags a positional. values: the choices joined by spaces, DIR, FILE, WORD (anything), or
    "" for an option that takes no value."""

    flags: tuple[str, ...]
    help: str
    values: str


@dataclass(frozen=True)
class Verb:
    name: str
    help: str
    options: tuple[Option, ...]

    @property
    def flags(self) -> str:
        return " ".join(flag for option in self.options for flag in option.flags)

    @property
    def positional(self) -> str:
        return next((option.values for option in self.options if not option.flags), "")


def run(parser: argparse.ArgumentParser, shell: str) -> Result:
    text = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](verbs(parser))
    return Result({"shell": shell, "script": text}, [text.rstrip("\n")])


def verbs(parser: argparse.ArgumentParser) -> list[Verb]:
    sub = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in sub._choices_actions}
    return [Verb(name, helps.get(name, ""), tuple(_option(action) for action in one._actions))
            for name, one in sub.choices.items()]


def _option(action: argparse.Action) -> Option:
    if action.choices:
        values = " ".join(map(str, action.choices))
    elif action.nargs == 0:
        values = ""
    else:
        values = DIR if action.type is Path else FILE if action.dest == "path" else WORD
    return Option(tuple(action.option_strings), re.sub(r"\s+", " ", action.help or ""), values)


BASH = """\
# bash completion of apply.py, made by: apply.py completions bash
_zero_mismatch() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" verb="" i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        [[ "${COMP_WORDS[i]}" == -* ]] || { verb="${COMP_WORDS[i]}"; break; }
    done
    _zero_mismatch_words() { mapfile -t COMPREPLY < <(compgen -W "$1" -- "$cur"); }
    _zero_mismatch_paths() { mapfile -t COMPREPLY < <(compgen "$1" -- "$cur"); }
    case "$verb:$prev" in
%s
    esac
    case "$verb:$cur" in
%s
    esac
}
complete -o filenames -F _zero_mismatch apply.py ./apply.py
"""


def _bash(found: list[Verb]) -> str:
    values, words = [], [f'    :*) _zero_mismatch_words "{" ".join(verb.name for verb in found)} -h --help";;']
    for verb in found:
        for option in verb.options:
            if option.flags and option.values:
                where = "|".join(f"{verb.name}:{flag}" for flag in option.flags)
                values.append(f"    {where}) {_bash_reply(option.values)}; return;;")
        words.append(f'    {verb.name}:-*) _zero_mismatch_words "{verb.flags}";;')
        words.append(f"    {verb.name}:*) {_bash_reply(verb.positional or verb.flags)};;")
    return BASH % ("\n".join(values), "\n".join(words))


def _bash_reply(values: str) -> str:
    """What completes a value: nothing is known about a word."""
    kinds = {DIR: "_zero_mismatch_paths -d", FILE: "_zero_mismatch_paths -f", WORD: ":"}
    return kinds.get(values, f'_zero_mismatch_words "{values}"')


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh(found: list[Verb]) -> str:
    lines = [f"#compdef {NAME} ./{NAME}", f"# zsh completion, made by: {NAME} completions zsh", "_zero_mismatch() {",
             "    local -a verbs", "    verbs=("]
    lines += [f"        {_quoted(f'{verb.name}:{verb.help}')}" for verb in found]
    lines += ["    )", "    if (( CURRENT == 2 )); then", "        _describe 'verb' verbs", "        return", "    fi",
              '    local verb="${words[2]}"', "    shift words; (( CURRENT-- ))", '    case "$verb" in']
    for verb in found:
        lines += [f"        {verb.name}) _arguments " + " ".join(map(_zsh_option, verb.options)) + ";;"]
    return "\n".join([*lines, "    esac", "}", "compdef _zero_mismatch apply.py ./apply.py", ""])


def _zsh_option(option: Option) -> str:
    kinds = {"": "", DIR: ":folder:_files -/", FILE: ":file:_files", WORD: ":value:"}
    action = kinds.get(option.values, f":value:({option.values})")
    said = re.sub(r"([\[\]:])", r"\\\1", option.help)
    if not option.flags:
        return _quoted(f"1{action}")
    return " ".join(_quoted(f"*{flag}[{said}]{action}") for flag in option.flags)


def _fish(found: list[Verb]) -> str:
    names = " ".join(verb.name for verb in found)
    free = f"complete -c {NAME} -n 'not __fish_seen_subcommand_from {names}'"
    lines = [f"# fish completion of {NAME}, made by: {NAME} completions fish", f"complete -c {NAME} -f"]
    for verb in found:
        lines.append(f"{free} -a {verb.name} -d {_fish_quoted(verb.help)}")
        within = f"complete -c {NAME} -n '__fish_seen_subcommand_from {verb.name}'"
        lines += [f"{within} {text}" for text in map(_fish_option, verb.options) if text]
    return "\n".join([*lines, ""])


def _fish_option(option: Option) -> str:
    kinds = {"": "", DIR: "-xa '(__fish_complete_directories)'", FILE: "-F", WORD: "-x"}
    values = kinds.get(option.values, f"-xa {_fish_quoted(option.values)}")
    if not option.flags:
        return "" if option.values == WORD else values
    words = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags]
    return " ".join([*words, *filter(None, [values]), f"-d {_fish_quoted(option.help)}"])


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
