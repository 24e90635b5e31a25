"""The stages of an audit, in order, each one function of the subject."""
