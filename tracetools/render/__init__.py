"""Renderers: a finished result in, text or bytes out. None of them reads files or computes a figure."""
