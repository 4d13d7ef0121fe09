"""Reports of records, traces and snapshots: tables, figures and HTML pages. Without torch.

`frame` (records as a DataFrame, from `frame_cells` and `frame_phases`), `units`, `collectives` (columns and fits of
collectives), `progress` (lines during a sweep), `tables/` (text), `figures/` (matplotlib), `pages/` (self-contained
HTML).
"""
