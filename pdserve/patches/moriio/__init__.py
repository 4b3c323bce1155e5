"""Patches of MoRI-IO."""
