"""Coincidences in words."""

from collections.abc import Mapping, Sequence

from camscope.explainers.agreement import Coincidence


def sentences(coincidences: Sequence[Coincidence], methods: Mapping[int, str], questions: int) -> tuple[str, ...]:
    """What coincides and why; what holds for several of so many questions is said once.

    `methods`: the name under which each explanation's method goes, by the explanation's id.
    """
    said: dict[tuple[tuple[str, ...], str, str], list[Coincidence]] = {}
    for group in coincidences:
        words = _in_words(group, [_quoted(methods[id(one)]) for one in group.explanations])
        said.setdefault(words, []).append(group)
    return tuple(
        f"{_listed(names)} are one map{where}{_of(groups, questions)}: {why}{_below(names, groups)}"
        for (names, where, why), groups in said.items()
    )


def _quoted(name: str) -> str:
    """`'gradcam, denoised'`: a wrapper's title has a comma of its own, and stands in a list."""
    return f"'{name}'" if "," in name else name


def _in_words(group: Coincidence, methods: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """The names of the methods, ` at layer4`, and why they coincide."""
    layers = {one.layer for one in group.explanations}
    if len(layers) > 1:
        names = tuple(f"{name} at {one.layer}" for name, one in zip(methods, group.explanations, strict=True))
        return names, "", _why(group, names)
    layer = layers.pop()
    return tuple(methods), f" at {layer}" if layer else "", _why(group, methods)


def _why(group: Coincidence, names: Sequence[str]) -> str:
    explained = [name for name, one in zip(names, group.explanations, strict=True) if one in group.explained]
    if not explained:
        return "the maps are the same here"
    rest = [name for name in names if name not in explained]
    whose = f"the formulas of {_listed(explained)} are one" if rest else "their formulas are one"
    because = f"{' and '.join(group.because)}, so " if group.because else ""
    return f"{because}{whose}" + (f"; {_listed(rest)} {_agrees(rest)} here" if rest else "")


def _below(names: Sequence[str], groups: Sequence[Coincidence]) -> str:
    """Which of them go below zero, where others do not: the same cell by cell, they differ where a picture interpolates."""
    heats = [[float(group.explanations[i].heat.min()) for group in groups] for i in range(len(names))]
    signed = [name for name, lowest in zip(names, heats, strict=True) if min(lowest) < 0]
    if len(signed) in (0, len(names)):
        return ""
    have, their = ("has", "its picture") if len(signed) == 1 else ("have", "their pictures")
    return f"; {_listed(signed)} also {have} a negative part, which narrows {their} between the cells"


def _agrees(names: Sequence[str]) -> str:
    return "is the same" if len(names) == 1 else "are the same"


def _of(groups: Sequence[Coincidence], questions: int) -> str:
    """For which classes, where there are several."""
    if questions == 1:
        return ""
    if len(groups) == questions:
        return " for every class"
    return f" for {_listed([group.explanations[0].label for group in groups])}"


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`"""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
