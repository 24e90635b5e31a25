"""What is in a set of images, before any model sees it."""

from camscope.batch.inspection.issues import CODES, Finding
from camscope.batch.inspection.report import Inspection
from camscope.batch.inspection.run import inspect_images

__all__ = ["CODES", "Finding", "Inspection", "inspect_images"]
