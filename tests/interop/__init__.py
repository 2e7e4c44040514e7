"""Interop: other libraries around our models."""
