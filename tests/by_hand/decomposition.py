"""Decompositions, worked out by hand. As rows of four cells, A1 = 1 2 0 1 and A2 = 2 0 1 -1."""

from math import sqrt, tanh

# Eigen-CAM: A1·A1 = A2·A2 = 6, A1·A2 = 1: eigenvalues 7 and 5, first vector (1, 1) / √2: (A1 + A2) / √2, and its inner
# product with the activity A1² + A2² = 5 4 1 2 is positive
# EigenGrad-CAM: P1 = 1 -2 0 0 and P2 = -4 0 1 -4: P1·P1 = 5, P2·P2 = 33, P1·P2 = -4: eigenvalue 19 + √212, its
# vector (-4, 14 + √212); with P1 + P2 = -3 -2 1 -4 the inner product of -4 P1 + (14 + √212) P2 is positive
FIRST, SECOND = -4.0, 14 + sqrt(212)
LENGTH = sqrt(FIRST**2 + SECOND**2)
GRADIENT = [(FIRST * p1 + SECOND * p2) / LENGTH for p1, p2 in zip((1, -2, 0, 0), (-4, 0, 1, -4), strict=True)]

# Seg-Eigen-CAM: |g| A of the channels: P1 and P2 with the sign of A1 and A2: Q1 = 1 2 0 0 and Q2 = 4 0 1 -4:
# Q1·Q1 = 5, Q2·Q2 = 33, Q1·Q2 = 4: eigenvalue 19 + √212, its vector (4, 14 + √212)
# the largest value of 4 Q1 + (14 + √212) Q2 is at the first cell, 4 + 4 (14 + √212), and positive
SIZED = [(4 * q1 + SECOND * q2) / LENGTH for q1, q2 in zip((1, 2, 0, 0), (4, 0, 1, -4), strict=True)]

# KPCA-CAM: the mean cell is (1, 1/2); less it, the cells are a = (0, 3/2), b = (1, -1/2), -b and -a. With γ = 1/2 the
# kernel of two cells is tanh(x·y / 2 + 1): a·a = 9/4, b·b = 5/4, a·b = -3/4. A component is either the same at x and at
# -x, or of opposite signs; of the latter, on (a - -a) / √2 and (b - -b) / √2, the kernel is [[P, R], [R, Q]]
P = tanh(1 + 9 / 8) - tanh(1 - 9 / 8)
Q = tanh(1 + 5 / 8) - tanh(1 - 5 / 8)
R = tanh(1 - 3 / 8) - tanh(1 + 3 / 8)
TOP = (P + Q) / 2 + sqrt((P - Q) ** 2 / 4 + R**2)  # 1.25; the even one has (1.0965 + 1.2832) / 2 - 1.434 < 0
SCALE = sqrt(TOP) / sqrt((TOP - Q) ** 2 + R**2) / sqrt(2)
AT_A, AT_B = (TOP - Q) * SCALE, R * SCALE  # 5 a + 4 b - b - 2 a is positive: towards the activity

NUMBERS = {
    "eigencam": [[3 / sqrt(2), 2 / sqrt(2)], [1 / sqrt(2), 0.0]],
    "eigengradcam": [GRADIENT[:2], GRADIENT[2:]],
    "segeigencam": [SIZED[:2], SIZED[2:]],
    "kpcacam": [[AT_A, AT_B], [-AT_B, -AT_A]],
    # of four cells none can be more than √3 standard deviations above the mean
    "fem": [[0.0, 0.0], [0.0, 0.0]],
}
