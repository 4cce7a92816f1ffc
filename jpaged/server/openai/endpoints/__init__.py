"""One router a file."""
