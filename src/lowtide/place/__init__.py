"""Placement: from lifetimes to offsets in one arena."""
