"""Reports of records, traces and snapshots: tables, figures and HTML pages. Without torch.

`frame` (records as a DataFrame, from `cell_columns` and `phase_columns`), `units`, `collectives` (columns and fits of
collectives), `progress` (lines during a sweep), `tables/` (text), `figures/` (matplotlib), `pages/` (self-contained
HTML).
"""
