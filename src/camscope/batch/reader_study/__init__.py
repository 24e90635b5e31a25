"""Export a blinded reader study from a run: images with and without maps, forms for the readers, and a key kept apart."""
