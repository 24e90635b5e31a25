"""The stages of an audit. Each stage is a function of the context and of earlier results."""
