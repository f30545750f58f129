"""The operation that makes a runtime leave its budget, and what is wrong with it."""
