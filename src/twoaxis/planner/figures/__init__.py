"""Figures of a plan."""
