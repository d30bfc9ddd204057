"""Each rule of lint finds its case, at its line, and a sound checkout has no finding; all findings come at once."""
import copy
import json
import shutil
from pathlib import Path

import pytest
from checkout import BASE, BODY, NEW, OLD, TRAILERS, Checkout, edit, files, hooked

from launch import __main__ as launch
from patchset import edit as edit_module
from patchset import export, lint, lint_rules, series
from patchset.lock import Lock
from patchset.ownership import Ownership
from patchset.rebase_replay import state_of
from patchset.shadow import File

GATE, LINES, THIRD = (f"patches/toy/{slug}.patch" for slug in ("gate-fp32", "line-thirty", "third"))
INIT = "overlays/toy/toy/zero_mismatch/__init__.py"
OVERLAY = "overlays/toy/toy/zero_mismatch/gate.py"
BIDI, ZERO_WIDTH = "\u202e", "\u200b"


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Checkout:
    return hooked(tmp_path_factory.mktemp("template"))


@pytest.fixture
def made(template, tmp_path) -> Checkout:
    checkout = copy.copy(template)
    checkout.base = {version: dict(found) for version, found in template.base.items()}
    checkout.root = shutil.copytree(template.root, tmp_path / "checkout")
    return checkout


def check(made: Checkout) -> list[dict]:
    result = lint.run(made.root, made.pins, made)
    errors = [finding for finding in result.data["findings"] if finding["level"] == "error"]
    assert (result.code, result.data["errors"]) == (int(bool(errors)), len(errors))
    assert len(result.lines) == len(result.data["findings"]) + 1
    return result.data["findings"]


def rules(made: Checkout) -> list[str]:
    return sorted({finding["rule"] for finding in check(made)})


def change(path, old, new):
    return lambda made: made.change(path, old, new)


def write(path, text):
    return lambda made: made.write(path, text)


def third(old, new, **options):
    """A third patch, on lines of lines.txt that no other touches."""
    return lambda made: made.patch("third", "toy/lines.txt", old, new, **options)


def added(text):
    return third("line 5\n", f"line 5\n{text}\n")


def changes(path, data, base=None):
    """A third patch that makes `data` of a file, which the release has as `base`."""
    def work(made):
        for version in made.base:
            if base is not None:
                made.base[version][path] = File(base)
        made.state = {**made.state, **({path: File(base)} if base is not None else {})}
        made.add("third", {**made.state, path: data if isinstance(data, File) else File(data)})
    return work


def several(count, text="x = 1\n"):
    new = {f"toy/new{number}.py": File(text.encode()) for number in range(count)}
    return lambda made: made.add("third", {**made.state, **new})


def absorb(made):
    made.base[OLD] = edit(made.base[OLD], "toy/lines.txt", "line 30\n", "line thirty\n")


def stale(made):
    """A variant that was made from another state of the main patch."""
    text = made.read(GATE).replace("\n---\n", f"\nRebased-From: {NEW} 0123456789ab\n---\n")
    made.write(f"patches/toy/gate-fp32@{OLD}.patch", text)


def release_has(path):
    return lambda made: made.base[OLD].update({path: File(b"")})


def link(made):
    (made.root / "overlays/toy/toy/zero_mismatch/link.py").symlink_to("gate.py")


def unsafe(made):
    made.write(LINES, made.read(LINES).replace("/toy/lines.txt", "/toy/../lines.txt"))


def twice(made):
    text = made.read(LINES)
    again = text[text.index("diff --git"):].replace("-line 30\n+line thirty\n", "-line thirty\n+line 30b\n")
    made.write(LINES, text + again)


def same_subject(made):
    third("line 5\n", "line five\n", subject="The gate-fp32 hook keeps a row at its bits")(made)


def claim(record):
    """The README points at a record; {digest} stands for today's."""
    def work(made):
        digest = next(iter(Lock.load(made.root).targets.values())).digest
        made.write("README.md", "Proven.\nDecode equals prefill [evidence/run.json].\n")
        if record is not None:
            text = record if isinstance(record, str) else json.dumps(record)
            made.write("evidence/run.json", text.replace("{digest}", digest))
    return work


GOOD = {"passed": True, "rows": [{"case": "base"}],
        "engines": {"a": {"lock": {"state": "locked", "digest": "{digest}"}}}}
