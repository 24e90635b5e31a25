"""Metrics over the maps of a run: long-form Parquet, and the statements that follow. Floor 5½. Needs the extra `metrics`."""

from camscope.measure.comparison import Compared, compared
from camscope.measure.evidence import Evidence, evidence_of
from camscope.measure.making import make_maps
from camscope.measure.run import Measures, measure

__all__ = ["Compared", "Evidence", "Measures", "compared", "evidence_of", "make_maps", "measure"]
