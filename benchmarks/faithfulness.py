"""`python -m benchmarks.faithfulness`: what the faithfulness metrics cost beside the bare forward passes that they take.

Processor time (on a GPU wall time), in turns, as ratios within a round: a metric's over that of the model alone on as many
images, in passes of the same sizes. --model resnet18, --batch 2 images, --steps 20, --rounds 5, --device cpu.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from benchmarks import cases
from benchmarks.timing import Spread, collector_off, in_turns, ratios, seconds
from camscope.metrics import METRICS, PerturbationTest, scoring_scope

SETS = 40
Settings = Mapping[str, Mapping[str, int]]  # of each metric
CURVES: Settings = {"deletion": {}, "insertion": {}, "lerf-morf-gap": {}, "aopc": {}}
WORK: dict[str, tuple[Settings, str]] = {
    "deletion, insertion, gap, AOPC; mean": (CURVES, "mean"),
    "the same; blur": (CURVES, "blur"),
    "the same; noise": (CURVES, "noise"),
    "the same; inpainting": (CURVES, "inpainting"),
    "faithfulness correlation": ({"faithfulness-correlation": {"sets": SETS}}, "mean"),
    "infidelity": ({"infidelity": {"squares": SETS}}, "mean"),
    "ROAD": ({"road": {}}, "mean"),
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
    heat = F.interpolate(torch.randn(len(case.x), 1, 7, 7, device=case.device), case.x.shape[2:], mode="bilinear")[:, 0]
    size = "x".join(map(str, case.x.shape))
    print(f"{case.name}, {size}, {options.steps} steps, {SETS} sets; the median of {options.rounds} rounds", flush=True)
    with scoring_scope(case.model, case.x, case.classes) as scores, collector_off():
        for title, (metrics, fill) in WORK.items():

            def asked(metrics: Settings = metrics, fill: str = fill) -> None:
                trial = PerturbationTest(heat, scores, imputation=fill, n_steps=options.steps)
                for name, settings in metrics.items():
                    METRICS[name](trial, **settings)

            spread, rows = measured(case, asked, options)
            print(f"| {title} | {rows} | {spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f}) |", flush=True)
    return 0


def measured(case: cases.Case, asked: Callable[[], None], options: argparse.Namespace) -> tuple[Spread, int]:
    """The ratio, and how many versions the model was asked about."""
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    sizes: list[int] = []
    counting = case.model.register_forward_pre_hook(lambda model, inputs: sizes.append(len(inputs[0])))
    asked()
    counting.remove()
    passes = {size: case.x[:1].expand(size, *case.x.shape[1:]).contiguous() for size in set(sizes)}

    def bare() -> None:
        with torch.inference_mode():
            for size in sizes:
                case.model(passes[size])

    tasks: dict[str, Callable[[], float]] = {
        "bare": lambda: seconds(bare, options.device, clock),
        "metric": lambda: seconds(asked, options.device, clock),
    }
    times = in_turns(tasks, options.rounds)
    return ratios(times, "bare")["metric"], sum(sizes)


if __name__ == "__main__":
    raise SystemExit(main())
