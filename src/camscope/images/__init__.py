"""Files in, tensors out."""
