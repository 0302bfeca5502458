"""Modules around the operator: settings, mixing matrix, feature maps, the MHLA core."""
