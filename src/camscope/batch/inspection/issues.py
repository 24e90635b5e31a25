"""What an inspection can find, each with its severity and what it means; and the findings themselves."""

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
# error: cannot be used as it is; warning: look at it; note: worth knowing
ISSUES: dict[str, tuple[Severity, str]] = {
    "missing-file": ("error", "there is no such file"),
    "outside": ("error", "the path leads out of the manifest's folder"),
    "missing-codec": ("error", "a package that reads them is not installed"),
    "no-pixels": ("error", "DICOM objects without pixels"),
    "ambiguous": ("error", "several volumes or series in one row: name one, as file#0"),
    "unreadable": ("error", "they cannot be read"),
    "repeated-id": ("error", "ids that another row has"),
    "patient-in-splits": ("error", "patients who are in several splits"),
    "study-in-splits": ("error", "DICOM studies that are in several splits"),
    "pixels-in-splits": ("error", "the same pixels in several splits"),
    "unknown-target": ("error", "targets that are none of the classes"),
    "mask-missing": ("error", "the mask's file is not there"),
    "mask-unreadable": ("error", "the mask cannot be read"),
    "mask-segmentation": (
        "error",
        "the mask is a DICOM segmentation object: convert it to NIfTI, as with dcmqi or highdicom",
    ),
    "mask-size": ("error", "the mask has another size than its image"),
    "columns": ("warning", "columns that the result of a run has of its own: rename yours"),
    "mask-place": ("warning", "the mask lies more than a voxel beside its image"),
    "mask-empty": ("warning", "nothing is marked in the mask"),
    "duplicates": ("warning", "the same pixels as in another row"),
    "duplicate-targets": ("warning", "the same pixels with different targets"),
    "no-target": ("warning", "no target"),
    "doubtful-target": ("warning", "targets that say that nothing is known"),
    "target-follows-group": ("warning", "the group gives the target away"),
    "no-split": ("warning", "no split"),
    "no-patient": ("warning", "no patient"),
    "monochrome1": ("warning", "MONOCHROME1 beside MONOCHROME2: a mark of the maker, though camscope inverts it"),
    "modality-mix": ("warning", "other modalities than most"),
    "axes-mix": ("warning", "flat images and volumes"),
    "colour-mix": ("warning", "colour and grey side by side"),
    "orientation-mix": ("warning", "axes that lead elsewhere than in most"),
    "spacing-mix": ("warning", "voxels of very different sizes"),
    "gap": ("warning", "slices that are missing, or unevenly apart"),
    "same-place": ("warning", "slices of one series at the same place"),
    "geometry": ("warning", "slices sheared, beside their line, or farther apart than the header says"),
    "left-out": ("warning", "a series some of whose files were left out"),
    "burned-in": ("warning", "text is part of the picture: burned-in annotation YES"),
    "burned-in-not-said": ("warning", "text may be part of the picture: US, SC, XC, screen saves that do not say"),
    "not-finite": ("warning", "NaN or infinity among the values: preprocessing needs finite="),
    "constant": ("warning", "one value everywhere"),
    "suffix": ("warning", "a suffix of another format"),
    "more-frames": ("warning", "an animation or a stack, of which photographs are the first frame"),
    "all-monochrome1": ("note", "all are MONOCHROME1; they are inverted on reading"),
    "format-mix": ("note", "another format than most"),
    "codec-mix": ("note", "another compression than most"),
    "stored-mix": ("note", "other bits than most"),
    "unit-mix": ("note", "another unit than most"),
    "lossy-mix": ("note", "compressed with loss, where others are not"),
    "spacing-differs": ("note", "voxels of different sizes"),
    "no-spacing": ("note", "no spacing, where others have one"),
    "anisotropic": ("note", "voxels at least three times as long as wide"),
    "window-mix": ("note", "window tags that differ, or are missing in some; they are never applied unasked"),
    "padding": ("note", "pixels that stand for no measurement"),
    "no-place": ("note", "no place in the world"),
    "no-preamble": ("note", "DICOM without its preamble"),
    "no-range": ("note", "pixels without a known range: only preprocessings of scans take them"),
    "exif": ("note", "turned or mirrored by EXIF; read upright"),
    "mask-labels": (
        "note",
        "several labels in a mask: choose with --category of measure, or { file = …, category = … } in an audit; all merges them",
    ),
    "mask-levels": (
        "note",
        "more levels in a mask than labels, as JPEG and soft edges leave: save it as PNG with two values, or choose all of "
        "what is not 0 with --category of measure, or { file = …, category = … } in an audit",
    ),
    "mask-labels-differ": (
        "note",
        "masks of one label each, another than in most: choose with --category of measure, or { file = …, category = … } in "
        "an audit",
    ),
    "no-mask": ("note", "no mask, where others have one"),
    "odd": ("note", "something else: see the column flags"),
}
# how a scan's flags begin, and what they are
FLAG_PATTERNS = (
    (r"a gap of|slices \d+ and \d+ only|\d+ more distances", "gap"),
    (r"slices ", "geometry"),
    (r"world coordinates hold", ""),  # comes with a gap
    (r"burned-in annotation: YES", "burned-in"),
    (r"burned-in annotation: not said", "burned-in-not-said"),
    (r"padding:", "padding"),
    (r"not finite:", "not-finite"),
    (r"no place", "no-place"),
    (r"left out:", "left-out"),
    (r"no DICOM preamble", "no-preamble"),
    (r"the file is called", "suffix"),
    (r"an animation or a stack", "more-frames"),
    (r"", "odd"),
)
ISSUE_ORDER = {code: at for at, code in enumerate(ISSUES)}


def flags_to_codes(flags: Sequence[str]) -> list[str]:
    """The codes of what is odd about a scan, each once."""
    found = [next(code for start, code in FLAG_PATTERNS if re.match(start, flag)) for flag in flags]
    return list(dict.fromkeys(filter(None, found)))


@dataclass(frozen=True, eq=False)
class DatasetIssue:
    """Something to be seen in a set of images: `code`, the rows concerned, `row_counts` with how many rows each.

    `row_groups`: rows that belong together, as those of equal pixels, at most fifty of them.
    """

    code: str
    rows: RowNumbers
    row_counts: Mapping[str, int] = field(default_factory=dict)
    row_groups: tuple[tuple[int, ...], ...] = ()

    @property
    def severity(self) -> Severity:
        """error: cannot be used as it is; warning: look at it; note: worth knowing."""
        return ISSUES[self.code][0]

    @property
    def message(self) -> str:
        """What it is, in words."""
        return ISSUES[self.code][1]

    @property
    def n_rows(self) -> int:
        """How many rows."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{self.severity}: {self.code}, {plural(self.n_rows, 'row')}: {self.message}>"
