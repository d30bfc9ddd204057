"""Put edits of the finished tree into one patch of the series, and rebase the later ones on top, all in memory."""
from __future__ import annotations

import re
from dataclasses import replace

from . import export
from .errors import ConflictError, Row
from .lock import BaseFiles
from .pins import Release, Upstream
from .rebase_merge import Merger
from .series import Patch
from .shadow import File, Files, Shadow

CONFLICT = re.compile(rb"^<{7} .*?^>{7} [^\n]*$", re.MULTILINE | re.DOTALL)


def rebuilt(release: Release, up: Upstream, patches: list[Patch], chosen: Patch, edits: dict[str, File | None],
            base: BaseFiles) -> list[tuple[Patch, bytes]]:
    """The chosen patch with its diff, edits included, and every later one with its diff on top of it."""
    order = patches if chosen.text else [*patches, chosen]
    first = order.index(chosen)
    paths = {path for patch in patches for path in patch.paths} | set(edits)
    with Shadow(base(up, release, paths)) as shadow:
        states = [shadow.base]
        for patch in order:
            if patch.text:
                shadow.apply(patch)
            states.append(shadow.files())
        merger = Merger(shadow)
        edited = _with(states[-1], {path: file and replace(file, mode=states[-1].get(path, file).mode)
                                    for path, file in edits.items()})
        below = states[first]
        now = _merge(merger, states[-1], states[first + 1], edited, (chosen.slug, "the edited tree"))
        texts = []
        for number, patch in enumerate(order[first:], first + 1):
            if patch is not chosen:
                now = _merge(merger, states[number - 1], below, states[number], (chosen.slug, patch.slug))
            text = export.diff_trees(shadow, shadow.tree_of(below), shadow.tree_of(now))
            if not text:
                raise ConflictError(f"{up.name}/{patch.slug} would change nothing any more",
                                    remedy="take it out of the series first, then make the edits again")
            texts.append((patch, text))
            below = now
    _demand_edited(now, edited, chosen)
    return texts


def _with(files: Files, changes: dict[str, File | None]) -> Files:
    return {path: file for path, file in {**files, **changes}.items() if file}


def _demand_edited(result: Files, edited: Files, chosen: Patch) -> None:
    rows = [Row(path, "another text", "the edited file") for path in sorted(set(result) | set(edited))
            if result.get(path) != edited.get(path)]
    if rows:
        raise ConflictError(f"with the edits in {chosen.slug} the later patches do not give the edited tree", rows=rows,
                            remedy="name a later patch, or split the edit")


def _merge(merger: Merger, base: Files, ours: Files, theirs: Files, names: tuple[str, str]) -> Files:
    """3-way merge of every file. Raises ConflictError with both sides of every conflict."""
    merged, rows, blocks = {}, [], []
    for path in sorted(set(base) | set(ours) | set(theirs)):
        one, two, three = base.get(path), ours.get(path), theirs.get(path)
        if one == two or two == three:
            merged[path] = three
        elif one == three:
            merged[path] = two
        elif not (one and two and three):
            rows.append(Row(path, *(f"{name} {'has' if file else 'deletes'} it"
                                    for name, file in zip(names[::-1], (three, two), strict=True))))
        else:
            done = merger.merge(one, two, three, ("before", *names))
            merged[path] = File(done.data, two.mode)
            if done.conflict:
                found = CONFLICT.findall(done.data)
                blocks += [f"{path}:\n" + block.decode("utf-8", "replace") for block in found]
                rows.append(Row(path, f"{len(found)} places changed by {names[1]}", f"left alone by {names[0]}"))
    if rows:
        message = f"{names[0]} and {names[1]} change the same lines; nothing was written"
        raise ConflictError("\n".join([message, *blocks]), rows=rows,
                            remedy="give the edits to a later patch (apply.py refresh SLUG), or edit so that both fit")
    return _with({}, merged)
