"""`camscope demo`: explain synthetic radiographs with known ground truth by one method of each family.

`camscope demo --audit` trains two models, one of which relies on a marker in the corner, and audits both.
"""

import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from camscope.cli import base, evaluation_request, progress
from camscope.cli.output_paths import check_free
from camscope.safe_files import build_output_path

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


EXAMPLE = "camscope demo"
DEMO_METHODS = "gradcam,layercam,scorecam,ablationcam,eigencam,center"  # one of each family, and a control
ENLARGEMENT, IMAGE_HEIGHT = (
    3,
    288,
)  # factor before drawing, for a thin outline; height of an image in pixels


@dataclass(frozen=True)
class _DemoCase:
    """One synthetic radiograph and its explanation by each method."""

    file_stem: str
    phantom: "Phantom"
    explanations: "Sequence[Explanation]"


def run(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Output folder.")] = Path(
        "camscope-demo"
    ),
    n_images: Annotated[
        int, typer.Option("--count", min=4, max=64, help="Number of radiographs; every finding occurs at least once.")
    ] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the synthetic radiographs.")] = 0,
    method_names: base.MethodsOption = DEMO_METHODS,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Train two models instead, one of which relies on a marker, and audit both (about two minutes).",
        ),
    ] = False,
    overwrite: base.OverwriteOption = False,
) -> None:
    """Explain synthetic radiographs with known ground truth: one figure, and how well each method localizes."""
    if audit:
        run_demo_audits(output, seed, overwrite=overwrite)
        return
    methods = base.parse_methods(method_names)
    names = _case_names(n_images)
    figure, images = output / "demo.png", [build_output_path(output, "images", f"{name}.png") for name in names]
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file, not a folder", param_hint="'--output'")
    for path in (figure, *images):
        check_free(path, overwrite)
    net = base.load_model_on_device("phantom")
    cases = _explain_cases(
        [explainer_cls(net, **progress.method_bar_settings(explainer_cls)) for explainer_cls in methods.values()],
        names,
        seed,
        skip_unsupported=method_names == "all",
    )
    _save_images(cases, figure, images, overwrite)
    console = base.stdout_console()
    console.print(_build_demo_table(cases))
    console.print(base.styled_text((LEGEND, "dim")))
    console.print(base.styled_text(("figure  ", "bold"), (base.display_text(figure), "cyan")), soft_wrap=True)
    console.print(
        base.styled_text(("try     ", "bold"), (f"camscope explain {base.display_text(images[0])}", "")), soft_wrap=True
    )


LEGEND = """\
hit     the peak of the map lies in the finding
energy  share of the map inside the finding
area    share of the image inside the finding: the energy of a uniform map
center  a control that ignores the image; --methods all shows all supported methods but the slow ones\
"""


def _case_names(n_images: int) -> list[str]:
    """Return names such as `1-nodule` that cycle through the findings; the class without evidence comes last."""
    from camscope.phantom import CATEGORIES

    categories = [*CATEGORIES[1:], CATEGORIES[0]]
    return [f"{n + 1}-{categories[n % len(categories)].replace(' ', '-')}" for n in range(n_images)]


def _explain_cases(
    explainers: "Sequence[Explainer]", names: Sequence[str], seed: int, *, skip_unsupported: bool
) -> list[_DemoCase]:
    """Explain one case per name; `skip_unsupported` drops methods that do not support the first image."""
    from camscope.explainers.comparison.supported_methods import explain_supported
    from camscope.explainers.core.dispatch import explain_grid
    from camscope.phantom import CATEGORIES, draw_radiograph

    cases: list[_DemoCase] = []
    with progress.progress_bar("explaining", len(names), base.stdout_console()) as bar, base.collect_warnings():
        for i, name in enumerate(names):
            phantom = draw_radiograph(seed + i, (i + 1) % len(CATEGORIES))
            if skip_unsupported and not cases:
                explainers, rows = explain_supported(explainers, phantom.image, [None], on_pass=bar.pause_for_methods)
            else:
                rows = explain_grid(explainers, phantom.image, [None], on_pass=bar.pause_for_methods)
            cases.append(_DemoCase(name, phantom, [row[0] for row in rows]))
            bar.advance()
    return cases


