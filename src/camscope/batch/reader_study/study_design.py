"""Draw which reader sees which case in which session and condition, and which map of another case is its control."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.plurals import plural

WITHOUT_MAP, WITH_MAP, CONTROL_MAP = "none", "map", "control"
CROSSED, SPLIT = "crossed", "split"
DESIGNS = (CROSSED, SPLIT)
MAX_READERS = 99  # two digits in the names of folders


@dataclass(frozen=True)
class Reading:
    """One reading of a study: a reader sees a case in a session, under one condition.

    Attributes:
        reader: Number of the reader, from 1.
        session: Number of the session, from 1.
        place: Place of the case in the session, from 1.
        case: Index of the case, from 0.
        condition: "none", "map" or "control".

    >>> Reading(reader=1, session=1, place=3, case=0, condition="map").condition
    'map'

    """

    reader: int
    session: int
    place: int
    case: int
    condition: str


def draw_readings(
    patients: Sequence[Hashable], n_readers: int, conditions: Sequence[str], design: str = CROSSED, seed: int = 0
) -> list[Reading]:
    """Draw the readings of a study.

    Patients are divided at random into as many blocks as there are conditions. A Latin square gives each block its
    condition in each session, and each reader starts in another row of it. Every second reader has the sessions in the
    reverse order, so that over six readers every order of three conditions occurs equally often. All images of a patient
    have the same condition in a session. The order of the cases is drawn for each reader and session.

    Args:
        patients: (N,) the patient of each case.
        n_readers: The number of readers.
        conditions: The conditions, such as `("none", "map", "control")`.
        design: "crossed": one session for each condition, and each reader sees each case once in each session. "split": one
            session, and each reader sees each case once.
        seed: Seed of blocks and orders.

    Returns:
        The readings, sorted by reader, session and place.

    Raises:
        InputError: There are fewer patients than conditions, or a setting is invalid.

    >>> readings = draw_readings(["a", "b", "c"], 2, ["none", "map"])
    >>> len(readings), {reading.session for reading in readings}
    (12, {1, 2})

    """
    check_positive_integer(n_readers=n_readers)
    if n_readers > MAX_READERS:
        raise InputError(f"n_readers={n_readers}; expected 1 to {MAX_READERS}")
    if design not in DESIGNS:
        raise InputError(f"design={design!r}; expected {' or '.join(DESIGNS)}")
    names = list(dict.fromkeys(patients))
    n_conditions = len(conditions)
    if len(names) < n_conditions:
        raise InputError(
            f"{plural(len(names), 'patient')} for {plural(n_conditions, 'condition')}: expected at least one patient per "
            "condition; select more rows"
        )
    random = np.random.default_rng(seed)
    blocks = dict(zip(names, random.permutation(len(names)) % n_conditions, strict=True))
    readings = []
    for reader in range(n_readers):
        direction = (1, -1)[reader % 2]
        for session in range(n_conditions if design == CROSSED else 1):
            for place, case in enumerate(random.permutation(len(patients)).tolist()):
                index = (int(blocks[patients[case]]) + reader + direction * session) % n_conditions
                readings.append(Reading(reader + 1, session + 1, place + 1, case, conditions[index]))
    return readings


def draw_control_donors(
    patients: Sequence[Hashable], shapes: Sequence[tuple[int, ...]], seed: int = 0
) -> npt.NDArray[np.int64]:
    """Draw for each case another case whose map is its control map. Each map is used once.

    A donor belongs to another patient, and its map has the same shape. So true maps and control maps have the same values,
    and a reader cannot recognize a control map by its appearance.

    Args:
        patients: (N,) the patient of each case.
        shapes: (N,) the shape of each map.
        seed: Seed of the drawing.

    Returns:
        (N,) index of the donor of each case.

    Raises:
        InputError: One patient has more than half of the maps of a shape.

    >>> donors = draw_control_donors(["a", "a", "b", "c"], [(7, 7)] * 4)
    >>> sorted(donors.tolist()), all("aabc"[case] != "aabc"[donor] for case, donor in enumerate(donors))
    ([0, 1, 2, 3], True)

    """
    random = np.random.default_rng((seed, 1))
    donors = np.empty(len(patients), np.int64)
    for shape in dict.fromkeys(shapes):
        members = [index for index, other in enumerate(shapes) if other == shape]
        by_patient: dict[Hashable, list[int]] = {}
        for index in random.permutation(members).tolist():
            by_patient.setdefault(patients[index], []).append(index)
        largest = max(map(len, by_patient.values()))
        if 2 * largest > len(members):
            raise InputError(
                f"one patient has {largest} of {plural(len(members), 'map')} of shape {'x'.join(map(str, shape))}, so that no "
                "other patient's map can be the control of each; use controls='flipped' or controls='none', or more patients"
            )
        # patients one after the other, the largest first: a shift by the largest size never meets the same patient
        ordered = [index for group in sorted(by_patient.values(), key=len, reverse=True) for index in group]
        donors[ordered] = np.roll(ordered, -largest)
    return donors
