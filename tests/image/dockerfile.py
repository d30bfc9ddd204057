"""A reader of our own Dockerfile, for the tests: stages and instructions, continuation lines joined."""
import dataclasses
import pathlib
import re
import shlex


@dataclasses.dataclass
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [rest for found, rest in self.instructions if found == word]


def instructions(path: pathlib.Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def stages(path: pathlib.Path) -> list[Stage]:
    """The first, named '', holds what stands before the first FROM."""
    found = [Stage("", "")]
    for word, rest in instructions(path):
        if word == "FROM":
            base, _, name = rest.split()
            found.append(Stage(name, base))
        else:
            found[-1].instructions.append((word, rest))
    return found


def by_name(found: list[Stage]) -> dict[str, Stage]:
    return {stage.name: stage for stage in found}


def lineage(found: list[Stage], name: str) -> list[Stage]:
    """The stage and those it is built on, the lowest first."""
    known, line = by_name(found), []
    while name in known:
        line.insert(0, known[name])
        name = known[name].base
    return line


def copied(found: list[Stage], name: str) -> list[tuple[str, str]]:
    """(source in the context, target) of every COPY that the stage and those below it have made from the context."""
    pairs = []
    for stage in lineage(found, name):
        for rest in stage.all("COPY"):
            words = shlex.split(rest)
            if not words[0].startswith("--from="):
                pairs += [(source, words[-1]) for source in words[:-1]]
    return pairs
