"""docs/rebase.md names every verdict that a rebase can give, and shows commands that exist."""
from __future__ import annotations

import re
from pathlib import Path

from patchset import rebase_replay, rebase_verdicts, sentinel

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/rebase.md").read_text(encoding="utf-8")


def test_the_table_of_verdicts_is_complete():
    known = {rebase_replay.NAME_GONE, sentinel.CHANGED, sentinel.GONE, *rebase_replay.WORST_FIRST,
             rebase_verdicts.ABSORBED, rebase_verdicts.BLOCKED, rebase_verdicts.RESOLVED}
    table = PAGE.partition("## Verdicts")[2].partition("## Step by step")[0]
    assert set(re.findall(r"^\| ([a-z ]+?) \|", table, re.MULTILINE)) - {"verdict"} == known


def test_every_shown_command_came_out_as_the_page_says():
    """The transcript is made by docs/make_rebase.py; a traceback or an unexpected code must not slip into it."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert sum(block.count("$ ") for block in blocks) > 15
    assert all(re.match(r"\$ ", block) for block in blocks)
    assert "Traceback" not in PAGE
    assert set(re.findall(r"^\[exit (\d)\]$", PAGE, re.MULTILINE)) == {"3"}, "only rebase itself may say 3: look there"


def test_the_example_is_a_whole_report_of_a_release_that_is_not_supported():
    text = (ROOT / "docs/examples/rebase-0.31.0.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!patch )[a-z0-9-]+ \| [a-z ]+ \|", text, re.MULTILINE)
    said = re.search(r"-> 0\.31\.0: (\d+) patches", text)
    assert said and len(rows) == int(said[1]) > 0
