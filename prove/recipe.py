"""Reads recipes/<name>/recipe.toml: which model, which engine flags, which environment.

[engine] holds vllm EngineArgs by their own names, [env] what is set before vLLM is imported; their tables .on and .off
are laid over them with batch invariance on and off, and so is a model's own engine table. [tiny] names the small
model's folder and its weights script; a recipe may have more small models, in sections [tiny-...]. A weights script
has either `fill(model)`, which fills the parameters of a model built from the folder's config, or
`write(source, folder)`, which writes a checkpoint of that config's sizes. A recipe may name another as its `base`: its
tables are laid over the other's, key by key, but for the small models, which belong to the recipe that has their files,
and the status, which is a claim about one. recipe_schema.py has the rest.
"""
from __future__ import annotations

import dataclasses
import pathlib
import tomllib

from prove import recipe_schema as schema

ROOT = pathlib.Path(__file__).resolve().parent.parent


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

    @property
    def status(self) -> dict:
        """state, and where they are said evidence and missing: of the small model or of the checkpoint."""
        return self.data[self.tiny]["status"] if self.tiny else self.data["status"]

    def engine_flags(self, invariant: bool) -> dict:
        """[engine] under the model's own engine table; the mode's flags of both are laid over those of either mode."""
        return _laid(self.data["engine"], self.data[self.tiny or "model"].get("engine", {}), invariant=invariant)

    def environment(self, invariant: bool) -> dict[str, str]:
        return {**_laid(self.data.get("env", {}), invariant=invariant),
                "VLLM_BATCH_INVARIANT": "1" if invariant else "0"}

    def layout(self, side: str) -> dict[str, int]:
        """Ranks of `rollout` or `trainer`, 1 where the recipe says nothing. A small model always takes one GPU."""
        said = {} if self.tiny else self.data["layout"].get(side, {})
        return {key: said.get(key, 1) for key in schema.LAYOUT}

    def section(self, name: str) -> dict:
        return self.data.get(name, {})


def _laid(*tables: dict, invariant: bool) -> dict:
    merged: dict = {}
    for table in tables:
        merged |= {k: v for k, v in table.items() if k not in ("on", "off")}
    for table in tables:
        merged |= table.get("on" if invariant else "off", {})
    return merged


def names(root: pathlib.Path = ROOT) -> list[str]:
    return sorted(path.parent.name for path in (root / "recipes").glob("*/recipe.toml"))


def load(name: str, tiny: str | None, root: pathlib.Path = ROOT) -> Recipe:
    """Raises ValueError with everything that is wrong with the recipe."""
    data = _read(name, root)
    path = root / "recipes" / name / "recipe.toml"
    if found := schema.findings(data):
        raise ValueError("\n".join(f"{path}: {one}" for one in found))
    small = schema.small(data)
    if tiny and tiny not in small:
        raise ValueError(f"{path} has no [{tiny}] section; --tiny can be {', '.join(small) or 'left out'}")
    return Recipe(name, path.parent, tiny, data)


def _read(name: str, root: pathlib.Path, above: tuple[str, ...] = ()) -> dict:
    """The recipe with its base under it. above: the recipes that it is a base of."""
    path = root / "recipes" / name / "recipe.toml"
    if name not in names(root):  # a path is no name: the record is called after it
        raise ValueError(f"no recipe {name!r}: recipes/{name}/recipe.toml does not exist, or is a path and no name; "
                         f"there are: {', '.join(names(root)) or 'none'}")
    if name in above:
        raise ValueError(f"{path} is its own base, by way of {' and '.join((*above, name))}: drop one `base` line")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    base = data.pop("base", None)
    if base is None:
        return data
    below = _read(str(base), root, (*above, name))
    return laid_over({section: table for section, table in below.items()
                      if schema.kind_of(section) not in schema.NOT_INHERITED}, data)


def require_one_gpu(made: Recipe) -> Recipe:
    """The proofs drive one engine on one GPU (prove/README.md). Raises ValueError for a recipe of several."""
    if (gpus := made.layout("rollout")["nodes"] * made.layout("rollout")["gpus"]) > 1:
        raise ValueError(f"{made.name} runs on {gpus} GPUs, and this proof drives one engine: prove its small model, "
                         "or a running server (prove served)")
    return made


def laid_over(below: dict, above: dict) -> dict:
    """`above` over `below`, table by table."""
    merged = dict(below)
    for key, value in above.items():
        deep = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = laid_over(below[key], value) if deep else value
    return merged
