"""`ImageExplanationWriter`: explain one image, write its figures and map files, and format the lines to print."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope import errors
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.cli import (
    console_output,
    json_output,
    progress_bars,
)
from camscope.cli.input_images_and_output_paths import CAPTION_SUFFIX, Destination
from camscope.cli.scan_options import EXPORT_SUFFIXES, ScanOptions, read_named_masks

if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from camscope.explainers import Explainer
    from camscope.explainers.core.run_methods_in_shared_passes import OnPass
    from camscope.explanation import ClassScore, Explanation, PrintFigure, ScaleOption
    from camscope.render import RGBImage

MIN_FIGURE_HEIGHT, MAX_FIGURE_HEIGHT = 384, 768  # pixel rows of an image in a figure


@dataclass(frozen=True)
class ImageExplanationWriter:
    """Explain images with the same methods and classes, and save the results."""

    explainers: "Sequence[Explainer]"
    targets: Sequence[int | str | None]
    destination: Destination
    overlay_options: dict[str, Any]  # of `Explanation.overlay`
    n_top_classes: int
    shared_scale: bool = False
    skip_unsupported: bool = False
    scan_settings: ScanOptions = field(default_factory=ScanOptions)
    mask_options: Sequence[str] = ()
    width_mm: float | None = None  # of a figure for print
    compare_classes: bool = False  # the targets are the predicted and the expected class

    def explain_and_write(
        self, image_number: int, path: Path, progress_bar: progress_bars.ProgressBar
    ) -> "tuple[list[Text | Padding], dict[str, Any]]":
        """Explain one image, and write its files. Return the lines to print and the facts for JSON."""
        settings, destination, n_targets = self.scan_settings, self.destination, len(self.targets)
        pseudonym = settings.pseudonym(path)
        export_suffixes = [EXPORT_SUFFIXES[kind] for kind in settings.export_formats]
        figures, map_files, exports = destination.list_output_files(
            image_number, path, self._build_map_names(), pseudonym, export_suffixes
        )
        with console_output.collect_warnings(quote_messages=pseudonym is None) as warnings:
            methods, by_method = self._explain_by_supported_methods(
                settings.read_scan_or_return_path(path), progress_bar.pause_for_methods
            )
        explanations = [settings.redact_explanation(each, path) for each in chain.from_iterable(by_method)]
        map_indices = [self.explainers.index(method) * n_targets + q for method in methods for q in range(n_targets)]
        map_files, exports = ([files[n] for n in map_indices] for files in (map_files, exports))
        self._save_files(explanations, figures, map_files, progress_bar)
        written = list(figures)
        for explanation, export_paths in zip(explanations, exports, strict=True):
            written += settings.export_map(explanation, export_paths, path, overwrite=destination.overwrite)
        written += chain.from_iterable(map_files)
        notes = dict.fromkeys([*warnings, *(text for explanation in explanations for text in explanation.notes)])
        facts: dict[str, Any] = {
            "image": pseudonym or path,
            "top_classes": explanations[0].top_classes[: self.n_top_classes],
            "explanations": list(map(json_output.describe_explanation, explanations)),
            "scan_steps": explanations[0].scan_steps,
        }
        if self.compare_classes:
            facts["expected"] = _compare_maps_of_predicted_and_expected_class(explanations)
            if facts["expected"]["is_predicted"]:
                notes["the model predicts the expected class: both maps are the same"] = None
        facts |= {"notes": list(notes), "files": written}
        return self._format_lines(
            pseudonym or console_output.to_printable_line(path), explanations, written, notes
        ), facts

    def _explain_by_supported_methods(
        self, source: Any, on_pass: "OnPass"
    ) -> "tuple[Sequence[Explainer], list[list[Explanation]]]":
        """Return the explainers that support the image. Also return their explanations, as [explainer][class]."""
        from camscope.explainers.comparison.explain_by_supported_methods import explain_supported
        from camscope.explainers.core.run_methods_in_shared_passes import explain_grid

        if (axis := self.scan_settings.slice_axis) is not None:
            from camscope.medical import explain_slices

            show = console_output.stderr_console().is_terminal
            return self.explainers, [
                [explain_slices(explainer, source, target, axis=axis, progress=show).volume for target in self.targets]
                for explainer in self.explainers
            ]
        if self.skip_unsupported:
            return explain_supported(self.explainers, source, self.targets, on_pass=on_pass)
        return self.explainers, explain_grid(self.explainers, source, self.targets, on_pass=on_pass)

    def _build_map_names(self) -> list[str]:
        """Return a name for each pair of method and class, such as `gradcam-q1`. The names become part of file names."""
        methods = [explainer.name for explainer in self.explainers]
        numbers = [f"q{n + 1}" for n in range(len(self.targets))]
        return ["-".join([m] * (len(methods) > 1) + [q] * (len(numbers) > 1)) for m in methods for q in numbers]

    def _save_files(
        self,
        explanations: "Sequence[Explanation]",
        figures: Sequence[Path],
        map_files: Sequence[Sequence[Path]],
        progress_bar: progress_bars.ProgressBar,
    ) -> None:
        """Write the figures, and the map files of each explanation."""
        from camscope.render import IMAGE_FORMATS, TWO_COLUMNS_MM, encode_image

        overwrite, placement, masks = self.destination.overwrite, explanations[0].placement, None
        if self.mask_options and placement is not None:
            masks = read_named_masks(self.mask_options, placement.image_size)
        rasters = [path for path in figures if path.suffix.lower() in IMAGE_FORMATS]
        if rasters:
            figure = self._build_figure(explanations, masks)
            for path in rasters:
                write_bytes(path, encode_image(figure, path.suffix), overwrite=overwrite)
        if len(figures) > len(rasters):
            print_figure, width_mm = self._build_print_figure(explanations, masks), self.width_mm or TWO_COLUMNS_MM
            for path in figures[len(rasters) :]:
                is_caption = path.suffix == CAPTION_SUFFIX
                caption = f"{print_figure.caption}\n".encode()
                data = caption if is_caption else print_figure.encode(path.suffix.lower(), width_mm=width_mm)
                write_bytes(path, data, overwrite=overwrite)
        for explanation, paths in zip(explanations, map_files, strict=True):
            for path in paths:
                if path.suffix.lower() == ".gif" and explanation.attribution.ndim == 3:
                    with progress_bar.nested_bar("drawing slices") as on_progress:
                        explanation.animate(
                            path,
                            mask=masks,
                            on_progress=on_progress,
                            overwrite=overwrite,
                            interpolation=self.overlay_options["interpolation"],
                        )
                else:
                    explanation.save(path, overwrite=overwrite)

    def _build_print_figure(self, explanations: "Sequence[Explanation]", masks: dict[str, Any] | None) -> "PrintFigure":
        """Build the figure for print: the image, the maps, and with `--expected` their differences."""
        from camscope.explanation import PrintFigure, shared_scales
        from camscope.render import DIVERGING

        options = {**self.overlay_options, "mask": masks}
        options.pop("colorbar")
        drawn, colormaps = list(explanations), [options["colormap"]] * len(explanations)
        scales: list[ScaleOption] = ["auto"] * len(explanations)
        if self.shared_scale:
            scales = shared_scales(explanations, options["colormap"], options["interpolation"])
        if self.compare_classes:
            for difference, scale in zip(build_class_differences(explanations), scales[::2], strict=True):
                drawn.append(difference)
                scales.append((-scale[1], scale[1]) if isinstance(scale, tuple) else "symmetric")
                colormaps.append(DIVERGING)
        photo = explanations[0].image if explanations[0].attribution.ndim == 2 else None
        return PrintFigure(drawn, scales=scales, colormaps=colormaps, photo=photo, **options)

    def _build_figure(self, explanations: "Sequence[Explanation]", masks: dict[str, Any] | None) -> "RGBImage":
        """Draw the image and its maps. With several methods and several classes, each class gets one row."""
        from camscope.explanation import add_own_maximum, compute_color_bar_width, shared_scales
        from camscope.render import DIVERGING, draw_image_grid

        is_volume, image, height = explanations[0].attribution.ndim == 3, explanations[0].image, MIN_FIGURE_HEIGHT
        if is_volume:  # its maps show the volume, in three planes of one image
            image, height = None, MAX_FIGURE_HEIGHT
        elif image is not None:
            height = min(MAX_FIGURE_HEIGHT, max(MIN_FIGURE_HEIGHT, image.shape[0]))
        rows, columns = len(self.targets), None
        first = [] if image is None else [(image, console_output.to_printable_line(explanations[0].name), None, 0)]
        has_bar = self.overlay_options["colorbar"]
        scales: Sequence[ScaleOption] = ["auto"] * len(explanations)
        if self.shared_scale:
            scales = shared_scales(
                explanations, self.overlay_options["colormap"], self.overlay_options["interpolation"]
            )
        cells = []
        for each, scale in zip(explanations, scales, strict=True):
            overlay = each.overlay(scale=scale, mask=masks, height=height, **self.overlay_options)
            bar_width = compute_color_bar_width(each, overlay, height) if has_bar else 0
            cells.append((overlay, add_own_maximum(each.caption, each, scale), each.warning_text, bar_width))
        if self.compare_classes:  # one row per method: the image, both maps, and the difference
            columns = len(first) + 3
            options, differences = {**self.overlay_options, "colormap": DIVERGING}, []
            for each, scale in zip(build_class_differences(explanations), scales[::2], strict=True):
                limits: ScaleOption = (
                    (-scale[1], scale[1]) if isinstance(scale, tuple) else "symmetric"
                )  # the scale of both maps
                overlay = each.overlay(scale=limits, mask=masks, height=height, **options)
                bar_width = compute_color_bar_width(each, overlay, height) if has_bar else 0
                differences.append((overlay, each.caption, None, bar_width))
            pairs = zip(cells[::2], cells[1::2], differences, strict=True)
            cells = [cell for row in pairs for cell in [*first, *row]]
        elif rows > 1 and len(explanations) > rows:
            columns = len(first) + len(explanations) // rows
            cells = [cell for row in range(rows) for cell in [*first, *cells[row::rows]]]
        else:
            cells = first + cells
        images, captions, flags, bar_widths = zip(*cells, strict=True)
        return draw_image_grid(images, captions, flags=flags, height=height, columns=columns, bar_widths=bar_widths)

    def _format_lines(
        self, display_name: str, explanations: "Sequence[Explanation]", files: Sequence[Path], notes: Iterable[str]
    ) -> "list[Text | Padding]":
        """Format the lines about an image: top classes, explanations, steps of the scan, notes and files."""
        from rich.padding import Padding

        def format_line(label: str, text: object, style: str = "") -> "Text":
            return console_output.styled_text((f"  {label}", "dim"), (console_output.to_printable_line(text), style))

        steps = "; ".join(explanations[0].scan_steps)
        top = " · ".join(map(_format_class_score, explanations[0].top_classes[: self.n_top_classes]))
        return [
            console_output.styled_text((display_name, "bold cyan")),
            *([format_line("top  ", top)] if top else []),
            Padding(_build_explanation_table(explanations), (0, 0, 0, 2), expand=False),
            *([format_line("read ", steps, "dim")] if steps else []),
            *(format_line("note: ", text, "dim") for text in notes),
            *(format_line("to   ", path) for path in files),
            console_output.styled_text(("", "")),
        ]


def build_class_differences(explanations: "Sequence[Explanation]") -> "list[Explanation]":
    """Return one difference map for each method: the map of the predicted class minus the map of the expected class.

    Its values are in units of the score.
    """
    differences = []
    for predicted, expected in zip(explanations[::2], explanations[1::2], strict=True):
        if predicted.layer != expected.layer:
            raise errors.LayerError(
                f"the maps of {predicted.label} and {expected.label} are of different layers, {predicted.layer} and "
                f"{expected.layer}, and have no difference",
                fix="pass layer=",
                remedy=errors.Remedy.SET_LAYER,
            )
        difference = predicted.attribution - expected.attribution
        label = f"{predicted.label} − {expected.label}"
        subtracted = replace(predicted, attribution=difference, standard_error=None, target=None, probability=None)
        differences.append(replace(subtracted, label=label, score=predicted.score - expected.score))
    return differences


def _compare_maps_of_predicted_and_expected_class(explanations: "Sequence[Explanation]") -> dict[str, Any]:
    """Compare, for each method, the map of the predicted class with the map of the expected class."""
    from camscope.metrics import spearman

    predicted, expected = explanations[:2]
    differences = []
    for first, second, difference in zip(
        explanations[::2], explanations[1::2], build_class_differences(explanations), strict=True
    ):
        try:
            correlation = spearman(first.attribution, second.attribution)
        except errors.UndefinedError:
            correlation = None
        values = [difference.attribution.min(), difference.attribution.max()]
        differences.append({"method": first.method, "value_range": values, "correlation": correlation})
    return {
        "label": expected.label,
        "predicted_label": predicted.label,
        "is_predicted": predicted.target == expected.target,
        "differences": differences,
    }


def _format_class_score(class_score: "ClassScore") -> str:
    value = f"score {class_score.score:.3g}" if class_score.probability is None else f"{class_score.probability:.3f}"
    return f"{console_output.format_class(class_score.index, class_score.label)} {value}"


def _build_explanation_table(explanations: "Sequence[Explanation]") -> "Table":
    """Build a table with one row per explanation: class, score, layer, grid and status."""
    table = console_output.new_table("method", "class", "score>", "probability>", "layer", "grid>", "status")
    for explanation in explanations:
        table.add_row(
            explanation.method_title,
            console_output.format_class(explanation.target, explanation.label),
            console_output.format_score(explanation.score),
            "–" if explanation.probability is None else f"{explanation.probability:.3f}",
            console_output.to_printable_line(explanation.layer or "–"),
            "×".join(map(str, explanation.grid)),
            console_output.format_status(explanation.status),
        )
    return table
