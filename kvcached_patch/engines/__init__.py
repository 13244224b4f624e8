"""Thin adapters: what happens at each seam of each target library."""
