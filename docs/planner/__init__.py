"""The planner's pages: its predictions beside published numbers, and every method at three scales."""
