"""The pages of the documentation, put together from the repository's own files: `make docs`."""
