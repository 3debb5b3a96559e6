"""Trace formats: one module each, with the same outline (`looks_like`, `read`, and `write` where it makes sense)."""
