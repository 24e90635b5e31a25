"""Image files, medical scans and preprocessing: what turns a source into a model's input."""
