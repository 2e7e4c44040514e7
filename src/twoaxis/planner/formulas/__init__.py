"""The arithmetic of the planner: functions of plain numbers, lists and dictionaries, which the page runs as they stand.

`planner.page` hands these modules to a browser, so they use what both languages have: numbers, strings, lists,
dictionaries, loops, comparisons and each other.
"""
