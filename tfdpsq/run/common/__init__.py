"""Code that several stages share."""
