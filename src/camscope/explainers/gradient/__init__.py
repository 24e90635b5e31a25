"""Methods that explain by gradients at the input."""
