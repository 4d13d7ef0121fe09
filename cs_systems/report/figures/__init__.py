"""Figures by matplotlib: `plot` (saves one), `kinds` (all kinds of figures), `drawing` (colours and style), and the
kinds that need no DataFrame: `collectives`, `errors`, `streams`."""
