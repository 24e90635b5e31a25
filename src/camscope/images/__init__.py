"""Read image files and medical scans, and preprocess them into a model's input."""