def _save_images(cases: Sequence[_DemoCase], figure: Path, images: Sequence[Path], overwrite: bool) -> None:
    from camscope.render import encode_image
    from camscope.safe_files import write_bytes

    for case, path in zip(cases, images, strict=True):
        write_bytes(path, encode_image(_gray_to_rgb(case.phantom.image), ".png"), overwrite=overwrite)
    write_bytes(figure, encode_image(_build_demo_figure(cases), ".png"), overwrite=overwrite)


def _gray_to_rgb(gray: "NDArray[np.uint8]") -> "RGBImage":
    return gray[..., None].repeat(3, axis=2)


def _build_demo_figure(cases: Sequence[_DemoCase]) -> "RGBImage":
    """Draw one row per radiograph: the image with the outlined finding, then the map of each method."""
    from camscope.render import draw_image_grid

    images, captions = [], []
    for case in cases:
        images += [_outline_lesion(_gray_to_rgb(case.phantom.image), case)]
        captions += [_format_case_title(case)]
        images += [_outline_lesion(explanation.overlay(), case) for explanation in case.explanations]
        captions += [
            f"{explanation.method}{_format_hit_and_energy(explanation, case)}" for explanation in case.explanations
        ]
    return draw_image_grid(images, captions, columns=1 + len(cases[0].explanations), height=IMAGE_HEIGHT)


def _outline_lesion(image: "RGBImage", case: _DemoCase) -> "RGBImage":
    import numpy as np

    from camscope.render import draw_contours

    large = image.repeat(ENLARGEMENT, axis=0).repeat(ENLARGEMENT, axis=1)
    mask = case.phantom.mask.repeat(ENLARGEMENT, axis=0).repeat(ENLARGEMENT, axis=1)
    return draw_contours(large, mask.astype(np.float64), 0.3, colormap="turbo")  # a light blue that no map here uses


def _format_case_title(case: _DemoCase) -> str:
    first, truth = case.explanations[0], case.phantom
    title = truth.name if first.target == truth.label else f"{truth.name}, predicted as {first.label}"
    return f"{title} (p={first.probability or 0:.2f})"


def _format_hit_and_energy(explanation: "Explanation", case: _DemoCase) -> str:
    if not case.phantom.mask.any():
        return ""
    attribution = explanation.heatmap(scale=None)
    inside = compute_energy_inside(attribution, case.phantom.mask)
    return f" · {'hit' if is_pointing_hit(attribution, case.phantom.mask) else 'miss'} · energy {_format_share(inside)}"


def is_pointing_hit(attribution: "FloatArray", mask: "NDArray[np.bool_]") -> bool:
    """Return whether the peak of a (H,W) map lies in the (H,W) mask; False if no value is positive.

    The first of several equal peaks counts.
    """
    return bool(attribution.max() > 0 and mask.reshape(-1)[attribution.argmax()])


def compute_energy_inside(attribution: "FloatArray", mask: "NDArray[np.bool_]") -> float | None:
    """Return the share of a (H,W) map's positive values inside the (H,W) mask; None if no value is positive."""
    positive = attribution.clip(min=0)
    total = float(positive.sum(dtype="float64"))
    return float(positive[mask].sum(dtype="float64")) / total if total > 0 else None


def _format_share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _build_demo_table(cases: Sequence[_DemoCase]) -> "Table":
    table = base.new_table("image", "prediction", "method", "score>", "hit", "energy>", "area>")
    for case in cases:
        for i, explanation in enumerate(case.explanations):
            name = (base.display_text(case.file_stem), _format_prediction(case)) if i == 0 else ("", "")
            table.add_row(*name, *_format_row(explanation, case), end_section=i == len(case.explanations) - 1)
    for column, first in enumerate(cases[0].explanations):
        table.add_row(
            "all findings" if column == 0 else "", "", first.method, "", *_format_mean(cases, column), style="bold"
        )
    return table


