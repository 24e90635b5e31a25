"""`camscope demo`: explain synthetic radiographs by one method of each family. With `--audit`, train and audit two models."""

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from camscope.atomic_writes_and_folder_locks import build_output_path, write_bytes
from camscope.cli import (
    console_output,
    json_output,
    load_model_and_methods,
    open_or_compute_run,
    progress_bars,
    shared_options,
)
from camscope.cli.input_images_and_output_paths import check_can_be_folder, check_overwrite_allowed
from camscope.cli.shared_options import option
from camscope.errors import UndefinedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table
    from rich.text import Text

    from camscope.audit import AuditRun
    from camscope.explainers import Explainer
    from camscope.explanation import Explanation, FloatArray
    from camscope.phantom import Phantom
    from camscope.render import RGBImage

    DemoCases = Sequence[tuple[Phantom, Sequence[Explanation]]]

EXAMPLE = "camscope demo"
DEMO_METHODS = "gradcam,layercam,scorecam,ablationcam,eigencam,center"  # one of each family, and a control
ENLARGEMENT, IMAGE_HEIGHT = 3, 288  # factor before drawing, for a thin outline; height of an image in pixels
LEGEND = """\
hit     the peak of the map lies in the finding
energy  share of the map inside the finding
area    share of the image inside the finding: the energy of a uniform map
center  a control that ignores the image; --methods all shows all supported methods but the slow ones\
"""


