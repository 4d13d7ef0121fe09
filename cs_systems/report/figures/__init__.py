"""Figures by matplotlib.

`plot` saves a figure, `kinds` holds all kinds of figures, `drawing` colours and style. `collectives`, `errors` and
`streams` are the kinds that need no DataFrame.
"""
