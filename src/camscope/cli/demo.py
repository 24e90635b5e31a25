"""`camscope demo`: drawn radiographs whose evidence is known, explained by a method of each family.

`camscope demo --audit`: two nets with the same accuracy, one of which looks at a token, and two reports that say
which.
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
)  # times, before the outline is drawn, so that it is thin; then pixels of a picture's height


@dataclass(frozen=True)
class _DemoCase:
    """One drawn radiograph, and what each method says of it."""

    file_stem: str
    phantom: "Phantom"
    explanations: "Sequence[Explanation]"


def run(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Output folder.")] = Path(
        "camscope-demo"
    ),
    n_images: Annotated[
        int, typer.Option("--count", min=4, max=64, help="Number of radiographs; each finding occurs at least once.")
    ] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the drawn radiographs.")] = 0,
    method_names: base.MethodsOption = DEMO_METHODS,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Train two models instead, one of which relies on a marker in the corner, and audit both (about two minutes).",
        ),
    ] = False,
    overwrite: base.OverwriteOption = False,
) -> None:
    """Explain drawn radiographs whose evidence is known: one figure, and how well each method finds it."""
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
        [kind(net, **progress.method_bar_settings(kind)) for kind in methods.values()],
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
hit     the map's hottest pixel lies in the finding
energy  share of the map inside the finding
area    share of the image inside the finding: the energy of a map without any idea
center  a control, which knows nothing of the image; --methods all shows all that have an answer here, but the slow\
"""


def _case_names(n_images: int) -> list[str]:
    """`1-nodule`, … : the findings in turn, those with evidence first."""
    from camscope.phantom import CATEGORIES

    turn = [*CATEGORIES[1:], CATEGORIES[0]]
    return [f"{n + 1}-{turn[n % len(turn)].replace(' ', '-')}" for n in range(n_images)]


def _explain_cases(
    explainers: "Sequence[Explainer]", names: Sequence[str], seed: int, *, skip_unsupported: bool
) -> list[_DemoCase]:
    """A case an image; with `skip_unsupported`, of those methods that have an answer for the first one."""
    from camscope.explainers.comparison.best_effort import explain_supported
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
    """A row for each radiograph: itself with the finding outlined, then every method's map."""
    from camscope.render import draw_image_grid

    pictures, captions = [], []
    for case in cases:
        pictures += [_outline_lesion(_gray_to_rgb(case.phantom.image), case)]
        captions += [_format_case_title(case)]
        pictures += [_outline_lesion(one.overlay(), case) for one in case.explanations]
        captions += [f"{one.method}{_format_hit_and_energy(one, case)}" for one in case.explanations]
    return draw_image_grid(pictures, captions, columns=1 + len(cases[0].explanations), height=IMAGE_HEIGHT)


def _outline_lesion(image: "RGBImage", case: _DemoCase) -> "RGBImage":
    import numpy as np

    from camscope.render import draw_contours

    large = image.repeat(ENLARGEMENT, axis=0).repeat(ENLARGEMENT, axis=1)
    mask = case.phantom.mask.repeat(ENLARGEMENT, axis=0).repeat(ENLARGEMENT, axis=1)
    return draw_contours(large, mask.astype(np.float64), 0.3, colormap="turbo")  # a light blue that no map here has


def _format_case_title(case: _DemoCase) -> str:
    first, truth = case.explanations[0], case.phantom
    told = truth.name if first.target == truth.label else f"{truth.name}, taken for {first.label}"
    return f"{told} (p={first.probability or 0:.2f})"


def _format_hit_and_energy(explanation: "Explanation", case: _DemoCase) -> str:
    if not case.phantom.mask.any():
        return ""
    heat = explanation.heatmap(scale=None)
    inside = compute_energy_inside(heat, case.phantom.mask)
    return f" · {'hit' if is_pointing_hit(heat, case.phantom.mask) else 'miss'} · energy {_format_share(inside)}"


def is_pointing_hit(attribution: "FloatArray", mask: "NDArray[np.bool_]") -> bool:
    """(H,W), (H,W): whether the hottest pixel, the first of equals, lies in the mask; a map without evidence misses."""
    return bool(attribution.max() > 0 and mask.reshape(-1)[attribution.argmax()])


def compute_energy_inside(attribution: "FloatArray", mask: "NDArray[np.bool_]") -> float | None:
    """(H,W), (H,W): share of the map's positive values that lies in the mask; None of a map without any."""
    positive = attribution.clip(min=0)
    total = float(positive.sum(dtype="float64"))
    return float(positive[mask].sum(dtype="float64")) / total if total > 0 else None


