"""Floor 0: configurations, tables, errors, declared parameters and units. Imports nothing above it."""
