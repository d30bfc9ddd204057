"""What the documents say to type exists, what they point at exists, and a gate of the skill is a real command."""
import argparse
import contextlib
import io
import itertools
import json
import os
import pathlib
import re
import shlex

import apply as apply_command
import pytest
from prove import __main__ as prove_command
from prove import bisect, cases, recipe

from launch import __main__ as launch_command

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("skill/**/*.md"),
                *(path for top in (".", "docker", "evidence", "overlays", "patches", "prove", "recipes")
                  for path in (ROOT / top).glob("README.md" if top == "." else "**/README.md"))])
SKILL = (ROOT / "skill/SKILL.md").read_text()
PARSERS = {"apply.py": apply_command.parser(), "prove": prove_command.parser(), "launch": launch_command.parser()}
STARTS = re.compile(r"^(?:\$ )?(?:\S*python3?\S* (?:-m )?)?"
                    r"(apply\.py|prove|launch|docker/\S+|docs/\S+\.py|recipes/\S+\.sh)(?: |$)")


def lines(text: str) -> list[str]:
    """What stands in a block, one command a line, and in inline code, which may name a verb and no more."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    joined = [re.sub(r"\s*\\\n\s*", " ", block).splitlines() for block in blocks]
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line.strip() for line in itertools.chain(*joined)] + [one for one in inline if " " in one]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(program, its arguments) of every command that is one of ours. A comment or a pipe ends it; in a container the
    image's entry point has the names of the programs."""
    found = []
    for line in lines(text):
        line = re.sub(r"^docker run .* zero-mismatch (serve|train|prove) ", _entered, line.split(" | ")[0])
        if (start := STARTS.match(line)) and not re.search(r"…|\.\.\.|^apply\.py$", line.split("  #")[0]):
            words = shlex.split(line.removeprefix("$ "), comments=True)
            at = next(i for i, word in enumerate(words) if word == start[1] or word.endswith(start[1]))
            found.append((start[1], words[at + 1:]))
    return found


def _entered(start: re.Match) -> str:
    return "python3 -m prove " if start[1] == "prove" else f"python3 -m launch {start[1]} "


def wrong(program: str, arguments: list[str]) -> str:
    """Why the command cannot be typed, or ''."""
    if program not in PARSERS:
        return "" if (ROOT / program).is_file() and os.access(ROOT / program, os.X_OK) or program.endswith(".py") and (
            ROOT / program).is_file() else f"{program} does not exist or cannot be run"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            args = PARSERS[program].parse_args(arguments)
    except SystemExit as stop:
        mention = len(arguments) == 1 and "arguments are required" in said.getvalue()
        return "" if stop.code == 0 or mention else said.getvalue().strip().splitlines()[-1]
    return _meant(args)


def _meant(args: argparse.Namespace) -> str:
    """Names that the parser takes as any text."""
    if (name := getattr(args, "recipe", None)) and name not in {*recipe.names(), "NAME", "RECIPE"}:
        return f"no recipe {name}"
    if names := getattr(args, "cases", None):
        return "".join(f"no case {one} " for one in names.split(",") if one not in cases.BY_NAME)
    arms = {getattr(args, side, "decode") for side in ("left", "right")} - set(bisect.ARMS)
    return f"no arm {arms}" if arms else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_can_be_typed(page):
    text = page.read_text()
    if page.name == "SKILL.md":
        text = "".join(section for gate, section in gates().items() if states()[gate] == "ready")
    assert not [(program, arguments, why) for program, arguments in commands(text)
                if (why := wrong(program, arguments))]


def test_commands_are_found_and_a_wrong_one_is_seen():
    found = commands((ROOT / "docs/troubleshooting.md").read_text())
    assert {"apply.py", "prove", "launch"} <= {program for program, _ in found} and len(found) > 8
    for text in ("python3 -m prove rollout --recipe deepseek-v4 --tinny", "python3 -m prove rolout --recipe x",
                 "python3 -m prove rollout --recipe deepseek", "python3 apply.py aply", "docker/biuld.sh x",
                 "python3 -m prove rollout --recipe deepseek-v4 --cases twic", "python3 -m launch check deepseek",
                 "python3 -m prove bisect --recipe deepseek-v4 --left decoed", "python3 apply.py aply | head",
                 "docker run --rm zero-mismatch prove rolout --recipe deepseek-v4",
                 "docker run --rm zero-mismatch serve deepseek"):
        (program, arguments), = commands(f"```\n{text}\n```")
        assert wrong(program, arguments), text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_transcripts_count_what_the_lock_counts_and_name_no_digest():
    """Whoever adds a patch or an overlay file runs docs/make_quickstart.py, make_install.py, make_rebase.py again."""
    targets = json.loads((ROOT / "patchset.lock").read_text())["targets"].items()
    counts = {(name.partition("@")[0], len(one["patches"]), len(one["paths"])) for name, one in targets
              if name.endswith("/all")}
    for page in ("quickstart", "install", "rebase"):
        text = (ROOT / f"docs/{page}.md").read_text()
        said = re.findall(r"^\S+: (\w+)\S* \S+: .*\n  (\d+) patches on (\d+) files, (\d+) overlay files, "
                          r"lock …, tree …$", text, re.MULTILINE)
        assert {(name, int(patches), int(files) + int(added)) for name, patches, files, added in said} <= counts, page
        assert said and len(said) == len(re.findall(r"overlay files, lock", text)), page


def test_every_recipe_stands_on_one_page_with_its_status():
    said = [pair for page in ROOT.glob("docs/models/*.md")
            for pair in re.findall(r"^\| `([\w.-]+)` \| (\w+) \|", page.read_text(), re.MULTILINE)]
    assert sorted(said) == sorted((name, recipe.load(name, None).status["state"]) for name in recipe.names())


def gates() -> dict[str, str]:
    parts = re.split(r"^## ", SKILL, flags=re.MULTILINE)[1:]
    return {part.split(":")[0]: part for part in parts if re.match(r"C\d+:", part)}


def states() -> dict[str, str]:
    return dict(re.findall(r"^\| (C\d+) \| .* \| (\w+) \|$", SKILL, re.MULTILINE))


def test_there_are_eleven_gates_each_with_a_command_and_a_pass_condition():
    assert list(gates()) == list(states()) == [f"C{number}" for number in range(11)]
    for gate, section in gates().items():
        assert re.search(r"^python3 -m prove \w+ --recipe", section, re.MULTILINE), gate
        assert "**Passes** if" in section, gate
        assert states()[gate] == "ready", gate


def test_the_skill_says_when_to_use_it_and_names_every_guide():
    head = re.match(r"---\nname: ([\w-]+)\ndescription: (.+)\n---\n", SKILL)
    assert head and len(head[2]) > 40
    assert {path.name for path in ROOT.glob("skill/guides/*.md")} == set(re.findall(r"guides/([\w-]+\.md)", SKILL))
