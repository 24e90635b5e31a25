"""The report of an audit: one page that says what was found, how, and what was not tested."""

from camscope.audit.report.gallery import cases, gallery
from camscope.audit.report.page import norms_csv, page
from camscope.audit.report.reading import numbers_in, unknown
from camscope.audit.report.shelves import Case, Pictures, unpictured

__all__ = ["Case", "Pictures", "cases", "gallery", "norms_csv", "numbers_in", "page", "unknown", "unpictured"]
