"""Numbers, tables, figures and pages: how results are shown. Knows nothing of what they mean; computing never imports it."""
