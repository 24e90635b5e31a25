"""How often the layout probe accepts a right grid and rejects a wrong one, over timm's families with random weights.

    python -m benchmarks.layout_probe                # all families, about a quarter of an hour on one core
    python -m benchmarks.layout_probe vit swin       # families by name

For each family: the verdict on the layer that camscope chooses and on every other layer that it takes for a map; the verdicts
on wrong grids planted at the chosen layer; the passes and the time of the first and the second call of Grad-CAM.
"""

import argparse
import json
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from camscope import GradCAM
from camscope.errors import CamscopeError
from camscope.layers.choose_layer import choose_layer
from camscope.layers.judge_layout_from_noise_reactions import LayoutProbeResult, LayoutVerdict
from camscope.layers.layout import CHANNELS_FIRST, TOKENS, Layout
from camscope.layers.spatial_layers import SpatialLayer, find_spatial_layers
from camscope.layers.verify_layout_by_noise import (
    MAX_TOKENS_WITHOUT_BLOCKS,
    OutputLocation,
    _read_layer_outputs,
    probe_layout,
    probe_output_layouts,
)

SIZES = (160, 224)
SMALL = (
    "test",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxxs",
    "xxs",
    "xxt",
    "tiny",
    "_ti",
    "xs",
    "micro",
    "lite",
    "small",
    "_s",
)
MAX_PARAMETERS = 40e6
TRIED = 5  # names of a family, the small ones first
MIN_PARAMETER = 1e-3  # heads of zeros and layer scales of 1e-6 hide what training would show
Change = Callable[[Tensor, Layout], tuple[Tensor, Layout]]


def families(names: Collection[str] = ()) -> dict[str, str]:
    """By the beginning of its name, one model of every family (default: all) that has a small one."""
    import timm

    found: dict[str, list[str]] = defaultdict(list)
    for name in timm.list_models():
        if not name.startswith("test_"):
            found[re.sub(r"(_?\d.*|_.*)$", "", name)].append(name)
    asked = {
        family: sorted(models, key=_cost)[:TRIED] for family, models in found.items() if not names or family in names
    }
    small = {family: next(filter(_is_small, models), None) for family, models in asked.items()}
    return {family: name for family, name in sorted(small.items()) if name is not None}


def _is_small(name: str) -> bool:
    """Whether a model has few parameters; none is made to find out."""
    import timm

    try:
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False, num_classes=10)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return sum(parameter.numel() for parameter in model.parameters()) <= MAX_PARAMETERS


