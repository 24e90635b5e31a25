"""`python -m benchmarks.devices`: whether a card computes the CPU's maps, over networks, methods and kinds of arithmetic.

    python -m benchmarks.devices --json maps.json              # every method on every network
    python -m benchmarks.devices resnet18 --methods gradcam    # some of them

The reference is the map in float64 on the CPU. Beside it stand the CPU's own float32, the card in float32, with TF32
convolutions (PyTorch's default), under autocast to bfloat16 and float16, and with channels last. A method that runs the
model many times does so a few times only. "apart": the largest difference, over the largest value of the reference.
"""

import argparse
import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cases, trained
from benchmarks.agreement import correlation
from benchmarks.cases import Case
from benchmarks.machine import machine
from benchmarks.report import described, line, updated
from benchmarks.tool import STAGES, explainer
from camscope.errors import CamscopeError

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "README.md", HERE / "results" / "devices.json"
IMAGES, SIDE = 2, 128  # so small that the CPU's float64 is there in time; a transformer of one size keeps its own
FEW = {
    "n_samples": 8,
    "n_steps": 4,
    "n_channels": 8,
    "n_groups": 8,
    "grid_size": 4,
    "segments": 8,
}  # settings of methods that run the model many times
MORE: dict[str, dict[str, Any]] = {
    "expectedgradients": {"background": ["zero", "mean"]},
    "gradientshap": {"background": ["zero", "mean"]},
    "deepliftshap": {"background": ["zero", "mean"]},
    "iscam": {"n_samples": 2},
    "occlusion": {"window": 48},
    "sobol": {"n_samples": 4, "grid_size": 3},
    "sscam": {"n_samples": 2},
    "vitcx": {"distance": 0.7},  # fewer clusters of channels
    "xrai": {"scales": (100.0, 500.0)},
}
TRAINED = ("resnet18", "mobilenet_v2", "deit_tiny")
RANDOM = ("densenet121", "convnext_tiny", "swin_t", "efficientnet_b0")
LAYERS = {"swin_t": "features", "efficientnet_b0": "features"}
CPU32 = "CPU, float32"


@dataclass(frozen=True)
class Kind:
    """Arithmetic of the card: whether convolutions may be of TF32, what autocast casts to, and the order in memory."""

    tf32: bool = False
    autocast: torch.dtype | None = None
    channels_last: bool = False


KINDS = {
    "float32": Kind(),
    "TF32 convolutions": Kind(tf32=True),
    "channels last": Kind(channels_last=True),
    "bfloat16 autocast": Kind(tf32=True, autocast=torch.bfloat16),
    "float16 autocast": Kind(tf32=True, autocast=torch.float16),
}


@dataclass(frozen=True)
class Row:
    """One map of one method; `problem`: what is wrong, if anything is; `refused`: that there is no map, here and there."""

    network: str
    method: str
    kind: str
    apart: float | None = None
    correlation: float | None = None
    seconds: float | None = None
    refused: str = ""
    problem: str = ""


def build(name: str) -> Case:
    """A network and a few images, on the CPU; trained where the weights are here."""
    if name in cases.RECIPES or name in TRAINED:
        case = trained.case_or_random(name, "cpu", IMAGES)
    else:
        from torchvision.models import get_model

        with torch.random.fork_rng():
            torch.manual_seed(cases.SEED)
            model, x = get_model(name, weights=None), torch.randn(IMAGES, 3, cases.SIDE, cases.SIDE)
            case = cases.ready(name, model, LAYERS[name], x)
    case.model.eval()
    x = case.x if case.prefix is not None else case.x[..., :SIDE, :SIDE].contiguous()
    with torch.no_grad():
        return replace(case, name=name, x=x, classes=case.model(x).argmax(1).tolist())


def on(case: Case, device: str, dtype: torch.dtype, *, channels_last: bool = False) -> Case:
    """The same network and images elsewhere, or of other numbers."""
    model, x = copy.deepcopy(case.model).to(device, dtype), case.x.to(device, dtype)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    return replace(case, model=model, x=x)


@contextmanager
def arithmetic(kind: Kind, device: str) -> Iterator[None]:
    """Inside, the card computes so."""
    before = torch.backends.cudnn.allow_tf32
    with ExitStack() as scope:
        if kind.autocast is not None:
            scope.enter_context(torch.autocast(device, kind.autocast))
        torch.backends.cudnn.allow_tf32 = kind.tf32
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = before


def ours(case: Case, method: str) -> Callable[[], Tensor]:
    """The method, with few passes."""
    from camscope.explainers import METHODS

    names = {field.name for field in fields(METHODS[method])}
    settings = {name: value for name, value in FEW.items() if name in names} | MORE.get(method, {})
    tool = explainer(case, method, **settings)
    return lambda: tool.attribute(case.x, case.classes)


def state(case: Case) -> list[tuple[str, Any]]:
    """What a call must leave: weights, buffers, gradients and flags."""
    values = [*case.model.named_parameters(), *case.model.named_buffers()]
    found: list[tuple[str, Any]] = [
        (name, (value._version, value.data_ptr(), value.grad is None)) for name, value in values
    ]
    found += [(name, (part.training, len(part._forward_hooks))) for name, part in case.model.named_modules()]
    return [*found, ("numbers drawn", torch.get_rng_state().sum().item())]


