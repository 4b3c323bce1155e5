"""LMCache MP servers."""
