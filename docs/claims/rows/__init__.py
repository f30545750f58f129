"""The rows by subject. What is claimed of a number stands here and nowhere else; tests take it from here."""
