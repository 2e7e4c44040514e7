"""Texts and tasks."""
