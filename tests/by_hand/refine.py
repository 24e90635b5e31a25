"""Products of several layers' maps, worked out by hand; of one layer, it is that layer's map over its maximum."""

NUMBERS = {
    # Grad-CAM++ is relu(11/30 A1 + 9/10 A2) = [65/30, 22/30; 27/30, 0], over its maximum
    "refinecam": [[1.0, 22 / 65], [27 / 65, 0.0]],
}
