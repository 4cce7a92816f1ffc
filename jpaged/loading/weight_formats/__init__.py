"""Reads, chooses and describes the formats that quantised weights are held in; docs/adding_a_weight_format.md."""
