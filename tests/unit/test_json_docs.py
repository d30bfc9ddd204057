"""docs/json.md is the whole truth about --json: every field a verb says is there, and none that no verb says."""
import importlib.util
import re
import sys
from pathlib import Path

import apply
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SPEC = importlib.util.spec_from_file_location("make_json", ROOT / "docs" / "make_json.py")
make_json = sys.modules["make_json"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_json)

# Fields that no scene reaches: a clone needs a repository to clone, no scene installs or settles a rebase, and the toy
# upstream is alone.
UNREACHED = {name for name in make_json.FIELDS["fetch"] if name.startswith("clone.")}
UNREACHED |= {"waiting[]", "patches[].notes[]", "patches[].names[]", "overlay[]", "renamed.<path>.to",
              "renamed.<path>.similarity", "patches[].sentinel[].where[]"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(apply, "ROOT", apply.ROOT)
        patched.setenv("XDG_CACHE_HOME", "unset")
        return list(make_json.scenes(tmp_path_factory.mktemp("json")))


def matching(field: str, documented) -> str | None:
    """The documented pattern of a field; `<name>` stands for any key, dots and all."""
    for pattern in documented:
        parts = [r".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", pattern) if part]
        if re.fullmatch("".join(parts), field):
            return pattern
    return None


def test_every_field_is_documented_and_every_documented_field_exists(found):
    seen = set()
    for scene in found:
        documented = {**make_json.ENVELOPE, **make_json.ERROR, **make_json.FIELDS[scene.section]}
        for field in make_json.patterns(scene.said):
            pattern = matching(field, documented)
            assert pattern, f"{scene.argv}: {field} is not in FIELDS of docs/make_json.py"
            seen.add((scene.section, pattern))
    for section, fields in make_json.FIELDS.items():
        for name in fields:
            said = any(pattern == name for where, pattern in seen if where == section or section == "every answer")
            assert said != (name in UNREACHED), f"{section}: FIELDS and the scenes disagree about {name}"


def test_every_verb_has_its_section(found):
    documented = {verb for section in make_json.FIELDS for verb in section.split(", ")}
    assert set(apply.VERBS) <= documented
    assert {scene.said["verb"] for scene in found} == set(apply.VERBS)


def test_the_page_holds_the_fields_as_they_are_now(found):
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    for line in make_json.page([]).splitlines():
        assert line in page, "run python3 docs/make_json.py"


def test_the_envelope_and_the_exit_codes(found):
    codes = {" ".join(scene.argv[:1]): scene.said["exit"] for scene in found}
    assert all(scene.said["schema"] == apply.JSON_SCHEMA for scene in found)
    assert codes["verify"] == 4 and codes["fetch"] == codes["sbom"] == 0
    (refusal,) = [scene for scene in found if scene.section == "a refusal"]
    assert refusal.said["error"]["kind"] == "dirty" and refusal.said["error"]["paths"]
