"""Interop: other libraries around our models, and our models from other libraries."""
