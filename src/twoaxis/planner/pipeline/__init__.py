"""A pipeline of stages on paper: orders of actions, what crosses a stage boundary, and what a step takes."""
