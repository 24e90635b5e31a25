"""Every method in METHODS, beside each toolkit that has it."""

from collections.abc import Iterator

from benchmarks.beside import beside_peers
from benchmarks.cases import Case
from benchmarks.report import OURS, Figure
from benchmarks.tool import titled
from benchmarks.trained import case_or_random, first, here

MODEL, TRANSFORMER = "resnet18", "deit_tiny" if here() else "vit_b_16"
FEW = {"0", "1", "2", "3", "+", "concepts", "rests", "L"}  # words of a cost that a whole batch can pay in no time
SLOW_ROUNDS = 3
RATIO = "camscope / the fastest"


def figures(rounds: int, device: str, batch: int, methods: list[str] | None = None) -> Iterator[list[Figure]]:
    """A row a method, one after the other."""
    for name in methods or ordered():
        case = asked(name, device, batch)
        times, warm_up = (rounds, 2) if quick(name) else (min(rounds, SLOW_ROUNDS), 1)
        yield with_ratio(beside_peers(case, name, times, section="family", work=work(name, case), warm_up=warm_up))


def ordered() -> list[str]:
    """Every method, the quick ones first."""
    from camscope.explainers import METHODS

    return sorted(METHODS, key=lambda name: (not quick(name), name))


def asked(method: str, device: str, batch: int) -> Case:
    """What a method is measured on; one that runs the model many times is asked about one image."""
    case = case_or_random(TRANSFORMER if reads_attention(method) else MODEL, device, batch)
    return case if quick(method) else first(case)


def work(method: str, case: Case) -> str:
    """A row's name."""
    return f"{titled(method)}, batch {len(case.x)}" + (f", {case.name}" if reads_attention(method) else "")


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
    return set(method.forward_passes.split()) <= FEW and method.backward_passes in FEW


def reads_attention(name: str) -> bool:
    """Whether a method looks into a transformer, and at no layer."""
    from camscope.explainers import METHODS
    from camscope.explainers.attention.token_attention_explainer import TokenAttentionExplainer

    return issubclass(METHODS[name], TokenAttentionExplainer)