def run(
    output: Annotated[Path, option("--output -o", "FOLDER", "Output folder.")] = Path("camscope-demo"),
    n_images: Annotated[
        int,
        option("--count", None, "Number of radiographs; every finding occurs at least once.", min=4, max=64),
    ] = 4,
    seed: Annotated[int, option("--seed", None, "Seed of the synthetic radiographs.", min=0)] = 0,
    method_names: shared_options.MethodsOption = DEMO_METHODS,
    plugins: shared_options.PluginOption = None,
    audit: Annotated[
        bool,
        option("--audit", None, "Train and audit two models instead, one of which relies on a marker (two minutes)."),
    ] = False,
    overwrite: shared_options.OverwriteOption = False,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Explain synthetic radiographs. Write one figure, and print how well each method localizes the known findings."""
    if audit:
        run_demo_audits(output, seed, overwrite=overwrite)
        return
    from camscope.phantom import CATEGORIES, draw_radiograph
    from camscope.render import encode_image

    methods = load_model_and_methods.parse_methods(method_names)
    phantoms = [draw_radiograph(seed + n, (n + 1) % len(CATEGORIES)) for n in range(n_images)]
    names = [f"{n}-{phantom.name.replace(' ', '-')}" for n, phantom in enumerate(phantoms, start=1)]
    figure, images = output / "demo.png", [build_output_path(output, "images", f"{name}.png") for name in names]
    check_can_be_folder(output)
    for path in (figure, *images):
        check_overwrite_allowed(path, overwrite)
    net = load_model_and_methods.load_model_on_device("phantom")
    explainers = [method(net, **progress_bars.build_method_bar_settings(method)) for method in methods.values()]
    cases = list(zip(phantoms, _explain_phantoms(explainers, phantoms, method_names == "all"), strict=True))
    for phantom, path in zip(phantoms, images, strict=True):
        write_bytes(path, encode_image(_gray_to_rgb(phantom.image), ".png"), overwrite=overwrite)
    write_bytes(figure, encode_image(_build_demo_figure(cases), ".png"), overwrite=overwrite)
    console = console_output.stdout_console()
    console.print(_build_demo_table(names, cases))
    console.print(LEGEND, style="dim")
    console_output.print_field("figure", figure, "cyan")
    console_output.print_field("try", f"camscope explain {images[0]}")
    described = [_describe_case(name, path, *case) for name, path, case in zip(names, images, cases, strict=True)]
    json_output.print_json_result("demo", {"images": described, "figure": figure})


def _describe_case(
    name: str, path: Path, phantom: "Phantom", explanations: "Sequence[Explanation]"
) -> dict[str, object]:
    """Describe a radiograph for JSON: the prediction, and how well each map localizes the finding."""
    first, area, maps = explanations[0], float(phantom.mask.mean()) or None, []
    for each in explanations:
        hit, energy = compute_hit_and_energy(each.heatmap(scale=None), phantom.mask) if area else (None, None)
        maps.append({"method": each.method, "score": each.score, "hit": hit, "energy": energy, "area": area})
    return {
        "name": name,
        "file": path,
        "finding": phantom.name,
        "prediction": first.label,
        "probability": first.probability,
        "is_correct": first.target == phantom.label,
        "maps": maps,
    }


def _explain_phantoms(
    explainers: "Sequence[Explainer]", phantoms: "Sequence[Phantom]", skip_unsupported: bool
) -> "list[list[Explanation]]":
    """Explain each synthetic radiograph with each method.

    With `skip_unsupported`, methods that fail on the first image are dropped.
    """
    from camscope.explainers.comparison.explain_by_supported_methods import explain_supported
    from camscope.explainers.core.run_methods_in_shared_passes import explain_grid

    rows: list[list[Explanation]] = []
    with (
        progress_bars.progress_bar("explaining", len(phantoms), console_output.stdout_console()) as bar,
        console_output.collect_warnings(),
    ):
        for phantom in phantoms:
            if skip_unsupported and not rows:
                explainers, grid = explain_supported(explainers, phantom.image, [None], on_pass=bar.pause_for_methods)
            else:
                grid = explain_grid(explainers, phantom.image, [None], on_pass=bar.pause_for_methods)
            rows.append([explanations[0] for explanations in grid])
            bar.advance()
    return rows


def _gray_to_rgb(gray: "NDArray[np.uint8]") -> "RGBImage":
    return gray[..., None].repeat(3, axis=2)


def _build_demo_figure(cases: "DemoCases") -> "RGBImage":
    """Draw one row per radiograph. It shows the image with its finding outlined, then the map of each method."""
    from camscope.render import draw_image_grid

    images, captions = [], []
    for truth, explanations in cases:
        first = explanations[0]
        title = truth.name if first.target == truth.label else f"{truth.name}, predicted as {first.label}"
        images += [_outline_lesion(_gray_to_rgb(truth.image), truth)]
        captions += [f"{title} (p={first.probability or 0:.2f})"]
        for explanation in explanations:
            images += [_outline_lesion(explanation.overlay(), truth)]
            is_hit, energy = compute_hit_and_energy(explanation.heatmap(scale=None), truth.mask)
            scores = (
                f" · {'hit' if is_hit else 'miss'} · energy {_format_with_two_decimals(energy)}"
                if truth.mask.any()
                else ""
            )
            captions += [f"{explanation.method_title}{scores}"]
    return draw_image_grid(images, captions, columns=1 + len(cases[0][1]), height=IMAGE_HEIGHT)


def _outline_lesion(image: "RGBImage", phantom: "Phantom") -> "RGBImage":
    """Enlarge the image and draw the outline of the lesion into it."""
    import numpy as np

    from camscope.render import draw_contours

    large = image.repeat(ENLARGEMENT, axis=0).repeat(ENLARGEMENT, axis=1)
    mask = phantom.mask.repeat(ENLARGEMENT, axis=0).repeat(ENLARGEMENT, axis=1)
    return draw_contours(large, mask.astype(np.float64), 0.3, colormap="turbo")  # a light blue that no map here uses


def compute_hit_and_energy(attribution: "FloatArray", mask: "NDArray[np.bool_]") -> tuple[bool, float | None]:
    """Return whether the peak of a map lies in a mask. Also return the share of the map that lies inside the mask.

    Return (False, None) for an empty map.
    """
    from camscope.metrics import energy_inside, pointing_game

    try:
        energy = energy_inside(attribution, mask)
    except UndefinedError:
        return False, None
    return pointing_game(attribution, mask) >= 0.5, energy


def _format_with_two_decimals(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _build_demo_table(names: Sequence[str], cases: "DemoCases") -> "Table":
    """Build a table with one row for each radiograph and method. The last rows average over radiographs with a finding."""
    table = console_output.new_table("image", "prediction", "method", "score>", "hit", "energy>", "area>")
    scores: dict[str, list[tuple[bool, float]]] = {explanation.method_title: [] for explanation in cases[0][1]}
    for name, (phantom, explanations) in zip(names, cases, strict=True):
        first, mask = explanations[0], phantom.mask
        is_correct = first.target == phantom.label
        prediction = f"{first.label} {first.probability or 0:.2f} {'✓' if is_correct else '✗'}"
        title = (
            console_output.to_printable_line(name),
            console_output.styled_text((prediction, "green" if is_correct else "red")),
        )
        for i, explanation in enumerate(explanations):
            cells: list[str | Text] = ["–", "–", "–"]
            if mask.any():
                is_hit, energy = compute_hit_and_energy(explanation.heatmap(scale=None), mask)
                scores[explanation.method_title].append((is_hit, energy or 0.0))
                hit = console_output.styled_text(("yes", "green") if is_hit else ("no", "red"))
                cells = [hit, _format_with_two_decimals(energy), _format_with_two_decimals(mask.mean())]
            row = *(title if i == 0 else ("", "")), explanation.method_title, f"{explanation.score:.2f}", *cells
            table.add_row(*row, end_section=i == len(explanations) - 1)
    areas = [phantom.mask.mean() for phantom, _ in cases if phantom.mask.any()]
    for i, (method, pairs) in enumerate(scores.items()):
        hits, energies = zip(*pairs, strict=True)
        means = [_format_with_two_decimals(sum(values) / len(pairs)) for values in (energies, areas)]
        table.add_row(
            "all findings" if i == 0 else "", "", method, "", f"{sum(hits)}/{len(pairs)}", *means, style="bold"
        )
    return table


def run_demo_audits(output: Path, seed: int, *, overwrite: bool) -> None:
    """Train and audit two models: one unbiased, one confounded. Print the verdicts that differ, and open the reports."""
    from camscope.audit import run_audit
    from camscope.audit.demo_dataset_and_model import CONFOUNDED_PROBABILITY, UNBIASED_PROBABILITY, write_demo_study
    from camscope.cli.audit import print_time_estimate, show_stage_progress

    audits = []
    with open_or_compute_run.add_resume_hint_on_interrupt(output), console_output.collect_warnings():
        for name, p in (("clean", UNBIASED_PROBABILITY), ("confounded", CONFOUNDED_PROBABILITY)):
            with console_output.spinner(f"drawing radiographs and training the {name} model"):
                config = write_demo_study(output / name, p, seed=seed, overwrite=overwrite)
            with show_stage_progress() as on_progress:
                folder, on_estimate = output / name / "audit", print_time_estimate
                audit = run_audit(config, folder, overwrite=overwrite, on_progress=on_progress, on_estimate=on_estimate)
            audits.append(audit)
    _print_differing_verdicts(*audits)
    for audit in audits:
        console_output.print_field("report", audit.report_path, "cyan")
        if sys.stdout.isatty() and not json_output.is_json_output():
            webbrowser.open(audit.report_path.resolve().as_uri())


def _print_differing_verdicts(clean: "AuditRun", confounded: "AuditRun") -> None:
    """Print the AUROC of the unbiased and the confounded model. Also print a table of the verdicts that differ."""
    from camscope.audit.audit_comparison import find_verdict_changes

    table = console_output.new_table("claim", "clean", "confounded")
    areas = [run.summary.predict.performance[0].auroc.value or 0.0 for run in (clean, confounded)]
    changes = list(find_verdict_changes(clean.verdicts, confounded.verdicts))
    audits = zip(("clean", "confounded"), areas, (clean.report_path, confounded.report_path), strict=True)
    json_output.print_json_result(
        "demo-audit",
        {
            "audits": [{"name": name, "auroc": area, "report": report} for name, area, report in audits],
            "differing_verdicts": [
                {"claim": change.claim, "clean": change.first, "confounded": change.second} for change in changes
            ],
        },
    )
    for change in changes:
        table.add_row(console_output.to_printable_line(change.claim), change.first, change.second)
    console_output.print_field("AUROC", f"clean {areas[0]:.3f}, confounded {areas[1]:.3f}")
    console_output.stdout_console().print(table)
