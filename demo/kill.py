"""How the demo tells an engine's worker process to die."""

KILL_AT_VARIABLE = "DCR_DEMO_KILL_AT"
"""Environment variable: the refit in which the engine's last rank kills itself; unset, it lives."""
