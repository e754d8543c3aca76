"""Owners inside real trainers."""
