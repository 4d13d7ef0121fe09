"""Figures by matplotlib.

`plot` saves a figure, `kinds` lists all kinds of figures with their titles. Drawn by `bars` (one bar per cell),
`lengths` (curves along a length), `warmup` (every step), and, without a DataFrame, `collectives`, `errors` and
`streams`. `drawing` has colours and style, `labels` the names of cells.
"""
