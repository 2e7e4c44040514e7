"""Operators against plain loops, in float64, with all gradients."""
