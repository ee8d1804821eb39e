"""The tests: folders as those of the package, `project` for the whole of it, and `support` for what they share."""
