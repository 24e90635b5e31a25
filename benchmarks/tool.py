"""Tool: one method of one toolkit, ready to run on a case."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.cases import Case

if TYPE_CHECKING:
    from camscope.explainers import Explainer

# What takes minutes as a method is shipped is measured with less of it, in every toolkit alike.
SETTINGS: dict[str, dict[str, int]] = {"sscam": {"n_samples": 2}, "iscam": {"n_samples": 2}}

STAGES = ("layer1", "layer2", "layer3", "layer4")


def unchanged(heat: Tensor) -> Tensor:
    """Maps are compared as they are."""
    return heat


@dataclass(frozen=True)
class Tool:
    """`run`: the work that is timed; `to_maps`: its result as maps (N,*s), at the layer's resolution and signed or not.

    `finish`: what this toolkit does to a map where it lets nobody have it before; done to camscope's too, to compare.
    `drawn`: the map is drawn by lot, so that there is nothing to compare.
    """

    run: Callable[[], Any]
    to_maps: Callable[[Any], Tensor]
    finish: Callable[[Tensor], Tensor] = unchanged
    drawn: bool = False


class NotOfferedError(LookupError):
    """A toolkit has no such method."""


def offered(names: dict[str, str], method: str) -> str:
    """What a toolkit calls a method; NotOfferedError where it has none."""
    if method not in names:
        raise NotOfferedError(method)
    return names[method]


def explainer(case: Case, method: str, **more: Any) -> "Explainer":
    """Ours, at the case's layer if it looks at one."""
    from camscope.explainers import METHODS

    cls = METHODS[method]
    takes = signature(cls).parameters
    given: dict[str, Any] = {name: value for name, value in SETTINGS.get(method, {}).items() if name in takes} | more
    if "layer" in takes:
        given["layer"] = case.layer
    if "layers" in takes:
        given["layers"] = stages(case)
    return cls(case.model, **given)


def looks_at_a_layer(method: str) -> bool:
    """Or at the whole model, several layers, or the image alone."""
    from camscope.explainers import METHODS

    return "layer" in signature(METHODS[method]).parameters


def stages(case: Case) -> list[str]:
    """The layers whose maps are multiplied by a method that takes several."""
    found = [name for name in STAGES if hasattr(case.model, name)]
    if len(found) < 2:
        raise ValueError(f"{case.name} has no stages by the names {', '.join(STAGES)}")
    return found


def titled(method: str) -> str:
    """A method's name, and the settings that it is measured with where they are not its own."""
    from camscope.explainers import METHODS

    takes = signature(METHODS[method]).parameters
    given = [f"{name}={value}" for name, value in SETTINGS.get(method, {}).items() if name in takes]
    return f"{method}, {', '.join(given)}" if given else method


def setting(case: Case, method: str, name: str, default: Any) -> Any:
    """A setting of camscope's method, for another toolkit to have the same."""
    return getattr(explainer(case, method), name, default)


def channels_first(case: Case) -> Callable[[Tensor], Tensor] | None:
    """What the other toolkits need to be told of tokens (N, prefix + h·w, K): how they become (N,K,h,w)."""
    prefix = case.prefix
    if prefix is None:
        return None

    def reshape(output: Tensor) -> Tensor:
        side = round((output.shape[1] - prefix) ** 0.5)
        cells: Tensor = output[:, prefix:].unflatten(1, (side, side)).movedim(-1, 1)
        return cells

    return reshape
