"""Levers: changes that may make a step faster or smaller, one file each, which exports `LEVER`."""
