"""What every option of every mixer computes, and what every parameter starts at.

Each kind has its equation here once more, in float64 and without any operator of the library; `cases` says at which options.
"""
