"""Score-weighted methods, worked out by hand."""

from math import exp

# channels stretched to 0..1: H1 = [1/2, 1; 0, 1/2], H2 = [1, 1/3; 2/3, 0]; the layer is the input, so x ∘ H1 has
# A1 ∘ H1 = [1/2, 2; 0, 1/2] and A2 ∘ H1 = [1, 0; 0, -1/2], and the score without its bias is the sum with G
FIRST = (1 / 2 - 2) + (-2 - 2)
# A1 ∘ H2 = [1, 2/3; 0, 0], A2 ∘ H2 = [2, 0; 2/3, 0]
SECOND = (1 - 2 / 3) + (-4 + 2 / 3)
W1 = exp(FIRST) / (exp(FIRST) + exp(SECOND))
W2 = 1 - W1

NUMBERS = {
    "scorecam": [[W1 + 2 * W2, 2 * W1], [W2, max(W1 - W2, 0.0)]],
}
