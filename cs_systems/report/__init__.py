"""Reports of records, traces and snapshots: the DataFrame of records, tables, figures and HTML pages. Without torch."""
