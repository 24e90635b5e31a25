"""What a built wheel must do in a fresh environment."""
