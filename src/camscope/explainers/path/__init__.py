"""Methods that integrate gradients along a path from a baseline to the input."""
