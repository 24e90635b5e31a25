"""The issues that an inspection can report: code, severity and message of each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from camscope.plurals import plural

Severity = Literal["error", "warning", "note"]
RowNumbers = NDArray[np.int64]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
# error: cannot be used unchanged; warning: needs a look; note: worth knowing
ISSUES: dict[str, tuple[Severity, str]] = {
    "missing-file": ("error", "there is no such file"),
    "outside-root": ("error", "the path leads out of the folder of the manifest"),
    "missing-codec": ("error", "a package that reads these files is not installed"),
    "no-pixels": ("error", "DICOM objects without pixels"),
    "ambiguous-series": ("error", "several volumes or series in one row: choose one, such as file#0"),
    "unreadable": ("error", "files that cannot be read"),
    "repeated-id": ("error", "ids that another row has"),
    "patient-in-several-splits": ("error", "patients with images in several splits"),
    "study-in-several-splits": ("error", "DICOM studies with images in several splits"),
    "pixels-in-several-splits": ("error", "the same pixels in several splits"),
    "unknown-target": ("error", "targets that are not classes"),
    "mask-missing": ("error", "the file of the mask is missing"),
    "mask-unreadable": ("error", "the mask cannot be read"),
    "mask-segmentation": (
        "error",
        "the mask is a DICOM segmentation object: convert it to NIfTI, for example with dcmqi or highdicom",
    ),
    "mask-size": ("error", "the mask and its image have different sizes"),
    "reserved-columns": ("warning", "columns whose names a run uses for its results: rename them"),
    "mask-position": ("warning", "the mask is displaced from its image by more than a voxel"),
    "mask-empty": ("warning", "the mask is empty"),
    "duplicates": ("warning", "the same pixels as in another row"),
    "duplicates-with-different-targets": ("warning", "the same pixels with different targets"),
    "no-target": ("warning", "no target"),
    "placeholder-target": ("warning", "targets that stand for a missing value"),
    "target-associated-with-group": ("warning", "the group predicts the target"),
    "no-split": ("warning", "no split"),
    "no-patient": ("warning", "no patient"),
    "monochrome1": (
        "warning",
        "MONOCHROME1 in addition to MONOCHROME2: camscope inverts these images, but the difference may reveal the device",
    ),
    "mixed-modalities": ("warning", "a modality other than that of most images"),
    "mixed-dimensions": ("warning", "both 2-D images and volumes"),
    "mixed-colors": ("warning", "both color and gray images"),
    "mixed-orientations": ("warning", "an orientation other than that of most images"),
    "mixed-spacings": ("warning", "voxels of very different sizes"),
    "missing-slices": ("warning", "missing or unevenly spaced slices"),
    "slices-at-same-position": ("warning", "slices of one series at the same position"),
    "irregular-slices": ("warning", "slices that are sheared, shifted sideways, or farther apart than the header says"),
    "skipped-files": ("warning", "series of which some files were skipped"),
    "burned-in": ("warning", "text is burned into the pixels (burned-in annotation: YES)"),
    "burned-in-not-stated": (
        "warning",
        "text may be burned into the pixels: ultrasound, captures and screen saves that do not state it",
    ),
    "not-finite": ("warning", "NaN or infinite values: the preprocessing needs finite="),
    "constant-pixels": ("warning", "all pixels have the same value"),
    "wrong-suffix": ("warning", "the suffix belongs to another format"),
    "several-frames": ("warning", "an animation or a stack, of which only the first frame is used"),
    "all-monochrome1": ("note", "all images are MONOCHROME1; they are inverted when they are read"),
    "mixed-formats": ("note", "a format other than that of most images"),
    "mixed-codecs": ("note", "a compression other than that of most images"),
    "mixed-stored-types": ("note", "a bit depth other than that of most images"),
    "mixed-units": ("note", "a unit other than that of most images"),
    "mixed-lossy-compression": ("note", "lossy compression, while other images are lossless"),
    "slightly-mixed-spacings": ("note", "voxels of slightly different sizes"),
    "no-spacing": ("note", "no spacing, while other images have one"),
    "anisotropic": ("note", "voxels at least three times as long as wide"),
    "mixed-windows": (
        "note",
        "window tags that differ or are missing in some images; they are applied only on request",
    ),
    "padding-pixels": ("note", "padding pixels, which are not measurements"),
    "no-position": ("note", "no position in patient coordinates"),
    "no-preamble": ("note", "DICOM without its preamble"),
    "unknown-value-range": ("note", "pixels without a known range: only the preprocessing of scans accepts them"),
    "exif-rotation": ("note", "rotated or mirrored by EXIF; the images are read upright"),
    "mask-labels": (
        "note",
        "several labels in a mask: choose with --category of camscope evaluate, or { file = …, category = … } in an audit; "
        "all merges them",
    ),
    "mask-levels": (
        "note",
        "more gray levels in a mask than labels, as JPEG and soft edges produce: save it as PNG with two values, or choose "
        "all nonzero pixels with --category of camscope evaluate, or { file = …, category = … } in an audit",
    ),
    "mask-labels-differ": (
        "note",
        "masks with one label, which is not the label of most masks: choose with --category of camscope evaluate, or "
        "{ file = …, category = … } in an audit",
    ),
    "no-mask": ("note", "no mask, while other images have one"),
    "other-flag": ("note", "another peculiarity: see the column flags"),
}
# the beginnings of a scan's flags, and their codes
FLAG_PATTERNS = (
    (r"a gap of|slices \d+ and \d+ only|\d+ more distances", "missing-slices"),
    (r"slices ", "irregular-slices"),
    (r"world coordinates hold", ""),  # always comes with missing slices
    (r"burned-in annotation: YES", "burned-in"),
    (r"burned-in annotation: not (said|stated)", "burned-in-not-stated"),
    (r"padding:", "padding-pixels"),
    (r"not finite:", "not-finite"),
    (r"no (place|position)", "no-position"),
    (r"(left out|skipped):", "skipped-files"),
    (r"no DICOM preamble", "no-preamble"),
    (r"the file is called", "wrong-suffix"),
    (r"an animation or a stack", "several-frames"),
    (r"", "other-flag"),
)
ISSUE_ORDER = {code: position for position, code in enumerate(ISSUES)}


def flags_to_codes(flags: Sequence[str]) -> list[str]:
    """Return the issue codes of the flags of a scan, each once."""
    codes = [next(code for pattern, code in FLAG_PATTERNS if re.match(pattern, flag)) for flag in flags]
    return list(dict.fromkeys(filter(None, codes)))


@dataclass(frozen=True, eq=False)
class DatasetIssue:
    """An issue of a set of images.

    Attributes:
        code: A key of `ISSUES`.
        rows: The positions of the rows concerned.
        row_counts: Details, such as reasons or values, and the number of rows of each.
        row_groups: Rows that belong together, such as those with equal pixels; at most fifty groups.

    >>> import numpy as np
    >>> DatasetIssue("duplicates", np.array([1, 4]))
    <warning: duplicates, 2 rows: the same pixels as in another row>

    """

    code: str
    rows: RowNumbers
    row_counts: Mapping[str, int] = field(default_factory=dict)
    row_groups: tuple[tuple[int, ...], ...] = ()

    @property
    def severity(self) -> Severity:
        """The severity: "error" (cannot be used unchanged), "warning" (needs a look) or "note" (worth knowing)."""
        return ISSUES[self.code][0]

    @property
    def message(self) -> str:
        """What the issue is."""
        return ISSUES[self.code][1]

    @property
    def n_rows(self) -> int:
        """The number of rows concerned."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{self.severity}: {self.code}, {plural(self.n_rows, 'row')}: {self.message}>"
