"""Tables as text.

`records` (records as tables), `rows` (rows of declared and other tables), `table` (one table), `columns`, `layout`
(default columns and headings of cells), `formats` (terminal, markdown, …).
"""
