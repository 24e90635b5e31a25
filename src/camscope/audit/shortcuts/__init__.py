"""Shortcut tests: how predictions and maps depend on regions that a correct model does not need."""
