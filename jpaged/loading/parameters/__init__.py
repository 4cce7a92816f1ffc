"""Says where each checkpoint tensor goes, in what form, and on which devices."""
