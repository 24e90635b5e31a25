"""Shell completion for names of methods, metrics and color maps."""

from collections.abc import Iterable


def complete_method(incomplete: str) -> list[str]:
    """Complete the last method name of a list `a,b`."""
    from camscope.explainers import METHODS

    return _complete_last(incomplete, METHODS)


def complete_metric(incomplete: str) -> list[str]:
    """Complete the last metric name of a list `a,b`."""
    from camscope.metrics import METRICS

    return _complete_last(incomplete, METRICS)


def complete_colormap(incomplete: str) -> list[str]:
    """Complete the name of a color map."""
    from camscope.render import COLORMAPS

    return _complete_last(incomplete, ("auto", *COLORMAPS))


def _complete_last(incomplete: str, names: Iterable[str]) -> list[str]:
    head, comma, last = incomplete.rpartition(",")
    return [head + comma + name for name in names if name.startswith(last)]
