"""The look of all figures, and what they are made of; knows nothing of what they show."""
