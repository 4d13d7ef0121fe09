"""The version, in one place. Floor 0."""

__version__ = "0.1.0"
