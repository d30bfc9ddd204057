"""Reads recipes/<name>/recipe.toml: which model, which engine flags, which environment.

[engine] holds vllm EngineArgs by their own names, [env] what is set before vLLM is imported; their tables .on and .off
are laid over them with batch invariance on and off. [tiny] names the small model's folder and its weights script.
"""
from __future__ import annotations

import dataclasses
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECTIONS = {"model", "tiny", "env", "engine", "bisect", "bench", "precompile"}


@dataclasses.dataclass(frozen=True)
class Recipe:
    name: str
    folder: pathlib.Path
    tiny: bool
    data: dict

    @property
    def model(self) -> str:
        return str(self.folder / self.data["tiny"]["model"]) if self.tiny else self.data["model"]["path"]

    @property
    def weights_script(self) -> str | None:
        """The script that fills the small model's weights; None loads a checkpoint."""
        return str(self.folder / self.data["tiny"]["weights"]) if self.tiny else None

    @property
    def vocab(self) -> int:
        return self.data["tiny" if self.tiny else "model"]["vocab"]

    def engine_flags(self, invariant: bool) -> dict:
        flags = {k: v for k, v in self.data["engine"].items() if k not in ("on", "off")}
        flags |= self.data["tiny"].get("engine", {}) if self.tiny else {}
        return flags | self.data["engine"].get("on" if invariant else "off", {})

    def environment(self, invariant: bool) -> dict[str, str]:
        shared = {k: v for k, v in self.data.get("env", {}).items() if k not in ("on", "off")}
        extra = self.data.get("env", {}).get("on" if invariant else "off", {})
        return {**shared, **extra, "VLLM_BATCH_INVARIANT": "1" if invariant else "0"}

    def section(self, name: str) -> dict:
        return self.data.get(name, {})


def load(name: str, tiny: bool, root: pathlib.Path = ROOT) -> Recipe:
    folder = root / "recipes" / name
    path = folder / "recipe.toml"
    if not path.is_file():
        known = sorted(p.parent.name for p in (root / "recipes").glob("*/recipe.toml"))
        raise ValueError(f"no recipe {name!r}: {path} does not exist; there are: {', '.join(known) or 'none'}")
    data = tomllib.loads(path.read_text())
    if unknown := set(data) - SECTIONS:
        raise ValueError(f"{path}: unknown section {sorted(unknown)}; expected some of {sorted(SECTIONS)}")
    if tiny and "tiny" not in data:
        raise ValueError(f"{path} has no [tiny] section: run without --tiny")
    return Recipe(name, folder, tiny, data)
