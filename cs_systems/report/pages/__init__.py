"""Self-contained HTML pages: `records` (a run), `profile` (a trace), `snapshot`."""
