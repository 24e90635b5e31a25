"""Methods of other packages, worked out by hand: the model is linear, and a cell is a pixel."""

# Σ_c A_c G_c, what the score loses when the pixel is 0: 1 - 4, -2 + 0; 0 + 1, 0 - 4
TERMS = [[-3.0, -2.0], [1.0, -4.0]]

NUMBERS = {
    "deeplift": TERMS,
    # against each channel's mean, 1 and 1/2: [[0 - 3, -1 - 1/2], [-2 + 1/2, 0 - 6]]; the mean of that and against 0
    "deepliftshap": [[-3.0, -1.75], [-0.25, -5.0]],
    "lime": TERMS,
    "kernelshap": TERMS,
    "lrp": TERMS,
}
