"""Reads recipes/<name>/recipe.toml: which model, which engine flags, which environment.

[engine] holds vllm EngineArgs by their own names, [env] what is set before vLLM is imported; their tables .on and .off
are laid over them with batch invariance on and off, and so is a model's own engine table. [tiny] names the small
model's folder and its weights script; a recipe may have more small models, in sections [tiny-...]. A weights script
has either `fill(model)`, which fills the parameters of a model built from the folder's config, or
`write(source, folder)`, which writes a checkpoint of that config's sizes.
"""
from __future__ import annotations

import dataclasses
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECTIONS = {"model", "env", "engine", "bisect", "bench", "precompile"}


@dataclasses.dataclass(frozen=True)
class Recipe:
    name: str
    folder: pathlib.Path
    tiny: str | None        # the section of the small model; None: the real one
    data: dict

    @property
    def subject(self) -> str:
        """What a record is named after."""
        return self.name + (f"-{self.tiny}" if self.tiny else "")

    @property
    def model(self) -> str:
        return str(self.folder / self.data[self.tiny]["model"]) if self.tiny else self.data["model"]["path"]

    @property
    def weights_script(self) -> str | None:
        """The script that makes the small model's weights; None loads a checkpoint."""
        return str(self.folder / self.data[self.tiny]["weights"]) if self.tiny else None

    @property
    def vocab(self) -> int:
        return self.data[self.tiny or "model"]["vocab"]

    def engine_flags(self, invariant: bool) -> dict:
        """[engine] under the model's own engine table; the mode's flags of both are laid over those of either mode."""
        return _laid(self.data["engine"], self.data[self.tiny or "model"].get("engine", {}), invariant=invariant)

    def environment(self, invariant: bool) -> dict[str, str]:
        return {**_laid(self.data.get("env", {}), invariant=invariant),
                "VLLM_BATCH_INVARIANT": "1" if invariant else "0"}

    def section(self, name: str) -> dict:
        return self.data.get(name, {})


def _laid(*tables: dict, invariant: bool) -> dict:
    merged: dict = {}
    for table in tables:
        merged |= {k: v for k, v in table.items() if k not in ("on", "off")}
    for table in tables:
        merged |= table.get("on" if invariant else "off", {})
    return merged


def load(name: str, tiny: str | None, root: pathlib.Path = ROOT) -> Recipe:
    folder = root / "recipes" / name
    path = folder / "recipe.toml"
    if not path.is_file():
        known = sorted(p.parent.name for p in (root / "recipes").glob("*/recipe.toml"))
        raise ValueError(f"no recipe {name!r}: {path} does not exist; there are: {', '.join(known) or 'none'}")
    data = tomllib.loads(path.read_text())
    small = {section for section in data if section == "tiny" or section.startswith("tiny-")}
    if unknown := set(data) - SECTIONS - small:
        raise ValueError(f"{path}: unknown section {sorted(unknown)}; expected some of {sorted(SECTIONS)} or tiny...")
    if tiny and tiny not in small:
        raise ValueError(f"{path} has no [{tiny}] section; --tiny can be {', '.join(sorted(small)) or 'left out'}")
    return Recipe(name, folder, tiny, data)
