"""The report of an audit: one page with verdicts, methods, results, and what was not tested."""

from camscope.audit.report.gallery import Gallery, PredictedImage, build_gallery, list_predicted_images
from camscope.audit.report.page import read_norms_csv, render_page

__all__ = [
    "Gallery",
    "PredictedImage",
    "build_gallery",
    "list_predicted_images",
    "read_norms_csv",
    "render_page",
]
