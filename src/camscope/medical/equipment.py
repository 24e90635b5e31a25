"""Who made a DICOM object: camscope with this model; other weights are another device."""

import uuid
from typing import TYPE_CHECKING

from camscope.explanation import Explanation
from camscope.medical.facts import plain, title
from camscope.version import __version__

if TYPE_CHECKING:
    from highdicom import ContributingEquipment

MAKER = "camscope"
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "camscope.model.digest")


def device_uid(digest: str) -> str:
    """`2.25.` and a number that follows from the model's digest: the same weights have the same, others another."""
    return f"2.25.{uuid.uuid5(NAMESPACE, digest).int}"


def equipment(explanation: Explanation) -> "ContributingEquipment":
    """The item of ContributingEquipmentSequence that names method, version and model."""
    from highdicom import ContributingEquipment
    from pydicom.sr.codedict import codes

    item = ContributingEquipment(
        manufacturer=MAKER,
        purpose_of_reference=codes.DCM.ProcessingEquipment,
        manufacturer_model_name=plain(explanation.method, 64),
        software_versions=__version__,
        device_serial_number=serial(explanation),
        contribution_description=plain(f"{title(explanation)}; model digest {serial(explanation)}", 1024),
    )
    if explanation.model:
        item.DeviceUID = device_uid(explanation.model)
    return item


def serial(explanation: Explanation) -> str:
    """The model's digest."""
    return explanation.model or "unknown"