RECIPE = """[model]
path = "x/y"
vocab = 8
[status]
state = "proven"
evidence = ["evidence/run.json"]
[requires]
platform = "cuda"
arch = ["sm90"]
[layout.rollout]
[env]
[engine]
"""
TOML, RUN = "recipes/r/recipe.toml", "recipes/r/run.sh"


def recipe(record, text=RECIPE):
    """A recipe that says it is proven, its run.sh, and the record it names."""
    def work(made):
        claim(record)(made)
        (made.root / "README.md").unlink()
        made.write(TOML, text)
        launch.write(only_check=False, root=made.root)
    return work


def run_sh_edited(made):
    recipe({**GOOD, "verb": "rollout", "subject": "r"})(made)
    made.change(RUN, "vllm serve", "vllm serve --enforce-eager")

CASES = {
    ("series", "repeated"): (write("patches/toy/series", "gate-fp32\ngate-fp32\n"), "patches/toy/series", 1),
    ("series", "listed without a file"): (
        write("patches/toy/series", "gate-fp32\nline-thirty\ngone\n"), "patches/toy/gone.patch", 1),
    ("unlisted", "patch"): (write("patches/toy/more.patch", "x"), "patches/toy/more.patch", 1),
    ("unlisted", "leftover"): (write("patches/toy/gate-fp32.patch.rej", "x"), "patches/toy/gate-fp32.patch.rej", 1),
    ("variant", "release"): (write("patches/toy/gate-fp32@9.patch", "x"), "patches/toy/gate-fp32@9.patch", 1),
    ("draft", ""): (write("patches/toy/more.draft", "x"), "patches/toy/more.draft", 1),
    ("unreadable", "count"): (change(LINES, "@@ -27,7", "@@ -27,9"), LINES, 1),
    ("unreadable", "extra line"): (change(LINES, " line 33\n", " line 33\n+line 34\n"), LINES, 1),
    ("unreadable", "binary"): (change(LINES, "--- a/", "GIT binary patch\n--- a/"), LINES, 1),
    ("unreadable", "rename"): (change(LINES, "--- a/", "rename from toy/a\n--- a/"), LINES, 1),
    ("applies", "conflict"): (change(LINES, "-line 30\n", "-line 30b\n"), LINES, 1),
    ("applies", "absorbed"): (absorb, LINES, 1),
    ("depends-on", "unknown"): (change(LINES, "Arch: any", "Depends-On: nobody\nArch: any"), LINES, 11),
    ("depends-on", "itself"): (change(LINES, "Arch: any", "Depends-On: line-thirty\nArch: any"), LINES, 11),
    ("depends-on", "later, so a cycle"): (change(GATE, "Arch: any", "Depends-On: line-thirty\nArch: any"), GATE, 11),
    ("undeclared-dependency", "its line"): (third("line thirty\n", "line XXX\n"), THIRD, 17),
    ("undeclared-dependency", "context"): (third("line 28\n", "line XXVIII\n"), THIRD, 17),
    ("duplicate-claim", "subject"): (same_subject, THIRD, 4),
    ("duplicate-claim", "line"): (
        change(LINES, "Counter-Test", "Tests: tests/test_toy.py::test_row_keeps_its_bits\nCounter-Test"), LINES, 13),
    ("subject", "long"): (change(GATE, "Subject: The", f"Subject: {'The ' * 30}"), GATE, 4),
    ("subject", "full stop"): (change(GATE, "its bits\n\n", "its bits.\n\n"), GATE, 4),
    ("body", "short"): (third("line 5\n", "line five\n", body="It makes toy/router.py:6 right."), THIRD, 5),
    ("body", "empty"): (third("line 5\n", "line five\n", body=""), THIRD, 5),
    ("body", "the subject again"): (
        third("line 5\n", "line five\n", body="The third hook keeps a row at its bits. " * 4), THIRD, 5),
    ("body-source", ""): (third("line 5\n", "line five\n", body=BODY.replace("router.py:6", "router")), THIRD, 5),
    ("todo", ""): (change(GATE, "an overlay alone", "TODO an overlay alone"), GATE, 7),
    ("trailer-missing", ""): (change(GATE, "Drop-When: upstream multiplies in fp32 itself\n", ""), GATE, 15),
    ("trailer-missing", "in the body"): (
        change(GATE, "inside upstream's", "\nTests: tests/test_toy.py::test_stock_differs\n\ninside"), GATE, 8),
    ("trailer-unknown", ""): (change(GATE, "Upstream-PR", "Upsteam-PR: none\nUpstream-PR"), GATE, 10),
    ("trailer-repeated", ""): (change(GATE, "Upstream-PR", "Upstream-PR: https://x.invalid/1\nUpstream-PR"), GATE, 11),
    ("upstream-status", "word"): (change(GATE, "Status: Pending", "Status: Later"), GATE, 9),
    ("upstream-status", "no reason"): (change(GATE, "Status: Pending", "Status: Inappropriate"), GATE, 9),
    ("upstream-status", "empty reason"): (change(GATE, "Status: Pending", "Status: Backport [ ]"), GATE, 9),
    ("upstream-pr", ""): (change(GATE, "PR: none", "PR: 123"), GATE, 10),
    ("arch", ""): (change(GATE, "Arch: any", "Arch: sm90, sm9"), GATE, 11),
    ("contract-read", ""): (change(GATE, "Anchors:", f"Contract-Read: {OLD} harmless\nAnchors:"), GATE, 16),
    ("variant", "stale"): (stale, f"patches/toy/gate-fp32@{OLD}.patch", 17),
    ("drop-when", ""): (change(GATE, "When: upstream multiplies in fp32 itself", "When: never"), GATE, 14),
    ("load-bearing", "no reason"): (change(GATE, "yes — without it a row's bits depend on the batch", "yes"), GATE, 15),
    ("load-bearing", "word"): (change(GATE, "yes — without", "maybe — without"), GATE, 15),
    ("test", "no such function"): (change(GATE, "test_row_keeps", "test_row_kept"), GATE, 12),
    ("test", "no such file"): (change(GATE, "Counter-Test: tests/test_toy", "Counter-Test: tests/test_boy"), GATE, 13),
    ("test", "no node"): (change(GATE, "::test_stock_differs", ""), GATE, 13),
    ("anchor", "no such symbol"): (change(GATE, "Gate.forward", "Gate.backward"), GATE, 16),
    ("anchor", "no such file"): (change(GATE, "toy/router.py::Gate", "toy/rooter.py::Gate"), GATE, 16),
    ("anchor", "no symbol"): (change(GATE, "toy/router.py::Gate.forward", "toy/router.py"), GATE, 16),
    ("path", "escape"): (unsafe, LINES, 18),
    ("path", "twice"): (twice, LINES, 31),
    ("path", "metadata"): (changes("toy-1.dist-info/RECORD", File(b"toy/__init__.py,,\n", "100644")), THIRD, 18),
    ("link", "symbolic"): (changes("toy/link.py", File(b"router.py", "120000")), THIRD, 18),
    ("mode", ""): (changes("setup.py", File(BASE["setup.py"].encode(), "100755")), THIRD, 18),
    ("line-ends", "CRLF into LF"): (added("five and a half\r"), THIRD, 26),
    ("line-ends", "LF into CRLF"): (
        changes("toy/crlf.py", b"a = 1\r\nb = 2\nc = 3\r\n", b"a = 1\r\nb = 1\r\nc = 3\r\n"), THIRD, 25),
    ("final-newline", ""): (changes("setup.py", b"print('toy')"), THIRD, 18),
    ("trailing-space", ""): (added("line five \t"), THIRD, 26),
    ("conflict-marker", ""): (added("<<<<<<< ours"), THIRD, 26),
    ("conflict-marker", "base"): (added("||||||| 1234567"), THIRD, 26),
    ("conflict-marker", "overlay"): (change(OVERLAY, "fp32.", "fp32.\n>>>>>>> theirs\n"), OVERLAY, 2),
    ("invisible", "bidi"): (added(f"# {BIDI}x"), THIRD, 26),
    ("invisible", "zero width"): (added(f"# {ZERO_WIDTH}x"), THIRD, 26),
    ("invisible", "in the head"): (change(GATE, "The gate multiplies", f"The {BIDI}gate multiplies"), GATE, 6),
    ("invisible", "in an overlay"): (change(OVERLAY, "fp32", f"fp{ZERO_WIDTH}32"), OVERLAY, 1),
    ("syntax", "patch"): (changes("toy/x.py", b"x = (1\n", b"x = 1\n"), THIRD, 18),
    ("syntax", "overlay"): (change(OVERLAY, "return x", "return (x"), OVERLAY, 5),
    ("undefined-name", "no import"): (changes("toy/x.py", b"x = envs.FLAG\n", b"x = 1\n"), THIRD, 18),
    ("undefined-name", "no such module"): (
        changes("toy/x.py", b"import toy.zero_mismatch.gone\n", b"x = 1\n"), THIRD, 18),
    ("undefined-name", "no such function"): (
        changes("toy/x.py", b"from toy.zero_mismatch.gate import gates\n", b"x = 1\n"), THIRD, 18),
    ("files", ""): (several(7), THIRD, 18),
    ("lines", ""): (several(1, "x = 1\n" * 121), THIRD, 18),
    ("overlay-shadows", "file"): (release_has("toy/zero_mismatch/gate.py"), OVERLAY, 1),
    ("overlay-shadows", "folder"): (release_has("toy/zero_mismatch"), INIT, 1),
    ("overlay-place", "outside"): (write("overlays/toy/other/x.py", "x = 1\n"), "overlays/toy/other/x.py", 1),
    ("overlay-place", "none"): (lambda made: shutil.rmtree(made.root / "overlays/toy"), "overlays/toy", 1),
    ("overlay-link", ""): (link, "overlays/toy/toy/zero_mismatch/link.py", 1),
    ("evidence", "no record"): (claim(None), "README.md", 2),
    ("evidence", "no JSON"): (claim("{"), "README.md", 2),
    ("evidence", "no lock"): (claim({"passed": True}), "README.md", 2),
    ("evidence", "another lock"): (claim({"passed": True, "lock": "0" * 64}), "README.md", 2),
    ("evidence", "another engine"): (
        claim({"passed": True, "lock": {"state": "other", "digest": "{digest}"}}), "README.md", 2),
    ("evidence", "not passed"): (claim({**GOOD, "passed": False}), "README.md", 2),
    ("evidence", "no rows"): (claim({**GOOD, "rows": []}), "README.md", 2),
    ("evidence", "another trainer"): (claim({**GOOD, "actor_lock": {"state": "locked", "digest": "0" * 64}}),
                                      "README.md", 2),
    ("recipe", "no record"): (recipe(None), TOML, 1),
    ("recipe", "another lock"): (recipe({"passed": True, "lock": "0" * 64}), TOML, 1),
    ("recipe", "not passed"): (recipe({**GOOD, "passed": False, "verb": "rollout", "subject": "r"}), TOML, 1),
    ("recipe", "record of another recipe"): (recipe({**GOOD, "verb": "rollout", "subject": "r-tiny"}), TOML, 1),
    ("recipe", "record of another proof"): (recipe({**GOOD, "verb": "bench", "subject": "r"}), TOML, 1),
    ("recipe", "schema"): (write(TOML, RECIPE.replace("vocab = 8", "vocab = 0")), TOML, 1),
    ("recipe", "no TOML"): (write(TOML, "[model"), TOML, 1),
    ("recipe", "no run.sh"): (write(TOML, RECIPE), RUN, 1),
    ("recipe", "edited run.sh"): (run_sh_edited, RUN, 1),
    ("lock", ""): (lambda made: (claim(GOOD)(made), (made.root / "patchset.lock").unlink()), "patchset.lock", 1),
}


