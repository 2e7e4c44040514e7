"""Formats results: numbers, tables, figures and pages. Independent of their meaning; computing never imports it."""
