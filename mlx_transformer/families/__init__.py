"""Published models: read and write their folders. Each family, e.g. BART or T5, is one file of data."""
