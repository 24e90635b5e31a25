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
from camscope.safe_files import path_in

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table
    from rich.text import Text

    from camscope.audit import AuditRun
    from camscope.explainers import Explainer
    from camscope.explanation import Explanation, Floats
    from camscope.phantom import Phantom
    from camscope.render import Picture


EXAMPLE = "camscope demo"
SHOWN = "gradcam,layercam,scorecam,ablationcam,eigencam,centre"  # one of each family, and a control
ENLARGED, ROWS = 3, 288  # times, before the outline is drawn, so that it is thin; then pixels of a picture's height


@dataclass(frozen=True)
class _Case:
    """One drawn radiograph, and what each method says of it."""

    name: str
    phantom: "Phantom"
    found: "Sequence[Explanation]"


def run(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the pictures go.")] = Path(
        "camscope-demo"
    ),
    count: Annotated[
        int, typer.Option("--count", min=4, max=64, help="How many radiographs; each finding at least once.")
    ] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another seed draws other radiographs.")] = 0,
    method: base.MethodOption = SHOWN,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Instead: train two nets, of which one looks at a token in the corner, and audit both. About two minutes.",
        ),
    ] = False,
    overwrite: base.OverwriteOption = False,
) -> None:
    """Explain drawn radiographs whose evidence is known: one figure, and how well each method finds it."""
    if audit:
        audits(output, seed, overwrite=overwrite)
        return
    methods = base.methods_of(method)
    names = _names(count)
    figure, images = output / "demo.png", [path_in(output, "images", f"{name}.png") for name in names]
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file, not a folder", param_hint="'--output'")
    for path in (figure, *images):
        check_free(path, overwrite)
    net = base.loaded("phantom")
    cases = _cases(
        [kind(net, **progress.of_method(kind)) for kind in methods.values()], names, seed, leave_out=method == "all"
    )
    _save(cases, figure, images, overwrite)
    console = base.out()
    console.print(_table(cases))
    console.print(base.styled((_LEGEND, "dim")))
    console.print(base.styled(("figure  ", "bold"), (base.shown(figure), "cyan")), soft_wrap=True)
    console.print(base.styled(("try     ", "bold"), (f"camscope explain {base.shown(images[0])}", "")), soft_wrap=True)


_LEGEND = """\
hit     the map's hottest pixel lies in the finding
energy  share of the map inside the finding
area    share of the image inside the finding: the energy of a map without any idea
centre  a control, which knows nothing of the image; --method all shows all that have an answer here, but the slow\
"""


def _names(count: int) -> list[str]:
    """`1-nodule`, … : the findings in turn, those with evidence first."""
    from camscope.phantom import CATEGORIES

    turn = [*CATEGORIES[1:], CATEGORIES[0]]
    return [f"{n + 1}-{turn[n % len(turn)].replace(' ', '-')}" for n in range(count)]


def _cases(explainers: "Sequence[Explainer]", names: Sequence[str], seed: int, *, leave_out: bool) -> list[_Case]:
    """A case an image; with `leave_out`, of those methods that have an answer for the first one."""
    from camscope.explainers.comparison.best_effort import explain_suited
    from camscope.explainers.core.dispatch import explain_each
    from camscope.phantom import CATEGORIES, draw

    cases: list[_Case] = []
    with progress.bar("explaining", len(names), base.out()) as bar, base.remarks():
        for i, name in enumerate(names):
            phantom = draw(seed + i, (i + 1) % len(CATEGORIES))
            if leave_out and not cases:
                explainers, rows = explain_suited(explainers, phantom.image, [None], watch=bar.make_room)
            else:
                rows = explain_each(explainers, phantom.image, [None], watch=bar.make_room)
            cases.append(_Case(name, phantom, [row[0] for row in rows]))
            bar.advance()
    return cases


def _save(cases: Sequence[_Case], figure: Path, images: Sequence[Path], overwrite: bool) -> None:
    from camscope.render import encode
    from camscope.safe_files import write_bytes

    for case, path in zip(cases, images, strict=True):
        write_bytes(path, encode(_rgb(case.phantom.image), ".png"), overwrite=overwrite)
    write_bytes(figure, encode(_figure(cases), ".png"), overwrite=overwrite)


def _rgb(grey: "NDArray[np.uint8]") -> "Picture":
    return grey[..., None].repeat(3, axis=2)


def _figure(cases: Sequence[_Case]) -> "Picture":
    """A row for each radiograph: itself with the finding outlined, then every method's map."""
    from camscope.render import panel

    pictures, captions = [], []
    for case in cases:
        pictures += [_outlined(_rgb(case.phantom.image), case)]
        captions += [_titled(case)]
        pictures += [_outlined(one.overlay(), case) for one in case.found]
        captions += [f"{one.method}{_judged(one, case)}" for one in case.found]
    return panel(pictures, captions, columns=1 + len(cases[0].found), height=ROWS)


