"""Enough: how many patients it takes for an interval to be shown, and for a word that rests on it."""

from typing import Final

from camscope.metrics.statistics import MIN_GROUPS

FOR_AN_INTERVAL: Final = (
    MIN_GROUPS  # a bootstrap of two patients holds the truth 48 times of 100, of four 86, of six 92
)
FOR_A_WORD: Final = 10  # below, an interval of a bootstrap says more of its few patients than of the model
FOR_ONE_WAY: Final = 100  # of two ways of looking that were planted fewer patients often show but one
RARE: Final = 0.3  # a way that fewer of the maps show is often missed among so many, too
