"""A choice as a file: TOML that `camscope explain` and `camscope batch` take, with the evidence that it rests on."""

import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from camscope.cards import digest
from camscope.data_files import read_toml
from camscope.errors import InputError
from camscope.explainers import METHODS
from camscope.files import write_bytes
from camscope.hooks.base import unwrap
from camscope.measure.choosing.choose import Choice
from camscope.measure.choosing.standing import Standing


@dataclass(frozen=True)
class Chosen:
    """A method, its layer, and the digest of the model that it was chosen for."""

    method: str
    layer: str | None
    model: str


def save(choice: Choice, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the first of the best, or where there is no clear winner the cheapest of those that are alike."""
    best = choice.best[0] if choice.best else choice.cheapest
    lines = [f"# {choice.sentence}", f"method = {_word(best.tool.name)}"]
    layer = getattr(best.tool, "layer", None)
    lines += [f"layer = {_word(layer)}"] if isinstance(layer, str) else []
    lines += [f"model = {_word(digest(unwrap(best.tool.model)))}", f"clear = {str(bool(choice.best)).lower()}"]
    for one in choice.standings:
        lines += ["", "[[standing]]", f"title = {_word(one.title)}", *_evidence(one)]
    return write_bytes(path, ("\n".join(lines) + "\n").encode(), overwrite=overwrite)


def read(path: str | Path) -> Chosen:
    """What `save` wrote; InputError for another file."""
    plain = read_toml(path, f"{path} is not a choice that camscope choose --save wrote")
    method, layer, model = (plain.get(name) for name in ("method", "layer", "model"))
    if (
        not (isinstance(method, str) and isinstance(layer, str | None) and isinstance(model, str))
        or method not in METHODS
    ):
        raise InputError(
            f"{path} is not a choice that camscope choose --save wrote: expected the name of a method, of a layer if it has "
            "one, and the digest of a model, each as text"
        )
    return Chosen(method, layer, model)


def _evidence(one: Standing) -> list[str]:
    found = [f"images = {one.images}", f"seconds = {one.price:.4f}"]
    for name in one.values:
        if (estimate := one.estimate(name)) is not None:
            numbers = [one for one in (estimate.mean, estimate.low, estimate.high) if isfinite(one)]
            found.append(f"{name} = [{', '.join(f'{one:.4f}' for one in numbers)}]")
    return [*found, f"out = {_word(one.out)}"] if one.out else found


def _word(text: str) -> str:
    """A string as TOML has it, which is JSON's where nothing is beyond its escapes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
