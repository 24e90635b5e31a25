"""What the model answers, how well that is, for whom it differs, and what can be read off what it keeps of an image."""