def _format_share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _build_demo_table(cases: Sequence[_DemoCase]) -> "Table":
    table = base.new_table("image", "answer", "method", "score>", "hit", "energy>", "area>")
    for case in cases:
        for i, one in enumerate(case.explanations):
            name = (base.display_text(case.file_stem), _format_prediction(case)) if i == 0 else ("", "")
            table.add_row(*name, *_format_row(one, case), end_section=i == len(case.explanations) - 1)
    for column, first in enumerate(cases[0].explanations):
        table.add_row(
            "all findings" if column == 0 else "", "", first.method, "", *_format_mean(cases, column), style="bold"
        )
    return table


def _format_prediction(case: _DemoCase) -> "Text":
    """What the model answers, and whether that is true."""
    from rich.text import Text

    first = case.explanations[0]
    right = first.target == case.phantom.label
    return Text(f"{first.label} {first.probability or 0:.2f} {'✓' if right else '✗'}", "green" if right else "red")


def _format_row(explanation: "Explanation", case: _DemoCase) -> "tuple[str | Text, ...]":
    from rich.text import Text

    mask = case.phantom.mask
    if not mask.any():
        return explanation.method, f"{explanation.score:.2f}", "–", "–", "–"
    heat = explanation.heatmap(scale=None)
    hit = Text("yes", "green") if is_pointing_hit(heat, mask) else Text("no", "red")
    return (
        explanation.method,
        f"{explanation.score:.2f}",
        hit,
        _format_share(compute_energy_inside(heat, mask)),
        _format_share(float(mask.mean())),
    )


def _format_mean(cases: Sequence[_DemoCase], column: int) -> tuple[str, ...]:
    """Of one method over the radiographs with a finding: hits, mean energy, mean area."""
    pairs = [(c.explanations[column].heatmap(scale=None), c.phantom.mask) for c in cases if c.phantom.mask.any()]
    hits = sum(is_pointing_hit(heat, mask) for heat, mask in pairs)
    energy = sum(compute_energy_inside(heat, mask) or 0.0 for heat, mask in pairs) / len(pairs)
    area = float(sum(mask.mean() for _, mask in pairs)) / len(pairs)
    return f"{hits}/{len(pairs)}", _format_share(energy), _format_share(area)


def run_demo_audits(output: Path, seed: int, *, overwrite: bool) -> None:
    """Train and audit both; print the verdicts that differ; open the reports where somebody sits at the terminal."""
    from camscope.audit import run_audit
    from camscope.audit.demo import CONFOUNDED_PROBABILITY, UNBIASED_PROBABILITY, write_demo_study
    from camscope.cli.audit import print_time_estimate, stage_progress

    made = []
    with evaluation_request.resume_hint(output), base.collect_warnings():
        for name, p in (("clean", UNBIASED_PROBABILITY), ("confounded", CONFOUNDED_PROBABILITY)):
            with base.spinner(f"drawing radiographs and training the {name} net"):
                config = write_demo_study(output / name, p, seed=seed, overwrite=overwrite)
            with stage_progress() as told:
                made.append(
                    run_audit(
                        config,
                        output / name / "audit",
                        overwrite=overwrite,
                        on_progress=told,
                        on_estimate=print_time_estimate,
                    )
                )
    _print_differing_verdicts(*made)
    for one in made:
        base.stdout_console().print(
            base.styled_text(("report  ", "bold"), (base.display_text(one.report_path), "cyan")), soft_wrap=True
        )
        if sys.stdout.isatty():
            webbrowser.open(one.report_path.resolve().as_uri())


def _print_differing_verdicts(clean: "AuditRun", confounded: "AuditRun") -> None:
    """A line for each verdict that differs."""
    from camscope.audit.comparison import find_verdict_changes

    table = base.new_table("claim", "clean", "confounded")
    for one in find_verdict_changes(clean.verdicts, confounded.verdicts):
        table.add_row(base.display_text(one.claim), one.first, one.second)
    areas = [run.summary.predict.performance[0].auroc.value or 0.0 for run in (clean, confounded)]
    base.stdout_console().print(
        base.styled_text(("AUROC   ", "bold"), (f"clean {areas[0]:.3f}, confounded {areas[1]:.3f}", ""))
    )
    base.stdout_console().print(table)