def test_a_sound_checkout_has_no_finding(made):
    assert check(made) == []


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_each_rule_finds_its_case_at_its_line(case, made):
    work, path, line = CASES[case]
    work(made)
    hits = [finding for finding in check(made) if finding["rule"] == case[0]]
    assert (path, line) in [(finding["path"], finding["line"]) for finding in hits], check(made)
    assert all(finding["remedy"] and finding["message"] for finding in hits)


def test_a_recipe_whose_record_bears_it_out_is_no_finding(made):
    recipe({**GOOD, "verb": "rollout", "subject": "r"})(made)
    assert check(made) == []


def test_every_rule_has_a_case():
    assert {rule for rule, _ in CASES} | {"binary"} == set(lint_rules.RULES)


def test_a_nul_byte_is_found_where_git_takes_the_file_for_text(made):
    changes("toy/long.txt", b"x\n" * 5000 + b"a\0b\n", b"x\n" * 5000 + b"ab\n")(made)
    assert "binary" in rules(made)


def test_sound_claims_variants_and_declared_dependencies_are_no_findings(made):
    claim(GOOD)(made)
    assert check(made) == []
    state = state_of(series.load_one(made.root, "toy", "gate-fp32", NEW))
    more = f"\nContract-Read: {OLD} 0123456789ab — only a comment\nRebased-From: {NEW} {state}\n---\n"
    made.write(f"patches/toy/gate-fp32@{OLD}.patch", made.read(GATE).replace("\n---\n", more))
    third("line thirty\n", "line XXX\n", trailers=TRAILERS.replace("Arch", "Depends-On: line-thirty\nArch"),
          subject="Another")(made)
    assert check(made) == []


