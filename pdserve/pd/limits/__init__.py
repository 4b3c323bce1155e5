"""Limit what a client may use: keys, quotas, admission, allowed hosts."""
