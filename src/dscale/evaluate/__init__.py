"""Offline evaluation: how far a drafter gets, and what every policy would make of it (measurement.md §5, §6)."""
