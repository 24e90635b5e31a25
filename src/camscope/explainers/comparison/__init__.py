"""Several methods or layers on the same inputs, side by side."""
