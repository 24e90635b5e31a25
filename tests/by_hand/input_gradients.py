"""Gradients at the input, worked out by hand: the gradient is the head's row, whatever the noise.

And excitation backpropagation, which shares 1 by relu(A) relu(G): 1 of the first channel, 1 of the second.
"""

NUMBERS = {
    # the larger of |g1| and |g2|
    "saliency": [[2.0, 1.0], [2.0, 4.0]],
    # [1, -2; 0, 0] and [-4, 0; 1, -4], added
    "inputxgradient": [[-3.0, -2.0], [1.0, -4.0]],
    # the same: a network of ReLUs without attention
    "attnlrp": [[-3.0, -2.0], [1.0, -4.0]],
    # |g1| + |g2|
    "smoothgrad": [[3.0, 2.0], [3.0, 4.0]],
    # g1^2 + g2^2
    "smoothgradsquared": [[5.0, 2.0], [5.0, 16.0]],
    "excitationbackprop": [[0.5, 0.0], [0.5, 0.0]],
    "vargrad": [[0.0, 0.0], [0.0, 0.0]],
}
