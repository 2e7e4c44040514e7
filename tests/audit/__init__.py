"""Tests of audits; a package, since its files share `toy`."""
