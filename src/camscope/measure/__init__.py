"""Metrics over the maps of a run: long-form Parquet, and the statements that follow. Floor 5½. Needs the extra `metrics`."""

from camscope.measure.evidence import Evidence, evidence_of
from camscope.measure.run import Measures, measure

__all__ = ["Evidence", "Measures", "evidence_of", "measure"]
