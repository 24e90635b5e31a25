"""Methods that follow the score along a path from a baseline to the input."""
