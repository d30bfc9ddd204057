#!/usr/bin/env python3
"""Run the commands of docs/rebase.md, in order, in a clone of this checkout's HEAD, and put their output into the page.

    python3 docs/make_rebase.py

The clone starts without the patches written for 0.32.0 and the contracts that were read for it, so that the page shows
how they came about. Also writes docs/examples/rebase-0.31.0.md. Needs the sdists in the archive cache, or an index.
"""
from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from make_quickstart import DIGESTS, ROOT

PAGE = ROOT / "docs/rebase.md"
SHOWN = 60  # lines of one command's output, at most
WIDTH = 180  # and characters of one line
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PREPARE = r"""
rm -f patches/vllm/*@0.32.0.patch
python3 - <<'END'
import pathlib, re
for path in pathlib.Path("patches/vllm").glob("*.patch"):
    path.write_text(re.sub(r"^Contract-Read: 0\.32\.0 .*\n(?: .*\n)*", "", path.read_text(), flags=re.MULTILINE))
END
"""


def run(command: str, folder: Path) -> list[str]:
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    said = DIGESTS.sub(r"\1 …", done.stdout.replace(str(folder), "~/zero-mismatch"))
    lines = [line if len(line) <= WIDTH else line[: WIDTH - 1] + "…" for line in said.splitlines()]
    cut = [f"… ({len(lines) - SHOWN} more lines)"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + cut + ([f"[exit {done.returncode}]"] if done.returncode else [])


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "zero-mismatch"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        run("python3 apply.py rebase --upstream vllm --to 0.31.0", folder)
        example = (folder / "build/rebase/vllm-0.31.0/report.md").read_text()
        (ROOT / "docs/examples/rebase-0.31.0.md").write_text(example)
        subprocess.run(["bash", "-e", "-c", PREPARE], cwd=folder, check=True)

        def filled(block: re.Match) -> str:
            commands = [line for line in block[1].split("\n") if line.startswith("$ ")]
            shown = [line for command in commands for line in [command, *run(command[2:], folder)]]
            return "\n".join(["```console", *shown, "```"])

        PAGE.write_text(BLOCK.sub(filled, PAGE.read_text()))


if __name__ == "__main__":
    main()
