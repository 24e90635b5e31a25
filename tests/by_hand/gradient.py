"""Gradient-weighted methods, worked out by hand."""

NUMBERS = {
    # means 2/4 and 4/4: relu(0.5 A1 + 1 A2)
    "gradcam": [[2.5, 1.0], [1.0, 0.0]],
    # A1 g1 + A2 g2, cell by cell, signed
    "hirescam": [[1 - 4, -2.0], [1.0, -4.0]],
    # sums 4 and 2: alpha relu(g) = 1/(2+4) 1 + 2/(2+8) and 1/(2+2) + 1/(2+2) + 4/(2+8): relu(11/30 A1 + 9/10 A2)
    "gradcam++": [[11 / 30 + 18 / 10, 22 / 30], [9 / 10, 0.0]],
    # (1-2+0+0)/4 and (-4+0+1-4)/2: relu(-1/4 A1 - 7/2 A2)
    "xgradcam": [[0.0, 0.0], [0.0, -1 / 4 + 7 / 2]],
    # relu of the positive gradients' part: [[1,0],[0,0]] + [[0,0],[1,-4]]
    "layercam": [[1.0, 0.0], [1.0, 0.0]],
    # products [[1,-2],[0,0]] and [[-4,0],[1,-4]]: each cell's positive ones
    "gradcam-elementwise": [[1.0, 0.0], [1.0, 0.0]],
    # means of the products -1/4 and -7/4: relu(3/4 products of 1) + relu(-3/4 products of 2)
    "bagcam": [[3 / 4 + 3.0, 0.0], [0.0, 3.0]],
}
