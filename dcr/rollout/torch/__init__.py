"""Receivers in plain torch: any module with a ``load_weights``."""
