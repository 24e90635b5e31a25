"""Metrics over the maps of a run: long-form Parquet, and the statements that follow. Floor 5½. Needs the extra `metrics`.

In the order of a measurement: `making` makes the maps that are not there yet, `evidence` (by `namesakes`) says where the answer
is known to be, `run` writes the values: those of maps alone (`measuring`, `maps`), and those that ask the model (`trials` of
`cases`, by the model asked `again`), all in one `form`. Then come statements: `summary`, and of several methods `comparison`,
with their `agreement`, `names`, `findings` and `sentences`. Then figures: `figure` of a summary; of a comparison `poster`, which
is a `forest` and `examples`. What follows from all of it for a choice is in `choosing`.
"""

from camscope.measure.comparison import Compared, compared
from camscope.measure.evidence import Evidence, evidence_of
from camscope.measure.making import make_maps
from camscope.measure.run import Measures, measure

__all__ = ["Compared", "Evidence", "Measures", "compared", "evidence_of", "make_maps", "measure"]
