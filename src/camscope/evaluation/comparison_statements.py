"""What a comparison says in words: which maps are one, which methods cannot be told apart, and which beat no control."""

from collections.abc import Iterator, Mapping, Sequence

from camscope.evaluation.map_agreement import Agreement, Key
from camscope.evaluation.summary import LEVEL, Line
from camscope.metrics import METRICS
from camscope.metrics.statistics import MIN_GROUPS, least_p
from camscope.plurals import plural

MOST = 6  # names in a list; of more it says how many
Names = Mapping[tuple[Key, bool], str]


def sentences(lines: Mapping[str, Sequence[Line]], agreement: Agreement, names: Names) -> Iterator[str]:
    """First of the maps, then of all metrics of which the same holds, then of each by itself."""
    for group in agreement.groups:
        yield f"{listed([names[key, False] for key in group])}: the same maps here, as they are displayed"
    if reason := dominance([line for own in lines.values() for line in own]):
        yield reason
    known = {metric: one for metric, own in lines.items() if len((one := _Top(own, names)).methods) > 1}
    few = {needed for one in known.values() if (needed := one.needed)}
    if few:
        there = max(known.values(), key=lambda one: one.groups)
        yield (
            f"{there.counted} cannot tell {plural(max(len(one.methods) for one in known.values()), 'method')} apart in "
            f"{plural(len(known), 'metric')}, whatever they show: at least {max(few)} are needed"
        )
    alike = [metric for metric, one in known.items() if not one.behind and not one.needed]
    if alike:
        yield f"no method can be told from the first in {listed(alike)}"
    for metric, one in known.items():
        if one.behind:
            yield f"{metric}: {one.words}"
    yield from _of_controls(lines, names)


def has_rivals(line: Line) -> bool:
    """Whether maps that know nothing are held against its method.

    How a map spreads is no merit to be beaten in, nor is how still it holds: a map that does not look holds still.
    """
    return METRICS[line.metric].needs not in ("map", "explainer")


def dominance(lines: Sequence[Line]) -> str:
    """Why there are no intervals, where one group has most of the images; "" where none of the lines lacks one for that."""
    every = [estimate for line in lines for estimate in (line.estimate, line.under_best, line.over_control)]
    estimates = [estimate for estimate in every if estimate is not None and estimate.is_dominated]
    return min(estimates, key=lambda estimate: estimate.effective or 0.0).dominance() if estimates else ""


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; of many the first, and how many more there are."""
    if len(words) > MOST + 1:
        return f"{', '.join(words[:MOST])} and {len(words) - MOST} more"
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


class _Top:
    """Of one metric the first method, those that cannot be told from it, and those behind."""

    def __init__(self, lines: Sequence[Line], names: Names) -> None:
        ranked = METRICS[lines[0].metric].higher_is_better is not None
        self.methods = [line for line in lines if not line.control and line.estimate is not None] if ranked else []
        self.behind = [line for line in self.methods[1:] if line.is_behind]
        self._names = names

    @property
    def groups(self) -> int:
        """How many images, or groups of them, the differences rest on."""
        return max((line.under_best.groups for line in self.methods if line.under_best is not None), default=0)

    @property
    def counted(self) -> str:
        """The same in words."""
        estimates = [line.under_best for line in self.methods if line.under_best is not None]
        word = "image" if all(one.n <= one.groups for one in estimates) else "group"
        return plural(self.groups, word)

    @property
    def needed(self) -> int | None:
        """How many it takes to tell any two methods apart, corrected for all comparisons; None where there are enough."""
        gaps = [line for line in self.methods if line.under_best is not None]
        if not gaps:
            return None
        pairs = max(line.pairs for line in gaps)
        needed = next(n for n in range(MIN_GROUPS, 1000) if pairs * least_p(n) < LEVEL)
        return needed if self.groups < needed else None

    @property
    def words(self) -> str:
        """Who is first, and who cannot be told from it."""
        first, *rest = [_name(line, self._names) for line in self.methods if line not in self.behind]
        if not rest:
            return f"{first} is first, and told from {'all others' if len(self.methods) > 2 else 'the other'}"
        return f"{first} is first; {listed(rest)} cannot be told from it"


def _of_controls(lines: Mapping[str, Sequence[Line]], names: Names) -> Iterator[str]:
    """Where no method, or not every one, is better than the best map that knows nothing."""
    none: dict[str, list[str]] = {}
    some = []
    for metric, own in lines.items():
        methods = [line for line in own if not line.control and line.over_control is not None]
        controls = [line.method for line in own if line.control and line.estimate is not None]
        if not methods or not controls or not has_rivals(own[0]):
            continue
        better = [_name(line, names) for line in methods if line.beats_control]
        if not better:
            none.setdefault(controls[0], []).append(metric)
        elif len(better) < len(methods):
            verb = "is" if len(better) == 1 else "are"
            some.append(f"only {listed(better)} {verb} better than the control {controls[0]} in {metric}")
    for control, metrics in none.items():
        yield f"no method is better than the control {control} in {listed(metrics)}"
    yield from some


def _name(line: Line, names: Names) -> str:
    return names[(line.method, line.layer, line.parameters), line.control]
