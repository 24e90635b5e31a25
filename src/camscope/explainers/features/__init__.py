"""Features of an encoder without a target: patch features, their principal components, and attention maps."""
