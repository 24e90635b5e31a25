"""Names of methods in a comparison, as short as they can be and still tell one from the other."""

from collections import Counter
from collections.abc import Mapping, Sequence

from camscope.batch import Run
from camscope.measure.agreement import Key
from camscope.measure.summary import Line


def named(run: Run, keys: Sequence[Key], lines: Sequence[Line]) -> dict[tuple[Key, bool], str]:
    """[method, whether it is a control]: `gradcam`, or `gradcam · layer4` where it has several layers, and settings that differ.

    `keys`: methods with a map; `lines`: what metrics say, also of controls, and of methods without any map.
    """
    every = list(dict.fromkeys([*((key, False) for key in keys), *map(_key, lines)]))
    methods = {key: _named(key, run, [other for other, kind in every if not kind]) for key, kind in every if not kind}
    taken = set(methods.values())
    return {
        (key, kind): methods[key] if not kind else f"{key[0]} (control)" if key[0] in taken else key[0]
        for key, kind in every
    }


def _key(line: Line) -> tuple[Key, bool]:
    return (line.method, line.layer, line.parameters), line.control


def _named(key: Key, run: Run, keys: Sequence[Key]) -> str:
    method, layer, _ = key
    alike = [other for other in keys if other[0] == method]
    layers = Counter(other[1] for other in alike)
    parts = [method, layer if len(layers) > 1 and layer is not None else ""]
    if layers[layer] > 1:
        rivals = [_settings(run, other) for other in alike if other[1] == layer]
        parts.append(_differing(_settings(run, key), rivals) or str(key[2]))
    return " · ".join(filter(None, parts))


def _settings(run: Run, key: Key) -> Mapping[str, object]:
    found: Mapping[str, object] = run.facts["made_with"]["methods"].get(f"{key[0]} {key[2]}", {})
    return found


def _differing(own: Mapping[str, object], all_of_them: Sequence[Mapping[str, object]]) -> str:
    return " ".join(f"{name}={value}" for name, value in own.items() if any(r.get(name) != value for r in all_of_them))
