"""The report of an audit: one page that says what was found, how, and what was not tested."""

from camscope.audit.report.consistency import numbers_in, unknown
from camscope.audit.report.gallery import cases, gallery
from camscope.audit.report.gallery_schema import Case, Pictures, unpictured
from camscope.audit.report.page import norms_csv, page

__all__ = ["Case", "Pictures", "cases", "gallery", "norms_csv", "numbers_in", "page", "unknown", "unpictured"]
