"""Methods that read the attention of a transformer."""