def _format_prediction(case: _DemoCase) -> "Text":
    """Format the predicted class, its probability, and whether it is correct."""
    from rich.text import Text

    first = case.explanations[0]
    is_correct = first.target == case.phantom.label
    return Text(
        f"{first.label} {first.probability or 0:.2f} {'✓' if is_correct else '✗'}", "green" if is_correct else "red"
    )


def _format_row(explanation: "Explanation", case: _DemoCase) -> "tuple[str | Text, ...]":
    from rich.text import Text

    mask = case.phantom.mask
    if not mask.any():
        return explanation.method, f"{explanation.score:.2f}", "–", "–", "–"
    attribution = explanation.heatmap(scale=None)
    hit = Text("yes", "green") if is_pointing_hit(attribution, mask) else Text("no", "red")
    return (
        explanation.method,
        f"{explanation.score:.2f}",
        hit,
        _format_share(compute_energy_inside(attribution, mask)),
        _format_share(float(mask.mean())),
    )


def _format_mean(cases: Sequence[_DemoCase], column: int) -> tuple[str, ...]:
    """Format hits, mean energy and mean area of one method over the radiographs with a finding."""
    pairs = [(c.explanations[column].heatmap(scale=None), c.phantom.mask) for c in cases if c.phantom.mask.any()]
    hits = sum(is_pointing_hit(attribution, mask) for attribution, mask in pairs)
    energy = sum(compute_energy_inside(attribution, mask) or 0.0 for attribution, mask in pairs) / len(pairs)
    area = float(sum(mask.mean() for _, mask in pairs)) / len(pairs)
    return f"{hits}/{len(pairs)}", _format_share(energy), _format_share(area)


def run_demo_audits(output: Path, seed: int, *, overwrite: bool) -> None:
    """Train and audit both models, print the verdicts that differ, and open the reports if run in a terminal."""
    from camscope.audit import run_audit
    from camscope.audit.demo import CONFOUNDED_PROBABILITY, UNBIASED_PROBABILITY, write_demo_study
    from camscope.cli.audit import print_time_estimate, stage_progress

    audits = []
    with evaluation_request.resume_hint(output), base.collect_warnings():
        for name, p in (("clean", UNBIASED_PROBABILITY), ("confounded", CONFOUNDED_PROBABILITY)):
            with base.spinner(f"drawing radiographs and training the {name} model"):
                config = write_demo_study(output / name, p, seed=seed, overwrite=overwrite)
            with stage_progress() as on_progress:
                audits.append(
                    run_audit(
                        config,
                        output / name / "audit",
                        overwrite=overwrite,
                        on_progress=on_progress,
                        on_estimate=print_time_estimate,
                    )
                )
    _print_differing_verdicts(*audits)
    for audit in audits:
        base.stdout_console().print(
            base.styled_text(("report  ", "bold"), (base.display_text(audit.report_path), "cyan")), soft_wrap=True
        )
        if sys.stdout.isatty():
            webbrowser.open(audit.report_path.resolve().as_uri())


def _print_differing_verdicts(clean: "AuditRun", confounded: "AuditRun") -> None:
    """Print the AUROC of both models, and one row per verdict that differs."""
    from camscope.audit.comparison import find_verdict_changes

    table = base.new_table("claim", "clean", "confounded")
    for change in find_verdict_changes(clean.verdicts, confounded.verdicts):
        table.add_row(base.display_text(change.claim), change.first, change.second)
    areas = [run.summary.predict.performance[0].auroc.value or 0.0 for run in (clean, confounded)]
    base.stdout_console().print(
        base.styled_text(("AUROC   ", "bold"), (f"clean {areas[0]:.3f}, confounded {areas[1]:.3f}", ""))
    )
    base.stdout_console().print(table)
