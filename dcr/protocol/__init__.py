"""The refit protocol as pure state machines: no torch, no sockets, no clock, no threads."""
