"""Target `coreml`: graphs of fixed shape."""
