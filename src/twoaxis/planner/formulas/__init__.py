"""The arithmetic of the planner and of its page: functions of plain numbers, lists and dictionaries.

Python runs these modules as they are. For the browser, docs/page_formulas.py translates all of them, and nothing else, to
JavaScript; so they use only what both languages have: numbers, strings, lists, dictionaries, loops, comparisons and each other.
"""
