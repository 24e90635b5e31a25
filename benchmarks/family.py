"""Every method in METHODS, beside each toolkit that has it."""

from collections.abc import Iterator

from benchmarks.beside import beside_peers
from benchmarks.report import OURS, Figure
from benchmarks.tool import titled
from benchmarks.trained import case_or_random, first, here

MODEL, TRANSFORMER = "resnet18", "deit_tiny" if here() else "vit_b_16"
FEW = {"0", "1", "2", "3", "+", "concepts", "rests", "L"}  # words of a cost that a whole batch can pay in no time
SLOW_ROUNDS = 3
RATIO = "camscope / the fastest"


def figures(rounds: int, device: str, batch: int, methods: list[str] | None = None) -> Iterator[list[Figure]]:
    """A row a method, one after the other; a method that runs the model many times is asked about one image."""
    from camscope.explainers import METHODS
    from camscope.explainers.token_attention import TokenAttention

    case = case_or_random(MODEL, device, batch)
    attentive = case_or_random(TRANSFORMER, device, batch)
    for name in methods or sorted(METHODS, key=lambda name: (not quick(name), name)):
        is_quick, reads_attention = quick(name), issubclass(METHODS[name], TokenAttention)
        chosen = attentive if reads_attention else case
        asked = chosen if is_quick else first(chosen)
        times, warm_up = (rounds, 2) if is_quick else (min(rounds, SLOW_ROUNDS), 1)
        work = f"{titled(name)}, batch {len(asked.x)}" + (f", {asked.name}" if reads_attention else "")
        yield with_ratio(beside_peers(asked, name, times, section="family", work=work, warm_up=warm_up))


def with_ratio(row: list[Figure]) -> list[Figure]:
    """The row, and what camscope takes of what the fastest other toolkit takes for the same method."""
    ours = next(figure for figure in row if figure.tool == OURS)
    others = [figure.value for figure in row if figure.tool != OURS and figure.value is not None]
    if ours.value is None or not others:
        return row
    return [*row, Figure("family", ours.work, RATIO, ours.value / min(others))]


def quick(name: str) -> bool:
    """By the method's own account of its cost."""
    from camscope.explainers import METHODS

    method = METHODS[name]
    return set(method.forwards.split()) <= FEW and method.backwards in FEW
