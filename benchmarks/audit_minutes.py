"""How long an audit of 40 chest X-rays takes: seconds foreseen and taken of each stage, and image passes.

    python -m benchmarks.audit_minutes DATA [-o FOLDER] [--methods gradcam] [--budget 10m] [--size 224] [--write]

DATA holds `models.py` and `chest_xray` with COCO-like `annotations.json`. A pass is one image through the whole model;
those with gradients are counted apart. The passes do not depend on --size, the side of the model's input, which makes
the count fast. --budget sets the config's budget of time. --write saves the figures in benchmarks/results/audit_minutes.json.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.audit_real import CATEGORIES, chest_rows, write_table
from benchmarks.machine import machine
from camscope import audit
from camscope.audit import AuditRun

RESULTS = Path(__file__).parent / "results" / "audit_minutes.json"
MODEL_FILE = """from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("models", {file!r})
models = module_from_spec(spec)
spec.loader.exec_module(models)
chest_xray, TARGET_LAYER = models.chest_xray, models.TARGET_LAYER
PREPROCESSING = {{"chest_xray": (({size}, {size}), *models.PREPROCESSING["chest_xray"][1:])}}
CATEGORIES = {{"chest_xray": {categories!r}}}
"""


class Counts:
    """Passes and seconds of each stage."""

    def __init__(self) -> None:
        self.stage = "start"
        self.passes, self.gradients = Counter[str](), Counter[str]()
        self.wall, self.cpu = defaultdict[str, float](float), defaultdict[str, float](float)
        self.foreseen: dict[str, float] = {}
        self._since = time.perf_counter(), time.process_time()

    def enter(self, stage: str, done: int = 0, total: int = 1) -> None:
        """Take note of the stage that runs now."""
        now = time.perf_counter(), time.process_time()
        self.wall[self.stage] += now[0] - self._since[0]
        self.cpu[self.stage] += now[1] - self._since[1]
        self._since = now
        if stage != self.stage:
            print(f"  {self.stage}: {self.wall[self.stage]:.0f} s, {self.passes[self.stage]} passes", flush=True)
        self.stage = stage

    def foresee(self, seconds: Mapping[str, float]) -> None:
        """Keep the first estimate of each stage."""
        self.foreseen = {**seconds, **self.foreseen}


@contextmanager
def counted(model: type[nn.Module], counts: Counts) -> Iterator[None]:
    """Count every image through models of a class, and through their copies."""
    forward = model.forward

    def counting(self: nn.Module, x: torch.Tensor, *rest: Any, **options: Any) -> Any:
        counts.passes[counts.stage] += len(x)
        counts.gradients[counts.stage] += len(x) * torch.is_grad_enabled()
        return forward(self, x, *rest, **options)

    model.forward = counting  # put back below
    try:
        yield
    finally:
        model.forward = forward


def settings(data: Path, folder: Path, methods: Sequence[str], size: int) -> dict[str, Any]:
    """The config of `camscope audit init` with masks, organ and regions."""
    manifest = write_table(chest_rows(data), folder / "chest.csv")
    source = folder / "chest.py"
    text = MODEL_FILE.format(file=str(data / "models.py"), size=size, categories=CATEGORIES["chest_xray"])
    source.write_text(text)
    return {
        "data": {
            "manifest": str(manifest), "root": str(data), "label": "label", "ground_truth": "opacity",
            "subgroups": ["view"],
        },
        "model": {"source": f"{source}:chest_xray"},
        "explain": {"findings": ["COVID-19"], "methods": list(methods)},
        "regions": {"modality": "xray", "organ": "lungs", "columns": {"devices": "devices"}},
    }  # fmt: skip


def measured(config: Mapping[str, Any], folder: Path) -> tuple[AuditRun, Counts]:
    """Run the audit and count."""
    from torchvision.models import ResNet

    counts = Counts()
    with counted(ResNet, counts):
        run = audit.run_audit(
            config, folder / "audit", overwrite=True, on_progress=counts.enter, on_estimate=counts.foresee
        )
    counts.enter("end")
    return run, counts


def table(counts: Counts) -> str:
    """A line for each stage. The ratio is that of the foreseen seconds to the CPU time, which other processes do not change."""
    lines = [f"{'stage':<14}{'foreseen':>10}{'taken':>8}{'cpu':>8}{'ratio':>7}{'passes':>9}{'gradients':>11}"]
    for stage, seconds in counts.wall.items():
        foreseen = counts.foreseen.get(stage)
        cpu = counts.cpu[stage]
        ratio = f"{foreseen / cpu:.2f}" if foreseen is not None and cpu else ""
        expected = "" if foreseen is None else f"{foreseen:.1f}"
        passes = f"{counts.passes[stage]:>9}{counts.gradients[stage]:>11}"
        lines.append(f"{stage:<14}{expected:>10}{seconds:>8.1f}{cpu:>8.1f}{ratio:>7}{passes}")
    totals = f"{sum(counts.passes.values()):>9}{sum(counts.gradients.values()):>11}"
    lines.append(
        f"{'all':<14}{sum(counts.foreseen.values()):>10.1f}{sum(counts.wall.values()):>8.1f}"
        f"{sum(counts.cpu.values()):>8.1f}{'':>7}{totals}"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Audit, count, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit_minutes", description=__doc__)
    parser.add_argument("data", type=Path, help="the folder of models and images")
    parser.add_argument("-o", "--output", type=Path, default=Path("audit-minutes"), help="where the audit goes")
    parser.add_argument("--methods", nargs="+", default=("gradcam", "integratedgradients"))
    parser.add_argument("--size", type=int, default=224, help="side of the model's input")
    parser.add_argument("--budget", help="time for the audit, such as 10m, as in the config")
    parser.add_argument("--set", type=json.loads, default={}, help="further settings of the config, as JSON")
    parser.add_argument("--write", action="store_true", help=f"write them into results/{RESULTS.name}")
    chosen = parser.parse_args(arguments)
    config = settings(chosen.data.resolve(), chosen.output, chosen.methods, chosen.size) | chosen.set
    config |= {} if chosen.budget is None else {"budget": chosen.budget}
    run, counts = measured(config, chosen.output)
    print(f"\n{table(counts)}\n")
    for planned in run.summary.planned_sizes:
        print(f"  {planned.stage}: {planned.n_images} of {planned.configured_n_images} images")
    for verdict in run.verdicts:
        print(f"  {verdict.conclusion:<14} {verdict.claim} {verdict.reason}")
    if chosen.write:
        figures = {name: dict(getattr(counts, name)) for name in ("foreseen", "wall", "cpu", "passes", "gradients")}
        verdicts = {verdict.claim: verdict.conclusion for verdict in run.verdicts}
        found = {"machine": machine("cpu"), "methods": list(chosen.methods), "size": chosen.size, **figures}
        RESULTS.write_text(json.dumps({**found, "verdicts": verdicts}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
