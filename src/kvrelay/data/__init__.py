"""Data that comes with the package; `docs/trace-data.md` says where it is from and how it was cut."""
