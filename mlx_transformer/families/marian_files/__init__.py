"""Models in Marian's own files, Firefox's, Bergamot's and Opus-MT's originals: read, imported, and written back."""
