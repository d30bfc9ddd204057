#!/usr/bin/env python3
"""Write docs/quickstart.md by running it: clone this checkout's HEAD, type the commands, keep what they print.

    python3 docs/make_quickstart.py

Needs git, Python 3.11+, and either the two sdists in the archive cache or an index that pip can reach. A command that
exits with another code than expected stops it, and the old transcript stays.
"""
from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APPLY = "python3 apply.py"
SHOWN = 24  # lines of one command's output, at most
DIGESTS = re.compile(r"\b(lock|tree) [0-9a-f]{12}\b")  # every change of an overlay's comment moves them: cut
CUT = "The digests behind `lock` and `tree` are cut: they are those of your own `patchset.lock`."

STEPS = [  # what a newcomer is told, the command, its exit code
    ("What will happen? This only looks.", f"{APPLY} plan --upstream megatron", 0),
    ("Fetch both pinned upstreams and patch them. Nothing has to be installed.", f"{APPLY} apply", 0),
    ("Check that both trees are exactly the locked ones.", f"{APPLY} verify", 0),
    ("A second apply changes nothing and says so.", f"{APPLY} apply", 0),
    ("Where each target stands.", f"{APPLY} status", 0),
    ("Which patches touch a file, and why.", f"{APPLY} why vllm/models/deepseek_v4/nvidia/flashmla.py", 0),
    ("", f"{APPLY} why vllm/models/deepseek_v4/nvidia/flash_mla.py", 2),
    ("The series as a table.", f"{APPLY} report", 0),
    ("An edit of yours in a patched file is seen, and never lost.",
     "echo '# mine' >> build/vllm/vllm/models/deepseek_v4/compressor.py", 0),
    ("", f"{APPLY} status --upstream vllm", 4),
    ("", f"{APPLY} revert --upstream vllm --edits-to saved", 0),
    ("", "tail -n 1 saved/vllm/models/deepseek_v4/compressor.py", 0),
    ("Put every original back.", f"{APPLY} revert", 0),
    ("", f"{APPLY} status", 1),
    ("Would the series hold on another release? A verdict a patch.", f"{APPLY} rebase --upstream vllm --to 0.32.0", 0),
]


def run(command: str, code: int, folder: Path, shown: int = SHOWN) -> list[str]:
    done = subprocess.run(command, shell=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != code:
        sys.exit(f"{command}: exit {done.returncode}, expected {code}\n{done.stdout}")
    said = done.stdout.replace(str(folder), "~/zero-mismatch").replace(str(Path.home()), "~")
    lines = DIGESTS.sub(r"\1 …", said).splitlines()
    cut = [f"… ({len(lines) - shown} more lines)"] if len(lines) > shown else []
    return lines[:shown] + cut + ([f"[exit {code}]"] if code else [])


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "zero-mismatch"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        started, text = time.monotonic(), ["# Quickstart: a transcript", ""]
        text += ["Made by `docs/make_quickstart.py`, which runs every command below in a fresh clone.", CUT, ""]
        for said, command, code in STEPS:
            text += [said, ""] if said else []
            text += ["```", f"$ {command}", *run(command, code, folder), "```", ""]
        text += [f"All of it took {time.monotonic() - started:.0f} s on two cores.", ""]
    (ROOT / "docs/quickstart.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
