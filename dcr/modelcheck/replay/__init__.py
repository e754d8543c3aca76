"""Replays behaviours of the specification on the roles of ``dcr.protocol``."""
