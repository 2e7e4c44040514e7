"""Checkpoints: published files, layouts of parameters, retrofits."""
