"""The stages, one file each: the name of a file is that of its command."""
