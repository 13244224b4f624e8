"""Pure logic: standard library only."""
