"""Read the positions of DICOM slices from their headers, and sort the slices into a volume."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from camscope.images.scans.dicom_header_values import read_first_numbers, read_numbers
from camscope.plurals import plural

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

Floats = NDArray[np.float64]
PIXEL_MEASURES_SEQUENCE = "PixelMeasuresSequence"
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM's axes lead to the left and to the back
DIRECTION_TOLERANCE = 1e-3  # of direction cosines: half a pixel over 500 pixels
MAX_SPACING_DEVIATION = 0.02  # share of the median distance


@dataclass(frozen=True, eq=False)
class SlicePlane:
    """The position of one slice in space: its first pixel, the directions of rows and columns, and the spacing in mm."""

    position: Floats
    row_cosines: Floats
    column_cosines: Floats
    spacing: tuple[float, float]
    thickness: float | None

    @property
    def normal(self) -> Floats:
        """The direction perpendicular to the slice."""
        return np.cross(self.row_cosines, self.column_cosines)

    @property
    def nearest_view(self) -> str:
        """The standard view that is closest to the slice: sagittal, coronal or axial."""
        return ("sagittal", "coronal", "axial")[int(abs(self.normal).argmax())]

    def build_affine(self, slice_step: Floats | None = None) -> Floats:
        """Return the affine matrix (4,4) that converts array indices (d,row,column) to RAS+ coordinates in mm.

        `slice_step` is the offset from one slice to the next in mm. By default it is the thickness along the normal, or
        1 mm.
        """
        matrix = np.eye(4)
        matrix[:3, 0] = self.normal * (self.thickness or 1.0) if slice_step is None else slice_step
        matrix[:3, 1], matrix[:3, 2] = self.column_cosines * self.spacing[0], self.row_cosines * self.spacing[1]
        matrix[:3, 3] = self.position
        return np.asarray(LPS_TO_RAS @ matrix)

    def is_parallel_with_equal_spacing(self, other: "SlicePlane") -> bool:
        """Return whether two planes have rows and columns of the same direction and spacing."""
        cosines, other_cosines = (np.r_[plane.row_cosines, plane.column_cosines] for plane in (self, other))
        has_same_directions = np.allclose(cosines, other_cosines, atol=DIRECTION_TOLERANCE)
        return bool(has_same_directions and np.allclose(self.spacing, other.spacing, rtol=DIRECTION_TOLERANCE))


def read_plane_and_flags(functional_groups: "list[Dataset]") -> tuple[SlicePlane | None, tuple[str, ...]]:
    """Read the plane of one frame. Return the plane, or None if the file has no position, together with warnings."""
    position = read_first_numbers(functional_groups, "PlanePositionSequence", "ImagePositionPatient", 3)
    directions = read_first_numbers(functional_groups, "PlaneOrientationSequence", "ImageOrientationPatient", 6)
    spacing = read_first_numbers(functional_groups, PIXEL_MEASURES_SEQUENCE, "PixelSpacing", 2)
    if position is None or directions is None or spacing is None or not _is_plausible(position, spacing):
        return None, ()
    across, down = np.array(directions[:3]), np.array(directions[3:])
    lengths = float(np.linalg.norm(across)), float(np.linalg.norm(down))
    if not np.allclose(lengths, 1, atol=10 * DIRECTION_TOLERANCE) or abs(across @ down) > 10 * DIRECTION_TOLERANCE:
        return None, ("no place: the orientation is not two perpendicular directions",)
    distances = [
        read_first_numbers(functional_groups, PIXEL_MEASURES_SEQUENCE, key, 1)
        for key in ("SpacingBetweenSlices", "SliceThickness")
    ]
    thickness = next((abs(distance[0]) for distance in distances if distance and 0 < abs(distance[0]) < 1e4), None)
    row_cosines, column_cosines = across / lengths[0], down / lengths[1]
    return SlicePlane(np.array(position), row_cosines, column_cosines, (spacing[0], spacing[1]), thickness), ()


def read_pixel_spacing(functional_groups: "list[Dataset]") -> tuple[float, float] | None:
    """Read the distance between rows and that between columns, in mm. Return None if the file has none."""
    for keyword in ("PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing"):
        spacing = read_first_numbers(functional_groups, PIXEL_MEASURES_SEQUENCE, keyword, 2)
        if spacing and _is_plausible((), spacing):
            return spacing[0], spacing[1]
    return None


def _is_plausible(position: Sequence[float], spacing: Sequence[float]) -> bool:
    """Return whether position and spacing are plausible as lengths in millimeters."""
    return all(abs(value) < 1e6 for value in position) and all(1e-6 < value < 1e4 for value in spacing)


@dataclass(frozen=True, eq=False)
class SliceStack:
    """Slices in spatial order: the `order` of their planes, the `affine` (4,4) of the volume, and warnings.

    `coincident_pairs` lists pairs of slices at one position. If there are any, the slices form no volume.
    """

    order: list[int]
    affine: Floats
    flags: tuple[str, ...]
    coincident_pairs: list[tuple[int, int]]


def sort_planes_and_check_distances(planes: Sequence[SlicePlane]) -> SliceStack:
    """Sort parallel planes by their position along the normal. Warn if the distances between them are irregular."""
    first = planes[0]
    positions = np.array([plane.position for plane in planes])
    along = positions @ first.normal
    order = np.argsort(along, kind="stable").tolist()
    if len(planes) == 1:
        return SliceStack(order, first.build_affine(), (), [])
    positions, steps = positions[order], np.diff(along[order])
    usual_distance = float(np.median(steps))
    min_distance = max(1e-3 * usual_distance, 1e-4)
    coincident_pairs = [(order[index], order[index + 1]) for index in np.flatnonzero(steps < min_distance).tolist()]
    gaps = np.flatnonzero(abs(steps - usual_distance) > max(MAX_SPACING_DEVIATION * usual_distance, 0.01)).tolist()
    start, end = _find_first_and_last_slice_of_longest_run(gaps, len(planes))
    step = (positions[end] - positions[start]) / (end - start) if end > start else first.normal * usual_distance
    origin = replace(planes[order[0]], position=positions[start] - start * step)
    flags = [
        *_describe_gaps(gaps, steps, usual_distance),
        *_describe_irregularities(first, step, usual_distance, positions[start : end + 1]),
    ]
    if gaps:
        flags.append(f"world coordinates hold for slices {start} to {end}")
    return SliceStack(order, origin.build_affine(step), tuple(flags), coincident_pairs)


def _find_first_and_last_slice_of_longest_run(gaps: list[int], n_slices: int) -> tuple[int, int]:
    """Return the first and the last slice of the longest run of slices without a gap."""
    ends = [*gaps, n_slices - 1]
    starts = [0, *(gap + 1 for gap in gaps)]
    return max(zip(starts, ends, strict=True), key=lambda run: run[1] - run[0])


def _describe_gaps(gaps: list[int], distances: Floats, usual_distance: float) -> list[str]:
    """Describe the first three distances between slices that differ from the usual one, and count the remaining ones."""
    descriptions = [
        f"a gap of {distances[index]:.4g} mm after slice {index}; usual {usual_distance:.4g}"
        if distances[index] > usual_distance
        else f"slices {index} and {index + 1} only {distances[index]:.4g} mm apart; usual {usual_distance:.4g}"
        for index in gaps[:3]
    ]
    if len(gaps) > 3:
        remaining = plural(len(gaps) - 3, "more distance between slices", "more distances between slices")
        descriptions.append(f"not the usual {usual_distance:.4g} mm either: {remaining}")
    return descriptions


def _describe_irregularities(
    first_plane: SlicePlane, slice_step: Floats, usual_distance: float, positions: Floats
) -> list[str]:
    """Describe sheared slices, slices off their line, and distances that contradict the thickness."""
    descriptions, advance = [], float(slice_step @ first_plane.normal)
    cosine = np.clip(advance / max(float(np.linalg.norm(slice_step)), 1e-12), -1, 1)
    shear = float(np.degrees(np.arccos(cosine)))
    if shear > 0.5:
        descriptions.append(f"slices sheared by {shear:.1f} degrees (a tilted gantry); the world matrix has it")
    offsets = positions - positions[0]
    offsets = offsets - np.outer(offsets @ first_plane.normal, slice_step / max(advance, 1e-12))
    if (max_offset := float(np.linalg.norm(offsets, axis=1).max())) > min(first_plane.spacing):
        descriptions.append(f"slices lie up to {max_offset:.4g} mm off their line")
    if first_plane.thickness and usual_distance > 2 * first_plane.thickness:
        descriptions.append(f"slices are {usual_distance:.4g} mm apart; the header says {first_plane.thickness:.4g}")
    return descriptions


def read_dose_grid_planes(dataset: "Dataset", n_frames: int, first_plane: SlicePlane) -> list[SlicePlane] | None:
    """Return the planes of all frames of a radiotherapy dose grid. Return None if the file does not list frame offsets."""
    offsets = read_numbers(dataset, "GridFrameOffsetVector", n_frames)
    if offsets is None or n_frames < 2:
        return None
    # offsets are relative to the first, which is 0 or the first frame's coordinate
    start, normal = first_plane.position, first_plane.normal
    return [replace(first_plane, position=start + normal * (offset - offsets[0])) for offset in offsets]
