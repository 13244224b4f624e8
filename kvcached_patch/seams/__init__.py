"""The names of target libraries that are patched."""
