"""Output of `camscope explain` for one image: explanations, files and printed lines."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.cli import base
from camscope.cli.output_paths import Destination, check_free
from camscope.cli.scan_options import ScanOptions, read_named_masks

if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from camscope.cli.progress import ProgressBar
    from camscope.explainers import Explainer
    from camscope.explainers.core.runner import OnPass
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
    overlay_options: dict[str, Any]  # of `Explanation.overlay`
    n_top_classes: int
    shared_scale: bool = False
    skip_unsupported: bool = False
    scan_settings: ScanOptions = field(default_factory=ScanOptions)
    mask_options: Sequence[str] = ()

    def explain_and_write(self, row: int, path: Path, progress_bar: "ProgressBar") -> "list[TerminalLine]":
        """Explain one image and write its files, none of which may exist yet; return the lines to print.

        `progress_bar` is the bar of the command; it pauses while methods show their own.
        """
        settings, overwrite = self.scan_settings, self.destination.overwrite
        pseudonym, names = settings.pseudonym(path), self._map_names()
        figures, map_files = self.destination.output_files(row, path, names, pseudonym)
        suffixes = [""] if len(names) == 1 else [f"-{name}" for name in names]
        export_paths = settings.list_export_paths(self.destination.output_stem(row, path, pseudonym), suffixes)
        for file in itertools.chain.from_iterable(export_paths):
            check_free(file, overwrite, path)
        with base.collect_warnings(quote_messages=pseudonym is None) as warnings:
            methods, by_method = self._explain(settings.read_image(path), progress_bar.pause_for_methods)
        explanations = [settings.redact_explanation(each, path) for each in itertools.chain.from_iterable(by_method)]
        n_targets, placement = len(self.targets), explanations[0].placement
        map_indices = [self.explainers.index(method) * n_targets + q for method in methods for q in range(n_targets)]
        masks = None
        if self.mask_options and placement is not None:
            masks = read_named_masks(self.mask_options, placement.image_size)
        map_files = [map_files[n] for n in map_indices]
        self._save_files(explanations, figures, map_files, masks, progress_bar)
        written = list(figures)
        for n, explanation in zip(map_indices, explanations, strict=True):
            written += settings.export_map(explanation, export_paths[n], path, overwrite=overwrite)
        written += itertools.chain.from_iterable(map_files)
        notes = dict.fromkeys([*warnings, *(text for explanation in explanations for text in explanation.notes)])
        return self._format_lines(pseudonym or base.display_text(path), explanations, written, notes)

    def _explain(self, source: Any, on_pass: "OnPass") -> "tuple[Sequence[Explainer], list[list[Explanation]]]":
        """Return the supported explainers and their explanations by [method][class], computed from shared passes."""
        from camscope.explainers.comparison.supported_methods import explain_supported
        from camscope.explainers.core.runner import explain_grid

        if (axis := self.scan_settings.slice_axis) is not None:
            from camscope.medical import explain_slices

            show = base.stderr_console().is_terminal
            return self.explainers, [
                [explain_slices(explainer, source, target, axis=axis, progress=show).volume for target in self.targets]
                for explainer in self.explainers
            ]
        if self.skip_unsupported:
            return explain_supported(self.explainers, source, self.targets, on_pass=on_pass)
        return self.explainers, explain_grid(self.explainers, source, self.targets, on_pass=on_pass)

    def _map_names(self) -> list[str]:
        """Return a part of the file name for each map, in the order of the maps."""
        methods = [explainer.name for explainer in self.explainers]
        numbers = [f"q{n + 1}" for n in range(len(self.targets))]
        return ["-".join([m] * (len(methods) > 1) + [q] * (len(numbers) > 1)) for m in methods for q in numbers]

    def _save_files(
        self,
        explanations: "Sequence[Explanation]",
        figures: Sequence[Path],
        map_files: Sequence[Sequence[Path]],
        masks: "dict[str, Any] | None",
        progress_bar: "ProgressBar",
    ) -> None:
        from camscope.render import encode_image
        from camscope.safe_files import write_bytes

        overwrite = self.destination.overwrite
        if figures:
            figure = self._build_figure(explanations, masks)
            for path in figures:
                write_bytes(path, encode_image(figure, path.suffix), overwrite=overwrite)
        for explanation, paths in zip(explanations, map_files, strict=True):
            for path in paths:
                if path.suffix.lower() == ".gif" and explanation.attribution.ndim == 3:
                    with progress_bar.nested_bar("drawing slices") as on_progress:
                        explanation.animate(path, mask=masks, on_progress=on_progress, overwrite=overwrite)
                else:
                    explanation.save(path, overwrite=overwrite)

    def _build_figure(self, explanations: "Sequence[Explanation]", masks: "dict[str, Any] | None" = None) -> "RGBImage":
        """Draw the image and its maps; several methods and classes give one row per class."""
        from camscope.explanation import shared_scales
        from camscope.render import draw_image_grid

        is_volume, image, height = explanations[0].attribution.ndim == 3, explanations[0].image, MIN_FIGURE_HEIGHT
        if is_volume:  # its maps show the volume, in three planes of one image
            image, height = None, MAX_FIGURE_HEIGHT
        elif image is not None:
            height = min(MAX_FIGURE_HEIGHT, max(MIN_FIGURE_HEIGHT, image.shape[0]))
        rows, columns = len(self.targets), None
        first = [] if image is None else [(image, base.display_text(explanations[0].name), None)]
        auto_scales: list[ScaleOption] = ["auto"] * len(explanations)
        scales = shared_scales(explanations, self.overlay_options["colormap"]) if self.shared_scale else auto_scales
        cells = [
            (
                each.overlay(scale=scale, mask=masks, height=height, **self.overlay_options),
                each.caption,
                each.warning_text,
            )
            for each, scale in zip(explanations, scales, strict=True)
        ]
        if rows > 1 and len(explanations) > rows:
            columns = len(first) + len(explanations) // rows
            cells = [cell for row in range(rows) for cell in [*first, *cells[row::rows]]]
        else:
            cells = first + cells
        images, captions, flags = zip(*cells, strict=True)
        return draw_image_grid(images, captions, flags=flags, height=height, columns=columns)

    def _format_lines(
        self, display_name: str, explanations: "Sequence[Explanation]", files: Sequence[Path], notes: Iterable[str]
    ) -> "list[TerminalLine]":
        from rich.padding import Padding

        def line(label: str, text: object, style: str = "") -> "Text":
            return base.styled_text((f"  {label}", "dim"), (base.display_text(text), style))

        steps = "; ".join(explanations[0].scan_steps)
        return [
            base.styled_text((display_name, "bold cyan")),
            line("top  ", " · ".join(map(_format_class_score, explanations[0].top_classes[: self.n_top_classes]))),
            Padding(_build_explanation_table(explanations), (0, 0, 0, 2), expand=False),
            *([line("read ", steps, "dim")] if steps else []),
            *(line("note: ", text, "dim") for text in notes),
            *(line("to   ", path) for path in files),
            base.styled_text(("", "")),
        ]


def _format_class_score(class_score: "ClassScore") -> str:
    value = f"score {class_score.score:.3g}" if class_score.probability is None else f"{class_score.probability:.3f}"
    return f"{base.format_class(class_score.index, class_score.label)} {value}"


def _build_explanation_table(explanations: "Sequence[Explanation]") -> "Table":
    table = base.new_table("method", "class", "score>", "probability>", "layer", "grid>", "status")
    for explanation in explanations:
        table.add_row(
            explanation.method_title,
            base.format_class(explanation.target, explanation.label),
            f"{explanation.score:.4g}",
            "–" if explanation.probability is None else f"{explanation.probability:.3f}",
            base.display_text(explanation.layer or "–"),
            "×".join(map(str, explanation.grid)),
            base.format_status(explanation.status),
        )
    return table
