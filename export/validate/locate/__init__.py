"""Find the operation behind a runtime's error, and a likely cause."""
