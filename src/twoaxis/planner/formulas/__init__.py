"""The arithmetic of the planner and of its page: functions of plain numbers, lists and dictionaries.

Python runs these modules as they stand, and so does a browser: docs/page_formulas.py translates all of them into JavaScript, so
they use only what both languages have: numbers, strings, lists, dictionaries, loops, comparisons and each other. No other code
is translated.
"""
