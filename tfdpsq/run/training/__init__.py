"""Training runs of the commands: private, plain and direct, and their settings."""
