"""The operation that makes a runtime leave its budget, and its fault."""
