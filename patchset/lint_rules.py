"""Every rule of `apply.py lint`, with what to do about a finding. docs/patches.md lists them (a test checks that)."""
from __future__ import annotations

from dataclasses import dataclass

ERROR, WARNING = "error", "warning"
RULES: dict[str, tuple[str, str]] = {
    # the series
    "series": (ERROR, "one existing slug a line, each once, in patches/<upstream>/series"),
    "unlisted": (ERROR, "add the slug to the series, or delete the file"),
    "variant": (ERROR, "a variant is <slug>@<version>.patch, for a pinned release; delete it, or rebase it again"),
    "draft": (ERROR, "make its edits in the applied tree, then apply.py refresh SLUG; or delete the draft"),
    "unreadable": (ERROR, "take the patch again from its tree with apply.py refresh"),
    "applies": (ERROR, "apply.py rebase shows what changed under it; an absorbed patch leaves the series"),
    "depends-on": (ERROR, "name slugs that stand earlier in the series"),
    "undeclared-dependency": (ERROR, "add the Depends-On line: --without would break this patch"),
    "duplicate-claim": (ERROR, "say each thing once: one subject a patch, one line a test"),
    # the head of a patch
    "subject": (ERROR, "one line, at most 110 characters, no full stop: what is hooked, which property it gives"),
    "body": (ERROR, "say why: the cause by upstream file:line, and why an overlay alone cannot do it"),
    "body-source": (WARNING, "name the upstream file and line of the cause"),
    "todo": (ERROR, "fill in what the draft left open"),
    "trailer-missing": (ERROR, "add it to the last paragraph above '---' (docs/patches.md)"),
    "trailer-unknown": (ERROR, "mend the name, or move the sentence up into the body"),
    "trailer-repeated": (ERROR, "keep one"),
    "upstream-status": (ERROR, "Pending, or Submitted, Backport, Denied, Inappropriate or Inactive-Upstream [reason]"),
    "upstream-pr": (ERROR, "an https address, or none"),
    "arch": (ERROR, "any, or architectures that a profile in patchset.toml names"),
    "drop-when": (ERROR, "state the condition under which the patch can go"),
    "load-bearing": (ERROR, "'yes — what breaks without it' or 'no — why it is there all the same'"),
    "test": (ERROR, "name an existing test as path.py::test_name"),
    "anchor": (ERROR, "name a symbol of the pristine release as path.py::Class.method"),
    "contract-read": (ERROR, "'<version> <digest> — why it is harmless', as apply.py rebase prints it"),
    # the diff
    "path": (ERROR, "a patch names plain relative paths, each once"),
    "link": (ERROR, "carry plain files only; no symbolic link, no submodule"),
    "mode": (ERROR, "keep modes as they are: a wheel does not carry the change"),
    "binary": (ERROR, "put binary files into the overlay"),
    "line-ends": (ERROR, "keep the line ends that the file has"),
    "final-newline": (ERROR, "end the file with a newline, as it did"),
    "trailing-space": (ERROR, "strip it"),
    "conflict-marker": (ERROR, "settle the conflict"),
    "invisible": (ERROR, "remove the character: it makes text read differently from what runs"),
    "syntax": (ERROR, "mend the patch: the file no longer compiles"),
    "undefined-name": (ERROR, "import or define it; an overlay module must hold what a hook imports"),
    "files": (WARNING, "a patch has one cause: split it, or move work into the overlay"),
    "lines": (WARNING, "thin patches, thick overlays: leave the hook here and move the rest into the overlay"),
    # overlays and claims
    "overlay-shadows": (ERROR, "rename the module: an overlay never replaces an upstream file"),
    "overlay-place": (ERROR, "put it under the upstream's package"),
    "overlay-link": (ERROR, "overlays hold plain files"),
    "lock": (ERROR, "write it with apply.py export"),
    "evidence": (ERROR, "make the record again with today's lock, or take the claim back"),
    "recipe": (ERROR, "mend recipe.toml (recipes/README.md), or say its status as it is"),
}


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    rule: str
    message: str

    @property
    def level(self) -> str:
        return RULES[self.rule][0]

    @property
    def remedy(self) -> str:
        return RULES[self.rule][1]

    def as_json(self) -> dict:
        return {**vars(self), "level": self.level, "remedy": self.remedy}

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.level}: {self.rule}: {self.message}; {self.remedy}"
