"""`apply.py sbom`: a CycloneDX 1.6 bill of materials. Equal inputs give equal bytes: no time, an id from the lock."""
from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path

from . import lock as locks
from . import series
from .errors import LockMismatch, Row
from .lock import OVERLAY, Lock, LockedTarget
from .pins import Pins, Profile, Release, Upstream
from .series import Patch
from .ui import Result

SPECIFICATION = "1.6"
PROFILE = "all"
OURS = "zero-mismatch"


def run(root: Path, pins: Pins) -> Result:
    """The default release of every upstream under the profile `all`, as the lock has them."""
    lock, profile = Lock.load(root), pins.profile(PROFILE)
    components, needs = [], []
    for name in profile.upstreams:
        upstream = pins.upstream(name)
        release = upstream.release()
        locked = lock.target(name, release.version, profile.name)
        patches = _patches(root, upstream, release, profile, locked)
        components += [_upstream(upstream, release, locked, patches), *_overlay(upstream, locked)]
        needs.append({"ref": f"overlay:{name}", "dependsOn": [_purl(upstream, release)]})
    bom = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json",
        "bomFormat": "CycloneDX", "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, (root / locks.NAME).read_text(encoding='utf-8'))}",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": OURS, "name": OURS}},
        "components": components,
        "dependencies": [{"ref": OURS, "dependsOn": [need["ref"] for need in needs]}, *needs],
    }
    return Result({"bom": bom}, [json.dumps(bom, indent=1, ensure_ascii=False)])


def _patches(root: Path, upstream: Upstream, release: Release, profile: Profile, locked: LockedTarget) -> list[Patch]:
    """The selected series. Raises LockMismatch if it is not the locked one."""
    patches = series.select(series.load(root, upstream.name, release.version), profile)
    want, have = dict(locked.patches), {patch.slug: patch.sha256 for patch in patches}
    rows = [Row(slug, have.get(slug, "absent")[:12], want.get(slug, "absent")[:12])
            for slug in sorted(want.keys() | have.keys()) if want.get(slug) != have.get(slug)]
    if rows:
        raise LockMismatch(f"the patches of {locked.name} have changed since {locks.NAME} was written", rows=rows,
                           remedy="write the lock again with apply.py export")
    return patches


def _purl(upstream: Upstream, release: Release) -> str:
    return f"pkg:pypi/{upstream.distribution}@{release.version}"


def _upstream(upstream: Upstream, release: Release, locked: LockedTarget, patches: list[Patch]) -> dict:
    about = {"tag": release.tag, "commit": release.commit, "wheel:sha256": release.wheel, "profile": locked.profile,
             "lock": locked.digest, "tree": locked.tree}
    for patch in patches:
        about[f"patch:{patch.slug}:sha256"] = patch.sha256
        about[f"patch:{patch.slug}:diff:sha256"] = _diff_digest(patch)
        about[f"patch:{patch.slug}:upstream-status"] = " ".join(patch.values("Upstream-Status"))
        about[f"patch:{patch.slug}:arch"] = ", ".join(sorted(patch.arch))
    purl = _purl(upstream, release)
    return {
        "type": "library", "bom-ref": purl, "name": upstream.distribution, "version": release.version, "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": release.sdist}],
        "pedigree": {"patches": [_patch(patch) for patch in patches],
                     "notes": f"The hash is that of the pristine sdist; patched it is the git tree {locked.tree}."},
        "properties": _properties(about),
    }


def _patch(patch: Patch) -> dict:
    status = " ".join(patch.values("Upstream-Status"))
    resolves = {"type": "defect", "id": patch.slug, "name": patch.subject, "description": patch.body}
    if links := [link for link in patch.values("Upstream-PR") if link != "none"]:
        resolves["references"] = links
    url = f"patches/{patch.upstream}/{patch.path.name}#sha256={_diff_digest(patch)}"
    return {"type": "backport" if status.startswith("Backport") else "unofficial", "diff": {"url": url},
            "resolves": [resolves]}


def _diff_digest(patch: Patch) -> str:
    return hashlib.sha256(patch.text).hexdigest()


def _overlay(upstream: Upstream, locked: LockedTarget) -> list[dict]:
    files = [{"type": "file", "bom-ref": f"overlay:{upstream.name}:{path}", "name": path,
              "hashes": [{"alg": "SHA-256", "content": entry.after}]}
             for path, entry in sorted(locked.paths.items()) if entry.by == (OVERLAY,)]
    return [{"type": "library", "bom-ref": f"overlay:{upstream.name}", "name": f"{OURS}-{upstream.name}-overlay",
             "version": locked.digest[:12], "description": f"New modules placed inside {upstream.package}",
             "components": files}]


def _properties(about: dict[str, str]) -> list[dict]:
    return [{"name": f"{OURS}:{name}", "value": value} for name, value in sorted(about.items()) if value]
