"""The gallery's answers: each method's explanation of each picture, with what it cost, kept so that a run can go on."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from subjects import Subject
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights

from camscope import Explanation, GradCAM
from camscope.errors import CamscopeError

SETTINGS: dict[str, dict[str, Any]] = {  # of what would take hours: the words say so
    "scorecam": {"n_channels": 256},
    "sscam": {"n_samples": 4, "n_channels": 64},
    "iscam": {"n_channels": 64},
}
OF_PHOTOGRAPHS: dict[str, dict[str, Any]] = {
    "rise": {"n_samples": 1000},
    "sobol": {"n_samples": 16},
    "extremalperturbation": {"n_steps": 100},
}
IMAGENET: list[str] = ResNet18_Weights.DEFAULT.meta["categories"]
COSTS = "forwards", "backwards", "seconds"


@dataclass(frozen=True)
class Answer:
    """What one method says of one picture, or why it says nothing."""

    method: str
    found: Explanation | str

    def cost(self, name: str) -> float | None:
        """Of COSTS, where it was measured."""
        return None if isinstance(self.found, str) else self.found.diagnostics.get(name)


def answers(net: nn.Module, layer: str | None, methods: list[str], one: Subject, kept: Path | None) -> list[Answer]:
    """Each method's answer; those that are kept in a folder are not asked for again."""
    front, made = GradCAM(net, layer, class_names=None if one.phantom else IMAGENET), []
    for name in methods:
        settings = {**SETTINGS.get(name, {}), **({} if one.phantom else OF_PHOTOGRAPHS.get(name, {}))}
        file = kept and kept / re.sub(r"[^\w+-]", "-", f"{one.name}-{name}-{settings}".lower())
        made.append(Answer(name, _answer(front, name, settings, one, file and file.with_suffix(".npz"))))
        seconds = made[-1].cost("seconds") or 0.0
        said = made[-1].found
        typer.echo(f"{one.name:14}{name:22}{seconds:8.2f} s  {said if isinstance(said, str) else said.status}")
    return made


def _answer(front: GradCAM, name: str, settings: dict[str, Any], one: Subject, file: Path | None) -> Explanation | str:
    if file is not None and file.exists():
        return Explanation.load(file)
    try:
        tool = front.with_method(name)
        shown: dict[str, Any] = {"progress": True} if hasattr(tool, "progress") else {}
        with counted(front.model) as costs:
            found = replace(tool, **shown, **settings).explain(one.image, one.label)
    except CamscopeError as error:  # a method may refuse a model: the gallery shows that too
        return str(error)
    found = replace(found, diagnostics={**found.diagnostics, **costs})
    if file is not None:
        found.save(file)
    return found


@contextmanager
def counted(net: nn.Module) -> Iterator[dict[str, float]]:
    """The rows of all forward and backward passes that run inside, and the seconds of processor time."""
    costs, start = dict.fromkeys(COSTS, 0.0), time.process_time()

    def back(gradient: Tensor) -> None:
        costs["backwards"] += len(gradient)

    def seen(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        costs["forwards"] += len(output)
        if output.requires_grad:
            output.register_hook(back)

    handle = net.register_forward_hook(seen)
    try:
        yield costs
    finally:
        handle.remove()
        costs["seconds"] = time.process_time() - start
