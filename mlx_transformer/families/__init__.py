"""Published models: their folders read and written, a family one file of data."""
