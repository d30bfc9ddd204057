#!/usr/bin/env python3
"""The image's health check. An engine that serves must answer /health; a container that does not serve is healthy."""
from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path

MARK = Path(os.environ.get("ZERO_MISMATCH_SERVING", "/tmp/zero-mismatch-serving"))  # `launch serve` writes its port


def main() -> int:
    if not MARK.is_file():
        return 0
    address = f"http://127.0.0.1:{MARK.read_text().strip()}/health"
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return int(answer.status != 200)
    except (OSError, ValueError) as error:
        print(f"{address}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