def timed(run: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    """A result, and its seconds."""
    begin = time.perf_counter()
    found = run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return found, time.perf_counter() - begin


def error(failed: Exception) -> str:
    """An error in a line."""
    return f"{type(failed).__name__}: {' '.join(str(failed).split())[:160]}"


def rows(name: str, methods: Sequence[str], device: str, chosen: Sequence[str]) -> Iterator[Row]:
    """Every method on one network."""
    from camscope.explainers import METHODS

    case = build(name)
    exact, single = on(case, "cpu", torch.float64), case
    cards = {
        kind: on(case, device, torch.float32, channels_last=settings.channels_last)
        for kind, settings in KINDS.items()
        if kind in chosen
    }
    for method in methods:
        if "layers" in signature(METHODS[method]).parameters and not hasattr(case.model, STAGES[0]):
            continue  # it takes several layers, and which they are is known of a ResNet
        try:
            expected = ours(exact, method)()
        except Exception as failed:
            expected, reason = None, error(failed)
        for kind, there in {CPU32: single, **cards}.items():
            settings, place = KINDS.get(kind, Kind()), "cpu" if kind == CPU32 else device
            before = state(there)
            try:
                run = ours(there, method)
                with arithmetic(settings, place):
                    found, seconds = timed(run, place)
            except Exception as failed:
                # the parts that it names have other names in the graph of another device
                same = expected is None and isinstance(failed, CamscopeError) and error(failed)[:60] == reason[:60]
                yield Row(
                    name, method, kind, refused=error(failed) if same else "", problem="" if same else error(failed)
                )
                continue
            if expected is None:
                yield Row(name, method, kind, problem=f"a map, where the CPU has none: {reason}")
                continue
            wrong = []
            if not bool(found.isfinite().all()):
                wrong.append("not finite")
            if found.shape != expected.shape:
                wrong.append(f"shape {tuple(found.shape)}, not {tuple(expected.shape)}")
            if found.device.type != place.partition(":")[0]:
                wrong.append(f"on {found.device}")
            if found.dtype != torch.float32:
                wrong.append(f"of {found.dtype}")
            if state(there) != before:
                wrong.append("something changed")
            if wrong:
                yield Row(name, method, kind, problem="; ".join(wrong))
                continue
            heat = found.double().cpu()
            most = expected.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
            yield Row(
                name, method, kind, float((heat - expected).abs().max() / most), correlation(heat, expected), seconds
            )
        gc.collect()


def stored(facts: dict[str, str | int], found: Sequence[Row]) -> dict[str, Any]:
    """As JSON: by network, method and kind how far apart and how correlated; what was refused, and what went wrong."""
    maps: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for row in found:
        if row.apart is not None:
            least = None if row.correlation is None else round(row.correlation, 6)
            maps.setdefault(row.network, {}).setdefault(row.method, {})[row.kind] = [float(f"{row.apart:.2g}"), least]
    return {
        "machine": facts,
        "refused": sorted({f"{row.method} on {row.network}" for row in found if row.refused}),
        "problems": [f"{row.kind}: {row.method} on {row.network}: {row.problem}" for row in found if row.problem],
        "maps": maps,
    }


def table(content: dict[str, Any]) -> str:
    """A row a kind of arithmetic: how far its maps are from the reference."""
    rows: dict[str, list[tuple[float, str]]] = {}
    for network, methods in content["maps"].items():
        for method, kinds in methods.items():
            for kind, (distance, _) in kinds.items():
                rows.setdefault(kind, []).append((distance, f"{method} on {network}"))
    head = ["", "maps", "apart: median", "95 %", "within 1e-4", "within 1e-2", "most", "no map"]
    lines = [line(head), line(["---"] * len(head))]
    for kind, found in rows.items():
        found.sort()
        values = [distance for distance, _ in found]
        shares = [f"{sum(value <= limit for value in values) / len(values):.0%}" for limit in (1e-4, 1e-2)]
        most = ", ".join(f"{place} {distance:.1g}" for distance, place in found[:-4:-1])
        failed = sum(problem.startswith(f"{kind}: ") for problem in content["problems"])
        middle, high = values[len(values) // 2], values[len(values) * 95 // 100]
        lines.append(line([kind, str(len(values)), f"{middle:.0e}", f"{high:.0e}", *shares, most, str(failed)]))
    return "\n".join(lines)


def page() -> None:
    """Draw the table of benchmarks/README.md from results/devices.json."""
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = f"{described(content['machine'])}.\n\n{table(content)}"
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), "devices", text), encoding="utf-8")


def written(path: Path, content: dict[str, Any]) -> None:
    """A line a network and method."""
    head = {name: value for name, value in content.items() if name != "maps"}
    networks = [
        f'"{network}": {{\n' + ",\n".join(f'"{name}": {json.dumps(kinds)}' for name, kinds in methods.items()) + "\n}"
        for network, methods in content["maps"].items()
    ]
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + ',\n "maps": {\n' + ",\n".join(networks) + "\n}\n}\n"
    path.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; 1 where something is wrong."""
    from camscope.explainers import METHODS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.devices", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*TRAINED, *RANDOM]
    parser.add_argument("networks", nargs="*", default=every, help=", ".join(every))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", action="store_true", help="draw the table of the page again; measure nothing")
    options = parser.parse_args(arguments)
    if options.page:
        page()
        return 0
    warnings.simplefilter("ignore")
    found: list[Row] = []
    for name in options.networks:
        for row in rows(name, options.methods, options.device, options.kinds):
            found.append(row)
            if options.json:
                written(options.json, stored(machine(options.device), found))
            if row.problem:
                print(asdict(row), file=sys.stderr, flush=True)
        print(f"{name} done", file=sys.stderr, flush=True)
    print(table(stored({}, found)))
    return int(any(row.problem for row in found))


if __name__ == "__main__":
    sys.exit(main())
