"""A lock of one file, in the place of the repository's: what a fake engine's site is bound to."""
import hashlib
import json

from prove import record


def use(folder, monkeypatch, path: str, after: str, before: str | None = None) -> None:
    """record.bind knows one entry from now on: `path` with the text `after`; None is no file in the release."""
    sha = {text: text if text is None else hashlib.sha256(text.encode()).hexdigest() for text in (before, after)}
    lock, bind = folder / "patchset.lock", record.bind
    lock.write_text(json.dumps({"targets": {"vllm@0/all": {
        "digest": "d", "paths": {path: {"before": sha[before], "after": sha[after]}}}}}))
    monkeypatch.setattr(record, "bind", lambda site: bind(site, lock_path=lock))
