"""A verb that only looks writes nothing at all, neither to the target nor to the checkout or the archive cache."""
import json
import re

import apply
import pytest
from checkout import OLD, Checkout, edit, hooked, pack, tree

from patchset import deliver, fetch, target

# What a verb may write is said in its help; all that stand in LOOKING say or imply that they write nothing.
LOOKING = {"plan", "verify", "status", "why", "report", "lint", "sbom", "completions"}
WRITING = {"fetch", "apply", "revert", "recover", "new", "refresh", "export", "rebase"}
CALLS = {
    "plan": ["plan"], "plan without a patch": ["plan", "--without", "line-thirty"],
    "plan of the other release": ["plan", "--version", OLD], "verify": ["verify"], "status": ["status"],
    "why": ["why", "toy/router.py"], "why of an unpatched path": ["why", "setup.py"],
    "why of no path": ["why", "toy/routr.py"], "report": ["report"], "sbom": ["sbom"],
    "completions": ["completions", "bash"], "lint": ["lint"], "export --check": ["export", "--check"],
}
NEEDS_ARCHIVES = {"lint", "export --check"}  # they fetch what is missing; offline there is nothing to look at


def request(made: Checkout) -> deliver.Request:
    return deliver.Request(made.root, made.pins, made.pins.profile("all"))


def unpacked(made: Checkout) -> target.Target:
    one = tree(made)
    deliver.revert(request(made), one)
    return one


def edited(made: Checkout) -> None:
    tree(made)
    made.change("build/toy/toy/router.py", "return y", "return y + 0")


def by_another_lock(made: Checkout) -> None:
    tree(made)
    made.change("overlays/toy/toy/zero_mismatch/gate.py", "2.0", "3.0")
    made.export()


def interrupted(made: Checkout) -> None:
    tree(made)
    made.write("build/toy/.zero-mismatch/journal.json", "{}")


def damaged(made: Checkout) -> None:
    place = fetch.cached(made.pins.upstream("toy"), made.pins.upstream("toy").release())
    place.write_bytes(place.read_bytes()[:-20])


STATES = {"nothing built": lambda made: None, "pristine": unpacked, "applied": tree, "edited": edited,
          "another lock": by_another_lock, "interrupted": interrupted, "damaged archive": damaged,
          "no archive": lambda made: [place.unlink() for place in (made.root / "cache").rglob("*.gz")]}


@pytest.fixture
def made(tmp_path, monkeypatch) -> Checkout:
    checkout = hooked(tmp_path / "checkout")
    checkout.base[OLD] = edit(checkout.base[OLD], "setup.py", "toy", "old toy")
    monkeypatch.setattr(apply, "ROOT", checkout.root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout.root / "cache"))
    pack(checkout)
    checkout.export()
    return checkout


def everything(made: Checkout) -> dict[str, tuple]:
    """Names, modes, bytes and times of change: of a folder too, so a file that came and went shows."""
    found = {}
    for path in [made.root, *made.root.rglob("*")]:
        info = path.lstat()
        found[str(path)] = (info.st_mode, info.st_ino, info.st_mtime_ns, path.is_file() and path.read_bytes())
    return found


def test_every_verb_is_known_to_look_or_to_write():
    assert LOOKING | WRITING == set(apply.VERBS) and not LOOKING & WRITING
    assert {call[0] for call in CALLS.values()} == LOOKING | {"export"}


@pytest.mark.parametrize("state", STATES)
def test_a_look_changes_nothing(state, made, capsys, tmp_path, monkeypatch):
    STATES[state](made)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    before = everything(made)
    for name, call in CALLS.items():
        if name in NEEDS_ARCHIVES and state in ("no archive", "damaged archive"):
            continue
        code = apply.main(call)
        said = capsys.readouterr()
        assert everything(made) == before, name
        assert code in range(6) and (said.out or said.err), name
    assert list((tmp_path / "tmp").iterdir()) == [], "temporary files are removed"


def test_plan_says_what_apply_then_does(made, capsys):
    """Before there is a target: the same patches, paths, lock and tree that apply delivers."""
    def run(verb: str) -> dict:
        assert apply.main([verb, "--json"]) == 0
        [said] = json.loads(capsys.readouterr().out)["targets"]
        return said

    planned = run("plan")
    assert planned["done"] == "absent" and set(planned["paths"].values()) == {"pristine"}
    assert planned["paths"].keys() == {"toy/router.py", "toy/lines.txt", "toy/zero_mismatch/__init__.py",
                                       "toy/zero_mismatch/gate.py"}
    done = run("apply")
    assert done["done"] == "applied"
    assert {key: planned[key] for key in planned if key != "done"} == {key: done[key] for key in done if key != "done"}


def test_plan_without_an_archive_says_that_apply_would_fetch_it(made, capsys):
    STATES["no archive"](made)
    assert apply.main(["plan"]) == 0
    said = capsys.readouterr().out
    assert "apply would fetch the pinned archive" in said.splitlines()[0]
    assert re.search(r"toy/router.py +unfetched +gate-fp32", said)
    assert apply.main(["plan", "--without", "gate-fp32"]) == 1
    assert "apply.py fetch" in capsys.readouterr().err


def test_plan_of_an_absent_target_holds_the_delivery_against_the_lock(made, capsys):
    made.change("overlays/toy/toy/zero_mismatch/gate.py", "2.0", "3.0")
    assert apply.main(["plan"]) == 5
    assert "changed since patchset.lock" in capsys.readouterr().err


def test_help_changes_nothing(made, capsys):
    before = everything(made)
    for verb in apply.VERBS:
        with pytest.raises(SystemExit):
            apply.main([verb, "--help"])
    assert everything(made) == before
