"""Grad-CAM of another question, worked out by hand."""

NUMBERS = {
    # a linear head has the same gradient under any noise: Grad-CAM++, relu(11/30 A1 + 9/10 A2)
    "smoothgradcam++": [[11 / 30 + 18 / 10, 22 / 30], [9 / 10, 0.0]],
    # the only other class has means 4/4 and 0: relu((0.5 - 0.6 1) A1 + (1 - 0.6 0) A2)
    "finercam": [[2 - 0.1, 0.0], [1.0, 0.0]],
    # a linear head has no curvature: Grad-CAM
    "shapleycam": [[2.5, 1.0], [1.0, 0.0]],
}
