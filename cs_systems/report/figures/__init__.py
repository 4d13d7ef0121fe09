"""Figures of records by matplotlib: `plot` saves one, and `kinds` lists them with the functions that draw them."""
