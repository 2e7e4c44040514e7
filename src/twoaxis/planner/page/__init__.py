"""The plan of a model as one page of HTML that recomputes it in the browser."""

from twoaxis.planner.page.document import planner_page, write_page

__all__ = ["planner_page", "write_page"]
