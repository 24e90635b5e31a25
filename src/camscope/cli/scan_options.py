"""`ScanOptions`: read medical scans, hide names of files and patients by pseudonyms, and export maps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camscope.cli import commands_and_error_reports, console_output, shared_options
from camscope.errors import CategoryError, ImageError
from camscope.images.files.find_and_open_image_files import is_scan_name

if TYPE_CHECKING:
    from camscope.batch.batch_runner import PrivacyProfile
    from camscope.explainers import Explainer
    from camscope.explanation import Explanation

EXPORT_SUFFIXES = {"nifti": "-map.nii.gz", "pmap": "-pmap.dcm", "sc": "-sc.dcm"}
DEFAULT_MASK_NAME = "mask"


@dataclass(frozen=True)
class ScanOptions:
    """The options of a command for medical scans: how to read them, hide their names, and export their maps."""

    folders_are_series: bool = False  # each is one scan
    window: str | None = None
    allow_burned_in_text: bool = False
    export_formats: Sequence[str] = ()
    profile: "PrivacyProfile" = "research"
    slice_axis: int | None = None  # along which volumes are explained slice by slice
    all_private: bool = False  # other images are as private as scans
    preprocess_opens_files: bool = False  # as MONAI's transforms do

    def __post_init__(self) -> None:
        if unknown := [name for name in self.export_formats if name not in EXPORT_SUFFIXES]:
            raise shared_options.build_option_error(
                "--export", f"{unknown[0]!r}; expected {', '.join(EXPORT_SUFFIXES)}"
            )
        if self.profile != "clinical" and {"pmap", "sc"} & set(self.export_formats):
            problem = "DICOM objects hold the patient's name and study, as an archive needs them"
            raise shared_options.build_option_error("--export", f"{problem}; pass --profile clinical")

    def require_export_packages(self) -> None:
        """Raise a MissingExtraError if the package for a requested export format is missing."""
        if self.export_formats:
            from camscope.medical.export_nifti_or_dicom import check_export_packages_installed

            for kind in self.export_formats:
                check_export_packages_installed(kind)

    def is_read_as_scan(self, path: Path) -> bool:
        """Return whether a file or folder is read as a medical scan."""
        from camscope.images.scans.scan_reader import is_scan

        return (self.folders_are_series and path.is_dir()) or is_scan_name(path.name) or is_scan(path)

    def read_scan_or_return_path(self, path: Path) -> Any:
        """Read a medical scan with the chosen window. Any other image is not read, and its path is returned."""
        if not self.is_read_as_scan(path):
            if self.window is not None:
                raise ImageError(f"{path} is not a scan: --window applies only to DICOM, NIfTI and other scans")
            if self.slice_axis is not None:
                raise ImageError(f"{path} is not a scan: --slices applies only to volumes")
            return path
        if self.preprocess_opens_files:
            if self.window is not None:
                raise ImageError(
                    "--window has no effect: the model's MONAI preprocessing reads the file; set the window in that preprocessing"
                )
            return path
        from camscope.images.scans.scan_reader import read_scan

        scan = read_scan(path, window=self.window)
        return replace(scan, has_burned_in_text=False) if self.allow_burned_in_text else scan

    def is_private(self, path: Path) -> bool:
        """Return whether a path may name a patient, and so must not appear in any output."""
        return self.profile != "clinical" and (self.all_private or self.is_read_as_scan(path))

    def pseudonym(self, path: Path) -> str | None:
        """Return the pseudonym that replaces a private path, such as `scan-1f0a92bc`. Return None if the path is not private."""
        from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source

        return pseudonymize_source(path) if self.is_private(path) else None

    def display_name(self, path: Path) -> str:
        """Return the text to print for a path. A private path is replaced by its pseudonym."""
        return self.pseudonym(path) or console_output.to_printable_line(path)

    def with_privacy_for(self, explainers: "Sequence[Explainer]") -> "ScanOptions":
        """Return a copy of these options. All images are private in it if the preprocessing of an explainer reads scans."""
        from camscope.explainers.core.model_input import accepts_scans
        from camscope.images.scans.monai_preprocess import MonaiPreprocess

        preprocesses = [explainer.preprocess for explainer in explainers]
        all_private = self.all_private or any(map(accepts_scans, preprocesses))
        opens_files = any(isinstance(preprocess, MonaiPreprocess) for preprocess in preprocesses)
        return replace(self, all_private=all_private, preprocess_opens_files=opens_files)

    def redact_explanation(self, explanation: "Explanation", path: Path) -> "Explanation":
        """Return a copy of the explanation. A pseudonym replaces the names of private files in it."""
        from camscope.explainers.core.redacted_settings_text import redact_parameters

        if (pseudonym := self.pseudonym(path)) is None:
            return explanation
        return replace(explanation, name=pseudonym, parameters=redact_parameters(explanation.parameters))

    def format_redacted_error(self, error: Exception, path: Path) -> str:
        """Format an error as one line. For a private path, the path and the messages of other libraries are hidden."""
        pseudonym = self.pseudonym(path)
        if pseudonym is None:
            return commands_and_error_reports.format_error(error)
        from camscope.images.files.redacted_errors_and_file_pseudonyms import format_error_without_causes

        if isinstance(error, OSError) and error.strerror:
            return f"{type(error).__name__}: {error.strerror}"
        message = format_error_without_causes(error).replace(str(path), pseudonym)
        message = re.sub(rf"(?<!\w){re.escape(path.name)}(?!\w)", pseudonym, message)
        return commands_and_error_reports.format_error(error, message)

    def export_map(
        self, explanation: "Explanation", paths: Sequence[Path], source: Path, *, overwrite: bool
    ) -> list[Path]:
        """Export a map to each requested format. Return the paths that were written.

        For the slices of a volume, a path without its suffix `.dcm` becomes a folder.
        """
        from camscope.medical import export

        source_scan, written = source if self.is_read_as_scan(source) else None, []
        for kind, path in zip(self.export_formats, paths, strict=True):
            if kind == "sc" and explanation.attribution.ndim == 3:
                path = path.with_suffix("")
            path.parent.mkdir(parents=True, exist_ok=True)
            written.append(
                export(explanation, path, kind, source=source_scan, profile=self.profile, overwrite=overwrite)
            )
        return written


def read_named_masks(mask_options: Sequence[str], shape: tuple[int, ...]) -> "dict[str, Any]":
    """Read the masks of `--mask`. Return them by name. Examples are `lungs=FILE`, and `lesion=FILE:2` for label 2.

    Each mask must have `shape`, the size of the image.
    """
    from camscope.images.files.redacted_errors_and_file_pseudonyms import format_error_without_causes
    from camscope.images.mask_file_reader import read_label_image
    from camscope.mask_labels import LabelChoice, format_count_and_names

    masks = {}
    for option in mask_options:
        name, equals, file_and_labels = option.rpartition("=")
        file, colon, label_text = file_and_labels.rpartition(":")
        if not colon or len(file) < 2 or Path(file_and_labels).exists() or "/" in label_text or "\\" in label_text:
            file, label_text = file_and_labels, ""  # an existing path, or a drive letter, holds no labels
        categories = tuple(shared_options.split_list(label_text))
        path, mask_title = Path(file), f"mask {name}" if name else DEFAULT_MASK_NAME
        try:
            labels = read_label_image(path, is_volume=len(shape) == 3)
        except ImageError as error:
            reason = format_error_without_causes(error).removeprefix(f"{path}: ")
            raise ImageError(f"the {mask_title}: {reason}") from None
        if not categories and len(names := labels.label_names()) > 1:
            raise CategoryError(
                f"the {mask_title} holds {format_count_and_names(names)}; expected one label; "
                f"choose one with --mask NAME=FILE:{names[0]}, or FILE:all"
            )
        mask = LabelChoice(categories).select_mask(labels)
        if mask.shape != shape:
            mask_size, image_size = (" x ".join(map(str, size)) for size in (mask.shape, shape))
            raise ImageError(f"the {mask_title} is {mask_size} and the image is {image_size}; expected the same size")
        masks[name if equals else DEFAULT_MASK_NAME] = mask
    return masks