def test_a_dependency_of_a_dependency_counts(made):
    depends = TRAILERS.replace("Arch", "Depends-On: {}\nArch")
    third("line thirty\n", "line XXX\n", trailers=depends.format("line-thirty"))(made)
    made.patch("fourth", "toy/lines.txt", "line XXX\n", "line 3X\n", trailers=depends.format("third"))
    assert "undeclared-dependency" not in rules(made)


def test_all_findings_come_at_once(made):
    made.change(GATE, "Arch: any", "Arch: none")
    made.change(LINES, "Status: Pending", "Status: Later")
    made.change(OVERLAY, "return x", "return (x")
    made.write("patches/toy/more.draft", "x")
    assert rules(made) == ["arch", "draft", "syntax", "upstream-status"]


def test_what_a_draft_left_open_is_one_finding_a_line(made):
    head = edit_module.DRAFT.format(date="today").partition("\nUpstream-Status")
    trailers = "Upstream-Status" + head[2]
    body = head[0].partition("\n\n")[2].strip()
    third("line 5\n", "line five\n", subject="TODO x", body=body, trailers=trailers)(made)
    found = check(made)
    assert {finding["rule"] for finding in found} == {"todo"} and len(found) == 7


def test_a_broken_patch_does_not_hide_the_others(made):
    third("line 5\n", "line five\n", body="")(made)
    made.change(LINES, "@@ -27,7", "@@ -27,9")
    assert rules(made) == ["body", "unreadable"]


