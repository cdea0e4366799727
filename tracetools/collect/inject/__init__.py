"""The folder that is put first on PYTHONPATH of a recorded job. Its modules are imported by name there, not through this package."""
