"""What `camscope explain` makes of one image: the answers, the files, and the lines for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.cli import base
from camscope.cli.options import RenderOptions
from camscope.cli.output_paths import Destination, OutputFiles, check_free
from camscope.cli.scan_options import ScanOptions, read_named_masks

if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from camscope.cli.progress import ProgressBar
    from camscope.explainers import Explainer
    from camscope.explainers.core.dispatch import OnPass
    from camscope.explanation import ClassScore, Explanation, ScaleOption
    from camscope.render import RGBImage

    TerminalLine = Text | Padding

MIN_FIGURE_HEIGHT, MAX_FIGURE_HEIGHT = 384, 768  # rows of a picture in a figure


@dataclass(frozen=True)
class ImageExplanationWriter:
    """Several methods and classes asked of every image, each time the same."""

    explainers: "Sequence[Explainer]"
    targets: Sequence[int | str | None]
    destination: Destination
    render_options: RenderOptions
    n_top_classes: int
    shared_scale: bool = False
    skip_unsupported: bool = False
    scan_settings: ScanOptions = field(default_factory=ScanOptions)
    mask_options: Sequence[str] = ()

    def explain_and_write(self, row: int, path: Path, progress_bar: "ProgressBar") -> "list[TerminalLine]":
        """Explain one image and write its files, none of which may be in the way; what to print of it.

        `progress_bar`: of the command; it makes room for others.
        """
        called = self.scan_settings.pseudonym(path)
        files = self.destination.output_files(row, path, self._map_names(), called)
        exported = self._list_export_paths(row, path, called)
        with base.collect_warnings(quote_messages=called is None) as remarks:
            methods, found = self._explain(self.scan_settings.read_image(path), progress_bar.pause_for_methods)
        maps = [self.scan_settings.redact_explanation(one, path) for answers in found for one in answers]
        kept = [
            self.explainers.index(method) * len(self.targets) + q for method in methods for q in self._target_indices
        ]
        files = OutputFiles(files.figures, tuple(files.map_files[n] for n in kept))
        masks = self._read_masks(maps)
        self._save_files(maps, files, masks, progress_bar)
        for n, one in zip(kept, maps, strict=True):
            viewed = self.scan_settings.export_map(one, exported[n], path, overwrite=self.destination.overwrite)
            files = OutputFiles((*files.figures, *viewed), files.map_files)
        notes = dict.fromkeys([*remarks, *(text for one in maps for text in one.notes)])
        return self._format_lines(called or base.display_text(path), maps, files, list(notes))

    def _list_export_paths(self, row: int, path: Path, pseudonym: str | None) -> list[tuple[Path, ...]]:
        """What viewers open, of each map; none of it is in the way."""
        names = self._map_names()
        tails = [""] if len(names) == 1 else [f"-{one}" for one in names]
        found = self.scan_settings.list_export_paths(self.destination.output_stem(row, path, pseudonym), tails)
        for one in (each for own in found for each in own):
            check_free(one, self.destination.overwrite, path)
        return found

    def _read_masks(self, explanations: "Sequence[Explanation]") -> "dict[str, Any] | None":
        """Outlines to draw over every map."""
        place = explanations[0].placement
        return (
            read_named_masks(self.mask_options, place.image_size) if self.mask_options and place is not None else None
        )

    @property
    def _target_indices(self) -> range:
        return range(len(self.targets))

    def _explain(self, source: Any, on_pass: "OnPass") -> "tuple[Sequence[Explainer], list[list[Explanation]]]":
        """The methods that answer, and [method][class], all from the same passes."""
        from camscope.explainers.comparison.best_effort import explain_supported
        from camscope.explainers.core.dispatch import explain_grid

        if self.scan_settings.slice_axis is not None:
            return self.explainers, [
                [self._explain_slices(tool, source, q) for q in self.targets] for tool in self.explainers
            ]
        if self.skip_unsupported:
            return explain_supported(self.explainers, source, self.targets, on_pass=on_pass)
        return self.explainers, explain_grid(self.explainers, source, self.targets, on_pass=on_pass)

    def _explain_slices(self, explainer: "Explainer", source: Any, target: int | str | None) -> "Explanation":
        from camscope.medical import explain_slices

        return explain_slices(
            explainer,
            source,
            target,
            axis=self.scan_settings.slice_axis or 0,
            progress=base.stderr_console().is_terminal,
        ).volume

    def _map_names(self) -> list[str]:
        """A part of a file's name for each map, in the order of the maps."""
        methods = [explainer.name for explainer in self.explainers]
        numbers = [f"q{n + 1}" for n in self._target_indices]
        return ["-".join([m] * (len(methods) > 1) + [q] * (len(numbers) > 1)) for m in methods for q in numbers]

    def _save_files(
        self,
        explanations: "Sequence[Explanation]",
        files: OutputFiles,
        masks: "dict[str, Any] | None",
        progress_bar: "ProgressBar",
    ) -> None:
        from camscope.render import encode_image
        from camscope.safe_files import write_bytes

        if files.figures:
            figure = self._build_figure(explanations, masks)
            for path in files.figures:
                write_bytes(path, encode_image(figure, path.suffix), overwrite=self.destination.overwrite)
        for one, paths in zip(explanations, files.map_files, strict=True):
            for path in paths:
                if path.suffix.lower() == ".gif" and one.attribution.ndim == 3:
                    with progress_bar.nested_bar("drawing slices") as watch:
                        one.animate(path, mask=masks, on_progress=watch, overwrite=self.destination.overwrite)
                else:
                    one.save(path, overwrite=self.destination.overwrite)

    def _build_figure(self, explanations: "Sequence[Explanation]", masks: "dict[str, Any] | None" = None) -> "RGBImage":
        """The image and its maps; with several methods and several classes, a row for each class."""
        from camscope.explanation import shared_scales
        from camscope.render import draw_image_grid

        photo, rows, columns = explanations[0].image, len(self.targets), None
        photo = photo if explanations[0].attribution.ndim == 2 else None  # a volume is seen under its maps
        tall = (
            MAX_FIGURE_HEIGHT if explanations[0].attribution.ndim == 3 else MIN_FIGURE_HEIGHT
        )  # three planes in one picture
        height = tall if photo is None else min(MAX_FIGURE_HEIGHT, max(MIN_FIGURE_HEIGHT, photo.shape[0]))
        first = [] if photo is None else [(photo, base.display_text(explanations[0].name), None)]
        every: list[ScaleOption] = ["auto"] * len(explanations)
        scales = shared_scales(explanations, self.render_options.colormap) if self.shared_scale else every
        drawn = [
            (self.render_options.draw(one, height, scale, masks), one.caption, one.warning_text)
            for one, scale in zip(explanations, scales, strict=True)
        ]
        if rows > 1 and len(explanations) > rows:
            columns = len(first) + len(explanations) // rows
            drawn = [cell for row in range(rows) for cell in [*first, *drawn[row::rows]]]
        else:
            drawn = first + drawn
        pictures, captions, flags = zip(*drawn, strict=True)
        return draw_image_grid(pictures, captions, flags=flags, height=height, columns=columns)

    def _format_lines(
        self, display_name: str, explanations: "Sequence[Explanation]", files: OutputFiles, notes: list[str]
    ) -> "list[TerminalLine]":
        from rich.padding import Padding

        title = base.styled_text((display_name, "bold cyan"))
        top = base.styled_text(
            ("  top  ", "dim"),
            (" · ".join(map(_format_class_score, explanations[0].top_classes[: self.n_top_classes])), ""),
        )
        said = [base.styled_text((f"  note: {base.display_text(text)}", "dim")) for text in notes]
        steps = "; ".join(explanations[0].scan_steps)
        said = [base.styled_text(("  read ", "dim"), (base.display_text(steps), "dim")), *said] if steps else said
        where = [base.styled_text(("  to   ", "dim"), (base.display_text(one), "")) for one in files.all_files]
        return [
            title,
            top,
            Padding(_build_explanation_table(explanations), (0, 0, 0, 2), expand=False),
            *said,
            *where,
            base.styled_text(("", "")),
        ]


def _format_class_score(class_score: "ClassScore") -> str:
    chance = f"score {class_score.score:.3g}" if class_score.probability is None else f"{class_score.probability:.3f}"
    return f"{base.format_class(class_score.index, class_score.label)} {chance}"


def _build_explanation_table(explanations: "Sequence[Explanation]") -> "Table":
    from rich.text import Text

    from camscope.explanation import STATUS_OK

    table = base.new_table("method", "class", "score>", "probability>", "layer", "grid>", "status")
    for one in explanations:
        table.add_row(
            one.method,
            Text(base.format_class(one.target, one.label)),
            f"{one.score:.4g}",
            "–" if one.probability is None else f"{one.probability:.3f}",
            Text(base.display_text(one.layer or "–")),
            "×".join(map(str, one.grid)),
            Text(one.status.replace("_", " "), "green" if one.status == STATUS_OK else "yellow"),
        )
    return table