def test_a_file_that_upstream_left_broken_or_mixed_is_not_blamed_on_the_patch(made):
    changes("toy/template.py", b"{{ name }} = (2\n", b"{{ name }} = (1\n")(made)
    assert rules(made) == []
    for version in made.base:
        made.base[version]["toy/mixed.py"] = File(b"a = 1\r\nb = 1\n")
    made.state["toy/mixed.py"] = File(b"a = 1\r\nb = 1\n")
    made.add("fourth", {**made.state, "toy/mixed.py": File(b"a = 1\r\nb = 2\n")})
    assert rules(made) == []


def test_removed_lines_are_owned_too():
    base = files(BASE)
    with_gap = edit(base, "toy/lines.txt", "line 20\n", "")
    spans = edit(with_gap, "toy/lines.txt", "line 18\n", "line eighteen\n")
    beside = edit(with_gap, "toy/lines.txt", "line 24\n", "line twenty-four\n")
    for after, leans in ((spans, {"gap"}), (beside, set())):
        ownership = Ownership(base)
        assert ownership.follow("gap", parsed(base, with_gap)) == set()
        assert ownership.follow("next", parsed(with_gap, after)) == leans


def parsed(before, after):
    from checkout import diff as git_diff

    from patchset import diff

    return diff.parse(git_diff(before, after), "x")


def test_the_document_lists_every_rule_as_it_is():
    page = (Path(__file__).resolve().parents[2] / "docs/patches.md").read_text(encoding="utf-8")
    table = page.partition("<!-- rules -->")[2].partition("<!-- end of rules -->")[0]
    rows = [f"| `{name}` | {level} | {remedy} |" for name, (level, remedy) in lint_rules.RULES.items()]
    assert [row for row in table.splitlines() if row.startswith("| `")] == rows


def test_the_document_lists_every_trailer():
    page = (Path(__file__).resolve().parents[2] / "docs/patches.md").read_text(encoding="utf-8")
    assert [name for name in export.ORDER if f"\n| `{name}` | " not in page] == []
