"""docs/config.md, generated from the schema by `make docs`."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from prime_rl.config.evals import EvalConfig
from prime_rl.config.help import Entry, entry, summary
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.pending import note
from prime_rl.config.reading.variants import type_of
from prime_rl.config.roots import RLConfig
from prime_rl.config.schema import documentation, target_of
from prime_rl.config.trainer import SFTConfig, TrainerConfig

ROOTS: Mapping[str, type[BaseModel]] = {
    "rl": RLConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
    "sft": SFTConfig,
    "eval": EvalConfig,
}
"""Command -> its configuration."""

INTRODUCTION = """\
# Configuration

Every key of every command, generated from the schema (`make docs`). How values are written and which source wins is
told in the [README](../README.md#configure-it). On the command line, `trainer.optim.lr` is `--trainer.optim.lr`; a dash
and an underscore are the same. `COMMAND --explain KEY` tells where a value came from.

A key marked *later* is accepted by `--dry-run`; a real start refuses every value but the default until what it waits
for is built.
"""


def reference() -> str:
    """The whole document, in Markdown."""
    seen: dict[type[BaseModel], str] = {}
    parts = [INTRODUCTION]
    for command, root in ROOTS.items():
        parts += [f"## {command}", "", summary(root), "", *_section(root, "", seen, command)]
    return "\n".join(parts).rstrip() + "\n"


def _section(cls: type[BaseModel], prefix: str, seen: dict[type[BaseModel], str], command: str) -> Iterator[str]:
    """A table of the plain keys, then each nested section; a section that was shown before is referred to."""
    texts = documentation(cls)
    rows = [
        _row(prefix, entry(name, field, texts[name]), _later(cls, name))
        for name, field in cls.model_fields.items()
        if not target_of(field.annotation).sections
    ]
    if rows:
        yield from ["| key | type | default | |", "|---|---|---|---|", *rows, ""]
    for name, field in cls.model_fields.items():
        key = f"{prefix}{name}"
        for section in target_of(field.annotation).sections:
            kind = type_of(section) if len(target_of(field.annotation).sections) > 1 else ""
            title = f'{key}` with `type = "{kind}"' if kind else key
            about = [texts[name] or summary(section), "Off by default." if field.default is None else ""]
            yield from [f"### {command}: `{title}`", "", " ".join(filter(None, [*about, _later(cls, name, kind)])), ""]
            if section in seen:
                yield from [f"The keys of [{seen[section]}](#{_anchor(seen[section])}).", ""]
                continue
            seen[section] = f"{command}: {title}".replace("`", "")
            yield from _section(section, f"{key}.", seen, command)


def _later(cls: type[BaseModel], name: str, kind: str = "") -> str:
    text = note(cls, name, kind)
    return f"*{text}*" if text else ""


def _row(prefix: str, about: Entry, pending: str) -> str:
    text = " ".join(filter(None, [about.text, pending])).replace("|", "\\|")
    kind = about.type.replace("|", " \\| ")
    return f"| `{prefix}{about.name}` | {kind} | `{about.default}` | {text} |"


def _anchor(title: str) -> str:
    """The anchor that Markdown viewers give a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


if __name__ == "__main__":
    print(reference(), end="")
