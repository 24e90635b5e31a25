"""Methods that read gradients at the input itself."""
