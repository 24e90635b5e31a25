"""`python -m benchmarks.faithfulness`: what the faithfulness metrics cost beside the bare forward passes that they take.

Processor time, in turns, as ratios within a round: a metric's over that of the model alone on as many images, in passes of
the same size. --model resnet18, --batch 2 images, --steps 20, --rounds 5, --device cpu (on a GPU wall time).
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks import cases
from benchmarks.timing import Spread, collector_off, in_turns, ratios, seconds
from camscope.metrics import METRICS, Scores, Trial, scoring

SETS = 40
TRIALS: dict[str, tuple[tuple[str, ...], str]] = {
    "deletion and insertion, mean": (("deletion", "insertion", "lerf-morf-gap", "aopc"), "mean"),
    "deletion and insertion, blur": (("deletion", "insertion", "lerf-morf-gap", "aopc"), "blur"),
    "deletion and insertion, noise": (("deletion", "insertion", "lerf-morf-gap", "aopc"), "noise"),
    "faithfulness correlation": (("faithfulness-correlation",), "mean"),
    "infidelity": (("infidelity",), "mean"),
    "deletion and insertion, inpainting": (("deletion", "insertion"), "inpainting"),
    "road": (("road",), "mean"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faithfulness", description=__doc__)
    parser.add_argument("--model", default="resnet18", choices=cases.RECIPES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    case = cases.build(options.model, options.device, options.batch)
    heat = torch.randn(len(case.x), 7, 7, device=case.device)
    heat = torch.nn.functional.interpolate(heat[:, None], case.x.shape[2:], mode="bilinear")[:, 0]
    print(
        f"{case.title}, {tuple(case.x.shape)}, {options.steps} steps, {SETS} sets; the median of {options.rounds} rounds"
    )
    with scoring(case.model, case.x, case.classes) as scores, collector_off():
        for title, (names, fill) in TRIALS.items():
            spread, rows = measured(scores, heat, names, fill, options)
            print(f"| {title} | {rows} | {spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f}) |", flush=True)
    return 0


def measured(
    scores: Scores, heat: torch.Tensor, names: Sequence[str], fill: str, options: argparse.Namespace
) -> tuple[Spread, int]:
    """The ratio, and the versions that the model was asked about."""
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    sizes: list[int] = []

    def tried() -> None:
        trial = Trial(heat, scores, fill=fill, steps=options.steps)
        for name in names:
            METRICS[name](
                trial,
                **({"sets": SETS} if "correlation" in name else {"squares": SETS} if name == "infidelity" else {}),
            )

    asked = scores._score.model.register_forward_pre_hook(lambda model, inputs: sizes.append(len(inputs[0])))
    tried()
    asked.remove()
    passes = [scores.x[:1].expand(size, *scores.x.shape[1:]).contiguous() for size in sizes]

    def bare() -> None:
        with torch.inference_mode():
            for each in passes:
                scores._score.model(each)

    tasks: dict[str, Callable[[], float]] = {
        "bare": lambda: seconds(bare, options.device, clock),
        "metric": lambda: seconds(tried, options.device, clock),
    }
    times = in_turns(tasks, options.rounds + 1)
    return ratios({name: each[1:] for name, each in times.items()}, "bare")["metric"], sum(sizes)


if __name__ == "__main__":
    raise SystemExit(main())
