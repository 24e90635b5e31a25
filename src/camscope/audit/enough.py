"""Enough: how many patients it takes for an interval to be shown, and for a word that rests on it."""

from typing import Final

FOR_AN_INTERVAL: Final = 6  # one of 95 % holds the truth 48 times of 100 with two patients, 86 with four, 92 with six
FOR_A_WORD: Final = 10  # below, an interval of a bootstrap says more of its few patients than of the model
FOR_ONE_WAY: Final = 100  # of two ways of looking that were planted fewer patients often show but one
RARE: Final = 0.3  # a way that fewer of the maps show is often missed among so many, too
