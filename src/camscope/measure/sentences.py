"""What a comparison says in words: which maps are one, which methods cannot be told apart, and which beat no control."""

from collections.abc import Iterator, Mapping, Sequence

from camscope.measure.agreement import Agreement, Key
from camscope.measure.summary import Line
from camscope.metrics import METRICS

LEVEL = 0.05
MOST = 6  # names in a list; of more it says how many
Names = Mapping[tuple[Key, bool], str]


def sentences(lines: Mapping[str, Sequence[Line]], agreement: Agreement, names: Names) -> Iterator[str]:
    """First of the maps, then of each metric."""
    for group in agreement.groups:
        yield f"{listed([names[key, False] for key in group])}: the same maps here"
    for metric, own in lines.items():
        if METRICS[metric].higher_is_better is None:
            continue
        methods = [line for line in own if not line.control and line.estimate is not None]
        if methods:
            yield from _of_top(metric, methods, names)
        if methods and METRICS[metric].needs == "mask":
            yield from _of_controls(metric, methods, [line for line in own if line.control], names)


def told_from_best(line: Line) -> bool:
    """Whether it is behind the best method, beyond chance."""
    return line.under_best is not None and line.under_best.mean < 0 and (line.under_best.p or 0) < LEVEL


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; of many the first, and how many more there are."""
    if len(words) > MOST + 1:
        return f"{', '.join(words[:MOST])} and {len(words) - MOST} more"
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _of_top(metric: str, methods: Sequence[Line], names: Names) -> Iterator[str]:
    best, rest = methods[0], methods[1:]
    name, near = _name(best, names), [line for line in rest if not told_from_best(line)]
    if rest and len(near) == len(rest):
        yield f"{metric}: no method can be told from another at the top"
    elif near:
        yield f"{metric}: {name} is first; {listed([_name(line, names) for line in near])} cannot be told from it"
    elif rest:
        yield f"{metric}: {name} is first, and told from all others"


def _of_controls(metric: str, methods: Sequence[Line], controls: Sequence[Line], names: Names) -> Iterator[str]:
    known = [line for line in controls if line.estimate is not None]
    if not known:
        return
    best, better = f"the control {known[0].method}", [line for line in methods if line.beats_control]
    if not better:
        yield f"no method is better than {best} in {metric}"
    elif len(better) < len(methods):
        yield f"only {listed([_name(line, names) for line in better])} {_is(better)} better than {best} in {metric}"


def _name(line: Line, names: Names) -> str:
    return names[(line.method, line.layer, line.parameters), line.control]


def _is(lines: Sequence[Line]) -> str:
    return "is" if len(lines) == 1 else "are"
