"""The drop-in for pytorch-grad-cam against pytorch-grad-cam itself: the largest difference and the time of every method.

python -m benchmarks.drop_in            # prints the table
python -m benchmarks.drop_in --write    # and writes benchmarks/results/drop_in.json
python -m benchmarks.drop_in --record   # writes the maps of pytorch-grad-cam that tests/compat/test_recorded_maps.py loads
"""

import argparse
import importlib
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OURS, THEIRS = "camscope.compat.pytorch_grad_cam", "pytorch_grad_cam"
RESULTS = Path(__file__).parent / "results" / "drop_in.json"
RECORDED_MAPS = Path(__file__).parents[1] / "tests" / "compat" / "grad_cam_maps.npz"
RECORDED_LEVELS = 65535  # of a map in 0..1 that is stored as uint16
RECORDED_STEP = 2  # every second row and column is stored
PAGE = Path(__file__).parents[1] / "docs" / "migrate" / "pytorch-grad-cam.md"
END = "<!-- end of table -->"
TOLERANCE = 1e-4
N_ROUNDS = 6  # timed calls of each package at real size
REAL_METHODS = ["GradCAM", "HiResCAM", "GradCAMPlusPlus", "LayerCAM", "EigenCAM"]
SEED = 3
METHODS = [
    "GradCAM",
    "HiResCAM",
    "GradCAMPlusPlus",
    "XGradCAM",
    "LayerCAM",
    "GradCAMElementWise",
    "ShapleyCAM",
    "EigenCAM",
    "EigenGradCAM",
    "SegEigenCAM",
    "KPCA_CAM",
    "FEM",
    "RandomCAM",
    "ScoreCAM",
    "AblationCAM",
    "FullGrad",
    "FinerCAM",
    "RefineCAM",
    "SESS",
]
WITHOUT_AUG_SMOOTH = ("FinerCAM", "RefineCAM", "SESS")  # their signatures do not have it
ONLY_FOR_IMAGES_OF_CHANNELS = ("FullGrad", "ShapleyCAM")  # there it raises an error for tokens
SMOOTHINGS: dict[str, dict[str, bool]] = {"plain": {}, "eigen": {"eigen_smooth": True}, "aug": {"aug_smooth": True}}


@dataclass(frozen=True)
class Setting:
    """A model, its layers in the order of the pass, an input, and how tokens become a map."""

    model: nn.Module
    layers: list[nn.Module]
    x: Tensor
    reshape: Callable[[Tensor], Tensor] | None = None


def build_cnn(size: int = 48, samples: int = 2, width: int = 12) -> Setting:
    """Convolutions with batch norms and in-place ReLUs, random weights and the statistics of random inputs."""
    torch.manual_seed(SEED)
    stages, channels = [], 3
    for stage in range(3):
        out = width * 2**stage
        stages.append(nn.Sequential(nn.Conv2d(channels, out, 3, 2, 1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)))
        channels = out
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 3, size, size))
    model.eval()
    return Setting(model, [model[1], model[2]], torch.randn(samples, 3, size, size))


def tokens_to_maps(side: int, tokens: Tensor) -> Tensor:
    """Tokens (N,1 + side²,K) without the class token as (N,K,side,side)."""
    return tokens[:, 1:].reshape(len(tokens), side, side, -1).permute(0, 3, 1, 2)


