"""The same answers? Every method that another toolkit has too, on trained weights and photographs, map against map.

Agreement is a second opinion, not the oracle; a difference needs a row in `deviations`, and its proof.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks import peers, report, trained
from benchmarks.agreement import correlation, difference
from benchmarks.beside import reason
from benchmarks.cases import Case
from benchmarks.deviations import DEVIATIONS, Deviation
from benchmarks.family import quick
from benchmarks.report import OURS, Figure, rounded_down
from benchmarks.situations import SITUATIONS
from benchmarks.tool import NotOfferedError, looks_at_a_layer

SAME = 0.9999
PHOTOGRAPHS = 10
QUICK = (("resnet18", "layer4"), ("resnet18", "layer3"), ("mobilenet_v2", None), ("deit_tiny", None))
SLOW = (("resnet18", "layer1", 2), ("resnet18", "layer4", 1))  # where a channel costs a pass

Found = dict[str, tuple[float, float]]  # by place: correlation, largest difference


def figures(
    device: str, photographs: int = PHOTOGRAPHS, methods: Sequence[str] | None = None
) -> Iterator[list[Figure]]:
    """One part a method: a figure a toolkit that has it, and one for each of that toolkit's choices."""
    from camscope.explainers import METHODS

    if not trained.here():
        return
    files = trained.names(photographs)
    for method in methods or METHODS:
        with _quiet():
            found = _of_method(method, files, device)
        if any(figure.section == "parity" for figure in found):
            yield found


def _of_method(method: str, files: list[str], device: str) -> list[Figure]:
    every = places(method, files, device)
    mine = [deviation for deviation in DEVIATIONS if deviation.method == method]
    rows = []
    for peer in list(peers.TOOLS)[1:]:
        choice = next((one.choice for one in mine if one.peer == peer and not one.situation), None)
        plain, chosen, note = _against(peer, method, every, choice)
        if plain or note:
            rows.append(_figure("parity", method, peer, plain, note))
        if chosen:
            rows.append(_figure("choice", method, peer, chosen))
    return rows + [figure for one in mine if one.situation for figure in _situation(one, files, device)]


def places(method: str, files: list[str], device: str) -> list[Case]:
    """Where the maps are compared; a method that runs the model for every channel is asked less."""
    if not quick(method):
        return [trained.case(name, files[:count], device, layer) for name, layer, count in SLOW]
    if not looks_at_a_layer(method):
        return [trained.case(name, files[:2], device, layer) for name, layer in QUICK if layer != "layer3"]
    return [trained.case(name, files, device, layer) for name, layer in QUICK]


def _against(
    peer: str, method: str, every: list[Case], choice: Callable[[Case], Tensor] | None
) -> tuple[Found, Found, str]:
    """By place: camscope's maps against the toolkit's, and the same with its choice made; and where there are no maps."""
    plain: Found = {}
    chosen: Found = {}
    failed: dict[str, str] = {}
    for case in every:
        place = f"{case.name} `{case.layer}`"
        try:
            with peers.open_tool(peer, case, method) as tool, seeded():
                theirs = tool.to_maps(tool.run()).detach().clone()
                if tool.drawn:
                    return {}, {}, "random, or components have no fixed order"
            with peers.open_tool(OURS, case, method) as own:
                ours = own.to_maps(own.run())
            _add(plain, place, theirs, tool.finish(ours))
            if choice is not None:
                with seeded():
                    _add(chosen, place, theirs, tool.finish(choice(case)))
        except NotOfferedError:
            return {}, {}, ""
        except Exception as error:
            failed[place] = reason(error)
    if plain:
        return plain, chosen, f"not at {', '.join(failed)}" if failed else ""
    return plain, chosen, next((f"{place}: {why}" for place, why in failed.items()), "")


def _add(found: Found, place: str, theirs: Tensor, ours: Tensor) -> None:
    least = correlation(theirs, ours)
    if least is not None:
        found[place] = least, difference(theirs, ours)


def _figure(section: str, work: str, peer: str, found: Found, note: str = "") -> Figure:
    """The least of all places; where that is, if it is not the same map."""
    if not found:
        return Figure(section, work, peer, None, note=note)
    place, (least, _) = min(found.items(), key=lambda item: item[1][0])
    largest = max(apart for _, apart in found.values())
    note = "; ".join(filter(None, ["" if least >= SAME else place, note]))
    return Figure(section, work, peer, least, difference=largest, note=note, floor=SAME)


def _situation(deviation: Deviation, files: list[str], device: str) -> list[Figure]:
    place, work, peer = deviation.situation, deviation.work, deviation.peer
    try:
        with seeded():
            trial = SITUATIONS[place](deviation, files, device)
    except Exception as error:
        return [Figure("parity", work, peer, None, note=reason(error))]
    plain: Found = {}
    chosen: Found = {}
    _add(plain, "", trial.theirs, trial.ours)
    _add(chosen, "", trial.theirs, trial.chosen)
    return [_figure("parity", work, peer, plain), _figure("choice", work, peer, chosen)]


@contextmanager
def seeded() -> Iterator[None]:
    """Noise that others draw from the process's own generator is the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def page(measured: Sequence[Figure]) -> str:
    """The docs' table: every deviation with what it makes of the map, and what is left of it with the choice made."""
    by_work = {(figure.section, figure.work, figure.tool): figure for figure in measured}
    if not any(section == "parity" for section, _, _ in by_work):
        return ""
    rows = [
        [
            one.work,
            one.peer,
            _r(by_work.get(("parity", one.work, one.peer))),
            one.does,
            one.right,
            _r(by_work.get(("choice", one.work, one.peer))),
        ]
        for one in DEVIATIONS
    ]
    head = ["method", "toolkit", "r", "what it does", "which is right, and why", "r with its choice"]
    lines = [report.line(cells) for cells in [head, ["---"] * len(head), *rows]]
    return "\n\n".join([report.tables([f for f in measured if f.section == "parity"]), "\n".join(lines)])


def _r(figure: Figure | None) -> str:
    return "–" if figure is None or figure.value is None else rounded_down(figure.value)
