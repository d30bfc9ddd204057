"""Whatever stands in a file that a verb reads, it answers with a refusal or does its work; never with a traceback."""
import base64
import hashlib
import shutil

import apply
import pytest
from checkout import Checkout, hooked, pack, tree

DAMAGES = {
    "empty": b"", "binary": bytes(range(256)), "half": None, "an object": b"{}", "a list": b"[]", "a number": b"7",
    "null": b"null", "text": b"text\n", "another encoding": "[upstr\xe9am]\n".encode("latin-1"),
    "conflict": b"<<<<<<< ours\na\n=======\nb\n>>>>>>> theirs\n",
    "deep": b"[" * 20_000,
}
VERBS = [["status"], ["apply"], ["revert"], ["recover"], ["refresh", "--upstream", "toy"]]
READERS = [["report"], ["why", "toy/router.py"], ["lint"], ["plan"]]
SITE = [["status"], ["apply"], ["revert"], ["recover"]]
FILES = {
    "patchset.toml": [*READERS, ["apply"]], "patchset.lock": [*READERS, ["apply"]], "patches/toy/series": READERS,
    "patches/toy/gate-fp32.patch": READERS, "evidence/x.json": [["report"], ["lint"]],
    "build/toy/.zero-mismatch/state.json": VERBS, "build/toy/.zero-mismatch/journal.json": VERBS,
    "build/toy/PKG-INFO": VERBS, "build/toy/pyproject.toml": [["status", "--from", "build/toy"]],
    "bare/toy-2.0.0.dist-info/RECORD": SITE, "bare/toy-2.0.0.dist-info/METADATA": SITE,
    "site/toy-2.0.0.dist-info/METADATA": SITE, "site/toy-2.0.0.dist-info/RECORD": SITE,
    "site/toy-2.0.0.dist-info/direct_url.json": SITE,
    "site/toy-2.0.0.dist-info/zero_mismatch/state.json": SITE,
    "site/toy-2.0.0.dist-info/zero_mismatch/journal.json": SITE,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Checkout:
    """The series applied to build/toy and to a wheel in site/; bare/ has the wheel alone. Not to be written to."""
    made = hooked(tmp_path_factory.mktemp("template") / "checkout")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(apply, "ROOT", made.root)
        patched.setenv("XDG_CACHE_HOME", str(made.root / "cache"))
        pack(made)
        made.export()
        tree(made)
        _install(made, "bare")
        _install(made, "site")
        assert apply.main(["apply", "--site", str(made.root / "site")]) == 0
    made.write("README.md", "claimed: evidence/x.json\n")
    return made


def _install(made: Checkout, site: str) -> None:
    rows = []
    for path, file in made.base["2.0.0"].items():
        made.write(f"{site}/{path}", file.data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(file.data)}\n")
    info = "toy-2.0.0.dist-info"
    made.write(f"{site}/{info}/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 2.0.0\n\n")
    made.write(f"{site}/{info}/RECORD", "".join(rows) + f"{info}/METADATA,,\n{info}/RECORD,,\n")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_no_content_of_a_file_ends_in_a_traceback(file, damage, template, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(template.root / "cache"))
    for number, verb in enumerate(FILES[file]):
        root = shutil.copytree(template.root, tmp_path / str(number), ignore=shutil.ignore_patterns("cache"))
        monkeypatch.setattr(apply, "ROOT", root)
        monkeypatch.chdir(root)
        place = root / file
        content = DAMAGES[damage]
        if content is None:
            old = place.read_bytes() if place.exists() else b'{"direction": "apply", "changes": [], "folders": []}'
            content = old[:len(old) // 2]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        site = file.split("/")[0]
        code = apply.main([*verb, "--site", site] if site in ("site", "bare") else verb)
        said = capsys.readouterr()
        assert code in range(6) and said.out + said.err, verb
