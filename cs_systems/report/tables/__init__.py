"""Tables as text.

`records` (records as tables), `rows` (plain rows as tables), `table` (one table), `columns`, `layout` (default columns
and headings), `formats` (terminal, markdown, …), `profile` and `snapshot` (their columns and headings).
"""
