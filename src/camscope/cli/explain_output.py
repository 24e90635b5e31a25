"""Output of `camscope explain` for one image: explanations, files and printed lines."""

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

MIN_FIGURE_HEIGHT, MAX_FIGURE_HEIGHT = 384, 768  # pixel rows of an image in a figure


@dataclass(frozen=True)
class ImageExplanationWriter:
    """Writer that explains every image with the same methods and classes, and saves the results."""

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
        """Explain one image and write its files, none of which may exist yet; return the lines to print.

        `progress_bar` is the bar of the command; it pauses while methods show their own.
        """
        pseudonym = self.scan_settings.pseudonym(path)
        files = self.destination.output_files(row, path, self._map_names(), pseudonym)
        export_paths = self._list_export_paths(row, path, pseudonym)
        with base.collect_warnings(quote_messages=pseudonym is None) as warnings:
            methods, explanations_by_method = self._explain(
                self.scan_settings.read_image(path), progress_bar.pause_for_methods
            )
        explanations = [
            self.scan_settings.redact_explanation(explanation, path)
            for method_explanations in explanations_by_method
            for explanation in method_explanations
        ]
        map_indices = [
            self.explainers.index(method) * len(self.targets) + q for method in methods for q in self._target_indices
        ]
        files = OutputFiles(files.figures, tuple(files.map_files[n] for n in map_indices))
        masks = self._read_masks(explanations)
        self._save_files(explanations, files, masks, progress_bar)
        for n, explanation in zip(map_indices, explanations, strict=True):
            exported_files = self.scan_settings.export_map(
                explanation, export_paths[n], path, overwrite=self.destination.overwrite
            )
            files = OutputFiles((*files.figures, *exported_files), files.map_files)
        notes = dict.fromkeys([*warnings, *(text for explanation in explanations for text in explanation.notes)])
        return self._format_lines(pseudonym or base.display_text(path), explanations, files, list(notes))

    def _list_export_paths(self, row: int, path: Path, pseudonym: str | None) -> list[tuple[Path, ...]]:
        """List the export files of each map, and check that none of them exists."""
        names = self._map_names()
        suffixes = [""] if len(names) == 1 else [f"-{name}" for name in names]
        paths_by_map = self.scan_settings.list_export_paths(
            self.destination.output_stem(row, path, pseudonym), suffixes
        )
        for name in (each for map_paths in paths_by_map for each in map_paths):
            check_free(name, self.destination.overwrite, path)
        return paths_by_map

    def _read_masks(self, explanations: "Sequence[Explanation]") -> "dict[str, Any] | None":
        """Read the masks whose outlines are drawn over every map."""
        placement = explanations[0].placement
        return (
            read_named_masks(self.mask_options, placement.image_size)
            if self.mask_options and placement is not None
            else None
        )

    @property
    def _target_indices(self) -> range:
        return range(len(self.targets))

    def _explain(self, source: Any, on_pass: "OnPass") -> "tuple[Sequence[Explainer], list[list[Explanation]]]":
        """Return the supported explainers and their explanations by [method][class], computed from shared passes."""
        from camscope.explainers.comparison.supported_methods import explain_supported
        from camscope.explainers.core.dispatch import explain_grid

        if self.scan_settings.slice_axis is not None:
            return self.explainers, [
                [self._explain_slices(explainer, source, target) for target in self.targets]
                for explainer in self.explainers
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
        """Return a part of the file name for each map, in the order of the maps."""
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
        for explanation, paths in zip(explanations, files.map_files, strict=True):
            for path in paths:
                if path.suffix.lower() == ".gif" and explanation.attribution.ndim == 3:
                    with progress_bar.nested_bar("drawing slices") as on_progress:
                        explanation.animate(
                            path, mask=masks, on_progress=on_progress, overwrite=self.destination.overwrite
                        )
                else:
                    explanation.save(path, overwrite=self.destination.overwrite)

    def _build_figure(self, explanations: "Sequence[Explanation]", masks: "dict[str, Any] | None" = None) -> "RGBImage":
        """Draw the image and its maps; several methods and classes give one row per class."""
        from camscope.explanation import shared_scales
        from camscope.render import draw_image_grid

        image, rows, columns = explanations[0].image, len(self.targets), None
        image = image if explanations[0].attribution.ndim == 2 else None  # the maps of a volume show the volume
        min_height = (
            MAX_FIGURE_HEIGHT if explanations[0].attribution.ndim == 3 else MIN_FIGURE_HEIGHT
        )  # three planes in one image
        height = min_height if image is None else min(MAX_FIGURE_HEIGHT, max(MIN_FIGURE_HEIGHT, image.shape[0]))
        first = [] if image is None else [(image, base.display_text(explanations[0].name), None)]
        auto_scales: list[ScaleOption] = ["auto"] * len(explanations)
        scales = shared_scales(explanations, self.render_options.colormap) if self.shared_scale else auto_scales
        cells = [
            (self.render_options.draw(explanation, height, scale, masks), explanation.caption, explanation.warning_text)
            for explanation, scale in zip(explanations, scales, strict=True)
        ]
        if rows > 1 and len(explanations) > rows:
            columns = len(first) + len(explanations) // rows
            cells = [cell for row in range(rows) for cell in [*first, *cells[row::rows]]]
        else:
            cells = first + cells
        images, captions, flags = zip(*cells, strict=True)
        return draw_image_grid(images, captions, flags=flags, height=height, columns=columns)

    def _format_lines(
        self, display_name: str, explanations: "Sequence[Explanation]", files: OutputFiles, notes: list[str]
    ) -> "list[TerminalLine]":
        from rich.padding import Padding

        title = base.styled_text((display_name, "bold cyan"))
        top = base.styled_text(
            ("  top  ", "dim"),
            (" · ".join(map(_format_class_score, explanations[0].top_classes[: self.n_top_classes])), ""),
        )
        note_lines = [base.styled_text((f"  note: {base.display_text(text)}", "dim")) for text in notes]
        steps = "; ".join(explanations[0].scan_steps)
        note_lines = (
            [base.styled_text(("  read ", "dim"), (base.display_text(steps), "dim")), *note_lines]
            if steps
            else note_lines
        )
        path_lines = [base.styled_text(("  to   ", "dim"), (base.display_text(path), "")) for path in files.all_files]
        return [
            title,
            top,
            Padding(_build_explanation_table(explanations), (0, 0, 0, 2), expand=False),
            *note_lines,
            *path_lines,
            base.styled_text(("", "")),
        ]


def _format_class_score(class_score: "ClassScore") -> str:
    value = f"score {class_score.score:.3g}" if class_score.probability is None else f"{class_score.probability:.3f}"
    return f"{base.format_class(class_score.index, class_score.label)} {value}"


def _build_explanation_table(explanations: "Sequence[Explanation]") -> "Table":
    from rich.text import Text

    from camscope.explanation import STATUS_OK

    table = base.new_table("method", "class", "score>", "probability>", "layer", "grid>", "status")
    for explanation in explanations:
        table.add_row(
            explanation.method,
            Text(base.format_class(explanation.target, explanation.label)),
            f"{explanation.score:.4g}",
            "–" if explanation.probability is None else f"{explanation.probability:.3f}",
            Text(base.display_text(explanation.layer or "–")),
            "×".join(map(str, explanation.grid)),
            Text(explanation.status.replace("_", " "), "green" if explanation.status == STATUS_OK else "yellow"),
        )
    return table
