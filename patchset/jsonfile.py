"""Read a JSON file that anyone may have changed since it was written."""
from __future__ import annotations

import json
from pathlib import Path

WRONG = (ValueError, KeyError, TypeError, AttributeError)  # what reading fields of other data than expected raises


def read(path: Path):
    """What the file holds. Raises ValueError if that is no JSON, and what opening it raises."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deep") from None
