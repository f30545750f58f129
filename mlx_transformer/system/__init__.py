"""Plumbing that knows nothing about models: errors, files, processes, progress, charts."""
