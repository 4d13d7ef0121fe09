"""Data types that all readers return, made of plain columns and independent of the file format."""
