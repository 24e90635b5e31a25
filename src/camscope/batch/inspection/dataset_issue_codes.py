"""`DatasetIssue`: an issue of a set of images. `ISSUES`: code, severity and message of all possible issues."""

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
CATEGORY_ADVICE = "with --category of camscope evaluate, or { file = …, category = … } in an audit"
MESSAGES: dict[Severity, dict[str, str]] = {
    "error": {  # cannot be used unchanged
        "missing-file": "there is no such file",
        "outside-root": "the path leads out of the folder of the manifest",
        "missing-codec": "a package that reads these files is not installed",
        "no-pixels": "DICOM objects without pixels",
        "ambiguous-series": "several volumes or series in one row: choose one, such as file#0",
        "unreadable": "files that cannot be read",
        "repeated-id": "ids that another row has",
        "patient-in-several-splits": "patients with images in several splits",
        "study-in-several-splits": "DICOM studies with images in several splits",
        "pixels-in-several-splits": "the same pixels in several splits",
        "unknown-target": "targets that are not classes",
        "mask-missing": "the file of the mask is missing",
        "mask-unreadable": "the mask cannot be read",
        "mask-segmentation": "the mask is a DICOM segmentation object: convert it to NIfTI, for example with dcmqi or highdicom",
        "mask-size": "the mask and its image have different sizes",
    },
    "warning": {  # needs a look
        "reserved-columns": "columns whose names a run uses for its results: rename them",
        "mask-position": "the mask is displaced from its image by more than a voxel",
        "mask-empty": "the mask is empty",
        "duplicates": "the same pixels as in another row",
        "duplicates-with-different-targets": "the same pixels with different targets",
        "no-target": "no target",
        "placeholder-target": "targets that stand for a missing value",
        "target-associated-with-group": "the group predicts the target",
        "no-split": "no split",
        "no-patient": "no patient",
        "monochrome1": "MONOCHROME1 in addition to MONOCHROME2: camscope inverts these images, but the difference may reveal the "
        "device",
        "mixed-modalities": "a modality other than that of most images",
        "mixed-dimensions": "both 2-D images and volumes",
        "mixed-colors": "both color and gray images",
        "mixed-orientations": "an orientation other than that of most images",
        "mixed-spacings": "voxels of very different sizes",
        "missing-slices": "missing or unevenly spaced slices",
        "slices-at-same-position": "slices of one series at the same position",
        "irregular-slices": "slices that are sheared, shifted sideways, or farther apart than the header says",
        "skipped-files": "series of which some files were skipped",
        "burned-in": "text is burned into the pixels (burned-in annotation: YES)",
        "burned-in-not-stated": "text may be burned into the pixels: ultrasound, captures and screen saves that do not state it",
        "not-finite": "NaN or infinite values: the preprocessing needs finite=",
        "constant-pixels": "all pixels have the same value",
        "wrong-suffix": "the suffix belongs to another format",
        "several-frames": "an animation or a stack, of which only the first frame is used",
    },
    "note": {  # worth knowing
        "all-monochrome1": "all images are MONOCHROME1; they are inverted when they are read",
        "mixed-formats": "a format other than that of most images",
        "mixed-codecs": "a compression other than that of most images",
        "mixed-stored-types": "a bit depth other than that of most images",
        "mixed-units": "a unit other than that of most images",
        "mixed-lossy-compression": "lossy compression, while other images are lossless",
        "slightly-mixed-spacings": "voxels of slightly different sizes",
        "no-spacing": "no spacing, while other images have one",
        "anisotropic": "voxels at least three times as long as wide",
        "mixed-windows": "window tags that differ or are missing in some images; they are applied only on request",
        "padding-pixels": "padding pixels, which are not measurements",
        "no-position": "no position in patient coordinates",
        "no-preamble": "DICOM without its preamble",
        "unknown-value-range": "pixels without a known range: only the preprocessing of scans accepts them",
        "exif-rotation": "rotated or mirrored by EXIF; the images are read upright",
        "mask-labels": f"several labels in a mask: choose {CATEGORY_ADVICE}; all merges them",
        "mask-levels": "more gray levels in a mask than labels, as JPEG and soft edges produce: save it as PNG with two values, "
        f"or choose all nonzero pixels {CATEGORY_ADVICE}",
        "mask-labels-differ": f"masks with one label, which is not the label of most masks: choose {CATEGORY_ADVICE}",
        "no-mask": "no mask, while other images have one",
        "other-flag": "another peculiarity: see the column flags",
    },
}
ISSUES = {code: (severity, text) for severity, messages in MESSAGES.items() for code, text in messages.items()}
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


def convert_flags_to_issue_codes(flags: Sequence[str]) -> list[str]:
    """Convert the flags of a scan to issue codes. Each code occurs once."""
    codes = [next(code for pattern, code in FLAG_PATTERNS if re.match(pattern, flag)) for flag in flags]
    return list(dict.fromkeys(filter(None, codes)))


@dataclass(frozen=True, eq=False)
class DatasetIssue:
    """One issue of a set of images, and the rows that have it.

    Attributes:
        code: A key of `ISSUES`.
        rows: The positions of the rows that have the issue.
        row_counts: Number of rows by detail, such as a reason or a value.
        row_groups: Rows that belong together, such as rows with equal pixels. There are at most fifty groups.

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
        """The severity of the issue: "error" (must be fixed), "warning" (should be checked) or "note" (for information)."""
        return ISSUES[self.code][0]

    @property
    def message(self) -> str:
        """A text that describes the issue."""
        return ISSUES[self.code][1]

    @property
    def n_rows(self) -> int:
        """The number of rows that have the issue."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{self.severity}: {self.code}, {plural(self.n_rows, 'row')}: {self.message}>"
