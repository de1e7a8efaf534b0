"""A package, so that its application ends with its last test and not with the last of all."""