def _outlined(picture: "Picture", case: _Case) -> "Picture":
    import numpy as np

    from camscope.render import draw_contours

    large = picture.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)
    mask = case.phantom.mask.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)
    return draw_contours(large, mask.astype(np.float64), 0.3, colormap="turbo")  # a light blue that no map here has


def _titled(case: _Case) -> str:
    first, truth = case.found[0], case.phantom
    told = truth.name if first.target == truth.label else f"{truth.name}, taken for {first.label}"
    return f"{told} (p={first.probability or 0:.2f})"


def _judged(one: "Explanation", case: _Case) -> str:
    if not case.phantom.mask.any():
        return ""
    heat = one.heatmap(scale=None)
    inside = energy_inside(heat, case.phantom.mask)
    return f" · {'hit' if pointing_hit(heat, case.phantom.mask) else 'miss'} · energy {_number(inside)}"


def pointing_hit(heat: "Floats", mask: "NDArray[np.bool_]") -> bool:
    """(H,W), (H,W): whether the hottest pixel, the first of equals, lies in the mask; a map without evidence misses."""
    return bool(heat.max() > 0 and mask.reshape(-1)[heat.argmax()])


def energy_inside(heat: "Floats", mask: "NDArray[np.bool_]") -> float | None:
    """(H,W), (H,W): share of the map's positive values that lies in the mask; None of a map without any."""
    positive = heat.clip(min=0)
    total = float(positive.sum(dtype="float64"))
    return float(positive[mask].sum(dtype="float64")) / total if total > 0 else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _table(cases: Sequence[_Case]) -> "Table":
    table = base.table("image", "answer", "method", "score>", "hit", "energy>", "area>")
    for case in cases:
        for i, one in enumerate(case.found):
            name = (base.shown(case.name), _said(case)) if i == 0 else ("", "")
            table.add_row(*name, *_row(one, case), end_section=i == len(case.found) - 1)
    for column, first in enumerate(cases[0].found):
        table.add_row("all findings" if column == 0 else "", "", first.method, "", *_mean(cases, column), style="bold")
    return table


def _said(case: _Case) -> "Text":
    """What the model answers, and whether that is true."""
    from rich.text import Text

    first = case.found[0]
    right = first.target == case.phantom.label
    return Text(f"{first.label} {first.probability or 0:.2f} {'✓' if right else '✗'}", "green" if right else "red")


def _row(one: "Explanation", case: _Case) -> "tuple[str | Text, ...]":
    from rich.text import Text

    mask = case.phantom.mask
    if not mask.any():
        return one.method, f"{one.score:.2f}", "–", "–", "–"
    heat = one.heatmap(scale=None)
    hit = Text("yes", "green") if pointing_hit(heat, mask) else Text("no", "red")
    return one.method, f"{one.score:.2f}", hit, _number(energy_inside(heat, mask)), _number(float(mask.mean()))


def _mean(cases: Sequence[_Case], column: int) -> tuple[str, ...]:
    """Of one method over the radiographs with a finding: hits, mean energy, mean area."""
    pairs = [(c.found[column].heatmap(scale=None), c.phantom.mask) for c in cases if c.phantom.mask.any()]
    hits = sum(pointing_hit(heat, mask) for heat, mask in pairs)
    energy = sum(energy_inside(heat, mask) or 0.0 for heat, mask in pairs) / len(pairs)
    area = float(sum(mask.mean() for _, mask in pairs)) / len(pairs)
    return f"{hits}/{len(pairs)}", _number(energy), _number(area)


def audits(output: Path, seed: int, *, overwrite: bool) -> None:
    """Train and audit both; print the verdicts that differ; open the reports where somebody sits at the terminal."""
    from camscope.audit import run
    from camscope.audit.demo import CLEAN, CONFOUNDED, phantom_audit
    from camscope.cli.audit import staged, tell_time

    made = []
    with evaluation_request.resumable(output), base.remarks():
        for name, p in (("clean", CLEAN), ("confounded", CONFOUNDED)):
            with base.working(f"drawing radiographs and training the {name} net"):
                config = phantom_audit(output / name, p, seed=seed, overwrite=overwrite)
            with staged() as told:
                made.append(run(config, output / name / "audit", overwrite=overwrite, told=told, foreseen=tell_time))
    _tell(*made)
    for one in made:
        base.out().print(base.styled(("report  ", "bold"), (base.shown(one.report), "cyan")), soft_wrap=True)
        if sys.stdout.isatty():
            webbrowser.open(one.report.resolve().as_uri())


def _tell(clean: "AuditRun", confounded: "AuditRun") -> None:
    """A line for each verdict that differs."""
    from camscope.audit.comparison import changes

    table = base.table("claim", "clean", "confounded")
    for one in changes(clean.verdicts, confounded.verdicts):
        table.add_row(base.shown(one.claim), one.first, one.second)
    areas = [run.summary.predict.findings[0].auroc.value or 0.0 for run in (clean, confounded)]
    base.out().print(base.styled(("AUROC   ", "bold"), (f"clean {areas[0]:.3f}, confounded {areas[1]:.3f}", "")))
    base.out().print(table)
