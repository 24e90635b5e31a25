"""Names of image regions as a reader of a report understands them."""

from camscope.audit.shortcuts.border_and_marker_detectors import REGIONS
from camscope.audit.shortcuts.load_images_and_region_masks import FINDING_REGION, ORGAN_REGION


def name_region(region: str) -> str:
    """Return the name of a region in tables and charts, such as `burned-in text or markers` for `saturated`."""
    return REGIONS[region].phrase.removeprefix("the ") if region in REGIONS else region


def format_region(region: str) -> str:
    """Return the name of a region inside a sentence, such as `the image border` or `the region “pacemaker”`."""
    if region in REGIONS:
        return REGIONS[region].phrase
    if region in (FINDING_REGION, ORGAN_REGION):
        return region
    return f"the area {region}" if region.startswith("outside ") else f"the region “{region}”"
