#!/usr/bin/env python3
"""Write docs/install.md by following each install path in a fresh clone: the commands, and what they print.

    python3 docs/make_install.py /path/to/python3.12

Needs git, that Python (the image's version), an index that pip can reach and 25 GB of free space: the wheel's path
installs every dependency of both engines. A command that exits with another code than expected stops it, and the old
transcript stays. What needs a Docker engine or a GPU is written down, not run, and said to be so.
"""
from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_quickstart import CUT, ROOT, run

APPLY, RECIPE = "python3 apply.py", "nemotron-3.5-lightning"
HEAD = f"""# Install

Three ways to the same two patched trees; each was followed in a fresh clone by `docs/make_install.py`, and what follows
is what it printed, on a machine without a GPU. [The image](#the-image) is what to take for a cluster,
[the wheel](#the-wheel) for one machine, [a checkout](#a-checkout) for working on the patches. They end in the same
check: `apply.py verify` exits 0 only if every path that `patchset.lock` names is exactly as locked. Of an installed
wheel it also compares the package's other files with RECORD; a source tree's are left to git: building writes some.

{CUT}"""
CHECKOUT = [
    ("Fetch both pinned upstreams and patch them. Python and git are enough.", f"{APPLY} apply", 0),
    ("", f"{APPLY} verify", 0),
    ("A tree that you have is patched where it lies: here one that was unpacked by hand.",
     "python3 docker/image_pins.py unpack vllm mine", 0),
    ("", f"{APPLY} apply --from mine", 0),
    ("", f"{APPLY} revert --from mine", 0),
    ("Megatron can be used from where it is. vLLM's libraries have to be compiled, on a machine with CUDA 13; this is "
     "how the image does it:", "sed -n '/source)/,/;;/p' docker/steps/vllm.sh", 0),
]
WHEEL = [
    ("The Python of the image: megatron-core's wheel is for that version alone.", "python3.12 -m venv .venv", 0),
    ("Both engines at their pins, with all they depend on (9 GB).",
     ".venv/bin/python -m pip install -qq $(python3 docker/image_pins.py engines)", 0),
    ("Patch them where they are installed, and check.", f"{APPLY} apply --installed .venv/bin/python", 0),
    ("", f"{APPLY} verify --installed .venv/bin/python", 0),
    ("What can be imported without a driver, the architectures in the compiled libraries, one NVSHMEM, one NCCL. "
     "`--partial` leaves out what only the image has.", ".venv/bin/python docker/image_checks.py --partial", 0),
    ("What there is to start, and how far each is.", ".venv/bin/python -m launch list", 0),
    ("The start-up check. Here the wheel's path ends: there is no GPU.",
     f".venv/bin/python -m launch check {RECIPE}", 1),
    ("On a machine that passes it, `launch serve` runs this:",
     f".venv/bin/python -m launch serve --print {RECIPE}", 0),
    ("Back to the published wheels.", f"{APPLY} revert --installed .venv/bin/python", 0),
]
IMAGE = [
    ("What it is built from, by digest.", "python3 docker/image_pins.py base", 0),
    ("", "python3 docker/image_pins.py requirements", 0),
    ("The commits that vLLM's own sources name for its kernel libraries; DeepEP is built at the one named here.",
     "python3 docker/image_pins.py unpack vllm mine && python3 docker/image_pins.py upstream mine", 0),
]
NOT_RUN = """From here on a Docker engine is needed, and then a GPU. These commands were **not run** for this page:

```
docker/build.sh zero-mismatch                                   # the published wheel, patched
docker/build.sh zero-mismatch --build-arg VLLM_FROM=source      # or vLLM built from the patched source
docker run --rm zero-mismatch manifest                          # what is in it; its short form is in the labels
docker run --rm --gpus all --ipc host -p 8000:8000 zero-mismatch serve nemotron-3.5-lightning
docker run --rm --gpus all --ipc host -v $PWD/evidence:/evidence zero-mismatch prove rollout --recipe deepseek-v4 --tiny
```

[docker/README.md](../docker/README.md) says which parts of the build have run outside Docker, and which never."""


PATHS = [("The wheel", WHEEL, ""), ("A checkout", CHECKOUT, ""), ("The image", IMAGE, NOT_RUN)]


def followed(steps, folder: Path) -> list[str]:
    text = []
    for said, command, code in steps:
        text += [said, ""] if said else []
        text += ["```", f"$ {command}", *run(command, code, folder, shown=40), "```", ""]
    return text


def main() -> None:
    python = Path(sys.argv[1]).resolve()
    started, text = time.monotonic(), [HEAD, ""]
    with tempfile.TemporaryDirectory() as work:
        tools = Path(work) / "bin"
        tools.mkdir()
        (tools / "python3.12").write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))} "$@"\n')
        (tools / "python3.12").chmod(0o755)
        os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
        for title, steps, after in PATHS:
            folder = Path(work) / title.replace(" ", "-") / "zero-mismatch"
            subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
            text += [f"## {title}", "", *followed(steps, folder)] + ([after, ""] if after else [])
    text += [f"All of it took {time.monotonic() - started:.0f} s on two cores.", ""]
    (ROOT / "docs/install.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
