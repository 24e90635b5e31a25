"""Which methods answer for an architecture, and what the others say; and the page that tells it."""

import re

import numpy as np
from torch import Tensor, nn

from camscope.errors import CamscopeError
from camscope.explainers import METHODS, Explainer, GradCAM
from tests.refusals import ATTENTION
from tests.zoo import of_ultralytics
from tests.zoo.row import Row

FEW = {"n_samples": 2, "n_steps": 2, "n_groups": 4, "n_channels": 6, "n_concepts": 2}
SMALL = 2e5  # parameters: such a model runs a hundred times in a second
PASSES = {
    *("1", "1 + n_samples", "1 + n_steps", "2 + n_steps", "2 + n_groups", "1 + K"),
    *(f"1 + {count} partial forwards" for count in ("L", "K", "cells", "2", "n_concepts")),
}
# often without an answer, which would end the passes that the others share
ALONE = {"cam", "finercam", "excitationbackprop", "guidedbackprop", "deconvnet", "refinecam", *ATTENTION}
HEAD = """# Models

{count} architectures are tested with random weights and small inputs. The only arguments are the model and the input. Models
without class scores also get a function of the output: a region, a query's class or an embedding's direction. The layer is
the one that camscope chooses by default.

- On each architecture, Grad-CAM and HiResCAM are compared with plain `torch.autograd.grad` in float64.
- Where tokens are laid out as a grid, changing a patch of the input changes the cell at the same position.
- `make models` measures this page again. The tests ask twelve of these models. With `--thorough` they fail if the page differs.

The tests run the methods that need few forward passes. On small models they also run those that repeat the model, or the
part behind the layer, often:

| methods |
|---|
| {methods} |

A number in the last column stands for methods without a map on that architecture. [Reasons](#reasons) lists their error
messages.

"""


def answers(row: Row, model: nn.Module, x: Tensor) -> dict[str, str]:
    """What the methods without an answer for one input (C,*S) say; AssertionError for a map that is none."""
    light = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    names = [name for name in asked_of() if light or METHODS[name].forward_passes == "1"]
    names.sort(key=("cam", "finercam").__contains__)  # what they say comes last on the page
    refused: dict[str, str] = {}
    together = [name for name in names if name not in ALONE]
    try:
        found = GradCAM(model).explain_methods(x, [small(name, row, model) for name in together], row.target)
    except CamscopeError:
        found, together = [], []
    for name in (name for name in names if name not in together):
        try:
            found.append(small(name, row, model).explain(x, row.target))
        except CamscopeError as error:
            refused[name] = re.sub(r"\s+", " ", str(error))
    for one in found:
        assert np.isfinite(one.attribution).all(), one.method
        if one.layer == row.layer:
            assert one.grid == row.grid, one.method
        elif one.method in ATTENTION and row.kind == "tokens":
            prefix = (
                0 if row.name == "cait" else row.prefix
            )  # its patches look at each other before the class token comes
            assert one.layout == f"tokens {prefix}+{'x'.join(map(str, row.grid))}", one.method
    return refused


def asked_of() -> list[str]:
    """The methods of a few passes that are here whatever else is installed."""
    return [
        name for name, one in METHODS.items() if one.forward_passes in PASSES and ".adapters." not in one.__module__
    ]


def small(name: str, row: Row, model: nn.Module) -> Explainer:
    """A method with few samples, steps and groups: the question is whether it works at all."""
    given = {**FEW, "layer": row.layer}  # the one that it would choose, too, in two more passes
    fields = METHODS[name].__dataclass_fields__
    return METHODS[name](model, **{key: value for key, value in given.items() if key in fields})


def page(rows: dict[str, tuple[Row, dict[str, str]]]) -> str:
    """The document."""
    reasons: dict[tuple[str, tuple[str, ...]], int] = {}  # the number of a sentence and the methods that say it
    lines, family = [], ""
    for name, (row, refused) in rows.items():
        if family != (family := name.partition(": ")[0]):
            lines += [
                f"\n## {family}\n",
                "| architecture | input | layer chosen | map | without a map |",
                "|---|---|---|---|---|",
            ]
        marks = [str(reasons.setdefault(reason, len(reasons) + 1)) for reason in said_by(refused)]
        size, grid = ("×".join(map(str, shape)) for shape in (row.size, row.grid))
        kind = {"maps": grid, "last": f"{grid}, channels last", "tokens": f"{grid} tokens, {row.prefix} before them"}[
            row.kind
        ]
        lines.append(
            f"| {row.name} | {size} | `{row.layer}` | {kind.replace(', 0 before them', '')} | {', '.join(marks) or '–'} |"
        )
    cheap = ", ".join(f"`{name}`" for name in asked_of())
    told = [
        f"| {number} | {', '.join(f'`{one}`' for one in methods)} | {sentence} |"
        for (sentence, methods), number in reasons.items()
    ]
    head = HEAD.format(count=len(rows), methods=cheap)
    return (
        head.rstrip()
        + "\n"
        + "\n".join(lines)
        + "\n\n## Reasons\n\n| number | methods | message |\n|---|---|---|\n"
        + "\n".join(told)
        + "\n"
        + of_ultralytics.section()
    )


def said_by(refused: dict[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Each sentence of one architecture, without names, numbers and grids of its own, and the methods that say it."""
    speakers: dict[str, list[str]] = {}
    for method, sentence in refused.items():
        plain = re.sub(r"'[^']*'( or '[^']*')*|(\b[\dx+]+\b|…\+)+(, [\dx+]+)*", "…", sentence)
        plain = re.sub(r"\([^()]*\)", "(…)", plain)  # as names of steps, which differ between processors
        speakers.setdefault(re.sub(rf"^{re.escape(method)}\b", "the method", plain), []).append(method)
    return [(sentence, tuple(methods)) for sentence, methods in speakers.items()]
