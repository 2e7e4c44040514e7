"""Other inference engines and trainers."""
