"""What `plan` says of a target that apply would make: the pinned archive, read in memory. Nothing is written."""
from __future__ import annotations

from . import archive, deliver, fetch
from . import lock as locks
from .deliver import Outcome, Request
from .errors import NeedsWork
from .plan import Plan
from .target import Target


def look(request: Request, one: Target) -> Outcome:
    """`absent`: the archive is in the cache, and the delivery was worked out on it and held against the lock.
    `unfetched`: it is not, so the paths are those of the lock and no file was looked at."""
    release, upstream = one.release(request.version), one.upstream
    locked, place = request.locked(one, release), fetch.cached(upstream, release)
    if not fetch.held(place, release.sdist):
        if request.without:
            raise NeedsWork(f"what is left of the series has to be tried on {upstream.name} {release.version}, "
                            "which is not in the cache", remedy=f"run apply.py fetch --upstream {upstream.name}")
        return Outcome(one, "unfetched", _plan(one, release, locked, "unfetched"))
    built = deliver.build(request, one, lambda _u, _r, paths: archive.read_files(place, paths))
    if not request.without and built.locked.digest != locked.digest:
        raise locks.explain(locked, built.locked)
    return Outcome(one, "absent", _plan(one, release, built.locked, "pristine"), built.offsets)


def _plan(one: Target, release, locked: locks.LockedTarget, kind: str) -> Plan:
    return Plan(one, release, locked, None, kind, dict.fromkeys(locked.paths, kind))
