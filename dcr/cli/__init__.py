"""The `dcr` command.  Commands import what they need when they run, so that `dcr --help` costs nothing."""
