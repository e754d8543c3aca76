"""Whether what the processes of a run wrote down is a behaviour of the specification; docs/event-log.md."""
