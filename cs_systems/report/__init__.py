"""From records to what a person sees: `frame` (pandas), `table` (text), `plot` (figures), `html` (a page). No torch."""