def _cost(name: str) -> tuple[int, int, str]:
    rank = next((place for place, part in enumerate(SMALL) if part in name), len(SMALL))
    return rank, len(name), name


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model with random weights and an input that it takes."""
    import timm

    for size in (*SIZES, 0):  # 0: its own
        torch.manual_seed(0)
        try:
            model: Any = timm.create_model(name, pretrained=False, num_classes=10)
            default = model.default_cfg["input_size"][-1]
            if size and (model.default_cfg.get("fixed_input_size") or size > default):
                continue
            x = torch.randn(1, model.default_cfg["input_size"][0], size or default, size or default)
            for parameter in model.parameters():
                if parameter.abs().max() < MIN_PARAMETER:
                    nn.init.normal_(parameter, std=0.1)
            with torch.no_grad():
                model.eval()(x)
        except (RuntimeError, AssertionError, IndexError, TypeError):
            continue
        return model.eval().requires_grad_(False), x
    raise ValueError(f"{name} took no input")


def planted() -> dict[str, Change]:
    """Wrong grids: what they make of a layer's rows (N,T,K) and its layout."""

    def shifted(by: int, rows: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        pad = rows[:, :1].expand(-1, 1, -1)
        rows = torch.cat([pad, rows] if by > 0 else [rows, pad], 1)
        return rows, Layout(TOKENS, layout.grid, layout.prefix if by > 0 else layout.prefix + 1)

    def reordered(order: Callable[[Layout], Tensor], rows: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        return rows[:, layout.prefix + order(layout)], Layout(TOKENS, layout.grid)

    def by_columns(layout: Layout) -> Tensor:
        return torch.arange(_count(layout)).view(layout.grid).movedim(-1, 0).reshape(-1)

    def snake(layout: Layout) -> Tensor:
        plane = torch.arange(_count(layout)).view(layout.grid)
        plane[1::2] = plane[1::2].flip(-1)
        return plane.reshape(-1)

    def rows_exchanged(layout: Layout) -> Tensor:
        plane = torch.arange(_count(layout)).view(layout.grid)
        return plane[[1, 0, *range(2, len(plane))]].reshape(-1)

    def flipped(axis: int, layout: Layout) -> Tensor:
        return torch.arange(_count(layout)).view(layout.grid).flip(axis).reshape(-1)

    def quarter(layout: Layout) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        order = torch.arange(_count(layout))
        some = torch.randperm(len(order), generator=generator)[: len(order) // 4]
        order[some] = order[some[torch.randperm(len(some), generator=generator)]]
        return order

    def shuffled(layout: Layout) -> Tensor:
        return torch.randperm(_count(layout), generator=torch.Generator().manual_seed(5))

    def words(behind: int, rows: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """Tokens of a text behind the image, that all take the same from it; the last ones are taken for the grid."""
        image = rows[:, layout.prefix : layout.prefix + _count(layout)]
        text = torch.randn(behind, rows.shape[2], generator=torch.Generator().manual_seed(6)) + image.mean(
            1, keepdim=True
        )
        return torch.cat([image, text], 1), Layout(TOKENS, layout.grid, behind)

    def blind(rows: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        return torch.ones_like(rows), layout

    return {
        "prefix too short": partial(shifted, 1),
        "prefix too long": partial(shifted, -1),
        "by columns": partial(reordered, by_columns),
        "shuffled": partial(reordered, shuffled),
        "snake": partial(reordered, snake),
        "two rows exchanged": partial(reordered, rows_exchanged),
        "upside down": partial(reordered, partial(flipped, 0)),
        "mirrored": partial(reordered, partial(flipped, -1)),
        "a quarter shuffled": partial(reordered, quarter),
        "words behind": partial(words, 3),
        "text alone": blind,
    }


def _count(layout: Layout) -> int:
    return int(torch.tensor(layout.grid).prod())


def plant(model: nn.Module, layer: SpatialLayer, x: Tensor, change: Change, outputs: list[Tensor]) -> LayoutProbeResult:
    """The verdict on a wrong grid at a layer. `outputs`: of the layer in each run, which all plants share; at first empty."""
    changed = Layout(TOKENS, layer.layout.grid, layer.layout.prefix)
    runs = iter(range(len(outputs))) if outputs else None

    def rows(output: Tensor) -> Tensor:
        if layer.layout.kind == TOKENS:
            return output
        return output.flatten(2).mT if layer.layout.kind == CHANNELS_FIRST else output.flatten(1, -2)

    def read(run: Callable[[Tensor], object], inputs: Tensor) -> list[Tensor | None]:
        found = (
            outputs[next(runs)] if runs else _read_layer_outputs(model, [OutputLocation(layer.name)], run, inputs)[0]
        )
        if runs is None and found is not None:
            outputs.append(found)
        return [None if found is None else change(rows(found), changed)[0]]

    probe = torch.zeros(1, changed.prefix + _count(changed), 1)
    wrong = change(probe, changed)[1]
    with torch.no_grad():
        found = probe_output_layouts(read, wrong, x, model)
    return next(iter(found), LayoutProbeResult(LayoutVerdict.UNDECIDED))


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and its seconds."""
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def row(name: str, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """What is measured of one model."""
    passes = [0]
    handle = model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    try:
        layers = find_spatial_layers(model, lambda: model(x), x)
        layer = choose_layer(model, lambda inputs: model(inputs).sum(1), x)
    finally:
        handle.remove()
    found: dict[str, Any] = {
        "model": name,
        "input": list(x.shape[1:]),
        "layer": layer.name,
        "layout": str(layer.layout),
    }
    chosen = next(one for one in layers if one.name == layer.name)
    finding = LayoutProbeResult(LayoutVerdict.BY_CONSTRUCTION) if chosen.by_construction else None
    found["verdict"] = (
        finding or probe_layout(model, [OutputLocation(layer.name)], layer.layout, x, model)[0]
    ).verdict.value
    groups: dict[Layout, list[str]] = defaultdict(list)
    for one in layers:
        if not one.by_construction:
            groups[one.layout].append(one.name)
    counts = Counter(LayoutVerdict.BY_CONSTRUCTION.value for one in layers if one.by_construction)
    found["contradicted"] = []
    for layout, names in groups.items():
        for each, proof in zip(
            names, probe_layout(model, [OutputLocation(each) for each in names], layout, x, model), strict=True
        ):
            counts[proof.verdict.value] += 1
            if proof.verdict is LayoutVerdict.CONTRADICTED:
                found["contradicted"].append(f"{each} {layout}: {proof.reason}")
    found["layers"] = dict(counts)
    if (
        found["verdict"] in (LayoutVerdict.VERIFIED.value, LayoutVerdict.UNDECIDED.value)
        and _count(layer.layout) <= MAX_TOKENS_WITHOUT_BLOCKS
    ):
        outputs: list[Tensor] = []
        found["planted"] = {
            kind: plant(model, layer, x, change, outputs).verdict.value for kind, change in planted().items()
        }
    tool = GradCAM(model, layer.name)
    fresh = GradCAM(nn.Sequential(model), f"0.{layer.name}")  # another model: nothing is known of it
    tool.attribute(x, 1)  # warm
    found["seconds_first"] = timed(partial(fresh.attribute, x, 1))[1]
    found["seconds_cached"] = min(timed(partial(fresh.attribute, x, 1))[1] for _ in range(2))
    return found


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """Family by family."""
    for family, name in families(names).items():
        try:
            yield {"family": family, **row(name, *build(name))}
        except (
            CamscopeError,
            ValueError,
            RuntimeError,
            TypeError,
            AttributeError,
            IndexError,
            NotImplementedError,
        ) as error:
            yield {"family": family, "model": name, "error": f"{type(error).__name__}: {str(error)[:200]}"}


def summary(found: list[dict[str, Any]]) -> str:
    """The figures of all families."""
    done = [one for one in found if "error" not in one]
    verdicts = Counter(one["verdict"] for one in done)
    layers = sum((Counter(one["layers"]) for one in done), Counter[str]())
    wrong: dict[str, Counter[str]] = defaultdict(Counter)
    for one in done:
        for kind, verdict in one.get("planted", {}).items():
            wrong[kind][verdict] += 1
    probed = [one["seconds_first"] / one["seconds_cached"] for one in done if one["verdict"] != "by construction"]
    ratio = sorted(probed)[len(probed) // 2] if probed else 0.0
    lines = [f"{len(done)} families, {len(found) - len(done)} without an answer", f"layer chosen: {dict(verdicts)}"]
    lines += [f"all layers: {dict(layers)}"]
    lines += [f"planted, {kind}: {dict(counts)}" for kind, counts in wrong.items()]
    return "\n".join([*lines, f"first call / cached call, median where probed: {ratio:.2f}"])


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="families by name; default: all")
    parser.add_argument("--output", help="a JSON file for the rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    for one in rows(options.families):
        found.append(one)
        print(json.dumps(one), flush=True)
        if options.output:
            Path(options.output).write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(summary(found), file=sys.stderr)


if __name__ == "__main__":
    main()
