#!/usr/bin/env python3
"""The image's manifest: what is in it, by version and digest. Its short form becomes the image's labels.

    image_manifest.py write DIR       DIR/manifest.json and DIR/sbom.json, of the interpreter that runs this
    image_manifest.py labels FILE     the manifest's labels, one KEY=VALUE a line

Equal images give equal manifests: no time, no host name.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

import image_arch
import image_checks
import image_pins

SCHEMA = 1
PREFIX = "zero-mismatch."
ROOT = image_pins.ROOT


def installed() -> dict[str, str]:
    """Distribution -> version of everything that this interpreter sees."""
    found = {re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): one.version for one in metadata.distributions()}
    return dict(sorted(found.items()))


def engines(packages: dict[str, str]) -> dict[str, dict]:
    """Each upstream as it is installed: version, the pinned archives' digests, the lock's entry and its tree."""
    from patchset.lock import Lock

    pinned, lock, found = image_pins.pins.load(ROOT), Lock.load(ROOT), {}
    for one in pinned.standard():
        name = one.name
        version = packages[one.distribution].split("+")[0]
        release, entry = one.release(version), lock.target(name, version, "all")
        found[name] = {"version": packages[one.distribution], "tag": release.tag, "commit": release.commit,
                       "sdist": release.sdist, "wheel": release.wheel, "lock": entry.digest, "tree": entry.tree,
                       "patches": [slug for slug, _ in entry.patches]}
    return found


def manifest() -> dict:
    packages = installed()
    libraries = {str(path.relative_to(image_checks.SITE)): image_arch.architectures(path)
                 for pattern in image_checks.EVERY_ARCH for path in sorted(image_checks.SITE.glob(pattern))}
    return {
        "schema": SCHEMA,
        "revision": os.environ.get("REVISION", ""),  # the commit of this repository; '' when nobody said it
        "base": os.environ.get("BASE", ""),          # '' outside the image
        "vllm_from": os.environ.get("VLLM_FROM", ""),
        "machine": platform.machine(), "python": platform.python_version(), "cuda": _cuda(),
        "patchset.lock": hashlib.sha256((ROOT / "patchset.lock").read_bytes()).hexdigest(),
        "requirements.lock": hashlib.sha256(image_pins.LOCK.read_bytes()).hexdigest(),
        "engines": engines(packages), "architectures": libraries, "packages": packages,
    }


def _cuda() -> str:
    """The toolkit's version, '' where there is none."""
    path = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "version.json"
    return json.loads(path.read_text())["cuda"]["version"] if path.is_file() else ""


def labels(data: dict) -> dict[str, str]:
    """What someone asks of an image that is not running."""
    found = {
        "org.opencontainers.image.title": "zero-mismatch",
        "org.opencontainers.image.revision": data["revision"],
        "org.opencontainers.image.base.name": data["base"].partition("@")[0],
        "org.opencontainers.image.base.digest": data["base"].partition("@")[2],
        f"{PREFIX}manifest": hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest(),
        f"{PREFIX}cuda": data["cuda"], f"{PREFIX}vllm-from": data["vllm_from"],
        f"{PREFIX}patchset.lock": data["patchset.lock"], f"{PREFIX}requirements.lock": data["requirements.lock"],
    }
    for name, engine in data["engines"].items():
        found |= {f"{PREFIX}{name}.{key}": engine[key] for key in ("version", "commit", "lock", "tree")}
    return {key: value for key, value in found.items() if value}


def bill(data: dict) -> dict:
    """apply.py's bill of materials (the engines, their patches as pedigree, the overlays) and every other package."""
    from patchset import sbom

    made = sbom.run(ROOT, image_pins.pins.load(ROOT)).data["bom"]
    known = {component["name"] for component in made["components"]}
    made["components"] += [
        {"type": "library", "bom-ref": f"pkg:pypi/{name}@{version}", "name": name, "version": version,
         "purl": f"pkg:pypi/{name}@{version}"} for name, version in data["packages"].items() if name not in known]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("write").add_argument("folder", type=Path)
    verbs.add_parser("labels").add_argument("file", type=Path)
    args = parser.parse_args()
    if args.verb == "labels":
        print("\n".join(f"{key}={value}" for key, value in labels(json.loads(args.file.read_text())).items()))
        return
    data = manifest()
    for name, content in (("manifest.json", data), ("sbom.json", bill(data))):
        (args.folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{args.folder / name}", file=sys.stderr)


if __name__ == "__main__":
    main()
