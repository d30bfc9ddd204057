"""The bill of materials is CycloneDX 1.6, says what the lock says, and is the same bytes for the same inputs."""
import hashlib
import json
import re

import pytest
from checkout import NEW, TRAILERS, Checkout, hooked

from patchset import sbom, series
from patchset.errors import LockMismatch
from patchset.lock import Lock

# What the specification allows in the objects used here (bom-1.6.schema.json forbids any other key).
KEYS = {
    "bom": {"$schema", "bomFormat", "specVersion", "serialNumber", "version", "metadata", "components", "dependencies"},
    "component": {"type", "bom-ref", "name", "version", "purl", "hashes", "pedigree", "properties", "description",
                  "components"},
    "pedigree": {"patches", "notes"}, "patch": {"type", "diff", "resolves"}, "diff": {"url"},
    "resolves": {"type", "id", "name", "description", "references"}, "property": {"name", "value"},
    "hash": {"alg", "content"}, "dependency": {"ref", "dependsOn"},
}


@pytest.fixture
def made(tmp_path) -> Checkout:
    return hooked(tmp_path)


def bill(made) -> dict:
    result = sbom.run(made.root, made.pins)
    assert json.loads("\n".join(result.lines)) == result.data["bom"]
    return result.data["bom"]


def components(bom: dict) -> list[dict]:
    found = list(bom["components"])
    for component in bom["components"]:
        found += component.get("components", [])
    return found


def test_only_keys_of_the_specification_are_used(made):
    bom = bill(made)
    assert set(bom) <= KEYS["bom"] and bom["bomFormat"] == "CycloneDX" and bom["specVersion"] == "1.6"
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bom["serialNumber"])
    for component in components(bom):
        assert set(component) <= KEYS["component"] and component["type"] in ("library", "file", "application")
        for one in component.get("hashes", []):
            assert set(one) == KEYS["hash"] and re.fullmatch("[0-9a-f]{64}", one["content"])
        for one in component.get("properties", []):
            assert set(one) == KEYS["property"] and isinstance(one["value"], str)
        pedigree = component.get("pedigree", {"patches": []})
        assert set(pedigree) <= KEYS["pedigree"]
        for patch in pedigree["patches"]:
            assert set(patch) <= KEYS["patch"] and set(patch["diff"]) <= KEYS["diff"]
            assert patch["type"] in ("unofficial", "backport")
            assert all(set(one) <= KEYS["resolves"] for one in patch["resolves"])
    assert all(set(one) == KEYS["dependency"] for one in bom["dependencies"])


def test_every_reference_is_defined_once(made):
    bom = bill(made)
    defined = [component["bom-ref"] for component in components(bom)] + [bom["metadata"]["component"]["bom-ref"]]
    assert len(defined) == len(set(defined))
    used = {ref for one in bom["dependencies"] for ref in [one["ref"], *one["dependsOn"]]}
    assert used <= set(defined)


def test_it_says_what_lock_and_patches_say(made):
    upstream, overlay = bill(made)["components"]
    locked = Lock.load(made.root).target("toy", NEW, "all")
    patches = series.load(made.root, "toy", NEW)
    about = {one["name"].removeprefix("zero-mismatch:"): one["value"] for one in upstream["properties"]}
    assert (upstream["purl"], upstream["hashes"][0]["content"]) == (f"pkg:pypi/toy@{NEW}", "0" * 64)
    assert (about["lock"], about["tree"]) == (locked.digest, locked.tree)
    for patch, said in zip(patches, upstream["pedigree"]["patches"], strict=True):
        digest = hashlib.sha256(patch.text).hexdigest()
        assert said["diff"]["url"] == f"patches/toy/{patch.slug}.patch#sha256={digest}"
        assert (said["resolves"][0]["id"], said["resolves"][0]["name"]) == (patch.slug, patch.subject)
        assert about[f"patch:{patch.slug}:sha256"] == dict(locked.patches)[patch.slug]
        assert about[f"patch:{patch.slug}:upstream-status"] == "Pending"
    assert {one["name"]: one["hashes"][0]["content"] for one in overlay["components"]} == {
        path: entry.after for path, entry in locked.paths.items() if entry.by == ("overlay",)}


def test_backports_and_links_are_named(made):
    made.patch("third", "toy/lines.txt", "line 5\n", "line five\n", trailers=TRAILERS.replace(
        "Status: Pending", "Status: Backport [1234567]").replace("PR: none", "PR: https://x.invalid/1"))
    made.export()
    third = bill(made)["components"][0]["pedigree"]["patches"][2]
    assert third["type"] == "backport" and third["resolves"][0]["references"] == ["https://x.invalid/1"]


def test_equal_inputs_give_equal_bytes_and_others_another_id(made):
    first, text = bill(made), sbom.run(made.root, made.pins).lines
    assert sbom.run(made.root, made.pins).lines == text
    made.change("overlays/toy/toy/zero_mismatch/gate.py", "2.0", "4.0")
    made.export()
    assert bill(made)["serialNumber"] != first["serialNumber"]


def test_a_stale_lock_is_refused(made):
    made.change("patches/toy/gate-fp32.patch", "Arch: any", "Arch: sm90")
    with pytest.raises(LockMismatch, match="have changed"):
        bill(made)
