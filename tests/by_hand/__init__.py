"""Every method's map of one case, worked out by hand: a module a family, each with its `MAX_METHODS_WITH_NUMBERS`.

Two channels of 2 x 2, A, are the model's input and the layer's output in one; the row of a flat linear head is the
gradient G; the score is Σ A G + the head's bias, which is random. Class 0 has the same bias, and OTHER as its row.
"""

from importlib import import_module
from pkgutil import iter_modules

A = [[[1.0, 2.0], [0.0, 1.0]], [[2.0, 0.0], [1.0, -1.0]]]
G = [[[1.0, -1.0], [2.0, 0.0]], [[-2.0, 1.0], [1.0, 4.0]]]
OTHER = [[[2.0, -2.0], [2.0, 2.0]], [[0.0, 2.0], [-2.0, 0.0]]]

BY_HAND = {
    method: numbers
    for family in iter_modules(__path__)
    for method, numbers in import_module(f"{__name__}.{family.name}").NUMBERS.items()
}
