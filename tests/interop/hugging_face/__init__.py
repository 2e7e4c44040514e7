"""Models of ours in transformers."""
