"""Memory, time, disk and money of a config, before it starts."""
