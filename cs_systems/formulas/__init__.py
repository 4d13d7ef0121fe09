"""Predictions by arithmetic, before any measurement. No torch; each formula cites its source."""