def build_vit(size: int = 32, samples: int = 2, depth: int = 4, width: int = 48) -> Setting:
    """A vision transformer with random weights; the layers are LayerNorms before the attention."""
    from torchvision.models import VisionTransformer

    torch.manual_seed(SEED)
    model: Any = VisionTransformer(size, 8, depth, 4, width, 2 * width, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.2)
    model.eval()
    layers = [model.encoder.layers[-2].ln_1, model.encoder.layers[-1].ln_1]
    return Setting(model, layers, torch.randn(samples, 3, size, size), partial(tokens_to_maps, size // 8))


MODELS: dict[str, Callable[[], Setting]] = {"CNN": build_cnn, "ViT": build_vit}


def build_recorded(kind: str) -> Setting:
    """A smaller model whose weights and input come from NumPy's legacy generator, which gives the same numbers everywhere."""
    setting = build_cnn(24, width=8) if kind == "CNN" else build_vit(depth=3, width=16)
    random: Any = np.random.RandomState(SEED)
    for name, values in sorted(setting.model.state_dict().items()):
        if values.is_floating_point():
            drawn = torch.from_numpy(random.standard_normal(tuple(values.shape)))
            values.copy_(drawn.abs() + 0.5 if "var" in name else drawn / max(1, values[0].numel()) ** 0.5)
    return replace(setting, x=torch.from_numpy(random.standard_normal(tuple(setting.x.shape))).float())


def recorded_combinations() -> list[tuple[str, str, int, str]]:
    """What is recorded: plain maps of one and two layers, smoothed maps of one layer."""
    return [
        (method, kind, n_layers, smoothing)
        for kind in MODELS
        for method in METHODS
        for n_layers, smoothing in ((1, "plain"), (2, "plain"), (1, "eigen"), (1, "aug"))
        if offered(method, kind, n_layers, smoothing)
    ]


def run_others(package: str, setting: Setting) -> dict[str, Any]:
    """The metrics of random maps, Deep Feature Factorization and guided backpropagation of one package."""
    modules = ("metrics.road", "metrics.arcc", "metrics.cam_mult_image", "utils.model_targets")
    road, arcc, multiplied, targets = (importlib.import_module(f"{package}.{name}") for name in modules)
    module: Any = importlib.import_module(package)
    cams = np.random.RandomState(0).random_sample((len(setting.x), *setting.x.shape[2:])).astype(np.float32)
    chosen = [targets.ClassifierOutputSoftmaxTarget(k) for k in (1, 2)]
    metrics = {
        "ROAD, most relevant first": road.ROADMostRelevantFirst(70),
        "ROAD, least relevant first": road.ROADLeastRelevantFirst(30),
        "ROAD, combined": road.ROADCombined([30, 60]),
        "ARCC": arcc.ARCC(module.GradCAM(setting.model, setting.layers), [30, 60]),
        "change of the score": multiplied.CamMultImageConfidenceChange(),
        "drop": multiplied.DropInConfidence(),
        "increase": multiplied.IncreaseInConfidence(),
    }
    results = {}
    for name, metric in metrics.items():
        torch.manual_seed(0)  # of the noise
        results[name] = metric(setting.x, cams, chosen, setting.model)
    concepts, maps = module.DeepFeatureFactorization(setting.model, setting.layers[1])(setting.x, 3)
    signal = module.GuidedBackpropReLUModel(setting.model, "cpu")(setting.x[:1].clone(), 2)
    results |= {"concepts": concepts, "maps of concepts": np.array(maps), "guided backpropagation": signal}
    return {name: np.float32(values) for name, values in results.items()}


def record() -> None:
    """Write the maps of pytorch-grad-cam as uint16, and the other results as they are."""
    maps: dict[str, Any] = run_others(THEIRS, build_recorded("CNN"))
    for kind in MODELS:
        setting = build_recorded(kind)
        for method, of_kind, n_layers, smoothing in recorded_combinations():
            if of_kind == kind:
                values = run(THEIRS, method, setting, n_layers, smoothing)[0][:, ::RECORDED_STEP, ::RECORDED_STEP]
                maps[f"{method} {kind} {n_layers} {smoothing}"] = np.uint16(np.round(values * RECORDED_LEVELS))
    np.savez_compressed(RECORDED_MAPS, **maps)
    print(f"{len(maps)} arrays, {RECORDED_MAPS.stat().st_size} bytes")


def run(package: str, method: str, setting: Setting, n_layers: int, smoothing: str) -> tuple[Any, float]:
    """The maps (N,H,W) of one package, and the seconds of a second call."""
    module: Any = importlib.import_module(package)
    targets_module: Any = importlib.import_module(f"{package}.utils.model_targets")
    options: dict[str, Any] = {}
    if method == "AblationCAM" and setting.reshape is not None:
        options["ablation_layer"] = module.AblationLayerVit()
    if method == "SESS":
        side = setting.x.shape[-1]
        options["scales"] = [side, side * 9 // 7] if setting.reshape is None else [side, side * 10 // 7]
    layers = [] if method == "FullGrad" else setting.layers[-n_layers:]
    categories = range(1, 1 + len(setting.x))
    targets = None if method == "FinerCAM" else [targets_module.ClassifierOutputTarget(k) for k in categories]
    with (
        warnings.catch_warnings(),
        WithoutHooksAfter(module, method)(setting.model, layers, setting.reshape, **options) as cam,
    ):
        warnings.simplefilter("ignore")
        seconds, maps = [], None
        for _ in range(2):
            np.random.seed(SEED)
            start = time.perf_counter()
            maps = cam(setting.x, targets, **SMOOTHINGS[smoothing])
            seconds.append(time.perf_counter() - start)
    setting.model.zero_grad(set_to_none=True)
    return maps, min(seconds)


def build_real(kind: str, batch_size: int) -> Setting:
    """A network of everyday size, with random weights: ResNet-50 or ViT-B/16, and images of 224 x 224 pixels."""
    from torchvision.models import resnet50, vit_b_16

    torch.manual_seed(SEED)
    x = torch.randn(batch_size, 3, 224, 224)
    if kind == "ResNet-50":
        resnet: Any = resnet50(weights=None).eval()
        return Setting(resnet, [resnet.layer4[-1]], x)
    vit: Any = vit_b_16(weights=None)
    nn.init.normal_(vit.heads.head.weight, std=0.02)
    return Setting(vit.eval(), [vit.encoder.layers[-1].ln_1], x, partial(tokens_to_maps, 14))


def compare_at_real_size(kind: str, batch_size: int, method: str) -> dict[str, Any]:
    """The largest difference and the median times of alternating calls of both packages, after one call that is not timed."""
    setting = build_real(kind, batch_size)
    seconds: dict[str, list[float]] = {OURS: [], THEIRS: []}
    maps: dict[str, Any] = {}
    for round_number in range(N_ROUNDS + 1):
        for package in (OURS, THEIRS)[:: 1 if round_number % 2 else -1]:
            module: Any = importlib.import_module(package)
            targets: Any = importlib.import_module(f"{package}.utils.model_targets")
            with (
                warnings.catch_warnings(),
                getattr(module, method)(setting.model, setting.layers, setting.reshape) as cam,
            ):
                warnings.simplefilter("ignore")
                start = time.perf_counter()
                maps[package] = cam(setting.x, [targets.ClassifierOutputTarget(3)] * batch_size)
                seconds[package] += [time.perf_counter() - start] if round_number else []
            setting.model.zero_grad(set_to_none=True)
    ratios = np.array(seconds[OURS]) / np.array(seconds[THEIRS])
    return {
        "model": kind,
        "batch": batch_size,
        "method": method,
        "difference": float(np.abs(maps[OURS] - maps[THEIRS]).max()),
        "seconds": round(float(np.median(seconds[OURS])), 4),
        "seconds_of_grad_cam": round(float(np.median(seconds[THEIRS])), 4),
        "ratio": round(float(np.median(ratios)), 3),
        "ratios": [round(float(ratios.min()), 3), round(float(ratios.max()), 3)],
    }


def format_difference(value: float) -> str:
    """A difference as a power of ten with one digit."""
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def format_real_size(rows: list[dict[str, Any]]) -> str:
    """The table of the page, of networks of everyday size."""
    lines = [
        "| model | images | method | largest difference | camscope | pytorch-grad-cam | ratio (lowest to highest) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["ratios"]
        lines.append(
            f"| {row['model']} | {row['batch']} | `{row['method']}` | {format_difference(row['difference'])} "
            f"| {row['seconds']:.2f} s | {row['seconds_of_grad_cam']:.2f} s | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines)


def format_all(rows: list[dict[str, Any]]) -> str:
    """The table of the page, of all methods on small networks: the times are those of camscope / pytorch-grad-cam."""
    lines = [
        "| method | model | layers | largest difference | plain | `eigen_smooth` | `aug_smooth` |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["model"], row["layers"]), {})[row["smoothing"]] = row
    for (method, kind, layers), group in groups.items():
        times = [
            f"{1000 * group[name]['seconds']:.1f} / {1000 * group[name]['seconds_of_grad_cam']:.1f} ms"
            if name in group
            else "–"
            for name in SMOOTHINGS
        ]
        worst = max(row["difference"] for row in group.values())
        lines.append(f"| `{method}` | {kind} | {layers} | {format_difference(worst)} | {' | '.join(times)} |")
    return "\n".join(lines)


def insert_tables(text: str, results: dict[str, Any]) -> str:
    """The text of the page with new tables between their marks."""
    tables = {"drop-in": format_real_size(results["real_size"]), "drop-in of all methods": format_all(results["rows"])}
    for name, table in tables.items():
        start = f"<!-- table: {name} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n\n{table}\n\n{END}{rest.partition(END)[2]}"
    return text


class WithoutHooksAfter:
    """A class of a package as a context manager that removes its hooks, which RefineCAM does not in pytorch-grad-cam."""

    def __init__(self, module: Any, name: str) -> None:
        self.cls = getattr(module, name)

    def __call__(self, *args: Any, **options: Any) -> "WithoutHooksAfter":
        """Construct it."""
        self.cam = self.cls(*args, **options)
        return self

    def __enter__(self) -> Any:
        return self.cam

    def __exit__(self, *details: object) -> None:
        cams = [*getattr(self.cam, "base_cam_per_layer", []), getattr(self.cam, "base_cam", self.cam)]
        for cam in cams:
            for handle in getattr(getattr(cam, "activations_and_grads", None), "handles", []):
                handle.remove()


def offered(method: str, kind: str, n_layers: int, smoothing: str) -> bool:
    """Whether pytorch-grad-cam has this combination."""
    if smoothing == "aug" and method in WITHOUT_AUG_SMOOTH:
        return False
    if method == "FullGrad" and n_layers > 1:  # its layers are those with a bias
        return False
    return kind == "CNN" or method not in ONLY_FOR_IMAGES_OF_CHANNELS


def compare(method: str, kind: str, n_layers: int, smoothing: str, setting: Setting | None = None) -> dict[str, Any]:
    """The largest difference of the maps, and the seconds of both packages."""
    setting = setting or MODELS[kind]()
    ours, our_seconds = run(OURS, method, setting, n_layers, smoothing)
    theirs, their_seconds = run(THEIRS, method, setting, n_layers, smoothing)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise AssertionError(f"{method}: {ours.shape} {ours.dtype}, pytorch-grad-cam {theirs.shape} {theirs.dtype}")
    return {
        "method": method,
        "model": kind,
        "layers": n_layers,
        "smoothing": smoothing,
        "difference": float(np.abs(ours - theirs).max()),
        "seconds": round(our_seconds, 5),
        "seconds_of_grad_cam": round(their_seconds, 5),
    }


def main() -> None:
    """Print the table; write it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/drop_in.json")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDED_MAPS.name} for the tests, and stop")
    parser.add_argument(
        "--real-size", action="store_true", help="measure ResNet-50 and ViT-B/16 in place of small networks"
    )
    arguments = parser.parse_args()
    if arguments.record:
        record()
        return
    results: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    results["versions"] = {"torch": torch.__version__, "numpy": np.__version__, "grad-cam": "1.5.7"}
    if arguments.real_size:
        results["real_size"], results["threads"] = measure_at_real_size(), torch.get_num_threads()
    else:
        results["rows"] = measure_small_networks()
    if arguments.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(insert_tables(PAGE.read_text("utf-8"), results), "utf-8")


def measure_at_real_size() -> list[dict[str, Any]]:
    """Print and return the rows of networks of everyday size."""
    rows = []
    for kind in ("ResNet-50", "ViT-B/16"):
        for batch_size in (1, 4):
            for method in REAL_METHODS:
                rows.append(compare_at_real_size(kind, batch_size, method))
                print(rows[-1], flush=True)
    return rows


def measure_small_networks() -> list[dict[str, Any]]:
    """Print and return the rows of all methods."""
    rows = []
    print(
        f"{'method':20s} {'model':5s} {'layers':>6s} {'smooth':>6s} {'difference':>10s} {'ours':>9s} {'grad-cam':>9s}"
    )
    for kind, build in MODELS.items():
        setting = build()
        for method in METHODS:
            for n_layers in (1, 2):
                for smoothing in SMOOTHINGS:
                    if not offered(method, kind, n_layers, smoothing):
                        continue
                    row = compare(method, kind, n_layers, smoothing, setting)
                    rows.append(row)
                    print(
                        f"{method:20s} {kind:5s} {n_layers:6d} {smoothing:>6s} {row['difference']:10.1e} "
                        f"{1000 * row['seconds']:6.1f} ms {1000 * row['seconds_of_grad_cam']:6.1f} ms",
                        flush=True,
                    )
    worst = max(rows, key=lambda row: row["difference"])
    print(f"largest difference: {worst['difference']:.1e} ({worst['method']}, {worst['model']}); limit {TOLERANCE}")
    return rows


if __name__ == "__main__":
    main()
