"""Methods that explain a transformer by its attention."""
