"""Self-contained HTML pages: of a run (`records`), a trace (`profile`), a snapshot, or of tables alone."""
