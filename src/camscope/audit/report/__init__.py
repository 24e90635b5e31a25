"""The report of an audit: one page with verdicts, methods, results, and what was not tested."""

from camscope.audit.report.gallery import build_gallery, list_predicted_images
from camscope.audit.report.gallery_schema import Gallery, PredictedImage, replace_images_with_digests
from camscope.audit.report.page import read_norms_csv, render_page

__all__ = [
    "Gallery",
    "PredictedImage",
    "build_gallery",
    "list_predicted_images",
    "read_norms_csv",
    "render_page",
    "replace_images_with_digests",
]
