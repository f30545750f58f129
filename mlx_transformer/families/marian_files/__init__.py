"""Models in Marian's own files (e.g. of Firefox, Bergamot and Opus-MT): import them, and write them back."""
