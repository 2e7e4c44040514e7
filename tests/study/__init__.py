"""Studies: what they refuse, survive, conclude and show."""
